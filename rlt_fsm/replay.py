"""Judge a trace against a spec, in linear time, and say why.

Each process's lines are fed, in their order, to the same compiled classes that ran. A line waits until what it
needs has happened: a message until its sender has sent it (per generation, first in, first out), an event of the
world until the world allows it. Where nothing can go on, the trace is not a run of the system. The clocks of
processes are never compared: of the orders that the messages allow, the one is judged in which receivers run
ahead of senders and deaths come as late as they can.

The world of a generation is kept as `ground` spells it out for one generation with storage of its own; every
`always` property is evaluated on it after each step of that generation. A property that counts over all
generations or over all storage cannot be judged so; it is named in `unjudged`, never passed over.

Three verdicts: ok, violation, inconclusive (events dropped, a process without a trace, another spec).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlt_fsm.compile import CompiledProcess, Message, compile_process, shown_values
from rlt_fsm.errors import IllegalEvent
from rlt_fsm.expr import BOOL, FALSE, INT, TRUE, Const, Node, Op, Quant, Ref, children, conjuncts, fold, show, to_python
from rlt_fsm.ground import Flat, ground
from rlt_fsm.model import Action, Assignment, Channel, Ignore, Spec, System
from rlt_fsm.trace import Line, Trace, TraceEvent, merge

OK, VIOLATION, INCONCLUSIVE = "ok", "violation", "inconclusive"
UNBOUNDED = 1 << 62
"""Stands for a constant of the system that the caller gives no value for: a bound that is never reached."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a replay found. `step` counts the lines that were taken before it stopped."""

    kind: str  # ok, violation, inconclusive
    reason: str
    step: int
    process: str = ""
    tid: str = ""
    event: str = ""
    at: str = ""  # file:line
    false: tuple[str, ...] = ()  # each conjunct that was false, with the values that it read
    enabled: tuple[str, ...] = ()  # what the process could have done instead
    waiting: tuple[str, ...] = ()  # the other lines that could not go on, and why
    open: tuple[str, ...] = ()  # generations with obligations that are not settled
    unjudged: tuple[str, ...] = ()  # properties that one generation's view cannot answer
    inferred: tuple[str, ...] = ()  # things of the world that no line says and that must have happened
    work: int = 0  # lines tried plus properties evaluated: what the time is proportional to

    @property
    def ok(self) -> bool:
        """Whether the whole trace is a run of the system."""
        return self.kind == OK

    def show(self) -> str:
        """The verdict as people read it."""
        lines = [f"{self.kind}: {self.reason}"]
        if self.at:
            what = f"{self.process or 'world'}.{self.event}" + (f" of generation '{self.tid}'" if self.tid else "")
            lines.append(f"  at {self.at}: {what}, after {self.step} lines")
        lines += [f"  false: {item}" for item in self.false]
        if self.enabled:
            lines.append(f"  could have happened instead: {', '.join(self.enabled)}")
        lines += [f"  waiting: {item}" for item in self.waiting]
        lines += [f"  open: {item}" for item in self.open]
        lines += [f"  inferred: {item}" for item in self.inferred]
        if self.unjudged:
            lines.append(f"  not judged here: {', '.join(self.unjudged)}")
        return "\n".join(lines)


def replay(
    spec: Spec, traces: Trace | str | Path | Iterable[str | Path | Trace], consts: Mapping[str, int] | None = None
) -> Verdict:
    """Judge a trace, or the traces of several processes of one run.

    consts: values of the system's constants, such as {"steps": 2}; one without a value binds nothing.
    Raises TraceError for what cannot be read.
    """
    if isinstance(traces, Trace | str | Path):
        traces = [traces]
    return _Replay(spec, merge(traces), dict(consts or {})).run()


class _Stop(Exception):
    """A violation, with all that a verdict says of it."""

    def __init__(self, reason: str, false: Iterable[str] = (), enabled: Iterable[str] = ()) -> None:
        super().__init__(reason)
        self.reason, self.false, self.enabled = reason, tuple(false), tuple(enabled)


@dataclass(slots=True)
class _Pending:
    """A message that was sent and not yet taken."""

    message: str
    fields: Mapping[str, int | bool]


@dataclass(slots=True)
class _Generation:
    """One generation: its record in every process, its part of the world, its channels."""

    tid: str
    records: dict[str, Any]
    world: dict[str, Any]
    queues: dict[str, deque[_Pending]]
    came: dict[tuple[str, str, str], set[int]] = field(default_factory=dict)  # (process, event, field) -> numbers


@dataclass(frozen=True, slots=True)
class _Cause:
    """An action of the world as the cause of an event, or of nothing that a process sees."""

    action: Action
    when: Node
    allows: Callable[..., bool]
    changes: Callable[..., None] | None
    fields: tuple[Mapping[str, str | int | bool], ...]  # each choice of field values that it may come with


@dataclass(frozen=True, slots=True)
class _Property:
    name: str
    node: Node
    holds: Callable[..., bool]


class _Replay:
    def __init__(self, spec: Spec, trace: Trace, consts: dict[str, int]) -> None:
        self.spec, self.trace = spec, trace
        self.system: System = spec.need_system()
        sizes = dict.fromkeys(self.system.instances, 1)
        self.flat: Flat = ground(self.system, sizes, dict.fromkeys(self.system.consts, UNBOUNDED) | consts)
        self.processes = list(self.system.processes)
        self.compiled: dict[str, CompiledProcess] = {}
        self.shared: dict[str, Any] = {}
        self.generations: dict[str, _Generation] = {}
        self.whole: dict[str, Any] = {}  # world variables that no index sort names
        self.queues: dict[str, deque[_Pending]] = {}  # of channels that are not per generation
        self.nobody: _Generation | None = None  # stands for the generation where an event has none
        self.place: dict[str, int] = {}
        self.inferred: list[str] = []
        self.step, self.work = 0, 0
        self.writer = _Writer(self.flat)
        self.causes: dict[tuple[str, str, str], list[_Cause]] = {}
        self.deaths: dict[str, _Cause] = {}
        self.channels: dict[tuple[str, str, str], list[Channel]] = {}
        self.effects: dict[str, tuple[Node, Callable[..., bool], Callable[..., None] | None]] = {}
        self.alive: dict[str, Callable[..., bool]] = {}
        self.properties: list[_Property] = []
        self.unjudged: list[str] = []
        self.lives: dict[str, list[str]] = {}  # death -> the processes that it ends

    # -- making ready ---------------------------------------------------------------------------------

    def reject(self) -> Verdict | None:
        """Why the trace cannot be judged at all, if it cannot."""

        def no(reason: str) -> Verdict:
            return Verdict(INCONCLUSIVE, reason, 0)

        unknown = [name for name in self.trace.headers if name not in self.system.processes]
        if unknown:
            known = ", ".join(self.processes)
            return no(f"the trace is of process '{unknown[0]}', which '{self.system.name}' does not have; known: {known}")
        for name, header in self.trace.headers.items():
            if not header.spec:
                return no(f"the trace of '{name}' does not say which spec it ran")
            if header.spec != self.spec.digest:
                return no(f"the trace of '{name}' ran spec {header.spec[:12]}, and this is {self.spec.digest[:12]}")
        dropped = self.trace.dropped()
        if dropped:
            listed = ", ".join(f"{number} of '{name}'" for name, number in dropped.items())
            return no(f"events are not in the trace: {listed}; what follows a gap cannot be judged")
        missing = [name for name in self.processes if name not in self.trace.headers]
        if missing:
            listed = ", ".join(f"'{name}'" for name in missing)
            return no(f"there is no trace of {listed}: what it sent, and what the world did to it, is not known")
        return None

    def prepare(self) -> None:
        system = self.system
        for name in self.processes:
            header = self.trace.headers[name]
            self.compiled[name] = compile_process(system, name)
            try:
                self.shared[name] = self.compiled[name].make_shared(header.given, start=header.start)
            except (ValueError, LookupError) as error:
                raise _Stop(f"the header of '{name}' does not fit the spec: {error}") from error
            self.place[name] = 0
        for var in self.flat.vars.values():
            if var.world:
                assert isinstance(var.init, Const)
                if "[" not in var.name:
                    self.whole[var.name] = var.init.value
        for channel in system.channels.values():
            for message in channel.messages:
                self.channels.setdefault((channel.target, channel.to, message), []).append(channel)
            if not channel.per:
                self.queues[channel.name] = deque()
        self.writer.channels = self.queues
        for effect in system.effects.values():
            needs = self.node(effect.needs, {effect.choose: 0} if effect.choose else {})
            self.effects[effect.name] = (
                needs,
                self.writer.test(needs),
                self.writer.update(self.assignments(effect.set, {effect.choose: 0} if effect.choose else {})),
            )
        for action in system.actions.values():
            self.add_action(action)
        for name, process in system.processes.items():
            self.alive[name] = self.writer.test(TRUE if process.alive is None else self.node(process.alive, {}))
        for item in system.properties:
            if item.kind == "always":
                if per_generation(item.formula, system):
                    node = self.node(item.formula, {})
                    self.properties.append(_Property(item.name, node, self.writer.test(node)))
                else:
                    self.unjudged.append(item.name)
        self.nobody = self.generation("")
        del self.generations[""]

    def add_action(self, action: Action) -> None:
        binding = dict.fromkeys(action.per, 0)
        when = self.node(action.when, binding)
        choices: list[dict[str, str | int | bool]] = [{}]
        for name, values in action.fields.items():
            plain = [v if isinstance(v, str) else self.number(self.node(v, binding)) for v in values]
            choices = [{**known, name: value} for known in choices for value in plain]
        changes = self.writer.update(self.assignments(action.set, binding))
        cause = _Cause(action, when, self.writer.test(when), changes, tuple(choices))
        if action.event:
            self.causes.setdefault((action.process, action.to, action.event), []).append(cause)
            return
        self.deaths[action.name] = cause
        ends: list[str] = []
        for name, process in self.system.processes.items():
            if process.alive is not None:
                after = dict(self.whole)
                if cause.changes is not None:
                    cause.changes(after, _Defaults(), {}, {}, {})
                if self.writer.test(self.node(process.alive, {}))(self.whole, {}, {}, {}, {}) and not self.writer.test(
                    self.node(process.alive, {})
                )(after, {}, {}, {}, {}):
                    ends.append(name)
        self.lives[action.name] = ends

    def node(self, node: Node, binding: Mapping[str, int]) -> Node:
        """A system expression for one generation with storage of its own."""
        return self.flat.formula(node, {**dict.fromkeys(self.system.instances, 0), **binding})

    def number(self, node: Node) -> int | bool:
        if not isinstance(node, Const):
            raise TypeError(f"a field of an action must be a constant, not {show(node)}")
        return node.value

    def assignments(
        self, sets: tuple[Assignment, ...], binding: Mapping[str, int]
    ) -> list[tuple[Node, list[tuple[str, Node]]]]:
        out = []
        for item in sets:
            pairs: list[tuple[str, Node]] = []
            for target, value in item.set:
                name = self.node(target, binding)
                assert isinstance(name, Ref)
                pairs.append((name.name, self.node(value, binding)))
            out.append((self.node(item.when, binding), pairs))
        return out
