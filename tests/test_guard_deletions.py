"""The negative side: every hand edit of the spec that breaks a promise is refuted, with a trace that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from guard_deletions import EDITS, Edit, apply

from rlt_fsm.load import load
from rlt_fsm.replay import replay
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


SAFETY = [  # an event that no row takes leaves no line to judge
    e for e in EDITS if any("reuse" in b or "activated" in b for b in e.breaks) and "handled:chunk_done" not in e.breaks
]


@pytest.mark.parametrize("edit", SAFETY, ids=lambda e: e.name)
def test_replay_judges_a_counterexample_as_the_checker_does(edit: Edit, tmp_path: Path) -> None:
    """Goal: one trace format joins proving and running. Method: save the counterexample; by the edited spec the same
    property must fall, by the shipped spec it is another spec's run."""
    (tmp_path / "spec").mkdir()
    apply(edit, tmp_path / "spec")
    spec = load([tmp_path / "spec"])
    report = run(spec, [str(tmp_path / "spec")], "quick", backends=("explicit",))
    hit = next(r for r in report.refuted if any(r.name.startswith(b) for b in edit.breaks))
    assert hit.trace is not None
    file = tmp_path / "run.jsonl"
    confirm(report.flats[hit.scope], hit.trace, spec.digest, file)

    verdict = replay(spec, file)

    assert verdict.kind == "violation"
    assert hit.name in verdict.reason
    assert replay(load(), file).kind == "inconclusive"


def test_there_are_enough_of_them() -> None:
    """Goal: the list is not thinned out. Method: count, and name those that the project promises."""
    assert len(EDITS) >= 10
    assert len({e.name for e in EDITS}) == len(EDITS)
