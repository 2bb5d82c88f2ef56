"""`rlt-verify` as people use it: exit codes, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from guard_deletions import EDITS, apply

from rlt_fsm.load import load
from rlt_fsm.schema import spec_directory
from verification.cli import main
from verification.report.scenario import judge, read


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A copy of the spec in which D gives its pages back while a writer is left."""
    edit = next(e for e in EDITS if e.name == "release_destination_with_a_writer")
    return str(apply(edit, tmp_path))


def test_the_shipped_spec_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the command that CI runs. Method: quick scopes and the induction, both methods."""
    assert main(["run", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "0 refuted, 0 unknown" in out
    assert "no_write_after_reuse" in out and "induction for any number of requests (z3)" in out
    assert "rows that no scope fires" not in out


def test_an_edited_copy_is_refuted_with_a_chart(
    broken: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Goal: a refutation that explains itself. Method: a deleted conjunct; both methods; the trace saved."""
    assert main(["run", "--quiet", "--spec", broken, "--save", str(tmp_path / "found")]) == 1
    out = capsys.readouterr().out
    assert "REFUTED no_write_after_reuse in scope one_everything" in out
    assert "|-- cancel r0 ->|" in out or "cancel r0" in out
    assert "DestinationRetirement[0].state retiring -> retired" in out
    assert "confirmed: the compiled classes take all" in out
    assert (tmp_path / "found" / "no_write_after_reuse.jsonl").is_file()
    kept = read(tmp_path / "found" / "no_write_after_reuse.json")
    assert kept.kind == "violation" and kept.false and not kept.differs(judge(load(), kept.trace))
    assert "the shipped spec refuses this run" in out


def test_induction_alone_does_not_call_an_invariant_refuted(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a step that is not kept proves nothing reachable. Method: the solver alone on the broken copy."""
    assert main(["run", "--quiet", "--spec", broken, "--backend", "smt"]) == 3
    assert "not kept by step 'settle_destination" in capsys.readouterr().out


def test_a_second_solver_and_a_measure_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the stored invariant by cvc5, and endings by z3. Method: each alone; a proof says on what."""
    assert main(["run", "--quiet", "--backend", "cvc5"]) == 0
    assert "no_write_after_reuse" in (out := capsys.readouterr().out) and "(cvc5)" in out

    assert main(["run", "--quiet", "--backend", "smt", "--only", "runs_end"]) == 0
    assert "runs_end is proved given the invariant" in capsys.readouterr().out


def test_a_stored_invariant_of_another_spec_is_no_proof(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a proof belongs to one spec. Method: an edited copy, asked of the second solver alone."""
    assert main(["run", "--quiet", "--backend", "cvc5", "--spec", broken]) == 3
    assert "unknown: induction: not asked" in capsys.readouterr().out


def test_a_hunt_finds_and_does_not_prove(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: bounded model checking says what it found, and no more. Method: a broken copy; the shipped spec; a typo."""
    asked = ["hunt", "--scope", "no_slot", "--only", "no_write_after_reuse", "--free", "cancels", "--seconds", "60"]
    assert main([*asked, "--spec", broken, "--depth", "16"]) == 1
    out = capsys.readouterr().out
    assert "REFUTED no_write_after_reuse" in out and "confirmed: the compiled classes take all" in out

    assert main([*asked, "--depth", "6"]) == 3
    assert "nothing found in no_slot: no counterexample up to depth 6" in capsys.readouterr().out

    assert main(["hunt", "--scope", "no_slt"]) == 2
    assert "no scope 'no_slt'" in capsys.readouterr().err


def test_one_property_and_one_scope_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: quick answers while editing. Method: a liveness property in its scope."""
    assert main(["run", "--quiet", "--scope", "no_slot", "--only", "a_receipt_frees_p"]) == 0
    out = capsys.readouterr().out
    assert "a_receipt_frees_p" in out and "no_send_after_reuse" not in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run", "--quiet", "--scope", "enormous"], "no scope or suite 'enormous'"),
        (
            ["run", "--quiet", "--only", "nothing", "--scope", "no_slot", "--backend", "explicit"],
            "no property 'nothing'",
        ),
        (["run", "--quiet", "--spec", "/nowhere"], "unreadable"),
    ],
)
def test_bad_usage_says_what_is_known(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: exit 2 and a way on. Method: an unknown scope, property and path."""
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_a_spec_with_a_mistake_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a bad spec is shown at its line. Method: a state misspelt."""
    text = (spec_directory() / "transport.yaml").read_text(encoding="utf-8").replace("to: posted}", "to: postd}")
    (tmp_path / "transport.yaml").write_text(text, encoding="utf-8")

    assert main(["run", "--quiet", "--spec", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "unknown-state: 'postd' is not a state of machine 'WriteHandle'" in err and "did you mean 'posted'" in err
