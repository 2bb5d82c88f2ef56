"""What the processes say to each other. Typed, tagged by name, in three scopes; tensors never travel here.

request: carries the generation's `tid`, and is one message of a channel of spec/system.yaml or data beside one.
worker:  about a process: ready, connect, connected, stop, stopped, fatal.
control: anything else, by id: `Control` and `ControlReply`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.cache.geometry import PoolGeometry
from engine.config import SamplingParams


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base: encoded with its class name."""


class RequestMessage(_Message, frozen=True):
    """Belongs to one generation."""

    tid: str


# -- coordinator -> decode ------------------------------------------------------------------------------


class Reserve(RequestMessage, frozen=True):
    """Lease pages for the whole request and a staging slot, and say where they are."""

    prompt_ids: list[int]
    params: SamplingParams


class CommitToDecode(RequestMessage, frozen=True):
    """So many partitions make the transfer complete."""

    count: int


class CancelSafe(RequestMessage, frozen=True):
    """P posts nothing more of this generation. Once so many partitions were heard of, nothing of it can land.

    count: partitions that P had posted.
    """

    count: int


class Fence(RequestMessage, frozen=True):
    """P is dead with writes in doubt: close the endpoint to it, then nothing of it can land."""


# -- coordinator -> prefill -----------------------------------------------------------------------------


class Prefill(RequestMessage, frozen=True):
    """Compute the prompt and write it to these pages of the peer. tables: per plane, block ids."""

    prompt_ids: list[int]
    params: SamplingParams
    tables: list[list[int]]
    slot: int
    cached_tokens: int


class Ack(RequestMessage, frozen=True):
    """D has received everything."""


# -- coordinator -> either ------------------------------------------------------------------------------


class Cancel(RequestMessage, frozen=True):
    """Stop. Storage waits for its evidence."""


# -- prefill -> coordinator -----------------------------------------------------------------------------


class PrefillComplete(RequestMessage, frozen=True):
    """The prompt is computed and its hidden row staged: the compute credit comes back."""


class CommitToCoordinator(RequestMessage, frozen=True):
    """Every partition is posted; there are so many."""

    count: int


class SourceReleased(RequestMessage, frozen=True):
    """P's storage of the generation is reusable: every handle is terminal, every device event done.

    count: partitions that P posted, all told.
    """

    count: int


class Progress(RequestMessage, frozen=True):
    """Not protocol: a milestone that only P sees, for the timeline (`drained`), with the bytes posted so far."""

    milestone: str
    bytes_posted: int


# -- decode -> coordinator ------------------------------------------------------------------------------


class Reserved(RequestMessage, frozen=True):
    """Pages and slot are leased. tables: per plane, block ids. cached_tokens: prompt tokens that need no transfer."""

    tables: list[list[int]]
    slot: int
    cached_tokens: int


class Received(RequestMessage, frozen=True):
    """Every partition has landed. No decode slot is implied."""


class Activated(RequestMessage, frozen=True):
    """D computes."""


class Token(RequestMessage, frozen=True):
    """Not protocol: one output token. exit_depth: loops it ran. stop: it is an end token, which has no text."""

    token_id: int
    exit_depth: int
    stop: bool
    logprob: float | None
    top_logprobs: list[tuple[int, float]]


class Finished(RequestMessage, frozen=True):
    """The last output is out. reason: stop or length."""

    reason: str


class DestinationReleased(RequestMessage, frozen=True):
    """D's storage of the generation is reusable."""


# -- worker scope ---------------------------------------------------------------------------------------


class Ready(_Message, frozen=True):
    """Runtime facts of a worker: nothing of the configuration, which the coordinator gave it."""

    incarnation: str
    pid: int
    agent: str
    metadata: bytes
    geometry: PoolGeometry
    compute_slots: int
    fingerprint: str


class Connect(_Message, frozen=True):
    """To P: whom to write to."""

    agent: str
    metadata: bytes
    geometry: PoolGeometry


class Connected(_Message, frozen=True):
    """The peer is known, or needs not to be."""


class Stop(_Message, frozen=True):
    """Nothing is live: exit in good order."""


class Stopped(_Message, frozen=True):
    """The last words of a worker that exits in good order."""

    metrics: dict[str, float]


class Fatal(_Message, frozen=True):
    """The worker cannot go on. It posts nothing more and waits to be ended."""

    error: str


# -- control scope --------------------------------------------------------------------------------------


class Control(_Message, frozen=True):
    """A question or command by name, answered by a ControlReply with the same id."""

    id: int
    name: str
    args: dict[str, Any]


class ControlReply(_Message, frozen=True):
    """The answer; exactly one of result and error says something."""

    id: int
    result: Any
    error: str


ToWorker = Reserve | CommitToDecode | CancelSafe | Fence | Prefill | Ack | Cancel | Connect | Stop | Control
FromWorker = (
    PrefillComplete
    | CommitToCoordinator
    | SourceReleased
    | Progress
    | Reserved
    | Received
    | Activated
    | Token
    | Finished
    | DestinationReleased
    | Ready
    | Connected
    | Stopped
    | Fatal
    | ControlReply
)

# channel message of spec/system.yaml -> the class that carries it; a test holds the two lists together
TO_PREFILL: dict[str, type[RequestMessage]] = {"prefill": Prefill, "ack": Ack, "cancel": Cancel}
TO_DECODE: dict[str, type[RequestMessage]] = {
    "reserve": Reserve,
    "commit": CommitToDecode,
    "cancel": Cancel,
    "cancel_safe": CancelSafe,
    "fence": Fence,
}
FROM_PREFILL: dict[str, type[RequestMessage]] = {
    "prefill_complete": PrefillComplete,
    "commit": CommitToCoordinator,
    "source_released": SourceReleased,
}
FROM_DECODE: dict[str, type[RequestMessage]] = {
    "reserved": Reserved,
    "received": Received,
    "activated": Activated,
    "finished": Finished,
    "destination_released": DestinationReleased,
}
EVENT_OF: dict[type[RequestMessage], str] = {
    kind: name for table in (TO_PREFILL, TO_DECODE, FROM_PREFILL, FROM_DECODE) for name, kind in table.items()
}

encode = msgspec.msgpack.Encoder().encode
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises msgspec.ValidationError, naming the field, for anything that is no such message."""
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    """Raises msgspec.ValidationError, naming the field, for anything that is no such message."""
    return _from_worker.decode(data)
