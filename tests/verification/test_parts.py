"""Parts of a store, checked one by one: their report is the report of the whole store."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import Selection
from hicachectl.verification.report import describe_store, report_of
from hicachectl.verification.request import Sample, VerifyRequest
from hicachectl.verification.verify import check_part, start_run
from tests.move.migrations import demo_store
from tests.speed import slow, some
from tests.stores import page
from tests.verification.damages import (
    DAMAGE,
    PAGES,
    ambiguous,
    at_once,
    cut,
    emptied,
    fresh,
    several_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.formats.catalog import Catalog
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.report import VerifyReport

HOUR_S = 3600


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_store(tmp_path_factory.mktemp("demo") / "store", PAGES)


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "store")
    return tmp_path / "store"


def divided(inventory: Inventory, count: int) -> list[Inventory]:
    """Divide an inventory by page hash; objects without a page go into the first part."""
    part_of = np.zeros(len(inventory.affix_ids), dtype=np.int64)
    paged = ~inventory.is_foreign
    words = inventory.page_words(paged, 0).tolist()
    part_of[paged] = [word * count >> 64 for word in words]
    return [inventory.only(np.flatnonzero(part_of == number)) for number in range(count)]


def reported(
    directory: Path, request: VerifyRequest, count: int
) -> tuple[VerifyReport, list[Catalog]]:
    """Check each part of a store, and report on all."""
    with FileStore(directory) as store:
        start = start_run(store, request)
        listed = take_inventory(store, request.profile, columns=request.columns(store))
        parts = [
            check_part(store, request, part, start.listed(), first=number == 0)
            for number, part in enumerate(divided(listed, count))
        ]
        described = describe_store(store, request)
    catalogs = [part.catalog for part in parts if part.catalog is not None]
    return report_of([part.result for part in parts], described, listed.table, request), catalogs


def compared(directory: Path, request: VerifyRequest, count: int) -> dict[str, Any]:
    """Return everything that must be equal for each number of parts."""
    report, catalogs = reported(directory, request, count)
    entries = [row for catalog in catalogs for row in catalog.entries.to_pylist()]
    for row in entries:
        del row["last_verified_ns"], row["first_seen_ns"]
    return {
        "document": {name: value for name, value in report.document.items() if name != "seconds"},
        "findings": sorted(report.placed.to_pylist(), key=repr),
        # Counts in the explanation are the first empty part's.
        "remarks": sorted(text.split(";")[0] for text in report.remarks),
        "catalog": sorted(entries, key=repr),
    }


def recorded(directory: Path, request: VerifyRequest) -> Catalog:
    _, (catalog,) = reported(directory, replace(request, update_catalog=True), 1)
    return catalog


MANY = 2 * PAGES  # some of so many parts are empty
PROFILES = {"inferred": None, "profile": PROFILE}
# Parts divide each damage alike with a profile and without, and among few and many.
DIVIDED = some(
    itertools.product(DAMAGE, PROFILES, (3, MANY)),
    *itertools.product(DAMAGE, ("profile",), (3,)),
    *itertools.product((cut, ambiguous, several_sizes, at_once), ("inferred",), (3,)),
    (at_once, "profile", MANY),
    (emptied, "profile", MANY),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "profile", "count"),
    [slow(*case) if case[-1] == MANY else case for case in DIVIDED],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_parts_say_what_the_whole_store_says(
    store: Path, damage: Callable[[Path], None], profile: str, count: int
) -> None:
    request = VerifyRequest(profile=PROFILES[profile], grace_seconds=HOUR_S)
    request = replace(request, catalog=recorded(store, request), update_catalog=True)
    damage(store)
    whole = compared(store, request, 1)
    assert damage.__name__ == "<lambda>" or whole["findings"] or damage in (fresh, emptied)
    assert compared(store, request, count) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"selection": Selection(pool="mamba")},
        {"selection": Selection(page="a")},
        {"selection": Selection(model="m")},
        {"selection": Selection(pool="none")},
        {"sample": Sample(3, 1)},
        {"checks": ("sizes", "names")},
        {"time_limit_seconds": 0.0},
        {"buffer_bytes": 120_000},
    ],
    ids=str,
)
def test_options_mean_the_same_for_parts(store: Path, options: dict[str, Any]) -> None:
    at_once(store)
    request = VerifyRequest(profile=PROFILE, grace_seconds=HOUR_S, **options)
    assert compared(store, request, 3) == compared(store, request, 1)


def test_the_smallest_ambiguous_key_is_named_by_any_number_of_parts(store: Path) -> None:
    ambiguous(store)
    keys = set()
    for count in (1, 2, 7):
        found = reported(store, VerifyRequest(checks=("names",)), count)[0].placed.to_pylist()
        keys.add(tuple(sorted(row["key"] for row in found if row["code"] == "ambiguous-key")))
    (named,) = keys
    assert named
    assert all(key[:64] == min(map(page, range(9))) for key in named)
