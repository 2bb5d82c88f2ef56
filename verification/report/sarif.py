"""A run as SARIF 2.1.0, for code scanning: a rule for each property, a result where one is refuted or unknown.

A result points at the property's line in the spec; its code flow goes through the rows that fire, step by step, with
the values that each step changed. Unknown is a warning and refuted an error: no pass is written for either.
Format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlt_fsm.errors import Span
from rlt_fsm.ground import Flat
from rlt_fsm.model import Spec
from verification.report.chart import changed
from verification.report.explain import objections
from verification.report.summary import BUILT_IN, row_places, span_of
from verification.result import Result, Trace
from verification.run import Report, base_name

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif(report: Report, spec: Spec) -> dict[str, Any]:
    """The log, with one run."""
    rules = _rules(report, spec)
    places = {rule["id"]: number for number, rule in enumerate(rules)}
    results = []
    for result in _worth_a_line(report):
        rule = _rule(result)
        item: dict[str, Any] = {
            "ruleId": rule,
            "ruleIndex": places[rule],
            "level": "error" if result.verdict == "refuted" else "warning",
            "message": {"text": _message(report, result)},
            "locations": [{"physicalLocation": _place(span_of(result, spec))}],
            "partialFingerprints": {"question/v1": f"{result.name}/{result.method}/{result.scope}"},
            "properties": {
                "verdict": result.verdict,
                "kind": result.kind,
                "method": result.method,
                "scope": result.scope,
            },
        }
        flat = report.flats.get(result.scope)
        if result.trace is not None and result.trace.moves and flat is not None:
            item["codeFlows"] = [_flow(flat, result.trace, result)]
        results.append(item)
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "rlt-verify", "rules": rules}},
                "artifacts": [{"location": {"uri": _uri(file)}} for file in spec.sources],
                "columnKind": "unicodeCodePoints",
                "properties": {"spec": spec.digest},
                "results": results,
            }
        ],
    }


def _rule(result: Result) -> str:
    return result.kind if result.kind in BUILT_IN else base_name(result.name)


def _worth_a_line(report: Report) -> list[Result]:
    """Refuted results first; of the unknown ones of a rule that have no trace and one reason, the first alone."""
    found: dict[tuple[str, ...], Result] = {}
    for result in report.results:
        if result.verdict == "refuted" or (result.verdict == "unknown" and result.trace is not None):
            found[result.name, result.method, result.scope, "trace"] = result
        elif result.verdict != "proved":
            found.setdefault((_rule(result), result.method, result.scope, result.why), result)
    return sorted(found.values(), key=lambda r: r.verdict != "refuted")


def _rules(report: Report, spec: Spec) -> list[dict[str, Any]]:
    """One for each property and lemma, then one for each built-in question."""
    rules: dict[str, dict[str, Any]] = {}
    for item in spec.need_system().properties:
        doc = item.doc or item.name
        rules[item.name] = {"id": item.name, "shortDescription": {"text": doc}, "properties": {"kind": item.kind}}
        if item.answers:
            rules[item.name]["properties"]["answers"] = list(item.answers)
    for kind, (title, doc) in BUILT_IN.items():
        rules[kind] = {"id": kind, "name": title, "shortDescription": {"text": doc}, "properties": {"kind": "built in"}}
    for result in report.results:  # a question that the spec does not have: said by a method of its own
        if result.kind not in BUILT_IN:
            name = base_name(result.name)
            rules.setdefault(name, {"id": name, "shortDescription": {"text": name}})
    return list(rules.values())


def _message(report: Report, result: Result) -> str:
    text = f"{result.name} is {result.verdict} by {result.method} in {result.scope}: {result.why or 'no reason given'}"
    flat = report.flats.get(result.scope)
    for objection in objections(flat, result) if flat is not None else []:
        values = ", ".join(f"{v.name} is {v.text}" for part in objection.parts for v in part.values)
        text += f"\nfalse: {objection.text}" + (f" ({values})" if values else "")
    return text


def _flow(flat: Flat, trace: Trace, result: Result) -> dict[str, Any]:
    """The steps as one thread; `executionOrder` counts from 1."""
    locations = []
    for number, move in enumerate(trace.moves, 1):
        loop = "from here on, for ever: " if trace.loop == number - 1 else ""
        location: dict[str, Any] = {
            "executionOrder": number,
            "location": {
                "physicalLocation": _place(row_places(flat, move.step)[0]),
                "message": {"text": loop + "; ".join([move.label, *changed(flat, move)])},
            },
        }
        locations.append(location)
    return {"message": {"text": f"{len(locations)} steps to {result.name}"}, "threadFlows": [{"locations": locations}]}


def _place(span: Span) -> dict[str, Any]:
    region = {"startLine": max(1, span.line), "startColumn": max(1, span.column)}
    return {"artifactLocation": {"uri": _uri(span.file)}, "region": region}


def _uri(file: str) -> str:
    """Relative to the current directory where it lies below it, as code scanning wants it."""
    path = Path(file)
    if path.is_absolute():
        return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.as_uri()
    return path.as_posix()
