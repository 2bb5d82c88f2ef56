"""Explicit search: every reachable state of a scope, breadth first, so that the first trace is a shortest one.

Safety (always, lemmas, and the obligations `handled:` and `in_order:` that the spelled-out system
brings) is checked on each state and step as it is found. With `edges`, the graph is kept for
`liveness.py`. A counter that would leave its field makes the answer Unknown, never Proved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlt_fsm.expr import BOOL, Const, Node, conj, neg, refs
from rlt_fsm.ground import Flat
from verification.result import Move, Result, Trace
from verification.slicing import Sliced, slice_scope
from verification.store import StateStore
from verification.symmetry import Symmetry
from verification.vector import Column, Layout, Program, Update, initial_values

CHUNK = 1 << 14


@dataclass(slots=True)
class Graph:
    """What a finished search leaves for liveness: states, edges, and how to show a path."""

    flat: Flat
    sliced: Sliced
    layout: Layout
    store: StateStore
    parent: NDArray[np.int32]
    via: NDArray[np.int16]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    step: NDArray[np.int16]
    edges: Any = None  # the edges by source, once liveness.py has sorted them
    renumbering: Symmetry | None = None  # states are kept up to this

    def evaluate(self, node: Node) -> NDArray[np.bool_]:
        """The truth of a formula in every state."""
        return self.evaluate_all([node])[0]

    def evaluate_all(self, nodes: Sequence[Node]) -> list[NDArray[np.bool_]]:
        """The truth of several formulas in every state, in one pass over the states."""
        folded = [self.sliced.fold(node) for node in nodes]
        out = [np.full(self.store.count, isinstance(f, Const) and bool(f.value)) for f in folded]
        asked = [(f, truth) for f, truth in zip(folded, out, strict=True) if not isinstance(f, Const)]
        if not asked:
            return out
        names = {r.name for f, _ in asked for r in refs(f)}
        program = Program(self.layout, [f for f, _ in asked])
        for low in range(0, self.store.count, CHUNK):
            rows = self.store.rows[low : min(low + CHUNK, self.store.count)]
            known = self.layout.columns(rows, names)
            columns: list[Any] = [known.get(name) for name in self.layout.fields]
            for (_, truth), value in zip(asked, program.run(columns, len(rows)), strict=True):
                truth[low : low + len(rows)] = value
        return out

    def path(self, state: int) -> list[tuple[int, int]]:
        """(step, state) pairs from the initial state to `state`."""
        out = []
        while self.parent[state] >= 0:
            out.append((int(self.via[state]), state))
            state = int(self.parent[state])
        return out[::-1]

    def trace(self, state: int, more: list[tuple[int, int]] | None = None, loop: bool = False) -> Trace:
        """The shortest run to `state`, then the steps of `more` (a cycle if `loop`)."""
        stem = self.path(state)
        moves: list[Move] = []
        before = self.layout.unpack(self.store.rows[0])
        for place, after_id in stem + (more or []):
            if self.renumbering is None:
                after = self.layout.unpack(self.store.rows[after_id])
            else:
                place, after = self._next(before, self.store.rows[after_id])
            changed = {k: (before[k], after[k]) for k in after if after[k] != before[k]}
            moves.append(Move(self.flat.steps[place].label, place, changed))
            before = after
        return Trace(tuple(moves), len(stem) if loop else None, before)

    def _next(self, before: dict[str, int], kept: NDArray[np.uint64]) -> tuple[int, dict[str, int]]:
        """A step from `before`, and its state, of which `kept` is the renumbering that was stored."""
        assert self.renumbering is not None
        row = self.layout.pack(before)
        columns = self.layout.columns(row)
        guards = Program(self.layout, [step.guard for _, step in self.sliced.steps])
        for (place, step), truth in zip(self.sliced.steps, guards.run(list(columns.values()), 1), strict=True):
            if truth[0]:
                after, _ = Update(self.layout, step).apply(row, np.zeros(1, np.int64), columns)
                if (self.renumbering.canonical(after)[0] == kept).all():
                    return place, self.layout.unpack(after[0])
        raise AssertionError("no step leads to the state that was stored: the symmetry is not one")


@dataclass(slots=True)
class Search:
    """The outcome of one search: results by name, figures, and the graph if it was kept."""

    results: list[Result]
    figures: dict[str, float | int | str]
    witnessed: set[str] = field(default_factory=set)
    fired: set[int] = field(default_factory=set)
    graph: Graph | None = None
    stopped: str = ""  # why it did not go to its end; empty where it did


def search(
    flat: Flat,
    scope: str,
    *,
    edges: bool = False,
    max_states: int = 60_000_000,
    counter_bits: int = 3,
    progress: bool = False,
    lemmas: bool = True,
    only: set[str] | None = None,
    symmetry: bool = False,
    max_bytes: int = 8 << 30,
) -> Search:
    """Explore `flat` to the end, or to the first violation.

    max_states, max_bytes: above either (states, tables and edges) the answer is Unknown. counter_bits: width of a
    counter's field; a value that does not fit gives Unknown with the variable's name, a negative one is a violation
    `bounds`. symmetry: keep one of the states that differ only in the numbering of instances (symmetry.py).
    Raises ValueError for symmetry together with edges, since liveness would not be sound.
    """
    if symmetry and edges:
        raise ValueError("a search with symmetry keeps no edges: liveness over renumbered states is not sound")
    started = time.perf_counter()
    sliced = slice_scope(flat)
    renumbering = Symmetry(flat, sliced.vars.values(), counter_bits) if symmetry else None
    layout = renumbering.layout if renumbering is not None else Layout(sliced.vars.values(), counter_bits)
    checks: list[tuple[str, str, Node]] = []  # (name, kind, condition that must hold)
    for name, item, formula, _ in flat.properties():
        if item.kind == "always" or (item.kind == "lemma" and lemmas):
            checks.append((name, item.kind, sliced.fold(formula)))
    for obligation in flat.obligations:
        pending, accepted = sliced.fold(obligation.pending), sliced.fold(obligation.accepted)
        checks.append((obligation.name, "handled", neg(conj(pending, neg(accepted)))))
    merged: dict[str, Node] = {}
    for _, step in sliced.steps:
        for name, condition in step.asserts:
            bad = conj(step.guard, neg(condition))
            merged[name] = conj(merged[name], neg(bad)) if name in merged else neg(bad)
    checks += [(name, "in_order", node) for name, node in merged.items()]
    if only is not None:
        checks = [c for c in checks if c[0].split("[")[0] in only or (c[1] == "always" and c[0] in only)]
    witnesses = [(n, sliced.fold(f)) for n, p, f, _ in flat.properties() if p.kind == "sometimes"]

    results: list[Result] = []
    live_checks = []
    for name, kind, node in checks:
        if isinstance(node, Const):
            if not node.value:
                results.append(Result(name, kind, "explicit", scope, "refuted", "false in every state", Trace(())))
            continue
        live_checks.append((name, kind, node))
    found: set[str] = {n for n, f in witnesses if isinstance(f, Const) and f.value}
    open_witnesses = [(n, f) for n, f in witnesses if not isinstance(f, Const)]

    guards = [step.guard for _, step in sliced.steps]
    roots = guards + [n for _, _, n in live_checks] + [f for _, f in open_witnesses]
    program = Program(layout, roots)
    updates = [Update(layout, step) for _, step in sliced.steps]
    store = StateStore(layout.words)
    first = {k: v for k, v in initial_values(flat).items() if k in layout.fields}
    large = [name for name, value in first.items() if value > layout.fields[name].top]
    store.add(layout.pack({name: 0 if name in large else value for name, value in first.items()}))
    parent = np.full(1 << 16, -1, np.int32)
    via = np.full(1 << 16, -1, np.int16)
    out_source: list[NDArray[np.int32]] = []
    out_target: list[NDArray[np.int32]] = []
    out_step: list[NDArray[np.int16]] = []
    fired: set[int] = set()
    done, transitions, depth, level_end = 0, 0, 0, 1
    unknown = f"'{large[0]}' does not fit {counter_bits} bits at the start" if large else ""
    violation: tuple[str, str, int] | None = None
    last_shown = started

    while done < store.count and violation is None and not unknown:
        if done >= level_end:
            depth += 1
            level_end = store.count
        high = min(done + CHUNK, level_end)
        rows = store.rows[done:high].copy()
        n = len(rows)
        columns = layout.columns(rows)
        values = program.run(list(columns.values()), n)
        for (name, kind, _), ok in zip(live_checks, values[len(guards) :], strict=False):
            if not ok.all():
                violation = (name, kind, done + int(np.flatnonzero(~ok)[0]))
                break
        if violation is not None:
            break
        base = len(guards) + len(live_checks)
        still = []
        for (name, formula), hit in zip(open_witnesses, values[base:], strict=True):
            if name not in found and hit.any():
                found.add(name)
            still.append((name, formula))
        successors: list[NDArray[np.uint64]] = []
        froms: list[NDArray[np.int64]] = []
        steps: list[NDArray[np.int16]] = []
        for place, ((number, _), mask) in enumerate(zip(sliced.steps, values, strict=False)):
            idx = np.flatnonzero(mask)
            if not idx.size:
                continue
            fired.add(number)
            rows_after, wrong = updates[place].apply(rows, idx, columns)
            if wrong:
                unknown = f"'{wrong}' leaves its field of {counter_bits} bits in step '{flat.steps[number].label}'"
                below = _below_zero(updates[place], wrong, columns, idx)
                if below is not None:
                    violation = (f"bounds:{wrong}", "bounds", done + below)
                    unknown = ""
                break
            successors.append(rows_after)
            froms.append(idx + done)
            steps.append(np.full(len(idx), number, np.int16))
        if violation is not None or unknown:
            break
        done = high
        if successors:
            batch = np.concatenate(successors)
            if renumbering is not None:
                batch = renumbering.canonical(batch)
            origin = np.concatenate(froms)
            number_of = np.concatenate(steps)
            transitions += len(batch)
            before = store.count
            ids, new = store.add(batch)
            if store.count > len(parent):
                size = max(2 * len(parent), store.count)
                parent = np.concatenate([parent, np.full(size - len(parent), -1, np.int32)])
                via = np.concatenate([via, np.full(size - len(via), -1, np.int16)])
            parent[before : store.count] = origin[new]
            via[before : store.count] = number_of[new]
            if edges:
                out_source.append(origin.astype(np.int32))
                out_target.append(ids.astype(np.int32))
                out_step.append(number_of)
        held = store.nbytes() + parent.nbytes + via.nbytes + (10 * transitions if edges else 0)
        if store.count > max_states:
            unknown = f"more than {max_states:,} states"
        elif held > max_bytes:
            unknown = f"{store.count:,} states need more than {max_bytes / 1e9:.1f} GB"
        now = time.perf_counter()
        if progress and now - last_shown > 2:
            last_shown = now
            rate = store.count / (now - started)
            print(
                f"  {scope}: {store.count:,} states, {store.count - done:,} to go, depth {depth}, "
                f"{rate:,.0f} states/s, {held / 1e6:,.0f} MB",
                file=sys.stderr,
            )

    seconds = time.perf_counter() - started
    figures: dict[str, float | int | str] = {
        "states": store.count,
        "transitions": transitions,
        "depth": depth,
        "seconds": round(seconds, 3),
        "bits": layout.bits,
        "memory_mb": round((store.nbytes() + parent.nbytes + via.nbytes + (10 * transitions if edges else 0)) / 1e6, 1),
    }
    empty32, empty16 = np.empty(0, np.int32), np.empty(0, np.int16)
    graph = Graph(
        flat,
        sliced,
        layout,
        store,
        parent,
        via,
        np.concatenate(out_source) if out_source else empty32,
        np.concatenate(out_target) if out_target else empty32,
        np.concatenate(out_step) if out_step else empty16,
        renumbering=renumbering,
    )
    refuted = {r.name for r in results}
    if violation is not None:
        name, kind, state = violation
        trace = graph.trace(state)
        results.append(Result(name, kind, "explicit", scope, "refuted", _why(flat, name, kind), trace, figures))
        refuted.add(name)
    complete = violation is None and not unknown
    why = "" if complete else unknown or "the search stopped at another violation"
    for name, kind, _ in checks:
        if name in refuted:
            continue
        verdict = "proved" if complete else "unknown"
        results.append(Result(name, kind, "explicit", scope, verdict, why, None, figures))
    return Search(results, figures, found, fired, graph if edges and complete else None, why)


def _why(flat: Flat, name: str, kind: str) -> str:
    if kind == "handled":
        return f"'{name.removeprefix('handled:')}' happens, and no row or ignore takes it there"
    if kind == "in_order":
        return (
            f"'{name.removeprefix('in_order:')}' is sent while a message of its rank or above is still on the channel"
        )
    if kind == "bounds":
        return f"'{name.removeprefix('bounds:')}' would go below zero"
    return next((p.doc for p in flat.system.properties if p.name == name.split("[")[0]), "")


def _below_zero(update: Update, name: str, columns: dict[str, Column], idx: NDArray[np.int64]) -> int | None:
    """The first row in which the variable would go below its lowest value, if any."""
    for place, value, names in update.computed:
        if place.var.name == name and place.var.type != BOOL:
            new = np.atleast_1d(update.new(place, value, names, columns, idx))
            low = np.flatnonzero(new < place.var.lo)
            if low.size:
                return int(idx[low[0]])
    return None
