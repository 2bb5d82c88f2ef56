"""What the engine makes of adaptive depth, what its bookkeeping costs, and what a plain loop makes of the same weights.

All on one random model that is wide enough for arithmetic to dominate; exit depths are those of the embedded model,
run again as traces. Every ratio is a median over runs whose sides take turns, so a slow moment strikes them all.

    depth      tokens/s with early exits over tokens/s at full depth, beside the bound (F0 + R Fr) / (F0 + d Fr). F0 and
               Fr are the seconds of one token's coda and of one loop, in batches of the same size in this run.
    overhead   the share of a step that is spent outside model, attention and sampling.
    peer       decode tokens/s of the engine over those of a loop over requests with a dense KV cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from machine import machine

from engine.config import CacheConfig, SamplingParams, SchedulerConfig
from engine.embedded.files import directory
from engine.local import EngineCore, LLMEngine
from engine.models import ouro
from engine.schedule.request import Stage
from engine.schedule.scheduler import Batch

LOOPS = 4


def wide_model(hidden: int, layers: int, vocab: int) -> ouro.OuroModel:
    """A random model. Its answers mean nothing; every shape is that of a real one."""
    heads = hidden // 64
    config = ouro.OuroConfig.from_json(
        {
            "model_type": "ouro",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": hidden * 11 // 4,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": 64,
            "total_ut_steps": LOOPS,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": 0,
        }
    )
    weights = ouro.allocate_weights(config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.named.values():
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
    return ouro.OuroModel(config, weights)


def embedded_depths(threshold: float) -> list[int]:
    """The loops of every token that the embedded model decodes at this threshold; without first tokens."""
    rows = [json.loads(line) for line in (directory() / "prompts.jsonl").read_text().splitlines() if line.strip()]
    engine = LLMEngine(directory(), CacheConfig(512))
    params = SamplingParams(16, min_loops=1, exit_threshold=threshold)
    outputs = engine.generate([row["prompt"] for row in rows], params)
    return [depth for output in outputs for depth in output.exit_depths[1:]]


class Work:
    """Requests for one run: prompts of `prompt` tokens, `tokens` outputs each, with these loops."""

    def __init__(self, model: ouro.OuroModel, count: int, prompt: int, tokens: int, depths: list[int]) -> None:
        rng = random.Random(0)
        vocab = model.config.vocab_size
        self.prompts = [[rng.randrange(1, vocab) for _ in range(prompt)] for _ in range(count)]
        self.params = []
        for _ in range(count):
            trace = (LOOPS, *(rng.choice(depths) for _ in range(tokens - 1)))
            self.params.append(SamplingParams(tokens, min_loops=1, exit_trace=trace, ignore_eos=True))


def core_of(model: ouro.OuroModel, rows: int, work: Work, spare: int = 0, **knobs: Any) -> EngineCore:
    """An engine with pages for everything, whose batches have `rows` rows. spare: requests that wait for a row."""
    need = len(work.prompts[0]) + work.params[0].max_tokens
    pages = -(-need // 16) * LOOPS * len(work.prompts)
    config = SchedulerConfig(max_num_seqs=rows + spare, max_num_batched_tokens=rows, prefill_chunk_size=16, **knobs)
    core = EngineCore(model, CacheConfig(pages), config, "cpu")
    for number, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True)):
        core.add_request(f"r{number}", prompt, params)
    return core


class Clock:
    """Seconds inside some methods of an object."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, target: Any, *names: str) -> None:
        """Count the time of these methods from now on."""
        for name in names:
            setattr(target, name, self._timed(name, getattr(target, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        return timed


class Run:
    """One engine at work: seconds per stage, rows per stage, and output tokens, of all but prefill."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.seconds = dict.fromkeys(Stage, 0.0)
        self.rows = dict.fromkeys(Stage, 0)
        self.outputs: dict[str, list[int]] = {}
        self._choose = core.scheduler.schedule
        self._batch: Batch | None = None
        core.scheduler.schedule = self._schedule  # type: ignore[method-assign]

    def _schedule(self) -> Batch | None:
        self._batch = self._choose()
        return self._batch

    def step(self) -> Stage:
        """Run one batch; returns its stage."""
        started = time.perf_counter()
        outputs = self.core.step_tokens()
        seconds = time.perf_counter() - started
        assert self._batch is not None, "there is nothing left to run"
        stage = self._batch.stage
        self.seconds[stage] += seconds
        self.rows[stage] += len(self._batch.requests)
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output.token_id)
        return stage

    def prefill(self) -> None:
        """Run until every prompt has run; forget what was measured."""
        while any(r.stage in (Stage.WAITING, Stage.PREFILL) for r in self.core.scheduler.requests.values()):
            self.step()
        self.seconds, self.rows = dict.fromkeys(Stage, 0.0), dict.fromkeys(Stage, 0)

    @property
    def decode_seconds(self) -> float:
        """All but prefill."""
        return sum(seconds for stage, seconds in self.seconds.items() if stage is not Stage.PREFILL)

    @property
    def seconds_per_token(self) -> float:
        """Of decoding."""
        return self.decode_seconds / self.rows[Stage.CODA]


def depth(model: ouro.OuroModel, rows: int, runs: int, depths: list[int], requests: int, tokens: int) -> None:
    """Print the gain of early exits beside its bound, and what is lost where nothing exits.

    Three engines step in turn, each with more requests than rows: early exits, full depth, and full depth without
    refill, whose rows keep in step: it gives the seconds of coda and loop in full batches, and what refill costs. With
    early exits half as many requests more are in flight, so that codas come in full batches, too.
    """
    gains, bounds, losses = [], [], []
    for _ in range(runs):
        exits, none = (Work(model, requests, 16, tokens, d) for d in (depths, [LOOPS]))
        early, full, even = (
            Run(core_of(model, rows, work, max_prefill_batches_before_decode=99, **knobs))
            for work, knobs in (
                (exits, {"spare": rows // 2, "min_coda_batch_size": rows}),
                (none, {}),
                (none, {"mode": "no_refill"}),
            )
        )
        while all(run.core.scheduler._waiting for run in (early, full, even)):
            for run in (early, full, even):
                while run.step() is not Stage.RECURRENT:
                    pass
        loop = even.seconds[Stage.RECURRENT] / even.rows[Stage.RECURRENT]
        fixed = sum(even.seconds[s] / even.rows[s] for s in (Stage.PRELUDE, Stage.CODA))
        mean, most = (
            run.rows[Stage.RECURRENT] / run.rows[Stage.CODA] for run in (early, full)
        )  # first tokens loop not
        gains.append(full.seconds_per_token / early.seconds_per_token)
        bounds.append((fixed + most * loop) / (fixed + mean * loop))
        losses.append(1 - even.seconds_per_token / full.seconds_per_token)
    gain, limit = statistics.median(gains), statistics.median(bounds)
    reached = statistics.median(g / b for g, b in zip(gains, bounds, strict=True))
    print(f"early exits, mean depth {mean:.2f} of {LOOPS}: gain {gain:.3f}, bound {limit:.3f}, reached {reached:.1%}")
    print(f"nothing exits: {statistics.median(losses):.1%} lost against no refill")


def overhead(model: ouro.OuroModel, rows: int, runs: int, depths: list[int], tokens: int) -> None:
    """Print the share of a decode step outside the device's work."""
    shares: dict[str, list[float]] = {"scheduler": [], "cache": [], "all but model, attention, sampling": []}
    for _ in range(runs):
        run = Run(core_of(model, rows, Work(model, rows, 16, tokens, depths)))
        run.prefill()
        core, scheduler, pages, device = run.core, Clock(), Clock(), Clock()
        scheduler.watch(core.scheduler, "schedule", "preluded", "looped", "sampled")
        pages.watch(core.pages, "require_prefix", "mark_plane_written", "finalize_exit")
        device.watch(core.model, "embed", "rotary", "loop", "hazards", "logits")
        device.watch(core.storage, "copy_tokens")
        device.watch(core.runner.sampler, "sample")
        while core.has_runnable():
            run.step()
        spent = run.decode_seconds
        shares["scheduler"].append(sum(scheduler.seconds.values()) / spent)
        shares["cache"].append(sum(pages.seconds.values()) / spent)
        shares["all but model, attention, sampling"].append(1 - sum(device.seconds.values()) / spent)
    for name, values in shares.items():
        print(f"{name}: {statistics.median(values):.2%} of a decode step at {rows} rows")


class Dense:
    """What a user would write: one request at a time, a dense KV cache of one plane per loop, torch's own attention."""

    def __init__(self, model: ouro.OuroModel) -> None:
        self.model = model

    @torch.inference_mode()
    def generate(self, prompt: list[int], trace: tuple[int, ...]) -> tuple[list[int], float]:
        """Greedy tokens, and the seconds after the prompt."""
        config, model = self.model.config, self.model
        size = len(prompt) + len(trace)
        shape = (LOOPS, config.num_layers, 1, config.num_kv_heads, size, config.head_dim)
        keys, values = torch.zeros(shape), torch.zeros(shape)

        def run(tokens: list[int], start: int, loops: int) -> torch.Tensor:
            hidden = model.embed(torch.tensor(tokens))
            rotary = model.rotary(torch.arange(start, start + len(tokens)))
            end = start + len(tokens)
            for loop in range(loops):

                def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, loop: int = loop) -> Any:
                    keys[loop, layer, 0, :, start:end] = k.transpose(0, 1)
                    values[loop, layer, 0, :, start:end] = v.transpose(0, 1)
                    out = F.scaled_dot_product_attention(
                        q.transpose(0, 1)[None],
                        keys[loop, layer, :, :, :end],
                        values[loop, layer, :, :, :end],
                        is_causal=len(tokens) > 1,
                    )
                    return out[0].transpose(0, 1)

                hidden = model.loop(hidden, rotary, attend)
            keys[loops:, :, :, :, start:end] = keys[loops - 1, :, :, :, start:end]
            values[loops:, :, :, :, start:end] = values[loops - 1, :, :, :, start:end]
            return hidden[-1:]

        hidden = run(prompt, 0, LOOPS)
        started = time.perf_counter()
        out = [int(model.logits(hidden).argmax())]
        for loops in trace[1:]:
            hidden = run([out[-1]], len(prompt) + len(out) - 1, loops)
            out.append(int(model.logits(hidden).argmax()))
        return out, time.perf_counter() - started


def peer(model: ouro.OuroModel, rows: int, runs: int, depths: list[int], tokens: int) -> None:
    """Print decode tokens/s of the engine over those of Dense, whose tokens must be the engine's."""
    work = Work(model, rows, 32, tokens, depths)
    ratios = []
    for _ in range(runs):
        run = Run(core_of(model, rows, work))
        run.prefill()
        while run.core.has_runnable():
            run.step()
        plain, equal = 0.0, 0
        for number, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True)):
            out, seconds = Dense(model).generate(prompt, params.exit_trace or ())
            plain += seconds
            equal += out == run.outputs[f"r{number}"]
        if equal < rows * 0.9:
            raise SystemExit(f"only {equal} of {rows} outputs are equal: the two do not compute the same")
        ratios.append(plain / run.decode_seconds)
    print(f"batch {rows}: {statistics.median(ratios):.2f}x the tokens/s of a loop over requests; equal outputs {equal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["depth", "overhead", "peer"], help="depth, overhead, peer")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs per figure (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers of a loop (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="tokens (default %(default)s)")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch (default %(default)s; peer: 16)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = wide_model(arguments.hidden, arguments.layers, arguments.vocab)
    depths = embedded_depths(0.3)
    print(machine("torch"))
    shape = f"{arguments.layers} layers of {arguments.hidden}, vocabulary {arguments.vocab}"
    print(f"{shape}; medians of {arguments.runs} runs\n")
    if "depth" in arguments.what:
        depth(model, arguments.rows, arguments.runs, depths, requests=3 * arguments.rows, tokens=24)
    if "overhead" in arguments.what:
        overhead(model, arguments.rows, arguments.runs, depths, tokens=24)
    if "peer" in arguments.what:
        peer(model, 16, arguments.runs, depths, tokens=24)


if __name__ == "__main__":
    main()
