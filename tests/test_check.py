"""The checker, and every mistake of `tests/bad_specs/` with the message that it gets."""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt_fsm.check import check, overlap
from rlt_fsm.cli import main
from rlt_fsm.errors import KINDS, NOWHERE, Finding, SpecError
from rlt_fsm.expr import BOOL, INT, Enum, Node, Scope, Symbol, evaluate, parse
from rlt_fsm.load import load

ROOT = Path(__file__).resolve().parent.parent
BAD = sorted(Path(__file__).parent.glob("bad_specs/*.yaml"))
SCOPE = Scope(
    {
        "x": Symbol(INT),
        "y": Symbol(INT),
        "p": Symbol(BOOL),
        "q": Symbol(BOOL),
        "c": Symbol(Enum("colour", ("red", "green", "blue"))),
    }
)


def findings_of(path: Path) -> tuple[Finding, ...]:
    """What the loader or the checker finds in one file."""
    try:
        spec = load([path])
    except SpecError as error:
        return error.findings
    return tuple(check(spec))


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_a_mistake_gets_the_recorded_message(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: each mistake is refused where it stands, in the recorded words.

    Method: run `rlt-spec check` on the file and compare what it writes to stderr with the .txt beside it.
    After an intended change of a message, `RECORD=1 pytest tests/test_check.py -rs` writes the new ones and
    shows each difference as the reason of a skip; look at them before you commit them.
    """
    monkeypatch.chdir(ROOT)

    code = main(["check", str(path.relative_to(ROOT))])
    said = capsys.readouterr().err.replace(os.sep, "/")

    record = path.with_suffix(".txt")
    before = record.read_text(encoding="utf-8") if record.exists() else ""
    if os.environ.get("RECORD") and said != before:
        record.write_text(said, encoding="utf-8")
        diff = difflib.unified_diff(before.splitlines(), said.splitlines(), "before", "after", lineterm="")
        pytest.skip("recorded:\n" + "\n".join(diff))
    assert code == 2
    assert said == before


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_a_bad_spec_holds_one_mistake(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one mistake gives findings of one kind, so that no message buries the cause. Method: count kinds."""
    monkeypatch.chdir(ROOT)

    kinds = {finding.kind for finding in findings_of(path)}

    assert len(kinds) == 1
    assert path.read_bytes().startswith(b"# One mistake: ")


def test_every_kind_of_finding_has_a_bad_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no message goes unseen. Method: the kinds met in the bad specs against the table of kinds."""
    monkeypatch.chdir(ROOT)

    met = {finding.kind for path in BAD for finding in findings_of(path)}

    assert met == set(KINDS)


def test_every_kind_in_the_code_is_in_the_table() -> None:
    """Goal: the table of kinds is whole, and names nothing that is never said.

    Method: collect the words that the reader and the checker give as a kind from their syntax trees.
    """
    said: set[str] = set()
    for name in ("load.py", "load_yaml.py", "schema.py", "expr.py", "check.py"):
        for node in ast.walk(ast.parse((ROOT / "rlt_fsm" / name).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = [word for arg in node.args for word in ast.walk(arg) if isinstance(word, ast.Constant)]
            if called in ("Finding", "error", "warning", "fail"):
                first = [w.value for w in ast.walk(node.args[0]) if isinstance(w, ast.Constant)]
                said |= {w for w in first if isinstance(w, str) and (w in KINDS or re.fullmatch(r"\w+(-\w+)+", w))}
            elif called == "known" and words:
                said.add(f"unknown-{words[-1].value}")

    assert said == set(KINDS)


def test_the_shipped_spec_is_clean() -> None:
    """Goal: nothing in `spec/` is unused, unreachable or ambiguous. Method: check it."""
    assert [str(f.span) + " " + f.message for f in check(load())] == []


def test_a_single_shipped_file_is_clean() -> None:
    """Goal: a file can be checked by itself; what needs the system is then not asked. Method: check each."""
    for path in sorted((ROOT / "spec").glob("*.yaml")):
        if path.name not in ("schema.yaml", "system.yaml"):
            assert check(load([path])) == [], path.name


EXCLUSIVE = [
    ("x == 0", "x > 0"),
    ("p and x > 7", "x > 7 and not p"),
    ("c in {red, green}", "c == blue"),
    ("x < y", "y <= x"),
    ("x > 8", "x + 1 == 5"),
]
TOGETHER = [
    ("x > 7", "x > 9"),
    ("p", "q"),
    ("c != red", "c != blue"),
    ("x <= y", "y <= x"),
    ("p or q", "not p"),
]


def read(text: str) -> Node:
    """A guard over the names of this module."""
    return parse(text, SCOPE, NOWHERE, BOOL)


@pytest.mark.parametrize(("left", "right"), EXCLUSIVE)
def test_guards_that_exclude_each_other_do_not_overlap(left: str, right: str) -> None:
    """Goal: no false alarm. Method: pairs that no values satisfy, some with numbers above the small domain."""
    assert overlap([read(left)], [read(right)]) is None


@pytest.mark.parametrize(("left", "right"), TOGETHER)
def test_guards_that_can_both_hold_overlap(left: str, right: str) -> None:
    """Goal: an overlap is found and shown. Method: put the values that are given back into both guards."""
    found = overlap([read(left)], [read(right)])

    assert found is not None
    values = {name: _value(text) for name, text in found.items()}
    for guard in (read(left), read(right)):
        assert evaluate(guard, lambda ref: values.get(str(ref), 0)) is True


def _value(text: str) -> int | bool:
    colours = {"red": 0, "green": 1, "blue": 2, "true": True, "false": False}
    return colours[text] if text in colours else int(text)


def _holds(guard: Node, case: Mapping[str, int]) -> bool:
    return bool(evaluate(guard, lambda ref: case[str(ref)]))


ATOMS = ["p", "q", "not p", "x == 0", "x > 1", "x < y", "c == red", "c in {green, blue}", "x + y <= 3"]


@given(st.lists(st.sampled_from(ATOMS), max_size=4), st.lists(st.sampled_from(ATOMS), max_size=4))
def test_overlap_agrees_with_trying_everything(left: list[str], right: list[str]) -> None:
    """Goal: dropping branches early loses nothing. Method: against a loop over every value of the domain."""
    guards = [read(text) for text in (*left, *right)]
    names = ("x", "y", "p", "q", "c")
    domains = (range(5), range(5), (False, True), (False, True), range(3))
    cases = [dict(zip(names, values, strict=True)) for values in itertools.product(*domains)]
    expected = any(all(_holds(guard, case) for guard in guards) for case in cases)

    found = overlap([read(text) for text in left], [read(text) for text in right])

    assert (found is not None) == expected
