"""The explicit checker against a plain interpreter, and the shipped spec's state counts."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_fsm.expr import BOOL, Const, evaluate
from rlt_fsm.ground import Flat, ground
from rlt_fsm.load import load
from verification.explicit import search
from verification.store import StateStore

SYSTEM = load().need_system()

# (states, transitions, depth) of each quick scope; a change of the spec that changes one is looked at, then pinned
COUNTS = {
    "one_everything": (321257, 926883, 44),
    "one_broken": (129980, 356641, 43),
    "one_from_start": (34918, 100635, 41),
    "one_long": (16251, 64529, 46),
    "two_share": (101592, 451936, 63),
    "two_share_faults": (156199, 558544, 65),
    "two_queue": (157532, 696312, 57),
    "one_compute": (304392, 1139810, 56),
    "no_slot": (1720, 3678, 46),
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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=60), max_size=8))
def test_the_store_numbers_each_row_once(batches: list[list[tuple[int, int]]]) -> None:
    """Goal: the hash table is exact under repeats and collisions. Method: a dictionary as oracle."""
    store, oracle = StateStore(words=2, capacity=4), {}
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
