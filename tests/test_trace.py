"""Trace files: what is written is what is read, what is dropped is counted, what is wrong is said with its line."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import scope_walk

from rlt_fsm.compile import compile_process
from rlt_fsm.load import load
from rlt_fsm.trace import Trace, TraceError, TraceRing, as_dict, merge, read, save

SPEC = load()
SYSTEM = SPEC.need_system()
CREDITS = {"source_capacity": 9, "destination_capacity": 9, "compute_capacity": 9}


def coordinator(ring: TraceRing) -> Any:
    """The coordinator's shared instances, writing to `ring`."""
    return compile_process(SYSTEM, "coordinator", SPEC.digest).make_shared({"credits": CREDITS}, ring)


def test_a_file_says_what_happened(tmp_path: Path) -> None:
    """Goal: the format as documented. Method: every kind of line, compared as JSON but for the times."""
    ring = TraceRing(100)
    shared = coordinator(ring)
    compiled = compile_process(SYSTEM, "coordinator")
    shared.fire("prefill_worker", "is_ready")
    record = compiled.make_record(shared, "g1", {"source_need": 3})
    record.submit()
    ring.world("crash_prefill")
    ring.write(tmp_path / "c.jsonl", incarnation="i7")

    header, *lines = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    times = [line.pop("time") for line in lines]
    assert header == {
        "format": "rlt-trace",
        "version": 1,
        "process": "coordinator",
        "spec": SPEC.digest,
        "incarnation": "i7",
        "given": {"credits": CREDITS},
        "record_given": {"source_need": 1, "destination_need": 1},
        "events": 4,
    }
    assert lines == [
        {"process": "coordinator", "to": "prefill_worker", "event": "is_ready"},
        {"process": "coordinator", "tid": "g1", "given": {"source_need": 3, "destination_need": 1}},
        {"process": "coordinator", "tid": "g1", "event": "submit"},
        {"event": "crash_prefill"},
    ]
    assert times == sorted(times) and times[0] > 0


def test_time_is_of_a_turn_by_the_clock_that_was_given() -> None:
    """Goal: events bear when their turn began; no other clock is read. Method: one that counts.

    What begins a turn reads the clock once; the methods of events never do.
    """
    ticks = count(100)
    ring = TraceRing(20, clock=lambda: next(ticks))  # 100 is read when the ring is made
    shared = coordinator(ring)
    compiled = compile_process(SYSTEM, "coordinator")
    first, second = (compiled.make_record(shared, tid) for tid in ("g1", "g2"))  # 101, 102
    first.submit()
    first.cancel()
    ring.turn()  # 103
    shared.prefill_worker_is_ready()
    shared.fire("decode_worker", "is_ready")  # 104
    second.fire("submit")  # 105
    ring.world("crash_prefill")  # 106

    assert [e.time for e in ring.events()] == [102, 102, 103, 104, 105, 106]
    assert next(ticks) == 107


@pytest.mark.parametrize("entries", [1, 2])
def test_an_interrupt_in_the_middle_of_a_line_is_a_dropped_event(entries: int) -> None:
    """Goal: half a line is neither shown nor passed over in silence. Method: write only its first entries."""
    ring = TraceRing(3)
    shared = coordinator(ring)
    compiled = compile_process(SYSTEM, "coordinator")
    compiled.make_record(shared, "g0").submit()
    ring.written += 1
    ring.items.extend((ring.now, "half")[:entries])
    compiled.make_record(shared, "g1").submit()

    assert [(e.tid, e.event) for e in ring.events()] == [("g0", "submit"), ("g1", "submit")]
    assert ring.dropped == 1 and ring.header().events == len(ring) == 2
    for number in (2, 3):
        compiled.make_record(shared, f"g{number}").submit()

    assert [e.tid for e in ring.events()] == ["g1", "g2", "g3"][-len(ring) :] and ring.dropped == 5 - len(ring)


def test_a_refused_event_is_not_written() -> None:
    """Goal: a trace holds what was accepted. Method: a refusal between two events."""
    ring = TraceRing(10)
    handle = compile_process(SYSTEM, "decode")
    record = handle.make_record(handle.make_shared({"slots": {"capacity": 1}}, ring), "g1")
    record.reserve()
    with pytest.raises(Exception, match="cannot take event 'activate'"):
        record.activate()
    record.commit(count=4)

    assert [(e.event, e.fields) for e in ring.events()] == [("reserve", {}), ("commit", {"count": 4})]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_written_is_read(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Goal: a file loses nothing. Method: the traces of a random walk, once from memory and once over files."""
    folder = tmp_path_factory.mktemp("traces")
    walk = scope_walk(SPEC, "two_share_everything", seed).run(60)
    for name, ring in walk.rings.items():
        ring.write(folder / f"{name}.jsonl", incarnation="i0")
    direct = walk.trace()

    again = merge(sorted(folder.glob("*.jsonl")))
    assert {k: as_lists(v) for k, v in again.streams.items()} == {k: as_lists(v) for k, v in direct.streams.items()}
    assert again.headers == direct.headers and not again.dropped()
    save(folder / "all.jsonl", again)
    whole = read(folder / "all.jsonl")
    assert {k: as_lists(v) for k, v in whole.streams.items()} == {k: as_lists(v) for k, v in direct.streams.items()}


def as_lists(lines: list[Any]) -> list[dict[str, Any]]:
    """Lines without their places."""
    return [as_dict(line.event) for line in lines]


@pytest.mark.parametrize(("events", "dropped"), [(0, 0), (3, 0), (4, 0), (5, 1), (11, 7)])
def test_a_full_ring_counts_what_it_drops(events: int, dropped: int, tmp_path: Path) -> None:
    """Goal: a gap is never silent. Method: a ring of four, filled with more and with less; its file says so."""
    ring = TraceRing(4)
    shared = coordinator(ring)
    compiled = compile_process(SYSTEM, "coordinator")
    for number in range(events):
        compiled.make_record(shared, f"g{number}").submit()
    ring.write(tmp_path / "t.jsonl")

    trace = read(tmp_path / "t.jsonl")
    assert ring.dropped == dropped and trace.dropped() == ({"coordinator": dropped} if dropped else {})
    assert [line.event.tid for line in trace.lines()] == [f"g{n}" for n in range(dropped, events)]


def test_a_file_that_was_cut_off_has_dropped_events(tmp_path: Path) -> None:
    """Goal: a lost tail is a gap too. Method: take the last two lines from a file."""
    ring = TraceRing(100)
    shared = coordinator(ring)
    for number in range(5):
        compile_process(SYSTEM, "coordinator").make_record(shared, f"g{number}").submit()
    path = tmp_path / "t.jsonl"
    ring.write(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))

    assert read(path).dropped() == {"coordinator": 2}


HEADER = '{"format":"rlt-trace","version":1,"process":"p"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t.jsonl:1: no header line"),
        ('{"time":1,"process":"p","tid":"g","event":"e"}\n', r"t.jsonl:1: not a line of a trace: .*format"),
        (HEADER.replace("rlt-trace", "other"), r"t.jsonl:1: the format is 'other', not 'rlt-trace'"),
        (HEADER.replace('"version":1', '"version":2'), r"t.jsonl:1: version 2; this program reads version 1"),
        (HEADER + HEADER, r"t.jsonl:2: process 'p' has a header already"),
        (HEADER + '{"process":"p","tid":"g","eve', r"t.jsonl:2: not a line of a trace"),
        (HEADER + '{"process":"q","tid":"g","event":"e"}\n', r"t.jsonl:2: process 'q' has no header line before"),
        (HEADER + '{"process":"p","event":"e"}\n', r"t.jsonl:2: an event has either a generation"),
        (HEADER + '{"process":"p","tid":"g","to":"x","event":"e"}\n', r"t.jsonl:2: an event has either a generation"),
        (HEADER + '{"process":"p","tid":"g"}\n', r"t.jsonl:2: neither an event nor the givens"),
        (HEADER + '{"event":"die","tid":"g"}\n', r"t.jsonl:2: a line of the world has no generation"),
        (HEADER + '{"process":"p","tid":"g","event":"e","fields":{"n":1.5}}\n', r"t.jsonl:2: not a line of a trace"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    """Goal: a broken file is refused, never half read. Method: one mistake at a time."""
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "t.jsonl")


def test_two_incarnations_are_two_runs() -> None:
    """Goal: restarts are not mixed up. Method: the same process twice in one merge."""
    one, two = TraceRing(1), TraceRing(1)
    coordinator(one)
    coordinator(two)
    with pytest.raises(TraceError, match="two traces of process 'coordinator': incarnations 'a' and 'b'"):
        merge([one.trace("a"), two.trace("b")])


def test_a_ring_belongs_to_one_process() -> None:
    """Goal: two processes' events never share a ring unmarked. Method: bind one twice; a ring without room."""
    ring = TraceRing(1)
    coordinator(ring)
    with pytest.raises(ValueError, match="belongs to process 'coordinator'"):
        coordinator(ring)
    with pytest.raises(ValueError, match="at least one event"):
        TraceRing(0)
    assert len(Trace()) == 0
