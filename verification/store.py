"""A set of packed states with numbers: NumPy rows in a hash table, exact (rows are compared, not hashes)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint64]
Ids = NDArray[np.int64]

_MIX = np.uint64(0x9E3779B97F4A7C15)
_STEP = np.uint64(0xBF58476D1CE4E5B9)
_EMPTY = -1


class StateStore:
    """Numbered rows of `words` 64-bit words each, without repeats, in order of first insertion."""

    def __init__(self, words: int, capacity: int = 1 << 16) -> None:
        self.words = words
        self.count = 0
        self.rows: Rows = np.empty((capacity, words), np.uint64)
        self.table: NDArray[np.int32] = np.full(capacity * 4, _EMPTY, np.int32)

    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return int(self.rows.nbytes + self.table.nbytes)

    def _hash(self, rows: Rows) -> NDArray[np.int64]:
        value = rows[:, 0] * _MIX
        for word in range(1, self.words):
            value ^= value >> np.uint64(31)
            value += rows[:, word]
            value *= _STEP
        value ^= value >> np.uint64(29)
        value *= _MIX
        value ^= value >> np.uint64(32)
        return (value & np.uint64(len(self.table) - 1)).astype(np.int64)

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
            self.table = np.full(size, _EMPTY, np.int32)
            self._place(np.arange(self.count))

    def _place(self, ids: Ids) -> None:
        """Put rows already known to differ into an empty table."""
        slots = self._hash(self.rows[: self.count])
        mask = len(self.table) - 1
        while ids.size:
            free = self.table[slots] == _EMPTY
            self.table[slots[free]] = ids[free]
            lost = self.table[slots] != ids
            ids, slots = ids[lost], (slots[lost] + 1) & mask

    def add(self, rows: Rows) -> tuple[Ids, Ids]:
        """Insert `rows` [n, words]; return (the number of each row [n], the places of the new ones)."""
        n = len(rows)
        self._reserve(n)
        base = self.count
        self.rows[base : base + n] = rows
        found = np.empty(n, np.int64)
        slots = self._hash(rows)
        home = np.empty(n, np.int64)
        pending = np.arange(n)
        mask = len(self.table) - 1
        won: list[Ids] = []
        while pending.size:
            current = self.table[slots].astype(np.int64)
            empty = current == _EMPTY
            if empty.any():
                claim = pending[empty]
                self.table[slots[empty]] = (base + claim).astype(np.int32)
                current = self.table[slots].astype(np.int64)
                winner = current == base + pending
                if winner.any():
                    place = pending[winner]
                    won.append(place)
                    home[place] = slots[winner]
                    found[place] = base + place
            same = (self.rows[current] == rows[pending]).all(axis=1)
            found[pending[same]] = current[same]
            keep = ~same
            pending, slots = pending[keep], (slots[keep] + 1) & mask
        new = np.sort(np.concatenate(won)) if won else np.empty(0, np.int64)
        final = np.arange(base, base + len(new))
        self.table[home[new]] = final.astype(np.int32)
        self.rows[final] = rows[new]
        if len(new) != n:
            renumber = np.full(n, -1, np.int64)
            renumber[new] = final
            fresh = found >= base
            found[fresh] = renumber[found[fresh] - base]
        self.count += len(new)
        return found, new
