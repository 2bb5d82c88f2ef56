"""A counterexample kept as a scenario: the run in the engine's trace format, and what a spec must say of it.

    {"format": "rlt-scenario", "version": 1, "doc": "..", "kind": "violation", "process": "decode",
     "event": "settle_destination", "false": ["not writers (writers is true)"], "trace": [{..}, ..]}

The trace is judged as a run of the spec that is there now, whichever spec it was found in: it is that spec's answer
which is recorded. So the trace of a deleted guard must be refused by the guard, and a good run must stay one.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlt_fsm import trace as trace_format
from rlt_fsm.model import Spec
from rlt_fsm.replay import Verdict, replay
from rlt_fsm.trace import Trace

FORMAT, VERSION = "rlt-scenario", 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """A recorded run with its recorded answer: the verdict, where it fell, and the false conjuncts."""

    doc: str
    kind: str
    process: str
    event: str
    false: tuple[str, ...]
    trace: Trace

    def differs(self, found: Verdict) -> str:
        """What a verdict says otherwise; empty where it is the recorded one."""
        pairs = {
            "verdict": (self.kind, found.kind),
            "process": (self.process, found.process),
            "event": (self.event, found.event),
            "false": (self.false, found.false),
        }
        other = [f"{name} was {was!r}, is {now!r}" for name, (was, now) in pairs.items() if was != now]
        return "; ".join(other) + (f" ({found.reason})" if other else "")


def judge(spec: Spec, trace: Trace) -> Verdict:
    """What this spec says of the run, whichever spec it was found in."""
    for header in trace.headers.values():
        header.spec = spec.digest
    return replay(spec, trace)


def record(spec: Spec, trace: Trace, path: Path, doc: str) -> Scenario:
    """Write the run with this spec's answer to it.

    Clock readings become places in their stream, so that the same run recorded again gives the same file.
    """
    for stream in trace.streams.values():
        for number, line in enumerate(stream):
            line.event.time = number
    found = judge(spec, trace)
    for header in trace.headers.values():
        header.spec = ""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "trace.jsonl"
        trace_format.save(lines, trace)
        kept = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "doc": doc, "kind": found.kind}
    data |= {"process": found.process, "event": found.event, "false": list(found.false)}
    text = json.dumps(data, ensure_ascii=False, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(line, ensure_ascii=False) for line in kept)
    path.write_text(f'{text},\n "trace": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    return read(path)


def read(path: Path) -> Scenario:
    """Read a scenario. Raises ValueError, naming the file, for anything else; OSError for no file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {data['format']} {data['version']}, not {FORMAT} {VERSION}")
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / "trace.jsonl"
            lines.write_text("".join(json.dumps(line) + "\n" for line in data["trace"]), encoding="utf-8")
            trace = trace_format.read(lines)
        return Scenario(data["doc"], data["kind"], data["process"], data["event"], tuple(data["false"]), trace)
    except (ValueError, KeyError, TypeError) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: not a scenario: {what}") from error
