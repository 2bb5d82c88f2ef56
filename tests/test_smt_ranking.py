"""Ranking: why runs end, and what must leave a run open."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from inn import PROMISED, inn

from rlt_fsm.load import load
from rlt_fsm.model import System
from rlt_fsm.schema import spec_directory
from verification.result import Result
from verification.smt.parametric import Parametric
from verification.smt.prove import counts, prove_endings
from verification.smt.ranking import Ranking, rank, runs_end


def end(system: System) -> Result:
    """Whether the runs of a system end."""
    return runs_end(Parametric(system, counts(system)))


def test_the_runs_of_the_shipped_spec_end() -> None:
    """Goal: no run for ever, for any number of requests and chunks. Method: a measure, and fairness where it rises."""
    result = prove_endings(None)

    assert result.holds, result.why
    assert result.why.startswith("given the invariant, and ")
    assert "that 'finish' is fair, so that 'step' ends" in result.why
    assert "'suspend' happens finitely often (at most 'suspensions' times)" in result.why


LIMITED = ("system.yaml", "when: 'left[r] > 0', set: {'left[r]': 'left[r] - 1'}, offered", "offered")
LAST = "set: {'left[r]': '0'}, offered: true,"
LAST_IS_FAIR = ("system.yaml", LAST + " fair: weak,", LAST)
FINISH_WAITS = (
    "retirement.yaml",
    "{on: finish, from: held, to: retiring}",
    "{on: finish, from: held, to: retiring, when: {idle: kernels == 0}}",
)
SUSPENSIONS_COUNT = ("system.yaml", "offered: true, budget: suspensions,", "offered: true,")


@pytest.mark.parametrize(
    ("edits", "opened"),
    [
        ((LIMITED,), ""),  # chunks without number, of which the last comes by fairness
        ((LIMITED, LAST_IS_FAIR), "launch_inner"),
        ((FINISH_WAITS,), "step"),  # each step puts the end off
        ((SUSPENSIONS_COUNT,), "suspend"),
    ],
)
def test_an_edit_leaves_a_run_open(edits: tuple[tuple[str, str, str], ...], opened: str, tmp_path: Path) -> None:
    """Goal: no measure out of nothing. Method: chunks without number, and an end that is unfair, or put off."""
    for path in spec_directory().glob("*.yaml"):
        if path.name != "schema.yaml":
            shutil.copy(path, tmp_path)
    for name, before, after in edits:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text.count(before) == 1
        (tmp_path / name).write_text(text.replace(before, after), encoding="utf-8")

    result = end(load([tmp_path]).need_system())

    assert result.holds == (not opened), result.why
    assert opened in result.why.removeprefix("no measure settles ")


def test_an_end_leans_on_the_invariant(tmp_path: Path) -> None:
    """Goal: no proof on a broken invariant. Method: the inn, where something is asked that does not hold."""
    inn(tmp_path, "desk.free > 0")
    asked = prove_endings([str(tmp_path)], {"enter": "it closes", "sleep": "it closes"})
    inn(tmp_path, PROMISED)
    unasked = prove_endings([str(tmp_path)], {"enter": "it closes", "sleep": "it closes"})

    assert asked.verdict == "unknown" and "leans on asked" in asked.why
    assert unasked.holds and "that 'enter' happens finitely often (it closes)" in unasked.why


def test_who_comes_and_goes_does_so_for_ever(tmp_path: Path) -> None:
    """Goal: a cycle is left open. Method: guests of an inn; and the same if they enter finitely often."""
    proof = Parametric(inn(tmp_path, PROMISED).need_system(), {"b": "beds"})

    assert set(rank(proof).open) == {"enter", "sleep"}
    assert set(rank(proof, {"enter": "the inn closes"}).open) == {"sleep"}


COUNTER = """
machine: Counter
doc: Counts until it ends.
per: generation
vars:
  n: {type: counter, doc: "How far."}
states:
  a: {initial: true, doc: "Counts."}
  done: {final: true, doc: "Ended."}
transitions:
  - {on: count, from: a, set: {n: n + 1}}
  - {on: end, from: a, to: done, when: {early: WHEN}}
ignore:
  - {on: end, from: a, when: {late: not (WHEN)}, why: "It is too late."}
---
system: counting
doc: Counters.
instances:
  r: {of: generation, doc: "One counter."}
processes:
  one: {machines: [Counter]}
channels: {}
actions:
  count: {per: r, event: one.count, offered: true, doc: "One more."}
  end: {per: r, event: one.end, when: 'Counter[r].state == a', fair: weak, doc: "No more."}
properties:
  kept: {always: 'all(r: Counter[r].n >= 0)', doc: "Nothing."}
scopes:
  one: {sizes: {r: 1}, suites: [quick, full], doc: "One."}
"""


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("n >= 0", lambda found: found.fair == {"count": "end"} and not found.open),
        ("n <= 5", lambda found: set(found.open) >= {"count"}),  # afterwards `end` is fair and changes nothing
        ("n > 5", lambda found: set(found.open) >= {"count"}),  # it would end; this proof does not see it
    ],
)
def test_an_end_that_changes_nothing_is_no_end(when: str, expected: Callable[[Ranking], bool], tmp_path: Path) -> None:
    """Goal: stuttering is not progress. Method: an end that always works, and one that is ignored early or late."""
    path = tmp_path / "counting.yaml"
    path.write_text(COUNTER.replace("WHEN", when), encoding="utf-8")

    found = rank(Parametric(load([path]).need_system()))

    assert expected(found), found
