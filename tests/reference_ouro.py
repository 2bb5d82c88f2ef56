"""A slow oracle for Ouro in float64 numpy: no cache, no pages, no batch. And tiny random checkpoints to run it on.

It works token by token and keeps, for every earlier token, one K and V per loop that the token really ran. A query at
loop d reads the token that left at loop e in version min(d, e); in the shared layout, in version e. Written from the
equations, apart from the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[np.float64]

torch.set_num_threads(1)  # tests share their machine; imported by every test that computes

TINY = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "total_ut_steps": 4,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Weights large enough that tokens, positions and loops all matter; gates that leave at every loop."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(hidden, generator=generator)

    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        for name in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            tensors[f"{prefix}{name}.weight"] = norm()
        shapes = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        for name, shape in shapes.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(*shape)
        for name, shape in {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}.items():
            tensors[f"{prefix}mlp.{name}_proj.weight"] = matrix(*shape)
    tensors["model.norm.weight"] = norm()
    tensors["model.early_exit_gate.weight"] = matrix(1, hidden)
    tensors["model.early_exit_gate.bias"] = torch.full((1,), -0.5)
    tensors["lm_head.weight"] = matrix(vocab, hidden) * 3.0
    return tensors


def write_checkpoint(folder: Path, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
    """A random checkpoint of the tiny shape, with these config keys changed; None removes a key. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (TINY | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(TINY | {key: value for key, value in changes.items() if value is not None}, seed)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@dataclass
class Trace:
    """What the oracle saw. logits: one row per output token. margin: see Reference.run."""

    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)
    margin: float = np.inf


class Reference:
    """The dense model of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path)
        self.weights: dict[str, Array] = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        self.loops: int = self.config["total_ut_steps"]

    def run(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        forced: Sequence[int] = (),
        min_loops: int = 2,
        max_loops: int | None = None,
        threshold: float = 1.0,
        delayed: bool = False,
        depths: Sequence[int] | None = None,
        shared: bool = False,
        stop_ids: Sequence[int] = (),
    ) -> Trace:
        """Decode: the forced tokens first, then the likeliest ones.

        delayed: leave one loop after the threshold is reached. depths: the loops of each output token, in place of a
        threshold. shared: an earlier token is read in its last version at every loop.
        margin is the smallest distance of any decision from turning out otherwise: between the two best logits, and
        between the accumulated exit probability and the threshold. A float32 engine may differ only where it is tiny.
        """
        trace = Trace()
        history: list[list[list[tuple[Array, Array]]]] = []  # token -> loop -> layer -> (key, value)
        state = np.zeros(0)
        for token in prompt:
            state, _ = self._token(history, token, None, shared)
        exit_depth, full = self.loops, min(max_loops or self.loops, self.loops)
        for number in range(max_tokens):
            logits = self.weights["lm_head.weight"] @ state
            if number < len(forced):
                token = forced[number]
            else:
                token = int(np.argmax(logits))
                best = np.sort(logits)[-2:]
                trace.margin = min(trace.margin, float(best[1] - best[0]))
            trace.logits.append(logits)
            trace.token_ids.append(token)
            trace.exit_depths.append(exit_depth)
            if token in stop_ids or number == max_tokens - 1:
                break

            remaining, due = 1.0, False
            limit = full if depths is None else depths[number + 1]

            def leaves(loop: int, hidden: Array, limit: int = limit) -> bool:
                nonlocal remaining, due
                gate = (
                    self.weights["model.early_exit_gate.weight"] @ hidden + self.weights["model.early_exit_gate.bias"]
                )
                remaining *= 1.0 - 1.0 / (1.0 + np.exp(-float(gate[0])))
                if loop >= limit or due:
                    return True
                if threshold >= 1.0 or loop < min_loops:
                    return False
                trace.margin = min(trace.margin, abs(1.0 - remaining - threshold))
                reached = bool(1.0 - remaining >= threshold)
                due = reached and delayed
                return reached and not delayed

            state, exit_depth = self._token(history, token, leaves, shared)
        return trace

    def _token(
        self,
        history: list[list[list[tuple[Array, Array]]]],
        token: int,
        leaves: Callable[[int, Array], bool] | None,
        shared: bool,
    ) -> tuple[Array, int]:
        """Run one token through its loops, add its versions to history; returns its last state and its exit loop."""
        hidden = self.weights["model.embed_tokens.weight"][token]
        position = len(history)
        own: list[list[tuple[Array, Array]]] = []
        history.append(own)
        for loop in range(1, self.loops + 1):
            own.append([])
            for layer in range(self.config["num_hidden_layers"]):
                hidden = self._layer(history, own, hidden, position, self.loops if shared else loop, layer)
            hidden = self._norm(hidden, "model.norm.weight")
            if leaves is not None and leaves(loop, hidden):
                return hidden, loop
        return hidden, self.loops

    def _layer(
        self,
        history: list[list[list[tuple[Array, Array]]]],
        own: list[list[tuple[Array, Array]]],
        hidden: Array,
        position: int,
        loop: int,
        layer: int,
    ) -> Array:
        prefix = f"model.layers.{layer}."
        weights, heads, kv_heads = self.weights, self.config["num_attention_heads"], self.config["num_key_value_heads"]
        normed = self._norm(hidden, f"{prefix}input_layernorm.weight")
        query = (weights[f"{prefix}self_attn.q_proj.weight"] @ normed).reshape(heads, -1)
        key = (weights[f"{prefix}self_attn.k_proj.weight"] @ normed).reshape(kv_heads, -1)
        value = (weights[f"{prefix}self_attn.v_proj.weight"] @ normed).reshape(kv_heads, -1)
        query, key = self._rotate(query, position), self._rotate(key, position)
        own[-1].append((key, value))
        versions = [past[min(loop, len(past)) - 1][layer] for past in history]
        output = np.empty_like(query)
        for head in range(heads):
            group = head // (heads // kv_heads)
            keys = np.array([k[group] for k, _ in versions])
            values = np.array([v[group] for _, v in versions])
            scores = keys @ query[head] / np.sqrt(query.shape[1])
            scores = np.exp(scores - scores.max())
            output[head] = scores @ values / scores.sum()
        branch = weights[f"{prefix}self_attn.o_proj.weight"] @ output.reshape(-1)
        hidden = hidden + self._norm(branch, f"{prefix}input_layernorm_2.weight")
        normed = self._norm(hidden, f"{prefix}post_attention_layernorm.weight")
        gate = weights[f"{prefix}mlp.gate_proj.weight"] @ normed
        up = weights[f"{prefix}mlp.up_proj.weight"] @ normed
        branch = weights[f"{prefix}mlp.down_proj.weight"] @ (gate / (1.0 + np.exp(-gate)) * up)
        return hidden + self._norm(branch, f"{prefix}post_attention_layernorm_2.weight")

    def _norm(self, hidden: Array, name: str) -> Array:
        return hidden / np.sqrt(np.mean(hidden**2) + self.config["rms_norm_eps"]) * self.weights[name]

    def _rotate(self, heads: Array, position: int) -> Array:
        """Turn dimension i together with dimension i + d/2 by position * theta^(-2i/d)."""
        half = heads.shape[1] // 2
        result = np.empty_like(heads)
        for i in range(half):
            angle = position * self.config["rope_theta"] ** (-2 * i / (2 * half))
            result[:, i] = heads[:, i] * np.cos(angle) - heads[:, i + half] * np.sin(angle)
            result[:, i + half] = heads[:, i + half] * np.cos(angle) + heads[:, i] * np.sin(angle)
        return result
