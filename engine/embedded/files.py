"""Where the embedded checkpoint lies."""

from __future__ import annotations

from pathlib import Path


def directory() -> Path:
    """The folder of the shipped checkpoint: config.json, model.safetensors, tokenizer.json, prompts.jsonl, README.md."""
    return Path(__file__).resolve().parent / "data"
