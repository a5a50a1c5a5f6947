"""What divided runs cost the lister, a worker and the driver, and how they scale; run by hand.

    python -m tests.bench.bench_parts --part memory [--stores file,hf3fs,mooncake,pack]
        [--objects 1000000] [--parts 8] [--at /dev/shm]
    python -m tests.bench.bench_parts --part memory --stores rows,snapshot --objects 10000000
    python -m tests.bench.bench_parts --part driver [--stores rows,damaged] [--objects 10000000]
    python -m tests.bench.bench_parts --part scaling [--seconds 120]
    python -m tests.bench.bench_parts --part ray [--seconds 60]

memory: fills a store and runs `verify --checks names,groups,sizes` in parts. Prints wall and CPU
seconds, the peak memory of each process, what the work added to it, and the size of the run
directory. `hf3fs` has SGLang's metadata server; `snapshot` is a snapshot of 3FS without a server,
and `rows` a file store whose listing is generated, for numbers of objects that fill no directory;
in `damaged` each page of that listing lacks an object.
The lister lists and divides; part 0 also judges what belongs to no page, and the tables of 3FS.
driver: the same verification by two workers of --ray on this machine. Prints the cost of the driver
alone: after the listing, after the last part, and after the document is written.
scaling: wall time of 1, 2 and 4 processes, each held to the same rate by --bwlimit, so that neither
the device nor the processor is the limit. `--seconds` is the time of one process.
ray: two workers of --ray against two processes, at the same rate; start-up is a run of two pages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import Rows, Store, open_store, scan_schema
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.pack.store import PackStore
from hicachectl.backends.testing import rows_of
from hicachectl.cli.commands.parts import opened_job
from hicachectl.cli.output import write_document
from hicachectl.parts.directory import RunDirectory
from hicachectl.parts.driver import Driver
from hicachectl.parts.results import merge_run
from hicachectl.parts.running import begin, run_part
from hicachectl.parts.verify import VerifyJob
from hicachectl.results import Shown
from hicachectl.verification.request import VerifyRequest
from tests.bench import bench_hf3fs_snapshot, bench_ls, bench_mooncake_ls
from tests.bench.runner import options_of, scratch
from tests.mooncake_cluster import Cluster
from tests.stores import OLD, page

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator

    from hicachectl.formats.arrays import BoolArray

ROOT = Path(__file__).parents[2]
CHECKS = ("names", "groups", "sizes")
STEPS = ("lister", "part 0", "part 1", "merge")
DRIVER = "driver"
AFFIXES = ("_m_0_2.bin", "_m_1_2.bin", ".mamba_m_0_2.bin", ".mamba_m_1_2.bin")
BATCH_PAGES = 16_384
PAGE_BYTES = 16 << 10  # of an object in the store of `scaling`: parts of about equal size
GENERATED = ("rows", "damaged")


# --- stores ---


class GeneratedStore(FileStore):
    """A directory that lists objects which it does not have, with random page hashes."""

    generated = 0  # number of objects
    damaged = False  # each page lacks one of its objects, which its hash decides

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """Yield the objects of four ranks and pools of each page."""
        schema = scan_schema(columns)
        chance = np.random.default_rng(0)
        left = self.generated
        while left:
            pages = chance.bytes(32 * BATCH_PAGES).hex()
            names = pa.array([pages[at : at + 64] for at in range(0, len(pages), 64)])
            hashes = names.take(pa.array(np.repeat(np.arange(len(names)), len(AFFIXES))))
            keys = pc.binary_join_element_wise(hashes, pa.array(AFFIXES * len(names)), "")
            keys = keys.cast(pa.binary())
            keys = keys.filter(pa.array(self.exists(pa.table({"key": keys})))).slice(0, left)
            left -= len(keys)
            given = {"key": keys, "nbytes": pa.repeat(52_000, len(keys))}
            given["mtime_ns"] = pa.repeat(1_700_000_000 * 10**9, len(keys))
            columns_ = [given.get(one.name, pa.nulls(len(keys), one.type)) for one in schema]
            yield pa.RecordBatch.from_arrays(columns_, schema=schema)

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys of a generated page are listed."""
        names = rows.column("key").cast(pa.string())
        lacks = pc.utf8_slice_codeunits(names, 0, 1)
        there = np.ones(len(names), dtype=np.bool_)
        for number, affix in enumerate(AFFIXES if self.damaged else ()):
            of_affix = pc.equal(pc.utf8_slice_codeunits(names, 64), affix)
            first = pa.array([f"{digit:x}" for digit in range(16) if digit % 4 == number])
            there &= ~pc.and_(of_affix, pc.is_in(lacks, first)).to_numpy(zero_copy_only=False)
        return there


@contextmanager
def filled(kind: str, objects: int, folder: Path) -> Iterator[str]:
    """Fill a store and yield its URL."""
    if kind in GENERATED:
        yield f"{kind}:{objects}:{folder}"
    elif kind == "file":
        bench_ls.fill(folder / "objects", objects, folders=False, trailers=False)
        yield str(folder / "objects")
    elif kind == "snapshot":
        path = folder / "snapshot.json"
        bench_hf3fs_snapshot.write_sample(path, objects)
        (folder / "data").mkdir()
        yield f"hf3fs://{folder}/data/hicache?snapshot={path}&file_size=1048576"
    elif kind == "hf3fs":
        from tests.hf3fs_fixtures import sglang_interpreter
        from tests.hf3fs_server import MetadataServer

        with MetadataServer(sglang_interpreter()) as server:
            server.initialize(0, 2 * objects)
            for start in range(0, objects, 20_000):
                numbers = range(start // 2, min(start + 20_000, objects) // 2)
                server.put(0, [f"{page(n)}{end}" for n in numbers for end in ("-k", "-v")])
            (folder / "data").mkdir()
            config = server.write_config(folder, 2 * objects * 512)
            yield f"hf3fs:?config={config}&snapshot={server.save()}"
    elif kind == "mooncake":
        nbytes = max(64 << 20, 4 * bench_mooncake_ls.OBJECT_BYTES * objects)
        with Cluster(nbytes) as cluster:
            bench_mooncake_ls.fill(cluster, objects)
            yield cluster.url
    else:
        write_pack(folder / "objects.hcpack", objects)
        yield f"pack://{folder}/objects.hcpack"


def write_pack(path: Path, objects: int) -> None:
    """Write a pack of small objects with random bytes."""
    listing = GeneratedStore.__new__(GeneratedStore)
    listing.generated = objects
    with PackStore(str(path), writable=True) as store, Arena(8 << 20) as arena:
        store.use_grammar("file")
        store.attach(arena)
        arena.memory[:] = os.urandom(len(arena.memory))
        for batch in listing.scan(("nbytes",)):
            for start in range(0, len(batch), 1024):
                keys = batch.column("key")[start : start + 1024].to_pylist()
                sizes = np.full(len(keys), 64, dtype=np.int64)
                offsets, _ = place(sizes)
                done = store.write_from(rows_of(keys), np.asarray(offsets), sizes, if_absent=False)
                assert done.all_ok


def opened(url: str) -> Store:
    """Open a store of `filled`."""
    kind, _, place = url.partition(":")
    if kind not in GENERATED:
        return open_store(url)
    objects, _, folder = place.partition(":")
    store = open_store(folder)
    store.__class__ = GeneratedStore
    store.generated = int(objects)  # type: ignore[attr-defined]
    store.damaged = kind == "damaged"  # type: ignore[attr-defined]
    return store


# --- memory and time ---


def peak_mib() -> float:
    """Return the peak memory of this process."""
    return bench_hf3fs_snapshot.peak_kib() / 1024


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children."""
    return sum(os.times()[:4])


def step(name: str, url: str, run: Path, parts: int) -> None:
    """Do one step of a run in this process; print what it cost as JSON."""
    if name == "merge":
        before, cpu, wall = peak_mib(), cpu_seconds(), time.perf_counter()
        with RunDirectory.existing(run) as directory:
            merged = merge_run(directory)
            json.dumps(merged.document, default=str)
    else:
        with opened(url) as store:
            job = verify_job(store)
            before, cpu, wall = peak_mib(), cpu_seconds(), time.perf_counter()
            with RunDirectory.create(run, job.permissions, job.trust) as directory:
                begun = begin(directory, job, parts)
                if name != "lister":
                    run_part(directory, job, begun, int(name.removeprefix("part ")))
    cost = {
        "wall": time.perf_counter() - wall,
        "cpu": cpu_seconds() - cpu,
        "peak": peak_mib(),
        "added": peak_mib() - before,
    }
    print(json.dumps(cost))


def measured(name: str, url: str, run: Path, parts: int) -> dict[str, float]:
    """Do a step in a process of its own."""
    program = (sys.executable, "-m", "tests.bench.bench_parts", "--step", name)
    arguments = ("--url", url, "--run", str(run), "--parts", str(parts))
    found: dict[str, float] = json.loads(subprocess.check_output([*program, *arguments], cwd=ROOT))
    return found


def drive(url: str, run: Path) -> None:
    """Drive a run in this process; print the peak memory after each stage as JSON."""
    costs: list[dict[str, Any]] = []

    def note(stage: str) -> None:
        wall, cpu = time.perf_counter() - began[0], cpu_seconds() - began[1]
        costs.append({"stage": stage, "wall": wall, "cpu": cpu, "peak": peak_mib()})

    with opened(url) as store:
        began = time.perf_counter(), cpu_seconds()
        job = verify_job(store)
        reopened = partial(opened_job, verify_job, [partial(opened, url)])
        with Driver("local", job, reopened, workers=2, path=run) as driver:
            note("start")
            driver.begin()
            note("listing")
            driver.work()
            note("parts")
            merged = driver.merged()
            note(f"merge of {len(merged.rows):,} findings")
            write_document(
                merged.document,
                rows=merged.rows,
                name=merged.rows_name,
                output_format="json",
                output=run / "document.json",
                text=lambda screen: merged.lines(merged.document, screen, Shown()),
            )
            note("document")
    print(json.dumps(costs))


def verify_job(store: Store) -> VerifyJob:
    """Return the job that all steps do."""
    return VerifyJob(store, VerifyRequest(checks=CHECKS), fail_on="never")


def driver_memory(kinds: list[str], objects: int, at: Path) -> None:
    """Print what the driver of a run on a cluster costs, by stage."""
    for kind in kinds:
        with scratch(at) as folder, filled(kind, objects, folder) as url:
            # Not as __main__: the nodes import the functions of the job by name.
            program = (sys.executable, "-c", f"import {__spec__.name} as b; b.main()")
            arguments = ("--step", DRIVER, "--url", url, "--run", str(folder / "run"))
            found = json.loads(subprocess.check_output([*program, *arguments], cwd=ROOT))
            for cost in found:
                print(
                    f"{kind:9} {objects:10,} objects  driver, after {cost['stage']:30}"
                    f"{cost['wall']:7.1f} s   CPU {cost['cpu']:6.1f} s   "
                    f"peak {cost['peak']:6.0f} MiB",
                    flush=True,
                )


def memory(kinds: list[str], objects: int, parts: int, at: Path) -> None:
    """Print the cost of each step for each store."""
    for kind in kinds:
        with scratch(at) as folder, filled(kind, objects, folder) as url:
            run = folder / "run"
            for name in STEPS:
                if name == "merge":
                    for part in range(2, parts):
                        measure_other(url, run, part, parts)
                cost = measured(name, url, run, parts)
                print(
                    f"{kind:9} {objects:10,} objects, {parts} parts  {name:7}"
                    f"{cost['wall']:7.1f} s   CPU {cost['cpu']:6.1f} s   "
                    f"peak {cost['peak']:6.0f} MiB   added {cost['added']:6.0f} MiB",
                    flush=True,
                )
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
            print(f"{kind:9} run directory {size / 1e6:.0f} MB", flush=True)


def measure_other(url: str, run: Path, part: int, parts: int) -> None:
    """Do a part whose cost is not of interest."""
    with opened(url) as store:
        job = verify_job(store)
        with RunDirectory.create(run, job.permissions, job.trust) as directory:
            run_part(directory, job, begin(directory, job, parts), part)


# --- scaling ---


def write_files(folder: Path, nbytes: int) -> None:
    """Write objects of one rank with real bytes."""
    folder.mkdir()
    content = np.random.default_rng(0).bytes(PAGE_BYTES)
    for number in range(nbytes // PAGE_BYTES):
        (folder / f"{page(number)}_m_0_1.bin").write_bytes(content)
        os.utime(folder / f"{page(number)}_m_0_1.bin", (OLD, OLD))


def verify_command(store: Path, catalog: Path, *more: object) -> list[str]:
    """Return a command that digests every object."""
    given = ("--checks", "digests", "--catalog", catalog, "--fail-on", "never", *more)
    return [sys.executable, "-m", "hicachectl", "-q", "verify", str(store), *map(str, given)]


def wall_of(commands: list[list[str]]) -> float:
    """Run processes at the same time; return the seconds until the last one ends."""
    begun = time.perf_counter()
    for process in [subprocess.Popen(each, cwd=ROOT) for each in commands]:
        assert process.wait() == 0
    return time.perf_counter() - begun


def scaling(seconds: float, at: Path) -> None:
    """Print the wall time of 1, 2 and 4 processes, each held to one rate."""
    rate = 4 << 20  # bytes a second, of each process
    with scratch(at) as folder:
        store, catalog = folder / "objects", folder / "catalog.parquet"
        write_files(store, int(rate * seconds))
        subprocess.run(verify_command(store, catalog, "--update-catalog"), cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        alone = 0.0
        for workers in (1, 2, 4):
            run = folder / f"run-{workers}"
            limit = ("--bwlimit", rate * workers, "--run", run)  # each part takes an equal share
            commands = [
                verify_command(store, catalog, *limit, "--shard", f"{part}/{workers}")
                for part in range(workers)
            ]
            wall = wall_of(commands)
            alone = alone or wall
            print(f"{workers} workers of {rate >> 20} MiB/s each: {wall:6.1f} s, "
                  f"{alone / wall:.2f} times one", flush=True)  # fmt: skip


# --- Ray ---


def ray(seconds: float, at: Path) -> None:
    """Print the wall time of two Ray workers and of two processes, each held to one rate."""
    rate = 4 << 20
    with scratch(at) as folder:
        store, catalog = folder / "objects", folder / "catalog.parquet"
        write_files(store, int(2 * rate * seconds))
        subprocess.run(verify_command(store, catalog, "--update-catalog"), cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        limit = ("--bwlimit", 2 * rate)
        plain = wall_of(
            [
                verify_command(store, catalog, *limit, "--run", folder / "run", "--shard", f"{n}/2")
                for n in range(2)
            ]
        )
        workers = ("--ray", "local", "--workers", 2)
        tiny = folder / "tiny"
        write_files(tiny, 2 * PAGE_BYTES)
        start = wall_of([verify_command(tiny, catalog, *workers)])
        with_ray = wall_of([verify_command(store, catalog, *limit, *workers)])
        print(f"processes {plain:.1f} s, Ray {with_ray:.1f} s, its start-up {start:.1f} s; beyond "
              f"start-up {(with_ray - start) / plain - 1:+.1%}")  # fmt: skip


def main() -> None:
    """Measure as the command line asks."""
    options = options_of(
        __doc__, part=str, stores=str, objects=int, parts=8, at=Path("/dev/shm"), seconds=float,
        step=str, url=str, run=Path,
    )  # fmt: skip
    objects = options.objects or (10_000_000 if options.part == "driver" else 1_000_000)
    usual = "rows,damaged" if options.part == "driver" else "file,hf3fs,mooncake,pack"
    kinds = (options.stores or usual).split(",")
    if options.step == DRIVER:
        drive(options.url, options.run)
    elif options.step:
        step(options.step, options.url, options.run, options.parts)
    elif options.part == "memory":
        memory(kinds, objects, options.parts, options.at)
    elif options.part == "driver":
        driver_memory(kinds, objects, options.at)
    elif options.part == "scaling":
        scaling(options.seconds or 120, options.at)
    elif options.part == "ray":
        ray(options.seconds or 60, options.at)
    else:
        raise SystemExit("give --part")


if __name__ == "__main__":
    main()
