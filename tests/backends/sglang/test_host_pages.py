"""Host indices become addresses only within the pool."""

from __future__ import annotations

import pytest

from hicachectl.backends.sglang.pools import EvenPages

K, V = 1 << 20, 1 << 21
PAGES = EvenPages(8, 3, [(K, 100, 96), (V, 50, 50)])


def test_pages_have_their_pieces_in_order() -> None:
    assert PAGES.pieces([16, 0]) == [((K + 200, 96), (V + 100, 50)), ((K, 96), (V, 50))]
    assert PAGES.pieces([]) == []


@pytest.mark.parametrize("index", [-8, -1, 4, 17, 24, 1 << 62])
def test_an_index_outside_the_pool_or_inside_a_page_is_refused(index: int) -> None:
    """A wrong index would make the plug-in write another request's memory."""
    with pytest.raises(ValueError, match=f"host index {index}: not the first index of one"):
        PAGES.pieces([0, index])
