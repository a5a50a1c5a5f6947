"""Tests of objects with trailers in a file store: sizes, reads, writes and copies."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from hicachectl.backends import testing
from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import keeps_digests
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.markers import Marker
from hicachectl.backends.object_files.store_files import StoreFiles
from hicachectl.backends.testing import ARENA_BYTES, listing, rows_of, write
from hicachectl.formats.errors import UsageError
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
from tests.speed import examples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicachectl.backends.base import ReadResult, Result

IDENTITY = Identity(model="m", weights="w", dtype="bfloat16", page_size=64, layer_bytes=64)
OTHER = replace(IDENTITY, weights="w2")
RANK = Shard(tp_rank=0, tp_size=1)
AFFIX = ("", "_m_0_1.bin")
SIDECAR = ("", ".indexer_m.bin")
KEYS = [f"{n:064x}{AFFIX[1]}".encode() for n in range(4)]
VALUE = bytes(range(256)) * 4


def _trailer(key: bytes, value: bytes = VALUE, **fields: Any) -> Trailer:
    page, digest = bytes.fromhex(key[:64].decode()), digest_function("xxh3")([value])
    identity, name, rank = IDENTITY.hash(), trailer_name("kv"), trailer_rank(RANK)
    return Trailer("xxh3", digest, len(value), page, identity, name, rank)._replace(**fields)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    """Give an empty store that writes trailers."""
    (tmp_path / "store").mkdir()
    with Arena(ARENA_BYTES) as arena, FileStore(tmp_path / "store") as opened:
        opened.attach(arena)
        opened.write_trailers({AFFIX: IDENTITY}, "xxh3")
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[FileStore]:
    """Give a second store, without settings."""
    (tmp_path / "other").mkdir()
    with Arena(ARENA_BYTES) as arena, FileStore(tmp_path / "other") as opened:
        opened.attach(arena)
        yield opened


def _file(store: FileStore, key: bytes) -> Path:
    return Path(store.path) / os.fsdecode(key)


def _tail(store: FileStore, key: bytes) -> Trailer | None:
    return parse_trailer(_file(store, key).read_bytes()[-TRAILER_BYTES:])


def read(store: FileStore, rows: Any, sizes: list[int]) -> tuple[ReadResult, list[bytes]]:
    """Read objects, and see that digesting them in pieces compares them as well."""
    result, found = testing.read(store, rows, sizes)
    capacities = np.array(sizes, dtype=np.int64)
    for wanted in (np.zeros(len(rows), dtype=np.bool_), np.ones(len(rows), dtype=np.bool_)):
        other, digests = store.digest(rows, capacities, wanted)
        for name in ("statuses", "errors", "nbytes", "compared", "unranked"):
            assert np.array_equal(getattr(other, name), getattr(result, name)), name
    for index in np.flatnonzero(result.ok).tolist():
        assert digests[index].tobytes() == blake3(found[index]).digest()
    return result, found


def _put(store: FileStore, *keys: bytes) -> None:
    assert write(store, dict.fromkeys(keys, VALUE), if_absent=False).all_ok


# writing


@pytest.mark.parametrize("kind", ["xxh3", "blake3", "off"])
def test_new_objects_get_trailers_that_say_what_they_are(store: FileStore, kind: str) -> None:
    store.write_trailers({AFFIX: IDENTITY}, kind)
    _put(store, KEYS[1])
    digest = digest_function(kind)([VALUE])
    assert _tail(store, KEYS[1]) == _trailer(KEYS[1], digest_kind=kind, digest=digest)
    assert _file(store, KEYS[1]).read_bytes()[:-TRAILER_BYTES] == VALUE
    assert store.markers() == [Marker(AFFIX[1], len(VALUE), IDENTITY, kind)]


def test_objects_of_other_affixes_get_none(store: FileStore) -> None:
    key = f"{0:064x}{SIDECAR[1]}".encode()
    _put(store, key, b"README.bin")
    assert _file(store, key).read_bytes() == _file(store, b"README.bin").read_bytes() == VALUE
    assert store.markers() == []


def test_the_marker_is_there_before_the_first_object(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that no listing sees an object of ours without knowing its size."""
    seen = []
    monkeypatch.setattr(
        store._writer, "sync_data", lambda _: seen.append(FileStore(store.path).markers())
    )
    _put(store, KEYS[0])
    assert seen == [store.markers()]
    assert len(seen[0]) == 1


def test_a_marker_that_cannot_be_written_keeps_the_objects_out(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: set[Marker]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._files.sizes, "ensure", full)
    result = write(store, {KEYS[0]: VALUE}, if_absent=True)
    assert result.statuses.tolist() == [Status.FULL]
    assert listing(store) == {}


def test_an_unknown_digest_is_refused(store: FileStore) -> None:
    with pytest.raises(UsageError, match="md5"):
        store.write_trailers({}, "md5")


# sizes


def test_markers_of_other_processes_are_noticed(store: FileStore, other: FileStore) -> None:
    """Proves that an open store learns of the first trailers without being opened again."""
    _file(other, KEYS[0]).write_bytes(VALUE + dump_trailer(_trailer(KEYS[0])))
    assert listing(other) == {KEYS[0]: len(VALUE) + TRAILER_BYTES}
    assert not keeps_digests(other)
    with FileStore(other.path) as writer:
        writer.attach(store.arena)  # type: ignore[arg-type]
        writer.write_trailers({AFFIX: IDENTITY}, "xxh3")
        _put(writer, KEYS[1])
    assert listing(other) == dict.fromkeys(KEYS[:2], len(VALUE))
    assert other.look(rows_of(KEYS[:1])).column("nbytes").to_pylist() == [len(VALUE)]
    assert keeps_digests(other)


def test_versions_and_times_are_those_of_the_file(store: FileStore) -> None:
    _put(store, KEYS[0])
    facts = _file(store, KEYS[0]).stat()
    (row,) = store.look(rows_of(KEYS[:1])).to_pylist()
    assert row["mtime_ns"] == facts.st_mtime_ns
    assert int.from_bytes(row["version"][-8:], "little") == facts.st_size
    result, _ = read(store, rows_of(KEYS[:1]), [len(VALUE)])
    assert result.versions.astype("<u8").tobytes() == row["version"]


SUFFIXES = (AFFIX[1], SIDECAR[1], "_m_1_2.bin")
MARKS = st.lists(
    st.tuples(st.sampled_from(SUFFIXES), st.sampled_from([0, 1, 128, 256, 384])), max_size=6
)
FILES = st.lists(
    st.tuples(st.sampled_from((*SUFFIXES, ".bin", "")), st.integers(-1, 700)), max_size=30
)


@pytest.mark.slow
@examples(30)
@given(marks=MARKS, files=FILES)
@example(marks=[(SUFFIXES[0], 128), (SUFFIXES[1], 256)], files=[(SUFFIXES[0], 384)])
def test_sizes_are_less_a_trailer_exactly_where_a_marker_says_so(
    tmp_path_factory: pytest.TempPathFactory,
    marks: list[tuple[str, int]],
    files: list[tuple[str, int]],
) -> None:
    """Compares the vectorised sizes with a loop over objects and markers."""
    path = tmp_path_factory.mktemp("store")
    with ObjectDirectory.open(str(path)) as objects:
        sizes = StoreFiles(objects).sizes
        sizes.ensure({Marker(suffix, nbytes, IDENTITY, "off") for suffix, nbytes in marks})
        rows = rows_of([f"{n:064x}{suffix}".encode() for n, (suffix, _) in enumerate(files)])
        found = sizes.payloads(rows, np.array([size for _, size in files], dtype=np.int64))
    assert found.tolist() == [
        size - TRAILER_BYTES if (suffix, size - TRAILER_BYTES) in marks else size
        for suffix, size in files
    ]
    shutil.rmtree(path)


@pytest.mark.parametrize("skew_s", [0, 300, -300])
def test_a_marker_of_the_same_tick_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: int
) -> None:
    """Two markers within one tick of the file server's clock, whatever this host's says."""
    monkeypatch.setattr(time, "time_ns", lambda real=time.time_ns: real() + skew_s * 10**9)
    one, two = (Marker(suffix, 128, IDENTITY, "off") for suffix in SUFFIXES[:2])
    with ObjectDirectory.open(str(tmp_path)) as objects:
        StoreFiles(objects).sizes.ensure({one})
        sizes = StoreFiles(objects).sizes
        tick = sizes._look()
        monkeypatch.setattr(sizes, "_look", lambda: tick)
        assert sizes.current() == [one]
        StoreFiles(objects).sizes.ensure({two})
        assert set(sizes.current()) == {one, two}
        monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + 2)
        sizes.current()  # no marker of this tick comes any more
        StoreFiles(objects).sizes.ensure({two._replace(nbytes=256)})
        assert set(sizes.current()) == {one, two}


@pytest.mark.slow
@examples(40)
@given(
    size=st.integers(0, 600),
    capacity=st.integers(0, 600),
    marked=st.sampled_from([None, 0, 100, 228]),
    trailed=st.booleans(),
)
def test_reads_and_listings_agree_on_sizes(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    capacity: int,
    marked: int | None,
    trailed: bool,
) -> None:
    """Proves that a read of the listed size succeeds, and that others say short or oversized."""
    path = tmp_path_factory.mktemp("store")
    value = VALUE[:size]
    with Arena(4096) as arena, FileStore(path) as store:
        store.attach(arena)
        if marked is not None:
            store._files.sizes.ensure({Marker(AFFIX[1], marked, IDENTITY, "xxh3")})
        tail = dump_trailer(_trailer(KEYS[0], value)) if trailed else b""
        _file(store, KEYS[0]).write_bytes(value + tail)
        listed = listing(store)[KEYS[0]]
        assert listed == (size if trailed and marked == size else size + len(tail)) or (
            not trailed and marked == size - TRAILER_BYTES == listed
        )
        result, found = read(store, rows_of(KEYS[:1]), [capacity])
    (status,) = result.statuses.tolist()
    if trailed and capacity == size:
        assert (status, found[0], result.nbytes[0]) == (Status.OK, value, size)
    elif listed == capacity:
        plain = listed == size + len(tail)
        assert status == (Status.OK if plain else Status.OVERSIZED)
    else:
        assert status == (Status.SHORT if listed < capacity else Status.OVERSIZED)
        assert result.nbytes[0] == listed
    shutil.rmtree(path)


# reading


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"digest": bytes(32)}, "its bytes differ from the xxh3 digest in its trailer"),
        ({"nbytes": 1 << 63}, f"its trailer says {1 << 63} bytes, but it has 1024"),
        ({"nbytes": 0}, "its trailer says 0 bytes, but it has 1024"),
        ({"page": bytes.fromhex(f"{1:064x}")}, f"its trailer is of page {1:064x}"),
        ({"name": trailer_name("indexer")}, "its trailer is of another pool"),
        ({"name": trailer_name("kv", "k")}, "its trailer is of another pool"),
    ],
)
def test_a_trailer_that_contradicts_its_object_is_damage(
    store: FileStore, change: Mapping[str, Any], why: str
) -> None:
    _put(store, KEYS[0])
    _file(store, KEYS[0]).write_bytes(VALUE + dump_trailer(_trailer(KEYS[0], **change)))
    result, _ = read(store, rows_of(KEYS[:1]), [len(VALUE)])
    assert result.statuses.tolist() == [Status.DAMAGED]
    assert result.errors == {0: why}


@pytest.mark.parametrize("place", range(0, TRAILER_BYTES, 8))
def test_each_flipped_bit_of_a_trailer_is_noticed(store: FileStore, place: int) -> None:
    _put(store, KEYS[0])
    data = bytearray(_file(store, KEYS[0]).read_bytes())
    data[len(VALUE) + place] ^= 1
    _file(store, KEYS[0]).write_bytes(data)
    result, _ = read(store, rows_of(KEYS[:1]), [len(VALUE)])
    # Without its magic, the trailer is no trailer.
    assert result.statuses.tolist() == [Status.DAMAGED if place >= 8 else Status.OVERSIZED]


def test_each_flipped_bit_of_an_object_is_noticed(store: FileStore) -> None:
    _put(store, KEYS[0])
    whole = _file(store, KEYS[0]).read_bytes()
    for place in range(0, len(VALUE), 97):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        _file(store, KEYS[0]).write_bytes(data)
        result, _ = read(store, rows_of(KEYS[:1]), [len(VALUE)])
        assert result.statuses.tolist() == [Status.DAMAGED]


@pytest.mark.parametrize("kind", ["xxh3", "blake3", "off"])
def test_all_pieces_of_a_large_object_are_digested(store: FileStore, kind: str) -> None:
    """A bit in any piece changes the digest, and differs from the one in the trailer."""
    store.write_trailers({AFFIX: IDENTITY}, kind)
    value = VALUE * 700  # almost three pieces
    assert write(store, {KEYS[0]: value}, if_absent=False).all_ok
    assert read(store, rows_of(KEYS[:1]), [len(value)])[0].all_ok
    whole = _file(store, KEYS[0]).read_bytes()
    for place in (0, len(value) // 2, len(value) - 1):
        data = bytearray(whole)
        data[place] ^= 1
        _file(store, KEYS[0]).write_bytes(data)
        result, _ = read(store, rows_of(KEYS[:1]), [len(value)])
        assert result.statuses.tolist() == [Status.OK if kind == "off" else Status.DAMAGED]


@pytest.mark.parametrize("tail", [0, TRAILER_BYTES])
def test_a_file_cut_short_while_it_is_digested_is_short(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, tail: int
) -> None:
    path, value = _file(store, KEYS[0]), bytes(1 << 20)
    path.write_bytes(value + dump_trailer(_trailer(KEYS[0], value))[:tail])
    preadv = os.preadv

    def cut(descriptor: int, *arguments: Any) -> int:
        done = preadv(descriptor, *arguments)
        os.truncate(path, 300_000)
        return done

    monkeypatch.setattr(os, "preadv", cut)
    result, _ = store.digest(rows_of(KEYS[:1]), np.array([len(value)]), np.ones(1, np.bool_))
    assert result.statuses.tolist() == [Status.SHORT]
    assert result.nbytes.tolist() == [300_000]


def test_a_trailer_cut_off_while_it_is_read_is_no_trailer(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(store, KEYS[0])
    pread = os.pread

    def cut(descriptor: int, *arguments: Any) -> bytes:
        os.truncate(_file(store, KEYS[0]), len(VALUE) + 50)
        return pread(descriptor, *arguments)

    monkeypatch.setattr(os, "pread", cut)
    result, _ = store.digest(rows_of(KEYS[:1]), np.array([len(VALUE)]), np.ones(1, np.bool_))
    assert result.statuses.tolist() == [Status.OVERSIZED]
    assert result.nbytes.tolist() == [len(VALUE) + 50]


def test_an_empty_object_is_a_regular_file(store: FileStore) -> None:
    _file(store, KEYS[0]).touch()
    os.mkfifo(_file(store, KEYS[1]))
    result, _ = read(store, rows_of(KEYS[:2]), [0, 0])
    assert result.statuses.tolist() == [Status.OK, Status.ERROR]
    assert result.errors == {1: "not a regular file"}


def test_objects_of_another_identity_are_foreign(store: FileStore, other: FileStore) -> None:
    """Proves that identities are compared only where one is expected and one is stated."""
    _put(store, KEYS[0])
    other.arena, rows = store.arena, rows_of([KEYS[0], KEYS[1]])
    _file(store, KEYS[1]).write_bytes(VALUE)
    for identities, status in (
        ({}, Status.OK),
        ({AFFIX: IDENTITY}, Status.OK),
        ({AFFIX: OTHER}, Status.FOREIGN),
        ({SIDECAR: OTHER}, Status.OK),
    ):
        store.expect_identities(identities)
        result, _ = read(store, rows, [len(VALUE)] * 2)
        assert result.statuses.tolist() == [status, Status.OK]
        if status == Status.FOREIGN:
            assert result.errors == {0: "its identity differs: weights w instead of w2"}


def test_trailers_are_shown_for_each_row(store: FileStore) -> None:
    _put(store, *KEYS[:3])
    _file(store, KEYS[1]).write_bytes(VALUE)
    _file(store, KEYS[2]).write_bytes(VALUE + dump_trailer(_trailer(KEYS[0])))
    foreign = _trailer(KEYS[3], rank=trailer_rank(Shard(tp_rank=0, tp_size=2)))
    _file(store, KEYS[3]).write_bytes(VALUE + dump_trailer(foreign))
    missing = KEYS[0].replace(b"0", b"1")
    shown = store.read_trailers(rows_of([missing, KEYS[0], KEYS[1], KEYS[2], b"../x", KEYS[3]]))
    found = {
        "identity": IDENTITY.hash(),
        "digest_kind": "xxh3",
        "digest": digest_function("xxh3")([VALUE]),
        "own_rank": True,
        "ranked": True,
    }
    none, theirs = dict.fromkeys(found), {**found, "own_rank": False}
    assert shown.to_pylist() == [none, found, none, none, none, theirs]


# copies


def _copy(
    source: FileStore, target: FileStore, *, new: bytes = KEYS[0], preserve: bool = False
) -> Result:
    sizes = np.array([len(VALUE)])
    rows = rows_of([new], mtime_ns=[1_600_000_000_000_000_000])
    return target.copy_from(
        source, rows_of(KEYS[:1]), rows, sizes, if_absent=False, preserve=preserve
    )


def test_a_copy_keeps_the_trailer_of_its_key(store: FileStore, other: FileStore) -> None:
    """Proves that digest and time of writing come along, and the marker with them."""
    _put(store, KEYS[0])
    whole = _file(store, KEYS[0]).read_bytes()
    for settings in (None, {AFFIX: IDENTITY}):
        if settings is not None:
            other.write_trailers(settings, "blake3")  # for objects without a trailer
        assert _copy(store, other).all_ok
        assert _file(other, KEYS[0]).read_bytes() == whole
        assert listing(other) == {KEYS[0]: len(VALUE)}
    assert {marker.digest for marker in other.markers()} == {"xxh3"}


def test_a_copy_to_another_key_or_without_trailers_has_none(
    store: FileStore, other: FileStore
) -> None:
    _put(store, KEYS[0])
    assert _copy(store, other, new=KEYS[1]).all_ok
    other.write_trailers({}, "off")
    assert _copy(store, other).all_ok
    assert _file(other, KEYS[0]).read_bytes() == _file(other, KEYS[1]).read_bytes() == VALUE


@pytest.mark.parametrize("had_one", [False, True])
def test_a_copy_gets_the_trailer_that_is_asked_for(
    store: FileStore, other: FileStore, had_one: bool
) -> None:
    """Proves that a store of HiCacheFile, or of another identity, becomes one of ours."""
    if not had_one:
        store.write_trailers({}, "off")
    _put(store, KEYS[0])
    other.write_trailers({AFFIX: OTHER}, "xxh3")
    for key in KEYS[:2]:
        assert _copy(store, other, new=key).all_ok
        assert _tail(other, key) == _trailer(key, identity=OTHER.hash())
        assert _file(other, key).stat().st_mtime_ns == 1_600_000_000_000_000_000
    assert listing(other) == dict.fromkeys(KEYS[:2], len(VALUE))


def test_damage_keeps_its_trailer_or_is_not_copied(store: FileStore, other: FileStore) -> None:
    """Proves that no copy makes damaged bytes look whole."""
    _put(store, KEYS[0])
    damaged = b"x" + _file(store, KEYS[0]).read_bytes()[1:]
    _file(store, KEYS[0]).write_bytes(damaged)
    result = _copy(store, other, new=KEYS[1])
    assert result.statuses.tolist() == [Status.DAMAGED]
    assert "differ from the xxh3 digest" in result.errors[0]
    other.write_trailers({AFFIX: OTHER}, "xxh3")
    assert _copy(store, other).statuses.tolist() == [Status.DAMAGED]
    assert listing(other) == {}
    other.write_trailers({AFFIX: IDENTITY}, "xxh3")
    assert _copy(store, other).all_ok
    assert _file(other, KEYS[0]).read_bytes() == damaged


def test_objects_of_an_unexpected_identity_are_not_copied(
    store: FileStore, other: FileStore
) -> None:
    _put(store, KEYS[0])
    store.expect_identities({AFFIX: OTHER})
    assert _copy(store, other).statuses.tolist() == [Status.FOREIGN]


def test_a_preserved_copy_is_equal_to_the_last_byte(store: FileStore, other: FileStore) -> None:
    """Proves that a quarantine on another file system gives back what it took."""
    _put(store, KEYS[0])
    whole = _file(store, KEYS[0]).read_bytes()
    for damaged in (whole, b"x" + whole[1:], whole[:-1] + b"x"):
        _file(store, KEYS[0]).write_bytes(damaged)
        assert _copy(store, other, new=b"0", preserve=True).all_ok
        assert _file(other, b"0").read_bytes() == damaged
    result, _ = read(other, rows_of([b"0"]), [len(VALUE)])
    assert result.statuses.tolist() == [Status.DAMAGED]


def test_a_longer_file_without_a_trailer_is_no_object_of_that_size(
    store: FileStore, other: FileStore
) -> None:
    _put(store, KEYS[0])
    _file(store, KEYS[0]).write_bytes(VALUE + bytes(TRAILER_BYTES))
    for preserve in (False, True):
        result = _copy(store, other, preserve=preserve)
        assert result.statuses.tolist() == [Status.OVERSIZED]
