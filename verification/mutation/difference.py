"""Where two spelled-out systems part: formulas over one state, each false wherever they take the same steps there.

`parting(before, after, dead)` pairs the steps of two flat systems by what happens (the action or message, its
instances, its fields) and says for each step that has no identical partner: it may fire, and no step of the other
system leads to the same state. Where all of these are false in every reachable state of `before`, the two have the
same reachable states and the same steps between them, so every answer about the one is an answer about the other.

A value that nothing will read is no part of that: `dead_values` finds, for each variable of a machine, the states in
which every path overwrites it before a guard, an update, a message, a sibling, the world or a property reads it.
Lemmas are not counted as readers, since they are there for the proof alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlt_fsm.expr import BOOL, Const, Enum, Node, Op, Ref, conj, conjuncts, disj, fold, neg, refs
from rlt_fsm.ground import Flat, Step
from rlt_fsm.model import Assignment, Ignore, Machine, System, Transition

Dead = Mapping[tuple[str, str], frozenset[str]]  # (machine, variable) -> states in which nothing will read it


@dataclass(frozen=True, slots=True)
class Parting:
    """`where` one system takes `label` in a way in which the other does not."""

    label: str
    where: Node


def parting(before: Flat, after: Flat, dead: Dead) -> list[Parting]:
    """Where the steps of the two part; empty where they are the same, or differ in dead values only."""
    same = _Same(before, dead)
    old, new = _by_occasion(before.steps), _by_occasion(after.steps)
    out = []
    for occasion in dict.fromkeys((*old, *new)):
        mine, theirs = old.get(occasion, []), new.get(occasion, [])
        alone, other = _without_twins(mine, theirs), _without_twins(theirs, mine)
        for step in alone:
            out.append(Parting(step.label, conj(step.guard, neg(same.some(step, theirs)))))
        for step in other:
            wrong = disj(*(neg(condition) for _, condition in step.asserts))
            out.append(Parting(step.label, conj(step.guard, disj(wrong, neg(same.some(step, mine))))))
    return [p for p in out if not (isinstance(p.where, Const) and not p.where.value)]


def _by_occasion(steps: Iterable[Step]) -> dict[tuple[object, ...], list[Step]]:
    """Steps by what happens: only such can stand for one another."""
    out: dict[tuple[object, ...], list[Step]] = defaultdict(list)
    for step in steps:
        out[step.label, step.fair, *sorted((k, str(v)) for k, v in step.fields.items())].append(step)
    return out


def _without_twins(steps: list[Step], others: list[Step]) -> list[Step]:
    """The steps that have no identical one among `others`."""
    return [s for s in steps if not any(_twins(s, o) for o in others)]


def _twins(one: Step, two: Step) -> bool:
    return one.guard == two.guard and one.updates == two.updates and one.asserts == two.asserts


class _Same:
    """Whether two steps lead from one state to one state, as a formula over the state before."""

    def __init__(self, flat: Flat, dead: Dead) -> None:
        self.flat = flat
        self.dead = dead
        self.machine_of = dict(_instances(flat))

    def some(self, step: Step, others: list[Step]) -> Node:
        """Some step of `others` may fire and leads where `step` does."""
        return disj(*(conj(o.guard, *self.leads(step.updates, o.updates)) for o in others))

    def leads(self, one: Mapping[str, Node], two: Mapping[str, Node]) -> Iterator[Node]:
        """For each variable: both give it the same value, or nothing will read it."""
        for name in dict.fromkeys((*one, *two)):
            keeps = Ref(name, (), "", self.flat.vars[name].type)
            left, right = one.get(name, keeps), two.get(name, keeps)
            if left != right:
                yield disj(_equal(left, right), self.unread(name, one))

    def unread(self, name: str, updates: Mapping[str, Node]) -> Node:
        """The state that the step leads to is one in which nothing will read the variable."""
        instance, _, variable = name.rpartition(".")
        machine = self.machine_of.get(instance)
        if machine is None or variable == "state":
            return Const(False, BOOL)
        state = f"{instance}.state"
        kind = self.flat.vars[state].type
        assert isinstance(kind, Enum)
        there = updates.get(state, Ref(state, (), "", kind))
        states = self.dead.get((machine, variable), frozenset())
        return disj(*(_equal(there, Const(kind.names.index(s), kind)) for s in sorted(states)))


def _equal(left: Node, right: Node) -> Node:
    """Equality; of truths, with constants folded away."""
    if left.type == BOOL:
        if isinstance(right, Const):
            left, right = right, left
        if isinstance(left, Const):
            return right if left.value else neg(right)
    return fold(Op("==", (left, right), BOOL))


def _instances(flat: Flat) -> Iterator[tuple[str, str]]:
    """(flat name of an instance, its machine)."""
    for process in flat.system.processes.values():
        for machine in process.machines:
            for number in range(flat.sizes[flat.system.generation]):
                yield f"{machine}[{number}]", machine
        for shared in process.shared.values():
            yield shared.name, shared.machine


# -- values that nothing will read ------------------------------------------------------------------------


def dead_values(*systems: System) -> Dead:
    """For each variable of each machine, the states in which no one of `systems` will read it."""
    parts = [_dead_values(system) for system in systems]
    return {key: frozenset.intersection(*(part[key] for part in parts)) for key in parts[0]}


def _dead_values(system: System) -> Dead:
    outside = _read_from_outside(system)
    out: dict[tuple[str, str], frozenset[str]] = {}
    for machine in system.machines.values():
        for variable in machine.vars:
            live = set(machine.states) if (machine.name, variable) in outside else _live(machine, variable)
            out[machine.name, variable] = frozenset(machine.states.keys() - live)
    return out


def _live(machine: Machine, variable: str) -> set[str]:
    """States from which some path of the machine's own rows reads the variable before it is overwritten."""
    live: set[str] = set()
    while True:
        before = len(live)
        for row in _rows(machine):
            for state in row.sources:
                read = any(_reads(node, variable) for node in row.when.values())
                if isinstance(row, Transition):
                    read = read or any(_reads(v, variable) for k, v in row.set.items() if k != variable)
                    read = read or any(_reads(v, variable) for send in row.send for v in send.fields.values())
                    kept = variable not in row.set or _reads(row.set[variable], variable)
                    read = read or (kept and (row.target or state) in live)
                if read:
                    live.add(state)
        if len(live) == before:
            return live


def _rows(machine: Machine) -> tuple[Transition | Ignore, ...]:
    return (*machine.transitions, *machine.ignores)


def _reads(node: Node, variable: str) -> bool:
    return any(ref.name == variable and not ref.field for ref in refs(node))


def _read_from_outside(system: System) -> set[tuple[str, str]]:
    """(machine, variable) that a sibling, the world, an action or a property reads."""
    machine_of = {name: name for name in system.machines}
    for process in system.processes.values():
        machine_of |= {s.name: s.machine for s in process.shared.values()}
    out: set[tuple[str, str]] = set()
    for machine in system.machines.values():
        for node in _row_nodes(machine):
            out |= {(machine.reads[r.name], r.field) for r in refs(node) if r.field and r.name in machine.reads}
    for node in _system_nodes(system):
        out |= {(machine_of[r.name], r.field) for r in refs(node) if r.field and r.name in machine_of}
    return out


def _row_nodes(machine: Machine) -> Iterator[Node]:
    for row in _rows(machine):
        yield from row.when.values()
        if isinstance(row, Transition):
            yield from row.set.values()
            yield from (value for send in row.send for value in send.fields.values())


def _system_nodes(system: System) -> Iterator[Node]:
    for item in system.properties:
        if item.kind != "lemma":
            yield item.formula
            if item.target is not None:
                yield item.target
    for process in system.processes.values():
        if process.alive is not None:
            yield process.alive
    for effect in system.effects.values():
        yield effect.needs
        yield from _assigned(effect.set)
    for action in system.actions.values():
        yield from conjuncts(action.when)
        yield from _assigned(action.set)
        yield from (v for values in action.fields.values() for v in values if not isinstance(v, str))


def _assigned(sets: Iterable[Assignment]) -> Iterator[Node]:
    for item in sets:
        yield item.when
        for _, value in item.set:
            yield value
