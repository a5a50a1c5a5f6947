"""Whose files are trusted, where several stores decide."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import trust_of
from tests.skips import needs_root

if TYPE_CHECKING:
    from pathlib import Path

ONE, OTHER = 12_345, 23_456


@needs_root
@pytest.mark.parametrize(
    ("owners", "trusted"),
    [([], {0}), ([ONE], {0, ONE}), ([ONE, ONE], {0, ONE}), ([ONE, OTHER], {0}), ([ONE, 0], {0})],
)
@pytest.mark.parametrize("url", ["file://{}", "nixl://{}"])
def test_users_whom_all_stores_trust(
    tmp_path: Path, owners: list[int], trusted: set[int], url: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    with ExitStack() as stack:
        stores = []
        for number, owner in enumerate(owners):
            directory = tmp_path / f"{number}"
            directory.mkdir()
            os.chown(directory, owner, owner)
            stores.append(stack.enter_context(open_store(url.format(directory))))
        trust = trust_of(*stores)
        for user in (0, ONE, OTHER):
            os.chown(file, user, user)
            assert trust.includes(file.stat(), -1) == (user in trusted)
