"""Tests of backends.hf3fs.creating: stores created before their cluster has started."""

from __future__ import annotations

import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status, open_store
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.backends.hf3fs.store import Hf3fsStore
from hicachectl.backends.testing import ARENA_BYTES, PAGE_HASHES, rows_of, write
from hicachectl.formats.errors import StoreUnavailable, UsageError
from tests.backends.hf3fs.place import FILE_SIZE, NUM_PAGES, PAGE_BYTES, PROFILE, Place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hf3fs_server import MetadataServer

KEYS = tuple(f"{n % 2}:kv:{page}-k".encode() for n, page in enumerate(PAGE_HASHES[:4]))
VALUES = {key: bytes([n]) * PAGE_BYTES for n, key in enumerate(KEYS)}
SIZED = f"&file_size={FILE_SIZE}"


@pytest.fixture
def place(metadata_server: MetadataServer, tmp_path: Path) -> Place:
    """A place where no rank has started."""
    return Place(metadata_server, tmp_path / "hicache")


@contextmanager
def opened(url: str, *, create: bool = True) -> Iterator[Hf3fsStore]:
    with Arena(ARENA_BYTES) as arena, open_store(url, create=create) as store:
        assert isinstance(store, Hf3fsStore)
        store.use_profile(PROFILE)
        store.attach(arena)
        yield store


def test_the_first_write_makes_files_and_tables_as_a_starting_rank_does(place: Place) -> None:
    with opened(place.url + SIZED) as store:
        assert place.server.saved() == {}
        assert write(store, VALUES, if_absent=True).all_ok
    for key, value in VALUES.items():
        assert place.get(key) == value
    tables = place.server.saved()
    assert {name: table["num_pages"] for name, table in tables.items()} == {
        "0:kv": NUM_PAGES,
        "1:kv": NUM_PAGES,
    }
    assert place.file(KEYS[0]).stat().st_size == place.file(KEYS[1]).stat().st_size == FILE_SIZE


def test_only_the_rank_that_is_written_to_is_made(place: Place) -> None:
    with opened(place.url + SIZED) as store:
        assert write(store, {KEYS[1]: VALUES[KEYS[1]]}, if_absent=True).all_ok
    assert list(place.server.saved()) == ["1:kv"]
    assert not place.file(KEYS[0]).exists()


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_a_rank_that_has_started_is_never_made_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, with_snapshot: bool
) -> None:
    place.create()
    place.server.save()
    url = place.url if with_snapshot else f"hf3fs://{place.prefix}?server={place.server.url}"
    with opened(url + SIZED) as store:
        monkeypatch.setattr(store._server, "initialize", None)
        assert write(store, VALUES, if_absent=True).all_ok
    assert place.get(KEYS[0]) == VALUES[KEYS[0]]


def test_a_file_that_is_there_tells_its_size(place: Place) -> None:
    for key in KEYS[:2]:
        place.file(key).write_bytes(bytes(5 * PAGE_BYTES + 7))
    with opened(place.url) as store:
        assert store.free_bytes() == 2 * 5 * PAGE_BYTES
        assert write(store, VALUES, if_absent=True).all_ok
    assert place.server.saved()["0:kv"]["num_pages"] == 5
    assert place.file(KEYS[0]).stat().st_size == 5 * PAGE_BYTES + 7


def test_without_a_size_nothing_is_made(place: Place) -> None:
    with opened(place.url) as store:
        assert store.free_bytes() is None
        with pytest.raises(UsageError, match="file_size="):
            write(store, VALUES, if_absent=True)
    assert place.server.saved() == {}
    assert not place.file(KEYS[0]).exists()


def test_a_file_of_another_size_is_left_alone(place: Place) -> None:
    place.file(KEYS[0]).write_bytes(bytes(PAGE_BYTES))
    with opened(place.url + SIZED) as store, pytest.raises(UsageError, match="has 4096 bytes"):
        write(store, VALUES, if_absent=True)
    assert place.file(KEYS[0]).stat().st_size == PAGE_BYTES
    assert "0:kv" not in place.server.saved()


def test_a_file_too_small_for_a_page_is_refused(place: Place) -> None:
    with (
        opened(f"{place.url}&file_size={PAGE_BYTES - 1}") as store,
        pytest.raises(UsageError, match="too few for a page"),
    ):
        write(store, VALUES, if_absent=True)
    assert place.server.saved() == {}


def test_a_store_that_is_merely_opened_makes_nothing(place: Place) -> None:
    with opened(place.url + SIZED, create=False) as store:
        result = write(store, VALUES, if_absent=True)
    assert set(result.statuses.tolist()) == {Status.ERROR}
    assert place.server.saved() == {}
    assert not place.file(KEYS[0]).exists()


def test_a_table_that_the_server_has_lost_is_not_made_anew(place: Place) -> None:
    place.create()
    saved = place.server.save().read_bytes()
    with opened(place.url + SIZED) as store:
        place.server.reset()
        place.server.snapshot.write_bytes(saved)
        with pytest.raises(StoreUnavailable, match="no table"):
            write(store, VALUES, if_absent=True)
    assert place.server.saved() == {}


def test_a_directory_that_is_not_there_is_not_made(place: Place, tmp_path: Path) -> None:
    url = place.url.replace(str(place.prefix), str(tmp_path / "unmounted" / "hicache"))
    with pytest.raises(StoreUnavailable, match="mounted"):
        open_store(url, create=True)
    assert not (tmp_path / "unmounted").exists()


def test_room_is_that_of_files_to_be_made_and_of_free_pages(place: Place) -> None:
    with opened(place.url + SIZED) as store:
        assert store.free_bytes() == 2 * FILE_SIZE
        assert write(store, {KEYS[0]: VALUES[KEYS[0]]}, if_absent=True).all_ok
        assert store.free_bytes() is None  # the table exists, but is not saved yet
        place.server.save()
        assert store.free_bytes() == 2 * FILE_SIZE - PAGE_BYTES


def test_what_was_written_is_there_and_can_be_read_back_before_the_next_snapshot(
    place: Place,
) -> None:
    rows = rows_of(list(KEYS))
    with opened(place.url + SIZED) as store:
        assert not store.exists(rows).any()
        assert write(store, VALUES, if_absent=True).all_ok
        assert store.exists(rows).all()
        assert store.arena is not None
        store.arena.view(0, ARENA_BYTES)[:] = 0xFF
        offsets = np.arange(len(KEYS), dtype=np.int64) * PAGE_BYTES
        sizes = np.full(len(KEYS), PAGE_BYTES, dtype=np.int64)
        result = store.read_confirmed(rows, offsets, sizes)
        assert (result.statuses == Status.OK).all()
        for key, offset in zip(KEYS, offsets.tolist(), strict=True):
            assert store.arena.view(offset, PAGE_BYTES).tobytes() == VALUES[key]


def test_files_are_no_more_readable_than_their_sources(place: Place) -> None:
    with opened(place.url + SIZED) as store:
        store.keep_private(Permissions(0o740))
        assert write(store, VALUES, if_absent=True).all_ok
    assert stat.S_IMODE(place.file(KEYS[0]).stat().st_mode) == 0o600
