"""Checkpoints in the safetensors format: with random numbers, or sparse files of any size."""

from __future__ import annotations

import json
import math
import os
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name

ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}


def shard_header(tensors: Tensors) -> tuple[bytes, int]:
    """Return a shard's header, preceded by its length, and the number of bytes of its tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def write_shard(path: Path, tensors: Tensors, *, seed: int | None = None) -> None:
    """Write a safetensors file with random numbers of a seed, or with holes if there is none."""
    header, nbytes = shard_header(tensors)
    with path.open("wb") as file:
        file.write(header)
        if seed is None:
            file.truncate(len(header) + nbytes)
        else:
            file.write(random.Random(seed).randbytes(nbytes))


def write_checkpoint(directory: Path, shards: Mapping[str, Tensors], *, index: bool = True) -> Path:
    """Write a model directory with random weights. Return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for seed, (name, tensors) in enumerate(shards.items()):
        write_shard(directory / name, tensors, seed=seed)
    if index:
        places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        text = json.dumps({"metadata": {}, "weight_map": places})
        (directory / "model.safetensors.index.json").write_text(text)
    return directory


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file, but not its size or its times."""
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
