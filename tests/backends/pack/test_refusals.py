"""Packs that no writer makes, and failed calls: the pack, what failed and what to do."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.backends.pack.recovery import repair
from hicachectl.backends.pack.store import PackStore
from hicachectl.backends.testing import read, scanned_rows, write
from hicachectl.formats.errors import FormatError, StoreUnavailable, UsageError
from tests.backends.pack import pack_files
from tests.backends.pack.pack_files import INDEX, METADATA, OBJECT, record
from tests.small_file_system import small_file_system
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

KEY = f"{page(0)}_m_0_1.bin".encode()
BEGIN = pack_files.header() + pack_files.metadata()


def ended(entry: bytes, length: int | None = None) -> bytes:
    """Return a pack whose trailer names a record as the index."""
    length = len(entry) if length is None else length
    return BEGIN + entry + pack_files.trailer(len(BEGIN), length)


COMPRESSED = record(INDEX, b"", bytes(64), planes=[bytes(8)])
BEYOND = record(INDEX, b"", b"", planes=[bytes(1000)], nbytes=1000)[:-1000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ended(COMPRESSED), "the record is compressed, which is not allowed here"),
        (ended(BEYOND), "the file ends within the record"),
        (ended(record(OBJECT, KEY, b"x")), "the record's kind or length differs from the trailer"),
        (ended(record(INDEX, b"", b"x", digest=bytes(32))), "the content does not match"),
    ],
    ids=["compressed", "cut", "another kind", "another digest"],
)
def test_an_index_that_is_none_is_named_with_its_place_and_the_repair(
    invoke: Invoke, tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "x.hcpack"
    path.write_bytes(content)
    (message,) = invoke("ls", f"pack://{path}", exit_code=2).stderr.splitlines()
    assert message.startswith(f"hicachectl: {path}: ")
    assert f"offset {len(BEGIN)}" in message
    assert said in message
    assert "pack repair" in message


@pytest.mark.parametrize("nbytes", [None, 5 << 20])
def test_a_cut_pack_without_its_metadata_is_not_continued(
    tmp_path: Path, nbytes: int | None
) -> None:
    path = tmp_path / "x.hcpack"
    metadata = b"" if nbytes is None else record(METADATA, b"", bytes(nbytes))
    path.write_bytes(pack_files.header() + metadata + record(OBJECT, KEY, b"x"))
    said = f"{path}: the pack's metadata is missing or damaged; write to a new pack"
    with pytest.raises(FormatError, match=said):
        open_store(f"pack://{path}?keys=file", create=True)


# System calls that fail


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(1 << 20) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.hcpack"


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def fill(directory: Path) -> Path:
    """Take all the space of a small file system; return the file that has it."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 12))
            except OSError:
                return filler


def test_a_file_system_without_locks_takes_no_new_pack(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(StoreUnavailable) as refused:
        open_store(f"pack://{path}?keys=file", create=True)
    assert str(refused.value) == (
        f"{path}: cannot lock the pack: No locks available; use a file system with locks"
    )


def test_a_lost_file_system_ends_reads(
    path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_files.build(path, {KEY: b"x"})
    with open_store(f"pack://{path}") as store:
        store.attach(arena)
        rows = scanned_rows(store, [KEY])
        monkeypatch.setattr(os, "preadv", failing(errno.ESTALE))
        with pytest.raises(StoreUnavailable) as refused:
            read(store, rows, [1])
    assert str(refused.value) == (
        f"{path}: cannot read the pack: Stale file handle; check that the file system is mounted"
    )


def test_the_index_of_a_pack_on_a_full_disk_is_left_to_a_repair(
    tmp_path: Path, arena: Arena
) -> None:
    with small_file_system(tmp_path / "small", "256k") as folder:
        path = folder / "x.hcpack"
        store = open_store(f"pack://{path}?keys=file", create=True)
        store.attach(arena)
        objects = {f"{page(n)}_m_0_1.bin".encode(): b"x" for n in range(60)}  # a large index
        assert write(store, objects, if_absent=True).all_ok
        filler = fill(folder)
        with pytest.raises(StoreUnavailable) as refused:
            store.close()
        assert str(refused.value) == (
            f"{path}: cannot finish the pack: No space left on device; the objects are safe; fix "
            f"the cause, then run hicachectl pack repair {path}"
        )
        with pytest.raises(StoreUnavailable) as refused:
            repair(str(path))
        assert str(refused.value) == (
            f"{path}: cannot repair the pack: No space left on device; fix the cause, then run "
            "again"
        )
        with pytest.raises(StoreUnavailable) as refused:
            repair(str(path), output=f"{folder}/new.hcpack")
        assert str(refused.value) == (
            f"{folder}/new.hcpack: cannot write the new pack: No space left on device; check the "
            "directory and its free space"
        )
        filler.unlink()
        assert repair(str(path)).objects == len(objects)


def test_a_new_pack_on_a_full_disk_has_nothing_to_repair(tmp_path: Path, arena: Arena) -> None:
    with small_file_system(tmp_path / "small", "256k") as folder:
        path = folder / "x.hcpack"
        with open_store(f"pack://{path}?keys=file", create=True) as store:
            store.attach(arena)
            filler = fill(folder)
            with pytest.raises(StoreUnavailable) as refused:
                write(store, {KEY: b"x"}, if_absent=True)
            filler.unlink()
    assert str(refused.value) == (
        f"{path}: cannot write the pack: No space left on device; fix the cause, then run again"
    )


def test_a_pack_that_its_writer_may_not_close_to_others_names_the_mode(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's pack that a group may write to."""
    pack_files.build(path, {KEY: b"x"})
    path.chmod(0o644)
    with open_store(f"pack://{path}?keys=file", create=True) as store:
        assert isinstance(store, PackStore)
        monkeypatch.setattr(os, "fchmod", failing(errno.EPERM))
        with pytest.raises(StoreUnavailable) as refused:
            store.keep_private(Permissions.of_file(private(path)))
    assert str(refused.value) == (
        f"{path}: more users may read the pack (mode 0644) than the source; chmod the pack to 0600"
    )


def private(path: Path) -> os.stat_result:
    """Return the facts of a file that its owner alone reads."""
    source = path.with_name("source")
    source.touch(0o600)
    return source.stat()


@pytest.mark.parametrize("changed", ["output", "pack"])
def test_a_repair_notices_what_changed_meanwhile(path: Path, changed: str) -> None:
    content = BEGIN + record(OBJECT, KEY, bytes(5000))
    path.write_bytes(content)
    output = path.with_name("new.hcpack")

    seen = [32]  # the header

    def on_bytes(nbytes: int, total: int) -> None:
        seen.append(nbytes)
        if sum(seen) < total:
            return
        if changed == "output":
            output.write_bytes(b"another's")
        else:
            os.truncate(path, len(content) - 4000)

    kind, said = {
        "output": (UsageError, f"{output}: already exists; choose another name"),
        "pack": (FormatError, f"{path}: became shorter while it was read; run again"),
    }[changed]
    with pytest.raises(kind) as refused:
        repair(str(path), output=str(output), on_bytes=on_bytes)
    assert str(refused.value) == said
    left = {"x.hcpack", "new.hcpack"} if changed == "output" else {"x.hcpack"}
    assert {entry.name for entry in path.parent.iterdir()} == left


def test_a_pack_that_cannot_be_read_is_named_not_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(BEGIN + record(OBJECT, KEY, bytes(5000)))
    real = os.pread

    def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        if output.with_name(".new.hcpack.tmp").exists():
            failing(errno.EIO)()
        return real(descriptor, nbytes, offset)

    output = path.with_name("new.hcpack")
    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(StoreUnavailable) as refused:
        repair(str(path), output=str(output))
    assert str(refused.value) == (
        f"{path}: cannot read the pack: Input/output error; check that the file system is mounted"
    )
