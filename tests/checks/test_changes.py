"""Which evidence of objects of different age shows a change of dtype or layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.checks.changes import check_changes
from hicachectl.checks.evidence import EVIDENCE_SCHEMA
from hicachectl.checks.registry import CheckSums
from hicachectl.formats.keys import grammar_of
from hicachectl.pages.deployments import assign_affixes
from hicachectl.pages.tally import Tally
from tests.checks.value_cases import profile_of
from tests.stores import OLD

if TYPE_CHECKING:
    from numpy.typing import NDArray

TP = 4
COUNT = 100
NANOSECONDS = 10**9
POOL = {"kind": "mha", "layers": 2, "kv_heads": 4, "head_dim": 16}
# Quartiles 0.35, 0.75 and 1.4 as codes of e4m3 and of e5m2, and those of numbers 2.8 times larger.
E4M3, E5M2, LARGER = (43, 52, 59), (54, 58, 62), (55, 64, 71)


def codes(*quartiles: tuple[int, int, int], spread: float = 0.5, seed: int = 1) -> NDArray[Any]:
    """Return the quartiles of COUNT objects, in as many equal pieces as there are triples."""
    each = np.repeat(np.array(quartiles), COUNT // len(quartiles), axis=0)
    noise = np.random.default_rng(seed).normal(0, spread, each.shape)
    return np.maximum(0, np.rint(each + noise)).astype(np.uint16)


def evidence(
    *ranks: NDArray[Any],
    disordered: NDArray[Any] | None = None,
    timed: bool = True,
    seconds: float = 60,
    start: float = OLD,
) -> pa.Table:
    """Return evidence of ranks. seconds: between the writes of two objects. start: of the first."""
    tables = []
    for rank, quartiles in enumerate(ranks):
        after_ns = round(seconds * 10**6) * 1000 * np.arange(len(quartiles))
        times = pa.array(round(start * 10) * 10**8 + after_ns)
        columns = [
            pa.repeat(pa.scalar(rank, pa.int32()), len(quartiles)),
            times if timed else pa.nulls(len(quartiles), pa.int64()),
            pa.repeat(pa.scalar(1, pa.uint8()), len(quartiles)),
            *(pa.array(column) for column in quartiles.T),
            pa.nulls(len(quartiles), pa.bool_()) if disordered is None else pa.array(disordered),
        ]
        tables.append(pa.table(columns, schema=EVIDENCE_SCHEMA))
    return pa.concat_tables(tables)


def found(seen: pa.Table, dtype: str = "float8_e4m3fn", *, unseen: int = 0) -> list[dict[str, Any]]:
    """Return the findings under a profile of a dtype.

    unseen: number of objects of rank 0 without evidence.
    """
    affixes = [("", f"_m_{rank}_{TP}.bin") for rank in range(TP)]
    profile = profile_of(POOL | {"dtype": dtype}, tp=TP)
    table = assign_affixes(affixes, grammar_of("file"), profile)
    tally = Tally.nothing(table)
    tally.objects[:TP] = np.bincount(seen.column("affix").to_numpy(), minlength=TP)
    tally.objects[0] += unseen
    given = CheckSums(table, tally, seen)
    rows: list[dict[str, Any]] = pa.concat_tables(
        [pa.table({"detail": pa.array([], pa.string()), "written_ns": pa.array([], pa.int64())})]
        + [one.select(["detail", "written_ns"]) for one in check_changes(given)]
    ).to_pylist()
    return rows


def one_rank(*quartiles: tuple[int, int, int], **options: Any) -> list[dict[str, Any]]:
    return found(evidence(codes(*quartiles, **options)))


@pytest.mark.parametrize("quartiles", [(E4M3, E5M2), (E5M2, E4M3), (E4M3, E4M3, E4M3, E5M2)])
def test_quartiles_of_two_dtypes_show_the_change(quartiles: tuple[Any, ...]) -> None:
    (change,) = one_rank(*quartiles)
    later = quartiles.index(quartiles[-1]) * COUNT // len(quartiles)
    assert change["written_ns"] == (OLD + 60 * later) * NANOSECONDS
    first, last = ("float8_e5m2", "float8_e4m3fn")[:: 1 if quartiles[0] == E5M2 else -1]
    assert f"{first} before 2023-11-1" in change["detail"]
    assert f"Z, {last} since then ({later} and {COUNT - later} objects" in change["detail"]
    evidence = "are 0.34, 0.75, 1.4 in float8_e4m3fn and 0.37, 0.75, 1.5 in float8_e5m2; if "
    assert evidence in change["detail"]


@pytest.mark.parametrize(
    ("start", "seconds", "time"),
    [
        (OLD, 60, "2023-11-14T23:03:20Z"),
        (OLD + 0.3, 60, "2023-11-14T23:03:20Z"),
        (OLD + 0.3, 0.25, "2023-11-14T22:13:32.800Z"),
        (OLD + 0.9, 0.25, "2023-11-14T22:13:33.400Z"),
        (OLD + 0.6, 0.25, "2023-11-14T22:13:33Z"),
        (OLD, 0.000_25, "2023-11-14T22:13:20.012500Z"),
    ],
)
def test_the_time_divides_the_pages(start: float, seconds: float, time: str) -> None:
    """It is the roundest of the times that do."""
    (change,) = found(evidence(codes(E4M3, E5M2), start=start, seconds=seconds))
    assert f"float8_e4m3fn before {time}, float8_e5m2 since then (" in change["detail"]
    assert change["detail"].endswith(
        f"--before {time}; if they write float8_e4m3fn, remove the newer pages with --since {time}"
    )


def test_pages_that_were_not_compared_leave_with_either_kind() -> None:
    (change,) = found(evidence(codes(E4M3, E5M2), start=OLD + 0.5), unseen=1)
    assert change["written_ns"] == (OLD + 3000) * NANOSECONDS
    first, last = "2023-11-14T23:02:21Z", "2023-11-14T23:03:20Z"
    assert f"float8_e4m3fn before {first}, float8_e5m2 since {last} (50 and 50 " in change["detail"]
    assert (
        f"--before {last}; if they write float8_e4m3fn, remove the newer pages with --since {first}"
        in change["detail"]
    )


@pytest.mark.parametrize(
    "quartiles",
    [
        (E4M3,),
        (E5M2,),
        (E4M3, LARGER),  # scales or weights
        (E4M3, (50, 54, 58)),  # as near as numbers of e5m2, but of another size
        (E4M3, (43, 58, 59)),  # only the middle differs
        (E4M3, (46, 52, 58)),
        ((44, 52, 59), (53, 58, 63)),  # a factor of 1.5
        ((60, 64, 68), (62, 64, 66)),  # around 2, which has one code in both dtypes
        ((0, 0, 4), E5M2),  # no logarithm
    ],
    ids=str,
)
def test_other_differences_are_no_change_of_the_dtype(quartiles: tuple[Any, ...]) -> None:
    assert one_rank(*quartiles) == []


def test_quartiles_that_are_too_near_to_tell_show_no_change() -> None:
    """Rounded distances are 1 to 4 codes."""
    assert one_rank((62, 64, 65), spread=0.7) == []
    assert one_rank((40, 42, 43), spread=0.7) == []


def test_scattered_objects_show_no_change() -> None:
    assert len(one_rank(E4M3, E5M2, spread=0.8)) == 1
    assert one_rank(E4M3, E5M2, spread=4) == []
    far = codes(E4M3, E5M2)
    far[::9] += 12
    assert found(evidence(far)) == []


def test_objects_of_zeros_are_not_compared() -> None:
    quartiles = codes(E4M3, E5M2)
    quartiles[::4] = 0
    (change,) = found(evidence(quartiles))
    assert "(37 and 38 objects compared, none from between)" in change["detail"]


def test_most_ranks_must_show_the_same_change() -> None:
    same, changed, little = codes(E4M3), codes(E4M3, E5M2), codes(E4M3)[:15]
    assert len(found(evidence(changed, changed, changed, changed))) == 1
    assert len(found(evidence(changed, changed, same, changed))) == 1
    assert found(evidence(changed, changed, same, same)) == []
    assert found(evidence(same, changed, same, same)) == []
    assert len(found(evidence(changed, little, little, little))) == 1  # ranks of few objects


@pytest.mark.parametrize(("fewer", "shown"), [(7, False), (8, True), (92, True), (93, False)])
def test_a_few_objects_show_nothing(fewer: int, shown: bool) -> None:
    quartiles = codes(E4M3)
    quartiles[:fewer] = codes(E5M2)[:fewer]
    assert len(found(evidence(quartiles))) == shown


def test_one_in_a_hundred_shows_nothing_among_many() -> None:
    many = np.concatenate([codes(E4M3, seed=n) for n in range(15)])
    many[:14] = codes(E5M2)[:14]
    assert found(evidence(many)) == []
    many[:16] = codes(E5M2)[:16]
    assert len(found(evidence(many))) == 1


def test_a_few_late_writes_of_the_old_dtype_leave_the_time() -> None:
    quartiles = codes(E4M3, E5M2)
    quartiles[[60, 90]] = codes(E4M3)[:2]
    (change,) = found(evidence(quartiles))
    assert change["written_ns"] == (OLD + 60 * COUNT // 2) * NANOSECONDS
    quartiles[52:60] = codes(E4M3)[:8]
    (change,) = found(evidence(quartiles))
    assert change["written_ns"] is None


def test_the_other_e4m3_has_half_the_numbers() -> None:
    """Codes of float8_e4m3fnuz are of half the number, so one more octave has the same number."""
    seen = evidence(codes((51, 60, 67), E5M2))
    assert found(seen) == []
    (change,) = found(seen, "float8_e4m3fnuz")
    assert "float8_e4m3fnuz before 2023-11-14T23:03:20Z, float8_e5m2 since then" in change["detail"]


def test_objects_of_one_time_have_no_order() -> None:
    (change,) = found(evidence(codes(E4M3, E5M2), seconds=0))
    assert change["written_ns"] is None
    assert "in 50 objects, written 2023-11-14 22:13 UTC and" in change["detail"]
    disordered = np.arange(COUNT) < 30
    assert found(evidence(codes(E4M3), disordered=disordered, seconds=0)) == []


def test_without_times_the_kinds_are_counted() -> None:
    (change,) = found(evidence(codes(E4M3, E5M2), timed=False))
    assert change["written_ns"] is None
    counts = "numbers are float8_e4m3fn in 50 objects and float8_e5m2 in 50 objects; "
    assert counts in change["detail"]


@pytest.mark.parametrize("first", [True, False])
def test_pages_in_another_layout_before_or_after_a_time_show_the_change(first: bool) -> None:
    disordered = (np.arange(COUNT) < 30) == first
    (change,) = found(evidence(codes(E4M3), disordered=disordered))
    assert change["written_ns"] == (OLD + 60 * 30) * NANOSECONDS
    kinds = ["another layout", "page_first"][:: 1 if first else -1]
    assert f"{kinds[0]} before 2023-11-14T22:43:20Z, {kinds[1]} since then" in change["detail"]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9, 1.0])
def test_pages_in_another_layout_at_all_times_show_no_change(share: float) -> None:
    disordered = np.random.default_rng(2).random(COUNT) < share
    assert found(evidence(codes(E4M3), disordered=disordered)) == []
    assert found(evidence(codes(E4M3), disordered=disordered, timed=False)) == []


def test_no_evidence_shows_nothing() -> None:
    assert found(EVIDENCE_SCHEMA.empty_table()) == []
