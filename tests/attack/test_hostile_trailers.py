"""Hostile marks, folders and trailers in a file store: one line, and nothing outside is touched."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.markers import Marker
from hicachectl.backends.testing import ARENA_BYTES, listing, read, rows_of, write
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import UntrustedError
from hicachectl.formats.identity import Identity
from hicachectl.formats.trailer import TRAILER_BYTES, dump_trailer, parse_trailer
from tests import stores
from tests.attack.test_trusted_places import STRANGER, state
from tests.move.repairs import indexer, kv
from tests.skips import needs_root
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

KV_BYTES, INDEXER_BYTES = 9216, 1056  # of stores.DSA
SUFFIX, SIDECAR = kv(0)[64:], indexer(0)[64:]
IDENTITIES = {
    ("", SUFFIX): Identity(model="x-dsa", weights="w", pool="kv"),
    ("", SIDECAR): Identity(model="x-dsa", weights="w", pool="indexer"),
}


def filled(path: Path, *, folders: bool = False) -> Path:
    """Write three whole pages with trailers."""
    with (
        Arena(ARENA_BYTES) as arena,
        FileStore.create(parse_url(f"file://{path}" + "?folders=hex2" * folders)) as store,
    ):
        store.attach(arena)
        store.write_trailers(IDENTITIES, "xxh3")
        for number in range(3):
            objects = {kv(number).encode(): KV_BYTES, indexer(number).encode(): INDEXER_BYTES}
            values = {key: hashlib.shake_128(key).digest(size) for key, size in objects.items()}
            assert write(store, values, if_absent=True).all_ok
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "profile.toml").write_text(stores.DSA)
    return filled(tmp_path / "store")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return filled(tmp_path / "folders", folders=True)


def _verify(store: Path, *more: object) -> tuple[object, ...]:
    profile = store.parent / "profile.toml"
    return ("verify", store, "--profile", profile, "--checks", "groups,sizes", *more)


def _repair(store: Path) -> tuple[object, ...]:
    return _verify(store, "--repair", "delete", "--yes", "--fail-on", "never")


def _plugin(store: Path) -> Path:
    return store / ".hicachectl" / "plugin"


# markers


def _huge(store: Path) -> str:
    marker = next(_plugin(store).iterdir())
    os.truncate(marker, 1 << 40)
    return marker.name


def _deep(store: Path) -> str:
    marker = next(_plugin(store).iterdir())
    marker.write_text('{"form":' * 1500 + "1" + "}" * 1500)
    return marker.name


def _swapped(store: Path) -> str:
    first, second = sorted(_plugin(store).iterdir())
    first.write_bytes(second.read_bytes())
    return first.name


@pytest.mark.parametrize("attack", [_huge, _deep, _swapped])
@pytest.mark.parametrize("command", ["ls", "verify", "repair"])
def test_a_hostile_marker_is_one_line_before_any_change(
    invoke: Invoke, store: Path, attack: Callable[[Path], str], command: str
) -> None:
    name = attack(store)
    if attack is not _huge:
        before = state(store)
    call = {"ls": ("ls", store), "verify": _verify(store), "repair": _repair(store)}[command]
    outcome = invoke(*call, exit_code=2)
    assert name in outcome.stderr
    assert "Traceback" not in outcome.stderr
    if attack is not _huge:
        assert state(store) == before


def _linked_marker(store: Path) -> str:
    marker = next(_plugin(store).iterdir())
    marker.rename(store.parent / "aside")
    marker.symlink_to(store.parent / "aside")
    return marker.name


def _fifo_marker(store: Path) -> str:
    marker = next(_plugin(store).iterdir())
    marker.unlink()
    os.mkfifo(marker)
    return marker.name


def _linked_markers(store: Path) -> str:
    _plugin(store).rename(store.parent / "aside")
    _plugin(store).symlink_to(store.parent / "aside")
    return "plugin"


def _stranger(store: Path) -> str:
    marker = next(_plugin(store).iterdir())
    os.chown(marker, STRANGER, STRANGER)
    return marker.name


@pytest.mark.parametrize(
    "attack",
    [_linked_marker, _fifo_marker, _linked_markers, pytest.param(_stranger, marks=needs_root)],
)
def test_markers_that_are_not_trusted_stop_readers_and_writers(
    invoke: Invoke, store: Path, attack: Callable[[Path], str]
) -> None:
    """Proves that no repair takes objects for oversized because their marker was replaced."""
    name = attack(store)
    before = state(store.parent)
    for call in (("ls", store), _verify(store), _repair(store)):
        outcome = invoke(*call, exit_code=3)
        assert name in outcome.stderr
    assert state(store.parent) == before


def test_a_linked_side_directory_is_a_remark_and_stops_writers(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    (store / ".hicachectl").rename(tmp_path / "aside")
    (store / ".hicachectl").symlink_to(tmp_path / "aside")
    before = state(tmp_path)
    assert "folders and trailers, if there are any, go unnoticed" in invoke("ls", store).stderr
    assert ".hicachectl: is a symbolic link" in invoke(*_repair(store), exit_code=3).stderr
    rows = rows_of([kv(0).encode()])
    with FileStore(store) as opened, FileStore(tmp_path) as run:
        with pytest.raises(UntrustedError, match="is a symbolic link"):
            opened.delete(rows)
        with pytest.raises(UntrustedError, match="is a symbolic link"):
            opened.mover(run)
    assert state(tmp_path) == before


def test_a_marker_without_objects_changes_no_size(store: Path) -> None:
    """Proves that a marker alone makes no object of ours out of another's."""
    plain = store / f"{page(9)}{SUFFIX}"
    plain.write_bytes(bytes(KV_BYTES + TRAILER_BYTES))  # of another deployment, as it happens
    key = plain.name.encode()
    with Arena(ARENA_BYTES) as arena, FileStore(store) as opened:
        opened.attach(arena)
        result, _ = read(opened, rows_of([key]), [KV_BYTES])
        assert result.statuses.tolist() == [Status.OVERSIZED]


# trailers


@pytest.fixture
def opened(store: Path) -> Iterator[FileStore]:
    with Arena(ARENA_BYTES) as arena, FileStore(store) as opened:
        opened.attach(arena)
        yield opened


def _status(opened: FileStore, key: str) -> Status:
    size = KV_BYTES if key.endswith(SUFFIX) and ".indexer" not in key else INDEXER_BYTES
    result, _ = read(opened, rows_of([key.encode()]), [size])
    return Status(result.statuses[0])


def test_an_object_under_another_page_is_damage(store: Path, opened: FileStore) -> None:
    """Proves that a file with a whole trailer is refused under any name but its own."""
    assert _status(opened, kv(0)) == Status.OK
    shutil.copy(store / kv(0), store / kv(1))
    assert _status(opened, kv(1)) == Status.DAMAGED
    shutil.copy(store / indexer(0), store / kv(2))
    assert _status(opened, kv(2)) == Status.SHORT


def test_a_trailer_of_another_page_is_damage(store: Path, opened: FileStore) -> None:
    mine, other = (store / kv(0)).read_bytes(), (store / kv(1)).read_bytes()
    (store / kv(0)).write_bytes(mine[:KV_BYTES] + other[KV_BYTES:])
    assert _status(opened, kv(0)) == Status.DAMAGED


@pytest.mark.parametrize("nbytes", [0, 1, KV_BYTES - 1, KV_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_trailer_that_lies_about_its_length_allocates_nothing(
    store: Path, opened: FileStore, nbytes: int
) -> None:
    data = (store / kv(0)).read_bytes()
    trailer = parse_trailer(data[KV_BYTES:])
    assert trailer is not None
    (store / kv(0)).write_bytes(data[:KV_BYTES] + dump_trailer(trailer._replace(nbytes=nbytes)))
    assert _status(opened, kv(0)) == Status.DAMAGED
    assert opened.read_trailers(rows_of([kv(0).encode()]))["identity"].null_count == 1


def test_a_trailer_on_a_trailer_is_an_oversized_object(store: Path, opened: FileStore) -> None:
    data = (store / kv(0)).read_bytes()
    (store / kv(0)).write_bytes(data + data[KV_BYTES:])
    assert _status(opened, kv(0)) == Status.OVERSIZED


# folders


def test_links_as_folders_are_not_followed(invoke: Invoke, folders: Path, tmp_path: Path) -> None:
    """Proves that no command lists, reads or removes what lies behind a linked folder."""
    victim = tmp_path / "victim"
    (folders / kv(0)[:2]).rename(victim)
    (folders / kv(0)[:2]).symlink_to(victim)
    before = state(tmp_path)
    outcome = invoke("ls", folders, "--objects", "--format", "json")
    assert kv(0) not in outcome.stdout
    assert kv(1) in outcome.stdout
    assert f"{kv(0)[:2]}: is a symbolic link" in outcome.stderr
    with Arena(ARENA_BYTES) as arena, FileStore(folders) as opened:
        opened.attach(arena)
        rows = rows_of([kv(0).encode()])
        assert not opened.exists(rows).any()
        assert len(opened.look(rows)) == 0
        assert read(opened, rows, [KV_BYTES])[0].statuses.tolist() == [Status.ERROR]
        assert opened.delete(rows).statuses.tolist() == [Status.ERROR]
        written = write(opened, {kv(0).encode(): b"new"}, if_absent=False)
        assert written.statuses.tolist() == [Status.ERROR]
        assert "is a symbolic link" in written.errors[0]
    assert state(tmp_path) == before


@pytest.mark.parametrize("attack", ["file", "fifo"])
def test_what_is_no_folder_is_left_alone(folders: Path, attack: str) -> None:
    place = folders / kv(0)[:2]
    shutil.rmtree(place)
    if attack == "file":
        place.write_bytes(b"file")
    else:
        os.mkfifo(place)
    with FileStore(folders) as opened:
        found = listing(opened)
        assert len(found) == 4
        assert any(str(place) in remark for remark in opened.remarks)


@needs_root
def test_folders_of_strangers_are_left_alone(folders: Path) -> None:
    os.chown(folders / kv(0)[:2], STRANGER, STRANGER)
    with FileStore(folders) as opened:
        assert len(listing(opened)) == 4
        assert f"belongs to user {STRANGER}" in opened.remarks[0]


def test_a_marker_for_every_size_costs_no_more_than_one(store: Path) -> None:
    """Proves that thousands of sizes of one suffix cost neither a loop per size nor an object."""
    identity = IDENTITIES["", SUFFIX]
    with FileStore(store) as opened:
        opened._files.sizes._use(
            [Marker(SUFFIX, nbytes, identity, "off") for nbytes in range(50_000)]
        )
        sizes = opened._files.sizes
        rows = rows_of([f"{n:064x}{SUFFIX}".encode() for n in range(1000)])
        files = np.arange(1000) * 50
        found = sizes.payloads(rows, files)
        marked = files >= TRAILER_BYTES
        assert (found == np.where(marked, files - TRAILER_BYTES, files)).all()
