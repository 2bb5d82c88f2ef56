"""Induction: the shipped spec for any number of chunks, and what must make it fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from guard_deletions import EDITS, apply

from rlt_fsm.ground import ground
from rlt_fsm.load import load
from verification.smt.induction import Induction

STORAGE = {"source_storage": 1, "destination_storage": 1}


@pytest.mark.parametrize("generations", [1, 2, 3])
def test_the_shipped_spec_is_inductive(generations: int) -> None:
    """Goal: safety for any number of chunks, steps and faults. Method: every conjunct over every step, by z3."""
    flat = ground(load().need_system(), {"r": generations, "b": 1, "s": 1}, STORAGE)

    results = Induction(flat).run()

    assert not [(r.name, r.why) for r in results if not r.holds]
    assert {r.kind for r in results} == {"always", "lemma", "handled", "in_order", "bounds"}


SAFETY = [e for e in EDITS if any("reuse" in b or "activated" in b for b in e.breaks)]


@pytest.mark.parametrize("edit", SAFETY, ids=lambda e: e.name)
def test_a_deleted_guard_is_not_inductive(edit: object, tmp_path: Path) -> None:
    """Goal: the proof leans on the guards. Method: each safety edit of the spec leaves something unproved."""
    apply(edit, tmp_path)  # type: ignore[arg-type]
    flat = ground(load([tmp_path]).need_system(), {"r": 1, "b": 1, "s": 1}, STORAGE)

    results = Induction(flat).run()

    assert [r.name for r in results if r.trace is not None]
    assert not any(r.holds for r in results), "a broken conjunct must take every proof with it"


def test_a_solver_without_time_is_unknown_not_proved() -> None:
    """Goal: `unknown` is never an answer. Method: a time-out that no query can meet."""
    flat = ground(load().need_system(), {"r": 2, "b": 1, "s": 1}, STORAGE)
    induction = Induction(flat)
    induction.timeout_ms = 1
    results = induction.run()

    assert all(r.verdict in ("proved", "unknown") for r in results)
    gave_up = [r for r in results if "gave up" in r.why]
    assert not gave_up or not any(r.holds for r in results)
