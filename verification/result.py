"""Verdicts: Proved, Refuted with a trace, or Unknown with the reason. Unknown is never a success."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a trace: its label and the flat variables it changed, old value to new."""

    label: str
    step: int  # its place in Flat.steps
    changed: Mapping[str, tuple[object, object]]


@dataclass(frozen=True, slots=True)
class Trace:
    """A run from an initial state. `loop` is where a lasso returns to, or None."""

    moves: tuple[Move, ...]
    loop: int | None = None
    final: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one question by one method."""

    name: str
    kind: str  # always, lemma, handled, in_order, bounds, sometimes, possible, leads_to, rests, induction
    method: str  # explicit, smt
    scope: str
    verdict: str  # proved, refuted, unknown
    why: str = ""
    trace: Trace | None = None
    figures: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """True only for proved."""
        return self.verdict == "proved"
