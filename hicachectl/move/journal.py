"""Journal of a migration, read by `--resume`: one JSON line for each completed batch.

The first line identifies the migration and is durable before the others. The reader drops a cut-off
last line (a crash) and lines with NUL bytes (a power failure); a resumed run finds the pages of
these lines at the destination. Each line has a digest of its text, its offset and the journal's
owner. Altered and foreign lines are refused, because a move deletes pages listed as copied.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.copying import write_bytes
from hicachectl.backends.disk.durable import is_named, lock, make_directories, sync_name
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO, Self

    import pyarrow as pa

    from hicachectl.formats.profile import Profile

FORM = 2
_UNDIGESTED = 1  # form of earlier releases, without digests; still resumed
_HASH_DIGITS = 64
_OWNER_BYTES = 8
_OWNER = re.compile(f"[0-9a-f]{{{2 * _OWNER_BYTES}}}")
_DIGEST_DIGITS = 32
# Fields that later profiles have, and on which no key or page depends.
_LATER_FIELDS = ("prefetch_threshold", "weights", "draft_weights")
_LATER_POOL_FIELD = "compress_ratio=0, "  # without a ratio, a pool is what it was before
_MOST_LINE_BYTES = 64 << 20  # a batch of a million pages


class JournalHeld(UsageError):
    """Another process runs the same migration."""


@dataclass(frozen=True, slots=True)
class JournalFiles:
    """Journals of a migration.

    own: written by this run; kept: even if the run is complete, as for parts of a divided run.
    earlier: of earlier runs; if `own` is one of them, this run extends it. Those of parts on other
    nodes may be lost. owner: of a new journal; "" for a random one. unfinished: owners of earlier
    attempts, by which their unfinished writes are found.
    """

    own: Path
    earlier: tuple[Path, ...] = ()
    kept: bool = False
    owner: str = ""
    unfinished: tuple[str, ...] = ()

    @property
    def next_steps(self) -> tuple[str, str]:
        """What to do if the journal cannot be created, or not be written to."""
        if self.kept:
            return ("check the directory of --run", "make room, then run the part again")
        return (
            "set XDG_STATE_HOME to a writable directory",
            "check its disk, then continue with --resume",
        )


@dataclass(slots=True)
class Progress:
    """Pages that earlier runs completed, by the name of their route.

    owners: of each journal, the mark on its run's unfinished writes; "" without a whole line.
    copied: whole at the destination. verified: also compared.
    removed: copied, then removed from the source.
    """

    owners: dict[Path, str] = field(default_factory=dict)
    copied: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    verified: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    removed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def marks(self) -> list[str]:
        """Marks on unfinished writes of earlier runs."""
        return [owner for owner in self.owners.values() if owner]

    @property
    def pages(self) -> int:
        """Number of copied pages."""
        return sum(map(len, self.copied.values()))

    def unremoved(self, route: str) -> set[str]:
        """Return pages copied but not removed from the source."""
        return self.copied[route] - self.removed[route]


def profile_text(profile: Profile) -> str:
    """Return a profile's text in a journal's identity, the same in all releases.

    The identity names the journal, so the text keeps two fields of earlier profiles, and lacks the
    fields of later ones.
    """
    texts = []
    for name in profile.__struct_fields__:
        if name in _LATER_FIELDS:
            continue
        if name == "tag":
            texts += ["unified_head_group=0", "unified_layer_partition=0"]
        text = repr(getattr(profile, name))
        texts.append(f"{name}={text.replace(_LATER_POOL_FIELD, '') if name == 'pools' else text}")
    return f"Profile({', '.join(texts)})"


def journal_path(
    identity: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> tuple[Path, str]:
    """Return the path of a migration's journal in the user's state directory (XDG), and a remark.

    Without a writable home, the path is in a private directory below TMPDIR, as the remark says;
    otherwise the remark is "". Raises UsageError if others can open that directory.
    """
    text = json.dumps(identity, sort_keys=True)
    name = Path("migrations", hashlib.sha256(text.encode()).hexdigest()[:32] + ".jsonl")
    base = Path(environ.get("XDG_STATE_HOME") or "")
    if base.is_absolute():
        return base / "hicachectl" / name, ""
    try:
        home = Path(environ.get("HOME") or Path.home())
    except RuntimeError:  # a user without a home
        home = Path()
    state = home / ".local" / "state" / "hicachectl"
    if home.is_absolute() and _can_be_written_to(state):
        return state / name, ""
    own = Path(tempfile.gettempdir(), f"hicachectl-{os.geteuid()}")
    try:
        with suppress(FileExistsError):
            own.mkdir(0o700)
        found = own.lstat()
    except OSError as error:
        next_step = "set XDG_STATE_HOME to a writable directory"
        raise UsageError(failed(own, "use the directory", error, next_step)) from error
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{own}: must be your own directory, closed to others (mode 0700); set XDG_STATE_HOME "
            "to another directory"
        )
    remark = (
        f"{state}: not writable, so the journal is in {own}; set XDG_STATE_HOME to a directory "
        "that survives a restart"
    )
    return own / name, remark


def _can_be_written_to(directory: Path) -> bool:
    """Return whether a directory, or its nearest existing parent, is writable."""
    while not os.path.lexists(directory):
        directory = directory.parent
    return os.access(directory, os.W_OK | os.X_OK) and directory.is_dir()


def read_journals(paths: Iterable[Path], identity: Mapping[str, Any]) -> Progress | None:
    """Return the progress of earlier runs; None if there is no journal.

    Raises FormatError if a journal is damaged or another migration's, UsageError if unreadable.
    """
    progress = Progress()
    for path in paths:
        try:
            descriptor = _opened(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        except OSError as error:
            next_step = "check its owner and permissions, or move the file away"
            raise UsageError(failed(path, "read the journal", error, next_step)) from error
        with os.fdopen(descriptor, "rb") as stream:
            progress.owners[path] = _read(stream, path, identity, progress)
    return progress if progress.owners else None


def _read(stream: BinaryIO, path: Path, identity: Mapping[str, Any], progress: Progress) -> str:
    """Add a journal's pages to the progress; return its owner, "" without a whole line."""
    owner, form = "", None
    for number, (start, line) in enumerate(_whole_lines(stream, path), 1):
        if b"\0" in line:  # torn by a power failure, maybe joined to the next line
            if number == 1:
                break
            continue
        entry = _parsed(line, path, number)
        if number == 1:
            form = entry.get("migration")
            owner = _owner(entry, identity, path)
        digest = entry.pop("digest", None)
        undigested = form == _UNDIGESTED and digest is None
        if not undigested and digest != _digest(entry, owner, start):
            raise FormatError(
                f"{path}: line {number} was altered; move the file away and run again, which "
                "checks the destination instead"
            )
        if number > 1:
            _add(progress, entry, path, number)
    return owner


def _opened(path: Path, flags: int) -> int:
    """Open a journal, never waiting for a FIFO. Raises OSError, also if not a regular file."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file")


def _whole_lines(stream: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and text of each line; skip a cut-off last line."""
    start = 0
    while line := stream.readline(_MOST_LINE_BYTES):
        if not line.endswith(b"\n"):
            if len(line) == _MOST_LINE_BYTES:
                raise FormatError(f"{path}: not a journal; move the file away")
            return
        yield start, line[:-1]
        start += len(line)


def _owner(head: Mapping[str, Any], identity: Mapping[str, Any], path: Path) -> str:
    """Return the first line's owner. Raises FormatError for another migration's journal."""
    owner = head.get("owner")
    is_ours = head.get("migration") in (FORM, _UNDIGESTED) and head.get("identity") == identity
    if not is_ours or not isinstance(owner, str) or not _OWNER.fullmatch(owner):
        raise FormatError(f"{path}: not the journal of this migration; move the file away")
    return owner


def _digest(entry: Mapping[str, Any], owner: str, start: int) -> str:
    text = json.dumps([owner, start, entry])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]


def _add(progress: Progress, entry: Mapping[str, Any], path: Path, number: int) -> None:
    pages, route, what = _pages(entry, path, number), str(entry.get("route")), entry.get("what")
    if what == "removed":
        progress.removed[route].update(pages)
        return
    progress.copied[route].update(pages)
    if what == "verified":
        progress.verified[route].update(pages)


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: line {number}: not JSON; move the file away") from error
    if not isinstance(entry, dict):
        raise FormatError(f"{path}: line {number}: not a JSON object; move the file away")
    return entry


def _pages(entry: Mapping[str, Any], path: Path, number: int) -> list[str]:
    text = entry.get("pages")
    if not isinstance(text, str) or len(text) % _HASH_DIGITS:
        raise FormatError(
            f"{path}: line {number}: `pages` is not a list of page hashes; move the file away"
        )
    return [text[at : at + _HASH_DIGITS] for at in range(0, len(text), _HASH_DIGITS)]


class Journal:
    """Journal for writing from several threads. A killed process loses no line.

    One process at a time holds the lock.
    owner: 16 hex digits, the same in all runs.
    """

    def __init__(
        self,
        files: JournalFiles,
        identity: Mapping[str, Any],
        *,
        earlier: Progress | None,
        fresh: bool,
        durable: bool,
    ) -> None:
        """Open a run's own journal; fresh: empty it first.

        earlier: result of `read_journals`. durable: sync each line; otherwise a power failure may
        lose all lines except the first; a resumed run reads their pages again.

        Raises UsageError if the journal cannot be written, JournalHeld if locked.
        """
        self.path = path = files.own
        self._next_steps = files.next_steps
        owner = None if earlier is None else earlier.owners.get(path)
        self.owner = owner or files.owner or os.urandom(_OWNER_BYTES).hex()
        self._durable = durable
        self._lock = threading.Lock()
        self._noted = owner is not None and not fresh
        try:
            make_directories(path.parent)
            self._file = _held(path)
        except OSError as error:
            raise UsageError(
                failed(path, "write the journal", error, self._next_steps[0])
            ) from error
        try:
            if fresh or owner == "":
                os.ftruncate(self._file, 0)
            self._cut_torn_line()
            if not os.lseek(self._file, 0, os.SEEK_END):
                head = {"migration": FORM, "identity": identity, "owner": self.owner}
                self._append(head, durable=True)
                sync_name(path)
        except BaseException:
            os.close(self._file)
            raise

    def copied(self, route: str, pages: pa.StringArray, *, verified: bool) -> None:
        """Record copied pages. verified: also compared at the destination."""
        self._note(route, pages.to_pylist(), "verified" if verified else "copied")

    def removed(self, route: str, pages: Sequence[str]) -> None:
        """Record pages removed from the source."""
        self._note(route, pages, "removed")

    def _note(self, route: str, pages: Sequence[str], what: str) -> None:
        if pages:
            entry = {"route": route, "what": what, "pages": "".join(pages)}
            self._append(entry, durable=self._durable)
            self._noted = True

    def _append(self, entry: Mapping[str, Any], *, durable: bool) -> None:
        with self._lock:
            end = os.lseek(self._file, 0, os.SEEK_END)
            digest = _digest(entry, self.owner, end)
            line = json.dumps({**entry, "digest": digest}).encode() + b"\n"
            try:
                write_bytes(memoryview(line), self._file)
                if durable:
                    os.fdatasync(self._file)
            except OSError as error:
                with suppress(OSError):  # the next line must not join a torn line
                    os.ftruncate(self._file, end)
                raise UsageError(
                    failed(self.path, "write the journal", error, self._next_steps[1])
                ) from error

    def _cut_torn_line(self) -> None:
        """Drop a cut-off last line, which the next would join."""
        size = os.lseek(self._file, 0, os.SEEK_END)
        end = size
        while end:
            step = min(end, 1 << 16)
            found = os.pread(self._file, step, end - step).rfind(b"\n")
            if found >= 0:
                end = end - step + found + 1
                break
            end -= step
        if end != size:
            os.ftruncate(self._file, end)

    def end(self) -> None:
        """Mark the migration as complete: `close` then removes the journal."""
        self._noted = False

    def close(self) -> None:
        """Close the journal; remove it if the migration is complete or it has no entries."""
        if not self._noted:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _held(path: Path) -> int:
    """Open and lock a journal. Raises OSError, JournalHeld."""
    while True:
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            if not lock(descriptor, optional=True):
                raise JournalHeld(
                    f"{path}: another process is running this migration; run again after it has "
                    "ended"
                )
            if is_named(descriptor, str(path)):  # else the previous holder has removed it
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
