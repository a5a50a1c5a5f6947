"""Check a sample of values before files get trailers in place.

The plug-in trusts bytes that have a trailer, even if they contradict the profile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import PROFILE_OPTION
from hicachectl.checks.registry import VALUES, codes
from hicachectl.formats.errors import UsageError
from hicachectl.text.units import counted
from hicachectl.text.vocabulary import SAMPLE_PAGES
from hicachectl.verification.request import VerifyRequest
from hicachectl.verification.sampling import changes_of, day_sample
from hicachectl.verification.verify import RunStart, check_part

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.store_pair import CopyOptions
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.in_flight import ListingTime


def doubtful_values(
    store: Store,
    profile: Profile,
    groups: PageGroups,
    adopted: BoolArray,
    listing: ListingTime,
    options: CopyOptions,
) -> BoolArray:
    """Read a sample of the pages to adopt. Return which pages have doubtful values: [groups].

    Values are doubtful if a check finds a fault in them that can make answers wrong
    (`Code.misleads`).
    profile: profile of the store, which names the weights.
    adopted: [groups] whether the group will get trailers.
    Raises UsageError if values contradict the profile, and StoreUnavailable.
    """
    if not adopted.any():
        return adopted
    request = VerifyRequest(
        profile=profile,
        checks=(VALUES.name,),
        grace_seconds=0,  # pages in flight are already left out
        buffer_bytes=options.buffer_bytes,
        bytes_per_second=options.bytes_per_second,
        jobs=options.jobs,
    )
    sample = day_sample(groups.inventory.only(groups.rows_in(adopted)), SAMPLE_PAGES)
    sampled = adopted & sample.contains(groups.pages)
    part = check_part(
        store,
        request,
        groups.inventory.only(groups.rows_in(sampled)),
        RunStart(listing=listing, began=time.monotonic()),
        first=False,
    )
    # An unreadable object gets no trailer anyway, so only misleading findings count.
    misleading = pa.array([code.name for code in codes() if code.misleads])
    found = part.result.found
    found = found.filter(pc.is_in(found.column("code"), misleading))
    wrong = found.filter(pc.equal(found.column("severity"), "error"))
    read = counted(part.result.facts.sampled, "page")
    said = ""
    if len(wrong):
        names = ", ".join(sorted(pc.unique(wrong.column("code")).to_pylist()))
        pages = len(pc.unique(wrong.column("page")))
        said = f"{pages} of {read} read have values that contradict the profile ({names})"
    elif changes_of(part):
        said = f"{read} read are of servers with two dtypes or layouts (values-changed)"
    if said:
        raise UsageError(
            f"{store.url}: {said}, and a trailer would prove them right; no file was changed; "
            f"hicachectl verify {store.url} {PROFILE_OPTION} lists them"
        )
    of_found = pc.is_in(groups.pages, found.column("page").combine_chunks())
    doubtful: BoolArray = sampled & of_found.to_numpy(zero_copy_only=False)
    return doubtful
