"""Fit the exit gate of a frozen trunk, with what an exit does to later tokens in the sum.

A token that leaves at loop e leaves its K and V of loop e in every deeper plane, where later tokens read them. So the
right depth of a token is not a matter of its own next token: a gate fitted to that alone leaves where a later token
then fails. Here exits are soft: a deeper plane holds the mixture of K and V over the loops at which the token may have
left, which makes the whole of it differentiable in the gate. The loss is the expected cross-entropy plus a price per
loop.
"""

from __future__ import annotations

import math
import random
import time

import torch
from torch import Tensor
from torch.nn import functional

from engine.embedded import recipe
from engine.embedded.batches import Batch, make_batch
from engine.embedded.network import Network


def fit_gate(
    network: Network, seed: int, steps: int = recipe.GATE_STEPS, tokens_per_step: int = recipe.GATE_TOKENS_PER_STEP
) -> None:
    """Fit the gate in place; nothing else changes. Prints a line every few seconds."""
    rng = random.Random(seed)
    weight = torch.zeros(1, network.shape.hidden, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([weight, bias], lr=recipe.GATE_LEARNING_RATE)
    started = last = time.monotonic()
    network.requires_grad_(False)
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = recipe.GATE_LEARNING_RATE * (1 - step / steps)
        batch = make_batch(rng, recipe.GATE_BUCKETS[step % len(recipe.GATE_BUCKETS)], tokens_per_step)
        entropy, depth = soft_exits(network, batch, weight, bias)
        share = batch.weight / batch.weight.sum()
        loss = ((entropy + recipe.LOOP_PRICE * depth) * share[batch.answer]).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        now = time.monotonic()
        if now - last > 5 or step + 1 == steps:
            last = now
            left = (now - started) / (step + 1) * (steps - step - 1)
            mean_depth = (depth.detach() * share[batch.answer]).sum().item()
            print(
                f"gate step {step + 1}/{steps}  loss {loss.item():.3f}  depth {mean_depth:.2f}  {left:.0f} s left",
                flush=True,
            )
    network.requires_grad_(True)
    with torch.no_grad():
        network.weight("model.early_exit_gate.weight").copy_(weight)
        network.weight("model.early_exit_gate.bias").copy_(bias)


def soft_exits(network: Network, batch: Batch, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Expected cross-entropy and expected depth of every answer token, [answer tokens] each.

    weight [1, hidden], bias [1]: of the gate. Prompt tokens, and so the first token of an answer, run at full depth.
    """
    shape = network.shape
    tokens = batch.tokens[:, :-1]
    count = tokens.shape[1]
    positions = torch.arange(count)
    mask = torch.full((count, count), float("-inf")).triu(1)
    first = batch.answer & (batch.answer.cumsum(1) == 1)
    free = (batch.answer & ~first).float()
    wanted = batch.tokens[:, 1:][batch.answer]
    x = functional.embedding(tokens, network.weight("model.embed_tokens.weight"))
    survive = torch.ones(tokens.shape)
    settled: list[tuple[Tensor, Tensor]] = []  # K and V of tokens that have left, weighted by how likely they have
    entropy, depth = torch.zeros(len(wanted)), torch.zeros(len(wanted))
    for loop in range(1, shape.loops + 1):
        own: list[tuple[Tensor, Tensor]] = []
        with torch.autocast("cpu", torch.bfloat16):
            for layer in range(shape.layers):
                q, k, v = network.project(network.norm(x, f"model.layers.{layer}.input_layernorm.weight"), layer)
                q, k = network.rotate(q, positions), network.rotate(k, positions)
                own.append((k, v))
                if settled:
                    stay = survive[:, None, :, None].to(k.dtype)
                    k, v = k * stay + settled[layer][0], v * stay + settled[layer][1]
                scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(shape.head_dim) + mask
                x = network.finish_layer(x, scores.softmax(-1).to(x.dtype) @ v, layer)
            x = network.norm(x, "model.norm.weight")
        hazard = torch.sigmoid(functional.linear(x.float(), weight, bias).squeeze(-1)) * free
        leave = survive if loop == shape.loops else survive * hazard
        survive = survive - leave
        chance = leave[:, None, :, None].to(own[0][0].dtype)
        parts = [(k * chance, v * chance) for k, v in own]
        settled = [(a + c, b + d) for (a, b), (c, d) in zip(settled, parts, strict=True)] if settled else parts
        scores = network.logits(x[batch.answer]).float()
        picked = leave[batch.answer]
        entropy = entropy + picked * functional.cross_entropy(scores, wanted, reduction="none")
        depth = depth + picked * loop
    return entropy, depth
