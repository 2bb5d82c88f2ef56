"""Stored invariants: the shipped one holds still, and one that was tampered with does not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from inn import COUNTED, OWNED, OWNER, PROMISED
from inn import inn as spec_of

from rlt_fsm.errors import SpecError
from rlt_fsm.load import load
from rlt_fsm.model import Spec
from rlt_fsm.schema import spec_directory
from verification.smt import prove
from verification.smt.parametric import Parametric
from verification.smt.prove import counts
from verification.smt.stored import StoredError, check, file_of, main, read, text_of


@pytest.fixture(scope="module")
def spec() -> Spec:
    """The shipped spec."""
    return load()


@pytest.fixture(scope="module")
def text(spec: Spec) -> str:
    """The stored invariant of the shipped spec."""
    return file_of(spec.need_system()).read_text(encoding="utf-8")


def test_the_stored_invariant_is_shown_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: two solvers that share no code agree. Method: cvc5, on the file and the steps of the spec as it is."""
    code = main([])
    out = capsys.readouterr()

    assert code == 0, out.err
    shown = re.search(r"(\d+) of (\d+) shown again by cvc5", out.out)
    assert shown is not None and shown[1] == shown[2] and int(shown[1]) > 100


def test_the_stored_invariant_is_that_of_the_spec(spec: Spec, text: str) -> None:
    """Goal: the file can be made again. Method: spell it out anew; compare, and look at its size."""
    system = spec.need_system()
    proof = Parametric(system, counts(system))

    assert text_of(spec, proof.clauses) == text, "run `python -m verification.smt.stored --write`"
    assert len(text) < 400_000


ASKED = "desk.free <= count(b: sleeper[b] == none)"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (PROMISED, "true"),  # weaker: another clause leaned on it, or the spec states it
        (PROMISED, PROMISED.replace("== beds", "<= beds")),
        (OWNED.removeprefix("all(r: ").removesuffix(")"), "true"),
        (PROMISED, PROMISED + " and desk.free < beds"),  # stronger: false at the start
        (PROMISED, PROMISED + " and all(r: nights[r] <= 3)"),  # stronger: not kept
    ],
)
def test_an_invariant_that_was_tampered_with_fails(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: the file is not believed. Method: prove and store; change one clause; nothing of it is shown again."""
    monkeypatch.setattr(prove, "COUNTED", COUNTED)
    spec_of(tmp_path, ASKED, (PROMISED, OWNED, OWNER))
    file = tmp_path / "inn.txt"
    where = [str(tmp_path), "--file", str(file)]
    assert main(["--write", *where]) == 0
    text = file.read_text(encoding="utf-8")
    assert text.count(f" {before}\n") == 1

    whole = check([str(tmp_path)], str(file))
    file.write_text(text.replace(f" {before}\n", f" {after}\n"), encoding="utf-8")
    changed = check([str(tmp_path)], str(file))

    assert all(r.holds for r in whole) and not any(r.holds for r in changed)
    assert any(r.trace is not None for r in changed)


def test_a_stale_invariant_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: no invariant of another spec. Method: one space more in the spec."""
    for path in spec_directory().glob("*.yaml"):
        if path.name != "schema.yaml":
            shutil.copy(path, tmp_path)
    changed = tmp_path / "handoff.yaml"
    changed.write_text(changed.read_text(encoding="utf-8") + "\n", encoding="utf-8")

    assert main([str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "pd_handoff.txt:2: stale" in told and "python -m verification.smt.stored --write" in told


def no_head(text: str) -> str:
    """Without the hash of the spec."""
    return re.sub(r"^spec .*\n", "", text, flags=re.M)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_head, "no line 'spec HASH'"),
        (lambda text: text.replace("count b destination_storage\n", ""), "its conditions"),
        (lambda text: text.replace("lemma p_lease", "theorem p_lease"), "cannot read 'theorem p_lease'"),
        (lambda text: text.replace("for all r, b:", "for all r, q:", 1), "is not a clause of a property"),
        (lambda text: text.replace("always no_write_after_reuse\n", "", 1), "is not a clause of a property"),
        (lambda text: text.replace("owner[b] == r", "owner[b] == ", 1), "expected"),
        (lambda text: text.replace("owner[b] == r", "lender[b] == r", 1), "lender"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(
    change: Callable[[str], str], why: str, spec: Spec, text: str, tmp_path: Path
) -> None:
    """Goal: no line is passed over. Method: one mistake each; the file and the line are named."""
    file = tmp_path / "broken.txt"
    file.write_text(change(text), encoding="utf-8")
    assert change(text) != text

    with pytest.raises((StoredError, SpecError)) as caught:
        read(spec, file)

    told = caught.value.show() if isinstance(caught.value, SpecError) else str(caught.value)
    assert why in told and re.search(r"broken\.txt:\d+:", told), told


def test_no_file_is_told(spec: Spec, tmp_path: Path) -> None:
    """Goal: nothing stored is not nothing to check. Method: a file that is not there."""
    with pytest.raises(StoredError, match=r"no invariant is stored for system 'pd_handoff'; run .*--write"):
        read(spec, tmp_path / "none.txt")
