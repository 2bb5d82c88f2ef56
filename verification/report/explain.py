"""Why a result is what it is: the states of its trace, and the conjunct that is false at the end with its values.

The trace of a refuted result starts where the system starts. The trace of an unknown one is a single step from a
state that the invariant allows and that need not be reachable; it is never shown as a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlt_fsm.expr import Const, Node, Op, conj, conjuncts, evaluate, neg, refs, show
from rlt_fsm.ground import Flat, Step
from verification.confirm import reader
from verification.result import Result
from verification.show import value_text

State = dict[str, int]


@dataclass(frozen=True, slots=True)
class Value:
    """A variable at the end of a trace. `since` counts steps from 1; 0: as at the start."""

    name: str
    text: str
    since: int


@dataclass(frozen=True, slots=True)
class Part:
    """One side of what failed: a condition, whether it holds at the end, and the variables that it reads."""

    text: str
    holds: bool
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Objection:
    """One conjunct that is false, taken apart: of `p implies q`, what makes p hold and what q lacks."""

    text: str
    parts: tuple[Part, ...]


def states(flat: Flat, result: Result) -> list[State]:
    """Every state of the trace, the first one before any step. Empty without a trace."""
    trace = result.trace
    if trace is None:
        return []
    known = {k: v.init.value for k, v in flat.vars.items() if isinstance(v.init, Const)}  # what a scope never changes
    at = {k: int(v) for k, v in known.items()} | {k: int(str(v)) for k, v in trace.final.items()}
    if result.verdict == "refuted":  # `final` is the last state: go back to the first one
        for move in reversed(trace.moves):
            at |= {name: int(str(old)) for name, (old, _) in move.changed.items()}
    found = [at]
    for move in trace.moves:
        at = at | {name: int(str(new)) for name, (_, new) in move.changed.items()}
        found.append(at)
    return found


def value(flat: Flat, name: str, number: object) -> str:
    """A value as the spec writes it: a state or instance by its name."""
    var = flat.system.world.get(name.split("[")[0])
    if var is not None and var.kind in flat.system.instances and isinstance(number, int):
        return "none" if number < 0 else f"{var.kind}{number}"
    return value_text(flat, name, number)


def is_message(flat: Flat, name: str) -> bool:
    """Whether a flat variable is a message on its way, or what it carries."""
    return name.split("[")[0].split(".")[0] in flat.system.channels


def is_budget(name: str) -> bool:
    """Whether a flat variable only counts what a scope still allows."""
    return name.startswith("left:")


def objections(flat: Flat, result: Result) -> list[Objection]:
    """What is false at the end of the trace; empty where there is no trace or nothing can be named."""
    path = states(flat, result)
    if not path:
        return []
    read = reader(flat, path[-1])
    since: dict[str, int] = {}
    for number, move in enumerate(result.trace.moves if result.trace else (), 1):
        since |= dict.fromkeys(move.changed, number)

    def part(node: Node) -> Part:
        names = dict.fromkeys(ref.name for ref in refs(node) if ref.name in path[-1])
        values = (Value(n, value(flat, n, path[-1][n]), since.get(n, 0)) for n in names)
        return Part(show(node), bool(evaluate(node, read)), tuple(values))

    out = []
    for node in _asked(flat, result, path[-1]):
        for item in conjuncts(node):
            if any(ref.name not in path[-1] for ref in refs(item)) or evaluate(item, read):
                continue
            if isinstance(item, Op) and item.op == "implies":
                sides = [part(p) for p in conjuncts(item.args[0])]
                sides += [part(p) for p in conjuncts(item.args[1]) if not evaluate(p, read)]
            else:
                sides = [part(item)]
            out.append(Objection(show(item), tuple(sides)))
    return out


def _asked(flat: Flat, result: Result, last: State) -> Iterator[Node]:
    """The formulas of which one must be false in the last state."""
    read = reader(flat, last)
    for name, _, formula, target in flat.properties():
        if name == result.name:
            yield formula if target is None else target
    for obligation in flat.obligations:
        if obligation.name == result.name:
            tried = [step for step in flat.steps if f"handled:{step.group}" == result.name]
            if not tried:
                yield neg(obligation.pending)
            for step in tried:  # what else the rows would have needed, beside that it comes at all
                yield _beyond(step.guard, obligation.pending)
    for step in flat.steps:
        for name, condition in step.asserts:
            if name == result.name and _takes(step, last, flat):
                yield condition
    if result.kind == "bounds":
        name = result.name.removeprefix("bounds:")
        for step in flat.steps:
            if name in step.updates and _takes(step, last, flat):
                new = evaluate(step.updates[name], read)
                if int(new) < flat.vars[name].lo:
                    yield Op(">=", (step.updates[name], Const(flat.vars[name].lo, flat.vars[name].type)), "bool")


def _beyond(guard: Node, pending: Node) -> Node:
    known = conjuncts(pending)
    return conj(*(part for part in conjuncts(guard) if part not in known))


def _takes(step: Step, at: State, flat: Flat) -> bool:
    return all(r.name in at for r in refs(step.guard)) and bool(evaluate(step.guard, reader(flat, at)))
