"""Paged attention against a dense float64 reading, over ragged batches and hostile memory."""

from __future__ import annotations

import numpy as np
import pytest
import reference_ouro  # noqa: F401  one torch thread
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.storage import KVStorage
from engine.execute import attention
from engine.execute.attention import Span, attend, plan_attention

CPU = torch.device("cpu")


def make_storage(num_blocks: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> KVStorage:
    return KVStorage(
        num_blocks=num_blocks,
        num_layers=2,
        block_size=4,
        kv_heads=kv_heads,
        head_dim=8,
        planes=1,
        hidden_size=8,
        staging_slots=0,
        dtype=dtype,
        device=CPU,
    )


def check(shapes: list[tuple[int, int]], kv_heads: int, seed: int) -> None:
    """Spans of (context, queries) in shuffled pages, everything else NaN; compare each query with a dense softmax."""
    heads, layer = 4, 1
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-context // 4) for context, _ in shapes]
    pool = make_storage(sum(pages) + 1, kv_heads)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    blocks = torch.randperm(sum(pages) + 1, generator=generator).tolist()
    spans, expected = [], []
    query = torch.randn(sum(queries for _, queries in shapes), heads, 8, generator=generator)
    line = 0
    for (context, queries), count in zip(shapes, pages, strict=True):
        table = [blocks.pop() for _ in range(count)]
        slots = torch.tensor([table[token // 4] * 4 + token % 4 for token in range(context)])
        rows = pool.rows_of(slots)
        key, value = (torch.randn(context, kv_heads, 8, generator=generator) for _ in range(2))
        pool.write(layer, rows, key, value)
        spans.append(Span(rows.numpy(), queries))
        for position in range(context - queries, context):
            seen_keys = key[: position + 1].double().repeat_interleave(heads // kv_heads, 1)
            seen_values = value[: position + 1].double().repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("hd,thd->ht", query[line].double(), seen_keys) * 8**-0.5
            expected.append(torch.einsum("ht,thd->hd", scores.softmax(-1), seen_values))
            line += 1
    output = attend(plan_attention(spans, CPU), pool, layer, query)

    np.testing.assert_allclose(output.numpy(), torch.stack(expected).numpy(), atol=1e-5)


SHAPES = st.lists(
    st.integers(1, 40).flatmap(lambda context: st.tuples(st.just(context), st.integers(1, context))),
    min_size=1,
    max_size=7,
)


@given(shapes=SHAPES, kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_every_query_sees_its_own_past_and_nothing_else(
    shapes: list[tuple[int, int]], kv_heads: int, seed: int
) -> None:
    """Goal: exact causal attention; no foreign memory. Method: dense oracle; all other pages and offsets hold NaN."""
    check(shapes, kv_heads, seed)


@given(shapes=SHAPES, seed=st.integers(0, 2**32 - 1), limit=st.sampled_from([1, 30, 300]))
@settings(deadline=None)
def test_splitting_into_groups_changes_nothing(shapes: list[tuple[int, int]], seed: int, limit: int) -> None:
    """Goal: rows come back in order however they are grouped. Method: the same oracle with eager splitting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT_ELEMENTS", limit)
        check(shapes, 2, seed)


def test_very_ragged_batches_are_split_and_even_ones_are_not() -> None:
    """Goal: one long context does not pad every row. Method: count groups of a ragged and of an even batch."""
    long, short = np.arange(600_000), np.arange(10)
    ragged = plan_attention([Span(short, 1), Span(long, 1), Span(short, 1)], CPU)
    even = plan_attention([Span(short, 1)] * 8, CPU)

    assert sorted(tuple(group.rows.shape) for group in ragged.groups) == [(1, 600_000), (2, 10)]
    assert len(even.groups) == 1 and even.groups[0].mask is None and even.restore is None


def test_bfloat16_softmax_is_float32() -> None:
    """Goal: many similar scores do not drown in rounding. Method: 512 equal keys in bfloat16 average their values."""
    pool = make_storage(128, 1, torch.bfloat16)
    rows = pool.rows_of(torch.arange(512))
    value = torch.ones(512, 1, 8, dtype=torch.bfloat16)
    value[::2] = 3.0
    pool.write(0, rows, torch.ones(512, 1, 8, dtype=torch.bfloat16), value)
    query = torch.ones(1, 4, 8, dtype=torch.bfloat16)

    output = attend(plan_attention([Span(rows.numpy(), 1)], CPU), pool, 0, query)
    assert torch.allclose(output.float(), torch.full((1, 4, 8), 2.0), atol=0.02)
