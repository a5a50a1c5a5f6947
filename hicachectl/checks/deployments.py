"""Check `groups`: pages of the profile's model that servers of the profile cannot reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.checks.findings import deployment_findings
from hicachectl.pages.naming import deployment_document, deployment_text, place_text, same_model
from hicachectl.pages.tally import NO_TIME
from hicachectl.text.units import counted, human_size, written_between

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from hicachectl.checks.registry import CheckSums
    from hicachectl.pages.deployments import Deployment


def check_other_deployments(given: CheckSums) -> Iterator[pa.Table]:
    """Yield an other-deployment finding for each other topology or tag of the profile's model."""
    table, tally = given.table, given.tally
    own = table.deployments[0]  # The profile's deployment comes first.
    of_affix = np.array(table.deployment_ids, dtype=np.int64)
    unsized = frozenset(of_affix[tally.unsized[: len(of_affix)] > 0].tolist())
    found = [
        (number, deployment)
        for number, deployment in enumerate(table.deployments)
        if number and tally.states[number].any() and same_model(deployment, own, table.codec.scheme)
    ]
    yield deployment_findings(
        "other-deployment",
        deployments=[deployment.label(table.codec) for _, deployment in found],
        written=[int(tally.newest_ns[number]) // 10**9 or None for number, _ in found],
        detail=[
            _described(deployment, number, given, sized=number not in unsized)
            for number, deployment in found
        ],
    )


def _described(deployment: Deployment, number: int, given: CheckSums, *, sized: bool) -> str:
    own, tally = given.table.deployments[0], given.tally
    pages = counted(int(tally.states[number].sum()), "page")
    nbytes = int(tally.nbytes[number]) if sized else 0
    oldest_ns, newest_ns = (int(times[number]) for times in (tally.oldest_ns, tally.newest_ns))
    written = "" if NO_TIME in (oldest_ns, newest_ns) else written_between(oldest_ns, newest_ns)
    facts = ", ".join(filter(None, [human_size(nbytes) if nbytes else "", written]))
    return (
        f"{pages} at {place_text(deployment, own)}{f' ({facts})' if facts else ''}: servers of the "
        f"profile ({deployment_text(deployment_document(own))}) do not ask for these keys"
    )
