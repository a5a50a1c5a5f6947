"""Which part of a run a process does: `--shard I/N`, or `/N` with a scheduler's variables."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.formats.errors import UsageError
from hicachectl.parts.manifest import MOST_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping

_KUBERNETES = "JOB_COMPLETION_INDEX"
_SLURM = "SLURM_ARRAY_TASK_ID"
_FORM = re.compile(r"([0-9]{0,9})/([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a run.

    number: number of the part; the first is 0.
    count: number of all parts.
    """

    number: int
    count: int


def parse_shard(text: str, environ: Mapping[str, str] = os.environ) -> Shard:
    """Parse I/N, or /N with I from the variables of Kubernetes or Slurm. Raises UsageError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(f"--shard {text!r:.40}: write I/N with I from 0, such as 0/8, or /8")
    count = int(match[2])
    if not 1 <= count <= MOST_PARTS:
        raise UsageError(f"--shard {text}: a run has 1 to {MOST_PARTS} parts; give another N")
    number = int(match[1]) if match[1] else _scheduled(text, count, environ)
    if number >= count:
        raise UsageError(
            f"--shard {text}: part {number} of {count} does not exist; the last is {count - 1}"
        )
    return Shard(number, count)


def _scheduled(text: str, count: int, environ: Mapping[str, str]) -> int:
    known = [name for name in (_KUBERNETES, _SLURM) if environ.get(name)]
    if len(known) != 1:
        found = "both are" if known else "neither is"
        raise UsageError(
            f"--shard {text}: takes the part from {_KUBERNETES} (Kubernetes) or {_SLURM} (Slurm), "
            f"but {found} set; give I/{count}"
        )
    number = _integer(known[0], environ)
    if known == [_KUBERNETES]:
        return number
    # A rerun of some tasks (--array=7,9) would take the first of them for part 0.
    expected = {"SLURM_ARRAY_TASK_STEP": 1, "SLURM_ARRAY_TASK_COUNT": count}
    for name, wanted in expected.items():
        if environ.get(name) and _integer(name, environ) != wanted:
            raise UsageError(
                f"--shard {text}: {name} is {environ[name]}, expected {wanted}; use an array of "
                f"{count} consecutive tasks, or give --shard I/{count}"
            )
    least = _integer("SLURM_ARRAY_TASK_MIN", environ)
    if number < least:
        raise UsageError(
            f"--shard {text}: {_SLURM} is {number}, but SLURM_ARRAY_TASK_MIN is {least}; give "
            f"--shard I/{count}"
        )
    return number - least


def _integer(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise UsageError(f"{name}: {text!r:.40} is not a number; give --shard I/N")
    return int(text)
