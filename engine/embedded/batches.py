"""Random problems as padded rows of tokens, for both stages of training."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.embedded import recipe, tasks
from engine.embedded.tasks import PAD, encode


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows. answer, digits and weight are about the next token of each position but the last.

    tokens: [rows, length] int64. answer [rows, length - 1]: the next token belongs to the answer or ends it; digits
    [same]: it is a digit of the answer. weight [same]: 1 / sqrt(answer tokens of the row) where answer is set.
    """

    tokens: Tensor
    answer: Tensor
    digits: Tensor
    weight: Tensor


def make_batch(rng: random.Random, size: int, tokens_per_step: int = recipe.TOKENS_PER_STEP) -> Batch:
    """As many problems of at most `size` entries and keys as fit into tokens_per_step, none held out."""
    length = 4 * size + 3
    rows = max(1, tokens_per_step // length)
    tokens = torch.full((rows, length), PAD)
    answer = torch.zeros(rows, length - 1, dtype=torch.bool)
    digits = torch.zeros(rows, length - 1, dtype=torch.bool)
    weight = torch.zeros(rows, length - 1)
    for row in range(rows):
        item = tasks.draw(rng, size, held_out=False)
        ids = [*encode(item.prompt), *item.wanted]
        tokens[row, : len(ids)] = torch.tensor(ids)
        start, end = len(item.prompt) - 1, len(ids) - 1
        answer[row, start:end] = True
        weight[row, start:end] = (end - start) ** -0.5
        for key in range(item.asked):
            digits[row, start + 3 * key + 1 : start + 3 * key + 3] = True
    return Batch(tokens, answer, digits, weight)
