"""Ouro: its config, the tensors of its checkpoint and its equations. Knows no cache, no batch and no scheduler.

One loop runs every physical layer and the final norm; the normed state feeds the next loop, the exit gate and the
head alike. Layers are sandwiched: the branch output is normed again before it joins the residual.
Source: the published Ouro checkpoints (ByteDance, "Scaling Latent Reasoning via Looped Language Models", 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ConfigError, require_int, require_number

FAMILY = "ouro"
ARCHITECTURE = "OuroForCausalLM"

METADATA_KEYS = frozenset(
    {
        "architectures",
        "auto_map",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "max_window_layers",
        "use_cache",
        "_name_or_path",
    }
)
"""Keys that say nothing about the numbers; read over. `architectures` and `model_type` are checked all the same."""

TRAINING_KEYS = frozenset(("initializer_range", "attention_dropout"))
"""Keys that only training reads."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, query, key, value) -> output: store key and value, then attend up to and including the own position.

query, output: [rows, heads, head_dim]. key, value: [rows, kv_heads, head_dim].
"""


@dataclass(frozen=True)
class OuroConfig:
    """What the equations need to know. Sizes in elements, lengths in tokens; loops is total_ut_steps in the file."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    loops: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    early_exit_threshold: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None

    @property
    def family(self) -> str:
        return FAMILY

    def to_dict(self) -> dict[str, Any]:
        """Plain data: equal dicts mean equal models up to weights."""
        return {"family": FAMILY, **asdict(self), "eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> OuroConfig:
        """Read a checkpoint's config.json, already parsed.

        Raises ConfigError: unknown keys by name, variants that these equations do not cover with the reason.
        """
        fields = dict(raw)
        _refuse_variants(fields)
        sizes = {name: _take_size(fields, key) for name, key in _SIZE_KEYS.items()}
        heads, kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        if heads % kv_heads:
            raise ConfigError("num_key_value_heads", kv_heads, f"must divide num_attention_heads = {heads}")
        head_dim = fields.pop("head_dim", None)
        if head_dim is None:
            head_dim, rest = divmod(sizes["hidden_size"], heads)
            if rest:
                raise ConfigError("hidden_size", sizes["hidden_size"], f"give head_dim: {heads} heads do not divide it")
        require_int("head_dim", head_dim, 2)
        if head_dim % 2:
            raise ConfigError("head_dim", head_dim, "must be even: rotary embedding turns pairs")
        layer_types = fields.pop("layer_types", None)
        if layer_types is not None and layer_types != ["full_attention"] * sizes["num_layers"]:
            raise ConfigError("layer_types", layer_types, "only full_attention, once per layer, is supported")
        theta, eps = fields.pop("rope_theta", 1e6), fields.pop("rms_norm_eps", 1e-6)
        require_number("rope_theta", theta, 0.0, math.inf, low_included=False)
        require_number("rms_norm_eps", eps, 0.0, 1.0, low_included=False)
        threshold = fields.pop("early_exit_threshold", 1.0)
        require_number("early_exit_threshold", threshold, 0.0, 1.0)
        eos = fields.pop("eos_token_id", None)
        eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        bos, pad = fields.pop("bos_token_id", None), fields.pop("pad_token_id", None)
        tokens = [("eos_token_id", token) for token in eos_token_ids] + [("bos_token_id", bos), ("pad_token_id", pad)]
        for field, token in tokens:
            if token is not None:
                require_int(field, token, 0, sizes["vocab_size"] - 1)
        unknown = sorted(set(fields) - METADATA_KEYS - TRAINING_KEYS)
        if unknown:
            raise ConfigError(
                "config.json", unknown, "these keys are not known for an Ouro model; remove them if they are inert"
            )
        return cls(
            **sizes,
            head_dim=head_dim,
            rope_theta=float(theta),
            rms_norm_eps=float(eps),
            early_exit_threshold=float(threshold),
            eos_token_ids=eos_token_ids,
            bos_token_id=bos,
            pad_token_id=pad,
        )


_SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "loops": "total_ut_steps",
    "max_positions": "max_position_embeddings",
}


def _take_size(fields: dict[str, Any], key: str) -> int:
    if key not in fields:
        raise ConfigError(key, None, "is missing from config.json and has no default")
    value: int = fields.pop(key)
    require_int(key, value, 1)
    return value


def _refuse_variants(fields: dict[str, Any]) -> None:
    """Remove every key that has one supported value; raise ConfigError where it has another."""
    architectures = fields.get("architectures", [ARCHITECTURE])
    if architectures != [ARCHITECTURE]:
        raise ConfigError("architectures", architectures, f"only [{ARCHITECTURE!r}] has these equations")
    window, window_used = fields.pop("sliding_window", None), fields.pop("use_sliding_window", None)
    if window_used or (window is not None and window_used is None):
        raise ConfigError(
            "sliding_window", window, "windowed attention is not supported; set use_sliding_window to false"
        )
    supported: dict[str, tuple[Any, str]] = {
        "hidden_act": ("silu", "only silu is supported"),
        "rope_scaling": (None, "scaled rotary embeddings are not supported"),
        "tie_word_embeddings": (False, "tied embeddings are not supported: lm_head.weight must be its own tensor"),
        "attention_bias": (False, "projections with bias are not supported"),
        "mlp_bias": (False, "projections with bias are not supported"),
        "early_exit_step": (None, "a fixed exit step is not supported; ask for max_loops per request"),
    }
    for key, (expected, reason) in supported.items():
        value = fields.pop(key, expected)
        if value != expected or type(value) is not type(expected):
            raise ConfigError(key, value, f"{reason}; expected {expected!r}")


@dataclass(frozen=True)
class OuroLayer:
    """One physical layer. qkv: [(heads + 2 kv_heads) * head_dim, hidden]; gate_up: [2 * intermediate, hidden]."""

    norm_attention_in: Tensor
    norm_attention_out: Tensor
    norm_mlp_in: Tensor
    norm_mlp_out: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class OuroWeights:
    """All tensors of one checkpoint, one dtype, one device. Projections that share their input are fused.

    named: every tensor under its checkpoint name; a fused one appears as the views that make it up, so filling the
    views fills the model.
    """

    embedding: Tensor
    layers: tuple[OuroLayer, ...]
    final_norm: Tensor
    gate_weight: Tensor
    gate_bias: Tensor
    head: Tensor
    named: Mapping[str, Tensor]


def tensor_shapes(config: OuroConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint must hold, and none besides."""
    hidden, inter = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for norm in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        shapes[f"{prefix}.self_attn.q_proj.weight"] = (query, hidden)
        shapes[f"{prefix}.self_attn.k_proj.weight"] = (kv, hidden)
        shapes[f"{prefix}.self_attn.v_proj.weight"] = (kv, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, query)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inter, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inter, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inter)
    shapes["model.norm.weight"] = (hidden,)
    shapes["model.early_exit_gate.weight"] = (1, hidden)
    shapes["model.early_exit_gate.bias"] = (1,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def allocate_weights(config: OuroConfig, dtype: torch.dtype, device: torch.device) -> OuroWeights:
    """Uninitialised weights on the device; the loader fills `named`."""
    shapes = tensor_shapes(config)
    named: dict[str, Tensor] = {}

    def fused(*names: str) -> Tensor:
        rows = [shapes[name][0] for name in names]
        whole = torch.empty((sum(rows), *shapes[names[0]][1:]), dtype=dtype, device=device)
        named.update(zip(names, whole.split(rows), strict=True))
        return whole

    embedding = fused("model.embed_tokens.weight")
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        layers.append(
            OuroLayer(
                norm_attention_in=fused(f"{prefix}.input_layernorm.weight"),
                norm_attention_out=fused(f"{prefix}.input_layernorm_2.weight"),
                norm_mlp_in=fused(f"{prefix}.post_attention_layernorm.weight"),
                norm_mlp_out=fused(f"{prefix}.post_attention_layernorm_2.weight"),
                qkv=fused(*(f"{attention}.{part}_proj.weight" for part in "qkv")),
                output=fused(f"{attention}.o_proj.weight"),
                gate_up=fused(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
                down=fused(f"{mlp}.down_proj.weight"),
            )
        )
    return OuroWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=fused("model.norm.weight"),
        gate_weight=fused("model.early_exit_gate.weight"),
        gate_bias=fused("model.early_exit_gate.bias"),
        head=fused("lm_head.weight"),
        named=named,
    )


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Statistics in float32, the quotient rounded to the input's dtype, then scaled. hidden: [rows, width]."""
    if hidden.dtype == torch.float32:
        return F.rms_norm(hidden, weight.shape, weight, eps)
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(hidden.dtype) * weight


class OuroModel:
    """The equations over one set of weights. Rows are tokens of any requests; only `attend` knows which."""

    def __init__(self, config: OuroConfig, weights: OuroWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype: torch.dtype = weights.embedding.dtype
        self.device: torch.device = weights.embedding.device
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=self.device)
        self._frequencies = (config.rope_theta ** (-pairs / config.head_dim)).float()  # never rounded to the dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """The prelude. token_ids: [rows] int64. Returns [rows, hidden]."""
        return F.embedding(token_ids, self.weights.embedding)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of every row: two [rows, 1, head_dim], the same at every loop. positions: [rows]."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cosine, sine = angles.cos(), angles.sin()
        wide_cosine, signed_sine = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        return wide_cosine.to(self.dtype)[:, None], signed_sine.to(self.dtype)[:, None]

    def loop(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """One pass of every layer and the final norm. hidden: [rows, hidden]; returns the same shape."""
        config, eps = self.config, self.config.rms_norm_eps
        heads, kv_heads, half = config.num_heads, config.num_kv_heads, config.head_dim // 2
        cosine, signed_sine = rotary
        rows = hidden.shape[0]
        for index, layer in enumerate(self.weights.layers):
            inner = F.linear(rms_norm(hidden, layer.norm_attention_in, eps), layer.qkv)
            inner = inner.view(rows, heads + 2 * kv_heads, config.head_dim)
            turning, value = inner[:, : heads + kv_heads], inner[:, heads + kv_heads :]
            turned = torch.addcmul(turning * cosine, turning.roll(half, -1), signed_sine)
            attended = attend(index, turned[:, :heads], turned[:, heads:], value)
            branch = F.linear(attended.reshape(rows, heads * config.head_dim), layer.output)
            hidden = hidden + rms_norm(branch, layer.norm_attention_out, eps)
            gate, up = F.linear(rms_norm(hidden, layer.norm_mlp_in, eps), layer.gate_up).chunk(2, -1)
            branch = F.linear(F.silu(gate) * up, layer.down)
            hidden = hidden + rms_norm(branch, layer.norm_mlp_out, eps)
        return rms_norm(hidden, self.weights.final_norm, eps)

    def hazards(self, hidden: Tensor) -> Tensor:
        """Exit hazard of every row, float32: in bfloat16 a sigmoid can round to exactly 1. hidden: [rows, hidden]."""
        logits = F.linear(hidden, self.weights.gate_weight, self.weights.gate_bias)
        return torch.sigmoid(logits.float()).squeeze(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """The coda. hidden: [rows, hidden] after a loop. Returns [rows, vocab] float32."""
        return F.linear(hidden, self.weights.head).float()
