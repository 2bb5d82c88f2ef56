"""Machines to classes: one object per generation, one method per event, guards and updates inlined.

The machines of a process move together, as `rlt_fsm/ground.py` spells out: every guard and update reads
the values from before the event, and where one machine refuses, none has moved. A method first picks
one row per machine, then writes. What it returns is data: messages and effects, for the shell to carry out.

The source is built from the model and kept in `CompiledProcess.source`. Names reach it only after a check
that they are identifiers; text of a spec never does.
"""

from __future__ import annotations

import keyword
import linecache
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, ClassVar, NamedTuple

from rlt_fsm.errors import NOWHERE, Finding, IllegalEvent, Span, SpecError, suggest
from rlt_fsm.expr import (
    BOOL,
    TRUE,
    Add,
    Const,
    Enum,
    Member,
    Node,
    Ref,
    Seen,
    children,
    conj,
    evaluate,
    show,
    to_python,
)
from rlt_fsm.model import Ignore, Machine, Process, Send, System, Transition, Variable
from rlt_fsm.trace import TraceRing

INDEX_MAX = 1 << 20
"""Sequence numbers are below this: a `seen` variable keeps one bit for each, and a wild number must not fill memory."""


class Message(NamedTuple):
    """One message for process `to`. `fields` is to be read, not changed: it may be shared between calls."""

    to: str
    name: str
    fields: Mapping[str, int | bool]


class Effect(NamedTuple):
    """Something that the shell must do, by its name in the system file."""

    name: str


Outputs = tuple[Message | Effect, ...]
Row = Transition | Ignore


# -- what a compiled class knows of its model --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine instance: where its variables live, and what it calls its siblings."""

    name: str
    machine: Machine
    place: str  # "record" or "shared"
    siblings: Mapping[str, tuple[str, str]]  # alias -> (place, instance)

    def slot(self, ref: Ref) -> tuple[str, str] | None:
        """(place, attribute) of a variable that a row reads; None for a field of the event."""
        if ref.field:
            place, instance = self.siblings[ref.name]
            return place, f"{instance}_{ref.field}"
        if ref.name in self.machine.vars or ref.name in self.machine.given or ref.name == "state":
            return self.place, f"{self.name}_{ref.name}"
        return None

    def rows(self, event: str) -> list[Row]:
        """The rows for `event`, in the order in which they are tried: transitions, then ignores."""
        rows: list[Row] = [*self.machine.transitions, *self.machine.ignores]
        return [r for r in rows if r.event == event]


@dataclass(frozen=True, slots=True)
class Event:
    """An event as one class takes it: the instances that move together, and its fields."""

    name: str
    to: str  # the shared instance addressed, or ""
    method: str
    members: tuple[Instance, ...]
    fields: Mapping[str, Variable]


@dataclass(frozen=True, slots=True)
class Plan:
    """What stands behind one generated class."""

    process: str
    place: str  # where its own variables live: "record" or "shared"
    instances: tuple[Instance, ...]
    events: Mapping[tuple[str, str], Event]  # (to, event) ->

    def instance(self, name: str) -> Instance:
        """The instance called `name`; LookupError, with the known ones, otherwise."""
        for item in self.instances:
            if item.name == name:
                return item
        raise LookupError(
            f"'{self.process}' has no machine '{name}'; {suggest(name, (i.name for i in self.instances))}"
        )


class _Compiled:
    """What every generated class can do besides its events."""

    __slots__ = ()
    plan: ClassVar[Plan]

    def values(self) -> dict[str, int | bool | str]:
        """Every variable by its flat name: `Export.state` (a state by its name), `Export.posted`."""
        out: dict[str, int | bool | str] = {}
        for item in self.plan.instances:
            out[f"{item.name}.state"] = item.machine.state_type.names[getattr(self, f"{item.name}_state")]
            for var in item.machine.vars.values():
                value = getattr(self, f"{item.name}_{var.name}")
                out[f"{item.name}.{var.name}"] = var.type.names[value] if isinstance(var.type, Enum) else value
        return out

    def _take(self, prefix: str, to: str, event: str, fields: Mapping[str, Any]) -> Any:
        found = self.plan.events.get((to, event))
        if found is None:
            known = [name for instance, name in self.plan.events if instance == to]
            where = f"{to}.{event}" if to else event
            raise IllegalEvent(self.plan.process, where, _states(self, self.plan.instances), (suggest(event, known),))
        if set(fields) != set(found.fields):
            detail = f"it carries fields {_listed(found.fields)}, not {_listed(fields)}"
            raise IllegalEvent(self.plan.process, event, _states(self, found.members), (detail,))
        return getattr(self, prefix + found.method)(**fields)


class RecordBase(_Compiled):
    """One generation in one process. Every event of its machines is a method: `record.commit(count=3)`."""

    __slots__ = ()
    shared: Any
    key: str

    def state(self, machine: str) -> str:
        """The name of a machine's state."""
        names = self.plan.instance(machine).machine.state_type.names
        return names[getattr(self, f"{machine}_state")]

    def fire(self, event: str, **fields: Any) -> Outputs:
        """Move by an event given by its name. Raises IllegalEvent, with nothing changed, where it is refused."""
        outputs: Outputs = self._take("", "", event, fields)
        return outputs

    def can(self, event: str, **fields: Any) -> bool:
        """Whether `fire` would move some machine (to ignore an event is not to move) and none would refuse."""
        return bool(self._take("can_", "", event, fields))

    def enabled(self) -> list[str]:
        """The events that some value of their fields would let move."""
        return [e.name for e in self.plan.events.values() if _any_fields(getattr(self, f"can_{e.method}"), e)]

    def __repr__(self) -> str:
        states = ", ".join(f"{n}={s}" for n, s in _states(self, self.plan.instances).items())
        return f"<{self.plan.process} {self.key!r}: {states}>"


class SharedBase(_Compiled):
    """What a process has once: its shared instances, and where its events are written down."""

    __slots__ = ()
    trace: TraceRing | None

    def state(self, instance: str) -> str:
        """The name of a shared instance's state."""
        names = self.plan.instance(instance).machine.state_type.names
        return names[getattr(self, f"{instance}_state")]

    def fire(self, instance: str, event: str, **fields: Any) -> Outputs:
        """Move one shared instance by an event addressed to it. Raises IllegalEvent, with nothing changed."""
        outputs: Outputs = self._take("", instance, event, fields)
        return outputs

    def can(self, instance: str, event: str, **fields: Any) -> bool:
        """Whether `fire` would move the instance."""
        return bool(self._take("can_", instance, event, fields))

    def enabled(self) -> list[str]:
        """The addressed events, as `instance.event`, that some value of their fields would let move."""
        found = self.plan.events.values()
        return [f"{e.to}.{e.name}" for e in found if _any_fields(getattr(self, f"can_{e.method}"), e)]

    def __repr__(self) -> str:
        states = ", ".join(f"{n}={s}" for n, s in _states(self, self.plan.instances).items())
        return f"<{self.plan.process} shared: {states}>"


class MachineBase(_Compiled):
    """One machine by itself. What it reads of siblings are attributes, `alias_variable`, which its owner sets."""

    __slots__ = ()
    source: ClassVar[str]

    def state(self) -> str:
        """The name of its state."""
        item = self.plan.instances[0]
        return item.machine.state_type.names[getattr(self, f"{item.name}_state")]

    def fire(self, event: str, **fields: Any) -> Outputs:
        """Move by an event given by its name. Raises IllegalEvent, with nothing changed, where it is refused."""
        outputs: Outputs = self._take("", "", event, fields)
        return outputs

    def can(self, event: str, **fields: Any) -> bool:
        """Whether `fire` would move it."""
        return bool(self._take("can_", "", event, fields))

    def __repr__(self) -> str:
        return f"<{self.plan.process}: {self.state()}>"


def _any_fields(can: Callable[..., bool], event: Event) -> bool:
    """Whether some of a few field values (false and true; 0 and 1; the first numbers) would do."""
    tries: list[dict[str, int | bool]] = [{}]
    for name, var in event.fields.items():
        samples: tuple[int | bool, ...] = (False, True) if var.type == BOOL else tuple(range(2))
        tries = [{**known, name: value} for known in tries for value in samples]
    return any(can(**fields) for fields in tries)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "(none)"


# -- refusal: the slow path, by the reference reading ------------------------------------------------


def _owner(self: Any, own: str, place: str) -> Any:
    return self if place == own else self.shared


def _states(self: Any, members: tuple[Instance, ...]) -> dict[str, str]:
    own = self.plan.place
    return {m.name: m.machine.state_type.names[getattr(_owner(self, own, m.place), f"{m.name}_state")] for m in members}


def _refuse(self: Any, to: str, name: str, values: tuple[Any, ...]) -> IllegalEvent:
    """Why `self` refuses an event: per machine, its state and each false conjunct with the values it read."""
    plan: Plan = self.plan
    event = plan.events[to, name]
    fields = dict(zip(event.fields, values, strict=True))
    states = _states(self, event.members)
    detail = [
        f"field '{key}' must be {_wanted(var)}, not {fields[key]!r}"
        for key, var in event.fields.items()
        if not _fits(var, fields[key])
    ]
    if not detail:
        for member in event.members:
            detail += _objections(self, plan, member, name, states[member.name], fields)
    assert detail, f"the compiled '{name}' of '{plan.process}' refuses what its table takes, in {states}"
    return IllegalEvent(plan.process, name, states, tuple(detail))


def _objections(
    self: Any, plan: Plan, member: Instance, event: str, state: str, fields: Mapping[str, Any]
) -> list[str]:
    rows = [r for r in member.rows(event) if state in r.sources]
    if not rows:
        sources = dict.fromkeys(s for r in member.rows(event) for s in r.sources)
        return [f"{member.name}: no row for '{event}' in state '{state}'; it has one in {', '.join(sources)}"]

    def value(ref: Ref) -> Any:
        slot = member.slot(ref)
        return fields[ref.name] if slot is None else getattr(_owner(self, plan.place, slot[0]), slot[1])

    out: list[str] = []
    for row in rows:
        false = [(label, node) for label, node in row.when.items() if not evaluate(node, value)]
        if not false:
            return []
        for label, node in false:
            out.append(f"{member.name}: {label} is false: {show(node)}{shown_values(node, value)}")
    return out


def shown_values(node: Node, value: Callable[[Ref], Any]) -> str:
    """` (handles is 2, domain.state is clear)`: what the variables of an expression are."""
    known: dict[str, str] = {}
    for ref in _reads(node):
        found = value(ref)
        if isinstance(ref.type, Enum) and isinstance(found, int) and 0 <= found < len(ref.type.names):
            found = ref.type.names[found]
        elif isinstance(ref.type, Seen):
            found = "{" + ", ".join(str(i) for i in range(int(found).bit_length()) if found >> i & 1) + "}"
        known[str(ref)] = str(found).lower() if isinstance(found, bool) else str(found)
    return f" ({', '.join(f'{k} is {v}' for k, v in known.items())})" if known else ""


def _reads(node: Node) -> Iterator[Ref]:
    """Every variable and event field that an expression reads."""
    if isinstance(node, Ref):
        yield node
    if isinstance(node, Member | Add):
        yield Ref(node.item)
    for child in children(node):
        yield from _reads(child)


def _wanted(var: Variable) -> str:
    if var.type == BOOL:
        return "true or false (a bool)"
    return f"an int from 0 to {INDEX_MAX - 1}" if var.kind == "index" else "an int that is not negative"


def _fits(var: Variable, value: Any) -> bool:
    if var.type == BOOL:
        return value is True or value is False
    return value.__class__ is int and value >= 0 and (var.kind != "index" or value < INDEX_MAX)


# -- source -------------------------------------------------------------------------------------------

_OWNERS = {"record": "self", "shared": "_sh"}


class _Source:
    """Python source that grows line by line, and the objects it names."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.lines: list[str] = []
        self.depth = 0
        self.names: dict[str, Any] = {
            "_now": monotonic_ns,
            "_refuse": _refuse,
            "_new": tuple.__new__,
            "_Message": Message,
            "RecordBase": RecordBase,
            "SharedBase": SharedBase,
            "MachineBase": MachineBase,
        }
        self.hoisted: dict[Any, str] = {}

    def add(self, line: str) -> None:
        """Append one line at the present depth."""
        self.lines.append("    " * self.depth + line if line else "")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """`head` and, indented, what is added meanwhile; `pass` where that is nothing."""
        self.add(head)
        self.depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.add("pass")
        self.depth -= 1

    def constant(self, outputs: Outputs) -> str:
        """The name of a tuple that is made once."""
        if not outputs:
            return "()"
        key = repr(outputs)
        if key not in self.hoisted:
            self.hoisted[key] = f"_k{len(self.hoisted)}"
            self.names[self.hoisted[key]] = outputs
        return self.hoisted[key]

    def run(self) -> tuple[str, dict[str, Any]]:
        """Execute the source; return it with its namespace. Tracebacks can show its lines."""
        constants = [f"# {name} = {value!r}" for name, value in self.names.items() if name.startswith("_k")]
        text = "\n".join([*constants, "", *self.lines]) + "\n"
        file = f"<compiled {self.label}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), self.names)
        return text, self.names


def _stop(kind: str, message: str, span: Span, hint: str = "") -> SpecError:
    return SpecError([Finding(kind, message, span, hint)])


def _identifier(word: str, span: Span, what: str) -> str:
    """`word`, if it can stand in source as a name; SpecError otherwise."""
    if not word.isidentifier() or not word.isascii():
        raise _stop("bad-name", f"{what} '{word}' is not a name", span, "letters, digits and _")
    return word


class _ClassWriter:
    """Writes one class of a plan."""

    def __init__(self, source: _Source, plan: Plan, class_name: str, base: str, traced: bool) -> None:
        self.source, self.plan, self.class_name, self.base, self.traced = source, plan, class_name, base, traced

    def owner(self, place: str) -> str:
        """How the object that holds a variable is written in a method of this class."""
        return "self" if place == self.plan.place else _OWNERS[place]

    def write(self, before: tuple[str, ...], extra: tuple[str, ...]) -> None:
        """The whole class. `before` are slots that the constructor takes, `extra` those of sibling values."""
        slots: dict[str, None] = dict.fromkeys(before)
        for item in self.plan.instances:
            names = ["state", *item.machine.given, *item.machine.vars]
            for slot in (f"{_identifier(item.name, item.machine.span, 'instance')}_{n}" for n in names):
                self.fresh(_identifier(slot, item.machine.span, "variable"), slots, item.machine.span)
        for slot in extra:
            self.fresh(_identifier(slot, self.plan.instances[0].machine.span, "variable"), slots, NOWHERE)
        source = self.source
        with source.block(f"class {self.class_name}({self.base}):"):
            source.add(f"__slots__ = {tuple(slots)!r}")
            source.add("")
            self.constructor(before, extra)
            for event in self.plan.events.values():
                self.event(event)
                self.can(event)
        source.add("")

    def fresh(self, slot: str, slots: dict[str, None], span: Span) -> None:
        if slot in slots:
            raise _stop("name-clash", f"two variables would be called '{slot}'", span, "rename one of them")
        slots[slot] = None

    def constructor(self, before: tuple[str, ...], extra: tuple[str, ...]) -> None:
        alone = self.base == "MachineBase"
        takes = [name for name in before if not name.startswith("_")]
        parameters = [*takes, *([] if alone else ["given"])]
        if alone and self.plan.instances[0].machine.given:
            parameters = ["*", *self.plan.instances[0].machine.given]
        with self.source.block(f"def __init__({', '.join(['self', *parameters])}):"):
            for name in takes:
                self.source.add(f"self.{name} = {name}")
            if "_note" in before:
                self.source.add("self._note = None if trace is None else trace.append")
                self.source.add("self._tick = None if trace is None else trace.tick")
            for item in self.plan.instances:
                machine, prefix = item.machine, f"self.{item.name}_"
                for name in machine.given:
                    value = name if alone else f"given[{item.name!r}, {name!r}]"
                    self.source.add(f"{prefix}{name} = {value}")
                self.source.add(f"{prefix}state = {machine.state_type.names.index(machine.initial)}")
                for var in machine.vars.values():
                    first = to_python(var.init, lambda ref, prefix=prefix: prefix + ref.name)  # type: ignore[misc]
                    self.source.add(f"{prefix}{var.name} = {first}")
            for name in extra:
                self.source.add(f"self.{name} = 0")
        self.source.add("")

    # -- one event ------------------------------------------------------------------------------------

    def reader(self, event: Event, member: Instance, locals_: Mapping[tuple[str, str], str]) -> Callable[[Ref], str]:
        """How a variable is written in the source of `event`."""

        def name(ref: Ref) -> str:
            slot = member.slot(ref)
            if slot is not None:
                return locals_.get(slot) or f"{self.owner(slot[0])}.{slot[1]}"
            if ref.name not in event.fields:
                wrong = f"'{ref.name}' is no field of '{event.name}' in {member.name}"
                raise _stop("unknown-name", wrong, member.machine.span)
            return ref.name

        return name

    def prologue(self, event: Event, late: bool) -> tuple[dict[tuple[str, str], str], bool]:
        """Load into locals what is read twice or would be overwritten too soon; whether `_sh` is needed."""
        counts: dict[tuple[str, str], int] = {}
        written: set[tuple[str, str]] = set()
        read_late: set[tuple[str, str]] = set()
        for member in event.members:
            if any(len(row.sources) < len(member.machine.states) for row in member.rows(event.name)):
                counts[member.place, f"{member.name}_state"] = 2
            for row in member.rows(event.name):
                after = _late_nodes(row) if late else []
                for node in (*row.when.values(), *after):
                    for ref in _reads(node):
                        slot = member.slot(ref)
                        if slot is not None:
                            counts[slot] = counts.get(slot, 0) + 1
                            if any(node is n for n in after):
                                read_late.add(slot)
                if late and isinstance(row, Transition):
                    names = [*(["state"] if row.target is not None else []), *row.set]
                    written |= {(member.place, f"{member.name}_{n}") for n in names}
        chosen = [s for s, count in counts.items() if count > 1 or s in written & read_late]
        needs = self.plan.place == "record" and any(place == "shared" for place, _ in (*counts, *written))
        return {slot: f"_v{i}" for i, slot in enumerate(chosen)}, needs

    def head(self, event: Event, late: bool) -> dict[tuple[str, str], str]:
        locals_, shared = self.prologue(event, late)
        if shared or (late and self.traced and self.plan.place == "record"):
            self.source.add("_sh = self.shared")
        for (place, slot), name in locals_.items():
            self.source.add(f"{name} = {self.owner(place)}.{slot}")
        return locals_

    def parameters(self, event: Event) -> str:
        return "".join(f", {name}" for name in event.fields)

    def event(self, event: Event) -> None:
        """The method that moves the machines."""
        source = self.source
        values = "(" + "".join(f"{name}, " for name in event.fields) + ")"
        refuse = f"raise _refuse(self, {event.to!r}, {event.name!r}, {values})"
        with source.block(f"def {event.method}(self{self.parameters(event)}):"):
            self.check_fields(event, refuse)
            locals_ = self.head(event, True)
            order = sorted(event.members, key=lambda m: len(m.rows(event.name)))
            outputs: dict[str, str | None] = {}  # instance -> its outputs, where they do not depend on the row
            for member in event.members:
                found = {self.outputs(event, member, row, locals_) for row in member.rows(event.name)}
                outputs[member.name] = found.pop() if len(found) == 1 else None
            number = {member.name: i for i, member in enumerate(event.members)}
            for member in order:
                rows = member.rows(event.name)
                last = member is order[-1]

                def choose(
                    row: Row,
                    member: Instance = member,
                    rows: list[Row] = rows,
                    last: bool = last,
                    constant: bool = outputs[member.name] is not None,
                ) -> None:
                    if last:
                        self.apply(event, member, row, locals_, "" if constant else f"_o{number[member.name]}")
                    elif len(rows) > 1:
                        source.add(f"_r{number[member.name]} = {rows.index(row)}")

                self.select(event, member, locals_, choose, refuse)
            for member in order[:-1]:
                self.apply_chosen(event, member, locals_, number[member.name], outputs[member.name] is not None)
            if self.traced:
                self.trace(event, values)
            parts = [outputs[m.name] or f"_o{number[m.name]}" for m in event.members]
            source.add(f"return {self.joined(parts)}")
        source.add("")

    def can(self, event: Event) -> None:
        """The method that only says whether the machines would move."""
        source = self.source
        with source.block(f"def can_{event.method}(self{self.parameters(event)}):"):
            self.check_fields(event, "return False")
            locals_ = self.head(event, False)
            sure = any(all(isinstance(r, Transition) for r in m.rows(event.name)) for m in event.members)
            if not sure:
                source.add("_moves = False")
            for member in event.members:

                def choose(row: Row) -> None:
                    if not sure and isinstance(row, Transition):
                        source.add("_moves = True")

                self.select(event, member, locals_, choose, "return False")
            source.add("return True" if sure else "return _moves")
        source.add("")

    def check_fields(self, event: Event, refuse: str) -> None:
        for name, var in event.fields.items():
            if var.type == BOOL:
                test = f"{name} is not True and {name} is not False"
            elif var.kind == "index":
                test = f"{name}.__class__ is not int or not 0 <= {name} < {INDEX_MAX}"
            else:
                test = f"{name}.__class__ is not int or {name} < 0"
            with self.source.block(f"if {test}:"):
                self.source.add(refuse)

    def select(
        self,
        event: Event,
        member: Instance,
        locals_: Mapping[tuple[str, str], str],
        choose: Callable[[Row], None],
        refuse: str,
    ) -> None:
        """Decide the row of one machine: a binary decision over the state, then the guards in table order."""
        source = self.source
        read = self.reader(event, member, locals_)
        state = locals_.get((member.place, f"{member.name}_state"), "")
        count = len(member.machine.states)
        rows = member.rows(event.name)
        table = [tuple(i for i, row in enumerate(rows) if s in row.sources) for s in member.machine.state_type.names]
        runs: list[tuple[int, int, tuple[int, ...]]] = []  # first state, one past the last, row numbers
        for place, numbers in enumerate(table):
            if runs and runs[-1][2] == numbers:
                runs[-1] = (runs[-1][0], place + 1, numbers)
            else:
                runs.append((place, place + 1, numbers))

        def leaf(numbers: tuple[int, ...]) -> None:
            word = "if"
            for i in numbers:
                guard = conj(*rows[i].when.values())
                if guard == TRUE:
                    if word == "if":
                        choose(rows[i])
                    else:
                        with source.block("else:"):
                            choose(rows[i])
                    return
                with source.block(f"{word} {to_python(guard, read)}:"):
                    choose(rows[i])
                word = "elif"
            if word == "if":
                source.add(refuse)
            else:
                with source.block("else:"):
                    source.add(refuse)

        def decide(part: list[tuple[int, int, tuple[int, ...]]]) -> None:
            if len(part) == 1:
                leaf(part[0][2])
                return
            taken = [run for run in part if run[2]]
            if len(taken) == 1:
                lo, hi, numbers = taken[0]
                test = f"{state} == {lo}" if hi == lo + 1 else f"{lo} <= {state} < {hi}"
                if hi > lo + 1 and (lo == 0 or hi == count):
                    test = f"{state} < {hi}" if lo == 0 else f"{state} >= {lo}"
                with source.block(f"if {test}:"):
                    leaf(numbers)
                with source.block("else:"):
                    source.add(refuse)
                return
            half = len(part) // 2
            with source.block(f"if {state} < {part[half][0]}:"):
                decide(part[:half])
            with source.block("else:"):
                decide(part[half:])

        decide(runs)

    def apply(
        self, event: Event, member: Instance, row: Row, locals_: Mapping[tuple[str, str], str], output: str
    ) -> None:
        """Write what one row writes, and put its outputs into local `output`, if that is not empty."""
        source, owner = self.source, self.owner(member.place)
        if output:
            source.add(f"{output} = {self.outputs(event, member, row, locals_)}")
        if isinstance(row, Ignore):
            return
        read = self.reader(event, member, locals_)
        if row.target is not None:
            source.add(f"{owner}.{member.name}_state = {member.machine.state_type.names.index(row.target)}")
        for var, value in row.set.items():
            source.add(f"{owner}.{member.name}_{var} = {to_python(value, read)}")

    def apply_chosen(
        self,
        event: Event,
        member: Instance,
        locals_: Mapping[tuple[str, str], str],
        number: int,
        constant: bool,
    ) -> None:
        rows = member.rows(event.name)
        output = "" if constant else f"_o{number}"
        if len(rows) == 1:
            self.apply(event, member, rows[0], locals_, output)
            return
        word = "if"
        for i, row in enumerate(rows):
            if constant and (isinstance(row, Ignore) or (row.target is None and not row.set)):
                continue
            with self.source.block(f"{word} _r{number} == {i}:"):
                self.apply(event, member, row, locals_, output)
            word = "elif"

    def outputs(self, event: Event, member: Instance, row: Row, locals_: Mapping[tuple[str, str], str]) -> str:
        """Source of the tuple of what a row sends and does."""
        if isinstance(row, Ignore):
            return "()"
        effects: Outputs = tuple(Effect(name) for name in row.do)
        if not any(send.fields for send in row.send):
            return self.source.constant(tuple(Message(s.to, s.message, {}) for s in row.send) + effects)
        read = self.reader(event, member, locals_)
        parts = [self.message(send, read) for send in row.send]
        parts += [f"{self.source.constant((effect,))}[0]" for effect in effects]
        return "(" + ", ".join(parts) + ",)"

    def message(self, send: Send, read: Callable[[Ref], str]) -> str:
        if not send.fields:
            return f"{self.source.constant((Message(send.to, send.message, {}),))}[0]"
        fields = ", ".join(f"{name!r}: {to_python(value, read)}" for name, value in send.fields.items())
        return f"_new(_Message, ({send.to!r}, {send.message!r}, {{{fields}}}))"

    def joined(self, parts: list[str]) -> str:
        """The outputs of all machines, one after another; neighbours that are constant are joined here."""
        out: list[str] = []
        known: Outputs = ()
        for part in parts:
            if part == "()":
                continue
            if part in self.source.names:
                known += self.source.names[part]
                continue
            if known:
                out.append(self.source.constant(known))
                known = ()
            out.append(part)
        if known:
            out.append(self.source.constant(known))
        return " + ".join(out) or "()"

    def trace(self, event: Event, values: str) -> None:
        source = self.source
        shared = self.owner("shared")
        key = "self.key" if self.plan.place == "record" else "''"
        source.add(f"_note = {shared}._note")
        with source.block("if _note is not None:"):
            source.add(f"_note((_now(), {shared}._tick(), {key}, {event.name!r}, {values}, {event.to!r}))")


def _late_nodes(row: Row) -> list[Node]:
    """The expressions of a row that are read after the rows are chosen."""
    if isinstance(row, Ignore):
        return []
    return [*row.set.values(), *(value for send in row.send for value in send.fields.values())]


# -- processes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompiledProcess:
    """The two classes of one process, and the source they were made from."""

    process: str
    system: System
    shared_class: type[SharedBase]
    record_class: type[RecordBase]
    source: str
    digest: str = ""  # of the spec, for the header of its traces; "" where the caller did not say
    shared_defaults: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    record_defaults: Mapping[str, int | None] = field(default_factory=dict)  # None: must be given

    def make_shared(
        self,
        given: Mapping[str, Mapping[str, int]],
        trace: TraceRing | None = None,
        start: Mapping[str, str] | None = None,
    ) -> Any:
        """The shared instances of one process.

        given: instance -> name -> number, such as {"credits": {"source_capacity": 10, ...}}. `trace`: where
        accepted events are written. `start`: instance -> the state it starts in, if not its initial one.
        Raises ValueError where a given is missing, unknown or not a natural number.
        """
        known = self.shared_defaults
        for name in given:
            if name not in known:
                raise ValueError(f"'{self.process}' has no shared instance '{name}' to give to; {suggest(name, known)}")
        values: dict[tuple[str, str], int] = {}
        for name, defaults in known.items():
            for key, number in _complete(given.get(name, {}), defaults, f"'{self.process}.{name}'").items():
                values[name, key] = number
        made: Any = self.shared_class(trace, values)  # type: ignore[call-arg]
        for name, state in (start or {}).items():
            names = self.shared_class.plan.instance(name).machine.state_type.names
            if state not in names:
                raise ValueError(f"'{name}' has no state '{state}'; {suggest(state, names)}")
            setattr(made, f"{name}_state", names.index(state))
        if trace is not None:
            full: dict[str, dict[str, int]] = {}
            for (name, key), number in values.items():
                full.setdefault(name, {})[key] = number
            fields: dict[tuple[str, str], tuple[str, ...]] = {}
            for plan in (self.record_class.plan, self.shared_class.plan):
                fields.update({key: tuple(event.fields) for key, event in plan.events.items()})
            usual = {k: v for k, v in self.record_defaults.items() if v is not None}
            trace.bind(self.process, self.digest, full, usual, dict(start or {}), fields)
        return made

    def make_record(self, shared: Any, key: str, given: Mapping[str, int] | None = None) -> Any:
        """One generation. `given` overrides the system file's values of the machines' givens.

        Raises ValueError where a given is missing, unknown or not a natural number.
        """
        values = _complete(given or {}, self.record_defaults, f"'{self.process}'")
        slots = {(i.name, k): values[k] for i in self.record_class.plan.instances for k in i.machine.given}
        if shared.trace is not None and values != shared.trace.record_given:
            shared.trace.open(key, values)
        return self.record_class(shared, key, slots)  # type: ignore[call-arg]


def _complete(given: Mapping[str, int], defaults: Mapping[str, int | None], who: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for name in given:
        if name not in defaults:
            raise ValueError(f"{who} takes no '{name}'; {suggest(name, defaults)}")
    for name, default in defaults.items():
        value = given.get(name, default)
        if value is None:
            raise ValueError(f"{who} must be given '{name}'")
        if value.__class__ is not int or value < 0:
            raise ValueError(f"{who}: '{name}' must be a natural number, not {value!r}")
        out[name] = value
    return out


def compile_process(system: System, process: str, digest: str = "") -> CompiledProcess:
    """The classes of one process of a system. `digest`: of the spec, noted in the header of every trace.

    Raises LookupError for an unknown process, SpecError for what cannot be compiled: names that cannot stand
    in Python, an addressed event whose rows read a generation.
    """
    if process not in system.processes:
        raise LookupError(f"no process '{process}'; {suggest(process, system.processes)}")
    home = system.processes[process]
    records = tuple(_instance(system, home, name, name, "record") for name in home.machines)
    shared = tuple(_instance(system, home, s.name, s.machine, "shared") for s in home.shared.values())
    by_name = {item.name: item for item in (*records, *shared)}
    wanted, addressed = _alphabet(system, process, records)
    record_events: dict[tuple[str, str], Event] = {}
    taken = {*_reserved(RecordBase, records), "shared", "key"}
    for name in wanted:
        own, joint = system.alphabet(process, name)
        members = tuple(by_name[n] for n in (*own, *joint))
        if members:
            record_events["", name] = Event(name, "", _method(name, taken), members, _fields(name, members))
    shared_events: dict[tuple[str, str], Event] = {}
    taken = {*_reserved(SharedBase, shared), "trace"}
    for to, name in addressed:
        member = by_name[to]
        if not member.rows(name):
            continue
        for row in member.rows(name):
            for ref in (r for node in (*row.when.values(), *_late_nodes(row)) for r in _reads(node)):
                slot = member.slot(ref)
                if slot is not None and slot[0] == "record":
                    wrong = f"'{name}' is addressed to '{to}' alone, yet a row of it reads '{ref}' of a generation"
                    raise _stop("unknown-generation", wrong, row.span)
        shared_events[to, name] = Event(name, to, _method(f"{to}_{name}", taken), (member,), _fields(name, (member,)))
    source = _Source(f"process {process}")
    title = "".join(part.title() for part in _identifier(process, home.span, "process").split("_"))
    shared_plan = Plan(process, "shared", shared, shared_events)
    record_plan = Plan(process, "record", records, record_events)
    _ClassWriter(source, shared_plan, f"{title}Shared", "SharedBase", True).write(("trace", "_note", "_tick"), ())
    _ClassWriter(source, record_plan, f"{title}Record", "RecordBase", True).write(("shared", "key"), ())
    text, names = source.run()
    shared_class, record_class = names[f"{title}Shared"], names[f"{title}Record"]
    shared_class.plan, record_class.plan = shared_plan, record_plan
    return CompiledProcess(
        process,
        system,
        shared_class,
        record_class,
        text,
        digest,
        {s.name: {k: _number(s.given.get(k)) for k in system.machines[s.machine].given} for s in home.shared.values()},
        {k: _number(home.given.get(k)) for item in records for k in item.machine.given},
    )


def compile_machine(machine: Machine) -> type:
    """The class of one machine by itself, such as a write handle: `handle = cls(); handle.post()`.

    Its givens are keyword arguments. What its rows read of a sibling is an attribute, `alias_variable`, 0 at
    first, which its owner keeps true.
    """
    siblings = {alias: ("record", alias) for alias in machine.reads}
    item = Instance(machine.name, machine, "record", siblings)
    taken = _reserved(MachineBase, (item,))
    events = {
        ("", name): Event(name, "", _method(name, taken), (item,), _fields(name, (item,))) for name in machine.events()
    }
    extra: dict[str, None] = {}
    for name in machine.events():
        for row in item.rows(name):
            for ref in (r for node in (*row.when.values(), *_late_nodes(row)) for r in _reads(node)):
                if ref.field:
                    extra[f"{ref.name}_{ref.field}"] = None
    source = _Source(f"machine {machine.name}")
    plan = Plan(machine.name, "record", (item,), events)
    _ClassWriter(source, plan, _identifier(machine.name, machine.span, "machine"), "MachineBase", False).write(
        (), tuple(extra)
    )
    text, names = source.run()
    made: type[MachineBase] = names[machine.name]
    made.plan, made.source = plan, text
    return made


def _alphabet(
    system: System, process: str, records: tuple[Instance, ...]
) -> tuple[dict[str, None], dict[tuple[str, str], None]]:
    """The events of a generation, and the (shared instance, event) pairs that somebody addresses."""
    wanted: dict[str, None] = dict.fromkeys(e for item in records for e in item.machine.events())
    addressed: dict[tuple[str, str], None] = {}
    for action in system.actions.values():
        if action.process == process and action.event:
            if action.to:
                addressed[action.to, action.event] = None
            else:
                wanted[action.event] = None
    for channel in system.channels.values():
        if channel.target == process:
            for message in channel.messages:
                if channel.to:
                    addressed[channel.to, message] = None
                else:
                    wanted[message] = None
    return wanted, addressed


def _instance(system: System, home: Process, name: str, machine_name: str, place: str) -> Instance:
    machine = system.machines[machine_name]
    siblings: dict[str, tuple[str, str]] = {}
    for alias, target in machine.reads.items():
        if alias in home.shared:
            siblings[alias] = ("shared", alias)
        elif target in home.machines:
            siblings[alias] = ("record", target)
        else:
            wrong = f"'{name}' reads {target}, which does not run in process '{home.name}'"
            raise _stop("unknown-machine", wrong, machine.span)
    return Instance(name, machine, place, siblings)


def _number(node: Node | None) -> int | None:
    return int(node.value) if isinstance(node, Const) else None


def _reserved(base: type, instances: tuple[Instance, ...]) -> set[str]:
    """Names that no event's method may take: what the base has, and the variables."""
    names = (f"{i.name}_{n}" for i in instances for n in ("state", *i.machine.given, *i.machine.vars))
    return {*dir(base), *names}


def _method(event: str, taken: set[str]) -> str:
    """The method for an event: its name, with `_` after it where Python or the class has another use for that."""
    name = event.lstrip("_") or "event"
    while keyword.iskeyword(name) or name in taken or f"can_{name}" in taken:
        name += "_"
    taken |= {name, f"can_{name}"}
    return name


def _fields(event: str, members: tuple[Instance, ...]) -> dict[str, Variable]:
    """The fields of an event, as its machines take it together."""
    out: dict[str, Variable] = {}
    for member in members:
        for name, var in member.machine.takes.get(event, {}).items():
            span = member.machine.span
            if keyword.iskeyword(name) or name == "self" or name.startswith("_"):
                raise _stop("reserved-name", f"'{name}' cannot name a field of '{event}'", span, "choose another word")
            _identifier(name, span, "field")
            if name in out and out[name].kind != var.kind:
                wrong = f"field '{name}' of '{event}' is {out[name].kind} for one machine and {var.kind} for another"
                raise _stop("type-mismatch", wrong, span)
            out.setdefault(name, var)
    return out
