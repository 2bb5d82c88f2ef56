"""One request as its engine sees it: what it asks for, where it stands, what it has produced. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from engine.config import SamplingParams


class Stage(StrEnum):
    """Where a request stands. WAITING, RECEIVING, HELD and FINISHED compute nothing.

    WAITING has no pages yet. RECEIVING has pages that a remote engine fills. HELD has run its prompt on a prefill
    engine and keeps its pages for the transfer. PREFILL runs prompt chunks through all loops, PRELUDE embeds the last
    token, RECURRENT runs one loop at a time, CODA turns the state into a token.
    """

    WAITING = "waiting"
    RECEIVING = "receiving"
    PREFILL = "prefill"
    PRELUDE = "prelude"
    RECURRENT = "recurrent"
    CODA = "coda"
    HELD = "held"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


RUNNABLE = (Stage.PREFILL, Stage.PRELUDE, Stage.RECURRENT, Stage.CODA)
"""Stages in which a request holds a compute slot and stands in exactly one queue."""


class Chunk:
    """Prompt tokens [start, end) that have run `depth` loops."""

    __slots__ = ("depth", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.depth = start, end, 0


class Request:
    """A request and its progress. Only the scheduler writes stage, slot and progress."""

    __slots__ = (
        "bypasses",
        "capacity_tokens",
        "exit_depths",
        "finish_reason",
        "loops_done",
        "num_prefilled",
        "output_ids",
        "params",
        "priority",
        "prompt_ids",
        "request_id",
        "slot",
        "stage",
        "stop_ids",
        "wave",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        capacity_tokens: int,
        stop_ids: frozenset[int],
        priority: int = 0,
    ) -> None:
        """capacity_tokens: tokens whose KV it may write, per plane. stop_ids: tokens that end the output.

        priority: lower numbers go first, where the scheduler goes by priority.
        """
        self.request_id = request_id
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.capacity_tokens = capacity_tokens
        self.stop_ids = stop_ids
        self.priority = priority
        self.stage = Stage.WAITING
        self.slot: int | None = None  # compute slot: the row of its hidden state
        self.num_prefilled = 0  # prompt tokens written in every plane
        self.wave: list[Chunk] = []  # chunks of the prompt under way, each deeper than the one behind it
        self.loops_done = 0  # of the token in flight
        self.output_ids: list[int] = []
        self.exit_depths: list[int] = []  # loops of each output token; the first is the model's depth
        self.finish_reason: FinishReason | None = None
        self.bypasses = 0  # later requests admitted while this one did not fit

    @property
    def position(self) -> int:
        """Position of the output token that is fed back now."""
        return len(self.prompt_ids) + len(self.output_ids) - 1

    @property
    def compute_slot(self) -> int:
        """The slot of a runnable request."""
        assert self.slot is not None, f"request {self.request_id!r} in stage {self.stage} has no compute slot"
        return self.slot
