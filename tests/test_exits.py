"""The exit rule, against a scalar reading of its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SamplingParams
from engine.execute.exits import ExitRule

FIRST = np.array([0])


def exit_loop(hazards: list[float], params: SamplingParams, loops: int) -> int:
    """Run one token through a fresh rule; returns the loop after which it leaves."""
    rule = ExitRule(1, loops)
    rule.bind(0, params)
    rule.begin_token(FIRST)
    for loop, hazard in enumerate(hazards, start=1):
        if rule.decide(FIRST, np.array([loop]), np.array([hazard], np.float32))[0]:
            return loop
    raise AssertionError("the rule let a token run past the model's depth")


def test_the_published_example() -> None:
    """Goal: the rule is the published one. Method: hazards .3, .3 reach .51, above .5, at the second loop."""
    assert exit_loop([0.3, 0.3, 0.3, 0.3], SamplingParams(1, exit_threshold=0.5), 4) == 2


def test_loops_below_the_minimum_count() -> None:
    """Goal: mass that leaves early is not forgotten. Method: .9 in loop 1 decides at loop 3, the first allowed."""
    params = SamplingParams(1, exit_threshold=0.85, min_loops=3)
    assert exit_loop([0.9, 0.0, 0.0, 0.0], params, 4) == 3


def test_a_threshold_of_one_never_leaves_early() -> None:
    """Goal: 1.0 means full depth even where hazards saturate. Method: hazards of exactly 1."""
    assert exit_loop([1.0] * 4, SamplingParams(1, exit_threshold=1.0), 4) == 4
    assert exit_loop([1.0] * 4, SamplingParams(1, exit_threshold=1.0 - 1e-12), 4) == 2


def test_equality_reaches_the_threshold() -> None:
    """Goal: a threshold equal to the mass in float32 is reached. Method: hazard and threshold .7 as float32."""
    assert exit_loop([0.0, 0.7, 0.0], SamplingParams(1, exit_threshold=float(np.float32(1) - np.float32(0.3))), 3) == 2


def test_the_remaining_mass_starts_anew_with_each_token() -> None:
    """Goal: one token's hazards do not count for the next. Method: a sure exit, then a token without hazard."""
    rule = ExitRule(2, 4)
    for slot in (0, 1):
        rule.bind(slot, SamplingParams(1, exit_threshold=0.5))
    slots = np.array([0, 1])
    rule.begin_token(slots)
    assert rule.decide(slots, np.array([2, 2]), np.array([1.0, 0.0], np.float32)).tolist() == [True, False]
    rule.begin_token(np.array([0]))

    assert rule.decide(slots, np.array([2, 3]), np.array([0.0, 1.0], np.float32)).tolist() == [False, True]


def test_hazards_are_asked_for_only_where_they_can_matter() -> None:
    """Goal: full-depth requests cost no gate. Method: needs_hazards over slots with and without a threshold."""
    rule = ExitRule(2, 4)
    rule.bind(0, SamplingParams(1))
    rule.bind(1, SamplingParams(1, exit_threshold=0.9))

    def asked(*slots: int, loop: int = 1) -> bool:
        return rule.needs_hazards(np.array(slots), np.full(len(slots), loop))

    assert [asked(0), asked(1), asked(0, 1)] == [False, True, True]
    assert not asked(0, 1, loop=4), "after the last loop there is nothing to decide"
    assert rule.decide(FIRST, np.array([4]), None).tolist() == [True]
    rule.bind(1, SamplingParams(1))
    assert not asked(1), "a slot keeps nothing of its last request"


def test_delayed_leaves_one_loop_later() -> None:
    """Goal: the published example of the delayed mode. Method: hazards .3, .3 at threshold .5, minimum 2: loop 3."""
    params = SamplingParams(1, exit_threshold=0.5, exit_mode="ouro_delayed")
    assert exit_loop([0.3, 0.3, 0.3, 0.3], params, 4) == 3
    assert exit_loop([0.0, 0.0, 0.0, 1.0], params, 4) == 4, "the model's depth still ends it"


def test_a_trace_gives_every_depth() -> None:
    """Goal: depths can be run again. Method: a trace of three tokens; the first output does not loop here."""
    rule = ExitRule(1, 4)
    rule.bind(0, SamplingParams(3, min_loops=1, exit_trace=(4, 2, 3)))
    assert not rule.needs_hazards(FIRST, np.array([1]))
    for expected in (2, 3):
        rule.begin_token(FIRST)
        left = [loop for loop in range(1, 5) if rule.decide(FIRST, np.array([loop]), None)[0]]
        assert left[0] == expected


@given(
    st.lists(st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4), min_size=3, max_size=3),
    st.sampled_from([0.3, 0.5, 0.9]),
    st.integers(1, 3),
)
def test_hazards_read_late_decide_the_same(hazards: list[list[float]], threshold: float, min_loops: int) -> None:
    """Goal: the asynchronous form of `ouro_delayed` is the synchronous one. Method: three tokens in one slot; the late
    form observes a loop's hazards after the next loop has been enqueued, and the last ones of a token after it left."""
    params = SamplingParams(4, exit_threshold=threshold, min_loops=min_loops, exit_mode="ouro_delayed")

    def depths(late: bool) -> list[int]:
        rule, found = ExitRule(1, 4), []
        rule.bind(0, params)
        unread: tuple[Any, ...] | None = None
        for token in hazards:
            rule.begin_token(FIRST)
            for loop, hazard in enumerate(token, start=1):
                row = (FIRST, np.array([loop]), np.array([hazard], np.float32))
                if late:
                    assert rule.can_wait(FIRST, row[1])
                    if unread is not None:
                        rule.observe(*unread)
                    unread = (*row, rule.epochs(FIRST))
                if rule.decide(row[0], row[1], None if late else row[2])[0]:
                    found.append(loop)
                    break
        return found

    assert depths(late=True) == depths(late=False)


@given(
    st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
    st.integers(1, 3),
    st.sampled_from(["ouro", "ouro_delayed"]),
    st.booleans(),
)
def test_a_token_in_flight_can_move_to_another_slot(hazards: list[float], moved: int, mode: str, traced: bool) -> None:
    """Goal: preemption loses nothing of a decision. Method: move after any loop, compare with a token that stayed."""
    if traced:
        params = SamplingParams(3, min_loops=1, exit_trace=(4, 3, 2))
    else:
        params = SamplingParams(3, exit_threshold=0.5, exit_mode=mode)
    rule = ExitRule(2, 4)
    rule.bind(0, params)
    rule.begin_token(FIRST)
    stayed = [bool(rule.decide(FIRST, np.array([i + 1]), np.array([h], np.float32))[0]) for i, h in enumerate(hazards)]
    rule.bind(0, params)
    rule.begin_token(FIRST)
    slot, went = FIRST, []
    for loop, hazard in enumerate(hazards, start=1):
        went.append(bool(rule.decide(slot, np.array([loop]), np.array([hazard], np.float32))[0]))
        if loop == moved:
            state = rule.save(0)
            rule.bind(1, params)
            rule.restore(1, state)
            slot = np.array([1])

    assert went == stayed


@given(data=st.data(), loops=st.integers(1, 6))
def test_the_rule_equals_its_definition(data: st.DataObject, loops: int) -> None:
    """Goal: every combination of bounds is decided right. Method: a scalar loop over float32 numbers as oracle."""
    hazards = data.draw(st.lists(st.floats(0, 1, width=32), min_size=loops, max_size=loops))
    min_loops = data.draw(st.integers(1, loops + 1))
    max_loops = data.draw(st.none() | st.integers(min_loops, loops + 1))
    threshold = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.875, 1.0]))
    remaining, expected = np.float32(1), 0
    for loop, hazard in enumerate(hazards, start=1):
        remaining = np.float32(remaining * np.float32(np.float32(1) - np.float32(hazard)))
        early = threshold < 1 and loop >= min_loops and np.float32(1) - remaining >= threshold
        if early or loop >= min(max_loops or loops, loops):
            expected = loop
            break

    params = SamplingParams(1, min_loops=min_loops, max_loops=max_loops, exit_threshold=threshold)
    assert exit_loop(hazards, params, loops) == expected
