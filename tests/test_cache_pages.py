"""Pages: a stateful comparison with a plain model, and each refusal by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.cache.pages import CacheError, KVCacheManager, LeaseError

LAYERS = 2


@dataclass
class Plain:
    """What the oracle knows of one allocation: every written token one by one, in a set."""

    capacity: int
    tables: list[list[int]]
    holders: list[str] = field(default_factory=list)
    written: set[tuple[int, int, int]] = field(default_factory=set)  # plane, layer, position

    def prefix(self, plane: int, layer: int) -> int:
        length = 0
        while (plane, layer, length) in self.written:
            length += 1
        return length


class PagesAgainstPlain(RuleBasedStateMachine):
    """Random calls, right and wrong; the manager must do and refuse exactly what the plain model says."""

    ids = st.sampled_from(["a", "b", "c"])
    holders = st.sampled_from(["transfer", "writer", "reader"])
    planes_of_pool: ClassVar = st.integers(1, 3)

    @initialize(planes=planes_of_pool, block_size=st.integers(1, 4), num_blocks=st.integers(1, 14))
    def start(self, planes: int, block_size: int, num_blocks: int) -> None:
        self.planes, self.block_size, self.num_blocks = planes, block_size, num_blocks
        self.pages = KVCacheManager(num_blocks, block_size, planes, LAYERS)
        self.plain: dict[str, Plain] = {}
        self.given = [0] * num_blocks

    def free_count(self) -> int:
        return self.num_blocks - sum(len(table) for plain in self.plain.values() for table in plain.tables)

    @rule(request_id=ids, tokens=st.integers(0, 20))
    def allocate(self, request_id: str, tokens: int) -> None:
        if request_id in self.plain or tokens == 0:
            with pytest.raises(CacheError):
                self.pages.allocate(request_id, tokens)
            return
        per_plane = (tokens + self.block_size - 1) // self.block_size
        fits = per_plane * self.planes <= self.free_count()
        assert self.pages.blocks_needed(tokens) == per_plane * self.planes
        assert self.pages.allocate(request_id, tokens) is fits
        if fits:
            tables = self.pages.block_tables(request_id)
            assert [len(table) for table in tables] == [per_plane] * self.planes
            self.plain[request_id] = Plain(tokens, tables)
            for table in tables:
                for block_id in table:
                    self.given[block_id] += 1

    @rule(request_id=ids)
    def free(self, request_id: str) -> None:
        plain = self.plain.get(request_id)
        if plain is None:
            with pytest.raises(CacheError, match="has no pages"):
                self.pages.free(request_id)
        elif plain.holders:
            with pytest.raises(LeaseError) as caught:
                self.pages.free(request_id)
            assert caught.value.holders == tuple(plain.holders)
            assert all(repr(holder) in str(caught.value) for holder in plain.holders)
        else:
            self.pages.free(request_id)
            del self.plain[request_id]

    @rule(request_id=ids, holder=holders, take=st.booleans())
    def lease(self, request_id: str, holder: str, take: bool) -> None:
        plain = self.plain.get(request_id)
        call = self.pages.lease if take else self.pages.unlease
        if plain is None or (holder in plain.holders) is take:
            with pytest.raises(CacheError):
                call(request_id, holder)
            return
        call(request_id, holder)
        (plain.holders.append if take else plain.holders.remove)(holder)

    @rule(request_id=ids, data=st.data(), whole_plane=st.booleans())
    def write(self, request_id: str, data: st.DataObject, whole_plane: bool) -> None:
        plain = self.plain.get(request_id)
        plane, layer = data.draw(st.integers(0, self.planes - 1)), data.draw(st.integers(0, LAYERS - 1))
        start = data.draw(st.integers(-1, 21))
        if plain is not None and data.draw(st.booleans()):
            start = plain.prefix(plane, layer)  # the usual case, often enough
        end = start + data.draw(st.integers(0, 6))
        layers = range(LAYERS) if whole_plane else [layer]
        tokens = {(plane, each, position) for each in layers for position in range(start, end)}
        valid = plain is not None and 0 <= start < end <= plain.capacity and not tokens & plain.written
        try:
            if whole_plane:
                self.pages.mark_plane_written(request_id, plane, start, end)
            else:
                self.pages.mark_written(request_id, plane, layer, start, end)
        except CacheError:
            assert not valid, (request_id, plane, layers, start, end)
            return
        assert valid, (request_id, plane, layers, start, end)
        assert plain is not None
        plain.written |= tokens

    @rule(request_id=ids, start=st.integers(0, 3), length=st.integers(0, 21))
    def import_prefix(self, request_id: str, start: int, length: int) -> None:
        plain = self.plain.get(request_id)
        every = [(plane, layer) for plane in range(self.planes) for layer in range(LAYERS)]
        expected = {(plane, layer, position) for plane, layer in every for position in range(start)}
        valid = plain is not None and start < length <= plain.capacity and plain.written == expected
        try:
            self.pages.mark_imported_prefix(request_id, length, start)
        except CacheError:
            assert not valid
            return
        assert valid and plain is not None
        plain.written |= {(plane, layer, position) for plane, layer in every for position in range(length)}

    @rule(request_id=ids, position=st.integers(0, 20), depth=st.integers(0, 4))
    def finalize(self, request_id: str, position: int, depth: int) -> None:
        plain = self.plain.get(request_id)
        layers = range(LAYERS)
        valid = (
            plain is not None
            and 1 <= depth <= self.planes
            and all((depth - 1, layer, position) in plain.written for layer in layers)
            and not any((p, layer, position) in plain.written for p in range(depth, self.planes) for layer in layers)
        )
        try:
            source, targets = self.pages.finalize_exit(request_id, position, depth)
        except CacheError:
            assert not valid
            return
        assert valid and plain is not None
        block, offset = divmod(position, self.block_size)
        slots = [table[block] * self.block_size + offset for table in plain.tables]
        assert (source, targets) == (slots[depth - 1], slots[depth:])
        plain.written |= {(p, layer, position) for p in range(depth, self.planes) for layer in layers}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.pages.check_integrity()
        assert self.pages.free_blocks == self.free_count()
        assert [self.pages.generation(block_id) for block_id in range(self.num_blocks)] == self.given
        assert set(self.pages.request_ids) == set(self.plain)
        for request_id, plain in self.plain.items():
            assert self.pages.block_tables(request_id) == plain.tables
            assert self.pages.holders(request_id) == tuple(plain.holders)
            for plane in range(self.planes):
                prefixes = [plain.prefix(plane, layer) for layer in range(LAYERS)]
                assert [self.pages.written_prefix(request_id, plane, layer) for layer in range(LAYERS)] == prefixes
                self.pages.require_prefix(request_id, plane, min(prefixes))
                with pytest.raises(CacheError, match="is written up to"):
                    self.pages.require_prefix(request_id, plane, min(prefixes) + 1)
                for position in range(plain.capacity):
                    written = (plane, 0, position) in plain.written
                    assert self.pages.is_written(request_id, plane, 0, position) is written


PagesAgainstPlain.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPagesAgainstPlain = PagesAgainstPlain.TestCase


def test_a_freed_page_rests_before_it_is_given_out_again() -> None:
    """Goal: late accesses meet a page's next owner as late as can be. Method: the freed page comes back last."""
    pages = KVCacheManager(num_blocks=4, block_size=1, planes=1, num_layers=1)
    assert pages.allocate("a", 1)
    first = pages.block_tables("a")[0][0]
    pages.free("a")
    assert pages.allocate("b", 4)

    assert pages.block_tables("b")[0][-1] == first
    assert pages.generation(first) == 2


def test_a_token_outside_the_capacity_has_no_slot() -> None:
    """Goal: the rest of the last page is nobody's. Method: ask for positions around a capacity of 5 in pages of 4."""
    pages = KVCacheManager(num_blocks=4, block_size=4, planes=2, num_layers=1)
    assert pages.allocate("a", 5)
    assert pages.slot("a", 1, 4) == pages.block_tables("a")[1][1] * 4
    for position in (-1, 5, 7):
        with pytest.raises(CacheError, match="capacity of 5"):
            pages.slot("a", 0, position)


def test_an_import_over_scattered_writes_is_refused() -> None:
    """Goal: an import never covers tokens that someone wrote before. Method: one token beyond the prefix, one layer."""
    pages = KVCacheManager(num_blocks=8, block_size=4, planes=2, num_layers=2)
    assert pages.allocate("a", 8)
    pages.mark_written("a", plane=1, layer=1, start=5, end=6)
    with pytest.raises(CacheError, match="plane 1, layer 1 is written up to 0, with 1 tokens beyond"):
        pages.mark_imported_prefix("a", 4)

    assert pages.written_prefix("a", 0, 0) == 0


def test_a_plane_write_joins_what_lies_beyond() -> None:
    """Goal: the quick way of plane writes loses nothing. Method: fill the gap before a scattered token."""
    pages = KVCacheManager(num_blocks=8, block_size=4, planes=1, num_layers=2)
    assert pages.allocate("a", 8)
    pages.mark_plane_written("a", 0, 2, 3)
    with pytest.raises(CacheError, match="layer 0, token 2 is already written"):
        pages.mark_plane_written("a", 0, 0, 3)
    pages.mark_plane_written("a", 0, 0, 2)

    assert [pages.written_prefix("a", 0, layer) for layer in (0, 1)] == [3, 3]


def test_tables_given_out_are_copies() -> None:
    """Goal: a caller cannot move pages by accident. Method: change the returned table and ask again."""
    pages = KVCacheManager(num_blocks=2, block_size=4, planes=1, num_layers=1)
    assert pages.allocate("a", 5)
    pages.block_tables("a")[0][0] = 77

    pages.check_integrity()
    assert pages.block_tables("a")[0] == [0, 1]


@pytest.mark.parametrize("damage", ["double", "lost", "shared", "short", "state"])
def test_check_integrity_sees_damage(damage: str) -> None:
    """Goal: the check can fail. Method: break the books from inside, one way at a time."""
    pages = KVCacheManager(num_blocks=6, block_size=2, planes=1, num_layers=1)
    assert pages.allocate("a", 4) and pages.allocate("b", 2)
    pages.check_integrity()
    if damage == "double":
        pages._free.append(pages._free[0])
    elif damage == "lost":
        pages._free.popleft()
    elif damage == "shared":
        pages._allocations["a"].tables[0][0] = pages._allocations["b"].tables[0][0]
    elif damage == "short":
        pages._free.append(pages._allocations["a"].tables[0].pop())
    else:
        pages._allocations["a"].written[0][0].prefix = 5
    with pytest.raises(CacheError):
        pages.check_integrity()
