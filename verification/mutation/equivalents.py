"""Mutants that no property and no solver tells from the spec, each with the reason why it may be so.

An entry is wrong where its mutant is no more, or is refuted or proved redundant after all; the sweep then fails.
"""

from __future__ import annotations

from collections.abc import Mapping

EQUIVALENTS: Mapping[str, str] = {}
