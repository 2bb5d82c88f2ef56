"""YAML text to trees of strings that know their place. Beside `load.py` nothing else touches YAML.

PyYAML composes the nodes; no tag is ever resolved, so `on`, `yes` or `1_000` stay the words they are
and only `load.py` decides what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def _span(file: str, node: yaml.Node) -> Span:
    mark, end = node.start_mark, node.end_mark
    quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
    length = end.column - mark.column if end.line == mark.line else 1
    if quoted:
        return Span(file, mark.line + 1, mark.column + 2, max(1, length - 2))
    return Span(file, mark.line + 1, mark.column + 1, max(1, length))


def _convert(file: str, node: yaml.Node, findings: list[Finding]) -> Raw:
    span = _span(file, node)
    if isinstance(node, yaml.ScalarNode):
        return Raw("scalar", span, text=str(node.value))
    if isinstance(node, yaml.SequenceNode):
        return Raw("list", span, items=[_convert(file, item, findings) for item in node.value])
    raw = Raw("map", span)
    for key_node, value_node in node.value:
        key_span = _span(file, key_node)
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
        raw.entries[key] = _convert(file, value_node, findings)
        raw.keys[key] = key_span
    return raw


def read_documents(path: Path, shown: str, findings: list[Finding]) -> tuple[str, list[Raw]]:
    """The text of a file and its YAML documents. Raises SpecError where it is not YAML at all."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError(
            [Finding("unreadable", f"cannot read the file: {reason}", Span(shown, 1, 1), "name an existing YAML file")]
        ) from error
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
        raise SpecError([Finding("bad-yaml", str(error), Span(shown, 1, 1))], {shown: text}) from error
    return text, [_convert(shown, node, findings) for node in nodes]
