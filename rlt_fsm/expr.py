"""Guards and updates: one small typed language, one syntax tree, several readings.

Text such as ``handles == 0 and not staging`` or ``all(r: flying[r] > 0 implies writers[r])`` is
tokenised and parsed here; Python's eval never sees it. Every node keeps its offset in the text, so a
mistake is shown under the word that made it.

The operator table `OPERATORS` is the only place where an operator's types and its Python reading are
written; the NumPy, z3 and Promela readings give one function per name of that table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlt_fsm.errors import Finding, Span, SpecError, suggest

BOOL = "bool"
INT = "int"


@dataclass(frozen=True, slots=True)
class Enum:
    """A type with named values; a value is stored as its place in `names`."""

    label: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True)
class Seen:
    """The type of a `seen` variable: which sequence numbers have come. Only `in` and `add` apply."""

    def __str__(self) -> str:
        return "seen"


Type = str | Enum | Seen


@dataclass(frozen=True, slots=True)
class Operator:
    """One row of the operator table: argument types, result type, and the Python reading."""

    name: str
    takes: str  # "bool", "int", or "same" (both sides of one type)
    gives: str
    python: str
    precedence: int


OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        Operator("implies", BOOL, BOOL, "((not {0}) or {1})", 1),
        Operator("or", BOOL, BOOL, "({0} or {1})", 2),
        Operator("and", BOOL, BOOL, "({0} and {1})", 3),
        Operator("not", BOOL, BOOL, "(not {0})", 4),
        Operator("==", "same", BOOL, "({0} == {1})", 5),
        Operator("!=", "same", BOOL, "({0} != {1})", 5),
        Operator("<=", INT, BOOL, "({0} <= {1})", 5),
        Operator(">=", INT, BOOL, "({0} >= {1})", 5),
        Operator("<", INT, BOOL, "({0} < {1})", 5),
        Operator(">", INT, BOOL, "({0} > {1})", 5),
        Operator("+", INT, INT, "({0} + {1})", 6),
        Operator("-", INT, INT, "({0} - {1})", 6),
        Operator("ite", "ite", "ite", "({1} if {0} else {2})", 0),
    )
}


# -- the tree ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Const:
    """A literal: True, False, or an integer."""

    value: bool | int
    type: Type
    at: int = 0


@dataclass(frozen=True, slots=True)
class Ref:
    """A variable: `posted`, `SourceRetirement.handles`, `flying[r]`, `Import[r].heard`."""

    name: str
    index: tuple[Node, ...] = ()
    field: str = ""
    type: Type = INT
    at: int = 0
    length: int = 1

    def __str__(self) -> str:
        index = "[" + ", ".join(show(i) for i in self.index) + "]" if self.index else ""
        return self.name + index + (f".{self.field}" if self.field else "")


@dataclass(frozen=True, slots=True)
class Op:
    """An operator of the table applied to its arguments."""

    op: str
    args: tuple[Node, ...]
    type: Type
    at: int = 0


@dataclass(frozen=True, slots=True)
class Quant:
    """`all`, `any` or `sum` over every instance of its binders."""

    kind: str
    binders: tuple[str, ...]
    body: Node
    type: Type
    at: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """`seq in seen` (or its negation through `not`): has this sequence number come before?"""

    item: str
    of: Ref
    at: int = 0
    type: Type = BOOL


@dataclass(frozen=True, slots=True)
class Add:
    """`add(seen, seq)`: the set with that sequence number in it."""

    of: Ref
    item: str
    at: int = 0
    type: Type = Seen()


Node = Const | Ref | Op | Quant | Member | Add

TRUE = Const(True, BOOL)
FALSE = Const(False, BOOL)


def conj(*nodes: Node) -> Node:
    """The conjunction, with constants folded away."""
    out: Node | None = None
    for node in nodes:
        if node == TRUE or (isinstance(node, Const) and node.value is True):
            continue
        if isinstance(node, Const) and node.value is False:
            return FALSE
        out = node if out is None else Op("and", (out, node), BOOL)
    return out if out is not None else TRUE


def disj(*nodes: Node) -> Node:
    """The disjunction, with constants folded away."""
    out: Node | None = None
    for node in nodes:
        if isinstance(node, Const) and node.value is False:
            continue
        if isinstance(node, Const) and node.value is True:
            return TRUE
        out = node if out is None else Op("or", (out, node), BOOL)
    return out if out is not None else FALSE


def neg(node: Node) -> Node:
    """The negation, with constants and double negations folded away."""
    if isinstance(node, Const):
        return FALSE if node.value else TRUE
    if isinstance(node, Op) and node.op == "not":
        return node.args[0]
    return Op("not", (node,), BOOL)


def ite(test: Node, then: Node, other: Node) -> Node:
    """`then if test else other`, folded where the test is constant or both arms agree."""
    if isinstance(test, Const):
        return then if test.value else other
    if then == other:
        return then
    return Op("ite", (test, then, other), then.type)


# -- scope ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Symbol:
    """What a name means in a scope: its type and the index sorts it must be given."""

    type: Type
    index: tuple[str, ...] = ()


class Scope:
    """The names an expression may use. Subclasses say what `name`, `name[i]` and `name.field` mean."""

    def __init__(
        self,
        names: Mapping[str, Symbol],
        fields: Mapping[str, tuple[tuple[str, ...], Mapping[str, Symbol]]] | None = None,
        sorts: tuple[str, ...] = (),
        hidden: Mapping[str, str] | None = None,
    ) -> None:
        self.names = dict(names)
        self.fields = dict(fields or {})
        self.sorts = sorts
        self.hidden = dict(hidden or {})  # names that exist but may not be read here, with the reason

    def known(self) -> list[str]:
        """Every name that may be written, for suggestions."""
        return [*self.names, *self.fields]


# -- parser -----------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<symbol>==|!=|<=|>=|[-+<>()\[\]{},.:]))"
)
_KEYWORDS = {"and", "or", "not", "implies", "in", "if", "else", "true", "false", "none"}
NONE_VALUE = -1


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


class _Parser:
    def __init__(self, text: str, scope: Scope, span: Span) -> None:
        self.text = text
        self.scope = scope
        self.span = span
        self.binders: list[str] = []
        self.tokens = self._tokenise()
        self.place = 0

    def fail(self, kind: str, message: str, at: int, length: int = 1, hint: str = "") -> SpecError:
        return SpecError([Finding(kind, message, self.span.within(at, length), hint)])

    def _tokenise(self) -> list[_Token]:
        out: list[_Token] = []
        place = 0
        end = len(self.text.rstrip())
        while place < end:
            match = _TOKEN.match(self.text, place)
            if match is None:
                at = place + (len(self.text[place:]) - len(self.text[place:].lstrip()))
                raise self.fail(
                    "bad-expression",
                    f"cannot read '{self.text[at]}' in an expression",
                    at,
                    1,
                    "known: names, numbers, and or not implies in if else, == != < <= > >= + -, all any sum",
                )
            kind = str(match.lastgroup)
            out.append(_Token(kind, match.group(kind), match.start(kind)))
            place = match.end()
        out.append(_Token("end", "", end))
        return out

    @property
    def now(self) -> _Token:
        return self.tokens[self.place]

    def take(self, text: str | None = None) -> _Token:
        token = self.now
        if text is not None and token.text != text:
            found = f"'{token.text}'" if token.text else "the end"
            raise self.fail("bad-expression", f"expected '{text}', found {found}", token.at, len(token.text))
        self.place = min(self.place + 1, len(self.tokens) - 1)  # the end stays the end
        return token

    def parse(self) -> Node:
        node = self.expression()
        if self.now.kind != "end":
            raise self.fail("bad-expression", f"unexpected '{self.now.text}'", self.now.at, len(self.now.text))
        return node

    def expression(self) -> Node:
        """cond := binary ['if' binary 'else' cond]"""
        node = self.binary(1)
        if self.now.text == "if":
            at = self.take().at
            test = self.binary(1)
            self.want(test, BOOL, "the condition of 'if'")
            self.take("else")
            other = self.expression()
            node, other = self.same(node, other, at)
            return Op("ite", (test, node, other), node.type, at)
        return node

    def binary(self, floor: int) -> Node:
        if self.now.text == "not" and floor <= 4:
            at = self.take().at
            inner = self.binary(4)
            self.want(inner, BOOL, "'not'")
            left: Node = neg(inner)
            if isinstance(left, Op):
                left = Op(left.op, left.args, left.type, at)
        else:
            left = self.atom()
        compared = False
        while True:
            token = self.now
            if token.text == "in" or (token.text == "not" and self.tokens[self.place + 1].text == "in"):
                if floor > 5:
                    return left
                self.no_chain(compared, token)
                left = self.membership(left)
                compared = True
                continue
            op = OPERATORS.get(token.text)
            if op is None or op.name in ("not", "ite") or op.precedence < floor:
                return left
            if op.precedence == 5:
                self.no_chain(compared, token)
            compared = op.precedence == 5
            self.take()
            # implies is right associative; the rest bind to the left
            right = self.binary(op.precedence if op.name == "implies" else op.precedence + 1)
            if op.takes == BOOL:
                self.want(left, BOOL, f"the left of '{op.name}'")
                self.want(right, BOOL, f"the right of '{op.name}'")
            elif op.takes == INT:
                self.want(left, INT, f"the left of '{op.name}'")
                self.want(right, INT, f"the right of '{op.name}'")
            else:
                left, right = self.same(left, right, token.at)
            left = Op(op.name, (left, right), op.gives, token.at)

    def no_chain(self, compared: bool, token: _Token) -> None:
        """Refuse `a < b < c` and `a == b == c`, which Python would read in a way of its own."""
        if compared:
            raise self.fail(
                "bad-expression",
                "comparisons do not chain",
                token.at,
                len(token.text),
                "write `a < b and b < c`, or put one of them in brackets",
            )

    def membership(self, left: Node) -> Node:
        negated = self.now.text == "not"
        at = self.take().at
        if negated:
            self.take("in")
        if self.now.text == "{":
            self.take()
            tests: list[Node] = []
            while True:
                item = self.atom(expected=left.type)
                a, b = self.same(left, item, item.at)
                tests.append(Op("==", (a, b), BOOL, item.at))
                if self.now.text != ",":
                    break
                self.take()
            self.take("}")
            node = disj(*tests)
        else:
            group = self.atom()
            if not (isinstance(group, Ref) and isinstance(group.type, Seen)):
                raise self.fail("type-mismatch", "the right of 'in' must be {…} or a variable of type seen", at)
            if not isinstance(left, Ref):
                raise self.fail("type-mismatch", "the left of 'in' must be an event's index field", left.at)
            node = Member(left.name, group, at)
        return neg(node) if negated else node

    def atom(self, expected: Type | None = None) -> Node:
        token = self.take()
        if token.kind == "number":
            return Const(int(token.text), INT, token.at)
        if token.text == "(":
            node = self.expression()
            self.take(")")
            return node
        if token.text == "-" and self.now.kind == "number":
            return Const(-int(self.take().text), INT, token.at)
        if token.kind != "name":
            found = f"'{token.text}'" if token.text else "the end"
            raise self.fail("bad-expression", f"expected a value, found {found}", token.at, len(token.text))
        if token.text in ("true", "false"):
            return Const(token.text == "true", BOOL, token.at)
        if token.text == "none":
            return Const(NONE_VALUE, INT, token.at)
        if token.text in ("all", "any", "sum", "count", "add") and self.now.text == "(":
            return self.call(token)
        if token.text in _KEYWORDS:
            raise self.fail("bad-expression", f"'{token.text}' cannot stand here", token.at, len(token.text))
        return self.name(token, expected)

    def call(self, token: _Token) -> Node:
        self.take("(")
        if token.text == "add":
            group = self.atom()
            self.take(",")
            item = self.take()
            self.take(")")
            if not (isinstance(group, Ref) and isinstance(group.type, Seen)):
                raise self.fail("type-mismatch", "add(seen, field) takes a variable of type seen", token.at, 3)
            return Add(group, item.text, token.at)
        names: list[str] = []
        while True:
            name = self.take()
            if name.text not in self.scope.sorts:
                raise self.fail(
                    "unknown-name",
                    f"'{name.text}' is not an index",
                    name.at,
                    len(name.text),
                    suggest(name.text, self.scope.sorts),
                )
            names.append(name.text)
            if self.now.text != ",":
                break
            self.take()
        self.take(":")
        self.binders.extend(names)
        body = self.expression()
        del self.binders[-len(names) :]
        self.take(")")
        self.want(body, INT if token.text == "sum" else BOOL, f"the body of '{token.text}'")
        if token.text == "count":  # how many: the sum of a one for each
            return Quant("sum", tuple(names), ite(body, Const(1, INT), Const(0, INT)), INT, token.at)
        return Quant(token.text, tuple(names), body, INT if token.text == "sum" else BOOL, token.at)

    def name(self, token: _Token, expected: Type | None) -> Node:
        text = token.text
        if text in self.binders and self.now.text not in ("[", "."):
            return Ref(text, (), "", INT, token.at, len(text))
        index: list[Node] = []
        field = ""
        if self.now.text == "[":
            self.take()
            while True:
                index.append(self.expression())
                if self.now.text != ",":
                    break
                self.take()
            self.take("]")
        if self.now.text == ".":
            self.take()
            if self.now.kind != "name":
                raise self.fail("bad-expression", f"expected a name after '{text}.'", self.now.at)
            field = self.take().text
        length = self.tokens[self.place - 1].at + len(self.tokens[self.place - 1].text) - token.at
        if text in self.scope.hidden:
            raise self.fail("world-in-guard", self.scope.hidden[text], token.at, length)
        if field:
            known = self.scope.fields.get(text)
            if known is None:
                hint = suggest(text, self.scope.known())
                raise self.fail("unknown-name", f"'{text}' is not known here", token.at, len(text), hint)
            sorts, members = known
            symbol = members.get(field)
            if symbol is None:
                raise self.fail("unknown-name", f"'{text}' has no '{field}'", token.at, length, suggest(field, members))
            wanted = sorts
        else:
            found = self.scope.names.get(text)
            if found is None:
                if isinstance(expected, Enum) and text in expected.names:
                    return Const(expected.names.index(text), expected, token.at)
                # a bare word may still turn out to be an enumeral when its other side is known
                return Ref(text, (), "", Enum("?", ()), token.at, len(text))
            symbol, wanted = found, found.index
        if len(index) != len(wanted):
            need = f"[{', '.join(wanted)}]" if wanted else "no index"
            raise self.fail("bad-index", f"'{text}' takes {need}", token.at, length)
        for node in index:
            self.want(node, INT, "an index")
        return Ref(text, tuple(index), field, symbol.type, token.at, length)

    def unknown(self, ref: Ref) -> SpecError:
        """A word that is neither a variable nor a value of the other side's enum."""
        if ref.name in self.scope.fields:
            members = ", ".join(f"{ref.name}.{field}" for field in self.scope.fields[ref.name][1])
            return self.fail(
                "unknown-name", f"'{ref.name}' is no value by itself", ref.at, ref.length, f"known: {members}"
            )
        hint = suggest(ref.name, self.scope.known())
        return self.fail("unknown-name", f"'{ref.name}' is not known here", ref.at, ref.length, hint)

    def want(self, node: Node, type_: Type, what: str) -> None:
        if isinstance(node, Ref) and node.type == Enum("?", ()):
            raise self.unknown(node)
        if node.type != type_:
            length = node.length if isinstance(node, Ref) else 1
            raise self.fail("type-mismatch", f"{what} must be {type_}, not {node.type}", node.at, length)

    def same(self, left: Node, right: Node, at: int) -> tuple[Node, Node]:
        """Give both sides one type, reading a bare word as an enumeral of the other side's type."""
        for a, b, swap in ((left, right, False), (right, left, True)):
            if isinstance(b, Ref) and b.type == Enum("?", ()) and isinstance(a.type, Enum) and a.type.names:
                if b.name not in a.type.names:
                    raise self.fail(
                        "unknown-state" if a.type.label.endswith("state") else "unknown-value",
                        f"'{b.name}' is not a value of {a.type.label}",
                        b.at,
                        b.length,
                        suggest(b.name, a.type.names),
                    )
                literal = Const(a.type.names.index(b.name), a.type, b.at)
                return (literal, a) if swap else (a, literal)
        for node in (left, right):
            if isinstance(node, Ref) and node.type == Enum("?", ()):
                raise self.unknown(node)
        if left.type != right.type:
            raise self.fail("type-mismatch", f"cannot compare {left.type} with {right.type}", at)
        return left, right


def parse(text: str, scope: Scope, span: Span, want: Type | None = None) -> Node:
    """Read `text` in `scope`. `span` is where the text stands, for errors.

    Raises SpecError (kinds: bad-expression, unknown-name, unknown-state, unknown-value, type-mismatch,
    bad-index, world-in-guard) that points into the text.
    """
    parser = _Parser(text, scope, span)
    try:
        node = parser.parse()
    except RecursionError:
        raise parser.fail("bad-expression", "it nests too deep", 0, len(text), "split it into conjuncts") from None
    if want is not None:
        if isinstance(want, Enum) and isinstance(node, Ref) and node.type == Enum("?", ()):
            if node.name in want.names:
                return Const(want.names.index(node.name), want, node.at)
            raise parser.fail(
                "unknown-value",
                f"'{node.name}' is not a value of {want.label}",
                node.at,
                node.length,
                suggest(node.name, want.names),
            )
        parser.want(node, want, "this expression")
    elif isinstance(node, Ref):
        parser.want(node, node.type if node.type != Enum("?", ()) else BOOL, "this expression")
    return node


# -- walking and readings ---------------------------------------------------------------------------


def children(node: Node) -> tuple[Node, ...]:
    """The direct sub-expressions."""
    if isinstance(node, Op):
        return node.args
    if isinstance(node, Ref):
        return node.index
    if isinstance(node, Quant):
        return (node.body,)
    if isinstance(node, Member | Add):
        return (node.of,)
    return ()


def refs(node: Node) -> Iterator[Ref]:
    """Every variable the expression reads, in order, with repeats."""
    if isinstance(node, Ref):
        yield node
    for child in children(node):
        yield from refs(child)


def substitute(node: Node, replace: Callable[[Ref | Member | Add], Node | None]) -> Node:
    """A copy with every Ref, Member or Add that `replace` answers for put in its place."""
    if isinstance(node, Ref | Member | Add):
        new = replace(node)
        if new is not None:
            return new
        if isinstance(node, Ref) and node.index:
            index = tuple(substitute(i, replace) for i in node.index)
            return Ref(node.name, index, node.field, node.type, node.at, node.length)
        return node
    if isinstance(node, Op):
        args = tuple(substitute(a, replace) for a in node.args)
        return fold(Op(node.op, args, node.type, node.at))
    if isinstance(node, Quant):
        return Quant(node.kind, node.binders, substitute(node.body, replace), node.type, node.at)
    return node


_FOLD: dict[str, Callable[..., bool | int]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
}


def fold(node: Op) -> Node:
    """Simplify one operator whose arguments may be constants."""
    if node.op == "and":
        return conj(*node.args)
    if node.op == "or":
        return disj(*node.args)
    if node.op == "not":
        return neg(node.args[0])
    if node.op == "ite":
        return ite(*node.args)
    if node.op == "implies":
        left, right = node.args
        if isinstance(left, Const):
            return right if left.value else TRUE
        if isinstance(right, Const):
            return TRUE if right.value else neg(left)
        return node
    left, right = node.args
    if isinstance(left, Const) and isinstance(right, Const):
        return Const(_FOLD[node.op](left.value, right.value), node.type)
    return node


def to_python(node: Node, name: Callable[[Ref], str]) -> str:
    """Python source for the expression; `name` says how a variable is written there."""
    if isinstance(node, Const):
        return repr(node.value)
    if isinstance(node, Ref):
        return name(node)
    if isinstance(node, Member):
        return f"({name(node.of)} >> {node.item} & 1 == 1)"
    if isinstance(node, Add):
        return f"({name(node.of)} | 1 << {node.item})"
    if isinstance(node, Op):
        return OPERATORS[node.op].python.format(*(to_python(a, name) for a in node.args))
    raise TypeError(f"cannot write {node} as Python before its instances are spelled out")


def evaluate(node: Node, value: Callable[[Ref], Any]) -> Any:
    """The expression's value, by walking the tree. Slow and obvious: the reference reading."""
    if isinstance(node, Const):
        return node.value
    if isinstance(node, Ref):
        return value(node)
    if isinstance(node, Op):
        if node.op == "and":
            return all(evaluate(a, value) for a in node.args)
        if node.op == "or":
            return any(evaluate(a, value) for a in node.args)
        if node.op == "not":
            return not evaluate(node.args[0], value)
        if node.op == "implies":
            return (not evaluate(node.args[0], value)) or evaluate(node.args[1], value)
        if node.op == "ite":
            return evaluate(node.args[1] if evaluate(node.args[0], value) else node.args[2], value)
        return _FOLD[node.op](*(evaluate(a, value) for a in node.args))
    if isinstance(node, Member):
        return bool(value(node.of) >> value(Ref(node.item)) & 1)
    if isinstance(node, Add):
        return value(node.of) | 1 << value(Ref(node.item))
    raise TypeError(f"cannot evaluate {node} before its instances are spelled out")


def read(node: Node, reading: Mapping[str, Callable[..., Any]], value: Callable[[Ref], Any]) -> Any:
    """The expression in another reading: `reading` has one function per operator, and `const`."""
    if isinstance(node, Const):
        return reading["const"](node.value, node.type)
    if isinstance(node, Ref):
        return value(node)
    if isinstance(node, Op):
        return reading[node.op](*(read(a, reading, value) for a in node.args))
    raise TypeError(f"cannot read {node} before its instances are spelled out")


def show(node: Node) -> str:
    """The expression as text again, with enumerals by name."""
    if isinstance(node, Const):
        if isinstance(node.type, Enum) and 0 <= node.value < len(node.type.names):
            return node.type.names[node.value]
        return str(node.value).lower() if isinstance(node.value, bool) else str(node.value)
    if isinstance(node, Ref):
        return str(node)
    if isinstance(node, Member):
        return f"{node.item} in {node.of}"
    if isinstance(node, Add):
        return f"add({node.of}, {node.item})"
    if isinstance(node, Quant):
        binders, body = ", ".join(node.binders), node.body
        ones = (
            isinstance(body, Op) and body.op == "ite" and [getattr(a, "value", None) for a in body.args[1:]] == [1, 0]
        )
        if node.kind == "sum" and isinstance(body, Op) and ones:
            return f"count({binders}: {show(body.args[0])})"
        return f"{node.kind}({binders}: {show(body)})"
    one_of = _one_of(node)
    if one_of is not None:
        return f"{_wrap(one_of[0], 6)} in {{{', '.join(show(value) for value in one_of[1])}}}"
    if node.op == "not":
        inner = node.args[0]
        one_of = _one_of(inner)
        if one_of is not None:
            return f"{_wrap(one_of[0], 6)} not in {{{', '.join(show(value) for value in one_of[1])}}}"
        if isinstance(inner, Member):
            return f"{inner.item} not in {inner.of}"
        return f"not {_wrap(inner, 4)}"
    if node.op == "ite":
        return f"{_wrap(node.args[1], 1)} if {_wrap(node.args[0], 1)} else {show(node.args[2])}"
    level = OPERATORS[node.op].precedence
    # `implies` binds to the right; comparisons do not chain; the rest bind to the left
    left = level + 1 if node.op == "implies" or level == 5 else level
    right = level if node.op == "implies" else level + 1
    return f"{_wrap(node.args[0], left)} {node.op} {_wrap(node.args[1], right)}"


def _wrap(node: Node, level: int) -> str:
    text = show(node)
    return f"({text})" if _binds(node) < level else text


def _binds(node: Node) -> int:
    """How tight the text of `node` holds together: a precedence of the operator table."""
    if isinstance(node, Member) or _one_of(node) is not None:
        return 5
    if isinstance(node, Op):
        if node.op == "not" and (isinstance(node.args[0], Member) or _one_of(node.args[0]) is not None):
            return 5
        return OPERATORS[node.op].precedence
    return 9


def _one_of(node: Node) -> tuple[Node, list[Const]] | None:
    """(x, [a, b]) where the node says `x == a or x == b` of an enum: what `x in {a, b}` is read as."""
    if not (isinstance(node, Op) and node.op == "or"):
        return None
    left, right = node.args
    if not (isinstance(right, Op) and right.op == "==" and isinstance(right.type, str)):
        return None
    subject, value = right.args
    if not (isinstance(value, Const) and isinstance(value.type, Enum)):
        return None
    before = _one_of(left)
    if before is not None:
        return (subject, [*before[1], value]) if before[0] == subject else None
    if isinstance(left, Op) and left.op == "==" and left.args[0] == subject:
        first = left.args[1]
        if isinstance(first, Const) and isinstance(first.type, Enum):
            return subject, [first, value]
    return None


def conjuncts(node: Node) -> list[Node]:
    """The parts of a conjunction, left to right."""
    if isinstance(node, Op) and node.op == "and":
        return [part for arg in node.args for part in conjuncts(arg)]
    return [node]
