"""When a token leaves its loops. Numbers in, decisions out; one row per compute slot, in float32 like the hazards.

The rule: after loop r with hazard h_r, the mass that remains shrinks by (1 - h_r) at every loop, those below the
minimum included. Leave if r has reached max_loops, or if the threshold is below 1, r has reached min_loops and the
mass that has left, 1 - remaining, has reached the threshold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.config import SamplingParams

Slots = npt.NDArray[np.int64]
Hazards = npt.NDArray[np.float32]


class ExitRule:
    """The exit state of every compute slot."""

    def __init__(self, slot_count: int, loops: int) -> None:
        """loops: the model's depth, which bounds every request's max_loops."""
        self._loops = loops
        self._remaining = np.ones(slot_count, np.float32)
        self._threshold = np.ones(slot_count, np.float32)
        self._adaptive = np.zeros(slot_count, np.bool_)
        self._min_loops = np.ones(slot_count, np.int64)
        self._max_loops = np.full(slot_count, loops, np.int64)

    def bind(self, slot: int, params: SamplingParams) -> None:
        """A request takes the slot."""
        self._max_loops[slot] = self._loops if params.max_loops is None else min(params.max_loops, self._loops)
        self._min_loops[slot] = params.min_loops
        self._threshold[slot] = params.exit_threshold
        self._adaptive[slot] = params.exit_threshold < 1.0  # before rounding to float32

    def begin_token(self, slots: Slots) -> None:
        """New tokens start their loops in these slots."""
        self._remaining[slots] = 1.0

    def needs_hazards(self, slots: Slots) -> bool:
        """Whether any of these rows may leave early; if none, hazards need not be computed."""
        return bool(self._adaptive[slots].any())

    def decide(self, slots: Slots, loops_done: Slots, hazards: Hazards | None) -> npt.NDArray[np.bool_]:
        """Which rows leave, after their loop number loops_done (from 1) with these hazards; None if none is needed."""
        exits: npt.NDArray[np.bool_] = loops_done >= self._max_loops[slots]
        if hazards is None:
            return exits
        remaining = self._remaining[slots] * (np.float32(1.0) - hazards)
        self._remaining[slots] = remaining
        reached = np.float32(1.0) - remaining >= self._threshold[slots]
        return exits | (self._adaptive[slots] & (loops_done >= self._min_loops[slots]) & reached)
