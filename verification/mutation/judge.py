"""One mutant, judged: refuted, proved redundant, equivalent for a written reason, or unclassified.

What counts as refuted, strongest first (`evidence`):
- `world`: an `always` property that reads the world, or a liveness property;
- `handled`: an event that nothing takes: the running engine would stop there;
- `machines`: an `always` property of the machines alone, if it compares the changed machine with another one. One
  that reads nothing but the changed machine would restate the change, and counts for nothing;
- `order`: a message is said while one of its rank or above is on its way (twice, or after what should follow it).
  That is a defect of its own: the receiver's table is proved for messages in order, each once, and beyond that send
  the flags of the model no longer say what is on the pipe, so that nothing stronger can be asked there;
- `witness`: a `sometimes` that no scope shows any more;
- `reader`: two rows can hold at once, so that the spec is not even read. For such a mutant only the scopes of up to
  `STATES_SMALL` states are searched for something stronger.
A weaker one is kept only where every scope was searched past it for a stronger one: behind a broken `always` by
leaving that property out, behind an order by not taking that send. Lemmas and bounds of counters are the protocol's
bookkeeping and never count; behind a bound the search lets the counter go below zero.

Proved redundant: nowhere does the mutant part from the spec (difference.py), shown in one of three ways. `the same
steps`: nothing is left of the change once the system is spelled out. `induction`: no state that the proved invariant
allows tells them apart, for any number of chunks, steps and faults. `every reachable state`: none of the scopes' states
does. What changes only an effect that means nothing in the world is not redundant for that: the model cannot see it,
so it needs a written reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rlt_fsm.check import ambiguous
from rlt_fsm.expr import INT, Const, Node, conj, refs
from rlt_fsm.ground import Flat, ground
from rlt_fsm.model import ScopeDef, Spec, System
from verification import liveness
from verification.explicit import Graph, search
from verification.mutation.difference import Dead, Parting, dead_values, parting
from verification.mutation.equivalents import reason_for
from verification.mutation.mutants import Mutant, Variant
from verification.result import Result

REFUTED, REDUNDANT, EQUIVALENT, UNCLASSIFIED = "refuted", "redundant", "equivalent", "unclassified"
EVIDENCE = ("world", "handled", "machines", "order", "witness", "reader")
GENERATIONS = 2  # that the induction spells out
STATES_MAX = 3_000_000  # of one mutant in one scope
STATES_SMALL = 100_000
BELOW_ZERO = (-2, -4)  # how far a counter is followed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant, and by what."""

    mutant: Mutant
    verdict: str
    by: str  # the property, the method, or the written reason
    evidence: str = ""
    scope: str = ""
    trace_length: int = 0


@dataclass(frozen=True, slots=True)
class Explored:
    """The spec itself in one scope."""

    scope: ScopeDef
    flat: Flat
    graph: Graph
    witnessed: frozenset[str]


@dataclass(slots=True)
class Basis:
    """What every mutant is compared with. Made once, then shared by all who judge."""

    spec: Spec
    explored: list[Explored]  # smallest first
    unbounded: Flat  # the sizes of the induction
    invariant: bool  # the induction holds on it
    solver: Solver | None = field(default=None, repr=False)

    @property
    def system(self) -> System:
        """The spec's own."""
        return self.spec.need_system()


@dataclass(slots=True)
class _Found:
    """The strongest refutation of one scope; the witnesses, where all of its states were seen."""

    refutation: Result | None = None
    witnessed: frozenset[str] | None = None
    why: str = ""  # why not


def basis(spec: Spec, suite: str = "quick") -> Basis:
    """Search the scopes of `suite` and prove the invariant. Raises ValueError where the spec itself does not hold."""
    explored = []
    system = spec.need_system()
    for scope in system.scopes.values():
        if suite not in scope.suites or scope.symmetry:
            continue
        flat = ground(system, scope.sizes, scope.consts, scope.start)
        found = search(flat, scope.name, edges=True, lemmas=False)
        if found.graph is None:
            raise ValueError(f"scope '{scope.name}' is refuted or unknown before any change: run `rlt-verify run`")
        explored.append(Explored(scope, flat, found.graph, frozenset(found.witnessed)))
    if not explored:
        raise ValueError(f"no scope of suite '{suite}' to search mutants in")
    explored.sort(key=lambda e: e.graph.store.count)
    from verification.smt.induction import Induction

    unbounded = spelled_out(system)
    invariant = all(r.holds for r in Induction(unbounded).run())
    return Basis(spec, explored, unbounded, invariant)


def spelled_out(system: System) -> Flat:
    """The system at the sizes of the induction: constants are symbols, but for what counts the instances."""
    storages = {"source_storage": 1, "destination_storage": 1}
    sizes = dict.fromkeys(system.instances, 1) | {system.generation: GENERATIONS}
    return ground(system, sizes, {k: v for k, v in storages.items() if k in system.consts})


def judge(basis: Basis, variant: Variant, equivalents: Mapping[str, str]) -> Outcome:
    """The class of one mutant."""
    mutant, system = variant.mutant, variant.system
    dead = dead_values(basis.system, system)
    everywhere = parting(basis.unbounded, spelled_out(system), dead)
    if not everywhere and mutant.kind != "effect":
        return Outcome(mutant, REDUNDANT, "nothing is left of it once spelled out", "the same steps")
    if everywhere and basis.invariant and _excluded(basis, everywhere):
        return Outcome(mutant, REDUNDANT, "no state of the invariant tells them apart", "induction")
    weak: list[tuple[str, Result]] = []
    unread = _unread(basis, system)
    witnessed: set[str] | None = set()
    reasons: list[str] = []
    parted = ""
    for explored in basis.explored:
        if unread and explored.graph.store.count > STATES_SMALL:
            break
        flat = ground(system, explored.scope.sizes, explored.scope.consts, explored.scope.start)
        first = first_parting(explored, flat, dead)
        if first is None:
            witnessed = None if witnessed is None else witnessed | explored.witnessed
            continue
        parted = parted or f"{first} in scope {explored.scope.name}"
        found = fall(flat, explored.scope, mutant, weak)
        if found.refutation is not None:
            return _refuted(mutant, "handled" if found.refutation.kind == "handled" else "world", found.refutation)
        if found.witnessed is None:
            witnessed = None
            reasons.append(f"{explored.scope.name}: {found.why}")
        elif witnessed is not None:
            witnessed |= found.witnessed
    if unread:
        if weak:
            return _refuted(mutant, *min(weak, key=lambda item: EVIDENCE.index(item[0])))
        return Outcome(mutant, REFUTED, unread, "reader", "none")
    if everywhere and not parted:
        scopes = ", ".join(e.scope.name for e in basis.explored)
        return Outcome(mutant, REDUNDANT, f"no reachable state of {scopes} tells them apart", "every reachable state")
    if weak:
        return _refuted(mutant, *min(weak, key=lambda item: EVIDENCE.index(item[0])))
    lost = set().union(*(e.witnessed for e in basis.explored)) - witnessed if witnessed is not None else set()
    if lost:
        return Outcome(mutant, REFUTED, f"sometimes {min(lost)}", "witness", "all")
    pattern = reason_for(mutant.id, equivalents)
    if pattern is not None:
        return Outcome(mutant, EQUIVALENT, equivalents[pattern], "written reason")
    if not parted:
        return Outcome(mutant, UNCLASSIFIED, "the effect means nothing in the world, so that no property can miss it")
    return Outcome(mutant, UNCLASSIFIED, "; ".join([f"parts from the spec after {parted}; nothing falls", *reasons]))


def _unread(basis: Basis, system: System) -> str:
    """Why the reader would not take the changed system, as far as its rows can hold together; empty where it would."""
    before = basis.system.machines
    changed = [m for name, m in system.machines.items() if m is not before[name]]
    return "; ".join(found.message for machine in changed for found in ambiguous(basis.spec, machine))


def _refuted(mutant: Mutant, evidence: str, result: Result) -> Outcome:
    moves = result.trace.moves if result.trace is not None else ()
    return Outcome(mutant, REFUTED, result.name, evidence, result.scope, len(moves))


# -- redundant ------------------------------------------------------------------------------------------------


class Solver:
    """The proved invariant in z3, asked whether it leaves room for a formula."""

    def __init__(self, flat: Flat) -> None:
        from verification.smt.induction import UNSAT, Induction, to_z3

        self.induction = Induction(flat, timeout_s=5.0)
        self.unsat, self.to_z3 = UNSAT, to_z3
        self.solver = self.induction.solver()
        self.solver.add(*self.induction.terms, *self.induction.ranges.values())

    def excludes(self, node: Node) -> bool:
        """True where no state of the invariant has `node`; false also where the solver does not know."""
        self.solver.push()
        self.solver.add(self.to_z3(node, self.induction.value))
        answer = str(self.solver.check())
        self.solver.pop()
        return answer == self.unsat


def _excluded(basis: Basis, partings: list[Parting]) -> bool:
    if basis.solver is None:  # made late, so that each process has its own
        basis.solver = Solver(basis.unbounded)
    solver = basis.solver
    return all(solver.excludes(parting.where) for parting in partings)


def first_parting(explored: Explored, flat: Flat, dead: Dead) -> str | None:
    """How the nearest reachable state is reached in which the two part, and by which step; None if there is none."""
    partings = parting(explored.flat, flat, dead)
    if not partings:
        return None
    nearest: tuple[int, str] | None = None
    for item, truth in zip(partings, explored.graph.evaluate_all([p.where for p in partings]), strict=True):
        hits = np.flatnonzero(truth)
        if hits.size and (nearest is None or int(hits[0]) < nearest[0]):
            nearest = int(hits[0]), item.label
    if nearest is None:
        return None
    path = explored.graph.trace(nearest[0]).moves
    return ", ".join([*(move.label for move in path), nearest[1]])


# -- refuted --------------------------------------------------------------------------------------------------


def fall(flat: Flat, scope: ScopeDef, mutant: Mutant, weak: list[tuple[str, Result]]) -> _Found:
    """Search one scope for a strong refutation, past all weaker ones, which are put into `weak`."""
    cut = False
    while True:
        found = search(flat, scope.name, edges=not cut, lemmas=False, max_states=STATES_MAX)
        broken = next((r for r in found.results if r.verdict == "refuted"), None)
        if broken is None:
            break
        if broken.kind == "handled" or (broken.kind == "always" and _reads_world(flat.system, broken.name)):
            return _Found(broken)
        if broken.kind == "in_order":
            weak.append(("order", broken))
            flat, cut = _without_sends(flat, broken.name), True
        elif broken.kind == "always":
            if _compares(flat.system, broken.name, mutant):
                weak.append(("machines", broken))
            flat = _without_property(flat, broken.name)
        else:
            deeper = _below_zero(flat, broken.name.removeprefix("bounds:"))
            if deeper is None:
                return _Found(why=f"{broken.name} goes down without end")
            flat = deeper
    if found.graph is None:
        return _Found(why=found.stopped or "what follows a message out of order is not known")
    asked = liveness.check(found.graph, scope.name)
    for result in asked:
        base = result.name.split("[")[0]
        if result.verdict == "refuted" and (not scope.asks or base in scope.asks):
            return _Found(result)
    return _Found(witnessed=frozenset(found.witnessed))


def _formulas(system: System, name: str) -> Iterator[Node]:
    for item in system.properties:
        if item.name == name.split("[")[0]:
            yield item.formula


def _reads_world(system: System, name: str) -> bool:
    return any(ref.name in system.world for formula in _formulas(system, name) for ref in refs(formula))


def _compares(system: System, name: str, mutant: Mutant) -> bool:
    """Whether the property reads a machine that is not the changed one."""
    machine_of = {n: n for n in system.machines}
    for process in system.processes.values():
        machine_of |= {s.name: s.machine for s in process.shared.values()}
    read = {machine_of[r.name] for f in _formulas(system, name) for r in refs(f) if r.name in machine_of}
    return bool(read - {mutant.part.split(".")[0]})


def _without_property(flat: Flat, name: str) -> Flat:
    kept = tuple(p for p in flat.system.properties if p.name != name.split("[")[0])
    return replace(flat, system=replace(flat.system, properties=kept))


def _without_sends(flat: Flat, name: str) -> Flat:
    """The steps that say it out of order do not happen."""
    steps = []
    for step in flat.steps:
        asked = [condition for assertion, condition in step.asserts if assertion == name]
        steps.append(replace(step, guard=conj(step.guard, *asked)) if asked else step)
    return replace(flat, steps=[s for s in steps if not (isinstance(s.guard, Const) and not s.guard.value)])


def _below_zero(flat: Flat, name: str) -> Flat | None:
    """The same, with room for one counter below zero; None where it has had it."""
    var = flat.vars[name]
    lower = next((low for low in BELOW_ZERO if low < var.lo), None)
    if lower is None or var.type != INT or var.hi is not None:
        return None
    return replace(flat, vars={**flat.vars, name: replace(var, lo=lower)})
