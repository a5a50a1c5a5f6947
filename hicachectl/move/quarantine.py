"""The quarantine on disk: objects taken out of a store, and a record of why and where from.

    DIR/RUN/000000.begun    record of groups that are being taken away
    DIR/RUN/000000.json     the record once all of them are: what the quarantine holds
    DIR/RUN/000000/17       an object; its record says which
    DIR/RUN/000000.copying  empty; the folder is being filled with copies and has no record yet

A record is durable before anything leaves the store, so that the next run can finish what one
that was killed had begun. A folder with objects and without a record, unless a `.copying` file
says that its originals are all in the store, may hold the only copies: nothing deletes it.
Objects are numbered: no path is made from a key. A run holds a lock (flock) on its folder.
Records are JSON and can be read without this tool.

Everything is opened below the quarantine's own directory without following links, and only
where its owner is trusted (`backends.disk.directory`).
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

from hicachectl.backends.capabilities import SideFiles
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.files import VERSION
from hicachectl.formats.errors import FormatError, StoreUnavailable, UsageError
from hicachectl.formats.quarantine import BEGUN, COPYING, DONE, FOLDER, RECORD, RUN
from hicachectl.move.record_file import Record, dump_record, parse_record

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.move.recorded import RecordedGroups

_MAX_RECORD_BYTES = 64 << 20  # a thousand objects are half a megabyte
_LEFTOVER = re.compile(r"\.[0-9]{6}\.(begun|json|copying)\.tmp")
_OBJECT = re.compile(r"0|[1-9][0-9]{0,8}")
# Objects that came meanwhile, and unfinished copies.
_PASSING = re.compile(r"new-[0-9a-f]{16}|\.hicachectl-[0-9a-f]{32}\.tmp")


class Quarantine:
    """Where the quarantine of a store is; it need not be there yet.

    path: for messages. own: it is the one that lies in the store itself and moves with it.
    """

    def __init__(self, store: Store, path: Path | None = None) -> None:
        """Use a path that an option names, or the store's own quarantine. Raises UsageError.

        A path that leads through the store's directory is followed by links up to there only.
        """
        self._beside = store if isinstance(store, SideFiles) else None
        side = None if self._beside is None else self._beside.side_directory()
        default = None if side is None else side / "quarantine"
        if path is None and default is None:
            raise UsageError(f"{store.url}: name a directory for its objects: --quarantine DIR")
        self.path: Path = path or default  # type: ignore[assignment]
        self._below = None if side is None else _parts_below(self.path, side.parent)
        self.own = side is not None and self._below == (side.name, "quarantine")

    @classmethod
    def of(cls, store: Store, quarantine: str | None) -> Self | None:
        """Return a store's quarantine: the one named, else the one beside the store.

        None where none is named and the store has no place. Raises UsageError where it cannot be.
        """
        from hicachectl.backends.urls import parse_url

        beside = store.side_directory() if isinstance(store, SideFiles) else None
        if quarantine is None:
            return None if beside is None else cls(store)
        url = parse_url(quarantine)
        path = Path(url.path)
        if url.scheme != "file" or (path.exists() and not path.is_dir()):
            raise UsageError(f"--quarantine {quarantine}: must be a directory")
        if beside is not None and os.path.realpath(path) == os.path.realpath(beside.parent):
            raise UsageError(f"--quarantine {quarantine}: is the store itself")
        return cls(store, path)

    @contextmanager
    def opened(self, *, writes: bool) -> Iterator[Directory | None]:
        """Open its directory, if there is one; writes: files in it are to be changed.

        Raises StoreUnavailable, also for an OSError inside, and UntrustedError.
        """
        directory = None
        try:
            directory = self.find(writes=writes)
            yield directory
        except OSError as error:
            raise StoreUnavailable(f"cannot work in {self.path}: {error.strerror}") from error
        finally:
            if directory is not None:
                directory.close()

    def make(self) -> Directory | None:
        """Open its directory, made where there is none. Raises OSError, UntrustedError."""
        return self._open(writes=True, makes=True)

    def find(self, *, writes: bool) -> Directory | None:
        """Open its directory; None where there is none. Raises OSError, UntrustedError.

        writes: files in it are to be changed.
        """
        return self._open(writes=writes, makes=False)

    def _open(self, *, writes: bool, makes: bool) -> Directory | None:
        side = self._beside
        if side is not None and self._below and self._below[0] == side.side_directory().name:
            here = side.open_side_directory(writes=writes, makes=makes)
            names: Sequence[str] = self._below[1:]
        else:
            here, names = self._named(writes, makes)
        for name in names:
            if here is None:
                return None
            with here:
                if makes:
                    here = here.make_directory(name, exist_ok=True)
                else:
                    here = here.directory(name) if here.has(name) else None
        return here

    def _named(self, writes: bool, makes: bool) -> tuple[Directory | None, Sequence[str]]:
        """Open the deepest directory of the path that is there, and name the others."""
        found, missing = self.path.absolute(), list[str]()
        while not found.is_dir() and found != found.parent:
            missing.insert(0, found.name)
            found = found.parent
        if missing and not makes:
            return None, ()
        trust = None if self._beside is None else self._beside.trust(writes=writes)
        return Directory.named(str(found), writes=writes, trust=trust), missing


def _parts_below(path: Path, store: Path) -> tuple[str, ...] | None:
    """Return the names that lead from the store's directory to a path; None where none do."""
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
    """The groups of one record, on disk. Its folder is opened at the first use."""

    def __init__(
        self, run: Directory, number: int, record: Record | None = None, *, done: bool = False
    ) -> None:
        """Name a batch of a run. record: what was read; None: `begin` writes one."""
        self.run = run
        self.number = number
        self.done = done
        self._record = record
        self._folder: Directory | None = None

    @property
    def record(self) -> Record:
        """The record, of a batch that has one."""
        assert self._record is not None
        return self._record

    @property
    def name(self) -> str:
        """Name of its folder in the run."""
        return f"{self.number:06d}"

    @property
    def folder(self) -> Directory:
        """Where its objects are. Raises FileNotFoundError, UntrustedError."""
        if self._folder is None:
            self._folder = self.run.directory(self.name)
        return self._folder

    def take_up(self) -> None:
        """Go on with a batch that a killed run has begun: its folder is there afterwards."""
        self.run.make_directory(self.name, exist_ok=True).close()
        if _remove(self.run, self.name + COPYING):
            self.run.sync()

    def has_folder(self) -> bool:
        """Say whether the folder is there."""
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
        """Bytes of each object that is here, by number.

        Raises UntrustedError for a link, a special file, or a file whose owner is not trusted
        and which is not the very file that the record names: an object keeps its owner.
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
        """Record as done what of these groups is here; without any, let go of the batch."""
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
        """Write the batch's record, durably, before anything leaves the store. Raises OSError."""
        self.run.write(self.name + BEGUN, dump_record(record))
        self._record = record

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Say, until there is a record, that the originals of all copies are in the store."""
        self.run.write(self.name + COPYING, b"")
        yield
        _remove(self.run, self.name + COPYING)
        self.run.sync()  # before an original leaves the store

    def rewrite(self, groups: RecordedGroups) -> None:
        """Replace the record by one of these groups only; without any, let go of the batch."""
        if len(groups):
            record = replace(self.record, groups=groups)
            self.run.write(self.name + (DONE if self.done else BEGUN), dump_record(record))
        else:
            self.discard()

    def discard(self) -> None:
        """Delete the objects and then the record, which until then says what to delete.

        Raises OSError where an object or anything else stays; the record stays as well.
        """
        if self.has_folder():
            self.clear()
            self.close()
            self.run.remove_directory(self.name)
            self.run.sync()
        for suffix in (DONE, BEGUN):
            _remove(self.run, self.name + suffix)
        self.run.sync()

    def clear(self, keep: Container[int] = ()) -> None:
        """Delete objects and passing files; what this tool does not name stays."""
        for name in self._entries():
            if _PASSING.fullmatch(name) or (_OBJECT.fullmatch(name) and int(name) not in keep):
                _remove(self.folder, name)


class Run:
    """One run's folder in a quarantine, locked while it is open; made when first needed."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._directory: Directory | None = None
        self._parent: Directory | None = None
        self._name = ""
        self._next = 0

    def new_batch(self) -> Batch:
        """Make a batch with an empty folder and no record yet.

        Raises OSError; the quarantine's own directory is made where there is none.
        """
        if self._directory is None:
            self._directory = self._make()
        batch = Batch(self._directory, self._next)
        batch.run.make_directory(batch.name).close()
        self._next += 1
        return batch

    def _make(self) -> Directory:
        parent = self._parent = self._quarantine.make()
        if parent is None:
            raise FileNotFoundError(errno.ENOENT, "no place for it")
        while True:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            self._name = f"{stamp}-{os.urandom(3).hex()}"
            # Before it is locked another process can take it for a leftover, and remove it.
            with suppress(FileNotFoundError):
                made = parent.make_directory(self._name)
                if made.lock() and made.is_still(self._name, parent):
                    return made
                made.close()

    def close(self) -> None:
        """Unlock the folder, or remove it where it holds no batch."""
        if self._directory is not None and self._parent is not None:
            sweep(self._directory, self._parent, self._name)
            self._directory.close()
        if self._parent is not None:
            self._parent.close()


def runs(quarantine: Directory) -> Iterator[tuple[str, Directory]]:
    """Give the runs of a quarantine one after the other, oldest first: name, open directory.

    A run's own folder is a quarantine of that run alone, named "". Raises UntrustedError for any
    entry that is a link, a special file or of an owner who is not trusted; OSError.
    """
    found = quarantine.checked_entries()
    if any(map(RECORD.fullmatch, found)):
        yield "", quarantine
        return
    for name in [name for name, facts in found.items() if stat.S_ISDIR(facts.st_mode)]:
        # Another process may just have finished with it.
        with suppress(FileNotFoundError), quarantine.directory(name) as run:
            yield name, run


def batches(run: Directory, wanted: Callable[[str], bool] = lambda suffix: True) -> Iterator[Batch]:
    """Read the records of a run whose suffix is wanted, a batch at a time.

    Raises FormatError on a damaged record, UntrustedError for what is no plain entry of a trusted
    owner, OSError.
    """
    numbers: dict[str, str] = {}
    # Where a run was killed between the two, the done record comes last and counts.
    for name in run.checked_entries():
        if match := RECORD.fullmatch(name):
            numbers[match[1]] = match[2]
    for stem, suffix in numbers.items():
        if wanted(suffix):
            try:
                record = _read_record(run, stem + suffix)
            except FileNotFoundError:
                continue
            with Batch(run, int(stem), record, done=suffix == DONE) as batch:
                yield batch


def sweep(run: Directory, parent: Directory, name: str) -> list[str]:
    """Delete what a killed run left over, and the run's folder when it is empty.

    Deleted are empty folders without a record, folders of copies that were not recorded yet,
    half-written records, and the begun record of a batch that is done. Folders with objects and
    without a record stay: their paths are returned. Raises UntrustedError.
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
        elif not name:  # an option named this very run
            Path(run.path).rmdir()
    return stay


def _swept_folder(run: Directory, name: str, *, copied: bool) -> list[str]:
    """Remove a folder without a record, if it is empty; else return its path.

    copied: the folder has copies only, of originals that are in the store.
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
    """Remove a file; whether it was there."""
    with suppress(FileNotFoundError):
        directory.remove(name)
        return True
    return False


def _read_record(run: Directory, name: str) -> Record:
    text = run.read(name, _MAX_RECORD_BYTES + 1)
    source = f"{run.path}/{name}"
    if len(text) > _MAX_RECORD_BYTES:
        raise FormatError(f"{source}: larger than {_MAX_RECORD_BYTES} bytes, not a record")
    return parse_record(text, source=source)
