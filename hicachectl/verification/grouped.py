"""Findings by code, deployment and age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from hicachectl.checks.codes import SEVERITIES
from hicachectl.text.units import human_age

if TYPE_CHECKING:
    import pyarrow as pa

_HOUR, _DAY = 3600, 86400
# Seconds between the classes of age.
_BOUNDS = np.array([_HOUR, _DAY, 7 * _DAY, 30 * _DAY])
AGE_CLASSES = ("under 1 h", "1 h to 1 d", "1 to 7 d", "7 to 30 d", "over 30 d")
_UNKNOWN = -1
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Findings with one severity, code, deployment and class of age.

    age: age of the youngest and of the oldest, as in `ls`; empty if the store keeps no times.
    age_class: index in AGE_CLASSES; None if the age is not known.
    examples: key and detail of the first findings.
    """

    severity: str
    code: str
    deployment: str | None
    age: str
    age_class: int | None
    count: int
    examples: tuple[tuple[str | None, str], ...]


def group_findings(found: pa.Table, now: float) -> list[FindingGroup]:
    """Return groups of findings, worst severity first, then by count.

    Python runs per group.
    found: findings of `checks.findings.PLACED_SCHEMA`.
    now: Unix seconds.
    """
    if not len(found):
        return []
    written = found.column("written").fill_null(0).to_numpy()
    ages = np.where(written == 0, _UNKNOWN, np.maximum(0, int(now) - written))
    classes = np.where(written == 0, _UNKNOWN, np.searchsorted(_BOUNDS, ages, side="right"))
    codes = classes + 1
    for name in ("severity", "code", "deployment"):
        numbers, distinct = _numbered(found.column(name))
        codes = codes * distinct + numbers
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    counts = np.diff(starts, append=len(order))
    youngest, oldest = (f.reduceat(ages[order], starts) for f in (np.minimum, np.maximum))
    groups = []
    for number, start in enumerate(starts.tolist()):
        rows = order[start : start + min(_EXAMPLES, counts[number])]
        first = found.take(rows).to_pylist()
        of_group = int(classes[rows[0]])
        groups.append(
            FindingGroup(
                severity=first[0]["severity"],
                code=first[0]["code"],
                deployment=first[0]["deployment"],
                age=_age(int(youngest[number]), int(oldest[number])),
                age_class=None if of_group == _UNKNOWN else of_group,
                count=int(counts[number]),
                examples=tuple((row["key"], row["detail"]) for row in first),
            )
        )
    return sorted(
        groups, key=lambda g: (-SEVERITIES.index(g.severity), -g.count, g.code, g.deployment or "")
    )


def _numbered(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], int]:
    """Return a number for each text of a column, null included, and how many there are."""
    encoded = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode")
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def _age(youngest: int, oldest: int) -> str:
    if youngest == _UNKNOWN:
        return ""
    ends = dict.fromkeys((human_age(youngest), human_age(oldest)))
    return "-".join(ends)
