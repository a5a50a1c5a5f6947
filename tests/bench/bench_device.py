"""Measure the parts of `verify --device cuda` against the limits of the device, in one run.

    python -m tests.bench.bench_device [--part kernels,bus,providers,verify,sparse]
        [--store /dev/shm] [--bytes 8GiB]
    python -m tests.bench.bench_device --part reads      # needs no device

Ceilings: a copy within the device (bytes read and written), a bare loop of cudaMemcpyAsync from
pinned memory, and reads of the same store into the arena. Kernels run on about 1 GiB of realistic
pages, several times the cache. Events time them; the median of some rounds counts. verify and reads
read a store with --bytes of distinct objects and further names of the same files.
`bench_providers` describes providers; sparse measures the same as `bench_sparse --part
gather,digest`. Each part, and each run of verify, is a forked process: CUDA, once started, would
keep verify from forking the processes that read.
"""

from __future__ import annotations

import hashlib
import os
import queue
import resource
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.spec import object_specs
from hicachectl.io.forking import Workers
from hicachectl.io.pipeline import Pipeline, batches
from hicachectl.io.reads import ReadingProcesses
from hicachectl.verification.request import VerifyRequest
from tests.bench.runner import options_of
from tests.checks.value_cases import DEEPSEEK, GDN, INDEXER, LLAMA_8B, profile_of
from tests.kvgen import KvGenerator
from tests.verification.in_process import verify_store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from hicachectl.backends.base import Limits
    from hicachectl.device.plans import PoolForm
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.io.pipeline import Loaded
    from tests.device.providers import Provider

    Copies = tuple[Callable[[], None], Callable[[], None]]

ROUNDS, WARM_UP = 15, 3
TOTAL_BYTES = 1 << 30
DISTINCT_PAGES = 12
ALIGNMENT = 4096
MOST_OBJECTS = 4096
OLD = 1_700_000_000
SLAB_BYTES = 64 << 20
GAPS = 1 << 20  # most bytes between the objects of a slab
BUFFER_BYTES = 1 << 30
DEVICE_BYTES = 8 << 30
LANES = 8  # slabs that are copied at once

STATES = GDN | {"layers": 36}


class Case(NamedTuple):
    """One kind of object to measure."""

    name: str
    profile: Profile
    pool: str = "kv"


def cases() -> Iterator[Case]:
    for layout in ("page_first", "page_first_direct", "page_head"):
        yield Case(f"bf16 K/V 8.4 MB {layout}", profile_of(LLAMA_8B, layout=layout))
    fp8 = LLAMA_8B | {"dtype": "float8_e4m3fn"}
    yield Case("fp8 K/V 4.2 MB page_first", profile_of(fp8, layout="page_first"))
    small = LLAMA_8B | {"layers": 13}
    yield Case(
        "bf16 K/V 53 KB page_first, page 1", profile_of(small, layout="page_first", page_size=1)
    )
    scaled = DEEPSEEK | {"row": "fp8_scaled"}
    for layout in ("page_first", "page_first_direct"):
        yield Case(f"bf16 MLA 4.5 MB {layout}", profile_of(DEEPSEEK, layout=layout))
        yield Case(f"656-byte rows 2.6 MB {layout}", profile_of(scaled, layout=layout))
    yield Case("indexer 515 KB", profile_of(DEEPSEEK, INDEXER, layout="page_first"), "indexer")
    yield Case("mamba 77 MB", profile_of(LLAMA_8B, STATES, layout="page_first"), "mamba")


def expected_of(case: Case) -> ObjectSpec:
    return next(e for e in object_specs(case.profile, "file") if e.coordinate.pool == case.pool)


def pages(case: Case, expected: ObjectSpec, count: int) -> np.ndarray:
    """Return objects at aligned offsets, a few distinct ones repeated: [count, stride]."""
    stride = -(-expected.nbytes // ALIGNMENT) * ALIGNMENT
    distinct = min(count, DISTINCT_PAGES if expected.nbytes > 1 << 20 else 64)
    made = np.zeros((count, stride), np.uint8)
    objects = KvGenerator(expected, case.profile, seed=1).objects(range(distinct))
    for start in range(0, count, distinct):
        part = made[start : start + distinct]
        part[:, : expected.nbytes] = objects[: len(part)]
    return made


def milliseconds(work: Callable[[], object]) -> float:
    """Time device work by events; return the median of some rounds."""
    import torch

    for _ in range(WARM_UP):
        work()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def replayed(work: Callable[[], object]) -> Callable[[], object]:
    """Capture launches, as verify does, so that Python's time does not count for small kernels."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the work's input may still be on its way
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work()
    return graph.replay


def rate(nbytes: int, work: Callable[[], object]) -> float:
    """Return the GB/s of device work on so many bytes."""
    return float(nbytes / milliseconds(work) / 1e6)


def cuda_device() -> torch.device:
    """Return the first CUDA device; without one, exit with the reason."""
    from hicachectl.device.devices import cuda_devices

    try:
        return cuda_devices(("cuda",))[0]
    except HicacheError as error:
        raise SystemExit(f"{error}; nothing was measured") from error


def apart(work: Callable[[], Any]) -> Any:
    """Do work in a forked process; return its result, of JSON types."""

    def send_result(send: Callable[[Any], None]) -> None:
        try:
            send([work(), None])
        except SystemExit as end:
            send([None, str(end)])
        sys.stdout.flush()

    sys.stdout.flush()
    with Workers(1, send_result) as children:
        ((result, end),) = children
    if end is not None:
        raise SystemExit(end)
    return result


def parts_of(text: str, known: Iterable[str]) -> list[str]:
    parts = text.split(",")
    if unknown := set(parts) - set(known):
        raise SystemExit(f"--part {min(unknown)!r}: write some of {','.join(known)}")
    return parts


def size(text: str) -> int:
    number, unit = text[:-3], text[-3:]
    return int(float(number) * {"GiB": 1 << 30, "MiB": 1 << 20}[unit])


def device_copy(device: torch.device) -> float:
    import torch

    source = torch.empty(TOTAL_BYTES, dtype=torch.uint8, device=device).random_()
    copy = torch.empty_like(source)
    return rate(2 * TOTAL_BYTES, lambda: copy.copy_(source))


def measure_kernels(options: argparse.Namespace) -> None:
    device = cuda_device()
    ceiling = device_copy(device)
    print(f"copy within the device: {ceiling:.0f} GB/s read and written\n")
    print("GB/s; in brackets the ratio to that copy: scatter and gather by bytes read and written,")
    print("checks by bytes read; digest alone")
    print(f"{'':38}{'scatter':>14}{'gather':>14}{'checks':>14}{'digest':>8}")
    for case in cases():
        measure_case(case, ceiling, device)


def copies(
    form: PoolForm,
    provider: Provider,
    objects: torch.Tensor,
    pools: torch.Tensor,
    slots: torch.Tensor,
) -> Copies:
    """Return what loads pools from objects ([n, stride]) and what writes them back."""
    import torch

    count, stride = objects.shape
    plans = form.plans(count)
    places = torch.arange(count, device=pools.device) * (stride // 16)
    flat = objects.view(-1)

    def scatter() -> None:
        for plan in plans:
            provider.copy(plan, flat, places, pools, slots)

    def gather() -> None:
        for plan in plans:
            provider.copy(plan.reversed(), pools, slots, flat, places)

    return scatter, gather


def measure_case(case: Case, ceiling: float, device: torch.device) -> None:
    import torch

    from hicachectl.device.check_kernels import fields_of
    from hicachectl.device.plans import pool_form
    from hicachectl.kernels.blake3_triton import digest_ranges, ranges_of
    from hicachectl.kernels.values_triton import block_flags
    from tests.device.providers import TritonProvider

    expected = expected_of(case)
    count = max(2, TOTAL_BYTES // expected.nbytes)
    host = pages(case, expected, min(count, 64))
    few = torch.from_numpy(host).to(device)
    objects = few.repeat(-(-count // len(few)), 1)[:count].contiguous()
    before = objects.clone()
    form = pool_form(expected.tensors)
    pools = torch.empty(count * form.page_bytes, dtype=torch.uint8, device=device)
    slots = torch.from_numpy(np.random.default_rng(2).permutation(count)).to(device)
    scatter, gather = copies(form, TritonProvider(), objects, pools, slots)
    looks = [
        (pools[count * piece.offset :], piece, fields)
        for piece, fields in fields_of(expected, case.profile, form)
    ]
    blocks = {
        piece.name: torch.arange(count * piece.layers, device=device) for piece in form.pieces
    }

    def check() -> None:
        for pool, piece, fields in looks:
            block_flags(pool, blocks[piece.name], piece.slot_bytes, fields, together=piece.layers)

    moved = 2 * count * expected.nbytes
    scattered = rate(moved, replayed(scatter))
    checked = rate(moved // 2, replayed(check))
    objects.fill_(0xA5)
    gathered = rate(moved, replayed(gather))
    same = torch.equal(objects[:, : expected.nbytes], before[:, : expected.nbytes])
    assert same, f"{case.name}: not what was scattered"
    offsets = np.arange(count, dtype=np.int64) * objects.shape[1]
    lengths = np.full(count, expected.nbytes, dtype=np.int64)
    ranges = ranges_of(objects.view(-1), offsets, lengths, upload=lambda table: table.cuda())
    digested = rate(moved // 2, replayed(partial(digest_ranges, objects.view(-1), ranges)))
    figures = "".join(
        f"{figure:8.0f} ({figure / ceiling:.2f})" for figure in (scattered, gathered, checked)
    )
    print(f"{case.name:38}{figures}{digested:8.0f}", flush=True)


# --- host to device ---


def measure_bus(options: argparse.Namespace) -> None:
    import torch

    from hicachectl.backends.arena import Arena
    from hicachectl.device.lanes import HostArenas

    device, slab = cuda_device(), SLAB_BYTES
    staging = [torch.empty(slab, dtype=torch.uint8, device=device) for _ in range(4)]

    def loop(host: torch.Tensor) -> None:
        for number in range(TOTAL_BYTES // slab):
            part = host[number * slab : (number + 1) * slab]
            staging[number % 4].copy_(part, non_blocking=True)

    bare = rate(
        TOTAL_BYTES, partial(loop, torch.empty(TOTAL_BYTES, dtype=torch.uint8).pin_memory())
    )
    with Arena(TOTAL_BYTES) as arena:
        started = time.monotonic()
        host = HostArenas().tensor(arena)
        registering = time.monotonic() - started
        through = rate(TOTAL_BYTES, partial(loop, host))
        del host
    print(f"bare loop of cudaMemcpyAsync, pinned, {slab >> 20} MiB each: {bare:.1f} GB/s")
    print(f"the same through the arena: {through:.1f} GB/s ({through / bare:.2f})")
    print(f"page-locking the arena once: {registering * 1e3:.0f} ms for {TOTAL_BYTES >> 20} MiB")


# --- verify, end to end ---


def write_store(directory: Path, case: Case, nbytes: int, distinct_bytes: int) -> int:
    """Write one object per page; beyond `distinct_bytes`, further names of the same files."""
    expected = expected_of(case)
    before, after = FileGrammar().affix(expected.coordinate)
    objects = KvGenerator(expected, case.profile, seed=1).objects(range(DISTINCT_PAGES))
    count, distinct = nbytes // expected.nbytes, min(nbytes, distinct_bytes) // expected.nbytes
    names = [f"{before}{hashlib.sha256(str(n).encode()).hexdigest()}{after}" for n in range(count)]

    def write(number: int) -> None:
        objects[number % DISTINCT_PAGES].tofile(directory / names[number])
        os.utime(directory / names[number], (OLD, OLD))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(distinct)))
    for number in range(distinct, count):
        (directory / names[number]).hardlink_to(directory / names[number % distinct])
    return count * expected.nbytes


class ByThreads(FileStore):
    """A store that threads read, as they read stores whose client cannot be forked."""

    limits: Limits = replace(FileStore.limits, forkable=False)


class Rate(NamedTuple):
    """How fast a store was read.

    gb: GB/s.
    cores: processors that the command used meanwhile, without those of processes that read.
    """

    gb: float
    cores: float

    def __str__(self) -> str:
        return f"{self.gb:.1f} ({self.cores:.2f})"


def timed_reads(directory: Path, jobs: int, by: type[FileStore], *, copies: bool = False) -> Rate:
    """Only read a whole store into the arena. copies: also copy it to the device."""
    with by(directory) as store:
        objects = pa.Table.from_batches(list(store.scan()))
        sizes = objects.column("nbytes").to_numpy()
        tasks = batches(
            np.arange(len(sizes)), sizes, most_objects=MOST_OBJECTS, most_bytes=SLAB_BYTES
        )
        forks = store.limits.forkable
        with (
            ReadingProcesses(store, objects, jobs, buffer_bytes=BUFFER_BYTES)
            if forks
            else nullcontext() as processes
        ):
            work = SlabCopies(cuda_device()) if copies else bytes_of
            clock = Clock()
            pipeline = Pipeline(
                store,
                objects,
                tasks,
                work,
                buffer_bytes=BUFFER_BYTES,
                jobs=None if forks else 1,
                processes=processes,
                waiting=LANES if forks else jobs - 1,
            )
            for nbytes in pipeline:
                clock.add(nbytes)
    return clock.rate


def bytes_of(loaded: Loaded) -> int:
    return loaded.task.nbytes


class SlabCopies:
    """Copies of slabs to a device, each by a stream of its own, without a check."""

    def __init__(self, device: torch.device) -> None:
        import torch

        from hicachectl.device.lanes import HostArenas

        self._arenas = HostArenas()
        self._free: queue.Queue[tuple[torch.cuda.Stream, torch.Tensor]] = queue.Queue()
        for _ in range(LANES):
            staging = torch.empty(SLAB_BYTES + GAPS, dtype=torch.uint8, device=device)
            self._free.put((torch.cuda.Stream(device), staging))

    def __call__(self, loaded: Loaded) -> int:
        import torch

        stream, staging = self._free.get()
        first = int(loaded.offsets[0])
        nbytes = int(loaded.offsets[-1] + loaded.task.capacities[-1]) - first
        host = self._arenas.tensor(loaded.arena)[first : first + nbytes]
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            staging[:nbytes].copy_(host, non_blocking=True)
            done.record()
        done.synchronize()
        self._free.put((stream, staging))
        return bytes_of(loaded)


class Clock:
    """Rate of bytes from the first finished task to the last."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._first = self._last = (0.0, 0.0)
        self._nbytes = 0

    def add(self, nbytes: int, total: int = 0) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._last = (time.monotonic(), used.ru_utime + used.ru_stime)
        if self._first[0]:
            self._nbytes += nbytes
        else:
            self._first = self._last

    @property
    def rate(self) -> Rate:
        wall, used = (last - first for first, last in zip(self._first, self._last, strict=True))
        return Rate(self._nbytes / max(wall, 1e-9) / 1e9, used / max(wall, 1e-9))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Way(NamedTuple):
    """A way to read for a device.

    store: ByThreads, or FileStore for processes.
    jobs: --jobs; None for verify's own number.
    buffer: --buffer-bytes, of which a slab is a 16th.
    """

    store: type[FileStore]
    jobs: int | None = None
    buffer: int = BUFFER_BYTES

    @property
    def name(self) -> str:
        return f"{'threads' if self.store is ByThreads else 'processes'} {self.jobs or 'auto'}"


def with_stores(
    options: argparse.Namespace, names: Iterable[str], measure: Callable[[Case, Path], None]
) -> None:
    """Write a store for each of some cases, and measure it."""
    distinct = size(options.bytes)
    nbytes = distinct * NAMES_OF_A_FILE
    if (free := shutil.disk_usage(options.store).free) < distinct + (64 << 20):
        raise SystemExit(
            f"{options.store} has room for {free >> 20} MiB, not for {distinct >> 20}: give "
            "another --store, or fewer --bytes"
        )
    print(f"{nbytes / (1 << 30):.1f} GiB of objects, {distinct / (1 << 30):.1f} GiB distinct")
    print("GB/s while reading, best of some rounds; in brackets the processors that the command")
    print("itself used, without those of reading processes")
    for case in cases():
        if case.name in names:
            with tempfile.TemporaryDirectory(dir=options.store) as directory:
                write_store(Path(directory), case, nbytes, distinct)
                measure(case, Path(directory))


def best(rounds: Iterable[list[float]]) -> Rate:
    return max(Rate(*one) for one in rounds)


def measure_reads(options: argparse.Namespace) -> None:
    """Only read: threads and processes take turns."""

    def measure(case: Case, directory: Path) -> None:
        for jobs in JOBS:
            rounds: list[list[list[float]]] = [[], []]
            for _ in range(READ_ROUNDS):
                for found, by in zip(rounds, (ByThreads, FileStore), strict=True):
                    found.append(apart(partial(timed_reads, directory, jobs, by)))
            threads, processes = map(best, rounds)
            print(f"{case.name:38}{jobs:4} threads {threads}   processes {processes}", flush=True)

    with_stores(options, (SMALL, *VERIFIED), measure)


def measure_verify(options: argparse.Namespace) -> None:
    """Verify; print ratios to the lower of reads and bus, and to bare copies."""
    bus = apart(bus_rate)
    print(f"bus: {bus:.1f} GB/s from pinned memory; copied: read, and copied to the device, only")

    def measure(case: Case, directory: Path) -> None:
        reads, copied = (
            best(
                apart(partial(timed_reads, directory, READ_JOBS, by, copies=copies))
                for _ in range(READ_ROUNDS)
                for by in (ByThreads, FileStore)
            )
            for copies in (False, True)
        )
        print(f"{case.name}: reads {reads}, copied {copied}", flush=True)
        for catalog in (False, True):
            apart(partial(verify_once, directory, case, WAYS[0], catalog))  # compiles
        for way in WAYS:
            figures = f"  {way.name:16}buffer {way.buffer >> 30} GiB"
            for catalog, name in ((False, "values"), (True, "with digests")):
                rates = [
                    apart(partial(verify_once, directory, case, way, catalog))
                    for _ in range(VERIFY_ROUNDS)
                ]
                done = best(rates)
                shares = f"{done.gb / min(reads.gb, bus):.2f}, {done.gb / copied.gb:.2f}"
                figures += f"   {name} {done} {shares}"
            print(figures, flush=True)

    with_stores(options, VERIFIED, measure)


def verify_once(directory: Path, case: Case, way: Way, catalog: bool) -> Rate:
    request = VerifyRequest(
        profile=case.profile,
        devices=("cuda",),
        jobs=way.jobs,
        buffer_bytes=way.buffer,
        device_bytes=DEVICE_BYTES,
        update_catalog=catalog,
    )
    clock = Clock()
    with way.store(directory) as store:
        report = verify_store(store, request, on_read=clock.add)
    assert not len(report.findings), report.findings.slice(0, 3).to_pylist()
    assert report.document["device"] == "cuda:0", report.remarks
    return clock.rate


def bus_rate() -> float:
    import torch

    host = torch.empty(TOTAL_BYTES, dtype=torch.uint8).pin_memory()
    staging = torch.empty(SLAB_BYTES, dtype=torch.uint8, device=cuda_device())

    def loop() -> None:
        for start in range(0, TOTAL_BYTES, SLAB_BYTES):
            staging.copy_(host[start : start + SLAB_BYTES], non_blocking=True)

    return rate(TOTAL_BYTES, loop)


def measure_providers(options: argparse.Namespace) -> None:
    from tests.bench import bench_providers

    bench_providers.measure_providers(cuda_device())


def measure_sparse(options: argparse.Namespace) -> None:
    from tests.bench import bench_sparse

    cuda_device()
    memory = bench_sparse.page_locked(bench_sparse.HOST_BYTES, "arena")
    bench_sparse.print_gather(memory)
    bench_sparse.print_digest(memory)


PARTS = {
    "kernels": measure_kernels,
    "bus": measure_bus,
    "providers": measure_providers,
    "verify": measure_verify,
    "sparse": measure_sparse,
    "reads": measure_reads,
}
ON_DEVICE = ",".join(name for name in PARTS if name != "reads")
SMALL = "bf16 K/V 53 KB page_first, page 1"
VERIFIED = ("bf16 K/V 8.4 MB page_first", "656-byte rows 2.6 MB page_first")
NAMES_OF_A_FILE = 8
JOBS = (1, 2, 4, 8, 16)
READ_JOBS = 16
READ_ROUNDS, VERIFY_ROUNDS = 3, 2
WAYS = (
    Way(ByThreads),
    Way(FileStore),
    Way(FileStore, 8),
    Way(FileStore, buffer=4 << 30),
)


def name_device() -> str:
    import torch

    return f"{torch.cuda.get_device_name(cuda_device())}, torch {torch.__version__}"


def main() -> None:
    options = options_of(__doc__, part=ON_DEVICE, store="/dev/shm", bytes="8GiB")
    parts = parts_of(options.part, PARTS)
    started = time.monotonic()
    if parts != ["reads"]:
        print(apart(name_device))
    for part in parts:
        print(f"\n# {part}")
        apart(partial(PARTS[part], options))
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
