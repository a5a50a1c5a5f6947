"""Checks of `doctor` about one store: what `verify` of a sample, its times and its space say."""

from __future__ import annotations

import math
import os
import pwd
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from hicachectl.backends.capabilities import Serviced
from hicachectl.checks.page_tables import saved_tables
from hicachectl.doctor.checks import FAIL, OK, STORE, UNKNOWN, WARN, Check, verdict_of
from hicachectl.formats.errors import HicacheError, UsageError
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.wording import GIVE_PROFILE
from hicachectl.pages.census import byte_sum
from hicachectl.pages.in_flight import ListingTime
from hicachectl.pages.inventory import describe_empty
from hicachectl.pages.scanning import take_inventory
from hicachectl.profiles.identities import expect_identities
from hicachectl.text.units import counted, human_age, human_size
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS
from hicachectl.verification.report_text import Mending
from hicachectl.verification.request import Sample, VerifyRequest
from hicachectl.verification.verify import RunStart, check_part, lister_findings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.verify import PartCheck

SAMPLE_PAGES = 256
_SAMPLE_BYTES = 1 << 30  # the most bytes to read
_READ_SECONDS = 20.0  # no read begins later
# A server writes the objects of a page within seconds. A run of minutes leaves out more.
_GRACE_SECONDS = 10.0
_MOST_LOOKED_UP = 20_000  # groups; two seconds
_HOUR, _DAY = 3600.0, 86400.0
_ROOM = 64 << 20  # with less, the next batch of pages does not fit
# Share of the stored and the free bytes.
_LEAST_FREE = 0.05
_FEW = 100  # one of so many pages with a warning is normal: servers evict object by object

_UNREADABLE = frozenset({"unreadable", "no-replica"})
_STAMP = frozenset({"stamp-mismatch"})
_IDENTITY = frozenset({"identity-mismatch"})
_DTYPE, _LAYOUT = frozenset({"dtype-mismatch"}), frozenset({"layout-mismatch"})
_TEMPORARIES = frozenset({"stale-temporary"})
_VALUES = frozenset(
    {"nan", "inf", "bad-scale", "all-zero", "digest-mismatch", "re-recorded", "replica-mismatch"}
)
_APART = _UNREADABLE | _STAMP | _IDENTITY | _DTYPE | _LAYOUT | _TEMPORARIES | _VALUES
_NO_DAMAGE = frozenset({"foreign-object", "ambiguous-key", "other-deployment", "disk-only"})
# Differences from the stamp that the checks of the server's deployment name.
_DEPLOYED = ("page_size:", "layout:", "tp:", "pp:", "cp:", "dcp:", "tag:", "model:")

_check = partial(Check, group=STORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedStore:
    """A store that was opened and listed once, and the servers to judge it by.

    mending: the store and the options of the profile in suggested commands.
    store: the open store; None if it could not be opened.
    inventory: all objects; None if they could not be listed.
    problem: why the store could not be opened or listed, and the next step, else "".
    contradiction: how the profile contradicts all objects of its deployment, else "".
    listing: time of the listing; None without one.
    has_servers: whether servers were asked, and their deployments are compared with the store's.
    profile: profile of the servers, or of the options; None if unknown.
    started: start of the first server, Unix seconds; None if unknown.
    weights: texts that name the weights, of the ranks that serve with the plug-in.
    sample_pages: number of pages to read; 0 reads none.
    """

    mending: Mending = field(default_factory=Mending)
    store: Store | None = None
    inventory: Inventory | None = None
    problem: str = ""
    contradiction: str = ""
    listing: ListingTime | None = None
    has_servers: bool = False
    profile: Profile | None = None
    started: float | None = None
    weights: frozenset[str] = frozenset()
    sample_pages: int = SAMPLE_PAGES

    def command(self, name: str, *more: str) -> str:
        """Return a command of hicachectl on the store, with the options of the profile."""
        command = self.mending.command(f"hicachectl {name} STORE OPTIONS")
        return " ".join(filter(None, (command, *more)))


def list_store(
    store: Store, profile: Profile | None = None, *, sample_pages: int = SAMPLE_PAGES
) -> ListedStore:
    """List an open store once, for all checks.

    Arguments: see `ListedStore`. An error of the store becomes `problem`. Raises UsageError.
    """
    contradictions: list[str] = []
    inventory, problem, listing = None, "", None
    try:
        listing = ListingTime.now(store, changes=False)
        inventory = take_inventory(
            store, profile, only_others=True, on_contradiction=contradictions.append
        )
        listing = listing.ended()
    except UsageError:
        raise
    except HicacheError as error:
        problem = str(error)
    return ListedStore(
        mending=Mending(store=store.url),
        store=store,
        inventory=inventory,
        problem=problem,
        contradiction=contradictions[0] if contradictions else "",
        listing=listing,
        profile=profile,
        sample_pages=sample_pages,
    )


def store_checks(listed: ListedStore) -> list[Check]:
    """Judge a store by its listing, a sample, its space and its services, in the order of causes.

    At most a sample of the pages is read, and nothing is changed. Without a server, this is the
    health of the store: it can be reached and read, it has room, and the age of its newest page.
    """
    store, inventory, listing = listed.store, listed.inventory, listed.listing
    if store is None or inventory is None or listing is None:
        return [Check.of_message("reachable", FAIL, listed.problem, group=STORE)]
    checks = [_reachable(store, inventory, listing)]
    try:
        if isinstance(store, Serviced):
            checks += _services(store)
            if verdict_of(checks) == FAIL:
                return checks  # its objects cannot be read
        if inventory.is_foreign.all():
            return [*checks, _empty(store, inventory), *_space(listed, store, inventory, listing)]
        findings = _Findings(_examined(store, listed, inventory, listing))
        checks += _readable(listed, findings)
        checks += _structure(listed, findings)
        checks += _identities(listed, findings)
        checks += _values(listed, findings)
        checks += _temporaries(listed, findings)
        checks += _space(listed, store, inventory, listing)
        checks += _last_write(listed, inventory, listing)
    except UsageError:
        raise
    except HicacheError as error:
        checks.append(Check.of_message("readable", FAIL, str(error), group=STORE))
    return checks


# --- the listing and the sample ---


def _reachable(store: Store, inventory: Inventory, listing: ListingTime) -> Check:
    nbytes = byte_sum(_sizes(inventory))
    size = f", {human_size(nbytes)}" if nbytes else ""
    return _check(
        "reachable",
        OK,
        f"The store can be listed: {counted(len(inventory.objects), 'object')}{size}",
        evidence="; ".join((f"listed in {listing.duration_ns / 1e9:.1f} s", *store.remarks)),
    )


def _empty(store: Store, inventory: Inventory) -> Check:
    what, _, next_step = describe_empty(store, inventory).rpartition("; ")
    return _check("pages", WARN, what, next=next_step)


def _sizes(inventory: Inventory) -> IntArray:
    """Return the bytes of each object, 0 if unknown: [objects]."""
    expected = inventory.table.expected_sizes[inventory.affix_ids]
    sizes = np.where(inventory.sizes == UNKNOWN_SIZE, expected, inventory.sizes)
    known: IntArray = np.where(sizes == UNKNOWN_SIZE, 0, sizes)
    return known


def _examined(
    store: Store, listed: ListedStore, inventory: Inventory, listing: ListingTime
) -> PartCheck:
    """Check the listing and a sample of the pages as `verify` does."""
    profile = listed.profile
    if profile is not None and not profile.inferred and len(listed.weights) == 1:
        profile = replace(profile, weights=next(iter(listed.weights)))
        expect_identities(store, profile)
    request = VerifyRequest(
        profile=profile,
        grace_seconds=_GRACE_SECONDS,
        sample=_sample(listed.sample_pages, inventory),
        time_limit_seconds=_READ_SECONDS if listed.sample_pages else 0.0,
        most_looked_up=_MOST_LOOKED_UP,
        # A catalog makes the run read all sampled objects, also where no profile describes them.
        update_catalog=True,
    )
    start = RunStart(listing=listing, began=time.monotonic(), tables=saved_tables(store))
    checked = check_part(store, request, inventory, start)
    found = lister_findings(store, request, listing.start_ns)
    checked.result.found = pa.concat_tables([found, checked.result.found])
    return checked


def _sample(pages: int, inventory: Inventory) -> Sample:
    """Return a slice with about so many pages, no more than _SAMPLE_BYTES, another one each day."""
    paged = ~inventory.is_foreign
    hashes = np.sort(inventory.page_words(paged, 0))
    stored = len(hashes) - int((hashes[1:] == hashes[:-1]).sum())
    most = int(_SAMPLE_BYTES * stored / max(1, byte_sum(_sizes(inventory))))
    slices = max(1, round(stored / max(1, min(pages, most))))
    # The slice of a page, so that it is not empty.
    page = int(hashes[int(time.time() // _DAY) % len(hashes)]) >> 32
    return Sample(slices, page % slices)


class _Findings:
    """Findings of a part.

    pages: number of pages in the store.
    sampled: number of pages with an object to read.
    tried: number of objects whose read was tried.
    """

    def __init__(self, part: PartCheck) -> None:
        self.part = part
        self.pages = len(part.groups)
        self.sampled = part.result.facts.sampled
        self.tried = part.result.facts.reading.objects_read
        youngest = (part.listing.start_ns - part.groups.newest_ns.max(initial=0)) / 1e9
        self._grace = f"--grace {_GRACE_SECONDS:.0f}s" if youngest < DEFAULT_GRACE_SECONDS else ""
        self._table = part.result.found.combine_chunks()

    def verify(self, listed: ListedStore) -> str:
        """Return the command that finds the same again."""
        return listed.command("verify", self._grace)

    def of(self, codes: Collection[str]) -> pa.Table:
        """Return the findings of some codes."""
        return self._table.filter(pc.is_in(self._table.column("code"), pa.array(list(codes))))

    def structural(self) -> pa.Table:
        """Return the findings that no other check is about."""
        others = pa.array([*_APART, *_NO_DAMAGE])
        return self._table.filter(pc.invert(pc.is_in(self._table.column("code"), others)))

    @staticmethod
    def damaged(found: pa.Table) -> int:
        """Return the number of pages, or of other objects, that findings are about."""
        what = pc.coalesce(found.column("page"), found.column("key"), found.column("detail"))
        return int(pc.count_distinct(what).as_py())


def _severe(found: pa.Table) -> pa.Table:
    return found.filter(pc.equal(found.column("severity"), "error"))


def _counts(found: pa.Table) -> str:
    """Return the codes of findings with their numbers, the most first."""
    counts = pc.value_counts(found.column("code")).to_pylist()
    ordered = sorted(counts, key=lambda row: -row["counts"])
    return ", ".join(f"{row['counts']} {row['values']}" for row in ordered)


# --- checks of the findings ---


def _readable(listed: ListedStore, findings: _Findings) -> Iterator[Check]:
    found = findings.of(_UNREADABLE)
    if len(found):
        yield _check(
            "readable",
            FAIL,
            f"{len(found)} of {counted(findings.tried, 'object')} could not be read as user "
            f"{_user()}",
            evidence=f"{_why(found)}; one of them costs servers a whole batch of pages",
            next=findings.verify(listed),
        )
    elif findings.tried:
        yield _check(
            "readable",
            OK,
            f"{counted(findings.tried, 'object')} of {counted(findings.sampled, 'page')} can be "
            "read",
            evidence="" if findings.sampled == findings.pages else f"{findings.pages} in the store",
        )
    else:
        young = int(findings.part.in_flight.sum())
        if not listed.sample_pages:
            why = "the sample has 0 pages; give --sample"
        elif young == findings.pages:
            why = f"all are younger than {_GRACE_SECONDS:.0f} s; run again later"
        else:
            why = f"their sizes are unknown; {GIVE_PROFILE}"
        yield Check.of_message("readable", UNKNOWN, f"No object was read: {why}", group=STORE)


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _why(found: pa.Table) -> str:
    """Return why the first object could not be read, without its path, and its page."""
    page = found.column("page")[0].as_py()
    why = str(found.column("detail")[0]).rpartition(": ")[2]
    return f"{why}; the first is of page {page[:8]}…" if page else why


def _structure(listed: ListedStore, findings: _Findings) -> Iterator[Check]:
    if listed.contradiction:
        # With servers, the checks of their deployments name the cause.
        status, before = (UNKNOWN, "Not judged: ") if listed.has_servers else (FAIL, "")
        message = f"{before}{listed.contradiction}"
        yield Check.of_message("structure", status, message, group=STORE)
        return
    found = findings.structural()
    if worst := _worst(
        listed,
        findings,
        found,
        "structure",
        findings.pages,
        errors="could give servers wrong data",
        warnings="have faults that cost hits",
    ):
        yield worst
        return
    young = int(findings.part.in_flight.sum())
    whole = findings.pages - findings.damaged(found) - young
    if young == findings.pages:
        message = (
            f"No page was judged: all are younger than {_GRACE_SECONDS:.0f} s; run again later"
        )
        yield Check.of_message("structure", UNKNOWN, message, group=STORE)
        return
    in_flight = f"{counted(young, 'page')} younger than {_GRACE_SECONDS:.0f} s not judged"
    given = listed.profile is not None and not listed.profile.inferred
    by = "by the profile" if given else "by comparison with each other"
    yield _check(
        "structure",
        OK,
        f"{whole} of {counted(findings.pages, 'page')} are whole, {by}",
        evidence="; ".join(filter(None, (_counts(found), in_flight if young else ""))),
    )


def _worst(
    listed: ListedStore,
    findings: _Findings,
    found: pa.Table,
    name: str,
    pages: int,
    *,
    errors: str,
    warnings: str,
) -> Check | None:
    """Return the check of pages with findings: any error fails, and many warnings warn.

    pages: number of pages that were judged.
    errors: predicate of the pages with errors.
    warnings: predicate of the pages with findings.
    """
    number, status, predicate = findings.damaged(_severe(found)), FAIL, errors
    if not number:
        number, status, predicate = findings.damaged(found), WARN, warnings
        if number * _FEW <= pages:
            return None
    return _check(
        name,
        status,
        f"{number} of {counted(pages, 'page')} {predicate}",
        evidence=_counts(found),
        next=findings.verify(listed),
    )


def _identities(listed: ListedStore, findings: _Findings) -> Iterator[Check]:
    """Compare the stamp, and the identities in trailers, with the servers' weights."""
    stamp = findings.of(_STAMP).column("detail").to_pylist()
    told = [text for text in stamp if not text.startswith(_DEPLOYED)]
    if len(findings.of(_DTYPE)):
        told = [text for text in told if not text.startswith("pools[")]
    if told:
        yield _check(
            "stamp",
            FAIL,
            "The stamp of the store differs from the servers' profile",
            evidence="; ".join(told),
            next="hicachectl explain stamp-mismatch",
        )
    if len(other := findings.of(_IDENTITY)):
        yield _check(
            "weights",
            FAIL,
            f"{findings.damaged(other)} of {counted(findings.sampled, 'page')} read are of other "
            "weights, dtype or layout than the servers'",
            evidence=str(other.column("detail")[0]),
            next="hicachectl explain identity-mismatch",
        )


def _values(listed: ListedStore, findings: _Findings) -> Iterator[Check]:
    read = f"of {counted(findings.sampled, 'page')} read"
    if len(found := findings.of(_DTYPE)):
        said, _, shares = str(found.column("detail")[0]).partition(": ")
        yield _check(
            "dtype",
            FAIL,
            f"{findings.damaged(found)} {read} are of another dtype than the servers': {said}",
            evidence=shares,
            next="hicachectl explain dtype-mismatch",
        )
    if len(found := findings.of(_LAYOUT)):
        yield _check(
            "layout",
            FAIL,
            f"{findings.damaged(found)} {read} lie in another memory layout than the servers'",
            evidence=str(found.column("detail")[0]),
            next="hicachectl explain layout-mismatch",
        )
    if worst := _worst(
        listed,
        findings,
        findings.of(_VALUES),
        "values",
        findings.sampled,
        errors="read have damaged values",
        warnings="read have odd values",
    ):
        yield worst
    elif len(findings.of(_DTYPE | _LAYOUT)):
        return
    elif valued := int(findings.part.judged.valued.sum()):
        yield _check("values", OK, f"The values of {counted(valued, 'object')} look as they should")


def _temporaries(listed: ListedStore, findings: _Findings) -> Iterator[Check]:
    if number := len(findings.of(_TEMPORARIES)):
        yield _check(
            "temporaries",
            WARN,
            f"{counted(number, 'file')} of unfinished writes, or from before a clear, take space",
            next=listed.mending.command("hicachectl rm STORE --temporaries"),
        )


# --- space and times ---


def _space(
    listed: ListedStore, store: Store, inventory: Inventory, listing: ListingTime
) -> Iterator[Check]:
    free = store.free_bytes()
    if free is None or not store.traits.live:
        return
    sizes = _sizes(inventory)
    if store.traits.evicts:
        yield _check(
            "space",
            OK,
            f"{human_size(free)} are free; a full store evicts pages, which is normal",
        )
        return
    written, seconds = _written_lately(inventory, sizes, listing)
    hours = free * seconds / written / _HOUR if written else None
    rate = f"{human_size(written)} written in the last {human_age(seconds)}" if written else ""
    whole = free + byte_sum(sizes)
    if free < _ROOM:
        status, told = FAIL, f"No room: {human_size(free)} are free, so servers store nothing more"
    elif hours is not None and hours < _DAY / _HOUR:
        status, told = (
            WARN,
            f"The {human_size(free)} that are free last {human_age(hours * _HOUR)} at the rate of "
            "the last day, unless servers evict",
        )
    elif free < _LEAST_FREE * whole:
        status, told = (
            WARN,
            f"{human_size(free)} are free, {free / whole:.1%} of what the store can take, unless "
            "servers evict",
        )
    else:
        yield _check("space", OK, f"{human_size(free)} are free", evidence=rate)
        return
    limit = "max_size of hicachectl's storage backend limits a store"
    room = f"--keep-free {max(1, math.ceil(_LEAST_FREE * whole / (1 << 30)))}GiB"
    yield _check(
        "space",
        status,
        told,
        evidence="; ".join(filter(None, (rate, limit))),
        next=listed.mending.command(f"hicachectl rm STORE {room}"),
    )


def _written_lately(
    inventory: Inventory, sizes: IntArray, listing: ListingTime
) -> tuple[int, float]:
    """Return the bytes written in the last day, and the seconds that they took; 0 if unknown.

    A store that is younger than an hour tells no rate.
    """
    times = inventory.objects.column("mtime_ns")
    ages = (listing.start_ns - times.drop_null().to_numpy()) / 1e9
    oldest = float(ages.max(initial=0.0))
    if oldest < _HOUR:
        return 0, 0.0
    seconds = min(oldest, _DAY)
    known = times.is_valid().to_numpy()
    return byte_sum(sizes[known][ages <= seconds]), seconds


def _last_write(listed: ListedStore, inventory: Inventory, listing: ListingTime) -> Iterator[Check]:
    """Compare the newest page with the start of the server, which writes what it computes."""
    chosen = ~inventory.is_foreign
    if listed.profile is not None and not listed.profile.inferred:
        own = [number == 0 for number in inventory.table.deployment_ids]
        chosen &= inventory.by_affix(own, False)
        if not (chosen.any() or listed.has_servers):
            yield _check(
                "pages",
                WARN,
                "The store has no page of the profile's deployment",
                next=listed.mending.command("hicachectl ls STORE --summary"),
            )
    times = inventory.objects.column("mtime_ns").filter(pa.array(chosen)).drop_null()
    if not len(times):
        return
    newest_ns = pc.max(times).as_py()
    detail = f"The newest page was written {human_age((listing.start_ns - newest_ns) / 1e9)} ago"
    running = 0.0 if listed.started is None else listing.start_ns / 1e9 - listed.started
    if listed.started is None or newest_ns / 1e9 >= listed.started or running < _HOUR:
        yield _check("last-write", OK, detail)
        return
    yield _check(
        "last-write",
        UNKNOWN,
        f"{detail}, before the server started {human_age(running)} ago: it has stored nothing new",
        evidence="a server that has answered new prompts stores them elsewhere, or not at all",
        next=listed.command("doctor", "--write-probe"),
    )


# --- services ---


def _services(store: Serviced) -> Iterator[Check]:
    for one in store.conditions():
        if one.problem:
            status = FAIL if one.is_lost else WARN
            yield Check.of_message(one.name, status, one.problem, group=STORE)
        else:
            yield _check(one.name, OK, one.text)
