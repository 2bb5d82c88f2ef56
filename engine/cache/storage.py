"""Where KV bytes lie: the pools of keys and values and the staging rows for hand-offs. Torch; owns no decision.

A pool is [num_blocks, num_layers, block_size, kv_heads, head_dim], contiguous. A token of one layer is one *row* of
kv_heads * head_dim elements. A slot (block_id * block_size + offset) names a token in all layers; `rows_of` turns it
into its row in layer 0, and layer l lies block_size * l rows further, a shift that is baked into one view per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cache.geometry import PoolGeometry


class ShapeError(ValueError):
    """Tensors do not fit the pool; names every shape, before anything is written."""


class KVStorage:
    """The pools of one engine; addresses never change. All zero at first, so that no stray read meets a NaN."""

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        planes: int,
        hidden_size: int,
        staging_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.num_layers, self.block_size, self.planes = num_blocks, num_layers, block_size, planes
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.dtype, self.device = dtype, device
        shape = (num_blocks, num_layers, block_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.hidden = torch.zeros((staging_slots, hidden_size), dtype=dtype, device=device)
        self._key_rows = self.keys.view(-1, kv_heads * head_dim)
        self._value_rows = self.values.view(-1, kv_heads * head_dim)
        self._layer_keys = [self._key_rows[layer * block_size :] for layer in range(num_layers)]
        self._layer_values = [self._value_rows[layer * block_size :] for layer in range(num_layers)]
        self._scratch = torch.empty((2, 0, kv_heads * head_dim), dtype=dtype, device=device)
        self._layer_shifts = torch.arange(num_layers, device=device)[:, None] * block_size

    def rows_of(self, slots: Tensor) -> Tensor:
        """Rows in layer 0 of int64 slots of any shape."""
        blocks = torch.div(slots, self.block_size, rounding_mode="floor")
        return slots + blocks * (self.block_size * (self.num_layers - 1))

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Scatter the K and V of one layer, in place.

        rows: [tokens] int64 from rows_of, none twice. key, value: [tokens, kv_heads, head_dim], the pool's dtype.
        Raises ShapeError.
        """
        expected = (rows.shape[0], self.kv_heads, self.head_dim)
        if key.shape != expected or value.shape != expected:
            raise ShapeError(f"key {list(key.shape)}, value {list(value.shape)}, expected both {list(expected)}")
        self._layer_keys[layer].index_copy_(0, rows, key.reshape(rows.shape[0], -1))
        self._layer_values[layer].index_copy_(0, rows, value.reshape(rows.shape[0], -1))

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the K and V of one layer. rows: int64 of any shape. Returns two [*rows.shape, kv_heads, head_dim].

        What it returns is overwritten by the next read: memory fresh from the system costs more than the copy itself.
        """
        flat, shape = rows.reshape(-1), (*rows.shape, self.kv_heads, self.head_dim)
        if self._scratch.shape[1] < flat.shape[0]:
            size = max(flat.shape[0], 2 * self._scratch.shape[1])
            self._scratch = torch.empty((2, size, self.kv_heads * self.head_dim), dtype=self.dtype, device=self.device)
        key, value = self._scratch[0, : flat.shape[0]], self._scratch[1, : flat.shape[0]]
        torch.index_select(self._layer_keys[layer], 0, flat, out=key)
        torch.index_select(self._layer_values[layer], 0, flat, out=value)
        return key.view(shape), value.view(shape)

    def copy_tokens(self, source_rows: Tensor, target_rows: Tensor) -> None:
        """Copy K and V of single tokens in every layer: an early exit fills its deeper planes.

        source_rows, target_rows: [tokens] int64 from rows_of; no target twice, no target that is also a source.
        """
        sources = (source_rows + self._layer_shifts).view(-1)
        targets = (target_rows + self._layer_shifts).view(-1)
        for rows in (self._key_rows, self._value_rows):
            rows.index_copy_(0, targets, rows.index_select(0, sources))

    def page_bytes(self, block_id: int) -> tuple[bytes, bytes]:
        """The raw bytes of one page in the pool of keys and in that of values: for tests and comparisons."""
        pages = (pool[block_id].contiguous().view(torch.uint8).cpu() for pool in (self.keys, self.values))
        key, value = (page.numpy().tobytes() for page in pages)
        return key, value

    def geometry(self) -> PoolGeometry:
        """Where the pools lie and how they are cut."""
        token_bytes = self.kv_heads * self.head_dim * self.keys.element_size()
        cuda = self.device.type == "cuda"
        return PoolGeometry(
            key_ptr=self.keys.data_ptr(),
            value_ptr=self.values.data_ptr(),
            hidden_ptr=self.hidden.data_ptr(),
            hidden_bytes=self.hidden.shape[1] * self.hidden.element_size(),
            device=(self.device.index or 0) if cuda else 0,
            memory="VRAM" if cuda else "DRAM",
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_layers=self.num_layers,
            planes=self.planes,
            block_bytes=self.num_layers * self.block_size * token_bytes,
            layer_bytes=self.block_size * token_bytes,
            token_bytes=token_bytes,
            staging_slots=self.hidden.shape[0],
        )
