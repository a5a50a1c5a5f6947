"""Tests of NixlStore: the shared suite, and places, watermarks and foreign files."""

from __future__ import annotations

import os
import resource
import shutil
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status, Store, open_store
from hicachectl.backends.nixl.store import NixlStore
from hicachectl.backends.testing import (
    ARENA_BYTES,
    PAGE_HASHES,
    StoreSuite,
    listing,
    read,
    rows_of,
    write,
)
from hicachectl.formats.errors import StoreUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = tuple(f"{page}_m_0_1".encode() for page in PAGE_HASHES)


def url_of(folder: Path, names: str = "abc", options: str = "&high_watermark=100") -> str:
    """Return the URL of a store; its servers use any disk to the last byte."""
    return f"nixl://{','.join(f'{folder}/{name}' for name in names)}?direct_io=on{options}"


def file_of(store: Store, key: bytes) -> Path:
    """Return where SGLang keeps an object (nixl_routing.route_key)."""
    assert isinstance(store, NixlStore)
    directories = store.path.split(",")
    number = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
    directory = directories[(number >> 16) % len(directories)]
    return Path(directory) / f"{number & 0xFF:02x}" / os.fsdecode(key)


class TestNixlStore(StoreSuite):
    keys = KEYS

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        url = url_of(tmp_path, options=f"&high_watermark=100&side_directory={tmp_path}/side/ours")
        with open_store(url, create=True) as opened:
            yield opened

    def reopen(self, store: Store) -> Store:
        return open_store(store.url)

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        path = file_of(store, key)
        path.parent.mkdir(exist_ok=True)
        path.with_name(".put").write_bytes(value)
        path.with_name(".put").rename(path)

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        path = file_of(store, key)
        return path.read_bytes() if path.exists() else None

    def raw_delete(self, store: Store, key: bytes) -> None:
        file_of(store, key).unlink(missing_ok=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Arena(ARENA_BYTES) as arena, open_store(url_of(tmp_path), create=True) as opened:
        opened.attach(arena)
        yield opened


def test_directories_are_part_of_the_address(store: Store, tmp_path: Path) -> None:
    """Proves that a file is no object of a store with other directories, or in another order."""
    values = {key: key * 3 for key in KEYS}
    assert write(store, values, if_absent=True).all_ok
    assert {key: file_of(store, key).read_bytes() for key in KEYS} == values
    assert len({file_of(store, key).parents[1] for key in KEYS}) > 1
    with open_store(url_of(tmp_path, "cba")) as other:
        found = set(listing(other))
        assert found == {key for key in KEYS if file_of(store, key) == file_of(other, key)}
        (remark,) = other.remarks
        assert f"ignored {len(KEYS) - len(found)} files outside the folders" in remark
        assert "the number and order of the directories decide" in remark
        assert other.exists(rows_of(KEYS)).sum() == len(found) < len(KEYS)


def put_many(folder: Path, made: str, count: int = 320) -> None:
    """Put small objects into a store's directories."""
    with open_store(url_of(folder, made), create=True) as store:
        paths = [file_of(store, f"{at:064x}_m_0_1".encode()) for at in range(count)]
        for parent in {path.parent for path in paths}:
            parent.mkdir(exist_ok=True)
        for path in paths:
            path.write_bytes(b"abc")


@pytest.mark.slow
@pytest.mark.parametrize(("made", "given"), [("abc", "a"), ("abc", "c"), ("abcd", "ac")])
def test_missing_directories_are_refused_where_no_file_seems_misplaced(
    tmp_path: Path, made: str, given: str
) -> None:
    """Proves that no command takes pages for incomplete that have objects elsewhere."""
    put_many(tmp_path, made)
    with pytest.raises(UsageError) as refused:
        open_store(url_of(tmp_path, given))
    assert f"has the objects of one of {len(made)} directories" in str(refused.value)
    assert f"add directories={len(given)} to the URL" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(("made", "left"), [("abc", "a"), ("abc", "c"), ("abcd", "ab")])
def test_a_store_reduced_to_fewer_directories_opens_if_the_url_says_so(
    tmp_path: Path, made: str, left: str
) -> None:
    """Proves that what servers find in the remaining directories is all listed."""
    put_many(tmp_path, made)
    there = {path.name.encode() for name in left for path in tmp_path.glob(f"{name}/*/*")}
    stated = f"&high_watermark=100&directories={len(left)}"
    with Arena(ARENA_BYTES) as arena, open_store(url_of(tmp_path, left, stated)) as store:
        assert set(listing(store)) == there
        assert store.remarks == ()
        store.attach(arena)
        lost = f"{1:064x}_m_0_1".encode()
        write(store, {lost: b"abc"}, if_absent=True)
        assert file_of(store, lost).read_bytes() == b"abc"


@pytest.mark.slow
@pytest.mark.parametrize("given", ["ba", "abc"])
def test_an_order_in_which_most_files_lie_elsewhere_is_refused_unless_stated(
    tmp_path: Path, given: str
) -> None:
    """Proves that a repair cannot remove pages that are whole in another order."""
    put_many(tmp_path, "ab")
    (tmp_path / "c").mkdir()
    most = "files lie where servers with these directories do not look; give all directories"
    with pytest.raises(UsageError, match=most) as refused:
        open_store(url_of(tmp_path, given))
    assert f"add directories={len(given)} to the URL" in str(refused.value)
    with open_store(url_of(tmp_path, given, f"&directories={len(given)}")) as store:
        assert "files outside the folders of their keys" in "".join(store.remarks)


def test_a_refused_destination_leaves_no_new_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names a directory twice"):
        open_store(url_of(tmp_path, "nn"), create=True)
    put_many(tmp_path, "abcd")
    with pytest.raises(UsageError, match="has the objects of one of 4 directories"):
        open_store(url_of(tmp_path, "ac"), create=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == list("abcd")


def test_directories_in_the_wrong_order_are_remarked_before_a_listing(tmp_path: Path) -> None:
    put_many(tmp_path, "abc", count=60)
    with open_store(url_of(tmp_path)) as right, open_store(url_of(tmp_path, "cab")) as wrong:
        assert right.remarks == ()
        (remark,) = wrong.remarks
        assert "ignored at least 60 files outside the folders of their keys" in remark
        assert "the number and order of the directories decide" in remark
        list(wrong.scan())
        assert "ignored 60 files" in wrong.remarks[0]


def test_leftovers_of_killed_writes_are_listed_from_their_folders(tmp_path: Path) -> None:
    """Proves that `rm --temporaries` finds them, and that they are not taken for lost objects."""
    with open_store(url_of(tmp_path), create=True) as opened:
        assert isinstance(opened, NixlStore)
        names = [opened.objects.temporary_name(key, b"0" * 24, n) for n, key in enumerate(KEYS)]
        for key, name in zip(KEYS, names, strict=True):
            folder = file_of(opened, key).parent
            folder.mkdir(exist_ok=True)
            (folder / os.fsdecode(name)).touch()
        (tmp_path / "a" / os.fsdecode(names[0])).touch()
        assert set(listing(opened)) == set(names)
        assert "ignored 1 files that are no objects" in "".join(opened.remarks)


@pytest.mark.slow
def test_descriptors_are_allowed_and_closed_again(tmp_path: Path) -> None:
    """Proves that 256 folders of each directory can be open, and none is left behind."""
    put_many(tmp_path, "abcd", count=400)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        with open_store(url_of(tmp_path, "abcd")) as opened:
            assert len(listing(opened)) == 400
        with pytest.raises(UsageError):
            open_store(url_of(tmp_path, "ac"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 4 * 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(descriptors.iterdir())) == before


def test_what_is_no_object_is_named_and_left_alone(store: Store, tmp_path: Path) -> None:
    """Proves that links, FIFOs, linked folders and misplaced files are neither read nor changed."""
    write(store, {KEYS[0]: b"abc"}, if_absent=True)
    for key, make in ((KEYS[1], os.mkfifo), (KEYS[2], lambda p: p.symlink_to("/etc/passwd"))):
        path = file_of(store, key)
        path.parent.mkdir(exist_ok=True)
        make(path)
    elsewhere = file_of(store, KEYS[3])
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / elsewhere.name).write_bytes(b"abc")
    elsewhere.parent.symlink_to(tmp_path / "real")
    shutil.copy(file_of(store, KEYS[0]), tmp_path / "a" / os.fsdecode(KEYS[4]))
    assert set(listing(store)) == {KEYS[0]}
    remarks = "; ".join(store.remarks)
    assert "ignored 2 links, FIFOs" in remarks
    assert "ignored 1 files outside" in remarks
    assert f"{elsewhere.parent}: is a symbolic link" in remarks
    rows = rows_of(KEYS[:5])
    statuses = read(store, rows, [3] * 5)[0].statuses.tolist()
    assert statuses == [Status.OK, Status.ERROR, Status.ERROR, Status.ERROR, Status.GONE]
    assert store.exists(rows).tolist() == [True, False, False, False, False]


def test_servers_side_files_are_not_looked_for(store: Store, tmp_path: Path) -> None:
    """Proves that nothing is kept in directories that a server's `clear` empties."""
    write(store, dict.fromkeys(KEYS, b"abc"), if_absent=True)
    assert isinstance(store, NixlStore)
    store.touch(rows_of(KEYS))
    store.delete(rows_of(KEYS[:2]))
    names = {path.name for path in tmp_path.glob("*/*")}
    assert names <= {f"{number:02x}" for number in range(256)}


def test_writes_stop_below_the_watermark_of_each_disk(tmp_path: Path) -> None:
    """Proves that no object is written that would make servers remove others."""
    space = os.statvfs(tmp_path)
    used = 100 * (1 - space.f_bavail / space.f_blocks)
    url = url_of(tmp_path, options=f"&high_watermark={used * 0.9:.6f}")
    with Arena(ARENA_BYTES) as arena, open_store(url, create=True) as store:
        store.attach(arena)
        result = write(store, {KEYS[0]: b"abc"}, if_absent=True)
        assert result.statuses.tolist() == [Status.FULL]
        assert "servers would remove objects" in result.errors[0]
        assert store.free_bytes() == 0
        assert listing(store) == {}


def test_an_object_that_would_reach_the_watermark_is_not_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that sizes count, and that directories on one disk share its space."""
    with open_store(store.url.replace("=100", "=80")) as other, Arena(ARENA_BYTES) as arena:
        other.attach(arena)
        space = SimpleNamespace(f_blocks=1000, f_frsize=1, f_bavail=210)
        monkeypatch.setattr("os.fstatvfs", lambda _: space)
        values = {KEYS[0]: b"123456789", KEYS[1]: b"1234567890"}
        result = write(other, values, if_absent=True)
        assert result.statuses.tolist() == [Status.OK, Status.FULL]
        assert other.free_bytes() == 9  # three times a third of 10


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nixl:///a,b", "each directory must be an absolute path"),
        ("nixl:///a,", "each directory must be an absolute path"),
        ("nixl:///tmp,/tmp/../tmp", "names a directory twice"),
        ("nixl:///tmp?direct_io=yes", "direct_io: 'yes' is not one of on, off"),
        (
            "nixl:///tmp?high_watermark=nan",
            "high_watermark: 'nan' is not a percentage above 0; give one",
        ),
        ("nixl:///tmp?high_watermark=8e1", "'8e1' is not a percentage above 0"),
        ("nixl:///tmp?high_watermark=0", "'0' is not a percentage above 0"),
        ("nixl:///tmp?high_watermark=100.5", "'100.5' is not a percentage"),
        ("nixl:///tmp?directories=2", "directories is 2, but the URL has 1; give all"),
        ("nixl:///tmp,/?directories=one", "directories: 'one' is not a number of directories"),
        ("nixl:///tmp?folders=hex2", "unknown parameter 'folders'"),
    ],
)
def test_urls_that_name_no_store_are_refused(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_store(url)


def test_more_directories_than_names_can_tell_apart_are_refused(tmp_path: Path) -> None:
    paths = [f"{tmp_path}/{number}" for number in range(257)]
    with pytest.raises(UsageError, match="has 257 directories; give at most 256"):
        open_store(f"nixl://{','.join(paths)}")
    with pytest.raises(StoreUnavailable, match=f"{tmp_path}/0: "):
        open_store(f"nixl://{','.join(paths[:256])}")


@pytest.mark.parametrize("percentage", ["0.5", "100"])
def test_any_percentage_is_a_watermark(tmp_path: Path, percentage: str) -> None:
    with open_store(f"nixl://{tmp_path}?high_watermark={percentage}") as store:
        assert listing(store) == {}


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(StoreUnavailable, match=f"{tmp_path}/b: ") as missing:
        open_store(url_of(tmp_path, "ab"))
    assert "create the directories" not in str(missing.value)
    assert not (tmp_path / "b").exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    url = url_of(tmp_path / "file")
    with pytest.raises(StoreUnavailable) as refused:
        open_store(url, create=True)
    paths = ",".join(f"{tmp_path}/file/{name}" for name in "abc")
    assert str(refused.value) == (
        f"{paths}: cannot create the directories: Not a directory; check the path and the "
        "permissions of its parent directories"
    )
