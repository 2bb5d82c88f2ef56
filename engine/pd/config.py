"""Every knob of a P/D engine beyond those of its two stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.config import CacheConfig, ConfigError, SchedulerConfig, require_int, require_number


@dataclass(frozen=True)
class PDConfig:
    """One prefill and one decode worker.

    prefill_device, decode_device: `cpu` or `cuda:N`; two CUDA workers need two devices.
    prefill_cache, decode_cache: each worker's page pool. Block sizes must agree, pages are copied whole.
    partition_bytes: of one write, at most; a smaller one overlaps better, a larger one costs fewer calls.
    partition_descriptors: byte ranges of one write, at most.
    inflight_bytes: posted and not yet done, at most, over all requests: bounds what a slow receiver can pile up.
    posts_per_tick: writes handed to the transport between two looks at the pipe.
    max_pending_requests: waiting for admission, at most; above it `add_request` refuses.
    max_admission_bypasses: later requests that may be admitted ahead of one that does not fit.
    request_timeout_s: from submission to the last output; then the request is cancelled. It frees no memory by itself.
    startup_timeout_s, shutdown_timeout_s: how long a worker may take to become ready, or to exit when asked.
    poll_interval_s: sleep of a worker that waits for its peer; 0.1 to 0.5 ms costs little and keeps latency.
    trace_capacity: events that each process keeps; older ones are dropped, and the trace says so.
    trace_dir: where the processes write their traces when they stop; None writes none.
    threads: of torch in each worker.
    """

    prefill_device: str = "cpu"
    decode_device: str = "cpu"
    prefill_cache: CacheConfig = field(default_factory=lambda: CacheConfig(1024))
    decode_cache: CacheConfig = field(default_factory=lambda: CacheConfig(1024))
    prefill_scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    decode_scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(max_num_seqs=16))
    partition_bytes: int = 1 << 20
    partition_descriptors: int = 256
    inflight_bytes: int = 8 << 20
    posts_per_tick: int = 4
    max_pending_requests: int = 256
    max_admission_bypasses: int = 8
    request_timeout_s: float = 300.0
    startup_timeout_s: float = 300.0
    shutdown_timeout_s: float = 30.0
    poll_interval_s: float = 0.0002
    trace_capacity: int = 1 << 18
    trace_dir: Path | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        for name in (
            "partition_bytes",
            "partition_descriptors",
            "inflight_bytes",
            "posts_per_tick",
            "max_pending_requests",
            "trace_capacity",
            "threads",
        ):
            require_int(name, getattr(self, name), 1)
        require_int("max_admission_bypasses", self.max_admission_bypasses, 0)
        for name in ("request_timeout_s", "startup_timeout_s", "shutdown_timeout_s", "poll_interval_s"):
            require_number(name, getattr(self, name), 0.0, float("inf"), low_included=False)
        if self.partition_bytes > self.inflight_bytes:
            raise ConfigError(
                "partition_bytes", self.partition_bytes, f"must not exceed inflight_bytes = {self.inflight_bytes}"
            )
        if self.prefill_cache.block_size != self.decode_cache.block_size:
            raise ConfigError(
                "block_size",
                (self.prefill_cache.block_size, self.decode_cache.block_size),
                "give both caches the same block_size",
            )
        for name in ("prefill_device", "decode_device"):
            value = getattr(self, name)
            if value != "cpu" and not (value.startswith("cuda:") and value[5:].isdigit()):
                raise ConfigError(name, value, "give cpu or cuda:N")
        if self.prefill_device == self.decode_device != "cpu":
            raise ConfigError("decode_device", self.decode_device, "prefill already has it; give another device")
