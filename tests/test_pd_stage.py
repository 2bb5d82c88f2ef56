"""D's side by itself, with device events that take their time, as on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from reference_ouro import write_checkpoint

from engine.config import CacheConfig, SamplingParams, SchedulerConfig
from engine.local import EngineCore
from engine.models.loading import load_model
from engine.pd import messages as m
from engine.pd.config import PDConfig
from engine.pd.stage import DecodeStageConnector


class Later:
    """A device event that is done when the test says so."""

    ready = False

    def done(self) -> bool:
        return self.ready


class Inbox:
    """Where notifications come from in this test; no transport takes part in what it shows."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, bytes]] = []

    def notifications(self) -> list[tuple[str, bytes]]:
        arrived, self.arrived = self.arrived, []
        return arrived


def test_no_step_runs_before_its_hold_is_recorded(tmp_path: Path) -> None:
    """Goal: device work is in the hold set before it is enqueued, also while the row's copy still runs. Method: the
    event of that copy is late; nothing may be stepped until it is done, and then the step is a hold."""
    model = load_model(write_checkpoint(tmp_path, seed=1))
    core = EngineCore(model, CacheConfig(64, 4), SchedulerConfig(max_num_seqs=2), "cpu", "decode", 4)
    said: list[Any] = []
    inbox = Inbox()
    stage = DecodeStageConnector(core, inbox, PDConfig(), said.append)  # type: ignore[arg-type]
    copied, activate = Later(), core.activate
    core.activate = lambda tid: (activate(tid), copied)[1]  # type: ignore[method-assign]
    stage.on_message(m.Reserve("t", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))
    stage.on_message(m.CommitToDecode("t", 1))
    inbox.arrived = [("p", msgspec.msgpack.encode(("t", 0)))]

    for _ in range(3):
        stage.tick()
    assert stage.records.holds("t", stage.machine) == {"binding": True}
    assert not [s for s in said if isinstance(s, m.Token)], "a step ran that no hold covers"

    stepped, last = Later(), core.last_event
    core.last_event = lambda: stepped  # type: ignore[method-assign]
    copied.ready = True
    stage.tick()
    assert stage.records.holds("t", stage.machine)["kernels"] == 1
    stage.on_message(m.Cancel("t"))
    assert stage.records.state("t", stage.machine) == "retiring", "the step still runs: its pages must stay"
    assert core.pages.free_blocks < 64
    stepped.ready, core.last_event = True, last  # type: ignore[method-assign]
    stage.tick()
    assert isinstance(said[-1], m.DestinationReleased)
    assert core.pages.free_blocks == 64
