"""Map page tables of one transfer to the byte ranges that a connector writes. Pure: integers and numpy.

A pool of keys (and one of values) is `[block, layer, token, kv_head, head_dim]`, contiguous, so one block holds
all layers of `block_size` tokens of one plane, and one layer of it is one range of `layer_bytes`. A plane is one
set of KV versions, with a block table of its own. The hidden pool is `[slot, hidden]`, one row per transfer.
Source and target agree on every shape (`check_compatible`), while addresses and block ids differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.cache.geometry import SHAPE_FIELDS, PoolGeometry

Ranges = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]


class GeometryMismatch(ValueError):
    """Two pools cannot exchange bytes; names the field and both values."""

    def __init__(self, field: str, source: object, target: object) -> None:
        super().__init__(field, source, target)
        self.field, self.source, self.target = field, source, target

    def __str__(self) -> str:
        return f"source and target pools differ in {self.field}: {self.source!r} and {self.target!r}"


class Partition(NamedTuple):
    """What one write carries. local, remote: [n, 3] uint64 rows (address, bytes, device); row i goes to row i."""

    local: Ranges
    remote: Ranges
    bytes: int


def check_compatible(source: PoolGeometry, target: PoolGeometry) -> None:
    """Raise GeometryMismatch unless a page of source may be written over a page of target.

    Pool sizes, addresses, devices and kinds of memory may differ; shapes may not.
    """
    for field in SHAPE_FIELDS:
        if getattr(source, field) != getattr(target, field):
            raise GeometryMismatch(field, getattr(source, field), getattr(target, field))


def check_limits(geometry: PoolGeometry, max_bytes: int, max_descriptors: int) -> None:
    """Raise ValueError where a single token or hidden row would not fit one partition: no split could help."""
    floor = max(geometry.token_bytes, geometry.hidden_bytes)
    if max_bytes < floor:
        raise ValueError(
            f"max_bytes is {max_bytes}, must be at least {floor}: one token of one layer is "
            f"{geometry.token_bytes} bytes and one hidden row {geometry.hidden_bytes}"
        )
    if max_descriptors < 1:
        raise ValueError(f"max_descriptors is {max_descriptors}, must be at least 1")


def partitions(
    source: PoolGeometry,
    source_tables: Sequence[Sequence[int]],
    target: PoolGeometry,
    target_tables: Sequence[Sequence[int]],
    start: int,
    end: int,
    hidden: tuple[int, int] | None,
    max_bytes: int,
    max_descriptors: int,
) -> list[Partition]:
    """Cut tokens [start, end) of every plane, keys and values, into partitions of bounded size.

    tables: per plane, the block ids, indexed by position // block_size; entries outside the range are not looked at.
    hidden: (source slot, target slot) of the row that goes with the last partition, as its last range, even where
    start == end; None for a chunk that is not the last. Without tokens and without hidden there is no partition.
    max_bytes, max_descriptors: bounds of one partition, checked by `check_limits`.

    A full page is one range over all layers, a partial page one range per layer, so bytes outside [start, end)
    are never touched. Ranges that touch on both sides are joined, within one pool only, since each pool is
    registered by itself; ranges are cut only between tokens. The order inside is by source address, keys
    before values, and means nothing: a receiver waits for all partitions.
    Raises GeometryMismatch or ValueError before anything is computed where an argument contradicts another.
    """
    check_compatible(source, target)
    check_limits(source, max_bytes, max_descriptors)
    if not 0 <= start <= end:
        raise ValueError(f"token range [{start}, {end}) is not a range")
    if hidden is not None:
        for side, geometry, slot in (("source", source, hidden[0]), ("target", target, hidden[1])):
            if not 0 <= slot < geometry.staging_slots:
                raise ValueError(f"{side} slot is {slot}, must be in [0, {geometry.staging_slots})")
    source_blocks = _blocks("source", source, source_tables, start, end)
    target_blocks = _blocks("target", target, target_tables, start, end)
    source_offsets, target_offsets, sizes = _joined(*_page_ranges(source, source_blocks, target_blocks, start, end))
    whole_tokens = max_bytes // source.token_bytes * source.token_bytes
    result = [
        Partition(_rows(sources, cut, source.device), _rows(targets, cut, target.device), int(cut.sum()))
        for sources, targets, cut in _cut(
            np.concatenate([source_offsets + source.key_ptr, source_offsets + source.value_ptr]),
            np.concatenate([target_offsets + target.key_ptr, target_offsets + target.value_ptr]),
            np.concatenate([sizes, sizes]),
            whole_tokens,
            max_descriptors,
        )
    ]
    if hidden is not None:
        row = Partition(_hidden_row(source, hidden[0]), _hidden_row(target, hidden[1]), source.hidden_bytes)
        fits = result and result[-1].bytes + row.bytes <= max_bytes and len(result[-1].local) + 1 <= max_descriptors
        if fits:
            last = result.pop()
            row = Partition(
                np.concatenate([last.local, row.local]),
                np.concatenate([last.remote, row.remote]),
                last.bytes + row.bytes,
            )
        result.append(row)
    return result


def _blocks(side: str, geometry: PoolGeometry, tables: Sequence[Sequence[int]], start: int, end: int) -> Integers:
    """The block ids under tokens [start, end): [planes, pages] int64. Each id valid and used once, else ValueError."""
    if len(tables) != geometry.planes:
        raise ValueError(f"{side} has {len(tables)} tables, must be {geometry.planes}, one per plane")
    first, last = _page_span(geometry, start, end)
    for plane, table in enumerate(tables):
        if len(table) < last:
            raise ValueError(
                f"{side} table of plane {plane} has {len(table)} pages, must be at least {last} "
                f"for {end} tokens of {geometry.block_size} per page"
            )
    blocks = np.array([table[first:last] for table in tables], np.int64).reshape(geometry.planes, last - first)
    outside = blocks[(blocks < 0) | (blocks >= geometry.num_blocks)]
    if outside.size:
        raise ValueError(f"{side} block is {outside[0]}, must be in [0, {geometry.num_blocks})")
    ids, uses = np.unique(blocks, return_counts=True)
    if ids.size != blocks.size:
        raise ValueError(f"{side} block {ids[uses > 1][0]} stands for more than one page of this transfer")
    return blocks


def _page_span(geometry: PoolGeometry, start: int, end: int) -> tuple[int, int]:
    """The pages [first, last) that hold tokens [start, end); none where the token range is empty."""
    return (0, 0) if start == end else (start // geometry.block_size, -(-end // geometry.block_size))


def _page_ranges(
    geometry: PoolGeometry, sources: Integers, targets: Integers, start: int, end: int
) -> tuple[Integers, Integers, Integers]:
    """Source offset, target offset and size of every range inside one pool; see `partitions` for full and partial."""
    first, last = _page_span(geometry, start, end)
    page_starts = np.arange(first, last, dtype=np.int64) * geometry.block_size
    low = np.maximum(start - page_starts, 0)
    high = np.minimum(end - page_starts, geometry.block_size)
    full = high - low == geometry.block_size
    layers = np.arange(geometry.num_layers, dtype=np.int64) * geometry.layer_bytes

    def offsets(blocks: Integers) -> Integers:
        whole = blocks[:, full] * geometry.block_bytes
        partial = blocks[:, ~full, None] * geometry.block_bytes + layers + (low[~full] * geometry.token_bytes)[:, None]
        return np.concatenate([whole.ravel(), partial.ravel()])

    whole_sizes = np.full(sources[:, full].size, geometry.block_bytes, np.int64)
    partial_sizes = (high - low)[~full, None] * geometry.token_bytes + np.zeros_like(layers)
    return (
        offsets(sources),
        offsets(targets),
        np.concatenate([whole_sizes, np.tile(partial_sizes.ravel(), geometry.planes)]),
    )


def _joined(sources: Integers, targets: Integers, sizes: Integers) -> tuple[Integers, Integers, Integers]:
    """Sort by source and join the ranges that touch on both sides; sorting puts every such pair side by side."""
    if not sizes.size:
        return sources, targets, sizes
    order = np.argsort(sources)
    sources, targets, sizes = sources[order], targets[order], sizes[order]
    touching = (sources[:-1] + sizes[:-1] == sources[1:]) & (targets[:-1] + sizes[:-1] == targets[1:])
    heads = np.flatnonzero(np.concatenate([[True], ~touching]))
    return sources[heads], targets[heads], np.add.reduceat(sizes, heads)


def _cut(
    sources: Integers, targets: Integers, sizes: Integers, max_bytes: int, max_descriptors: int
) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Fill one partition after the other, in order; a range that does not fit goes on in the next one."""
    ends = np.cumsum(sizes)
    done, total = 0, int(ends[-1]) if ends.size else 0
    while done < total:
        stop = min(done + max_bytes, total)
        head = int(np.searchsorted(ends, done, side="right"))
        tail = int(np.searchsorted(ends, stop, side="left"))
        if tail - head >= max_descriptors:
            tail = head + max_descriptors - 1
            stop = int(ends[tail])
        source, target, size = (part[head : tail + 1].copy() for part in (sources, targets, sizes))
        skipped = done - int(ends[head] - sizes[head])
        source[0] += skipped
        target[0] += skipped
        size[0] -= skipped
        size[-1] -= int(ends[tail]) - stop
        yield source, target, size
        done = stop


def _rows(addresses: Integers, sizes: Integers, device: int) -> Ranges:
    return np.stack([addresses, sizes, np.full_like(sizes, device)], axis=1).astype(np.uint64)


def _hidden_row(geometry: PoolGeometry, slot: int) -> Ranges:
    address = geometry.hidden_ptr + slot * geometry.hidden_bytes
    return np.array([[address, geometry.hidden_bytes, geometry.device]], np.uint64)
