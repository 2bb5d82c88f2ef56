"""The P/D engine whole, over real NIXL between real processes: equality, cancels, deaths, refusals."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pd_tools import PATIENCE_S, Hold, Stranger, outputs_of, until
from reference_ouro import write_checkpoint

from engine.config import CacheConfig, ConfigError, SamplingParams, SchedulerConfig
from engine.local import LLMEngine
from engine.models.registry import UnsupportedModel
from engine.pd import messages as m
from engine.pd.config import PDConfig
from engine.pd.engine import EngineFailed, EngineOverloaded, PDEngine, PDOutput, StageClient
from engine.pd.worker import WorkerOrder

BLOCKS = 256
TRANSPORTS = [pytest.param({}, id="cma"), pytest.param({"UCX_TLS": "tcp"}, id="tcp")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint: answers mean nothing, but every wrong byte changes them."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1)


def config(**changes: Any) -> PDConfig:
    """Small chunks and partitions, so that one prompt makes many of both."""
    values: dict[str, Any] = {
        "prefill_cache": CacheConfig(BLOCKS),
        "decode_cache": CacheConfig(BLOCKS),
        "prefill_scheduler": SchedulerConfig(prefill_chunk_size=16, max_num_seqs=4),
        "decode_scheduler": SchedulerConfig(max_num_seqs=4),
        "partition_bytes": 4096,
    }
    return PDConfig(**(values | changes))


def some_requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 5 to 100 tokens; half greedy, half sampled; early exits."""
    rng = random.Random(seed)
    out = []
    for place in range(count):
        prompt = [rng.randrange(3, 64) for _ in range(rng.randrange(5, 100))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 20),
            ignore_eos=True,
            temperature=0.8 * (place % 2),
            seed=place,
            min_loops=1,
            exit_threshold=0.6,
        )
        out.append((prompt, params))
    return out


def settled(engine: PDEngine) -> None:
    """Nothing is held: no obligation, every credit back, every page free by the allocators' own reading."""
    assert engine.drain(PATIENCE_S)
    assert engine.obligations() == []
    credits = engine.credits()
    assert (credits["source"], credits["destination"], credits["compute"], credits["live"]) == (BLOCKS, BLOCKS, 4, 0)
    for role in ("prefill", "decode"):
        assert engine.control(role, "metrics")["free_blocks"] == BLOCKS


@pytest.fixture
def processes_end() -> Iterator[None]:
    """No test leaves a worker behind."""
    import multiprocessing

    yield
    end = time.monotonic() + PATIENCE_S
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


pytestmark = pytest.mark.usefixtures("processes_end")


@pytest.mark.parametrize(
    ("environment", "wave"),
    [
        pytest.param({}, False, id="cma"),
        pytest.param({}, True, id="cma-wavefront"),
        pytest.param({"UCX_TLS": "tcp"}, False, id="tcp"),
    ],
)
def test_the_pair_gives_the_tokens_of_one_process(checkpoint: Path, environment: dict[str, str], wave: bool) -> None:
    """Goal: disaggregation changes no token and no exit depth. Method: the same requests through one process."""
    scheduler = SchedulerConfig(prefill_chunk_size=16, max_num_seqs=4, wavefront_prefill=wave)
    requests = some_requests(12)
    prompts, params = [p for p, _ in requests], [s for _, s in requests]
    wanted = LLMEngine(checkpoint, CacheConfig(512)).generate(prompts, params)

    with PDEngine(checkpoint, config(prefill_scheduler=scheduler), environment=environment) as engine:
        outputs = engine.generate(prompts, params)
        settled(engine)
        sent = engine.control("prefill", "metrics")["bytes_sent"]

    assert [o.token_ids for o in outputs] == [w.token_ids for w in wanted]
    assert [o.exit_depths for o in outputs] == [w.exit_depths for w in wanted]
    for output in outputs:
        assert list(output.timeline) == sorted(output.timeline, key=output.timeline.__getitem__)
        assert {"reserved", "computed", "submitted", "received", "activated", "finished", "retired"} <= set(
            output.timeline
        )
    token = 2 * 4 * 2 * 2 * 8 * 4  # keys and values, 4 planes, 2 layers, 2 heads of 8, float32
    assert sent == sum(len(p) for p in prompts) * token + len(prompts) * 32 * 4


@pytest.mark.parametrize("environment", TRANSPORTS)
def test_kv_on_decode_equals_kv_on_prefill(checkpoint: Path, environment: dict[str, str]) -> None:
    """Goal: every plane and layer arrives byte for byte. Method: keep the ack back, read both sides, compare."""
    prompt, _ = some_requests(1, seed=5)[0]
    with PDEngine(checkpoint, config(), environment=environment) as engine:
        acks = Hold(engine, "prefill", m.Ack)
        engine.add_request(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        until(engine, lambda: bool(acks.kept))
        tid = acks.kept[0].tid
        source = engine.control("prefill", "pages", tid=tid, tokens=len(prompt))
        target = engine.control("decode", "pages", tid=tid, tokens=len(prompt))
        acks.let_go()
        settled(engine)

    assert len(source["planes"]) == len(target["planes"]) == 4
    assert source["planes"] == target["planes"]
    assert len({bytes(keys) for keys, _ in source["planes"]}) == 4, "planes that are alike would prove nothing"


@pytest.mark.parametrize("page", [0, 2, 5])
def test_a_page_that_is_wrong_on_decode_changes_the_output(checkpoint: Path, page: int) -> None:
    """Goal: the equality tests can fail. Method: a third process's writes zero one imported page before activation;
    the log-probabilities of the answer must differ from those of an untouched run."""
    prompt = some_requests(1, seed=5)[0][0]
    prompt = (prompt * 20)[:96]
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=True)

    def run(spoil: bool) -> list[float | None]:
        with PDEngine(checkpoint, config()) as engine:
            commits = Hold(engine, "decode", m.CommitToDecode)
            engine.add_request(prompt, params)
            until(engine, lambda: bool(commits.kept))
            (generation,) = engine.core.generations.values()
            until(engine, lambda: "drained" in generation.timeline)  # everything has landed
            if spoil:
                assert generation.reservation is not None
                stranger = Stranger(engine)
                stranger.zero(engine, generation.reservation.tables, page)
                stranger.close()
            commits.let_go()
            (output,) = outputs_of(engine, 1)
            settled(engine)
        return output.logprobs

    assert run(spoil=False) != run(spoil=True)


@pytest.mark.parametrize("milestone", ["waiting", "reserved", "computed", "submitted", "received", "activated"])
def test_a_cancel_at_every_point_settles_everything(checkpoint: Path, milestone: str) -> None:
    """Goal: no leak and no wait on cancel. Method: cancel some of many requests at one point each; the rest is right,
    and afterwards nothing is held."""
    requests = some_requests(10, seed=3)
    prompts, params = [p for p, _ in requests], [s for _, s in requests]
    wanted = LLMEngine(checkpoint, CacheConfig(512)).generate(prompts, params)

    with PDEngine(checkpoint, config()) as engine:
        outputs: dict[str, PDOutput] = {}
        points = {}
        for place, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(prompt, chosen, f"keep-{place}")
            if place % 2 == 0:
                longer = SamplingParams(max_tokens=129 - len(prompt), ignore_eos=True)
                points[engine.add_request(prompt, longer, f"drop-{place}")] = milestone
        if milestone == "waiting":
            for name in points:
                assert engine.abort(name)
            points = {}
        end = time.monotonic() + PATIENCE_S
        while len(outputs) < 15:
            for name in engine.reached(points):
                assert engine.abort(name)
                points.pop(name)
            for output in engine.step(0.002):
                outputs[output.request_id] = output
            assert time.monotonic() < end
        settled(engine)

    assert [outputs[f"keep-{p}"].token_ids for p in range(10)] == [w.token_ids for w in wanted]
    assert {outputs[f"drop-{p}"].finish_reason for p in range(0, 10, 2)} == {"abort"}


def test_an_id_is_free_as_soon_as_its_output_is_out(checkpoint: Path) -> None:
    """Goal: a client may reuse its id while the old generation still retires. Method: keep the old ack back."""
    prompt, _ = some_requests(1, seed=5)[0]
    with PDEngine(checkpoint, config()) as engine:
        acks = Hold(engine, "prefill", m.Ack)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add_request(prompt, params, "mine")
        with pytest.raises(ConfigError, match="in use"):
            engine.add_request(prompt, params, "mine")
        first = outputs_of(engine, 1)
        assert any("prefill" in o.holder for o in engine.obligations()), "P must still hold: it has no ack"
        engine.add_request(prompt, params, "mine")
        second = outputs_of(engine, 1)
        assert len(acks.kept) == 2
        acks.let_go()
        settled(engine)
    assert first[0].token_ids == second[0].token_ids


def test_a_deadline_ends_the_request_and_frees_nothing_by_itself(checkpoint: Path) -> None:
    """Goal: time is no evidence. Method: keep the ack and the cancel from P; the output is out, P's hold stays."""
    prompt, _ = some_requests(1, seed=5)[0]
    with PDEngine(checkpoint, config(request_timeout_s=1.0)) as engine:
        acks = Hold(engine, "prefill", m.Ack, m.Cancel)
        engine.add_request(prompt, SamplingParams(max_tokens=129 - len(prompt), ignore_eos=True))
        outputs = outputs_of(engine, 1)
        assert outputs[0].finish_reason in ("deadline", "length")
        assert any(o.holder.startswith("prefill") for o in engine.obligations())
        acks.let_go()
        settled(engine)


@pytest.mark.parametrize("environment", TRANSPORTS)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_killed_worker_ends_the_engine_with_a_clear_error(
    checkpoint: Path, victim: str, environment: dict[str, str]
) -> None:
    """Goal: kill -9 mid-transfer loses requests, not safety. Method: kill while writes are under way; every request
    ends with the reason, the survivor is alive until close, and then no process is left."""
    requests = some_requests(12, seed=7)
    engine = PDEngine(checkpoint, config(inflight_bytes=4096, posts_per_tick=1), environment=environment)
    try:
        for prompt, params in requests:
            engine.add_request(prompt, params)
        outputs = until(engine, lambda: any(g.timeline.get("computed") for g in engine.core.generations.values()))
        pid = engine.clients[victim].process.pid
        assert pid is not None
        os.kill(pid, 9)
        outputs += outputs_of(engine, len(requests) - len(outputs))
        until(engine, lambda: f"{victim} worker ended: killed by signal 9" in engine.failure)
        assert [o for o in outputs if o.error], "some request must have been lost"
        assert all("worker" in o.error or o.finish_reason in ("stop", "length") for o in outputs)
        with pytest.raises(EngineFailed, match="killed by signal 9"):
            engine.add_request(*requests[0])
        if victim == "prefill":
            assert engine.drain(PATIENCE_S), "D must retire every generation by itself"
            assert engine.clients["decode"].process.is_alive(), "D's memory outlives P"
            assert engine.control("decode", "metrics")["free_blocks"] == BLOCKS
    finally:
        engine.close()
    assert not any(client.process.is_alive() for client in engine.clients.values())


def test_a_failed_write_quarantines_p_and_lets_d_retire(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a transport error fails closed, P before D. Method: P is told addresses that D never registered, so its
    first write is refused; P must end, and D must give every page back by its fence."""
    send = StageClient.send

    def mislead(client: StageClient, message: Any) -> None:
        if isinstance(message, m.Connect) and client.role == "prefill":
            wrong = msgspec.structs.replace(message.geometry, key_ptr=1 << 20, value_ptr=1 << 30)
            message = msgspec.structs.replace(message, geometry=wrong)
        send(client, message)

    monkeypatch.setattr(StageClient, "send", mislead)
    with PDEngine(checkpoint, config()) as engine:
        for prompt, params in some_requests(6, seed=13):
            engine.add_request(prompt, params)
        outputs = outputs_of(engine, 6)
        until(engine, lambda: engine.core.worker_state("prefill_worker") == "failed")
        assert engine.drain(PATIENCE_S), "D must retire every generation by itself"
        assert engine.control("decode", "metrics")["free_blocks"] == BLOCKS
        assert engine.obligations() == []
        assert not engine.clients["prefill"].process.is_alive()
        assert engine.clients["decode"].process.is_alive()
    assert "prefill worker: post failed" in engine.failure
    assert all("post failed" in o.error for o in outputs)


def test_workers_with_different_weights_do_not_start(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: KV of one model never reaches another. Method: the same config with other weights on D."""
    other = write_checkpoint(tmp_path, seed=2)
    make = PDEngine._order

    def swap(engine: PDEngine, role: str, *rest: Any) -> WorkerOrder:
        order = make(engine, role, *rest)
        return replace(order, model_dir=other) if role == "decode" else order

    monkeypatch.setattr(PDEngine, "_order", swap)
    with pytest.raises(EngineFailed, match="the workers disagree on the model"):
        PDEngine(checkpoint, config())


def test_close_with_live_requests_ends_everything(checkpoint: Path) -> None:
    """Goal: close never hangs and loses nothing silently. Method: close in the middle of many requests."""
    engine = PDEngine(checkpoint, config())
    for prompt, params in some_requests(12, seed=9):
        engine.add_request(prompt, params)
    engine.step(0.01)
    engine.close()

    assert engine.core.generations == {}
    assert [c.stopped is not None for c in engine.clients.values()] == [True, True]
    with pytest.raises(EngineFailed, match="closed"):
        engine.add_request([5, 6], SamplingParams(max_tokens=1))


def test_what_can_never_be_served_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    """Goal: refusals name the field and the value, and change nothing. Method: one of each kind."""
    with pytest.raises(UnsupportedModel, match="huginn_raven"):
        (tmp_path / "config.json").write_text('{"model_type": "huginn_raven"}', encoding="utf-8")
        PDEngine(tmp_path)
    with pytest.raises(ConfigError, match="block_size"):
        config(decode_cache=CacheConfig(BLOCKS, block_size=8))
    with PDEngine(checkpoint, config(max_pending_requests=1, decode_cache=CacheConfig(16))) as engine:
        with pytest.raises(ConfigError, match=r"decode_cache.num_blocks"):
            engine.add_request([5] * 90, SamplingParams(max_tokens=8))
        with pytest.raises(ConfigError, match="prompt = 64: give an integer from 0 to 63"):
            engine.add_request([64], SamplingParams(max_tokens=8))
        engine.add_request([5] * 20, SamplingParams(max_tokens=8, ignore_eos=True))
        with pytest.raises(EngineOverloaded, match="max_pending_requests is 1"):
            engine.add_request([5] * 20, SamplingParams(max_tokens=8))
        until(engine, lambda: not engine.has_unfinished())
        with pytest.raises(RuntimeError, match="no control 'nonsense'"):
            engine.control("decode", "nonsense")


def test_scarcity_makes_requests_wait_and_nothing_else(checkpoint: Path) -> None:
    """Goal: with pages for one request at a time everything still ends. Method: one decode slot, 24 pages a side."""
    requests = [(p[:40], s) for p, s in some_requests(8, seed=11)]
    prompts, params = [p for p, _ in requests], [s for _, s in requests]
    wanted = LLMEngine(checkpoint, CacheConfig(512)).generate(prompts, params)
    small = config(
        prefill_cache=CacheConfig(16),
        decode_cache=CacheConfig(20),
        prefill_scheduler=SchedulerConfig(prefill_chunk_size=16, max_num_seqs=1),
        decode_scheduler=SchedulerConfig(max_num_seqs=1),
    )

    with PDEngine(checkpoint, small) as engine:
        outputs = engine.generate(prompts, params)
        assert engine.drain(PATIENCE_S)

    assert [o.token_ids for o in outputs] == [w.token_ids for w in wanted]
