"""YAML text to trees of strings that know their place. Beside `load.py` nothing else touches YAML.

PyYAML composes the nodes; no tag is ever resolved, so `on`, `yes` or `1_000` stay the words they are
and only `load.py` decides what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rlt_fsm.errors import Finding, Span, SpecError


@dataclass(slots=True)
class Raw:
    """A scalar, list or mapping with its span. `keys` maps each key to the span of the key itself."""

    kind: str  # scalar, list, map
    span: Span
    text: str = ""
    items: list[Raw] = field(default_factory=list)
    entries: dict[str, Raw] = field(default_factory=dict)
    keys: dict[str, Span] = field(default_factory=dict)

    def get(self, key: str) -> Raw | None:
        """The value under `key`, or None."""
        return self.entries.get(key)

    def word(self, key: str, default: str = "") -> str:
        """The scalar text under `key`."""
        value = self.entries.get(key)
        return default if value is None else value.text

    def words(self, key: str) -> list[Raw]:
        """The scalars under `key`, which may be one or a list."""
        value = self.entries.get(key)
        if value is None:
            return []
        return value.items if value.kind == "list" else [value]

    def pairs(self, key: str) -> Iterator[tuple[str, Raw]]:
        """The entries of the mapping under `key`."""
        value = self.entries.get(key)
        return iter(()) if value is None else iter(value.entries.items())


def _span(file: str, node: yaml.Node, text: Sequence[str]) -> Span:
    mark, end = node.start_mark, node.end_mark
    quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
    length = end.column - mark.column if end.line == mark.line else 1
    if quoted:
        length = max(1, length - 2)
        return Span(file, mark.line + 1, mark.column + 2, length, _rows(node, text, mark.column + 1))
    return Span(file, mark.line + 1, mark.column + 1, max(1, length), _rows(node, text, mark.column))


def _rows(node: yaml.Node, text: Sequence[str], column: int) -> tuple[tuple[int, int, int], ...]:
    """Where each line of a scalar over several lines begins, if it is its lines joined by blanks."""
    first, last = node.start_mark.line, node.end_mark.line
    if not isinstance(node, yaml.ScalarNode) or first == last:
        return ()
    block = node.style in ("|", ">")
    rows: list[tuple[int, int, int]] = []
    offset = 0
    for number in range(first + 1 if block else first, min(last + 1, len(text))):
        line = text[number]
        start = column if number == first else len(line) - len(line.lstrip())
        part = line[start:].rstrip()
        if not part or str(node.value)[offset : offset + len(part)] != part:
            part = part.rstrip("'\"")  # the closing quote, or what follows the value in a flow mapping
            if str(node.value)[offset:].rstrip() != part or not part:
                break
        rows.append((offset, number + 1, start + 1))
        offset += len(part) + 1
    return tuple(rows)


def _convert(file: str, node: yaml.Node, findings: list[Finding], text: Sequence[str]) -> Raw:
    span = _span(file, node, text)
    if isinstance(node, yaml.ScalarNode):
        return Raw("scalar", span, text=str(node.value))
    if isinstance(node, yaml.SequenceNode):
        return Raw("list", span, items=[_convert(file, item, findings, text) for item in node.value])
    raw = Raw("map", span)
    for key_node, value_node in node.value:
        key_span = _span(file, key_node, text)
        if not isinstance(key_node, yaml.ScalarNode):
            findings.append(Finding("bad-key", "a key must be a word", key_span, "write `name: value`"))
            continue
        key = str(key_node.value)
        if key in raw.entries:
            first = raw.keys[key]
            findings.append(
                Finding(
                    "duplicate-key",
                    f"'{key}' stands here and at line {first.line}",
                    key_span,
                    "keep one of them; YAML would silently take the last",
                )
            )
            continue
        raw.entries[key] = _convert(file, value_node, findings, text)
        raw.keys[key] = key_span
    return raw


def read_documents(path: Path, shown: str, findings: list[Finding]) -> tuple[str, list[Raw]]:
    """The text of a file and its YAML documents. Raises SpecError where it is not YAML at all."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason, hint = "it is not UTF-8 text", "save it as UTF-8"
        if isinstance(error, OSError):
            reason, hint = error.strerror or str(error), "name an existing YAML file"
        place = Span(shown, 1, 1)
        raise SpecError([Finding("unreadable", f"cannot read the file: {reason}", place, hint)]) from error
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Span(shown, mark.line + 1, mark.column + 1) if mark else Span(shown, 1, 1)
        raise SpecError(
            [Finding("bad-yaml", str(error.problem), where, "quote values that hold ': ', ', ' or brackets")],
            {shown: text},
        ) from error
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise SpecError([Finding("bad-yaml", reason, Span(shown, 1, 1), "write plain text")], {shown: text}) from error
    except RecursionError as error:
        raise SpecError([_too_deep(shown)], {shown: text}) from error
    lines = text.splitlines()
    try:
        return text, [_convert(shown, node, findings, lines) for node in nodes]
    except RecursionError as error:
        raise SpecError([_too_deep(shown)], {shown: text}) from error


def _too_deep(shown: str) -> Finding:
    return Finding("bad-yaml", "it nests without end", Span(shown, 1, 1), "an alias (*name) must not hold itself")
