"""The compiled classes: against the system spelled out, and each promise of theirs by itself."""

from __future__ import annotations

import ast
import gc
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import Walk, long_walk, rare_faults, scope_walk

from rlt_fsm import codegen
from rlt_fsm import compile as compile_module
from rlt_fsm.compile import INDEX_MAX, CompiledProcess, Effect, Message, compile_machine, compile_process
from rlt_fsm.errors import KINDS, IllegalEvent, SpecError
from rlt_fsm.expr import BOOL, Const, Ref, Seen, evaluate
from rlt_fsm.load import load
from rlt_fsm.model import Ignore, System
from rlt_fsm.trace import TraceRing

SPEC = load()
SYSTEM = SPEC.need_system()
CREDITS = {"credits": {"source_capacity": 2, "destination_capacity": 2, "compute_capacity": 1}}


@pytest.mark.parametrize("scope", SYSTEM.scopes)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rare=st.booleans())
def test_compiled_and_ground_walk_together(scope: str, seed: int, rare: bool) -> None:
    """Goal: one semantics. Method: random walks over the spelled-out system; `Walk` compares values, moves, outputs."""
    walk = scope_walk(SPEC, scope, seed).run(400, rare_faults if rare else None)

    assert walk.steps


def test_long_walks_fire_every_row_of_the_shipped_tables() -> None:
    """Goal: the comparison above leaves no row out. Method: count the rows that seeded walks fire, in every scope."""
    fired: set[tuple[str, int]] = set()
    ignored: set[tuple[str, str]] = set()
    walks = [scope_walk(SPEC, scope, seed) for scope in SYSTEM.scopes for seed in range(25)]
    for walk in walks:
        for step in walk.run(200, rare_faults).steps:
            for instance, row in step.rows:
                machine = _machine(SYSTEM, instance)
                if isinstance(row, Ignore):
                    ignored.add((machine, row.event))
                else:
                    fired.add((machine, row.place))
    wanted = {
        (m.name, t.place) for m in SYSTEM.machines.values() for t in m.transitions if m.name not in SYSTEM.standalone
    }

    assert len(wanted - fired) <= len(wanted) // 20, f"walks miss {sorted(wanted - fired)}"
    assert len(ignored) > 10


def _machine(system: System, instance: str) -> str:
    name = instance.partition("[")[0]
    for process in system.processes.values():
        if name in process.shared:
            return process.shared[name].machine
    return name


@cache
def with_cases_in_line(process: str, cases: int) -> CompiledProcess:
    """A process whose methods tell so many cases apart by themselves; with more, they go by tables."""
    with patch.object(codegen, "CASES_IN_LINE", cases):
        return compile_process(SYSTEM, process)


@pytest.mark.parametrize("cases", [1, codegen.CASES_IN_LINE])
@pytest.mark.parametrize("process", SYSTEM.processes)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_state_any_event_as_the_reference_reading_says(process: str, cases: int, data: st.DataObject) -> None:
    """Goal: equality also where no run comes. Method: set all variables at random, fire any event, compare.

    The oracle reads the tables with `evaluate`: first row that holds per machine, all values from before.
    """
    compiled = with_cases_in_line(process, cases)
    instances = {i.name: i for i in (*compiled.record_class.plan.instances, *compiled.shared_class.plan.instances)}
    shared_given = {s.name: dict.fromkeys(s.given, 3) for s in SYSTEM.processes[process].shared.values()}
    shared = compiled.make_shared(shared_given)
    record = compiled.make_record(shared, "g")
    before: dict[tuple[str, str], Any] = {}
    for item in instances.values():
        owner = record if item.place == "record" else shared
        before[item.name, "state"] = data.draw(st.integers(0, len(item.machine.states) - 1), f"{item.name}.state")
        for var in item.machine.vars.values():
            kind = st.booleans() if var.type == BOOL else st.integers(0, 7 if isinstance(var.type, Seen) else 3)
            before[item.name, var.name] = data.draw(kind, f"{item.name}.{var.name}")
        for name in ("state", *item.machine.vars):
            setattr(owner, f"{item.name}_{name}", before[item.name, name])
        for name in item.machine.given:
            before[item.name, name] = getattr(owner, f"{item.name}_{name}")
    event = data.draw(st.sampled_from(list(compiled.record_class.plan.events.values())), "event")
    fields = {
        name: data.draw(st.booleans() if var.type == BOOL else st.integers(0, 3), name)
        for name, var in event.fields.items()
    }

    after, outputs, refused, moves = dict(before), [], False, False
    for member in event.members:
        item = member

        def value(ref: Ref, item: Any = item) -> Any:
            if ref.field:
                return before[item.siblings[ref.name][1], ref.field]
            return before[item.name, ref.name] if (item.name, ref.name) in before else fields[ref.name]

        state = list(item.machine.states)[before[item.name, "state"]]
        rows = [*item.machine.rows(event.name, state), *item.machine.ignored(event.name, state)]
        row = next((r for r in rows if all(evaluate(n, value) for n in r.when.values())), None)
        refused |= row is None
        if row is None or isinstance(row, Ignore):
            continue
        moves = True
        if row.target is not None:
            after[item.name, "state"] = list(item.machine.states).index(row.target)
        for name, node in row.set.items():
            after[item.name, name] = evaluate(node, value)
        outputs += [Message(s.to, s.message, {k: evaluate(n, value) for k, n in s.fields.items()}) for s in row.send]
        outputs += [Effect(name) for name in row.do]

    assert getattr(record, f"can_{event.method}")(**fields) == (moves and not refused)
    if refused:
        with pytest.raises(IllegalEvent):
            getattr(record, event.method)(**fields)
        after = before
    else:
        assert getattr(record, event.method)(**fields) == tuple(outputs)
    for (name, var), want in after.items():
        owner = record if instances[name].place == "record" else shared
        assert getattr(owner, f"{name}_{var}") == want, f"{name}.{var}"


def test_every_row_reads_the_values_from_before(tmp_path: Path) -> None:
    """Goal: machines that read one another's changing values agree on the old ones. Method: two that swap."""
    (tmp_path / "swap.yaml").write_text(SWAP, encoding="utf-8")
    compiled = compile_process(load([tmp_path]).need_system(), "one")
    record = compiled.make_record(compiled.make_shared({}), "g")
    record.A_x, record.B_x, record.shared.c_x = 1, 2, 3

    out = record.swap(by=5)

    assert (record.A_x, record.B_x, record.shared.c_x) == (2 + 5, 3, 1)
    assert out == (told(1, 2), Effect("ring"), told(2, 2))
    assert (record.state("A"), record.state("B")) == ("on", "on")


def told(was: int, now: int) -> Message:
    """What each of the two machines sends."""
    return Message("one", "told", {"was": was, "now": now})


SWAP = """
machine: A
per: generation
doc: It takes the value of B.
reads: {B: B}
takes: {swap: {by: {type: counter}}}
vars: {x: {type: counter, doc: A number.}}
states: {off: {initial: true}, on: {}}
transitions:
  - on: swap
    from: off
    to: on
    when: {b_is_off: B.state == off}
    set: {x: B.x + by}
    send: {one: {told: {was: x, now: B.x}}}
    do: [ring]
  - {on: state, from: on, to: off}
---
machine: B
per: generation
doc: It takes the value of c, if A was off.
reads: {A: A, c: C}
vars: {x: {type: counter, doc: A number.}}
states: {off: {initial: true}, on: {}}
transitions:
  - on: swap
    from: [off, on]
    to: on
    when: {a_is_off: A.state == off}
    set: {x: c.x}
    send: {one: {told: {was: x, now: x}}}
ignore:
  - {on: swap, from: on, when: {a_is_on: A.state == on}, why: "Never tried: A refuses."}
---
machine: C
doc: It takes the value of A.
reads: {A: A}
vars: {x: {type: counter, doc: A number.}}
states: {only: {initial: true}}
transitions: [{on: swap, from: only, set: {x: A.x}}]
---
system: swapping
doc: Three machines that pass a value round.
instances: {r: {of: generation}}
processes: {one: {machines: [A, B], shared: {c: {machine: C}}}}
channels: {loop: {from: one, to: one, per: r, messages: [told]}}
effects: {ring: {doc: Ring.}}
"""


@pytest.mark.parametrize(
    ("event", "after", "sent"),
    [("forth", (5, 20), ()), ("back", (5, 20), ()), ("tell", (5, 30), (20,)), ("grow", (21, 21), (20,))],
)
def test_an_update_never_sees_another_update(
    event: str, after: tuple[int, ...], sent: tuple[int, ...], tmp_path: Path
) -> None:
    """Goal: `set` and `send` read values from before, in any order. Method: what one row reads, once, it also sets."""
    (tmp_path / "chain.yaml").write_text(CHAIN, encoding="utf-8")
    spec = load([tmp_path])
    compiled = compile_process(spec.need_system(), "one")
    for made in (compiled.make_record(compiled.make_shared({}), "g"), compile_machine(spec.machines["Chain"])()):
        made.Chain_x, made.Chain_y = 20, 30
        out = made.fire(event)

        assert (made.Chain_x, made.Chain_y) == after
        assert out == tuple(Message("one", "told", {"x": x}) for x in sent)


CHAIN = """
machine: Chain
per: generation
doc: Two numbers.
vars: {x: {type: counter, doc: A number.}, y: {type: counter, doc: A number.}}
states: {only: {initial: true}}
transitions:
  - {on: forth, from: only, set: {x: '5', y: x}}
  - {on: back, from: only, set: {y: x, x: '5'}}
  - {on: tell, from: only, set: {x: '5'}, send: {one: {told: {x: x}}}}
  - {on: grow, from: only, set: {x: x + 1, y: x + 1}, send: {one: {told: {x: x}}}}
---
system: chain
doc: One machine.
instances: {r: {of: generation}}
processes: {one: {machines: [Chain]}}
channels: {loop: {from: one, to: one, per: r, messages: [told]}}
"""


def test_a_refusal_changes_nothing_and_says_why() -> None:
    """Goal: IllegalEvent names each false conjunct with its values. Method: post with nothing ready, quarantined."""
    compiled = compile_process(SYSTEM, "prefill")
    ring = TraceRing(16)
    record = compiled.make_record(compiled.make_shared({}, ring), "g1")
    record.prefill()
    record.shared.domain_state = 1
    before, written = record.values(), len(ring)

    with pytest.raises(IllegalEvent) as caught:
        record.post()

    assert caught.value.states == {"Export": "computing", "SourceRetirement": "held"}
    assert caught.value.detail == (
        "Export: computed is false: ready > 0 (ready is 0)",
        "Export: domain_clear is false: domain.state == clear (domain.state is quarantined)",
    )
    assert record.values() == before and len(ring) == written and not record.can_post()


def test_a_refusal_by_the_last_machine_undoes_the_others() -> None:
    """Goal: a joint event is all or nothing. Method: admit where the coordinator would and the credits would not."""
    compiled = compile_process(SYSTEM, "coordinator")
    none = {"credits": CREDITS["credits"] | {"compute_capacity": 0}}
    shared = compiled.make_shared(none, start={"prefill_worker": "serving", "decode_worker": "serving"})
    record = compiled.make_record(shared, "g1")
    record.submit()
    before = {**record.values(), **shared.values()}

    with pytest.raises(IllegalEvent, match=r"credits: compute_fits is false: compute > 0 \(compute is 0\)"):
        record.admit()

    assert {**record.values(), **shared.values()} == before


def test_can_tells_a_move_from_an_ignored_event() -> None:
    """Goal: `can` is False where every machine only ignores. Method: a second cancel, which does nothing."""
    compiled = compile_process(SYSTEM, "coordinator")
    shared = compiled.make_shared(CREDITS, start={"prefill_worker": "serving", "decode_worker": "serving"})
    record = compiled.make_record(shared, "g1")
    record.submit()
    record.admit()

    assert record.can_cancel() and record.can("cancel")
    assert record.cancel() != ()
    assert record.state("Coordinator") == "closing"
    assert not record.can_cancel() and record.cancel() == ()


@pytest.mark.parametrize("value", [-1, True, "2", 1.0, None, INDEX_MAX])
def test_a_field_of_the_wrong_kind_is_refused(value: object) -> None:
    """Goal: a wild value changes nothing. Method: sequence numbers that are none, and one that would fill memory."""
    compiled = compile_process(SYSTEM, "decode")
    record = compiled.make_record(compiled.make_shared({"slots": {"capacity": 1}}), "g1")
    record.reserve()
    before = record.values()

    with pytest.raises(IllegalEvent, match="field 'seq' must be an int from 0"):
        record.notified(seq=value)
    assert record.values() == before and not record.can_notified(seq=value)


def test_events_by_name_fail_closed() -> None:
    """Goal: an unknown event or field never passes. Method: `fire` with words that no table has."""
    compiled = compile_process(SYSTEM, "decode")
    record = compiled.make_record(compiled.make_shared({"slots": {"capacity": 1}}), "g1")
    record.reserve()

    with pytest.raises(IllegalEvent, match="did you mean 'commit'"):
        record.fire("comit", count=1)
    with pytest.raises(IllegalEvent, match="it carries fields count, not number"):
        record.fire("commit", number=1)
    with pytest.raises(IllegalEvent, match="fatal"):
        record.shared.fire("slots", "fatal")
    assert record.fire("commit", count=0) == () and record.receive() == (Message("coordinator", "received", {}),)


def test_shared_instances_move_by_events_addressed_to_them() -> None:
    """Goal: `fire`, `can` and the direct methods of a shared instance. Method: one worker from start to its end."""
    compiled = compile_process(SYSTEM, "coordinator")
    shared = compiled.make_shared(CREDITS)

    assert shared.fire("prefill_worker", "is_ready") == ()
    assert shared.can_prefill_worker_connected() and not shared.can("decode_worker", "connected")
    assert shared.prefill_worker_fatal() == (Effect("terminate_prefill"),)
    assert shared.values()["prefill_worker.state"] == "failing" and shared.state("decode_worker") == "starting"
    with pytest.raises(
        IllegalEvent, match="prefill_worker: no row for 'stop' in state 'failing'; it has one in draining"
    ):
        shared.prefill_worker_stop()


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({}, "must be given 'source_capacity'"),
        ({"credit": {}}, "no shared instance 'credit' to give to; did you mean 'credits'"),
        ({"credits": CREDITS["credits"] | {"sauce": 1}}, "takes no 'sauce'"),
        ({"credits": CREDITS["credits"] | {"compute_capacity": -1}}, "must be a natural number"),
        ({"credits": CREDITS["credits"] | {"compute_capacity": True}}, "must be a natural number"),
    ],
)
def test_a_wrong_given_is_said_at_once(given_: dict[str, dict[str, int]], message: str) -> None:
    """Goal: capacities are never guessed. Method: missing, unknown and impossible ones."""
    with pytest.raises(ValueError, match=message):
        compile_process(SYSTEM, "coordinator").make_shared(given_)


def test_a_record_takes_its_own_givens() -> None:
    """Goal: a generation may need more credits than the system file's default. Method: one that takes both."""
    compiled = compile_process(SYSTEM, "coordinator")
    shared = compiled.make_shared(CREDITS, start={"prefill_worker": "serving", "decode_worker": "serving"})
    record = compiled.make_record(shared, "g1", {"source_need": 2})
    record.submit()

    assert record.admit() == (Message("decode", "reserve", {}),)
    assert (shared.credits_source, shared.credits_destination, shared.values()["credits.compute"]) == (0, 1, 0)
    with pytest.raises(ValueError, match="takes no 'sources'"):
        compiled.make_record(shared, "g2", {"sources": 2})


def test_a_machine_by_itself() -> None:
    """Goal: standalone machines, and siblings as attributes. Method: a write handle; an Export whose domain breaks."""
    handle = compile_machine(SPEC.machines["WriteHandle"])()
    assert handle.post() == () and handle.state() == "posted" and handle.can("done") and not handle.can_drop()
    with pytest.raises(IllegalEvent):
        handle.drop()
    export = compile_machine(SPEC.machines["Export"])()
    export.prefill()
    export.event_done(parts=2)
    assert export.post() == (Effect("post_partition"),)
    export.domain_state = 1
    with pytest.raises(IllegalEvent, match="domain_clear"):
        export.post()
    assert export.values()["Export.ready"] == 1


def test_an_event_named_as_a_method_of_the_class(tmp_path: Path) -> None:
    """Goal: no event hides what a record can do. Method: an event called `state`."""
    (tmp_path / "swap.yaml").write_text(SWAP, encoding="utf-8")
    compiled = compile_process(load([tmp_path]).need_system(), "one")
    record = compiled.make_record(compiled.make_shared({}), "g")
    record.swap(0)
    record.state_()
    assert record.state("A") == "off" and not record.can("state")


def test_a_field_that_cannot_be_a_parameter(tmp_path: Path) -> None:
    """Goal: a name that would break the source is refused. Method: a field called `self`."""
    (tmp_path / "swap.yaml").write_text(SWAP.replace("by:", "self:").replace("+ by", "+ self"), encoding="utf-8")
    with pytest.raises(SpecError, match="self"):
        compile_process(load([tmp_path]).need_system(), "one")


def test_every_refusal_to_compile_is_of_a_documented_kind() -> None:
    """Goal: a reader can look up what the compiler says. Method: each word given to `stop` is in the table."""
    said: set[str] = set()
    for module in (codegen, compile_module):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "stop":
                said.add(ast.literal_eval(node.args[0]))

    assert said and said <= set(KINDS)


def test_an_addressed_event_cannot_read_a_generation(tmp_path: Path) -> None:
    """Goal: no guard runs without the values it reads. Method: an action that addresses `c`, which reads A."""
    text = SWAP + "actions: {swap: {event: one.swap, to: c, doc: Wrong.}}\n"
    (tmp_path / "swap.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(SpecError, match=r"addressed to 'c' alone, yet a row of it reads 'A\.x'"):
        compile_process(load([tmp_path]).need_system(), "one")


def test_source_holds_no_text_of_the_spec() -> None:
    """Goal: documents cannot become code. Method: no doc string of the spec stands in the generated source."""
    for process in SYSTEM.processes:
        source = compile_process(SYSTEM, process).source
        for name in SYSTEM.processes[process].machines:
            machine = SYSTEM.machines[name]
            texts = [machine.doc, *(s.doc for s in machine.states.values()), *(t.doc for t in machine.transitions)]
            assert not [t for t in texts if t and t in source]


def test_a_record_is_small() -> None:
    """Goal: no dict per generation. Method: the size of a record is its header and one pointer per slot."""
    for process in SYSTEM.processes:
        compiled = compile_process(SYSTEM, process)
        given_ = {s.name: dict.fromkeys(s.given, 1) for s in SYSTEM.processes[process].shared.values()}
        record = compiled.make_record(compiled.make_shared(given_), "g1")

        assert not hasattr(record, "__dict__")
        assert sys.getsizeof(record) <= 32 + 8 * len(type(record).__slots__) and gc.is_tracked(record)
        assert len(type(record).__slots__) <= 16


def test_a_walk_finds_a_wrong_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the comparison can fail. Method: a record whose `post` counts twice."""
    walk = Walk(SPEC, {"r": 1, "b": 1, "s": 1}, LONG, {"prefill_worker": "serving", "decode_worker": "serving"}, 3)
    kind: Any = walk.compiled["prefill"].record_class
    right = kind.post

    def wrong(self: Any) -> Any:
        out = right(self)
        self.Export_posted += 1
        return out

    monkeypatch.setattr(kind, "post", wrong)
    with pytest.raises(AssertionError, match=r"Export\[0\].posted is 2, not 1"):
        walk.run(200)


LONG = {"chunks": 1, "steps": 1, "decode_slots": 1, "compute_slots": 1, "source_storage": 1, "destination_storage": 1}


def test_places_are_used_again_and_again() -> None:
    """Goal: an old generation leaves nothing in shared instances. Method: a long walk; all credits return."""
    walk = long_walk(SPEC, 3000, seed=7)
    assert walk.fresh > 50
    names = [n for n in walk.state if n.startswith("credits.") and not n.endswith("state")]
    walk.run(3000, lambda s: 0.0 if s.action in ("submit", "admit", "cancel", "echo") else 1.0)

    assert {n: walk.shared["coordinator"].values()[n] for n in names} == {n: walk.first[n] for n in names}
    assert all(isinstance(var.init, Const) for var in walk.flat.vars.values())
