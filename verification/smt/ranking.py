"""Why runs end: a lexicographic measure, found among the variables, for any number of chunks and instances.

Candidates are the variables themselves: a counter, a truth as 1 or 0 (or turned round), and the state of a
machine as the number of states that may still lie before it. A component is good if no step that is still
to be explained can raise it, for the instance that acts or for any other; it settles the steps that always
lower it. What is settled needs no further explanation, which is what makes the measure lexicographic. Summed
over the instances, component by component, the tuple falls at every settled step, and it is bounded below.

So every run that takes the steps left open only finitely often, is finite. A step that can change nothing
is no step here. The invariant is assumed: this is worth what its induction is worth
(verification/smt/parametric.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlt_fsm.expr import BOOL, FALSE, INT, Const, Enum, Node, Op, conj, disj, fold, ite, neg, substitute
from rlt_fsm.ground import Step
from rlt_fsm.model import Machine
from verification.result import Result
from verification.smt.parametric import SCOPE, Parametric, compare
from verification.smt.reading import UNSAT
from verification.smt.window import NAMED


@dataclass(frozen=True, slots=True)
class Measure:
    """One candidate, for every instance alike: a natural number of each."""

    name: str
    values: tuple[tuple[str, Node], ...]  # (flat variable, its number)


@dataclass(frozen=True, slots=True)
class Ranking:
    """components: the measure, most significant first, each with the actions that it settles.

    open: for each action that nothing settles, why. Every infinite run takes one of these for ever.
    """

    components: tuple[tuple[str, tuple[str, ...]], ...]
    open: Mapping[str, str]


def rank(proof: Parametric, set_aside: Mapping[str, str] | None = None) -> Ranking:
    """The measure of the runs of `proof`'s system.

    set_aside: actions that are not to be explained, with the reason; they are reported as open. An action
    that may never happen by its fairness, and that nothing settles, is set aside as well.
    """
    return _Search(proof, dict(set_aside or {})).run()


def runs_end(proof: Parametric, but_for: Mapping[str, str]) -> Result:
    """Proved if every run is finite that takes the actions of `but_for` only finitely often."""
    found = rank(proof, but_for)
    surplus = {name: why for name, why in found.open.items() if name not in but_for}
    figures: dict[str, float | int | str] = {"components": len(found.components), "open": len(found.open)}
    if surplus:
        why = "no measure settles " + "; ".join(f"{name} ({reason})" for name, reason in surplus.items())
        return Result("runs_end", "ranking", "smt", SCOPE, "unknown", why, figures=figures)
    why = "given the invariant, and that these happen finitely often: " + ", ".join(found.open) if found.open else ""
    return Result("runs_end", "ranking", "smt", SCOPE, "proved", why, figures=figures)


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


class _Search:
    def __init__(self, proof: Parametric, set_aside: dict[str, str]) -> None:
        self.proof = proof
        self.aside = set_aside
        self.solver = proof.solver(proof.invariant)
        self.measures = list(measures(proof))
        self.steps = [
            (place, step)
            for place, step in enumerate(proof.flat.steps)
            if step.updates and all(v == 0 for _, v in (*step.index, *step.chosen))
        ]
        self.known: dict[tuple[int, str], str] = {}

    def run(self) -> Ranking:
        """Greedy, and complete for these candidates: a good component stays good when fewer steps are left."""
        left = [(p, s) for p, s in self.steps if s.action not in self.aside and self.moves(p, s)]
        components: list[tuple[str, tuple[str, ...]]] = []
        open_: dict[str, str] = {name: why for name, why in self.aside.items()}
        while left:
            for measure in self.measures:
                effects = [(place, step, self.effect(place, step, measure)) for place, step in left]
                settled = [(p, s) for p, s, e in effects if e == "lowers"]
                if settled and not any(e == "may raise" for _, _, e in effects):
                    components.append((measure.name, tuple(dict.fromkeys(s.action for _, s in settled))))
                    left = [item for item in left if item not in settled]
                    break
            else:
                loose = {s.action: s for _, s in left if not s.fair}
                if not loose:
                    for _, step in left:
                        open_.setdefault(step.action, "every candidate can rise again")
                    break
                for name in loose:
                    budget = self.proof.system.actions[name].budget if name in self.proof.system.actions else ""
                    open_[name] = f"at most '{budget}' times" if budget else "it may happen again and again, or never"
                left = [(p, s) for p, s in left if s.action not in loose]
        return Ranking(tuple(components), open_)

    def assume(self, step: Step) -> None:
        """Open a frame in which `step` can happen."""
        window = self.proof.window
        named = dict((*step.index, *step.chosen))
        self.solver.push()
        self.solver.add(step.guard, *(window.exists(s, v) for s, v in named.items()))

    def moves(self, place: int, step: Step) -> bool:
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
