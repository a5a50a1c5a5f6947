"""What a migration has done, a line for each batch: written before the next, read by `--resume`.

Lines are JSON. The first says which migration it is; a line that was cut off by a crash is the
last, and is dropped: what it would have said is found out again from the destination.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    import pyarrow as pa

FORM = 1
_HASH_DIGITS = 64


@dataclass(slots=True)
class Progress:
    """What earlier runs have done: pages of each route, by its name.

    copied: whole at the destination, and compared where that was asked for. removed: taken from
    the source since.
    """

    copied: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    removed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def pages(self) -> int:
        """How many pages were copied."""
        return sum(map(len, self.copied.values()))

    def unremoved(self, route: str) -> set[str]:
        """Pages that were copied and are still to be taken from the source."""
        return self.copied[route] - self.removed[route]


def journal_path(identity: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Path:
    """Name the journal of a migration, in the user's state directory (XDG base directories)."""
    text = json.dumps(identity, sort_keys=True)
    base = Path(environ.get("XDG_STATE_HOME") or "")
    if not base.is_absolute():
        base = Path(environ.get("HOME") or Path.home()) / ".local" / "state"
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return base / "hicachectl" / "migrations" / f"{name}.jsonl"


def read_journal(path: Path, identity: Mapping[str, Any]) -> Progress | None:
    """Read what earlier runs of a migration have done; None where there is no journal.

    Raises FormatError for a journal of something else, UsageError where it cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    progress = Progress()
    if len(lines) < 2:  # not even the head was written whole
        return progress
    head = _parsed(lines[0], path, 1)
    if head.get("migration") != FORM or head.get("identity") != identity:
        raise FormatError(f"{path}: not the journal of this migration; move it out of the way")
    for number, line in enumerate(lines[1:-1], 2):
        entry = _parsed(line, path, number)
        pages = _pages(entry, path, number)
        which = progress.removed if entry.get("removed") else progress.copied
        which[str(entry.get("route"))].update(pages)
    return progress


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: line {number}: not JSON; move the file away") from error
    if not isinstance(entry, dict):
        raise FormatError(f"{path}: line {number}: not an object")
    return entry


def _pages(entry: dict[str, Any], path: Path, number: int) -> list[str]:
    text = entry.get("pages")
    if not isinstance(text, str) or len(text) % _HASH_DIGITS:
        raise FormatError(f"{path}: line {number}: no page hashes")
    return [text[at : at + _HASH_DIGITS] for at in range(0, len(text), _HASH_DIGITS)]


class Journal:
    """A journal that is written to, from several threads; each line is durable at once."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, fresh: bool) -> None:
        """Open a journal, emptied if `fresh`. Raises UsageError where it cannot be written."""
        self.path = path
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        self._cut_torn_line()
        if not os.lseek(self._file, 0, os.SEEK_END):
            self._append({"migration": FORM, "identity": identity})

    def copied(self, route: str, pages: pa.StringArray) -> None:
        """Note pages that are at the destination for good."""
        self._note(route, pages.to_pylist(), removed=False)

    def removed(self, route: str, pages: Sequence[str]) -> None:
        """Note pages that were taken from the source."""
        self._note(route, pages, removed=True)

    def _note(self, route: str, pages: Sequence[str], *, removed: bool) -> None:
        if pages:
            self._append({"route": route, "removed": removed, "pages": "".join(pages)})

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self._lock:
            line = json.dumps(entry).encode() + b"\n"
            while line:
                line = line[os.write(self._file, line) :]
            os.fdatasync(self._file)

    def _cut_torn_line(self) -> None:
        """Drop a last line that a crash has cut off, so that the next does not join it."""
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
        os.lseek(self._file, 0, os.SEEK_END)

    def close(self, *, delete: bool = False) -> None:
        """Close it; delete: it has served its purpose."""
        os.close(self._file)
        if delete:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
