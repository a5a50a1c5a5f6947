"""A backend as another program could add it: a read-only tar of `.bin` files, as `tar:` URLs.

The tests use public interfaces only: `Store`, `register_scheme`, the suite and the commands.
"""

from __future__ import annotations

import json
import os
import tarfile
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.base import (
    Limits,
    ReadResult,
    Status,
    Store,
    Traits,
    keys_of,
    open_store,
    scan_schema,
)
from hicachectl.backends.testing import StoreSuite
from hicachectl.backends.urls import Scheme, StoreUrl, register_scheme
from hicachectl.formats.errors import StoreUnavailable
from tests.move.migrations import MODEL, PAGES, demo_store, profile_file
from tests.stores import OLD, contents, page, put

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Mapping

    from hicachectl.backends.base import Rows
    from hicachectl.formats.arrays import IntArray
    from tests.conftest import Invoke

Members = dict[bytes, tarfile.TarInfo]


class TarStore(Store):
    """The `.bin` files of a tar archive, named as SGLang's file backend names them."""

    traits = Traits(live=False)
    limits = Limits(batch_objects=1024, batch_bytes=64 << 20, parallel_reads=2, parallel_writes=1)
    grammar = "file"

    def __init__(self, url: StoreUrl) -> None:
        self.url, self._path = str(url), Path(url.path)
        with self._archive():
            pass

    @classmethod
    def from_url(cls, url: StoreUrl) -> TarStore:
        return cls(url)

    @contextmanager
    def _archive(self) -> Iterator[tuple[BufferedReader, Members]]:
        """Open the current archive; a later member replaces an earlier one of the same name."""
        try:
            with self._path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
                files = [member for member in archive if member.isreg()]
                yield file, {os.fsencode(f.name): f for f in files if f.name.endswith(".bin")}
        except (OSError, tarfile.TarError) as error:
            raise StoreUnavailable(f"{self.url}: {error}") from error

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        with self._archive() as (_, members):
            yield from _listing(members, columns).to_batches(max_chunksize=65_536)

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        with self._archive() as (_, members):
            return _listing({k: members[k] for k in keys_of(rows) if k in members}, columns)

    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        memory = self.memory(offsets, capacities, len(rows))
        statuses = np.full(len(rows), Status.GONE, dtype=np.uint8)
        nbytes = np.full(len(rows), -1, dtype=np.int64)
        with self._archive() as (file, members):
            for row, key in enumerate(keys_of(rows)):
                if key not in members:
                    continue
                member, start, capacity = members[key], offsets[row], capacities[row]
                nbytes[row], statuses[row] = member.size, _judged(member.size, capacity)
                if statuses[row] == Status.OK:
                    file.seek(member.offset_data)
                    file.readinto(memory[start : start + capacity])
        return ReadResult(statuses, nbytes=nbytes, versions=np.zeros((len(rows), 0), np.uint64))


def _listing(members: Members, columns: Collection[str]) -> Any:
    known = {
        "key": list(members),
        "nbytes": [member.size for member in members.values()],
        "mtime_ns": [int(member.mtime * 10**9) for member in members.values()],
    }
    schema = scan_schema(columns)
    return pa.table({n: known.get(n, [None] * len(members)) for n in schema.names}, schema=schema)


def _judged(size: int, capacity: int) -> Status:
    if size == capacity:
        return Status.OK
    return Status.SHORT if size < capacity else Status.OVERSIZED


register_scheme("tar", Scheme(f"{__name__}:TarStore"))


# --- the tests ---


def put_tar(path: Path, objects: Mapping[str, bytes]) -> None:
    """Write an archive; replace an existing one."""
    with tarfile.open(path.with_suffix(".new"), "w") as archive:
        for name, value in objects.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(value), OLD
            archive.addfile(member, BytesIO(value))
    path.with_suffix(".new").rename(path)


def get_tar(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {member.name: _value(archive, member) for member in archive}


def _value(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


class TestTarStore(StoreSuite):
    path: Path

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        self.path = tmp_path / "x.tar"
        put_tar(self.path, {})
        with open_store(f"tar://{self.path}") as opened:
            yield opened

    def reopen(self, store: Store) -> Store:
        return open_store(store.url)

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        put_tar(self.path, {**get_tar(self.path), key.decode(): value})

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        return get_tar(self.path).get(key.decode())

    def raw_delete(self, store: Store, key: bytes) -> None:
        kept = {name: value for name, value in get_tar(self.path).items() if name != key.decode()}
        put_tar(self.path, kept)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write the demo's pages, and beside them x.tar with the same objects and times."""
    directory = demo_store(tmp_path / "directory")
    for file in directory.iterdir():
        os.utime(file, (OLD, OLD))
    put_tar(tmp_path / "x.tar", {name: value for name, (value, _) in contents(directory).items()})
    return directory


@pytest.fixture
def archive(directory: Path) -> Path:
    return directory.with_name("x.tar")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_file(tmp_path / "profile.toml")


def rows(invoke: Invoke, store: str, *options: object) -> list[dict[str, Any]]:
    out = invoke("ls", store, *options, "--format", "jsonl").stdout
    return sorted(map(json.loads, out.splitlines()), key=str)


def verified(invoke: Invoke, archive: Path, *options: object, exit_code: int = 0) -> dict[str, Any]:
    command = ("verify", f"tar://{archive}", *options, "--format", "json")
    return invoke(*command, exit_code=exit_code).document


@pytest.mark.parametrize("options", [(), ("--objects",)], ids=["pages", "objects"])
@pytest.mark.parametrize("known", [False, True], ids=["inferred", "profile"])
def test_ls_lists_what_it_lists_of_the_directory(
    invoke: Invoke, directory: Path, archive: Path, profile: Path, options: tuple[str], known: bool
) -> None:
    more = (*options, *(("--profile", profile) if known else ()))
    found = rows(invoke, f"tar://{archive}", *more)
    assert len(found) == (len(contents(directory)) if options else PAGES)
    assert found == rows(invoke, str(directory), *more)


@pytest.mark.slow
def test_verify_finds_each_damage(invoke: Invoke, archive: Path, profile: Path) -> None:
    catalog = archive.with_name("catalog.parquet")
    options = ("--profile", profile, "--catalog", catalog)
    document = verified(invoke, archive, *options, "--update-catalog")
    objects = get_tar(archive)
    assert document["checks"] == ["names", "groups", "sizes", "values", "digests"]
    assert (document["objects"], document["objects_read"]) == (len(objects), len(objects))
    assert (document["pages"], document["findings"]) == (PAGES, [])
    first_rank = sorted(name for name in objects if name.endswith(f"_{MODEL}_0_2.bin"))
    flipped, infinite, cut, lost, *_ = (name for name in first_rank if ".mamba" not in name)
    objects[flipped] = bytes([objects[flipped][0] ^ 1]) + objects[flipped][1:]
    objects[infinite] = objects[infinite][:-2] + b"\x80\x7f"  # the bfloat16 infinity
    objects[cut] = objects[cut][:-1]
    del objects[lost]
    put_tar(archive, objects)
    document = verified(invoke, archive, *options, exit_code=4)
    found = {(finding["code"], finding["key"]) for finding in document["findings"]}
    assert found == {
        ("digest-mismatch", flipped),
        ("digest-mismatch", infinite),
        ("inf", infinite),
        ("digest-mismatch", cut),
        ("truncated", cut),
        ("missing-rank", lost),
    }


def test_migrate_makes_the_directory_again(invoke: Invoke, directory: Path, archive: Path) -> None:
    target = directory.with_name("target")
    document = invoke("migrate", f"tar://{archive}", target, "--format", "json").document
    assert (document["pages"], document["complete"]) == (PAGES, True)
    assert contents(target) == contents(directory)


def test_diff_suggests_no_copy_into_the_archive(
    invoke: Invoke, directory: Path, archive: Path
) -> None:
    compared = ("diff", directory, f"tar://{archive}", "--grace", "0s")
    assert invoke.document(*compared, "--verify")["equal"] == PAGES
    next(directory.glob("*.bin")).write_bytes(b"short")
    for rank in range(2):
        put(directory, f"{page(99)}_{MODEL}_{rank}_2.bin")
    closings = invoke.document(*compared, exit_code=4)["next"]
    assert closings[0]["text"].endswith("; objects cannot be written to B")
    assert [closing["commands"] for closing in closings] == [[], []]


def test_what_would_change_the_archive_is_refused(
    invoke: Invoke, directory: Path, archive: Path
) -> None:
    before = archive.read_bytes()
    url = f"tar://{archive}"
    for command in (("migrate", directory, url), ("rm", url, "--model", MODEL, "--yes")):
        assert url in invoke(*command, exit_code=2).stderr
    assert archive.read_bytes() == before


def test_what_is_no_archive_is_unavailable(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "text.tar").write_text("no archive")
    for path in (tmp_path / "text.tar", tmp_path / "none.tar"):
        assert f"tar://{path}: " in invoke("ls", f"tar://{path}", exit_code=3).stderr
