"""Commands that write, and what must hold of every state that a power failure leaves.

A `Writer` prepares directories, names the command to record, finds what is wrong with a crash
state by looking at its files alone (`violations`), and runs what an operator would run next
(`recover`).
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, ClassVar

from hicachectl.__main__ import run
from hicachectl.formats.catalog import read_catalog
from hicachectl.formats.errors import FormatError
from tests.hicachectl import stores
from tests.hicachectl.repairs import content, dsa_store, indexer, kv, shorten
from tests.hicachectl.stores import page
from tests.power.crash_states import Kind
from tests.power.recording import Recording, record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hicachectl.repairs import Content
    from tests.power.crash_states import State

PAGES = 4
_BUFFER = ("--buffer-bytes", "16MiB")


class Writer(ABC):
    """One command. kinds: syncs that it cannot do without, each under the name of a test."""

    inject: ClassVar[str | None] = None
    kinds: ClassVar[dict[str, Kind]] = {}

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.store = folder / "disk" / "store"
        self.profile = folder / "profile.toml"
        self.folder = folder

    @property
    def roots(self) -> list[Path]:
        """Return the file systems of the command, its HOME aside."""
        return [self.store.parent]

    @abstractmethod
    def arguments(self) -> list[object]:
        """Spell the command."""

    def prepare(self) -> None:
        """Make what the command works on."""
        for root in (*self.roots, self.home):
            root.mkdir(parents=True, exist_ok=True)
        self.profile.write_text(stores.DSA)
        dsa_store(self.store, PAGES)
        self.original = content(self.store)

    def record(self) -> Recording:
        """Run the command once, recorded. Its exit code is 0."""
        self.prepare()
        command = [sys.executable, "-m", "hicachectl", "-q", *self.arguments()]
        recording = record(command, self.roots, home=self.home, inject=self.inject)
        assert recording.exit_code == 0, recording.stderr
        return recording

    def violations(self, state: State) -> Iterator[str]:
        """Name what is wrong with a state."""
        yield from self.wrong(state, _document(state.printed))

    @abstractmethod
    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        """Name what is wrong; document: what the command had printed, once that is whole."""

    @abstractmethod
    def recover(self, state: State) -> Iterator[str]:
        """Run what an operator runs next on the files of a state; name what is wrong then."""

    def objects(self, directory: Path | None = None) -> Content:
        """Return the objects of a store; unfinished files of other names aside."""
        directory = directory or self.store
        there = content(directory) if directory.is_dir() else {}
        return {name: value for name, value in there.items() if name in self.original}

    def run(self, *arguments: object, codes: tuple[int, ...] = (0,)) -> Iterator[str]:
        """Run a command in this process; complain of any other exit code."""
        code, text = run_here(*arguments, home=self.home)
        if code not in codes:
            yield f"{' '.join(map(str, arguments[:2]))}: exit code {code}: {text}"


def run_here(*arguments: object, home: Path) -> tuple[int, str]:
    """Run a command in this process; its exit code and stderr."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    error = io.StringIO()
    before, os.environ["HOME"] = os.environ.get("HOME"), str(home)
    try:
        with redirect_stdout(out), redirect_stderr(error):
            code = run(["-q", *map(str, arguments)])
    finally:
        if before is not None:
            os.environ["HOME"] = before
    return code, error.getvalue()


def _document(printed: bytes) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(printed)
    except ValueError:
        return None
    return document


def half_pages(names: set[str], *, orphans: bool = True) -> set[str]:
    """List pages with an anchor and no sidecar; orphans: and with a sidecar and no anchor."""
    pages = range(PAGES)
    return {
        page(n)
        for n in pages
        if (kv(n) in names and indexer(n) not in names)
        or (orphans and indexer(n) in names and kv(n) not in names)
    }


def _wrong_bytes(files: dict[str, bytes], right: dict[str, tuple[bytes, int]]) -> Iterator[str]:
    for name, data in files.items():
        if name in right and data != right[name][0]:
            yield f"{name} has other bytes"


# migrations


class Migration(Writer):
    """SRC to DST, each on a file system of its own."""

    destination: Path | str

    moves: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.destination = self.target = folder / "other" / "new" / "store"

    @property
    def roots(self) -> list[Path]:
        return [self.store.parent, self.folder / "other"]

    def arguments(self) -> list[object]:
        arguments = ["migrate", self.store, self.destination, "--profile", self.profile]
        move = ["--move", "--yes"] if self.moves else []
        # A buffer of a few objects: several parcels, and lines of the journal.
        return [*arguments, *move, "--buffer-bytes", "64KiB", "--format", "json"]

    def noted(self, state: State) -> set[str]:
        """List the pages that the journal has as copied."""
        pages: set[str] = set()
        for text in state.below(self.home).values():
            for line in text.split(b"\n")[1:-1]:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # torn
                if entry["what"] in ("copied", "verified"):
                    pages |= set(re.findall("[0-9a-f]{64}", entry["pages"]))
        return pages


class FileMigration(Migration):
    """File to file: the system copies."""

    kinds: ClassVar[dict[str, Kind]] = {
        "publish-data": Kind("syncfs", "*/new/store"),
        "publish-names": Kind("fsync", "*/new/store"),
    }

    def source_wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        if state.directly_in(self.store) != {n: data for n, (data, _) in self.original.items()}:
            yield "the source changed"

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        there = state.directly_in(self.target)
        yield from _wrong_bytes(there, self.original)
        for name in sorted(half_pages(set(there), orphans=False)):
            yield f"page {name[:8]} of the destination has no sidecar"
        for name in sorted(self.noted(state)):
            if not {f"{name}_x-dsa.bin", f"{name}.indexer_x-dsa.bin"} <= there.keys():
                yield f"page {name[:8]} is in the journal, and not whole at the destination"
        if document is not None and not self.original.keys() <= there.keys():
            yield "the migration was reported, and objects are missing"
        yield from self.source_wrong(state, document)

    def recover(self, state: State) -> Iterator[str]:
        again = ["--resume"] if self.moves or hash(state.content) % 2 else []
        yield from self.run(*self.arguments(), *again)
        if self.objects(self.target) != self.original:
            yield "the migration was run again, and the destination is not the source"


class FileMigrationWithoutSyncfs(FileMigration):
    """The same where the system has no syncfs: each file is synced."""

    inject: ClassVar[str | None] = "syncfs:error=ENOSYS"
    kinds: ClassVar[dict[str, Kind]] = {
        "publish-each": Kind("fsync", "*/new/store/.hicachectl-*.tmp"),
        "publish-names": Kind("fsync", "*/new/store"),
        "new-directory": Kind("fsync", "*/new"),
    }


class Move(FileMigration):
    """A migration that then deletes from the source."""

    moves: ClassVar[bool] = True
    kinds: ClassVar[dict[str, Kind]] = {
        "delete": Kind("fsync", "*/disk/store"),
        "journal": Kind("fdatasync", "*.jsonl"),
        "journal-name": Kind("fsync", "*/migrations"),
    }

    def source_wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        here = state.directly_in(self.store)
        yield from _wrong_bytes(here, self.original)
        there = state.directly_in(self.target)
        for name in self.original.keys() - here.keys() - there.keys():
            yield f"{name} is nowhere"
        for name in sorted(half_pages(set(here)) - self.noted(state)):
            yield f"page {name[:8]} of the source is not whole, and no journal names it"
        if half_pages(set(here), orphans=False):
            yield "a page of the source has no sidecar"
        if document is not None and self.original.keys() & here.keys():
            yield "the move was reported, and objects are still in the source"

    def recover(self, state: State) -> Iterator[str]:
        yield from super().recover(state)
        if left := self.objects():
            yield f"the move was run again, and {len(left)} objects are still in the source"


class PackToFile(FileMigration):
    """Pack to file: what was decompressed is written."""

    def prepare(self) -> None:
        super().prepare()
        pack = self.store.parent / "store.hcpack"
        command = ("migrate", self.store, f"pack://{pack}", "--profile", self.profile)
        code, text = run_here(*command, *_BUFFER, home=self.home)
        assert code == 0, text
        self.store = pack

    def source_wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        yield from ()

    def arguments(self) -> list[object]:
        return ["migrate", f"pack://{self.store}", *super().arguments()[2:]]


# repairs


class _Repair(Writer):
    """Two of the pages are damaged. puts_back: sidecars come before their anchor."""

    puts_back: ClassVar[bool] = False

    def prepare(self) -> None:
        super().prepare()
        for number in (1, 2):
            shorten(self.store / indexer(number))
        self.original = content(self.store)
        self.bad = {kv(1), indexer(1), kv(2), indexer(2)}

    @property
    def quarantine(self) -> Path:
        return self.store / ".hicachectl" / "quarantine"

    def arguments(self) -> list[object]:
        command = ["verify", self.store, "--profile", self.profile, "--checks", "groups,sizes"]
        options = ["--repair", "quarantine", "--quarantine", self.quarantine, "--yes"]
        return [*command, *options, "--fail-on", "never", *_BUFFER, "--format", "json"]

    def records(self, state: State, suffix: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Read the records of a quarantine: path of the batch's folder, and the record."""
        for name, data in state.below(self.quarantine).items():
            if re.fullmatch(rf".*/\d{{6}}\{suffix}", name):
                yield f"{self.quarantine}/{name.removesuffix(suffix)}", _document(data)

    def named(self, state: State) -> set[str]:
        """List the pages that the records of unfinished batches name."""
        records = (found for _, found in self.records(state, ".begun"))
        return {group["page"] for found in records if found for group in found["groups"]}

    def held(self, state: State) -> dict[str, bytes]:
        """Return what the quarantine holds, as its records say, by key."""
        return {
            taken["key"]: state.files[f"{folder}/{taken['file']}"]
            for suffix in (".begun", ".json")
            for folder, found in self.records(state, suffix)
            for group in (found or {}).get("groups", ())
            for taken in group["objects"]
            if f"{folder}/{taken['file']}" in state.files
        }

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        here = state.directly_in(self.store)
        yield from _wrong_bytes(here, self.original)
        for suffix in (".begun", ".json"):
            for folder, found in self.records(state, suffix):
                if found is None:
                    yield f"the record {folder}{suffix} is torn"
        half = half_pages(set(here), orphans=not self.puts_back)
        for name in sorted(half - self.named(state)):
            yield f"page {name[:8]} is not whole, and no record names it"
        yield from self.lost(state, here)
        if document is not None:
            yield from self.undone(state, here)

    def lost(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        held = self.held(state)
        yield from _wrong_bytes(held, self.original)
        for name in sorted(self.original.keys() - here.keys() - held.keys()):
            yield f"{name} is nowhere"

    def undone(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        if self.bad & here.keys():
            yield "the repair was reported, and damaged pages are still there"
        if list(self.records(state, ".begun")):
            yield "the repair was reported, and its record is an unfinished one"

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
        if set(self.objects()) != self.original.keys() - self.bad:
            yield "the repair was run again, and damaged pages are still there"
        yield from self.run("restore", self.quarantine, self.store, "--yes")
        if self.objects() != self.original:
            yield "what was quarantined does not come back"


class Quarantine(_Repair):
    """Objects leave by rename."""

    kinds: ClassVar[dict[str, Kind]] = {
        "record": Kind("fsync", "*.begun.tmp"),
        "record-name": Kind("fsync", "*/quarantine/*Z-??????"),
        "gained-names": Kind("fsync", "*/quarantine/*Z-??????/000000"),
        "lost-names": Kind("fsync", "*/disk/store"),
    }


class _Elsewhere(_Repair):
    """The quarantine is on another file system."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.elsewhere = folder / "mount"

    @property
    def roots(self) -> list[Path]:
        return [self.store.parent, self.elsewhere]

    @property
    def quarantine(self) -> Path:
        return self.elsewhere / "quarantine"


class QuarantineByCopy(_Elsewhere):
    """Copies are made, and then the objects are deleted."""

    kinds: ClassVar[dict[str, Kind]] = {
        "copies": Kind("syncfs", "*/quarantine/*Z-??????/000000"),
        "delete": Kind("fsync", "*/disk/store"),
    }


class Remove(_Repair):
    """Pages are removed for good."""

    kinds: ClassVar[dict[str, Kind]] = {
        "record": Kind("fsync", "*.begun.tmp"),
        "lost-names": Kind("fsync", "*/disk/store"),
    }

    def arguments(self) -> list[object]:
        return ["rm", self.store, "--model", "x/dsa", "--yes", "--format", "json"]

    def lost(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        yield from ()

    def undone(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        if self.original.keys() & here.keys():
            yield "the removal was reported, and objects are still there"

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
        if self.objects():
            yield "the removal was run again, and objects are still there"
        left = [path for path in self.quarantine.rglob("*") if path.is_file()]
        if left:
            yield f"the removal was run again, and leaves {left}"


class Restore(_Repair):
    """What was quarantined comes back."""

    puts_back: ClassVar[bool] = True
    kinds: ClassVar[dict[str, Kind]] = {
        "gained-names": Kind("fsync", "*/disk/store"),
    }

    def prepare(self) -> None:
        super().prepare()
        code, text = run_here(*_Repair.arguments(self), home=self.home)
        assert code == 0, text

    def arguments(self) -> list[object]:
        return ["restore", self.quarantine, self.store, "--yes", "--format", "json"]

    def undone(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        if self.original.keys() - here.keys():
            yield "the restore was reported, and objects are missing"

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
        if self.objects() != self.original:
            yield "what was quarantined does not come back"


class RestoreByCopy(_Elsewhere, Restore):
    """Copies of the copies come back."""

    kinds: ClassVar[dict[str, Kind]] = {
        "copies": Kind("syncfs", "*/disk/store"),
        "gained-names": Kind("fsync", "*/disk/store"),
    }


class Notes(Writer):
    """A catalog and a stamp, of objects that one run has read."""

    kinds: ClassVar[dict[str, Kind]] = {
        "catalog": Kind("fsync", "*/catalogs/.*.tmp"),
        "catalog-name": Kind("fsync", "*/catalogs"),
        "stamp": Kind("fsync", "*/stamps/.*.tmp"),
        "stamp-name": Kind("fsync", "*/stamps"),
        "new-directory": Kind("fsync", "*/disk/store"),
    }

    @property
    def catalog(self) -> Path:
        return self.folder / "catalogs" / "store.parquet"

    @property
    def stamp(self) -> Path:
        return self.store / ".hicachectl" / "stamps" / "x-dsa.json"

    @property
    def roots(self) -> list[Path]:
        return [self.store.parent, self.catalog.parent]

    def arguments(self) -> list[object]:
        command = ["verify", self.store, "--profile", self.profile, *_BUFFER, "--format", "json"]
        return [
            *command,
            "--stamp",
            "--checks",
            "digests",
            "--catalog",
            self.catalog,
            "--update-catalog",
        ]

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        for path, whole in ((self.catalog, _is_catalog), (self.stamp, _is_json)):
            data = state.files.get(str(path))
            if data is None and document is not None:
                yield f"{path.name} was reported, and is missing"
            if data is not None and not whole(data):
                yield f"{path.name} is torn"

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
        if not (self.catalog.exists() and self.stamp.exists()):
            yield "the command was run again, and wrote no catalog or no stamp"


def _is_json(data: bytes) -> bool:
    return _document(data) is not None


def _is_catalog(data: bytes) -> bool:
    import pyarrow as pa

    try:
        return len(read_catalog(pa.py_buffer(data), source="catalog").entries) == 2 * PAGES
    except FormatError:
        return False


WRITERS: tuple[type[Writer], ...] = (
    FileMigration,
    FileMigrationWithoutSyncfs,
    Move,
    PackToFile,
    Quarantine,
    QuarantineByCopy,
    Remove,
    Restore,
    RestoreByCopy,
    Notes,
)
