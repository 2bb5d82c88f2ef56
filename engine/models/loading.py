"""Read a safetensors checkpoint into a model. Headers are checked whole before one byte is allocated.

Layout: `model.safetensors`, or `model.safetensors.index.json` and the shards it names, beside config.json.
Missing, extra, duplicate and misshapen tensors are refused by name; so is a shard outside the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from engine.models.registry import Model, ModelConfig, family_of, read_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Dtypes that a checkpoint may have; a quantised one needs equations of its own."""

HEADER_BYTES_MAX = 100_000_000
"""The format's own bound: a length above it is a damaged file."""


class CheckpointError(ValueError):
    """The checkpoint does not hold what its config asks for; names the file and the tensor."""


class TensorEntry(NamedTuple):
    """What a shard's header says about one tensor."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


def load_model(model_dir: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Model:
    """The model in model_dir, its weights converted to dtype on the device.

    Raises UnsupportedModel, ConfigError or CheckpointError, each before anything is allocated.
    """
    folder, device = Path(model_dir), torch.device(device)
    config = read_config(folder)
    family = family_of(config.family)
    entries = read_entries(folder)
    check_entries(entries, family.tensor_shapes(config))
    weights = family.allocate(config, dtype, device)
    by_shard: dict[str, list[str]] = {}
    for name, entry in entries.items():
        by_shard.setdefault(entry.shard, []).append(name)
    for shard, names in by_shard.items():
        with safe_open(folder / shard, framework="pt", device="cpu") as reader:
            for name in names:
                weights.named[name].copy_(reader.get_tensor(name))
    return family.model(config, weights)


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in folder, from the headers alone. Raises CheckpointError."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file() and index.is_file():
        raise CheckpointError(f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}; remove one")
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = _parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to shard names")
    for name, shard in weight_map.items():
        if Path(shard).name != shard or shard in ("", ".", "..") or "\\" in shard:
            raise CheckpointError(f"{index}: {name}: shard {shard!r} must be a plain file name beside the index")
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index}: shard {shard} does not exist")
        for name, entry in read_header(folder / shard).items():
            if name in entries:
                raise CheckpointError(f"{name}: stored twice, in {entries[name].shard} and in {shard}")
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{name}: stored in {shard}, but the index says {weight_map.get(name)}")
            entries[name] = entry
    for name in sorted(set(weight_map) - set(entries)):
        raise CheckpointError(f"{name}: the index says {weight_map[name]}, whose header does not hold it")
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one shard. Raises CheckpointError where the header contradicts itself or the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_BYTES_MAX + 1
        if length > min(HEADER_BYTES_MAX, size - 8):
            raise CheckpointError(f"{path}: is cut short or no safetensors file")
        header = _parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    entries, covered = {}, 0
    for name, raw in sorted(header.items(), key=lambda item: _begin(path, *item)):
        dtype, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        if dtype not in ELEMENT_BYTES:
            raise CheckpointError(f"{path}: {name}: dtype {dtype} is not one of {', '.join(ELEMENT_BYTES)}")
        if begin != covered or end - begin != math.prod(shape) * ELEMENT_BYTES[dtype]:
            raise CheckpointError(f"{path}: {name}: bytes {begin}..{end} do not fit shape {list(shape)} of {dtype}")
        entries[name] = TensorEntry(path.name, dtype, shape)
        covered = end
    if covered != size - 8 - length:
        raise CheckpointError(f"{path}: header describes {covered} bytes of data, the file holds {size - 8 - length}")
    return entries


def _begin(path: Path, name: str, raw: Any) -> int:
    """The first byte of one header entry; raises CheckpointError where the entry is malformed."""
    valid = isinstance(raw, dict) and set(raw) == {"dtype", "shape", "data_offsets"} and isinstance(raw["dtype"], str)
    numbers = [*raw["shape"], *raw["data_offsets"]] if valid else []
    if not numbers or len(raw["data_offsets"]) != 2 or any(type(n) is not int or n < 0 for n in numbers):
        raise CheckpointError(f"{path}: {name}: malformed header entry {raw!r}")
    return int(raw["data_offsets"][0])


def check_entries(entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, naming every offending tensor, unless entries are exactly those of shapes."""
    faults = [f"{name}: missing" for name in shapes if name not in entries]
    faults += [f"{name}: not part of this model" for name in entries if name not in shapes]
    faults += [
        f"{name}: shape {list(entries[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in entries and entries[name].shape != shape
    ]
    if faults:
        raise CheckpointError("the checkpoint does not fit its config:\n  " + "\n  ".join(faults))


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """One JSON object in which no key appears twice, at any depth."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{path}: {key}: appears twice")
            result[key] = value
        return result

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: must hold one JSON object")
    return parsed


def fingerprint(
    config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, layout: str, attention_backend: str
) -> str:
    """SHA-256 over all that makes two engines compute the same: workers of a pair must agree on it, or not start.

    weights: tensors by checkpoint name, as loaded, on any device; names, shapes and bytes count.
    """
    digest = hashlib.sha256()
    head = [config.family, config.to_dict(), str(dtype), layout, attention_backend]
    digest.update(json.dumps(head, sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
