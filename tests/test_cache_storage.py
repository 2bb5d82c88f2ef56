"""The pools: where a token's bytes lie, and that no call touches others."""

from __future__ import annotations

import ctypes

import pytest
import reference_ouro  # noqa: F401  one torch thread
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.storage import KVStorage, ShapeError

BLOCKS, LAYERS, BLOCK, HEADS, DIM = 5, 3, 4, 2, 8


def make_storage(dtype: torch.dtype = torch.float32) -> KVStorage:
    return KVStorage(
        num_blocks=BLOCKS,
        num_layers=LAYERS,
        block_size=BLOCK,
        kv_heads=HEADS,
        head_dim=DIM,
        planes=2,
        hidden_size=16,
        staging_slots=3,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@given(
    slots=st.lists(st.integers(0, BLOCKS * BLOCK - 1), min_size=1, unique=True),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_a_write_lands_in_its_slots_and_nowhere_else(slots: list[int], layer: int, seed: int) -> None:
    """Goal: block, layer and offset are where the layout says. Method: plain indexing of the pool as oracle."""
    pool = make_storage()
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(len(slots), HEADS, DIM, generator=generator) for _ in range(2))
    rows = pool.rows_of(torch.tensor(slots))
    pool.write(layer, rows, key, value)
    expected_keys, expected_values = torch.zeros_like(pool.keys), torch.zeros_like(pool.values)
    for index, slot in enumerate(slots):
        expected_keys[slot // BLOCK, layer, slot % BLOCK] = key[index]
        expected_values[slot // BLOCK, layer, slot % BLOCK] = value[index]

    assert torch.equal(pool.keys, expected_keys) and torch.equal(pool.values, expected_values)
    read_key, read_value = pool.read(layer, rows.flip(0)[None])
    assert torch.equal(read_key[0], key.flip(0)) and torch.equal(read_value[0], value.flip(0))


def test_an_exit_copies_one_token_in_every_layer() -> None:
    """Goal: deeper planes get the token, all layers, K and V. Method: random pools, plain indexing as oracle."""
    pool = make_storage()
    pool.keys.normal_()
    pool.values.normal_()
    expected_keys, expected_values = pool.keys.clone(), pool.values.clone()
    sources, targets = [1, 1, 6], [9, 19, 15]
    for source, target in zip(sources, targets, strict=True):
        for expected in (expected_keys, expected_values):
            expected[target // BLOCK, :, target % BLOCK] = expected[source // BLOCK, :, source % BLOCK]
    pool.copy_tokens(pool.rows_of(torch.tensor(sources)), pool.rows_of(torch.tensor(targets)))

    assert torch.equal(pool.keys, expected_keys) and torch.equal(pool.values, expected_values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_geometry_tells_where_bytes_lie(dtype: torch.dtype) -> None:
    """Goal: a remote writer can compute addresses. Method: read raw memory at the told address of one token."""
    pool = make_storage(dtype)
    pool.keys.normal_()
    pool.values.normal_()
    pool.hidden.normal_()
    told = pool.geometry()
    block, layer, offset = 3, 2, 1
    distance = block * told.block_bytes + layer * told.layer_bytes + offset * told.token_bytes
    for base, tensor in ((told.key_ptr, pool.keys), (told.value_ptr, pool.values)):
        raw = ctypes.string_at(base + distance, told.token_bytes)
        assert raw == tensor[block, layer, offset].contiguous().view(torch.uint8).numpy().tobytes()
    staged = ctypes.string_at(told.hidden_ptr + 2 * told.hidden_bytes, told.hidden_bytes)
    assert staged == pool.hidden[2].contiguous().view(torch.uint8).numpy().tobytes()
    start = block * told.block_bytes
    assert pool.page_bytes(block)[0] == ctypes.string_at(told.key_ptr + start, told.block_bytes)
    assert pool.page_bytes(block)[1] == ctypes.string_at(told.value_ptr + start, told.block_bytes)


def test_a_misshapen_write_changes_nothing() -> None:
    """Goal: a wrong shape is named before anything is written. Method: one head too few."""
    pool = make_storage()
    rows = pool.rows_of(torch.tensor([0, 1]))
    with pytest.raises(ShapeError, match=r"key \[2, 1, 8\], value \[2, 2, 8\], expected both \[2, 2, 8\]"):
        pool.write(0, rows, torch.ones(2, 1, DIM), torch.ones(2, HEADS, DIM))

    assert not pool.keys.any() and not pool.values.any()
