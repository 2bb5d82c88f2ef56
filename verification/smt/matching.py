"""Count what a matching of the invariant says: as many are pointed at as hold a pointer.

Where the invariant says that each `r` of some condition owns a `b`, and that each owned `b` is that of one such
`r` and no other, the owned and the owners are equally many. No clause that speaks of one instance at a time
can say that, so it is added as a clause of its own, which the induction has to prove like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlt_fsm.errors import NOWHERE, Span
from rlt_fsm.expr import BOOL, INT, NONE_VALUE, Const, Node, Op, Quant, Ref, conjuncts, show


@dataclass(frozen=True, slots=True)
class Clause:
    """One conjunct of the invariant: for all instances of `sorts`, `matrix`."""

    name: str
    kind: str
    sorts: tuple[str, ...]
    matrix: Node
    span: Span = NOWHERE


def counted(clauses: Sequence[Clause], counts: Mapping[str, str]) -> list[Clause]:
    """What follows from `clauses` for the sorts that a constant counts, and is not yet among them.

    From `P(r) implies any(b: owner[b] == r)` and `owner[b] == r implies target[r] == b and P(r)`:
    `count(b: owner[b] == none) + count(r: P(r)) ==` the constant that counts `b`.
    """
    said = {show(clause.matrix) for clause in clauses}
    out: list[Clause] = []
    for clause in clauses:
        for pointer, b, r, condition in _owners(clause):
            if b not in counts or not any(_converse(other, pointer, b, r, condition) for other in clauses):
                continue
            unowned = Op("==", (Ref(pointer, (Ref(b),)), Const(NONE_VALUE, INT)), BOOL)
            total = Op("+", (count(b, unowned), count(r, condition)), INT)
            matrix = Op("==", (total, Ref(counts[b])), BOOL)
            if show(matrix) not in said:
                said.add(show(matrix))
                out.append(Clause(f"{pointer}_is_counted", "lemma", (), matrix, clause.span))
    return out


def count(sort: str, condition: Node) -> Node:
    """`count(sort: condition)`."""
    return Quant("sum", (sort,), Op("ite", (condition, Const(1, INT), Const(0, INT)), INT), INT)


def _owners(clause: Clause) -> Iterator[tuple[str, str, str, Node]]:
    """(owner, b, r, P) where the clause says that each `r` with P owns a `b`."""
    left, right = _implication(clause.matrix)
    if left is not None and isinstance(right, Quant) and right.kind == "any":
        for part in conjuncts(right.body):
            found = _points(part)
            if found is not None and (found[1],) == right.binders and (found[2],) == clause.sorts:
                yield (*found, left)


def _converse(clause: Clause, pointer: str, b: str, r: str, condition: Node) -> bool:
    """Whether the clause says that an owned `b` is that of one `r` alone, and that it has `condition`."""
    left, right = _implication(clause.matrix)
    if left is None or right is None or _points(left) != (pointer, b, r):
        return False
    parts = conjuncts(right)
    back = any(found is not None and found[1:] == (r, b) for found in map(_points, parts))
    return back and {show(part) for part in conjuncts(condition)} <= {show(part) for part in parts}


def _implication(node: Node) -> tuple[Node | None, Node | None]:
    return (node.args[0], node.args[1]) if isinstance(node, Op) and node.op == "implies" else (None, None)


def _points(node: Node) -> tuple[str, str, str] | None:
    """(owner, b, r) of `owner[b] == r`."""
    if not (isinstance(node, Op) and node.op == "=="):
        return None
    pointer, value = node.args
    if not (isinstance(pointer, Ref) and isinstance(value, Ref) and len(pointer.index) == 1) or pointer.field:
        return None
    at = pointer.index[0]
    if not isinstance(at, Ref) or value.index or value.field:
        return None
    return pointer.name, at.name, value.name
