"""The engine whole: against the oracle, as a P/D pair joined by hand, and under every wrong call."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from reference_ouro import Reference, write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import engine
from engine.cache.pages import CacheError, LeaseError
from engine.config import CacheConfig, ConfigError, SamplingParams, SchedulerConfig
from engine.execute.device import PAST
from engine.execute.sampling import LogitsError, Sampled, Sampler
from engine.local import EngineCore, LLMEngine, Output, PrefillProgress, Role, TokenOutput
from engine.models.loading import load_model
from engine.models.ouro import OuroModel
from engine.schedule.request import FinishReason, Stage
from engine.schedule.scheduler import SchedulerError

BLOCK = 4
EMBEDDED = Path(engine.__file__).parent / "embedded" / "data"
MARGIN = 1e-3
"""Decisions of the oracle closer than this may fall otherwise in float32; such draws are left out."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four random checkpoints: one with as many KV heads as heads, one of another depth."""
    root = tmp_path_factory.mktemp("checkpoints")
    changes: list[dict[str, Any]] = [{}, {}, {"num_key_value_heads": 4}, {"total_ut_steps": 3}]
    return [write_checkpoint(root / str(seed), seed=seed, **change) for seed, change in enumerate(changes)]


@pytest.fixture(scope="module")
def model(folders: list[Path]) -> OuroModel:
    return load_model(folders[1])


def make_core(model: OuroModel, role: Role = "both", num_blocks: int = 96, **knobs: Any) -> EngineCore:
    slots = 0 if role == "both" else 4
    return EngineCore(model, CacheConfig(num_blocks, BLOCK), SchedulerConfig(**knobs), "cpu", role, slots)


def run(core: EngineCore) -> dict[str, list[TokenOutput]]:
    """Step until nothing can run, checking the books each time; the outputs by request."""
    outputs: dict[str, list[TokenOutput]] = {}
    while core.has_runnable():
        for output in core.step_tokens():
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
        assert core.last_event().done()
    return outputs


class Recorder(Sampler):
    """Records every row of logits by request, and forces the tokens that it is given."""

    def __init__(self, core: EngineCore, forced: dict[str, list[int]]) -> None:
        super().__init__(core.scheduler_config.max_num_seqs)
        self.core, self.forced = core, forced
        self.logits: dict[str, list[torch.Tensor]] = {}

    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> Sampled:
        sampled = super().sample(logits, slots)
        by_slot = {request.slot: request for request in self.core.scheduler.requests.values()}
        for row, slot in enumerate(slots):
            request = by_slot[slot]
            self.logits.setdefault(request.request_id, []).append(logits[row].clone())
            forced = self.forced.get(request.request_id, [])
            if len(request.output_ids) < len(forced):
                sampled.token_ids[row] = forced[len(request.output_ids)]
        return sampled


PROMPTS = st.lists(st.integers(1, 63), min_size=1, max_size=20)


@given(data=st.data(), which=st.integers(0, 3))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_the_engine_equals_the_oracle(folders: list[Path], data: st.DataObject, which: int) -> None:
    """Goal: paging, chunks, batches and early exits change no number.

    Method: random prompts, parameters and batch knobs; tokens, exit depths and logits against the dense oracle.
    """
    draw, reference = data.draw, Reference(folders[which])
    core = make_core(
        load_model(folders[which]),
        num_blocks=draw(st.sampled_from([48, 96, 200])),
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(1, 24)),
        prefill_chunk_size=draw(st.integers(1, 24)),
        max_prefill_batches_before_decode=draw(st.integers(1, 3)),
        mode=draw(st.sampled_from(["refill", "no_refill"])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        wavefront_prefill=draw(st.booleans()),
    )
    expected, forced = {}, {}
    for number in range(draw(st.integers(1, 5))):
        name, prompt, max_tokens = f"r{number}", draw(PROMPTS), draw(st.integers(1, 10))
        min_loops = draw(st.integers(1, 3))
        max_loops = draw(st.none() | st.integers(min_loops, reference.loops))
        threshold = draw(st.sampled_from([0.0, 0.4, 0.6, 0.8, 0.9, 1.0]))
        forced[name] = draw(st.lists(st.integers(1, 63), max_size=max_tokens))
        how: dict[str, Any] = {"min_loops": min_loops, "max_loops": max_loops}
        mode = draw(st.sampled_from(["ouro", "ouro_delayed", "trace"]))
        if mode == "trace":
            depth = st.integers(min_loops, min(max_loops or reference.loops, reference.loops))
            depths = [reference.loops, *draw(st.lists(depth, min_size=max_tokens, max_size=max_tokens))]
            params = SamplingParams(max_tokens, exit_trace=tuple(depths), **how)
            how["depths"] = depths
        else:
            params = SamplingParams(max_tokens, exit_threshold=threshold, exit_mode=mode, **how)
            how |= {"threshold": threshold, "delayed": mode == "ouro_delayed"}
        trace = reference.run(prompt, max_tokens, forced=forced[name], stop_ids=[0], **how)
        assume(trace.margin > MARGIN)
        core.add_request(name, prompt, params, priority=draw(st.integers(0, 2)))
        expected[name] = trace
    recorder = Recorder(core, forced)
    core.runner.sampler = recorder
    outputs = run(core)

    assert set(outputs) == set(expected)
    for name, trace in expected.items():
        assert [output.token_id for output in outputs[name]] == trace.token_ids
        assert [output.exit_depth for output in outputs[name]] == trace.exit_depths
        np.testing.assert_allclose(torch.stack(recorder.logits[name]).numpy(), np.array(trace.logits), atol=2e-3)
        assert [output.finished for output in outputs[name]] == [False] * (len(trace.token_ids) - 1) + [True]
    assert core.pages.free_blocks == core.pages.num_blocks and not core.scheduler.requests


def test_early_exits_really_happen_and_matter(folders: list[Path]) -> None:
    """Goal: the comparison above is not empty. Method: one prompt leaves at 2, 3 and 4 loops; text differs."""
    reference = Reference(folders[1])
    prompt = [3, 4, 5, 6, 7, 8, 9]
    trace = reference.run(prompt, 12, threshold=0.8)
    llm = LLMEngine(folders[1])
    early, full = llm.generate(
        [prompt, prompt], [SamplingParams(12, exit_threshold=0.8, ignore_eos=True), SamplingParams(12, ignore_eos=True)]
    )

    assert set(early.exit_depths) == {2, 3, 4} and full.exit_depths == [4] * 12
    assert early.token_ids == trace.token_ids != full.token_ids


def move_kv(source: EngineCore, target: EngineCore, request_id: str, start: int, end: int) -> None:
    """What a connector does: copy tokens [start, end) of every plane and layer, table to table."""
    source_tables, target_tables = source.block_tables(request_id), target.block_tables(request_id)
    for source_table, target_table in zip(source_tables, target_tables, strict=True):
        for token in range(start, end):
            page, offset = divmod(token, BLOCK)
            for mine, theirs in (
                (source.storage.keys, target.storage.keys),
                (source.storage.values, target.storage.values),
            ):
                theirs[target_table[page], :, offset] = mine[source_table[page], :, offset]


class Pair:
    """A prefill and a decode engine joined by hand: reserve, move each chunk, stage the hidden row, activate."""

    def __init__(self, model: OuroModel, **knobs: Any) -> None:
        self.prefill = make_core(model, "prefill", **knobs)
        self.decode = make_core(model, "decode", **knobs)
        self.outputs: dict[str, list[TokenOutput]] = {}

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams, slot: int) -> None:
        assert self.decode.reserve(request_id, prompt, params, slot)
        self.prefill.add_request(request_id, prompt, params)
        self.prefill.set_staging_slot(request_id, slot)

    def step(self) -> list[PrefillProgress]:
        done = self.prefill.step_prefill()
        for progress in done:
            assert progress.event.done()
            if not progress.whole:
                continue
            move_kv(self.prefill, self.decode, progress.request_id, progress.start, progress.end)
            if progress.final:
                assert progress.staged_event is not None and progress.staged_event.done()
                slot = self.decode._staging[progress.request_id]
                self.decode.storage.hidden[slot].copy_(self.prefill.storage.hidden[slot])
                assert self.prefill.stage(progress.request_id) is Stage.HELD
                self.prefill.release(progress.request_id)
        self.prefill.check_integrity()
        self.decode.check_integrity()
        return done

    def drain(self) -> None:
        for request_id, outputs in run(self.decode).items():
            self.outputs.setdefault(request_id, []).extend(outputs)
            if outputs[-1].finished:
                assert self.decode.stage(request_id) is Stage.FINISHED
                self.decode.release(request_id)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_a_pair_joined_by_hand_equals_one_engine(folders: list[Path], data: st.DataObject, seed: int) -> None:
    """Goal: the P/D contract carries everything that decoding needs.

    Method: seeded sampling, one engine as oracle. In float64, where no batch shape turns a decision.
    """
    model = load_model(folders[1], torch.float64)
    chunk = data.draw(st.integers(1, 9))
    wave = data.draw(st.booleans())
    pair, single = Pair(model, prefill_chunk_size=chunk, wavefront_prefill=wave), make_core(model)
    rng = random.Random(seed)
    for slot in range(data.draw(st.integers(1, 4))):
        prompt = [rng.randrange(1, 64) for _ in range(rng.randint(1, 15))]
        params = SamplingParams(
            rng.randint(1, 8), temperature=rng.choice([0.0, 0.7]), seed=rng.randrange(99), exit_threshold=0.8
        )
        pair.submit(f"r{slot}", prompt, params, slot)
        single.add_request(f"r{slot}", prompt, params)
    while pair.prefill.has_runnable():
        for progress in pair.step():
            if progress.final:
                assert pair.decode.activate(progress.request_id).done()
        if rng.random() < 0.5:
            pair.drain()
    pair.drain()

    assert pair.outputs == run(single)
    for core in (pair.prefill, pair.decode):
        assert core.pages.free_blocks == core.pages.num_blocks and not core.scheduler.requests


def test_the_imported_pages_are_those_of_one_engine(model: OuroModel) -> None:
    """Goal: KV bytes are identical in float32 at the same geometry. Method: compare pages before the first token."""
    pair, single = Pair(model), make_core(model)
    prompt = list(range(1, 13))  # three full pages
    pair.submit("a", prompt, SamplingParams(1), 0)
    single.add_request("a", prompt, SamplingParams(1))
    single.step()
    (progress,) = pair.step()

    assert (progress.start, progress.end, progress.final) == (0, 12, True)
    for mine, theirs in zip(pair.decode.block_tables("a"), single.block_tables("a"), strict=True):
        for block, other in zip(mine, theirs, strict=True):
            assert pair.decode.storage.page_bytes(block) == single.storage.page_bytes(other) != (b"", b"")
    assert torch.equal(pair.decode.storage.hidden[0], single.runner.hidden[single.scheduler.get("a").compute_slot])


def test_a_decode_engine_idles_while_it_receives(model: OuroModel) -> None:
    """Goal: waiting for remote KV is no error and no work. Method: only RECEIVING requests; then cancel one."""
    core = make_core(model, "decode", num_blocks=32)
    assert core.reserve("a", [1, 2, 3], SamplingParams(14), 0)
    assert core.blocks_needed(3, 14) == 16 == 32 - core.pages.free_blocks
    assert core.reserve("b", [1, 2, 3], SamplingParams(14), 1)
    assert core.reserve("c", [1], SamplingParams(1), 2) is False
    core.check_integrity()
    assert not core.has_runnable() and core.step() == []
    with pytest.raises(SchedulerError, match="'a' is still receiving; remove it first"):
        core.release("a")
    core.pages.lease("a", "writer")
    core.remove("a")
    with pytest.raises(LeaseError, match="'a' cannot be freed: held by 'writer'"):
        core.release("a")
    core.check_integrity()
    assert core.pages.free_blocks == 0 and core.stage("a") is Stage.FINISHED
    core.pages.unlease("a", "writer")
    core.release("a")

    assert core.reserve("z", [5], SamplingParams(1), 0), "pages and staging slot are free again"
    assert core.reserve("a", [5], SamplingParams(1), 2), "and so is the id"


def test_no_step_reads_what_is_not_written(model: OuroModel) -> None:
    """Goal: attention never runs over missing KV. Method: take one layer's mark back before each reading stage."""
    core = make_core(model, prefill_chunk_size=2)
    core.add_request("a", [1, 2, 3], SamplingParams(3))
    core.step()
    state = core.pages._allocations["a"].written[2][1]
    state.prefix = 1
    with pytest.raises(CacheError, match="plane 2, layer 1 is written up to 1 of 2"):
        core.step()
    core.remove("a")
    core.release("a")
    core.add_request("a", [1, 2], SamplingParams(3))
    for _ in range(3):  # prefill, coda, prelude
        core.step()
    core.pages._allocations["a"].written[0][1].prefix = 1

    with pytest.raises(CacheError, match="plane 0, layer 1 is written up to 1 of 2"):
        core.step()


def test_a_prefill_engine_never_samples(model: OuroModel) -> None:
    """Goal: P stops after the prompt, whatever max_tokens says. Method: chunked prompt; pages cover the prompt only."""
    core = make_core(model, "prefill", prefill_chunk_size=3)
    core.add_request("a", [1, 2, 3, 4, 5], SamplingParams(100))
    core.set_staging_slot("a", 2)
    first, second = core.step(), core.step()

    assert first == [PrefillProgress("a", 0, 3, True, False, PAST, None)]
    assert second == [PrefillProgress("a", 3, 5, True, True, PAST, PAST)]
    assert core.step() == [] and not core.has_runnable()
    assert core.storage.hidden[2].any() and not core.storage.hidden[[0, 1, 3]].any()
    assert 96 - core.pages.free_blocks == core.blocks_needed(5, 100) == 8
    core.remove("a")
    core.release("a")
    assert core.pages.free_blocks == 96


def test_a_prompt_without_a_staging_slot_does_not_end(model: OuroModel) -> None:
    """Goal: the hidden row is never lost. Method: the last chunk is refused until the slot is set; then it runs."""
    core = make_core(model, "prefill")
    core.add_request("a", [1, 2], SamplingParams(1))
    with pytest.raises(SchedulerError, match=r"\['a'\] would end their prompts without a staging slot"):
        core.step()
    core.set_staging_slot("a", 0)

    assert [progress.final for progress in core.step_prefill()] == [True]


def wrong_calls() -> dict[str, tuple[Role, Callable[[EngineCore], Any], type[Exception], str]]:
    one = SamplingParams(1)
    return {
        "unknown role": ("both", lambda c: make_core(c.model, "relay"), ConfigError, "role = 'relay'"),  # type: ignore[arg-type]
        "empty prompt": ("both", lambda c: c.add_request("a", [], one), ConfigError, "prompt = []"),
        "foreign token": ("both", lambda c: c.add_request("a", [64], one), ConfigError, "prompt = 64"),
        "negative token": ("both", lambda c: c.add_request("a", [-1], one), ConfigError, "prompt = -1"),
        "too deep": (
            "both",
            lambda c: c.add_request("a", [1], SamplingParams(1, max_loops=5)),
            ConfigError,
            "max_loops = 5: the model has 4 loops",
        ),
        "too long": (
            "both",
            lambda c: c.add_request("a", [1] * 100, SamplingParams(30)),
            ConfigError,
            "max_tokens = 30: with a prompt of 100 tokens exceeds the model's 128 positions",
        ),
        "foreign stop": (
            "both",
            lambda c: c.add_request("a", [1], SamplingParams(1, stop_token_ids=(64,))),
            ConfigError,
            "stop_token_ids = 64",
        ),
        "never fits": (
            "both",
            lambda c: c.add_request("a", [1] * 100, one),
            SchedulerError,
            "needs 100 pages for 100 tokens; the pool has 96",
        ),
        "reserve on both": ("both", lambda c: c.reserve("a", [1], one, 0), SchedulerError, "reserve is not for"),
        "activate on both": ("both", lambda c: c.activate("a"), SchedulerError, "activate is not for"),
        "add on decode": ("decode", lambda c: c.add_request("a", [1], one), SchedulerError, "role 'decode'"),
        "staging on decode": ("decode", lambda c: c.set_staging_slot("a", 0), SchedulerError, "role 'decode'"),
        "slot beyond": ("decode", lambda c: c.reserve("a", [1], one, 4), ConfigError, "slot = 4"),
        "slot of nobody": ("prefill", lambda c: c.set_staging_slot("a", 0), SchedulerError, "'a' is not known"),
        "activate nobody": ("decode", lambda c: c.activate("a"), SchedulerError, "'a' is not known"),
        "release nobody": ("both", lambda c: c.release("a"), SchedulerError, "'a' is not known"),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_a_wrong_call_changes_nothing(model: OuroModel, name: str) -> None:
    """Goal: mistakes are named and harmless. Method: one wrong call on a fresh core; its books stay as they were."""
    role, call, error, message = wrong_calls()[name]
    core = make_core(model, role)
    with pytest.raises(error) as caught:
        call(core)

    assert message in str(caught.value)
    core.check_integrity()
    assert core.pages.free_blocks == 96 and not core.scheduler.requests and not core.has_runnable()


def test_a_staging_slot_has_one_owner(model: OuroModel) -> None:
    """Goal: two hidden rows never meet. Method: reserve the same slot twice; after activation it is free again."""
    pair = Pair(model)
    pair.submit("a", [1, 2], SamplingParams(2), 1)
    with pytest.raises(ConfigError, match="slot = 1: is the staging slot of request 'a'"):
        pair.decode.reserve("b", [1], SamplingParams(1), 1)
    with pytest.raises(ConfigError, match="slot = 1: is the staging slot of request 'a'"):
        pair.prefill.add_request("b", [1], SamplingParams(1))
        pair.prefill.set_staging_slot("b", 1)
    pair.prefill.set_staging_slot("b", 0)
    pair.prefill.step()
    pair.decode.activate("a")

    assert pair.decode.reserve("b", [1], SamplingParams(1), 1)


def test_import_into_written_pages_is_refused(model: OuroModel) -> None:
    """Goal: a handoff is consumed once. Method: activate twice; and damaged books are seen by the check."""
    core = make_core(model, "decode")
    assert core.reserve("a", [1, 2], SamplingParams(3), 0)
    core.activate("a")
    with pytest.raises(SchedulerError, match="'a' cannot be activated in stage coda"):
        core.activate("a")
    core.check_integrity()
    core.scheduler.requests.pop("a")

    with pytest.raises(SchedulerError, match=r"compute slots|unknown requests"):
        core.check_integrity()


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_aborts_at_any_point_disturb_nobody(folders: list[Path], seed: int) -> None:
    """Goal: who stays gets the same tokens; ids and pages come back.

    Method: aborts between steps; each prompt alone as oracle. In float64, where no batch shape turns a decision.
    """
    rng = random.Random(seed)
    knobs = SchedulerConfig(max_num_seqs=3, prefill_chunk_size=4)
    llm = LLMEngine(folders[1], CacheConfig(64, BLOCK), knobs, dtype=torch.float64)
    prompts = {f"r{number}": [rng.randrange(1, 64) for _ in range(rng.randint(1, 9))] for number in range(6)}
    params = SamplingParams(6, temperature=0.9, seed=seed % 1000, exit_threshold=0.8)
    for name, prompt in prompts.items():
        llm.add_request(prompt, params, name)
    results: dict[str, Output] = {}
    while llm.has_unfinished():
        if rng.random() < 0.1:
            name = rng.choice(list(prompts))
            aborted = llm.abort(name)
            if aborted is not None:
                assert aborted.finish_reason is FinishReason.ABORT
                llm.add_request(prompts[name], params, name)  # the id is free at once
        results.update((output.request_id, output) for output in llm.step())
        llm.core.check_integrity()

    assert llm.core.pages.free_blocks == 64 and set(results) == set(prompts)
    alone = LLMEngine(folders[1], CacheConfig(64, BLOCK), dtype=torch.float64)
    for name, prompt in prompts.items():
        assert alone.generate([prompt], params)[0].token_ids == results[name].token_ids


def test_damaged_weights_end_the_call_and_leave_a_clean_engine(folders: list[Path]) -> None:
    """Goal: fail closed. Method: a NaN in the head: generate raises, every page is back, and repair serves again."""
    llm = LLMEngine(folders[0])
    head = llm.core.model.weights.head
    kept = head[3, 3].clone()
    head[3, 3] = torch.nan
    with pytest.raises(LogitsError, match="no finite maximum"):
        llm.generate([[1, 2], [3]], SamplingParams(3))
    llm.core.check_integrity()
    assert not llm.has_unfinished() and llm.core.pages.free_blocks == 256
    head[3, 3] = kept

    assert len(llm.generate([[1, 2]], SamplingParams(3, ignore_eos=True))[0].token_ids) == 3


def test_eos_stop_and_length(folders: list[Path]) -> None:
    """Goal: each way to end. Method: make the first greedy token the model's eos, a stop token, or neither."""
    first = Reference(folders[0]).run([7, 8], 1).token_ids[0]

    def ends(params: SamplingParams, **changes: Any) -> tuple[FinishReason | None, int]:
        folder = folders[0].parent / f"eos-{len(changes)}"
        llm = LLMEngine(write_checkpoint(folder, seed=0, **changes))
        output = llm.generate([[7, 8]], params)[0]
        return output.finish_reason, len(output.token_ids)

    assert ends(SamplingParams(3), eos_token_id=first) == (FinishReason.STOP, 1)
    assert ends(SamplingParams(3, ignore_eos=True), eos_token_id=first) == (FinishReason.LENGTH, 3)
    assert ends(SamplingParams(3, ignore_eos=True, stop_token_ids=(first,)), eos_token_id=first)[1] == 1
    assert ends(SamplingParams(1)) == (FinishReason.LENGTH, 1)


def test_text_goes_in_and_comes_out(tmp_path: Path, folders: list[Path]) -> None:
    """Goal: prompts and outputs as text; the stop token is not shown. Method: a letter tokenizer beside the weights."""
    folder = write_checkpoint(tmp_path, seed=0)
    vocab = {chr(ord("0") + index): index for index in range(64)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    llm = LLMEngine(folder)
    by_text, by_ids = llm.generate(["78", [7, 8]], SamplingParams(4, ignore_eos=True))
    stop = SamplingParams(4, ignore_eos=True, stop_token_ids=(by_ids.token_ids[0],))

    assert by_text.prompt_ids == [7, 8] and by_text.token_ids == by_ids.token_ids
    assert by_ids.text == "".join(chr(ord("0") + token) for token in by_ids.token_ids)
    assert llm.generate([[7, 8]], stop)[0].text == ""
    with pytest.raises(ConfigError, match=r"prompt = '78': the checkpoint has no tokenizer\.json"):
        LLMEngine(folders[0]).add_request("78", stop)


def test_generate_needs_an_idle_engine_and_matching_params(folders: list[Path]) -> None:
    """Goal: no output is lost by mixing two ways of use. Method: a request pending; one params too few."""
    llm = LLMEngine(folders[0])
    with pytest.raises(ConfigError, match="params = 1: give one for all or one for each of 2 prompts"):
        llm.generate([[1], [2]], [SamplingParams(1)])
    llm.add_request([1], SamplingParams(1))
    with pytest.raises(SchedulerError, match="1 requests are unfinished"):
        llm.generate([[1]], SamplingParams(1))

    assert llm.abort("unknown") is None


def test_bfloat16_runs_and_stays_near(folders: list[Path]) -> None:
    """Goal: the low-precision path works. Method: logits of one prompt within a stated tolerance of the oracle."""
    core = make_core(load_model(folders[1], torch.bfloat16))
    core.add_request("a", [3, 4, 5, 6], SamplingParams(4))
    recorder = Recorder(core, {"a": [9, 8, 7, 6]})
    core.runner.sampler = recorder
    run(core)
    expected = np.array(Reference(folders[1]).run([3, 4, 5, 6], 4, forced=[9, 8, 7, 6]).logits)
    actual = torch.stack(recorder.logits["a"]).numpy()

    assert np.abs(actual - expected).mean() < 0.1 * np.abs(expected).mean()
    assert not np.allclose(actual, expected, atol=1e-4), "a float32 run would be far nearer: bfloat16 was not used"


def test_the_fingerprint_of_a_core_covers_weights_and_dtype(folders: list[Path]) -> None:
    """Goal: two cores agree exactly when they compute alike. Method: one checkpoint twice, another, another dtype."""
    prints = [
        make_core(load_model(folder, dtype)).fingerprint()
        for folder, dtype in [
            (folders[0], torch.float32),
            (folders[0], torch.float32),
            (folders[1], torch.float32),
            (folders[0], torch.bfloat16),
        ]
    ]

    assert prints[0] == prints[1] and len(set(prints)) == 3


if (EMBEDDED / "prompts.jsonl").is_file():

    def test_the_embedded_model_answers_its_prompts() -> None:
        """Goal: the whole path gives right answers, not only equal ones. Method: each fourth prompt shipped."""
        rows = [json.loads(line) for line in (EMBEDDED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()][::4]
        llm = LLMEngine(EMBEDDED, CacheConfig(1024))
        outputs = llm.generate([row["prompt"] for row in rows], [SamplingParams(row["max_tokens"]) for row in rows])

        assert rows and [output.text for output in outputs] == [row["answer"] for row in rows]
