"""Stores of every kind as sources and destinations of migrations, with the demo's pages."""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import Status, open_store, scan_schema
from hicachectl.backends.capabilities import Archive, Profiled
from hicachectl.backends.pack.file import open_pack
from hicachectl.backends.pack.recovery import walk
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.spec import object_specs
from tests.hf3fs_server import MetadataServer
from tests.killed import Runner
from tests.mooncake_cluster import Cluster
from tests.move.migrations import profile_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SOURCE_PAGES = 16
LEASE_MS = 300  # a move waits for the leases of its own reads
FILE_BYTES = 8 << 20  # size of each data file of 3FS

# By key: bytes of the object, and its time if the place keeps times.
Held = dict[bytes, tuple[bytes, int | None]]


class Place(ABC):
    """A place for a store."""

    kind: str
    url: str
    grammar: str
    profile = PROFILE

    @abstractmethod
    def empty(self) -> None:
        """Restore the state before the first write."""

    @abstractmethod
    def keys(self) -> set[str]:
        """Return the keys as servers see them."""

    def leftovers(self) -> list[str]:
        """Return entries that are not objects."""
        return []

    def fill(self, pages: int) -> None:
        """Write the demo's pages."""
        self.empty()
        with open_store(self.url, create=True) as store:
            if isinstance(store, Archive):
                store.use_grammar(self.grammar)
            if isinstance(store, Profiled):
                store.use_profile(self.profile)
            fill(store, pages)

    def set_times(self, held: Held) -> None:  # noqa: B027 - most keep no times
        """Set the times of existing objects to given times, by key."""

    def held(self) -> Held:
        """Return all objects."""
        with open_store(self.url) as store:
            if isinstance(store, Profiled):
                store.use_profile(self.profile)
            columns = ("nbytes", "mtime_ns", "locator")
            listed = pa.Table.from_batches(store.scan(columns), schema=scan_schema(columns))
            sizes = listed.column("nbytes").to_numpy()
            offsets, total = place(sizes)
            with Arena(max(total, 1)) as arena:
                store.attach(arena)
                read = store.read_into(listed, offsets, sizes)
                assert read.statuses.tolist() == [Status.OK] * len(listed), read.errors
                values = [
                    arena.view(offset, size).tobytes()
                    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
                ]
                store.detach()
        keys, times = listed.column("key").to_pylist(), listed.column("mtime_ns").to_pylist()
        return dict(zip(keys, zip(values, times, strict=True), strict=True))


class FilePlace(Place):
    """A directory."""

    kind = grammar = "file"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "files"
        self.url = f"file://{self.path}"

    def empty(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()

    def keys(self) -> set[str]:
        return {path.name for path in self.path.iterdir() if path.name[0] != "."}

    def set_times(self, held: Held) -> None:
        for key, (_, time_ns) in held.items():
            assert time_ns is not None
            os.utime(self.path / key.decode(), ns=(time_ns, time_ns))

    def leftovers(self) -> list[str]:
        return [path.name for path in self.path.iterdir() if path.name[0] == "."]


class NixlPlace(Place):
    """Two directories of the NIXL backend."""

    kind = grammar = "nixl"

    def __init__(self, folder: Path) -> None:
        self.directories = (folder / "one", folder / "two")
        paths = ",".join(map(str, self.directories))
        self.url = f"nixl://{paths}?high_watermark=100"

    def empty(self) -> None:
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()

    def keys(self) -> set[str]:
        return {path.name for path in self._files() if path.name[0] != "."}

    def set_times(self, held: Held) -> None:
        for path in self._files():
            _, time_ns = held[path.name.encode()]
            assert time_ns is not None
            os.utime(path, ns=(time_ns, time_ns))

    def leftovers(self) -> list[str]:
        return [path.name for path in self._files() if path.name[0] == "."]

    def _files(self) -> list[Path]:
        return [path for one in self.directories for path in one.rglob("*") if path.is_file()]


class PackPlace(Place):
    """One file, with the keys of a file store."""

    kind, grammar = "pack", "file"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "archive.hcpack"
        self.url = f"pack://{self.path}?keys=file"

    def empty(self) -> None:
        self.path.unlink(missing_ok=True)

    def keys(self) -> set[str]:
        """Return the keys of the records, whether the pack is finished or not."""
        if not self.path.exists() or not self.path.stat().st_size:
            return set()
        descriptor = open_pack(str(self.path), os.O_RDONLY)
        try:
            return {key.decode() for key in walk(descriptor, str(self.path)).entries}
        finally:
            os.close(descriptor)


class MooncakePlace(Place):
    """A cluster."""

    kind = grammar = "mooncake"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.url = cluster.url

    def empty(self) -> None:
        self.cluster.clear()

    def keys(self) -> set[str]:
        return set(self.cluster.list_keys())

    def held(self) -> Held:
        client = self.cluster.client()
        return {key.encode(): (client.get(key), None) for key in self.keys()}


class Hf3fsPlace(Place):
    """Tables of a metadata server, and files for their pages."""

    kind = grammar = "hf3fs"

    def __init__(self, folder: Path, server: MetadataServer) -> None:
        self._server = server
        self._folder = folder
        self.url = (
            f"hf3fs://{folder}/hicache?server={server.url}"
            f"&snapshot={server.snapshot}&file_size={FILE_BYTES}"
        )

    def empty(self) -> None:
        self._server.reset()
        for expected in object_specs(self.profile, "hf3fs"):
            number, pool, _ = grammar_of("hf3fs").affix(expected.coordinate)[0].split(":")
            path = self._folder / f"hicache.{number}.bin{'' if pool == 'kv' else '.' + pool}"
            path.unlink(missing_ok=True)
            path.touch()
            os.truncate(path, FILE_BYTES)
            self._server.initialize(int(number), FILE_BYTES // expected.nbytes, namespace=pool)
        self._server.save()

    def keys(self) -> set[str]:
        tables = self._server.saved()
        return {f"{name}:{key}" for name, t in tables.items() for key, _ in t["key_to_index"]}

    def fill(self, pages: int) -> None:
        super().fill(pages)
        self._server.save()

    def held(self) -> Held:
        self._server.save()
        return super().held()


class Places:
    """Places of every kind: a filled one to read from, and one to write to."""

    def __init__(self, folder: Path, python: Callable[[], Path]) -> None:
        self._folder = folder
        self._python = python
        self._made: dict[tuple[str, str], Place] = {}
        self._ended: list[Any] = []
        self.runner = Runner(self.folder("runs"))
        self.profile = profile_file(folder / "profile.toml")

    def folder(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir()
        return path

    def source(self, kind: str, *, fresh: bool) -> Place:
        """Return a place with the demo.

        fresh: whether to fill it anew, for runs that remove pages.
        """
        role = "moved" if fresh else "source"
        if fresh or (role, kind) not in self._made:
            self._place(role, kind).fill(SOURCE_PAGES)
        return self._made[role, kind]

    def destination(self, kind: str) -> Place:
        """Return an empty place."""
        place = self._place("destination", kind)
        place.empty()
        return place

    def _place(self, role: str, kind: str) -> Place:
        if (role, kind) not in self._made:
            self._made[role, kind] = self._new(kind, f"{role}-{kind}")
        return self._made[role, kind]

    def _new(self, kind: str, name: str) -> Place:
        if kind == "mooncake":
            self._ended.append(Cluster(lease_ms=LEASE_MS, put_start_discard_timeout_sec=1))
            return MooncakePlace(self._ended[-1])
        if kind == "hf3fs":
            self._ended.append(MetadataServer(self._python()))
            return Hf3fsPlace(self.folder(name), self._ended[-1])
        folder = self.folder(name)
        kinds: dict[str, Callable[[Path], Place]]
        kinds = {"file": FilePlace, "nixl": NixlPlace, "pack": PackPlace}
        return kinds[kind](folder)

    def close(self) -> None:
        for each in (self.runner, *self._ended):
            each.close()


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Places]:
    made = Places(
        tmp_path_factory.mktemp("kills"),
        lambda: request.getfixturevalue("sglang_python"),
    )
    yield made
    made.close()


def page_of(key: str) -> str:
    """Return the page hash in a key of any grammar."""
    found = re.search("[0-9a-f]{64}", key)
    assert found is not None, key
    return found[0]


def half_pages(place: Place, whole: Held) -> list[str]:
    """Return the pages that have an anchor, but lack a sidecar that they have in `whole`."""
    spell = grammar_of(place.grammar).affix
    anchors = {spell(e.coordinate) for e in object_specs(place.profile, place.grammar)
               if e.anchor}  # fmt: skip
    believed, incomplete = set(), set()
    there = place.keys()
    for key in map(bytes.decode, whole):
        page = page_of(key)
        if tuple(key.split(page)) in anchors:
            if key in there:
                believed.add(page)
        elif key not in there:
            incomplete.add(page)
    return sorted(believed & incomplete)


def whole_pages(place: Place, whole: Held) -> set[str]:
    """Return pages with all objects that they have in `whole`."""
    there = place.keys()
    keys = set(map(bytes.decode, whole))
    return {page_of(key) for key in keys} - {page_of(key) for key in keys - there}
