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
import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hicachectl.formats.errors import FormatError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

FORM = 1
BEGUN, DONE = ".begun", ".json"
_MAX_RECORD_BYTES = 256 << 20  # a thousand objects are half a megabyte
_PAGE = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"\d{6}")
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})

Mode = Literal["quarantine", "delete"]


@dataclass(frozen=True, slots=True)
class Slot:
    """An object that a page of a deployment can have; its key is prefix, page hash, suffix.

    required: a page without it is not whole.
    trailing: number of a set that a page has all or nothing of; None outside of such sets.
    sidecars: of an anchor, the slots that its writer has written before it.
    """

    prefix: str
    suffix: str
    anchor: bool
    required: bool
    trailing: int | None = None
    sidecars: tuple[int, ...] = ()


Shape = tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store lists of an object: how to tell it from a later one under its key."""

    nbytes: int | None
    mtime_ns: int | None
    version: bytes | None

    def same(self, other: Facts) -> bool:
        """Whether both are the same object; where a store has no versions, size and time decide."""
        if self.version is not None and other.version is not None:
            return self.version == other.version
        return (self.nbytes, self.mtime_ns) == (other.nbytes, other.mtime_ns)


@dataclass(frozen=True, slots=True)
class TakenObject:
    """One object of a group, as it was.

    slot: index into the group's shape. file: its number in the batch's folder.
    unwanted: the group is taken away because of this object.
    """

    slot: int
    file: int
    unwanted: bool
    facts: Facts
    blake3: str | None = None


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A page group that is taken away.

    absent: slots whose absence is not why. findings: why, with the members of `verify`'s.
    """

    page: str
    model: str
    tag: str
    shape: Shape
    objects: tuple[TakenObject, ...]
    absent: frozenset[int] = frozenset()
    findings: tuple[Mapping[str, str | None], ...] = ()

    def key(self, slot: int) -> bytes:
        """Spell the key of one of its objects."""
        return f"{self.shape[slot].prefix}{self.page}{self.shape[slot].suffix}".encode()

    @property
    def keys(self) -> list[bytes]:
        """The keys of all its slots."""
        return [self.key(slot) for slot in range(len(self.shape))]


@dataclass(frozen=True, slots=True)
class Record:
    """What one batch took from where."""

    store: str
    scheme: str
    mode: Mode
    began: float
    groups: tuple[TakenGroup, ...]


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
        kept = [
            _with_objects(group, [o for o in group.objects if o.file in held]) for group in groups
        ]
        kept = [group for group in kept if group.objects]
        if not kept:
            self.discard()
            return
        wanted = {object_.file for group in kept for object_ in group.objects}
        for entry in self.folder.iterdir():
            if not entry.name.isdecimal() or int(entry.name) not in wanted:
                entry.unlink()
        record = _with_groups(self.record, kept)
        write_durably(self.path(DONE), dump_record(record))
        self.path(BEGUN).unlink(missing_ok=True)
        sync_directory(self.run)

    def rewrite(self, groups: Sequence[TakenGroup]) -> None:
        """Replace the record by one of these groups only; without any, let go of the batch."""
        if groups:
            record = _with_groups(self.record, list(groups))
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
                self._lock = lock_run(path)
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


def lock_run(run: Path) -> int | None:
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


def dump_record(record: Record) -> bytes:
    """Write a record as JSON, a group a line."""
    shapes: dict[int, int] = {}
    distinct: list[Shape] = []
    groups = []
    for group in record.groups:
        if id(group.shape) not in shapes:
            shapes[id(group.shape)] = len(distinct)
            distinct.append(group.shape)
        groups.append(json.dumps(_group_to_mapping(group, shapes[id(group.shape)])))
    head = {
        "quarantine": FORM,
        "store": record.store,
        "scheme": record.scheme,
        "mode": record.mode,
        "began": record.began,
        "shapes": [[_slot_to_mapping(slot) for slot in shape] for shape in distinct],
    }
    body = ",\n".join(groups)
    return f'{json.dumps(head)[:-1]}, "groups": [\n{body}\n]}}\n'.encode()


def parse_record(text: bytes, *, source: str) -> Record:
    """Read a record. Raises FormatError."""
    try:
        document = json.loads(text)
        if document["quarantine"] != FORM:
            raise FormatError(
                f"{source}: a record of form {document['quarantine']!r}; this release knows {FORM}"
            )
        if document["mode"] not in ("quarantine", "delete"):
            raise ValueError("mode")
        shapes = [tuple(_parse_slot(slot) for slot in shape) for shape in document["shapes"]]
        groups = tuple(_parse_group(group, shapes) for group in document["groups"])
        numbers = [object_.file for group in groups for object_ in group.objects]
        if len(set(numbers)) != len(numbers):
            raise ValueError("a file number twice")
        return Record(
            _text(document["store"]),
            _text(document["scheme"]),
            document["mode"],
            float(document["began"]),
            groups,
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise FormatError(f"{source}: not the record of a quarantine ({error})") from error


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


def _with_objects(group: TakenGroup, objects: list[TakenObject]) -> TakenGroup:
    return TakenGroup(
        group.page,
        group.model,
        group.tag,
        group.shape,
        tuple(objects),
        group.absent,
        group.findings,
    )


def _with_groups(record: Record, groups: list[TakenGroup]) -> Record:
    return Record(record.store, record.scheme, record.mode, record.began, tuple(groups))


def _slot_to_mapping(slot: Slot) -> dict[str, Any]:
    return {
        "prefix": slot.prefix,
        "suffix": slot.suffix,
        "anchor": slot.anchor,
        "required": slot.required,
        "trailing": slot.trailing,
        "sidecars": list(slot.sidecars),
    }


def _group_to_mapping(group: TakenGroup, shape: int) -> dict[str, Any]:
    return {
        "page": group.page,
        "model": group.model,
        "tag": group.tag,
        "findings": [dict(finding) for finding in group.findings],
        "shape": shape,
        "absent": sorted(group.absent),
        "objects": [
            {
                "key": group.key(taken.slot).decode(),
                "slot": taken.slot,
                "file": taken.file,
                "unwanted": taken.unwanted,
                "nbytes": taken.facts.nbytes,
                "mtime_ns": taken.facts.mtime_ns,
                "version": None if taken.facts.version is None else taken.facts.version.hex(),
                "blake3": taken.blake3,
            }
            for taken in group.objects
        ],
    }


def _parse_slot(table: Mapping[str, Any]) -> Slot:
    return Slot(
        _text(table["prefix"]),
        _text(table["suffix"]),
        bool(table["anchor"]),
        bool(table["required"]),
        _optional_count(table["trailing"]),
        tuple(_count(slot) for slot in table["sidecars"]),
    )


def _parse_group(table: Mapping[str, Any], shapes: Sequence[Shape]) -> TakenGroup:
    page = _text(table["page"])
    if not _PAGE.fullmatch(page):
        raise ValueError(f"page {page!r}")
    shape = shapes[_count(table["shape"])]
    absent = frozenset(_count(slot) for slot in table["absent"])
    group = TakenGroup(
        page,
        _text(table["model"]),
        _text(table["tag"]),
        shape,
        tuple(_parse_object(entry) for entry in table["objects"]),
        absent,
        tuple(_parse_finding(finding) for finding in table["findings"]),
    )
    slots = [taken.slot for taken in group.objects]
    if len(set(slots)) != len(slots) or any(slot >= len(shape) for slot in (*slots, *absent)):
        raise ValueError(f"page {page}: its objects do not fit its shape")
    for taken, entry in zip(group.objects, table["objects"], strict=True):
        if group.key(taken.slot) != _text(entry["key"]).encode():
            raise ValueError(f"key {entry['key']!r} is not that of its slot")
    return group


def _parse_object(table: Mapping[str, Any]) -> TakenObject:
    version, digest = table["version"], table["blake3"]
    return TakenObject(
        slot=_count(table["slot"]),
        file=_count(table["file"]),
        unwanted=bool(table["unwanted"]),
        facts=Facts(
            nbytes=_optional_count(table["nbytes"]),
            mtime_ns=None if table["mtime_ns"] is None else int(table["mtime_ns"]),
            version=None if version is None else bytes.fromhex(version),
        ),
        blake3=None if digest is None else _text(digest),
    )


def _parse_finding(table: Mapping[str, Any]) -> dict[str, str | None]:
    return {_text(name): None if value is None else _text(value) for name, value in table.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    value.encode()  # ValueError for half a surrogate pair, which nothing could print
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r:.60} is no count")
    return value


def _optional_count(value: object) -> int | None:
    return None if value is None else _count(value)
