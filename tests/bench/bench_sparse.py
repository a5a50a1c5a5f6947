"""Measure the sparse loader, and the digest kernel alone.

    python -m tests.bench.bench_sparse --part fraction [--pattern FILE.npy] [--slots 2048,4096]
    python -m tests.bench.bench_sparse --part gather,digest [--host-bytes 4GiB] [--memory huge]

fraction: the share of selected tokens that a step fetches, for each layer, by the loader's model;
          needs no device. The pattern is [steps, layers, k] int32, of one request, -1 for none.
          Without a file it is generated: tokens have scores that drift, the k best are selected.
          Its persistence decides the share, so only a recorded pattern is evidence about a model.
gather:   400 missing rows of 656 bytes for each of 64 requests, from page objects in page-locked
          mapped memory, against a kernel that reads the same memory from end to end.
digest:   of 1 GiB, against host-to-device copies.
"""

from __future__ import annotations

import mmap
import time
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.arena import Arena
from tests.bench.bench_device import (
    ROUNDS,
    WARM_UP,
    cuda_device,
    milliseconds,
    parts_of,
    rate,
    size,
)
from tests.bench.runner import options_of
from tests.kernels.sparse_reference import SparseModel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    import torch

    from hicachectl.device.sparse import SparseLoader
    from hicachectl.kernels.sparse_triton import HostRows

    Pattern = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

REQUESTS, TOP_K, MISSES = 64, 2048, 400
LAYERS, PAGE_SIZE, ROW_BYTES = 61, 64, 656
DIGEST_BYTES = 1 << 30
OBJECT_BYTES = (40_016, 515_328, 2_561_024, 4_497_408, 75_497_472)
HOST_BYTES = 4 << 30
DEVICE = "cuda"


def generated(options: argparse.Namespace) -> Pattern:
    """Select the k best of scores that keep a share of their value from step to step."""
    rng = np.random.default_rng(options.seed)
    keep = options.persistence
    fresh = np.float32((1 - keep * keep) ** 0.5)
    shape = (options.layers, options.context)
    scores = rng.standard_normal(shape, np.float32)
    pattern = np.empty((options.steps, options.layers, options.k), np.int32)
    for step in pattern:
        step[:] = np.argpartition(scores, -options.k, axis=1)[:, -options.k :]
        scores = keep * scores + fresh * rng.standard_normal(shape, np.float32)
    return pattern


def loaded(path: Path) -> Pattern:
    try:
        pattern: Pattern = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from error
    if pattern.dtype != np.int32 or pattern.ndim != 3 or not pattern.size:
        raise SystemExit(f"{path}: {pattern.dtype} {pattern.shape}, not int32 [steps, layers, k]")
    return pattern


def fractions(pattern: Pattern, slots: int) -> np.ndarray:
    """Return fetched tokens per selected token, by step and layer."""
    steps, layers = pattern.shape[:2]
    length = int(pattern.max()) + 2  # the newest token is never selected
    there = [True] * length
    shares = np.empty((steps, layers))
    for layer in range(layers):
        model = SparseModel(min(slots, length - 1))
        for step in range(steps):
            top_k = pattern[step, layer].tolist()
            selected = sum(position >= 0 for position in top_k)
            shares[step, layer] = len(model.step(top_k, length, there)[1]) / max(1, selected)
    return shares


def print_fractions(options: argparse.Namespace) -> None:
    pattern = loaded(options.pattern) if options.pattern else generated(options)
    steps, layers, k = pattern.shape
    source = options.pattern or (
        f"context {options.context}, persistence {options.persistence}, seed {options.seed}"
    )
    print(f"fraction fetched, {steps} steps, {layers} layers, k {k}; {source}")
    print(f"{'slots':>8}{'first':>8}{'later':>8}{'layers, least':>16}{'most':>8}{'s':>8}")
    chosen = map(int, options.slots.split(",")) if options.slots else (k, 2 * k, 4 * k)
    for slots in chosen:
        if slots < k:
            raise SystemExit(f"--slots {slots}: a buffer of fewer than the {k} selected tokens")
        start = time.perf_counter()
        shares = fractions(pattern, slots)
        by_layer = shares[1:].mean(axis=0) if steps > 1 else shares[0]
        print(
            f"{slots:8}{shares[0].mean():8.3f}{by_layer.mean():8.3f}{by_layer.min():16.3f}"
            f"{by_layer.max():8.3f}{time.perf_counter() - start:8.1f}"
        )
        if options.each_step:
            for step, share in enumerate(shares):
                by_each = " ".join(f"{one:.3f}" for one in share)
                print(f"{'':8}step {step}: {share.mean():.3f}; layers {by_each}")


def page_locked(nbytes: int, kind: str) -> torch.Tensor:
    """Return random bytes that kernels can read, kept until the process ends.

    kind: arena, as in the loaders; huge, a private mapping that asks for huge pages.
    """
    import torch

    if kind == "huge":
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(mapping, np.uint8)
    else:
        array = Arena(nbytes).array
    block = np.random.default_rng(1).integers(0, 256, 64 << 20, np.uint8)
    for start in range(0, nbytes, len(block)):
        array[start : start + len(block)] = block[: len(array) - start]
    # Blocks repeat, but one word in each 4 KiB holds its position.
    array.view(np.int64)[::512] = np.arange(-(-len(array) // 4096))
    status = int(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, len(array), 3))
    assert status == 0, f"cudaHostRegister: {status}"
    return torch.from_numpy(array)[:nbytes]


def mapped_read_gb_s(memory: torch.Tensor) -> float:
    """Read mapped memory from end to end with a kernel: the ceiling of any gather."""
    import torch

    from tests.bench.stream_triton import stream

    nbytes = 256 << 20
    target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    starts = cycle(range(0, len(memory) - nbytes + 1, nbytes))
    first = next(starts)
    stream(memory[first : first + nbytes], target)
    assert torch.equal(target.cpu(), memory[first : first + nbytes])

    def read() -> None:
        start = next(starts)
        stream(memory[start : start + nbytes], target)

    return rate(nbytes, read)


def copy_gb_s(memory: torch.Tensor) -> float:
    import torch

    nbytes = 256 << 20
    target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    starts = cycle(range(0, len(memory) - nbytes + 1, nbytes))

    def copy() -> None:
        start = next(starts)
        target.copy_(memory[start : start + nbytes], non_blocking=True)

    return rate(nbytes, copy)


def print_gather(memory: torch.Tensor) -> None:
    import torch

    from hicachectl.device.sparse import SparseLoader
    from tests.device.sparse_rows import rows_of_layout

    ceiling = mapped_read_gb_s(memory)
    print(f"mapped read {ceiling:.1f} GB/s, cudaMemcpyAsync {copy_gb_s(memory):.1f} GB/s")
    pages = len(memory) // (LAYERS * PAGE_SIZE * ROW_BYTES)
    table = torch.arange(pages, device=DEVICE).repeat(REQUESTS, 1)
    print(f"{'':20}{'us a layer':>12}{'ms, 61 layers':>15}{'GB/s':>8}{'of ceiling':>12}")
    for layout in ("page_first", "page_first_direct"):
        rows = rows_of_layout(
            memory, table, layout=layout, layers=LAYERS, page_size=PAGE_SIZE, row_bytes=ROW_BYTES
        )
        loader = SparseLoader(rows, top_k=TOP_K)
        check_rows(loader)
        for name, ms in timings(loader, rows):
            nbytes = REQUESTS * MISSES * ROW_BYTES if "400" in name else 0
            speed = nbytes / ms / 1e6
            print(
                f"{layout:20}{ms * 1e3:12.1f}{ms * LAYERS:15.2f}{speed:8.1f}{speed / ceiling:12.2f}"
                f"  {name}"
            )
        del loader


def shifting_top_k(rows: HostRows) -> Iterator[torch.Tensor]:
    """Yield top-k sets, each with 400 tokens that no earlier step of the request had."""
    import torch

    context = rows.pages.shape[1] * rows.page_size
    order = np.random.default_rng(2).permutation(context - 1).astype(np.int32)
    requests = np.arange(REQUESTS)[:, None] * (context // REQUESTS)
    for step in count():
        entries = (requests + MISSES * step + np.arange(TOP_K)) % len(order)
        yield torch.from_numpy(order[entries]).to(DEVICE)


def lengths_of(rows: HostRows) -> torch.Tensor:
    import torch

    context = rows.pages.shape[1] * rows.page_size
    return torch.full((REQUESTS,), context, dtype=torch.int32, device=DEVICE)


def check_rows(loader: SparseLoader) -> None:
    """Compare the rows of two steps with the host's bytes, in the first and last layer."""
    rows = loader.rows
    top_k = shifting_top_k(rows)
    for layer in (0, rows.layers - 1, rows.layers - 1):
        selected = next(top_k)
        locs = loader.step(layer, selected, lengths_of(rows))
        found = loader.pool(layer)[locs[::9].long()].cpu().numpy()
        position = selected[::9].cpu().numpy().astype(np.int64)
        start = (
            position // rows.page_size * rows.page_stride
            + position % rows.page_size * rows.token_stride
            + layer * rows.layer_stride
        )
        host = np.lib.stride_tricks.sliding_window_view(rows.memory.numpy(), rows.row_bytes)
        assert (host[start] == found).all(), f"layer {layer}"
    for request in range(REQUESTS):
        loader.reset(request)


def timings(loader: SparseLoader, rows: HostRows) -> Iterator[tuple[str, float]]:
    """Yield names and milliseconds per layer."""
    from hicachectl.kernels.sparse_triton import gather_rows

    top_k = shifting_top_k(rows)
    lengths = lengths_of(rows)
    selected = next(top_k).clone()
    step_all = captured(lambda: [loader.step(layer, selected, lengths) for layer in range(LAYERS)])
    upcoming = iter([next(top_k) for _ in range(WARM_UP + ROUNDS)])

    def shift_and_step() -> None:
        selected.copy_(next(upcoming))
        step_all()

    ms = milliseconds(shift_and_step) / LAYERS
    assert loader.fetched.tolist() == [MISSES] * REQUESTS
    yield "step with 400 missing rows", ms
    plan = loader._plan  # the last plan, again and again

    def gather_layers() -> None:
        for layer in range(LAYERS):
            gather_rows(rows, layer, plan, loader._pools[layer])

    gather_all = captured(gather_layers)
    yield "gather of 400 rows alone", milliseconds(gather_all) / LAYERS
    yield "step with no missing row", milliseconds(step_all) / LAYERS


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """Capture device work as a graph, so launches cost nothing; return its replay."""
    import torch

    work()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], object] = graph.replay
    return replay


def print_digest(memory: torch.Tensor) -> None:
    from blake3 import blake3

    from hicachectl.kernels.blake3_triton import digest_ranges, ranges_of

    copy = copy_gb_s(memory)
    total = min(DIGEST_BYTES, len(memory))
    print(f"digest of {total >> 20} MiB, GB/s; host-to-device {copy:.1f}")
    buffer = memory[:total].to(DEVICE)
    lanes = (32, 64, 128, 256)
    print(f"{'bytes an object':>16}" + "".join(f"{f'{n} lanes':>12}" for n in lanes))
    for nbytes in OBJECT_BYTES:
        stride = -(-nbytes // 4096) * 4096
        offsets = np.arange(total // stride) * stride
        lengths = np.full(len(offsets), nbytes)
        rates = []
        for n in lanes:
            ranges = ranges_of(buffer, offsets, lengths, upload=lambda table: table.cuda(), lanes=n)
            found = digest_ranges(buffer, ranges).cpu().numpy()
            for number in (0, len(offsets) - 1):
                start = int(offsets[number])
                data = memory[start : start + nbytes].numpy().tobytes()
                assert found[number].tobytes() == blake3(data).digest()
            rates.append(rate(nbytes * len(offsets), partial(digest_ranges, buffer, ranges)))
        print(f"{nbytes:16}" + "".join(f"{speed:12.0f}" for speed in rates))


def main() -> None:
    options = options_of(
        __doc__, part="fraction", pattern=Path, save=Path, slots=str, each_step=False, steps=32,
        layers=4, k=TOP_K, context=16384, persistence=0.95, seed=0, host_bytes="4GiB",
        memory="arena",
    )  # fmt: skip
    host_bytes = size(options.host_bytes)
    parts = parts_of(options.part, ("fraction", "gather", "digest"))
    if options.save:
        np.save(options.save, generated(options))
    if "fraction" in parts:
        print_fractions(options)
    if {"gather", "digest"} & set(parts):
        cuda_device()
        import torch

        print(f"{torch.cuda.get_device_name()}, {options.memory} {host_bytes >> 20} MiB")
        memory = page_locked(host_bytes, options.memory)
        if "gather" in parts:
            print_gather(memory)
        if "digest" in parts:
            print_digest(memory)


if __name__ == "__main__":
    main()
