"""A checkpoint's tokenizer, if it ships one."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from engine.config import ConfigError


def load_tokenizer(model_dir: Path | str) -> Tokenizer | None:
    """The tokenizer of the checkpoint's tokenizer.json; None where there is none. Raises ConfigError for a bad one."""
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError("tokenizer.json", str(path), f"cannot be read: {error}") from error
