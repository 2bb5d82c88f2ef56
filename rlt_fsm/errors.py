"""How to point at a line: spans, findings, and the errors that carry them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a spec file. `line` and `column` count from 1; `length` is in characters.

    `rows` is for a value that goes over several lines: (offset in the value, line, column) where each begins.
    """

    file: str
    line: int
    column: int
    length: int = 1
    rows: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def within(self, offset: int, length: int) -> Span:
        """The part of this span that starts `offset` characters in (for expressions inside a value)."""
        line, column = self.line, self.column + offset
        for start, row, first in self.rows:
            if start <= offset:
                line, column = row, first + offset - start
        return Span(self.file, line, column, max(1, length))


NOWHERE = Span("<none>", 0, 0)


# Every kind of finding there is, with what it means; the documents print this table.
KINDS = {
    # the text
    "unreadable": "The file cannot be read, or is not UTF-8 text.",
    "bad-yaml": "The file is not YAML, or an alias holds itself.",
    "bad-key": "A key is not a plain word.",
    "no-spec": "There is no machine and no system here.",
    # the shape, against `spec/schema.yaml`
    "duplicate-key": "A key, or a property, stands twice.",
    "unknown-key": "A key that means nothing here.",
    "missing-key": "A key that must be given.",
    "wrong-type": "A word, list or mapping where another is needed.",
    "bad-name": "A name with other characters than letters, digits and _, or a reserved word.",
    # names
    "duplicate-machine": "Two machines of one name.",
    "duplicate-system": "A second system; one set of files has at most one.",
    "duplicate-state": "A row names a state twice.",
    "duplicate-name": "A list names something twice, or a message has two ways between the same processes.",
    "name-clash": "One name for two things that an expression could not tell apart.",
    "unknown-machine": "No machine of that name.",
    "unknown-state": "No state of that name in that machine.",
    "unknown-variable": "`set` names a variable that the machine does not have.",
    "unknown-type": "No type of that name.",
    "unknown-sort": "No instance sort of that name, or not the generation sort where it must be.",
    "unknown-process": "No process of that name.",
    "unknown-instance": "No shared instance of that name in that process.",
    "unknown-property": "No property of that name.",
    "unknown-name": "A name that is not known in this place.",
    "unknown-value": "A word that is not among the values of this key or enum.",
    "unknown-effect": "`do` names an effect that the system does not declare.",
    # expressions
    "bad-expression": "The expression cannot be read.",
    "type-mismatch": "Two sides, or an argument, of different types.",
    "bad-index": "Too few, too many or no indices.",
    "bad-target": "What `set` of the system names is not a world variable.",
    "world-in-guard": "A guard or update reads the world, which no process can see.",
    # machines
    "initial-state": "Not exactly one initial state.",
    "leaves-final": "A row leaves a final state.",
    "unreachable-state": "No row leads there from the initial state.",
    "dead-end": "A state that is not final and has no way out.",
    "ambiguous-rows": "Two rows for one event that can hold at the same time.",
    "shadowed-ignore": "Where the ignore row holds, a transition does too, so it never counts.",
    "unchanged-variable": "No row sets the variable.",
    "unread-variable": "Nothing reads the variable but its own updates.",
    "unused-read": "`reads` declares a sibling that no row reads.",
    "unused-takes": "`takes` declares fields for an event that is not in the table, or a field that no row reads.",
    "unused-given": "Nothing reads the given.",
    # systems
    "no-generation": "Not exactly one instance sort is the generation.",
    "bad-property": "Not exactly one of always, sometimes, possible, leads_to, rests.",
    "symmetry-and-liveness": "A scope drops states that differ only in numbering, and asks what those cannot answer.",
    "missing-given": "An instance is made without a number that its machine needs.",
    "wrong-place": "A per-generation machine as a shared instance, or the other way round.",
    "unused-machine": "No process runs the machine, and it is not standalone.",
    "foreign-read": "A machine reads a sibling that does not run in its process.",
    "unhandled-event": "A message or action brings an event that no machine of the process knows.",
    "unraised-event": "A row waits for an event that no message and no action brings.",
    "no-channel": "No channel carries the message between these processes.",
    "unsent-message": "No row sends the message that a channel carries.",
    "missing-field": "A message or action lacks a field that its receiver takes.",
    "extra-field": "A message or action has a field that its receiver does not take.",
    "unused-effect": "No row does the effect.",
    "unset-world": "Nothing sets the world variable.",
    "unread-world": "Nothing reads the world variable but its own updates.",
    "unused-const": "Nothing reads the constant.",
}


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
                lines.append((gutter + row).rstrip())
                indent = "".join("\t" if c == "\t" else " " for c in row[: self.span.column - 1])
                lines.append(" " * 5 + " | " + indent.ljust(self.span.column - 1) + "^" * room)
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
