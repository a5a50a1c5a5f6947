"""A run directory gives the result of one process, whatever is killed, full, torn or forged."""

from __future__ import annotations

import errno
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
    StoreUnavailable,
    UnsupportedByBackend,
    UntrustedError,
    UsageError,
)
from hicachectl.parts import running
from hicachectl.parts.directory import RunDirectory
from tests.parts.runs import NUMBERS, ToyRun, names_in, toy_run  # noqa: F401 - a fixture
from tests.parts.toy import LISTED_NS, ToyJob
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.parts.running import PartOutcome


def whole(run: ToyRun) -> dict[str, Any]:
    """Return the document of a merged run without its rows; check the rows."""
    document = run.merged().document
    assert sorted(document.pop("numbers")["number"].to_pylist()) == list(range(NUMBERS))
    return document


UNDISTURBED = {
    "copied": NUMBERS,
    "complete": True,
    "finished": NUMBERS - 1,
    "listed": LISTED_NS / 1e9,
    "parts": 3,
    "missing_parts": [],
}


# killed and concurrent processes


@pytest.mark.slow
def test_parts_wait_for_the_listing_of_part_0(toy_run: ToyRun) -> None:  # noqa: F811
    """Processes that start together list once; those that wait say so once within a minute."""
    started = [toy_run.start(part, 3, seconds=0.1, listing=0.02) for part in (2, 1)]
    wait_until(toy_run.path.exists, "no part has begun")
    started.append(toy_run.start(0, 3, listing=0.02))
    said = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0] * 3, said
    waiting = f"Waiting for part 0 to list for all parts, because {toy_run.path} has no run.json"
    assert waiting in said[0] + said[1]
    assert max(text.count(waiting) for text in said) == 1
    assert toy_run.listings == 1
    assert whole(toy_run) == UNDISTURBED


def test_a_part_waits_no_longer_than_it_is_told_to(
    toy_run: ToyRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says what it waits for again and again, and at last the command of part 0."""
    monkeypatch.setattr(running, "_SAY_SECONDS", 0.1)
    said: list[str] = []
    job = ToyJob(toy_run.store, toy_run.destination)
    with (
        RunDirectory.create(toy_run.path, job.permissions, job.trust) as run,
        pytest.raises(StoreUnavailable) as refusal,
    ):
        running.join(run, job, 3, wait_seconds=1, lister="toy --shard 0/3", say=said.append)
    assert str(refusal.value) == (
        f"{toy_run.path}: part 0 has not published run.json within 1s; run part 0: toy --shard 0/3"
    )
    assert 3 <= len(said) <= 10
    assert names_in(toy_run.path) == []


@pytest.mark.slow
def test_a_killed_lister_is_followed_by_another(toy_run: ToyRun) -> None:  # noqa: F811
    first = toy_run.start(0, 3, listing=10)
    wait_until(lambda: (toy_run.folder / "listings").exists() and list(toy_run.path.glob("lis*")))
    first.kill()
    first.communicate()
    toy_run.all(3)
    assert whole(toy_run) == UNDISTURBED
    assert len(list(toy_run.path.glob("listing-*"))) == 1, "the killed lister's tables remain"


def test_of_two_listers_at_once_the_first_counts(toy_run: ToyRun) -> None:  # noqa: F811
    """The second one goes on with the listing of the first, and leaves no table behind."""

    def begin_again(name: str) -> None:
        if name == "listing":
            with RunDirectory.create(toy_run.path, other.permissions, other.trust) as run:
                running.begin(run, other, 3)

    other = ToyJob(toy_run.store, toy_run.destination)
    toy_run.part(0, 3, meanwhile=begin_again)
    assert toy_run.listings == 2
    assert len(list(toy_run.path.glob("listing-*"))) == 1
    toy_run.part(1, 3)
    toy_run.part(2, 3)
    assert whole(toy_run) == UNDISTURBED


def test_of_two_attempts_at_once_the_first_result_counts(toy_run: ToyRun) -> None:  # noqa: F811
    """The second one ends as the first one ended, and leaves no table behind."""
    toy_run.part(0, 3)
    first: list[PartOutcome] = []

    def do_part_1(name: str) -> None:
        first.append(toy_run.part(1, 3, full=1))

    second = toy_run.part(1, 3, meanwhile=do_part_1)
    assert (first[0].earlier, second.earlier) == (False, True)
    assert second.record == first[0].record
    assert not second.record.settled
    names = [name for name in names_in(toy_run.path / "parts") if name.startswith("00001")]
    assert len(names) == 2, "a result, and its table"


def test_two_processes_may_finish_a_run(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.part(0, 2)
    toy_run.part(1, 2, meanwhile=lambda name: toy_run.part(1, 2))
    assert whole(toy_run) == UNDISTURBED | {"parts": 2}


@pytest.mark.slow
def test_a_killed_part_is_run_again(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.part(0, 3)
    first = toy_run.start(1, 3, seconds=0.1, host="other")
    wait_until(lambda: len(list(toy_run.destination.iterdir())) >= 6, "nothing is copied")
    first.kill()
    first.communicate()
    second = toy_run.start(1, 3, host="here")
    said = second.communicate(timeout=60)[1]
    assert said.splitlines() == ["hicachectl: part 1 is finished by here"]
    toy_run.part(2, 3)
    assert whole(toy_run) == UNDISTURBED
    (mark,) = {(toy_run.destination / str(n)).read_text() for n in range(1, NUMBERS, 3)}
    assert re.fullmatch("[0-9a-f]{16}", mark), "attempts have marks of their own"


@pytest.mark.parametrize("full", [None, 7])
def test_a_part_with_a_result_is_not_done_again(
    toy_run: ToyRun,  # noqa: F811
    full: int | None,
) -> None:
    """It ends as it ended, complete or not."""
    first = toy_run.part(0, 2, full=full)
    before = names_in(toy_run.path / "parts")
    again = toy_run.part(0, 2)
    assert (first.earlier, again.earlier) == (False, True)
    assert again.record == first.record
    assert again.record.settled == (full is None)
    assert names_in(toy_run.path / "parts") == before


def test_a_finished_run_is_refused(toy_run: ToyRun) -> None:  # noqa: F811
    """Each part of the next night would otherwise end at once as that of the first."""
    toy_run.all(2)
    before = {path: path.stat().st_mtime_ns for path in toy_run.path.rglob("*")}
    for part in range(2):
        with pytest.raises(UsageError) as refusal:
            toy_run.part(part, 2)
        assert str(refusal.value) == (
            f"{toy_run.path}: the run of 2023-11-14 22:13 UTC is finished; give a new --run, such "
            f"as --run {toy_run.folder}/$(date +%F), or print this run with: hicachectl merge "
            f"{toy_run.path}"
        )
    assert before == {path: path.stat().st_mtime_ns for path in toy_run.path.rglob("*")}


def test_a_run_is_finished_by_any_part(toy_run: ToyRun) -> None:  # noqa: F811
    """The last part may be killed after its result; a part that is done finishes the run then."""
    toy_run.all(2)
    (toy_run.path / "finish.json").unlink()
    assert toy_run.merged().document["finished"] is None
    assert toy_run.part(0, 2).earlier
    assert whole(toy_run) == UNDISTURBED | {"parts": 2}


def test_an_incomplete_part_is_named(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.part(0, 2)
    assert not toy_run.part(1, 2, full=7).record.settled
    merged = toy_run.merged()
    assert merged.document["finished"] == 10
    assert merged.remarks[0] == (
        f"{toy_run.path}: not complete: part 1 of 2; to complete the work, run all parts with "
        "another --run"
    )


def test_missing_parts_are_named(toy_run: ToyRun) -> None:  # noqa: F811
    for part in (0, 5):
        toy_run.part(part, 12)
    merged = toy_run.merged()
    assert merged.failed
    assert merged.document["missing_parts"] == [1, 2, 3, 4, *range(6, 12)]
    assert merged.document["complete"] is False
    assert merged.document["copied"] == 2
    assert "there is no result of parts 1-4, 6-11 of 12" in merged.remarks[0]


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
                toy_run.part(0, 2)
                break
            except UsageError as error:
                said.append(str(error))
                assert not list(small.glob("run/listing-*")) or (toy_run.path / "run.json").exists()
                assert not list(toy_run.path.rglob(".hicachectl-*")), "a temporary file remains"
        filler.unlink()
        toy_run.all(2)
        assert whole(toy_run) == UNDISTURBED | {"parts": 2}
    assert len(said) >= 2
    assert all("cannot write: No space left on device; make room" in text for text in said)
    assert any("run/parts: " in text for text in said)
    assert any("run: " in text for text in said)


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
        ("parts/00000.json", torn, "not JSON.*; remove 00000.json and run part 0 again"),
        ("parts/00000-*.parquet", torn, r"bytes, expected \d+; remove 00000.json and run part 0"),
        ("parts/00000-*.parquet", changed, "is damaged: .*; remove 00000.json and run part 0"),
        ("parts/00000-*.parquet", replaced, "(other columns|damaged).*; remove 00000.json and"),
        ("parts/00000-*.parquet", os.unlink, "is missing; remove 00000.json and run part 0"),
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
        (toy_run.merged if "parts" in place else lambda: toy_run.part(1, 2))()
    assert "\n" not in str(refusal.value)


def test_a_removed_result_is_made_again(toy_run: ToyRun) -> None:  # noqa: F811
    """What the message of a damaged result advises gives the undisturbed outcome."""
    toy_run.all(3)
    (toy_run.path / "parts/00001.json").unlink()
    toy_run.part(1, 3)
    assert whole(toy_run) == UNDISTURBED


def test_the_result_of_another_run_is_refused(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.all(2)
    shutil.copyfile(toy_run.path / "parts/00000.json", toy_run.path / "parts/00001.json")
    with pytest.raises(FormatError, match=r"belongs to another run or part; remove 00001.json"):
        toy_run.merged()


@pytest.mark.parametrize("name", ["run.json", "parts", "parts/00000.json"])
def test_links_are_not_followed(toy_run: ToyRun, name: str) -> None:  # noqa: F811
    toy_run.part(0, 2, full=3)
    path = toy_run.path / name
    path.rename(toy_run.folder / "elsewhere")
    path.symlink_to(toy_run.folder / "elsewhere")
    with pytest.raises(UntrustedError, match=f"{re.escape(name)}: is a symbolic link"):
        toy_run.part(0, 2)


@needs_root
def test_files_of_strangers_are_refused(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.part(0, 1)
    os.chown(toy_run.path / "parts/00000.json", 12345, 12345)
    with pytest.raises(UntrustedError, match=r"00000.json: belongs to user 12345"):
        toy_run.merged()


@needs_root
@pytest.mark.parametrize("does", ["part", "merged"])
def test_the_run_directory_of_a_stranger_is_refused(
    toy_run: ToyRun,  # noqa: F811
    does: str,
) -> None:
    """It decides what is removed: its listing is believed, and its results are merged."""
    toy_run.part(0, 2)
    for path in [toy_run.path, *toy_run.path.rglob("*")]:
        os.chown(path, 12345, 12345)
    before = {path: path.stat().st_mtime_ns for path in toy_run.path.rglob("*")}
    do = partial(toy_run.part, 0, 2) if does == "part" else toy_run.merged
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
    results = toy_run.path / "parts"
    times = [next(results.glob(name)).stat().st_ctime_ns for name in ("00000-*", "00000.json")]
    assert all(before <= after for before, after in pairwise(times))


def test_a_merge_needs_a_run(toy_run: ToyRun) -> None:  # noqa: F811
    with pytest.raises(HicacheError, match="run: cannot use the run directory: No such file"):
        toy_run.merged()
    toy_run.path.mkdir()
    with pytest.raises(UsageError, match=r"has no run.json; run part 0 first"):
        toy_run.merged()
