"""The quarantine on disk: objects taken out of a store, and a record of why and where from.

    DIR/RUN/000000.begun   record of groups that are being taken away
    DIR/RUN/000000.json    the record once all of them are: what the quarantine holds
    DIR/RUN/000000/17      an object; its record says which

A record is durable before anything moves, so that the next run can finish what one that was
killed had begun. Objects are numbered: no path is made from a key. A run holds a lock (flock) on
its folder. Records are JSON and can be read without this tool.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicachectl.formats.errors import FormatError, StoreUnavailable
from hicachectl.records import Record, dump_record, parse_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from hicachectl.records import TakenGroup

BEGUN, DONE = ".begun", ".json"
_MAX_RECORD_BYTES = 256 << 20  # a thousand objects are half a megabyte
_NUMBER = re.compile(r"\d{6}")
_RUN_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
_RECORD_NAME = re.compile(rf"{_NUMBER.pattern}(?:{re.escape(BEGUN)}|{re.escape(DONE)})")
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one record, on disk."""

    run: Path
    number: int
    record: Record
    done: bool

    @property
    def folder(self) -> Path:
        """Where its objects are."""
        return self.run / f"{self.number:06d}"

    def path(self, suffix: str) -> Path:
        """Where its record is."""
        return self.run / f"{self.number:06d}{suffix}"

    def held(self) -> dict[int, int]:
        """Bytes of each object that is here, by number."""
        with os.scandir(self.folder) as entries:
            return {
                int(entry.name): entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if entry.name.isdecimal() and entry.is_file(follow_symlinks=False)
            }

    def write(self, groups: Sequence[TakenGroup]) -> None:
        """Record as done what of these groups is here; without any, let go of the batch."""
        held = self.held()
        kept = []
        for group in groups:
            objects = tuple(taken for taken in group.objects if taken.file in held)
            if objects:
                kept.append(replace(group, objects=objects))
        if not kept:
            self.discard()
            return
        wanted = {object_.file for group in kept for object_ in group.objects}
        for entry in self.folder.iterdir():
            if not entry.name.isdecimal() or int(entry.name) not in wanted:
                entry.unlink()
        record = replace(self.record, groups=tuple(kept))
        write_durably(self.path(DONE), dump_record(record))
        self.path(BEGUN).unlink(missing_ok=True)
        sync_directory(self.run)

    def rewrite(self, groups: Sequence[TakenGroup]) -> None:
        """Replace the record by one of these groups only; without any, let go of the batch."""
        if groups:
            record = replace(self.record, groups=tuple(groups))
            write_durably(self.path(DONE if self.done else BEGUN), dump_record(record))
        else:
            self.discard()

    def discard(self) -> None:
        """Delete the objects and then the record, which until then says what to delete."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for suffix in (DONE, BEGUN):
            self.path(suffix).unlink(missing_ok=True)
        sync_directory(self.run)


class Run:
    """One run's folder in a quarantine, locked while it is open; made when first needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path: Path | None = None
        self._lock: int | None = None
        self._next = 0

    def new_folder(self) -> Batch:
        """Make the folder of a batch that has no record yet.

        Raises OSError; the quarantine's own directory is made where there is none.
        """
        if self._path is None:
            self._path = self._make()
        empty = Record("", "", "quarantine", 0.0, ())
        batch = Batch(self._path, self._next, empty, done=False)
        batch.folder.mkdir()
        self._next += 1
        return batch

    def begin(self, batch: Batch, record: Record) -> Batch:
        """Write a batch's record, durably. Raises OSError."""
        write_durably(batch.path(BEGUN), dump_record(record))
        return Batch(batch.run, batch.number, record, done=False)

    def _make(self) -> Path:
        _make_directories(self.directory)
        while True:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            path = self.directory / f"{stamp}-{os.urandom(3).hex()}"
            path.mkdir()
            # Before it is locked another process can take it for a leftover, and remove it.
            with suppress(FileNotFoundError):
                self._lock = _lock(path)
                if self._lock is not None and path.is_dir():
                    sync_directory(self.directory)
                    return path

    def close(self) -> None:
        """Unlock the folder, or remove it where it holds no batch."""
        if self._path is not None:
            sweep(self._path)
        if self._lock is not None:
            os.close(self._lock)


def runs(directory: Path) -> Iterator[Path]:
    """List the runs of a quarantine, oldest first; a run's own folder is one too."""
    try:
        entries = sorted(entry for entry in directory.iterdir() if entry.is_dir())
        if any(_is_record(path) for path in directory.iterdir()):
            yield directory
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreUnavailable(f"cannot read {directory}: {error.strerror}") from error
    yield from entries


def batches(run: Path) -> list[Batch]:
    """Read the records of a run. Raises FormatError on a damaged one, StoreUnavailable."""
    found = {}
    try:
        # Where a run was killed between the two, the done record comes last and counts.
        for path in sorted(filter(_is_record, run.iterdir())):
            number, done = int(path.stem), path.suffix == DONE
            found[number] = Batch(run, number, _read_record(path), done)
    except FileNotFoundError:  # another process has just finished with it
        return []
    except OSError as error:
        raise StoreUnavailable(f"cannot read {run}: {error.strerror}") from error
    return list(found.values())


def sweep(run: Path) -> None:
    """Delete what a killed run left over, and the run's folder when it is empty.

    That is what has no record, and the begun record of a batch that is done.
    """
    with suppress(OSError):
        numbers = {path.stem for path in run.iterdir() if _is_record(path)}
        for path in run.iterdir():
            if path.is_dir() and _NUMBER.fullmatch(path.name) and path.name not in numbers:
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".tmp" or (
                path.suffix == BEGUN and path.with_suffix(DONE).exists()
            ):
                path.unlink()
        run.rmdir()


@contextmanager
def locked_run(run: Path) -> Iterator[bool]:
    """Hold a run's lock in the block; False while another process works on it, or it is gone.

    Raises OSError.
    """
    try:
        lock = _lock(run)
    except FileNotFoundError:
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _lock(run: Path) -> int | None:
    """Lock a run's folder and return what to close; None while another process works on it."""
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # the file system has no locks
        pass
    return descriptor


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, on disk when this returns. Raises OSError."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # some network file systems need none
            raise
    finally:
        os.close(descriptor)


def _make_directories(path: Path) -> None:
    if path.is_dir():
        return
    _make_directories(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def _is_record(path: Path) -> bool:
    return path.suffix in (BEGUN, DONE) and _NUMBER.fullmatch(path.stem) is not None


def _read_record(path: Path) -> Record:
    with path.open("rb") as stream:
        text = stream.read(_MAX_RECORD_BYTES + 1)
    if len(text) > _MAX_RECORD_BYTES:
        raise FormatError(f"{path}: larger than {_MAX_RECORD_BYTES} bytes, not a record")
    return parse_record(text, source=str(path))


def is_quarantine(path: str, names: Iterable[str]) -> bool:
    """Tell a directory of these names from a store: a quarantine, one of its runs or folders."""
    parts = path.rsplit("/", 2)[-2:]
    if parts == [".hicachectl", "quarantine"]:
        return True
    if _NUMBER.fullmatch(parts[-1]) and any(os.path.lexists(path + end) for end in (BEGUN, DONE)):
        return True
    return any(_RUN_NAME.fullmatch(name) or _RECORD_NAME.fullmatch(name) for name in names)
