"""The training network: Ouro's equations, dense and differentiable. The engine has its own implementation.

Tests hold it against an independent oracle, and the engine answers its checkpoint's prompts, so neither can drift.
Source: the published Ouro checkpoints (ByteDance, "Scaling Latent Reasoning via Looped Language Models", 2025).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from engine.embedded.tasks import EOS, PAD, VOCAB_SIZE

SIZE_KEYS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "loops": "total_ut_steps",
    "theta": "rope_theta",
    "positions": "max_position_embeddings",
    "eps": "rms_norm_eps",
}
"""Fields of Shape by their keys in config.json."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model: vocab, widths and heads in elements, positions in tokens. Every head has its own K and V."""

    vocab: int = VOCAB_SIZE
    hidden: int = 128
    inner: int = 384
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    loops: int = 4
    theta: float = 10000.0
    positions: int = 512
    eps: float = 1e-6

    def config(self) -> dict[str, object]:
        """config.json in the published format."""
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            **{key: getattr(self, field) for field, key in SIZE_KEYS.items()},
            "num_key_value_heads": self.heads,
            "early_exit_threshold": 1.0,
            "rope_scaling": None,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "torch_dtype": "float32",
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "use_cache": True,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Shape:
        """The inverse of config(). Raises ValueError, naming the keys, for a config that this network cannot run."""
        shape = cls(**{field: config[key] for field, key in SIZE_KEYS.items() if key in config})
        wrong = sorted(key for key, value in shape.config().items() if key not in config or config[key] != value)
        if wrong:
            raise ValueError(f"config.json: missing, or not as this network needs them: {', '.join(wrong)}")
        return shape


NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
MATRICES = {
    "self_attn.q_proj": ("heads", "hidden"),
    "self_attn.k_proj": ("heads", "hidden"),
    "self_attn.v_proj": ("heads", "hidden"),
    "self_attn.o_proj": ("hidden", "heads"),
    "mlp.gate_proj": ("inner", "hidden"),
    "mlp.up_proj": ("inner", "hidden"),
    "mlp.down_proj": ("hidden", "inner"),
}


class Network(nn.Module):
    """Parameters under the checkpoint's own names (dots become underscores inside torch)."""

    def __init__(self, shape: Shape, seed: int) -> None:
        """Random parameters from the seed: matrices of std 1/sqrt(inputs), a quiet head, a gate of hazard 1/2."""
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        sizes = {"hidden": shape.hidden, "inner": shape.inner, "heads": shape.heads * shape.head_dim}
        self.names: dict[str, str] = {}

        def add(name: str, value: Tensor) -> None:
            attribute = name.replace(".", "_")
            self.names[name] = attribute
            self.register_parameter(attribute, nn.Parameter(value))

        def normal(rows: int, columns: int, std: float) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * std

        add("model.embed_tokens.weight", normal(shape.vocab, shape.hidden, 1.0))
        for layer in range(shape.layers):
            for name, (rows, columns) in MATRICES.items():
                value = normal(sizes[rows], sizes[columns], 1 / math.sqrt(sizes[columns]))
                add(f"model.layers.{layer}.{name}.weight", value)
            for norm in NORMS:
                start = 0.5 if norm.endswith("_2") else 1.0
                add(f"model.layers.{layer}.{norm}.weight", torch.full((shape.hidden,), start))
        add("model.norm.weight", torch.ones(shape.hidden))
        add("model.early_exit_gate.weight", torch.zeros(1, shape.hidden))
        add("model.early_exit_gate.bias", torch.zeros(1))
        add("lm_head.weight", normal(shape.vocab, shape.hidden, 0.02))
        frequencies = shape.theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        angles = torch.arange(shape.positions, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1).float(), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1).float(), persistent=False)

    def weight(self, name: str) -> Tensor:
        """The parameter with this checkpoint name."""
        value: Tensor = getattr(self, self.names[name])
        return value

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by name, detached."""
        return {name: self.weight(name).detach().clone().contiguous() for name in self.names}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over a checkpoint's tensors. Raises ValueError, naming them, for missing, extra and misshapen ones."""
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        needed = {name: tuple(self.weight(name).shape) for name in self.names}
        wrong = sorted(name for name in found.keys() | needed.keys() if found.get(name) != needed.get(name))
        if wrong:
            raise ValueError(f"these tensors are missing, extra or misshapen: {', '.join(wrong)}")
        with torch.no_grad():
            for name in self.names:
                self.weight(name).copy_(tensors[name])

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last axis: float32 statistics, rounded to x's dtype, then scaled."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.eps)
        return wide.to(x.dtype) * self.weight(name).to(x.dtype)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., tokens, head_dim] by absolute position [tokens], in halves; the same at every loop."""
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[positions].to(x.dtype) + turned * self.sin[positions].to(x.dtype)

    def project(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, tokens, head_dim], not yet rotated, of a normed x."""
        s, prefix = self.shape, f"model.layers.{layer}.self_attn."
        parts = [functional.linear(x, self.weight(f"{prefix}{n}_proj.weight").to(x.dtype)) for n in "qkv"]
        q, k, v = (p.unflatten(-1, (s.heads, s.head_dim)).transpose(1, 2) for p in parts)
        return q, k, v

    def finish_layer(self, x: Tensor, attended: Tensor, layer: int) -> Tensor:
        """Residuals and the gated MLP after attention; `attended` is [batch, heads, tokens, head_dim]."""
        prefix = f"model.layers.{layer}."
        flat = attended.transpose(1, 2).flatten(-2)
        out = functional.linear(flat, self.weight(f"{prefix}self_attn.o_proj.weight").to(x.dtype))
        x = x + self.norm(out, f"{prefix}input_layernorm_2.weight")
        u = self.norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = functional.linear(u, self.weight(f"{prefix}mlp.gate_proj.weight").to(x.dtype))
        up = functional.linear(u, self.weight(f"{prefix}mlp.up_proj.weight").to(x.dtype))
        inner = functional.silu(gate) * up
        out = functional.linear(inner, self.weight(f"{prefix}mlp.down_proj.weight").to(x.dtype))
        return x + self.norm(out, f"{prefix}post_attention_layernorm_2.weight")

    def loop(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """One pass through the layers, final norm included. x [batch, tokens, hidden]; mask [tokens, tokens], added."""
        for layer in range(self.shape.layers):
            normed = self.norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = self.project(normed, layer)
            scores = self.rotate(q, positions) @ self.rotate(k, positions).transpose(-1, -2)
            scores = scores.float() / math.sqrt(self.shape.head_dim) + mask
            x = self.finish_layer(x, scores.softmax(-1).to(x.dtype) @ v, layer)
        return self.norm(x, "model.norm.weight")

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """The normed state after each loop, [batch, tokens, hidden] each; tokens [batch, tokens] int64."""
        count = tokens.shape[1]
        positions = torch.arange(count, device=tokens.device)
        mask = torch.full((count, count), float("-inf"), device=tokens.device).triu(1)
        x = functional.embedding(tokens, self.weight("model.embed_tokens.weight"))
        out = []
        for _ in range(self.shape.loops):
            x = self.loop(x, positions, mask)
            out.append(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token, [..., vocab], of states [..., hidden]."""
        return functional.linear(hidden, self.weight("lm_head.weight").to(hidden.dtype))

    def gate(self, hidden: Tensor) -> Tensor:
        """The exit logit in float32, [...], of states [..., hidden]; its sigmoid is the hazard."""
        weight, bias = self.weight("model.early_exit_gate.weight"), self.weight("model.early_exit_gate.bias")
        return functional.linear(hidden.float(), weight, bias).squeeze(-1)


def load_network(folder: Path) -> Network:
    """The checkpoint in a folder, in float32. Raises OSError or ValueError where it is not one of this network."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    network = Network(Shape.from_config(config), seed=0)
    network.load(load_file(folder / "model.safetensors"))
    return network


def describe(shape: Shape) -> str:
    """The sizes as one line."""
    return ", ".join(f"{key} {value}" for key, value in asdict(shape).items())
