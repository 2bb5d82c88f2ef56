"""The expression language: parser, errors, and the equality of its readings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_fsm.errors import Span, SpecError
from rlt_fsm.expr import (
    BOOL,
    INT,
    OPERATORS,
    Add,
    Const,
    Enum,
    Member,
    Node,
    Op,
    Quant,
    Ref,
    Scope,
    Seen,
    Symbol,
    Type,
    evaluate,
    fold,
    parse,
    read,
    refs,
    show,
    substitute,
    to_python,
)

COLOUR = Enum("colour", ("red", "green", "blue"))
STATE = Enum("Lamp state", ("off", "on_"))
SPAN = Span("spec/x.yaml", 7, 11, 40)
SCOPE = Scope(
    {
        "x": Symbol(INT),
        "y": Symbol(INT),
        "p": Symbol(BOOL),
        "q": Symbol(BOOL),
        "c": Symbol(COLOUR),
        "d": Symbol(COLOUR),
        "grid": Symbol(INT, ("r", "b")),
        "came": Symbol(Seen()),
        "seq": Symbol(INT),
    },
    {"Lamp": ((), {"state": Symbol(STATE), "lit": Symbol(INT)}), "Wire": (("r",), {"hot": Symbol(BOOL)})},
    ("r", "b"),
    {"secret": "'secret' is a fact of the world"},
)
VALUES: dict[str, int | bool] = {"x": 2, "y": 5, "p": True, "q": False, "c": 1, "d": 2, "Lamp.lit": 3, "Lamp.state": 1}


def bare(node: Node) -> Node:
    """The tree without its offsets in the text."""
    if isinstance(node, Const):
        return Const(node.value, node.type)
    if isinstance(node, Ref):
        return Ref(node.name, tuple(bare(i) for i in node.index), node.field, node.type)
    if isinstance(node, Op):
        return Op(node.op, tuple(bare(a) for a in node.args), node.type)
    if isinstance(node, Quant):
        return Quant(node.kind, node.binders, bare(node.body), node.type)
    of = bare(node.of)
    assert isinstance(of, Ref)
    return Member(node.item, of) if isinstance(node, Member) else Add(of, node.item)


def value_of(text: str) -> object:
    """What `text` is worth under VALUES."""
    return evaluate(parse(text, SCOPE, SPAN), lambda ref: VALUES[str(ref)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x + y - 1", 6),
        ("y - x - 1", 2),  # to the left
        ("y - (x - 1)", 4),
        ("x - -1", 3),
        ("p or q and q", True),  # `and` before `or`
        ("(p or q) and q", False),
        ("not p or p", True),  # `not` before `or`
        ("not p == q", True),  # comparison before `not`
        ("q implies q implies q", True),  # to the right
        ("(q implies p) implies q", False),
        ("p or q implies q", False),  # `or` before `implies`
        ("x + 1 == 3 and y > x", True),
        ("c == green", True),
        ("green == c", True),
        ("c in {red, blue}", False),
        ("c not in {red, blue}", True),
        ("not c in {red, blue}", True),
        ("c == d", False),
        ("x + 3 in {4, 5}", True),
        ("x if p else y", 2),
        ("1 if q else 2 if p else 3", 2),
        ("x + 1 if q else y", 5),
        ("Lamp.state == on_ and Lamp.lit >= 3", True),
        ("not not p", True),
        ("true and not false", True),
    ],
)
def test_text_has_its_value(text: str, value: object) -> None:
    """Goal: precedence and associativity are what readers expect. Method: values worked out by hand."""
    assert value_of(text) == value


def test_quantifiers_and_indices() -> None:
    """Goal: binders bind, indices are kept. Method: the tree of a formula of a system."""
    text = "all(r, b: grid[r, b] > 0 implies Wire[r].hot) and count(r: Wire[r].hot) > 1"
    node = parse(text, SCOPE, SPAN)
    spelled = text.replace("count(r: Wire[r].hot)", "sum(r: 1 if Wire[r].hot else 0)")

    assert [str(ref) for ref in refs(node)] == ["grid[r, b]", "r", "b", "Wire[r].hot", "r", "Wire[r].hot", "r"]
    assert show(node) == text
    assert show(parse(spelled, SCOPE, SPAN)) == text


def test_seen_has_its_own_two_words() -> None:
    """Goal: `in` and `add` over a seen variable. Method: a set of bits."""
    values = {"came": 0b1010, "seq": 3}
    again = parse("seq in came", SCOPE, SPAN)
    more = parse("add(came, seq)", SCOPE, SPAN, Seen())

    assert evaluate(again, lambda ref: values[ref.name]) is True
    assert evaluate(parse("seq not in came", SCOPE, SPAN), lambda ref: values[ref.name]) is False
    assert evaluate(more, lambda ref: {"came": 0, "seq": 2}[ref.name]) == 0b100
    assert eval(to_python(again, str), dict(values)) is True
    assert eval(to_python(more, str), dict(values)) == 0b1010


@pytest.mark.parametrize(
    ("text", "kind", "under"),
    [
        ("x +", "bad-expression", ""),
        ("(x > 1", "bad-expression", ""),
        ("x > 1)", "bad-expression", ")"),
        ("x && y", "bad-expression", "&"),
        ("x * 2 == 1", "bad-expression", "*"),
        ("0 < x < 3", "bad-expression", "<"),
        ("p == q == p", "bad-expression", "=="),
        ("p and and q", "bad-expression", "and"),
        ("x == 1 if p", "bad-expression", ""),
        ("nope == 1", "unknown-name", "nope"),
        ("p and nope", "unknown-name", "nope"),
        ("Lamp.nope == 1", "unknown-name", "Lamp.nope"),
        ("Lump.lit == 1", "unknown-name", "Lump"),
        ("Lamp.", "bad-expression", ""),
        ("Lamp == 1", "unknown-name", "Lamp"),
        ("p and not", "bad-expression", ""),
        ("add(came,", "bad-expression", ""),
        ("all(", "unknown-name", ""),
        ("all(z: p)", "unknown-name", "z"),
        ("c == yellow", "unknown-value", "yellow"),
        ("c in {red, yellow}", "unknown-value", "yellow"),
        ("Lamp.state == broken", "unknown-state", "broken"),
        ("x and p", "type-mismatch", "x"),
        ("p + 1 == 2", "type-mismatch", "p"),
        ("x == p", "type-mismatch", "=="),
        ("c == Lamp.state", "type-mismatch", "=="),
        ("p if x else q", "type-mismatch", "x"),
        ("x in came == 1", "bad-expression", "=="),
        ("1 in came", "type-mismatch", "1"),
        ("x in y", "type-mismatch", "in"),
        ("grid > 0", "bad-index", "grid"),
        ("grid[x] > 0", "bad-index", "grid[x]"),
        ("x[1] > 0", "bad-index", "x[1]"),
        ("Wire.hot", "bad-index", "Wire.hot"),
        ("secret > 0", "world-in-guard", "secret"),
        ("secret[1] and p", "world-in-guard", "secret[1]"),
        ("x", "type-mismatch", "x"),
    ],
)
def test_a_mistake_is_shown_under_its_word(text: str, kind: str, under: str) -> None:
    """Goal: every error names its place in the file. Method: the kind, and the text that the span covers."""
    with pytest.raises(SpecError) as caught:
        parse(text, SCOPE, SPAN, BOOL)

    (finding,) = caught.value.findings
    start = finding.span.column - SPAN.column
    assert finding.kind == kind
    assert (finding.span.file, finding.span.line) == (SPAN.file, SPAN.line)
    if under:
        assert text[start:].startswith(under)
        assert finding.span.length in (1, len(under))
    else:
        assert start == len(text)


def test_a_near_miss_is_suggested() -> None:
    """Goal: a misspelling costs one look. Method: the hint of an unknown enumeral."""
    with pytest.raises(SpecError) as caught:
        parse("c == gren", SCOPE, SPAN, BOOL)

    assert caught.value.findings[0].hint == "did you mean 'green'? known: red, green, blue"


def test_a_wild_text_is_refused_not_crashed_on() -> None:
    """Goal: no text crashes the reader. Method: brackets deeper than Python's stack."""
    with pytest.raises(SpecError) as caught:
        parse("(" * 5000 + "p" + ")" * 5000, SCOPE, SPAN, BOOL)

    assert caught.value.findings[0].kind == "bad-expression"


WORDS = ["p", "x", "c", "Lamp", "came", "seq", "red", "1", "all", "sum", "add", "not", "in", "if", "else", "and", "=="]


@settings(max_examples=400)
@given(st.lists(st.sampled_from([*WORDS, *"()[]{}<-.,:r"]), max_size=9).map(" ".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Goal: a text is an expression or a SpecError, nothing else. Method: random words of the language."""
    try:
        node = parse(text, SCOPE, SPAN, BOOL)
    except SpecError as error:
        assert all(f.span.line == SPAN.line for f in error.findings)
    else:
        assert node.type == BOOL


# -- the readings -----------------------------------------------------------------------------------

LEAVES: Mapping[str, list[Node]] = {
    BOOL: [Ref("p", (), "", BOOL), Ref("q", (), "", BOOL)],
    INT: [Ref("x", (), "", INT), Ref("y", (), "", INT), Ref("Lamp", (), "lit", INT)],
    "enum": [Ref("c", (), "", COLOUR), Ref("d", (), "", COLOUR)],
}


def ints() -> st.SearchStrategy[Node]:
    """Typed trees of numbers."""
    leaves = st.one_of(st.sampled_from(LEAVES[INT]), st.integers(0, 4).map(lambda n: Const(n, INT)))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda op, a, b: Op(op, (a, b), INT), st.sampled_from(["+", "-"]), inner, inner),
            st.builds(lambda t, a, b: Op("ite", (t, a, b), INT), st.sampled_from(LEAVES[BOOL]), inner, inner),
        ),
        max_leaves=5,
    )


def enums() -> st.SearchStrategy[Node]:
    """An enum's variable or value."""
    return st.one_of(st.sampled_from(LEAVES["enum"]), st.integers(0, 2).map(lambda n: Const(n, COLOUR)))


def bools() -> st.SearchStrategy[Node]:
    """Typed trees of truths, over numbers and enums."""
    # deferred strategies have a short repr, which Hypothesis asks for
    orders, same = st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.sampled_from(["==", "!="])
    variable = st.sampled_from(LEAVES["enum"])
    leaves = st.one_of(
        st.sampled_from(LEAVES[BOOL]),
        st.builds(lambda op, a, b: Op(op, (a, b), BOOL), orders, st.deferred(ints), st.deferred(ints)),
        st.builds(lambda op, a, b: Op(op, (a, b), BOOL), same, variable, enums()),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(
                lambda op, a, b: Op(op, (a, b), BOOL),
                st.sampled_from(["and", "or", "implies", "==", "!="]),
                inner,
                inner,
            ),
            inner.filter(lambda n: not (isinstance(n, Op) and n.op == "not")).map(lambda a: Op("not", (a,), BOOL)),
            st.builds(lambda t, a, b: Op("ite", (t, a, b), BOOL), inner, inner, inner),
        ),
        max_leaves=8,
    )


TREES = st.deferred(lambda: bools() | ints())
NUMPY = {
    "const": lambda value, type_: np.bool_(value) if type_ == BOOL else np.int64(value),
    "implies": lambda a, b: np.logical_or(np.logical_not(a), b),
    "or": np.logical_or,
    "and": np.logical_and,
    "not": np.logical_not,
    "==": np.equal,
    "!=": np.not_equal,
    "<=": np.less_equal,
    ">=": np.greater_equal,
    "<": np.less,
    ">": np.greater,
    "+": np.add,
    "-": np.subtract,
    "ite": np.where,
}

CASES = st.lists(
    st.fixed_dictionaries(
        {
            "x": st.integers(0, 4),
            "y": st.integers(0, 4),
            "p": st.booleans(),
            "q": st.booleans(),
            "c": st.integers(0, 2),
            "d": st.integers(0, 2),
            "Lamp.lit": st.integers(0, 4),
        }
    ),
    min_size=1,
    max_size=5,
)


def test_numpy_reads_every_operator() -> None:
    """Goal: the table below is whole. Method: its names against the operator table."""
    assert set(NUMPY) == {*OPERATORS, "const"}


def python_name(ref: Ref) -> str:
    """How a variable is called in Python source."""
    return str(ref).replace(".", "_")


@given(TREES, CASES)
def test_the_readings_agree(tree: Node, cases: list[dict[str, int]]) -> None:
    """Goal: what is proved is what runs. Method: random typed trees, walked, as Python source, and over arrays."""
    walked = [evaluate(tree, lambda ref, case=case: case[str(ref)]) for case in cases]

    code = compile(to_python(tree, python_name), "<tree>", "eval")
    ran = [eval(code, {name.replace(".", "_"): value for name, value in case.items()}) for case in cases]
    columns = {name: np.array([case[name] for case in cases]) for name in cases[0]}
    over = np.broadcast_to(read(tree, NUMPY, lambda ref: columns[str(ref)]), len(cases)).tolist()

    assert ran == walked
    assert over == walked
    assert all(isinstance(value, bool) == (tree.type == BOOL) for value in ran)


@given(TREES)
def test_show_and_parse_are_inverse(tree: Node) -> None:
    """Goal: what a message or a page shows is what is meant. Method: random tree -> text -> the same tree."""
    want: Type = tree.type

    assert bare(parse(show(tree), SCOPE, SPAN, want)) == bare(tree)


@given(TREES, CASES)
def test_folding_keeps_the_value(tree: Node, cases: list[dict[str, int]]) -> None:
    """Goal: simplifying changes no meaning. Method: put values in for some variables, fold, evaluate the rest."""

    def put(node: Any) -> Node | None:
        if isinstance(node, Ref) and node.name in ("p", "x", "c"):
            return Const(case[node.name], node.type)
        return None

    for case in cases:
        small = substitute(tree, put)
        assert not any(ref.name in ("p", "x", "c") for ref in refs(small))
        value = evaluate(small, lambda ref, case=case: case[str(ref)])
        assert value == evaluate(tree, lambda ref, case=case: case[str(ref)])


def test_fold_drops_what_is_constant() -> None:
    """Goal: ground formulas stay small. Method: each operator with a constant arm."""
    p, yes, no = Ref("p", (), "", BOOL), Const(True, BOOL), Const(False, BOOL)

    assert fold(Op("implies", (no, p), BOOL)) == yes
    assert fold(Op("implies", (yes, p), BOOL)) == p
    assert fold(Op("implies", (p, no), BOOL)) == Op("not", (p,), BOOL)
    assert fold(Op("and", (p, no), BOOL)) == no
    assert fold(Op("or", (p, yes), BOOL)) == yes
    assert fold(Op("ite", (yes, p, no), BOOL)) == p
    assert fold(Op("+", (Const(2, INT), Const(3, INT)), INT)) == Const(5, INT)
