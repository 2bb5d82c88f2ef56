"""A run as JUnit XML: a suite for each method and scope, a case for each question that was put there.

Refuted is a failure and unknown an error, so that neither passes. A scope that was not run is a skipped case, and
stands in a report that fails, since only a refutation leaves scopes out.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from verification.report.explain import objections
from verification.result import Result
from verification.run import Report

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report, date: str = "") -> str:
    """The document. date: ISO 8601, without a zone, as the format wants it; empty: not said."""
    suites: dict[tuple[str, str], list[Result]] = {}
    for result in report.results:
        suites.setdefault((result.method, result.scope), []).append(result)
    root = ET.Element("testsuites", {"name": "rlt-verify", "time": _seconds(report.seconds)})
    for (method, scope), results in suites.items():
        seconds = max((float(r.figures.get("seconds", 0)) for r in results), default=0.0)
        suite = _suite(root, f"{method}.{scope}", results, seconds, date)
        for result in results:
            case = ET.SubElement(
                suite, "testcase", {"classname": f"{method}.{scope}", "name": _text(result.name), "time": "0"}
            )
            if result.verdict != "proved":
                tag = "failure" if result.verdict == "refuted" else "error"
                why = _text(result.why or result.verdict)
                ET.SubElement(case, tag, {"message": why, "type": result.verdict}).text = _text(_body(report, result))
    for scope in report.skipped:
        suite = _suite(root, f"explicit.{scope}", [], 0.0, date, skipped=1)
        case = ET.SubElement(suite, "testcase", {"classname": f"explicit.{scope}", "name": "scope", "time": "0"})
        ET.SubElement(case, "skipped", {"message": "not run: an earlier scope refuted a property"})
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(
    root: ET.Element, name: str, results: list[Result], seconds: float, date: str, skipped: int = 0
) -> ET.Element:
    counts = {
        "name": _text(name),
        "tests": str(len(results) + skipped),
        "failures": str(sum(r.verdict == "refuted" for r in results)),
        "errors": str(sum(r.verdict not in ("proved", "refuted") for r in results)),
        "skipped": str(skipped),
        "time": _seconds(seconds),
    }
    return ET.SubElement(root, "testsuite", counts | ({"timestamp": date[:19]} if date else {}))


def _body(report: Report, result: Result) -> str:
    """The steps of the trace, and what is false at its end."""
    lines = [result.why]
    if result.trace is not None:
        for number, move in enumerate(result.trace.moves, 1):
            if result.trace.loop == number - 1:
                lines.append("-- from here on, for ever --")
            lines.append(f"{number:>4} {move.label}")
        if result.trace.loop == len(result.trace.moves):
            lines.append("-- and stays there for ever --")
    flat = report.flats.get(result.scope)
    if flat is not None:
        for objection in objections(flat, result):
            lines.append(f"false: {objection.text}")
            values = {v.name: v.text for part in objection.parts for v in part.values}
            lines += [f"  {name} is {text}" for name, text in values.items()]
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _text(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return _NOT_XML.sub("�", text)
