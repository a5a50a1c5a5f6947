"""A quarantine run, a folder with the objects that one repair removed. It is a store itself.

QUARANTINE/RUN/.hicachectl/run.json        description of the run: see `backends.runs.RunForm`
QUARANTINE/RUN/.hicachectl/findings.jsonl  findings for which pages were removed, one on each line
QUARANTINE/RUN/.hicachectl/plugin/         the store's markers of objects with trailers
QUARANTINE/RUN/KEY                         an object, under the store's own names and folders
QUARANTINE/RUN/run.hcpack                  all objects, if the store has no files
QUARANTINE/RUN.purged                      the rest of a run whose purge was interrupted
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SIDE, RUN_FILE, FINDINGS_FILE, PACK_FILE = (
    ".hicachectl", "run.json", "findings.jsonl", "run.hcpack",
)  # fmt: skip
PURGED = ".purged"

RUN = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")
_EARLIER_RUN = re.compile(rf"{RUN.pattern}(-[0-9a-f]{{16}})?")
_EARLIER_ENTRY = re.compile(r"[0-9]{6}(\.(begun|json|copying|purged))?")


def is_earlier_run(name: str, entries: Iterable[str]) -> bool:
    """Return whether a folder is a run of an earlier form, with records of numbered files."""
    return _EARLIER_RUN.fullmatch(name) is not None and any(map(_EARLIER_ENTRY.fullmatch, entries))


def is_quarantine(path: str, names: Iterable[str]) -> bool:
    """Return whether a directory is a quarantine.

    names: the directory's entries.
    """
    parts = path.rsplit("/", 2)[-2:]
    return parts == [SIDE, "quarantine"] or any(map(_EARLIER_RUN.fullmatch, names))
