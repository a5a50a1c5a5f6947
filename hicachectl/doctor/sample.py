"""Checks of `doctor` that judge what `verify` finds in a listing and in a sample of its pages."""

from __future__ import annotations

import os
import pwd
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from hicachectl.checks.page_tables import saved_tables
from hicachectl.doctor.checks import FAIL, OK, STORE, UNKNOWN, WARN, Check
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.wording import GIVE_PROFILE
from hicachectl.profiles.identities import expect_identities
from hicachectl.text.units import counted
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS
from hicachectl.verification.request import VerifyRequest
from hicachectl.verification.sampling import changes_of, day_sample
from hicachectl.verification.verify import RunStart, check_part, lister_findings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from fractions import Fraction

    from hicachectl.backends.base import Store
    from hicachectl.doctor.listed_store import ListedStore
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.in_flight import ListingTime
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.verify import PartCheck

_READ_SECONDS = 20.0  # no read begins after this time
# A server writes the objects of a page within seconds, so this short grace suffices.
_GRACE_SECONDS = 10.0
_MOST_LOOKED_UP = 20_000  # most groups to look up, which takes two seconds
# Servers evict object by object, so up to one page in this many has a warning in a sound store.
_FEW = 100
_UNREADABLE = frozenset({"unreadable", "no-replica"})
_STAMP = frozenset({"stamp-mismatch"})
_IDENTITY = frozenset({"identity-mismatch"})
_DTYPE, _LAYOUT = frozenset({"dtype-mismatch"}), frozenset({"layout-mismatch"})
_TEMPORARIES = frozenset({"stale-temporary"})
_SIZES = frozenset({"truncated", "oversized"})
_VALUES = frozenset(
    {"nan", "inf", "bad-scale", "all-zero", "digest-mismatch", "re-recorded", "replica-mismatch"}
)
_APART = _UNREADABLE | _STAMP | _IDENTITY | _DTYPE | _LAYOUT | _TEMPORARIES | _VALUES
_NO_DAMAGE = frozenset({"foreign-object", "ambiguous-key", "other-deployment", "disk-only"})
# Beginnings of details of `stamp-mismatch` that the checks of a server's deployment report, too.
_DEPLOYED = ("page_size:", "layout:", "tp:", "pp:", "cp:", "dcp:", "tag:", "model:")

_check = partial(Check, group=STORE)


def sample_checks(listed: ListedStore, store: Store, inventory: Inventory) -> Iterator[Check]:
    """Check the listing and a sample of the pages as `verify` does, and judge the findings."""
    assert listed.listing is not None
    findings = _Findings(
        _examined(store, listed, inventory, listed.listing),
        listed.profile,
        _of_scales(inventory, listed.explained),
    )
    for judge in (_readable, _structure, _identities, _values, _temporaries):
        yield from judge(listed, findings)


def _examined(
    store: Store, listed: ListedStore, inventory: Inventory, listing: ListingTime
) -> PartCheck:
    """Return what `verify` finds in the listing and in a sample of the pages."""
    profile = listed.profile
    if profile is not None and not profile.inferred and len(listed.weights) == 1:
        profile = replace(profile, weights=next(iter(listed.weights)))
        expect_identities(store, profile)
    request = VerifyRequest(
        profile=profile,
        grace_seconds=_GRACE_SECONDS,
        sample=day_sample(inventory, listed.sample_pages),
        time_limit_seconds=_READ_SECONDS if listed.sample_pages else 0.0,
        most_looked_up=_MOST_LOOKED_UP,
        # A catalog makes the run read all sampled objects, even if no profile describes them.
        update_catalog=True,
    )
    start = RunStart(listing=listing, began=time.monotonic(), tables=saved_tables(store))
    checked = check_part(store, request, inventory, start)
    found = lister_findings(store, request, listing.start_ns)
    checked.result.found = pa.concat_tables([found, checked.result.found])
    return checked


def _of_scales(inventory: Inventory, scales: Collection[Fraction]) -> BoolArray:
    """Return which objects have one of these ratios of actual to expected size: [objects]."""
    expected = inventory.table.expected_sizes[inventory.affix_ids]
    known = (expected > 0) & (inventory.sizes != UNKNOWN_SIZE)
    chosen = np.zeros(len(expected), dtype=np.bool_)
    for scale in scales:
        chosen |= known & (inventory.sizes * scale.denominator == expected * scale.numerator)
    return chosen


class _Findings:
    """Findings of `verify` in the listing and in the sample.

    changes: findings about changes of dtype or layout.
    pages: number of pages in the store.
    explained: number of pages with objects whose size another check explains.
    young: number of pages that a server may be writing.
    sampled: number of pages with an object to read.
    tried: number of objects whose read was tried.
    """

    def __init__(self, part: PartCheck, profile: Profile | None, explained: BoolArray) -> None:
        self.part = part
        self._given = profile is not None and not profile.inferred
        # The profile's deployment has the number 0. Without a profile, it is just the first one.
        self._own = (part.groups.deployment_ids == 0) & self._given
        self.pages = len(part.groups)
        self.young = int(part.in_flight.sum())
        self.sampled = part.result.facts.sampled
        self.tried = part.result.facts.reading.objects_read
        youngest = (part.listing.start_ns - part.groups.newest_ns.max(initial=0)) / 1e9
        self._grace = f"--grace {_GRACE_SECONDS:.0f}s" if youngest < DEFAULT_GRACE_SECONDS else ""
        table = part.result.found.combine_chunks()
        rows = table.column("row").to_numpy()
        sized = pc.is_in(table.column("code"), pa.array(list(_SIZES))).to_numpy()
        # The row of a finding about no object is NO_NUMBER, which selects the appended entry.
        told = sized & np.append(explained, False)[rows]
        self.explained = self.damaged(table.filter(pa.array(told)))
        self._table = table.filter(pa.array(~told))
        self.changes = changes_of(part)

    @property
    def judged(self) -> int:
        """Number of pages whose structure was judged."""
        return self.pages - self.young - self.explained

    @property
    def by(self) -> str:
        """How pages were judged. A profile describes only the pages of its own deployment."""
        if not self._own.any():
            return "by comparison with each other"
        if self._own.all():
            return "by the profile"
        return "by the profile or, for other deployments, by comparison with each other"

    def verify(self, listed: ListedStore) -> str:
        """Return the command that lists these findings.

        The command leaves out a profile that describes no page of the store, because `verify`
        refuses such a profile.
        """
        options = "OPTIONS" if self._own.any() or not self._given else ""
        return listed.mending.command(f"hicachectl verify STORE {options} {self._grace}")

    def of(self, codes: Collection[str]) -> pa.Table:
        """Return the findings of some codes."""
        return self._table.filter(pc.is_in(self._table.column("code"), pa.array(list(codes))))

    def structural(self) -> pa.Table:
        """Return the findings for the check `structure`: faults that no other check judges."""
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
    """Return the codes of findings with their numbers, the most frequent code first."""
    counts = pc.value_counts(found.column("code")).to_pylist()
    ordered = sorted(counts, key=lambda row: -row["counts"])
    return ", ".join(f"{row['counts']} {row['values']}" for row in ordered)


def _readable(listed: ListedStore, findings: _Findings) -> Iterator[Check]:
    found = findings.of(_UNREADABLE)
    if len(found):
        yield _check(
            "readable",
            FAIL,
            f"{len(found)} of {counted(findings.tried, 'object')} could not be read as user "
            f"{_user()}",
            evidence=f"{_why(found)}; one such object costs servers a whole batch of pages",
            next=findings.verify(listed),
        )
    elif findings.tried:
        stored = []
        if findings.sampled < findings.pages:
            stored.append(f"{counted(findings.pages, 'page')} in the store")
        if findings.young:
            stored.append(
                f"{counted(findings.young, 'page')} younger than {_GRACE_SECONDS:.0f} s not read"
            )
        yield _check(
            "readable",
            OK,
            f"{counted(findings.tried, 'object')} of {counted(findings.sampled, 'page')} can be "
            "read",
            evidence=", ".join(stored),
        )
    else:
        if not listed.sample_pages:
            why = "the sample has 0 pages; give --sample"
        elif findings.young == findings.pages:
            why = f"all pages are younger than {_GRACE_SECONDS:.0f} s; run again later"
        else:
            why = f"the sizes of the objects are unknown; {GIVE_PROFILE}"
        message = f"No object was read, because {why}"
        yield Check.of_message("readable", UNKNOWN, message, group=STORE)


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _why(found: pa.Table) -> str:
    """Return why the first object could not be read, and its page. The text has no path."""
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
        findings.judged,
        errors="could give servers wrong data or failed reads",
        warnings="have faults that cost hits",
    ):
        yield worst
        return
    left_out = []
    if findings.explained:
        left_out.append(
            f"{counted(findings.explained, 'page')} of another size; see the server's checks"
        )
    if findings.young:
        left_out.append(f"{counted(findings.young, 'page')} younger than {_GRACE_SECONDS:.0f} s")
    if not findings.judged:
        message = (
            f"No page was judged, because all pages are younger than {_GRACE_SECONDS:.0f} s; run "
            "again later"
        )
        if findings.explained:
            message = f"No page was judged: {' and '.join(left_out)}"
        yield Check.of_message("structure", UNKNOWN, message, group=STORE)
        return
    whole = findings.judged - findings.damaged(found)
    yield _check(
        "structure",
        OK,
        f"{whole} of {counted(findings.judged, 'judged page')} are whole, {findings.by}",
        evidence="; ".join(
            filter(None, (_counts(found), f"not judged: {', '.join(left_out)}" if left_out else ""))
        ),
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
    """Return the check of pages with findings; None if they are too few to matter.

    The check fails if any page has an error. It warns if many pages have warnings.
    pages: number of pages that were judged.
    errors: words that follow "N of M pages" in the text about pages with errors.
    warnings: the same for pages with findings.
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
    elif findings.changes:
        said, _, evidence = str(findings.changes[0].column("detail")[0]).partition("; ")
        yield _check(
            "changes",
            FAIL,
            f"Servers of two settings wrote the pages: {said}",
            evidence=evidence,
            next=findings.verify(listed),
        )
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
