"""The storage plug-in against SGLang's HiCacheFile and against a bare loop; run by hand.

    PYTHONPATH=. .venv-sglang/bin/python tests/bench/bench_plugin.py [--dir /dev/shm] [--rounds 9]

Runs in the SGLang environment, on SGLang's own host pools: MHA pages of 8 MiB, DSA pages (KV of
2.6 MB and indexer of 0.5 MB, the indexer by v2), and pages of 53 KB. Every round reads and writes
the same pages in turn

- by HiCacheFile, called as the controller calls it (`_generic_page_get`, `_generic_page_set`,
  `batch_get_v2`, `batch_set_v2`),
- by the plug-in, with digests off, xxh3 and BLAKE3,
- by bare loops over preadv and pwritev that do the plug-in's work with each digest: they compare
  the trailer, read the file into memory of their own with as many threads, compare trailer and
  digest, and copy into the pool; or look for the file, write a temporary one with its trailer,
  digest before and after, and rename it. They know no deadlines, epochs or capacity.

Prints the ratio of throughputs in each round to HiCacheFile and to the bare loop, lower quartile
and median.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conformance import attached_rank, rank_pools, sglang_env
    from tests.conformance.store_cases import Deployment
else:
    import sglang_env

    sglang_env.prepare()
    import attached_rank
    import rank_pools
    from store_cases import Deployment

MIB = 1 << 20
DIGESTS = ("off", "xxh3", "blake3")
THREADS = 4
LARGE = 256 << 10  # bytes of a page from which threads pay


def _profile(pools: list[dict[str, Any]], page_size: int) -> Any:
    document = {"model": "bench/model", "sglang": "0.5.23", "page_size": page_size}
    return {**document, "layout": "page_first", "tp": 1, "pools": pools}


KV_MHA = {"name": "kv", "kind": "mha", "dtype": "bfloat16", "kv_heads": 8, "head_dim": 128}
KV_MLA = {"kind": "mla", "layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
CASES = {
    "mha": (_profile([{**KV_MHA, "layers": 32}], 64), 24),
    "dsa": (
        _profile(
            [
                {"name": "kv", "row": "fp8_scaled", **KV_MLA},
                {"name": "indexer", "kind": "dsa_indexer", "layers": 61, "index_head_dim": 128},
            ],
            64,
        ),
        48,
    ),
    "53k": (_profile([{**KV_MHA, "layers": 13, "kv_heads": 8, "head_dim": 128}], 1), 1024),
}


@dataclass
class Timing:
    """Seconds of each round by what was timed."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, name: str, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def ratio(self, slow: str, fast: str) -> str:
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        ratios = sorted(a / b for a, b in pairs)
        quartile = ratios[len(ratios) // 4]
        return f"{quartile:.2f} ({statistics.median(ratios):.2f})"


class Rank:
    """A rank's host pools, HiCacheFile, and the pages of a prompt."""

    def __init__(self, case: str, directory: Path) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        self.profile, count = CASES[case]
        self.pages = [f"{number:064x}" for number in range(count)]
        self.deployment = Deployment(self.profile)
        with rank_pools.parallel(self.deployment, rank_pools.Rank(0, 0, 0)):
            self.pools = rank_pools.build_pools(
                self.deployment, rank_pools.Rank(0, 0, 0), count + 1
            )
        self.host = self.pools.host
        self.sidecars = [name for name in self.host if name != "kv"]
        kv = self.host["kv"]
        self.indices = kv.alloc(count * kv.page_size)
        for pool in self.host.values():
            for name in ("kv_buffer", "index_k_with_scale_buffer"):
                buffer = getattr(pool, name, None)
                if buffer is None:
                    continue
                buffer.view(-1).view(sys.modules["torch"].uint8).random_()
        self.config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=len(self.sidecars) > 0,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench/model",
            extra_config={"file_storage_path": str(directory)},
        )
        self.file = HiCacheFile(self.config)
        for name, pool in self.host.items():
            self.file.register_mem_host_pool_v2(pool, name)
        self.nbytes = {name: _page_bytes(pool) for name, pool in self.host.items()}

    def transfers(self) -> list[Any]:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        return [
            PoolTransfer(name=PoolName(name), host_indices=self.indices, keys=self.pages)
            for name in self.sidecars
        ]

    # HiCacheFile as CacheController calls it

    def file_read(self) -> None:
        kv = self.host["kv"]
        assert self.file.batch_exists(self.pages) == len(self.pages)
        for start in range(0, len(self.pages), 128):
            batch = self.pages[start : start + 128]
            dummies = [kv.get_dummy_flat_data_page() for _ in batch]
            data = self.file.batch_get(batch, dummies)
            for number, page in enumerate(data):
                assert page is not None
                kv.set_from_flat_data_page(self.indices[(start + number) * kv.page_size], page)
        if self.sidecars:
            results = self.file.batch_get_v2(self.transfers())
            assert all(all(result) for result in results.values())

    def file_write(self) -> None:
        kv = self.host["kv"]
        if self.sidecars:
            results = self.file.batch_set_v2(self.transfers())
            assert all(all(result) for result in results.values())
        for start in range(0, len(self.pages), 128):
            batch = self.pages[start : start + 128]
            data = [
                kv.get_data_page(self.indices[(start + number) * kv.page_size])
                for number in range(len(batch))
            ]
            assert self.file.batch_set(batch, data)


def _page_bytes(pool: Any) -> int:
    import torch

    _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    return int(sum(sizes))


class Plugin:
    """The plug-in on a directory of its own."""

    def __init__(self, rank: Rank, directory: Path, digest: str) -> None:
        from dataclasses import replace

        from hicachectl.backends.sglang import HiCacheStore

        self.rank = rank
        extra = {
            "backend_name": "hicachectl",
            "module_path": "hicachectl.backends.sglang",
            "class_name": "HiCacheStore",
            "interface_v1": 1,
            "store": f"file://{directory}",
            "digest": digest,
            "identity": "bench",
            "threads": THREADS,
        }
        self.store = HiCacheStore(replace(rank.config, extra_config=extra), {})
        self.store.register_mem_pool_host(rank.host["kv"])
        for name, pool in rank.host.items():
            self.store.register_mem_host_pool_v2(pool, name)
        self.store.on_host_pools_registered()

    def read(self) -> None:
        rank = self.rank
        size = rank.host["kv"].page_size
        if rank.sidecars:
            found = self.store.batch_exists_v2(rank.pages, rank.transfers())
            assert found.kv_hit_pages == len(rank.pages)
        else:
            assert self.store.batch_exists(rank.pages) == len(rank.pages)
        for start in range(0, len(rank.pages), 128):
            batch = rank.pages[start : start + 128]
            indices = rank.indices[start * size :][: len(batch) * size]
            assert all(self.store.batch_get_v1(batch, indices))
        if rank.sidecars:
            results = self.store.batch_get_v2(rank.transfers())
            assert all(all(result) for result in results.values())

    def write(self) -> None:
        rank = self.rank
        size = rank.host["kv"].page_size
        if rank.sidecars:
            results = self.store.batch_set_v2(rank.transfers())
            assert all(all(result) for result in results.values())
        for start in range(0, len(rank.pages), 128):
            batch = rank.pages[start : start + 128]
            indices = rank.indices[start * size :][: len(batch) * size]
            assert all(self.store.batch_set_v1(batch, indices))


class Bare:
    """Loops over system calls that do the same work: threads, memory, digests, renames."""

    def __init__(self, rank: Rank, directory: Path, digest: str) -> None:
        from hicachectl.formats.trailer import PoolTrailers, digest_function

        self.rank = rank
        self.trailers = {
            name: PoolTrailers(digest, nbytes, bytes(16), bytes(24))
            for name, nbytes in rank.nbytes.items()
        }
        self.directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.digest = digest_function(digest)
        self.has_digest = digest != "off"
        self.pieces = {}
        for name, pool in rank.host.items():
            pointers, sizes = pool.get_page_buffer_meta(rank.indices)
            each = len(pointers) // len(rank.pages)
            pairs = list(zip(pointers, sizes, strict=True))
            self.pieces[name] = [
                pairs[start : start + each] for start in range(0, len(pairs), each)
            ]
        self.own = threading.local()

    def read(self) -> None:
        for name in self.rank.host:
            for page in self.rank.pages:
                descriptor = os.open(f"{page}.{name}", os.O_RDONLY, dir_fd=self.directory)
                size = os.fstat(descriptor).st_size
                trailer = os.pread(descriptor, 128, size - 128)
                os.close(descriptor)
                assert self.trailers[name].digest(trailer, bytes.fromhex(page)) is not None
        for name in self.rank.host:
            self._threads(name, self._read)

    def write(self) -> None:
        for name in reversed(list(self.rank.host)):
            self._threads(name, self._write)

    def _threads(self, name: str, work: Callable[[str, int], None]) -> None:
        left = iter(range(len(self.rank.pages)))

        def loop() -> None:
            for number in left:
                work(name, number)

        count = THREADS if self.rank.nbytes[name] >= LARGE else 1  # more only wait for each other
        threads = [threading.Thread(target=loop) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _read(self, name: str, number: int) -> None:
        nbytes, page = self.rank.nbytes[name], self.rank.pages[number]
        memory, address = self._memory(nbytes + 128)
        descriptor = os.open(f"{page}.{name}", os.O_RDONLY, dir_fd=self.directory)
        os.fstat(descriptor)
        assert os.preadv(descriptor, [memory[: nbytes + 128]], 0) == nbytes + 128
        os.close(descriptor)
        trailer = bytes(memory[nbytes : nbytes + 128])
        stored = self.trailers[name].digest(trailer, bytes.fromhex(page))
        assert self.digest([memory[:nbytes]]) == stored
        for target, size in self.pieces[name][number]:
            ctypes.memmove(target, address, size)
            address += size

    def _write(self, name: str, number: int) -> None:
        page = self.rank.pages[number]
        final = f"{page}.{name}"
        with suppress(FileNotFoundError):
            os.close(os.open(final, os.O_RDONLY, dir_fd=self.directory))
            return
        views = [
            memoryview((ctypes.c_char * size).from_address(pointer)).cast("B")
            for pointer, size in self.pieces[name][number]
        ]
        digest = self.digest(views)
        trailer = self.trailers[name].dump(bytes.fromhex(page), digest)
        temporary = f"{final}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(temporary, flags, 0o666, dir_fd=self.directory)
        os.pwritev(descriptor, [*views, trailer], 0)
        os.close(descriptor)
        if self.has_digest:
            assert self.digest(views) == digest
        os.rename(temporary, final, src_dir_fd=self.directory, dst_dir_fd=self.directory)

    def _memory(self, nbytes: int) -> tuple[memoryview, int]:
        if getattr(self.own, "memory", None) is None:
            mapping = mmap.mmap(-1, nbytes)
            self.own.memory = memoryview(mapping)
            self.own.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        return self.own.memory, self.own.address


def emptied(directory: Path) -> Path:
    """Remove the objects in a directory, and leave what is hidden."""
    for path in directory.iterdir():
        if not path.name.startswith("."):
            path.unlink()
    return directory


def measure(case: str, base: Path, rounds: int) -> dict[str, Any]:
    """Return the ratios of one case."""
    folders = {name: base / name for name in ("file", *DIGESTS, *(f"bare-{d}" for d in DIGESTS))}
    for folder in folders.values():
        folder.mkdir(parents=True)
    rank = Rank(case, folders["file"])
    with attached_rank.server_arguments(rank.deployment):
        return _measured(rank, folders, rounds)


def _measured(rank: Rank, folders: dict[str, Path], rounds: int) -> dict[str, Any]:
    users: dict[str, Any] = {d: Plugin(rank, folders[d], d) for d in DIGESTS}
    users |= {f"bare-{d}": Bare(rank, folders[f"bare-{d}"], d) for d in DIGESTS}
    reads, writes = Timing(), Timing()
    for number in range(rounds + 1):
        names = ["file", *users]
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            emptied(folders[name])
            write = rank.file_write if name == "file" else users[name].write
            read = rank.file_read if name == "file" else users[name].read
            if number:  # the first round warms up
                writes.run(name, write)
                reads.run(name, read)
            else:
                write()
                read()
    total = sum(rank.nbytes.values()) * len(rank.pages)
    result: dict[str, Any] = {
        "GB/s of HiCacheFile": {
            "read": round(total / statistics.median(reads.seconds["file"]) / 1e9, 2),
            "write": round(total / statistics.median(writes.seconds["file"]) / 1e9, 2),
        }
    }
    for digest in DIGESTS:
        result[digest] = {
            "read / HiCacheFile": reads.ratio("file", digest),
            "read / bare": reads.ratio(f"bare-{digest}", digest),
            "write / HiCacheFile": writes.ratio("file", digest),
            "write / bare": writes.ratio(f"bare-{digest}", digest),
        }
    result["get_stats us"] = _microseconds(users["xxh3"].store.get_stats)
    for digest in DIGESTS:
        users[digest].store.close()
    return result


def _microseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for _ in range(10_000):
        call()
    return round((time.perf_counter() - began) * 100, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default="/dev/shm", help="a directory on the file system to use")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args(arguments)
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-plugin-", dir=options.dir) as folder:
            print(
                case, json.dumps(measure(case, Path(folder), options.rounds), indent=1), flush=True
            )


if __name__ == "__main__":
    main()
