"""A slow decoder with the engine's semantics, to measure the model without the engine.

Prompts run at full depth; the first token comes from there; a later token that leaves at loop e hands its K and V of
loop e to the deeper planes (layout LAST_EXITED). Batched over problems of one prompt length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.embedded.network import Network
from engine.embedded.tasks import EOS, Problem, encode


@dataclass(frozen=True, slots=True)
class Score:
    """Of one set of problems. depths: how many tokens after the first left at loop 1, 2, ..."""

    problems: int
    right: int
    depths: tuple[int, ...]

    @property
    def exact(self) -> float:
        """Share of answers that are right in every token, end included."""
        return self.right / self.problems

    @property
    def mean_depth(self) -> float:
        """Loops of a token after the first, on average."""
        total = sum(self.depths)
        return sum(d * n for d, n in enumerate(self.depths, 1)) / total if total else 0.0


@torch.inference_mode()
def decode(
    network: Network,
    problems: Sequence[Problem],
    threshold: float,
    min_loops: int = 1,
    spoil_page: int | None = None,
    page: int = 16,
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Greedy outputs of problems of one prompt length, and the exits taken.

    threshold: of the accumulated exit probability; 1 never leaves early. spoil_page: zero this page of the prompt's
    KV in every plane after the prompt has run.
    """
    shape = network.shape
    tokens = torch.tensor([encode(p.prompt) for p in problems])
    batch, length = tokens.shape
    longest = max(3 * p.asked + 1 for p in problems)
    total = length + longest
    planes = [
        [torch.zeros(2, batch, shape.heads, total, shape.head_dim) for _ in range(shape.layers)]
        for _ in range(shape.loops)
    ]
    hidden = _run(
        network, planes, torch.nn.functional.embedding(tokens, network.weight("model.embed_tokens.weight")), 0
    )
    if spoil_page is not None:
        for plane in planes:
            for cache in plane:
                cache[:, :, :, spoil_page * page : min((spoil_page + 1) * page, length)] = 0
    token = network.logits(hidden[:, -1]).argmax(-1)
    outputs = [[int(t)] for t in token]
    depths = [0] * shape.loops
    for place in range(length, total - 1):
        live = [i for i in range(batch) if outputs[i][-1] != EOS]
        if not live:
            break
        x = torch.nn.functional.embedding(token[:, None], network.weight("model.embed_tokens.weight"))
        remaining = torch.ones(batch)
        left = torch.zeros(batch, dtype=torch.bool)
        final = torch.zeros(batch, shape.hidden)
        depth = torch.full((batch,), shape.loops)
        for loop in range(shape.loops):
            x = _step(network, planes, x, place, loop, left)
            remaining = remaining * (1 - torch.sigmoid(network.gate(x[:, 0])))
            leave = torch.full((batch,), loop + 1 == shape.loops)
            if threshold < 1 and loop + 1 >= min_loops:
                leave = leave | (1 - remaining >= threshold)
            now = leave & ~left
            final[now] = x[now, 0]
            depth[now] = loop + 1
            for deeper in range(loop + 1, shape.loops):
                for layer in range(shape.layers):
                    planes[deeper][layer][:, now, :, place] = planes[loop][layer][:, now, :, place]
            left = left | now
            if bool(left.all()):
                break
        token = network.logits(final).argmax(-1)
        for i in live:
            outputs[i].append(int(token[i]))
            depths[int(depth[i]) - 1] += 1
    return outputs, tuple(depths)


def _run(network: Network, planes: list[list[Tensor]], x: Tensor, start: int) -> Tensor:
    """Whole rows at full depth, filling every plane; returns the last loop's states."""
    count = x.shape[1]
    positions = torch.arange(start, start + count)
    mask = torch.full((count, count), float("-inf")).triu(1)
    for plane in planes:
        for layer, cache in enumerate(plane):
            q, k, v = network.project(network.norm(x, f"model.layers.{layer}.input_layernorm.weight"), layer)
            q, k = network.rotate(q, positions), network.rotate(k, positions)
            cache[0, :, :, start : start + count], cache[1, :, :, start : start + count] = k, v
            scores = q @ k.transpose(-1, -2) / math.sqrt(network.shape.head_dim) + mask
            x = network.finish_layer(x, scores.softmax(-1) @ v, layer)
        x = network.norm(x, "model.norm.weight")
    return x


def _step(network: Network, planes: list[list[Tensor]], x: Tensor, place: int, loop: int, left: Tensor) -> Tensor:
    """One token of every row through one loop. left [batch]: rows that keep what their earlier exit wrote."""
    positions = torch.tensor([place])
    for layer, cache in enumerate(planes[loop]):
        q, k, v = network.project(network.norm(x, f"model.layers.{layer}.input_layernorm.weight"), layer)
        q, k = network.rotate(q, positions), network.rotate(k, positions)
        stay = ~left
        cache[0, stay, :, place], cache[1, stay, :, place] = k[stay, :, 0], v[stay, :, 0]
        keys, values = cache[0, :, :, : place + 1], cache[1, :, :, : place + 1]
        scores = q @ keys.transpose(-1, -2) / math.sqrt(network.shape.head_dim)
        x = network.finish_layer(x, scores.softmax(-1) @ values, layer)
    return network.norm(x, "model.norm.weight")


def score(
    network: Network, problems: Sequence[Problem], threshold: float, min_loops: int = 1, spoil_page: int | None = None
) -> Score:
    """Exact match over problems of any lengths."""
    groups: dict[int, list[Problem]] = {}
    for item in problems:
        groups.setdefault(len(item.prompt), []).append(item)
    right, depths = 0, [0] * network.shape.loops
    for group in groups.values():
        for low in range(0, len(group), 64):
            part = group[low : low + 64]
            outputs, counts = decode(network, part, threshold, min_loops, spoil_page)
            right += sum(out == [*encode(p.answer), EOS] for out, p in zip(outputs, part, strict=True))
            depths = [a + b for a, b in zip(depths, counts, strict=True)]
    return Score(len(problems), right, tuple(depths))
