"""Induction: what holds at the start and is kept by every step holds for ever.

Counters are integers without bound, so a proof here is for any number of chunks, partitions, decode
steps, cancels, duplicates, errors and deaths; only the number of generations and of storages is fixed.
The invariant is the conjunction of every `always` property, every lemma, the ranges of the variables,
and nothing else. The obligations (`handled:`, `in_order:`) are then consequences of it, state by state.

For each step the question is: invariant before, guard, and some conjunct false after. A conjunct is
asked only where the step writes a variable that it reads; the others cannot change. Unknown from the
solver is Unknown here. A failed step is shown as the two states; it need not be reachable, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import z3

from rlt_fsm.expr import BOOL, INT, Node, Ref, conjuncts, refs
from rlt_fsm.ground import Flat
from verification.result import Move, Result, Trace
from verification.smt.reading import to_z3, variable

SAT, UNSAT = "sat", "unsat"


@dataclass(frozen=True, slots=True)
class Clause:
    """One conjunct of the invariant, with the property or lemma that it belongs to."""

    name: str
    kind: str
    node: Node
    reads: frozenset[str]


class Induction:
    """Induction over one grounded system with symbolic constants."""

    def __init__(self, flat: Flat, timeout_s: float = 20.0) -> None:
        self.flat = flat
        self.timeout_ms = int(timeout_s * 1000)
        self.now = {name: variable(name, var.type) for name, var in flat.vars.items()}
        self.symbols = {name: z3.Int(name) for name in flat.symbols}
        self.clauses: list[Clause] = []
        for name, item, formula, _ in flat.properties():
            if item.kind in ("always", "lemma"):
                for part in conjuncts(formula):
                    self.clauses.append(Clause(name, item.kind, part, frozenset(r.name for r in refs(part))))
        self.terms = [to_z3(c.node, self.value) for c in self.clauses]
        self.ranges = {name: self.range_of(name, self.now[name]) for name in flat.vars}
        self.assumptions = [symbol >= 0 for symbol in self.symbols.values()]

    def value(self, ref: Ref) -> Any:
        """The term of a variable or constant before the step."""
        return self.now[ref.name] if ref.name in self.now else self.symbols[ref.name]

    def range_of(self, name: str, term: Any) -> Any:
        """What the variable's type says: enums and sorts within their values, counters not below zero."""
        var = self.flat.vars[name]
        if var.type == BOOL:
            return z3.BoolVal(True)
        low = term >= var.lo
        return low if var.hi is None else z3.And(low, term <= var.hi)

    def solver(self) -> Any:
        """A solver that knows the constants' assumptions."""
        out = z3.SolverFor("QF_LIA")
        out.set("timeout", self.timeout_ms)
        out.add(*self.assumptions)
        return out

    def run(self, progress: Callable[[str], None] | None = None) -> list[Result]:
        """Base, step and obligations; one result per property, lemma and obligation."""
        started = time.perf_counter()
        failed: dict[str, Result] = {}
        unknown: dict[str, str] = {}
        self._base(failed, unknown)
        solver = self.solver()
        solver.add(*self.terms, *self.ranges.values())
        asked = 0
        for place, step in enumerate(self.flat.steps):
            after = {name: to_z3(node, self.value) for name, node in step.updates.items()}

            def later(ref: Ref, after: Mapping[str, Any] = after) -> Any:
                return after[ref.name] if ref.name in after else self.value(ref)

            goals: list[tuple[str, Any]] = []
            for clause, term in zip(self.clauses, self.terms, strict=True):
                if clause.reads & after.keys():
                    new = to_z3(clause.node, later)
                    if not new.eq(term):
                        goals.append((clause.name, new))
            for name, term in after.items():
                if self.flat.vars[name].type == INT:
                    goals.append((f"bounds:{name}", self.range_of(name, term)))
            for name, node in step.asserts:
                goals.append((name, to_z3(node, self.value)))
            if not goals:
                continue
            solver.push()
            solver.add(to_z3(step.guard, self.value))
            solver.add(z3.Or(*(z3.Not(goal) for _, goal in goals)))
            asked += 1
            while True:
                answer = str(solver.check())
                if answer != SAT:
                    break
                model = solver.model()
                broken = [n for n, goal in goals if not z3.is_true(model.eval(goal, model_completion=True))]
                for name in broken:
                    failed.setdefault(name, self._step_failure(name, place, model, after))
                goals = [(n, g) for n, g in goals if n not in broken]
                if not goals:
                    break
                solver.add(z3.Or(*(z3.Not(goal) for _, goal in goals)))
            if answer not in (SAT, UNSAT):
                for name, _ in goals:
                    unknown.setdefault(name, f"the solver gave up on step '{step.label}': {solver.reason_unknown()}")
            solver.pop()
            if progress and asked % 50 == 0:
                progress(f"  induction: {place + 1} of {len(self.flat.steps)} steps")
        self._obligations(failed, unknown)
        figures: dict[str, float | int | str] = {
            "steps": len(self.flat.steps),
            "conjuncts": len(self.clauses),
            "seconds": round(time.perf_counter() - started, 3),
        }
        return self._results(failed, unknown, figures)

    def _results(
        self, failed: dict[str, Result], unknown: dict[str, str], figures: dict[str, float | int | str]
    ) -> list[Result]:
        kinds: dict[str, str] = {}
        for clause in self.clauses:
            kinds.setdefault(clause.name, clause.kind)
        for obligation in self.flat.obligations:
            kinds.setdefault(obligation.name, "handled")
        for step in self.flat.steps:
            for name, _ in step.asserts:
                kinds.setdefault(name, "in_order")
        for name in (*failed, *unknown):
            kinds.setdefault(name, "bounds")
        kinds.setdefault("bounds", "bounds")
        # a broken conjunct takes every proof with it: the invariant is proved whole or not at all
        spoiled = ", ".join([*failed, *unknown])
        out = []
        for name, kind in kinds.items():
            if name in failed:
                out.append(failed[name])
            elif name in unknown:
                out.append(Result(name, kind, "smt", "any chunks", "unknown", unknown[name], figures=figures))
            elif spoiled:
                why = f"its induction leans on {spoiled}, which did not hold"
                out.append(Result(name, kind, "smt", "any chunks", "unknown", why, figures=figures))
            else:
                out.append(Result(name, kind, "smt", "any chunks", "proved", figures=figures))
        return out

    def _base(self, failed: dict[str, Result], unknown: dict[str, str]) -> None:
        solver = self.solver()
        for name, var in self.flat.vars.items():
            solver.add(self.now[name] == to_z3(var.init, self.value))
        for clause, term in zip(self.clauses, self.terms, strict=True):
            solver.push()
            solver.add(z3.Not(term))
            answer = str(solver.check())
            if answer == SAT:
                why = "it does not hold at the start"
                failed[clause.name] = Result(
                    clause.name, clause.kind, "smt", "any chunks", "refuted", why, self._state(solver.model())
                )
            elif answer != UNSAT:
                unknown[clause.name] = f"the solver gave up on the start: {solver.reason_unknown()}"
            solver.pop()

    def _obligations(self, failed: dict[str, Result], unknown: dict[str, str]) -> None:
        solver = self.solver()
        solver.add(*self.terms, *self.ranges.values())
        for obligation in self.flat.obligations:
            solver.push()
            solver.add(to_z3(obligation.pending, self.value))
            solver.add(z3.Not(to_z3(obligation.accepted, self.value)))
            answer = str(solver.check())
            if answer == SAT:
                why = "the invariant allows a state in which it comes and no row takes it (it need not be reachable)"
                failed[obligation.name] = Result(
                    obligation.name, "handled", "smt", "any chunks", "unknown", why, self._state(solver.model())
                )
            elif answer != UNSAT:
                unknown[obligation.name] = f"the solver gave up: {solver.reason_unknown()}"
            solver.pop()

    def _number(self, model: Any, term: Any) -> int:
        value = model.eval(term, model_completion=True)
        return int(z3.is_true(value)) if z3.is_bool(value) else value.as_long()

    def _state(self, model: Any) -> Trace:
        return Trace((), None, {name: self._number(model, term) for name, term in self.now.items()})

    def _step_failure(self, name: str, place: int, model: Any, after: Mapping[str, Any]) -> Result:
        before = {n: self._number(model, t) for n, t in self.now.items()}
        new = {n: self._number(model, t) for n, t in after.items()}
        changed = {n: (before[n], v) for n, v in new.items() if before[n] != v}
        label = self.flat.steps[place].label
        kind = next((c.kind for c in self.clauses if c.name == name), "bounds")
        return Result(
            name,
            kind,
            "smt",
            "any chunks",
            "unknown",
            f"not kept by step '{label}' from a state that the invariant allows (it need not be reachable)",
            Trace((Move(label, place, changed),), None, before),
        )
