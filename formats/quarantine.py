"""Names of the files and folders of a quarantine; `move.quarantine` says what they hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BEGUN, DONE, COPYING = ".begun", ".json", ".copying"
FOLDER = re.compile(r"[0-9]{6}")
RECORD = re.compile(rf"([0-9]{{6}})({re.escape(BEGUN)}|{re.escape(DONE)})")
RUN = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")


def is_quarantine(path: str, names: Iterable[str], exists: Callable[[str], bool]) -> bool:
    """Tell a directory of these names from a store: a quarantine, one of its runs or folders.

    exists: whether there is anything of a path; a folder of objects has its record beside it.
    """
    parts = path.rsplit("/", 2)[-2:]
    if parts == [".hicachectl", "quarantine"]:
        return True
    if FOLDER.fullmatch(parts[-1]) and any(exists(path + end) for end in (BEGUN, DONE)):
        return True
    return any(RUN.fullmatch(name) or RECORD.fullmatch(name) for name in names)
