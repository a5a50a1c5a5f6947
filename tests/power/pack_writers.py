"""Commands that write packs, and rules for every state after a power failure."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from hicachectl.backends.pack.file import (
    ObjectReader,
    RecordPlace,
    load_pack,
    read_header,
)
from hicachectl.backends.pack.recovery import walk
from hicachectl.formats.errors import FormatError, UnfinishedPackError
from hicachectl.formats.pack.records import HEADER_BYTES
from tests.power.crash_states import Kind
from tests.power.migration_writers import Migration
from tests.power.writers import Writer, run_here
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from tests.power.crash_states import State


class PackBytes:
    """Objects of a pack in memory, and whether it is finished. Raises FormatError."""

    def __init__(self, data: bytes) -> None:
        self.finished = True
        with _opened(data) as descriptor:
            try:
                entries = load_pack(descriptor, "pack").entries
            except UnfinishedPackError:
                self.finished = False
                walked = walk(descriptor, "pack")
                entries = walked.entries.table()
                if walked.metadata is None and len(entries):
                    raise FormatError("its objects have no metadata, so none is saved") from None
            reader = ObjectReader(descriptor, read_header(descriptor, "pack"))
            self.objects = dict(_objects(reader, entries))


@contextmanager
def _opened(data: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("pack")
    try:
        os.write(descriptor, data)
        yield descriptor
    finally:
        os.close(descriptor)


def _objects(reader: ObjectReader, entries: pa.Table) -> Iterator[tuple[str, bytes]]:
    for row in entries.to_pylist():
        content = bytearray(row["nbytes"])
        place = RecordPlace(*(row[name] for name in RecordPlace._fields))
        reader.read(row["key"], place, memoryview(content))
        yield row["key"].decode(), bytes(content)


class _PackWriter(Writer):
    """A command that writes a pack."""

    pack: Path

    def pack_wrong(self, state: State, held: set[str], *, ended: bool) -> Iterator[str]:
        """Check the pack. held: objects that must be in the pack. ended: it must be finished."""
        data = state.files.get(str(self.pack), b"")
        if len(data) <= HEADER_BYTES:  # the header is written before anything else
            if held or ended:
                yield "the pack has no header, and its objects were reported"
            return
        try:
            pack = PackBytes(data)
        except FormatError as error:
            yield f"the pack cannot be opened: {error}"
            return
        for name in sorted(held - pack.objects.keys()):
            yield f"{name} is not in the pack"
        for name, found in pack.objects.items():
            if found != self.original[name][0]:
                yield f"{name} has other bytes"
        if ended and not pack.finished:
            yield "the pack was reported, and is not finished"

    def complete(self) -> Iterator[str]:
        """Check the pack on disk after a recovery."""
        try:
            pack = PackBytes(self.pack.read_bytes())
        except FormatError as error:
            yield f"the pack was recovered, and cannot be opened: {error}"
            return
        if not pack.finished:
            yield "the pack was recovered, and is not finished"
        if pack.objects != {name: data for name, (data, _) in self.original.items()}:
            yield "the pack was recovered, and has not all objects"


class FileToPack(_PackWriter, Migration):
    """A move of files to a new pack, which then alone has the objects."""

    moves: ClassVar[bool] = True
    kinds: ClassVar[dict[str, Kind]] = {
        "name": Kind("fsync", "*/other/new"),
        "metadata": Kind("fdatasync", "*.hcpack", 0, 1),
        "append": Kind("fdatasync", "*.hcpack", 1, -2),
        "records-before-trailer": Kind("fdatasync", "*.hcpack", -2, -1),
        "trailer": Kind("fdatasync", "*.hcpack", -1),
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pack = folder / "other" / "new" / "store.hcpack"
        self.destination = f"pack://{self.pack}"

    def prepare(self) -> None:
        super().prepare()
        self.pack.parent.mkdir()

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        moved = self.original.keys() - self.present_in(state).keys()
        held = moved if document is None else set(self.original)
        yield from self.pack_wrong(state, held | self.earlier, ended=document is not None)

    @property
    def earlier(self) -> set[str]:
        """Return the objects that the pack had before."""
        return set()

    def recover(self, state: State) -> Iterator[str]:
        if self.pack.exists() and hash(state.content) % 2:
            # 2: a pack without metadata has nothing to save yet.
            yield from self.run("pack", "repair", self.pack, codes=(0, 2, 4))
        yield from self.run(*self.arguments())
        yield from self.complete()


class FileToOldPack(FileToPack):
    """A move of files to a pack that already has two of the pages."""

    kinds: ClassVar[dict[str, Kind]] = {
        "append": Kind("fdatasync", "*.hcpack", 0, -2),
        "records-before-trailer": Kind("fdatasync", "*.hcpack", -2, -1),
        "trailer": Kind("fdatasync", "*.hcpack", -1),
    }

    def prepare(self) -> None:
        super().prepare()
        pages = self.folder / "pages"
        pages.write_text(f"{page(0)}\n{page(1)}\n")
        copy = ("migrate", self.place, self.destination, "--profile", self.profile)
        code, text = run_here(*copy, "--pages-from", pages, home=self.home)
        assert code == 0, text

    @property
    def earlier(self) -> set[str]:
        return {name for name in self.original if name[:64] in (page(0), page(1))}


class PackRepair(_PackWriter):
    """Repair of a pack without an end, in place."""

    kinds: ClassVar[dict[str, Kind]] = {"trailer": Kind("fdatasync", "*.hcpack", -1)}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cut = self.pack = self.store.parent / "store.hcpack"

    def prepare(self) -> None:
        super().prepare()
        command = ("migrate", self.store, f"pack://{self.cut}", "--profile", self.profile)
        code, text = run_here(*command, "--buffer-bytes", "16MiB", home=self.home)
        assert code == 0, text
        os.truncate(self.cut, self.cut.stat().st_size - 40)  # a cut index and no trailer

    def arguments(self) -> list[object]:
        return ["pack", "repair", self.cut, "--format", "json"]

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        yield from self.pack_wrong(state, set(self.original), ended=document is not None)

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
        yield from self.complete()


class PackRepairToNew(PackRepair):
    """Repair that writes all objects that can be saved to a new pack."""

    kinds: ClassVar[dict[str, Kind]] = {
        "trailer": Kind("fdatasync", "*", -1),
        "name": Kind("fsync", "*/other"),
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pack = folder / "other" / "saved.hcpack"

    @property
    def roots(self) -> list[Path]:
        return [self.store.parent, self.pack.parent]

    def arguments(self) -> list[object]:
        return [*super().arguments(), "-o", self.pack]

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        if str(self.pack) in state.files or document is not None:
            yield from self.pack_wrong(state, set(self.original), ended=True)

    def recover(self, state: State) -> Iterator[str]:
        if not self.pack.exists():
            yield from self.run(*self.arguments())
        yield from self.complete()


WRITERS = (FileToPack, FileToOldPack, PackRepair, PackRepairToNew)
