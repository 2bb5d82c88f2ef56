"""Every knob of one engine, with its unit, its bound and the reason for it. Data only: no clock, no device.

A wrong value raises ConfigError, which names the field, the value and what to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LAST_EXITED = "last_exited"
KV_LAYOUTS = (LAST_EXITED,)
OURO, OURO_DELAYED = "ouro", "ouro_delayed"
EXIT_MODES = (OURO, OURO_DELAYED)
REFILL, NO_REFILL = "refill", "no_refill"
FCFS, PRIORITY = "fcfs", "priority"
TOP_LOGPROBS_MAX = 20


class ConfigError(ValueError):
    """A knob has a value it cannot have: names the field, the value and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(field, value, remedy)
        self.field, self.value, self.remedy = field, value, remedy

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.remedy}"


def require_int(field: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless value is an int (no bool) with low <= value <= high."""
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(field, value, f"give an integer {bound}")


def require_bool(field: str, value: Any) -> None:
    """Raise ConfigError unless value is True or False."""
    if type(value) is not bool:
        raise ConfigError(field, value, "give true or false")


def require_one_of(field: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise ConfigError unless value is one of the known words."""
    if value not in known:
        raise ConfigError(field, value, f"choose one of {', '.join(known)}")


def require_number(field: str, value: Any, low: float, high: float, low_included: bool = True) -> None:
    """Raise ConfigError unless value is a finite int or float within the bounds; high may be math.inf."""
    valid = type(value) in (int, float) and math.isfinite(value) and value <= high
    if not valid or value < low or (value == low and not low_included):
        relation = "at least" if low_included else "above"
        bound = "" if high == math.inf else f" and at most {high}"
        raise ConfigError(field, value, f"give a finite number {relation} {low}{bound}")


@dataclass(frozen=True)
class CacheConfig:
    """The page pool of one engine; fixed for its life, since remote writers know its addresses.

    num_blocks: physical pages over all planes. One page holds every layer of block_size tokens of one plane, so a
        request of T tokens takes ceil(T / block_size) * loops pages. At least 1.
    block_size: tokens per page. Small pages waste less at the end of a request; large ones make longer transfers.
    layout: "last_exited": one plane per loop; a query at loop d reads a token that left at loop e in version min(d, e).
        The single-plane layout changes the numbers and is not offered yet.
    """

    num_blocks: int
    block_size: int = 16
    layout: str = LAST_EXITED

    def __post_init__(self) -> None:
        require_int("num_blocks", self.num_blocks, 1)
        require_int("block_size", self.block_size, 1)
        if self.layout not in KV_LAYOUTS:
            raise ConfigError("layout", self.layout, f"choose one of {', '.join(KV_LAYOUTS)}")


@dataclass(frozen=True)
class SchedulerConfig:
    """How one engine fills its batches.

    max_num_seqs: requests that compute at once, each with a hidden row. Waiting for remote KV does not count.
    max_num_batched_tokens: rows of one device batch, of any stage: bounds the activations.
    prefill_chunk_size: prompt tokens of one request per prefill batch: bounds how long decode waits for a prompt.
    max_prefill_batches_before_decode: prefill batches that may run in a row while tokens wait to decode.
    admission_scan_limit: waiting requests looked at per admission: bounds the cost of a long queue.
    max_admission_bypasses: later requests that may be admitted ahead of one that does not fit, before the queue waits
        for it. 0 is strict first come, first served.
    mode: "refill": a row that leaves its loops is replaced at once by the next token. "no_refill": the rows that loop
        together all leave before others begin; the plainer order, kept for comparison.
    min_coda_batch_size: rows that wait for each other before they become tokens, while enough others loop. Above 1 it
        saves reads of the output weights where max_num_seqs exceeds max_num_batched_tokens, and costs latency.
    policy: "fcfs": who came first is admitted first. "priority": lower numbers first, and among equals as fcfs.
    wavefront_prefill: run a prompt's chunks one loop per batch, chunk after chunk in different depths at once. The
        scheduler may admit, decode or cancel after each loop, at the price of keeping the hidden rows in between.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 128
    prefill_chunk_size: int = 128
    max_prefill_batches_before_decode: int = 1
    admission_scan_limit: int = 64
    max_admission_bypasses: int = 8
    min_coda_batch_size: int = 1
    mode: str = REFILL
    policy: str = FCFS
    wavefront_prefill: bool = False

    def __post_init__(self) -> None:
        require_int("max_num_seqs", self.max_num_seqs, 1)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        require_int("prefill_chunk_size", self.prefill_chunk_size, 1)
        require_int("max_prefill_batches_before_decode", self.max_prefill_batches_before_decode, 1)
        require_int("admission_scan_limit", self.admission_scan_limit, 1)
        require_int("max_admission_bypasses", self.max_admission_bypasses, 0)
        require_int("min_coda_batch_size", self.min_coda_batch_size, 1)
        require_one_of("mode", self.mode, (REFILL, NO_REFILL))
        require_one_of("policy", self.policy, (FCFS, PRIORITY))
        require_bool("wavefront_prefill", self.wavefront_prefill)


@dataclass(frozen=True)
class SamplingParams:
    """How one request ends, samples and leaves its loops.

    max_tokens: output tokens, at least 1. The last one is never fed back, so a request needs room for
        prompt + max_tokens - 1 tokens.
    temperature: 0 takes the likeliest token; above 0 divides the logits before sampling.
    top_k: keep the k likeliest tokens; 0 keeps all. top_p: keep the smallest likeliest set of at least this mass,
        in (0, 1]; 1 keeps all.
    seed: of the request's own random stream, in [0, 2^63); None draws one. A token costs one draw, whatever the batch.
    min_loops: loops before an early exit is allowed. A value above the model's depth never exits early.
    max_loops: loops of every decoded token; None is the model's depth. Prompt tokens always run at full depth.
    exit_threshold: leave once the exit probability accumulated over loops reaches it, in [0, 1]; 1 never exits early.
    exit_mode: "ouro": leave after the loop that reaches the threshold. "ouro_delayed": after the loop behind it, so
        that the next loop need not wait for the decision. min_loops is about the loop that reaches it.
    exit_trace: the loops of each output token, at least max_tokens of them, in place of a threshold; the first is the
        model's depth. What a run's exit_depths say can be run again so.
    stop_token_ids: end the output, which keeps the stop token as its last id.
    stop: texts that end the output, which then ends before the first of them; needs a tokenizer. A token that completes
        one is the output's last id.
    ignore_eos: go on after the model's own end tokens; stop_token_ids still end the output.
    logprobs: report the log-probability of each chosen token under the raw logits; costs a softmax per token.
    top_logprobs: likeliest tokens to report beside it, at most 20; needs logprobs.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_loops: int = 2
    max_loops: int | None = None
    exit_threshold: float = 1.0
    exit_mode: str = OURO
    exit_trace: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        require_int("max_tokens", self.max_tokens, 1)
        require_number("temperature", self.temperature, 0.0, math.inf)
        require_int("top_k", self.top_k, 0)
        require_number("top_p", self.top_p, 0.0, 1.0, low_included=False)
        if self.seed is not None:
            require_int("seed", self.seed, 0, 2**63 - 1)
        require_int("min_loops", self.min_loops, 1)
        if self.max_loops is not None:
            require_int("max_loops", self.max_loops, 1)
            if self.max_loops < self.min_loops:
                raise ConfigError(
                    "max_loops", self.max_loops, f"is below min_loops = {self.min_loops}; lower min_loops"
                )
        require_number("exit_threshold", self.exit_threshold, 0.0, 1.0)
        require_one_of("exit_mode", self.exit_mode, EXIT_MODES)
        for field, kind in (("stop_token_ids", "token ids"), ("stop", "texts"), ("exit_trace", "loops")):
            value = getattr(self, field)
            if isinstance(value, list):  # as it comes out of JSON
                object.__setattr__(self, field, tuple(value))
            elif not isinstance(value, tuple) and (field != "exit_trace" or value is not None):
                raise ConfigError(field, value, f"give a tuple of {kind}")
        for token_id in self.stop_token_ids:
            require_int("stop_token_ids", token_id, 0)
        for text in self.stop:
            if type(text) is not str or not text:
                raise ConfigError("stop", text, "give texts of at least one character")
        self._check_exit_trace()
        require_bool("ignore_eos", self.ignore_eos)
        require_bool("logprobs", self.logprobs)
        require_int("top_logprobs", self.top_logprobs, 0, TOP_LOGPROBS_MAX)
        if self.top_logprobs and not self.logprobs:
            raise ConfigError("top_logprobs", self.top_logprobs, "set logprobs as well")

    def _check_exit_trace(self) -> None:
        if self.exit_trace is None:
            return
        if self.exit_threshold < 1.0:
            raise ConfigError("exit_trace", self.exit_trace, "gives every depth; leave exit_threshold at 1")
        if len(self.exit_trace) < self.max_tokens:
            raise ConfigError(
                "exit_trace", self.exit_trace, f"covers {len(self.exit_trace)} of {self.max_tokens} tokens"
            )
        for depth in self.exit_trace:
            require_int("exit_trace", depth, 1)
        for depth in self.exit_trace[1:]:
            if depth < self.min_loops or (self.max_loops is not None and depth > self.max_loops):
                raise ConfigError("exit_trace", depth, "is not within min_loops and max_loops")
