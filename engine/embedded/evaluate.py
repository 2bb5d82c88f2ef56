"""A slow decoder with the engine's semantics, to measure the model without the engine.

Prompts run at full depth; the first token comes from there; a later token that leaves at loop e hands its K and V of
loop e to the deeper planes (layout LAST_EXITED). Greedy, float32, batched over problems of one prompt length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.embedded.network import Network
from engine.embedded.tasks import EOS, Problem, encode

PAGE_TOKENS = 16
ROWS_MAX = 64

Fault = Callable[[Tensor, int], None]
"""fault(kv, prompt_tokens): alter the prompt's KV in place, after the prompt has run.

kv: [loops, layers, 2, rows, heads, tokens, head_dim], K before V; keys are already rotated.
"""


@dataclass(frozen=True, slots=True)
class Output:
    """One answer. tokens: the end included, where it came; depths: the exit loop of each token after the first."""

    tokens: list[int]
    depths: list[int]


@dataclass(frozen=True, slots=True)
class Score:
    """Of one set of problems. depths: how many tokens after the first left at loop 1, 2, ..."""

    problems: int
    right: int
    depths: tuple[int, ...]

    @property
    def exact(self) -> float:
        """Share of answers that are right in every token, end included; 0 to 1."""
        return self.right / self.problems

    @property
    def mean_depth(self) -> float:
        """Loops of a token after the first, on average; 0 where there is none."""
        total = sum(self.depths)
        return sum(d * n for d, n in enumerate(self.depths, 1)) / total if total else 0.0

    def __add__(self, other: Score) -> Score:
        depths = tuple(a + b for a, b in zip(self.depths, other.depths, strict=True))
        return Score(self.problems + other.problems, self.right + other.right, depths)


def zero_page(page: int) -> Fault:
    """Zero K and V of one page of the prompt, in every plane and layer."""

    def fault(kv: Tensor, prompt_tokens: int) -> None:
        kv[..., page * PAGE_TOKENS : min((page + 1) * PAGE_TOKENS, prompt_tokens), :] = 0

    return fault


def stale_page(page: int) -> Fault:
    """Put the same page of the batch's next problem in its place: what a wrong block table reads. Needs two rows."""

    def fault(kv: Tensor, prompt_tokens: int) -> None:
        places = slice(page * PAGE_TOKENS, min((page + 1) * PAGE_TOKENS, prompt_tokens))
        kv[..., places, :] = kv[..., places, :].roll(-1, 3)

    return fault


def zero_plane(loop: int, layer: int) -> Fault:
    """Zero the prompt's K and V of one loop, from 1, and one layer, from 0."""

    def fault(kv: Tensor, prompt_tokens: int) -> None:
        kv[loop - 1, layer, ..., :prompt_tokens, :] = 0

    return fault


def answers(
    network: Network,
    problems: Sequence[Problem],
    threshold: float = 1.0,
    min_loops: int = 1,
    fault: Fault | None = None,
) -> list[Output]:
    """Outputs of problems of any lengths, in their order. Parameters: as decode()."""
    places: dict[int, list[int]] = {}
    for place, item in enumerate(problems):
        places.setdefault(len(item.prompt), []).append(place)
    out: dict[int, Output] = {}
    for group in places.values():
        for low in range(0, len(group), ROWS_MAX):
            part = group[low : low + ROWS_MAX]
            found = decode(network, [problems[place] for place in part], threshold, min_loops, fault)
            out.update(zip(part, found, strict=True))
    return [out[place] for place in range(len(problems))]


def score(
    network: Network,
    problems: Sequence[Problem],
    threshold: float = 1.0,
    min_loops: int = 1,
    fault: Fault | None = None,
) -> Score:
    """Exact match and exit depths over problems of any lengths. Parameters: as decode()."""
    outputs = answers(network, problems, threshold, min_loops, fault)
    depths = [depth for output in outputs for depth in output.depths]
    return Score(
        len(problems),
        sum(output.tokens == item.wanted for output, item in zip(outputs, problems, strict=True)),
        tuple(depths.count(loop) for loop in range(1, network.shape.loops + 1)),
    )


@torch.inference_mode()
def decode(
    network: Network,
    problems: Sequence[Problem],
    threshold: float = 1.0,
    min_loops: int = 1,
    fault: Fault | None = None,
) -> list[Output]:
    """Outputs of problems whose prompts have one length.

    threshold: of the accumulated exit probability; 1 never leaves early, 0 always leaves at min_loops.
    """
    shape = network.shape
    tokens = torch.tensor([encode(item.prompt) for item in problems])
    rows, length = tokens.shape
    total = length + max(len(item.wanted) for item in problems)
    kv = torch.zeros(shape.loops, shape.layers, 2, rows, shape.heads, total, shape.head_dim)
    hidden = _prefill(network, kv, tokens)
    if fault is not None:
        fault(kv, length)
    token = network.logits(hidden[:, -1]).argmax(-1)
    outputs = [Output([int(first)], []) for first in token]
    for place in range(length, total - 1):
        live = [output.tokens[-1] != EOS for output in outputs]
        if not any(live):
            break
        hidden, depth = _decode_one(network, kv, token, place, threshold, min_loops)
        token = network.logits(hidden).argmax(-1)
        for row, output in enumerate(outputs):
            if live[row]:
                output.tokens.append(int(token[row]))
                output.depths.append(int(depth[row]))
    return outputs


def _prefill(network: Network, kv: Tensor, tokens: Tensor) -> Tensor:
    """Whole prompts [rows, tokens] at full depth, filling kv; returns the last loop's states."""
    count = tokens.shape[1]
    positions = torch.arange(count)
    mask = torch.full((count, count), float("-inf")).triu(1)
    x = functional.embedding(tokens, network.weight("model.embed_tokens.weight"))
    for plane in kv:
        for layer, cache in enumerate(plane):
            q, k, v = network.project(network.norm(x, f"model.layers.{layer}.input_layernorm.weight"), layer)
            q, k = network.rotate(q, positions), network.rotate(k, positions)
            cache[0, :, :, :count], cache[1, :, :, :count] = k, v
            scores = q @ k.transpose(-1, -2) / math.sqrt(network.shape.head_dim) + mask
            x = network.finish_layer(x, scores.softmax(-1) @ v, layer)
        x = network.norm(x, "model.norm.weight")
    return x


def _decode_one(
    network: Network, kv: Tensor, token: Tensor, place: int, threshold: float, min_loops: int
) -> tuple[Tensor, Tensor]:
    """One token [rows] of every row, at one place; returns the states [rows, hidden] and loops [rows] of its exit."""
    shape, rows = network.shape, len(token)
    x = functional.embedding(token[:, None], network.weight("model.embed_tokens.weight"))
    final, depth = torch.zeros(rows, shape.hidden), torch.zeros(rows, dtype=torch.int64)
    remaining, inside = torch.ones(rows), torch.ones(rows, dtype=torch.bool)
    for loop in range(1, shape.loops + 1):
        x = _loop_one(network, kv[loop - 1], x, place, inside)
        remaining = remaining * (1 - torch.sigmoid(network.gate(x[:, 0])))
        if loop == shape.loops:
            now = inside
        elif threshold < 1 and loop >= min_loops:
            now = inside & (1 - remaining >= threshold)
        else:
            continue
        final[now], depth[now] = x[now, 0], loop
        kv[loop:, :, :, now, :, place] = kv[loop - 1, :, :, now, :, place]
        inside = inside & ~now
        if not inside.any():
            break
    return final, depth


def _loop_one(network: Network, plane: Tensor, x: Tensor, place: int, inside: Tensor) -> Tensor:
    """One token through one loop. inside [rows]: rows that have not left; only they write their K and V."""
    positions = torch.tensor([place])
    for layer, cache in enumerate(plane):
        q, k, v = network.project(network.norm(x, f"model.layers.{layer}.input_layernorm.weight"), layer)
        q, k = network.rotate(q, positions), network.rotate(k, positions)
        cache[0, inside, :, place], cache[1, inside, :, place] = k[inside, :, 0], v[inside, :, 0]
        keys, values = cache[0, :, :, : place + 1], cache[1, :, :, : place + 1]
        scores = q @ keys.transpose(-1, -2) / math.sqrt(network.shape.head_dim)
        x = network.finish_layer(x, scores.softmax(-1) @ values, layer)
    return network.norm(x, "model.norm.weight")
