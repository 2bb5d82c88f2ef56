"""Mutants that no property and no solver tells from the spec, each with the reason why it may be so.

A key is the id of a mutant, or a pattern in which `*` stands for anything. An entry is wrong where no mutant has such
an id, or none of them needs the reason because they are refuted or proved redundant after all; the sweep then fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

EQUIVALENTS: Mapping[str, str] = {}


def matches(pattern: str, name: str) -> bool:
    """Whether `name` is as the pattern says. Only `*` means something else than itself."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None


def reason_for(name: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that fits a mutant, or None."""
    return next((pattern for pattern in patterns if matches(pattern, name)), None)
