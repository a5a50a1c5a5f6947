"""Quarantine on disk: objects removed from a store, with records of their origin.

    DIR/RUN/000000.begun    record of a batch being removed
    DIR/RUN/000000.json     record of a completed batch: the groups in quarantine
    DIR/RUN/000000.purged   record of a batch; the whole run is being purged
    DIR/RUN/000000/17       object 17 of the batch; the record has its key
    DIR/RUN/000000.copying  empty; the folder is being filled with copies and has no record yet

A record is durable before the first object leaves the store, so the next run can finish a killed
run's batch. A folder with objects but no record may hold the only copies and is never deleted,
unless a `.copying` file shows that all originals are in the store.
A purge renames one record to `.purged`, which needs no space. From then on, nothing of the run can
be restored. That record goes last, so the next purge finishes a killed one.
Paths contain object numbers, never keys. A run holds a lock (flock) on its folder. Records are
JSON and can be read without this tool.

Entries are opened below the quarantine's directory, without following links, and only if their
owner is trusted (`backends.disk.directory`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from hicachectl.backends.capabilities import Emptied, SideFiles
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.files import VERSION
from hicachectl.formats.errors import FormatError, StoreUnavailable, UsageError
from hicachectl.formats.quarantine import BEGUN, COPYING, DONE, FOLDER, PURGED, RECORD, RUN
from hicachectl.formats.wording import failed, no_quarantine
from hicachectl.move.record_file import Record, dump_record, parse_record

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator

    from hicachectl.backends.base import Store
    from hicachectl.move.recorded import RecordedGroups

_MAX_RECORD_BYTES = 64 << 20  # a thousand objects take half a megabyte
_LEFTOVER = re.compile(r"\.[0-9]{6}\.(begun|json|copying)\.tmp")
_OBJECT = re.compile(r"0|[1-9][0-9]{0,8}")
# Not kept: objects written by a server during the removal, and unfinished copies.
_PASSING = re.compile(r"new-[0-9a-f]{16}|\.hicachectl-[0-9a-f]{32}\.tmp")


class Quarantine:
    """Place of a store's quarantine, which need not exist. path: for messages.

    own: whether the quarantine lies in the store's directory, and moves with the store.
    """

    def __init__(self, store: Store, path: Path | None = None) -> None:
        """Use a path, or the store's own quarantine. Raises UsageError if there is neither.

        Links in the path are followed down to the store's directory, not below it.
        """
        self._beside = store if isinstance(store, SideFiles) else None
        side = None if self._beside is None else self._beside.side_directory()
        default = None if side is None else side / "quarantine"
        if path is None and default is None:
            raise no_default(store)
        self.path: Path = path or default  # type: ignore[assignment]
        self._below = None if side is None else _parts_below(self.path, side.parent)
        self.own = (
            side is not None
            and not isinstance(store, Emptied)
            and self._below == (side.name, "quarantine")
        )

    @classmethod
    def of(cls, store: Store, quarantine: str | None) -> Self | None:
        """Return the named quarantine, else the store's own, else None.

        Raises UsageError if the name cannot be a quarantine.
        """
        from hicachectl.backends.urls import parse_url

        beside = store.side_directory() if isinstance(store, SideFiles) else None
        emptied = store if isinstance(store, Emptied) else None
        if quarantine is None:
            return None if beside is None else cls(store)
        url = parse_url(quarantine)
        path = Path(url.path)
        if url.scheme != "file" or (path.exists() and not path.is_dir()):
            raise UsageError(f"--quarantine {quarantine}: not a local directory; give another path")
        if emptied is not None:
            emptied.refuse_inside(path, f"--quarantine {quarantine}")
        elif beside is not None and os.path.realpath(path) == os.path.realpath(beside.parent):
            raise UsageError(
                f"--quarantine {quarantine}: is the store itself; give another directory"
            )
        return cls(store, path)

    @contextmanager
    def opened(self, *, writes: bool) -> Iterator[Directory | None]:
        """Open the directory; yield None if missing. writes: whether files will change.

        Raises StoreUnavailable, also for an OSError in the body, and UntrustedError.
        """
        directory = None
        try:
            directory = self.find(writes=writes)
            yield directory
        except OSError as error:
            why = failed(self.path, "use the quarantine", error, "check its owner and permissions")
            raise StoreUnavailable(why) from error
        finally:
            if directory is not None:
                directory.close()

    def make(self) -> Directory | None:
        """Open the directory; create it if missing. Raises OSError, UntrustedError."""
        return self._open(writes=True, makes=True)

    def find(self, *, writes: bool) -> Directory | None:
        """Open the directory; return None if missing. writes: whether files will change.

        Raises OSError, UntrustedError.
        """
        return self._open(writes=writes, makes=False)

    def _open(self, *, writes: bool, makes: bool) -> Directory | None:
        side = self._beside
        if side is not None and self._below and self._below[0] == side.side_directory().name:
            here = side.open_side_directory(writes=writes, makes=makes)
            return here and here.descend(self._below[1:], makes=makes)
        trust = None if side is None else side.trust(writes=writes)
        return Directory.at(self.path, writes=writes, makes=makes, trust=trust)


def no_default(store: Store) -> UsageError:
    """Return the error for a store without a default quarantine."""
    return UsageError(no_quarantine(store.url, nameable=isinstance(store, Emptied)))


def _parts_below(path: Path, store: Path) -> tuple[str, ...] | None:
    """Return the path's names below the store's directory; None if the path is elsewhere."""
    try:
        here = store.stat()
    except OSError:
        return None
    path = path.absolute()
    for parent in path.parents:
        with suppress(OSError):
            if os.path.samestat(parent.stat(), here):
                return path.relative_to(parent).parts
    return None


class Batch:
    """Record of a batch, and its folder of objects, opened at first use."""

    def __init__(
        self, run: Directory, number: int, record: Record | None = None, *, done: bool = False
    ) -> None:
        """Prepare; nothing is read.

        record: None until `begin`. done: all objects have left the store.
        """
        self.run = run
        self.number = number
        self.done = done
        self._record = record
        self._folder: Directory | None = None

    @property
    def record(self) -> Record:
        """The record, which must exist."""
        assert self._record is not None
        return self._record

    @property
    def name(self) -> str:
        """Name of the folder."""
        return f"{self.number:06d}"

    @property
    def folder(self) -> Directory:
        """Folder of the objects. Raises FileNotFoundError, UntrustedError."""
        if self._folder is None:
            self._folder = self.run.directory(self.name)
        return self._folder

    def take_up(self) -> None:
        """Prepare to finish a batch of a killed run; create its folder if missing."""
        self.run.make_directory(self.name, exist_ok=True).close()
        if _remove(self.run, self.name + COPYING):
            self.run.sync()

    def has_folder(self) -> bool:
        """Return whether the folder exists."""
        return self.run.has(self.name)

    def close(self) -> None:
        """Close the folder."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def held(self) -> dict[int, int]:
        """Return the bytes of each object in the folder, by number.

        Raises UntrustedError for a link, a special file, or an untrusted owner. A file with the
        record's inode may have any owner, because objects keep their owners.
        """
        groups = self.record.groups
        versions = groups.facts.column("version").to_pylist()
        inodes = dict(zip(groups.files.tolist(), map(_inode, versions), strict=True))
        held = {}
        for name, facts in self._entries().items():
            if _OBJECT.fullmatch(name) and stat.S_ISREG(facts.st_mode):
                own = inodes.get(int(name)) == facts.st_ino
                self.folder.check(name, facts, any_owner=own)
                held[int(name)] = facts.st_size
            else:
                self.folder.check(name, facts, any_owner=_PASSING.fullmatch(name) is not None)
        return held

    def _entries(self) -> dict[str, os.stat_result]:
        try:
            return self.folder.entries()
        except FileNotFoundError:
            return {}

    def write(self, groups: RecordedGroups) -> None:
        """Write the done record, which lists these groups' objects in the folder.

        If the folder has none of them, discard the batch.
        """
        here = groups.with_objects(np.isin(groups.files, list(self.held())))
        kept = here.take(np.unique(here.owners))
        if not len(kept):
            self.discard()
            return
        self.clear(keep=set(kept.files.tolist()))
        self.run.write(self.name + DONE, dump_record(replace(self.record, groups=kept)))
        _remove(self.run, self.name + BEGUN)
        self.run.sync()

    def begin(self, record: Record) -> None:
        """Write the record durably, before objects leave the store. Raises OSError."""
        self.run.write(self.name + BEGUN, dump_record(record))
        self._record = record

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Mark the folder as filled with copies of originals in the store.

        The body copies and writes the record; the mark is then removed.
        """
        self.run.write(self.name + COPYING, b"")
        yield
        _remove(self.run, self.name + COPYING)
        self.run.sync()  # before an original leaves the store

    def rewrite(self, groups: RecordedGroups) -> None:
        """Reduce the record to these groups; discard the batch if no group is left."""
        if len(groups):
            record = replace(self.record, groups=groups)
            self.run.write(self.name + (DONE if self.done else BEGUN), dump_record(record))
        else:
            self.discard()

    def discard(self) -> None:
        """Delete the objects, then the record that lists them.

        Raises OSError if the folder cannot be emptied; the record then stays.
        """
        if self.has_folder():
            self.clear()
            self.close()
            self.run.remove_directory(self.name)
            self.run.sync()
        for suffix in (DONE, BEGUN, PURGED):
            _remove(self.run, self.name + suffix)
        self.run.sync()

    def mark_purged(self) -> None:
        """Mark the run as being purged, durably: rename the done record of this batch."""
        _remove(self.run, self.name + BEGUN)  # else it would count once the batch is gone
        self.run.rename(self.name + DONE, self.name + PURGED)
        self.run.sync()

    def clear(self, keep: Container[int] = ()) -> None:
        """Delete temporary files, and objects not in `keep`. Other files stay."""
        for name in self._entries():
            if _PASSING.fullmatch(name) or (_OBJECT.fullmatch(name) and int(name) not in keep):
                _remove(self.folder, name)


class Run:
    """Folder of one run in a quarantine, created at the first batch and locked while open."""

    def __init__(self, quarantine: Quarantine, mark: str = "") -> None:
        """Prepare. mark: 16 hex digits that end the name, so that `marked_runs` finds the run."""
        self._quarantine = quarantine
        self._mark = f"-{mark}" if mark else ""
        self._directory: Directory | None = None
        self._parent: Directory | None = None
        self._name = ""
        self._next = 0

    def new_batch(self) -> Batch:
        """Create a batch with an empty folder; create missing directories. Raises OSError."""
        if self._directory is None:
            self._directory = self._make()
        batch = Batch(self._directory, self._next)
        batch.run.make_directory(batch.name).close()
        self._next += 1
        return batch

    def _make(self) -> Directory:
        parent = self._parent = self._quarantine.make()
        if parent is None:
            raise FileNotFoundError(errno.ENOENT, "the quarantine cannot be created")
        while True:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            self._name = f"{stamp}-{os.urandom(3).hex()}{self._mark}"
            # Until the folder is locked, another process may remove it as a leftover.
            with suppress(FileNotFoundError):
                made = parent.make_directory(self._name)
                if made.lock() and made.is_still(self._name, parent):
                    return made
                made.close()

    def close(self) -> None:
        """Unlock the folder; remove it if it has no batch."""
        if self._directory is not None and self._parent is not None:
            sweep(self._directory, self._parent, self._name)
            self._directory.close()
        if self._parent is not None:
            self._parent.close()


def runs(quarantine: Directory) -> Iterator[tuple[str, Directory]]:
    """Yield name and open directory of each run of a quarantine, oldest first.

    If the directory is itself a run's folder, yield only that run, with the name "". Raises
    OSError, and UntrustedError if an entry is a link, a special file or of an untrusted owner.
    """
    found = quarantine.checked_entries()
    if any(map(RECORD.fullmatch, found)):
        yield "", quarantine
        return
    for name in [name for name, facts in found.items() if stat.S_ISDIR(facts.st_mode)]:
        # Another process may just have removed the run.
        with suppress(FileNotFoundError), quarantine.directory(name) as run:
            yield name, run


def marked_runs(
    quarantine: Directory, marks: Collection[str] | None
) -> Iterator[tuple[str, Directory]]:
    """Yield the runs that have one of the marks, as `runs` does; None: all runs."""
    for name, run in runs(quarantine):
        match = RUN.fullmatch(name)
        if marks is None or (match is not None and match[1] in marks):
            yield name, run


def batches(run: Directory, wanted: Callable[[str], bool] = lambda suffix: True) -> Iterator[Batch]:
    """Yield the batches of a run whose record has a wanted suffix.

    Raises OSError, FormatError if a record is damaged, and UntrustedError as `runs` does.
    """
    numbers: dict[str, str] = {}
    # A killed run may leave two records: the later state sorts last, and counts.
    for name in run.checked_entries():
        if match := RECORD.fullmatch(name):
            numbers[match[1]] = match[2]
    for stem, suffix in numbers.items():
        if wanted(suffix):
            try:
                record = _read_record(run, stem + suffix)
            except FileNotFoundError:
                continue
            with Batch(run, int(stem), record, done=suffix != BEGUN) as batch:
                yield batch


def is_purged(run: Directory) -> bool:
    """Return whether a purge of the run has begun."""
    return any(
        match[2] == PURGED for name in run.checked_entries() if (match := RECORD.fullmatch(name))
    )


def sweep(run: Directory, parent: Directory, name: str) -> list[str]:
    """Delete the leftovers of a killed run, and the run's folder once empty.

    Leftovers are empty folders without a record, unrecorded copies, half-written records, and begun
    records of completed batches. Return the paths of folders with objects but no record, which
    stay. Raises UntrustedError.
    """
    stay: list[str] = []
    with suppress(OSError):
        found = run.entries()
        recorded = {match[1] for match in map(RECORD.fullmatch, found) if match}
        for entry, facts in found.items():
            stem, _, suffix = entry.partition(".")
            is_folder = stat.S_ISDIR(facts.st_mode) and FOLDER.fullmatch(entry)
            if _LEFTOVER.fullmatch(entry) or (f".{suffix}" == BEGUN and stem + DONE in found):
                run.remove(entry)
            elif is_folder and entry not in recorded:
                stay += _swept_folder(run, entry, copied=entry + COPYING in found)
            elif f".{suffix}" == COPYING and (stem in recorded or not run.has(stem)):
                run.remove(entry)
        if name and RUN.fullmatch(name):
            parent.remove_directory(name)
        elif not name:  # the quarantine's path is the folder of this run
            Path(run.path).rmdir()
    return stay


def _swept_folder(run: Directory, name: str, *, copied: bool) -> list[str]:
    """Remove a folder without a record if empty, else return its path.

    copied: the folder has only copies of originals in the store.
    """
    with Batch(run, int(name)) as batch:
        if copied:
            batch.clear()
        if batch.folder.entries():
            return [batch.folder.path]
    run.remove_directory(name)
    return []


def _inode(version: bytes | None) -> int | None:
    if version is None or len(version) != VERSION.size:
        return None
    inode: int = VERSION.unpack(version)[0]
    return inode


def _remove(directory: Directory, name: str) -> bool:
    with suppress(FileNotFoundError):
        directory.remove(name)
        return True
    return False


def _read_record(run: Directory, name: str) -> Record:
    text = run.read(name, _MAX_RECORD_BYTES + 1)
    source = f"{run.path}/{name}"
    if len(text) > _MAX_RECORD_BYTES:
        raise FormatError(
            f"{source}: larger than {_MAX_RECORD_BYTES} bytes, so not a quarantine record; "
            "move the file out of the quarantine"
        )
    return parse_record(text, source=source)
