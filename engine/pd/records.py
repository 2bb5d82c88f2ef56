"""The compiled records of one process, and the internal events that nobody has to remember to offer.

Pure: events in, outputs out. All protocol state of the engine lives in these records; the shells keep
data (tables, queues, handles) beside them and carry out the effects, in order, before the next event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.pd import protocol
from rlt_fsm.compile import Effect, Message
from rlt_fsm.trace import TraceRing

AUTOMATIC: dict[str, tuple[str, ...]] = {
    "coordinator": ("refuse", "lose_prefill", "lose_decode", "retire"),
    "prefill": ("submitted", "drained", "settle_source"),
    "decode": ("receive", "settle_destination"),
}
"""Internal events that need nothing of a shell but to be asked: offered after every event of a record."""

Outputs = tuple[Message | Effect, ...]


class Records:
    """One process's machines: a record per generation, and what they share."""

    def __init__(self, process: str, shared_given: Mapping[str, Mapping[str, int]], trace_capacity: int) -> None:
        """shared_given: the givens of each shared instance, such as the capacities of `credits`."""
        self.process = process
        self.compiled = protocol.process(process)
        self.trace = TraceRing(trace_capacity)
        self.shared = self.compiled.make_shared({k: dict(v) for k, v in shared_given.items()}, trace=self.trace)
        self.automatic = AUTOMATIC[process]
        self.of: dict[str, Any] = {}

    def open(self, tid: str, given: Mapping[str, int] | None = None) -> None:
        """Make the record of a new generation. A tid is never used twice."""
        assert tid not in self.of, f"generation {tid} has a record already"
        self.of[tid] = self.compiled.make_record(self.shared, tid, dict(given) if given else None)

    def close(self, tid: str) -> None:
        """Drop the record of a generation that is over; whatever still comes for it changes nothing."""
        del self.of[tid]

    def fire(self, tid: str, event: str, **fields: Any) -> Outputs:
        """Move one generation by one event; return what the shell must now do, in order.

        Raises IllegalEvent, with nothing changed, where its machines have no such row.
        """
        outputs: Outputs = getattr(self.of[tid], event)(**fields)
        return outputs

    def follow(self, tid: str) -> Outputs | None:
        """Fire the first automatic event that the generation is ready for; None when there is none.

        Call it until it is None, carrying out the outputs between: an event may enable the next.
        """
        record = self.of.get(tid)
        if record is None:
            return None
        for event in self.automatic:
            if getattr(record, f"can_{event}")():
                outputs: Outputs = getattr(record, event)()
                return outputs
        return None

    def can(self, tid: str, event: str, **fields: Any) -> bool:
        """Whether the generation's machines would take `event` now."""
        record = self.of.get(tid)
        return record is not None and bool(getattr(record, f"can_{event}")(**fields))

    def state(self, tid: str, machine: str) -> str:
        """The name of a machine's state."""
        return str(self.of[tid].state(machine))

    def holds(self, tid: str, machine: str) -> dict[str, int | bool]:
        """The named holds of a retirement machine that are not settled: variable -> value."""
        prefix = machine + "."
        return {
            name[len(prefix) :]: value
            for name, value in self.of[tid].values().items()
            if name.startswith(prefix) and not name.endswith(".state") and value
        }
