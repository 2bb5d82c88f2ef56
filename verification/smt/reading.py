"""The solvers' readings of an expression: one function per operator of the table, and one small interface.

Everything that is asked here is an expression over flat variables; a solver only ever answers `sat`,
`unsat` or, with the reason, `unknown`. Two solvers that share no code read the same expressions: z3
proves, and cvc5 checks again what was stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import cvc5
import z3

from rlt_fsm.expr import BOOL, Const, Node, Op, Ref, Type, read

SAT, UNSAT, UNKNOWN = "sat", "unsat", "unknown"

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

CVC5: dict[str, Any] = {
    "implies": cvc5.Kind.IMPLIES,
    "or": cvc5.Kind.OR,
    "and": cvc5.Kind.AND,
    "not": cvc5.Kind.NOT,
    "==": cvc5.Kind.EQUAL,
    "!=": cvc5.Kind.DISTINCT,
    "<=": cvc5.Kind.LEQ,
    ">=": cvc5.Kind.GEQ,
    "<": cvc5.Kind.LT,
    ">": cvc5.Kind.GT,
    "+": cvc5.Kind.ADD,
    "-": cvc5.Kind.SUB,
    "ite": cvc5.Kind.ITE,
}


def literal(value: bool | int, type_: Type) -> Any:
    """A z3 constant; enumerals are their place in the enumeration."""
    return z3.BoolVal(bool(value)) if type_ == BOOL else z3.IntVal(int(value))


def variable(name: str, type_: Type) -> Any:
    """A z3 variable of the type's sort."""
    return z3.Bool(name) if type_ == BOOL else z3.Int(name)


def to_z3(node: Node, value: Callable[[Ref], Any]) -> Any:
    """The expression as a z3 term; `value` gives each variable's term."""
    return read(node, {**Z3, "const": literal}, value)


class Solver(ABC):
    """A stack of assertions. The last frame can be taken back; `why` is the reason of an `unknown`."""

    name = ""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_ms = int(timeout_s * 1000)
        self.why = ""
        self.terms: dict[int, tuple[Node, Any]] = {}

    def term(self, node: Node) -> Any:
        """The solver's term; one node is read once, however often it is asked about."""
        found = self.terms.get(id(node))
        if found is None:
            found = self.terms[id(node)] = (node, self.read(node))
        return found[1]

    @abstractmethod
    def read(self, node: Node) -> Any:
        """Build the term of `node`."""

    @abstractmethod
    def add(self, *nodes: Node) -> None:
        """Assert."""

    @abstractmethod
    def any_false(self, nodes: list[Node]) -> None:
        """Assert that at least one of `nodes` is false."""

    @abstractmethod
    def push(self) -> None:
        """Open a frame."""

    @abstractmethod
    def pop(self) -> None:
        """Take the last frame back."""

    @abstractmethod
    def check(self) -> str:
        """`sat`, `unsat` or `unknown`."""

    @abstractmethod
    def value(self, node: Node) -> bool | int:
        """The value of `node` in the model of the last `sat`."""


class Z3Solver(Solver):
    """z3 over linear integers."""

    name = "z3"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.solver = z3.SolverFor("QF_LIA")
        self.solver.set("timeout", self.timeout_ms)
        self.model: Any = None
        self.names: dict[str, Any] = {}

    def read(self, node: Node) -> Any:
        return to_z3(node, self.named)

    def named(self, ref: Ref) -> Any:
        """The variable, made once."""
        if ref.name not in self.names:
            self.names[ref.name] = variable(ref.name, ref.type)
        return self.names[ref.name]

    def add(self, *nodes: Node) -> None:
        self.solver.add(*(self.term(n) for n in nodes))

    def any_false(self, nodes: list[Node]) -> None:
        self.solver.add(z3.Or(*(z3.Not(self.term(n)) for n in nodes)))

    def push(self) -> None:
        self.solver.push()

    def pop(self) -> None:
        self.solver.pop()

    def check(self) -> str:
        answer = str(self.solver.check())
        self.model = self.solver.model() if answer == SAT else None
        self.why = self.solver.reason_unknown() if answer == UNKNOWN else ""
        return answer

    def value(self, node: Node) -> bool | int:
        found = self.model.eval(self.term(node), model_completion=True)
        return z3.is_true(found) if node.type == BOOL else int(found.as_long())


class Cvc5Solver(Solver):
    """cvc5 over linear integers: the second opinion."""

    name = "cvc5"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.terms_of = cvc5.TermManager()
        self.solver = cvc5.Solver(self.terms_of)
        self.solver.setLogic("QF_LIA")
        for option, setting in (
            ("incremental", "true"),
            ("produce-models", "true"),
            ("tlimit-per", str(self.timeout_ms)),
        ):
            self.solver.setOption(option, setting)
        self.names: dict[str, Any] = {}

    def read(self, node: Node) -> Any:
        if isinstance(node, Const):
            make = self.terms_of
            return make.mkBoolean(bool(node.value)) if node.type == BOOL else make.mkInteger(int(node.value))
        if isinstance(node, Ref):
            if node.name not in self.names:
                make = self.terms_of
                sort = make.getBooleanSort() if node.type == BOOL else make.getIntegerSort()
                self.names[node.name] = make.mkConst(sort, node.name)
            return self.names[node.name]
        assert isinstance(node, Op)
        return self.terms_of.mkTerm(CVC5[node.op], *(self.read(a) for a in node.args))

    def add(self, *nodes: Node) -> None:
        for node in nodes:
            self.solver.assertFormula(self.term(node))

    def any_false(self, nodes: list[Node]) -> None:
        parts = [self.terms_of.mkTerm(cvc5.Kind.NOT, self.term(n)) for n in nodes]
        self.solver.assertFormula(parts[0] if len(parts) == 1 else self.terms_of.mkTerm(cvc5.Kind.OR, *parts))

    def push(self) -> None:
        self.solver.push()

    def pop(self) -> None:
        self.solver.pop()

    def check(self) -> str:
        result = self.solver.checkSat()
        self.why = ""
        if result.isSat():
            return SAT
        if result.isUnsat():
            return UNSAT
        self.why = str(result.getUnknownExplanation())
        return UNKNOWN

    def value(self, node: Node) -> bool | int:
        found = self.solver.getValue(self.term(node))
        return bool(found.getBooleanValue()) if node.type == BOOL else int(found.getIntegerValue())
