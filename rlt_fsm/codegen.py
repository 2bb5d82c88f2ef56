"""The Python source of a compiled class: guards and updates inlined, one method per event.

A method first picks one row per machine, then writes, so that a refusal changes nothing. A variable is loaded into
a local where it is read twice, or might be overwritten before it is read.

Names reach the source only after a check that they are identifiers; text of a spec never does.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from rlt_fsm.compiled import (
    INDEX_MAX,
    Effect,
    Event,
    Instance,
    MachineBase,
    Message,
    Outputs,
    Plan,
    RecordBase,
    Row,
    SharedBase,
    reads,
    refuse,
)
from rlt_fsm.errors import NOWHERE, Finding, Span, SpecError
from rlt_fsm.expr import BOOL, TRUE, Node, Ref, conj, to_python
from rlt_fsm.model import Ignore, Send, Transition

CASES_IN_LINE = 6
"""Runs of states, 1 or more, that a method tells apart by comparing; for more, a table of functions is as fast."""

_OWNERS = {"record": "self", "shared": "_sh"}


class Source:
    """Python source that grows line by line, and the objects it names."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.lines: list[str] = []
        self.depth = 0
        self.names: dict[str, Any] = {
            "_refuse": refuse,
            "_type": type,
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


def stop(kind: str, message: str, span: Span, hint: str = "") -> SpecError:
    """The error for one finding."""
    return SpecError([Finding(kind, message, span, hint)])


def identifier(word: str, span: Span, what: str) -> str:
    """`word`, if it can stand in source as a name; SpecError otherwise."""
    if not word.isidentifier() or not word.isascii():
        raise stop("bad-name", f"{what} '{word}' is not a name", span, "letters, digits and _")
    return word


class ClassWriter:
    """Writes one class of a plan."""

    def __init__(self, source: Source, plan: Plan, class_name: str, base: str, traced: bool) -> None:
        self.source, self.plan, self.class_name, self.base, self.traced = source, plan, class_name, base, traced
        self.tables: list[Callable[[], None]] = []  # what has to be written after the class

    def owner(self, place: str) -> str:
        """How the object that holds a variable is written in a method of this class."""
        return "self" if place == self.plan.place else _OWNERS[place]

    def write(self, before: tuple[str, ...], extra: tuple[str, ...]) -> None:
        """The whole class. `before` are slots that the constructor takes, `extra` those of sibling values."""
        slots: dict[str, None] = dict.fromkeys(before)
        for item in self.plan.instances:
            names = ["state", *item.machine.given, *item.machine.vars]
            for slot in (f"{identifier(item.name, item.machine.span, 'instance')}_{n}" for n in names):
                self.fresh(identifier(slot, item.machine.span, "variable"), slots, item.machine.span)
        for slot in extra:
            self.fresh(identifier(slot, self.plan.instances[0].machine.span, "variable"), slots, NOWHERE)
        source = self.source
        with source.block(f"class {self.class_name}({self.base}):"):
            source.add(f"__slots__ = {tuple(slots)!r}")
            source.add("")
            self.constructor(before, extra)
            for event in self.plan.events.values():
                self.method(event, event.method, self.event)
                self.method(event, f"can_{event.method}", self.can)
        source.add("")
        for table in self.tables:
            table()

    def fresh(self, slot: str, slots: dict[str, None], span: Span) -> None:
        if slot in slots:
            raise stop("name-clash", f"two variables would be called '{slot}'", span, "rename one of them")
        slots[slot] = None

    def constructor(self, before: tuple[str, ...], extra: tuple[str, ...]) -> None:
        alone = self.base == "MachineBase"
        parameters = [*before, *([] if alone else ["given"])]
        if alone and self.plan.instances[0].machine.given:
            parameters = ["*", *self.plan.instances[0].machine.given]
        with self.source.block(f"def __init__({', '.join(['self', *parameters])}):"):
            for name in before:
                self.source.add(f"self.{name} = {name}")
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
                raise stop("unknown-name", wrong, member.machine.span)
            return ref.name

        return name

    def head(self, event: Event, late: bool) -> dict[tuple[str, str], str]:
        """Load what needs a local, and say its name. late: whether rows are applied, too, or only chosen."""
        times: Counter[tuple[str, str]] = Counter()  # reads of a variable, over all rows
        written: set[tuple[str, str]] = set()
        exposed: set[tuple[str, str]] = set()  # read where a row may have written already
        for member in event.members:
            state = (member.place, f"{member.name}_state")
            runs = _runs(member, event.name)
            if len(runs) > 1:
                times[state] += _cases(member, event.name)
            for row in member.rows(event.name):
                times.update(slot for node in row.when.values() for slot in _slots(member, node))
                if not late or isinstance(row, Ignore):
                    continue
                if row.target is not None:
                    written.add(state)
                for name, node in row.set.items():
                    target = (member.place, f"{member.name}_{name}")
                    written.add(target)
                    found = list(_slots(member, node))
                    times.update(found)
                    exposed.update(slot for slot in found if slot != target)
                for node in (value for send in row.send for value in send.fields.values()):
                    found = list(_slots(member, node))
                    times.update(found)
                    exposed.update(found)
        shared = any(place == "shared" for place, _ in (*times, *written))
        if self.plan.place == "record" and (shared or (late and self.traced)):
            self.source.add("_sh = self.shared")
        chosen = [slot for slot, number in times.items() if number > 1 or slot in written & exposed]
        locals_ = {slot: f"_v{i}" for i, slot in enumerate(chosen)}
        for (place, slot), name in locals_.items():
            self.source.add(f"{name} = {self.owner(place)}.{slot}")
        return locals_

    def method(self, event: Event, name: str, body: Callable[[Event], None]) -> None:
        """One method, or function: by a table where a machine has more cases than can be told apart in line."""
        parameters = ", ".join(["self", *event.fields])
        member = max(event.members, key=lambda m: _cases(m, event.name))
        with self.source.block(f"def {name}({parameters}):"):
            if _cases(member, event.name) <= CASES_IN_LINE or not all(m.rows(event.name) for m in event.members):
                body(event)
            else:
                table = f"_{self.class_name}_{name.lstrip('_')}"
                owner = "self" if member.place == self.plan.place else "self.shared"
                self.source.add(f"return {table}[{owner}.{member.name}_state]({parameters})")
                self.tables.append(lambda: self.table(table, event, member, body))
        self.source.add("")

    def table(self, table: str, event: Event, member: Instance, body: Callable[[Event], None]) -> None:
        """A function for each case of `member`, and the tuple that says which it is in each state."""
        functions: dict[tuple[int, ...], str] = {}
        by_state: list[str] = []
        for run in _runs(member, event.name):
            if run.rows not in functions:
                functions[run.rows] = f"{table}_{len(functions)}"
                self.method(_narrowed(event, member, run.rows), functions[run.rows], body)
            by_state += [functions[run.rows]] * (run.end - run.first)
        self.source.add(f"{table} = ({', '.join(by_state)})")
        self.source.add("")

    def event(self, event: Event) -> None:
        """The body of the method that moves the machines."""
        source = self.source
        values = "(" + "".join(f"{name}, " for name in event.fields) + ")"
        refuse = f"raise _refuse(self, {event.to!r}, {event.name!r}, {values})"
        if not all(member.rows(event.name) for member in event.members):
            source.add(refuse)
            return
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
            self.trace(event)
        parts = [outputs[m.name] or f"_o{number[m.name]}" for m in event.members]
        source.add(f"return {self.joined(parts)}")

    def can(self, event: Event) -> None:
        """The body of the method that only says whether the machines would move."""
        source = self.source
        if not all(member.rows(event.name) for member in event.members):
            source.add("return False")
            return
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

    def check_fields(self, event: Event, refuse: str) -> None:
        for name, var in event.fields.items():
            if var.type == BOOL:
                test = f"{name} is not True and {name} is not False"
            elif var.kind == "index":
                test = f"_type({name}) is not int or not 0 <= {name} < {INDEX_MAX}"
            else:
                test = f"_type({name}) is not int or {name} < 0"
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
        """Decide the row of one machine: by its state, then by the guards in order."""
        source = self.source
        read = self.reader(event, member, locals_)
        slot = f"{member.name}_state"
        state = locals_.get((member.place, slot)) or f"{self.owner(member.place)}.{slot}"
        count = len(member.machine.states)
        rows = member.rows(event.name)
        runs = _runs(member, event.name)

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

        def within(lo: int, hi: int) -> str:
            if hi == lo + 1:
                return f"{state} == {lo}"
            if hi == count:
                return f"{state} >= {lo}"
            return f"{state} < {hi}" if lo == 0 else f"{lo} <= {state} < {hi}"

        if len(runs) == 1:
            leaf(runs[0].rows)
            return
        word = "if"
        for run in sorted((run for run in runs if run.rows), key=lambda run: run.rows):
            with source.block(f"{word} {within(run.first, run.end)}:"):
                leaf(run.rows)
            word = "elif"
        with source.block("else:"):
            source.add(refuse)

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
        return f"_Message({send.to!r}, {send.message!r}, {{{fields}}})"

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

    def trace(self, event: Event) -> None:
        """Append the event to the ring, with the time of its turn: no clock is read here, and none in a core."""
        source = self.source
        key = "self.key" if self.plan.place == "record" else "''"
        source.add(f"_ring = {self.owner('shared')}.trace")
        with source.block("if _ring is not None:"):
            what = f"({event.name!r}, {event.to!r}{''.join(f', {name}' for name in event.fields)})"
            source.add("_ring.written += 1")
            source.add("_append = _ring.append")
            for part in ("_ring.now", key, what):
                source.add(f"_append({part})")


class _Run(NamedTuple):
    """States next to one another that have the same rows for an event."""

    first: int
    end: int  # one past the last
    rows: tuple[int, ...]


def _runs(member: Instance, event: str) -> list[_Run]:
    rows = member.rows(event)
    runs: list[_Run] = []
    for place, state in enumerate(member.machine.state_type.names):
        numbers = tuple(i for i, row in enumerate(rows) if state in row.sources)
        if runs and runs[-1].rows == numbers:
            runs[-1] = _Run(runs[-1].first, place + 1, numbers)
        else:
            runs.append(_Run(place, place + 1, numbers))
    return runs


def _cases(member: Instance, event: str) -> int:
    """How often a machine's states must be told apart to find its rows for an event."""
    return sum(bool(run.rows) for run in _runs(member, event))


def _narrowed(event: Event, member: Instance, rows: tuple[int, ...]) -> Event:
    """The event where `member` is known to stand in a state with just these rows: they hold in every state then."""
    machine, known = member.machine, member.rows(event.name)
    kept = [replace(known[i], sources=tuple(machine.states)) for i in rows]
    machine = replace(
        machine,
        transitions=tuple(row for row in kept if isinstance(row, Transition)),
        ignores=tuple(row for row in kept if isinstance(row, Ignore)),
    )
    members = tuple(replace(m, machine=machine) if m is member else m for m in event.members)
    return replace(event, members=members)


def _slots(member: Instance, node: Node) -> Iterator[tuple[str, str]]:
    """(place, attribute) of each variable that an expression reads, as often as it does."""
    found = (member.slot(ref) for ref in reads(node))
    return (slot for slot in found if slot is not None)


def late_nodes(row: Row) -> list[Node]:
    """The expressions of a row that are read after the rows are chosen."""
    if isinstance(row, Ignore):
        return []
    return [*row.set.values(), *(value for send in row.send for value in send.fields.values())]
