"""Recorded runs: each is judged by the spec as it is now, and must get the answer that was recorded.

`python tests/test_report_scenarios.py` records them again, after a change of the spec that changes an answer for
a reason that was looked at.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from guard_deletions import EDITS, apply
from report_tools import shipped
from walks import rare_faults, scope_walk

from rlt_fsm import trace as trace_format
from rlt_fsm.load import load
from rlt_fsm.trace import Trace
from verification.confirm import confirm
from verification.report.scenario import judge, read, record
from verification.run import run

FOLDER = Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.glob("*.json"))
SOURCES = {  # file -> the hand edit of the spec of which it is a counterexample, and what it tells
    "a_writer_is_a_hold": (
        "release_destination_with_a_writer",
        "D gives its pages back while a write of P may still land. The guard `no_writer` refuses that.",
    ),
    "a_step_is_a_hold": (
        "release_destination_before_the_last_step",
        "D gives its pages back while a decode step runs on them. The guard `no_step` refuses that.",
    ),
}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_recorded_run_is_judged_as_recorded(file: Path) -> None:
    """Goal: a counterexample stays a test. Method: replay it on the shipped spec, and compare the whole answer."""
    scenario = read(file)

    differs = scenario.differs(judge(shipped(), scenario.trace))

    assert not differs, f"{file}: {differs}; if that is right, record it again: python {Path(__file__).name}"


def test_each_source_is_recorded_and_refused_for_its_reason() -> None:
    """Goal: the scenarios say something. Method: each counterexample is a violation with a false conjunct."""
    assert {f.stem for f in FILES} == {*SOURCES, "a_good_run"}
    for name in SOURCES:
        scenario = read(FOLDER / f"{name}.json")
        assert scenario.kind == "violation" and scenario.false and scenario.event, name
    assert read(FOLDER / "a_good_run.json").kind == "ok"


def test_another_answer_is_noticed(tmp_path: Path) -> None:
    """Goal: the comparison can fail. Method: the good run recorded as a violation; a file that is none."""
    text = (FOLDER / "a_good_run.json").read_text(encoding="utf-8")
    file = tmp_path / "wrong.json"
    file.write_text(text.replace('"kind": "ok"', '"kind": "violation"'), encoding="utf-8")

    assert "verdict was 'violation', is 'ok'" in read(file).differs(judge(shipped(), read(file).trace))
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong\.json: not a scenario: key 'format' is missing"):
        read(file)


def counterexample(edit: str, folder: Path) -> Trace:
    """The first safety counterexample of an edited spec, in the trace format."""
    found = next(e for e in EDITS if e.name == edit)
    spec = load([apply(found, folder)])
    report = run(spec, None, "quick", backends=("explicit",))
    result = next(r for r in report.refuted if r.name.startswith(found.breaks) and r.trace is not None)
    assert result.trace is not None
    file = folder / "trace.jsonl"
    confirm(report.flats[result.scope], result.trace, spec.digest, file)
    return trace_format.read(file)


def record_all() -> None:
    """Write every scenario again, with the shipped spec's answers."""
    spec = shipped()
    for name, (edit, doc) in SOURCES.items():
        with TemporaryDirectory() as folder:
            record(spec, counterexample(edit, Path(folder)), FOLDER / f"{name}.json", doc)
    scope = next(iter(spec.need_system().scopes))
    for seed in count():
        walk = scope_walk(spec, scope, seed).run(400, rare_faults)
        if {"finish", "step_done", "retire"} <= {step.action for step in walk.steps}:
            break
    doc = f"A whole handoff: the random walk with seed {seed} in scope {scope}."
    record(spec, walk.trace(), FOLDER / "a_good_run.json", doc)


if __name__ == "__main__":
    record_all()
    sys.exit(0)
