"""The explicit checker against a plain interpreter, and the shipped spec's state counts."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlt_fsm.expr import BOOL, Const, evaluate
from rlt_fsm.ground import Flat, ground
from rlt_fsm.load import load
from tests.guard_deletions import EDITS, apply
from verification.confirm import confirm
from verification.explicit import search
from verification.slicing import slice_scope
from verification.store import StateStore
from verification.symmetry import Symmetry

SYSTEM = load().need_system()

# (states, transitions, depth) of scopes that are soon searched; a change of the spec that moves one is looked at first
COUNTS = {
    "one_everything": (424861, 1227375, 46),
    "one_broken": (218800, 599050, 45),
    "one_from_start": (46981, 134076, 41),
    "one_long": (34741, 138139, 51),
    "two_share": (213616, 910224, 74),
    "two_share_faults": (207539, 737420, 65),
    "two_queue": (435806, 2058872, 59),
    "one_compute": (354576, 1276042, 58),
    "no_slot": (1720, 3678, 46),
    "r1_k3": (410339, 1054019, 50),
    "r2_k1_b1": (332737, 1592244, 65),
    "r2_k2_b1": (940647, 4445832, 75),
}


def flat_of(scope: str) -> Flat:
    """A scope of the shipped spec, spelled out."""
    item = SYSTEM.scopes[scope]
    return ground(SYSTEM, item.sizes, item.consts, item.start)


def plain_search(flat: Flat) -> tuple[int, int]:
    """States and transitions by a dictionary and the reference reading: slow and obvious."""
    names = list(flat.vars)
    first = []
    for name in names:
        init = flat.vars[name].init
        assert isinstance(init, Const)
        first.append(bool(init.value) if flat.vars[name].type == BOOL else int(init.value))
    start = tuple(first)
    seen, todo, transitions = {start}, deque([start]), 0
    while todo:
        state = dict(zip(names, todo.popleft(), strict=True))
        for step in flat.steps:
            if evaluate(step.guard, lambda ref, state=state: state[ref.name]):
                transitions += 1
                after = dict(state)
                for name, value in step.updates.items():
                    after[name] = evaluate(value, lambda ref, state=state: state[ref.name])
                key = tuple(after.values())
                if key not in seen:
                    seen.add(key)
                    todo.append(key)
    return len(seen), transitions


@pytest.mark.parametrize("scope", COUNTS)
def test_the_shipped_spec_is_safe_and_its_counts_are_known(scope: str) -> None:
    """Goal: every safety question holds, over exactly the states that were looked at. Method: full search, pinned."""
    found = search(flat_of(scope), scope)

    assert not [r.name for r in found.results if not r.holds]
    assert (found.figures["states"], found.figures["transitions"], found.figures["depth"]) == COUNTS[scope]


@pytest.mark.parametrize("consts", [{}, {"cancels": 1, "errors": 1, "crashes_prefill": 1}])
def test_the_vectorised_search_agrees_with_a_plain_one(consts: dict[str, int]) -> None:
    """Goal: packing, slicing and hashing lose no state. Method: the same scope through the reference reading."""
    base = {"steps": 1, "decode_slots": 1, "compute_slots": 1, "source_storage": 1, "destination_storage": 1}
    values = dict.fromkeys(SYSTEM.consts, 0) | base | consts
    start = {"prefill_worker": "serving", "decode_worker": "serving"}
    flat = ground(SYSTEM, {"r": 1, "b": 1, "s": 1}, values, start)

    figures = search(flat, "small").figures

    assert (figures["states"], figures["transitions"]) == plain_search(flat)


class Blunt(StateStore):
    """A store whose hash is poor: two slots, two tags (one negative), each rows of both."""

    def _hash(self, rows: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        number = rows[:, 0].astype(np.int64)
        return number & 1, (number & 2) - 1 << 32


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from((StateStore, Blunt)),
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=60), max_size=8),
)
def test_the_store_numbers_each_row_once(kind: type[StateStore], batches: list[list[tuple[int, int]]]) -> None:
    """Goal: the hash table is exact under repeats and collisions, of slots and of tags. Method: a dictionary."""
    store, oracle = kind(words=2, capacity=4), {}
    for batch in batches:
        rows = np.array(batch, np.uint64).reshape(-1, 2)
        before = len(oracle)
        ids, new = store.add(rows)
        for row in batch:
            oracle.setdefault(row, len(oracle))

        assert [tuple(store.rows[i]) for i in ids] == batch
        assert len(new) == len(oracle) - before == store.count - before
    assert len({tuple(row) for row in store.rows[: store.count]}) == store.count == len(oracle)


def test_a_counter_that_does_not_fit_is_unknown_not_proved() -> None:
    """Goal: a bound never turns into a proof. Method: narrow counters on a scope that counts to four."""
    found = search(flat_of("one_long"), "one_long", counter_bits=1)

    assert {r.verdict for r in found.results} == {"unknown"}
    assert "does not fit 1 bits" in found.results[0].why
    assert "leaves its field of 2 bits" in search(flat_of("one_long"), "one_long", counter_bits=2).results[0].why


def test_a_scope_too_large_is_unknown_not_proved() -> None:
    """Goal: a cut search claims nothing. Method: a limit below the scope's states."""
    found = search(flat_of("two_share"), "two_share", max_states=5_000)

    assert {r.verdict for r in found.results} == {"unknown"}


def test_more_memory_than_allowed_is_unknown_not_proved() -> None:
    """Goal: memory is bounded and said. Method: a limit below what the scope needs."""
    found = search(flat_of("two_share"), "two_share", max_bytes=2_000_000, edges=True)

    assert {r.verdict for r in found.results} == {"unknown"}
    assert "need more than 0.0 GB" in found.results[0].why and found.graph is None


SMALL = {"parts": 1, "steps": 1, "decode_slots": 1, "compute_slots": 1, "cancels": 1, "echoes": 1}
SERVING = {"prefill_worker": "serving", "decode_worker": "serving"}


@pytest.mark.parametrize(("sizes", "least"), [({"r": 2, "b": 1, "s": 1}, 1.9), ({"r": 2, "b": 2, "s": 1}, 3.8)])
def test_symmetry_keeps_one_state_of_each_orbit(sizes: dict[str, int], least: float) -> None:
    """Goal: nothing but renumberings is dropped. Method: close the kept states under renumbering; count them."""
    consts = dict.fromkeys(SYSTEM.consts, 0) | SMALL
    consts |= {"parts": 0, "echoes": 0, "source_storage": sizes["s"], "destination_storage": sizes["b"]}
    flat = ground(SYSTEM, sizes, consts, SERVING)
    sliced = slice_scope(flat)
    symmetry = Symmetry(flat, sliced.vars.values(), 3)

    whole = search(flat, "whole", edges=True)
    kept = search(flat, "kept", symmetry=True)

    assert whole.graph is not None
    columns = whole.graph.layout.columns(whole.graph.store.rows[: whole.graph.store.count])
    packed = np.zeros((whole.graph.store.count, symmetry.layout.words * 8), np.uint8)
    for name, field in symmetry.layout.fields.items():
        packed[:, field.byte] |= (columns[name].astype(np.int16) - field.var.lo).astype(np.uint8) << np.uint8(
            field.shift
        )
    seen = StateStore(symmetry.layout.words)
    seen.add(symmetry.canonical(packed.view(np.uint64)))
    assert seen.count == kept.figures["states"]
    assert int(whole.figures["states"]) >= least * int(kept.figures["states"])
    assert kept.witnessed == whole.witnessed and kept.figures["depth"] == whole.figures["depth"]


def test_a_trace_found_under_symmetry_is_a_run(tmp_path: Path) -> None:
    """Goal: renumbering does not tear a trace. Method: a hand edit that needs two generations, with and without."""
    edit = next(e for e in EDITS if e.name == "release_destination_with_a_writer")
    spec = load([apply(edit, tmp_path)])
    consts = dict.fromkeys(SYSTEM.consts, 0) | SMALL | {"source_storage": 2, "destination_storage": 1}
    flat = ground(spec.need_system(), {"r": 2, "b": 1, "s": 2}, consts, SERVING)

    plain, kept = (search(flat, "x", symmetry=symmetry, lemmas=False) for symmetry in (False, True))

    (one,), (other,) = ([r for r in found.results if r.verdict == "refuted"] for found in (plain, kept))
    assert one.name == other.name and one.trace is not None and other.trace is not None
    assert len(one.trace.moves) == len(other.trace.moves)
    assert "the compiled classes" in confirm(flat, other.trace, spec.digest)


def test_symmetry_and_liveness_are_not_asked_together() -> None:
    """Goal: no liveness verdict over renumbered states. Method: ask for both."""
    with pytest.raises(ValueError, match="liveness over renumbered states is not sound"):
        search(flat_of("no_slot"), "no_slot", symmetry=True, edges=True)
