"""A spelled-out system as Promela, one to one: one process, one `d_step` per step, every variable a field of the state.

So SPIN stores exactly the states that the explicit search stores. The updates of a step are simultaneous: they are put
in an order in which none reads what another has written. A question is an option of the loop that can be taken only
where the answer is wrong; it is evaluated once per state, prints its number, and asserts false.

A truth is a bit; an enumeration, a pointer (moved up by one, so that `none` is 0) and a counter are a byte. A counter
above COUNTER_MAX, or below zero, is an error of its own and never a clamp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlt_fsm.expr import BOOL, Const, Enum, Node, Ref, Type, conj, neg, read, refs
from rlt_fsm.ground import Flat, FlatVar
from verification.slicing import Sliced, slice_scope

COUNTER_MAX = 7  # as wide as the explicit search's counters


def _infix(symbol: str) -> Callable[..., str]:
    return lambda *parts: f"({f' {symbol} '.join(parts)})"


PROMELA: Mapping[str, Callable[..., str]] = {
    "implies": lambda a, b: f"(!{a} || {b})",
    "or": _infix("||"),
    "and": _infix("&&"),
    "not": lambda a: f"(!{a})",
    "==": _infix("=="),
    "!=": _infix("!="),
    "<=": _infix("<="),
    ">=": _infix(">="),
    "<": _infix("<"),
    ">": _infix(">"),
    "+": _infix("+"),
    "-": _infix("-"),
    "ite": lambda a, b, c: f"({a} -> {b} : {c})",
}


@dataclass(frozen=True, slots=True)
class Question:
    """Something that must hold in every state: its place in the list is the number that a violation prints."""

    name: str
    kind: str
    holds: Node


@dataclass(frozen=True, slots=True)
class Model:
    """The text, and what the numbers in it mean. counters: the variables that must stay within their bounds."""

    text: str
    questions: list[Question]
    counters: list[str]


def promela(flat: Flat, scope: str = "", lemmas: bool = False) -> Model:
    """The system with everything that its safety asks."""
    sliced = slice_scope(flat)
    names = {name: f"v{place}" for place, name in enumerate(sliced.vars)}
    writer = _Writer(sliced.vars, names)
    asked = [q for q in questions(flat, sliced, lemmas) if not (isinstance(q.holds, Const) and q.holds.value)]
    counters = [name for name, var in sliced.vars.items() if var.hi is None]
    lines = [f"/* {flat.system.name}, scope {scope}: written from the spec; not to be edited. */"]
    for name, var in sliced.vars.items():
        assert isinstance(var.init, Const)
        kind = "bit" if var.type == BOOL else "byte"
        lines.append(f"{kind} {names[name]} = {int(var.init.value) - shift(var)};  /* {name} */")
    lines += writer.temporaries(sliced)
    lines += ["", "active proctype system() {", "do"]
    for number, question in enumerate(asked):
        lines.append(f':: d_step {{ !{writer.of(question.holds)} -> printf("VIOLATION {number}\\n"); assert(false) }}')
    for number, name in enumerate(counters):
        over = f"{names[name]} > {COUNTER_MAX}"
        lines.append(f':: d_step {{ {over} -> printf("OUTSIDE {number} %d\\n", {names[name]}); assert(false) }}')
    for place, step in sliced.steps:
        parts = [writer.of(step.guard), f'printf("STEP {place}\\n")', *writer.updates(step.updates)]
        lines.append(f":: d_step {{ {parts[0]} -> {'; '.join(parts[1:])} }}  /* {step.label} */")
    lines += ["od", "}"]
    return Model("\n".join(lines) + "\n", asked, counters)


def questions(flat: Flat, sliced: Sliced, lemmas: bool) -> list[Question]:
    """As the explicit search asks them: properties, events that must be taken, channels that must keep their order."""
    out = []
    for name, item, formula, _ in flat.properties():
        if item.kind == "always" or (item.kind == "lemma" and lemmas):
            out.append(Question(name, item.kind, sliced.fold(formula)))
    for obligation in flat.obligations:
        pending, accepted = sliced.fold(obligation.pending), sliced.fold(obligation.accepted)
        out.append(Question(obligation.name, "handled", neg(conj(pending, neg(accepted)))))
    orders: dict[str, Node] = {}
    for _, step in sliced.steps:
        for name, condition in step.asserts:
            kept = neg(conj(step.guard, neg(condition)))
            orders[name] = conj(orders[name], kept) if name in orders else kept
    return out + [Question(name, "in_order", node) for name, node in orders.items()]


def shift(var: FlatVar) -> int:
    """What is added to a value before it is stored: a pointer's `none` is -1."""
    return min(var.lo, 0) if var.hi is not None else 0


class _Writer:
    """Expressions and updates, with the names of the text."""

    def __init__(self, variables: Mapping[str, FlatVar], names: Mapping[str, str]) -> None:
        self.vars, self.names = variables, names

    def of(self, node: Node) -> str:
        """The expression."""
        text: str = read(node, {**PROMELA, "const": _literal}, self._value)
        return text

    def _value(self, ref: Ref) -> str:
        low = shift(self.vars[ref.name])
        return f"({self.names[ref.name]} - {-low})" if low else self.names[ref.name]

    def updates(self, changes: Mapping[str, Node]) -> list[str]:
        """Assignments that all have the effect of reading the state before.

        A variable is written once nothing that is left reads it. Where that leaves a circle, one value waits in a
        temporary, which is 0 again at the end, so that it tells no two states apart.
        """
        left = {n: v for n, v in changes.items() if n in self.vars and not (isinstance(v, Ref) and v.name == n)}
        out: list[str] = []
        waiting: list[tuple[str, str]] = []
        while left:
            needed = {ref.name for name, node in left.items() for ref in refs(node) if ref.name != name}
            name = next((n for n in left if n not in needed), next(iter(left)))
            value = self.stored(name, left.pop(name))
            if name in needed:
                waiting.append((name, f"t{len(waiting)}"))
                out.append(f"{waiting[-1][1]} = {value}")
            else:
                out.append(f"{self.names[name]} = {value}")
        for name, temporary in waiting:
            out += [f"{self.names[name]} = {temporary}", f"{temporary} = 0"]
        return out

    def stored(self, name: str, node: Node) -> str:
        """The value as it is kept."""
        low = shift(self.vars[name])
        return f"{self.of(node)} + {-low}" if low else self.of(node)

    def temporaries(self, sliced: Sliced) -> list[str]:
        """Declarations of those that any step needs."""
        most = max((sum(u.startswith("t") for u in self.updates(s.updates)) // 2 for _, s in sliced.steps), default=0)
        return [f"byte t{place};  /* 0 in every state */" for place in range(most)]


def _literal(value: Any, type_: Type) -> str:
    number = int(value)
    return f"({number})" if number < 0 and not isinstance(type_, Enum) else str(number)
