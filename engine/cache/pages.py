"""Who owns which page, and what has been written into it. Integers only: no torch, no clock, no randomness.

A request owns one block table per plane (LAST_EXITED: one plane per loop). A page is in exactly one place: free, or
in one table. "Written" means that the write is enqueued on the device; readers come after it in stream or event order.
Named holders (a transfer, a remote writer) keep an allocation from being freed until each has let go.
Why named holders: spec/retirement.yaml.
"""

from __future__ import annotations

from collections import deque


class CacheError(RuntimeError):
    """A call that the state of the cache forbids; nothing has changed."""


class LeaseError(CacheError):
    """An allocation is still held; names the request and its holders."""

    def __init__(self, request_id: str, holders: tuple[str, ...]) -> None:
        super().__init__(request_id, holders)
        self.request_id, self.holders = request_id, holders

    def __str__(self) -> str:
        return f"request {self.request_id!r} cannot be freed: held by {', '.join(map(repr, self.holders))}"


class WrittenState:
    """Positions written in one plane and layer: 0..prefix-1, and `beyond`, which all lie above prefix."""

    __slots__ = ("beyond", "prefix")

    def __init__(self) -> None:
        self.prefix = 0
        self.beyond: set[int] = set()

    def holds(self, position: int) -> bool:
        return position < self.prefix or position in self.beyond

    def first_written(self, start: int, end: int) -> int | None:
        """The lowest written position within [start, end), if any."""
        if start < min(self.prefix, end):
            return start
        return min((position for position in self.beyond if start <= position < end), default=None)

    def add(self, start: int, end: int) -> None:
        """Mark [start, end), of which nothing is written yet."""
        if start != self.prefix:
            self.beyond.update(range(start, end))
            return
        self.prefix = end
        while self.prefix in self.beyond:
            self.beyond.remove(self.prefix)
            self.prefix += 1


class Allocation:
    """The pages of one request. tables[plane][position // block_size] is a block id."""

    __slots__ = ("capacity_tokens", "holders", "request_id", "tables", "written")

    def __init__(self, request_id: str, capacity_tokens: int, tables: list[list[int]], num_layers: int) -> None:
        self.request_id = request_id
        self.capacity_tokens = capacity_tokens
        self.tables = tables
        self.holders: dict[str, None] = {}  # a dict keeps the order of arrival for messages
        self.written = [[WrittenState() for _ in range(num_layers)] for _ in tables]


class KVCacheManager:
    """Pages of one pool. Every method raises CacheError, with nothing changed, where its demands are not met."""

    def __init__(self, num_blocks: int, block_size: int, planes: int, num_layers: int) -> None:
        """num_blocks: physical pages over all planes; block_size in tokens; all at least 1."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.planes, self.num_layers = planes, num_layers
        self._free = deque(range(num_blocks))  # first in, first out: a freed page rests as long as it can
        self._generations = [0] * num_blocks
        self._allocations: dict[str, Allocation] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._allocations)

    def blocks_needed(self, tokens: int) -> int:
        """Pages of a request of this many tokens, over all planes."""
        return -(-tokens // self.block_size) * self.planes

    def generation(self, block_id: int) -> int:
        """How many times this page has been given out."""
        return self._generations[block_id]

    def allocate(self, request_id: str, capacity_tokens: int) -> bool:
        """Give pages for capacity_tokens in every plane; False, with nothing changed, if too few are free."""
        if request_id in self._allocations:
            raise CacheError(f"request {request_id!r} already has pages; free them first")
        if capacity_tokens < 1:
            raise CacheError(f"request {request_id!r}: capacity of {capacity_tokens} tokens; at least 1 is needed")
        needed = self.blocks_needed(capacity_tokens)
        if needed > len(self._free):
            return False
        per_plane = needed // self.planes
        tables = [[self._free.popleft() for _ in range(per_plane)] for _ in range(self.planes)]
        for table in tables:
            for block_id in table:
                self._generations[block_id] += 1
        self._allocations[request_id] = Allocation(request_id, capacity_tokens, tables, self.num_layers)
        return True

    def free(self, request_id: str) -> None:
        """Return the pages. Raises LeaseError, naming the holders, while there are any."""
        allocation = self._get(request_id)
        if allocation.holders:
            raise LeaseError(request_id, tuple(allocation.holders))
        del self._allocations[request_id]
        for table in allocation.tables:
            self._free.extend(table)

    def has(self, request_id: str) -> bool:
        return request_id in self._allocations

    def capacity(self, request_id: str) -> int:
        """Tokens that the request may write per plane."""
        return self._get(request_id).capacity_tokens

    def block_tables(self, request_id: str) -> list[list[int]]:
        """Block ids in token order, one list per plane; copies."""
        return [list(table) for table in self._get(request_id).tables]

    def slot(self, request_id: str, plane: int, position: int) -> int:
        """Where a token's K and V lie: block_id * block_size + offset, in tokens."""
        allocation = self._get(request_id)
        self._check_range(allocation, position, position + 1)
        block, offset = divmod(position, self.block_size)
        return allocation.tables[plane][block] * self.block_size + offset

    def lease(self, request_id: str, holder: str) -> None:
        """Keep the pages from being freed until the holder calls unlease."""
        allocation = self._get(request_id)
        if holder in allocation.holders:
            raise CacheError(f"request {request_id!r}: {holder!r} already holds it")
        allocation.holders[holder] = None

    def unlease(self, request_id: str, holder: str) -> None:
        """Let go. The pages stay the request's own: the last holder frees nothing."""
        allocation = self._get(request_id)
        if holder not in allocation.holders:
            raise CacheError(f"request {request_id!r}: {holder!r} does not hold it; {list(allocation.holders)} do")
        del allocation.holders[holder]

    def holders(self, request_id: str) -> tuple[str, ...]:
        return tuple(self._get(request_id).holders)

    def written_prefix(self, request_id: str, plane: int, layer: int) -> int:
        """Tokens 0..n-1 are written in this plane and layer; returns n."""
        return self._get(request_id).written[plane][layer].prefix

    def is_written(self, request_id: str, plane: int, layer: int, position: int) -> bool:
        return self._get(request_id).written[plane][layer].holds(position)

    def require_prefix(self, request_id: str, plane: int, length: int) -> None:
        """Raise unless every layer of the plane holds tokens 0..length-1: what attention at `length` reads."""
        for layer, state in enumerate(self._get(request_id).written[plane]):
            if state.prefix < length:
                raise CacheError(
                    f"request {request_id!r}: plane {plane}, layer {layer} is written up to {state.prefix} of {length}"
                )

    def mark_written(self, request_id: str, plane: int, layer: int, start: int, end: int) -> None:
        """Record that tokens [start, end) are enqueued; a token is written once per plane and layer."""
        allocation = self._get(request_id)
        self._check_unwritten(allocation, plane, layer, start, end)
        allocation.written[plane][layer].add(start, end)

    def mark_plane_written(self, request_id: str, plane: int, start: int, end: int) -> None:
        """mark_written for every layer of one plane, all or none."""
        allocation = self._get(request_id)
        states = allocation.written[plane]
        if 0 <= start < end <= allocation.capacity_tokens and all(s.prefix == start and not s.beyond for s in states):
            for state in states:  # the way of every step but the rarest: nothing beyond, so nothing to look up
                state.prefix = end
            return
        for layer in range(self.num_layers):
            self._check_unwritten(allocation, plane, layer, start, end)
        for state in states:
            state.add(start, end)

    def mark_imported_prefix(self, request_id: str, length: int, start: int = 0) -> None:
        """Record that [start, length) has arrived in every plane and layer: the one call that trusts a remote writer.

        Every plane and layer must be written exactly up to start, with nothing beyond.
        """
        allocation = self._get(request_id)
        self._check_range(allocation, start, length)
        for plane, layers in enumerate(allocation.written):
            for layer, state in enumerate(layers):
                if state.prefix != start or state.beyond:
                    raise CacheError(
                        f"request {request_id!r}: cannot import from token {start}: plane {plane}, layer {layer} is "
                        f"written up to {state.prefix}, with {len(state.beyond)} tokens beyond"
                    )
        for layers in allocation.written:
            for state in layers:
                state.add(start, length)

    def finalize_exit(self, request_id: str, position: int, exit_depth: int) -> tuple[int, list[int]]:
        """The token at position leaves after exit_depth loops (1..planes): its deeper planes take over that version.

        Marks them written in every layer. Returns the slot to copy from and those to copy to, one per deeper plane.
        """
        allocation = self._get(request_id)
        if not 1 <= exit_depth <= self.planes:
            raise CacheError(f"request {request_id!r}: exit depth {exit_depth} is not within 1..{self.planes}")
        source = self.slot(request_id, exit_depth - 1, position)
        for layer, state in enumerate(allocation.written[exit_depth - 1]):
            if not state.holds(position):
                raise CacheError(
                    f"request {request_id!r}: token {position} leaves at depth {exit_depth}, but layer {layer} "
                    "is not written there"
                )
        deeper = range(exit_depth, self.planes)
        for plane in deeper:
            for layer in range(self.num_layers):
                self._check_unwritten(allocation, plane, layer, position, position + 1)
        for plane in deeper:
            for state in allocation.written[plane]:
                state.add(position, position + 1)
        return source, [self.slot(request_id, plane, position) for plane in deeper]

    def check_integrity(self) -> None:
        """Raise CacheError unless every page is in exactly one place and every written state is well formed."""
        owners: dict[int, str] = dict.fromkeys(self._free, "the free list")
        if len(owners) != len(self._free):
            raise CacheError("a page is twice in the free list")
        for request_id, allocation in self._allocations.items():
            expected = -(-allocation.capacity_tokens // self.block_size)
            for plane, table in enumerate(allocation.tables):
                if len(table) != expected:
                    raise CacheError(f"request {request_id!r}: plane {plane} has {len(table)} pages of {expected}")
                for block_id in table:
                    if block_id in owners:
                        raise CacheError(f"page {block_id} is owned by {owners[block_id]} and by {request_id!r}")
                    owners[block_id] = f"request {request_id!r}"
                for state in allocation.written[plane]:
                    beyond = state.beyond
                    if state.prefix > allocation.capacity_tokens or (
                        beyond and not state.prefix < min(beyond) <= max(beyond) < allocation.capacity_tokens
                    ):
                        raise CacheError(f"request {request_id!r}: plane {plane} has an impossible written state")
        if sorted(owners) != list(range(self.num_blocks)):
            raise CacheError(f"{self.num_blocks} pages, of which {len(owners)} are accounted for")

    def _get(self, request_id: str) -> Allocation:
        allocation = self._allocations.get(request_id)
        if allocation is None:
            raise CacheError(f"request {request_id!r} has no pages")
        return allocation

    @staticmethod
    def _check_range(allocation: Allocation, start: int, end: int) -> None:
        if not 0 <= start < end <= allocation.capacity_tokens:
            raise CacheError(
                f"request {allocation.request_id!r}: tokens [{start}, {end}) are not within its "
                f"capacity of {allocation.capacity_tokens}"
            )

    def _check_unwritten(self, allocation: Allocation, plane: int, layer: int, start: int, end: int) -> None:
        self._check_range(allocation, start, end)
        written = allocation.written[plane][layer].first_written(start, end)
        if written is not None:
            raise CacheError(
                f"request {allocation.request_id!r}: plane {plane}, layer {layer}, token {written} is already written"
            )
