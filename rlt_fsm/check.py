"""A model to findings: what reads well and still cannot be meant.

The loader refuses what has no meaning; this module looks for what has one that nobody can want: a state
that nothing reaches, two rows that both hold, a message without a channel, a fact that nothing sets.
Whether the machines do the right thing together is the business of `verification/`.

An error changes what the spec does, or may; a warning is a declaration without use.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlt_fsm.errors import Finding, Span, suggest
from rlt_fsm.expr import (
    BOOL,
    FALSE,
    INT,
    TRUE,
    Add,
    Const,
    Enum,
    Member,
    Node,
    Ref,
    children,
    conj,
    disj,
    neg,
    refs,
    show,
    substitute,
)
from rlt_fsm.model import Action, Effect, Ignore, Machine, Process, Spec, System, Transition, Variable

Row = Transition | Ignore
Value = Node | tuple[str | Node, ...]  # what a send gives a field, or what the world may choose for it


def check(spec: Spec) -> list[Finding]:
    """Every finding, in the order of files and lines. Empty for a spec that can be meant."""
    return _Checker(spec).run()


def ambiguous(spec: Spec, machine: Machine) -> list[Finding]:
    """What the reader says of rows of `machine`, one of the spec's or a changed one, that can hold together."""
    checker = _Checker(spec)
    checker.rows(machine)
    return [found for found in checker.found if found.kind in ("ambiguous-rows", "shadowed-ignore")]


def overlap(left: Iterable[Node], right: Iterable[Node]) -> dict[str, str] | None:
    """Values under which all of `left` and all of `right` hold, or None where there are none.

    Bools and enums are tried fully, numbers from 0 to 3 and around every number that the guards name. The
    search goes variable by variable and drops a branch as soon as a guard is false.
    """
    guard = _plain(conj(*left, *right))
    numbers = {int(n.value) for n in _walk(guard) if isinstance(n, Const) and n.type == INT}
    domain = sorted({0, 1, 2, 3} | {n + d for n in numbers for d in (-1, 0, 1) if n + d >= 0})
    return _solve(guard, domain)


def _plain(node: Node) -> Node:
    """`seq in seen` as one more yes-or-no variable."""
    return substitute(node, lambda n: Ref(f"{n.item} in {n.of}", (), "", BOOL) if isinstance(n, Member) else None)


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from _walk(child)


def _solve(guard: Node, numbers: list[int]) -> dict[str, str] | None:
    if isinstance(guard, Const):
        return {} if guard.value else None
    first = next(refs(guard))
    name = str(first)
    values: Iterable[Const]
    if first.type == BOOL:
        values = (FALSE, TRUE)
    elif isinstance(first.type, Enum):
        values = (Const(place, first.type) for place in range(len(first.type.names)))
    else:
        values = (Const(number, INT) for number in numbers)
    for value in values:
        found = _solve(_put(guard, name, value), numbers)
        if found is not None:
            return {name: show(value), **found}
    return None


def _put(guard: Node, name: str, value: Const) -> Node:
    return substitute(guard, lambda n: value if isinstance(n, Ref) and str(n) == name else None)


@dataclass(slots=True)
class _Reads:
    """What one part of a spec reads: (machine, variable) of a table, or names of the system document."""

    own: set[str]
    siblings: set[tuple[str, str]]  # (alias, member)


def _reads(nodes: Iterable[Node]) -> _Reads:
    out = _Reads(set(), set())
    for node in nodes:
        for part in _walk(node):
            if isinstance(part, Ref) and part.field:
                out.siblings.add((part.name, part.field))
            elif isinstance(part, Ref):
                out.own.add(part.name)
            elif isinstance(part, Member | Add):
                out.own.add(part.item)
    return out


class _Checker:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.found: list[Finding] = []

    def run(self) -> list[Finding]:
        for machine in self.spec.machines.values():
            self.machine(machine)
        if self.spec.system is not None:
            _SystemChecker(self, self.spec.system).run()
        files = list(self.spec.sources)
        self.found.sort(key=lambda f: (files.index(f.span.file), f.span.line, f.span.column))
        return self.found

    def error(self, kind: str, message: str, span: Span, hint: str = "") -> None:
        self.found.append(Finding(kind, message, span, hint))

    def warning(self, kind: str, message: str, span: Span, hint: str = "") -> None:
        self.found.append(Finding(kind, message, span, hint, "warning"))

    def word(self, span: Span, word: str) -> Span:
        """Where `word` stands, from `span` on, within some lines; `span` itself where it does not."""
        rows = self.spec.sources.get(span.file, "").splitlines()
        for number in range(span.line - 1, min(span.line + 40, len(rows))):
            start = span.column - 1 if number == span.line - 1 else 0
            match = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)").search(rows[number], start)
            if match is not None:
                return Span(span.file, number + 1, match.start() + 1, len(word.rstrip(":")))
        return span

    def alias(self, machine: Machine, name: str) -> Span:
        """Where `name` stands under 'reads'."""
        return self.word(self.word(machine.span, "reads:"), f"{name}:")

    # -- one machine --------------------------------------------------------------------------------

    def machine(self, machine: Machine) -> None:
        self.graph(machine)
        self.rows(machine)
        self.declarations(machine)

    def graph(self, machine: Machine) -> None:
        """States that nothing reaches, and states that nothing leaves."""
        moves = {
            state: {t.target for t in machine.transitions if state in t.sources and t.target not in (None, state)}
            for state in machine.states
        }
        reached = _closure({machine.initial}, lambda s: {t for t in moves[s] if t is not None})
        for state in machine.states.values():
            if state.name not in reached:
                self.error(
                    "unreachable-state",
                    f"no row leads from '{machine.initial}' to state '{state.name}' of machine '{machine.name}'",
                    state.span,
                    "add a row with `to: " + state.name + "`, or drop the state",
                )
        finals = {s.name for s in machine.states.values() if s.final}
        ends = set(finals)
        while True:
            more = {s for s, targets in moves.items() if s not in ends and targets & ends}
            if not more:
                break
            ends |= more
        for state in machine.states.values():
            rows = [t for t in machine.transitions if state.name in t.sources]
            if state.final or (rows and not finals) or state.name in ends:
                continue
            self.error(
                "dead-end",
                f"state '{state.name}' of machine '{machine.name}' is not final and "
                + ("no way leads from it to a final state" if rows else "no row leaves it"),
                state.span,
                "mark it `final: true`, or add a row that leaves it",
            )

    def rows(self, machine: Machine) -> None:
        """Rows of one event that can hold together. The first would win; nobody would see that it does."""
        table: list[Row] = [*machine.transitions, *machine.ignores]
        for ignore in machine.ignores:
            covered = [self.covered(machine, ignore, state) for state in ignore.sources]
            for state, by in zip(ignore.sources, covered, strict=True):
                if by is not None:
                    self.error(
                        "shadowed-ignore",
                        f"'{ignore.event}' is not ignored in state '{state}': a transition always holds there",
                        ignore.span,
                        f"the transition stands at line {by.span.line}; drop the state from one of the two rows",
                    )
        for one, two in itertools.combinations(table, 2):
            shared = [s for s in one.sources if s in two.sources]
            if one.event != two.event or not shared:
                continue
            for state in shared:
                if isinstance(two, Ignore) and self.covered(machine, two, state) is not None:
                    continue
                witness = overlap(self.in_state(machine, one, state), self.in_state(machine, two, state))
                if witness is None:
                    continue
                case = ", ".join(f"{name} = {value}" for name, value in witness.items())
                self.error(
                    "ambiguous-rows",
                    f"two rows for '{one.event}' can hold in state '{state}' of machine '{machine.name}'"
                    + (f", when {case}" if case else ""),
                    two.span,
                    f"the other stands at line {one.span.line}; give them guards that exclude each other",
                )
                break

    def in_state(self, machine: Machine, row: Row, state: str) -> list[Node]:
        """The guards of a row with the machine's own state put in."""
        kind = machine.state_type
        here = Const(kind.names.index(state), kind)
        return [
            substitute(g, lambda n: here if isinstance(n, Ref) and n.name == "state" and not n.field else None)
            for g in row.when.values()
        ]

    def covered(self, machine: Machine, ignore: Ignore, state: str) -> Transition | None:
        """A transition that always holds in `state` where the ignore row does, alone or with others."""
        rows = machine.rows(ignore.event, state)
        others = disj(*(conj(*self.in_state(machine, row, state)) for row in rows))
        if rows and overlap(self.in_state(machine, ignore, state), [neg(others)]) is None:
            return rows[0]
        return None

    def declarations(self, machine: Machine) -> None:
        """What is declared and not used, as far as one machine can tell."""
        table: list[Row] = [*machine.transitions, *machine.ignores]
        nodes = [node for row in table for node in _nodes(row)]
        reads = _reads(nodes)
        for alias in machine.reads:
            if not any(name == alias for name, _ in reads.siblings):
                self.warning(
                    "unused-read",
                    f"machine '{machine.name}' reads '{alias}' in no row",
                    self.alias(machine, alias),
                    "drop it from 'reads'",
                )
        for event, fields in machine.takes.items():
            rows = [row for row in table if row.event == event]
            used = _reads(node for row in rows for node in _nodes(row)).own
            for field in fields.values():
                if not rows:
                    self.error(
                        "unused-takes",
                        f"machine '{machine.name}' has no row for '{event}', which would bring '{field.name}'",
                        field.span,
                        suggest(event, machine.events()),
                    )
                elif field.name not in used:
                    self.warning(
                        "unused-takes",
                        f"no row for '{event}' of machine '{machine.name}' reads '{field.name}'",
                        field.span,
                        "drop it from 'takes'",
                    )
        changed = {name for t in machine.transitions for name in t.set}
        for var in machine.vars.values():
            if var.name not in changed:
                self.error(
                    "unchanged-variable",
                    f"no row of machine '{machine.name}' sets '{var.name}'",
                    var.span,
                    "set it, make it a 'given', or drop it",
                )


def _closure(start: set[str], after: Callable[[str], set[str]]) -> set[str]:
    reached, queue = set(start), list(start)
    while queue:
        for name in after(queue.pop()):
            if name not in reached:
                reached.add(name)
                queue.append(name)
    return reached


def _nodes(row: Row) -> Iterator[Node]:
    """Every expression of a row."""
    yield from row.when.values()
    if isinstance(row, Transition):
        yield from row.set.values()
        for send in row.send:
            yield from send.fields.values()


# -- a system ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Event:
    """An event that comes to a process: by a channel, or by an action."""

    process: str
    event: str
    to: str
    origin: str
    span: Span


class _SystemChecker:
    def __init__(self, base: _Checker, system: System) -> None:
        self.base = base
        self.system = system
        self.homes: dict[str, list[Process]] = {name: [] for name in system.machines}
        for process in system.processes.values():
            for name in {*process.machines, *(s.machine for s in process.shared.values())}:
                self.homes[name].append(process)

    def run(self) -> None:
        events = list(self.events())
        for event in events:
            self.handled(event)
        for machine in self.system.machines.values():
            self.placed(machine)
            if self.homes[machine.name]:
                self.raised(machine, events)
                self.sends(machine)
                self.siblings(machine)
        self.sent()
        for action in self.system.actions.values():
            self.action_fields(action)
        self.effects()
        self.used()

    def events(self) -> Iterator[_Event]:
        for channel in self.system.channels.values():
            for message in channel.messages:
                yield _Event(
                    channel.target,
                    message,
                    channel.to,
                    f"message '{message}' of channel '{channel.name}'",
                    self.base.word(channel.span, message),
                )
        for action in self.system.actions.values():
            if action.event:
                place = self.base.word(action.span, f"{action.process}.{action.event}")
                yield _Event(action.process, action.event, action.to, f"action '{action.name}'", place)

    def members(self, process: str, event: str, to: str) -> list[Machine]:
        """The machines that move when `process` gets `event`."""
        home = self.system.processes[process]
        if to:
            machine = self.system.machines[home.shared[to].machine]
            return [machine] if event in machine.events() else []
        own, joint = self.system.alphabet(process, event)
        return [self.system.machines[name] for name in own] + [
            self.system.machines[home.shared[name].machine] for name in joint
        ]

    def handled(self, event: _Event) -> None:
        if self.members(event.process, event.event, event.to):
            return
        home = self.system.processes[event.process]
        names = (
            [home.shared[event.to].machine]
            if event.to
            else [*home.machines, *(s.machine for s in home.shared.values())]
        )
        where = f"instance '{event.to}'" if event.to else f"process '{event.process}'"
        known = sorted({e for name in names for e in self.system.machines[name].events()})
        self.base.error(
            "unhandled-event",
            f"{event.origin} brings '{event.event}' to {where}, where no machine handles or ignores it",
            event.span,
            suggest(event.event, known),
        )

    def placed(self, machine: Machine) -> None:
        if not self.homes[machine.name] and machine.name not in self.system.standalone:
            self.base.error(
                "unused-machine",
                f"no process runs machine '{machine.name}'",
                machine.span,
                "name it under a process, or under 'standalone' if a variable of another machine counts it",
            )

    def raised(self, machine: Machine, events: Iterable[_Event]) -> None:
        """Rows wait for events that something brings to a process of theirs."""
        brought: set[str] = set()
        for event in events:
            if machine.name in {m.name for m in self.members(event.process, event.event, event.to)}:
                brought.add(event.event)
        rows: tuple[Row, ...] = (*machine.transitions, *machine.ignores)
        for name in machine.events():
            if name not in brought:
                row = next(row for row in rows if row.event == name)
                self.base.error(
                    "unraised-event",
                    f"machine '{machine.name}' waits for '{name}', which no message and no action brings",
                    self.base.word(row.span, name),
                    suggest(name, sorted({e.event for e in events if e.process in self.names(machine)})),
                )

    def names(self, machine: Machine) -> set[str]:
        return {process.name for process in self.homes[machine.name]}

    def sends(self, machine: Machine) -> None:
        for row in machine.transitions:
            for send in row.send:
                place = self.base.word(send.span, send.message)
                if send.to not in self.system.processes:
                    self.base.error(
                        "unknown-process",
                        f"'{send.to}' is not a process",
                        self.base.word(row.span, send.to),
                        suggest(send.to, self.system.processes),
                    )
                    continue
                for home in self.homes[machine.name]:
                    channel = self.system.channel(home.name, send.to, send.message)
                    if channel is not None:
                        fields = self.taken(self.members(send.to, send.message, channel.to), send.message)
                        self.fields(f"message '{send.message}'", send.fields, fields, place)
                        continue
                    carried = [
                        message
                        for c in self.system.channels.values()
                        if (c.source, c.target) == (home.name, send.to)
                        for message in c.messages
                    ]
                    self.base.error(
                        "no-channel",
                        f"no channel carries '{send.message}' from '{home.name}' to '{send.to}'",
                        place,
                        suggest(send.message, carried),
                    )

    def taken(self, members: Iterable[Machine], event: str) -> dict[str, Variable]:
        """The fields that the machines of `members` take with `event`."""
        return {name: var for machine in members for name, var in machine.takes.get(event, {}).items()}

    def fields(self, what: str, given: Mapping[str, Value], need: Mapping[str, Variable], span: Span) -> None:
        """Hold the fields that something brings against those that its receivers take."""
        for name in need:
            if name not in given:
                self.base.error(
                    "missing-field",
                    f"{what} lacks the field '{name}', which its receiver takes",
                    span,
                    f"give it: {{{name}: …}}",
                )
        for name, value in given.items():
            if name not in need:
                self.base.error(
                    "extra-field",
                    f"{what} has a field '{name}', which its receiver does not take",
                    self.base.word(span, name),
                    suggest(name, need),
                )
                continue
            for choice in value if isinstance(value, tuple) else (value,):
                self.field_type(what, need[name], choice, span)

    def field_type(self, what: str, field: Variable, value: str | Node, span: Span) -> None:
        index = field.kind == "index"
        fits = index if isinstance(value, str) else not index and value.type == field.type
        if fits:
            return
        shown = value if isinstance(value, str) else str(value.type)
        need = "fresh or repeat" if index else str(field.type)
        self.base.error(
            "type-mismatch",
            f"field '{field.name}' of {what} must be {need}, not {shown}",
            self.base.word(span, field.name),
        )

    def action_fields(self, action: Action) -> None:
        if action.event:
            need = self.taken(self.members(action.process, action.event, action.to), action.event)
            self.fields(f"action '{action.name}'", action.fields, need, action.span)

    def siblings(self, machine: Machine) -> None:
        """A machine reads only what lives in its process."""
        for alias, target in machine.reads.items():
            for home in self.homes[machine.name]:
                shared = home.shared.get(alias)
                if shared is not None and shared.machine == target:
                    continue
                if target in home.machines and machine.per:
                    continue
                if target in home.machines and self.joint(machine, home):
                    continue
                self.base.error(
                    "foreign-read",
                    f"machine '{machine.name}' reads '{alias}', which process '{home.name}' does not run",
                    self.base.alias(machine, alias),
                    f"for a shared machine the name must be that of the instance; known: "
                    f"{', '.join([*home.machines, *home.shared])}",
                )

    def joint(self, machine: Machine, home: Process) -> bool:
        """True where a shared machine reads a record's machine only on events that they take together."""
        own = {event for name in home.machines for event in self.system.machines[name].events()}
        rows: tuple[Row, ...] = (*machine.transitions, *machine.ignores)
        aliases = {alias for alias, target in machine.reads.items() if target in home.machines}
        return all(row.event in own for row in rows if any(a in aliases for a, _ in _reads(_nodes(row)).siblings))

    def sent(self) -> None:
        """Every message of a channel is said by someone."""
        for channel in self.system.channels.values():
            home = self.system.processes[channel.source]
            machines = [*home.machines, *(s.machine for s in home.shared.values())]
            said = {
                send.message
                for name in machines
                for row in self.system.machines[name].transitions
                for send in row.send
                if send.to == channel.target or send.to not in self.system.processes  # misspelled: said elsewhere
            }
            for message in channel.messages:
                if message not in said:
                    self.base.error(
                        "unsent-message",
                        f"no row in process '{channel.source}' sends '{message}' to '{channel.target}'",
                        self.base.word(channel.span, message),
                        "send it, or drop it from the channel",
                    )

    def effects(self) -> None:
        used: set[str] = set()
        for machine in self.system.machines.values():
            for row in machine.transitions:
                for name in row.do:
                    used.add(name)
                    if name not in self.system.effects and self.homes[machine.name]:
                        self.base.error(
                            "unknown-effect",
                            f"'{name}' is not an effect of the system",
                            self.base.word(row.span, name),
                            suggest(name, self.system.effects),
                        )
        for effect in self.system.effects.values():
            if effect.name not in used:
                self.base.warning("unused-effect", f"no row does '{effect.name}'", effect.span, "do it, or drop it")

    # -- who reads what -----------------------------------------------------------------------------

    def used(self) -> None:
        read = self.system_reads()
        for machine in self.system.machines.values():
            if self.homes[machine.name]:
                self.machine_reads(machine, read)
        assigned: set[str] = set()
        for _, target, _ in self.assignments():
            assigned.add(target)
        for var in self.system.world.values():
            if var.name not in read.own:
                self.base.warning(
                    "unread-world",
                    f"nothing reads the world variable '{var.name}' but its own updates",
                    var.span,
                    "a fact that no property, action or effect asks about can be dropped",
                )
            if var.name not in assigned:
                self.base.error(
                    "unset-world",
                    f"no action and no effect sets the world variable '{var.name}'",
                    var.span,
                    "say what makes it true, or drop it",
                )
        budgets = {action.budget for action in self.system.actions.values()}
        inits = _reads(var.init for var in self.system.world.values()).own
        givens = [node for p in self.system.processes.values() for node in p.given.values()]
        givens += [n for p in self.system.processes.values() for s in p.shared.values() for n in s.given.values()]
        for name in self.system.consts:
            if name not in budgets | inits | _reads(givens).own | read.own:
                span = self.base.word(self.system.span, "consts")
                self.base.warning(
                    "unused-const", f"nothing reads the constant '{name}'", self.base.word(span, name), "drop it"
                )

    def assignments(self) -> Iterator[tuple[Node, str, Node]]:
        """(condition, world variable, new value) of every action and effect."""
        items: tuple[Action | Effect, ...] = (*self.system.actions.values(), *self.system.effects.values())
        for item in items:
            for assignment in item.set:
                for target, value in assignment.set:
                    if isinstance(target, Ref):
                        yield assignment.when, target.name, value

    def system_reads(self) -> _Reads:
        """What properties, actions, effects and liveness conditions read; an own update does not count."""
        nodes: list[Node] = []
        for item in self.system.properties:
            nodes += [item.formula, *([item.target] if item.target is not None else [])]
        for action in self.system.actions.values():
            nodes.append(action.when)
            nodes += [v for values in action.fields.values() for v in values if not isinstance(v, str)]
        nodes += [effect.needs for effect in self.system.effects.values()]
        nodes += [p.alive for p in self.system.processes.values() if p.alive is not None]
        out = _reads(nodes)
        for when, target, value in self.assignments():
            more = _reads([when, value])
            out.own |= more.own - {target} | _reads([when]).own
            out.siblings |= more.siblings
        return out

    def machine_reads(self, machine: Machine, system: _Reads) -> None:
        """Variables and givens of one machine that nothing reads: no row, no sibling, no property."""
        rows: tuple[Row, ...] = (*machine.transitions, *machine.ignores)
        own: set[str] = set()
        for row in rows:
            own |= _reads(row.when.values()).own
            if isinstance(row, Transition):
                for send in row.send:
                    own |= _reads(send.fields.values()).own
                for target, value in row.set.items():
                    own |= _reads([value]).own - {target}
                    own |= {str(n.of) for n in _walk(value) if isinstance(n, Member)}
            own |= {str(n.of) for node in row.when.values() for n in _walk(node) if isinstance(n, Member)}
        outside: set[str] = set()
        for other in self.system.machines.values():
            aliases = {alias for alias, target in other.reads.items() if target == machine.name}
            table: tuple[Row, ...] = (*other.transitions, *other.ignores)
            pairs = _reads(node for row in table for node in _nodes(row)).siblings
            outside |= {field for alias, field in pairs if alias in aliases}
        instances = {machine.name} | {
            s.name for p in self.homes[machine.name] for s in p.shared.values() if s.machine == machine.name
        }
        outside |= {field for name, field in system.siblings if name in instances}
        inits = _reads(var.init for var in machine.vars.values()).own
        for var in machine.vars.values():
            if var.name not in own | outside:
                self.base.warning(
                    "unread-variable",
                    f"nothing reads '{var.name}' of machine '{machine.name}' but its own updates",
                    var.span,
                    "drop it, or say what it is for in a guard or a property",
                )
        for given in machine.given.values():
            if given.name not in own | outside | inits:
                self.base.warning(
                    "unused-given", f"nothing reads '{given.name}' of machine '{machine.name}'", given.span, "drop it"
                )
