"""Spell out a system of any number of instances: a window on a few of them, and symbols for the rest.

Of each sort (generations, storages) the window names two instances, 0 and 1, and a third, 2, that
stands for an arbitrary instance outside of those two. `all`, `any` and `sum` range over 0 and 1 by
parts, and over everything else by one symbol, the rest of that quantifier. A variable that points at
an instance points at none, at 0, 1 or 2, or ELSEWHERE. Any of the three may not exist.

This is exact only for specs that treat all instances alike. `Window` refuses, naming the place, one
that does not (`Refused`). The argument is written out in docs/proof_cutoff.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rlt_fsm.errors import Span
from rlt_fsm.expr import (
    BOOL,
    INT,
    NONE_VALUE,
    Const,
    Node,
    Op,
    Quant,
    Ref,
    children,
    conj,
    disj,
    fold,
    ite,
    neg,
    refs,
    show,
    substitute,
)
from rlt_fsm.ground import Flat, FlatVar, Grounder, flat_name
from rlt_fsm.model import Assignment, System

NAMED = (0, 1)
OUTSIDE = 2
ELSEWHERE = 3


class Refused(Exception):
    """The spec is outside of the class that the argument covers; the text names the place."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What a quantifier says of the instances outside of 0 and 1, as one symbol.

    kind: `sum`, or `any` (an `all` is the negation of an `any`). part: the body at instance 2.
    reads: every variable whose change can change the body at 2.
    """

    ref: Ref
    kind: str
    sort: str
    part: Node
    reads: frozenset[str]


class Window(Grounder):
    """A system with two named instances of each sort, an arbitrary third, and a rest."""

    def __init__(self, system: System) -> None:
        super().__init__(Flat(system, dict.fromkeys(system.instances, len(NAMED) + 1), {}, symbols=dict(system.consts)))
        self.rests: dict[str, Rest] = {}
        self.pointers = {v.name: v.kind for v in system.world.values() if v.kind in system.instances}
        self.alike = Alike(system, self.pointers)
        self.alike.check()
        self.build({})
        for step in self.flat.steps:
            named = [sort for sort, _ in (*step.index, *step.chosen)]
            if len(named) > len(set(named)):
                at = system.effects[step.effects[-1]].span if step.effects else system.span
                raise Refused(f"{at}: '{step.label}' names two instances of one sort: {', '.join(named)}")
        for name, var in list(self.flat.vars.items()):
            if self.base(name) in self.pointers:
                self.flat.vars[name] = FlatVar(name, var.type, var.lo, ELSEWHERE, var.init, var.world)

    # -- the present state --------------------------------------------------------------------------

    def exists(self, sort: str, value: int) -> Node:
        return Ref(f"exists:{sort}{value}", type=BOOL)

    def quantified(self, node: Quant, binding: dict[str, int]) -> Node:
        sort = node.binders[0]
        body = node.body
        if len(node.binders) > 1:
            body = Quant(node.kind, node.binders[1:], node.body, node.type)
        parts = [(self.exists(sort, value), self.expr(body, {**binding, sort: value})) for value in NAMED]
        if node.kind == "sum":
            total: Node = self.rest("sum", sort, body, binding)
            for there, part in parts:
                total = fold(Op("+", (total, ite(there, part, Const(0, INT))), INT))
            return total
        if node.kind == "any":
            return disj(*(conj(there, part) for there, part in parts), self.rest("any", sort, body, binding))
        none_else = neg(self.rest("any", sort, neg(body), binding))
        return conj(*(fold(Op("implies", pair, BOOL)) for pair in parts), none_else)

    def rest(self, kind: str, sort: str, body: Node, binding: Mapping[str, int]) -> Node:
        """The symbol for what the quantifier says of the instances outside of the window."""
        fixed = {b: v for b, v in binding.items() if b != sort and b in {r.name for r in refs(body)}}
        name = f"rest:{kind}({sort}: {show(body)})" + "".join(f"[{b}{v}]" for b, v in sorted(fixed.items()))
        if name not in self.rests:
            part = self.expr(body, {**fixed, sort: OUTSIDE})
            self.rests[name] = self.record(Ref(name, type=INT if kind == "sum" else BOOL), kind, sort, part)
        return self.rests[name].ref

    def record(self, ref: Ref, kind: str, sort: str, part: Node) -> Rest:
        """A Rest with its reads, those of the rests within it included."""
        reads: set[str] = set()
        for inner in refs(part):
            reads |= self.rests[inner.name].reads if inner.name in self.rests else {inner.name}
        return Rest(ref, kind, sort, part, frozenset(reads))

    def reads(self, node: Node) -> frozenset[str]:
        """Every variable that `node` depends on, those of its rests included."""
        out: set[str] = set()
        for ref in refs(node):
            out |= {ref.name} | (self.rests[ref.name].reads if ref.name in self.rests else set())
        return frozenset(out)

    def after(self, node: Node, updates: Mapping[str, Node]) -> Node:
        if isinstance(node, Ref) and node.name in self.rests and self.rests[node.name].reads & updates.keys():
            raise Refused(
                f"an effect reads {node.name.removeprefix('rest:')} after an effect of the same step changed it"
            )
        return super().after(node, updates)

    # -- the state after a step -----------------------------------------------------------------------

    def later(self, node: Node, updates: Mapping[str, Node], mark: str) -> Node:
        """`node` in the state after `updates`. A rest that they can change is another symbol, marked."""

        def value(ref: object) -> Node | None:
            assert isinstance(ref, Ref)
            rest = self.rests.get(ref.name)
            if rest is None:
                return updates.get(ref.name)
            if not rest.reads & updates.keys():
                return None
            name = f"{ref.name}{mark}"
            if name not in self.rests:
                part = self.later(rest.part, updates, mark)
                self.rests[name] = self.record(Ref(name, type=ref.type), rest.kind, rest.sort, part)
            return self.rests[name].ref

        return substitute(node, value)

    # -- names ------------------------------------------------------------------------------------------

    @staticmethod
    def base(name: str) -> str:
        """`flying` of `flying[1]`."""
        return name.partition("[")[0]

    def index(self, name: str) -> dict[str, int]:
        """The instances that a flat variable belongs to."""
        base, _, rest = name.partition("[")
        if not rest:
            return {}
        var = self.system.world.get(base)
        sorts = (self.system.generation,) if var is None else var.per
        return dict(zip(sorts, (int(v) for v in rest.partition("]")[0].split(",")), strict=True))

    def well_pointed(self) -> list[Node]:
        """A pointer of an instance that exists points at one that exists."""
        out = []
        for name in self.flat.vars:
            if self.base(name) in self.pointers:
                mine = [self.exists(s, v) for s, v in self.index(name).items()]
                for value in (*NAMED, OUTSIDE):
                    here = Op("==", (self.ref(name), Const(value, INT)), BOOL)
                    there = self.exists(self.pointers[self.base(name)], value)
                    out.append(fold(Op("implies", (conj(*mine, here), there), BOOL)))
        return out

    def pointing(self, named: Mapping[str, int], sort: str) -> Iterator[Ref]:
        """The variables of the named instances that point at instances of `sort`."""
        for name, kind in self.pointers.items():
            per = self.system.world[name].per
            if kind == sort and per and all(s in named for s in per):
                yield self.ref(flat_name(name, [str(named[s]) for s in per]))


class Alike:
    """Whether a system treats all instances of a sort alike, so that names do not matter.

    An instance may be used as an index, be compared with a variable that points at one, and be stored in
    such a variable. Nothing may name a particular instance, count with it, or compare two pointers.
    """

    def __init__(self, system: System, pointers: Mapping[str, str]) -> None:
        self.system = system
        self.pointers = pointers

    def check(self) -> None:
        """Raise Refused at the first place that tells instances apart."""
        system = self.system
        for var in system.world.values():
            if var.name in self.pointers and var.init != Const(NONE_VALUE, INT, getattr(var.init, "at", 0)):
                raise self.refused(
                    var.span, f"'{var.name}' begins as a particular instance; only none is alike for all"
                )
        for prop in system.properties:
            if prop.kind in ("always", "lemma"):
                self.expression(prop.formula, (), prop.span)
        for process in system.processes.values():
            if process.alive is not None:
                self.expression(process.alive, (), process.span)
        for action in system.actions.values():
            self.expression(action.when, action.per, action.span)
            self.assignments(action.set, action.per, action.span)
            for values in action.fields.values():
                for value in values:
                    if not isinstance(value, str):
                        self.expression(value, action.per, action.span)
        for effect in system.effects.values():
            bound = (system.generation, *([effect.choose] if effect.choose else []))
            self.expression(effect.needs, bound, effect.span)
            self.assignments(effect.set, bound, effect.span)

    def refused(self, span: Span, why: str) -> Refused:
        return Refused(f"{span}: {why}")

    def assignments(self, sets: tuple[Assignment, ...], bound: tuple[str, ...], span: Span) -> None:
        for item in sets:
            inside = (*bound, *item.over)
            self.expression(item.when, inside, span)
            for target, value in item.set:
                self.expression(target, inside, span, stored=True)
                assert isinstance(target, Ref)
                self.expression(value, inside, span, stored=target.name in self.pointers)

    def sort_of(self, node: Node, bound: Collection[str]) -> str:
        """The sort of an instance or pointer; "none" for none; "" for anything else."""
        if isinstance(node, Const):
            return "none" if node.type == INT and node.value == NONE_VALUE else ""
        if isinstance(node, Ref) and not node.field:
            return node.name if node.name in bound and not node.index else self.pointers.get(node.name, "")
        return ""

    def expression(self, node: Node, bound: Collection[str], span: Span, stored: bool = False) -> None:
        """Check `node`. stored: it is put into a pointer, so it may be an instance."""
        if isinstance(node, Quant):
            return self.expression(node.body, {*bound, *node.binders}, span)
        if isinstance(node, Ref):
            for item in node.index:
                if not (isinstance(item, Ref) and item.name in bound):
                    raise self.refused(span, f"the index of '{show(node)}' must be an instance bound there")
            if self.sort_of(node, bound) and not stored:
                raise self.refused(span, f"'{show(node)}' is an instance, used as a number")
            return None
        if isinstance(node, Op) and node.op in ("==", "!="):
            left, right = (self.sort_of(a, bound) for a in node.args)
            if (left and left != "none") or (right and right != "none"):
                if not (left and right) or {left, right} - {"none"} != {left if left != "none" else right}:
                    raise self.refused(span, f"'{show(node)}' compares an instance with something else")
                if all(isinstance(a, Ref) and a.name in self.pointers for a in node.args):
                    raise self.refused(span, f"'{show(node)}' compares two pointers; both may point elsewhere")
                for part in node.args:
                    self.expression(part, bound, span, stored=True)
                return None
        if stored and isinstance(node, Op) and node.op == "ite":
            self.expression(node.args[0], bound, span)
            for part in node.args[1:]:
                self.expression(part, bound, span, stored=True)
            return None
        if stored and isinstance(node, Const) and node.type == INT and node.value != NONE_VALUE:
            raise self.refused(span, f"'{show(node)}' names a particular instance")
        for part in children(node):
            self.expression(part, bound, span)
        return None
