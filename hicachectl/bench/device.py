"""Time the steps of the device loaders, or of the checks on the CPU, over objects of the store."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.backends.arena import ALIGNMENT, Arena, place
from hicachectl.backends.base import attached, take_rows
from hicachectl.checks.values import ValueChecker
from hicachectl.io.pipeline import Loaded, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    import torch

    from hicachectl.backends.base import Store
    from hicachectl.bench.sample import Sample
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.sparse_triton import HostRows

_SLAB_BYTES = 64 << 20
_MOST_OBJECTS = 1024
_ROUNDS = 5
_TOP_K = 2048  # rows that sparse attention selects
_VECTOR_BYTES = 16


class Stage(NamedTuple):
    """A timed step over objects of one pool.

    name: name of the step.
    nbytes: bytes of the objects.
    """

    name: str
    pool: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Objects of one spec in memory, after their read."""

    spec: ObjectSpec
    loaded: Loaded

    @property
    def step(self) -> int:
        """Bytes from the start of one object to the start of the next."""
        return -(-self.spec.nbytes // ALIGNMENT) * ALIGNMENT


def timed_stages(
    store: Store, objects: pa.Table, sample: Sample, profile: Profile, device: torch.device | None
) -> Iterator[Stage]:
    """Read some objects of each pool, and time the steps over them.

    Pools of unknown form, and pools whose objects cannot be read, are left out.
    objects: table of the inventory.
    device: device that does the steps; None for the CPU.
    Raises DeviceError and StoreUnavailable.
    """
    pools = set[str]()
    for column, (spec, nbytes) in enumerate(sample.specs):
        if spec.pool in pools or not spec.tensors or nbytes != spec.nbytes or not nbytes:
            continue
        pools.add(spec.pool)
        rows = sample.batches[0][0].rows[column :: len(sample.specs)]
        step = -(-nbytes // ALIGNMENT) * ALIGNMENT
        rows = rows[: max(1, min(_MOST_OBJECTS, _SLAB_BYTES // step))]
        sizes = np.full(len(rows), nbytes, dtype=np.int64)
        offsets, total = place(sizes)
        with Arena(total) as arena:
            with attached(arena, store):
                named = take_rows(objects, rows)
                read = store.read_into(named, offsets, sizes, identify=False)
            if not read.all_ok:
                continue
            found = Objects(spec, Loaded(Task(rows, sizes), arena, offsets, total, read))
            yield from (
                _on_cpu(found, profile) if device is None else on_device(found, profile, device)
            )


def _on_cpu(objects: Objects, profile: Profile) -> Iterator[Stage]:
    """Time the checks and digests of `verify` on the CPU, in one thread."""
    from blake3 import blake3

    spec, loaded = objects.spec, objects.loaded
    checker = ValueChecker(spec, profile)
    every, nbytes = np.arange(len(loaded.offsets)), loaded.task.nbytes
    if checker.prepared:
        block = loaded.block()
        seconds = _seconds(lambda: checker.check(block, every, checker.prepared.keys()))
        yield Stage("values", spec.pool, nbytes, seconds)
    seconds = _seconds(lambda: [blake3(one).digest() for one in loaded.contents(every)])
    yield Stage("digests", spec.pool, nbytes, seconds)


def on_device(objects: Objects, profile: Profile, device: torch.device) -> Iterator[Stage]:
    """Time the steps of `verify --device`, and of the sparse loader, on a device."""
    from hicachectl.device.lanes import HostArenas, allocate_lanes, lane_bytes
    from hicachectl.device.runs import DeviceRun, ObjectForm

    spec, loaded = objects.spec, objects.loaded
    count, slab, step = len(loaded.offsets), loaded.room, objects.step
    nbytes = loaded.task.nbytes
    form = ObjectForm(spec, ValueChecker(spec, profile), step)
    if not form.supported:
        return
    (lane,) = allocate_lanes([device], lane_bytes(slab), slab, slab)
    memory = HostArenas().tensor(loaded.arena)
    host = memory[:slab]
    with lane.in_use():
        run = DeviceRun(form, lane)
        run.prepare_digests()
        steps: list[tuple[str, Callable[[], object]]] = [
            ("to device", lambda: lane.staging[:slab].copy_(host, non_blocking=True)),
            ("scatter", lambda: run.scatter(count)),
            ("values", lambda: run.start_checks(count)),
            ("digests", lambda: run.start_digests(count)),
        ]
        for name, launch in steps:
            yield Stage(name, spec.pool, nbytes, _seconds(launch, lane.wait))
        lane.wait()
        run.close()
    lane.close()
    if (rows := _sparse_rows(objects, memory, device)) is not None:
        yield _sparse(rows, spec.pool)


def _sparse_rows(objects: Objects, memory: torch.Tensor, device: torch.device) -> HostRows | None:
    """Return the rows of the tokens in the objects, as one sequence.

    Return None if the objects do not have one row for each token and layer, or if the sparse loader
    cannot read their rows.
    """
    import torch

    from hicachectl.kernels.sparse_triton import HostRows

    spec, loaded = objects.spec, objects.loaded
    tensor = spec.tensors[0]
    lengths, strides = dict(zip(tensor.axes, tensor.shape, strict=True)), tensor.strides
    if len(spec.tensors) > 1 or not {"layer", "token"} <= lengths.keys() or "head" in lengths:
        return None
    row_bytes = tensor.nbytes // (lengths["layer"] * lengths["token"])
    if any(size % _VECTOR_BYTES for size in (row_bytes, strides["token"], strides["layer"])):
        return None
    return HostRows(
        memory=memory,
        pages=torch.arange(len(loaded.offsets), device=device)[None],
        layers=lengths["layer"],
        page_size=lengths["token"],
        row_bytes=row_bytes,
        page_stride=objects.step,
        token_stride=strides["token"],
        layer_stride=strides["layer"],
    )


def _sparse(rows: HostRows, pool: str) -> Stage:
    """Time a step of the sparse loader in every layer. Before, the loader holds no row."""
    import torch

    from hicachectl.device.sparse import SparseLoader

    device, tokens = rows.pages.device, rows.pages.shape[1] * rows.page_size
    top_k = max(1, min(_TOP_K, tokens // 2))
    loader = SparseLoader(rows, top_k=top_k, slots=top_k)
    length = torch.tensor([tokens], dtype=torch.int32, device=device)
    rng = np.random.default_rng()
    chosen = [rng.permutation(tokens)[:top_k].astype(np.int32) for _ in range(rows.layers)]
    selected = [torch.from_numpy(one[None]).to(device) for one in chosen]

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def steps() -> None:
        loader.reset(0)
        for layer, some in enumerate(selected):
            loader.step(layer, some, length)

    nbytes = rows.layers * top_k * rows.row_bytes
    return Stage("sparse rows", pool, nbytes, _seconds(steps, wait))


def _seconds(work: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Return the median duration of some rounds, after a warm-up round."""
    times = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
