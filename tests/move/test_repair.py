"""Repair: bad groups leave completely and healthy groups stay, whatever happens meanwhile."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.base import Status, Store, open_store
from hicachectl.backends.capabilities import Mover
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files import reading
from hicachectl.backends.object_files.mover import FileMover
from hicachectl.checks.findings import findings
from hicachectl.formats.errors import FormatError, StoreUnavailable, UsageError
from hicachectl.move.planning import plan_removal
from hicachectl.move.purge import list_runs
from hicachectl.move.quarantine import Quarantine
from hicachectl.move.record_file import dump_record, parse_record
from hicachectl.move.restore import restore_groups
from hicachectl.move.withdrawal import count_unfinished, finish_removals, remove_groups
from tests.move.repairs import (
    INDEXER_BYTES,
    default_quarantine,
    dsa_store,
    indexer,
    kv,
    plan_for,
    planned,
    quarantined,
    repaired,
    scanned,
    shorten,
    stick,
)
from tests.skips import missing
from tests.small_file_system import small_file_system
from tests.stores import DSA as DSA_TEXT
from tests.stores import Contents, contents, page, put, put_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.base import ReadResult, Result
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.formats.profile import Profile
    from hicachectl.move.reports import GroupReport
    from tests.conftest import Invoke


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Make six pages of a model with an indexer."""
    return dsa_store(tmp_path / "store", 6)


def fill(path: Path) -> None:
    """Write a file until the file system is full."""
    with path.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))


def without(before: Contents, *names: str) -> Contents:
    return {name: value for name, value in before.items() if name not in names}


def only(before: Contents, *names: str) -> Contents:
    return {name: before[name] for name in names}


def bad_value(key: str, code: str = "nan") -> pa.Table:
    """Return a finding about an object's bytes."""
    return findings(
        code,
        keys=pa.array([key]),
        pages=pa.array([key[:64]]),
        pools=pa.array(["kv"]),
        detail="test",
    )


def repair_findings(
    directory: Path, found: pa.Table, profile: Profile | None = None
) -> GroupReport:
    with FileStore(directory) as opened:
        inventory, groups = scanned(opened, profile)
        plan = plan_for(inventory, groups, found)
        return remove_groups(opened, inventory, groups, plan, mode="quarantine")


# which groups


def test_every_object_of_a_bad_group_goes(store: Path) -> None:
    shorten(store / indexer(2))
    before = contents(store)
    outcome = repaired(store)
    assert contents(store) == without(before, kv(2), indexer(2))
    assert quarantined(default_quarantine(store)) == only(before, kv(2), indexer(2))
    assert (outcome.groups, outcome.moved, outcome.deleted) == (1, 2, 0)
    assert (outcome.failures, outcome.remaining, outcome.gone) == ((), 0, 0)
    assert outcome.nbytes == sum(len(before[name][0]) for name in (kv(2), indexer(2)))


def test_a_group_that_lacks_a_pool_goes(store: Path) -> None:
    (store / indexer(3)).unlink()
    before = contents(store)
    assert repaired(store).groups == 1
    assert contents(store) == without(before, kv(3))


def test_groups_with_warnings_go_only_when_asked_by_code(store: Path) -> None:
    (store / kv(1)).unlink()
    before = contents(store)
    assert repaired(store).groups == 0
    assert contents(store) == before
    assert repaired(store, codes=("orphan-sidecar",)).groups == 1
    assert contents(store) == without(before, indexer(1))


def test_only_the_group_of_the_damaged_model_goes(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_a_0_1", "_b_0_1")
    before = contents(tmp_path)
    repair_findings(tmp_path, bad_value(f"{page(1)}_b_0_1.bin"))
    assert contents(tmp_path) == without(before, f"{page(1)}_b_0_1.bin")


def test_an_ambiguous_group_stays_whatever_is_found(tmp_path: Path) -> None:
    """The model of the group, and so of the finding, is unknown."""
    stems = ("_m_0_2", ".mamba_m_0_2")
    put_pages(tmp_path, range(2), *stems)
    before = contents(tmp_path)
    assert repair_findings(tmp_path, bad_value(f"{page(1)}{stems[0]}.bin")).groups == 0
    assert contents(tmp_path) == before


def test_findings_that_name_no_group_are_counted(store: Path) -> None:
    with FileStore(store) as opened:
        inventory, groups = scanned(opened)
        found = pa.concat_tables(
            [
                bad_value("README"),
                bad_value(f"{page(77)}_x-dsa.bin"),
                bad_value(kv(1)),
                findings("stamp-mismatch", keys=pa.nulls(1, pa.string()), detail="x"),
            ]
        )
        plan = plan_for(inventory, groups, found)
    assert plan.unplaced == {"nan": 2, "stamp-mismatch": 1}
    assert groups.pages.take(pa.array(plan.groups)).to_pylist() == [page(1)]
    assert plan.reasons.column("code").to_pylist() == ["nan"]


def test_a_finding_without_an_object_is_about_its_whole_group(store: Path) -> None:
    before = contents(store)
    with FileStore(store) as opened:
        inventory, groups = scanned(opened)
        place = inventory.objects.column("key").to_pylist().index(kv(4).encode())
        number = groups.of_object[place : place + 1]
        nothing = pa.nulls(1, pa.string())
        found = findings("layout-mismatch", keys=nothing, groups=number, detail="x")
        plan = plan_for(inventory, groups, found)
        remove_groups(opened, inventory, groups, plan, mode="quarantine")
    assert contents(store) == without(before, kv(4), indexer(4))


# the quarantine


def test_the_record_says_why_and_where_from(store: Path) -> None:
    shorten(store / kv(0))
    facts = (store / kv(0)).stat()
    with FileStore(store) as opened:
        outcome = remove_groups(opened, *planned(opened), mode="quarantine")
    assert outcome.place == str(default_quarantine(store))
    (path,) = default_quarantine(store).glob("*/*.json")
    record = json.loads(path.read_text())
    assert (record["store"], record["mode"]) == (f"file://{store}", "quarantine")
    (group,) = record["groups"]
    assert (group["page"], group["model"]) == (page(0), "x-dsa")
    assert [f["code"] for f in group["findings"]] == ["truncated"]
    entry = next(entry for entry in group["objects"] if entry["key"] == kv(0))
    assert (entry["nbytes"], entry["mtime_ns"]) == (facts.st_size, facts.st_mtime_ns)
    assert (entry["blake3"], entry["unwanted"]) == (None, True)
    moved = path.with_suffix("") / str(entry["file"])
    assert moved.stat().st_ino == facts.st_ino
    assert dump_record(parse_record(path.read_bytes(), source="x")) == path.read_bytes()


def test_the_record_is_there_before_anything_moves(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(store / kv(0))
    seen: list[int] = []
    take = FileMover.take

    def watched(mover: FileMover, *arguments: Any) -> Status:
        seen.extend(
            len(json.loads(path.read_text())["groups"])
            for path in default_quarantine(store).glob("*/*.begun")
        )
        return take(mover, *arguments)

    monkeypatch.setattr(FileMover, "take", watched)
    repaired(store)
    assert seen == [1, 1]


def test_anchors_leave_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_pages(tmp_path, range(4), "_m_0_2", "_m_1_2", ".draft_m_0_2", ".draft_m_1_2")
    put_pages(tmp_path, range(4), ".mamba_m_0_2", ".mamba_m_1_2")
    taken: list[bytes] = []
    take = FileMover.take

    def watched(mover: FileMover, key: bytes, *rest: Any) -> Status:
        taken.append(key)
        return take(mover, key, *rest)

    monkeypatch.setattr(FileMover, "take", watched)
    found = bad_value(f"{page(1)}.mamba_m_1_2.bin")
    assert repair_findings(tmp_path, found).moved == 6
    stems = [key[64:].decode() for key in taken]
    assert sorted(stems[:2]) == ["_m_0_2.bin", "_m_1_2.bin"]
    # The damaged sidecar leaves right after the anchors, before a new anchor can appear.
    assert stems[2] == ".mamba_m_1_2.bin"


def test_a_dry_run_changes_nothing_and_says_the_same(store: Path) -> None:
    shorten(store / kv(0))
    before = sorted(path for path in store.rglob("*"))
    rehearsed = repaired(store, dry_run=True)
    assert sorted(path for path in store.rglob("*")) == before
    done = repaired(store)
    for name in ("groups", "moved", "deleted", "nbytes", "place"):
        assert getattr(rehearsed, name) == getattr(done, name)
    assert rehearsed.rows.drop_columns("state").equals(done.rows.drop_columns("state"))


def test_delete_keeps_nothing(store: Path) -> None:
    shorten(store / indexer(2))
    before = contents(store)
    outcome = repaired(store, mode="delete")
    assert contents(store) == without(before, kv(2), indexer(2))
    assert list(default_quarantine(store).iterdir()) == []
    assert (outcome.groups, outcome.moved, outcome.deleted) == (1, 0, 2)
    assert outcome.place is None


@pytest.mark.parametrize("stuck", [False, True], ids=["", "an object stays"])
def test_no_object_in_the_quarantine_is_without_its_record(
    store: Path, monkeypatch: pytest.MonkeyPatch, *, stuck: bool
) -> None:
    """An object without a record would stay forever: the next run deletes only recorded objects."""
    for number in range(3):
        shorten(store / indexer(number))
    unrecorded: set[Path] = set()
    quarantine = default_quarantine(store)
    unlink, steps = os.unlink, itertools.count()

    def watched(path: Any, *, dir_fd: int | None = None) -> None:
        if stuck and os.fsdecode(path).isdecimal():
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, dir_fd=dir_fd)
        next(steps)
        for held in quarantine.glob("*/[0-9]*/[0-9]*"):
            records = [held.parent.with_suffix(suffix) for suffix in (".begun", ".json")]
            if not any(record.exists() for record in records):
                unrecorded.add(held)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", watched)
        outcome = repaired(store, mode="delete")
    assert stuck or next(steps)
    assert unrecorded == set()
    assert outcome.deleted == 6
    assert sum(len(path.read_bytes()) > 0 for path in quarantine.glob("*/*/*")) == 6 * stuck
    repaired(store, mode="delete")  # finishes the killed run
    assert list(quarantine.glob("*/*")) == []


def test_a_second_run_finds_nothing_to_do(store: Path) -> None:
    shorten(store / indexer(2))
    repaired(store)
    before = contents(store)
    again = repaired(store)
    assert (again.groups, again.moved, len(again.rows)) == (0, 0, 0)
    assert contents(store) == before


def test_many_groups_go_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicachectl.move.listed.BATCH_OBJECTS", 7)
    store = dsa_store(tmp_path / "store", 23)
    before = contents(store)
    with FileStore(store) as opened:
        inventory, groups = scanned(opened)
        plan = plan_removal(groups, np.arange(23), "test")
        steps: list[int] = []
        outcome = remove_groups(
            opened, inventory, groups, plan, mode="quarantine", on_progress=steps.append
        )
    assert (sum(steps), outcome.groups, outcome.moved) == (23, 23, 46)
    assert len(steps) == 8
    assert contents(store) == {}
    assert quarantined(default_quarantine(store)) == before


# places of a quarantine


def test_another_file_system_gets_copies(store: Path, other_file_system: Path) -> None:
    shorten(store / indexer(2))
    before = contents(store)
    outcome = repaired(store, quarantine=str(other_file_system / "q"))
    assert contents(store) == without(before, kv(2), indexer(2))
    assert quarantined(other_file_system / "q") == only(before, kv(2), indexer(2))
    assert (outcome.groups, outcome.moved) == (1, 2)
    assert not default_quarantine(store).exists()


def test_a_full_quarantine_costs_nothing(store: Path, tmp_path: Path) -> None:
    """Two of three groups do not fit: groups without a complete copy stay, and are reported."""
    for number in range(3):
        shorten(store / indexer(number))
    before = contents(store)
    with small_file_system(tmp_path / "small", "44k") as small:
        outcome = repaired(store, quarantine=str(small / "q"))
        kept = quarantined(small / "q")
    assert 0 < outcome.groups < 3
    assert outcome.groups + outcome.remaining == 3
    assert outcome.failures
    assert all("No space left on device" in message for _, message in outcome.failures)
    assert {**contents(store), **kept} == before
    assert len(kept) == 2 * outcome.groups
    assert not set(contents(store)) & set(kept)


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    """There is no room even for the record."""
    with small_file_system(tmp_path / "small", "256k") as small:
        store = dsa_store(small / "store", 3)
        shorten(store / indexer(1))
        default_quarantine(store).mkdir(parents=True)
        before = contents(store)
        fill(small / "filler")
        outcome = repaired(store)
        assert contents(store) == before
        assert (outcome.groups, outcome.remaining) == (0, 1)
        why = "cannot write to the quarantine: No space left on device"
        next_step = "check its disk, then run again"
        assert outcome.failures == ((str(default_quarantine(store)), f"{why}; {next_step}"),)
        (small / "filler").unlink()
        assert repaired(store).groups == 1
        assert contents(store) == without(before, kv(1), indexer(1))


def test_an_unreadable_copy_fails_only_its_group(
    store: Path, other_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        shorten(store / indexer(number))
    before = contents(store)
    read = reading.read_file

    def broken(
        name: bytes, directory: int, target: memoryview
    ) -> tuple[int, os.stat_result, bytearray | None]:
        if name == kv(1).encode():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(name, directory, target)

    monkeypatch.setattr(reading, "read_file", broken)
    outcome = repaired(store, quarantine=str(other_file_system))
    why = "not copied to quarantine: cannot be read: Input/output error"
    assert outcome.failures == ((kv(1), why),)
    assert (outcome.groups, outcome.remaining) == (1, 1)
    assert contents(store) == without(before, kv(2), indexer(2))
    assert quarantined(other_file_system) == only(before, kv(2), indexer(2))


@pytest.mark.parametrize("place", ["{store}", "{store}/x/..", "{file}", "nosuch:"])
def test_places_that_are_no_quarantine_are_refused(store: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (store / "x").mkdir()
    shorten(store / indexer(1))
    before = contents(store)
    with pytest.raises(UsageError):
        repaired(store, quarantine=place.format(store=store, file=tmp_path / "file"))
    assert contents(store) == before


def test_a_store_without_side_files_needs_a_named_quarantine(tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text("{}")
    with open_store(f"hf3fs://{tmp_path}/x?snapshot={tmp_path}/saved.json") as store:
        said = f"^{re.escape(store.url)}: no default quarantine; give --quarantine DIR$"
        with pytest.raises(UsageError, match=said):
            Quarantine(store)


def test_a_quarantine_with_a_name_too_long_is_said(store: Path, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 300)
    said = f"^{path}: cannot use the quarantine: File name too long; check its owner"
    with (
        FileStore(store) as opened,
        pytest.raises(StoreUnavailable, match=said),
        Quarantine(opened, path).opened(writes=True),
    ):
        pass
    with pytest.raises(StoreUnavailable, match=said):
        list_runs(path)


def test_a_quarantine_that_cannot_be_written_is_said(store: Path) -> None:
    shorten(store / indexer(1))
    before = contents(store)
    with pytest.raises(StoreUnavailable, match="quarantine"):
        repaired(store, quarantine="/proc/hicachectl")
    assert contents(store) == before


# a store that changes meanwhile


def replan_after(store: Path, change: Callable[[], None], key: str, **options: Any) -> GroupReport:
    """Repair with a plan made before a change."""
    with FileStore(store) as opened:
        inventory, groups = scanned(opened)
        plan = plan_for(inventory, groups, bad_value(key))
        change()
        return remove_groups(opened, inventory, groups, plan, **{"mode": "quarantine", **options})


def rewrite(path: Path, value: bytes | None = None) -> None:
    """Write an object as SGLang does: a temporary file, and a rename."""
    value = path.read_bytes() if value is None else value
    path.with_name(".w.tmp").write_bytes(value)
    path.with_name(".w.tmp").rename(path)


def test_a_damaged_object_that_was_rewritten_is_not_damaged(store: Path) -> None:
    outcome = replan_after(store, lambda: rewrite(store / indexer(1)), indexer(1))
    assert (outcome.groups, outcome.kept) == (0, 1)
    assert (store / indexer(1)).exists()
    assert (store / kv(1)).exists()


def test_a_rewrite_of_another_object_saves_no_damaged_one(store: Path) -> None:
    outcome = replan_after(store, lambda: rewrite(store / kv(1)), indexer(1))
    assert (outcome.groups, outcome.kept) == (1, 0)
    assert not (store / indexer(1)).exists()
    assert not (store / kv(1)).exists()


def test_a_pool_that_arrived_heals_its_group(store: Path) -> None:
    value = (store / indexer(1)).read_bytes()
    (store / indexer(1)).unlink()
    with FileStore(store) as opened:
        inventory, groups, plan = planned(opened)
        assert len(plan.groups) == 1
        rewrite(store / indexer(1), value)
        outcome = remove_groups(opened, inventory, groups, plan, mode="quarantine")
    assert (outcome.groups, outcome.kept) == (0, 1)
    assert (store / kv(1)).exists()


def test_objects_that_vanished_are_gone_and_no_failure(store: Path) -> None:
    def vanish() -> None:
        (store / indexer(1)).unlink()

    outcome = replan_after(store, vanish, indexer(1))
    assert (outcome.groups, outcome.moved, outcome.gone) == (1, 1, 1)
    assert outcome.failures == ()
    assert not (store / kv(1)).exists()


def test_a_group_that_vanished_is_gone(store: Path) -> None:
    def vanish() -> None:
        (store / indexer(1)).unlink()
        (store / kv(1)).unlink()

    outcome = replan_after(store, vanish, indexer(1))
    assert (outcome.groups, outcome.gone, outcome.failures) == (0, 2, ())
    assert outcome.rows.column("state").to_pylist() == ["gone"]


class Interfering(FileStore):
    """A store in which a server acts right after each removal of an object."""

    after: Callable[[bytes], None]

    def mover(self, directory: Directory) -> FileMover | None:
        real = super().mover(directory)
        assert real is not None
        take = real.take

        def interfered(key: bytes, name: str, version: bytes | None = None) -> Status:
            status = take(key, name, version)
            self.after(key)
            return status

        real.take = interfered  # type: ignore[method-assign]
        return real


def interfered(store: Path, after: Callable[[bytes], None], **options: Any) -> GroupReport:
    with Interfering(store) as opened:
        opened.after = after
        inventory, groups = scanned(opened)
        plan = plan_for(inventory, groups, bad_value(indexer(1)))
        return remove_groups(opened, inventory, groups, plan, **{"mode": "quarantine", **options})


@pytest.mark.parametrize("times", [1, 2])
def test_an_anchor_that_comes_back_beside_an_old_sidecar_goes_again(
    store: Path, times: int
) -> None:
    """A server saw the old sidecar, skipped it, and wrote kv again after the removal of kv."""
    value = (store / kv(1)).read_bytes()
    written: list[bytes] = []

    def server(key: bytes) -> None:
        if key == kv(1).encode() and len(written) < times:
            written.append(key)
            rewrite(store / kv(1), value)

    before = contents(store)
    outcome = interfered(store, server)
    assert contents(store) == without(before, kv(1), indexer(1))
    assert (outcome.groups, outcome.moved, outcome.deleted) == (1, 2, times)
    assert quarantined(default_quarantine(store)) == only(before, kv(1), indexer(1))


def test_a_whole_new_group_is_left_alone(store: Path) -> None:
    values = [(store / name(1)).read_bytes() for name in (indexer, kv)]

    def server(key: bytes) -> None:
        if key == indexer(1).encode():
            rewrite(store / indexer(1), values[0])
            rewrite(store / kv(1), values[1])

    outcome = interfered(store, server)
    assert (outcome.groups, outcome.moved, outcome.deleted) == (1, 2, 0)
    assert (store / indexer(1)).exists()
    assert (store / kv(1)).exists()


def test_a_page_that_is_being_written_is_left_to_its_writer(store: Path) -> None:
    def server(key: bytes) -> None:
        if key == indexer(1).encode():
            put(store, indexer(1), INDEXER_BYTES, mtime=time.time())

    outcome = interfered(store, server)
    assert (outcome.groups, outcome.deleted) == (1, 0)
    assert (store / indexer(1)).exists()


def test_an_anchor_that_never_stays_away_is_said(store: Path) -> None:
    value = (store / kv(1)).read_bytes()
    outcome = interfered(
        store, lambda key: rewrite(store / kv(1), value) if key == kv(1).encode() else None
    )
    assert (outcome.groups, outcome.remaining) == (0, 1)
    assert outcome.failures == (
        (
            kv(1),
            "its page is still incomplete after 5 attempts, because a server keeps writing the "
            "page; run again",
        ),
    )


def test_what_a_live_server_half_wrote_afterwards_goes(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor appears after the repair has looked and found nothing."""
    value = (store / kv(1)).read_bytes()
    put(store, kv(5), len(value), mtime=time.time())  # there is a writer
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        if not slept:
            rewrite(store / kv(1), value)
        slept.append(seconds)

    monkeypatch.setattr("hicachectl.move.withdrawal.time.sleep", sleep)
    outcome = replan_after(store, lambda: None, indexer(1), settle_seconds=0.2)
    assert slept
    assert (outcome.groups, outcome.moved, outcome.deleted) == (1, 2, 1)
    assert not (store / kv(1)).exists()
    assert {path.name for path in store.glob(".hicachectl/quarantine/*/*")} == {
        "000000",
        "000000.json",
    }


# faults


class Faulty(FileStore):
    """A store in which some objects cannot be moved."""

    stuck: frozenset[str] = frozenset()

    def mover(self, directory: Directory) -> FileMover | None:
        real = super().mover(directory)
        assert real is not None
        take = real.take

        def failing(key: bytes, name: str, version: bytes | None = None) -> Status:
            if key.decode() in self.stuck:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return take(key, name, version)

        real.take = failing  # type: ignore[method-assign]
        return real


def test_sidecars_stay_when_their_anchor_cannot_leave(store: Path) -> None:
    for number in (1, 2):
        shorten(store / indexer(number))
    before = contents(store)
    with Faulty(store) as opened:
        opened.stuck = frozenset({kv(1)})
        outcome = remove_groups(opened, *planned(opened), mode="quarantine")
        assert outcome.failures == ((kv(1), "cannot be removed: Operation not permitted"),)
        assert (outcome.groups, outcome.remaining) == (1, 1)
        assert outcome.rows.column("state").to_pylist().count("failed") == 1
        assert contents(store) == without(before, kv(2), indexer(2))
        assert count_unfinished(opened) == 2
        opened.stuck = frozenset()
        finished = finish_removals(opened)
    assert (finished.groups, finished.failures) == (2, ())
    assert contents(store) == without(before, *(n(i) for i in (1, 2) for n in (kv, indexer)))
    assert quarantined(default_quarantine(store)).keys() == {
        n(i) for i in (1, 2) for n in (kv, indexer)
    }


@pytest.mark.parametrize("fail_on", ["never", "error"])
def test_a_repair_that_left_a_page_fails_whatever_findings_do(
    invoke: Invoke, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_on: str
) -> None:
    (tmp_path / "p.toml").write_text(DSA_TEXT)
    shorten(store / kv(1))
    stick(monkeypatch, kv(1))
    options = ("--profile", tmp_path / "p.toml", "--checks", "sizes", "--fail-on", fail_on)
    ran = invoke("verify", store, *options, "--repair", "delete", "--yes", exit_code=4)
    assert f"{kv(1)}: cannot be removed: Operation not permitted" in ran.stderr
    assert (store / kv(1)).exists()


def test_a_sidecar_that_cannot_leave_is_said(store: Path) -> None:
    shorten(store / indexer(1))
    with Faulty(store) as opened:
        opened.stuck = frozenset({indexer(1)})
        outcome = remove_groups(opened, *planned(opened), mode="delete")
    assert outcome.failures == ((indexer(1), "cannot be removed: Operation not permitted"),)
    assert not (store / kv(1)).exists()
    assert (store / indexer(1)).exists()


def test_a_removal_that_cannot_be_synced_names_an_object_of_each_group(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor, or another recorded object of a group without an anchor."""
    shorten(store / indexer(1))
    (store / kv(2)).unlink()

    def failing(mover: FileMover, *, into_store: bool) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(FileMover, "flush", failing)
    outcome = repaired(store, mode="delete", codes=("orphan-sidecar",))
    why = "removed, but a power failure may undo this: Input/output error; run again"
    assert set(outcome.failures) == {(kv(1), why), (indexer(2), why)}
    assert outcome.remaining == 2
    monkeypatch.undo()
    with FileStore(store) as opened:
        assert count_unfinished(opened) == 2
        assert finish_removals(opened).failures == ()
        assert count_unfinished(opened) == 0


def test_sidecars_stay_when_their_anchor_cannot_be_deleted(
    store: Path, other_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule also holds for objects that are copied and then deleted."""
    for number in (1, 2):
        shorten(store / indexer(number))
    before = contents(store)
    delete = FileStore.delete

    def failing(opened: FileStore, rows: Any) -> Any:
        result = delete(opened, rows.filter(pa.array([k != kv(1).encode() for k in keys(rows)])))
        statuses = np.array(
            [Status.ERROR if key == kv(1).encode() else Status.OK for key in keys(rows)], np.uint8
        )
        assert result.all_ok
        errors = {n: "Device busy" for n, s in enumerate(statuses) if s == Status.ERROR}
        return type(result)(statuses, errors)

    def keys(rows: Any) -> list[bytes]:
        found: list[bytes] = rows.column("key").to_pylist()
        return found

    monkeypatch.setattr(FileStore, "delete", failing)
    outcome = repaired(store, quarantine=str(other_file_system))
    assert outcome.failures == ((kv(1), "cannot be removed: Device busy"),)
    assert contents(store) == without(before, kv(2), indexer(2))
    monkeypatch.undo()
    repaired(store, quarantine=str(other_file_system))
    assert contents(store) == without(before, *(n(i) for i in (1, 2) for n in (kv, indexer)))
    assert len(quarantined(other_file_system)) == 4


def test_nothing_is_deleted_whose_copy_was_lost(
    store: Path, other_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed between copying and deleting; then the quarantine is emptied."""
    shorten(store / indexer(1))
    before = contents(store)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("hicachectl.move.withdrawal.withdraw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            repaired(store, quarantine=str(other_file_system))
    for path in other_file_system.glob("*/000000/0"):
        path.unlink()
    with FileStore(store) as opened:
        outcome = finish_removals(opened, str(other_file_system))
    (record,) = other_file_system.glob("*/000000.begun")
    assert [message for _, message in outcome.failures] == [
        "its copy is missing from the quarantine, so its page was not removed; move "
        f"{record} away, then run again"
    ]
    assert contents(store) == before


class Bare(Store):
    """A file store reduced to what every store can do: no renames, no directory for records."""

    grammar = FileStore.grammar
    traits = FileStore.traits
    limits = FileStore.limits

    def __init__(self, path: Path) -> None:
        self._files = FileStore(path)
        self.url = self._files.url

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        return cls(Path(url.path))

    def attach(self, arena: Arena) -> None:
        super().attach(arena)
        self._files.attach(arena)

    def scan(self, columns: Collection[str] = ()) -> Generator[Any, None, None]:
        return self._files.scan(columns)

    def look(self, rows: Any, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        return self._files.look(rows, columns)

    def read_into(self, *arguments: Any, **options: Any) -> ReadResult:
        return self._files.read_into(*arguments, **options)

    def delete(self, rows: Any) -> Result:
        return self._files.delete(rows)

    def close(self) -> None:
        self._files.close()


def test_a_store_without_a_place_for_records_can_be_deleted_from(store: Path) -> None:
    shorten(store / indexer(2))
    before = contents(store)
    with Bare(store) as opened:
        assert finish_removals(opened).groups == 0
        outcome = remove_groups(opened, *planned(opened), mode="delete")
    assert contents(store) == without(before, kv(2), indexer(2))
    assert (outcome.groups, outcome.deleted, outcome.place) == (1, 2, None)


class Torn(Bare):
    """A store in which a server rewrites an object in place during the copy."""

    rewritten: Path

    def read_into(self, *arguments: Any, **options: Any) -> ReadResult:
        with self.rewritten.open("r+b") as stream:
            stream.write(b"torn")
        return super().read_into(*arguments, **options)


@pytest.mark.parametrize("name", [kv, indexer])
def test_an_object_that_is_written_to_while_it_is_copied_is_not_recorded(
    store: Path, tmp_path: Path, name: Callable[[int], str]
) -> None:
    shorten(store / indexer(2))
    before = contents(store)
    quarantine = tmp_path / "q"
    with Torn(store) as opened:
        opened.rewritten = store / name(2)
        remove_groups(opened, *planned(opened), mode="quarantine", quarantine=str(quarantine))
    held = quarantined(quarantine)
    assert held == {n: before[n] for n in held}
    assert name(2) not in held
    files = [path for path in quarantine.rglob("*") if path.is_file() and path.suffix != ".json"]
    assert len(files) == len(held)


def test_a_store_without_a_place_needs_a_quarantine(store: Path, tmp_path: Path) -> None:
    shorten(store / indexer(2))
    before = contents(store)
    with Bare(store) as opened:
        with pytest.raises(UsageError, match="--quarantine DIR"):
            remove_groups(opened, *planned(opened), mode="quarantine")
        assert contents(store) == before
        quarantine = str(tmp_path / "q")
        outcome = remove_groups(opened, *planned(opened), mode="quarantine", quarantine=quarantine)
    assert outcome.moved == 2
    assert quarantined(tmp_path / "q") == only(before, kv(2), indexer(2))


def test_another_mount_of_the_same_file_system_gets_copies(store: Path, tmp_path: Path) -> None:
    shorten(store / indexer(2))
    before = contents(store)
    for name in ("real", "bound"):
        (tmp_path / name).mkdir()
    mount = ["mount", "--bind", str(tmp_path / "real"), str(tmp_path / "bound")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        missing("the right to mount", "run the tests as root, with CAP_SYS_ADMIN")
    try:
        assert repaired(store, quarantine=str(tmp_path / "bound")).moved == 2
    finally:
        subprocess.run(["umount", tmp_path / "bound"], check=True)
    assert quarantined(tmp_path / "real") == only(before, kv(2), indexer(2))
    assert contents(store) == without(before, kv(2), indexer(2))


# killed


def test_what_a_killed_run_left_before_its_record_is_swept(store: Path) -> None:
    """Copies of objects in the store, half-written files, empty folders and their run go."""
    before = contents(store)
    run = default_quarantine(store) / "20260101T000000Z-abcdef"
    for number in ("000000", "000001"):
        (run / number).mkdir(parents=True)
    for name in (
        "000001/0",
        "000001/.hicachectl-0123456789abcdef0123456789abcdef.tmp",
        "000001.copying",
        "000002.copying",
        ".000001.begun.tmp",
        ".000001.json.tmp",
        ".000001.copying.tmp",
    ):
        (run / name).write_bytes(b"copy")
    with FileStore(store) as opened:
        assert finish_removals(opened).unrecorded == ()
    assert list(default_quarantine(store).iterdir()) == []
    assert contents(store) == before


def test_a_run_at_work_is_left_alone(store: Path) -> None:
    """A process does not finish the batches of another running process."""
    shorten(store / indexer(1))
    inside: list[int] = []

    def meanwhile(_: bytes) -> None:
        with FileStore(store) as other:
            assert finish_removals(other).groups == 0
            inside.append(restore_groups(other, default_quarantine(store)).busy)

    outcome = interfered(store, meanwhile)
    assert outcome.groups == 1
    assert inside == [1, 1]


def test_an_unfinished_repair_of_another_store_is_not_ours(
    store: Path, tmp_path: Path, other_file_system: Path
) -> None:
    shorten(store / indexer(1))
    quarantine = str(tmp_path / "shared")
    with Faulty(store) as opened:
        opened.stuck = frozenset({kv(1)})
        remove_groups(opened, *planned(opened), mode="quarantine", quarantine=quarantine)
    other = dsa_store(tmp_path / "other", 6)
    before = contents(other)
    with FileStore(other) as opened:
        assert count_unfinished(opened, quarantine) == 0
        finish_removals(opened, quarantine)
    assert contents(other) == before
    with FileStore(store) as opened:
        assert count_unfinished(opened, quarantine) == 1
        assert finish_removals(opened, quarantine).groups == 1


# hostile records


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.clear(),
        lambda d: d.update(quarantine=2),
        lambda d: d.update(mode="format"),
        lambda d: d["groups"][0].update(page="../../etc"),
        lambda d: d["groups"][0].update(shape=7),
        lambda d: d["groups"][0]["objects"][0].update(slot=9),
        lambda d: d["groups"][0]["objects"][0].update(file="../x"),
        lambda d: d["groups"][0]["objects"][0].update(file=-1),
        lambda d: d["groups"][0]["objects"][0].update(key="other"),
        lambda d: d["groups"][0]["objects"][0].update(version="zz"),
        lambda d: d["shapes"][0][0].update(prefix="\ud800"),
        lambda d: d["shapes"][0][0].pop("trailing"),
        lambda d: d["shapes"][0][0].pop("sidecars"),
        lambda d: d.update(groups=[[]]),
        lambda d: d["groups"].append(d["groups"][0]),
    ],
)
def test_a_damaged_record_is_refused(store: Path, damage: Callable[[Any], object]) -> None:
    shorten(store / indexer(1))
    repaired(store)
    (path,) = default_quarantine(store).glob("*/*.json")
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    before = contents(store)
    with FileStore(store) as opened, pytest.raises(FormatError, match=r"000000\.json"):
        restore_groups(opened, default_quarantine(store))
    assert contents(store) == before


def test_a_record_cannot_name_a_path(store: Path, tmp_path: Path) -> None:
    shorten(store / indexer(1))
    repaired(store)
    (path,) = default_quarantine(store).glob("*/*.json")
    for name in ("../escaped", ".hicachectl-"):
        hostile = path.read_text().replace('"prefix": ""', f'"prefix": "{name}"')
        path.write_text(hostile.replace('"key": "', f'"key": "{name}'))
        with FileStore(store) as opened:
            outcome = restore_groups(opened, default_quarantine(store))
        assert outcome.failed == 1
        path.write_text(path.read_text().replace(name, ""))
    assert not list(tmp_path.glob("escaped*"))


def test_movers_are_what_they_say(store: Path) -> None:
    with FileStore(store) as opened:
        with Directory.named(str(store.parent), writes=True) as aside:
            mover = opened.mover(aside)
        assert isinstance(mover, Mover)
        mover.close()


def test_what_vanishes_while_it_is_copied_takes_no_copy_with_it(
    tmp_path: Path, other_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dsa_store(tmp_path, 2)
    shorten(store / indexer(1))
    copy_from = FileStore.copy_from

    def vanish(*args: Any, **options: Any) -> Any:
        (store / indexer(1)).unlink(missing_ok=True)
        return copy_from(*args, **options)

    monkeypatch.setattr(FileStore, "copy_from", vanish)
    data = contents(store)[kv(1)]
    outcome = repaired(store, quarantine=str(other_file_system))
    assert (outcome.groups, outcome.failed) == (1, 0)
    assert not (store / kv(1)).exists()
    assert quarantined(other_file_system) == {kv(1): data}
