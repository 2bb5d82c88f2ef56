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
from functools import partial
from pathlib import Path
from typing import Any

from rlt_fsm.compile import CompiledProcess, Message, compile_process, shown_values
from rlt_fsm.errors import IllegalEvent
from rlt_fsm.expr import TRUE, Const, Node, Quant, Ref, children, conjuncts, evaluate, refs, show, to_python
from rlt_fsm.ground import Flat, ground
from rlt_fsm.model import Action, Assignment, Channel, Spec, System
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
        self.source = ""  # the process that is waited for
        self.line: Line | None = None


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
    begun: set[str] = field(default_factory=set)  # processes in which something has happened to it
    came: dict[tuple[str, str, str], set[int]] = field(default_factory=dict)  # (process, event, field) -> numbers


@dataclass(frozen=True, slots=True)
class _Cause:
    """An action of the world: the cause of an event, or of something that no process takes as one."""

    name: str
    when: _Test
    changes: _Update
    fields: tuple[Mapping[str, str | int | bool], ...]  # each choice of field values that it may come with
    ends: tuple[str, ...] = ()  # the processes that it ends
    free: bool = False  # follows from what a process did: no budget bounds it


@dataclass(frozen=True, slots=True)
class _EffectRule:
    needs: _Test
    changes: _Update


class _Replay:
    def __init__(self, spec: Spec, trace: Trace, consts: dict[str, int]) -> None:
        self.spec, self.trace = spec, trace
        self.system: System = spec.need_system()
        sizes = dict.fromkeys(self.system.instances, 1)
        self.flat: Flat = ground(self.system, sizes, dict.fromkeys(self.system.consts, UNBOUNDED) | consts)
        self.order = list(self.system.processes)[::-1]  # receivers first, as far as the declared order tells
        self.compiled: dict[str, CompiledProcess] = {}
        self.place = dict.fromkeys(self.system.processes, 0)
        self.generations: dict[str, _Generation] = {}
        self.live: dict[str, _Generation] = {}
        self.inferred: list[str] = []
        self.unjudged: list[str] = []
        self.step, self.work = 0, 0
        self.writer = _Writer(self.flat)
        self.shared, self.whole, self.common = self.writer.shared, self.writer.whole, self.writer.common
        self.causes: dict[tuple[str, str, str], list[_Cause]] = {}
        self.unseen: dict[str, _Cause] = {}  # actions that no process takes as an event
        self.channels: dict[tuple[str, str, str], list[Channel]] = {}
        self.ranks: dict[tuple[str, str, str], tuple[Channel, dict[str, int]]] = {}
        self.effects: dict[str, _EffectRule] = {}
        self.alive: dict[str, _Test] = {}
        self.properties: list[tuple[str, _Test]] = []
        self.written = {line.event.event for line in trace.lines() if not line.event.process}
        self.nobody = _Generation("", {}, {}, {})

    # -- making ready ---------------------------------------------------------------------------------

    def reject(self) -> str:
        """Why the trace cannot be judged at all; empty where it can."""
        headers, known = self.trace.headers, list(self.system.processes)
        for name, header in headers.items():
            if name not in known:
                return f"the trace is of process '{name}'; '{self.system.name}' has {', '.join(known)}"
            if not header.spec:
                return f"the trace of '{name}' does not say which spec it ran"
            if header.spec != self.spec.digest:
                return f"the trace of '{name}' ran spec {header.spec[:12]}, and this is {self.spec.digest[:12]}"
        gaps = ", ".join(f"{number} of '{name}'" for name, number in self.trace.dropped().items())
        if gaps:
            return f"events are not in the trace: {gaps}; what follows a gap cannot be judged"
        missing = ", ".join(f"'{name}'" for name in known if name not in headers)
        if missing:
            return f"there is no trace of {missing}: what it sent, and what the world did to it, is not known"
        return ""

    def prepare(self) -> None:
        system, writer = self.system, self.writer
        for name in system.processes:
            header = self.trace.headers[name]
            self.compiled[name] = compile_process(system, name)
            try:
                self.shared[name] = self.compiled[name].make_shared(header.given, start=header.start)
                self.compiled[name].make_record(self.shared[name], "", self.usual(name))
            except (ValueError, LookupError) as error:
                raise _Stop(f"the header of '{name}' does not fit the spec: {error}") from error
        for var in self.flat.vars.values():
            if var.world and not var.name.endswith("]"):
                self.whole[var.name] = _first(var.init)
        for channel in system.channels.values():
            ranks = {message: rank for rank, message in enumerate(channel.messages)}
            for message in channel.messages:
                self.channels.setdefault((channel.target, channel.to, message), []).append(channel)
                self.ranks[channel.source, channel.target, message] = (channel, ranks)
            if not channel.per:
                self.common[channel.name] = deque()
        self.nobody = self.new_generation("")
        for effect in system.effects.values():
            needs = writer.test(self.node(effect.needs))
            self.effects[effect.name] = _EffectRule(needs, writer.update(self.assignments(effect.set)))
        for name, process in system.processes.items():
            self.alive[name] = writer.test(TRUE if process.alive is None else self.node(process.alive))
        for action in system.actions.values():
            self.add_action(action)
        for item in system.properties:
            if item.kind != "always":
                continue
            if per_generation(item.formula, system):
                self.properties.append((item.name, writer.test(self.node(item.formula))))
            else:
                self.unjudged.append(item.name)

    def add_action(self, action: Action) -> None:
        choices: list[dict[str, str | int | bool]] = [{}]
        for name, values in action.fields.items():
            plain: list[str | int | bool] = []
            for value in values:
                node = value if isinstance(value, str) else self.node(value)
                assert isinstance(node, str | Const), f"field '{name}' of action '{action.name}' is not a constant"
                plain.append(node if isinstance(node, str) else node.value)
            choices = [{**known, name: value} for known in choices for value in plain]
        when = action.when
        if not all(_each(part, self.system.generation) for part in conjuncts(when)):
            self.unjudged.append(f"when of {action.name}")
            when = TRUE
        test, changes = self.writer.test(self.node(when)), self.writer.update(self.assignments(action.set))
        if action.event:
            cause = _Cause(action.name, test, changes, tuple(choices))
            self.causes.setdefault((action.process, action.to, action.event), []).append(cause)
            return
        before = dict(self.whole)
        changes.whole(self.nobody)
        ends = tuple(name for name, alive in self.alive.items() if not alive.holds(self.nobody))
        self.whole.clear()
        self.whole.update(before)
        self.unseen[action.name] = _Cause(action.name, test, changes, (), ends, not action.budget)

    def node(self, node: Node) -> Node:
        """A system expression for one generation with storage of its own."""
        return self.flat.formula(node, dict.fromkeys(self.system.instances, 0))

    def assignments(self, sets: tuple[Assignment, ...]) -> list[tuple[Node, list[tuple[str, Node]]]]:
        out = []
        for item in sets:
            pairs: list[tuple[str, Node]] = []
            for target, value in item.set:
                name = self.node(target)
                assert isinstance(name, Ref)
                pairs.append((name.name, self.node(value)))
            out.append((self.node(item.when), pairs))
        return out

    def new_generation(self, tid: str) -> _Generation:
        """A generation of which nothing has happened."""
        records: dict[str, Any] = {}
        for name, compiled in self.compiled.items():
            records[name] = compiled.make_record(self.shared[name], tid, self.usual(name))
        world = {v.name: _first(v.init) for v in self.flat.vars.values() if v.world and v.name.endswith("]")}
        queues = {c.name: deque[_Pending]() for c in self.system.channels.values() if c.per}
        return _Generation(tid, records, world, queues)

    def usual(self, process: str) -> dict[str, int]:
        """The givens of a generation that has no opening line."""
        defaults = self.compiled[process].record_defaults
        return {name: value or 0 for name, value in defaults.items()} | self.trace.headers[process].record_given

    def generation(self, tid: str) -> _Generation:
        found = self.generations.get(tid)
        if found is None:
            found = self.generations[tid] = self.live[tid] = self.new_generation(tid)
        return found

    # -- running --------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """Take every line, or say why the next cannot be taken."""
        reason = self.reject()
        if reason:
            return Verdict(INCONCLUSIVE, reason, 0)
        try:
            self.prepare()
            while True:
                moved = False
                for process in self.order:
                    while self.advance(process):
                        moved = True
                if not moved and all(self.head(name) is None for name in self.order):
                    break
                moved = moved or self.unstick()
                if not moved:
                    return self.stuck()
        except _Stop as stop:
            return self.verdict(VIOLATION, stop, stop.line)
        number = len(self.generations)
        return self.verdict(OK, _Stop(f"{self.step} lines of {number} generations are a run of the system"), None)

    def verdict(self, kind: str, stop: _Stop, line: Line | None, waiting: Iterable[str] = ()) -> Verdict:
        event = line.event if line is not None else TraceEvent()
        return Verdict(
            kind,
            stop.reason,
            self.step,
            event.process,
            event.tid,
            event.event,
            str(line) if line is not None else "",
            stop.false,
            stop.enabled,
            tuple(waiting),
            tuple(self.open_obligations()) if self.compiled else (),
            tuple(self.unjudged),
            tuple(self.inferred),
            self.work,
        )

    def head(self, process: str) -> Line | None:
        """The next line of a process's file."""
        stream, place = self.trace.streams[process], self.place[process]
        return stream[place] if place < len(stream) else None

    def advance(self, process: str, last_resort: bool = False) -> bool:
        """Take the next line of one process, if it can be taken now. Raises _Stop where it never can."""
        line = self.head(process)
        if line is None:
            return False
        self.work += 1
        try:
            waits = self.take(line.event, last_resort)
        except _Stop as stop:
            stop.line = line
            raise
        if waits is not None:
            return False
        self.place[process] += 1
        self.step += 1
        return True

    def unstick(self) -> bool:
        """No line can be taken as it stands: an event that changes nothing, a death, or what nobody wrote down."""
        heads = [(name, line) for name in self.order if (line := self.head(name)) is not None]
        heads.sort(key=lambda item: item[1].event.process != "")  # deaths that are written down go first
        for process, _ in heads:
            if self.advance(process, last_resort=True):
                return True
        for name, cause in self.unseen.items():
            self.work += 1
            if cause.free and name not in self.written and self.allows(cause, self.nobody) and not self.at_work(cause):
                self.inferred.append(name)
                self.happen(cause)
                return True
        return False

    def stuck(self) -> Verdict:
        """The verdict where lines are left and none can be taken."""
        found: list[tuple[int, Line, _Stop]] = []
        for process in self.order:
            line = self.head(process)
            if line is not None:
                stop = self.take(line.event, False)
                assert stop is not None
                # first who waits for a process that has ended, then whom the world stops, then who waits for others
                rank = 1 if not stop.source else 2 if self.head(stop.source) is not None else 0
                found.append((rank, line, stop))
        found.sort(key=lambda item: item[0])
        _, line, stop = found[0]
        waiting = []
        for _, other, why in found[1:]:
            waiting.append(f"{other}: {other.event.process or 'world'}.{other.event.event}: {why.reason}")
        generation = self.generations.get(line.event.tid, self.nobody)
        for channel in self.system.channels.values():
            for item in generation.queues[channel.name] if channel.per else self.common[channel.name]:
                waiting.append(f"'{item.message}', sent by '{channel.source}', was not taken by '{channel.target}'")
        return self.verdict(VIOLATION, stop, line, waiting)

    def take(self, event: TraceEvent, last_resort: bool) -> _Stop | None:
        """Take one line; or say, having changed nothing, why not yet. Raises _Stop where it never can be taken."""
        if not event.process:
            return self.take_world(event, last_resort)
        generation = self.generation(event.tid) if event.tid else self.nobody
        if not event.event:
            self.open(event, generation)
            return None
        if not self.alive[event.process].holds(generation):
            raise _Stop(f"'{event.process}' is dead", self.alive[event.process].objections(generation))
        waits = self.take_message(event, generation)
        if waits is not None:
            waits = self.take_action(event, generation, waits, last_resort)
        return waits

    def open(self, event: TraceEvent, generation: _Generation) -> None:
        if event.process in generation.begun:
            raise _Stop(f"generation '{event.tid}' is opened in '{event.process}', where it began before")
        generation.begun.add(event.process)
        try:
            made = self.compiled[event.process].make_record(self.shared[event.process], event.tid, event.given)
        except ValueError as error:
            raise _Stop(str(error)) from error
        generation.records[event.process] = made

    def take_message(self, event: TraceEvent, generation: _Generation) -> _Stop | None:
        """Take the event as a message, where it is the next on its channel."""
        why: _Stop | None = None
        acts = (event.process, event.to, event.event) in self.causes
        for channel in self.channels.get((event.process, event.to, event.event), ()):
            queue = generation.queues[channel.name] if channel.per else self.common[channel.name]
            if not queue:
                why = _Stop(f"'{channel.source}' has not sent '{event.event}' (channel {channel.name})")
                why.source = channel.source
                continue
            first = queue[0]
            if first.message != event.event:
                why = _Stop(f"'{first.message}' is the next message on {channel.name}, not '{event.event}'")
                if not acts:
                    raise why
                continue
            names = self.fields(event)
            sent = {name: first.fields.get(name) for name in names}
            if sent != event.fields:
                raise _Stop(f"'{event.event}' was sent with {_shown(sent)} and taken with {_shown(event.fields)}")
            queue.popleft()
            self.move(event, generation, None)
            return None
        return why or _Stop("")

    def fields(self, event: TraceEvent) -> tuple[str, ...]:
        compiled = self.compiled[event.process]
        plan = compiled.shared_class.plan if event.to else compiled.record_class.plan
        found = plan.events.get((event.to, event.event))
        return tuple(found.fields) if found is not None else tuple(event.fields)

    def take_action(self, event: TraceEvent, generation: _Generation, why: _Stop, last_resort: bool) -> _Stop | None:
        """Take the event as one that the world or the process's own shell caused."""
        causes = self.causes.get((event.process, event.to, event.event), [])
        if not causes:
            if why.reason:
                return why
            self.move(event, generation, None)  # nothing causes it: let the machines say so
            raise _Stop(f"nothing in '{self.system.name}' causes '{event.event}' in '{event.process}'")
        matched = [c for c in causes for choice in c.fields if self.matches(event, generation, choice)]
        scaled = [] if matched else self.scaled(event, generation, causes)
        for cause in matched:
            if self.allows(cause, generation):
                self.move(event, generation, partial(self.change, cause, generation))
                return None
        if scaled and all(self.allows(cause, generation) for cause, _ in scaled):
            self.move(event, generation, partial(self.change_scaled, generation, scaled))
            return None
        if not matched and not scaled:
            offers = "; ".join(_shown(choice) for c in causes for choice in c.fields)
            raise _Stop(f"the world offers '{event.event}' with {offers}, not with {_shown(event.fields)}")
        if last_resort and self.changes_nothing(event, generation):
            self.move(event, generation, None)
            return None
        refused = [cause for cause in matched or [c for c, _ in scaled] if not self.allows(cause, generation)]
        names = " or ".join(dict.fromkeys(f"'{c.name}'" for c in refused))
        false = [text for c in refused for text in self.objections(c, generation)]
        return _Stop(f"the world does not allow {names} here", false, self.enabled(event, generation))

    def matches(self, event: TraceEvent, generation: _Generation, choice: Mapping[str, str | int | bool]) -> bool:
        """Whether the event's fields are those of one choice of an action's."""
        if set(choice) != set(event.fields):
            return False
        for name, value in choice.items():
            came = generation.came.get((event.process, event.event, name), ())
            if value in ("fresh", "repeat"):
                if (event.fields[name] in came) != (value == "repeat"):
                    return False
            elif event.fields[name] != value or isinstance(event.fields[name], bool) != isinstance(value, bool):
                return False
        return True

    def scaled(self, event: TraceEvent, generation: _Generation, causes: list[_Cause]) -> list[tuple[_Cause, int]]:
        """The causes for 1 and for 0 of a counter that the system offers with no other values, and how often.

        The spec says of such a counter that more of it is more of the same: what the world does is linear in it.
        """
        for name, number in event.fields.items():
            if isinstance(number, bool) or number < 2:
                continue
            found: dict[int, _Cause] = {}
            for value in (0, 1):
                like = TraceEvent(process=event.process, event=event.event, fields={**event.fields, name: value})
                for cause in causes:
                    if any(self.matches(like, generation, choice) for choice in cause.fields):
                        found.setdefault(value, cause)
            if len(found) == 2:
                return [(found[1], number), (found[0], number - 1)]
        return []

    def change_scaled(self, generation: _Generation, scaled: list[tuple[_Cause, int]]) -> None:
        """The world after a counter of n: n times what 1 does, less n - 1 times what 0 does."""
        (one, number), (none, _) = scaled
        before = dict(generation.world)
        self.change(none, generation)
        zero = dict(generation.world)
        generation.world.clear()
        generation.world.update(before)
        self.change(one, generation)
        for name, value in generation.world.items():
            if not isinstance(value, bool):
                generation.world[name] = value + (number - 1) * (value - zero[name])

    def changes_nothing(self, event: TraceEvent, generation: _Generation) -> bool:
        """Whether no machine would move: every one ignores the event (nothing need have caused it), or one refuses."""
        owner = self.owner(event, generation)
        try:
            return not owner.can(*([event.to] if event.to else []), event.event, **event.fields)
        except IllegalEvent:
            return True

    def owner(self, event: TraceEvent, generation: _Generation) -> Any:
        return self.shared[event.process] if event.to else generation.records[event.process]

    def fire(self, event: TraceEvent, generation: _Generation) -> tuple[Any, ...]:
        """Give the event to the compiled classes. Raises _Stop, with what they say, where they refuse it."""
        owner = self.owner(event, generation)
        try:
            if event.to:
                outputs: tuple[Any, ...] = owner.fire(event.to, event.event, **event.fields)
            else:
                outputs = owner.fire(event.event, **event.fields)
        except IllegalEvent as error:
            where = ", ".join(f"{m} is {s}" for m, s in error.states.items())
            raise _Stop(f"'{event.event}' is refused: {where}", error.detail, owner.enabled()) from error
        return outputs

    def enabled(self, event: TraceEvent, generation: _Generation) -> list[str]:
        found: list[str] = self.owner(event, generation).enabled()
        return found

    def move(self, event: TraceEvent, generation: _Generation, change: Callable[[], None] | None) -> None:
        """Take the event in the machines, then in the world, then carry out what it asked for; judge the result."""
        generation.begun.add(event.process)
        if event.tid:
            self.live[event.tid] = generation
        before = self.shared[event.process].values() if event.to else {}
        outputs = self.fire(event, generation)
        rules = [self.effects[item.name] for item in outputs if not isinstance(item, Message)]
        names = [item.name for item in outputs if not isinstance(item, Message)]
        for name, rule in zip(names, rules, strict=True):
            if not rule.needs.holds(generation):
                raise _Stop(f"the effect '{name}' finds the world not ready for it", rule.needs.objections(generation))
        if change is not None:
            change()
        for rule in rules:
            self.update(rule.changes, [generation], generation)
        for item in outputs:
            if isinstance(item, Message):
                self.send(event, generation, item)
        for name, value in event.fields.items():
            if not isinstance(value, bool):
                generation.came.setdefault((event.process, event.event, name), set()).add(value)
        if not event.to:
            self.judge(generation)
        elif outputs or change is not None or before != self.shared[event.process].values():
            self.judge_all()

    def send(self, event: TraceEvent, generation: _Generation, item: Message) -> None:
        channel, ranks = self.ranks[event.process, item.to, item.name]
        queue = generation.queues[channel.name] if channel.per else self.common[channel.name]
        if queue and ranks[queue[-1].message] >= ranks[item.name]:
            raise _Stop(f"'{item.name}' is sent on {channel.name} after '{queue[-1].message}', against its order")
        queue.append(_Pending(item.name, item.fields))

    # -- the world ------------------------------------------------------------------------------------

    def allows(self, cause: _Cause, generation: _Generation) -> bool:
        """Whether the world allows an action; one that concerns every generation is asked of each."""
        if not cause.when.holds(generation):
            return False
        if not cause.when.own or generation is not self.nobody:
            return True
        self.work += len(self.generations)
        return all(cause.when.holds(each) for each in self.generations.values())

    def objections(self, cause: _Cause, generation: _Generation) -> list[str]:
        found = cause.when.objections(generation)
        if not found and generation is self.nobody:
            for each in self.generations.values():
                found = found or cause.when.objections(each)
        return found

    def take_world(self, event: TraceEvent, last_resort: bool) -> _Stop | None:
        cause = self.unseen.get(event.event)
        if cause is None:
            raise _Stop(f"the world of '{self.system.name}' has no '{event.event}'; known: {', '.join(self.unseen)}")
        busy = self.at_work(cause)
        if busy:
            return _Stop(f"'{busy}' goes on after '{event.event}'")
        if not self.allows(cause, self.nobody):
            return _Stop(f"the world does not allow '{event.event}' here", self.objections(cause, self.nobody))
        if not last_resort:
            return _Stop(f"'{event.event}' waits for what others still do")
        self.happen(cause)
        return None

    def at_work(self, cause: _Cause) -> str:
        """A process that an action ends and that has lines left."""
        return next((name for name in cause.ends if self.head(name) is not None), "")

    def happen(self, cause: _Cause) -> None:
        """Something of the world that no process takes as an event; it may concern every generation."""
        self.change(cause, self.nobody)
        self.judge_all()

    def change(self, cause: _Cause, generation: _Generation) -> None:
        every = [generation] if generation is not self.nobody else [generation, *self.generations.values()]
        self.update(cause.changes, every, generation)

    def update(self, changes: _Update, every: list[_Generation], one: _Generation) -> None:
        for each in every:
            changes.own(each)
        changes.whole(one)

    def judge(self, generation: _Generation) -> None:
        """Evaluate every property for one generation."""
        self.work += len(self.properties)
        for name, test in self.properties:
            if not test.holds(generation):
                raise _Stop(f"property '{name}' does not hold", test.objections(generation))

    def judge_all(self) -> None:
        """Evaluate every property for each generation that is not over; forget those that are."""
        over = []
        for tid, generation in self.live.items():
            self.judge(generation)
            if not any(self.unsettled(generation)):
                over.append(tid)
        for tid in over:
            del self.live[tid]
        self.judge(self.nobody)

    def unsettled(self, generation: _Generation) -> Iterable[str]:
        """The machines of a generation that have begun and not ended, as `machine is state (what is left)`."""
        for name, record in generation.records.items():
            for item in record.plan.instances:
                state = item.machine.states[record.state(item.name)]
                if not state.initial and not state.final:
                    held = [f"{v} is {getattr(record, f'{item.name}_{v}')}" for v in item.machine.vars]
                    held = [text for text in held if not text.endswith((" is 0", " is False"))]
                    yield f"{name}: {item.name} is {state.name}" + (f" ({', '.join(held)})" if held else "")

    def open_obligations(self) -> Iterable[str]:
        """Generations whose retirement is not over, in the processes that live."""
        retiring = {
            m.name for m in self.system.machines.values() if any(s.milestone == "retired" for s in m.states.values())
        }
        for tid, generation in self.live.items():
            for text in self.unsettled(generation):
                process, _, rest = text.partition(": ")
                if rest.split(" ", 1)[0] in retiring and self.alive[process].holds(self.nobody):
                    yield f"'{tid}' in {text}"


# -- expressions about one generation ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Test:
    """A condition on a generation and the world."""

    node: Node
    holds: Callable[[_Generation], bool]
    value: Callable[[_Generation, str], Any]
    own: bool  # whether it reads anything of the generation

    def objections(self, generation: _Generation) -> list[str]:
        """Each conjunct that is false, with the values that it read."""
        out = []
        for part in conjuncts(self.node):
            if not self._holds(part, generation):
                text = show(part) + shown_values(part, lambda ref: self.value(generation, ref.name))
                out.append(text.replace("[0]", f"[{generation.tid}]"))
        return out

    def _holds(self, node: Node, generation: _Generation) -> bool:
        return bool(evaluate(node, lambda ref: self.value(generation, ref.name)))


@dataclass(frozen=True, slots=True)
class _Update:
    """What changes: of a generation's own part of the world, and of the rest. Own goes first."""

    own: Callable[[_Generation], None]
    whole: Callable[[_Generation], None]


class _Writer:
    """Turns expressions over the flat variables into functions of a generation.

    The objects that the functions read are the attributes here: the caller fills them, and never replaces them.
    """

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.whole: dict[str, Any] = {}  # world variables that no generation or storage has by itself
        self.shared: dict[str, Any] = {}  # process -> its shared instances
        self.common: dict[str, deque[_Pending]] = {}  # channels that are not per generation
        self.names: dict[str, Any] = {
            "whole": self.whole,
            "shared": self.shared,
            "common": self.common,
            "_has": _has,
            "_field": _field,
        }
        self.sources: dict[str, str] = {}
        self.getters: dict[str, Callable[[_Generation], Any]] = {}
        system = flat.system
        for process in system.processes.values():
            for name in process.machines:
                for var in ("state", *system.machines[name].vars):
                    self.sources[f"{name}[0].{var}"] = f"g.records[{process.name!r}].{name}_{var}"
            for shared in process.shared.values():
                for var in ("state", *system.machines[shared.machine].vars):
                    self.sources[f"{shared.name}.{var}"] = f"shared[{process.name!r}].{shared.name}_{var}"
        for channel in system.channels.values():
            queue = f"g.queues[{channel.name!r}]" if channel.per else f"common[{channel.name!r}]"
            base = f"{channel.name}[0]" if channel.per else channel.name
            for message in channel.messages:
                self.sources[f"{base}.{message}"] = f"_has({queue}, {message!r})"
                prefix = f"{base}.{message}_"
                for flat_var in flat.vars:
                    if flat_var.startswith(prefix):
                        item = flat_var[len(prefix) :]
                        self.sources.setdefault(flat_var, f"_field({queue}, {message!r}, {item!r})")
        self.machines = set(self.sources)
        for flat_var, found in flat.vars.items():
            if found.world:
                self.sources[flat_var] = self.place(flat_var)

    def place(self, name: str) -> str:
        """Where a world variable is kept."""
        return f"g.world[{name!r}]" if name.endswith("]") else f"whole[{name!r}]"

    def read(self, ref: Ref) -> str:
        """How a flat variable is written in the source of a function."""
        return self.sources[ref.name]

    def function(self, source: str) -> Callable[[_Generation], Any]:
        space = dict(self.names)
        exec(compile(source, "<replay>", "exec"), space)
        found: Callable[[_Generation], Any] = space["f"]
        return found

    def value(self, generation: _Generation, name: str) -> Any:
        """The value of one flat variable."""
        if name not in self.getters:
            self.getters[name] = self.function(f"def f(g):\n    return {self.sources[name]}\n")
        return self.getters[name](generation)

    def test(self, node: Node) -> _Test:
        """A condition as a function."""
        body = to_python(node, self.read)
        own = any(self.sources[ref.name].startswith(("g.", "_has(g.", "_field(g.")) for ref in refs(node))
        return _Test(node, self.function(f"def f(g):\n    return {body}\n"), self.value, own)

    def update(self, sets: list[tuple[Node, list[tuple[str, Node]]]]) -> _Update:
        """Assignments as functions: every value of one group is read before any of the group is written."""
        own: list[str] = []
        whole: list[str] = []
        for test, pairs in sets:
            for node in (test, *(value for _, value in pairs)):
                for ref in refs(node):
                    if ref.name in self.machines:
                        raise NotImplementedError(f"a change of the world reads '{ref.name}' of a machine")
            for lines, kept in ((own, True), (whole, False)):
                mine = [(name, value) for name, value in pairs if name.endswith("]") == kept]
                if mine:
                    lines.append(f"    if {to_python(test, self.read)}:")
                    values = ", ".join(to_python(value, self.read) for _, value in mine)
                    lines.append(f"        {', '.join(self.place(name) for name, _ in mine)} = {values}")
        texts = ["def f(g):\n" + "\n".join([*lines, "    return\n"]) for lines in (own, whole)]
        return _Update(self.function(texts[0]), self.function(texts[1]))


def _has(queue: deque[_Pending], message: str) -> bool:
    return any(item.message == message for item in queue)


def _field(queue: deque[_Pending], message: str, name: str) -> int:
    return next((int(item.fields.get(name, 0)) for item in queue if item.message == message), 0)


def _first(init: Node) -> int | bool:
    assert isinstance(init, Const), f"{show(init)} is no first value"
    return init.value


def _shown(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in fields.items()) or "no fields"


def _each(node: Node, generation: str) -> bool:
    """Whether a conjunct asks the same of each generation, or nothing of all of them."""
    if isinstance(node, Quant) and node.kind == "all" and node.binders == (generation,):
        return not any(generation in q.binders for q in _quantifiers(node.body))
    return not any(generation in q.binders for q in _quantifiers(node))


def _quantifiers(node: Node) -> Iterable[Quant]:
    if isinstance(node, Quant):
        yield node
    for child in children(node):
        yield from _quantifiers(child)


def per_generation(node: Node, system: System, inside: tuple[str, ...] = ()) -> bool:
    """Whether a property holds of the system if it holds of each generation with storage of its own.

    So it is where it sums over nothing, and asks for *some* generation only of a given piece of storage: nobody
    but its own generation can be that one.
    """
    if isinstance(node, Quant):
        if node.kind == "sum":
            return False
        storage = [s for s in inside if s != system.generation]
        if node.kind == "any" and system.generation in node.binders and not storage:
            return False
        return per_generation(node.body, system, (*inside, *node.binders))
    return all(per_generation(child, system, inside) for child in children(node))
