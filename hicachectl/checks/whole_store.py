"""Checks of a store as a whole: stamp, lost objects, ranks with equal keys, other deployments."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.capabilities import Losing
from hicachectl.checks.findings import deployment_findings, findings
from hicachectl.pages.naming import deployment_document, deployment_text, place_text, same_model
from hicachectl.pages.tally import NO_TIME
from hicachectl.text.units import counted, human_size, written_between

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput, CheckListing, CheckSums
    from hicachectl.pages.deployments import Deployment


def check_stamp(given: CheckInput) -> Iterator[pa.Table]:
    """Yield a stamp-mismatch finding for each difference from the stamp."""
    details = pa.array(given.stamp_differences, pa.string())
    yield findings("stamp-mismatch", keys=pa.nulls(len(details), pa.string()), detail=details)


def check_collision(given: CheckListing) -> Iterator[pa.Table]:
    """Yield a colliding-keys finding if ranks of the deployment share the names of objects."""
    if given.collision:
        yield findings("colliding-keys", keys=pa.nulls(1, pa.string()), detail=given.collision)


def check_losses(given: CheckListing) -> Iterator[pa.Table]:
    """Yield a finding for each loss that the listing found, unless a server may still write it."""
    for loss in given.store.losses if isinstance(given.store, Losing) else ():
        if loss.changed_ns <= given.grace_start_ns:
            yield findings(
                loss.code, keys=pa.array([_readable(loss.place)]), detail=_readable(loss.what)
            )


def _readable(text: str) -> str:
    """Return a text with file names as keys are written: other bytes than UTF-8 escaped."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def check_other_deployments(given: CheckSums) -> Iterator[pa.Table]:
    """Yield an other-deployment finding for each other topology or tag of the profile's model."""
    table, tally = given.table, given.tally
    own = table.deployments[0]  # The profile's deployment comes first.
    of_affix = np.array(table.deployment_ids, dtype=np.int64)
    unsized = frozenset(of_affix[tally.unsized[: len(of_affix)] > 0].tolist())
    found = [
        (number, deployment)
        for number, deployment in enumerate(table.deployments)
        if number and tally.states[number].any() and same_model(deployment, own, table.grammar)
    ]
    yield deployment_findings(
        "other-deployment",
        deployments=[deployment.label(table.grammar) for _, deployment in found],
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
