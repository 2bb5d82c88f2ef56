"""When a token leaves its loops. Numbers in, decisions out; one row per compute slot, in float32 like the hazards.

The rule: after loop r with hazard h_r, the mass that remains shrinks by (1 - h_r) at every loop, those below the
minimum included. Leave if r has reached max_loops, or if the threshold is below 1, r has reached min_loops and the
mass that has left, 1 - remaining, has reached the threshold. In mode `ouro_delayed` the token leaves one loop after
that, so that the next loop can be enqueued before the decision is read: its hazards may be observed any time before it
is decided on. A trace gives every token's loops instead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.config import OURO_DELAYED, SamplingParams

Slots = npt.NDArray[np.int64]
Hazards = npt.NDArray[np.float32]


class ExitState(NamedTuple):
    """What a slot knows of the token in flight, for a request that moves to another slot."""

    token: int
    remaining: float
    due: bool


class ExitRule:
    """The exit state of every compute slot."""

    def __init__(self, slot_count: int, loops: int) -> None:
        """loops: the model's depth, which bounds every request's max_loops."""
        self._loops = loops
        self._remaining = np.ones(slot_count, np.float32)
        self._threshold = np.ones(slot_count, np.float32)
        self._adaptive = np.zeros(slot_count, np.bool_)
        self._delayed = np.zeros(slot_count, np.bool_)
        self._due = np.zeros(slot_count, np.bool_)  # the last loop observed has reached the threshold
        self._epoch = np.zeros(slot_count, np.int64)  # counts the tokens that were in flight in a slot
        self._min_loops = np.ones(slot_count, np.int64)
        self._max_loops = np.full(slot_count, loops, np.int64)  # of the token in flight
        self._token = np.zeros(slot_count, np.int64)  # which output token is in flight
        self._traced = np.zeros(slot_count, np.bool_)
        self._traces: list[tuple[int, ...] | None] = [None] * slot_count

    def bind(self, slot: int, params: SamplingParams) -> None:
        """A request takes the slot. Its first output token, which never loops here, is in flight."""
        self._max_loops[slot] = self._loops if params.max_loops is None else min(params.max_loops, self._loops)
        self._min_loops[slot] = params.min_loops
        self._threshold[slot] = params.exit_threshold
        self._adaptive[slot] = params.exit_threshold < 1.0  # before rounding to float32
        self._delayed[slot] = params.exit_mode == OURO_DELAYED
        self._traced[slot] = params.exit_trace is not None
        self._traces[slot] = params.exit_trace
        self._restore(slot, ExitState(0, 1.0, False))

    def begin_token(self, slots: Slots) -> None:
        """New tokens start their loops in these slots."""
        self._remaining[slots] = 1.0
        self._due[slots] = False
        self._token[slots] += 1
        self._epoch[slots] += 1
        for slot in slots[self._traced[slots]].tolist():
            self._follow_trace(slot)

    def save(self, slot: int) -> ExitState:
        """What `bind` and `restore` need to go on in another slot."""
        return ExitState(int(self._token[slot]), float(self._remaining[slot]), bool(self._due[slot]))

    def restore(self, slot: int, state: ExitState) -> None:
        """Go on with a token in flight, after `bind`."""
        self._restore(slot, state)
        self._follow_trace(slot)

    def _follow_trace(self, slot: int) -> None:
        trace = self._traces[slot]
        if trace is not None:
            self._max_loops[slot] = trace[self._token[slot]]

    def _restore(self, slot: int, state: ExitState) -> None:
        self._epoch[slot] += 1
        self._token[slot], self._remaining[slot], self._due[slot] = state

    def needs_hazards(self, slots: Slots, loops_done: Slots) -> bool:
        """Whether the hazards after these loops can decide anything; if not, they need not be computed."""
        return bool((self._adaptive[slots] & (loops_done < self._max_loops[slots])).any())

    def can_wait(self, slots: Slots, loops_done: Slots) -> bool:
        """Whether every row that the hazards after these loops can decide leaves one loop later, or not at all."""
        return not (self._adaptive[slots] & ~self._delayed[slots] & (loops_done < self._max_loops[slots])).any()

    def epochs(self, slots: Slots) -> Slots:
        """A number of the token in flight in each slot; hazards that come late are those of one token."""
        return self._epoch[slots]

    def observe(self, slots: Slots, loops_done: Slots, hazards: Hazards, epochs: Slots | None = None) -> None:
        """Take the hazards that these rows had after loop number loops_done; of rows that have gone on, take nothing.

        epochs: what `epochs` said when that loop was enqueued; None where it is the last one enqueued.
        """
        if epochs is not None:
            here = epochs == self._epoch[slots]
            slots, loops_done, hazards = slots[here], loops_done[here], hazards[here]
        remaining = self._remaining[slots] * (np.float32(1.0) - hazards)
        self._remaining[slots] = remaining
        reached = np.float32(1.0) - remaining >= self._threshold[slots]
        self._due[slots] = reached & self._adaptive[slots] & (loops_done >= self._min_loops[slots])

    def decide(self, slots: Slots, loops_done: Slots, hazards: Hazards | None) -> npt.NDArray[np.bool_]:
        """Which rows leave, after their loop number loops_done (from 1).

        hazards: those of this loop; None if none is needed, or if all rows can wait and what they had after the loop
        before has been observed.
        """
        due: npt.NDArray[np.bool_] = self._due[slots] & self._delayed[slots]
        if hazards is not None:
            self.observe(slots, loops_done, hazards)
            due |= self._due[slots] & ~self._delayed[slots]
        return (loops_done >= self._max_loops[slots]) | due
