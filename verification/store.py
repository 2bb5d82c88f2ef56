"""A set of packed states with numbers: NumPy rows in a hash table, exact.

A slot of the table has the number of a row, and half of its hash as a tag, so that a row of another hash is passed
over without being read; two rows of one tag are compared whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint64]
Ids = NDArray[np.int64]

_MIX = np.uint64(0x9E3779B97F4A7C15)
_STEP = np.uint64(0xBF58476D1CE4E5B9)
_NUMBER = np.int64((1 << 32) - 1)  # of a slot, what is the row's number; above it is the tag
_EMPTY = -1  # no row has this number


class StateStore:
    """Numbered rows of `words` 64-bit words each, without repeats, in order of first insertion."""

    def __init__(self, words: int, capacity: int = 1 << 16) -> None:
        self.words = words
        self.count = 0
        self.rows: Rows = np.empty((capacity, words), np.uint64)
        self.table: NDArray[np.int64] = np.full(capacity * 4, _EMPTY, np.int64)

    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return int(self.rows.nbytes + self.table.nbytes)

    def _hash(self, rows: Rows) -> tuple[Ids, Ids]:
        """Of each row the slot at which it is looked for first, and its tag."""
        value = rows[:, 0] * _MIX
        for word in range(1, self.words):
            value ^= value >> np.uint64(31)
            value += rows[:, word]
            value *= _STEP
        value ^= value >> np.uint64(29)
        value *= _MIX
        value ^= value >> np.uint64(32)
        number = value.view(np.int64)
        return number & (len(self.table) - 1), number & ~_NUMBER

    def _reserve(self, extra: int) -> None:
        need = self.count + extra
        if need > len(self.rows):
            grown = np.empty((max(need, 2 * len(self.rows)), self.words), np.uint64)
            grown[: self.count] = self.rows[: self.count]
            self.rows = grown
        if 2 * need > len(self.table):
            size = len(self.table)
            while 2 * need > size:
                size *= 2
            self.table = np.full(size, _EMPTY, np.int64)
            self._place()

    def _place(self) -> None:
        """Put all rows, known to differ, into an empty table."""
        slots, entries = self._hash(self.rows[: self.count])
        entries |= np.arange(self.count)
        mask = len(self.table) - 1
        while entries.size:
            free = self.table.take(slots) == _EMPTY
            self.table[slots.compress(free)] = entries.compress(free)
            lost = self.table.take(slots) != entries
            entries, slots = entries.compress(lost), (slots.compress(lost) + 1) & mask

    def add(self, rows: Rows) -> tuple[Ids, Ids]:
        """Insert `rows` [n, words]; return (the number of each row [n], the places of the new ones)."""
        n = len(rows)
        self._reserve(n)
        base = self.count
        self.rows[base : base + n] = rows  # so that a row of this batch can be compared as those before it
        found = np.empty(n, np.int64)
        home = np.empty(n, np.int64)
        slots, tags = self._hash(rows)
        pending = np.arange(n)
        entries = tags | (base + pending)
        mask = len(self.table) - 1
        won: list[Ids] = []
        while pending.size:
            current = self.table.take(slots)
            empty = current == _EMPTY
            if empty.any():
                self.table[slots.compress(empty)] = entries.compress(empty)
                current = self.table.take(slots)
                winner = current == entries
                place = pending.compress(winner)
                won.append(place)
                home[place] = slots.compress(winner)
                found[place] = base + place
                passed = ~winner
            else:
                passed = np.ones(len(pending), bool)
            alike = np.flatnonzero(passed & (current ^ entries <= _NUMBER) & (current ^ entries >= 0))
            number, place = current.take(alike) & _NUMBER, pending.take(alike)
            same = self.rows.take(number, axis=0) == rows.take(place, axis=0)
            if not same.all():
                equal = same.all(axis=1)
                alike, number, place = alike.compress(equal), number.compress(equal), place.compress(equal)
            found[place] = number
            passed[alike] = False
            pending, entries = pending.compress(passed), entries.compress(passed)
            slots = (slots.compress(passed) + 1) & mask
        new = np.sort(np.concatenate(won)) if won else np.empty(0, np.int64)
        final = np.arange(base, base + len(new))
        self.table[home.take(new)] = tags.take(new) | final
        self.rows[base : base + len(new)] = rows.take(new, axis=0)
        if len(new) != n:
            renumber = np.full(n, -1, np.int64)
            renumber[new] = final
            fresh = found >= base
            found[fresh] = renumber[found[fresh] - base]
        self.count += len(new)
        return found, new
