"""Liveness on a finished graph: what can always be reached, and what must be under fairness.

`possible`: from every reachable state, some state with the property can be reached (no stuck state).
`leads_to`: no fair run has `from` and then never `to`. A run may stutter for ever in a state unless a
weakly or strongly fair action is enabled there, so standing still is a run like any other and never
counts as progress.

The fair-run search is on strongly connected components: a component is discarded where a weakly fair
group is enabled in all of its states and taken on none of its inner edges; where a strongly fair group
is enabled in some of its states and taken on no inner edge, those states are removed and the rest is
split again. What survives carries a fair run through all of its states and inner edges.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from rlt_fsm.expr import conj, neg
from verification.explicit import Graph
from verification.result import Result

Bools = NDArray[np.bool_]


def possible(graph: Graph, name: str, goal: Bools, scope: str) -> Result:
    """Can `goal` be reached from every reachable state?"""
    can = _closure(goal, graph.target, graph.source)
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


def leads_to(graph: Graph, name: str, start: Bools, goal: Bools, scope: str) -> Result:
    """Does every fair run that has `start` have `goal` then or later?"""
    inside = ~goal
    edge_in = inside[graph.source] & inside[graph.target]
    source, target, step = graph.source[edge_in], graph.target[edge_in], graph.step[edge_in]
    region = _closure(start & inside, source, target)
    component = _fair_component(graph, region, source, target, step)
    if component is None:
        return Result(name, "leads_to", "explicit", scope, "proved", figures={"states": int(region.sum())})
    states = np.flatnonzero(component)
    at = int(states[0])
    cycle = _cycle(at, component, source, target, step)
    groups = sorted({graph.flat.steps[place].label for place, _ in cycle})
    why = f"a fair run stays among {states.size:,} states for ever"
    why += f", through {', '.join(groups)}" if cycle else ": nothing that must happen is enabled there"
    return Result(name, "leads_to", "explicit", scope, "refuted", why, graph.trace(at, cycle or None, loop=True))


def check(graph: Graph, scope: str) -> list[Result]:
    """Every `possible` and `leads_to` property of the system."""
    out = []
    for name, item, formula, target in graph.flat.properties():
        if item.kind == "possible":
            out.append(possible(graph, name, graph.evaluate(formula), scope))
        elif item.kind == "leads_to":
            assert target is not None
            start = graph.evaluate(conj(formula, neg(target)))
            out.append(leads_to(graph, name, start, graph.evaluate(target), scope))
    return out


def _closure(seed: Bools, source: NDArray[np.int32], target: NDArray[np.int32]) -> Bools:
    """Everything reachable from `seed` along the edges."""
    reached = seed.copy()
    order = np.argsort(source, kind="stable")
    ends = target[order]
    starts = np.searchsorted(source[order], np.arange(len(seed) + 1))
    frontier: NDArray[np.intp] = np.flatnonzero(reached)
    while frontier.size:
        counts = starts[frontier + 1] - starts[frontier]
        total = int(counts.sum())
        if not total:
            break
        offsets = np.repeat(starts[frontier] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        hit = ends[offsets + np.arange(total)]
        frontier = np.unique(hit[~reached[hit]]).astype(np.intp)
        reached[frontier] = True
    return reached


def _fair_component(
    graph: Graph,
    region: Bools,
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    step: NDArray[np.int16],
) -> Bools | None:
    """The states of some component that carries a fair run inside `region`, or None."""
    groups: dict[str, int] = {}
    group_of = np.full(len(graph.flat.steps), -1, np.int64)
    strong: list[bool] = []
    for place, item in enumerate(graph.flat.steps):
        if item.fair:
            number = groups.setdefault(item.group, len(groups))
            if number == len(strong):
                strong.append(item.fair == "strong")
            group_of[place] = number
    is_strong = np.array(strong, bool)
    count = len(groups)
    # which fair groups are enabled in which states of the region: from every edge, also those that leave it
    relevant = region[graph.source] & (group_of[graph.step] >= 0)
    pairs = np.unique(graph.source[relevant].astype(np.int64) * count + group_of[graph.step[relevant]])
    enabled_state, enabled_group = pairs // count, pairs % count
    alive = region.copy()
    n = len(region)
    while True:
        keep = alive[source] & alive[target]
        inner_s, inner_t, inner_g = source[keep], target[keep], group_of[step[keep]]
        matrix = csr_matrix((np.ones(len(inner_s), np.int8), (inner_s, inner_t)), shape=(n, n))
        total, label = connected_components(matrix, directed=True, connection="strong")
        same = label[inner_s] == label[inner_t]
        taken = np.zeros(total * count, bool)
        fair_edge = same & (inner_g >= 0)
        taken[label[inner_s[fair_edge]].astype(np.int64) * count + inner_g[fair_edge]] = True
        size = np.bincount(label[alive], minlength=total)
        live = alive[enabled_state]
        key = label[enabled_state[live]].astype(np.int64) * count + enabled_group[live]
        enabled = np.bincount(key, minlength=total * count)
        everywhere = (enabled == np.repeat(size, count)) & (enabled > 0)
        somewhere = enabled > 0
        weak_dead = (everywhere & ~taken).reshape(total, count).any(axis=1)
        strong_bad = (somewhere & ~taken).reshape(total, count) & is_strong[None, :]
        candidate = (size > 0) & ~weak_dead
        fair = candidate & ~strong_bad.any(axis=1)
        if fair.any():
            return alive & fair[label]
        if not candidate.any():
            return None
        # drop dead components, and in the others the states in which an untaken strong group is enabled
        alive &= candidate[label]
        bad = strong_bad.ravel()[label[enabled_state].astype(np.int64) * count + enabled_group]
        alive[enabled_state[bad]] = False


def _cycle(
    at: int,
    component: Bools,
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    step: NDArray[np.int16],
) -> list[tuple[int, int]]:
    """A shortest way from `at` back to itself inside its component, as (step, state) pairs; empty if none."""
    keep = component[source] & component[target]
    edges: dict[int, list[tuple[int, int]]] = {}
    for s, t, k in zip(source[keep][:200_000], target[keep][:200_000], step[keep][:200_000], strict=True):
        edges.setdefault(int(s), []).append((int(k), int(t)))
    came: dict[int, tuple[int, int]] = {}
    frontier = [at]
    while frontier:
        following = []
        for state in frontier:
            for place, after in edges.get(state, []):
                if after == at:
                    path = [(place, at)]
                    while state != at:
                        place, before = came[state]
                        path.append((place, state))
                        state = before
                    return path[::-1]
                if after not in came:
                    came[after] = (place, state)
                    following.append(after)
        frontier = following
    return []
