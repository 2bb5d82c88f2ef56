"""Induction for any number of instances: what holds at the start and is kept by every step holds for ever.

Counters are integers without bound and instances are as many as one likes, so a proof here is for any
number of chunks, partitions, faults, generations and storages. The invariant is the conjunction of every
`always` property, every lemma and the ranges of the variables; `handled:` and `in_order:` follow from it.

A clause of the invariant names at most one instance of each sort, and a step at most another. The two
are the window (verification/smt/window.py); the hypothesis is the invariant of everything in the window
and of one arbitrary instance outside. Of the rest of a quantifier nothing is assumed but what is proved
of that arbitrary instance in the same case (`_Case.transfer`): if every instance outside adds at least
nothing, so do all together. The argument and its hypotheses are in docs/proof_cutoff.md.

`unknown` of the solver is Unknown here. A failed step is shown as the state of the window before it; it
need not be reachable, and says so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlt_fsm.expr import BOOL, INT, Const, Node, Op, Quant, Ref, conj, conjuncts, fold, neg, refs
from rlt_fsm.ground import Step
from rlt_fsm.model import Property, System
from verification.result import Move, Result, Trace
from verification.smt.matching import Clause, counted
from verification.smt.reading import SAT, UNSAT, Solver, Z3Solver
from verification.smt.window import NAMED, OUTSIDE, Refused, Rest, Window

SCOPE = "any number"
ZERO = Const(0, INT)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a case must show; `named` are the instances that it speaks of."""

    name: str
    node: Node
    named: tuple[tuple[str, int], ...] = ()


def clauses_of(system: System) -> list[Clause]:
    """The invariant that the spec states: its `always` properties and lemmas, split into clauses."""
    out: list[Clause] = []
    for prop in system.properties:
        if prop.kind in ("always", "lemma"):
            out += split(prop, prop.formula)
    return out


def split(prop: Property, node: Node, sorts: tuple[str, ...] = ()) -> list[Clause]:
    """The clauses of a formula: conjunctions and outer `all`s opened, each with the sorts that it needs."""
    parts = conjuncts(node)
    if len(parts) > 1:
        return [clause for part in parts for clause in split(prop, part, sorts)]
    if isinstance(node, Quant) and node.kind == "all" and not set(node.binders) & set(sorts):
        return split(prop, node.body, (*sorts, *node.binders))
    used = {ref.name for ref in refs(node)}
    return [Clause(prop.name, prop.kind, tuple(s for s in sorts if s in used), node, prop.span)]


class Parametric:
    """One proof for any number of instances.

    counts: for each sort whose instances are counted by a constant, that constant. make: the solver.
    clauses: the invariant, if not the one that the spec states. Raises Refused.
    """

    def __init__(
        self,
        system: System,
        counts: Mapping[str, str] | None = None,
        timeout_s: float = 20.0,
        make: Callable[[float], Solver] = Z3Solver,
        clauses: Sequence[Clause] | None = None,
    ) -> None:
        self.system = system
        self.window = Window(system)
        self.flat = self.window.flat
        self.timeout_s = timeout_s
        self.make = make
        self.stated = clauses_of(system)
        self.elsewhere = clauses is not None
        self.counts = dict(counts or {})
        self.clauses = list(clauses) if clauses is not None else self.stated + counted(self.stated, self.counts)
        for clause in self.clauses:
            self.window.alike.expression(clause.matrix, clause.sorts, clause.span)
        self.ranges = [node for name in self.flat.vars for node in self.range_of(name, self.window.ref(name))]
        self.ranges += self.window.well_pointed()
        self.assumptions: list[Node] = [compare(">=", Ref(name), ZERO) for name in self.flat.symbols]
        for sort, const in self.counts.items():
            if sort not in system.instances or const not in system.consts:
                raise Refused(f"'{const}' cannot count '{sort}': it must be a constant, and '{sort}' a sort")
            number = self.window.expr(Quant("sum", (sort,), Const(1, INT), INT), {})
            self.assumptions.append(Op("==", (Ref(const), number), BOOL))
        self.invariant = [goal.node for goal in self.instances(self.clauses, (*NAMED, OUTSIDE))]
        self.goals = self.instances(self.clauses, NAMED)
        self.reads = [self.window.reads(goal.node) for goal in self.goals]
        self.failed: dict[str, Result] = {}
        self.unknown: dict[str, str] = {}
        self.queries = 0
        self.lifted = 0  # facts about rests that were used
        self.facts: dict[tuple[str, str, str], tuple[Node, Node]] = {}

    def instances(self, clauses: Iterable[Clause], values: Sequence[int]) -> list[Goal]:
        """Every clause for every choice of instances from `values`, of those that exist."""
        out = []
        for clause in clauses:
            for chosen in itertools.product(values, repeat=len(clause.sorts)):
                named = dict(zip(clause.sorts, chosen, strict=True))
                there = conj(*(self.window.exists(s, v) for s, v in named.items()))
                node = fold(Op("implies", (there, self.window.expr(clause.matrix, named)), BOOL))
                out.append(Goal(clause.name, node, tuple(named.items())))
        return out

    def range_of(self, name: str, term: Node) -> list[Node]:
        """What the variable's type says: enums and pointers within their values, counters not below zero."""
        var = self.flat.vars[name]
        if var.type == BOOL:
            return []
        low = compare(">=", term, Const(var.lo, INT))
        return [low] if var.hi is None else [low, compare("<=", term, Const(var.hi, INT))]

    # -- the proof ------------------------------------------------------------------------------------

    def run(self, progress: Callable[[str], None] | None = None) -> list[Result]:
        """Base, every step, obligations; one result per property, lemma and obligation."""
        started = time.perf_counter()
        self.base()
        solver = self.solver(self.invariant)
        for place, step in enumerate(self.flat.steps):
            if all(value == 0 for _, value in (*step.index, *step.chosen)):
                self.step(solver, place, step)
                if progress and place % 50 == 0:
                    progress(f"  induction: {place} of {len(self.flat.steps)} steps")
        self.obligations(solver)
        if self.elsewhere:
            self.covers(solver)
        figures: dict[str, float | int | str] = {
            "steps": len(self.flat.steps),
            "conjuncts": len(self.clauses),
            "queries": self.queries,
            "facts of the rest": self.lifted,
            "solver": solver.name,
            "seconds": round(time.perf_counter() - started, 3),
        }
        return self.results(figures)

    def solver(self, invariant: Sequence[Node]) -> Solver:
        """A solver that knows the ranges, the assumptions and `invariant`."""
        solver = self.make(self.timeout_s)
        solver.add(*self.assumptions, *self.ranges, *invariant)
        return solver

    def base(self) -> None:
        """Every clause at the start, for as many instances as there may be."""
        solver = self.solver([])
        for name, var in self.flat.vars.items():
            here = self.window.ref(name)
            solver.add(compare("==", here, var.init))
        case = _Case(self, solver, self.goals, "the start")
        for goal, trace in case.settle(None):
            self.failed.setdefault(
                goal.name,
                Result(
                    goal.name, self.kind(goal.name), "smt", SCOPE, "unknown", "not shown to hold at the start", trace
                ),
            )

    def step(self, solver: Solver, place: int, step: Step) -> None:
        """Every clause that the step can change, its own asserts, and the ranges of what it writes."""
        window, updates = self.window, step.updates
        goals: list[Goal] = []
        for goal, reads in zip(self.goals, self.reads, strict=True):
            if reads & updates.keys():
                goals.append(Goal(goal.name, window.later(goal.node, updates, f"'{place}"), goal.named))
        for name, node in updates.items():
            named = window.index(name)
            counts = self.flat.vars[name].type == INT and window.base(name) not in window.pointers
            if counts and OUTSIDE not in named.values():  # place 1 speaks for whoever does not act
                there = conj(*(window.exists(s, v) for s, v in named.items()))
                goals += [Goal(f"bounds:{name}", compare("implies", there, part)) for part in self.range_of(name, node)]
        goals += [Goal(name, node) for name, node in step.asserts]
        named = dict((*step.index, *step.chosen))
        solver.push()
        solver.add(step.guard, *(window.exists(s, v) for s, v in named.items()))
        groups: dict[tuple[tuple[str, int], ...], list[Goal]] = {}
        for goal in goals:
            groups.setdefault(goal.named, []).append(goal)
        for about, group in groups.items():
            solver.push()
            solver.add(*self.anchors(named, dict(about)))
            case = _Case(self, solver, group, f"step '{step.label}'", f"'{place}")
            for goal, trace in case.settle(place):
                why = (
                    f"not kept by step '{step.label}' from a state that the invariant allows (it need not be reachable)"
                )
                self.failed.setdefault(
                    goal.name, Result(goal.name, self.kind(goal.name), "smt", SCOPE, "unknown", why, trace)
                )
            solver.pop()
        solver.pop()

    def anchors(self, acting: Mapping[str, int], about: Mapping[str, int]) -> list[Node]:
        """Where the window is looked for: a place in it that nobody named is given to an instance pointed at.

        Place 0 of a sort, if the step does not name it, goes to what the step's instances point at; place 1,
        if the goal does not name it, to what the goal's instances point at. One pointer a place.
        """
        out = []
        for sort in self.system.instances:
            for free, pointing in ((sort not in acting, acting), (about.get(sort) != 1, about)):
                first = next(self.window.pointing(pointing, sort), None) if free else None
                if first is not None:
                    out.append(compare("<", first, Const(OUTSIDE, INT)))
        return out

    def obligations(self, solver: Solver) -> None:
        """What comes and cannot be refused finds a row that takes it."""
        for item in self.flat.obligations:
            if any(value for _, value in item.index):
                continue
            named = dict(item.index)
            solver.push()
            solver.add(item.pending, *(self.window.exists(s, v) for s, v in named.items()), *self.anchors(named, {}))
            case = _Case(self, solver, [Goal(item.name, item.accepted)], item.name)
            for goal, trace in case.settle(None):
                self.fail(goal.name, "the invariant allows a state in which it comes and no row takes it", trace)
            solver.pop()

    def covers(self, solver: Solver) -> None:
        """What the spec states follows from an invariant that came from elsewhere."""
        for goal in self.instances(self.stated, NAMED):
            solver.push()
            solver.add(*self.anchors({}, dict(goal.named)))
            for _, trace in _Case(self, solver, [goal], "what the spec states").settle(None):
                self.fail(goal.name, "it does not follow from the invariant", trace)
            solver.pop()

    def fail(self, name: str, why: str, trace: Trace) -> None:
        """Keep the first state of the window from which `name` was not shown."""
        why += " (it need not be reachable)"
        self.failed.setdefault(name, Result(name, self.kind(name), "smt", SCOPE, "unknown", why, trace))

    # -- the answer -----------------------------------------------------------------------------------

    def kind(self, name: str) -> str:
        """The kind of result that `name` stands for."""
        head = name.partition(":")[0]
        if head in ("handled", "in_order", "bounds"):
            return head
        return next(c.kind for c in (*self.stated, *self.clauses) if c.name == name)

    def results(self, figures: dict[str, float | int | str]) -> list[Result]:
        """A broken clause takes every proof with it: the invariant is proved whole or not at all."""
        asked: dict[str, None] = dict.fromkeys(c.name for c in (*self.stated, *self.clauses))
        asked |= dict.fromkeys(o.name for o in self.flat.obligations if not any(v for _, v in o.index))
        asked |= dict.fromkeys(name for step in self.flat.steps for name, _ in step.asserts)
        asked |= dict.fromkeys((*self.failed, *self.unknown, "bounds:"))
        spoiled = ", ".join([*self.failed, *self.unknown])
        counted = ", ".join(f"'{const}' is the number of '{sort}'" for sort, const in self.counts.items())
        condition = f"for every system in which {counted}" if counted else ""
        out = []
        for name in asked:
            verdict, why = "proved", condition
            if name in self.failed:
                out.append(self.failed[name])
                continue
            if name in self.unknown:
                verdict, why = "unknown", self.unknown[name]
            elif spoiled:
                verdict, why = "unknown", f"its induction leans on {spoiled}, which did not hold"
            kind = self.kind(name)
            out.append(Result(name.removesuffix(":"), kind, "smt", SCOPE, verdict, why, figures=figures))
        return out

    def state(self, solver: Solver, place: int | None) -> Trace:
        """The window in the solver's model, and the step from it."""
        final: dict[str, object] = {n: int(solver.value(self.window.ref(n))) for n in self.flat.vars}
        if place is None:
            return Trace((), None, final)
        step = self.flat.steps[place]
        new = {name: int(solver.value(node)) for name, node in step.updates.items()}
        changed = {name: (final[name], value) for name, value in new.items() if final[name] != value}
        return Trace((Move(step.label, place, changed),), None, final)


def compare(op: str, left: Node, right: Node) -> Node:
    """`left op right`, folded."""
    return fold(Op(op, (left, right), BOOL))


class _Case:
    """Goals under what the solver holds at this moment."""

    def __init__(self, proof: Parametric, solver: Solver, goals: list[Goal], where: str, mark: str = "") -> None:
        self.proof = proof
        self.solver = solver
        self.goals = goals
        self.where = where
        self.mark = mark  # of the rests after the step

    def settle(self, place: int | None) -> list[tuple[Goal, Trace]]:
        """The goals that are not shown, each with the state that the solver found."""
        solver, doubtful = self.solver, []
        open_goals = self.goals
        solver.push()
        while open_goals:
            solver.any_false([g.node for g in open_goals])
            answer = self.ask()
            if answer == UNSAT:
                break
            if answer != SAT:
                self.give_up(open_goals)
                break
            false = {id(g) for g in open_goals if not solver.value(g.node)}
            doubtful += [g for g in open_goals if id(g) in false]
            open_goals = [g for g in open_goals if id(g) not in false]
        solver.pop()
        failures = []
        for goal in doubtful:
            solver.push()
            solver.any_false([goal.node])
            answer = self.ask()
            while answer == SAT:
                facts = self.transfer()
                if not facts:
                    break
                solver.add(*facts)
                self.proof.lifted += len(facts)
                answer = self.ask()
            if answer == SAT and self.ask() == SAT:
                failures.append((goal, self.proof.state(solver, place)))
            elif answer != UNSAT:
                self.give_up([goal])
            solver.pop()
        return failures

    def transfer(self) -> list[Node]:
        """Facts about rests that would end the last model, each proved of an arbitrary instance outside.

        Whatever is assumed at this moment is so for every choice of instance 2 outside of the window. If it
        forces, say, the body of one sum to be at most that of another there, the same holds of the rests.
        """
        solver, out = self.solver, []
        waiting: dict[str, list[tuple[Node, Node]]] = {}
        for sort, single, whole in self.candidates():
            if not solver.value(whole):
                waiting.setdefault(sort, []).append((single, whole))
        for sort, facts in waiting.items():
            solver.push()
            solver.add(self.proof.window.exists(sort, OUTSIDE))
            while facts:
                solver.any_false([single for single, _ in facts])
                answer = self.ask()
                if answer == UNSAT:
                    out += [whole for _, whole in facts]
                    break
                if answer != SAT:
                    break
                facts = [pair for pair in facts if solver.value(pair[0])]
            solver.pop()
        return out

    def candidates(self) -> Iterable[tuple[str, Node, Node]]:
        """(sort, what an instance outside satisfies, what the rest then satisfies)."""
        in_play = [r for n, r in self.proof.window.rests.items() if n.endswith(("]", ")", self.mark or ")"))]
        for rest in in_play:
            if rest.kind == "any":
                yield rest.sort, *self.fact("not", rest)
            else:
                yield rest.sort, *self.fact(">=", rest)
                yield rest.sort, *self.fact("<=", rest)
        for one, two in itertools.permutations(in_play, 2):
            if one.sort == two.sort and one.kind == two.kind:
                yield one.sort, *self.fact("implies" if one.kind == "any" else "<=", one, two)

    def fact(self, op: str, one: Rest, two: Rest | None = None) -> tuple[Node, Node]:
        """`op` of the parts and of the rests, made once, so that a solver reads it once."""
        made = self.proof.facts
        key = (op, one.ref.name, two.ref.name if two else "")
        if key not in made and op == "not":
            made[key] = (neg(one.part), neg(one.ref))
        elif key not in made:
            part, ref = (two.part, two.ref) if two else (ZERO, ZERO)
            made[key] = (compare(op, one.part, part), compare(op, one.ref, ref))
        return made[key]

    def ask(self) -> str:
        """One question to the solver."""
        self.proof.queries += 1
        return self.solver.check()

    def give_up(self, goals: Iterable[Goal]) -> None:
        """Note that the solver had no answer."""
        for goal in goals:
            self.proof.unknown.setdefault(goal.name, f"the solver gave up on {self.where}: {self.solver.why}")
