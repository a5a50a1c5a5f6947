"""Run the checks that judge a listing alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.checks.registry import Need, Scope, checks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import pyarrow as pa

    from hicachectl.checks.registry import CheckInput


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
