"""Decide which requests compute next, and in which stage. Integers only: no torch, no clock, no randomness.

Continuous depth batching: one recurrent batch mixes tokens at any depth, and a row that leaves its loops is refilled
by the next token to arrive (mode "no_refill": only when all of them have left). A prompt runs in chunks, each through
all loops, in turn with decoding; or as a wavefront, in which a batch runs chunks in different depths by one loop each.
One batch at a time: `schedule` chooses it, and one of `prefilled`, `preluded`, `looped`, `sampled` completes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.cache.pages import KVCacheManager
from engine.config import NO_REFILL, PRIORITY, SchedulerConfig
from engine.schedule.request import RUNNABLE, Chunk, FinishReason, Request, Stage
from engine.schedule.waiting import WaitingQueue


class SchedulerError(RuntimeError):
    """A call that the request's stage forbids, or a broken promise; names the request and its stage."""


@dataclass(frozen=True)
class Batch:
    """Requests that compute together in one stage.

    ranges: per row the prompt tokens [start, end); PREFILL only. depths: per range the one loop to run, from 0; empty
    where each range runs them all. In a wavefront a request may have several rows.
    """

    stage: Stage
    requests: list[Request]
    ranges: list[tuple[int, int]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)


class Scheduler:
    """The queues of one engine. Admits requests to the pages of its cache; never frees pages."""

    def __init__(self, config: SchedulerConfig, pages: KVCacheManager, loops: int, hold_after_prefill: bool) -> None:
        """loops: the model's depth. hold_after_prefill: a prompt ends in HELD, as a prefill engine needs it."""
        self.config = config
        self.requests: dict[str, Request] = {}
        self._pages = pages
        self._loops = loops
        self._hold_after_prefill = hold_after_prefill
        self._waiting = WaitingQueue(config.policy == PRIORITY)
        self._queues: dict[Stage, OrderedDict[str, Request]] = {stage: OrderedDict() for stage in RUNNABLE}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._prefill_loops = 0  # since the last recurrent batch
        self._prefill_loops_max = config.max_prefill_batches_before_decode * loops
        self._draining = False  # no_refill: the rows that loop together have begun
        self._rows_max = min(config.max_num_seqs, config.max_num_batched_tokens)

    @property
    def free_slots(self) -> int:
        """Compute slots that nobody holds."""
        return len(self._free_slots)

    def add(self, request: Request) -> None:
        """Queue a request for admission. Raises SchedulerError for a known id or one that can never fit."""
        self._register(request)
        self._waiting.add(request)

    def reserve(self, request: Request) -> bool:
        """Give the request its pages and stage RECEIVING; False, with nothing changed, if too few are free."""
        self._register(request)
        if not self._pages.allocate(request.request_id, request.capacity_tokens):
            del self.requests[request.request_id]
            return False
        request.stage = Stage.RECEIVING
        return True

    def activate(self, request_id: str) -> Request:
        """RECEIVING -> CODA: its prompt and hidden state have arrived. Needs a free compute slot."""
        request = self.get(request_id)
        if request.stage is not Stage.RECEIVING:
            raise SchedulerError(f"request {request_id!r} cannot be activated in stage {request.stage}")
        if not self._free_slots:
            raise SchedulerError(
                f"request {request_id!r} cannot be activated: all {self.config.max_num_seqs} compute slots are taken"
            )
        request.num_prefilled = len(request.prompt_ids)
        request.loops_done = self._loops
        self._enter(request, Stage.CODA)
        return request

    def get(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise SchedulerError(f"request {request_id!r} is not known")
        return request

    def remove(self, request_id: str) -> Request:
        """Take the request out of every queue and give its compute slot back; its pages and its record stay."""
        request = self.get(request_id)
        if request.stage is Stage.WAITING:
            self._waiting.remove(request)
        self._leave(request)
        request.wave.clear()
        if request.stage is not Stage.FINISHED:
            request.stage, request.finish_reason = Stage.FINISHED, FinishReason.ABORT
        return request

    def forget(self, request_id: str) -> None:
        """Drop the record of a request that no longer computes; its id may then be used again."""
        request = self.get(request_id)
        if request.stage not in (Stage.HELD, Stage.FINISHED):
            raise SchedulerError(f"request {request_id!r} is still {request.stage}; remove it first")
        del self.requests[request_id]

    def has_runnable(self) -> bool:
        """Whether `schedule` would return a batch."""
        return any(self._queues.values()) or self._can_admit()

    def schedule(self) -> Batch | None:
        """The next batch; None if nothing can compute: all wait for a remote engine or for pages that it holds.

        Raises SchedulerError if a runnable request is in no queue, or if a request waits for nothing.
        """
        recurrent = self._queues[Stage.RECURRENT]
        if recurrent and self._draining:
            return self._take_rows(Stage.RECURRENT)
        self._draining = False
        if self._queues[Stage.PRELUDE]:
            return self._take_rows(Stage.PRELUDE)
        coda = len(self._queues[Stage.CODA])
        if coda and (coda >= self.config.min_coda_batch_size or len(recurrent) < self._rows_max):
            return self._take_rows(Stage.CODA)
        if recurrent and self._prefill_loops >= self._prefill_loops_max:
            return self._take_rows(Stage.RECURRENT)
        self._admit()
        if self._queues[Stage.PREFILL]:
            return self._take_wave() if self.config.wavefront_prefill else self._take_prefill()
        if recurrent:
            return self._take_rows(Stage.RECURRENT)
        self._check_idle()
        return None

    def prefilled(self, batch: Batch) -> None:
        """The chunks of a PREFILL batch have run: all loops, or the one that `depths` says."""
        depths = batch.depths or [self._loops - 1] * len(batch.requests)
        for request, (_, end), depth in zip(batch.requests, batch.ranges, depths, strict=True):
            if batch.depths:
                self._advance(request, end)
            if depth + 1 < self._loops:
                continue
            request.num_prefilled = end
            if end < len(request.prompt_ids):
                continue  # stays at its place: the prompt begun first ends first
            request.loops_done = self._loops
            if self._hold_after_prefill:
                self._leave(request)
                request.stage = Stage.HELD
            else:
                self._enter(request, Stage.CODA)

    def preluded(self, batch: Batch) -> None:
        """The last tokens of a PRELUDE batch are embedded."""
        for request in batch.requests:
            request.loops_done = 0
            self._enter(request, Stage.RECURRENT)

    def looped(self, batch: Batch, exits: Sequence[bool]) -> None:
        """Each row of a RECURRENT batch has run one more loop; exits says which rows leave."""
        for request, leaves in zip(batch.requests, exits, strict=True):
            request.loops_done += 1
            if leaves:  # the others keep their place: a token begun first ends first, its next one queues behind
                self._enter(request, Stage.CODA)

    def sampled(self, batch: Batch, token_ids: Sequence[int]) -> None:
        """Each row of a CODA batch has its token: it finishes or goes on with it."""
        for request, token_id in zip(batch.requests, token_ids, strict=True):
            request.output_ids.append(token_id)
            request.exit_depths.append(request.loops_done)
            if token_id in request.stop_ids:
                request.finish_reason = FinishReason.STOP
            elif len(request.output_ids) == request.params.max_tokens:
                request.finish_reason = FinishReason.LENGTH
            if request.finish_reason is None:
                self._enter(request, Stage.PRELUDE)
            else:
                self._leave(request)
                request.stage = Stage.FINISHED

    def check_integrity(self) -> None:
        """Raise SchedulerError unless each request is in the one queue of its stage, and each slot in one place."""
        slots = list(self._free_slots)
        for request_id, request in self.requests.items():
            queued = [stage for stage, queue in self._queues.items() if request_id in queue]
            expected = [request.stage] if request.stage in RUNNABLE else []
            if queued != expected or (request in self._waiting) != (request.stage is Stage.WAITING):
                raise SchedulerError(f"request {request_id!r} in stage {request.stage} is queued in {queued}")
            if (request.slot is not None) != bool(expected):
                raise SchedulerError(f"request {request_id!r} in stage {request.stage} has slot {request.slot}")
            if request.slot is not None:
                slots.append(request.slot)
        if sorted(slots) != list(range(self.config.max_num_seqs)):
            raise SchedulerError(f"compute slots are not conserved: {sorted(slots)}")

    def _register(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise SchedulerError(f"request {request.request_id!r} is already known; release it first")
        needed = self._pages.blocks_needed(request.capacity_tokens)
        if needed > self._pages.num_blocks:
            raise SchedulerError(
                f"request {request.request_id!r} needs {needed} pages for {request.capacity_tokens} tokens; the pool "
                f"has {self._pages.num_blocks}: raise num_blocks or ask for fewer tokens"
            )
        self.requests[request.request_id] = request

    def _enter(self, request: Request, stage: Stage) -> None:
        """Move the request to the tail of a runnable stage's queue; it gets a slot if it has none."""
        if request.stage in self._queues:
            del self._queues[request.stage][request.request_id]
        if request.slot is None:
            request.slot = self._free_slots.pop()
        request.stage = stage
        self._queues[stage][request.request_id] = request

    def _leave(self, request: Request) -> None:
        """Take the request out of its runnable queue, if any, and its slot back."""
        if request.stage in self._queues:
            del self._queues[request.stage][request.request_id]
        if request.slot is not None:
            self._free_slots.append(request.slot)
            request.slot = None

    def _take_rows(self, stage: Stage) -> Batch:
        if stage is Stage.RECURRENT:
            self._prefill_loops = 0
            self._draining = self.config.mode == NO_REFILL
        return Batch(stage, list(islice(self._queues[stage].values(), self._rows_max)))

    def _take_prefill(self) -> Batch:
        """The next chunk of each prompt, through all loops."""
        self._prefill_loops += self._loops
        budget = self.config.max_num_batched_tokens
        batch = Batch(Stage.PREFILL, [])
        for request in self._queues[Stage.PREFILL].values():
            if budget == 0:
                break
            start = request.num_prefilled
            count = min(budget, self.config.prefill_chunk_size, len(request.prompt_ids) - start)
            batch.requests.append(request)
            batch.ranges.append((start, start + count))
            budget -= count
        return batch

    def _take_wave(self) -> Batch:
        """One loop of every chunk that is ready, and the next chunk of each prompt whose last one has left loop 0.

        A chunk is ready for a loop once the one before it has run that loop. No chunk is split to fit the budget.
        """
        self._prefill_loops += 1
        budget = self.config.max_num_batched_tokens
        batch = Batch(Stage.PREFILL, [])
        for request in self._queues[Stage.PREFILL].values():
            before = self._loops
            for chunk in request.wave:
                if chunk.depth < before and chunk.end - chunk.start <= budget:
                    self._add_chunk(batch, request, chunk)
                    budget -= chunk.end - chunk.start
                before = chunk.depth
            start = request.wave[-1].end if request.wave else request.num_prefilled
            wanted = min(self.config.prefill_chunk_size, len(request.prompt_ids) - start)
            count = min(budget, wanted)
            if before > 0 and count > 0 and (count == wanted or not batch.requests):
                request.wave.append(Chunk(start, start + count))
                self._add_chunk(batch, request, request.wave[-1])
                budget -= count
        return batch

    @staticmethod
    def _add_chunk(batch: Batch, request: Request, chunk: Chunk) -> None:
        batch.requests.append(request)
        batch.ranges.append((chunk.start, chunk.end))
        batch.depths.append(chunk.depth)

    def _advance(self, request: Request, end: int) -> None:
        """The chunk that ends there has run one more loop; it leaves the wave after the last."""
        for chunk in request.wave:
            if chunk.end == end:
                chunk.depth += 1
        if request.wave and request.wave[0].depth == self._loops:
            del request.wave[0]

    def _admit(self) -> None:
        """Move waiting requests to PREFILL while slots and pages last.

        One that does not fit may be overtaken max_admission_bypasses times; then the queue waits for it.
        """
        blocked: list[Request] = []
        for request in self._waiting.first(self.config.admission_scan_limit) if self._free_slots else ():
            if not self._free_slots:
                break
            if self._pages.allocate(request.request_id, request.capacity_tokens):
                self._waiting.remove(request)
                self._enter(request, Stage.PREFILL)
                for earlier in blocked:
                    earlier.bypasses += 1
            else:
                blocked.append(request)
            if any(earlier.bypasses >= self.config.max_admission_bypasses for earlier in blocked):
                break

    def _can_admit(self) -> bool:
        """Whether `_admit` would admit at least one request."""
        if not self._free_slots:
            return False
        for request in self._waiting.first(self.config.admission_scan_limit):
            if self._pages.blocks_needed(request.capacity_tokens) <= self._pages.free_blocks:
                return True
            if request.bypasses >= self.config.max_admission_bypasses:
                return False
        return False

    def _check_idle(self) -> None:
        """Raise SchedulerError where idling would last for ever."""
        lost = [request.request_id for request in self.requests.values() if request.stage in RUNNABLE]
        if lost:
            raise SchedulerError(f"runnable requests are in no queue: {lost}")
        if self._waiting and self._pages.free_blocks == self._pages.num_blocks:
            raise SchedulerError(
                f"request {self._waiting.first(1)[0].request_id!r} waits though every page and slot is free"
            )
