"""Tests of backends.pack: the shared suite, and what is particular to packs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.pack import PackStore, _Growing
from hicachectl.backends.testing import StoreSuite
from hicachectl.backends.urls import open_store
from tests.backends import pack_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store


class TestPackStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with open_store(f"pack://{tmp_path}/x.hcpack?keys=file", create=True) as opened:
            yield opened

    def reopen(self, store: Store) -> Store:
        return PackStore(str(_path(store)))

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        path = _path(store)
        if not path.stat().st_size:
            pack_files.build(path, {})
        kept = pack_files.indexed(path)
        data = path.read_bytes()
        entry = pack_files.record(pack_files.OBJECT, key, value, mtime_ns=len(data))
        path.write_bytes(data + entry)
        (found,) = (one for one in pack_files.records(path) if one.offset == len(data))
        kept.pop(key, None)
        pack_files.finish(path, [*kept.values(), pack_files.row_of(found)])
        _reload(store)

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        found = [one.content for one in pack_files.records(_path(store)) if one.key == key]
        return found[-1] if found else None

    def raw_delete(self, store: Store, key: bytes) -> None:
        kept = pack_files.indexed(_path(store))
        kept.pop(key, None)
        pack_files.finish(_path(store), kept.values())
        _reload(store)


def _path(store: Store) -> Path:
    assert isinstance(store, PackStore)
    return Path(store.path)


def _reload(store: Store) -> None:
    """Let a store see what was written behind its back, which nobody does while it has the lock."""
    assert isinstance(store, PackStore)
    assert store._writer is not None
    store._writer._continue()
    store._pack_id = store._writer.pack_id
    store._listed = _Growing(store._writer.entries)
