"""The scheduler, driven without a device: whatever it batches is completed with drawn exits and tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.pages import KVCacheManager
from engine.config import SamplingParams, SchedulerConfig
from engine.schedule.request import FinishReason, Request, Stage
from engine.schedule.scheduler import Batch, Scheduler, SchedulerError

LOOPS = 4
STOP = 0


def make(num_blocks: int = 64, hold: bool = False, **knobs: Any) -> tuple[Scheduler, KVCacheManager]:
    pages = KVCacheManager(num_blocks, block_size=4, planes=LOOPS, num_layers=1)
    return Scheduler(SchedulerConfig(**knobs), pages, LOOPS, hold_after_prefill=hold), pages


def request(request_id: str, prompt: int = 4, output: int = 4) -> Request:
    return Request(request_id, [1] * prompt, SamplingParams(output), prompt + output - 1, frozenset({STOP}))


def complete(scheduler: Scheduler, batch: Batch, exits: Sequence[bool] | None = None, token: int = 5) -> None:
    """Finish a batch: rows leave at full depth unless exits says otherwise; every coda yields the token."""
    if batch.stage is Stage.PREFILL:
        scheduler.prefilled(batch)
    elif batch.stage is Stage.PRELUDE:
        scheduler.preluded(batch)
    elif batch.stage is Stage.RECURRENT:
        scheduler.looped(batch, exits or [row.loops_done + 1 == LOOPS for row in batch.requests])
    else:
        scheduler.sampled(batch, [token] * len(batch.requests))


def step(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    complete(scheduler, batch)
    return batch


def stages(scheduler: Scheduler, count: int) -> list[str]:
    return [step(scheduler).stage.value for _ in range(count)]


def test_one_request_runs_through_its_stages() -> None:
    """Goal: the published flow. Method: a prompt of 5 in chunks of 3, then two tokens, batch by batch."""
    scheduler, _ = make(prefill_chunk_size=3)
    mine = request("a", prompt=5, output=2)
    scheduler.add(mine)
    first, second = step(scheduler), step(scheduler)

    assert (first.ranges, second.ranges) == ([(0, 3)], [(3, 5)])
    assert stages(scheduler, 7) == ["coda", "prelude", *["recurrent"] * LOOPS, "coda"]
    assert (mine.stage, mine.finish_reason, mine.exit_depths) == (Stage.FINISHED, FinishReason.LENGTH, [LOOPS] * 2)
    assert not scheduler.has_runnable() and scheduler.schedule() is None


def test_a_stop_token_ends_the_output() -> None:
    """Goal: stop comes before length, and the token is kept. Method: the first token is a stop token."""
    scheduler, _ = make()
    mine = request("a", output=1)
    scheduler.add(mine)
    step(scheduler)
    batch = scheduler.schedule()
    assert batch is not None
    complete(scheduler, batch, token=STOP)

    assert (mine.finish_reason, mine.output_ids) == (FinishReason.STOP, [STOP])


def test_depths_mix_in_one_recurrent_batch_and_freed_rows_are_refilled() -> None:
    """Goal: continuous depth batching. Method: one row leaves early; its next token joins the others' later loops."""
    scheduler, _ = make()
    for name in "ab":
        scheduler.add(request(name))
    assert stages(scheduler, 3) == ["prefill", "coda", "prelude"]
    for exits in ([False, False], [True, False]):
        batch = scheduler.schedule()
        assert batch is not None and batch.stage is Stage.RECURRENT
        complete(scheduler, batch, exits)
    assert stages(scheduler, 2) == ["coda", "prelude"], "the row that left goes first"
    batch = scheduler.schedule()

    assert batch is not None
    assert sorted((row.request_id, row.loops_done) for row in batch.requests) == [("a", 0), ("b", 2)]


def test_rows_beyond_the_budget_take_turns_by_token() -> None:
    """Goal: tokens begun first end first, and nobody starves. Method: three requests, two rows; count their tokens."""
    scheduler, _ = make(max_num_batched_tokens=2, prefill_chunk_size=2)
    for name in "abc":
        scheduler.add(request(name, prompt=2, output=9))
    while any(r.stage in (Stage.WAITING, Stage.PREFILL) for r in scheduler.requests.values()):
        step(scheduler)
    while scheduler.has_runnable():
        batch = step(scheduler)
        counts = [len(row.output_ids) for row in scheduler.requests.values()]
        assert len(batch.requests) <= 2 and max(counts) - min(counts) <= 2

    assert [len(row.output_ids) for row in scheduler.requests.values()] == [9, 9, 9]


@pytest.mark.parametrize("limit", [1, 3])
def test_prefill_and_decode_take_turns(limit: int) -> None:
    """Goal: neither a long prompt nor decoding starves the other. Method: count prefills between recurrent batches."""
    scheduler, _ = make(128, prefill_chunk_size=2, max_num_batched_tokens=2, max_prefill_batches_before_decode=limit)
    scheduler.add(request("decoding", prompt=2, output=30))
    stages(scheduler, 3)
    scheduler.add(request("long", prompt=80, output=1))
    seen = [stage for stage in stages(scheduler, 20) if stage in ("prefill", "recurrent")]
    runs = "".join("p" if stage == "prefill" else "r" for stage in seen).split("r")

    assert max(map(len, runs)) == limit
    assert all(len(run) == limit for run in runs[1:-1]), "decoding takes one batch per turn while prompts wait"


def test_a_prefill_batch_keeps_to_its_budgets() -> None:
    """Goal: rows are bounded and earlier prompts end first. Method: three prompts of 7, chunk 5, budget 8."""
    scheduler, _ = make(prefill_chunk_size=5, max_num_batched_tokens=8)
    for name in "abc":
        scheduler.add(request(name, prompt=7, output=1))
    batches = []
    while any(r.stage in (Stage.WAITING, Stage.PREFILL) for r in scheduler.requests.values()):
        batch = step(scheduler)
        if batch.stage is Stage.PREFILL:
            batches.append([(r.request_id, *span) for r, span in zip(batch.requests, batch.ranges, strict=True)])

    assert batches == [
        [("a", 0, 5), ("b", 0, 3)],
        [("a", 5, 7), ("b", 3, 7), ("c", 0, 2)],
        [("c", 2, 7)],
    ]


def test_a_large_request_is_overtaken_a_bounded_number_of_times() -> None:
    """Goal: small requests use idle pages, but the large one is not starved. Method: 8 of 12 pages free, a stream."""
    scheduler, pages = make(num_blocks=12, max_num_seqs=4, max_admission_bypasses=2)
    assert pages.allocate("other", 4)
    for name, prompt in (("large", 12), ("s0", 4), ("s1", 4), ("s2", 4)):
        scheduler.add(request(name, prompt=prompt, output=1))
    order: list[str] = []
    while len(order) < 4:
        if not scheduler.has_runnable():
            assert order == ["s0", "s1"], "the third small request waits for the large one"
            pages.free("other")
        batch = step(scheduler)
        order += [row.request_id for row in batch.requests if batch.stage is Stage.PREFILL]
        for row in list(scheduler.requests.values()):
            if row.stage is Stage.FINISHED:
                pages.free(row.request_id)
                scheduler.forget(row.request_id)
        scheduler.check_integrity()

    assert order == ["s0", "s1", "large", "s2"]


def test_without_bypasses_admission_is_strictly_in_order() -> None:
    """Goal: 0 means first come, first served. Method: a small request waits behind a large one, though it would fit."""
    scheduler, pages = make(num_blocks=12, max_admission_bypasses=0)
    assert pages.allocate("other", 4)
    scheduler.add(request("large", prompt=12, output=1))
    scheduler.add(request("small", prompt=4, output=1))

    assert not scheduler.has_runnable() and scheduler.schedule() is None
    pages.free("other")
    assert [row.request_id for row in step(scheduler).requests] == ["large"]


def test_the_admission_scan_is_bounded() -> None:
    """Goal: a long queue costs a bounded look. Method: the fitting request stands one beyond the limit."""
    scheduler, pages = make(num_blocks=12, admission_scan_limit=2)
    assert pages.allocate("other", 4)
    for name in ("large0", "large1"):
        scheduler.add(request(name, prompt=12, output=1))
    scheduler.add(request("small", prompt=4, output=1))

    assert not scheduler.has_runnable() and scheduler.schedule() is None
    assert [scheduler.get(name).stage for name in ("large0", "large1", "small")] == [Stage.WAITING] * 3


def test_receiving_requests_idle_until_activated() -> None:
    """Goal: waiting for remote KV is not work and takes no slot. Method: reserve more than there are slots."""
    scheduler, pages = make(num_blocks=24, max_num_seqs=1)
    assert scheduler.reserve(request("a")) and scheduler.reserve(request("b")) and scheduler.reserve(request("c"))
    assert not scheduler.reserve(request("d")) and "d" not in scheduler.requests
    assert pages.free_blocks == 0 and not scheduler.has_runnable() and scheduler.schedule() is None
    scheduler.activate("b")

    assert scheduler.free_slots == 0
    with pytest.raises(SchedulerError, match=r"'a' cannot be activated: all 1 compute slots"):
        scheduler.activate("a")
    with pytest.raises(SchedulerError, match="'b' cannot be activated in stage coda"):
        scheduler.activate("b")
    batch = step(scheduler)
    assert (batch.stage, [row.request_id for row in batch.requests]) == (Stage.CODA, ["b"])
    assert scheduler.get("b").exit_depths == [LOOPS]


def test_a_prefill_engine_holds_after_the_prompt() -> None:
    """Goal: no coda on a prefill engine; the slot is free for the next prompt. Method: two prompts, one slot."""
    scheduler, pages = make(hold=True, max_num_seqs=1)
    for name in "ab":
        scheduler.add(request(name))
    assert stages(scheduler, 2) == ["prefill", "prefill"]

    assert [scheduler.get(name).stage for name in "ab"] == [Stage.HELD] * 2
    assert scheduler.schedule() is None and pages.has("a")
    scheduler.forget("a")
    assert "a" not in scheduler.requests


def test_a_lost_runnable_request_is_an_error() -> None:
    """Goal: a scheduler that loses a request says so and does not idle. Method: take one out of its queue."""
    scheduler, _ = make()
    scheduler.add(request("a"))
    step(scheduler)
    scheduler._queues[Stage.CODA].clear()

    with pytest.raises(SchedulerError, match=r"in no queue: \['a'\]"):
        scheduler.schedule()
    with pytest.raises(SchedulerError, match="'a' in stage coda is queued in"):
        scheduler.check_integrity()


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    """Goal: nobody waits for ever. Method: more tokens than the whole pool holds; and an id that is taken."""
    scheduler, _ = make(num_blocks=8)
    with pytest.raises(SchedulerError, match="needs 12 pages for 9 tokens; the pool has 8"):
        scheduler.add(request("a", prompt=6, output=4))
    scheduler.add(request("a", prompt=6, output=3))

    with pytest.raises(SchedulerError, match="'a' is already known"):
        scheduler.add(request("a"))
    with pytest.raises(SchedulerError, match="'a' is still waiting; remove it first"):
        scheduler.forget("a")
    with pytest.raises(SchedulerError, match="'z' is not known"):
        scheduler.remove("z")


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_every_request_ends_and_everything_comes_back(data: st.DataObject, seed: int) -> None:
    """Goal: no starvation, no leak, whatever the sizes. Method: random requests, exits, stops and removals."""
    draw = data.draw
    knobs = {
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.integers(1, 9)),
        "prefill_chunk_size": draw(st.integers(1, 6)),
        "max_prefill_batches_before_decode": draw(st.integers(1, 3)),
        "admission_scan_limit": draw(st.integers(1, 3)),
        "max_admission_bypasses": draw(st.integers(0, 2)),
    }
    scheduler, pages = make(num_blocks=20, **knobs)
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    fresh, steps = 0, 0
    while fresh < 12 or scheduler.requests:
        steps += 1
        assert steps < 5000, f"no end in sight, seed {seed}"
        if fresh < 12 and rng.random() < 0.3:
            scheduler.add(request(f"r{fresh}", prompt=rng.randint(1, 12), output=rng.randint(1, 8)))
            fresh += 1
        if scheduler.requests and rng.random() < 0.02:
            scheduler.remove(rng.choice(list(scheduler.requests)))
        runnable = scheduler.has_runnable()
        batch = scheduler.schedule()
        assert (batch is not None) is runnable
        if batch is not None:
            rows = sum(end - start for start, end in batch.ranges) or len(batch.requests)
            assert 0 < rows <= knobs["max_num_batched_tokens"]
            assert all(row.stage is batch.stage for row in batch.requests)
            exits = [row.loops_done + 1 == LOOPS or rng.random() < 0.3 for row in batch.requests]
            complete(scheduler, batch, exits, token=STOP if rng.random() < 0.1 else 5)
        scheduler.check_integrity()
        pages.check_integrity()
        for row in list(scheduler.requests.values()):
            if row.stage is Stage.FINISHED:
                assert len(row.output_ids) == len(row.exit_depths) <= row.params.max_tokens
                assert row.finish_reason is not None
                ends[row.finish_reason] += 1
                if pages.has(row.request_id):
                    pages.free(row.request_id)
                scheduler.forget(row.request_id)

    assert sum(ends.values()) == 12
    assert pages.free_blocks == 20 and scheduler.free_slots == knobs["max_num_seqs"]


def test_a_wavefront_runs_chunks_in_different_depths_together() -> None:
    """Goal: the published diagonal. Method: a prompt of three chunks; each batch's (start, depth) rows, in order."""
    scheduler, _ = make(prefill_chunk_size=2, wavefront_prefill=True)
    mine = request("a", prompt=5, output=1)
    scheduler.add(mine)

    rows = []
    while mine.stage in (Stage.WAITING, Stage.PREFILL):
        batch = step(scheduler)
        rows.append([(start, depth) for (start, _), depth in zip(batch.ranges, batch.depths, strict=True)])

    assert rows == [
        [(0, 0)],
        [(0, 1), (2, 0)],
        [(0, 2), (2, 1), (4, 0)],
        [(0, 3), (2, 2), (4, 1)],
        [(2, 3), (4, 2)],
        [(4, 3)],
    ]
    assert mine.stage is Stage.CODA and mine.num_prefilled == 5 and not mine.wave


def test_a_wavefront_splits_no_chunk_and_keeps_to_its_budget() -> None:
    """Goal: rows are bounded and no chunk becomes crumbs. Method: two prompts, a budget of one and a half chunks."""
    scheduler, _ = make(prefill_chunk_size=4, max_num_batched_tokens=6, wavefront_prefill=True)
    for name in ("a", "b"):
        scheduler.add(request(name, prompt=8, output=1))
    while scheduler.has_runnable():
        batch = step(scheduler)
        sizes = [end - start for start, end in batch.ranges]
        assert sum(sizes) <= 6 and all(size == 4 for size in sizes)


def test_a_wavefront_is_charged_by_the_loop() -> None:
    """Goal: decode waits as long as for an ordinary chunk. Method: loops of prefill between two recurrent batches."""
    scheduler, _ = make(128, prefill_chunk_size=1, wavefront_prefill=True, max_prefill_batches_before_decode=2)
    scheduler.add(request("decoding", prompt=1, output=30))
    while not scheduler.requests["decoding"].output_ids:
        step(scheduler)
    scheduler.add(request("long", prompt=40, output=1))
    names = "".join({Stage.PREFILL: "p", Stage.RECURRENT: "r"}.get(step(scheduler).stage, "") for _ in range(60))

    assert set(names.split("r")[1:5]) == {"p" * 2 * LOOPS}, names


def test_an_aborted_wavefront_leaves_nothing() -> None:
    """Goal: a stale chunk is in no later batch. Method: abort in the middle, then another prompt."""
    scheduler, pages = make(prefill_chunk_size=1, wavefront_prefill=True)
    scheduler.add(request("a", prompt=6))
    step(scheduler), step(scheduler)
    scheduler.remove("a")
    assert not scheduler.get("a").wave
    pages.free("a")
    scheduler.forget("a")
    scheduler.add(request("b", prompt=1))
    assert [row.request_id for row in step(scheduler).requests] == ["b"]


def test_without_refill_the_rows_that_loop_together_leave_together() -> None:
    """Goal: the plainer order. Method: one row leaves early; nobody joins before the other has left."""
    scheduler, _ = make(mode="no_refill", max_num_seqs=2)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, prompt=1, output=3))
    while scheduler.requests["a"].stage is not Stage.RECURRENT:
        step(scheduler)
    order = []
    for _ in range(LOOPS):
        batch = scheduler.schedule()
        assert batch is not None and batch.stage is Stage.RECURRENT
        order.append([row.request_id for row in batch.requests])
        complete(scheduler, batch, [row.request_id == "a" or row.loops_done + 1 == LOOPS for row in batch.requests])

    assert order == [["a", "b"], ["b"], ["b"], ["b"]]
    after = scheduler.schedule()
    assert after is not None and after.stage is Stage.CODA and len(after.requests) == 2


def test_codas_wait_for_each_other_only_while_others_fill_the_batch() -> None:
    """Goal: waiting rows cost no idle row. Method: six requests on four rows, codas in fours, drawn exits."""
    scheduler, _ = make(96, max_num_seqs=6, max_num_batched_tokens=4, min_coda_batch_size=4)
    rng, waited = random.Random(1), 0
    for number in range(6):
        scheduler.add(request(f"r{number}", prompt=1, output=12))
    while (batch := scheduler.schedule()) is not None:
        looping, done = (len(scheduler._queues[stage]) for stage in (Stage.RECURRENT, Stage.CODA))
        if batch.stage is Stage.CODA:
            assert len(batch.requests) == 4 or looping < 4
        if batch.stage is Stage.RECURRENT and done:
            assert len(batch.requests) == 4 and done < 4
            waited += 1
        complete(scheduler, batch, [row.loops_done + 1 == LOOPS or rng.random() < 0.5 for row in batch.requests])

    assert waited > 5 and all(row.stage is Stage.FINISHED for row in scheduler.requests.values())


def test_priority_goes_first_and_equals_keep_their_order() -> None:
    """Goal: lower numbers are admitted first. Method: five requests, one slot; and the same under fcfs."""
    for policy, expected in (("priority", "bdace"), ("fcfs", "abcde")):
        scheduler, pages = make(policy=policy, max_num_seqs=1)
        for name, priority in zip("abcde", (1, 0, 1, 0, 2), strict=True):
            item = request(name, prompt=1, output=1)
            item.priority = priority
            scheduler.add(item)
        order = []
        while scheduler.requests:
            batch = step(scheduler)
            for row in batch.requests:
                if row.stage is Stage.FINISHED:
                    order.append(row.request_id)
                    pages.free(row.request_id)
                    scheduler.forget(row.request_id)
        assert "".join(order) == expected


def test_ten_thousand_waiting_requests_cost_no_more_per_step() -> None:
    """Goal: a step looks at no more than its scan limit. Method: count the looks into a queue that counts them."""
    looks = {}
    for waiting in (100, 10_000):
        scheduler, _ = make(12, admission_scan_limit=8, max_admission_bypasses=100)
        for number in range(waiting):
            scheduler.add(request(f"r{number}", prompt=4, output=9))
        first = scheduler._waiting.first
        seen: list[int] = []

        def counted(count: int, first: Any = first, seen: list[int] = seen) -> list[Request]:
            found: list[Request] = first(count)
            seen.append(len(found))
            return found

        scheduler._waiting.first = counted  # type: ignore[method-assign]
        for _ in range(5):
            step(scheduler)
        looks[waiting] = seen
    assert looks[100] == looks[10_000] and max(looks[100]) <= 8
