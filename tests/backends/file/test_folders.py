"""Tests of ObjectDirectory: marks, places of objects, and directories that vanish."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.file.folders import ObjectDirectory, folder_of
from hicachectl.formats.errors import FormatError, UntrustedError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

KEY = b"ab" + b"0" * 62 + b"_m_0_2.bin"
TOKEN = b"0123456789abcdef01234567"


def _write(directory: ObjectDirectory, key: bytes, value: bytes) -> None:
    where, name = directory.place_for_new(key)
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=where)
    os.write(descriptor, value)
    os.close(descriptor)


@pytest.mark.slow
def test_importing_the_directory_loads_neither_arrow_nor_click() -> None:
    """Proves that the plug-in can use both modules in a server without these packages."""
    program = (
        "import sys, hicachectl.backends.file.folders, hicachectl.backends.object_files.markers; "
        "sys.exit(bool({'pyarrow', 'click'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_new_directory_is_flat_and_holds_nothing_of_ours(tmp_path: Path) -> None:
    made: list[str] = []
    with ObjectDirectory.create(str(tmp_path / "a" / "b"), made=made) as directory:
        assert not directory.folders
        assert directory.place(KEY) == directory.place_for_new(KEY) == (directory.descriptor, KEY)
    assert made == [str(tmp_path / "a" / "b"), str(tmp_path / "a")]
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_directory_with_folders_stays_one(tmp_path: Path) -> None:
    """Proves that the mark decides the form, and that a folder is made for the first object."""
    path = str(tmp_path / "store")
    with ObjectDirectory.create(path, folders=True) as directory:
        with pytest.raises(FileNotFoundError):
            directory.place(KEY)
        _write(directory, KEY, b"value")
    for again in (ObjectDirectory.open(path), ObjectDirectory.create(path)):
        with again:
            assert again.folders
            where, name = again.place(KEY)
            assert os.stat(name, dir_fd=where).st_size == 5
    assert (tmp_path / "store" / "ab" / os.fsdecode(KEY)).read_bytes() == b"value"


def test_a_directory_keeps_its_form(tmp_path: Path) -> None:
    flat, folders = str(tmp_path / "flat"), str(tmp_path / "folders")
    with ObjectDirectory.create(flat) as directory:
        _write(directory, KEY, b"value")
    ObjectDirectory.create(folders, folders=True).close()
    with pytest.raises(UsageError, match="objects outside folders"):
        ObjectDirectory.create(flat, folders=True)
    with pytest.raises(UsageError, match="has folders"):
        ObjectDirectory.create(folders, folders=False)


def test_an_unknown_mark_is_named(tmp_path: Path) -> None:
    (tmp_path / ".hicachectl").mkdir()
    (tmp_path / ".hicachectl" / "folders").write_text("hex3\n")
    with pytest.raises(FormatError, match=r"\.hicachectl/folders: .* newer"):
        ObjectDirectory.open(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (KEY, b"ab"),
        (b"AB" + KEY[2:], None),
        (b"README", None),
        (b".hicachectl", None),
        (b".hicachectl-" + b"0" * 30 + b"7f.tmp", b"7f"),
        (b".hicachectl-.tmp", None),
        (b"", None),
    ],
)
def test_names_name_their_folder(name: bytes, folder: bytes | None) -> None:
    assert folder_of(name) == folder


def test_temporary_files_lie_beside_their_object(tmp_path: Path) -> None:
    """Proves that a rename to the key stays within a folder, and that removers find the file."""
    with ObjectDirectory.create(str(tmp_path), folders=True) as directory:
        names = {directory.temporary_name(KEY, TOKEN, number) for number in range(300)}
        assert len(names) == 300
        assert {directory.place_for_new(name)[0] for name in names} == {
            directory.place_for_new(KEY)[0]
        }
        with pytest.raises(OSError, match="hex digits"):
            directory.place_for_new(b"README")


def test_folders_give_the_rights_of_their_directory(tmp_path: Path) -> None:
    """Proves that servers of the directory's group can write to folders, whatever the umask."""
    tmp_path.chmod(0o2775)
    umask = os.umask(0o077)
    try:
        with ObjectDirectory.create(str(tmp_path), folders=True) as directory:
            directory.place_for_new(KEY)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "ab").stat().st_mode) == 0o2775


def test_a_link_is_no_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with ObjectDirectory.create(str(tmp_path / "store"), folders=True) as directory:
        (tmp_path / "store" / "ab").symlink_to(outside)
        for place in (directory.place, directory.place_for_new):
            with pytest.raises(UntrustedError, match="store/ab: is a symbolic link"):
                place(KEY)
        left_alone: list[str] = []
        assert [place.path for place in directory.places(left_alone)] == [directory.path]
        assert len(left_alone) == 1
    assert list(outside.iterdir()) == []


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    with ObjectDirectory.create(str(tmp_path), folders=True) as directory:
        _write(directory, KEY, b"old")
        shutil.rmtree(tmp_path / "ab")
        with pytest.raises(FileNotFoundError):
            directory.place(KEY)
        _write(directory, KEY, b"new")
    assert (tmp_path / "ab" / os.fsdecode(KEY)).read_bytes() == b"new"


def test_a_directory_that_another_host_removed_has_vanished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS the descriptors of a removed directory and its folders are stale."""
    with ObjectDirectory.create(str(tmp_path), folders=True) as directory:
        _write(directory, KEY, b"old")
        stale = {directory.descriptor, directory.place(KEY)[0]}
        fstat = os.fstat

        def fail(descriptor: int) -> os.stat_result:
            if descriptor in stale:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return fstat(descriptor)

        monkeypatch.setattr(os, "fstat", fail)
        assert directory.vanished
        stale.discard(directory.descriptor)
        shutil.rmtree(tmp_path / "ab")
        with pytest.raises(FileNotFoundError):
            directory.place(KEY)
        stale.clear()
        _write(directory, KEY, b"new")
    assert (tmp_path / "ab" / os.fsdecode(KEY)).read_bytes() == b"new"


@pytest.mark.parametrize("folders", [False, True])
@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_directory_that_vanished_is_made_again(tmp_path: Path, folders: bool, how: str) -> None:
    """Proves that writes after `reopen` reach the path, and none the earlier directory."""
    path = tmp_path / "outer" / "store"
    with ObjectDirectory.create(str(path), folders=folders) as directory:
        _write(directory, KEY, b"old")
        numbers = directory.place(KEY)[0], directory.descriptor
        assert not directory.vanished
        if how == "removed":
            shutil.rmtree(path.parent)
        else:
            path.rename(tmp_path / "aside")
        if how == "replaced":
            path.mkdir()
        assert directory.vanished
        directory.reopen()
        assert not directory.vanished
        _write(directory, KEY, b"new")
        assert (directory.place(KEY)[0], directory.descriptor) == numbers
    with ObjectDirectory.open(str(path)) as again:
        assert again.folders is folders
        where, name = again.place(KEY)
        with open(
            name, "rb", opener=lambda name, flags: os.open(name, flags, dir_fd=where)
        ) as file:
            assert file.read() == b"new"
    if how == "moved":
        assert b"new" not in [
            f.read_bytes() for f in (tmp_path / "aside").rglob("*") if f.is_file()
        ]


def test_threads_and_processes_may_share_a_directory(tmp_path: Path) -> None:
    """Proves that racing creators agree, and that each folder is opened once."""
    keys = [b"%02x" % (n % 256) + b"%062x_m.bin" % n for n in range(1024)]

    def write(n: int) -> None:
        with ObjectDirectory.create(str(tmp_path / "store"), folders=True) as directory:
            for key in keys[n::8]:
                _write(directory, key, key)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with ObjectDirectory.open(str(tmp_path / "store")) as directory, ThreadPoolExecutor(8) as pool:
        places = list(pool.map(directory.place, keys))
        assert len({where for where, _ in places}) == 256
        assert all(os.stat(name, dir_fd=where).st_size for where, name in places)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
