"""The library `transitions` as a second interpreter of every machine of the shipped spec."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_fsm.compile import Effect, Message, compile_machine
from rlt_fsm.errors import IllegalEvent
from rlt_fsm.expr import BOOL, Enum, Node, Ref, Type, refs
from rlt_fsm.interop import to_transitions
from rlt_fsm.load import load
from rlt_fsm.model import Machine

SPEC = load()


def nodes(machine: Machine) -> list[Node]:
    """Every expression of a machine's table."""
    out: list[Node] = []
    for row in machine.transitions:
        out += [*row.when.values(), *row.set.values(), *(v for send in row.send for v in send.fields.values())]
    for ignored in machine.ignores:
        out += ignored.when.values()
    return out


def sibling_reads(machine: Machine) -> list[Ref]:
    """What its rows read of siblings."""
    return list({str(r): r for node in nodes(machine) for r in refs(node) if r.field}.values())


@cache
def compiled(name: str) -> type:
    """The compiled class of a machine by itself."""
    return compile_machine(SPEC.machines[name])


def some(kind: Type) -> st.SearchStrategy[Any]:
    """Values of a type: states and enumerals by their number."""
    if kind == BOOL:
        return st.booleans()
    return st.integers(0, len(kind.names) - 1) if isinstance(kind, Enum) else st.integers(0, 3)


@pytest.mark.parametrize("name", SPEC.machines)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_both_interpreters_move_alike(name: str, data: st.DataObject) -> None:
    """Goal: two interpreters, one semantics. Method: random events, fields and sibling values, one after another.

    Siblings are given to one by number and to the other by name, in a mapping that is changed in place.
    """
    machine = SPEC.machines[name]
    givens = {key: data.draw(st.integers(0, 3), key) for key in machine.given}
    reads = sibling_reads(machine)
    siblings: dict[str, dict[str, Any]] = {alias: {} for alias in machine.reads}
    fast: Any = compiled(name)(**givens)
    slow = to_transitions(machine, given=givens, siblings=siblings)
    # most events are refused in most states, so the walk starts where the drawn states lead
    for _ in range(data.draw(st.integers(1, 25), "events")):
        for ref in reads:
            value = data.draw(some(ref.type), str(ref))
            setattr(fast, f"{ref.name}_{ref.field}", value)
            siblings[ref.name][ref.field] = ref.type.names[value] if isinstance(ref.type, Enum) else value
        here = [e for e in machine.events() if machine.rows(e, fast.state()) or machine.ignored(e, fast.state())]
        every = data.draw(st.integers(0, 4), "any event?") == 0 or not here
        event = data.draw(st.sampled_from(machine.events() if every else here), "event")
        fields = {k: data.draw(some(v.type), k) for k, v in machine.takes.get(event, {}).items()}
        before = (fast.values(), slow.values())
        try:
            outputs: Any = fast.fire(event, **fields)
        except IllegalEvent as error:
            with pytest.raises(IllegalEvent) as caught:
                slow.fire(event, **fields)
            assert caught.value.states == error.states
            assert (fast.values(), slow.values()) == before
        else:
            assert slow.fire(event, **fields) == outputs
        assert fast.values() == slow.values()


@pytest.mark.parametrize("name", SPEC.machines)
def test_the_comparison_can_fail(name: str) -> None:
    """Goal: a wrong interpreter is seen. Method: without its first row a machine refuses what the other takes."""
    machine = SPEC.machines[name]
    row = machine.transitions[0]
    less = replace(machine, transitions=machine.transitions[1:], ignores=())
    slow = to_transitions(less, given=dict.fromkeys(machine.given, 1), siblings={a: {} for a in machine.reads})

    assert row.sources[0] == machine.initial
    with pytest.raises((IllegalEvent, LookupError)):
        slow.fire(row.event)
    assert slow.models[0].state == machine.initial


class Watcher:
    """Someone's own object, with callbacks by the library's naming."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_enter_ready(self, event: Any) -> None:
        self.seen.append(f"ready by {event.event.name}")

    def on_exit_starting(self, event: Any) -> None:
        self.seen.append("left starting")


def test_callbacks_of_ones_own() -> None:
    """Goal: a machine of the spec can drive an existing object. Method: callbacks on the model and as options."""
    watcher: Any = Watcher()
    machine = to_transitions(
        SPEC.machines["PrefillWorker"],
        model=watcher,
        siblings={"credits": {"live": 0}},
        after_state_change=lambda event: watcher.seen.append(f"now {event.model.state}"),
    )

    assert watcher.is_ready() and watcher.state == "ready"  # the event, not the library's test of the state `ready`
    assert watcher.seen == ["left starting", "ready by is_ready", "now ready"]
    assert machine.fire("fatal") == (Effect("terminate_prefill"),)
    with pytest.raises(IllegalEvent, match="cannot take event 'connected' in PrefillWorker=failing"):
        watcher.connected()
    assert not hasattr(watcher, "to_stopped"), "the library's way round the table must be closed"


def test_fields_reach_guards_updates_and_messages() -> None:
    """Goal: a message's field is the value before the event. Method: an Export that posts twice and submits."""
    retirement = {"kernels": 0, "staging": False, "handles": 0}
    siblings: dict[str, dict[str, Any]] = {"SourceRetirement": retirement, "domain": {"state": "clear"}}
    machine = to_transitions(SPEC.machines["Export"], siblings=siblings)
    machine.fire("prefill")
    machine.fire("launch", final=True)
    machine.fire("event_done", parts=2)
    machine.fire("post")
    with pytest.raises(IllegalEvent, match=r"all_posted is false: ready == 0 \(ready is 1\)"):
        machine.fire("submitted")
    siblings["domain"]["state"] = "quarantined"
    with pytest.raises(IllegalEvent, match=r"domain_clear is false: domain.state == clear"):
        machine.fire("post")
    siblings["domain"]["state"] = "clear"
    machine.fire("post")

    assert machine.fire("submitted") == (Message("coordinator", "commit", {"count": 2}),)
    assert machine.values()["Export.state"] == "submitted"


def test_what_is_missing_is_said() -> None:
    """Goal: nothing defaults in silence. Method: no siblings, no givens, an unknown event."""
    with pytest.raises(ValueError, match="reads SourceRetirement, domain; siblings has "):
        to_transitions(SPEC.machines["Export"])
    with pytest.raises(ValueError, match="takes givens source_need, destination_need, not "):
        to_transitions(SPEC.machines["Coordinator"])
    with pytest.raises(LookupError, match="no event 'pots'"):
        to_transitions(SPEC.machines["WriteHandle"]).fire("pots")
