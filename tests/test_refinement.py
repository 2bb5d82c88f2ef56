"""Counting partitions: the counted system, the numbered partitions and the compiled class go together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from guard_deletions import EDITS, apply

from rlt_fsm.load import load
from verification.refinement import NAME, Refinement, check


def test_counting_loses_nothing_on_the_shipped_spec() -> None:
    """Goal: counts stand for ranges. Method: every order of three partitions, with a repeat, a cancel and P's death."""
    result = check(load().need_system())

    assert result.verdict == "proved", result.why
    assert result.name == NAME
    assert int(result.figures["transitions"]) > 100_000  # the walk was one


def test_a_number_used_twice_is_noticed() -> None:
    """Goal: the numbering that it rests on matters. Method: give the second and third partition one number."""
    result = Refinement(load().need_system(), numbers=lambda place: min(place, 1)).run()

    assert result.verdict == "refuted"
    assert "Import[0].heard" in result.why
    assert result.trace is not None and result.trace.moves[-1].label.startswith("hear")


def test_a_spec_that_does_not_hold_is_no_proof(tmp_path: Path) -> None:
    """Goal: no proof on sand. Method: a duplicate counted twice breaks the counted scope already."""
    edit = next(e for e in EDITS if e.name == "a_duplicate_notification_counted_twice")

    result = check(load([apply(edit, tmp_path)]).need_system())

    assert result.verdict == "unknown"


def test_a_renamed_action_is_named() -> None:
    """Goal: the mapping cannot go stale silently. Method: take an action that it moves partitions by away."""
    system = load().need_system()
    less = replace(system, actions={k: v for k, v in system.actions.items() if k != "write_error"})

    result = check(less)

    assert result.verdict == "unknown"
    assert "write_error" in result.why
