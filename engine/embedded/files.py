"""Where the embedded checkpoint lies."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def directory() -> Path:
    """The folder of the shipped checkpoint: config.json, model.safetensors, tokenizer.json, prompts.jsonl, README.md.

    The package must lie unpacked on disk, as pip leaves it: a checkpoint is mapped from its file.
    """
    return Path(str(resources.files("engine.embedded"))) / "data"
