"""Admission, routing and the end of every generation. Pure: no process, pipe, clock or thread.

A shell (engine.py) brings in what the workers say, with the time, and carries out what comes back.
Machines: Coordinator and Cancellation per generation; Credits, PrefillWorker and DecodeWorker shared
(spec/handoff.yaml, spec/cancellation.yaml, spec/lifecycle.yaml).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from engine.config import SamplingParams
from engine.pd import messages as m
from engine.pd import protocol
from engine.pd.records import Outputs, Records
from rlt_fsm.compile import Effect, Message

MILESTONES = ("reserved", "computed", "submitted", "drained", "received", "activated", "finished", "retired")


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send `message` to worker `process` (prefill or decode)."""

    process: str
    message: m.ToWorker


@dataclass(slots=True)
class Generation:
    """One request on its way: data beside its record."""

    tid: str
    prompt_ids: list[int]
    params: SamplingParams
    submitted_s: float
    timeline: dict[str, float] = field(default_factory=dict)  # milestone -> seconds since submission
    reservation: m.Reserved | None = None
    reason: str = ""  # why it ended: stop, length, or the reason of a cancel
    bypasses: int = 0
    bytes_posted: int = 0

    def reach(self, milestone: str, now_s: float) -> None:
        """Note a milestone, the first time it is reached."""
        self.timeline.setdefault(milestone, now_s - self.submitted_s)


class CoordinatorCore:
    """Every generation's record, and what may happen next."""

    def __init__(
        self,
        *,
        source_credits: int,
        destination_credits: int,
        compute_credits: int,
        max_admission_bypasses: int,
        trace_capacity: int,
    ) -> None:
        """Credits are pages of P, pages of D, and prompts that P computes at a time: promises, not readings."""
        self.credits_given = {
            "source_capacity": source_credits,
            "destination_capacity": destination_credits,
            "compute_capacity": compute_credits,
        }
        self.records = Records("coordinator", {"credits": self.credits_given}, trace_capacity)
        self.generations: dict[str, Generation] = {}
        self.waiting: deque[str] = deque()
        self.max_admission_bypasses = max_admission_bypasses
        states = protocol.system().machines["Coordinator"].states
        self._milestone = {name: state.milestone for name, state in states.items()}
        self._finished: list[Generation] = []
        self._retired: list[Generation] = []

    # -- requests -----------------------------------------------------------------------------------

    def submit(
        self,
        tid: str,
        prompt_ids: list[int],
        params: SamplingParams,
        source_need: int,
        destination_need: int,
        now_s: float,
    ) -> None:
        """Queue a request. needs: pages on each side; the caller has checked that they can ever fit."""
        self.records.open(tid, {"source_need": source_need, "destination_need": destination_need})
        self.generations[tid] = Generation(tid, prompt_ids, params, now_s)
        self.waiting.append(tid)
        self._fire(tid, "submit", now_s)

    def cancel(self, tid: str, reason: str, now_s: float) -> list[ToWorker | Effect]:
        """End a request for its client, now. Storage follows when its evidence is there."""
        generation = self.generations.get(tid)
        if generation is None or self.records.state(tid, "Coordinator") in ("closing", "retired"):
            return []
        generation.reason = reason
        return self._fire(tid, "cancel", now_s)

    def admit(self, now_s: float) -> list[ToWorker | Effect]:
        """Admit whom the credits allow, first come first served, with a bounded number of bypasses."""
        out: list[ToWorker | Effect] = []
        blocked: list[Generation] = []
        for tid in list(self.waiting):
            generation = self.generations[tid]
            if self.records.can(tid, "admit"):
                self.waiting.remove(tid)
                out += self._fire(tid, "admit", now_s)
                for earlier in blocked:
                    earlier.bypasses += 1
            else:
                blocked.append(generation)
                if generation.bypasses >= self.max_admission_bypasses:
                    break
        return out

    # -- what workers say -----------------------------------------------------------------------------

    def handle(self, message: m.RequestMessage, now_s: float) -> list[ToWorker | Effect]:
        """Take one message of a worker. One for an unknown generation changes nothing.

        Raises IllegalEvent where the protocol does not allow it there.
        """
        generation = self.generations.get(message.tid)
        if generation is None:
            return []
        if isinstance(message, m.Progress):
            generation.reach(message.milestone, now_s)
            generation.bytes_posted = message.bytes_posted
            return []
        fields: dict[str, Any] = {}
        if isinstance(message, m.Reserved):
            generation.reservation = message
        elif isinstance(message, m.CommitToCoordinator | m.SourceReleased):
            fields["count"] = message.count
        elif isinstance(message, m.PrefillComplete):
            generation.reach("computed", now_s)
        elif isinstance(message, m.Finished):
            generation.reason = generation.reason or message.reason
        return self._fire(message.tid, m.EVENT_OF[type(message)], now_s, **fields)

    def worker(self, instance: str, event: str, now_s: float) -> list[ToWorker | Effect]:
        """Move `prefill_worker` or `decode_worker`; then every generation that this concerns."""
        outputs: Outputs = self.records.shared.fire(instance, event)
        out: list[ToWorker | Effect] = [item for item in outputs if isinstance(item, Effect)]
        for tid in list(self.generations):
            out += self._follow(tid, now_s)
        return out

    def worker_state(self, instance: str) -> str:
        """The state of `prefill_worker` or `decode_worker`."""
        return str(self.records.shared.values()[f"{instance}.state"])

    def can_worker(self, instance: str, event: str) -> bool:
        """Whether `prefill_worker` or `decode_worker` would take the event now."""
        return bool(getattr(self.records.shared, f"can_{instance}_{event}")())

    # -- what the shell collects ----------------------------------------------------------------------

    def take_finished(self) -> list[Generation]:
        """Generations that are over for their clients since the last call."""
        out, self._finished = self._finished, []
        return out

    def take_retired(self) -> list[Generation]:
        """Generations whose every obligation is settled since the last call; they are forgotten here."""
        out, self._retired = self._retired, []
        return out

    def credits(self) -> dict[str, int]:
        """What is not given of each credit, and how many generations are live."""
        values = self.records.shared.values()
        prefix = "credits."
        return {n[len(prefix) :]: int(v) for n, v in values.items() if n.startswith(prefix) and n != "credits.state"}

    def state(self, tid: str) -> str:
        """The Coordinator state of a generation."""
        return self.records.state(tid, "Coordinator")

    # -- inside -----------------------------------------------------------------------------------------

    def _fire(self, tid: str, event: str, now_s: float, **fields: Any) -> list[ToWorker | Effect]:
        before = self.records.state(tid, "Coordinator")
        out = self._translate(tid, self.records.fire(tid, event, **fields))
        self._note(tid, before, now_s)
        return out + self._follow(tid, now_s)

    def _follow(self, tid: str, now_s: float) -> list[ToWorker | Effect]:
        out: list[ToWorker | Effect] = []
        while tid in self.generations:
            before = self.records.state(tid, "Coordinator")
            outputs = self.records.follow(tid)
            if outputs is None:
                break
            out += self._translate(tid, outputs)
            self._note(tid, before, now_s)
        return out

    def _note(self, tid: str, before: str, now_s: float) -> None:
        after = self.records.state(tid, "Coordinator")
        if after == before:
            return
        generation = self.generations[tid]
        if self._milestone[after]:
            generation.reach(self._milestone[after], now_s)
        over = after in ("closing", "retired")
        if over and before not in ("closing", "retired"):
            generation.reach("finished", now_s)
            generation.reason = generation.reason or "a worker ended"
            self._finished.append(generation)
            if before == "waiting":
                self.waiting.remove(tid)
        if after == "retired":
            self._retired.append(generation)
            self.records.close(tid)
            del self.generations[tid]

    def _translate(self, tid: str, outputs: Outputs) -> list[ToWorker | Effect]:
        out: list[ToWorker | Effect] = []
        for item in outputs:
            if isinstance(item, Message):
                table = m.TO_PREFILL if item.to == "prefill" else m.TO_DECODE
                out.append(ToWorker(item.to, self._message(tid, table[item.name], item)))
            else:
                out.append(item)
        return out

    def _message(self, tid: str, kind: type[m.RequestMessage], item: Message) -> m.ToWorker:
        generation = self.generations[tid]
        if kind is m.Reserve:
            return m.Reserve(tid, generation.prompt_ids, generation.params)
        if kind is m.Prefill:
            r = generation.reservation
            assert r is not None, f"generation {tid} is to be prefilled without a reservation"
            return m.Prefill(tid, generation.prompt_ids, generation.params, r.tables, r.slot, r.cached_tokens)
        message: m.ToWorker = kind(tid, **item.fields)  # type: ignore[assignment]
        return message
