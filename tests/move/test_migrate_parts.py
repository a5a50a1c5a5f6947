"""Migrations in parts: N parts one after another do what one run does, also after interruptions.

Each part plans its own pages of one listing; a later attempt of the part completes it.
"""

from __future__ import annotations

import itertools
import shutil
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.transfer import retargeted
from hicachectl.move.migration import (
    Migration,
    MigrationRequest,
    carry_out,
    migrate,
    plan_groups,
    rehearse,
)
from hicachectl.move.migration_outcome import MigrationFacts, result_of
from hicachectl.move.run_mark import RunMark
from hicachectl.move.store_pair import CopyOptions
from hicachectl.pages.in_flight import ListingTime
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import PageList, Selection
from tests.move.migrations import damaged_stores
from tests.speed import slow
from tests.stores import OLD, contents, page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.pages.inventory import Inventory
    from hicachectl.results import Result

STEPS = 1  # the fewest of a part
NOW_NS = (OLD + 10**8) * 10**9
SMALL = CopyOptions(buffer_bytes=224 << 10, jobs=1)


class KilledError(BaseException):
    """Stand-in for a kill: ends a run."""


class Killer:
    """Ends a run before its n-th step, then lets it do nothing more. steps: steps so far.

    A step is a call that changes a store.
    """

    def __init__(self, at: int) -> None:
        self.steps = 0
        self._at = at

    @contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (FileStore, "write_from"),
                (FileStore, "copy_from"),
                (FileStore, "delete"),
                (FileStore, "undo_writes"),
            ):
                patch.setattr(owner, name, self._step(getattr(owner, name)))
            yield

    def _step(self, call: Any) -> Any:
        def stepped(*arguments: Any, **options: Any) -> Any:
            self.steps += 1
            if self.steps >= self._at:
                raise KilledError
            return call(*arguments, **options)

        return stepped


@dataclass
class Site:
    """A source, a destination, and a run directory of parts."""

    folder: Path
    request: MigrationRequest
    listed: Inventory | None = None

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def target(self) -> Path:
        return self.folder / "target"

    def copy(self, name: str) -> Site:
        """Return an equal site elsewhere."""
        folder = self.folder.parent / name
        shutil.copytree(self.folder, folder)
        return Site(folder, self.request)

    def whole(self) -> Result:
        """Migrate in one run."""
        with FileStore(self.source) as source, FileStore(self.target) as target:
            return migrate(source, target, self.request)

    def in_parts(self, count: int, killers: Iterator[Killer]) -> Result:
        """Migrate in parts, one after another; attempts are killed until `killers` is empty."""
        with FileStore(self.source) as source, FileStore(self.target) as target:
            migration = Migration(source, target, self.request)
            self.listed = take_inventory(source, self.request.profile, columns=migration.columns)
            migration.refuse_destination(self.listed.table)
            urls = source.url, target.url
        facts = []
        for number in range(count):
            rows = rows_of_part(self.listed, number, count)
            while True:
                killer = next(killers, None)
                with ExitStack() as stack:
                    if killer is not None:
                        stack.enter_context(killer.watching())
                    try:
                        facts.append(self._attempt(number, rows))
                        break
                    except KilledError:
                        continue
        labelled, dry_run = self.request.labelled, self.request.dry_run
        return result_of(facts, *urls, labelled=labelled, dry_run=dry_run)

    def _attempt(self, number: int, rows: np.ndarray) -> MigrationFacts:
        """Run a part, with the objects of the listing that are left."""
        assert self.listed is not None
        with FileStore(self.source) as source, FileStore(self.target) as target:
            migration = Migration(source, target, self.request)
            rows = rows[source.exists(self.listed.take(rows))]
            part = self.listed.only(rows)
            listing = ListingTime(start_ns=NOW_NS, began=time.monotonic())
            plan = plan_groups(migration, part, (), listing, asks=True)
            if self.request.dry_run:
                return rehearse(migration, plan)
            return carry_out(migration, plan, RunMark(str(number) * 16, (str(number) * 16,)))


def rows_of_part(listed: Inventory, number: int, count: int) -> np.ndarray:
    """Return the rows of a part: by the first word of the page hash; foreign objects in part 0."""
    pages = listed.pages().to_pylist()
    parts = [0 if name is None else int(name[:16], 16) * count >> 64 for name in pages]
    return np.flatnonzero(np.array(parts) == number)


def told(outcome: Result) -> tuple[dict[str, Any], list[str]]:
    """Return what a migration reports, except times and URLs."""
    document = {k: v for k, v in outcome.document.items() if k != "seconds"}
    document |= {"source": None, "destination": None}
    document["problems"] = sorted(map(str, document["problems"]))
    urls = (str(outcome.document["source"]), str(outcome.document["destination"]))
    remarks = (r.replace(urls[0], "SRC").replace(urls[1], "DST") for r in outcome.remarks)
    return document, sorted(remarks)


def without_first(outcome: Result, beginning: str) -> Result:
    """Return a result without its first remark, which begins so."""
    first, *others = outcome.remarks
    assert first.startswith(beginning)
    return replace(outcome, remarks=others)


def troubles(outcome: Result) -> dict[str, Any]:
    """Return what an interruption does not change of a report."""
    names = ("conflicts", "failed", "gone", "left_in_source", "complete", "stopped_by")
    return {name: outcome.document[name] for name in names}


def damaged_site(folder: Path, request: MigrationRequest) -> Site:
    damaged_stores(folder)
    return Site(folder, request)


PROFILED = MigrationRequest(profile=PROFILE, options=SMALL)
LISTED = [page(0), page(1), page(7)]
REQUESTS = {
    "verbatim": MigrationRequest(options=SMALL),
    "profiled": PROFILED,
    "reshaped": replace(
        PROFILED, destination_profile=retargeted(PROFILE, tp=4, layout="page_first_direct")
    ),
    "verified": replace(PROFILED, options=replace(SMALL, verify=True), if_exists="verify"),
    "overwritten": replace(PROFILED, if_exists="overwrite"),
    "partial": replace(PROFILED, partial=True, damaged=True),
    "moved": replace(PROFILED, options=replace(SMALL, verify=True, move=True)),
    "moved-verbatim": MigrationRequest(options=replace(SMALL, verify=True, move=True)),
    "rehearsed": replace(PROFILED, dry_run=True),
    "large": replace(PROFILED, options=replace(SMALL, buffer_bytes=80 << 10)),
    "listed": MigrationRequest(
        options=SMALL,
        selection=Selection(
            pages=PageList("file", LISTED, [None, "no-such-group", "other"], [1, 1, 1])
        ),
    ),
    "unlisted": replace(
        PROFILED, selection=Selection(pages=PageList("pages", [page(7)], [None], [1]))
    ),
    "nothing": MigrationRequest(options=SMALL, selection=Selection(model="no/such")),
}


@pytest.mark.parametrize(
    ("name", "count"), [*((name, 3) for name in REQUESTS), slow("profiled", 40), slow("moved", 40)]
)
def test_parts_do_what_one_run_does(tmp_path: Path, name: str, count: int) -> None:
    site = damaged_site(tmp_path / "parts", REQUESTS[name])
    one = site.copy("one")
    expected, found = one.whole(), site.in_parts(count, iter(()))
    if name == "nothing":  # the numbers of pages are those of a part
        known = "--model no/such: no page matches; models in the store: demo-hybrid-1b ("
        found, expected = without_first(found, known), without_first(expected, known)
    if name == "unlisted":
        known = "--pages: no page matches"
        found, expected = without_first(found, known), without_first(expected, known)
    assert told(found) == told(expected)
    assert contents(site.target) == contents(one.target)
    assert contents(site.source) == contents(one.source)


@pytest.mark.parametrize(
    "name", ["profiled", "reshaped", "verified", "overwritten", "partial", "moved"]
)
@pytest.mark.slow
def test_a_part_killed_at_any_step_is_completed_by_its_next_attempts(
    tmp_path: Path, name: str
) -> None:
    site = damaged_site(tmp_path / "parts", REQUESTS[name])
    one = site.copy("one")
    expected = one.whole()
    for at in itertools.count(1):
        cut = site.copy(f"cut-{at}")
        killers = [Killer(at), Killer(max(1, at // 2))]
        found = cut.in_parts(2, iter(killers))
        assert troubles(found) == troubles(expected), at
        assert contents(cut.target) == contents(one.target), at
        assert contents(cut.source) == contents(one.source), at
        shutil.rmtree(cut.folder)
        if killers[0].steps < at:
            assert at > STEPS
            break
