"""The embedded model: its files, its task, its slow decoder, and that training it twice gives the same bytes.

The decoder is held against the float64 oracle of reference_ouro.py, which shares no code with it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_ouro import Reference
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.embedded import recipe, tasks
from engine.embedded.batches import make_batch
from engine.embedded.evaluate import PAGE_TOKENS, Output, Score, answers, decode, score, stale_page, zero_page
from engine.embedded.files import directory
from engine.embedded.gate import fit_gate, soft_exits
from engine.embedded.measure import Measured, main, page_kind
from engine.embedded.network import Network, Shape, load_network
from engine.embedded.ship import Run, prompt_rows, ship
from engine.embedded.tasks import EOS, PAD, UNK, VOCAB, Problem
from engine.embedded.train import main as train_main
from engine.embedded.train import train_trunk
from engine.models.loading import load_model

DATA = directory()
TINY = Shape(hidden=32, inner=64, heads=2, head_dim=16)
MARGIN_MIN = 1e-3
"""Decisions nearer than this may fall either way in float32."""


@pytest.fixture(scope="module")
def network() -> Network:
    return load_network(DATA)


@pytest.fixture(scope="module")
def exits() -> dict[str, Any]:
    """The recommended min_loops and exit_threshold."""
    found: dict[str, Any] = json.loads((DATA / "generation_config.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DATA / "tokenizer.json"))


def shipped() -> list[Problem]:
    """The prompts of the file, as problems."""
    rows = [json.loads(line) for line in (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        Problem(row["prompt"], row["answer"], row["prompt"].index("?") // 4, len(row["answer"]) // 3) for row in rows
    ]


# --- Files


def test_the_checkpoint_has_the_tensors_of_its_config() -> None:
    """Goal: any Ouro loader takes it. Method: names and shapes written out from config.json's numbers."""
    config = json.loads((DATA / "config.json").read_text(encoding="utf-8"))
    vocab, hidden, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    query, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    expected = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    expected |= {"model.early_exit_gate.weight": (1, hidden), "model.early_exit_gate.bias": (1,)}
    expected["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        expected |= {f"{prefix}self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        expected |= {f"{prefix}mlp.{name}_proj.weight": shape for name, shape in shapes.items()}
        for norm in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            expected[f"{prefix}{norm}.weight"] = (hidden,)
    tensors = load_file(DATA / "model.safetensors")

    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert (DATA / "model.safetensors").stat().st_size <= 4_000_000
    assert config["eos_token_id"] == EOS and config["model_type"] == "ouro" and config["total_ut_steps"] == 4
    load_model(DATA)


def test_the_shipped_files_are_those_that_the_script_writes() -> None:
    """Goal: code and data do not drift. Method: write config, tokenizer and prompts again and compare."""
    config = json.loads((DATA / "config.json").read_text(encoding="utf-8"))
    written = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]

    assert config == Shape().config() and Shape.from_config(config) == Shape()
    assert written == tasks.tokenizer_json()
    assert rows == prompt_rows(Run(recipe.SEED, recipe.STEPS, recipe.PER_SHAPE, 0.0).prompts_seed)


def test_the_card_names_its_recipe_and_the_recommended_threshold(exits: dict[str, Any]) -> None:
    """Goal: the card belongs to this checkpoint. Method: the figures that other files hold too."""
    text = (DATA / "README.md").read_text(encoding="utf-8")

    assert f"--seed {recipe.SEED} --steps {recipe.STEPS}" in text
    assert f"| {exits['exit_threshold']} (recommended) |" in text and exits["min_loops"] == 1
    assert "/home/" not in text and "/tmp/" not in text


@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=40))
def test_text_of_the_vocabulary_comes_back_whole(text: str) -> None:
    """Goal: tokens are text. Method: encode and decode random printable ASCII, unless it spells a special token."""
    tokenizer = Tokenizer.from_str(json.dumps(tasks.tokenizer_json()))
    if "<pad>" not in text and "<eos>" not in text:
        ids = tokenizer.encode(text).ids

        assert tokenizer.decode(ids) == text and ids == tasks.encode(text)


def test_an_unknown_character_is_kept_as_unk(tokenizer: Tokenizer) -> None:
    """Goal: nothing is dropped silently. Method: an accent, a tab, characters of three and four bytes."""
    for text, count in (("é", 1), ("a\tb", 1), ("a71 日本 ok", 2), ("x\U0001f600y", 1), ("\x00", 1)):
        ids = tokenizer.encode(text).ids

        assert len(ids) == len(text) and ids.count(UNK) == count and ids == tasks.encode(text)
        assert tokenizer.decode(ids).count("<unk>") == count


def test_prompts_are_token_ids_without_additions(tokenizer: Tokenizer) -> None:
    """Goal: the ids of a prompt are the exact input. Method: encode each, compare with one id per character."""
    for item in shipped():
        assert tokenizer.encode(item.prompt).ids == [VOCAB[character] for character in item.prompt]
        assert tokenizer.decode(item.wanted) == item.answer


# --- The task


def read_answer(prompt: str) -> str:
    """The right answer, read off the prompt's text alone."""
    body, question = prompt.removesuffix("=").split("?")
    values = {entry[0]: entry[1:] for entry in body.split()}
    return "".join(key + values[key] for key in question)


@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from(recipe.BUCKETS), held_out=st.booleans())
def test_a_problem_has_one_right_answer_and_keeps_its_bounds(seed: int, size: int, held_out: bool) -> None:
    """Goal: the generator is the task. Method: answer random draws from their text, check sizes and the split."""
    item = tasks.draw(random.Random(seed), size, held_out)

    assert item.answer == read_answer(item.prompt) and item.held_out == held_out
    assert len(item.prompt) == tasks.prompt_tokens(item.entries, item.asked)
    assert 1 <= item.asked <= min(item.entries, tasks.ASKED_MAX) and item.entries + item.asked <= size
    assert len(set(item.keys)) == item.asked


def test_a_problem_that_cannot_be_is_refused() -> None:
    """Goal: no silent clipping. Method: more keys than entries, more entries than letters, none asked."""
    for entries, asked in ((3, 4), (53, 1), (3, 0)):
        with pytest.raises(ValueError, match=f"asked = {asked} and entries = {entries}"):
            tasks.problem(random.Random(0), entries, asked)


def test_the_shipped_prompts_cover_what_an_engine_can_get_wrong() -> None:
    """Goal: lengths around page borders, answers over a border, shared prefixes. Method: count them in the file."""
    problems = shipped()
    lengths = [len(item.prompt) for item in problems]
    crossing = [p for p in problems if p.asked >= 10 and len(p.prompt) // 16 < (len(p.prompt) + 3 * p.asked) // 16]
    group = [p for p in problems if p.prompt.split("?")[0] == problems[-1].prompt.split("?")[0]]

    assert len(problems) == 40 == len({p.prompt for p in problems})
    assert all(p.held_out and p.answer == read_answer(p.prompt) for p in problems)
    assert min(lengths) >= 40 and max(lengths) <= 200 and max(lengths) - min(lengths) > 140
    assert {length % 16 for length in lengths} >= {15, 0, 1}
    assert sum(p.asked >= 2 for p in problems) >= 20 and len(crossing) >= 8
    assert len(group) == 8 and len(group[0].prompt.split("?")[0]) >= 8 * PAGE_TOKENS


def test_no_training_row_is_held_out() -> None:
    """Goal: the figures are about unseen problems. Method: read rows of every bucket back from their tokens."""
    letters = {place: token for token, place in VOCAB.items()}
    rng = random.Random(3)
    for size in recipe.BUCKETS:
        batch = make_batch(rng, size)
        for row, answer in zip(batch.tokens.tolist(), batch.answer.tolist(), strict=True):
            text = "".join(letters[token] for token in row if token not in (PAD, EOS))
            prompt, answered = text[: text.index("=") + 1], text[text.index("=") + 1 :]

            assert not Problem(prompt, answered, 0, 0).held_out and answered == read_answer(prompt)
            assert [row[place + 1] for place, wanted in enumerate(answer) if wanted] == [*tasks.encode(answered), EOS]


# --- The decoder and the network


def oracle_folder(folder: Path, model: Network) -> Path:
    """A checkpoint of the network, where the oracle reads it."""
    nothing = Score(1, 0, (0,) * model.shape.loops)
    ship(model, measured(nothing), Run(0, 0, 2, 0.0), folder)
    return folder


def measured(one: Score) -> Measured:
    """A measurement in which every score is the same one."""
    return Measured(
        full=one,
        chosen=0.5,
        gated={0.5: one},
        forced={1: one},
        cells={(10, 1): (one, one)},
        scattered=(one, one),
        pages={("zero", "1 key", "asked"): one},
        planes={(1, 0): one},
    )


@pytest.mark.parametrize("threshold", [1.0, 0.6])
def test_the_decoder_agrees_with_the_oracle(tmp_path: Path, threshold: float) -> None:
    """Goal: Ouro's equations and LAST_EXITED. Method: a random network with lively gates, in batch, against float64."""
    model = Network(TINY, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.weight("lm_head.weight").mul_(50)
        model.weight("model.early_exit_gate.weight").copy_(torch.randn(1, TINY.hidden, generator=generator) * 0.3)
        for name in model.names:
            if "norm" in name:
                model.weight(name).mul_(1 + 0.2 * torch.randn(model.weight(name).shape, generator=generator))
    problems = [tasks.problem(random.Random(seed), 5, 4) for seed in range(6)]
    reference = Reference(oracle_folder(tmp_path, model))
    expected = [
        reference.run(tasks.encode(p.prompt), len(p.wanted), min_loops=1, threshold=threshold, stop_ids=[EOS])
        for p in problems
    ]
    compared = [place for place, trace in enumerate(expected) if trace.margin > MARGIN_MIN]
    found = decode(model, problems, threshold)

    assert len(compared) >= 3, "choose other seeds: too many decisions are too close to compare"
    for place in compared:
        assert found[place] == Output(expected[place].token_ids, expected[place].exit_depths[1:])
    if threshold < 1:
        assert len({depth for place in compared for depth in found[place].depths}) >= 3


def test_the_training_network_agrees_with_the_oracle(network: Network) -> None:
    """Goal: training fits the equations that are shipped. Method: teacher-forced logits of the checkpoint, float64."""
    item = shipped()[0]
    trace = Reference(DATA).run(tasks.encode(item.prompt), len(item.wanted), forced=item.wanted)
    with torch.inference_mode():
        logits = network.logits(network(torch.tensor([[*tasks.encode(item.prompt), *item.wanted]]))[-1])[0]

    np.testing.assert_allclose(logits[len(item.prompt) - 1 : -1].numpy(), trace.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("scale", "bias"), [(0.0, 60.0), (0.0, -60.0), (60.0, 0.0)])
def test_soft_exits_of_a_sure_gate_are_hard_ones(tmp_path: Path, scale: float, bias: float) -> None:
    """Goal: the gate is fitted to what decoding does. Method: hazards of 0 and 1, teacher-forced, against float64."""
    model = Network(TINY, seed=1)
    gate = torch.randn(1, TINY.hidden, generator=torch.Generator().manual_seed(3)) * scale
    with torch.no_grad():
        model.weight("lm_head.weight").mul_(10)
        model.weight("model.early_exit_gate.weight").copy_(gate)
        model.weight("model.early_exit_gate.bias").fill_(bias)
    batch = make_batch(random.Random(4), 6, tokens_per_step=6 * (4 * 6 + 3))
    reference = Reference(oracle_folder(tmp_path, model))
    expected, depths = [], []
    for row, answer in zip(batch.tokens.tolist(), batch.answer.tolist(), strict=True):
        start = answer.index(True) + 1
        wanted = row[start : start + sum(answer)]
        trace = reference.run(row[:start], len(wanted), forced=wanted, min_loops=1, threshold=0.5)
        depths += trace.exit_depths
        expected += [
            float(np.log(np.exp(logits).sum()) - logits[token])
            for logits, token in zip(trace.logits, wanted, strict=True)
        ]
    with torch.no_grad():
        entropy, depth = soft_exits(model, batch, gate, torch.tensor([bias]))

    same = np.isclose(depth.numpy(), depths, atol=0.01)
    assert same.mean() > 0.9, "bfloat16 may turn a close call, not a tenth of them"
    assert np.abs(entropy.numpy() - expected)[same].mean() < 0.02  # nats; 0.05 if deeper planes keep their own K and V
    assert len(set(depths)) == (2 if bias > 0 else 1 if bias < 0 else 4)


def test_prompts_are_answered_right_at_full_depth(network: Network) -> None:
    """Goal: a wrong answer means a wrong engine. Method: all shipped prompts, decoded in full."""
    wrong = [p.prompt for p, out in zip(shipped(), answers(network, shipped()), strict=True) if out.tokens != p.wanted]

    assert not wrong


def test_prompts_are_answered_right_when_tokens_leave_early(network: Network, exits: dict[str, Any]) -> None:
    """Goal: the recommended exits save loops, not answers. Method: all shipped prompts at the shipped threshold."""
    found = score(network, shipped(), exits["exit_threshold"], exits["min_loops"])

    assert found.right == found.problems and 1.0 < found.mean_depth < 3.5
    assert sum(count > 0 for count in found.depths) >= 2, "a gate that always leaves at one loop tests nothing"


@pytest.mark.parametrize("fault", [zero_page, stale_page])
def test_a_wrong_page_changes_the_answer(network: Network, fault: Callable[[int], Any]) -> None:
    """Goal: text shows KV faults. Method: spoil each page of two prompts of 126 tokens that ask for 20 of 26 keys."""
    rng = random.Random(11)
    problems = [tasks.held_out(rng, 26, 20) for _ in range(2)]
    before = answers(network, problems)
    for page in range(-(-len(problems[0].prompt) // PAGE_TOKENS)):
        after = answers(network, problems, fault=fault(page))
        for item, good, bad in zip(problems, before, after, strict=True):
            assert page_kind(item, page) != "not asked" and good.tokens == item.wanted
            assert bad.tokens != good.tokens, f"page {page} of {item.prompt!r}"


def test_pages_are_told_apart_by_what_they_hold() -> None:
    """Goal: the card's table is about what it says. Method: nine entries, one question, by hand."""
    item = Problem("a01 b02 c03 d04 e05 f06 g07 h08 i09 ?b=", "b02", 9, 1)

    assert [page_kind(item, page) for page in range(3)] == ["asked", "not asked", "tail"]


# --- Training and shipping


def test_training_twice_gives_the_same_bytes() -> None:
    """Goal: the recipe is reproducible. Method: a tiny network, a few steps and a gate, twice; then another seed."""
    runs = []
    for seed in (5, 5, 6):
        model = Network(TINY, seed)
        train_trunk(model, steps=3, seed=seed, tokens_per_step=256)
        fit_gate(model, seed, steps=3, tokens_per_step=256)
        runs.append(model.tensors())

    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not torch.equal(runs[0]["lm_head.weight"], runs[2]["lm_head.weight"])
    assert not torch.equal(runs[0]["lm_head.weight"], Network(TINY, 5).weight("lm_head.weight"))


def test_what_is_shipped_loads_again_and_says_what_was_measured(tmp_path: Path) -> None:
    """Goal: nothing is lost between training and disk. Method: ship a random network with made-up scores."""
    model = Network(TINY, seed=9)
    ship(model, measured(Score(800, 617, (3, 2, 1, 0))), Run(7, 123, 2, 4.0), tmp_path / "new" / "folder")
    again = load_network(tmp_path / "new" / "folder")
    text = (tmp_path / "new" / "folder" / "README.md").read_text(encoding="utf-8")

    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in model.tensors().items())
    assert "77.12" in text and "--seed 7 --steps 123" in text and "0.500 / 0.333 / 0.167 / 0.000" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_a_foreign_checkpoint_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: no figure about another model. Method: another activation, a missing tensor, no folder at all."""
    model = Network(TINY, seed=9)
    folder = oracle_folder(tmp_path, model)
    (folder / "config.json").write_text(json.dumps(TINY.config() | {"hidden_act": "gelu"}), encoding="utf-8")
    with pytest.raises(ValueError, match="hidden_act"):
        load_network(folder)
    tensors = model.tensors()
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        model.load(tensors)

    assert main(["--model", str(tmp_path / "nowhere")]) == 2 and "nowhere" in capsys.readouterr().err


def test_commands_refuse_numbers_that_make_no_sense(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Goal: an error before half an hour is spent. Method: no steps, one problem per shape."""
    for arguments in (["--steps", "0"], ["--per-shape", "1"]):
        with pytest.raises(SystemExit) as stop:
            train_main(["--out", str(tmp_path / "out"), *arguments])

        assert stop.value.code == 2 and arguments[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
