"""What machines read of a run: ITF, JUnit, SARIF, and the files that `write` leaves."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from report_tools import LASSO, RIGHT, TEXT, hotel, hotel_run

from rlt_fsm.expr import BOOL, Enum, evaluate
from rlt_fsm.ground import Flat, Step
from verification.confirm import reader
from verification.report.files import here, write
from verification.report.itf import BUDGETS, itf
from verification.report.junit import junit
from verification.report.sarif import sarif
from verification.result import Result
from verification.run import Report


def plain(flat: Flat, state: dict[str, Any]) -> dict[str, int]:
    """An ITF state as flat variables again: the oracle for what was written."""
    out = {}
    for name, var in flat.vars.items():
        if name.startswith("left:"):
            term = state[BUDGETS][name.removeprefix("left:")]
        else:
            base, _, rest = name.partition("[")
            index, _, field = rest.partition("]")
            if not rest:
                base, _, field = name.partition(".")
            term = state[base]
            if rest:
                keys = {k["#bigint"]: v for k, v in term["#map"]}
                term = keys[index]
            if field.removeprefix("."):
                term = term[field.removeprefix(".")]
        if isinstance(term, dict):
            out[name] = int(term["#bigint"])
        elif isinstance(term, bool):
            assert var.type == BOOL
            out[name] = int(term)
        elif isinstance(var.type, Enum):
            out[name] = var.type.names.index(term)
        else:
            out[name] = -1 if term == "none" else int(term[1:])
    return out


def follows(flat: Flat, step: Step, before: dict[str, int]) -> dict[str, int]:
    """The state after a step, by the reference reading; the guard must hold."""
    read = reader(flat, before)
    assert evaluate(step.guard, read), step.label
    return before | {name: int(evaluate(node, read)) for name, node in step.updates.items()}


@pytest.mark.parametrize("text", [TEXT, LASSO], ids=["safety", "lasso"])
def test_an_itf_trace_is_a_run_of_the_system(text: str) -> None:
    """Goal: other tools read the same run. Method: read the states back, and take each step from one to the next."""
    report = hotel_run(text)
    result = report.refuted[0]
    flat = report.flats[result.scope]
    assert result.trace is not None

    found = json.loads(json.dumps(itf(flat, result)))

    assert found["#meta"]["format"] == "ITF"
    path = [plain(flat, state) for state in found["states"]]
    assert [set(s) - {"#meta"} for s in found["states"]] == [set(found["vars"])] * len(path)
    assert [s["#meta"]["index"] for s in found["states"]] == list(range(len(path)))
    assert path[0] == {name: int(var.init.value) for name, var in flat.vars.items()}  # type: ignore[union-attr]
    loop = result.trace.loop
    ends = path[1:] if loop is None else [*path[1:], path[loop]]  # a lasso's last state goes back, and is not repeated
    assert len(ends) == len(result.trace.moves)
    for before, after, move in zip(path[: len(ends)], ends, result.trace.moves, strict=True):
        assert follows(flat, flat.steps[move.step], before) == after, move.label
    assert found.get("loop") == loop


def test_a_result_without_a_trace_has_no_itf() -> None:
    """Goal: nothing is made up. Method: a proof."""
    report = hotel_run(RIGHT)

    with pytest.raises(ValueError, match="'beds_are_counted' \\(proved\\) has no trace"):
        itf(report.flats["small"], next(r for r in report.results if r.name == "beds_are_counted"))


def test_junit_counts_what_does_not_hold() -> None:
    """Goal: CI sees each answer, and no unknown passes. Method: read the document back against the results."""
    report = hotel_run(TEXT)

    root = ET.fromstring(junit(report, "2026-11-30T12:00:00+00:00"))

    cases = {(c.get("classname"), c.get("name")): [child.tag for child in c] for c in root.iter("testcase")}
    tags = {"proved": [], "refuted": ["failure"], "unknown": ["error"]}
    for result in report.results:
        assert cases.pop((f"{result.method}.{result.scope}", result.name)) == tags[result.verdict]
    assert cases == {("explicit.other", "scope"): ["skipped"]}
    for suite in root.iter("testsuite"):
        children = [child.tag for case in suite for child in case]
        assert suite.get("tests") == str(len(suite)) and suite.get("timestamp") == "2026-11-30T12:00:00"
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert suite.get(name) == str(children.count(tag))
    assert (root.get("failures"), root.get("errors")) == (str(len(report.refuted)), str(len(report.unknown)))
    failure = next(root.iter("failure"))
    assert failure.text is not None and "4 to_street.key" in failure.text
    assert "false: sleeper[" in failure.text and "is inside" in failure.text


def test_junit_survives_text_that_xml_cannot_hold() -> None:
    """Goal: a reason from a tool never breaks the file. Method: control characters and markup in it."""
    report = Report([Result("a\x00b", "always", "smt", "any", "unknown", "\x1b[31m<&>\ud800")])

    root = ET.fromstring(junit(report))

    assert next(root.iter("error")).get("message") == "�[31m<&>�"


def test_sarif_points_at_the_lines() -> None:
    """Goal: code scanning shows the property and the rows of the trace. Method: look the regions up in the file."""
    report, spec = hotel_run(TEXT), hotel(TEXT)
    lines = next(iter(spec.sources.values())).splitlines()

    log = json.loads(json.dumps(sarif(report, spec)))

    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert log["version"] == "2.1.0" and {p.name for p in spec.need_system().properties} <= {r["id"] for r in rules}
    levels = [r["level"] for r in run["results"]]
    assert levels[0] == "error" and set(levels[1:]) == {"warning"}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    refuted = run["results"][0]
    place = refuted["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] in spec.sources
    assert lines[place["region"]["startLine"] - 1].strip() == "nobody_sleeps_twice:"
    flow = refuted["codeFlows"][0]["threadFlows"][0]["locations"]
    rows = [lines[item["location"]["physicalLocation"]["region"]["startLine"] - 1] for item in flow]
    assert [item["executionOrder"] for item in flow] == [1, 2, 3, 4]
    for row, event in zip(rows, ("ask", "book", "give", "key"), strict=True):
        assert f"on: {event}" in row
    assert "desk.rooms 1 → 0" in flow[2]["location"]["message"]["text"]
    assert "false: " in refuted["message"]["text"] and "is inside" in refuted["message"]["text"]


def test_sarif_of_a_run_that_holds_has_no_results() -> None:
    """Goal: a clean run raises no alarm. Method: the hotel without its wrong properties."""
    assert sarif(hotel_run(RIGHT), hotel(RIGHT))["runs"][0]["results"] == []


def test_unknown_answers_of_one_reason_are_one_line() -> None:
    """Goal: a stopped search is one alarm per rule. Method: many obligations with one reason, two with others."""
    results = [Result(f"handled:x r{i}", "handled", "smt", "any", "unknown", "stopped") for i in range(9)]
    results += [Result("handled:y", "handled", "smt", "any", "unknown", "other")]

    found = sarif(Report(results), hotel(RIGHT))["runs"][0]["results"]

    assert [r["message"]["text"].rsplit(": ", 1)[1] for r in found] == ["stopped", "other"]


def test_write_leaves_one_set_of_files(tmp_path: Path) -> None:
    """Goal: what lies beside a page belongs to it. Method: write a refuted run, then one that holds, over it."""
    page = tmp_path / "out" / "run.html"
    other = tmp_path / "out" / "another.x.itf.json"

    first = write(hotel_run(TEXT), hotel(TEXT), page, here("rlt-verify run"))
    other.write_text("{}", encoding="utf-8")

    traces = [r for r in hotel_run(TEXT).results if r.trace is not None]
    assert {p.name for p in first} == {"run.html", "run.junit.xml", "run.sarif.json"} | {
        f"run.{r.name}.{r.method}.{r.scope}.itf.json" for r in traces
    }
    assert all(p.is_file() for p in first)
    second = write(hotel_run(RIGHT), hotel(RIGHT), page)
    assert set(page.parent.iterdir()) == {*second, other}
    with pytest.raises(ValueError, match=r"must end in \.html"):
        write(hotel_run(RIGHT), hotel(RIGHT), tmp_path / "run.pdf")
