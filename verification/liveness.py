"""Liveness on a finished graph: what can always be reached, and what must be under fairness.

`possible`: from every reachable state, some state with the property can be reached (no stuck state).
`leads_to`: no fair run has `from` and then never `to`. A run may stutter for ever in a state unless a
weakly or strongly fair action is enabled there, so standing still is a run like any other and never
counts as progress.
`rests`: every fair run comes to a state in which nothing fair is enabled.

The fair-run search is on strongly connected components: a component is discarded where a weakly fair
group is enabled in all of its states and taken on none of its inner edges; where a strongly fair group
is enabled in some of its states and taken on no inner edge, those states are removed and the rest is
split again. What survives carries a fair run through all of its states and inner edges.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from rlt_fsm.expr import conj, neg
from verification.explicit import Graph
from verification.result import Result

KINDS = ("possible", "leads_to", "rests")  # what is asked of runs, not of single states
Bools = NDArray[np.bool_]
Places = NDArray[np.int64]


class Edges:
    """The edges of a graph by the state that they leave (or, turned round, that they enter)."""

    def __init__(self, source: NDArray[np.int32], target: NDArray[np.int32], states: int) -> None:
        self.order: Places = np.argsort(source, kind="stable")
        self.source, self.target = source[self.order], target[self.order]
        self.starts: Places = np.searchsorted(self.source, np.arange(states + 1))

    def of(self, states: Places) -> Places:
        """The places, in sorted order, of all edges of `states`."""
        low = self.starts[states]
        counts = self.starts[states + 1] - low
        total = int(counts.sum())
        if not total:
            return np.empty(0, np.int64)
        return np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(total)

    def closure(self, seed: Bools, inside: Bools | None = None) -> Bools:
        """Everything reachable from `seed` along the edges, through states `inside` only."""
        reached = seed.copy()
        first = np.zeros(len(seed), np.int64)  # which of several edges found a state
        frontier: Places = np.flatnonzero(reached)
        while frontier.size:
            hit = self.target[self.of(frontier)]
            hit = hit[~reached[hit]] if inside is None else hit[~reached[hit] & inside[hit]]
            number = np.arange(hit.size)
            first[hit] = number
            frontier = hit[first[hit] == number].astype(np.int64)
            reached[frontier] = True
        return reached


def edges_of(graph: Graph) -> Edges:
    """The graph's edges by source, sorted once."""
    if graph.edges is None:
        graph.edges = Edges(graph.source, graph.target, graph.store.count)
    found: Edges = graph.edges
    return found


def possible(graph: Graph, name: str, goal: Bools, scope: str) -> Result:
    """Can `goal` be reached from every reachable state?"""
    can = Edges(graph.target, graph.source, graph.store.count).closure(goal)
    stuck = np.flatnonzero(~can)
    if not stuck.size:
        return Result(name, "possible", "explicit", scope, "proved", figures={"states": graph.store.count})
    return Result(
        name,
        "possible",
        "explicit",
        scope,
        "refuted",
        f"{stuck.size:,} reachable states have no way there; the nearest is shown",
        graph.trace(int(stuck[0])),
    )


def leads_to(graph: Graph, name: str, start: Bools, goal: Bools, scope: str, resting: Bools | None = None) -> Result:
    """Does every fair run that has `start` have `goal` then or later?

    resting: the states in which nothing fair is enabled, where it is known that every fair run comes to one again and
    again. One that never has `goal` comes to one without it, and can as well stay there: no cycle need be looked for.
    """
    inside = ~goal
    region = edges_of(graph).closure(start & inside, inside)
    ends = resting is not None and not (region & resting).any()
    component = None if ends else _fair_component(graph, region)
    if component is None:
        return Result(name, "leads_to", "explicit", scope, "proved", figures={"states": int(region.sum())})
    edges = edges_of(graph)
    lead = _way(edges, start & inside, inside, component[edges.target]) if not (start & component).any() else []
    first = int(edges.source[lead[0]]) if lead else int(np.flatnonzero(start & component)[0])
    at = int(edges.target[lead[-1]]) if lead else first
    component = _around(graph, at, component)
    cycle = _fair_cycle(graph, at, component)
    moves = [(int(graph.step[edges.order[place]]), int(edges.target[place])) for place in lead + cycle]
    trace = graph.trace(first, moves)
    groups = sorted({move.label for move in trace.moves[len(trace.moves) - len(cycle) :]})
    why = f"a fair run stays among {int(component.sum()):,} states for ever"
    why += f", through {', '.join(groups)}" if cycle else ": nothing that must happen is enabled there"
    trace = replace(trace, loop=len(trace.moves) - len(cycle))
    return Result(name, "leads_to", "explicit", scope, "refuted", why, trace)


def rests(graph: Graph, name: str, resting: Bools, scope: str) -> Result:
    """Does every fair run come to where nothing is left that must happen? A shell that is offered the same again and
    again, and changes nothing by it, never does."""
    return replace(leads_to(graph, name, ~resting, resting, scope), kind="rests")


def check(graph: Graph, scope: str) -> list[Result]:
    """Every property of the system that is not of single states."""
    asked = [p for p in graph.flat.properties() if p[1].kind in KINDS]
    nodes = []
    for _, _, formula, target in asked:
        nodes += [formula] if target is None else [conj(formula, neg(target)), target]
    truths = iter(graph.evaluate_all(nodes))
    fair = np.array([bool(step.fair) for step in graph.flat.steps], bool)
    resting = ~_mask(graph.source[fair[graph.step]], graph.store.count)
    settles = any(p[1].kind != "possible" for p in asked) and _fair_component(graph, ~resting) is None
    out = []
    for name, item, _, _ in asked:
        truth = next(truths)
        if item.kind == "possible":
            out.append(possible(graph, name, truth, scope))
        elif item.kind == "leads_to":
            out.append(leads_to(graph, name, truth, next(truths), scope, resting if settles else None))
        elif settles:
            figures = {"states": int((~resting).sum())}
            out.append(Result(name, "rests", "explicit", scope, "proved", figures=figures))
        else:
            out.append(rests(graph, name, resting, scope))
    return out


def _fair_component(graph: Graph, region: Bools) -> Bools | None:
    """The states of some component that carries a fair run inside `region`, or None.

    The states are numbered anew, from 0, within what is left to look at. A state on no cycle can only be stood
    still in, which is fair where nothing fair is enabled; that leaves the cycles, usually few.
    """
    group_of, is_strong = _groups(graph)
    count = len(is_strong)
    states: Places = np.flatnonzero(region)
    if not states.size:
        return None
    s, t, g, out = _inner(graph, states, group_of)
    label, total = _components(s, t, len(states))
    on_cycle = np.bincount(label, minlength=total)[label] > 1
    on_cycle[s[s == t]] = True
    asked = np.zeros(len(states), bool)  # something fair is enabled, whether or not it leaves the region
    asked[out[0]] = True
    still = ~on_cycle & ~asked
    if still.any():
        return _mask(states[still], len(region))
    states = states[on_cycle]
    if not states.size or not count:
        return _mask(states, len(region)) if states.size else None
    s, t, g, out = _inner(graph, states, group_of)
    enables = np.zeros(len(states) * count, bool)
    enables[out[0] * count + out[1]] = True
    pairs = np.flatnonzero(enables)
    enabled_state, enabled_group = pairs // count, pairs % count
    alive = np.ones(len(states), bool)
    while True:
        keep = alive[s] & alive[t]
        label, total = _components(s[keep], t[keep], len(states))
        same = label[s[keep]] == label[t[keep]]
        taken = np.zeros(total * count, bool)
        fair_edge = same & (g[keep] >= 0)
        taken[label[s[keep][fair_edge]] * count + g[keep][fair_edge]] = True
        size = np.bincount(label[alive], minlength=total)
        live = alive[enabled_state]
        enabled = np.bincount(label[enabled_state[live]] * count + enabled_group[live], minlength=total * count)
        everywhere = (enabled == np.repeat(size, count)) & (enabled > 0)
        somewhere = enabled > 0
        weak_dead = (everywhere & ~taken).reshape(total, count).any(axis=1)
        strong_bad = (somewhere & ~taken).reshape(total, count) & is_strong[None, :]
        candidate = (size > 0) & ~weak_dead
        fair = candidate & ~strong_bad.any(axis=1)
        if fair.any():
            return _mask(states[alive & fair[label]], len(region))
        if not candidate.any():
            return None
        # drop dead components, and in the others the states in which an untaken strong group is enabled
        alive &= candidate[label]
        bad = strong_bad.ravel()[label[enabled_state] * count + enabled_group]
        alive[enabled_state[bad]] = False


def _groups(graph: Graph) -> tuple[Places, Bools]:
    """For each step the number of its fair group, or -1; and which groups are strong."""
    groups: dict[str, int] = {}
    strong: list[bool] = []
    group_of = np.full(len(graph.flat.steps), -1, np.int64)
    for place, item in enumerate(graph.flat.steps):
        if item.fair:
            number = groups.setdefault(item.group, len(groups))
            if number == len(strong):
                strong.append(item.fair == "strong")
            group_of[place] = number
    return group_of, np.array(strong, bool)


def _inner(graph: Graph, states: Places, group_of: Places) -> tuple[Places, Places, Places, tuple[Places, Places]]:
    """Edges between `states`, renumbered: sources, targets, groups; and (state, group) of all their fair edges."""
    edges = edges_of(graph)
    number = np.full(graph.store.count, -1, np.int64)
    number[states] = np.arange(len(states))
    places = edges.of(states)
    source, target = number[edges.source[places]], number[edges.target[places]]
    group = group_of[graph.step[edges.order[places]]]
    fair, inner = group >= 0, target >= 0
    return source[inner], target[inner], group[inner], (source[fair], group[fair])


def _components(source: Places, target: Places, states: int) -> tuple[Places, int]:
    """Strongly connected components: a label for each state, and their number."""
    matrix = csr_matrix((np.ones(len(source), np.int8), (source, target)), shape=(states, states))
    total, label = connected_components(matrix, directed=True, connection="strong")
    return label.astype(np.int64), int(total)


def _mask(states: Places, size: int) -> Bools:
    out = np.zeros(size, bool)
    out[states] = True
    return out


def _around(graph: Graph, at: int, states: Bools) -> Bools:
    """Those of `states` that `at` reaches, and that reach it, through nothing else."""
    seed = _mask(np.array([at]), len(states))
    back = Edges(graph.target, graph.source, graph.store.count)
    return edges_of(graph).closure(seed, states) & back.closure(seed, states)


def _way(edges: Edges, start: Bools, inside: Bools, last: Bools) -> list[int]:
    """A shortest way from `start` through states `inside` to an edge of `last`, that one included: places of edges."""
    came = np.full(len(start), -1, np.int64)  # the edge over which a state was found
    seen, frontier = start.copy(), np.flatnonzero(start)
    while frontier.size:
        places = edges.of(frontier)
        places = places[inside[edges.target[places]]]
        ends = places[last[places]]
        if ends.size:
            way = [int(ends[0])]
            while not start[edges.source[way[-1]]]:
                way.append(int(came[edges.source[way[-1]]]))
            return way[::-1]
        places = places[~seen[edges.target[places]]]
        came[edges.target[places]] = places
        frontier = np.unique(edges.target[places]).astype(np.int64)
        seen[frontier] = True
    raise AssertionError("the component cannot be walked as it was found")


def _fair_cycle(graph: Graph, at: int, component: Bools) -> list[int]:
    """A fair way from `at` back to itself inside its fair component, as places of edges; empty to stand still there.

    While a group is not treated fairly, the way goes on to an edge of it, or, where the component has none, to a
    state in which it is not enabled; then home, which may meet another group.
    """
    edges = edges_of(graph)
    group_of, is_strong = _groups(graph)
    group = group_of[graph.step[edges.order]]
    way: list[int] = []
    while True:
        here = int(edges.target[way[-1]]) if way else at
        visited = np.unique(np.append(edges.target[way], at).astype(np.int64)) if way else np.array([at])
        places = edges.of(visited)
        missing = None
        for number, strong in enumerate(is_strong):
            on = np.unique(edges.source[places[group[places] == number]]).size
            if on and (strong or on == visited.size) and not (group[way] == number).any():
                missing = number
                break
        if missing is None and here == at:
            return way
        if missing is None:
            last = edges.target == at
        else:
            last = (group == missing) & component[edges.source] & component[edges.target]
            if not last.any():
                enabled = _mask(edges.source[group == missing].astype(np.int64), len(component))
                last = ~enabled[edges.target]
        way += _way(edges, _mask(np.array([here]), len(component)), component, last)
