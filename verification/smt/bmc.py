"""Bounded search with z3: the shortest run to a broken promise, for any constants, up to some number of steps.

Made for finding faults. It never says proved: without a counterexample the answer is Unknown, with the
depth that was reached. What the solver finds is put into numbers (constants and budgets included) and
run again on the grounded system before it is believed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import z3

from rlt_fsm.expr import BOOL, INT, Const, Node, Ref, Type, conj, evaluate, neg, read
from rlt_fsm.expr import Op as Operation
from rlt_fsm.ground import Flat, Step, ground
from rlt_fsm.model import System
from verification.result import Move, Result, Trace
from verification.smt.reading import SAT, UNKNOWN, Z3

METHOD = "bmc"
BITS = 8  # of a number; a run in which one overflows does not replay and is not believed
CONST_MAX = 15  # the solver's choice for a constant


def _literal(value: bool | int, type_: Type) -> Any:
    return z3.BoolVal(bool(value)) if type_ == BOOL else z3.BitVecVal(int(value), BITS)


def _variable(name: str, type_: Type) -> Any:
    return z3.Bool(name) if type_ == BOOL else z3.BitVec(name, BITS)


READING = {**Z3, "const": _literal}  # z3's operators are signed on bit vectors, as they are on integers


@dataclass(frozen=True, slots=True)
class Hunt:
    """The answer, and the grounded system that its trace numbers."""

    result: Result
    flat: Flat


@dataclass(frozen=True, slots=True)
class _Bad:
    """A condition that no reachable state may have."""

    name: str
    kind: str
    node: Node


def hunt(
    system: System,
    sizes: Mapping[str, int],
    depth_max: int,
    consts: Mapping[str, int] | None = None,
    start: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    seconds_max: float = 60.0,
) -> Hunt:
    """Look for the shortest run, of at most `depth_max` steps, that breaks an `always` or an obligation.

    consts: constants with a fixed value; the solver chooses all others, and faults have no budget.
    only: names (before any instance or row) to ask for; empty for all. Lemmas are asked only by name.
    """
    flat = ground(system, sizes, consts, start)
    unrolled = _Unrolled(flat, [b for b in _bad(flat) if _asked(b, only)], seconds_max)
    for depth in range(depth_max + 1):
        answer = unrolled.ask(depth)
        if answer == SAT:
            return unrolled.found(depth, dict(consts or {}), dict(start or {}))
        if answer == UNKNOWN:
            why = f"no counterexample up to depth {depth - 1}; then the solver gave up: {unrolled.why}"
            return Hunt(Result("bmc", "bmc", METHOD, f"depth {depth}", "unknown", why), flat)
    why = f"no counterexample up to depth {depth_max} for constants up to {CONST_MAX}; it was looked for no further"
    return Hunt(Result("bmc", "bmc", METHOD, f"depth {depth_max}", "unknown", why), flat)


def _asked(bad: _Bad, only: Sequence[str]) -> bool:
    return bad.name.split("[")[0].split(" ")[0] in only or bad.name in only if only else bad.kind != "lemma"


def _bad(flat: Flat) -> list[_Bad]:
    """Everything that must not be so in any reachable state."""
    out = [_Bad(n, p.kind, neg(f)) for n, p, f, _ in flat.properties() if p.kind in ("always", "lemma")]
    out += [_Bad(o.name, "handled", conj(o.pending, neg(o.accepted))) for o in flat.obligations]
    out += [_Bad(n, "in_order", conj(s.guard, neg(a))) for s in flat.steps for n, a in s.asserts]
    for name, var in flat.vars.items():
        if var.type == INT:
            low = Operation("<", (Ref(name), Const(var.lo, INT)), BOOL)
            out.append(_Bad(f"bounds:{name}", "bounds", low))
    return [b for b in out if not (isinstance(b.node, Const) and b.node.value is False)]


class _Unrolled:
    """The system over times 0, 1, 2, …: one set of variables a time, one chosen step between two."""

    def __init__(self, flat: Flat, bad: list[_Bad], seconds_max: float) -> None:
        self.flat = flat
        self.bad = bad
        self.deadline = time.monotonic() + seconds_max
        self.why = ""
        self.solver = z3.SolverFor("QF_BV")
        self.symbols = {name: z3.BitVec(name, BITS) for name in flat.symbols}
        for symbol in self.symbols.values():
            self.solver.add(symbol >= 0, symbol <= CONST_MAX)
        self.states: list[dict[str, Any]] = []
        self.taken: list[Any] = []
        self.writers: dict[str, list[tuple[int, Node]]] = {}
        for place, step in enumerate(flat.steps):
            for name, node in step.updates.items():
                self.writers.setdefault(name, []).append((place, node))

    def read(self, node: Node, at: int) -> Any:
        """`node` at a time."""
        state = self.states[at]
        return read(node, READING, lambda ref: state[ref.name] if ref.name in state else self.symbols[ref.name])

    def extend(self) -> None:
        """Add the next time."""
        at = len(self.states)
        self.states.append({name: _variable(f"{name}@{at}", var.type) for name, var in self.flat.vars.items()})
        if at == 0:
            for name, var in self.flat.vars.items():
                self.solver.add(self.states[0][name] == self.read(var.init, 0))
            return
        taken = [z3.Bool(f"step {place}@{at}") for place in range(len(self.flat.steps))]
        self.taken.append(taken)
        self.solver.add(z3.PbEq([(flag, 1) for flag in taken], 1))
        for flag, step in zip(taken, self.flat.steps, strict=True):
            self.solver.add(z3.Implies(flag, self.read(step.guard, at - 1)))
        for name, term in self.states[at].items():
            value = self.states[at - 1][name]
            for place, node in self.writers.get(name, []):
                value = z3.If(taken[place], self.read(node, at - 1), value)
            self.solver.add(term == value)

    def ask(self, depth: int) -> str:
        """Whether some run of `depth` steps ends in a bad state."""
        while len(self.states) <= depth:
            self.extend()
        left_ms = int((self.deadline - time.monotonic()) * 1000)
        if left_ms <= 0:
            self.why = "its time was over"
            return UNKNOWN
        self.solver.set("timeout", left_ms)
        self.solver.push()
        self.solver.add(z3.Or(*(self.read(b.node, depth) for b in self.bad)))
        answer = str(self.solver.check())
        if answer == SAT:
            self.model = self.solver.model()
        self.why = self.solver.reason_unknown() if answer == UNKNOWN else ""
        self.solver.pop()
        return answer

    def found(self, depth: int, consts: dict[str, int], start: dict[str, str]) -> Hunt:
        """The model as a trace of the system with numbers for its constants, run again step by step."""
        chosen = []
        for taken in self.taken[:depth]:
            chosen.append(next(p for p, flag in enumerate(taken) if z3.is_true(self.model.eval(flag))))
        steps = [self.flat.steps[place] for place in chosen]
        system = self.flat.system
        for name, symbol in self.symbols.items():
            consts[name] = self.model.eval(symbol, model_completion=True).as_signed_long()
        for name in {a.budget for a in system.actions.values() if a.budget in self.symbols}:
            consts[name] = sum(1 for step in steps if step.action in system.actions and budget(system, step) == name)
        flat = ground(system, self.flat.sizes, consts, start)
        moves, state = rerun(flat, steps)
        scope = f"depth {depth}"
        if moves is None:
            why = "the solver's run does not replay on the grounded system: a fault of the encoding or of the solver"
            return Hunt(Result("bmc", "bmc", METHOD, scope, "unknown", why), flat)
        broken = [b for b in _bad(flat) if _truth(b.node, flat, state)]
        broken = [b for b in broken if b.name in {x.name for x in self.bad}]
        if not broken:
            why = "the solver's run ends in a state that breaks nothing: a fault of the encoding or of the solver"
            return Hunt(Result("bmc", "bmc", METHOD, scope, "unknown", why), flat)
        values = ", ".join(f"{k} = {v}" for k, v in consts.items())
        why = f"a run of {depth} steps, with {values}"
        trace = Trace(tuple(moves), None, dict(state))
        return Hunt(Result(broken[0].name, broken[0].kind, METHOD, scope, "refuted", why, trace), flat)


def budget(system: System, step: Step) -> str:
    """The constant that bounds the step's action, if one does."""
    return system.actions[step.action].budget if step.action in system.actions else ""


def rerun(flat: Flat, steps: Sequence[Step]) -> tuple[list[Move] | None, dict[str, int]]:
    """The same steps in `flat`, whose constants have values; None where one of them cannot happen."""
    state = {name: int(_number(var.init, flat, {})) for name, var in flat.vars.items()}
    moves: list[Move] = []
    for wanted in steps:
        for place, step in enumerate(flat.steps):
            same = (step.label, step.rows, step.chosen) == (wanted.label, wanted.rows, wanted.chosen)
            if same and dict(step.fields) == dict(wanted.fields) and _truth(step.guard, flat, state):
                new = {name: int(_number(node, flat, state)) for name, node in step.updates.items()}
                changed: dict[str, tuple[object, object]] = {}
                changed |= {n: (state[n], v) for n, v in new.items() if state[n] != v}
                moves.append(Move(step.label, place, changed))
                state |= new
                break
        else:
            return None, state
    return moves, state


def _number(node: Node, flat: Flat, state: Mapping[str, int]) -> int:
    def value(ref: Ref) -> bool | int:
        return bool(state[ref.name]) if flat.vars[ref.name].type == BOOL else state[ref.name]

    return int(evaluate(node, value))


def _truth(node: Node, flat: Flat, state: Mapping[str, int]) -> bool:
    return bool(_number(node, flat, state))
