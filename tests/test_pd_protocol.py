"""Engine and spec name the same messages and effects, and the coordinator's core by itself."""

from __future__ import annotations

import pytest

from engine.config import SamplingParams
from engine.pd import messages as m
from engine.pd import protocol
from engine.pd.coordinator import CoordinatorCore, ToWorker
from engine.pd.engine import PDEngine
from engine.pd.records import AUTOMATIC
from engine.pd.stage import DecodeStageConnector, PrefillStageConnector
from rlt_fsm.errors import IllegalEvent

SHELLS = {"coordinator": PDEngine, "prefill": PrefillStageConnector, "decode": DecodeStageConnector}
PARAMS = SamplingParams(max_tokens=4)


def test_every_channel_message_has_its_class_and_no_class_is_idle() -> None:
    """Goal: what the spec sends can be sent. Method: both lists, both ways."""
    channels = protocol.system().channels
    tables = {
        "to_prefill": m.TO_PREFILL,
        "to_decode": m.TO_DECODE,
        "from_prefill": m.FROM_PREFILL,
        "from_decode": m.FROM_DECODE,
    }

    for name, table in tables.items():
        assert list(table) == list(channels[name].messages)
    assert set(channels) - set(tables) == {"prefill_alarm"}


def test_every_effect_has_its_method_in_the_shell_that_must_carry_it_out() -> None:
    """Goal: no effect is asked for in vain. Method: the tables of each process against the methods of its shell."""
    system = protocol.system()
    asked = set()
    for process in system.processes.values():
        machines = [*process.machines, *(s.machine for s in process.shared.values())]
        effects = {e for name in machines for row in system.machines[name].transitions for e in row.do}
        missing = [e for e in effects if not hasattr(SHELLS[process.name], f"do_{e}")]
        assert not missing, f"{process.name} cannot carry out {missing}"
        asked |= effects
    assert asked == set(system.effects)


def test_automatic_events_are_internal_events_without_conditions_of_the_world() -> None:
    """Goal: nothing is fired that the spec does not offer there. Method: each name against the system's actions."""
    for process, events in AUTOMATIC.items():
        for event in events:
            action = next(a for a in protocol.system().actions.values() if (a.process, a.event) == (process, event))
            assert action.offered and not action.fields and not action.to
            assert getattr(action.when, "value", None) is True


@pytest.mark.parametrize(
    "message",
    [
        m.Reserve("t", [1, 2], SamplingParams(max_tokens=3, seed=5, stop_token_ids=(7,))),
        m.Prefill("t", [1], PARAMS, [[0, 1], [2, 3]], 4, 0),
        m.CommitToDecode("t", 3),
        m.Stop(),
        m.Control(1, "obligations", {}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive_the_pipe(message: m.ToWorker) -> None:
    """Goal: nothing is lost or confused in encoding. Method: round trip of each kind."""
    assert m.decode_to_worker(m.encode(message)) == message


class Talk:
    """A coordinator core, with a clock that ticks at every word."""

    def __init__(self, **changes: int) -> None:
        values = {
            "source_credits": 8,
            "destination_credits": 8,
            "compute_credits": 2,
            "max_admission_bypasses": 2,
            "trace_capacity": 1000,
        }
        self.core = CoordinatorCore(**(values | changes))
        self.now = 0.0
        for instance in ("prefill_worker", "decode_worker"):
            for event in ("is_ready", "connected"):
                self.core.worker(instance, event, 0.0)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def submit(self, tid: str, need: int = 4) -> list[str]:
        self.core.submit(tid, [1, 2, 3], PARAMS, need, need, self.tick())
        return self.admit()

    def admit(self) -> list[str]:
        return said(self.core.admit(self.tick()))

    def hear(self, message: m.RequestMessage) -> list[str]:
        return said(self.core.handle(message, self.tick()))


def said(items: list[object]) -> list[str]:
    """`decode:Reserve` and effects by name."""
    return [f"{i.process}:{type(i.message).__name__}" if isinstance(i, ToWorker) else i.name for i in items]


def complete(talk: Talk, tid: str) -> None:
    """Everything a generation's workers say, in order."""
    assert talk.hear(m.Reserved(tid, [[0]], 0, 0)) == ["prefill:Prefill"]
    assert talk.hear(m.PrefillComplete(tid)) == []
    assert talk.hear(m.CommitToCoordinator(tid, 2)) == ["decode:CommitToDecode"]
    assert talk.hear(m.Received(tid)) == ["prefill:Ack"]
    for message in (m.SourceReleased(tid, 2), m.Activated(tid), m.Finished(tid, "stop"), m.DestinationReleased(tid)):
        assert talk.hear(message) == []


def test_a_whole_handoff_returns_every_credit_and_passes_the_milestones() -> None:
    """Goal: the coordinator's side by itself. Method: say every message of one generation."""
    talk = Talk()
    assert talk.submit("a") == ["decode:Reserve"]
    assert talk.core.credits() == {"source": 4, "destination": 4, "compute": 1, "live": 1}

    complete(talk, "a")

    assert talk.core.credits() == {"source": 8, "destination": 8, "compute": 2, "live": 0}
    (generation,) = talk.core.take_retired()
    assert list(generation.timeline) == [
        "reserved", "computed", "submitted", "received", "activated", "finished", "retired",
    ]  # fmt: skip
    assert talk.core.generations == {} and talk.core.records.of == {}


def test_a_cancel_before_the_reservation_reply_never_reaches_prefill() -> None:
    """Goal: P never starts for a dead request. Method: cancel while reserving, then let the reply come."""
    talk = Talk()
    talk.submit("a")

    assert said(talk.core.cancel("a", "abort", talk.tick())) == ["decode:Cancel", "decode:CancelSafe"]
    assert talk.hear(m.Reserved("a", [[0]], 0, 0)) == []
    assert talk.core.credits()["source"] == 8 and talk.core.credits()["destination"] == 4
    assert talk.hear(m.DestinationReleased("a")) == []
    assert talk.core.credits() == {"source": 8, "destination": 8, "compute": 2, "live": 0}


def test_a_cancel_after_p_released_needs_only_to_reach_decode() -> None:
    """Goal: the trap of the late cancel. Method: P's release first, then the cancel."""
    talk = Talk()
    talk.submit("a")
    for message in (
        m.Reserved("a", [[0]], 0, 0),
        m.PrefillComplete("a"),
        m.CommitToCoordinator("a", 1),
        m.Received("a"),
    ):
        talk.hear(message)
    talk.hear(m.SourceReleased("a", 1))

    assert said(talk.core.cancel("a", "abort", talk.tick())) == ["decode:Cancel"]  # it has its own evidence


def test_decode_is_told_how_many_writes_to_hear_of_after_a_cancel() -> None:
    """Goal: P's count reaches D. Method: cancel while P works, then let P say what it had posted."""
    talk = Talk()
    talk.submit("a")
    talk.hear(m.Reserved("a", [[0]], 0, 0))
    assert said(talk.core.cancel("a", "abort", talk.tick())) == ["prefill:Cancel", "decode:Cancel"]

    (told,) = talk.core.handle(m.SourceReleased("a", 3), talk.tick())

    assert told == ToWorker("decode", m.CancelSafe("a", 3))


def test_late_and_foreign_messages_change_nothing() -> None:
    """Goal: unknown and retired generations are inert. Method: say everything again after the end."""
    talk = Talk()
    talk.submit("a")
    complete(talk, "a")
    before = talk.core.credits()

    for message in (m.Reserved("a", [[0]], 0, 0), m.SourceReleased("a", 2), m.Finished("zzz", "stop")):
        assert talk.hear(message) == []
    assert talk.core.cancel("a", "abort", talk.tick()) == []
    assert talk.core.credits() == before


def test_a_message_that_the_protocol_excludes_is_refused_with_the_reason() -> None:
    """Goal: fail closed. Method: a receipt before any commit; nothing has changed after it."""
    talk = Talk()
    talk.submit("a")
    state = talk.core.records.of["a"].values()

    with pytest.raises(IllegalEvent, match="'received' in Coordinator=reserving"):
        talk.hear(m.Received("a"))
    assert talk.core.records.of["a"].values() == state


def test_small_requests_pass_a_large_one_a_bounded_number_of_times() -> None:
    """Goal: no starvation. Method: one that needs everything, then small ones; two may pass it, the third waits."""
    talk = Talk(compute_credits=8)
    assert talk.submit("busy", need=2) == ["decode:Reserve"]
    assert talk.submit("large", need=8) == []
    assert talk.submit("first", need=2) == ["decode:Reserve"]
    assert talk.submit("second", need=2) == ["decode:Reserve"]
    assert talk.submit("third", need=2) == []

    for tid in ("busy", "first", "second"):
        complete(talk, tid)

    assert talk.admit() == ["decode:Reserve"]
    assert talk.core.state("large") == "reserving" and talk.core.state("third") == "waiting"


def test_a_dead_writer_is_fenced_and_a_waiting_request_refused() -> None:
    """Goal: P's death reaches every generation in its own way. Method: one waits, one has P at work."""
    talk = Talk(compute_credits=1)
    talk.submit("works")
    talk.hear(m.Reserved("works", [[0]], 0, 0))
    talk.submit("waits")

    assert said(talk.core.worker("prefill_worker", "died", talk.tick())) == ["decode:Cancel", "decode:Fence"]
    assert {g.tid for g in talk.core.take_finished()} == {"works", "waits"}
    assert [g.tid for g in talk.core.take_retired()] == ["waits"]
    talk.hear(m.DestinationReleased("works"))
    assert [g.tid for g in talk.core.take_retired()] == ["works"]


def test_a_broken_decode_worker_is_ended_only_after_its_writer() -> None:
    """Goal: D's memory outlives P also by force. Method: D says fatal; the effects in their order."""
    talk = Talk()

    assert said(talk.core.worker("decode_worker", "fatal", talk.tick())) == ["terminate_prefill"]
    assert not talk.core.can_worker("decode_worker", "end")
    talk.core.worker("prefill_worker", "died", talk.tick())
    assert said(talk.core.worker("decode_worker", "end", talk.tick())) == ["terminate_decode"]
