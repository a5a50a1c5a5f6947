"""Stores written and read as the plug-in does it, for tests of commands."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.epochs import begin_epoch
from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages
from hicachectl.backends.sglang.page_store import ServedPool
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.urls import parse_url
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.identity import object_identity
from hicachectl.formats.profile import parse_profile
from hicachectl.formats.spec import object_specs, ranks_of
from hicachectl.formats.trailer import NO_RANK, TRAILER_BYTES, dump_trailer, parse_trailer
from tests.kvgen import KvGenerator
from tests.stores import DSA, OLD, page

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from hicachectl.backends.sglang.page_store import Pieces
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

SECONDS = 8.0
_SEED = 1
WEIGHTS, OTHER_WEIGHTS = "a" * 32, "b" * 32
HYBRID = replace(PROFILE, weights=WEIGHTS)  # MHA of TP 2, with Mamba states
INDEXED = replace(parse_profile(DSA), weights=WEIGHTS)  # MLA with an indexer


class Page:
    """Host memory for one page of a pool, in two pieces."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, max(1, nbytes))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._nbytes = nbytes

    def pieces(self, host_indices: Sequence[int]) -> list[Pieces]:
        half = self._nbytes // 2
        whole = ((self._address, half), (self._address + half, self._nbytes - half))
        return [whole for _ in host_indices]

    @property
    def value(self) -> bytes:
        return self._memory[: self._nbytes]

    @value.setter
    def value(self, data: bytes) -> None:
        self._memory[: self._nbytes] = data


class Rank:
    """One rank of a deployment, with a page's memory for each of its pools."""

    def __init__(self, directory: Path, profile: Profile, rank: int, **options: Any) -> None:
        url = parse_url(str(directory))
        settings = Settings(stores=(url,), **options)
        self.store = FilePages(url, Counters(str(directory)), settings)
        self.specs: dict[str, ObjectSpec] = {}
        self.hosts: dict[str, Page] = {}
        self.pools: dict[str, ServedPool] = {}
        for spec in object_specs(profile, "file"):
            shard = spec.coordinate.shard
            if shard.tp_rank not in (rank, None):
                continue
            identity = object_identity(profile, spec)
            assert identity is not None
            self.specs[spec.pool] = spec
            self.hosts[spec.pool] = host = Page(spec.nbytes)
            self.pools[spec.pool] = pool = ServedPool(
                name=spec.pool,
                ranks=ranks_of(profile)._replace(tp_rank=rank),
                shared_anchor=profile.rank_replicated,
                identity=identity,
                page_indices=1,
                nbytes=spec.nbytes,
                parts=(),
                trailing=spec.trailing,
                writes=shard.tp_rank is not None or not rank,
                host=host,
            )
            self.store.add(pool)

    def write(self, pool: str, page: str, data: bytes) -> None:
        self.hosts[pool].value = data
        served = self.pools[pool]
        with Call(SECONDS) as call:
            done = self.store.write(served, [page], self.hosts[pool].pieces([0]), call)
        assert done == [True], self.store.counters.tally.of("refused")

    def read(self, pool: str, page: str) -> bytes | None:
        """Return a page as a server gets it; None for a miss."""
        served = self.pools[pool]
        with Call(SECONDS) as call:
            done = self.store.read(served, [page], self.hosts[pool].pieces([0]), call)
        return self.hosts[pool].value if done == [True] else None

    def exists(self, pool: str, pages: Sequence[str]) -> list[bool]:
        with Call(SECONDS) as call:
            return self.store.exists(self.pools[pool], pages, call)


@contextmanager
def serving(directory: Path, profile: Profile, **options: Any) -> Iterator[list[Rank]]:
    """Attach the ranks of a deployment to a directory."""
    ranks = [Rank(directory, profile, rank, **options) for rank in range(profile.tp)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.store.close()


def served_store(
    directory: Path, profile: Profile, pages: Iterable[int] = range(4), **options: Any
) -> list[str]:
    """Write pages as servers with the plug-in do, with old times. Return the page hashes."""
    numbers = list(pages)
    with serving(directory, profile, **options) as ranks:
        for rank in ranks:
            for pool, spec in rank.specs.items():
                if rank.pools[pool].writes:
                    objects = KvGenerator(spec, profile, _SEED).objects(numbers)
                    for number, value in zip(numbers, objects, strict=True):
                        rank.write(pool, page(number), value.tobytes())
    written = [page(number) for number in numbers]
    age(directory, written)
    return written


def age(directory: Path, pages: Collection[str] | None = None) -> None:
    """Give the objects old times, so that no page is in flight.

    pages: pages of the objects; None for all pages.

    Setting a file's times renews its ctime, which would bring back what a server has cleared.
    """
    for path in directory.rglob("*.bin"):
        if pages is None or path.name[:64] in pages:
            os.utime(path, (OLD, OLD))


def forget_ranks(directory: Path) -> None:
    """Replace all trailers by trailers without a rank, as older releases write. Set old times."""
    for path in directory.rglob("*.bin"):
        data = path.read_bytes()
        trailer = parse_trailer(data[-TRAILER_BYTES:])
        assert trailer is not None
        path.write_bytes(data[:-TRAILER_BYTES] + dump_trailer(trailer._replace(rank=NO_RANK)))
    age(directory)


def swap_ranks(directory: Path, page: str) -> set[str]:
    """Swap the files of ranks 0 and 1 of TP 2 of a page. Return their names."""
    firsts = sorted(directory.glob(f"{page}*_0_2.bin"))
    assert firsts
    seconds = [path.with_name(path.name.replace("_0_2.bin", "_1_2.bin")) for path in firsts]
    for first, second in zip(firsts, seconds, strict=True):
        away = first.rename(first.with_suffix(".away"))
        second.rename(first)
        away.rename(second)
    return {path.name for path in (*firsts, *seconds)}


def clear(store: Path) -> None:
    """Make all present objects misses, as the plug-in's `clear` does, but not later ones."""
    names = {path.name.encode() for path in store.rglob("*.bin")}
    with ObjectDirectory.open(str(store)) as directory:
        begin_epoch(directory, {name[64:] for name in names})
    time.sleep(0.05)  # the file system's clock has ticks of some milliseconds


def served_by(
    directory: Path, profile: Profile, pages: Sequence[str], **options: Any
) -> list[bool]:
    """Return which pages servers of a deployment can read whole, with all pools of all ranks."""
    with serving(directory, profile, **options) as ranks:
        return [
            all(rank.read(pool, one) is not None for rank in ranks for pool in rank.pools)
            for one in pages
        ]
