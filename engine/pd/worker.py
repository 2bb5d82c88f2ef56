"""One stage's process: a device, an engine core, a NIXL agent, and a loop between the pipe and the work.

The configuration arrives as a spawned copy, owned by the entry point; what goes back in `Ready` is
runtime facts only. The process ends when it is told to, when it is killed, or when the coordinator is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import uuid
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.local import EngineCore
from engine.models.loading import load_model
from engine.models.registry import ModelConfig, read_config
from engine.pd import messages as m
from engine.pd.config import PDConfig
from engine.pd.nixl import NixlConnector
from engine.pd.segments import check_limits
from engine.pd.stage import DecodeStageConnector, PDStageConnector, PrefillStageConnector


@dataclass(frozen=True)
class WorkerOrder:
    """What a worker is spawned with. role: prefill or decode."""

    role: str
    model_dir: Path
    model_config: ModelConfig
    dtype: torch.dtype
    device: str
    cache: CacheConfig
    scheduler: SchedulerConfig
    pd: PDConfig
    environment: dict[str, str]


def run_worker(pipe: Connection, order: WorkerOrder) -> None:
    """Entry point of the spawned process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides; a terminal's Ctrl-C goes to it
    os.environ.update(order.environment)
    try:
        StageWorker(pipe, order).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the coordinator is gone: nobody could be told anything
    except Exception as error:
        traceback.print_exc()
        try:
            pipe.send_bytes(m.encode(m.Fatal(f"{type(error).__name__}: {error}")))
        except OSError:
            sys.exit(1)
        _await_end(pipe)
        sys.exit(1)


def _await_end(pipe: Connection) -> None:
    """Keep the memory and do nothing until the coordinator ends this process or is gone: fail closed."""
    while True:
        try:
            pipe.recv_bytes()
        except (EOFError, OSError):
            return


class StageWorker:
    """The process's loop around one StageConnector."""

    def __init__(self, pipe: Connection, order: WorkerOrder) -> None:
        self.pipe, self.order = pipe, order
        torch.set_num_threads(order.pd.threads)
        config = read_config(order.model_dir)
        if config != order.model_config:
            raise ValueError(f"the checkpoint in {order.model_dir} changed after the engine read its config")
        model = load_model(order.model_dir, order.dtype, order.device)
        # every request has at least one page in each plane, so a page credit always implies a staging slot
        slots = max(1, order.cache.num_blocks // config.loops)
        self.core = EngineCore(model, order.cache, order.scheduler, order.device, order.role, slots)  # type: ignore[arg-type]
        self.link = NixlConnector()
        storage = self.core.storage
        for name, tensor in (("key", storage.keys), ("value", storage.values), ("hidden", storage.hidden)):
            self.link.register_tensor(name, tensor)
        kind = PrefillStageConnector if order.role == "prefill" else DecodeStageConnector
        self.stage: PDStageConnector = kind(self.core, self.link, order.pd, self.say)
        check_limits(self.stage.geometry, order.pd.partition_bytes, order.pd.partition_descriptors)
        self.incarnation = uuid.uuid4().hex

    def say(self, message: m.FromWorker) -> None:
        """Send one message to the coordinator."""
        self.pipe.send_bytes(m.encode(message))

    def run(self) -> None:
        """Ready, then work until told to stop."""
        self.say(
            m.Ready(
                self.incarnation,
                os.getpid(),
                self.link.name,
                self.link.metadata(),
                self.stage.geometry,
                self.order.scheduler.max_num_seqs,
                self.core.fingerprint(),
            )
        )
        with torch.inference_mode():
            while True:
                worked = False
                while self.pipe.poll(0):
                    worked = True
                    if not self.take(m.decode_to_worker(self.pipe.recv_bytes())):
                        return
                if not self.stage.tick() and not worked:
                    self.pipe.poll(self.order.pd.poll_interval_s if self.stage.waiting_for_peer() else 0.002)

    def take(self, message: m.ToWorker) -> bool:
        """Handle one message; False ends the process in good order."""
        if isinstance(message, m.RequestMessage):
            self.stage.on_message(message)
        elif isinstance(message, m.Connect):
            self.stage.connect(message)
            self.say(m.Connected())
        elif isinstance(message, m.Control):
            self.control(message)
        elif isinstance(message, m.Stop):
            self.stop()
            return False
        return True

    def control(self, message: m.Control) -> None:
        """Answer one question; an unknown one is refused by name, never ignored."""
        questions: dict[str, Any] = {
            "obligations": self.stage.obligations,
            "pages": self.pages,
            "raw_pages": self.raw_pages,
            "metrics": self.metrics,
        }
        ask = questions.get(message.name)
        if ask is None:
            known = ", ".join(questions)
            self.say(m.ControlReply(message.id, None, f"no control '{message.name}'; known: {known}"))
            return
        try:
            self.say(m.ControlReply(message.id, ask(**message.args), ""))
        except (KeyError, TypeError, ValueError) as error:
            self.say(m.ControlReply(message.id, None, f"{type(error).__name__}: {error}"))

    def pages(self, tid: str, tokens: int) -> dict[str, Any]:
        """KV bytes of the first `tokens` positions of a generation: per plane, keys and values of [layer, token, ...].

        For tests and diagnosis: it copies.
        """
        tables = self.core.block_tables(tid)
        size = self.core.storage.block_size
        planes = []
        for table in tables:
            count = -(-tokens // size)
            keys = torch.cat([self.core.storage.keys[b] for b in table[:count]], dim=1)[:, :tokens].contiguous()
            values = torch.cat([self.core.storage.values[b] for b in table[:count]], dim=1)[:, :tokens].contiguous()
            planes.append([_raw(keys), _raw(values)])
        return {"tables": tables, "planes": planes}

    def raw_pages(self, tid: str, pages: int) -> dict[str, Any]:
        """The first `pages` pages of a generation as they lie: per plane and page, keys and values. Copies."""
        storage = self.core.storage
        tables = self.core.block_tables(tid)
        return {"pages": [[[_raw(storage.keys[b]), _raw(storage.values[b])] for b in t[:pages]] for t in tables]}

    def metrics(self) -> dict[str, float]:
        """Counters, and how much of the pool is in use by the allocator's own reading."""
        pages = self.core.pages
        return {**self.stage.metrics, "unknown": float(self.stage.unknown), "free_blocks": float(pages.free_blocks)}

    def stop(self) -> None:
        """Write the trace, say the last words, give the memory up."""
        self.core.check_integrity()
        if self.order.pd.trace_dir is not None:
            self.stage.records.trace.write(
                self.order.pd.trace_dir / f"{self.order.role}.jsonl", **trace_header(self.stage, self.incarnation)
            )
        self.say(m.Stopped(self.metrics()))
        self.link.close()


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().reshape(-1).view(torch.uint8).numpy())


def trace_header(stage: PDStageConnector, incarnation: str) -> dict[str, Any]:
    """What a trace file says about the process that wrote it."""
    return {"process": stage.records.process, "incarnation": incarnation}
