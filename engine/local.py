"""The engine of one process: EngineCore, the loop that every stage of a P/D pair also runs, and LLMEngine around it.

EngineCore joins scheduler, pages, storage and runner; it moves no bytes between processes and speaks no protocol.
Why a finished request keeps its pages outside role "both": spec/retirement.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import torch

from engine.cache.geometry import PoolGeometry
from engine.cache.pages import KVCacheManager
from engine.cache.storage import KVStorage
from engine.config import CacheConfig, ConfigError, SamplingParams, SchedulerConfig, require_int
from engine.execute.attention import BACKEND
from engine.execute.device import PAST, DeviceEvent, record
from engine.execute.runner import ModelRunner
from engine.execute.sampling import TopLogprobs
from engine.limits import check_request
from engine.models.loading import fingerprint, load_model
from engine.models.registry import Model
from engine.models.tokenizer import load_tokenizer
from engine.schedule.request import FinishReason, Request, Stage
from engine.schedule.scheduler import Batch, Scheduler, SchedulerError
from engine.text import TextStream

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class PrefillProgress:
    """Device work on prompt tokens [start, end) of a request, which is over once event is done.

    whole: the tokens are then in every plane and layer; False for the earlier loops of a wavefront. final: they end the
    prompt as well; its last hidden row is in the staging slot once staged_event is done.
    """

    request_id: str
    start: int
    end: int
    whole: bool
    final: bool
    event: DeviceEvent
    staged_event: DeviceEvent | None


@dataclass(frozen=True)
class TokenOutput:
    """One output token. exit_depth: the loops it ran; the model's depth for a request's first."""

    request_id: str
    token_id: int
    exit_depth: int
    finished: bool
    finish_reason: FinishReason | None
    logprob: float | None
    top_logprobs: TopLogprobs


class EngineCore:
    """One stage's local loop. Single-threaded; it waits for the device only where it must read a result."""

    def __init__(
        self,
        model: Model,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        device: torch.device | str,
        role: Role = "both",
        staging_slots: int = 0,
    ) -> None:
        """role: "both" serves alone; "prefill" stops after each prompt; "decode" starts from imported prompts.

        staging_slots: hidden rows for hand-offs, at fixed addresses; 0 where there are none.
        """
        if role not in ("both", "prefill", "decode"):
            raise ConfigError("role", role, "choose one of both, prefill, decode")
        require_int("staging_slots", staging_slots, 0)
        config = model.config
        self.model, self.role, self.device = model, role, torch.device(device)
        if self.device != model.device and self.device.type != model.device.type:
            raise ConfigError("device", str(device), f"the model is on {model.device}; load it onto the same device")
        self.device = model.device
        self.cache_config, self.scheduler_config = cache_config, scheduler_config
        self.pages = KVCacheManager(cache_config.num_blocks, cache_config.block_size, config.loops, config.num_layers)
        self.storage = KVStorage(
            num_blocks=cache_config.num_blocks,
            num_layers=config.num_layers,
            block_size=cache_config.block_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            planes=config.loops,
            hidden_size=config.hidden_size,
            staging_slots=staging_slots,
            dtype=model.dtype,
            device=self.device,
        )
        self.scheduler = Scheduler(scheduler_config, self.pages, config.loops, hold_after_prefill=role == "prefill")
        self.runner = ModelRunner(model, self.storage, self.pages, scheduler_config.max_num_seqs)
        self._staging: dict[str, int] = {}
        self._last_event: DeviceEvent = PAST

    def add_request(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> None:
        """Queue a request for prefill. priority: lower numbers go first, where the policy is "priority".

        Raises ConfigError for what the model cannot do, SchedulerError for a known id or a request that never fits.
        """
        self._require_role("add_request", "both", "prefill")
        self.scheduler.add(self._request(request_id, prompt_ids, params, priority))

    def set_staging_slot(self, request_id: str, slot: int) -> None:
        """Where the request's last hidden row goes (role prefill); needed before its last chunk runs."""
        self._require_role("set_staging_slot", "prefill")
        self.scheduler.get(request_id)
        self._check_staging_slot(request_id, slot)
        self._staging[request_id] = slot

    def reserve(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, slot: int) -> bool:
        """Allocate a request's whole capacity for a remote writer (role decode); False, with nothing changed, if full.

        slot: the staging slot where its hidden row will arrive. The request idles as RECEIVING until `activate`.
        """
        self._require_role("reserve", "decode")
        self._check_staging_slot(request_id, slot)
        if not self.scheduler.reserve(self._request(request_id, prompt_ids, params)):
            return False
        self._staging[request_id] = slot
        return True

    def activate(self, request_id: str) -> DeviceEvent:
        """Trust the imported prompt, bind its hidden row and queue the coda; needs a compute slot (`free_slots`).

        The staging slot may be written again once the returned event is done.
        """
        self._require_role("activate", "decode")
        request = self.scheduler.activate(request_id)
        self.pages.mark_imported_prefix(request_id, len(request.prompt_ids))
        self.runner.bind(request)
        self.runner.import_hidden(request, self._staging.pop(request_id))
        self._last_event = record(self.device)
        return self._last_event

    def step(self) -> list[PrefillProgress] | list[TokenOutput]:
        """Run one batch: `step_prefill` for role prefill, otherwise `step_tokens`. Empty when nothing came of it."""
        return self.step_prefill() if self.role == "prefill" else self.step_tokens()

    def step_prefill(self) -> list[PrefillProgress]:
        """Run one prefill batch (role prefill); one entry per row of it. Empty if nothing can run."""
        self._require_role("step_prefill", "prefill")
        batch = self._schedule()
        if batch is None:
            return []
        last = self.model.config.loops - 1
        depths = batch.depths or [last] * len(batch.requests)
        whole = [d == last for d in depths]  # the rows whose tokens will be in every plane
        finals = [
            w and end == len(r.prompt_ids) for w, r, (_, end) in zip(whole, batch.requests, batch.ranges, strict=True)
        ]
        leaving = [request for request, final in zip(batch.requests, finals, strict=True) if final]
        unstaged = [request.request_id for request in leaving if request.request_id not in self._staging]
        if unstaged:
            raise SchedulerError(f"requests {unstaged} would end their prompts without a staging slot; set one first")
        self.runner.prefill(batch.requests, batch.ranges, batch.depths)
        computed = staged = record(self.device)
        if leaving:
            for request in leaving:
                self.runner.export_hidden(request, self._staging.pop(request.request_id))
                self.runner.unbind(request.request_id)
            staged = record(self.device)
        self._last_event = staged
        self.scheduler.prefilled(batch)
        rows = zip(batch.requests, batch.ranges, whole, finals, strict=True)
        return [
            PrefillProgress(request.request_id, start, end, through, final, computed, staged if final else None)
            for request, (start, end), through, final in rows
        ]

    def step_tokens(self) -> list[TokenOutput]:
        """Run one batch of any stage (roles both and decode). Only a coda batch yields outputs, one per row.

        With role both a finished request is released at once; with role decode it keeps its pages until `release`.
        """
        self._require_role("step_tokens", "both", "decode")
        batch = self._schedule()
        if batch is None:
            return []
        outputs: list[TokenOutput] = []
        if batch.stage is Stage.PREFILL:
            self.runner.prefill(batch.requests, batch.ranges, batch.depths)
            self.scheduler.prefilled(batch)
        elif batch.stage is Stage.PRELUDE:
            self.runner.prelude(batch.requests)
            self.scheduler.preluded(batch)
        elif batch.stage is Stage.RECURRENT:
            self.scheduler.looped(batch, self.runner.recurrent(batch.requests))
        else:
            outputs = self._coda(batch)
        self._last_event = record(self.device)
        return outputs

    def last_event(self) -> DeviceEvent:
        """Covers all device work that this core has enqueued so far."""
        return self._last_event

    def remove(self, request_id: str) -> None:
        """Take the request out of scheduler and runner, in any stage; its pages stay its own until `release`."""
        self.scheduler.remove(request_id)
        self.runner.unbind(request_id)
        self._staging.pop(request_id, None)

    def release(self, request_id: str) -> None:
        """Free the pages of a held, finished or removed request; its id may then be used again.

        Raises LeaseError, naming the holders and changing nothing, while someone holds the pages, and SchedulerError
        for a request that still computes or receives.
        """
        request = self.scheduler.get(request_id)
        if request.stage not in (Stage.HELD, Stage.FINISHED):
            raise SchedulerError(f"request {request_id!r} is still {request.stage}; remove it first")
        if self.pages.has(request_id):
            self.pages.free(request_id)
        self.scheduler.forget(request_id)

    def block_tables(self, request_id: str) -> list[list[int]]:
        """Block ids in token order, one list per plane."""
        return self.pages.block_tables(request_id)

    def stage(self, request_id: str) -> Stage:
        """Where the request stands. Raises SchedulerError for an id that is not known, or released."""
        return self.scheduler.get(request_id).stage

    def has_runnable(self) -> bool:
        """Whether `step` would run a batch now."""
        return self.scheduler.has_runnable()

    @property
    def free_slots(self) -> int:
        """Compute slots free for admission or activation."""
        return self.scheduler.free_slots

    def blocks_needed(self, prompt_tokens: int, max_tokens: int) -> int:
        """Pages that this role takes for a request of these sizes."""
        return self.pages.blocks_needed(self._capacity(prompt_tokens, max_tokens))

    def geometry(self) -> PoolGeometry:
        """Addresses and sizes of the pools, for a connector."""
        return self.storage.geometry()

    def fingerprint(self) -> str:
        """What must be equal on all workers of a pair; reads every weight, so ask once."""
        model = self.model
        return fingerprint(model.config, model.weights.named, model.dtype, self.cache_config.layout, BACKEND)

    def check_integrity(self) -> None:
        """Raise CacheError or SchedulerError where pages, queues or bindings contradict each other."""
        self.pages.check_integrity()
        self.scheduler.check_integrity()
        for request_id, request in self.scheduler.requests.items():
            bound = self.runner.is_bound(request_id)
            if bound and request.slot is None:
                raise SchedulerError(f"request {request_id!r} in stage {request.stage} is still bound to the runner")
            if request.stage is not Stage.WAITING and request.slot is not None and not self.pages.has(request_id):
                raise SchedulerError(f"request {request_id!r} computes without pages")
        ownerless = set(self.pages.request_ids) - set(self.scheduler.requests)
        if ownerless:
            raise SchedulerError(f"pages of unknown requests: {sorted(ownerless)}")

    def _schedule(self) -> Batch | None:
        batch = self.scheduler.schedule()
        if batch is not None and batch.stage is Stage.PREFILL:
            for request in batch.requests:
                if not self.runner.is_bound(request.request_id):
                    self.runner.bind(request)
        return batch

    def _coda(self, batch: Batch) -> list[TokenOutput]:
        sampled = self.runner.coda(batch.requests)
        self.scheduler.sampled(batch, sampled.token_ids)
        outputs = []
        rows = zip(batch.requests, sampled.token_ids, sampled.logprobs, sampled.top, strict=True)
        for request, token_id, logprob, top in rows:
            reason = request.finish_reason
            depth = request.exit_depths[-1]
            outputs.append(TokenOutput(request.request_id, token_id, depth, reason is not None, reason, logprob, top))
            if reason is not None:
                self.runner.unbind(request.request_id)
                if self.role == "both":
                    self.release(request.request_id)
        return outputs

    def _request(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> Request:
        config = self.model.config
        check_request(config, prompt_ids, params, has_text=True)
        stop_ids = frozenset(params.stop_token_ids + (() if params.ignore_eos else config.eos_token_ids))
        capacity = self._capacity(len(prompt_ids), params.max_tokens)
        return Request(request_id, prompt_ids, params, capacity, stop_ids, priority)

    def _capacity(self, prompt_tokens: int, max_tokens: int) -> int:
        """Tokens to store: the last sampled token is never fed back, and a prefill engine samples none."""
        return prompt_tokens if self.role == "prefill" else prompt_tokens + max_tokens - 1

    def _check_staging_slot(self, request_id: str, slot: int) -> None:
        require_int("slot", slot, 0, self.storage.hidden.shape[0] - 1)
        for other, taken in self._staging.items():
            if taken == slot and other != request_id:
                raise ConfigError("slot", slot, f"is the staging slot of request {other!r}")

    def _require_role(self, call: str, *roles: Role) -> None:
        if self.role not in roles:
            raise SchedulerError(f"{call} is not for an engine of role {self.role!r}, but for {' or '.join(roles)}")


@dataclass
class Output:
    """One request's result. exit_depths: loops per token. text is None where there is no tokenizer.

    logprobs, top_logprobs: per token, where asked for; see SamplingParams.
    """

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    text: str | None = None
    finish_reason: FinishReason | None = None


class LLMEngine:
    """Prompts in, outputs out, in one process."""

    def __init__(
        self,
        model_dir: Path | str,
        cache_config: CacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """model_dir: a checkpoint's folder, with tokenizer.json if prompts or outputs are text. Cache: 256 pages."""
        model = load_model(model_dir, dtype, device)
        self.tokenizer = load_tokenizer(model_dir)
        self.core = EngineCore(model, cache_config or CacheConfig(256), scheduler_config or SchedulerConfig(), device)
        self._outputs: dict[str, Output] = {}
        self._texts: dict[str, TextStream] = {}
        self._ids = count()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Output]:
        """Answer all prompts; outputs in their order. params: one for all, or one each. Needs an idle engine."""
        if self._outputs:
            raise SchedulerError(f"generate needs an idle engine; {len(self._outputs)} requests are unfinished")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError("params", len(each), f"give one for all or one for each of {len(prompts)} prompts")
        request_ids: list[str] = []
        results: dict[str, Output] = {}
        try:
            for prompt, chosen in zip(prompts, each, strict=True):
                request_ids.append(self.add_request(prompt, chosen))
            while len(results) < len(request_ids):
                results.update((output.request_id, output) for output in self.step())
        except BaseException:
            for request_id in request_ids:
                self.abort(request_id)
            raise
        return [results[request_id] for request_id in request_ids]

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt, text or token ids; returns its id. Raises ConfigError or SchedulerError, changing nothing.

        priority: lower numbers go first, where the scheduler's policy is "priority".
        """
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("prompt", prompt, "the checkpoint has no tokenizer.json; give token ids")
            prompt = self.tokenizer.encode(prompt).ids
        check_request(self.core.model.config, prompt, params, has_text=self.tokenizer is not None)
        self.core.add_request(request_id, prompt, params, priority)
        self._outputs[request_id] = Output(request_id, list(prompt))
        if self.tokenizer is not None:
            self._texts[request_id] = TextStream(self.tokenizer, params.stop)
        return request_id

    def step(self) -> list[Output]:
        """Run one batch; returns the outputs that are finished by it."""
        finished = []
        for token in self.core.step_tokens():
            output = self._outputs[token.request_id]
            output.token_ids.append(token.token_id)
            output.exit_depths.append(token.exit_depth)
            output.logprobs.append(token.logprob)
            output.top_logprobs.append(token.top_logprobs)
            text = self._texts.get(token.request_id)
            if text is not None and token.finish_reason is not FinishReason.STOP:  # a stop token has no text
                text.push(token.token_id)
            if text is not None and text.stopped and not token.finished:
                self.core.remove(token.request_id)
                self.core.release(token.request_id)
            if token.finished or (text is not None and text.stopped):
                finished.append(self._close(token.request_id, token.finish_reason or FinishReason.STOP))
        return finished

    def abort(self, request_id: str) -> Output | None:
        """End a request now; returns what it has produced, or None if it is not known or already finished."""
        if request_id not in self._outputs:
            return None
        self.core.remove(request_id)
        self.core.release(request_id)
        return self._close(request_id, FinishReason.ABORT)

    def has_unfinished(self) -> bool:
        return bool(self._outputs)

    def _close(self, request_id: str, reason: FinishReason) -> Output:
        output, text = self._outputs.pop(request_id), self._texts.pop(request_id, None)
        output.finish_reason = reason
        if text is not None:
            text.finish()
            output.text = text.text
            if text.stopped:
                output.finish_reason = FinishReason.STOP
        return output
