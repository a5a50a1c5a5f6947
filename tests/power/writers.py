"""Commands that write, and rules for every state after a power failure.

A `Writer` prepares directories, names the command to record, checks the files of a crash state
(`violations`), and runs the command that an operator would run next (`recover`).
"""

from __future__ import annotations

import io
import json
import os
import sys
from abc import ABC, abstractmethod
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, ClassVar

from hicachectl.__main__ import run
from hicachectl.formats.catalog import read_catalog
from hicachectl.formats.errors import FormatError
from tests import stores
from tests.move.repairs import dsa_store, indexer, kv
from tests.power.crash_states import Kind
from tests.power.recording import Recording, record
from tests.stores import contents, page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.power.crash_states import State
    from tests.stores import Contents

PAGES = 4
BUFFER = ("--buffer-bytes", "16MiB")


class Writer(ABC):
    """One command. kinds: syncs that the command needs, by name of a test."""

    inject: ClassVar[str | None] = None
    kinds: ClassVar[dict[str, Kind]] = {}

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.store = folder / "disk" / "store"
        self.profile = folder / "profile.toml"
        self.folder = folder

    @property
    def roots(self) -> list[Path]:
        """Return the file systems of the command, except its HOME."""
        return [self.store.parent]

    @property
    def place(self) -> object:
        """Return the STORE argument of the store."""
        return self.store

    @property
    def unsynced(self) -> list[Path]:
        """Return directories with files that another process has just written and never synced."""
        return []

    @property
    def program(self) -> list[str]:
        """Return the words before the command line."""
        return [sys.executable, "-m", "hicachectl"]

    @abstractmethod
    def arguments(self) -> list[object]:
        """Return the command line."""

    def prepare(self) -> None:
        """Make the command's input."""
        for root in (*self.roots, self.home):
            root.mkdir(parents=True, exist_ok=True)
        self.profile.write_text(stores.DSA)
        dsa_store(self.store, PAGES)
        self.original = contents(self.store)

    def record(self) -> Recording:
        """Run and record the command once; it must exit with 0."""
        self.prepare()
        command = [*self.program, "-q", *self.arguments()]
        recording = record(
            command, self.roots, home=self.home, inject=self.inject, unsynced=self.unsynced
        )
        assert recording.exit_code == 0, recording.stderr
        return recording

    def violations(self, state: State) -> Iterator[str]:
        """Yield what is wrong with a state."""
        yield from self.wrong(state, document_of(state.printed))

    @abstractmethod
    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        """Yield what is wrong. document: the command's output, once complete."""

    @abstractmethod
    def recover(self, state: State) -> Iterator[str]:
        """Run an operator's next command on the files of a state; yield what is wrong then."""

    def file(self, name: str) -> Path:
        """Return where the store has an object."""
        return self.store / name

    def present(self, directory: Path | None = None) -> Contents:
        """Return the files of a store, by default of the command's."""
        directory = directory or self.store
        return contents(directory) if directory.is_dir() else {}

    def present_in(self, state: State) -> dict[str, bytes]:
        """Return the files of the command's store in a state."""
        return state.directly_in(self.store)

    def objects(self, directory: Path | None = None) -> Contents:
        """Return the objects of a store, without unfinished files of other names."""
        there = self.present(directory)
        return {name: value for name, value in there.items() if name in self.original}

    def run(self, *arguments: object, codes: tuple[int, ...] = (0,)) -> Iterator[str]:
        """Run a command in this process; yield a complaint about any other exit code."""
        code, text = run_here(*arguments, home=self.home)
        if code not in codes:
            yield f"{' '.join(map(str, arguments[:2]))}: exit code {code}: {text}"


def run_here(*arguments: object, home: Path) -> tuple[int, str]:
    """Run a command in this process; return its exit code and stderr."""
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


def document_of(printed: bytes) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(printed)
    except ValueError:
        return None
    return document


def half_pages(names: set[str], *, orphans: bool = True) -> set[str]:
    """Return pages with an anchor and no sidecar; orphans: also the opposite."""
    pages = range(PAGES)
    return {
        page(n)
        for n in pages
        if (kv(n) in names and indexer(n) not in names)
        or (orphans and indexer(n) in names and kv(n) not in names)
    }


def wrong_bytes(files: dict[str, bytes], right: dict[str, tuple[bytes, int]]) -> Iterator[str]:
    for name, data in files.items():
        if name in right and data != right[name][0]:
            yield f"{name} has other bytes"


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
        command = ["verify", self.store, "--profile", self.profile, *BUFFER, "--format", "json"]
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
    return document_of(data) is not None


def _is_catalog(data: bytes) -> bool:
    import pyarrow as pa

    try:
        return len(read_catalog(pa.py_buffer(data), source="catalog").entries) == 2 * PAGES
    except FormatError:
        return False
