"""Helpers for tests of repairs: a hybrid store, its repair, and the contents afterwards."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hicachectl.backends.base import Store
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.mover import FileMover
from hicachectl.backends.object_files.writing import FileWriter
from hicachectl.checks.findings import LOCATED_SCHEMA, combine, located
from hicachectl.checks.registry import CheckInput
from hicachectl.checks.sizes import check_sizes
from hicachectl.checks.structure import check_groups
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.move.removal_plan import RepairPlan, plan_repair
from hicachectl.move.withdrawal import remove_groups
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.scanning import take_inventory
from tests import stores
from tests.move.migrations import demo_store
from tests.stores import page, put

if TYPE_CHECKING:
    from collections.abc import Collection, Generator

    import pyarrow as pa
    import pytest

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.base import ReadResult, Result, Status
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.move.results import GroupReport

DSA = parse_profile(stores.DSA)
KV_BYTES, INDEXER_BYTES = 4 * 2 * 1152, 4 * 2 * 132


def dsa_store(directory: Path, pages: int) -> Path:
    """Make a store of pages with kv and indexer; each page has different bytes and time."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(pages):
        for stem, nbytes in (("_x-dsa", KV_BYTES), (".indexer_x-dsa", INDEXER_BYTES)):
            path = put(directory, f"{page(number)}{stem}.bin", nbytes)
            with path.open("r+b") as stream:
                stream.write(f"{number}{stem}".encode())
            os.utime(path, ns=(0, 1_700_000_000_123_456_789 + number * 60 * 10**9))
    return directory


def lacking_store(directory: Path) -> Path:
    """Make the demo's pages, two hours old. One page lacks a rank, and another lacks all its kv."""
    demo_store(directory)
    orphan = next(directory.glob("*.mamba_*")).name[:64]
    rank = next(path for path in directory.glob("*_1_2.bin") if path.name[:64] != orphan)
    for path in (rank, *directory.glob(f"{orphan}_*.bin")):
        path.unlink()
    moment = time.time() - 2 * 3600
    for path in directory.glob("*.bin"):
        os.utime(path, (moment, moment))
    return directory


def kv(number: int) -> str:
    return f"{page(number)}_x-dsa.bin"


def indexer(number: int) -> str:
    return f"{page(number)}.indexer_x-dsa.bin"


def shorten(path: Path, nbytes: int = 1) -> None:
    """Cut bytes off an object, keeping its time."""
    facts = path.stat()
    os.truncate(path, facts.st_size - nbytes)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def stick(monkeypatch: pytest.MonkeyPatch, stuck: str) -> None:
    """Let an object stay in its store, as if its directory were immutable."""
    for type_, name in ((FileMover, "_take"), (FileWriter, "remove")):
        call = getattr(type_, name)

        def failing(self: object, key: bytes, *rest: Any, call: Any = call) -> Status | None:
            if key.decode() == stuck:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            status: Status | None = call(self, key, *rest)
            return status

        monkeypatch.setattr(type_, name, failing)


def scanned(store: Store, profile: Profile | None = DSA) -> PageGroups:
    return PageGroups(take_inventory(store, profile, columns=("version",)))


def structure_findings(store: Store, groups: PageGroups) -> pa.Table:
    settled = np.zeros(len(groups), dtype=np.bool_)
    given = CheckInput(store=store, groups=groups, in_flight=settled)
    found = combine([*check_groups(given), *check_sizes(given)], LOCATED_SCHEMA)
    return located(found, groups)


def plan_for(groups: PageGroups, found: pa.Table) -> RepairPlan:
    """Plan the repair of findings that may have only keys."""
    return plan_repair(located(found, groups))


def planned(store: Store, *, codes: tuple[str, ...] = ()) -> tuple[PageGroups, RepairPlan]:
    groups = scanned(store)
    found = structure_findings(store, groups)
    return groups, plan_repair(found, codes=codes)


def repaired(directory: Path, **options: Any) -> GroupReport:
    """Scan, plan and repair, as `verify --repair` does."""
    with FileStore(directory) as store:
        codes = options.pop("codes", ())
        return remove_groups(
            store, *planned(store, codes=codes), **{"mode": "quarantine", **options}
        )


def default_quarantine(directory: Path) -> Path:
    return directory / ".hicachectl" / "quarantine"


class Bare(Store):
    """A file store reduced to what every store can do: no renames, no directory of its own."""

    grammar = FileStore.grammar
    traits = FileStore.traits
    limits = FileStore.limits

    def __init__(self, path: Path) -> None:
        self._files = FileStore(path)
        self.url = self._files.url

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        return cls(Path(url.path))

    def attach(self, arena: Arena) -> None:
        super().attach(arena)
        self._files.attach(arena)

    def scan(self, columns: Collection[str] = ()) -> Generator[Any, None, None]:
        return self._files.scan(columns)

    def look(self, rows: Any, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        return self._files.look(rows, columns)

    def read_into(self, *arguments: Any, **options: Any) -> ReadResult:
        return self._files.read_into(*arguments, **options)

    def delete(self, rows: Any) -> Result:
        return self._files.delete(rows)

    def close(self) -> None:
        self._files.close()
