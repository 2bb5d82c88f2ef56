"""Hold a raw tree against `spec/schema.yaml`: which keys, which are required, which shapes."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlt_fsm.errors import Finding, Span, suggest
from rlt_fsm.load_yaml import Raw, read_documents

_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*\Z")
# Words of the expression language, and those that Python keeps for itself: the tables become classes.
_RESERVED = {"all", "any", "sum", "add", "implies", "true", "false", "none", *keyword.kwlist}


@dataclass(frozen=True, slots=True)
class KeyRule:
    """What one key of a kind must hold."""

    shape: str
    required: bool
    doc: str


def spec_directory() -> Path:
    """The directory of the shipped spec files: beside this package, in a checkout and when installed."""
    return Path(__file__).resolve().parent.parent / "spec"


@cache
def schema() -> dict[str, dict[str, KeyRule]]:
    """The kinds of `spec/schema.yaml`: kind -> key -> rule."""
    _, documents = read_documents(spec_directory() / "schema.yaml", "spec/schema.yaml", [])
    return {
        kind: {
            key: KeyRule(rule.word("is"), rule.word("required") == "true", rule.word("doc"))
            for key, rule in keys.entries.items()
        }
        for kind, keys in documents[0].pairs("kinds")
    }


def _check_name(word: str, span: Span, what: str, findings: list[Finding]) -> None:
    if not _NAME.match(word):
        findings.append(Finding("bad-name", f"{what} must be a name, not '{word}'", span, "letters, digits and _"))
    elif word in _RESERVED:
        findings.append(Finding("bad-name", f"{what} is '{word}', a reserved word", span, "choose another name"))


def check_kind(raw: Raw, kind: str, what: str, findings: list[Finding]) -> bool:
    """Add a finding for every way in which `raw` is not a `kind`; True when there was none."""
    before = len(findings)
    rules = schema()[kind]
    if raw.kind != "map":
        findings.append(Finding("wrong-type", f"{what} must be a mapping", raw.span, f"its keys: {', '.join(rules)}"))
        return False
    for key, value in raw.entries.items():
        rule = rules.get(key)
        if rule is None:
            findings.append(
                Finding("unknown-key", f"'{key}' is not a key of {what}", raw.keys[key], suggest(key, rules))
            )
            continue
        _check_shape(value, rule.shape, f"'{key}' of {what}", findings)
    for key, rule in rules.items():
        if rule.required and key not in raw.entries:
            findings.append(Finding("missing-key", f"{what} needs '{key}'", raw.span, rule.doc))
    return len(findings) == before


def _check_shape(raw: Raw, shape: str, what: str, findings: list[Finding]) -> None:
    def wrong(need: str) -> None:
        found = {"scalar": "a word", "list": "a list", "map": "a mapping"}[raw.kind]
        findings.append(Finding("wrong-type", f"{what} must be {need}, not {found}", raw.span))

    if shape == "any":
        return
    if shape in ("name", "text", "flag", "number", "expr"):
        if raw.kind != "scalar":
            wrong({"name": "a name", "text": "text", "flag": "true or false"}.get(shape, f"a {shape}"))
            return
        if shape == "name":
            _check_name(raw.text, raw.span, what, findings)
        if shape == "flag" and raw.text not in ("true", "false"):
            findings.append(Finding("wrong-type", f"{what} must be true or false, not '{raw.text}'", raw.span))
        if shape == "number" and not re.fullmatch(r"\d+", raw.text):
            findings.append(Finding("wrong-type", f"{what} must be a natural number, not '{raw.text}'", raw.span))
    elif shape == "names":
        for item in raw.items if raw.kind == "list" else [raw]:
            if item.kind != "scalar":
                findings.append(Finding("wrong-type", f"{what} must be a name or a list of names", item.span))
            else:
                _check_name(item.text, item.span, what, findings)
    elif shape.startswith("list of "):
        if raw.kind != "list":
            wrong("a list")
            return
        for item in raw.items:
            check_kind(item, shape[8:], f"an entry of {what}", findings)
    elif shape.startswith("map of "):
        if raw.kind != "map":
            wrong("a mapping")
            return
        inner = shape[7:]
        for key, item in raw.entries.items():
            if not what.startswith("'set' of"):  # there a key is a variable, which may have an index
                _check_name(key, raw.keys[key], f"a key of {what}", findings)
            if inner == "fields":
                _check_shape(item, "map of field", f"'{key}' in {what}", findings)
            elif inner in ("expr", "text", "number", "name"):
                _check_shape(item, inner, f"'{key}' in {what}", findings)
            elif item.kind == "scalar" and item.text == "" and not any(r.required for r in schema()[inner].values()):
                item.kind = "map"  # `name:` with nothing after it is an empty mapping
            else:
                check_kind(item, inner, f"'{key}' in {what}", findings)
    else:
        check_kind(raw, shape, what, findings)
