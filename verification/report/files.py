"""Write a run's page, and beside it what machines read: JUnit, SARIF, and an ITF trace for each counterexample."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rlt_fsm.model import Spec
from verification.report.coverage import Joined
from verification.report.itf import itf
from verification.report.junit import junit
from verification.report.page import About, Outcome, html
from verification.report.sarif import sarif
from verification.report.summary import counterexamples
from verification.run import Report


def write(
    report: Report,
    spec: Spec,
    path: Path,
    about: About | None = None,
    mutants: Sequence[Outcome] | None = None,
    coverage: Joined | None = None,
) -> list[Path]:
    """Write `FILE.html`, and beside it FILE.junit.xml, FILE.sarif.json and FILE.NAME.itf.json; return what was written.

    ITF files of an earlier run of the same FILE are removed, so that none is taken for a counterexample of this one.
    about: where the run was; by default here and now. Raises ValueError where `path` is not an .html file's, OSError.
    """
    if path.suffix != ".html":
        raise ValueError(f"the report is a page: '{path}' must end in .html")
    about = about or here("")
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.iterdir():
        if old.name.startswith(f"{path.stem}.") and old.name.endswith(".itf.json"):
            old.unlink()
    texts = {
        path: html(report, spec, about, mutants, coverage),
        path.with_suffix(".junit.xml"): junit(report, about.date),
        path.with_suffix(".sarif.json"): _json(sarif(report, spec)),
    }
    for name, result, flat in counterexamples(report):
        if flat is not None:
            texts[path.with_suffix(f".{name}.itf.json")] = _json(itf(flat, result))
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    return list(texts)


def here(command: str) -> About:
    """This moment, this machine, and the command that was given."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    return About(datetime.now(UTC).isoformat(timespec="seconds"), machine, command)


def _json(data: object) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
