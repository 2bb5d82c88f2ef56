"""Requests that wait for admission, in the order in which they are to be looked at: by priority, then by arrival.

Adding, removing and looking at the first few cost the same, however many wait. Integers only.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from engine.schedule.request import Request


class WaitingQueue:
    """A queue for each priority; lower numbers go first. Without priorities everybody is in one."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._queues: dict[int, OrderedDict[str, Request]] = {}
        self._order: list[int] = []  # priorities that have a queue, sorted

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._queues.get(self._level(request), ())

    def add(self, request: Request) -> None:
        """Behind everybody of its priority."""
        self._queue(request)[request.request_id] = request

    def add_first(self, request: Request) -> None:
        """Before everybody of its priority: it was here before them."""
        queue = self._queue(request)
        queue[request.request_id] = request
        queue.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        """Take it out, wherever it stands."""
        level = self._level(request)
        del self._queues[level][request.request_id]
        if not self._queues[level]:
            del self._queues[level]
            self._order.remove(level)

    def first(self, count: int) -> list[Request]:
        """The first `count` requests."""
        return list(islice(self._all(), count))

    def _all(self) -> Iterator[Request]:
        for level in self._order:
            yield from self._queues[level].values()

    def _level(self, request: Request) -> int:
        return request.priority if self._by_priority else 0

    def _queue(self, request: Request) -> OrderedDict[str, Request]:
        level = self._level(request)
        if level not in self._queues:
            self._queues[level] = OrderedDict()
            insort(self._order, level)
        return self._queues[level]
