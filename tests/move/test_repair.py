"""Repair: bad groups leave completely and healthy groups stay, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl import __version__
from hicachectl.backends.base import Status, Store, open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files import copies
from hicachectl.backends.object_files.mover import FileMover
from hicachectl.backends.object_files.reading import open_file
from hicachectl.checks.findings import findings
from hicachectl.formats.errors import FormatError, StoreUnavailable, UsageError
from hicachectl.move.quarantine import Quarantine, list_runs
from hicachectl.move.removal_plan import plan_removal
from hicachectl.move.restore import restore_groups
from hicachectl.move.withdrawal import remove_groups
from tests.move.quarantines import quarantined, reasons_of, run_document, runs_in
from tests.move.repairs import (
    INDEXER_BYTES,
    Bare,
    default_quarantine,
    dsa_store,
    indexer,
    kv,
    plan_for,
    planned,
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
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.backends.base import ReadResult, Result
    from hicachectl.formats.profile import Profile
    from hicachectl.move.results import GroupReport
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
        groups = scanned(opened, profile)
        plan = plan_for(groups, found)
        return remove_groups(opened, groups, plan, mode="quarantine")


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
        groups = scanned(opened)
        found = pa.concat_tables(
            [
                bad_value("README"),
                bad_value(f"{page(77)}_x-dsa.bin"),
                bad_value(kv(1)),
                findings("stamp-mismatch", keys=pa.nulls(1, pa.string()), detail="x"),
            ]
        )
        plan = plan_for(groups, found)
    assert plan.unplaced == {"nan": 2, "stamp-mismatch": 1}
    assert groups.pages.take(pa.array(plan.groups)).to_pylist() == [page(1)]
    assert plan.reasons.column("code").to_pylist() == ["nan"]


def test_a_finding_without_an_object_is_about_its_whole_group(store: Path) -> None:
    before = contents(store)
    with FileStore(store) as opened:
        groups = scanned(opened)
        place = groups.inventory.objects.column("key").to_pylist().index(kv(4).encode())
        number = groups.of_object[place : place + 1]
        nothing = pa.nulls(1, pa.string())
        found = findings("layout-mismatch", keys=nothing, groups=number, detail="x")
        plan = plan_for(groups, found)
        remove_groups(opened, groups, plan, mode="quarantine")
    assert contents(store) == without(before, kv(4), indexer(4))


# the quarantine


def test_a_run_says_why_and_where_from(store: Path) -> None:
    shorten(store / kv(0))
    facts = (store / kv(0)).stat()
    with FileStore(store) as opened:
        outcome = remove_groups(opened, *planned(opened), mode="quarantine")
    assert outcome.place == str(default_quarantine(store))
    (run,) = runs_in(default_quarantine(store))
    document = run_document(run)
    assert time.time() - 60 < document.pop("begin") <= time.time() + 1
    assert document == {
        "form": 1,
        "run": run.name,
        "store": f"file://{store}",
        "scheme": "file",
        "grammar": "file",
        "version": __version__,
    }
    (reason,) = reasons_of(run)
    assert (reason["code"], reason["page"], reason["key"]) == ("truncated", page(0), kv(0))
    assert reason["group"] == "x-dsa"
    assert (run / kv(0)).stat().st_ino == facts.st_ino


def test_what_describes_a_run_is_there_before_anything_moves(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(store / kv(0))
    seen: list[tuple[str, int]] = []
    take = FileMover._take

    def watched(mover: FileMover, *arguments: Any) -> Status | None:
        (run,) = runs_in(default_quarantine(store))
        seen.append((run_document(run)["run"], len(reasons_of(run))))
        return take(mover, *arguments)

    monkeypatch.setattr(FileMover, "_take", watched)
    repaired(store)
    (run,) = runs_in(default_quarantine(store))
    assert seen == [(run.name, 1)] * 2


@pytest.mark.slow
def test_a_run_is_a_store(invoke: Invoke, store: Path) -> None:
    """`ls`, `show`, `verify` and `migrate` read it, however new its pages are; nothing writes."""
    shorten(store / indexer(1))
    put(store, kv(5), len((store / kv(5)).read_bytes()), mtime=time.time())
    (store / indexer(5)).unlink()
    profile = store.parent / "p.toml"
    profile.write_text(DSA_TEXT)
    repaired(store)
    (run,) = runs_in(default_quarantine(store))
    listed = invoke("ls", run, "--format", "json").document["pages"]
    assert [row["page"] for row in listed] == sorted([page(1), page(5)])
    assert invoke("show", run, page(1), "--profile", profile).stdout
    checks = ("--profile", profile, "--checks", "groups,sizes", "--format", "json")
    document = invoke("verify", run, *checks, exit_code=4).document
    assert document["in_flight"] == 0
    assert {(f["page"], f["code"]) for f in document["findings"]} == {
        (page(1), "truncated"),
        (page(5), "missing-pool"),
    }
    pack = store.parent / "kept.hcpack"
    migrated = (
        "migrate",
        run,
        pack,
        "--profile",
        profile,
        "--include-damaged",
        "--include-partial",
    )
    assert invoke(*migrated, "--format", "json").document["pages"] >= 1
    before = sorted(run.rglob("*"))
    invoke("verify", run, "--profile", profile, "--repair", "delete", "--yes", exit_code=2)
    assert "is a quarantine run" in invoke("migrate", store, run, exit_code=2).stderr
    assert sorted(run.rglob("*")) == before


def test_anchors_leave_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_pages(tmp_path, range(4), "_m_0_2", "_m_1_2", ".draft_m_0_2", ".draft_m_1_2")
    put_pages(tmp_path, range(4), ".mamba_m_0_2", ".mamba_m_1_2")
    taken: list[bytes] = []
    take = FileMover._take

    def watched(mover: FileMover, key: bytes, *rest: Any) -> Status | None:
        taken.append(key)
        return take(mover, key, *rest)

    monkeypatch.setattr(FileMover, "_take", watched)
    found = bad_value(f"{page(1)}.mamba_m_1_2.bin")
    assert repair_findings(tmp_path, found).moved == 6
    stems = [key[64:].decode() for key in taken]
    assert stems[:2] == ["_m_0_2.bin", "_m_1_2.bin"]


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
    assert not default_quarantine(store).exists()
    assert (outcome.groups, outcome.moved, outcome.deleted) == (1, 0, 2)
    assert outcome.place is None


def test_a_second_run_finds_nothing_to_do(store: Path) -> None:
    shorten(store / indexer(2))
    repaired(store)
    before = contents(store)
    again = repaired(store)
    assert (again.groups, again.moved, len(again.rows)) == (0, 0, 0)
    assert contents(store) == before


def test_many_groups_go_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicachectl.move.removal_plan.BATCH_OBJECTS", 7)
    store = dsa_store(tmp_path / "store", 23)
    before = contents(store)
    with FileStore(store) as opened:
        groups = scanned(opened)
        plan = plan_removal(np.arange(23))
        steps: list[int] = []
        outcome = remove_groups(opened, groups, plan, mode="quarantine", on_progress=steps.append)
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
    """There is no room even for the run."""
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

    def broken(name: bytes, directory: int) -> int:
        if name == kv(1).encode():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_file(name, directory)

    monkeypatch.setattr(copies, "open_file", broken)
    outcome = repaired(store, quarantine=str(other_file_system))
    why = "not copied to quarantine: Input/output error"
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
            Quarantine(store=store)


def test_a_quarantine_with_a_name_too_long_is_said(store: Path, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 300)
    said = f"^{path}: cannot use the quarantine: File name too long; check its owner"
    with (
        FileStore(store) as opened,
        pytest.raises(StoreUnavailable, match=said),
        Quarantine(path, opened).opened(writes=True),
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
        groups = scanned(opened)
        plan = plan_for(groups, bad_value(key))
        change()
        return remove_groups(opened, groups, plan, **{"mode": "quarantine", **options})


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
        groups, plan = planned(opened)
        assert len(plan.groups) == 1
        rewrite(store / indexer(1), value)
        outcome = remove_groups(opened, groups, plan, mode="quarantine")
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

    def mover(self, run: Store) -> FileMover | None:
        real = super().mover(run)
        assert real is not None
        take = real._take

        def interfered(key: bytes, version: bytes | None) -> Status | None:
            status = take(key, version)
            self.after(key)
            return status

        real._take = interfered  # type: ignore[method-assign]
        return real

    def delete(self, rows: Any) -> Result:
        found = super().delete(rows)
        for key in rows.column("key").to_pylist():
            self.after(key)
        return found


def interfered(store: Path, after: Callable[[bytes], None], **options: Any) -> GroupReport:
    with Interfering(store) as opened:
        opened.after = after
        groups = scanned(opened)
        plan = plan_for(groups, bad_value(indexer(1)))
        return remove_groups(opened, groups, plan, **{"mode": "quarantine", **options})


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
    monkeypatch.setattr("hicachectl.move.withdrawal.SETTLE_SECONDS", 0.2)
    outcome = replan_after(store, lambda: None, indexer(1))
    assert slept
    assert (outcome.groups, outcome.moved, outcome.deleted) == (1, 2, 1)
    assert not (store / kv(1)).exists()
    assert quarantined(default_quarantine(store)).keys() == {kv(1), indexer(1)}


# faults


class Faulty(FileStore):
    """A store in which some objects cannot be moved."""

    stuck: frozenset[str] = frozenset()

    def mover(self, run: Store) -> FileMover | None:
        real = super().mover(run)
        assert real is not None
        take = real._take

        def failing(key: bytes, version: bytes | None) -> Status | None:
            if key.decode() in self.stuck:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return take(key, version)

        real._take = failing  # type: ignore[method-assign]
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
        opened.stuck = frozenset()
        again = remove_groups(opened, *planned(opened), mode="quarantine")
    assert (again.groups, again.failures) == (1, ())
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
        outcome = remove_groups(opened, *planned(opened), mode="quarantine")
    assert outcome.failures == ((indexer(1), "cannot be removed: Operation not permitted"),)
    assert not (store / kv(1)).exists()
    assert (store / indexer(1)).exists()


def test_a_removal_that_cannot_be_synced_is_said(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sidecars stay: a power failure may bring their anchor back."""
    shorten(store / indexer(1))

    def failing(mover: FileMover, *, into_store: bool) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(FileMover, "flush", failing)
    outcome = repaired(store)
    why = "removed, but a power failure may bring it back: Input/output error; run again"
    assert outcome.failures == ((kv(1), f"cannot be removed: {why}"),)
    assert outcome.remaining == 1
    assert (store / indexer(1)).exists()
    assert quarantined(default_quarantine(store)).keys() == {kv(1)}


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


def test_copies_of_a_killed_repair_are_put_back_as_equal(
    invoke: Invoke, store: Path, other_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed between copying and deleting."""
    shorten(store / indexer(1))
    before = contents(store)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("hicachectl.move.withdrawal.withdraw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            repaired(store, quarantine=str(other_file_system))
    assert contents(store) == before
    assert quarantined(other_file_system).keys() == {kv(1), indexer(1)}
    document = invoke("restore", other_file_system, store, "--yes", "--format", "json").document
    assert (document["pages"], document["objects"], document["conflicts"]) == (1, 0, 0)
    assert contents(store) == before
    assert runs_in(other_file_system) == []


def test_a_store_without_a_directory_can_be_deleted_from(store: Path) -> None:
    shorten(store / indexer(2))
    before = contents(store)
    with Bare(store) as opened:
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
def test_an_object_that_is_written_to_while_it_is_copied_is_not_kept(
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
    # Without the damaged object there is no reason to remove the page.
    assert held.keys() == ({indexer(2)} if name is kv else set())


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


def test_a_run_at_work_is_left_alone(store: Path) -> None:
    """A process restores nothing of a run that another process fills."""
    shorten(store / indexer(1))
    inside: list[int] = []

    def meanwhile(_: bytes) -> None:
        with FileStore(store) as other:
            inside.append(restore_groups(other, default_quarantine(store)).busy)

    outcome = interfered(store, meanwhile)
    assert outcome.groups == 1
    assert inside == [1, 1]


# hostile runs


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.clear(),
        lambda d: d.update(form=2),
        lambda d: d.update(scheme="mooncake"),
        lambda d: d.update(run="20260101T000000Z-abcdef"),
        lambda d: d.update(run="../other"),
        lambda d: d.update(begin=-1),
        lambda d: d.update(begin=1e300),
        lambda d: d.pop("grammar"),
    ],
)
def test_a_damaged_run_is_refused(store: Path, damage: Callable[[Any], object]) -> None:
    shorten(store / indexer(1))
    repaired(store)
    (run,) = runs_in(default_quarantine(store))
    path = run / ".hicachectl" / "run.json"
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    before = contents(store)
    with FileStore(store) as opened, pytest.raises(FormatError, match=run.name):
        restore_groups(opened, default_quarantine(store))
    assert contents(store) == before
    assert runs_in(default_quarantine(store)) == [run]


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
