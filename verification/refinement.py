"""Counting partitions loses nothing: the counted system, run with numbered partitions that each cover a range of bytes.

The spec counts partitions and asks `first_time` of the world (docs/decisions/0002-counting.md). Here each partition has
a sequence number and a place of its own, writes are done and heard of in every order, and any number that came may
come again. The numbered partitions are carried along every edge of the counted graph of a small scope, and D's half
of each notification is taken by the compiled class with its real set of numbers. Three things are asked:

- the counted system and the numbered one agree: so many partitions are in each place as the counter says, and the
  compiled class goes where the counted step goes, whichever number comes;
- D receives only when the *ranges* that have landed are the whole of what P computed, no gap and no overlap;
- D's hold `writers` is dropped only when no posted range can still land, or the endpoint to a dead P is gone.

It rests on P numbering its partitions 0, 1, 2, ... with no number twice, which `numbers` may break to show that it
matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rlt_fsm.errors import IllegalEvent
from rlt_fsm.expr import Const, Enum, Seen
from rlt_fsm.ground import Flat, Step, ground
from rlt_fsm.model import System
from verification.confirm import Runtime, plain
from verification.explicit import Graph, search
from verification.result import Move, Result, Trace

NAME = "coverage_by_ranges"
SCOPE = "3 partitions, each with its range"
CONSTS = {"chunks": 2, "parts": 1, "decode_slots": 1, "compute_slots": 1, "source_storage": 1, "destination_storage": 1}
FAULTS = {"echoes": 1, "cancels": 1, "crashes_prefill": 1}

# Action -> the places between which it moves one partition. `heard` is where a range has landed for certain.
MOVES: dict[str, tuple[str, str]] = {
    "post": ("computed", "flying"),
    "write_done": ("flying", "landing"),
    "write_error": ("flying", "rogue"),
    "write_to_dead": ("flying", "rogue"),
    "hear": ("landing", "heard"),
    "hear_the_dead": ("landing", "heard"),
}
COMPUTES = ("chunk_done_with_kv", "copy_done")  # a new partition, the next range of the prompt
CLOSES = "endpoint_gone"  # nothing on its way lands any more
AGAIN = "echo"  # a number that came before
COUNTED = {"flying": "flying[0]", "landing": "landing[0]", "rogue": "rogue[0]", "heard": "Import[0].heard"}

ON_THEIR_WAY = frozenset({"flying", "landing", "rogue"})

Places = tuple[str, ...]  # of each partition, in the order of computing


@dataclass(slots=True)
class _Node:
    state: int
    places: Places
    before: _Node | None = None
    step: int = -1


@dataclass(slots=True)
class Refinement:
    """The search over the counted graph with numbered partitions."""

    system: System
    numbers: Callable[[int], int] = lambda place: place  # a partition's place -> its sequence number
    taken: dict[tuple[object, ...], str] = field(default_factory=dict)  # D's answers, which do not depend on the rest

    def run(self) -> Result:
        """Proved for the scope, refuted with the counted steps, or unknown where the spec has changed under it."""
        started = time.perf_counter()
        flat = ground(self.system, dict.fromkeys(self.system.instances, 1), self._consts())
        missing = {*MOVES, *COMPUTES, CLOSES, AGAIN} - set(self.system.actions)
        missing |= set(COUNTED.values()) - set(flat.vars)
        if missing:
            why = f"verification/refinement.py names what the spec lacks: {', '.join(sorted(missing))}"
            return Result(NAME, "refinement", "refinement", SCOPE, "unknown", why)
        found = search(flat, NAME, edges=True, lemmas=False)
        if found.graph is None or any(not r.holds for r in found.results):
            return Result(NAME, "refinement", "refinement", SCOPE, "unknown", "the counted scope itself does not hold")
        return self._walk(flat, found.graph, started)

    def _consts(self) -> dict[str, int]:
        wanted = CONSTS | FAULTS
        return {name: wanted.get(name, 0) for name in self.system.consts}

    def _walk(self, flat: Flat, graph: Graph, started: float) -> Result:
        counted = _Counted(flat, graph)
        decode = Runtime(flat)
        first = _Node(0, ())
        known, frontier = {(0, first.places)}, [first]
        edges = 0
        while frontier:
            later = []
            for node in frontier:
                for number, target in counted.out[node.state]:
                    step = flat.steps[number]
                    for places, moved in successors(node.places, step):
                        edges += 1
                        again = (target, places) in known
                        wrong = "" if again else counted.disagrees(target, places)
                        if not wrong and counted.lets_go(node.state, target) and not ON_THEIR_WAY.isdisjoint(places):
                            wrong = "D let go of its writers while a posted range may still land"
                        if not wrong and moved is not None and step.event == "notified":
                            seen = frozenset(self.numbers(i) for i, p in enumerate(node.places) if p == "heard")
                            halves = counted.decode[node.state], counted.decode[target]
                            wrong = self._notified(decode, counted.own, *halves, seen, self.numbers(moved))
                        if wrong:
                            trace = counted.trace(_Node(target, places, node, number))
                            return Result(NAME, "refinement", "refinement", SCOPE, "refuted", wrong, trace)
                        if not again:
                            known.add((target, places))
                            later.append(_Node(target, places, node, number))
            frontier = later
        figures = {"states": len(known), "transitions": edges, "seconds": round(time.perf_counter() - started, 2)}
        return Result(NAME, "refinement", "refinement", SCOPE, "proved", figures=figures)

    def _notified(
        self,
        decode: Runtime,
        own: list[str],
        before: tuple[int, ...],
        after: tuple[int, ...],
        seen: frozenset[int],
        number: int,
    ) -> str:
        """The compiled class of D, brought to this state, takes the number: does it go where the count goes?

        own: D's variables, whose values before and after by count are given.
        """
        key = (before, after, seen, number)
        if key in self.taken:
            return self.taken[key]
        record = decode.records["decode", 0]
        for name, value in zip(own, before, strict=True):
            setattr(record, name.replace("[0].", "_"), value)
        record.Import_seen = sum(1 << n for n in seen)
        wrong = ""
        try:
            record.notified(seq=number)
        except IllegalEvent as error:
            wrong = f"the compiled class refuses number {number} after {sorted(seen)}: {error}"
        else:
            values = {n.replace(".", "[0].", 1): v for n, v in record.values().items()}
            for name, count in zip(own, after, strict=True):
                if plain(decode.flat, name, values[name]) != count:
                    where = f"number {number} after {sorted(seen)}"
                    wrong = f"{where}: the compiled class has {values[name]} for '{name}', the counted system {count}"
        self.taken[key] = wrong
        return wrong


def successors(places: Places, step: Step) -> Iterator[tuple[Places, int | None]]:
    """Every way in which the numbered partitions can make a counted step, and which of them moved."""
    if step.action in COMPUTES:
        yield (*places, "computed"), None
    elif step.action in MOVES:
        source, target = MOVES[step.action]
        first = source == "computed"  # P posts in the order of computing
        for i, place in enumerate(places):
            if place == source:
                yield (*places[:i], target, *places[i + 1 :]), i
                if first:
                    return
    elif step.action == AGAIN:
        for i, place in enumerate(places):
            if place == "heard":
                yield places, i
    elif step.action == CLOSES:
        yield tuple("lost" if p in ON_THEIR_WAY else p for p in places), None
    else:
        yield places, None


class _Counted:
    """The counted graph, as what a walk along its edges needs to know of a state."""

    def __init__(self, flat: Flat, graph: Graph) -> None:
        self.flat, self.graph = flat, graph
        self.out: list[list[tuple[int, int]]] = [[] for _ in range(graph.store.count)]
        for source, target, step in zip(graph.source.tolist(), graph.target.tolist(), graph.step.tolist(), strict=True):
            self.out[source].append((step, target))
        self.counts = list(zip(*(self.column(name) for name in COUNTED.values()), strict=True))
        self.own = [n for n in flat.vars if n.startswith(("Import[0].", "DestinationRetirement[0]."))]
        self.decode = list(zip(*(self.column(name) for name in self.own), strict=True))
        self.whole = self.column("whole[0]")
        self.writers = self.column("DestinationRetirement[0].writers")
        kind = flat.vars["Import[0].state"].type
        assert isinstance(kind, Enum)
        self.takes_for_whole = {kind.names.index(name) for name in ("received", "active")}
        self.import_state = self.column("Import[0].state")

    def column(self, name: str) -> list[int]:
        """The value of a variable in every state."""
        var = self.flat.vars[name]
        rows = self.graph.store.rows[: self.graph.store.count]
        known = self.graph.layout.columns(rows, {name}) if name in self.graph.layout.fields else {}
        if name in known:
            return [int(v) for v in known[name]]
        assert isinstance(var.init, Const)
        return [int(var.init.value)] * len(rows)  # it never changes in this scope

    def values(self, state: int) -> dict[str, int]:
        """Every variable of a state."""
        fixed = {n: int(v.init.value) for n, v in self.flat.vars.items() if isinstance(v.init, Const)}
        return fixed | self.graph.layout.unpack(self.graph.store.rows[state])

    def lets_go(self, state: int, target: int) -> bool:
        """Whether D drops its hold `writers` between two states."""
        return bool(self.writers[state]) and not self.writers[target]

    def disagrees(self, state: int, places: Places) -> str:
        """What the numbered partitions say otherwise than the counted state; empty where they agree."""
        for (place, name), count in zip(COUNTED.items(), self.counts[state], strict=True):
            if count != places.count(place):
                return f"'{name}' is {count}, and {places.count(place)} of the numbered partitions are {place}"
        if self.import_state[state] in self.takes_for_whole:
            landed = [i for i, place in enumerate(places) if place == "heard"]
            if not self.whole[state] or len(landed) != len(places):
                return f"D took the prompt for whole with the ranges {landed} of {len(places)} landed"
        return ""

    def trace(self, last: _Node) -> Trace:
        """The counted steps that lead to a node."""
        moves: list[Move] = []
        node = last
        while node.before is not None:
            a, b = self.values(node.before.state), self.values(node.state)
            changed = {k: (a[k], b[k]) for k in b if a[k] != b[k]}
            moves.append(Move(self.flat.steps[node.step].label, node.step, changed))
            node = node.before
        return Trace(tuple(moves[::-1]), None, self.values(last.state))


def applies(system: System) -> bool:
    """Whether the system is the one that this module's words are about: it counts the partitions of an Import."""
    return "Import" in system.machines and any(
        isinstance(v.type, Seen) for v in system.machines["Import"].vars.values()
    )


def check(system: System) -> Result:
    """Whether counting partitions loses anything, for the scope that the result names."""
    return Refinement(system).run()
