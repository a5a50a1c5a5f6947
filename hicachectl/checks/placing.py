"""Place findings: the page groups that they are about, and when these were written."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.registry import absent_codes
from hicachectl.formats.keys.table import FOREIGN, KeySplitter
from hicachectl.pages.deployments import UNRESOLVED

if TYPE_CHECKING:
    from hicachectl.formats.keys.base import Affix
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import IntArray, Inventory

_NOBODY = -1


def placed(found: pa.Table, inventory: Inventory, groups: PageGroups) -> pa.Table:
    """Return findings with their columns `group` and `written` filled.

    found: of NAMED_SCHEMA. Of several groups that a finding is about, the first counts. A finding
    about an object without a group has the time of the object.
    """
    if not len(found):
        return found
    rows, about = groups_about(groups, found)
    owner = np.full(len(found), _NOBODY, dtype=np.int64)
    owner[rows[::-1]] = about[::-1]
    nowhere = owner == _NOBODY
    labels = pa.array(groups.labels, pa.string())
    label_ids = groups.label_ids[np.where(nowhere, 0, owner)] if len(groups) else owner
    written = np.zeros(len(found), dtype=np.int64)
    written[~nowhere] = groups.newest_ns[owner[~nowhere]] // 10**9
    written[nowhere] = _written(found.filter(pa.array(nowhere)), inventory)
    columns = {
        "group": labels.take(pa.array(label_ids, mask=nowhere)),
        "written": pa.array(written, mask=written == 0),
    }
    for name, values in columns.items():
        found = found.set_column(found.schema.get_field_index(name), name, values)
    return found


def _written(found: pa.Table, inventory: Inventory) -> IntArray:
    """Return when the object of each finding was written, in Unix seconds; 0 if not known."""
    seconds = np.zeros(len(found), dtype=np.int64)
    keys = pc.cast(found.column("key"), pa.binary()).combine_chunks()
    known = pc.is_in(inventory.objects.column("key"), value_set=keys.drop_null())
    rows = np.flatnonzero(known.to_numpy())
    if len(rows):
        objects = inventory.take(rows, ["key", "mtime_ns"])
        at = pc.index_in(keys, value_set=objects.column("key").combine_chunks(), skip_nulls=True)
        there = at.is_valid().to_numpy(zero_copy_only=False)
        times = objects.column("mtime_ns").fill_null(0).to_numpy()
        seconds[there] = times[at.drop_null().to_numpy()] // 10**9
    return seconds


def groups_about(groups: PageGroups, found: pa.Table) -> tuple[IntArray, IntArray]:
    """Pair findings with groups: [pairs] rows of `found`, [pairs] group numbers.

    Groups of ambiguous keys get no finding: a profile must not cause their removal.
    """
    keys = pc.cast(found.column("key"), pa.binary()).combine_chunks()
    pages, affix_ids = (splitter := KeySplitter()).split(pc.fill_null(keys, b""))
    homes: dict[Affix, set[int]] = defaultdict(set)
    for number, deployment in enumerate(groups.deployments):
        for spec in deployment.specs:
            homes[spec.affix].add(number)
    keyed = affix_ids != FOREIGN
    keyless = ~keyed & keys.is_null().to_numpy(zero_copy_only=False)
    # Two models can share a key. A finding is then about the group of the object with the key; a
    # finding that the object is missing, about the groups without it.
    owners = groups.owners(keys)
    lacks = pc.is_in(found.column("code"), value_set=pa.array(absent_codes())).to_numpy()
    owned = np.flatnonzero((owners != _NOBODY) & ~lacks)
    owned = owned[groups.deployment_ids[owners[owned]] != UNRESOLVED]
    rows: list[IntArray] = [owned]
    about: list[IntArray] = [owners[owned]]
    # Of thousands of deployments, findings name few.
    named: dict[int, list[int]] = defaultdict(list)
    for affix_id, affix in enumerate(splitter.affixes):
        for number in homes[affix]:
            named[number].append(affix_id)
    for number in range(len(groups.deployments)) if keyless.any() else sorted(named):
        at_home = np.zeros(len(splitter.affixes) + 1, dtype=np.bool_)
        at_home[named[number]] = True
        here = at_home[affix_ids] & keyed & (lacks | (owners == _NOBODY))
        for mine, names in (
            (np.flatnonzero(here), pages),
            (np.flatnonzero(keyless), found.column("page").combine_chunks()),
        ):
            numbers = groups.find(number, names.take(pa.array(mine)))
            placed = (numbers != _NOBODY) & (numbers != owners[mine])
            rows.append(mine[placed])
            about.append(numbers[placed])
    return np.concatenate(rows), np.concatenate(about)
