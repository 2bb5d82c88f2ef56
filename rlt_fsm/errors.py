"""How to point at a line: spans, findings, and the errors that carry them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a spec file. `line` and `column` count from 1; `length` is in characters."""

    file: str
    line: int
    column: int
    length: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def within(self, offset: int, length: int) -> Span:
        """The part of this span that starts `offset` characters in (for expressions inside a value)."""
        return Span(self.file, self.line, self.column + offset, max(1, length))


NOWHERE = Span("<none>", 0, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a spec: its kind, where it stands, what it is and what to do."""

    kind: str
    message: str
    span: Span
    hint: str = ""
    severity: str = "error"  # or "warning"

    def show(self, source: str | None = None) -> str:
        """The finding as people read it: place, kind, message, the line with a caret, the hint."""
        lines = [f"{self.span}: {self.kind}: {self.message}"]
        if source is not None:
            rows = source.splitlines()
            if 1 <= self.span.line <= len(rows):
                row = rows[self.span.line - 1]
                gutter = f"{self.span.line:>5} | "
                room = max(1, min(self.span.length, len(row) - self.span.column + 1))
                lines.append(gutter + row)
                lines.append(" " * 5 + " | " + " " * (self.span.column - 1) + "^" * room)
        if self.hint:
            lines.append("  " + self.hint)
        return "\n".join(lines)


class SpecError(Exception):
    """A spec that cannot be read or does not hold together; carries every finding."""

    def __init__(self, findings: Iterable[Finding], sources: dict[str, str] | None = None) -> None:
        self.findings = tuple(findings)
        self.sources = dict(sources or {})
        super().__init__(self.show())

    def show(self) -> str:
        """All findings, each with its source line where the text is known."""
        return "\n".join(f.show(self.sources.get(f.span.file)) for f in self.findings)


@dataclass(slots=True)
class IllegalEvent(Exception):
    """An event that no machine of the record accepts where it stands. Nothing was changed.

    `detail` lists, per machine that refused, its state and the guard conjuncts that were false.
    """

    process: str
    event: str
    states: dict[str, str]
    detail: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        where = ", ".join(f"{machine}={state}" for machine, state in self.states.items())
        why = "; ".join(self.detail) or "no transition for this event in this state"
        return f"process '{self.process}' cannot take event '{self.event}' in {where}: {why}"


def suggest(word: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known word and lists the rest."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    listed = ", ".join(names) if names else "(none)"
    return (f"did you mean '{near[0]}'? " if near else "") + f"known: {listed}"
