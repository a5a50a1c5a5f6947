"""Refuse a repair if its profile may be wrong.

A sign of a wrong profile is one finding on at least half of the newest pages. A wrong profile gives
healthy pages findings that look like damage. Real damage strikes pages of any age, while the newest
pages show how servers run now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import LOCATED_SCHEMA, combine, located
from hicachectl.checks.registry import codes
from hicachectl.checks.structure import check_groups
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.move.removal_plan import described_groups, plan_repair
from hicachectl.pages.group_table import ORPHAN
from hicachectl.verification.part_result import Refusal

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.checks.codes import Code
    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.verification.verify import Judged, PartCheck

    Checked = CheckInput | PartCheck

# A tenth of the pages count as newest. At least a tenth of all pages must be affected.
_NEWEST = 10
_LEAST_NEWEST = 8
_SIZES = ("truncated", "oversized")


def doubt_missing(given: CheckInput) -> Refusal | None:
    """Return why `rm` must not trust the profile about missing objects; None if `rm` may trust it.

    A listing shows missing objects, so no object is read.
    """
    structural = [code.name for code in codes() if code.structural]
    found = combine(check_groups(given), LOCATED_SCHEMA)
    plan = plan_repair(located(found, given.groups), codes=structural)
    return doubt(given, plan.where(described_groups(given.groups)).reasons)


def doubt(checked: Checked, reasons: pa.Table, judged: Judged | None = None) -> Refusal | None:
    """Return why a repair must not trust the profile; None if the repair may trust it.

    reasons: findings of a `RepairPlan`, on which the repair would act.
    judged: objects that the checks judged; None if the checks judged the listing alone.

    The profile is doubted if there is a finding that a wrong profile can cause and that affects:

    - at least half of the newest pages, which are the newest tenth of the judged pages, but at
    least 8 pages
    - at least a tenth of all judged pages

    Two wrong sizes are one finding only if they have the same expected and actual size. A pool
    such as Mamba states may be in few pages only. So the findings of each pool that at least 8
    pages have are also compared with these pages alone. If the profile is doubted for several
    findings, the finding of most pages is returned.
    """
    known = {code.name: code for code in codes() if code.doubts and (judged or code.structural)}
    doubts = pa.array(list(known))
    chosen = np.flatnonzero(pc.is_in(reasons.column("code"), value_set=doubts).to_numpy())
    if not len(chosen):
        return None
    reasons = reasons.take(pa.array(chosen))
    about: IntArray = reasons.column("group").to_numpy()
    pools = reasons.column("pool").fill_null("")
    reasons = reasons.set_column(reasons.schema.get_field_index("pool"), "pool", pools)
    kinds = reasons.group_by(["code", "pool"]).aggregate([]).to_pydict()
    found: list[Refusal] = []
    pairs = {(code, "") for code in kinds["code"]} | set(zip(*kinds.values(), strict=True))
    for code, pool in sorted(pairs):
        own = pc.equal(reasons.column("code"), code)
        rows = np.flatnonzero((pc.and_(own, pc.equal(pools, pool)) if pool else own).to_numpy())
        among = _judged_groups(checked, judged, known[code], pool)
        among[about[rows]] = True
        if not pool or np.count_nonzero(among) >= _LEAST_NEWEST:
            found += _doubts(checked, code, reasons.take(pa.array(rows)), about[rows], among)
    return max(found, key=lambda refusal: refusal.affected, default=None)


def _judged_groups(checked: Checked, judged: Judged | None, code: Code, pool: str) -> BoolArray:
    """Return for which groups of the profile a check could have reported the finding: [groups].

    Such a group has an object of the pool that the check has judged. Structural checks report no
    missing objects of orphans.
    pool: name of the pool; "" for any pool.
    """
    groups, inventory = checked.groups, checked.groups.inventory
    table = inventory.table
    of_pool = np.array(
        [*(spec is not None and pool in ("", spec.pool) for spec in table.specs), False]
    )[inventory.affix_ids]
    if code.structural or judged is None:
        trails = {spec.pool for spec in table.deployments[0].specs if spec.trailing}
        objects = of_pool if pool in trails else np.ones(len(of_pool), dtype=np.bool_)
    elif code.name in _SIZES:
        sizes = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
        objects = of_pool & ((sizes != UNKNOWN_SIZE) | judged.tried)
    elif code.name == "identity-mismatch":
        objects = of_pool & judged.identified
    else:
        objects = of_pool & judged.valued
    having = np.zeros(len(groups) + 1, dtype=np.bool_)  # last entry: objects without a group
    having[groups.of_object[objects]] = True
    having = having[:-1] & ~checked.in_flight
    if code.structural:
        having &= groups.states != ORPHAN
    span = groups.span(0)
    having[: span.start] = having[span.stop :] = False
    return having


def _doubts(
    checked: Checked,
    code: str,
    reasons: pa.Table,
    about: IntArray,
    judged: BoolArray,
) -> list[Refusal]:
    """Return the refusals for findings of one code and pool.

    about: [reasons] group of each finding.
    judged: [groups] groups for which the check could have reported the finding.
    """
    numbers = np.flatnonzero(judged)
    times = checked.groups.newest_ns[numbers]
    newest = _newest(times)
    details, of_reason = _alike(reasons, code)
    pairs = np.unique(of_reason * len(judged) + about)
    of_pair, owners = np.divmod(pairs, len(judged))
    places = np.searchsorted(numbers, owners)
    counts = np.bincount(of_pair, minlength=len(details))
    found = []
    for kind in np.flatnonzero(_NEWEST * counts >= len(numbers)).tolist():
        affected = np.zeros(len(numbers), dtype=np.bool_)
        affected[places[of_pair == kind]] = True
        of_newest = int(affected[newest].sum())
        if 2 * of_newest < int(newest.sum()):
            continue
        found.append(
            Refusal(
                code=code,
                detail=details[kind],
                newest=int(newest.sum()),
                newest_affected=of_newest,
                pages=len(numbers),
                affected=int(affected.sum()),
                since=_since(times, affected) / 10**9 if checked.groups.has_times else None,
            )
        )
    return found


def _alike(reasons: pa.Table, code: str) -> tuple[list[str], IntArray]:
    """Return the distinct findings of one code, and the index of each reason's finding.

    A finding is given as its detail. For wrong sizes, the detail states both sizes. For other
    codes, the detail describes a single page, so all reasons count as one finding.
    """
    if code not in _SIZES:
        return [""], np.zeros(len(reasons), dtype=np.int64)
    encoded = reasons.column("detail").combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _newest(times: IntArray) -> BoolArray:
    """Return which pages are the newest tenth, at least 8: [pages].

    All pages of the same time count as newest if one of them does. Without times, all pages do.
    """
    count = max(_LEAST_NEWEST, -(-len(times) // _NEWEST))
    if len(times) <= count:
        return np.ones(len(times), dtype=np.bool_)
    place = len(times) - count
    chosen: BoolArray = times >= np.partition(times, place)[place]
    return chosen


def _since(times: IntArray, affected: BoolArray) -> int:
    """Return when the affected pages began to be at least half of all pages.

    Take the longest period, up to the newest page, in which at least half of the pages are
    affected.
    Return the time of the oldest affected page in this period.
    """
    order: npt.NDArray[np.int64] = np.argsort(-times, kind="stable")
    struck = affected[order]
    most = np.flatnonzero(2 * np.cumsum(struck) >= np.arange(1, len(order) + 1))
    return int(times[order[: most[-1] + 1]][struck[: most[-1] + 1]].min())
