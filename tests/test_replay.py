"""Replay: right traces are ok, wrong ones are refused with the reason, and what has gaps is never called ok."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from guard_deletions import EDITS, apply
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import Walk, long_walk, rare_faults, scope_walk

from rlt_fsm.ground import Step
from rlt_fsm.load import load
from rlt_fsm.replay import INCONCLUSIVE, OK, VIOLATION, Verdict, per_generation, replay
from rlt_fsm.trace import Line, Trace, TraceEvent, read

SPEC = load()
SYSTEM = SPEC.need_system()
SERVING = {"prefill_worker": "serving", "decode_worker": "serving"}
ONE = {"r": 1, "b": 1, "s": 1}
SMALL = {"steps": 1, "decode_slots": 1, "compute_slots": 1, "source_storage": 1, "destination_storage": 1}


def event(name: str, process: str = "prefill", **fields: int | bool) -> TraceEvent:
    """One line of generation g0."""
    return TraceEvent(process=process, tid="g0", event=name, fields=fields)


def without_faults(step: Step) -> float:
    """A weight for walks in which nothing fails and every notification is heard at once."""
    if step.action.startswith(("crash", "break", "cancel", "drain_", "write_error")):
        return 0.0
    return {"hear": 100.0, "drained": 30.0, "chunk_done_with_kv": 10.0, "step": 5.0, "echo": 3.0}.get(step.action, 1.0)


def handoff() -> Trace:
    """One generation through all milestones, with partitions of KV, a duplicate notification and a step."""
    wanted = {"chunk_done_with_kv", "echo", "step", "drained", "retire"}
    for seed in range(1000):
        consts = SMALL | {"chunks": 1, "parts": 1, "echoes": 1}
        walk = Walk(SPEC, ONE, consts, SERVING, seed).run(200, without_faults)
        if wanted <= {s.action for s in walk.steps}:
            return walk.trace()
    raise AssertionError("no walk of a thousand shows a whole handoff")


HANDOFF = handoff()


def changed(trace: Trace, process: str, lines: list[Line]) -> Trace:
    """The trace with other lines for one process."""
    return Trace(trace.headers, {**trace.streams, process: lines})


def find(trace: Trace, process: str, name: str, which: int = 0) -> int:
    """The place of an event among the lines of its process."""
    return [i for i, line in enumerate(trace.streams[process]) if line.event.event == name][which]


SUMS = {
    "d_decodes_within_its_slots",
    "destination_credits_are_conserved",
    "live_generations_are_counted",
    "p_computes_within_its_slots",
    "source_credits_are_conserved",
    "source_credits_are_promises",
    "credits_are_promises",
    "slots_are_conserved",
    "compute_credits_are_conserved",
}  # over all generations


@pytest.mark.parametrize("scope", SYSTEM.scopes)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), known=st.booleans())
def test_every_walk_is_a_run(scope: str, seed: int, known: bool) -> None:
    """Goal: no false alarm. Method: seeded walks with every fault of the scope, stopped anywhere."""
    walk = scope_walk(SPEC, scope, seed).run(seed % 150, rare_faults)

    verdict = replay(SPEC, walk.trace(), walk.consts if known else None)

    assert verdict.ok and verdict.step == len(walk.trace()), verdict.show()
    assert not verdict.inferred and set(verdict.unjudged) <= SUMS


def test_a_handoff_is_ok_and_leaves_nothing_open() -> None:
    """Goal: the ok verdict. Method: a whole handoff; its first half, which names what is still held."""
    verdict = replay(SPEC, HANDOFF)
    assert (verdict.kind, verdict.open, verdict.step) == (OK, (), len(HANDOFF))

    bound = find(HANDOFF, "decode", "activate") + 1
    half = changed(HANDOFF, "decode", HANDOFF.streams["decode"][:bound])
    half = changed(half, "coordinator", [x for x in half.streams["coordinator"] if x.event.event not in AFTER])
    verdict = replay(SPEC, half)
    assert verdict.ok, verdict.show()
    assert "'g0' in decode: DestinationRetirement is held (binding is True)" in verdict.open


AFTER = ("finished", "destination_released", "retire")


def mutants(trace: Trace) -> Iterator[tuple[str, str, str, Trace]]:
    """(what was done, process, event, trace) for each line: removed, doubled, swapped with the next, changed."""
    for process, lines in trace.streams.items():
        for i, line in enumerate(lines):
            name = line.event.event
            yield "remove", process, name, changed(trace, process, lines[:i] + lines[i + 1 :])
            yield "double", process, name, changed(trace, process, [*lines[: i + 1], *lines[i:]])
            if i + 1 < len(lines):
                swapped = [*lines[:i], lines[i + 1], line, *lines[i + 2 :]]
                yield "swap", process, f"{name} {lines[i + 1].event.event}", changed(trace, process, swapped)
            for key, value in line.event.fields.items():
                for other in [not value] if isinstance(value, bool) else [value + 1, value + 7]:
                    new = msgspec.structs.replace(line.event, fields={**line.event.fields, key: other})
                    yield "field", process, name, changed(trace, process, [*lines[:i], Line(new), *lines[i + 1 :]])


def test_every_mutant_of_a_handoff_is_refused_or_is_a_run() -> None:
    """Goal: one wrong line is found. Method: all single mutations; those that pass are runs, for a reason given."""
    passing = {
        ("remove", "prefill", "drained"),  # an ack finds P submitted or drained
        ("remove", "coordinator", "retire"),  # the trace ends a line earlier, with its record open
        ("remove", "decode", "notified"),  # one of two notifications with one number is a duplicate or is not
        ("double", "decode", "notified"),  # a duplicate may come again
        ("field", "decode", "notified"),  # a number of its own, that no other line repeats
    }
    refused = 0
    for what, process, name, trace in mutants(HANDOFF):
        verdict = replay(SPEC, trace)
        if what == "swap" and verdict.ok:
            first, second = name.split()
            assert independent(process, first, second), (what, process, name)
        elif verdict.ok:
            assert (what, process, name) in passing, (what, process, name)
        else:
            assert verdict.kind == VIOLATION and verdict.reason and verdict.process and verdict.at
            refused += 1
    assert refused > 70


def independent(process: str, first: str, second: str) -> bool:
    """Whether two lines of a handoff may come in either order."""
    from_p, from_d = (set(SYSTEM.channels[f"from_{name}"].messages) for name in ("prefill", "decode"))
    pair = {first, second}
    if process == "coordinator" and len(pair & from_p) == len(pair & from_d) == 1:
        return True
    either = [
        {"handle_done", "submitted"},  # the transport and P's shell
        {"handle_done", "post"},
        {"handle_done", "event_done"},
        {"handle_done", "staged"},
        {"handle_done", "launch"},
        {"handle_done", "ack"},
        {"post", "event_done"},
        {"post", "staged"},
        {"post", "launch"},
        {"launch", "event_done"},
        {"notified", "commit"},  # notifications are not ordered with messages
        {"notified"},
        {"step", "step_done"},
        {"finish", "step_done"},
        {"step_done", "step"},
    ]
    return {first, second} in either


def only(verdict: Verdict) -> tuple[str, str, str, str]:
    """What a violation is blamed on."""
    return verdict.kind, verdict.process, verdict.tid, verdict.event


def test_a_refused_event_is_explained() -> None:
    """Goal: the false conjunct with its values, the line, and what was enabled. Method: submit too early."""
    lines = list(HANDOFF.streams["prefill"])
    lines[find(HANDOFF, "prefill", "submitted")] = Line(event("submitted"), "p.jsonl", 99)
    del lines[find(HANDOFF, "prefill", "post", -1)]

    verdict = replay(SPEC, changed(HANDOFF, "prefill", lines))

    assert only(verdict) == (VIOLATION, "prefill", "g0", "submitted") and verdict.at == "p.jsonl:99"
    assert any("all_posted is false: ready == 0 (ready is 1)" in text for text in verdict.false)
    assert "post" in verdict.enabled and "submitted" not in verdict.enabled
    assert "all_posted is false" in verdict.show() and "p.jsonl:99" in verdict.show()


def test_a_message_that_was_not_sent() -> None:
    """Goal: no message from nowhere. Method: P hears of the generation before D has answered."""
    early = changed(HANDOFF, "decode", [])

    verdict = replay(SPEC, early)

    assert only(verdict) == (VIOLATION, "coordinator", "g0", "reserved")
    assert verdict.reason == "'decode' has not sent 'reserved' (channel from_decode)"
    assert any("'reserve', sent by 'coordinator', was not taken by 'decode'" in text for text in verdict.waiting)


def test_a_message_out_of_its_order() -> None:
    """Goal: channels are first in, first out. Method: take D's second message before its first."""
    lines = list(HANDOFF.streams["coordinator"])
    one, two = find(HANDOFF, "coordinator", "activated"), find(HANDOFF, "coordinator", "finished")
    lines[one], lines[two] = lines[two], lines[one]

    verdict = replay(SPEC, changed(HANDOFF, "coordinator", lines))

    assert only(verdict) == (VIOLATION, "coordinator", "g0", "finished")
    assert verdict.reason == "'activated' is the next message on from_decode, not 'finished'"


def test_a_message_with_another_field() -> None:
    """Goal: what is taken is what was sent. Method: the coordinator takes a count of its own."""
    lines = list(HANDOFF.streams["coordinator"])
    place = find(HANDOFF, "coordinator", "commit")
    sent = lines[place].event.fields["count"]
    lines[place] = Line(event("commit", "coordinator", count=sent + 1))

    verdict = replay(SPEC, changed(HANDOFF, "coordinator", lines))

    assert only(verdict) == (VIOLATION, "coordinator", "g0", "commit")
    assert verdict.reason == f"'commit' was sent with count={sent} and taken with count={sent + 1}"


def test_an_event_that_the_world_does_not_allow() -> None:
    """Goal: evidence has a cause. Method: P's machines take the end of a handle that had failed; the world does not."""
    names = ["prefill", "launch", "event_done", "staged", "post", "handle_error", "handle_done"]
    fields = {"launch": {"final": True}, "event_done": {"parts": 0}}
    p_lines = [Line(event(name, **fields.get(name, {}))) for name in names]
    c_lines = [Line(event(name, "coordinator")) for name in ("submit", "admit", "reserved")]
    d_lines = [Line(event("reserve", "decode"))]

    verdict = replay(SPEC, Trace(HANDOFF.headers, {"coordinator": c_lines, "prefill": p_lines, "decode": d_lines}))

    assert only(verdict) == (VIOLATION, "prefill", "g0", "handle_done"), verdict.show()
    assert verdict.reason == "the world does not allow 'write_done' here" and "handle_done" in verdict.enabled
    assert verdict.false == ("flying[g0] > 0 (flying[g0] is 0)",)


def test_a_death_without_a_line() -> None:
    """Goal: a death is believed only if it happened. Method: take the crash out of a walk in which P dies."""
    for seed in range(200):
        walk = Walk(SPEC, ONE, SMALL | {"crashes_prefill": 1}, SERVING, seed).run(100, dying)
        trace = walk.trace()
        if any(line.event.event == "died" for line in trace.lines()):
            break
    assert replay(SPEC, trace).ok
    lines = [line for line in trace.streams["coordinator"] if line.event.event != "crash_prefill"]

    verdict = replay(SPEC, changed(trace, "coordinator", lines))

    assert only(verdict) == (VIOLATION, "coordinator", "", "died")
    assert verdict.false[0].startswith("prefill_dead (prefill_dead is false)")


def dying(step: Step) -> float:
    """P dies now and then; nothing is cancelled."""
    return 0.2 if step.action == "crash_prefill" else 1.0


def test_a_dead_process_does_nothing() -> None:
    """Goal: no event after a death. Method: P goes on after a crash that the coordinator's trace puts first."""
    lines = HANDOFF.streams["coordinator"]
    dead = [Line(TraceEvent(event="crash_prefill")), *lines]

    verdict = replay(SPEC, changed(HANDOFF, "coordinator", dead))

    assert verdict.kind == VIOLATION
    assert only(verdict) == (VIOLATION, "", "", "crash_prefill")
    assert verdict.reason == "'prefill' goes on after 'crash_prefill'"


def test_an_orderly_exit_needs_no_line() -> None:
    """Goal: what must have happened is inferred, and said. Method: drop the exits from a drain to the end."""
    for seed in range(300):
        walk = Walk(SPEC, ONE, SMALL | {"drains": 1}, SERVING, seed).run(300, draining)
        if walk.shared["coordinator"].state("decode_worker") == "stopped":
            break
    trace = walk.trace()
    assert replay(SPEC, trace).ok
    lines = [line for line in trace.streams["coordinator"] if not line.event.event.endswith("_exits")]

    verdict = replay(SPEC, changed(trace, "coordinator", lines))

    assert verdict.ok and set(verdict.inferred) == {"prefill_exits", "decode_exits"}, verdict.show()


def draining(step: Step) -> float:
    """An operator drains now and then; nothing else goes wrong."""
    return 0.1 if step.action == "drain_prefill" else 1.0


def test_more_partitions_of_a_chunk_are_more_of_the_same() -> None:
    """Goal: a counter that the spec offers as 0 or 1 may be larger. Method: three partitions of one chunk."""
    names = [("prefill", {}), ("launch", {"final": True}), ("event_done", {"parts": 3}), ("staged", {})]
    names += [("post", {}), ("handle_done", {}), ("post", {}), ("post", {}), ("post", {}), ("submitted", {})]
    names += [("handle_done", {})] * 3 + [("ack", {}), ("settle_source", {})]
    p_lines = [Line(event(name, **fields)) for name, fields in names]
    d_names: list[tuple[str, dict[str, Any]]] = [("reserve", {}), ("commit", {"count": 4})]
    d_names += [("notified", {"seq": n}) for n in (3, 1, 0, 2)] + [("receive", {})]
    d_lines = [Line(event(name, "decode", **fields)) for name, fields in d_names]
    c_names = ["submit", "admit", "reserved", "prefill_complete", "commit", "received", "source_released"]
    counted = ("commit", "source_released")
    c_lines = [Line(event(name, "coordinator", **({"count": 4} if name in counted else {}))) for name in c_names]
    trace = Trace(HANDOFF.headers, {"coordinator": c_lines, "prefill": p_lines, "decode": d_lines})

    assert replay(SPEC, trace).ok, replay(SPEC, trace).show()
    p_lines[find(trace, "prefill", "event_done")] = Line(event("event_done", parts=2))
    short = changed(trace, "prefill", p_lines)
    verdict = replay(SPEC, short)
    assert only(verdict) == (VIOLATION, "prefill", "g0", "post"), verdict.show()
    assert verdict.false == ("Export: computed is false: ready > 0 (ready is 0)",)


@pytest.mark.parametrize("name", ["release_destination_with_a_writer", "release_source_with_an_open_handle"])
def test_a_broken_protocol_is_judged_by_the_world(name: str, tmp_path: Path) -> None:
    """Goal: properties are judged on the world, not on the tables. Method: runs of a spec without a guard.

    The same run is refused by the shipped spec, at the very event, with the guard that was deleted.
    """
    edits = {edit.name: edit for edit in EDITS}
    edit = edits.get(name) or next(e for e in EDITS if "no_send_after_reuse" in e.breaks)
    broken = load([apply(edit, tmp_path)])
    for seed in range(400):
        walk = Walk(broken, ONE, SMALL | {"cancels": 1}, SERVING, seed).run(100, cancelling)
        verdict = replay(broken, walk.trace())
        if not verdict.ok:
            break
    assert verdict.kind == VIOLATION and verdict.reason.startswith("property 'no_"), verdict.show()
    assert verdict.reason.split("'")[1] in edit.breaks and any("owner" in text for text in verdict.false)

    headers = {k: msgspec.structs.replace(h, spec=SPEC.digest) for k, h in walk.trace().headers.items()}
    shipped = replay(SPEC, Trace(headers, walk.trace().streams))
    assert only(shipped) == only(verdict) and shipped.event.startswith("settle_"), shipped.show()
    assert any("is false: " in text for text in shipped.false)


def cancelling(step: Step) -> float:
    """A cancel comes sooner than a write lands."""
    return {"cancel": 0.3, "write_done": 0.05}.get(step.action, 1.0)


def inconclusive(trace: Trace, reason: str) -> None:
    """The trace cannot be judged, for this reason."""
    verdict = replay(SPEC, trace)
    assert verdict.kind == INCONCLUSIVE and not verdict.ok and reason in verdict.reason, verdict.show()


def test_what_cannot_be_judged_is_never_ok() -> None:
    """Goal: the third verdict. Method: dropped events, a missing process, another spec, no spec, a foreign process."""
    header = HANDOFF.headers["prefill"]

    def headed(new: Any) -> Trace:
        return Trace({**HANDOFF.headers, "prefill": new}, HANDOFF.streams)

    inconclusive(headed(msgspec.structs.replace(header, dropped=3)), "3 of 'prefill'")
    inconclusive(Trace(HANDOFF.headers, HANDOFF.streams, {"decode": 1}), "1 of 'decode'")
    inconclusive(headed(msgspec.structs.replace(header, spec="0" * 64)), "ran spec 000000000000")
    inconclusive(headed(msgspec.structs.replace(header, spec="")), "does not say which spec")
    alone = Trace({"prefill": header}, {"prefill": HANDOFF.streams["prefill"]})
    inconclusive(alone, "there is no trace of 'coordinator', 'decode'")
    foreign = Trace({**HANDOFF.headers, "router": header}, {**HANDOFF.streams, "router": []})
    inconclusive(foreign, "the trace is of process 'router'")


def test_a_ring_that_was_full_is_inconclusive(tmp_path: Path) -> None:
    """Goal: the same over files. Method: a walk whose rings hold ten events each, written and read again."""
    walk = Walk(SPEC, ONE, SMALL, SERVING, 1, capacity=5).run(100, without_faults)
    for name, ring in walk.rings.items():
        ring.write(tmp_path / f"{name}.jsonl")

    verdict = replay(SPEC, sorted(tmp_path.glob("*.jsonl")))

    assert verdict.kind == INCONCLUSIVE and "events are not in the trace" in verdict.reason


def test_a_header_that_does_not_fit() -> None:
    """Goal: capacities are part of a run. Method: credits that the header does not give; ones too small."""
    header = HANDOFF.headers["coordinator"]
    none = msgspec.structs.replace(header, given={})
    verdict = replay(SPEC, Trace({**HANDOFF.headers, "coordinator": none}, HANDOFF.streams))
    assert verdict.kind == VIOLATION and "must be given 'source_capacity'" in verdict.reason

    small = {"credits": {"source_capacity": 0, "destination_capacity": 1, "compute_capacity": 1}}
    poor = msgspec.structs.replace(header, given=small)
    verdict = replay(SPEC, Trace({**HANDOFF.headers, "coordinator": poor}, HANDOFF.streams))
    assert only(verdict) == (VIOLATION, "coordinator", "g0", "admit")
    assert "source_fits is false" in verdict.false[0]


def test_a_generation_with_givens_of_its_own(tmp_path: Path) -> None:
    """Goal: opening lines count. Method: a request that needs two credits where there is one."""
    opened = [Line(TraceEvent(process="coordinator", tid="g0", given={"source_need": 2, "destination_need": 1}))]
    verdict = replay(SPEC, changed(HANDOFF, "coordinator", opened + HANDOFF.streams["coordinator"]))
    assert only(verdict) == (VIOLATION, "coordinator", "g0", "admit")
    assert "(source is 1, Coordinator.source_need is 2)" in verdict.false[0]

    late = HANDOFF.streams["coordinator"] + opened
    verdict = replay(SPEC, changed(HANDOFF, "coordinator", late))
    assert "is opened in 'coordinator', where it began before" in verdict.reason


def test_the_work_is_linear() -> None:
    """Goal: ten thousand lines in time proportional to them. Method: count the work at three lengths."""
    works = {}
    for steps in (1000, 3000, 10000):
        walk = long_walk(SPEC, steps, seed=11)
        verdict = replay(SPEC, walk.trace())
        assert verdict.ok and verdict.step == steps and walk.fresh > steps // 40, verdict.show()
        works[steps] = verdict.work / steps

    each_once = 1 + sum(p.kind == "always" for p in SYSTEM.properties)
    assert works[10000] < each_once and works[10000] < 1.1 * works[1000], works


def test_one_wrong_line_among_ten_thousand(tmp_path: Path) -> None:
    """Goal: it is found, and named with its line in its file. Method: remove one posting near the end."""
    walk = long_walk(SPEC, 10000, seed=12)
    for name, ring in walk.rings.items():
        ring.write(tmp_path / f"{name}.jsonl")
    path = tmp_path / "prefill.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    posts = [i for i, row in enumerate(rows) if '"event":"post"' in row]
    place = posts[-5]
    tid = read(path).streams["prefill"][place - 1].event.tid
    header = rows[0].replace(f'"events":{len(rows) - 1}', f'"events":{len(rows) - 2}')
    path.write_text("".join([header, *rows[1:place], *rows[place + 1 :]]))

    verdict = replay(SPEC, sorted(tmp_path.glob("*.jsonl")))

    assert verdict.kind == VIOLATION and verdict.tid == tid and verdict.at.startswith(str(path)), verdict.show()
    assert place <= int(verdict.at.rpartition(":")[2]) <= place + 60 and verdict.step > 8000


def test_which_properties_one_generation_can_answer() -> None:
    """Goal: nothing that needs the whole is judged by a part. Method: the shipped properties, and their forms."""
    kinds = {p.name: per_generation(p.formula, SYSTEM) for p in SYSTEM.properties if p.kind == "always"}
    assert not kinds["credits_are_promises"] and kinds["no_write_after_reuse"] and kinds["one_owner_each"]
    witness = next(p for p in SYSTEM.properties if p.name == "a_handoff_completes")
    assert not per_generation(witness.formula, SYSTEM), "some generation of many is no question to one"
    assert replace(witness, kind="always").kind == "always"
