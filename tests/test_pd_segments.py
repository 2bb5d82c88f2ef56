"""The mapping of page tables to byte ranges, against an oracle that lists every byte one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from engine.cache.geometry import GeometryError, PoolGeometry
from engine.pd.segments import (
    SHAPE_FIELDS,
    GeometryMismatch,
    Partition,
    check_compatible,
    partitions,
)


def geometry(base: int = 1 << 20, **changes: Any) -> PoolGeometry:
    """A small pool: 3 layers of 4 tokens of 2 bytes per block, 8 blocks, 2 planes, 3 hidden rows of 5 bytes."""
    shape = {"block_size": 4, "num_layers": 3, "planes": 2, "token_bytes": 2, "num_blocks": 8} | {
        name: changes.pop(name)
        for name in ("block_size", "num_layers", "planes", "token_bytes", "num_blocks")
        if name in changes
    }
    layer_bytes = shape["block_size"] * shape["token_bytes"]
    block_bytes = layer_bytes * shape["num_layers"]
    pool_bytes = block_bytes * shape["num_blocks"]
    fields: dict[str, Any] = {
        "key_ptr": base,
        "value_ptr": base + pool_bytes,  # adjacent on purpose: no range may run from one pool into the next
        "hidden_ptr": base + 2 * pool_bytes,
        "hidden_bytes": 5,
        "device": 0,
        "memory": "DRAM",
        "block_bytes": block_bytes,
        "layer_bytes": layer_bytes,
        "staging_slots": 3,
    }
    return PoolGeometry(**(shape | fields | changes))


@dataclass
class Case:
    source: PoolGeometry
    source_tables: list[list[int]]
    target: PoolGeometry
    target_tables: list[list[int]]
    start: int
    end: int
    hidden: tuple[int, int] | None
    max_bytes: int
    max_descriptors: int

    def run(self) -> list[Partition]:
        return partitions(
            self.source,
            self.source_tables,
            self.target,
            self.target_tables,
            self.start,
            self.end,
            self.hidden,
            self.max_bytes,
            self.max_descriptors,
        )

    def expected(self) -> dict[int, int]:
        """Every source byte that must move, with the target byte it must move to, listed one by one."""
        source, target = self.source, self.target
        moves: dict[int, int] = {}
        for plane in range(source.planes):
            for position in range(self.start, self.end):
                page, token = divmod(position, source.block_size)
                for layer in range(source.num_layers):
                    inside = (layer * source.block_size + token) * source.token_bytes
                    source_offset = self.source_tables[plane][page] * source.block_bytes + inside
                    target_offset = self.target_tables[plane][page] * target.block_bytes + inside
                    for byte in range(source.token_bytes):
                        moves[source.key_ptr + source_offset + byte] = target.key_ptr + target_offset + byte
                        moves[source.value_ptr + source_offset + byte] = target.value_ptr + target_offset + byte
        if self.hidden is not None:
            for byte in range(source.hidden_bytes):
                row = source.hidden_ptr + self.hidden[0] * source.hidden_bytes
                moves[row + byte] = target.hidden_ptr + self.hidden[1] * target.hidden_bytes + byte
        return moves


@st.composite
def tables(draw: st.DrawFn, planes: int, pages: int, num_blocks: int) -> list[list[int]]:
    """Distinct blocks for every page: in one run by plane, in one run by page, or in any order."""
    count = planes * pages
    kind = draw(st.sampled_from(["by plane", "by page", "any"]))
    if kind == "any":
        blocks = draw(st.permutations(range(num_blocks)))[:count]
    else:
        first = draw(st.integers(0, num_blocks - count))
        blocks = list(range(first, first + count))
    if kind == "by page":
        return [[blocks[page * planes + plane] for page in range(pages)] for plane in range(planes)]
    return [list(blocks[plane * pages : (plane + 1) * pages]) for plane in range(planes)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    planes, pages = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = {
        "planes": planes,
        "block_size": draw(st.integers(1, 4)),
        "num_layers": draw(st.integers(1, 3)),
        "token_bytes": draw(st.integers(1, 3)),
        "hidden_bytes": draw(st.integers(1, 6)),
    }
    source = geometry(1 << 20, num_blocks=planes * pages + draw(st.integers(0, 3)), **shape)
    target = geometry(
        1 << 30, num_blocks=planes * pages + draw(st.integers(0, 3)), staging_slots=2, memory="VRAM", device=3, **shape
    )
    end = draw(st.integers(0, pages * source.block_size))
    floor = max(source.token_bytes, source.hidden_bytes)
    return Case(
        source,
        draw(tables(planes, pages, source.num_blocks)),
        target,
        draw(tables(planes, pages, target.num_blocks)),
        draw(st.integers(0, end)),
        end,
        draw(st.none() | st.tuples(st.integers(0, 2), st.integers(0, 1))),
        draw(st.integers(floor, floor + 8) | st.integers(floor, 4096)),
        draw(st.integers(1, 6) | st.just(1000)),
    )


@given(case=cases())
def test_every_byte_moves_once_to_its_place_and_no_other_byte_moves(case: Case) -> None:
    """Goal: exact coverage, disjoint, bijective. Method: expand all ranges to bytes, compare with the oracle."""
    moves: list[tuple[int, int]] = []
    for part in case.run():
        for (local, size, _), (remote, remote_size, _) in zip(part.local.tolist(), part.remote.tolist(), strict=True):
            assert size == remote_size > 0
            moves += zip(range(local, local + size), range(remote, remote + size), strict=True)

    expected = case.expected()
    assert dict(moves) == expected
    assert len(moves) == len(expected), "a source byte moves more than once"
    assert len({target for _, target in moves}) == len(expected), "two source bytes move to one target byte"


@given(case=cases())
def test_partitions_hold_the_limits_and_stay_inside_one_region(case: Case) -> None:
    """Goal: limits and bounds hold for each partition. Method: sums and per-pool bounds, on both sides."""
    for part in case.run():
        assert part.bytes == int(part.local[:, 1].sum()) == int(part.remote[:, 1].sum())
        assert 0 < part.bytes <= case.max_bytes
        assert 1 <= len(part.local) == len(part.remote) <= case.max_descriptors
        for ranges, side in ((part.local, case.source), (part.remote, case.target)):
            assert ranges.dtype == np.uint64 and ranges.shape[1] == 3
            for address, size, device in ranges.tolist():
                assert device == side.device
                assert any(
                    start <= address and address + size <= start + length for _, start, length in side.regions()
                ), f"{address}+{size} lies in no single region of {side}"


@given(case=cases())
def test_the_hidden_row_is_the_last_range_of_the_last_partition(case: Case) -> None:
    """Goal: whoever holds the last partition holds the hidden row. Method: look for its rows in every partition."""
    parts = case.run()
    rows = [
        (number, row, tuple(part.remote[row].tolist()))
        for number, part in enumerate(parts)
        for row in range(len(part.local))
        if int(part.local[row, 0]) >= case.source.hidden_ptr
    ]
    if case.hidden is None:
        assert rows == []
        assert parts or case.start == case.end
        return
    event(f"kv range empty: {case.start == case.end}")
    row_address = case.target.hidden_ptr + case.hidden[1] * case.target.hidden_bytes
    last = len(parts) - 1
    assert rows == [(last, len(parts[last].local) - 1, (row_address, case.target.hidden_bytes, case.target.device))]


@given(case=cases())
def test_no_two_ranges_are_left_that_could_be_one(case: Case) -> None:
    """Goal: runs contiguous on both sides are joined. Method: without limits, search all pairs for a seam.

    Pairs from two pools do not count, since each pool is one registration.
    """
    case.max_bytes, case.max_descriptors = 1 << 40, 1 << 20
    bounds = {address for side in (case.source, case.target) for _, address, _ in side.regions()}
    for part in case.run():
        ends = {
            (int(address + size), int(remote + size))
            for (address, size, _), (remote, _, _) in zip(part.local, part.remote, strict=True)
        }
        starts = {
            (int(address), int(remote))
            for (address, _, _), (remote, _, _) in zip(part.local, part.remote, strict=True)
            if int(address) not in bounds
        }
        assert not ends & starts


@given(case=cases())
def test_greedy_filling_wastes_no_partition(case: Case) -> None:
    """Goal: few partitions. Method: apart from the last, each is full in whole tokens or in descriptors."""
    whole = case.max_bytes // case.source.token_bytes * case.source.token_bytes
    parts = case.run()
    if case.hidden is not None and len(parts[-1].local) == 1 and parts[-1].bytes == case.source.hidden_bytes:
        parts = parts[:-1]  # the hidden row alone: it did not fit, or there is nothing else
    for part in parts[:-1]:
        assert part.bytes == whole or len(part.local) == case.max_descriptors


def test_pages_in_one_run_on_both_sides_are_one_range_per_pool() -> None:
    """Goal: a dense transfer has the fewest descriptors. Method: consecutive blocks, by plane; then by page."""
    pool, other = geometry(), geometry(1 << 24)
    by_plane, by_page = [[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]]
    for table in (by_plane, by_page):
        (part,) = partitions(pool, table, other, table, 0, 12, None, 1 << 20, 100)
        assert part.local.tolist() == [[pool.key_ptr, 6 * 24, 0], [pool.value_ptr, 6 * 24, 0]]
        assert part.remote.tolist() == [[other.key_ptr, 6 * 24, 0], [other.value_ptr, 6 * 24, 0]]
    (part,) = partitions(pool, by_plane, other, by_page, 0, 12, None, 1 << 20, 100)
    assert len(part.local) == 2 * 6


def test_partial_pages_are_one_range_per_layer() -> None:
    """Goal: the invalid tail of a page never travels. Method: tokens 1..2 of one page, written out by hand."""
    pool, other = geometry(planes=1), geometry(1 << 24, planes=1)
    (part,) = partitions(pool, [[5]], other, [[2]], 1, 3, (1, 2), 1 << 20, 100)
    first, second = 5 * 24 + 2, 2 * 24 + 2
    assert part.local.tolist() == [
        *([pool.key_ptr + first + 8 * layer, 4, 0] for layer in range(3)),
        *([pool.value_ptr + first + 8 * layer, 4, 0] for layer in range(3)),
        [pool.hidden_ptr + 5, 5, 0],
    ]
    assert part.remote.tolist() == [
        *([other.key_ptr + second + 8 * layer, 4, 0] for layer in range(3)),
        *([other.value_ptr + second + 8 * layer, 4, 0] for layer in range(3)),
        [other.hidden_ptr + 10, 5, 0],
    ]


@pytest.mark.parametrize("field", SHAPE_FIELDS)
def test_a_different_shape_is_refused_by_name(field: str) -> None:
    """Goal: a mismatch names its field and both values. Method: change one field at a time, sizes following."""
    source = geometry(hidden_bytes=6)
    target = geometry(**({"hidden_bytes": 6} | {field: getattr(source, field) + 1}))
    with pytest.raises(GeometryMismatch) as caught:
        check_compatible(source, target)
    assert (caught.value.field, caught.value.source, caught.value.target) == (
        field,
        getattr(source, field),
        getattr(source, field) + 1,
    )
    assert field in str(caught.value) and str(getattr(source, field)) in str(caught.value)


def test_pools_of_other_sizes_and_places_are_compatible() -> None:
    """Goal: only shapes must agree. Method: other addresses, block counts, slots, device and memory pass."""
    target = geometry(1 << 40, num_blocks=99, staging_slots=1, memory="VRAM", device=7)
    check_compatible(geometry(), target)
    assert partitions(geometry(), [[0], [1]], target, [[98], [5]], 0, 3, (2, 0), 1 << 20, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_bytes": 9}, "layer_bytes is 9"),
        ({"block_bytes": 25}, "block_bytes is 25"),
        ({"memory": "FILE"}, "memory is 'FILE'"),
        ({"device": 1}, "device is 1"),
        ({"memory": "VRAM", "device": -1}, "device is -1"),
        ({"planes": 0}, "planes is 0"),
        ({"hidden_ptr": 0}, "hidden_ptr is 0"),
        ({"value_ptr": (1 << 20) + 191}, "the key pool ends at 1048768, after the value pool"),
    ],
)
def test_a_geometry_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    """Goal: a wrong ready message is found where it is made. Method: one wrong field at a time."""
    with pytest.raises(GeometryError, match=message):
        geometry(**changes)


def test_a_geometry_travels_in_a_message_and_is_checked_on_arrival() -> None:
    """Goal: PoolGeometry is message data. Method: encode and decode; then with a field changed, added, missing."""
    data = msgspec.msgpack.encode(geometry())
    assert msgspec.msgpack.decode(data, type=PoolGeometry) == geometry()
    fields = msgspec.to_builtins(geometry())
    wrong: list[dict[str, Any]] = [fields | {"layer_bytes": 9}, fields | {"loops": 4}, fields | {"device": "0"}]
    wrong.append({name: value for name, value in fields.items() if name != "planes"})
    for message in wrong:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(message, PoolGeometry)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 5, "end": 4}, r"token range \[5, 4\)"),
        ({"start": -1}, r"token range \[-1, 8\)"),
        ({"source_tables": [[0, 1]]}, "source has 1 tables, must be 2"),
        ({"target_tables": [[0, 1], [2]]}, "target table of plane 1 has 1 pages, must be at least 2"),
        ({"source_tables": [[0, 1], [2, 8]]}, r"source block is 8, must be in \[0, 8\)"),
        ({"target_tables": [[0, -1], [2, 3]]}, "target block is -1"),
        ({"source_tables": [[0, 1], [1, 2]]}, "source block 1 stands for more than one page"),
        ({"target_tables": [[4, 4], [1, 2]]}, "target block 4 stands for more than one page"),
        ({"hidden": (3, 0)}, "source slot is 3"),
        ({"hidden": (0, -1)}, "target slot is -1"),
        ({"max_bytes": 4}, "max_bytes is 4, must be at least 5"),
        ({"max_descriptors": 0}, "max_descriptors is 0"),
    ],
)
def test_arguments_that_cannot_be_carried_out_are_refused(changes: dict[str, Any], message: str) -> None:
    """Goal: no address is ever computed from a wrong page. Method: one wrong argument at a time."""
    fields: dict[str, Any] = {
        "source": geometry(),
        "source_tables": [[0, 1], [2, 3]],
        "target": geometry(1 << 24),
        "target_tables": [[4, 5], [6, 7]],
        "start": 0,
        "end": 8,
        "hidden": (0, 0),
        "max_bytes": 64,
        "max_descriptors": 8,
    }
    assert Case(**fields).run(), "the unchanged arguments are fine"
    with pytest.raises(ValueError, match=message):
        Case(**(fields | changes)).run()


def test_table_entries_outside_the_range_are_not_looked_at() -> None:
    """Goal: pages already at the target need no valid entry. Method: nonsense before and after the range."""
    pool, other = geometry(), geometry(1 << 24)
    parts = partitions(pool, [[-1, 0, 99], [-1, 1, 99]], other, [[99, 0, -1], [99, 1, -1]], 4, 8, None, 1 << 20, 9)
    assert [part.bytes for part in parts] == [2 * 2 * 24]
    assert partitions(pool, [[], []], other, [[], []], 0, 0, None, 1 << 20, 9) == []
    (part,) = partitions(pool, [[], []], other, [[], []], 5, 5, (0, 0), 1 << 20, 9)
    assert part.bytes == pool.hidden_bytes, "an empty range inside a page needs no page either"
