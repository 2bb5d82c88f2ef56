"""Instances of one sort are interchangeable: of all states that differ only in their numbering, one is kept.

Why that is sound for safety: an expression of a system cannot name an instance, only bind one, and instances start
equal. So every renumbering of generations, and of storage, maps steps to steps and leaves each `always`, each lemma and
the set of obligations as it is; a violation is reachable exactly if its smallest renumbering is. It is not sound for
`leads_to`, whose run must follow one instance: a search with symmetry keeps no edges, and refuses to.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from rlt_fsm.ground import Flat, FlatVar
from rlt_fsm.model import System
from verification.vector import Field, Layout

_INDEX = re.compile(r"\[([^\]]*)\]")


def sorts_of(system: System, name: str) -> tuple[str, ...]:
    """The sorts that index a flat variable: ("r",) for `Import[0].heard`."""
    found = _INDEX.search(name)
    if found is None:
        return ()
    base = name[: found.start()]
    return system.world[base].per if base in system.world else (system.generation,)


def numbers_of(name: str) -> tuple[int, ...]:
    """The instances that index a flat variable: (0,) for `Import[0].heard`."""
    found = _INDEX.search(name)
    return () if found is None else tuple(int(v) for v in found.group(1).split(","))


class Symmetry:
    """Renumberings of one flat system, as moves of bytes and of the values that are instance numbers."""

    def __init__(self, flat: Flat, variables: Iterable[FlatVar], counter_bits: int) -> None:
        system = flat.system
        variables = list(variables)
        kept = {var.name for var in variables}
        blocks: dict[tuple[str, ...], dict[tuple[int, ...], list[FlatVar]]] = {}
        for var in variables:
            per = sorts_of(system, var.name)
            blocks.setdefault(per, {}).setdefault(numbers_of(var.name), []).append(var)
        self.layout = BlockLayout(blocks.values(), counter_bits)
        fields = self.layout.fields
        groups = [list(itertools.permutations(range(flat.sizes[sort]))) for sort in system.instances]
        self.moves: list[tuple[NDArray[np.int64], list[tuple[Field, NDArray[np.uint8]]]]] = []
        for chosen in itertools.product(*groups):
            renumber = dict(zip(system.instances, chosen, strict=True))
            if all(list(p) == sorted(p) for p in chosen):
                continue
            gather = np.arange(self.layout.words * 8)
            relabel: dict[int, tuple[Field, NDArray[np.uint8]]] = {}
            for place, (name, field) in enumerate(fields.items()):
                moved = renamed(name, sorts_of(system, name), renumber)
                assert moved in kept, f"{name} is kept and {moved} is not: the scope treats its instances differently"
                gather[fields[moved].byte] = field.byte
                kind = system.world[name.split("[")[0]].kind if name.split("[")[0] in system.world else ""
                if kind in system.instances:
                    relabel[place] = (fields[moved], self._values(field, renumber[kind]))
            self.moves.append((gather, list(relabel.values())))

    @staticmethod
    def _values(field: Field, renumber: tuple[int, ...]) -> NDArray[np.uint8]:
        """Raw value -> raw value of an instance number; below zero is none, and stays."""
        table = np.arange(1 << field.width, dtype=np.uint8)
        for old, new in enumerate(renumber):
            table[old - field.var.lo] = new - field.var.lo
        return table

    def canonical(self, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The smallest renumbering of each row."""
        best = rows
        data = rows.view(np.uint8)
        for gather, relabel in self.moves:
            moved = np.ascontiguousarray(data[:, gather])
            for field, table in relabel:
                mask = np.uint8(((1 << field.width) - 1) << field.shift)
                old = (moved[:, field.byte] & mask) >> np.uint8(field.shift)
                moved[:, field.byte] = moved[:, field.byte] & ~mask | table[old] << np.uint8(field.shift)
            words = moved.view(np.uint64)
            less = np.zeros(len(rows), bool)
            equal = np.ones(len(rows), bool)
            for word in range(words.shape[1]):
                less |= equal & (words[:, word] < best[:, word])
                equal &= words[:, word] == best[:, word]
            best = np.where(less[:, None], words, best)
        return best


def renamed(name: str, per: tuple[str, ...], renumber: Mapping[str, tuple[int, ...]]) -> str:
    """`Import[0].heard` under a renumbering of generations that takes 0 to 1: `Import[1].heard`."""
    if not per:
        return name
    numbers = ",".join(str(renumber[sort][n]) for sort, n in zip(per, numbers_of(name), strict=True))
    return _INDEX.sub(f"[{numbers}]", name, count=1)


class BlockLayout(Layout):
    """A layout in which each instance has bytes of its own, laid out as those of its siblings."""

    def __init__(self, blocks: Iterable[Mapping[tuple[int, ...], list[FlatVar]]], counter_bits: int) -> None:
        self.fields = {}
        first = 0
        bits = 0
        for siblings in blocks:
            for variables in siblings.values():
                inner = Layout(variables, counter_bits)
                for name, field in inner.fields.items():
                    self.fields[name] = Field(field.var, field.byte + first, field.shift, field.width)
                first += 1 + max(field.byte for field in inner.fields.values())
                bits += inner.bits
        self.bits = bits
        self.words = max(1, (first + 7) // 8)
