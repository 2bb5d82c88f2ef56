"""Which family a checkpoint belongs to. An unknown one is refused before anything is allocated or spawned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.models import ouro

ModelConfig = ouro.OuroConfig
"""The typed config of any family; a union once there are two."""

Model = ouro.OuroModel


class UnsupportedModel(ValueError):
    """No family has this model_type; names it and the known ones."""

    def __init__(self, model_type: object, known: tuple[str, ...]) -> None:
        super().__init__(model_type, known)
        self.model_type, self.known = model_type, known

    def __str__(self) -> str:
        return f"model_type = {self.model_type!r} is not supported; known: {', '.join(self.known)}"


@dataclass(frozen=True)
class Family:
    """What the engine asks of a model family."""

    config: Callable[[Mapping[str, Any]], ModelConfig]
    tensor_shapes: Callable[[ModelConfig], dict[str, tuple[int, ...]]]
    allocate: Callable[..., ouro.OuroWeights]
    model: Callable[[ModelConfig, ouro.OuroWeights], Model]


FAMILIES: dict[str, Family] = {
    ouro.FAMILY: Family(ouro.OuroConfig.from_json, ouro.tensor_shapes, ouro.allocate_weights, ouro.OuroModel),
}


def family_of(model_type: object) -> Family:
    """The family with this model_type. Raises UnsupportedModel."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(model_type, tuple(sorted(FAMILIES)))
    return FAMILIES[model_type]


def read_config(model_dir: Path | str) -> ModelConfig:
    """The typed config of the checkpoint in model_dir; reads config.json and nothing else.

    Raises UnsupportedModel or ConfigError.
    """
    path = Path(model_dir) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("model_dir", str(model_dir), "holds no config.json; name a checkpoint's folder") from None
    except ValueError as error:
        raise ConfigError("config.json", str(path), f"is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("config.json", str(path), "must hold one JSON object")
    return family_of(raw.get("model_type")).config(raw)
