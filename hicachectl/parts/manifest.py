"""The manifest of a divided run (`run.json`), and the part that a process does (`--shard`).

The manifest publishes the listing. All parts of a run read the manifest, so they agree on every
decision about the whole store.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from hicachectl import __version__
from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import UsageError
from hicachectl.io.table_files import (
    MOST_BYTES,
    FileName,
    TableFile,
    parse_document,
)
from hicachectl.text.units import minute

if TYPE_CHECKING:
    from collections.abc import Mapping


MANIFEST = "run.json"  # name of the manifest in the run directory
FORM = 1
MOST_PARTS = 10_000
LIST_AGAIN = "give another --run"  # next step if the manifest or a published table is damaged

Owner = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Moment = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]


class Published(Struct, kw_only=True):
    """Result of listing and planning, with tables and facts for all parts.

    listing_ns: start of the listing, Unix nanoseconds.
    duration_ns: duration of the listing.
    table: affixes of the listing, as `pages.published.Listing` writes them.
    files: all tables, in `Manifest.folder`.
    shares: row groups of each part, by file name.
    facts: facts of the job, which only the job reads.
    """

    listing_ns: Moment
    duration_ns: Count = 0
    table: dict[str, Any] = {}
    files: list[TableFile] = []
    shares: Annotated[list[dict[FileName, list[Count]]], Meta(min_length=1, max_length=MOST_PARTS)]
    facts: dict[str, Any] = {}


class Manifest(Struct, kw_only=True):
    """The manifest of a run.

    run: random name of the run.
    version: release of hicachectl that began the run.
    identity: values that must be equal in all parts, such as the URLs of the stores and `--checks`.
        See `Job.identity`.
    options: the lister's options with all defaults filled in. All parts use these options.
    spent_seconds: duration of listing and planning.
    folder: directory of the published tables.
    """

    form: int
    version: str
    run: Owner
    command: str
    identity: dict[str, Any]
    options: dict[str, Any]
    spent_seconds: Seconds
    folder: FileName
    published: Published

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.published.shares)

    @property
    def listed(self) -> str:
        """Time of the listing, in words."""
        return f"{minute(self.published.listing_ns)} UTC"


def dump(form: Struct) -> bytes:
    """Return a manifest or a result as JSON text. Raises UsageError if readers would refuse it."""
    content = json.dumps(msgspec.to_builtins(form)).encode()
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"A record of the run takes {len(content)} bytes, more than {MOST_BYTES}; give fewer "
            "parts"
        )
    return content


def parse_manifest(content: bytes, source: str, *, any_release: bool = False) -> Manifest:
    """Parse a manifest.

    source: the run directory.
    any_release: whether to accept another release whose manifests have this form.
    Raises FormatError if the content is no manifest, and UsageError if another release wrote it.
    """
    expected = {"form": FORM} if any_release else {"form": FORM, "version": __version__}

    def refuse_release(document: Mapping[str, Any]) -> None:
        for name, mine in expected.items():
            if document.get(name) != mine:
                theirs = shown(document.get(name))
                raise UsageError(
                    f"{source}: was begun by hicachectl of {name} {theirs}, but this hicachectl "
                    f"has {mine!r}; finish the run with the same release, or give another --run"
                )

    path = f"{source}/{MANIFEST}"
    return parse_document(content, path, Manifest, LIST_AGAIN, check=refuse_release)


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
    # Refuse a rerun of only some tasks (--array=7,9), because the first of these tasks would do
    # part 0.
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
