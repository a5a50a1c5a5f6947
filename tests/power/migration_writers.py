"""Migrations, and rules for every state after a power failure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, ClassVar

from tests.move.repairs import dsa_store
from tests.power.crash_states import Kind
from tests.power.writers import BUFFER, PAGES, Writer, half_pages, run_here, wrong_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.power.crash_states import State


class Migration(Writer):
    """SRC to DST, on separate file systems."""

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
        # A buffer for a few objects gives several batches and several lines of the journal.
        return [*arguments, *move, "--buffer-bytes", "64KiB", "--format", "json"]

    def noted(self, state: State) -> set[str]:
        """Return the pages that the journal lists as copied."""
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
    """File to file, copied by the system."""

    kinds: ClassVar[dict[str, Kind]] = {
        "publish-data": Kind("syncfs", "*/new/store"),
        "publish-names": Kind("fsync", "*/new/store"),
    }

    def source_wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        if state.directly_in(self.store) != {n: data for n, (data, _) in self.original.items()}:
            yield "the source changed"

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        there = state.directly_in(self.target)
        yield from wrong_bytes(there, self.original)
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
    """The same on a system without syncfs: each file is synced."""

    inject: ClassVar[str | None] = "syncfs:error=ENOSYS"
    kinds: ClassVar[dict[str, Kind]] = {
        "publish-each": Kind("fsync", "*/new/store/.hicachectl-*.tmp"),
        "publish-names": Kind("fsync", "*/new/store"),
        "new-directory": Kind("fsync", "*/new"),
    }


class Move(FileMigration):
    """A migration that deletes from the source afterwards."""

    moves: ClassVar[bool] = True
    kinds: ClassVar[dict[str, Kind]] = {
        "delete": Kind("fsync", "*/disk/store"),
        "journal": Kind("fdatasync", "*.jsonl"),
        "journal-name": Kind("fsync", "*/migrations"),
    }

    def source_wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        here = state.directly_in(self.store)
        yield from wrong_bytes(here, self.original)
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


class _ToCopies(Migration):
    """A server, or a killed run, has just written the pages to the destination."""

    kinds: ClassVar[dict[str, Kind]] = {"found": Kind("syncfs", "*/new/store")}

    def prepare(self) -> None:
        super().prepare()
        dsa_store(self.target, PAGES)

    @property
    def unsynced(self) -> list[Path]:
        return [self.target]


class MigrationToCopies(_ToCopies, FileMigration):
    """A migration to a destination that has just received the pages."""

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        """Check the end only: until then, files of other writers may be torn."""
        if document is not None:
            yield from super().wrong(state, document)

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments(), codes=(0, 2, 4))


class MoveToCopies(_ToCopies, Move):
    """A move to such a destination."""

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        """Check that a whole copy is left: files of other writers may be torn."""
        here, there = state.directly_in(self.store), state.directly_in(self.target)
        for name, (data, _) in self.original.items():
            if data not in (here.get(name), there.get(name)):
                yield f"{name} is nowhere"

    def recover(self, state: State) -> Iterator[str]:
        # Another writer's torn object is a conflict (4), or looks like another deployment (2).
        yield from self.run(*self.arguments(), "--resume", codes=(0, 2, 4))
        places = [self.objects(), self.objects(self.target)]
        for name, (data, _) in self.original.items():
            if data not in [place[name][0] for place in places if name in place]:
                yield f"the move was run again, and {name} is nowhere"


class PackToFile(FileMigration):
    """Pack to file: decompressed bytes are written."""

    def prepare(self) -> None:
        super().prepare()
        pack = self.store.parent / "store.hcpack"
        command = ("migrate", self.store, f"pack://{pack}", "--profile", self.profile)
        code, text = run_here(*command, *BUFFER, home=self.home)
        assert code == 0, text
        self.store = pack

    def source_wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        yield from ()

    def arguments(self) -> list[object]:
        return ["migrate", f"pack://{self.store}", *super().arguments()[2:]]


WRITERS = (
    FileMigration,
    FileMigrationWithoutSyncfs,
    Move,
    MigrationToCopies,
    MoveToCopies,
    PackToFile,
)
