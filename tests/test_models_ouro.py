"""Ouro: strict configs, strict checkpoints, and equations that equal the oracle's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_ouro import TINY, Reference, random_tensors, write_checkpoint
from safetensors.torch import save_file
from torch import Tensor

from engine.cache import storage
from engine.config import ConfigError
from engine.models import loading
from engine.models.loading import CheckpointError, fingerprint, load_model, read_entries
from engine.models.ouro import OuroConfig, OuroModel, rms_norm, tensor_shapes
from engine.models.registry import UnsupportedModel, read_config


def config_of(**changes: Any) -> OuroConfig:
    return OuroConfig.from_json({key: value for key, value in (TINY | changes).items() if value is not ...})


def test_the_published_config_is_read() -> None:
    """Goal: a real checkpoint's config passes as it is. Method: the published keys and values of the 1.4B model."""
    config = OuroConfig.from_json(
        {
            "architectures": ["OuroForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"},
            "model_type": "ouro",
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "early_exit_threshold": 1.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 5632,
            "layer_types": ["full_attention"] * 24,
            "max_position_embeddings": 65536,
            "max_window_layers": 24,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "total_ut_steps": 4,
            "transformers_version": "4.55.0",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 49152,
        }
    )

    shapes = tensor_shapes(config)
    assert (config.loops, config.num_layers, config.eos_token_ids) == (4, 24, (0,))
    assert len(shapes) == 269
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 1_434_652_673


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_head": 1, "extra_norm": True}, "'extra_norm', 'speculative_head'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"early_exit_step": 2}, "early_exit_step"),
        ({"architectures": ["OtherForCausalLM"]}, "architectures"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"head_dim": ..., "hidden_size": 30}, "head_dim"),
        ({"total_ut_steps": 0}, "total_ut_steps"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"eos_token_id": 64}, "eos_token_id"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ],
)
def test_a_config_that_the_equations_do_not_cover_is_refused(changes: dict[str, Any], named: str) -> None:
    """Goal: no unknown or unsupported key is read over. Method: one change to a good config; the message names it."""
    with pytest.raises(ConfigError) as caught:
        config_of(**changes)

    assert named in str(caught.value)


def test_defaults_follow_the_published_model() -> None:
    """Goal: keys that may be absent get the published defaults. Method: leave them out of the tiny config."""
    config = config_of(head_dim=..., eos_token_id=..., rope_theta=..., rms_norm_eps=...)

    assert (config.head_dim, config.eos_token_ids, config.rope_theta, config.rms_norm_eps) == (8, (), 1e6, 1e-6)
    assert config_of(eos_token_id=[2, 5]).eos_token_ids == (2, 5)


@pytest.mark.parametrize("model_type", ["llama", None, 3])
def test_an_unknown_family_is_refused_before_anything_is_read(tmp_path: Path, model_type: object) -> None:
    """Goal: an unsupported model costs nothing. Method: a folder with only config.json: no weights are looked for."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": model_type}))

    with pytest.raises(UnsupportedModel, match="known: ouro") as caught:
        load_model(tmp_path)
    assert repr(model_type) in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_without_a_proper_config_is_refused(tmp_path: Path, text: str | None) -> None:
    """Goal: a wrong path says so. Method: no config.json, broken JSON, and JSON that is no object."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    """Goal: the number of files changes nothing. Method: load both; every tensor and the fingerprint are equal."""
    single = load_model(write_checkpoint(tmp_path / "single", seed=3))
    sharded = load_model(write_checkpoint(tmp_path / "sharded", seed=3, shards=3))
    expected = random_tensors(TINY, 3)

    assert set(single.weights.named) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(single.weights.named[name], tensor)
        assert torch.equal(sharded.weights.named[name], tensor)
    layer = single.weights.layers[1]
    parts = [expected[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(parts))
    assert _fingerprint(single) == _fingerprint(sharded)


def _fingerprint(model: OuroModel, **changes: Any) -> str:
    arguments = {
        "config": model.config,
        "weights": model.weights.named,
        "dtype": model.dtype,
        "layout": "last_exited",
        "attention_backend": "torch",
    }
    return fingerprint(**(arguments | changes))


def test_the_fingerprint_covers_everything_that_changes_the_numbers(tmp_path: Path) -> None:
    """Goal: workers that would compute differently never pair. Method: change one ingredient at a time, to one bit."""
    model = load_model(write_checkpoint(tmp_path / "a", seed=1))
    other_theta = load_model(write_checkpoint(tmp_path / "b", seed=1, rope_theta=9999.0))
    flipped = {name: tensor.clone() for name, tensor in model.weights.named.items()}
    flipped["model.layers.1.mlp.down_proj.weight"].view(torch.int32)[3, 5] ^= 1
    renamed = dict(model.weights.named)
    renamed["other"] = renamed.pop("model.norm.weight")
    prints = [
        _fingerprint(model),
        _fingerprint(other_theta),
        _fingerprint(model, weights=flipped),
        _fingerprint(model, weights=renamed),
        _fingerprint(model, dtype=torch.bfloat16),
        _fingerprint(model, layout="shared"),
        _fingerprint(model, attention_backend="triton"),
    ]

    assert len(set(prints)) == len(prints)
    assert _fingerprint(model) == prints[0]


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)


def _reshape(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.contiguous()


def _quantise(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, r"model\.layers\.1\.mlp\.up_proj\.weight: missing"),
        (_add, r"model\.layers\.2\.mlp\.up_proj\.weight: not part of this model"),
        (_reshape, r"lm_head\.weight: shape \[32, 64\], expected \[64, 32\]"),
        (_quantise, r"model\.norm\.weight: dtype I8"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name_before_allocating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    """Goal: nothing is guessed or padded. Method: damage one tensor; torch.empty must not be reached."""
    tensors = random_tensors(TINY, 0)
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(torch, "empty", lambda *_args, **_keys: pytest.fail("allocated"))

    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Goal: a cut or overlong download is found from the header. Method: cut, extend and empty a good file."""
    path = write_checkpoint(tmp_path) / "model.safetensors"
    good = path.read_bytes()
    for damaged in (good[:-1], good + b"\0", good[:100], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_model(tmp_path)


@pytest.mark.parametrize("entry", [{}, {"dtype": "F32", "shape": [1, -1], "data_offsets": [0, 4]}, [], "x"])
def test_a_malformed_header_entry_is_refused(tmp_path: Path, entry: Any) -> None:
    """Goal: a hostile header raises our error and no other. Method: headers with one malformed entry each."""
    header = json.dumps({"model.norm.weight": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: malformed"):
        loading.read_header(path)


def test_a_key_that_appears_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    """Goal: no tensor silently replaces another. Method: one header that names a tensor twice."""
    entry = '"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = f"{{{entry}, {entry}}}".encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: appears twice"):
        loading.read_header(path)


@pytest.mark.parametrize("shard", ["../model-0.safetensors", "/etc/x", "a/b", "..", "", "a\\b"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    """Goal: an index cannot name a file elsewhere. Method: shard names that are no plain file names."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))

    with pytest.raises(CheckpointError, match=r"lm_head\.weight: shard .* plain file name"):
        read_entries(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    """Goal: each tensor lies where the index says, once. Method: damage a good sharded checkpoint four ways."""
    folder = write_checkpoint(tmp_path / "good", shards=2)
    index_path = folder / "model.safetensors.index.json"
    good = json.loads(index_path.read_text())["weight_map"]
    stored = {shard: loading.read_header(folder / shard) for shard in set(good.values())}
    name = "lm_head.weight"
    other = next(shard for shard in stored if shard != good[name])

    def refuse(weight_map: dict[str, str], message: str) -> None:
        index_path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            read_entries(folder)

    refuse(good | {name: other}, rf"lm_head\.weight: stored in {good[name]}, but the index says {other}")
    refuse(good | {"ghost": other}, rf"ghost: the index says {other}")
    refuse({key: shard for key, shard in good.items() if key != name}, r"lm_head\.weight: stored in .* says None")
    refuse(good | {"ghost": "model-9.safetensors"}, r"shard model-9\.safetensors does not exist")
    tensors = {key: value for key, value in random_tensors(TINY, 0).items() if good[key] == other}
    save_file(tensors | {name: torch.zeros(64, 32)}, folder / other)
    refuse(good, r"lm_head\.weight: stored (twice|in)")


def dense_attend(model: OuroModel) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of a whole prompt over itself, within one loop, without any cache."""
    groups = model.config.num_heads // model.config.num_kv_heads

    def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key).float() * model.config.head_dim**-0.5
        scores.masked_fill_(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(value.dtype), value)

    return attend


@pytest.mark.parametrize(("seed", "changes"), [(0, {}), (1, {"num_key_value_heads": 4}), (2, {"total_ut_steps": 1})])
def test_the_equations_equal_the_oracle(tmp_path: Path, seed: int, changes: dict[str, Any]) -> None:
    """Goal: norms, rotation, loops and head are right. Method: a prompt's last logits against float64 numpy."""
    folder = write_checkpoint(tmp_path, seed=seed, **changes)
    model, prompt = load_model(folder), [5, 9, 13, 5, 63, 0, 1]
    hidden = model.embed(torch.tensor(prompt))
    rotary = model.rotary(torch.arange(len(prompt)))
    for _ in range(model.config.loops):
        hidden = model.loop(hidden, rotary, dense_attend(model))

    expected = Reference(folder).run(prompt, 1).logits[0]
    np.testing.assert_allclose(model.logits(hidden)[-1].numpy(), expected, atol=2e-4, rtol=1e-4)


def test_bfloat16_keeps_statistics_frequencies_and_hazards_in_float32(tmp_path: Path) -> None:
    """Goal: low precision stays where the model has it. Method: values that a bfloat16 computation would round away."""
    model = load_model(write_checkpoint(tmp_path), torch.bfloat16)
    hidden = (torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * 50).bfloat16()
    weight = torch.full((32,), 1.5, dtype=torch.bfloat16)
    wide = hidden.float()
    expected = (wide / wide.square().mean(-1, keepdim=True).add(1e-6).sqrt()).bfloat16() * weight
    model.weights.gate_weight.zero_()
    model.weights.gate_bias.fill_(8.0)  # sigmoid(8) is 0.99966: 1.0 once rounded to bfloat16
    cosine, _ = model.rotary(torch.tensor([100]))

    assert torch.equal(rms_norm(hidden, weight, 1e-6), expected)
    assert 0.9996 < float(model.hazards(hidden)[0]) < 1.0
    angles = 100 * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cosine[0, 0, :4].float().numpy(), np.cos(angles), atol=4e-3)


def test_pools_start_without_any_nan() -> None:
    """Goal: a fresh pool is defined memory. Method: every byte of a new pool is zero."""
    pool = storage.KVStorage(
        num_blocks=3,
        num_layers=2,
        block_size=4,
        kv_heads=2,
        head_dim=8,
        planes=1,
        hidden_size=8,
        staging_slots=2,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )

    assert not pool.keys.any() and not pool.values.any() and not pool.hidden.any()
