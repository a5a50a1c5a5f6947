"""The order in which the pages of chains are copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError
from hicachectl.prewarming.ranking import prefixes_worth_asking, rank_by_value
from hicachectl.requests.chains import requests_of_pages

if TYPE_CHECKING:
    from collections.abc import Sequence


def page(number: int) -> str:
    return f"{number:064x}"


def ranked(*prompts: Sequence[int]) -> list[int]:
    """Return the pages of prompts, given as numbers, best first."""
    chains = requests_of_pages([[page(number) for number in prompt] for prompt in prompts], None)
    names, rank = chains.page_names, rank_by_value(chains)
    assert sorted(rank.tolist()) == list(range(len(names)))
    return [int(names[at].as_py(), 16) for at in np.argsort(rank).tolist()]


def test_prompts_that_share_nothing_are_copied_one_after_another() -> None:
    assert ranked([1, 2, 3], [11, 12], [21, 22, 23]) == [1, 2, 3, 11, 12, 21, 22, 23]


def test_what_more_prompts_share_comes_first() -> None:
    assert ranked([1, 2, 3], [11, 12, 13], [11, 12, 14]) == [11, 12, 1, 2, 3, 13, 14]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8))
def test_no_page_comes_before_its_prefix(paths: list[list[int]]) -> None:
    # A page's number encodes the path to it, as a hash encodes a prefix.
    def number(path: list[int]) -> int:
        return int("1" + "".join(map(str, path)))

    prompts = [[number(path[: n + 1]) for n in range(len(path))] for path in paths]
    order = ranked(*prompts)
    for prompt in prompts:
        places = [order.index(name) for name in prompt]
        assert places == sorted(places)


def test_a_page_with_two_prefixes_is_named() -> None:
    with pytest.raises(FormatError, match=f"page {page(3)} follows page"):
        ranked([1, 3], [2, 3])


def test_servers_are_asked_for_each_usable_prefix_once_and_the_most_shared_first() -> None:
    asked = [[1, 2, 3], [1, 2], [11, 12, 13], [11, 12, 14], [1, 2, 9], [21]]
    chains = requests_of_pages([[page(number) for number in one] for one in asked], None)
    usable = np.array([3, 2, 3, 2, 2, 0])  # 4th and 5th: only shared pages

    def chosen(*, longest_only: bool) -> list[int]:
        found = prefixes_worth_asking(chains, usable, rank_by_value, longest_only=longest_only)
        return [int(number) for number in found]

    assert chosen(longest_only=True) == [0, 2]
    assert chosen(longest_only=False) == [1, 3, 0, 2]
