"""Run this process as a user without rights on the files of root."""

from __future__ import annotations

import encodings.ascii  # noqa: F401 - this user may be unable to enter the directory of Python
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534


@contextmanager
def as_other_user() -> Iterator[None]:
    """Run the block, in all threads, as NOBODY, who reaches a closed path only by open descriptors.

    The test must be marked with `needs_root`.
    """
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
