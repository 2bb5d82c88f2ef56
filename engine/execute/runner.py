"""Run one batch of one stage on the device. Owns the hidden rows and drives model, storage, sampling and exits.

Every KV write is checked against the written state before it is enqueued and recorded in it after. The caller orders
readers after the work by device events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cache.pages import KVCacheManager
from engine.cache.storage import KVStorage
from engine.execute.attention import AttentionPlan, Rows, Span, attend, plan_attention
from engine.execute.device import Readback
from engine.execute.exits import ExitRule
from engine.execute.sampling import Sampled, Sampler
from engine.models.registry import Model
from engine.schedule.request import Request


class ModelRunner:
    """The device side of one engine. A request is bound to its compute slot while it computes."""

    def __init__(self, model: Model, storage: KVStorage, pages: KVCacheManager, slot_count: int) -> None:
        self.model, self.storage, self.pages = model, storage, pages
        self.device = storage.device
        self.hidden = torch.zeros((slot_count, model.config.hidden_size), dtype=model.dtype, device=self.device)
        self.exits = ExitRule(slot_count, model.config.loops)
        self.sampler = Sampler(slot_count)
        self._rows: dict[str, Rows] = {}  # [planes, tokens]: the storage row (layer 0) of every token
        self._row_width = storage.kv_heads * storage.head_dim
        self._unread: tuple[Rows, Rows, Rows, Readback] | None = None  # slots, loops done, epochs and hazards
        self._waves: dict[str, dict[int, Tensor]] = {}  # start of a chunk -> its hidden rows [tokens, hidden]

    def bind(self, request: Request) -> None:
        """The request has pages and a compute slot from now on."""
        tables = np.array(self.pages.block_tables(request.request_id))
        page_rows = self.storage.num_layers * self.storage.block_size
        rows = tables[:, :, None] * page_rows + np.arange(self.storage.block_size)
        self._rows[request.request_id] = rows.reshape(len(tables), -1)
        self._waves.setdefault(request.request_id, {})
        self.exits.bind(request.compute_slot, request.params)
        self.sampler.bind(request.compute_slot, request.params)

    def is_bound(self, request_id: str) -> bool:
        return request_id in self._rows

    def unbind(self, request_id: str) -> None:
        """The request computes no more."""
        self._rows.pop(request_id, None)
        self._waves.pop(request_id, None)

    def import_hidden(self, request: Request, staging_slot: int) -> None:
        """Take the request's hidden row from a staging slot."""
        self.hidden[request.compute_slot].copy_(self.storage.hidden[staging_slot])

    def export_hidden(self, request: Request, staging_slot: int) -> None:
        """Put the request's hidden row into a staging slot."""
        self.storage.hidden[staging_slot].copy_(self.hidden[request.compute_slot])

    @torch.inference_mode()
    def prefill(
        self, requests: Sequence[Request], ranges: Sequence[tuple[int, int]], depths: Sequence[int] = ()
    ) -> None:
        """Run prompt tokens [start, end) of each row's request: through all loops, or, with depths, loop depths[row].

        A wavefront keeps the hidden rows of a chunk between its loops. A prompt's last token leaves its final state in
        the request's hidden row.
        """
        rotary = self.model.rotary(self._tensor([p for start, end in ranges for p in range(start, end)]))
        hidden = self._chunks(requests, ranges, depths)
        planes = [depths] if depths else [[plane] * len(ranges) for plane in range(self.model.config.loops)]
        for plane in planes:
            hidden = self._prefill_loop(requests, ranges, plane, hidden, rotary)
        lasts: list[int] = []
        final_slots: list[int] = []
        first = 0
        for row, (request, (start, end)) in enumerate(zip(requests, ranges, strict=True)):
            after = first + end - start
            if depths and depths[row] + 1 < self.model.config.loops:
                self._waves[request.request_id][start] = hidden[first:after]
            elif end == len(request.prompt_ids):
                lasts.append(after - 1)
                final_slots.append(request.compute_slot)
            first = after
        if lasts:
            self.hidden.index_copy_(0, self._tensor(final_slots), hidden.index_select(0, self._tensor(lasts)))

    def _chunks(self, requests: Sequence[Request], ranges: Sequence[tuple[int, int]], depths: Sequence[int]) -> Tensor:
        """The hidden rows that go into a prefill batch: embeddings, and what earlier loops of a wavefront left."""
        fresh = [row for row in range(len(ranges)) if not depths or depths[row] == 0]
        embedded: Iterator[Tensor] = iter(())  # of the fresh rows, in order
        if fresh:
            sizes = [ranges[row][1] - ranges[row][0] for row in fresh]
            token_ids = [t for row in fresh for t in requests[row].prompt_ids[slice(*ranges[row])]]
            embedded = iter(self.model.embed(self._tensor(token_ids)).split(sizes))
        taken = set(fresh)
        parts = [
            next(embedded) if row in taken else self._waves[request.request_id].pop(ranges[row][0])
            for row, request in enumerate(requests)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill_loop(
        self,
        requests: Sequence[Request],
        ranges: Sequence[tuple[int, int]],
        planes: Sequence[int],
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """One loop of every row, each in its own plane; returns the new hidden rows."""
        spans, written = [], []
        for request, (start, end), plane in zip(requests, ranges, planes, strict=True):
            self.pages.require_prefix(request.request_id, plane, start)
            rows = self._rows[request.request_id][plane]
            spans.append(Span(rows[:end], end - start))
            written.append(rows[start:end])
        hidden = self._loop(
            hidden, rotary, plan_attention(spans, self.device, self._row_width), np.concatenate(written)
        )
        for request, (start, end), plane in zip(requests, ranges, planes, strict=True):
            self.pages.mark_plane_written(request.request_id, plane, start, end)
        return hidden

    @torch.inference_mode()
    def prelude(self, requests: Sequence[Request]) -> None:
        """Embed each request's last output token into its hidden row."""
        slots = np.array([request.compute_slot for request in requests])
        hidden = self.model.embed(self._tensor([request.output_ids[-1] for request in requests]))
        self.hidden.index_copy_(0, self._tensor(slots), hidden)
        self.exits.begin_token(slots)

    @torch.inference_mode()
    def recurrent(self, requests: Sequence[Request]) -> list[bool]:
        """Run one more loop of each row, at its own depth. Returns which rows leave; their deeper planes are filled."""
        spans, positions, written = [], [], np.empty(len(requests), np.int64)
        slots = np.array([request.compute_slot for request in requests])
        for line, request in enumerate(requests):
            plane, position = request.loops_done, request.position
            self.pages.require_prefix(request.request_id, plane, position)
            rows = self._rows[request.request_id][plane]
            spans.append(Span(rows[: position + 1], 1))
            positions.append(position)
            written[line] = rows[position]
        index = self._tensor(slots)
        rotary = self.model.rotary(self._tensor(positions))
        hidden = self._loop(
            self.hidden.index_select(0, index), rotary, plan_attention(spans, self.device, self._row_width), written
        )
        self.hidden.index_copy_(0, index, hidden)
        for request, position in zip(requests, positions, strict=True):
            self.pages.mark_plane_written(request.request_id, request.loops_done, position, position + 1)
        exits = self._decide(slots, np.array([request.loops_done for request in requests]) + 1, hidden)
        self._fill_deeper_planes([request for request, leaves in zip(requests, exits, strict=True) if leaves])
        return exits

    @torch.inference_mode()
    def coda(self, requests: Sequence[Request]) -> Sampled:
        """Turn each request's hidden row into its next token."""
        slots = [request.compute_slot for request in requests]
        logits = self.model.logits(self.hidden.index_select(0, self._tensor(slots)))
        return self.sampler.sample(logits, slots)

    def settle(self) -> None:
        """Read the hazards that nobody has read yet; before a request's exit state is saved."""
        if self._unread is not None:
            slots, loops_done, epochs, hazards = self._unread
            self._unread = None
            self.exits.observe(slots, loops_done, hazards.wait().numpy(), epochs)

    def _decide(self, slots: Rows, loops_done: Rows, hidden: Tensor) -> list[bool]:
        """Which rows leave after this loop, which is enqueued. Hazards that can wait are read after the next one is."""
        self.settle()
        hazards = None
        if self.exits.needs_hazards(slots, loops_done):
            readback = Readback(self.model.hazards(hidden))
            if self.exits.can_wait(slots, loops_done):
                self._unread = (slots, loops_done, self.exits.epochs(slots), readback)
            else:
                hazards = readback.wait().numpy()
        exits: list[bool] = self.exits.decide(slots, loops_done, hazards).tolist()
        return exits

    def _fill_deeper_planes(self, leaving: Sequence[Request]) -> None:
        """Tokens that leave now, after loops_done + 1 loops, hand their K and V to the planes that they never reach."""
        sources: list[int] = []
        targets: list[int] = []
        for request in leaving:
            depth = request.loops_done + 1
            if depth < self.model.config.loops:
                source, deeper = self.pages.finalize_exit(request.request_id, request.position, depth)
                sources += [source] * len(deeper)
                targets += deeper
        if targets:
            rows_of = self.storage.rows_of
            self.storage.copy_tokens(rows_of(self._tensor(sources)), rows_of(self._tensor(targets)))

    def _loop(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], plan: AttentionPlan, written: Rows) -> Tensor:
        """One loop of the model over a batch whose K and V go to the rows `written`."""
        storage, rows = self.storage, self._tensor(written)

        def write_and_attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            storage.write(layer, rows, key, value)
            return attend(plan, storage, layer, query)

        return self.model.loop(hidden, rotary, write_and_attend)

    def _tensor(self, values: Sequence[int] | Rows) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device)
