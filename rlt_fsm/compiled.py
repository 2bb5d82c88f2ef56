"""What a compiled class is, whatever its machines: messages and effects, what it can do besides its events, refusal.

`rlt_fsm/codegen.py` writes such classes, `rlt_fsm/compile.py` makes them. A refusal is the slow path: it reads the
tables anew, by `expr.evaluate`, to say which conjunct is false and with what values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from rlt_fsm.errors import IllegalEvent, suggest
from rlt_fsm.expr import BOOL, Add, Enum, Member, Node, Ref, Seen, children, evaluate, show
from rlt_fsm.model import Ignore, Machine, Transition, Variable
from rlt_fsm.trace import TraceRing

INDEX_MAX = 1 << 20
"""Sequence numbers are below this: a `seen` variable keeps one bit for each, and a wild number must not fill memory."""


class Message(msgspec.Struct, frozen=True):
    """One message for process `to`. `fields` is to be read, not changed: it may be shared between calls."""

    to: str
    name: str
    fields: Mapping[str, int | bool]


class Effect(msgspec.Struct, frozen=True):
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
        if self.shared.trace is not None:
            self.shared.trace.turn()
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
        if self.trace is not None:
            self.trace.turn()
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


def refuse(self: Any, to: str, name: str, values: tuple[Any, ...]) -> IllegalEvent:
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
    for ref in reads(node):
        found = value(ref)
        if isinstance(ref.type, Enum) and isinstance(found, int) and 0 <= found < len(ref.type.names):
            found = ref.type.names[found]
        elif isinstance(ref.type, Seen):
            found = "{" + ", ".join(str(i) for i in range(int(found).bit_length()) if found >> i & 1) + "}"
        known[str(ref)] = str(found).lower() if isinstance(found, bool) else str(found)
    return f" ({', '.join(f'{k} is {v}' for k, v in known.items())})" if known else ""


def reads(node: Node) -> Iterator[Ref]:
    """Every variable and event field that an expression reads."""
    if isinstance(node, Ref):
        yield node
    if isinstance(node, Member | Add):
        yield Ref(node.item)
    for child in children(node):
        yield from reads(child)


def _wanted(var: Variable) -> str:
    if var.type == BOOL:
        return "true or false (a bool)"
    return f"an int from 0 to {INDEX_MAX - 1}" if var.kind == "index" else "an int that is not negative"


def _fits(var: Variable, value: Any) -> bool:
    if var.type == BOOL:
        return value is True or value is False
    return value.__class__ is int and value >= 0 and (var.kind != "index" or value < INDEX_MAX)
