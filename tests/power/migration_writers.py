"""Migrations, and rules for every state after a power failure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.identity import Identity
from hicachectl.formats.profile import parse_profile
from hicachectl.formats.spec import object_specs
from hicachectl.formats.trailer import digest_function, parse_trailer
from tests.kvgen import KvGenerator
from tests.move.repairs import dsa_store, indexer, kv
from tests.power.crash_states import Kind
from tests.power.nixl_writers import (
    OnNixl,
    nixl_directories,
    nixl_files,
    nixl_objects,
    nixl_url,
)
from tests.power.writers import (
    BUFFER,
    PAGES,
    Writer,
    document_of,
    half_pages,
    run_here,
    wrong_bytes,
)
from tests.stores import DSA, contents, page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.power.crash_states import State
    from tests.stores import Contents


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
        arguments = ["migrate", self.place, self.destination, "--profile", self.profile]
        move = ["--move", "--yes"] if self.moves else []
        # A buffer for a few objects gives several batches.
        return [*arguments, *move, "--buffer-bytes", "64KiB", "--format", "json"]


class FileMigration(Migration):
    """File to file, copied by the system."""

    kinds: ClassVar[dict[str, Kind]] = {
        "publish-data": Kind("syncfs", "*/new/store"),
        "publish-names": Kind("fsync", "*/new/store"),
    }

    def source_wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        if self.present_in(state) != {n: data for n, (data, _) in self.original.items()}:
            yield "the source changed"

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        yield from self.published_wrong(state, state.directly_in(self.target), document)

    def published_wrong(
        self, state: State, there: dict[str, bytes], document: dict[str, Any] | None
    ) -> Iterator[str]:
        """Yield what is wrong. there: files of the destination, by name."""
        yield from wrong_bytes(there, self.original)
        for name in sorted(half_pages(set(there), orphans=False)):
            yield f"page {name[:8]} of the destination has no sidecar"
        if document is not None and not self.original.keys() <= there.keys():
            yield "the migration was reported, and objects are missing"
        yield from self.source_wrong(state, document)

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
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


class TrailedMigration(FileMigration):
    """Objects with trailers, into a new directory with folders."""

    kinds: ClassVar[dict[str, Kind]] = {
        # The syncfs of the data makes the names of markers durable too.
        "marker": Kind("fsync", "*/new/store/.hicachectl/plugin/.*"),
        "mark": Kind("fsync", "*/new/store/.hicachectl/.*"),
        "publish-data": Kind("syncfs", "*/new/store"),
        "publish-names": Kind("fsync", "*/new/store/[0-9a-f][0-9a-f]"),
        "folder": Kind("fsync", "*/new/store"),
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.destination = f"file://{self.target}?folders=hex2"

    def prepare(self) -> None:
        """Give the objects trailers."""
        super().prepare()
        identities = {
            ("", affix): Identity(model="x-dsa", weights="w", pool=pool)
            for affix, pool in ((kv(0)[64:], "kv"), (indexer(0)[64:], "indexer"))
        }
        with FileStore(self.store) as plain, FileStore(self.store) as trailed:
            (rows,) = plain.scan(("nbytes", "mtime_ns"))
            trailed.write_trailers(identities, "xxh3")
            sizes = rows.column("nbytes").to_numpy()
            assert trailed.copy_from(plain, rows, rows, sizes, if_absent=False).all_ok
        self.original = contents(self.store)

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        below = state.below(self.target)
        markers = [document_of(data) for name, data in below.items() if _is_marker(name)]
        if None in markers:
            yield "a marker is torn"
        known = {marker["suffix"] for marker in markers if marker}
        there = {name.rpartition("/")[2]: data for name, data in below.items() if name[2:3] == "/"}
        for name in there:
            if name in self.original and name[64:] not in known:
                yield f"{name} has a trailer, and no marker"
        if below.get(".hicachectl/folders") != b"hex2\n" and there:
            yield "there are objects in folders, and the directory is not marked"
        yield from self.published_wrong(state, there, document)

    def objects(self, directory: Path | None = None) -> Contents:
        found: Contents = {}
        for place in (directory or self.store).glob("[0-9a-f][0-9a-f]"):
            found |= super().objects(place)
        return found or super().objects(directory)


class Adoption(Writer):
    """Objects get trailers where they are."""

    kinds: ClassVar[dict[str, Kind]] = {
        # The syncfs of the data makes the names of markers durable too.
        "marker": Kind("fsync", "*/disk/store/.hicachectl/plugin/.*"),
        "publish-data": Kind("syncfs", "*/disk/store"),
        "publish-names": Kind("fsync", "*/disk/store"),
    }

    def prepare(self) -> None:
        """Give the objects values that the profile describes."""
        super().prepare()
        profile = parse_profile(DSA)
        for spec in object_specs(profile, "file"):
            prefix, suffix = spec.affix
            made = KvGenerator(spec, profile, 1).objects(range(PAGES))
            for number, content in enumerate(made):
                path = self.store / f"{prefix}{page(number)}{suffix}"
                times = path.stat().st_mtime_ns
                path.write_bytes(content.tobytes())
                os.utime(path, ns=(0, times))
        self.original = contents(self.store)

    def arguments(self) -> list[object]:
        write = ("--profile", self.profile, "--weights", 32 * "a", "--trailers", "write")
        batches = ("--buffer-bytes", "64KiB", "--format", "json")
        return ["migrate", self.store, self.store, *write, *batches]

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        below = state.below(self.store)
        markers = [document_of(data) for name, data in below.items() if _is_marker(name)]
        if None in markers:
            yield "a marker is torn"
        known = {marker["suffix"] for marker in markers if marker}
        for name, (data, _) in self.original.items():
            found = below.get(name)
            if found is None:
                yield f"{name} is nowhere"
            elif found == data:
                if document is not None:
                    yield f"the adoption was reported, and {name} has no trailer"
            elif not _is_adopted(found, data, name):
                yield f"{name} has other bytes"
            elif name[64:] not in known:
                yield f"{name} has a trailer, and no marker"

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
        there = self.objects()
        if there.keys() != self.original.keys():
            yield "the adoption was run again, and objects are missing"
        for name, (found, mtime_ns) in there.items():
            data, before_ns = self.original[name]
            if not _is_adopted(found, data, name):
                yield f"the adoption was run again, and {name} has no trailer"
            if mtime_ns != before_ns:
                yield f"{name} has another time"


class AdoptionWithoutSyncfs(Adoption):
    """The same on a system without syncfs: each file is synced."""

    inject: ClassVar[str | None] = "syncfs:error=ENOSYS"
    kinds: ClassVar[dict[str, Kind]] = {
        "publish-each": Kind("fsync", "*/disk/store/.hicachectl-*.tmp"),
        "publish-names": Kind("fsync", "*/disk/store"),
    }


def _is_adopted(found: bytes, data: bytes, name: str) -> bool:
    """Return whether a file has an object's bytes and a trailer of them."""
    trailer = parse_trailer(found[len(data) :]) if found.startswith(data) else None
    return trailer is not None and (
        trailer.page.hex() == name[:64]
        and trailer.digest == digest_function(trailer.digest_kind)((data,))
    )


class NixlMigration(FileMigration):
    """From a file store to two disks of the NIXL backend, under other names."""

    kinds: ClassVar[dict[str, Kind]] = {
        "data-of-one": Kind("syncfs", "*/new/store/one"),
        "data-of-two": Kind("syncfs", "*/new/store/two"),
        "publish-names": Kind("fsync", "*/new/store/???/??"),
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.destination = nixl_url(self.target)

    @property
    def roots(self) -> list[Path]:
        return [self.store.parent, *nixl_directories(self.target)]

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        yield from self.published_wrong(state, nixl_files(state, self.target), document)

    def present(self, directory: Path | None = None) -> Contents:
        return nixl_objects(self.target) if directory == self.target else super().present(directory)


class NixlMigrationWithoutSyncfs(NixlMigration):
    """The same on a system without syncfs, into new directories."""

    inject: ClassVar[str | None] = "syncfs:error=ENOSYS"
    kinds: ClassVar[dict[str, Kind]] = {
        "publish-each": Kind("fsync", "*/new/store/???/??/.hicachectl-*.tmp"),
        "publish-names": Kind("fsync", "*/new/store/???/??"),
        "folders": Kind("fsync", "*/new/store/???"),
        "new-directories": Kind("fsync", "*/new/store"),
    }

    @property
    def roots(self) -> list[Path]:
        return [self.store.parent, self.folder / "other"]


def _is_marker(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder == ".hicachectl/plugin" and not file.startswith(".")


class Move(FileMigration):
    """A migration that deletes from the source afterwards."""

    moves: ClassVar[bool] = True
    kinds: ClassVar[dict[str, Kind]] = {
        **FileMigration.kinds,
        "delete": Kind("fsync", "*/disk/store"),
    }

    def source_wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        here = self.present_in(state)
        yield from wrong_bytes(here, self.original)
        there = state.directly_in(self.target)
        for name in self.original.keys() - here.keys() - there.keys():
            yield f"{name} is nowhere"
        for name in sorted(half_pages(set(here))):
            if not {n for n in self.original if n.startswith(name)} <= there.keys():
                yield f"page {name[:8]} is whole in neither store"
        if half_pages(set(here), orphans=False):
            yield "a page of the source has no sidecar"
        if document is not None and self.original.keys() & here.keys():
            yield "the move was reported, and objects are still in the source"

    def recover(self, state: State) -> Iterator[str]:
        yield from super().recover(state)
        if left := self.objects():
            yield f"the move was run again, and {len(left)} objects are still in the source"


class MoveFromNixl(Move, OnNixl):
    """A move out of two directories of the NIXL backend."""

    kinds: ClassVar[dict[str, Kind]] = {
        **Move.kinds,
        "delete": Kind("fsync", "*/disk/store/???/??"),
    }


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
        yield from self.run(*self.arguments(), codes=(0, 2, 4))
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
    NixlMigration,
    NixlMigrationWithoutSyncfs,
    MoveFromNixl,
    TrailedMigration,
    Adoption,
    AdoptionWithoutSyncfs,
    Move,
    MigrationToCopies,
    MoveToCopies,
    PackToFile,
)
