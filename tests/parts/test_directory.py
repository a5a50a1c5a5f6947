"""A run directory gives the result of one process, whatever is killed, full, torn or forged."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.permissions import Permissions
from hicachectl.formats.errors import (
    FormatError,
    HicacheError,
    UnsupportedByBackend,
    UntrustedError,
    UsageError,
)
from tests.parts.runs import NUMBERS, ToyRun, names_in, toy_run  # noqa: F401 - a fixture
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def whole(run: ToyRun) -> dict[str, Any]:
    """Return the document of a merged run without its rows; check the rows."""
    document = run.merged().document
    assert sorted(document.pop("numbers")["number"].to_pylist()) == list(range(NUMBERS))
    return document


UNDISTURBED = {
    "copied": NUMBERS,
    "complete": True,
    "finished": NUMBERS - 1,
    "parts": 3,
    "missing_parts": [],
}


# killed and concurrent processes


def test_parts_at_once_list_the_store_once(toy_run: ToyRun) -> None:  # noqa: F811
    """Of two processes for the same part, one waits; each object is copied once."""
    started = [toy_run.start(part, 3, seconds=0.1, listing=0.02) for part in (2, 0, 1, 0)]
    said = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0] * 4, said
    assert sum("part 0 was finished before by" in text for text in said) == 1
    assert toy_run.listings == 1
    assert whole(toy_run) == UNDISTURBED


def test_a_killed_lister_is_followed_by_another(toy_run: ToyRun) -> None:  # noqa: F811
    first = toy_run.start(0, 3, listing=10)
    wait_until(lambda: (toy_run.folder / "listings").exists() and list(toy_run.path.glob("lis*")))
    first.kill()
    first.communicate()
    for part in range(3):
        toy_run.part(part, 3)
    assert whole(toy_run) == UNDISTURBED
    assert len(list(toy_run.path.glob("listing-*"))) == 1, "the killed lister's tables remain"


def test_a_killed_part_is_finished_as_it_was_planned(toy_run: ToyRun) -> None:  # noqa: F811
    """The second attempt counts what the first has copied."""
    first = toy_run.start(1, 3, seconds=0.1, host="other")
    wait_until(lambda: len(list(toy_run.destination.iterdir())) >= 2, "nothing is copied")
    first.kill()
    first.communicate()
    second = toy_run.start(1, 3, host="here")
    said = second.communicate(timeout=60)[1]
    assert said.splitlines() == [
        "hicachectl: Waiting for other, which works on part 1",
        "hicachectl: part 1 is finished by here",
    ]
    for part in (2, 0):
        toy_run.part(part, 3)
    assert whole(toy_run) == UNDISTURBED
    record = json.loads((toy_run.path / "parts/00001/result-1.json").read_text())
    plan = json.loads((toy_run.path / "parts/00001/plan.json").read_text())
    assert record["facts"]["earlier"] == [plan["owner"]]


def test_a_settled_part_is_not_done_again(toy_run: ToyRun) -> None:  # noqa: F811
    first = toy_run.part(0, 1)
    before = names_in(toy_run.path / "parts/00000")
    again = toy_run.part(0, 1)
    assert (first.earlier, again.earlier) == (False, True)
    assert again.record.owner == first.record.owner
    assert names_in(toy_run.path / "parts/00000") == before


def test_an_unsettled_part_is_done_again_and_finished_anew(toy_run: ToyRun) -> None:  # noqa: F811
    assert not toy_run.part(1, 2, full=7).record.settled
    assert toy_run.part(0, 2, full=7).record.settled is False
    assert toy_run.merged().document["finished"] == 6
    assert toy_run.part(1, 2).record.attempt == 1
    assert toy_run.part(0, 2).record.attempt == 1
    assert whole(toy_run) == UNDISTURBED | {"parts": 2}


def test_missing_parts_are_named(toy_run: ToyRun) -> None:  # noqa: F811
    for part in (0, 5):
        toy_run.part(part, 12)
    merged = toy_run.merged()
    assert merged.failed
    assert merged.document["missing_parts"] == [1, 2, 3, 4, *range(6, 12)]
    assert merged.document["complete"] is False
    assert merged.document["copied"] == 2
    assert "parts 1-4, 6-11 of 12: no result" in merged.remarks[0]


# full disks, and file systems without links


def test_a_full_disk_loses_nothing(toy_run: ToyRun, tmp_path: Path) -> None:  # noqa: F811
    """While listing, planning or keeping a result: one line; complete once there is room."""
    with small_file_system(tmp_path / "small", "256k") as small:
        toy_run.path = small / "run"
        filler = small / "filler"
        said = []
        for room in range(4096, 60_000, 4096):  # pages of the tmpfs
            free = os.statvfs(small).f_bavail * 4096
            filler.write_bytes(b"\1" * max(0, filler_size(filler) + free - room))
            try:
                toy_run.part(0, 1)
                break
            except UsageError as error:
                said.append(str(error))
                assert not list(small.glob("run/listing-*")) or (toy_run.path / "run.json").exists()
                assert not list(toy_run.path.rglob(".hicachectl-*")), "a temporary file remains"
        filler.unlink()
        toy_run.part(0, 1)
        assert whole(toy_run) == UNDISTURBED | {"parts": 1}
    assert len(said) >= 4
    assert all("cannot write: No space left on device; make room" in text for text in said)
    assert any("parts/00000" in text for text in said)
    assert any("parts/00000" not in text for text in said)


def filler_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_file_system_without_links_is_refused(
    toy_run: ToyRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UnsupportedByBackend, match="run: this file system has no hard links"):
        toy_run.part(0, 1)
    assert names_in(toy_run.path) == []
    assert not (toy_run.folder / "listings").exists()


def test_a_repeated_link_call_is_ours(
    toy_run: ToyRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NFS may answer a call that it has done already: the name exists, and is ours."""
    link = os.link

    def repeated(*arguments: Any, **options: Any) -> None:
        link(*arguments, **options)
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", repeated)
    for part in range(3):
        assert not toy_run.part(part, 3).earlier
    assert whole(toy_run) == UNDISTURBED


# torn and forged files


def torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def changed(path: Path) -> None:
    """Change a byte in the middle of a table's data."""
    content = bytearray(path.read_bytes())
    at = content.index(b"\x28\xb5\x2f\xfd")  # a frame of zstd
    content[at + 12] ^= 1
    path.write_bytes(content)


def replaced(path: Path) -> None:
    """Give a table other columns, in as many bytes."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"number", b"Number"))


@pytest.mark.parametrize(
    ("place", "damage", "said"),
    [
        ("run.json", torn, "run/run.json: not JSON.*; give another --run"),
        ("parts/*/plan.json", torn, "plan.json: not JSON.*; give another --run"),
        ("parts/*/plan-*", torn, r"has \d+ bytes, expected \d+; give another --run"),
        ("parts/*/result-0.json", torn, "not JSON.*; remove result-0.json beside it and run part"),
        ("parts/*/result-*.parquet", torn, r"bytes, expected \d+; remove result-0.json beside it"),
        ("parts/*/result-*.parquet", changed, "is damaged: .*; remove result-0.json beside it"),
        ("parts/*/result-*.parquet", replaced, "(other columns|damaged).*; remove result-0.json"),
        ("parts/*/result-*.parquet", os.unlink, "is missing; remove result-0.json beside it"),
        ("listing-*/00.parquet", torn, r"00.parquet: has \d+ bytes, expected \d+"),
    ],
)
def test_damaged_files_are_named(
    toy_run: ToyRun,  # noqa: F811
    place: str,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    toy_run.part(0, 2, full=3)
    [path] = toy_run.path.glob(place)
    damage(path)
    with pytest.raises(FormatError, match=said) as refusal:
        (toy_run.merged if "result" in place else lambda: toy_run.part(0, 2))()
    assert "\n" not in str(refusal.value)


def test_a_removed_result_is_made_again(toy_run: ToyRun) -> None:  # noqa: F811
    """What the message of a damaged result advises gives the undisturbed outcome."""
    for part in range(3):
        toy_run.part(part, 3)
    (toy_run.path / "parts/00001/result-0.json").unlink()
    toy_run.part(1, 3)
    assert whole(toy_run) == UNDISTURBED


def test_the_result_of_another_run_is_refused(toy_run: ToyRun) -> None:  # noqa: F811
    for part in range(2):
        toy_run.part(part, 2)
    shutil.copyfile(
        toy_run.path / "parts/00000/result-0.json", toy_run.path / "parts/00001/result-0.json"
    )
    with pytest.raises(FormatError, match=r"belongs to another run or part; remove result-0.json"):
        toy_run.merged()


@pytest.mark.parametrize(
    "name", ["run.json", "claim.0", "parts", "parts/00000", "parts/00000/claim.0",
             "parts/00000/plan.json", "parts/00000/result-0.json"]
)  # fmt: skip
def test_links_are_not_followed(toy_run: ToyRun, name: str) -> None:  # noqa: F811
    toy_run.part(0, 1, full=3)
    path = toy_run.path / name
    path.rename(toy_run.folder / "elsewhere")
    if name == "claim.0":  # read only before there is a manifest
        shutil.rmtree(toy_run.path)
        toy_run.path.mkdir()
    path.symlink_to(toy_run.folder / "elsewhere")
    with pytest.raises(UntrustedError, match=f"{re.escape(name)}: is a symbolic link"):
        toy_run.part(0, 1)


@needs_root
def test_files_of_strangers_are_refused(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.part(0, 1)
    os.chown(toy_run.path / "parts/00000/result-0.json", 12345, 12345)
    with pytest.raises(UntrustedError, match=r"result-0.json: belongs to user 12345"):
        toy_run.merged()


@needs_root
@pytest.mark.parametrize("does", ["part", "merged"])
def test_the_run_directory_of_a_stranger_is_refused(
    toy_run: ToyRun,  # noqa: F811
    does: str,
) -> None:
    """It decides what is removed: its plan is followed, and its results are merged."""
    toy_run.part(0, 1)
    for path in [toy_run.path, *toy_run.path.rglob("*")]:
        os.chown(path, 12345, 12345)
    before = {path: path.stat().st_mtime_ns for path in toy_run.path.rglob("*")}
    do = partial(toy_run.part, 0, 1) if does == "part" else toy_run.merged
    with pytest.raises(UntrustedError, match=r"run: belongs to user 12345.*another run directory"):
        do()
    assert before == {path: path.stat().st_mtime_ns for path in toy_run.path.rglob("*")}
    os.chown(toy_run.destination, 12345, 12345)
    do()  # the store's owner may decide


def test_new_files_are_as_private_as_the_store(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.part(0, 1, permissions=Permissions(bits=0o750, group=os.getegid()))
    for path in [toy_run.path, *toy_run.path.rglob("*")]:
        facts = path.stat()
        assert not facts.st_mode & stat.S_IRWXO, path
        assert facts.st_mode & 0o600 == 0o600, path


def test_a_result_is_whole_or_absent(toy_run: ToyRun) -> None:  # noqa: F811
    """A reader never sees a record before its tables: names appear in this order."""
    toy_run.part(0, 1)
    part = toy_run.path / "parts/00000"
    times = [
        (next(part.glob(name))).stat().st_ctime_ns
        for name in ("plan-*", "plan.json", "result-0-*", "result-0.json")
    ]
    assert all(before <= after for before, after in pairwise(times))


def test_a_merge_needs_a_run(toy_run: ToyRun) -> None:  # noqa: F811
    with pytest.raises(HicacheError, match="run: cannot use the run directory: No such file"):
        toy_run.merged()
    toy_run.path.mkdir()
    with pytest.raises(UsageError, match=r"has no run.json; run a part first"):
        toy_run.merged()
