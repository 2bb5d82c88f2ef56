"""Where a worker's pools lie and how they are cut: what storage tells and a transfer reads. Integers only."""

from __future__ import annotations

from itertools import pairwise

import msgspec

SHAPE_FIELDS = ("block_size", "num_layers", "planes", "token_bytes", "hidden_bytes")
"""What both sides must agree on; block_bytes and layer_bytes follow, as each geometry checks by itself."""


class GeometryError(ValueError):
    """One geometry contradicts itself; names the field, its value and what it should be."""


class PoolGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one worker's pools lie and how they are cut. Addresses and sizes are in bytes.

    token_bytes is one token of one layer in one pool; hidden_bytes is the distance between two hidden rows.
    memory is "DRAM" or "VRAM"; device is the accelerator's index, 0 for DRAM.
    Raises GeometryError where the sizes do not multiply out or where two pools overlap.
    """

    key_ptr: int
    value_ptr: int
    hidden_ptr: int
    hidden_bytes: int
    device: int
    memory: str
    num_blocks: int
    block_size: int
    num_layers: int
    planes: int
    block_bytes: int
    layer_bytes: int
    token_bytes: int
    staging_slots: int

    def __post_init__(self) -> None:
        counts = ("num_blocks", "staging_slots", "key_ptr", "value_ptr", "hidden_ptr")
        for field in (*SHAPE_FIELDS, *counts):
            if getattr(self, field) < 1:
                raise GeometryError(f"{field} is {getattr(self, field)}, must be at least 1")
        if self.memory not in ("DRAM", "VRAM"):
            raise GeometryError(f"memory is {self.memory!r}, must be 'DRAM' or 'VRAM'")
        if self.device < 0 or (self.memory == "DRAM" and self.device != 0):
            raise GeometryError(f"device is {self.device}, must be 0 for DRAM and not negative for VRAM")
        if self.layer_bytes != self.block_size * self.token_bytes:
            raise GeometryError(
                f"layer_bytes is {self.layer_bytes}, must be block_size * token_bytes = "
                f"{self.block_size} * {self.token_bytes}"
            )
        if self.block_bytes != self.num_layers * self.layer_bytes:
            raise GeometryError(
                f"block_bytes is {self.block_bytes}, must be num_layers * layer_bytes = "
                f"{self.num_layers} * {self.layer_bytes}"
            )
        spans = sorted((address, address + size, name) for name, address, size in self.regions())
        for (_, end, first), (start, _, second) in pairwise(spans):
            if end > start:
                raise GeometryError(f"the {first} pool ends at {end}, after the {second} pool starts at {start}")

    def regions(self) -> list[tuple[str, int, int]]:
        """The three pools as (name, address, bytes): what a connector registers, once each."""
        pool_bytes = self.num_blocks * self.block_bytes
        return [
            ("key", self.key_ptr, pool_bytes),
            ("value", self.value_ptr, pool_bytes),
            ("hidden", self.hidden_ptr, self.staging_slots * self.hidden_bytes),
        ]
