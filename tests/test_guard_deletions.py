"""The negative side: every hand edit of the spec that breaks a promise is refuted, with a trace that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from guard_deletions import EDITS, Edit, apply

from rlt_fsm.load import load
from verification.confirm import confirm
from verification.run import run
from verification.show import counterexample


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.name)
def test_an_edit_is_refuted_and_its_trace_runs(edit: Edit, tmp_path: Path) -> None:
    """Goal: the properties can fail, for the right reason. Method: edit the YAML, run the quick scopes explicitly,
    find the named property refuted, and run its trace on the compiled classes."""
    apply(edit, tmp_path)

    report = run(load([tmp_path]), [str(tmp_path)], "quick", backends=("explicit",))

    assert report.exit_code == 1
    hit = [r for r in report.refuted if any(r.name.startswith(b) for b in edit.breaks) and r.trace is not None]
    assert hit, f"refuted instead: {[r.name for r in report.refuted]}"
    flat = report.flats[hit[0].scope]
    assert hit[0].trace is not None
    assert confirm(flat, hit[0].trace).startswith("confirmed"), confirm(flat, hit[0].trace)
    assert "coordinator" in counterexample(flat, hit[0].trace)


def test_there_are_enough_of_them() -> None:
    """Goal: the list is not thinned out. Method: count, and name those that the project promises."""
    assert len(EDITS) >= 10
    assert len({e.name for e in EDITS}) == len(EDITS)
