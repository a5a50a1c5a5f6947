"""Readable sizes and ages."""

from __future__ import annotations

import pyarrow as pa
import pytest

from hicachectl.text.tables import human_column
from hicachectl.text.units import counted, human_age, human_size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**50, "1.0 PiB"), (2**70, "1024.0 EiB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert human_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (59.9, "59s"), (60, "1m"), (7260, "2h"), (200_000, "2d")]
)
def test_ages_for_people(seconds: float, text: str) -> None:
    assert human_age(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 page groups"), (1, "1 page group"), (2, "2 page groups")]
)
def test_a_number_of_things(number: int, text: str) -> None:
    assert counted(number, "page group") == text


def test_a_column_is_worded_once_a_distinct_value() -> None:
    calls: list[int] = []

    def word(value: int) -> str:
        calls.append(value)
        return str(value)

    assert human_column(pa.array([1, 2, 1, None]), word).to_pylist() == ["1", "2", "1", None]
    assert calls == [1, 2]
