"""The SSD tier as a store: the common suite, damage, foreign files, and other forms."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import ReadResult, Status, Store, open_store
from hicachectl.backends.mooncake_ssd import index
from hicachectl.backends.testing import PAGE_HASHES, StoreSuite, listing, read, scanned_rows
from hicachectl.formats.errors import (
    DeniedError,
    HicacheError,
    StoreUnavailable,
    UnsupportedByBackend,
    UntrustedError,
    UsageError,
)
from tests.mooncake_ssd_files import TENANT, Record, offset_meta, put_bucket, put_offset_files
from tests.other_user import as_other_user
from tests.processes import descriptors as open_descriptors
from tests.skips import needs_root
from tests.stores import OLD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEYS = tuple(f"m_{page}_0_k".encode() for page in PAGE_HASHES)
SLOT_BYTES = 1 << 16


def url_of(directory: Path, query: str = "") -> str:
    return f"mooncake-ssd://{directory}{query}"


class SsdSuite(StoreSuite):
    keys = KEYS
    path: Path
    objects: dict[bytes, bytes]

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        self.path, self.objects = tmp_path, {}
        with open_store(url_of(tmp_path)) as opened:
            yield opened

    def reopen(self, store: Store) -> Store:
        return open_store(store.url)

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        return self.objects.get(key)


class TestBuckets(SsdSuite):
    ids: dict[bytes, int]

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        """Add a bucket with two objects; both ranks of a deployment have a directory."""
        self.raw_delete(store, key)
        number = 1 + max(map(int, (p.stem for p in self.path.rglob("*.bucket"))), default=7 << 40)
        folder = self.path / f"rank_0_{KEYS.index(key) % 2}_0_0"
        folder.mkdir(exist_ok=True)
        put_bucket(folder, number, {key: value})
        self.objects[key] = value

    def raw_delete(self, store: Store, key: bytes) -> None:
        self.objects.pop(key, None)
        for path in self.path.rglob("*.bucket"):
            if key in path.read_bytes():
                path.unlink()
                path.with_suffix(".meta").unlink()


class TestOffsetFiles(SsdSuite):
    sequence = 0
    sequences: dict[bytes, int]

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        if not self.objects:
            self.sequences = {}
        self.sequence += 1
        self.objects[key], self.sequences[key] = value, self.sequence
        self._write()

    def raw_delete(self, store: Store, key: bytes) -> None:
        self.objects.pop(key, None)
        self._write()

    def _write(self) -> None:
        put_offset_files(
            self.path,
            [
                Record(TENANT + key, value, KEYS.index(key) * SLOT_BYTES, self.sequences[key])
                for key, value in self.objects.items()
            ],
        )


# --- remarks on objects that are left out, and findings of damage ---

A, B, C = KEYS[:3]
VALUES = {A: b"a" * 5000, B: b"b" * 100, C: b"c" * 9000}


def read_all(directory: Path) -> dict[bytes, tuple[Status, str]]:
    """Return status and message of reading each listed object with its intended size."""
    with open_store(url_of(directory)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        keys = sorted(listing(store))
        result, found = read(store, scanned_rows(store, keys), [len(VALUES[k]) for k in keys])
        for at, key in enumerate(keys):
            if result.statuses[at] == Status.OK:
                assert found[at] == VALUES[key]
        return {
            key: (Status(result.statuses[at]), result.errors.get(at, ""))
            for at, key in enumerate(keys)
        }


def remarks_of(directory: Path, query: str = "") -> str:
    with open_store(url_of(directory, query)) as store:
        list(store.scan())
        return "\n".join(store.remarks)


def test_objects_behind_the_end_of_a_bucket_are_damage(tmp_path: Path) -> None:
    """A truncated bucket lists the bytes that are left, and reads say where it ends."""
    path = put_bucket(tmp_path, 7, VALUES)
    os.truncate(path, path.stat().st_size - 8950)
    with open_store(url_of(tmp_path)) as store:
        assert listing(store) == {A: 5000, B: 100, C: 50}
    found = read_all(tmp_path)
    assert (found[A][0], found[B][0], found[C][0]) == (Status.OK, Status.OK, Status.ERROR)
    assert "7.bucket ends before byte" in found[C][1]
    with open_store(url_of(tmp_path)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        result, _ = read(store, scanned_rows(store, [C]), [50])  # as listed
        assert result.statuses.tolist() == [Status.ERROR]
    assert "7.bucket: 1 objects lie partly or wholly behind the end" in remarks_of(tmp_path)
    os.truncate(path, path.stat().st_size - 60)
    with open_store(url_of(tmp_path)) as store:
        assert listing(store)[C] == 0


def test_a_bucket_overwritten_by_another_client_is_damage(tmp_path: Path) -> None:
    """Clients that shared a directory wrote buckets of one number; the keys then differ."""
    path = put_bucket(tmp_path, 7, VALUES)
    content = path.read_bytes()
    end = len(TENANT + A) + 5000
    path.write_bytes(content[:end] + content[end + 1 :] + b"x")
    found = read_all(tmp_path)
    assert found[A][0] == Status.OK
    assert [found[key][0] for key in (B, C)] == [Status.ERROR] * 2
    assert "has another key than its .meta file" in found[B][1]


def test_an_older_whole_copy_serves_where_the_newer_is_truncated(tmp_path: Path) -> None:
    put_bucket(tmp_path, 7, {A: VALUES[A]})
    newer = put_bucket(tmp_path, 8, {A: VALUES[A]})
    assert "1 older objects" in remarks_of(tmp_path)
    os.truncate(newer, 100)
    assert read_all(tmp_path)[A][0] == Status.OK


@pytest.mark.parametrize("sequences", [(4, 9), (9, 4)])
def test_the_newest_of_several_objects_counts(tmp_path: Path, sequences: tuple[int, int]) -> None:
    for number, fill in zip(sequences, (b"1", b"2"), strict=True):
        (tmp_path / f"rank_{number}_0_0_0").mkdir()
        put_bucket(tmp_path / f"rank_{number}_0_0_0", number, {A: fill * number})
    with open_store(url_of(tmp_path)) as store:
        assert listing(store) == {A: 9}


def test_leftovers_of_crashes_are_remarked_and_not_listed(tmp_path: Path) -> None:
    """A bucket without .meta, a .meta without bucket, and a damaged .meta lose only themselves."""
    put_bucket(tmp_path, 1, {A: VALUES[A]})
    put_bucket(tmp_path, 2, {B: VALUES[B]}).with_suffix(".meta").unlink()
    put_bucket(tmp_path, 3, {C: VALUES[C]}).unlink()
    damaged = put_bucket(tmp_path, 4, {C: VALUES[C]}).with_suffix(".meta")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    said = remarks_of(tmp_path)
    assert f"{tmp_path}/2.bucket: no .meta file says which objects the bucket has" in said
    assert "a restart of the client deletes the bucket" in said
    assert f"{tmp_path}/3.meta: its data file is missing" in said
    assert f"{tmp_path}/4.meta: the objects of the bucket are left out: cut off" in said
    assert "may still be listed" in said
    assert read_all(tmp_path) == {A: (Status.OK, "")}


def test_leftovers_of_one_kind_are_one_remark(tmp_path: Path) -> None:
    for number in range(3):
        put_bucket(tmp_path, number, {A: VALUES[A]}).with_suffix(".meta").unlink()
    said = remarks_of(tmp_path)
    assert f"{tmp_path}/0.bucket and 2 more: no .meta file says" in said
    assert "1.bucket" not in said


def test_tenants_are_apart_and_keys_of_older_releases_are_the_defaults(tmp_path: Path) -> None:
    put_bucket(tmp_path, 1, {A: b"1"})
    put_bucket(tmp_path, 2, {B: b"22"}, tenant=b"")
    put_bucket(tmp_path, 3, {A: b"333"}, tenant=b"blue\0")
    with open_store(url_of(tmp_path)) as store:
        assert listing(store) == {A: 1, B: 2}
    with open_store(url_of(tmp_path, "?tenant=blue")) as store:
        assert listing(store) == {A: 3}
    assert "1 objects of other tenants are left out ('blue')" in remarks_of(tmp_path)


@pytest.mark.parametrize("crc", [True, False], ids=["crc", "no-crc"])
def test_a_flipped_byte_of_a_record_is_found_by_its_crc(tmp_path: Path, crc: bool) -> None:
    path = put_offset_files(
        tmp_path, [Record(TENANT + A, VALUES[A], 0, 1, crc), Record(TENANT + B, VALUES[B], 9216, 2)]
    )
    content = bytearray(path.read_bytes())
    content[4096 + 17] ^= 1
    path.write_bytes(content)
    VALUES_A = bytearray(VALUES[A])  # noqa: N806 - the value as read
    VALUES_A[17] ^= 1
    with open_store(url_of(tmp_path)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        result, found = read(store, scanned_rows(store, [A, B]), [5000, 100])
    assert result.statuses.tolist() == [Status.DAMAGED if crc else Status.OK, Status.OK]
    assert crc or found[0] == VALUES_A
    assert ("CRC-32C" in result.errors.get(0, "")) == crc


def test_records_are_kept_by_the_rules_of_a_restart(tmp_path: Path) -> None:
    """Evicted keys, records after the checkpoint, and torn headers are left out."""
    torn, late, evicted, whole = (
        Record(TENANT + key, b"v" * 10, n * SLOT_BYTES, n + 1) for n, key in enumerate(KEYS[:4])
    )
    records = [torn, late, evicted, whole]
    path = put_offset_files(tmp_path, records)
    with path.open("r+b") as file:
        file.write(b"\xff" * 8)
    extents = [(record.start, len(record.content)) for record in records]
    meta = offset_meta(extents, 5, evicted=[evicted.key])
    (tmp_path / "kv_cache.meta").write_bytes(meta)
    with open_store(url_of(tmp_path)) as store:
        assert set(listing(store)) == {KEYS[1], KEYS[3]}
    meta = offset_meta(extents, 2, evicted=[evicted.key])
    (tmp_path / "kv_cache.meta").write_bytes(meta)
    said = remarks_of(tmp_path)
    assert f"{path}: 1 records are left out, because their headers" in said
    assert f"{path}: 3 records are left out, because they are newer" in said


def test_a_record_cut_off_by_the_end_of_the_file_is_damage(tmp_path: Path) -> None:
    path = put_offset_files(
        tmp_path, [Record(TENANT + A, VALUES[A], 0, 1), Record(TENANT + C, VALUES[C], 9216, 2)]
    )
    os.truncate(path, 9216 + 4096 + 20)
    with open_store(url_of(tmp_path)) as store:
        assert listing(store) == {A: 5000, C: 20}
    assert [status for status, _ in read_all(tmp_path).values()] == [Status.OK, Status.ERROR]


@dataclass(frozen=True)
class Listed:
    """An open store that was listed, and the rows of A."""

    store: Store
    rows: Any
    path: Path

    def read(self) -> ReadResult:
        return read(self.store, self.rows, [len(VALUES[A])])[0]


@pytest.fixture(params=["bucket", "record"])
def listed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listed]:
    path = (
        put_bucket(tmp_path, 1, {A: VALUES[A]})
        if request.param == "bucket"
        else put_offset_files(tmp_path, [Record(TENANT + A, VALUES[A], 0, 1)])
    )
    with open_store(url_of(tmp_path)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        yield Listed(store, scanned_rows(store, [A]), path)


def alter(path: Path, at: int, content: bytes) -> None:
    """Write into a file; its time is then another one."""
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), content, at)
    os.utime(path, (OLD, OLD))


def test_a_place_that_was_used_again_since_the_listing_is_gone(listed: Listed) -> None:
    """A running client took it for another object: no damage."""
    at = listed.path.read_bytes().index(TENANT + A)
    alter(listed.path, at, b"another")
    result = listed.read()
    assert (result.statuses.tolist(), result.nbytes.tolist()) == ([Status.GONE], [-1])
    assert result.errors == {}


def test_a_wrong_crc_is_damage_in_a_file_that_changed_since_the_listing(tmp_path: Path) -> None:
    """Proves that a bit that flips while a verification runs is not taken for a new object."""
    path = put_offset_files(tmp_path, [Record(TENANT + A, VALUES[A], 0, 1)])
    with open_store(url_of(tmp_path)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        rows = scanned_rows(store, [A])
        alter(path, 4096 + 17, b"?")
        assert read(store, rows, [5000])[0].statuses.tolist() == [Status.DAMAGED]


def test_a_read_that_ends_early_names_the_last_byte(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process truncates the file while it is read."""
    value = listed.path.read_bytes().index(VALUES[A])
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    result = listed.read()
    assert result.statuses.tolist() == [Status.ERROR]
    assert result.errors[0].endswith(f"{listed.path.name} ends before byte {value + 5000}")
    assert len(list(descriptors.iterdir())) == before


@pytest.mark.parametrize(("keeps", "left"), [(30, 0), (4999, 4999)])
def test_a_truncated_object_says_how_much_is_left(listed: Listed, keeps: int, left: int) -> None:
    value = listed.path.read_bytes().index(VALUES[A])
    os.truncate(listed.path, keeps if not left else value + left)
    result = listed.read()
    assert (result.statuses.tolist(), result.nbytes.tolist()) == ([Status.ERROR], [left])
    assert result.errors[0].endswith(f"{listed.path.name} ends before byte {value + 5000}")


def test_a_bad_sector_fails_one_object_and_a_lost_disk_all(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.preadv", fails)
    code = errno.EINVAL
    result = listed.read()
    assert result.statuses.tolist() == [Status.ERROR]
    assert f"{listed.path}: cannot read" in result.errors[0]
    code = errno.ESTALE
    with pytest.raises(StoreUnavailable, match="check that the file system is mounted"):
        listed.read()


def fails_with(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("call", "action"), [("os.scandir", "list the directory"), ("os.pread", "read the metadata")]
)
def test_a_lost_file_system_is_named_with_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, action: str
) -> None:
    put_offset_files(tmp_path, [Record(TENANT + A, VALUES[A], 0, 1)])
    monkeypatch.setattr(call, fails_with(errno.ESTALE))
    with pytest.raises(StoreUnavailable) as refused:
        open_store(url_of(tmp_path))
    assert str(refused.value) == (
        f"{url_of(tmp_path)}: cannot {action}: Stale file handle; check that the file system is "
        "mounted"
    )


def test_more_keys_than_one_listing_holds_name_the_file_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_bucket(tmp_path, 1, {A: VALUES[A]})
    put_bucket(tmp_path, 2, {B: VALUES[B]})
    limit = len(A) + len(B) - 1
    monkeypatch.setattr("hicachectl.backends.mooncake_ssd.index._MAX_KEYS_BYTES", limit)
    with pytest.raises(UnsupportedByBackend) as refused:
        open_store(url_of(tmp_path))
    assert str(refused.value) == (
        f"{tmp_path}/2.bucket: the keys up to this file have more than 2 GiB; open the directory "
        "of one rank"
    )


def test_a_url_without_a_directory_shows_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        open_store("mooncake-ssd://")
    assert str(refused.value) == (
        "mooncake-ssd://: name the directory, as in mooncake-ssd:///mnt/ssd/mooncake"
    )


def test_rows_of_an_older_listing_are_found_by_their_keys(tmp_path: Path) -> None:
    """Their places in the listing are of other objects, or of none, by now."""
    for number, key in enumerate((A, B, C)):
        put_bucket(tmp_path, number + 1, {key: VALUES[key]})
    with open_store(url_of(tmp_path)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        rows = scanned_rows(store, [A, B, C])
        (tmp_path / "1.bucket").unlink()
        assert set(listing(store)) == {B, C}
        result, values = read(store, rows, [len(VALUES[key]) for key in (A, B, C)])
        assert result.statuses.tolist() == [Status.GONE, Status.OK, Status.OK]
        assert values[1:] == [VALUES[B], VALUES[C]]


@pytest.mark.parametrize("sequence", [1, (1 << 63) + 1, (1 << 64) - 2])
def test_any_sequence_number_and_any_time_can_be_read(tmp_path: Path, sequence: int) -> None:
    """Proves that versions hold numbers of 64 bits, and times before 1970; the newer record counts.

    A file says what it likes.
    """
    records = [Record(TENANT + A, VALUES[A], 0, sequence), Record(TENANT + A, b"old", 1 << 14, 0)]
    path = put_offset_files(tmp_path, records, sequence=(1 << 64) - 1)
    os.utime(path, (-1, -1))
    with open_store(url_of(tmp_path)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        result = read(store, scanned_rows(store, [A]), [5000])[0]
        assert result.all_ok
        listed = store.look(scanned_rows(store, [A])).column("version")[0].as_py()
        assert result.versions is not None
        assert result.versions[0].tobytes() == listed


def put_version_1(directory: Path) -> None:
    put_offset_files(directory, [])
    (directory / "kv_cache.meta").write_bytes(offset_meta([], 1, version=1))


def put_version_2(directory: Path) -> None:
    put_offset_files(directory, [])
    (directory / "kv_cache.meta").write_bytes(offset_meta([], 1, version=2))


def put_without_meta(directory: Path) -> None:
    put_offset_files(directory, [])
    (directory / "kv_cache.meta").unlink()


def put_file_per_key(directory: Path) -> None:
    (directory / "file_per_key_dir" / "c" / "p").mkdir(parents=True)


def put_renamed_file_per_key(directory: Path) -> None:
    (directory / "c" / "p").mkdir(parents=True)


def put_all_folders(directory: Path) -> None:
    for name in "abcdefghijklmnop":
        (directory / name).mkdir()


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (put_version_1, "version 1 of Mooncake's offset files, .*; name the mooncake://"),
        (put_version_2, "version 2 of Mooncake's offset files, .*; name the mooncake://"),
        (put_without_meta, "MOONCAKE_OFFSET_PERSIST_MODE"),
        (put_file_per_key, "file_per_key backend, .*; name the mooncake://"),
        (put_renamed_file_per_key, "file_per_key backend, .*; name the mooncake://"),
        (put_all_folders, "file_per_key backend, .*; name the mooncake://"),
    ],
)
@pytest.mark.parametrize("folder", ["", "rank_0_1_0_0"])
def test_other_forms_are_refused_by_name(tmp_path: Path, put: Any, words: str, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    put(tmp_path / folder)
    with pytest.raises(HicacheError, match=words) as caught:
        open_store(url_of(tmp_path))
    assert not isinstance(caught.value, StoreUnavailable)


@pytest.mark.parametrize("name", ["1.meta", "1.bucket", "kv_cache.meta", "kv_cache.data"])
@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_no_link_is_followed_and_no_fifo_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    """A special file in the place of any file is left out or refused, and never read."""
    outside = tmp_path / "outside"
    outside.mkdir()
    directory = tmp_path / "store"
    directory.mkdir()
    put_bucket(directory, 1, {A: VALUES[A]})
    if name.startswith("kv"):
        put_offset_files(directory, [Record(TENANT + B, VALUES[B], 0, 1)])
    (directory / name).rename(outside / name)
    if kind == "link":
        (directory / name).symlink_to(outside / name)
    elif kind == "fifo":
        os.mkfifo(directory / name)
    else:
        (directory / name).mkdir()
    try:
        with open_store(url_of(directory)) as store:
            listed = set(listing(store))
            said = "\n".join(store.remarks)
    except HicacheError as error:
        listed, said = set(), str(error)
    assert name.partition(".")[0] in said
    assert not listed & ({B} if name.startswith("kv") else {A})


def test_a_rank_that_is_a_link_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "store").mkdir()
    put_bucket(tmp_path / "outside", 1, {A: VALUES[A]})
    put_bucket(tmp_path / "store", 2, {B: VALUES[B]})
    (tmp_path / "store" / "rank_0_0_0_0").symlink_to(tmp_path / "outside")
    assert "1 ranks are left out, because they are links" in remarks_of(tmp_path / "store")
    assert set(read_all(tmp_path / "store")) == {B}


def test_a_file_that_becomes_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = put_bucket(tmp_path, 1, {A: VALUES[A]})
    with open_store(url_of(tmp_path)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        rows = scanned_rows(store, [A])
        path.unlink()
        os.mkfifo(path)
        sizes = np.array([5000], dtype=np.int64)
        result = store.read_into(rows, place(sizes)[0], sizes)
    assert result.statuses.tolist() == [Status.ERROR]
    assert "FIFO" in result.errors[0]


def test_a_huge_meta_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    meta = put_bucket(tmp_path, 1, {A: VALUES[A]}).with_suffix(".meta")
    os.truncate(meta, 1 << 40)
    assert "1.meta: the objects of the bucket are left out: larger than" in remarks_of(tmp_path)
    put_offset_files(tmp_path, [])
    os.truncate(tmp_path / "kv_cache.meta", 1 << 40)
    assert "kv_cache.meta: the objects of kv_cache.data are left out: larger than" in remarks_of(
        tmp_path
    )


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert "No objects" in remarks_of(tmp_path)  # a new file system
    (tmp_path / "5f1d_model_0_1.bin").touch()
    with pytest.raises(UnsupportedByBackend, match=r"has 5f1d_model_0_1\.bin, but no files of"):
        open_store(url_of(tmp_path))


def test_an_empty_directory_says_so_and_a_missing_one_is_unavailable(tmp_path: Path) -> None:
    assert "No objects" in remarks_of(tmp_path)
    for path in (tmp_path / "none", tmp_path / "file"):
        if path.name == "file":
            path.touch()
        with pytest.raises(StoreUnavailable, match=path.name):
            open_store(url_of(path))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    """Proves it for whole stores, and for those that are refused after ranks were opened."""
    for name, key in (("rank_0_0_0_0", A), ("rank_0_1_0_0", B)):
        (tmp_path / name).mkdir()
        put_offset_files(tmp_path / name, [Record(TENANT + key, VALUES[key], 0, 1)])
    before = open_descriptors()
    with open_store(url_of(tmp_path)) as store:
        assert set(listing(store)) == {A, B}
    assert open_descriptors() == before
    put_file_per_key(tmp_path / "rank_0_1_0_0")
    with pytest.raises(UnsupportedByBackend, match="file_per_key"):
        open_store(url_of(tmp_path))
    assert open_descriptors() == before


@needs_root
def test_a_rank_of_another_user_is_refused(tmp_path: Path) -> None:
    for name in ("rank_0_0_0_0", "rank_0_1_0_0"):
        (tmp_path / name).mkdir()
        put_bucket(tmp_path / name, 1, {A: VALUES[A]})
    os.chown(tmp_path / "rank_0_1_0_0", 12345, -1)
    before = open_descriptors()
    with pytest.raises(UntrustedError, match="rank_0_1_0_0"):
        open_store(url_of(tmp_path))
    assert open_descriptors() == before


def test_an_offset_file_that_is_missing_loses_its_own_objects(tmp_path: Path) -> None:
    put_bucket(tmp_path, 1, {A: VALUES[A]})
    put_offset_files(tmp_path, [Record(TENANT + B, VALUES[B], 0, 1)]).unlink()
    assert f"{tmp_path}/kv_cache.meta: its data file is missing" in remarks_of(tmp_path)
    assert set(read_all(tmp_path)) == {A}


def test_only_buckets_list_removed_objects(tmp_path: Path) -> None:
    put_offset_files(tmp_path, [Record(TENANT + A, VALUES[A], 0, 1)])
    assert remarks_of(tmp_path) == ""


def test_a_record_whose_key_is_cut_off_is_left_out(tmp_path: Path) -> None:
    path = put_offset_files(
        tmp_path, [Record(TENANT + A, VALUES[A], 0, 1), Record(TENANT + C, VALUES[C], 9216, 2)]
    )
    os.truncate(path, path.read_bytes().index(TENANT + C) + 5)
    with open_store(url_of(tmp_path)) as store:
        assert set(listing(store)) == {A}
    assert f"{path}: 1 records are left out, because their headers are damaged" in remarks_of(
        tmp_path
    )


@needs_root
@pytest.mark.parametrize("name", ["2.meta", "2.bucket"])
def test_a_file_that_this_user_may_not_read_is_no_loss(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o755)
    put_bucket(tmp_path, 1, {A: VALUES[A]})
    put_bucket(tmp_path, 2, {B: VALUES[B]})
    (tmp_path / name).chmod(0o600)
    with pytest.raises(DeniedError, match=rf"/{name}: cannot read: Permission denied; run as"):
        read_all_as_other_user(tmp_path)


def read_all_as_other_user(directory: Path) -> None:
    """Read all objects as another user, who may enter only the directory itself."""
    here = os.open(directory, os.O_PATH)
    try:
        with as_other_user():
            read_all(Path(f"/proc/self/fd/{here}"))
    finally:
        os.close(here)


def test_nothing_is_found_in_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    put_bucket(tmp_path / "full", 1, {A: VALUES[A]})
    with open_store(url_of(tmp_path / "full")) as full:
        rows = scanned_rows(full, [A])
    (tmp_path / "empty").mkdir()
    with open_store(url_of(tmp_path / "empty")) as empty:
        assert empty.exists(rows).tolist() == [False]
        assert empty.look(rows).num_rows == 0
        assert empty.exists(rows[:0]).tolist() == []


@pytest.mark.parametrize("spare", [0, -1])
def test_more_keys_than_fit_an_array_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    for number, key in enumerate((A, B)):
        put_bucket(tmp_path, number, {key: VALUES[key]})
    monkeypatch.setattr(index, "_MAX_KEYS_BYTES", len(A) + len(B) + spare)
    if spare < 0:
        with pytest.raises(UnsupportedByBackend, match=r"1\.bucket: the keys up to this file"):
            open_store(url_of(tmp_path))
    else:
        assert set(read_all(tmp_path)) == {A, B}
