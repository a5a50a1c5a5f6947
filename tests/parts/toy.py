"""A small command with parts: it copies numbers from a text file, each to a file of its own.

Numbers are the objects; a part gets every N-th of them. Run as a program, it does one part:
`python -m tests.parts.toy STORE DESTINATION RUN I/N [BEHAVIOUR …]`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hicachectl.backends.disk.directory import Trust
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.io.table_files import opened_table, write_table
from hicachectl.parts.job import Kind, PartInput, Record, RecordForm, StageResult, Tables
from hicachectl.parts.manifest import Manifest, Published
from hicachectl.results import Result
from tests.parts.disturbed import settle
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicachectl.backends.disk.directory import Directory
    from hicachectl.parts.job import PartCount
    from hicachectl.text.tables import Screen

NUMBERS = pa.schema([pa.field("number", pa.int64(), nullable=False)])
AGAIN = "run it again"
LISTED_NS = 1_700_000_000 * 10**9  # 2023-11-14 22:13 UTC


def merge(manifest: Manifest, results: Mapping[int, Record], finish: Record | None) -> Result:
    """Sum the copied numbers."""
    tables = [result.table("copied") for result in results.values()]
    copied = pa.concat_tables(tables or [NUMBERS.empty_table()])

    def lines(document: dict[str, Any], screen: Screen, shown: object) -> Iterator[str]:
        yield f"{len(copied)} copied"

    document = {
        "copied": len(copied),
        "complete": all(result.form.settled for result in results.values()),
        "finished": None if finish is None else finish.facts["largest"],
        "numbers": copied,
    }
    return Result(document=document, rows=copied, rows_name="numbers", lines=lines)


def undone(manifest: Manifest, record: RecordForm) -> Iterator[str]:
    """Yield no message."""
    return iter(())


KIND = Kind("toy", {"copied": NUMBERS}, merge, undone, parts_fail=False, finishes=True)


class ToyJob:
    """Copies the numbers of a file, slowly if asked.

    seconds: duration of the work for each number.
    full: the number from which the destination seems full.
    aborts: the part whose process ends like a crash.
    held: if true, parts copy a second number when the file `released` exists beside the store.
    meanwhile: is called before the end of each listing and of each part, with its name.
    Each process notes its id and its parent's.
    """

    kind = KIND

    def __init__(
        self,
        store: Path,
        destination: Path,
        *,
        seconds: float = 0.0,
        listing_seconds: float = 0.0,
        full: int | None = None,
        aborts: int | None = None,
        held: float = 0,
        factor: int = 1,
        meanwhile: Callable[[str], object] = lambda name: None,
        permissions: Permissions | None = None,
    ) -> None:
        self._store = store
        self._destination = destination
        self._seconds = seconds
        self._listing_seconds = listing_seconds
        self._full = full
        self._aborts = aborts
        self._held = held
        self._meanwhile = meanwhile
        self.identity: dict[str, Any] = {
            "store": str(store),
            "destination": str(destination),
            "--factor": factor,
        }
        self.options: dict[str, Any] = {"factor": factor}
        self.permissions = permissions or Permissions()
        self.trust = Trust(destination.stat(), writes=True)

    def publish(
        self, folder: Directory, parts: PartCount, on_listed: Callable[[int], None]
    ) -> Published:
        numbers = [int(line) for line in self._store.read_text().split()]
        with (self._store.parent / "listings").open("a") as listings:
            listings.write("listed\n")
        for _ in numbers:
            time.sleep(self._listing_seconds)
            on_listed(1)
        self._meanwhile("listing")
        count = parts(len(numbers)) if callable(parts) else parts
        pieces = [pa.table({"number": numbers[part::count]}, NUMBERS) for part in range(count)]
        file = write_table(folder, "00.parquet", pieces, NUMBERS)
        shares = [{file.name: [part]} for part in range(count)]
        return Published(listing_ns=LISTED_NS, files=[file], shares=shares)

    def tables(self, folder: Directory, manifest: Manifest, part: int) -> Tables:
        file = manifest.published.files[0]
        with opened_table(folder, file, NUMBERS, AGAIN) as parquet:
            own = parquet.read_row_groups(manifest.published.shares[part][file.name])
        return {"numbers": lambda: own}

    def work(
        self, given: PartInput, tables: Tables, on_progress: Callable[[int, int], None]
    ) -> StageResult:
        with (self._store.parent / "processes").open("a") as processes:
            processes.write(f"{os.getpid()} {os.getppid()}\n")
        if given.part == self._aborts:
            os.abort()
        numbers = tables["numbers"]()["number"].to_pylist()
        done = []
        for number in numbers:
            if self._full is not None and number >= self._full:
                continue
            (self._destination / str(number)).write_text(given.owner)
            if self._held:
                wait_until((self._store.parent / "released").exists, "no part is released")
            time.sleep(self._seconds)
            on_progress(1, len(numbers))
            done.append(number)
        self._meanwhile("part")
        copied = pa.table({"number": done}, NUMBERS)
        return StageResult({}, {"copied": copied}, settled=len(done) == len(numbers))

    def finish(
        self, folder: Directory, manifest: Manifest, results: Mapping[int, Record]
    ) -> StageResult:
        numbers = [n for r in results.values() for n in r.table("copied")["number"].to_pylist()]
        return StageResult({"largest": max(numbers, default=None)})


@contextmanager
def opened(store: Path, destination: Path, **settings: Any) -> Iterator[ToyJob]:
    """Open the job; picklable, so that a node can, unless its environment refuses."""
    if os.environ.get("TOY_REFUSES"):
        raise StoreUnavailable(f"{store}: not mounted here")
    yield ToyJob(store, destination, **settings)


def _main(store: str, destination: str, run: str, shard: str, *settings: str) -> None:
    """Do one part in a process of its own; settings: NAME=VALUE."""
    from hicachectl.__main__ import _say
    from hicachectl.formats.errors import HicacheError
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.manifest import parse_shard
    from hicachectl.parts.running import begin, join, run_part

    values = dict(setting.split("=") for setting in settings)
    settle(values)
    job = ToyJob(
        Path(store),
        Path(destination),
        seconds=float(values.get("seconds", 0)),
        listing_seconds=float(values.get("listing", 0)),
    )
    try:
        with RunDirectory.create(Path(run), job.permissions, job.trust) as opened:
            chosen = parse_shard(shard)
            if chosen.number:
                wait = float(values.get("wait", 60))
                manifest = join(
                    opened, job, chosen.count, wait_seconds=wait, lister="toy 0/N", say=_say
                )
            else:
                manifest = begin(opened, job, chosen.count)
            outcome = run_part(opened, job, manifest, chosen.number)
    except HicacheError as error:
        _say(str(error))
        sys.exit(2)
    said = "was finished before by" if outcome.earlier else "is finished by"
    _say(f"part {outcome.record.part} {said} {outcome.record.host}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
