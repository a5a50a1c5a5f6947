"""A value check of another package, without a device kernel or changes to the product."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.checks.codes import Code
from hicachectl.checks.registry import CheckGroup, ValueCheck, ValueIssue, register, unregister

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

    Bytes = npt.NDArray[np.uint8]

REPEATS = CheckGroup(
    "repeats", "objects of which all bytes are equal; reads objects, needs a profile"
)


def prepare(spec: ObjectSpec, profile: Profile) -> Callable[[Bytes], Iterator[ValueIssue]] | None:
    """Find objects of one repeated byte other than zero, in pools with token rows."""
    pool = profile.pool(spec.pool)
    if pool is None or pool.kind == "mamba":
        return None

    def find(objects: Bytes) -> Iterator[ValueIssue]:
        repeats = (objects == objects[:, :1]).all(axis=1) & (objects[:, 0] != 0)
        for index in np.flatnonzero(repeats).tolist():
            detail = f"all {spec.nbytes} bytes of {spec.pool} are {objects[index, 0]:#04x}"
            yield ValueIssue(index, "repeated-byte", detail)

    return find


@contextmanager
def registered(**changes: Any) -> Iterator[ValueCheck]:
    """Register the check for the duration of a test."""
    facts = {
        "name": "repeats",
        "group": REPEATS,
        "codes": (Code("repeated-byte", "warning"),),
        "prepare": prepare,
    }
    check = ValueCheck(**{**facts, **changes})
    register(check)
    try:
        yield check
    finally:
        unregister(check.name)
