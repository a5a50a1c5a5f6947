"""Run the checks that judge a listing; find the page groups that findings are about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import NO_NUMBER
from hicachectl.checks.registry import Need, Scope, checks
from hicachectl.pages.deployments import UNRESOLVED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory


def listing_findings(given: CheckInput, unmet: Collection[Need] = ()) -> Iterator[pa.Table]:
    """Yield the findings of each registered check of objects that reads no bytes.

    unmet: needs that the store or the profile does not meet; checks with such a need do not run.
    """
    unmet = {*unmet, Need.BYTES}
    if "replicas" not in given.inventory.objects.column_names:
        unmet.add(Need.REPLICAS)
    for check in checks():
        if check.scope is Scope.OBJECTS and check.needs.isdisjoint(unmet):
            yield from check.find(given)


def located(found: pa.Table, inventory: Inventory, groups: PageGroups) -> pa.Table:
    """Return findings with the row of each object and the group of each row.

    found: has the columns of `findings.LOCATED_SCHEMA`. Findings that have only a key, such as
    those about page tables, get the row of the key. Groups of ambiguous keys get no finding: a
    profile must not cause their removal.
    """
    rows, about = (found.column(name).to_numpy().copy() for name in ("row", "group"))
    has_key = found.column("key").is_valid().to_numpy()
    keyed = np.flatnonzero((rows == NO_NUMBER) & (about == NO_NUMBER) & has_key)
    if len(keyed):
        rows[keyed] = _rows_of(found.column("key").take(pa.array(keyed)), inventory)
    of_object = rows != NO_NUMBER
    about[of_object] = groups.of_object[rows[of_object]]
    in_group = np.flatnonzero(about != NO_NUMBER)
    ambiguous = groups.deployment_ids[about[in_group]] == UNRESOLVED
    about[in_group[ambiguous]] = NO_NUMBER
    for name, numbers in (("row", rows), ("group", about)):
        found = found.set_column(found.schema.get_field_index(name), name, pa.array(numbers))
    return found


def _rows_of(keys: pa.ChunkedArray, inventory: Inventory) -> IntArray:
    """Return the row of each key, as text; NO_NUMBER for a key that the listing lacks."""
    keys = pc.cast(keys, pa.binary()).combine_chunks()
    known = pc.is_in(inventory.objects.column("key"), value_set=keys)
    rows = np.flatnonzero(known.to_numpy())
    listed = inventory.take(rows, ["key"]).column("key").combine_chunks()
    places = pc.index_in(keys, value_set=listed).fill_null(NO_NUMBER).to_numpy()
    found: IntArray = np.append(rows, NO_NUMBER)[places]
    return found


def labelled(found: pa.Table, inventory: Inventory, groups: PageGroups) -> pa.Table:
    """Return located findings with their columns `deployment` and `written` filled.

    A finding about an object without a group has the time of the object.
    """
    if not len(found):
        return found
    rows, about = (found.column(name).to_numpy() for name in ("row", "group"))
    lone = np.flatnonzero((about == NO_NUMBER) & (rows != NO_NUMBER))
    grouped = np.flatnonzero(about != NO_NUMBER)
    label_ids = np.zeros(len(found), dtype=np.int64)
    label_ids[grouped] = groups.label_ids[about[grouped]]
    written_ns = np.zeros(len(found), dtype=np.int64)
    written_ns[grouped] = groups.newest_ns[about[grouped]]
    times = inventory.take(rows[lone], ["mtime_ns"]).column("mtime_ns")
    written_ns[lone] = times.fill_null(0).to_numpy()
    written = written_ns // 10**9
    labels = pa.array(groups.labels, pa.string())
    columns = {
        "deployment": labels.take(pa.array(label_ids, mask=about == NO_NUMBER)),
        "written": pa.array(written, mask=written == 0),
    }
    for name, values in columns.items():
        found = found.set_column(found.schema.get_field_index(name), name, values)
    return found
