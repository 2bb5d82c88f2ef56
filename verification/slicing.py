"""Leave out what a scope cannot use: variables that never change, and steps whose guard is then false.

Exact: a variable that no remaining step writes keeps its initial value in every reachable state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlt_fsm.expr import Const, Node, Ref, substitute
from rlt_fsm.ground import Flat, FlatVar, Step, contradictory


@dataclass(frozen=True, slots=True)
class Sliced:
    """What is left, and the value of each variable that was folded away."""

    vars: dict[str, FlatVar]
    steps: list[tuple[int, Step]]  # (place in Flat.steps, folded step)
    fixed: dict[str, Const]

    def fold(self, node: Node) -> Node:
        """A formula with the fixed variables put in."""
        return put(node, self.fixed)


def put(node: Node, fixed: Mapping[str, Node]) -> Node:
    """`node` with the variables of `fixed` replaced by their values, and folded."""

    def value(ref: object) -> Node | None:
        return fixed.get(ref.name) if isinstance(ref, Ref) else None

    return substitute(node, value)


def slice_scope(flat: Flat) -> Sliced:
    """Fold until nothing more folds."""
    steps = list(enumerate(flat.steps))
    fixed: dict[str, Const] = {}
    while True:
        written: set[str] = set()
        for _, step in steps:
            for name, value in step.updates.items():
                init = flat.vars[name].init
                same = isinstance(value, Ref) and value.name == name
                constant = isinstance(value, Const) and isinstance(init, Const) and value.value == init.value
                if not same and not constant:
                    written.add(name)
        now: dict[str, Const] = {}
        for name, var in flat.vars.items():
            if name not in written:
                assert isinstance(var.init, Const)
                now[name] = Const(var.init.value, var.type)
        folded = []
        for place, step in steps:
            guard = put(step.guard, now)
            if contradictory(guard):
                continue
            updates = {n: put(v, now) for n, v in step.updates.items() if n not in now}
            asserts = tuple((n, put(a, now)) for n, a in step.asserts)
            folded.append((place, replace(step, guard=guard, updates=updates, asserts=asserts)))
        done = len(folded) == len(steps) and len(now) == len(fixed)
        steps, fixed = folded, now
        if done:
            return Sliced({n: v for n, v in flat.vars.items() if n not in fixed}, steps, fixed)
