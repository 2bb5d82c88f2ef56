"""Machines to classes: one object per generation, one method per event.

The machines of a process move together, as `rlt_fsm/ground.py` spells out: every guard and update reads
the values from before the event, and where one machine refuses, none has moved. What a method returns is data:
messages and effects, for the shell to carry out. The source that was run is kept in `CompiledProcess.source`.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlt_fsm.codegen import ClassWriter, Source, identifier, late_nodes, stop
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
    SharedBase,
    reads,
    shown_values,
)
from rlt_fsm.errors import suggest
from rlt_fsm.expr import Const, Node
from rlt_fsm.model import Machine, Process, System, Variable
from rlt_fsm.trace import TraceRing

# What callers of compiled classes need comes from here too: they know this module, not how it is divided.
__all__ = [
    "INDEX_MAX",
    "CompiledProcess",
    "Effect",
    "Message",
    "Outputs",
    "compile_machine",
    "compile_process",
    "shown_values",
]


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
        if shared.trace is not None:
            shared.trace.turn()
            if values != shared.trace.record_given:
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
            for ref in (r for node in (*row.when.values(), *late_nodes(row)) for r in reads(node)):
                slot = member.slot(ref)
                if slot is not None and slot[0] == "record":
                    wrong = f"'{name}' is addressed to '{to}' alone, yet a row of it reads '{ref}' of a generation"
                    raise stop("unknown-name", wrong, row.span)
        shared_events[to, name] = Event(name, to, _method(f"{to}_{name}", taken), (member,), _fields(name, (member,)))
    source = Source(f"process {process}")
    title = "".join(part.title() for part in identifier(process, home.span, "process").split("_"))
    shared_plan = Plan(process, "shared", shared, shared_events)
    record_plan = Plan(process, "record", records, record_events)
    ClassWriter(source, shared_plan, f"{title}Shared", "SharedBase", True).write(("trace",), ())
    ClassWriter(source, record_plan, f"{title}Record", "RecordBase", True).write(("shared", "key"), ())
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
            for ref in (r for node in (*row.when.values(), *late_nodes(row)) for r in reads(node)):
                if ref.field:
                    extra[f"{ref.name}_{ref.field}"] = None
    source = Source(f"machine {machine.name}")
    plan = Plan(machine.name, "record", (item,), events)
    ClassWriter(source, plan, identifier(machine.name, machine.span, "machine"), "MachineBase", False).write(
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
            raise stop("unknown-machine", wrong, machine.span)
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
                raise stop("bad-name", f"'{name}' cannot name a field of '{event}'", span, "choose another word")
            identifier(name, span, "field")
            if name in out and out[name].kind != var.kind:
                wrong = f"field '{name}' of '{event}' is {out[name].kind} for one machine and {var.kind} for another"
                raise stop("type-mismatch", wrong, span)
            out.setdefault(name, var)
    return out
