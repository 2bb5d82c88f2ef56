"""Turn logits into tokens. A request's tokens depend on its own logits, parameters and random stream alone.

Each sampled token takes one uniform number from the request's generator, which lives on the host: the stream is the
same on every device and does not depend on who shares the batch. Greedy rows draw nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import SamplingParams

TopLogprobs = list[tuple[int, float]]


class LogitsError(RuntimeError):
    """A row of logits has no finite maximum: weights or KV are damaged. No token is drawn from it."""


@dataclass(frozen=True)
class Sampled:
    """One batch's tokens and, where asked for, log-probabilities under the raw logits.

    logprobs: of each row's token. top: (token id, log-probability) of each row's likeliest tokens, likeliest first.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    top: list[TopLogprobs]


class Sampler:
    """The sampling state of every compute slot."""

    def __init__(self, slot_count: int) -> None:
        self._params: list[SamplingParams | None] = [None] * slot_count
        self._generators: list[torch.Generator | None] = [None] * slot_count

    def bind(self, slot: int, params: SamplingParams) -> None:
        """A request takes the slot; its random stream starts anew."""
        self._params[slot] = params
        self._generators[slot] = None
        if params.temperature > 0.0:
            generator = torch.Generator()
            if params.seed is None:
                generator.seed()
            else:
                generator.manual_seed(params.seed)
            self._generators[slot] = generator

    def save(self, slot: int) -> Tensor | None:
        """The state of the slot's random stream, for a request that moves to another slot; None for a greedy one."""
        generator = self._generators[slot]
        return None if generator is None else generator.get_state()

    def restore(self, slot: int, state: Tensor | None) -> None:
        """Go on with a stream, after `bind`."""
        generator = self._generators[slot]
        if generator is not None and state is not None:
            generator.set_state(state)

    def sample(self, logits: Tensor, slots: Sequence[int]) -> Sampled:
        """One token per row. logits: [rows, vocab] float32; slots: the compute slot of each row, none twice.

        Raises LogitsError before any random number is drawn.
        """
        best, choice = logits.max(-1)
        if not bool(torch.isfinite(best).all()):
            bad = [slot for slot, fine in zip(slots, torch.isfinite(best).tolist(), strict=True) if not fine]
            raise LogitsError(f"logits of compute slots {bad} have no finite maximum")
        token_ids: list[int] = choice.tolist()
        rows = [row for row, slot in enumerate(slots) if self._generators[slot] is not None]
        if rows:
            drawn = self._draw(logits[rows] if len(rows) < len(slots) else logits, [slots[row] for row in rows])
            for row, token_id in zip(rows, drawn, strict=True):
                token_ids[row] = token_id
        return Sampled(token_ids, *self._logprobs(logits, slots, token_ids))

    def _logprobs(
        self, logits: Tensor, slots: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[list[float | None], list[TopLogprobs]]:
        """The log-probabilities of those rows that ask for them."""
        chosen: list[float | None] = [None] * len(slots)
        top: list[TopLogprobs] = [[] for _ in slots]
        asking = [(row, p) for row, slot in enumerate(slots) if (p := self._params[slot]) is not None and p.logprobs]
        if asking:
            rows = [row for row, _ in asking]
            logprobs = torch.log_softmax(logits[rows], -1).cpu()
            for line, (row, params) in enumerate(asking):
                chosen[row] = float(logprobs[line, token_ids[row]])
                best = logprobs[line].topk(min(params.top_logprobs, logprobs.shape[-1]))
                top[row] = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return chosen, top

    def _draw(self, logits: Tensor, slots: Sequence[int]) -> list[int]:
        """Sample each row by inverting its cumulative distribution, likeliest token first."""
        params, uniforms = [], []
        for slot in slots:
            bound, generator = self._params[slot], self._generators[slot]
            assert bound is not None and generator is not None, f"compute slot {slot} has no random stream"
            params.append(bound)
            uniforms.append(torch.rand((), generator=generator, dtype=torch.float64))
        device, vocab = logits.device, logits.shape[-1]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        # The likeliest becomes 0 before the division, so that a tiny temperature cannot overflow it.
        scaled = (ordered - ordered[:, :1]).double() / column([p.temperature for p in params], torch.float64)
        kept = column([min(p.top_k or vocab, vocab) for p in params], torch.int64)
        scaled.masked_fill_(torch.arange(vocab, device=device) >= kept, -torch.inf)
        probabilities = scaled.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        top_p = column([p.top_p for p in params], torch.float64)
        probabilities.masked_fill_((before >= top_p) & (top_p < 1.0), 0.0)  # the likeliest has nothing before it
        cumulative = probabilities.cumsum(-1)
        targets = torch.stack(uniforms).to(device)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, targets, right=True)
        last = (probabilities > 0).sum(-1, keepdim=True) - 1  # rounding may not push a draw past the last kept token
        return order.gather(-1, torch.minimum(drawn, last)).squeeze(-1).tolist()
