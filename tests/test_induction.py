"""Induction over a few generations spelled out: the shipped spec, and what must make it fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guard_deletions import EDITS, apply

from rlt_fsm.ground import Flat, ground
from rlt_fsm.load import load
from verification.smt.induction import Induction

STORAGE = {"source_storage": 1, "destination_storage": 1}


def shipped(generations: int) -> Flat:
    """The shipped spec, for so many generations that share one storage on each side."""
    return ground(load().need_system(), {"r": generations, "b": 1, "s": 1}, STORAGE)


def test_the_shipped_spec_is_inductive() -> None:
    """Goal: safety for any number of chunks, steps and faults. Method: every conjunct over every step, by z3."""
    results = Induction(shipped(2)).run()

    assert not [(r.name, r.why) for r in results if not r.holds]
    assert {r.kind for r in results} == {"always", "lemma", "handled", "in_order", "bounds"}


@pytest.mark.parametrize(
    "name", ["release_destination_before_the_binding_copy", "a_cancel_taken_for_the_end_of_writing"]
)
def test_a_deleted_guard_is_not_inductive(name: str, tmp_path: Path) -> None:
    """Goal: the proof leans on the guards. Method: each safety edit of the spec leaves something unproved."""
    (edit,) = [e for e in EDITS if e.name == name]
    apply(edit, tmp_path)
    flat = ground(load([tmp_path]).need_system(), {"r": 1, "b": 1, "s": 1}, STORAGE)

    results = Induction(flat).run()

    assert [r.name for r in results if r.trace is not None]
    assert not any(r.holds for r in results), "a broken conjunct must take every proof with it"


class Silent:
    """A solver that has no answer to anything."""

    def check(self) -> str:
        return "unknown"

    def reason_unknown(self) -> str:
        return "timeout"

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def test_a_solver_without_time_is_unknown_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: `unknown` is never an answer. Method: a solver that gives up, on a spec that holds."""
    monkeypatch.setattr(Induction, "solver", lambda self: Silent())

    results = Induction(shipped(1)).run()

    assert results and {r.verdict for r in results} == {"unknown"}
    assert any("gave up" in r.why and "timeout" in r.why for r in results)
