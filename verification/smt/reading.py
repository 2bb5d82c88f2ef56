"""The z3 reading of an expression: one function per operator of the table, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import z3

from rlt_fsm.expr import BOOL, Const, Node, Op, Ref, Type

Z3: dict[str, Callable[..., Any]] = {
    "implies": z3.Implies,
    "or": z3.Or,
    "and": z3.And,
    "not": z3.Not,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "ite": z3.If,
}


def literal(value: bool | int, type_: Type) -> Any:
    """A constant; enumerals are their place in the enumeration."""
    return z3.BoolVal(bool(value)) if type_ == BOOL else z3.IntVal(int(value))


def variable(name: str, type_: Type) -> Any:
    """A z3 constant of the variable's sort."""
    return z3.Bool(name) if type_ == BOOL else z3.Int(name)


def to_z3(node: Node, value: Callable[[Ref], Any]) -> Any:
    """The expression as a z3 term; `value` gives each variable's term."""
    if isinstance(node, Const):
        return literal(node.value, node.type)
    if isinstance(node, Ref):
        return value(node)
    assert isinstance(node, Op)
    return Z3[node.op](*(to_z3(a, value) for a in node.args))
