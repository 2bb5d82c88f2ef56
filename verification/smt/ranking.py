"""Why runs end: a lexicographic measure, found among the variables, for any number of chunks and instances.

Candidates are the variables themselves: a counter, a truth as 1 or 0 (or turned round), and the state of a
machine as the number of states that may still lie before it. A component is good if no step that is still
to be explained can raise it, for the instance that acts or for any other; it settles the steps that always
lower it. What is settled needs no further explanation, which is what makes the measure lexicographic. Summed
over the instances, component by component, the tuple falls at every settled step, and it is bounded below.

A step that nothing settles is left open. One with a budget happens finitely often by declaration. Another may be
ended by fairness: where it is enabled some fair action of the same instance is enabled as well, stays enabled
whatever else still happens, and is itself settled above everything that the open step can raise. Then a run
that took the open step for ever would leave out that action for ever, and would not be fair.

So every fair run in which the steps with a budget happen finitely often is finite. A step that can change
nothing is no step here. The invariant is assumed: this is worth what its induction is worth
(verification/smt/parametric.py). What the last state of a run looks like is not said here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rlt_fsm.expr import BOOL, FALSE, INT, Const, Enum, Node, Op, conj, disj, fold, ite, neg, substitute
from rlt_fsm.ground import Step
from rlt_fsm.model import Machine
from verification.result import Result
from verification.smt.parametric import SCOPE, Parametric, compare
from verification.smt.reading import UNSAT
from verification.smt.window import NAMED

NAME = "runs_end"

Numbered = tuple[int, Step]  # a step and its place


@dataclass(frozen=True, slots=True)
class Measure:
    """One candidate, for every instance alike: a natural number of each."""

    name: str
    values: tuple[tuple[str, Node], ...]  # (flat variable, its number)


@dataclass(frozen=True, slots=True)
class Ranking:
    """What ends, and by what.

    components: the measure, most significant first, each with the actions that it settles.
    fair: for each action that fairness ends, the fair action that it makes possible.
    finite: for each action that happens finitely often, who says so.
    open: for each action that nothing ends, why. Every infinite fair run takes one of these for ever.
    """

    components: tuple[tuple[str, tuple[str, ...]], ...]
    fair: Mapping[str, str]
    finite: Mapping[str, str]
    open: Mapping[str, str]


def rank(proof: Parametric, finite: Mapping[str, str] | None = None) -> Ranking:
    """The measure of the runs of `proof`'s system.

    finite: actions that are taken to happen finitely often, with the reason. One with a budget that nothing
    settles is so as well.
    """
    return _Search(proof, dict(finite or {})).run()


def runs_end(proof: Parametric, finite: Mapping[str, str] | None = None) -> Result:
    """Proved if every fair run is finite that takes each action of `finite`, or with a budget, finitely often."""
    found = rank(proof, finite)
    figures: dict[str, float | int | str] = {"components": len(found.components), "open": len(found.open)}
    if found.open:
        why = "no measure settles " + "; ".join(f"{name} ({reason})" for name, reason in found.open.items())
        return Result(NAME, "ranking", "ranking", SCOPE, "unknown", why, figures=figures)
    given = ["given the invariant"]
    given += [f"that '{fair}' is fair, so that '{name}' ends" for name, fair in found.fair.items()]
    given += [f"that '{name}' happens finitely often ({why})" for name, why in found.finite.items()]
    return Result(NAME, "ranking", "ranking", SCOPE, "proved", ", and ".join(given), figures=figures)


def measures(proof: Parametric) -> Iterator[Measure]:
    """Every candidate."""
    window, flat = proof.window, proof.flat
    families: dict[str, list[str]] = {}
    for name in flat.vars:
        if window.base(name) not in window.pointers and all(v in NAMED for v in window.index(name).values()):
            head, _, tail = name.partition("[")
            families.setdefault(head + "[]" + tail.partition("]")[2] if tail else name, []).append(name)
    machines = {m: m for p in window.system.processes.values() for m in p.machines}
    machines |= {s.name: s.machine for p in window.system.processes.values() for s in p.shared.values()}
    for family, names in families.items():
        kind = flat.vars[names[0]].type
        if kind == BOOL:
            yield Measure(family, tuple((n, ite(window.ref(n), one(1), one(0))) for n in names))
            yield Measure(f"not {family}", tuple((n, ite(window.ref(n), one(0), one(1))) for n in names))
        elif isinstance(kind, Enum):
            if family.endswith(".state"):
                ahead = states_ahead(window.system.machines[machines[family.removesuffix(".state").removesuffix("[]")]])
                yield Measure(f"states ahead of {family}", tuple((n, weigh(window.ref(n), ahead)) for n in names))
        else:
            yield Measure(family, tuple((n, window.ref(n)) for n in names))
    for family, names in families.items():  # where what is left of a machine's rows is no cycle any more
        kind = flat.vars[names[0]].type
        if isinstance(kind, Enum):
            for place, value in enumerate(kind.names):
                is_it = [int(place == other) for other in range(len(kind.names))]
                yield Measure(f"{family} is {value}", tuple((n, weigh(window.ref(n), is_it)) for n in names))


def one(value: int) -> Const:
    """A number."""
    return Const(value, INT)


def weigh(state: Node, ahead: list[int]) -> Node:
    """The number of `state`, by its place."""
    out: Node = one(0)
    for place, value in enumerate(ahead):
        out = ite(Op("==", (state, Const(place, state.type)), BOOL), one(value), out)
    return out


def states_ahead(machine: Machine) -> list[int]:
    """For each state, how many steps forward there may be at most; states on a cycle count as one."""
    names = list(machine.states)
    reach = {name: {name} for name in names}
    edges = [(s, t.target) for t in machine.transitions if t.target is not None for s in t.sources]
    grown = True
    while grown:
        grown = False
        for source, target in edges:
            more = reach[target] - reach[source]
            reach[source] |= more
            grown = grown or bool(more)
    level = dict.fromkeys(names, 0)
    for _ in names:
        for source, target in edges:
            if source not in reach[target]:
                level[source] = max(level[source], level[target] + 1)
    for _ in names:  # states of one cycle share the highest level, and whatever leads to them lies above
        for name in names:
            level[name] = max(level[other] for other in names if other in reach[name] and name in reach[other])
        for source, target in edges:
            if source not in reach[target]:
                level[source] = max(level[source], level[target] + 1)
    return [level[name] for name in names]


def is_first(step: Step) -> bool:
    """Whether the step speaks for all of its kind."""
    return all(value == 0 for _, value in (*step.index, *step.chosen))


class _Search:
    """The search for a measure, with what was asked of it so far."""

    def __init__(self, proof: Parametric, finite: dict[str, str]) -> None:
        self.proof = proof
        self.finite = finite
        self.solver = proof.solver(proof.invariant)
        self.measures = list(measures(proof))
        self.known: dict[tuple[int, str], str] = {}
        self.steps = [
            (place, step)
            for place, step in enumerate(proof.flat.steps)
            if step.updates and is_first(step) and self.moves(step)
        ]

    def run(self) -> Ranking:
        """Greedy, and complete for these candidates: a good component stays good when fewer steps are left."""
        left = [(place, step) for place, step in self.steps if step.action not in self.finite]
        components: list[tuple[Measure, list[Numbered]]] = []
        loose: dict[str, str] = {}
        while left:
            found = self.settle(left)
            if found is not None:
                components.append(found)
                left = [item for item in left if item not in found[1]]
                continue
            names = dict.fromkeys(s.action for _, s in left if not s.fair)  # none of these need ever happen
            names = names or dict.fromkeys(s.action for _, s in left)
            helps = [n for n in names if self.settle([i for i in left if i[1].action != n])]
            for name in helps[:1] or names:
                action = self.proof.system.actions.get(name)
                if action is not None and action.budget:
                    self.finite[name] = f"at most '{action.budget}' times"
                else:
                    loose[name] = "every candidate may rise again"
            left = [(place, step) for place, step in left if step.action not in {*loose, *self.finite}]
        fair = {name: by for name in loose for by in [self.ended_by(name, list(loose), components)] if by}
        return Ranking(
            tuple((m.name, tuple(dict.fromkeys(s.action for _, s in settled))) for m, settled in components),
            fair,
            self.finite,
            {name: why for name, why in loose.items() if name not in fair},
        )

    def settle(self, left: list[Numbered]) -> tuple[Measure, list[Numbered]] | None:
        """The first candidate that is a component for `left`."""
        return next(filter(None, (self.component(measure, left) for measure in self.measures)), None)

    def component(self, measure: Measure, left: list[Numbered]) -> tuple[Measure, list[Numbered]] | None:
        """The measure with the steps of `left` that it settles, if none of `left` can raise it."""
        effects = [(item, self.effect(*item, measure)) for item in left]
        settled = [item for item, effect in effects if effect == "lowers"]
        return (measure, settled) if settled and all(effect != "may raise" for _, effect in effects) else None

    def ended_by(self, name: str, loose: list[str], components: list[tuple[Measure, list[Numbered]]]) -> str:
        """A fair action without which `name` cannot go on for ever; "" if none was found.

        Above the first component that a loose step may raise, everything settled happens finitely often.
        """
        taken = [item for item in self.steps if item[1].action in loose]
        settled: list[Numbered] = []
        for measure, items in components:
            if any(self.effect(*item, measure) == "may raise" for item in taken):
                break
            settled += items
        going_on = [i for i in self.steps if i not in settled and i[1].action not in self.finite]
        fair = {step.action: dict(step.index).keys() for _, step in settled if step.fair}
        lowered = {place for place, _ in settled}
        for place, step in enumerate(self.proof.flat.steps):
            # all its steps must be settled: one that changes nothing would be fair, too
            if step.action in fair and is_first(step) and place not in lowered and self.happens(step):
                del fair[step.action]
        mine = [item for item in taken if item[1].action == name]
        for candidate, sorts in fair.items():
            named = all(sorts <= dict(step.index).keys() for _, step in mine)
            if named and all(self.after(i, self.enabled(candidate, sorts, 0), None) for i in mine):
                on = [self.enabled(candidate, sorts, value) for value in (NAMED if sorts else NAMED[:1])]
                if all(self.after(item, one, one) for item in going_on for one in on):
                    return candidate
        return ""

    def enabled(self, action: str, sorts: Collection[str], value: int) -> Node:
        """That some step of `action` can be taken, for the instance `value` of its sorts."""
        steps = [s for s in self.proof.flat.steps if s.action == action and set(s.index) == {(k, value) for k in sorts}]
        there = conj(*(self.proof.window.exists(sort, value) for sort in sorts))
        return conj(there, disj(*(step.guard for step in steps)))

    def after(self, item: Numbered, node: Node, before: Node | None) -> bool:
        """Whether `node` holds where the step is taken: before it, or, where `before` did, after it."""
        place, step = item
        self.assume(step)
        if before is not None:
            self.solver.add(before)
            node = self.proof.window.later(node, step.updates, f"'{place}")
        out = self.holds(node)
        self.solver.pop()
        return out

    def assume(self, step: Step) -> None:
        """Open a frame in which `step` can happen."""
        window = self.proof.window
        named = dict((*step.index, *step.chosen))
        self.solver.push()
        self.solver.add(step.guard, *(window.exists(s, v) for s, v in named.items()))

    def happens(self, step: Step) -> bool:
        """Whether it can happen."""
        self.assume(step)
        answer = self.solver.check()
        self.solver.pop()
        return answer != UNSAT

    def moves(self, step: Step) -> bool:
        """Whether it can happen and change anything."""
        window = self.proof.window
        same = [compare("==", window.ref(n), v) for n, v in step.updates.items()]
        self.assume(step)
        self.solver.any_false(same)
        answer = self.solver.check()
        self.solver.pop()
        return answer != UNSAT

    def effect(self, place: int, step: Step, measure: Measure) -> str:
        """What the step does to the measure: `keeps`, `lowers`, `may lower` or `may raise`."""
        key = (place, measure.name)
        if key not in self.known:
            self.known[key] = self._effect(step, measure)
        return self.known[key]

    def _effect(self, step: Step, measure: Measure) -> str:
        window = self.proof.window
        pairs = []
        for name, before in measure.values:
            if name in step.updates:
                after = substitute(before, lambda ref: step.updates.get(getattr(ref, "name", "")))
                there = conj(*(window.exists(s, v) for s, v in window.index(name).items()))
                pairs.append((there, before, after))
        if not pairs:
            return "keeps"
        self.assume(step)
        raises = disj(*(conj(there, fold(Op(">", (after, before), BOOL))) for there, before, after in pairs))
        lowers = disj(*(conj(there, fold(Op("<", (after, before), BOOL))) for there, before, after in pairs))
        out = "may raise"
        if raises == FALSE or self.holds(neg(raises)):
            out = "lowers" if self.holds(lowers) else "may lower"
        self.solver.pop()
        return out

    def holds(self, node: Node) -> bool:
        """Whether the open frame forces `node`. A solver without an answer forces nothing."""
        self.solver.push()
        self.solver.any_false([node])
        answer = self.solver.check()
        self.solver.pop()
        return answer == UNSAT
