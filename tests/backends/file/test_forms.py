"""The shared suite on each form of a file store: folders, trailers, and both kinds of objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.markers import Marker, write_marker
from hicachectl.backends.testing import StoreSuite
from hicachectl.backends.urls import parse_url
from hicachectl.formats.identity import Identity
from hicachectl.formats.objects import Shard
from hicachectl.formats.trailer import (
    TRAILER_BYTES,
    Trailer,
    digest_function,
    dump_trailer,
    parse_trailer,
    trailer_name,
    trailer_rank,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store

pytestmark = pytest.mark.slow

SUFFIX = "_m_0_1.bin"  # of the suite's keys
RANK = Shard(tp_rank=0, tp_size=1)
IDENTITY = Identity(model="m", weights="w", dtype="bfloat16", page_size=64, layer_bytes=1)


def file_of(key: bytes, value: bytes, kind: str = "xxh3") -> bytes:
    """Return an object's bytes and its trailer."""
    page = bytes.fromhex(key[:64].decode())
    digest = digest_function(kind)([value])
    identity, name, rank = IDENTITY.hash(), trailer_name("kv"), trailer_rank(RANK)
    return value + dump_trailer(Trailer(kind, digest, len(value), page, identity, name, rank))


class _Form(StoreSuite):
    """A form of the store. folders: in its directory."""

    folders: ClassVar[bool] = False
    # The last one shares the folder of the first.
    keys = tuple(f"{n * 37 % 259:02x}{n:062x}{SUFFIX}".encode() for n in range(8))

    def trailed(self, key: bytes) -> bool:
        """Return whether the object that `raw_put` makes of a key has a trailer."""
        return False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        query = "?folders=hex2" if self.folders else ""
        with FileStore.create(parse_url(f"file://{tmp_path}/store{query}")) as opened:
            self.prepare(opened)
            yield opened

    def prepare(self, store: FileStore) -> None:
        """Set the form of new objects."""

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, FileStore)
        again = FileStore(store.path)
        self.prepare(again)
        return again

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        path = self.path(store, key)
        path.parent.mkdir(exist_ok=True)
        if self.trailed(key):
            assert isinstance(store, FileStore)
            with Directory.named(store.path, writes=True) as directory:
                write_marker(directory, Marker(SUFFIX, len(value), IDENTITY, "xxh3"))
        path.with_name(".put").write_bytes(self.moved(key, value))
        path.with_name(".put").rename(path)

    def moved(self, key: bytes, value: bytes) -> bytes:
        return file_of(key, value) if self.trailed(key) else value

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        path = self.path(store, key)
        if not path.exists():
            return None
        data = path.read_bytes()
        trailer = parse_trailer(data[-TRAILER_BYTES:])
        if trailer is None:
            return data
        value = data[:-TRAILER_BYTES]
        assert data == file_of(key, value, trailer.digest_kind)
        return value

    def raw_delete(self, store: Store, key: bytes) -> None:
        self.path(store, key).unlink(missing_ok=True)

    def path(self, store: Store, key: bytes) -> Path:
        """Return the path of a key's file."""
        assert isinstance(store, FileStore)
        folder = os.fsdecode(key[:2]) if self.folders else ""
        return Path(store.path) / folder / os.fsdecode(key)


class TestFolders(_Form):
    folders = True


class TestTrailers(_Form):
    def prepare(self, store: FileStore) -> None:
        store.write_trailers({("", SUFFIX): IDENTITY}, "xxh3")
        store.expect_identities({("", SUFFIX): IDENTITY})

    def trailed(self, key: bytes) -> bool:
        return True


class TestTrailersBesideOthersInFolders(TestTrailers):
    """Another writer writes the objects with even page hashes."""

    folders = True

    def trailed(self, key: bytes) -> bool:
        return int(key[:64], 16) % 2 == 1
