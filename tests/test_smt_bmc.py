"""Bounded search with z3: what it finds, and what it never says."""

from __future__ import annotations

from pathlib import Path

import pytest
from guard_deletions import EDITS, apply

from rlt_fsm.ground import Step
from rlt_fsm.load import load
from verification.confirm import confirm
from verification.smt import bmc
from verification.smt.bmc import CONST_MAX, hunt

ONE = {"r": 1, "b": 1, "s": 1}
STORAGE = {"source_storage": 1, "destination_storage": 1}
SERVING = {"prefill_worker": "serving", "decode_worker": "serving"}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("a_prompt_without_a_compute_credit", 2),
        ("decode_memory_goes_before_its_writer", 3),
        ("release_source_before_the_last_device_event", 9),
    ],
)
def test_a_hand_edit_is_found(name: str, steps: int, tmp_path: Path) -> None:
    """Goal: find faults for constants that nobody chose. Method: hand edits; each run is taken again at run time."""
    (edit,) = [e for e in EDITS if e.name == name]
    apply(edit, tmp_path)
    spec = load([tmp_path])

    found = hunt(spec.need_system(), ONE, 12, STORAGE, SERVING)

    assert found.result.verdict == "refuted" and found.result.name.split("[")[0] in edit.breaks
    assert found.result.trace is not None and len(found.result.trace.moves) == steps
    assert confirm(found.flat, found.result.trace, spec.digest).startswith(
        f"confirmed: the compiled classes take all {steps}"
    )


def test_what_is_not_found_is_not_proved() -> None:
    """Goal: a bound is never hidden. Method: the shipped spec, without a fault in it, to a small depth."""
    result = hunt(load().need_system(), ONE, 3, STORAGE, SERVING).result

    assert result.verdict == "unknown"
    assert f"up to depth 3 for constants up to {CONST_MAX}" in result.why


def test_no_time_is_no_answer() -> None:
    """Goal: a time-out is told, with what was reached. Method: no time at all."""
    result = hunt(load().need_system(), ONE, 5, STORAGE, SERVING, seconds_max=0.0).result

    assert result.verdict == "unknown" and "gave up" in result.why


def test_a_run_that_does_not_replay_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no fault of the encoding is shown as one of the spec. Method: lose the first step of what was found."""
    (edit,) = [e for e in EDITS if e.name == "a_prompt_without_a_compute_credit"]
    apply(edit, tmp_path)
    rerun = bmc.rerun

    def without_the_first(flat: bmc.Flat, steps: list[Step]) -> object:
        return rerun(flat, steps[1:])

    monkeypatch.setattr(bmc, "rerun", without_the_first)
    result = hunt(load([tmp_path]).need_system(), ONE, 3, STORAGE, SERVING).result

    assert result.verdict == "unknown" and "does not replay" in result.why and result.trace is None
