"""Report on one page of a store: objects, contents, findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from hicachectl.backends.capabilities import Trailed
from hicachectl.checks.findings import Finding, combine, listing_findings
from hicachectl.checks.registry import CheckInput, TensorStats
from hicachectl.checks.structure import cleared_objects
from hicachectl.formats.errors import UsageError
from hicachectl.formats.identity import Identity  # noqa: TC001 - hints are read
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.trailer import digest_text
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES, Loaded, Pipeline, Task
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.in_flight import ListingTime, groups_in_flight
from hicachectl.pages.listing import Group, ObjectRow, object_rows, page_rows
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import EVERYTHING, Selection, explain_selection, select
from hicachectl.text.units import first_of
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS
from hicachectl.verification.reading import read_objects
from hicachectl.verification.reading_plan import (
    ReadingPlan,
    known_specs,
    readable_sizes,
    value_checkers,
)
from hicachectl.verification.request import VerifyRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.checks.values import ValueChecker
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.errors import ContradictionError
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.reading import ReadingResult


class ShownObject(ObjectRow):
    """Row for an object. Only rows of stores with trailers have the last two members."""

    digest: str | None
    identity: NotRequired[str | None]
    trailer_digest: NotRequired[str | None]


class Contents(TensorStats):
    """Row for one tensor and layer of an object that a profile describes."""

    key: str


class Reading(TypedDict):
    """Row for the quartiles of an object, with its bytes read as one dtype."""

    key: str
    dtype: str
    quarter: float | None
    half: float | None
    three_quarters: float | None


class ShowDocument(msgspec.Struct, kw_only=True):
    """Document of `show`.

    identities: identities by hash, from the markers; only for stores with trailers.
    """

    store: str
    page: str
    groups: list[Group]
    objects: list[ShownObject] | None = None
    contents: list[Contents]
    readings: list[Reading]
    findings: list[Finding]
    identities: dict[str, Identity] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class PageReport:
    """Report on a page.

    document: members of `ShowDocument`.
    objects: rows in the columns of `ShownObject`.
    """

    document: dict[str, Any]
    objects: pa.Table
    findings: pa.Table


def inspect_page(
    store: Store,
    profile: Profile | None,
    prefix: str,
    *,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    on_contradiction: Callable[[ContradictionError], None] | None = None,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> PageReport:
    """Read the page whose hash has the given prefix, and report on it.

    See `take_inventory` for the callbacks and errors. Also raises UsageError if not exactly one
    page has the prefix.
    """
    time = ListingTime.now(store, changes=False)
    listed = take_inventory(
        store,
        profile,
        columns={"replicas"} & store.traits.columns,
        on_contradiction=on_contradiction,
        on_batch=on_batch,
    )
    return inspect_listed(store, listed, time.ended(), profile, prefix, grace_seconds=grace_seconds)


def inspect_listed(
    store: Store,
    listed: Inventory,
    time: ListingTime,
    profile: Profile | None,
    prefix: str,
    *,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
) -> PageReport:
    """Report on a page as `inspect_page` does, from a listing made at the given time."""
    inventory = select(listed, Selection(page=prefix))
    groups = PageGroups(inventory)
    cleared = _cleared(listed, prefix)
    pages = pc.unique(groups.pages).to_pylist()
    if not pages:
        reason = explain_selection(store, listed, EVERYTHING) or (
            f"no page begins with {prefix!r}; hicachectl ls lists the pages"
        )
        if len(cleared):
            reason = (
                f"{prefix}: has only objects from before a server cleared the store; choose "
                "another page"
            )
        raise UsageError(f"{store.url}: {reason}")
    if len(pages) > 1:
        raise UsageError(
            f"{store.url}: {len(pages)} pages begin with {prefix!r}: {first_of(pages)}; give more "
            "digits"
        )
    checkers = value_checkers(known_specs(inventory.table), profile)
    reading = _read(store, inventory, checkers)
    given = CheckInput(
        store=store,
        groups=groups,
        in_flight=groups_in_flight(store, groups, time, grace_seconds),
        profile=profile,
        now_ns=time.start_ns,
        grace_ns=int(grace_seconds * 1e9),
    )
    found = combine(
        [
            *listing_findings(given, VerifyRequest(profile=profile).unmet(store)),
            *reading.findings(inventory),
            cleared_objects(listed, cleared, given.now_ns - given.grace_ns),
        ]
    )
    objects = _with_digests(object_rows(inventory), reading)
    identities: dict[str, Identity] | UnsetType = UNSET
    if isinstance(store, Trailed) and (markers := store.markers()):
        objects = _with_trailers(objects, store, inventory)
        seen = set(objects.column("identity").to_pylist())
        facts = {one.identity.hash().hex(): one.identity for one in markers}
        identities = {name: known for name, known in sorted(facts.items()) if name in seen}
    states = page_rows(groups).drop_columns(["page"]).to_pylist()
    for state in states:
        state["pools"] = {pool: counts for pool, counts in state["pools"].items() if counts}
    document = ShowDocument(
        store=store.url,
        page=pages[0],
        groups=states,
        contents=list(_contents(store, inventory, checkers)),
        readings=list(_readings(inventory, checkers, reading)),
        findings=found.to_pylist(),
        identities=identities,
    )
    return PageReport(msgspec.to_builtins(document), objects, found)


def _cleared(listed: Inventory, prefix: str) -> IntArray:
    """Return the rows of objects that a `clear` made misses, and whose key has the prefix."""
    rows = listed.cleared_rows
    keys = listed.take(rows, ["key"]).column("key")
    cleared: IntArray = rows[pc.starts_with(keys, prefix.lower()).to_numpy()]
    return cleared


def _read(
    store: Store, inventory: Inventory, checkers: Mapping[int, ValueChecker]
) -> ReadingResult:
    expected = inventory.table.expected_sizes
    sizes = readable_sizes(inventory, expected)
    huge = sizes > DEFAULT_BUFFER_BYTES
    rows = np.flatnonzero((sizes != UNKNOWN_SIZE) & ~huge)
    plan = ReadingPlan(
        rows=rows,
        capacities=sizes[rows],
        digest=np.ones(len(rows), dtype=np.bool_),
        noted=np.ones(len(rows), dtype=np.bool_),
        expected={},  # only devices need the specs
        checkers=checkers,
        sizes=expected,
    )
    reading = read_objects(store, inventory, plan)
    of_each = expected[inventory.affix_ids]
    unjudged = (of_each == UNKNOWN_SIZE) | (of_each == sizes)  # check_sizes reports other sizes
    for row in np.flatnonzero(huge & unjudged).tolist():
        why = (
            f"not read: needs {sizes[row]} bytes of memory, but the buffer has "
            f"{DEFAULT_BUFFER_BYTES}; run hicachectl verify with a larger --buffer-bytes"
        )
        reading.report("unreadable", row, why)
    return reading


def _with_digests(objects: pa.Table, reading: ReadingResult) -> pa.Table:
    digests = [
        digest.tobytes().hex() if known else None
        for digest, known in zip(reading.digests, reading.digested, strict=True)
    ]
    return objects.append_column("digest", pa.array(digests, pa.string()))


def _with_trailers(objects: pa.Table, store: Trailed, inventory: Inventory) -> pa.Table:
    trailers = store.read_trailers(inventory.objects).to_pylist()
    identities = [t["identity"] and t["identity"].hex() for t in trailers]
    digests = [t["identity"] and digest_text(t["digest_kind"], t["digest"]) for t in trailers]
    for name, values in (("identity", identities), ("trailer_digest", digests)):
        objects = objects.append_column(name, pa.array(values, pa.string()))
    return objects


def _readings(
    inventory: Inventory, checkers: Mapping[int, ValueChecker], reading: ReadingResult
) -> Iterator[Reading]:
    """Yield the quartiles that `checks.changes` compares.

    Each object with quartiles has a reading for each of the two dtypes that its numbers may have.
    """
    keys = object_rows(inventory).column("key")
    noted = np.flatnonzero(reading.quartiles.any(axis=1))
    for row in noted.tolist():
        quartiles = checkers[int(inventory.affix_ids[row])].quartiles
        if quartiles is not None:
            for dtype, sizes in quartiles.readings(reading.quartiles[row]).items():
                quarter, half, more = sizes
                yield Reading(
                    key=keys[row].as_py(),
                    dtype=dtype,
                    quarter=quarter,
                    half=half,
                    three_quarters=more,
                )


def _contents(
    store: Store, inventory: Inventory, checkers: Mapping[int, ValueChecker]
) -> Iterator[Any]:
    """Yield `Contents` for each tensor and layer of the objects that have the expected size."""
    sizes = inventory.table.expected_sizes[inventory.affix_ids]
    described = np.isin(inventory.affix_ids, list(checkers)) & (sizes == inventory.sizes)
    described &= sizes <= DEFAULT_BUFFER_BYTES
    keys = object_rows(inventory).column("key")

    def work(loaded: Loaded) -> list[dict[str, Any]]:
        row = int(loaded.task.rows[0])
        if not loaded.read.all_ok:
            return []
        checker = checkers[int(inventory.affix_ids[row])]
        return [
            {"key": keys[row].as_py(), **asdict(stats)} for stats in checker.stats(loaded.view(0))
        ]

    tasks = [Task(np.array([row]), sizes[row : row + 1]) for row in np.flatnonzero(described)]
    for rows in Pipeline(store, inventory.objects, tasks, work, jobs=1):
        yield from rows
