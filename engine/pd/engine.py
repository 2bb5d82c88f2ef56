"""PDEngine: the process that clients talk to. Spawns the workers, carries the coordinator's messages, ends everything.

It owns no device memory and waits for nothing but its pipes. Order of every end: P first, then D, since P
writes into D's memory (docs/decisions/0004-teardown-order.md).
"""

from __future__ import annotations

import multiprocessing
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from engine.config import CacheConfig, ConfigError, SamplingParams, SchedulerConfig
from engine.execute.sampling import TopLogprobs
from engine.limits import check_request
from engine.models.registry import read_config
from engine.models.tokenizer import load_tokenizer
from engine.pd import messages as m
from engine.pd.config import PDConfig
from engine.pd.coordinator import CoordinatorCore, Generation, ToWorker
from engine.pd.segments import check_compatible
from engine.pd.worker import WorkerOrder, run_worker
from engine.text import TextStream
from rlt_fsm.compile import Effect

PREFILL, DECODE = "prefill", "decode"


class EngineFailed(RuntimeError):
    """A worker failed or died: the engine takes no more work. Says which, why, and what was lost."""


class EngineOverloaded(RuntimeError):
    """Too many requests wait; try again later."""


@dataclass
class PDOutput:
    """One answer. exit_depths: loops of each token; the first is the model's depth. timeline: milestone -> seconds."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    exit_depths: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    timeline: dict[str, float] = field(default_factory=dict)
    bytes_posted: int = 0
    error: str = ""


@dataclass(frozen=True)
class Obligation:
    """Something that is still held. holder: who holds it; resource: what, and of which generation; age in seconds."""

    request_id: str
    tid: str
    resource: str
    holder: str
    age_s: float


class StageClient:
    """The coordinator's end of one worker: process, pipe, and what it said when it was ready."""

    def __init__(self, order: WorkerOrder) -> None:
        context = multiprocessing.get_context("spawn")
        self.role = order.role
        self.pipe, child = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=run_worker, args=(child, order), name=f"rlt-{order.role}", daemon=True
        )
        self.process.start()
        child.close()
        self.ready: m.Ready | None = None
        self.stopped: m.Stopped | None = None
        self.error = ""
        self.at_end = False  # the pipe was read to its end
        self.terminated = False  # the protocol asked for its end

    def send(self, message: m.ToWorker) -> None:
        """Send; a worker that is gone is noticed by its pipe's end, not here."""
        try:
            self.pipe.send_bytes(m.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            self.error = self.error or "its pipe broke"

    def receive(self) -> list[m.FromWorker]:
        """Everything that is there to read."""
        out: list[m.FromWorker] = []
        try:
            while not self.at_end and self.pipe.poll(0):
                out.append(m.decode_from_worker(self.pipe.recv_bytes()))
        except (EOFError, ConnectionResetError):
            self.at_end = True
        return out

    def kill(self) -> None:
        """End the process now, and wait until it is gone."""
        self.process.kill()
        self.process.join()

    @property
    def exit_text(self) -> str:
        """How the process ended, in words."""
        code = self.process.exitcode
        if code is None:
            return "still running"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


class PDEngine:
    """Prompts in, outputs out, over one prefill and one decode worker."""

    def __init__(
        self,
        model_dir: Path | str,
        config: PDConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start both workers and wait until they serve.

        environment: variables for the workers alone, such as UCX_TLS. Raises ConfigError or UnsupportedModel before
        any process is spawned, EngineFailed where a worker cannot start.
        """
        self.config = config or PDConfig()
        self.model_dir = Path(model_dir)
        self.model_config = read_config(self.model_dir)
        self.tokenizer = load_tokenizer(self.model_dir)
        c = self.config
        self.core = CoordinatorCore(
            source_credits=c.prefill_cache.num_blocks,
            destination_credits=c.decode_cache.num_blocks,
            compute_credits=c.prefill_scheduler.max_num_seqs,
            max_admission_bypasses=c.max_admission_bypasses,
            trace_capacity=c.trace_capacity,
        )
        self.incarnation = uuid.uuid4().hex
        self.failure = ""
        self.closed = False
        self._outputs: dict[str, PDOutput] = {}  # tid -> output in the making
        self._texts: dict[str, TextStream] = {}  # tid -> its text
        self._tid_of: dict[str, str] = {}  # external id -> live tid
        self._external: dict[str, str] = {}  # tid -> external id, until retired
        self._started: dict[str, float] = {}
        self._deadline: dict[str, float] = {}
        self._replies: dict[int, m.ControlReply] = {}
        self._next_id = 0
        self._bytes = 0
        if c.trace_dir is not None:
            c.trace_dir.mkdir(parents=True, exist_ok=True)
        env = dict(environment or {})
        orders = [
            self._order(PREFILL, c.prefill_device, c.prefill_cache, c.prefill_scheduler, dtype, env),
            self._order(DECODE, c.decode_device, c.decode_cache, c.decode_scheduler, dtype, env),
        ]
        self.clients = {order.role: StageClient(order) for order in orders}
        try:
            self._start()
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    def _order(
        self,
        role: str,
        device: str,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        dtype: torch.dtype,
        environment: dict[str, str],
    ) -> WorkerOrder:
        return WorkerOrder(
            role, self.model_dir, self.model_config, dtype, device, cache, scheduler, self.config, environment
        )

    def _start(self) -> None:
        deadline = time.monotonic() + self.config.startup_timeout_s
        while self.core.worker_state("prefill_worker") != "serving":
            self._pump(0.2)
            if self.failure:
                raise EngineFailed(self.failure)
            late = [c.role for c in self.clients.values() if c.ready is None]
            if time.monotonic() > deadline:
                limit = self.config.startup_timeout_s
                raise EngineFailed(f"not ready after startup_timeout_s = {limit}: {', '.join(late) or 'connect'}")

    # -- requests -----------------------------------------------------------------------------------------

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a prompt, text or token ids; returns its id, which may be used again once its output is out.

        Raises ConfigError for what can never be served, EngineOverloaded, or EngineFailed; nothing is changed then.
        """
        self._require_open()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("prompt", prompt, "the checkpoint has no tokenizer.json; give token ids")
            prompt = self.tokenizer.encode(prompt).ids
        prompt_ids = [int(token) for token in prompt]
        source_need, destination_need = self._needs(prompt_ids, params)
        if len(self.core.waiting) >= self.config.max_pending_requests:
            raise EngineOverloaded(
                f"{len(self.core.waiting)} requests wait, max_pending_requests is {self.config.max_pending_requests}"
            )
        self._next_id += 1
        request_id = f"request-{self._next_id}" if request_id is None else request_id
        if request_id in self._tid_of:
            raise ConfigError("request_id", request_id, "is in use by a request that is not finished")
        tid = uuid.uuid4().hex
        now = time.monotonic()
        self._tid_of[request_id] = tid
        self._external[tid] = request_id
        self._outputs[tid] = PDOutput(request_id)
        if self.tokenizer is not None:
            self._texts[tid] = TextStream(self.tokenizer, params.stop)
        self._started[tid] = now
        self._deadline[tid] = now + self.config.request_timeout_s
        self.core.submit(tid, prompt_ids, params, source_need, destination_need, now)
        return request_id

    def _needs(self, prompt_ids: list[int], params: SamplingParams) -> tuple[int, int]:
        """Pages on P and on D; refused where the request could never fit or the model cannot do it."""
        config, c = self.model_config, self.config
        check_request(config, prompt_ids, params, has_text=self.tokenizer is not None)
        total = len(prompt_ids) + params.max_tokens - 1
        size = c.prefill_cache.block_size
        source = -(-len(prompt_ids) // size) * config.loops
        destination = -(-total // size) * config.loops
        for name, need, have in (
            ("prefill_cache.num_blocks", source, c.prefill_cache.num_blocks),
            ("decode_cache.num_blocks", destination, c.decode_cache.num_blocks),
        ):
            if need > have:
                raise ConfigError(name, have, f"this request needs {need} pages; shorten it or enlarge the cache")
        return source, destination

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """End a request for its client at the next step; its storage waits for evidence. False if not running."""
        tid = self._tid_of.get(request_id)
        if tid is None:
            return False
        self._carry_out(self.core.cancel(tid, reason, time.monotonic()))
        return True

    def step(self, timeout_s: float = 0.05) -> list[PDOutput]:
        """Wait for the workers up to `timeout_s`, move everything on, and return the outputs that ended."""
        self._pump(timeout_s)
        return self._collect()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[PDOutput]:
        """Answer all prompts, in their order. params: one for all, or one each.

        Raises EngineFailed where a worker ends meanwhile; every request has then been ended.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError("params", len(each), f"give one for all or one for each of {len(prompts)} prompts")
        ids = [self.add_request(prompt, chosen) for prompt, chosen in zip(prompts, each, strict=True)]
        results: dict[str, PDOutput] = {}
        while len(results) < len(ids):
            for output in self.step():
                results[output.request_id] = output
        failed = [r for r in results.values() if r.error]
        if failed:
            raise EngineFailed(failed[0].error)
        return [results[i] for i in ids]

    def reached(self, points: Mapping[str, str]) -> list[str]:
        """Of the requests in `points` (id -> milestone), those that run and have reached theirs."""
        out = []
        for request_id, milestone in points.items():
            generation = self.core.generations.get(self._tid_of.get(request_id, ""))
            if generation is not None and milestone in generation.timeline:
                out.append(request_id)
        return out

    def has_unfinished(self) -> bool:
        """Whether a client still waits for an output."""
        return bool(self._tid_of)

    # -- who holds what -------------------------------------------------------------------------------------

    def obligations(self, timeout_s: float = 5.0) -> list[Obligation]:
        """Everything that is held: per generation and side, each named holder. Empty means all settled.

        Asks the workers; one that does not answer in time is itself named as the holder.
        """
        now = time.monotonic()
        out: list[Obligation] = []
        answers = {role: self._ask(role, "obligations", timeout_s) for role in self.clients}
        for tid, generation in self.core.generations.items():
            age = now - generation.submitted_s
            external = self._external.get(tid, "")
            out.append(Obligation(external, tid, "record", f"coordinator: {self.core.state(tid)}", age))
        for role, answer in answers.items():
            where = "source storage" if role == PREFILL else "destination storage"
            if answer is None:
                for tid in self.core.generations:
                    age = now - self._started.get(tid, now)
                    out.append(Obligation(self._external.get(tid, ""), tid, where, f"{role}: does not answer", age))
                continue
            for item in answer:
                age = now - self._started.get(item["tid"], now)
                holders = [f"{name}={value}" for name, value in item["holds"].items()] or ["owner"]
                for holder in holders:
                    out.append(
                        Obligation(self._external.get(item["tid"], ""), item["tid"], where, f"{role}: {holder}", age)
                    )
        return out

    def control(self, role: str, name: str, timeout_s: float = 5.0, **args: Any) -> Any:
        """Ask a worker something by name. Raises RuntimeError with its words, or where it does not answer."""
        reply = self._control(role, name, timeout_s, args)
        if reply is None:
            raise RuntimeError(f"{role} did not answer '{name}' within {timeout_s} s")
        if reply.error:
            raise RuntimeError(f"{role} refused '{name}': {reply.error}")
        return reply.result

    def _ask(self, role: str, name: str, timeout_s: float) -> Any:
        reply = self._control(role, name, timeout_s, {})
        return None if reply is None or reply.error else reply.result

    def _control(self, role: str, name: str, timeout_s: float, args: dict[str, Any]) -> m.ControlReply | None:
        client = self.clients[role]
        if client.at_end or client.stopped is not None:
            return None if client.stopped is None else m.ControlReply(0, [], "")
        self._next_id += 1
        number = self._next_id
        client.send(m.Control(number, name, args))
        deadline = time.monotonic() + timeout_s
        while number not in self._replies and time.monotonic() < deadline and not client.at_end:
            self._pump(0.02)
        return self._replies.pop(number, None)

    def credits(self) -> dict[str, int]:
        """Promises not given, per kind; beside it the allocators' own readings come from `control(.., 'metrics')`."""
        return self.core.credits()

    @property
    def bytes_moved(self) -> int:
        """Bytes that P has posted for generations that are retired."""
        return self._bytes

    # -- ends ---------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None) -> bool:
        """Go on until nothing is held any more; True when that is so. Takes in no new request meanwhile."""
        deadline = time.monotonic() + (self.config.shutdown_timeout_s if timeout_s is None else timeout_s)
        while self.core.generations and time.monotonic() < deadline:
            self._pump(0.05)
        return not self.core.generations

    def close(self, timeout_s: float | None = None) -> None:
        """End everything: cancel, drain, stop P, stop D. What does not end in time is killed, P before D."""
        if self.closed:
            return
        limit = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        now = time.monotonic()
        for tid in list(self.core.generations):
            self._carry_out(self.core.cancel(tid, "the engine closes", now))
        self.drain(limit)
        for role, instance in ((PREFILL, "prefill_worker"), (DECODE, "decode_worker")):
            client = self.clients[role]
            for event in ("drain", "stop"):
                if self.core.can_worker(instance, event):
                    self._carry_out(self.core.worker(instance, event, time.monotonic()))
            deadline = time.monotonic() + limit
            while client.process.is_alive() and time.monotonic() < deadline and client.stopped is None:
                self._pump(0.05)
                if self.core.worker_state(instance) != "stopping":
                    break
            if client.stopped is not None:
                client.process.join(max(1.0, limit))
            if client.process.is_alive():
                client.kill()
            while not client.at_end:
                self._pump(0.05)
        self._collect()
        self._write_trace()
        for client in self.clients.values():
            client.pipe.close()
        self.closed = True

    def __enter__(self) -> PDEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def trace_files(self) -> list[Path]:
        """The traces of the processes that wrote one, after `close`."""
        folder = self.config.trace_dir
        names = ("coordinator", PREFILL, DECODE)
        return [] if folder is None else [p for n in names if (p := folder / f"{n}.jsonl").is_file()]

    def _write_trace(self) -> None:
        if self.config.trace_dir is not None:
            self.core.records.trace.write(
                self.config.trace_dir / "coordinator.jsonl", process="coordinator", incarnation=self.incarnation
            )

    # -- inside ---------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self.failure:
            raise EngineFailed(f"{self.failure}; close this engine and start a new one")
        if self.closed:
            raise EngineFailed("the engine is closed; start a new one")

    def _pump(self, timeout_s: float) -> None:
        """One round: read what is there, admit, end what is late, notice deaths."""
        live = [c for c in self.clients.values() if not c.at_end]
        if live:
            wait([c.pipe for c in live], timeout_s)
        for client in live:
            for message in client.receive():
                self._take(client, message)
        now = time.monotonic()
        if not self.failure and not self.closed:
            self._carry_out(self.core.admit(now))
        for tid in [t for t, limit in self._deadline.items() if now > limit]:
            del self._deadline[tid]
            self._carry_out(self.core.cancel(tid, "deadline", now))
        for client in live:
            if client.at_end:
                self._ended(client)
        if self.core.can_worker("decode_worker", "end"):
            self._carry_out(self.core.worker("decode_worker", "end", time.monotonic()))
        for generation in self.core.take_retired():
            self._bytes += generation.bytes_posted
            output = self._outputs.get(generation.tid)
            if output is not None:
                output.timeline = dict(generation.timeline)
            self._external.pop(generation.tid, None)
            self._started.pop(generation.tid, None)

    def _take(self, client: StageClient, message: m.FromWorker) -> None:
        now = time.monotonic()
        if isinstance(message, m.Token):
            output, text = self._outputs.get(message.tid), self._texts.get(message.tid)
            if output is not None and not (text is not None and text.stopped):
                output.token_ids.append(message.token_id)
                output.exit_depths.append(message.exit_depth)
                output.logprobs.append(message.logprob)
                output.top_logprobs.append(message.top_logprobs)
                generation = self.core.generations.get(message.tid)
                if generation is not None:
                    generation.reach("first_token", now)
                if text is not None and not message.stop:
                    text.push(message.token_id)
                    if text.stopped:  # D learns of it by a cancel; what it still sends is not the output's
                        self._carry_out(self.core.cancel(message.tid, "stop", now))
        elif isinstance(message, m.RequestMessage):
            self._carry_out(self.core.handle(message, now))
        elif isinstance(message, m.Ready):
            client.ready = message
            self._carry_out(self.core.worker(f"{client.role}_worker", "is_ready", now))
            self._introduce()
        elif isinstance(message, m.Connected):
            self._carry_out(self.core.worker(f"{client.role}_worker", "connected", now))
        elif isinstance(message, m.ControlReply):
            self._replies[message.id] = message
        elif isinstance(message, m.Stopped):
            client.stopped = message
        elif isinstance(message, m.Fatal):
            client.error = message.error
            self._fail(f"{client.role} worker: {message.error}")
            self._carry_out(self.core.worker(f"{client.role}_worker", "fatal", now))

    def _introduce(self) -> None:
        """Both are ready: check that they agree, then tell each of the other."""
        ready = {role: c.ready for role, c in self.clients.items()}
        p, d = ready[PREFILL], ready[DECODE]
        if p is None or d is None:
            return
        if p.fingerprint != d.fingerprint:
            self._fail(f"the workers disagree on the model: fingerprints {p.fingerprint[:12]} and {d.fingerprint[:12]}")
            return
        check_compatible(p.geometry, d.geometry)
        self.clients[DECODE].send(m.Connect(p.agent, p.metadata, p.geometry))
        self.clients[PREFILL].send(m.Connect(d.agent, d.metadata, d.geometry))

    def _carry_out(self, items: list[ToWorker | Effect]) -> None:
        for item in items:
            if isinstance(item, ToWorker):
                self.clients[item.process].send(item.message)
            else:
                getattr(self, f"do_{item.name}")()

    def do_terminate_prefill(self) -> None:
        """Kill P's process and join it; its pipe is then read to its end like any other."""
        self._kill(PREFILL)

    def do_terminate_decode(self) -> None:
        """Kill D's process, whose writer is gone, and join it."""
        self._kill(DECODE)

    def _kill(self, role: str) -> None:
        self.core.records.trace.world(f"kill_{role}")
        self.clients[role].terminated = True
        self.clients[role].kill()

    def do_stop_prefill(self) -> None:
        """Ask P to exit."""
        self.clients[PREFILL].send(m.Stop())

    def do_stop_decode(self) -> None:
        """Ask D to exit."""
        self.clients[DECODE].send(m.Stop())

    def _ended(self, client: StageClient) -> None:
        """A worker's pipe has ended: reap it, then let the protocol know."""
        client.process.join(5.0)
        if client.process.is_alive():
            client.kill()
        instance, now = f"{client.role}_worker", time.monotonic()
        if not client.terminated:
            what = f"{client.role}_exits" if client.stopped is not None else f"crash_{client.role}"
            self.core.records.trace.world(what)
        if client.stopped is not None and self.core.can_worker(instance, "stopped"):
            self._carry_out(self.core.worker(instance, "stopped", now))
            return
        if self.core.can_worker(instance, "died"):
            self._fail(f"{client.role} worker ended: {client.error or client.exit_text}")
            self._carry_out(self.core.worker(instance, "died", now))

    def _fail(self, why: str) -> None:
        """Take no more work, and end every request for its client; storage follows by its own evidence."""
        if why not in self.failure:
            self.failure = f"{self.failure}; {why}" if self.failure else why
        now = time.monotonic()
        for tid in list(self.core.generations):
            self._carry_out(self.core.cancel(tid, "failed", now))

    def _collect(self) -> list[PDOutput]:
        out: list[PDOutput] = []
        for generation in self.core.take_finished():
            out.append(self._finish(generation))
        return out

    def _finish(self, generation: Generation) -> PDOutput:
        output = self._outputs.pop(generation.tid)
        self._tid_of.pop(output.request_id, None)
        self._deadline.pop(generation.tid, None)
        output.finish_reason = generation.reason
        output.timeline = generation.timeline  # shared: `retired` appears in it when it happens
        output.bytes_posted = generation.bytes_posted
        if self.failure and generation.reason not in ("stop", "length"):
            output.error = f"{self.failure}; this request had produced {len(output.token_ids)} tokens"
        text = self._texts.pop(generation.tid, None)
        if text is not None:
            text.finish()
            output.text = text.text
            if text.stopped:
                output.finish_reason = "stop"
        return output


def default_threads() -> int:
    """Torch threads per worker: the cores, shared between the two."""
    return max(1, (os.cpu_count() or 2) // 2)
