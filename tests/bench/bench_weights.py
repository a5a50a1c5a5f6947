"""Measure how long the fingerprint of a large checkpoint takes, and what it reads.

    python -m tests.bench.bench_weights [--bytes 1TB] [--latency-ms 0,1,5] [--directory /tmp]

The shards are sparse files with the headers of two kinds of models: experts of 14.7 MB with their
scales, and dense layers of 70 to 1,700 MB. --latency-ms: every open and read waits this long first,
as on a network file system.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from hicachectl.backends.disk.weights import read_checkpoint
from hicachectl.formats.sizes import parse_size
from tests.bench.runner import options_of, scratch, timed
from tests.checkpoints import CONFIG, ITEM_BYTES, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SHARD_BYTES = 5_000_000_000
EXPERT = {"weight": ("F8_E4M3", (7168, 2048)), "weight_scale_inv": ("F32", (56, 16))}
DENSE = {
    "q_proj.weight": ("BF16", (16384, 16384)),
    "k_proj.weight": ("BF16", (2048, 16384)),
    "gate_proj.weight": ("BF16", (53248, 16384)),
    "input_layernorm.weight": ("BF16", (16384,)),
}
MODELS: Mapping[str, Mapping[str, Any]] = {"experts": EXPERT, "dense": DENSE}


def main() -> None:
    """Run the measurement of the command line."""
    arguments = options_of(__doc__, bytes="1TB", latency_ms="0,1,5", directory=Path)
    nbytes = parse_size(arguments.bytes)
    for kind, layer in MODELS.items():
        with scratch(arguments.directory) as folder:
            shards, tensors = write_sparse(folder, layer, nbytes)
            print(f"{kind}: {nbytes / 1e12:.2f} TB, {shards} shards, {tensors} tensors")
            for latency in map(float, arguments.latency_ms.split(",")):
                measure(folder, latency / 1000)


def write_sparse(directory: Path, layer: Mapping[str, Any], nbytes: int) -> tuple[int, int]:
    """Write sparse shards of about SHARD_BYTES; return their number, and that of their tensors."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    one = sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in layer.values())
    layers = max(1, SHARD_BYTES // one)
    shards = max(1, nbytes // (one * layers))
    for shard in range(shards):
        # safetensors' own writer puts the wider dtypes first
        names = sorted(layer, key=lambda name: -ITEM_BYTES[layer[name][0]])
        tensors = {
            f"layers.{shard}.{number}.{name}": layer[name]
            for wide in (True, False)
            for number in range(layers)
            for name in names
            if (layer[name][0] == "F32") is wide
        }
        write_shard(directory / f"model-{shard:05d}.safetensors", tensors)
    return shards, shards * layers * len(layer)


def measure(directory: Path, latency_s: float) -> None:
    """Print the time of one fingerprint, and the reads that it made."""
    lock, calls, read = threading.Lock(), 0, 0
    names: list[str] = []

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*arguments: Any) -> Any:
            nonlocal calls, read
            if latency_s:
                time.sleep(latency_s)
            result = call(*arguments)
            with lock:
                calls += 1
                read += len(result) if isinstance(result, bytes) else 0
            return result

        return waiting

    with (
        mock.patch.object(os, "pread", slow(os.pread)),
        mock.patch.object(os, "open", slow(os.open)),
    ):
        seconds = timed(lambda: names.append(read_checkpoint(directory).fingerprint))()
    print(
        f"  latency {1000 * latency_s:g} ms: {seconds:.2f} s, {calls} opens and reads, "
        f"{read / 1e6:.1f} MB: {names[0]}"
    )


if __name__ == "__main__":
    main()
