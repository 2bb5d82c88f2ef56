"""Sampling: what is kept, how often it comes, and that a batch's other rows change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SamplingParams
from engine.execute.sampling import LogitsError, Sampler

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, 3.0]])


def draw(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    """Draw count tokens one after another from one request's stream."""
    sampler = Sampler(1)
    sampler.bind(0, SamplingParams(count, **params))
    return [sampler.sample(logits, [0]).token_ids[0] for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    """Goal: greedy is deterministic, ties to the lowest id. Method: repeated draws, and a tie."""
    assert draw(5) == [4] * 5
    assert draw(3, torch.tensor([[1.0, 7.0, 7.0]])) == [1] * 3


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    """Goal: no overflow near zero. Method: the smallest positive float as temperature."""
    assert draw(5, temperature=5e-324, seed=0) == [4] * 5


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.6}, {4}),  # the likeliest alone has .62
        ({"top_p": 0.7}, {0, 4}),
        ({"top_p": 1e-9}, {4}),
        ({"top_k": 3, "top_p": 0.99}, {0, 1, 4}),
    ],
)
def test_only_kept_tokens_are_drawn(params: dict[str, Any], kept: set[int]) -> None:
    """Goal: top-k and top-p keep what they say. Method: 600 draws show every kept token and no other."""
    assert set(draw(600, temperature=1.0, seed=7, **params)) == kept


def test_the_largest_draw_takes_the_last_kept_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: rounding never reaches a token that was filtered out. Method: a draw of 1.0, which rounding can give."""
    monkeypatch.setattr(torch, "rand", lambda *_shape, **_options: torch.tensor(1.0, dtype=torch.float64))
    assert draw(1, temperature=1.0, seed=0, top_k=2) == [0]
    assert draw(1, temperature=1.0, seed=0, top_p=0.9) == [1]
    assert draw(1, temperature=1.0, seed=0) == [3]


def test_frequencies_follow_the_distribution() -> None:
    """Goal: temperature shapes the draw. Method: 6000 draws within five standard deviations of the softmax."""
    count = 6000
    expected = (LOGITS[0] / 1.5).softmax(-1)
    observed = torch.bincount(torch.tensor(draw(count, temperature=1.5, seed=11)), minlength=5)
    deviation = (observed - count * expected).abs() / (count * expected * (1 - expected)).sqrt()

    assert float(deviation.max()) < 5, (observed.tolist(), expected.tolist())


@given(seed=st.integers(0, 2**32 - 1), others=st.integers(0, 6))
def test_a_batch_changes_no_row(seed: int, others: int) -> None:
    """Goal: a request's tokens depend on itself alone. Method: one stream, alone and among other rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(others + 1, 40, generator=generator) * 2
    mine = int(torch.randint(others + 1, (), generator=generator))
    params = SamplingParams(4, temperature=0.8, top_k=20, top_p=0.9, seed=seed)
    alone = Sampler(1)
    alone.bind(0, params)
    crowd = Sampler(others + 1)
    for slot in range(others + 1):
        greedy = slot % 2 == 0
        crowd.bind(slot, params if slot == mine else SamplingParams(4, temperature=0.0 if greedy else 2.0))

    for _ in range(4):
        order = torch.randperm(others + 1, generator=generator).tolist()
        together = crowd.sample(logits[order], order).token_ids[order.index(mine)]
        assert together == alone.sample(logits[mine : mine + 1], [0]).token_ids[0]


def test_a_seed_replays_and_a_new_request_starts_anew() -> None:
    """Goal: seeds replay; streams do not leak between requests of a slot. Method: the same slot bound twice."""
    flat = torch.zeros(1, 1000)
    assert draw(8, flat, temperature=1.0, seed=5) == draw(8, flat, temperature=1.0, seed=5)
    assert draw(8, flat, temperature=1.0, seed=5) != draw(8, flat, temperature=1.0, seed=6)
    assert draw(8, flat, temperature=1.0) != draw(8, flat, temperature=1.0), "without a seed each request differs"


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Goal: the report is independent of temperature and filters. Method: a log-softmax; None if unasked."""
    sampler = Sampler(2)
    sampler.bind(0, SamplingParams(1, temperature=0.3, top_k=1, seed=0, logprobs=True))
    sampler.bind(1, SamplingParams(1))
    sampled = sampler.sample(LOGITS.repeat(2, 1), [0, 1])

    assert sampled.logprobs[0] == pytest.approx(float(LOGITS[0].log_softmax(-1)[4]))
    assert sampled.logprobs[1] is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_logits_yield_no_token(bad: float) -> None:
    """Goal: corrupt memory is never turned into text. Method: one NaN or infinity; the stream is not advanced."""
    sampler = Sampler(2)
    for slot in (0, 1):
        sampler.bind(slot, SamplingParams(2, temperature=1.0, seed=3))
    damaged = LOGITS.repeat(2, 1)
    damaged[1, 2] = bad
    with pytest.raises(LogitsError, match=r"slots \[1\]"):
        sampler.sample(damaged, [0, 1])

    assert sampler.sample(LOGITS, [0]).token_ids == draw(1, temperature=1.0, seed=3)
