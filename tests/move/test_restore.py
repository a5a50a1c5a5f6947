"""`restore`: quarantined groups come back unchanged, never over existing objects."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.epochs import begin_epoch, owner_of
from hicachectl.backends.object_files.mover import FileMover
from hicachectl.move.removal_plan import plan_removal
from hicachectl.move.withdrawal import remove_groups
from hicachectl.text.units import human_size
from tests.move.quarantines import quarantined, runs_in
from tests.move.repairs import (
    default_quarantine,
    dsa_store,
    indexer,
    kv,
    repaired,
    scanned,
    shorten,
)
from tests.stores import contents, page, put_pages
from tests.terminals import answering

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import Status
    from tests.conftest import Invoke
    from tests.stores import Contents


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Make a store with pages 1 and 3 in its quarantine."""
    directory = dsa_store(tmp_path / "store", 5)
    shorten(directory / indexer(1))
    shorten(directory / kv(3))
    return directory


def restored(
    invoke: Invoke, quarantine: Path, *arguments: object, exit_code: int = 0
) -> dict[str, Any]:
    return invoke(
        "restore", quarantine, *arguments, "--format", "json", exit_code=exit_code
    ).document


def test_groups_come_back_with_bytes_and_times(invoke: Invoke, store: Path) -> None:
    before = contents(store)
    repaired(store)
    assert contents(store) != before
    document = restored(invoke, default_quarantine(store), store, "--yes")
    assert contents(store) == before
    assert list(default_quarantine(store).iterdir()) == []
    assert (document["pages"], document["objects"], document["failed"]) == (2, 4, 0)
    assert document["bytes"] == sum(
        len(before[name(number)][0]) for number in (1, 3) for name in (kv, indexer)
    )
    assert sorted((g["page"], *g["codes"], g["state"]) for g in document["groups"]) == sorted(
        [(page(1), "truncated", "restored"), (page(3), "truncated", "restored")]
    )


def test_a_long_table_has_the_first_pages_and_the_number_of_the_others(
    invoke: Invoke, tmp_path: Path
) -> None:
    store = dsa_store(tmp_path / "store", 50)
    for number in range(25):
        shorten(store / indexer(number))
    repaired(store)
    lines = invoke("restore", store, store, "--yes").stdout.splitlines()
    assert (len(lines), lines[-2]) == (1 + 20 + 2, "and 5 pages more; --format csv has all")


def test_the_document_has_the_members_of_the_contract(invoke: Invoke, store: Path) -> None:
    repaired(store)
    assert list(restored(invoke, default_quarantine(store), store, "--dry-run")) == [
        "schema",
        "version",
        "store",
        "quarantine",
        "pages",
        "objects",
        "bytes",
        "gone",
        "conflicts",
        "failed",
        "seconds",
        "complete",
        "stopped_by",
        "dry_run",
        "groups",
    ]


def test_copies_come_back_from_another_file_system(
    invoke: Invoke, store: Path, other_file_system: Path
) -> None:
    before = contents(store)
    repaired(store, quarantine=str(other_file_system))
    assert restored(invoke, other_file_system, store, "--yes")["pages"] == 2
    assert contents(store) == before
    assert list(other_file_system.iterdir()) == []


def test_sidecars_come_back_before_their_anchor(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repaired(store)
    order: list[bytes] = []
    put_back = FileMover._put_back

    def watched(mover: FileMover, key: bytes) -> Status:
        order.append(key)
        return put_back(mover, key)

    monkeypatch.setattr(FileMover, "_put_back", watched)
    restored(invoke, default_quarantine(store), store, "--yes")
    for number in (1, 3):
        assert order.index(indexer(number).encode()) < order.index(kv(number).encode())


def test_only_the_pages_asked_for(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    before = contents(store)
    repaired(store)
    quarantine = default_quarantine(store)
    assert restored(invoke, quarantine, store, "--yes", "--page", page(1)[:9])["pages"] == 1
    assert (store / kv(1)).exists()
    assert not (store / kv(3)).exists()
    assert set(quarantined(quarantine)) == {kv(3), indexer(3)}
    listed = tmp_path / "listed"
    listed.write_text(page(3))
    assert restored(invoke, quarantine, store, "--yes", "--pages", listed)["pages"] == 1
    assert contents(store) == before


def test_a_dry_run_lists_and_changes_nothing(invoke: Invoke, store: Path) -> None:
    repaired(store)
    quarantine = default_quarantine(store)
    before, held = contents(store), quarantined(quarantine)
    outcome = invoke("restore", quarantine, store, "--dry-run")
    assert page(1)[:16] in outcome.stdout
    assert "truncated" in outcome.stdout
    *lines, total = outcome.stdout.splitlines()
    assert total.startswith("2 pages, 4 objects, ")
    assert total.endswith(" would be restored")
    assert [line.split()[-2] for line in lines[1:]] == ["would-restore"] * 2
    document = restored(invoke, quarantine, store, "--dry-run")
    assert (document["pages"], document["objects"], document["dry_run"]) == (2, 4, True)
    assert {row["state"] for row in document["groups"]} == {"would-restore"}
    assert "Dry run" in outcome.stderr
    assert (contents(store), quarantined(quarantine)) == (before, held)


@pytest.mark.parametrize("name", [kv, indexer])
def test_a_page_that_is_there_again_is_a_conflict(invoke: Invoke, store: Path, name: Any) -> None:
    repaired(store)
    (store / name(1)).write_bytes(b"new")
    quarantine = default_quarantine(store)
    document = restored(invoke, quarantine, store, "--yes", exit_code=4)
    assert (document["pages"], document["conflicts"], document["failed"]) == (1, 1, 0)
    (conflict,) = (g for g in document["groups"] if g["state"] == "conflict")
    assert conflict["detail"] == (
        f"{name(1)}: already exists in the store; to restore this page, first remove the page from "
        "the store with hicachectl rm"
    )
    assert (store / name(1)).read_bytes() == b"new"
    assert set(quarantined(quarantine)) == {kv(1), indexer(1)}
    assert (store / kv(3)).exists()
    (store / name(1)).unlink()
    assert restored(invoke, quarantine, store, "--yes")["pages"] == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_page_that_appears_meanwhile_is_a_conflict(
    invoke: Invoke,
    store: Path,
    elsewhere: bool,
    monkeypatch: pytest.MonkeyPatch,
    other_file_system: Path,
) -> None:
    """The page's sidecars, already restored, leave again."""
    quarantine = other_file_system if elsewhere else default_quarantine(store)
    repaired(store, quarantine=str(quarantine))
    look = FileStore.look

    def overtaken(*arguments: Any) -> Any:
        seen = look(*arguments)
        (store / kv(1)).write_bytes(b"new")
        return seen

    monkeypatch.setattr(FileStore, "look", overtaken)
    document = restored(invoke, quarantine, store, "--yes", exit_code=4)
    assert (document["pages"], document["conflicts"]) == (1, 1)
    assert (store / kv(1)).read_bytes() == b"new"
    assert not (store / indexer(1)).exists()
    assert set(quarantined(quarantine)) == {kv(1), indexer(1)}


def test_what_is_left_of_a_page_comes_back_whatever_its_size(invoke: Invoke, store: Path) -> None:
    repaired(store)
    (run,) = runs_in(default_quarantine(store))
    (run / indexer(1)).unlink()
    (run / kv(3)).write_bytes(b"short")
    assert restored(invoke, default_quarantine(store), store, "--yes")["pages"] == 2
    assert (store / kv(1)).exists()
    assert (store / kv(3)).read_bytes() == b"short"
    assert runs_in(default_quarantine(store)) == []


def test_pages_from_before_a_clear_stay_in_the_quarantine(invoke: Invoke, store: Path) -> None:
    """Only of the suffix that the server cleared."""
    before = contents(store)
    repaired(store)
    suffix = indexer(1)[64:].encode()
    with ObjectDirectory.open(str(store)) as directory:
        begin_epoch(directory, [suffix])
    document = restored(invoke, default_quarantine(store), store, "--yes", exit_code=4)
    assert (document["pages"], document["failed"]) == (0, 2)
    assert "a server has cleared the store" in document["groups"][0]["detail"]
    assert quarantined(default_quarantine(store)).keys() == before.keys() - contents(store).keys()
    (store / ".hicachectl" / f"epoch-{owner_of(suffix).decode()}").unlink()
    with ObjectDirectory.open(str(store)) as directory:
        begin_epoch(directory, [b"_of-another.bin"])
    assert restored(invoke, default_quarantine(store), store, "--yes")["pages"] == 2
    assert contents(store) == before


def test_pages_of_another_store_are_named_with_both(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    repaired(store)
    other = tmp_path / "other"
    other.mkdir()
    quarantine = default_quarantine(store)
    nbytes = human_size(sum(len(data) for data, _ in quarantined(quarantine).values()))
    asked = f"Put 2 pages ({nbytes}), taken from file://{store}, back into file://{other}?"
    with answering("n"):
        assert asked in invoke("restore", quarantine, other).stderr
    assert contents(other) == {}
    said = invoke("restore", quarantine, other, "--yes").stderr
    assert f"The pages were taken from file://{store}, not from file://{other}" in said
    assert len(contents(other)) == 4


@pytest.mark.parametrize("resumes", [False, True], ids=["rewritten", "and its anchor gone"])
def test_another_object_of_the_same_size_and_time_is_a_conflict(
    invoke: Invoke, store: Path, *, resumes: bool
) -> None:
    """Only the bytes distinguish the object from a copy of an interrupted restore."""
    before = contents(store)
    repaired(store)
    taken = quarantined(default_quarantine(store))
    names = [indexer(1)] if resumes else [indexer(1), kv(1)]
    for name in names:
        data, time_ns = before[name]
        (store / name).write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
        os.utime(store / name, ns=(time_ns, time_ns))
    kept = contents(store)
    document = restored(invoke, default_quarantine(store), store, "--yes", exit_code=4)
    assert (document["pages"], document["conflicts"]) == (1, 1)
    assert {name: contents(store)[name] for name in names} == {n: kept[n] for n in names}
    held = quarantined(default_quarantine(store))
    assert held == {name: taken[name] for name in (kv(1), indexer(1))}


def test_copies_that_an_interrupted_restore_has_left_are_completed(
    invoke: Invoke, store: Path
) -> None:
    before = contents(store)
    repaired(store)
    data, time_ns = before[indexer(1)]
    (store / indexer(1)).write_bytes(data)
    os.utime(store / indexer(1), ns=(time_ns, time_ns))
    assert restored(invoke, default_quarantine(store), store, "--yes")["pages"] == 2
    assert contents(store) == before
    assert list(default_quarantine(store).iterdir()) == []


def test_a_quarantine_goes_back_into_a_store_that_moved(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    before = contents(store)
    repaired(store)
    moved = tmp_path / "moved"
    shutil.move(store, moved)
    assert restored(invoke, default_quarantine(moved), moved, "--yes")["pages"] == 2
    assert contents(moved) == before


def test_pages_of_several_repairs_come_back_together(invoke: Invoke, store: Path) -> None:
    before = contents(store)
    repaired(store)
    shorten(store / kv(4))
    later: Contents = contents(store)
    repaired(store)
    assert len(list(default_quarantine(store).iterdir())) == 2
    assert restored(invoke, default_quarantine(store), store, "--yes")["pages"] == 3
    assert contents(store) == {**before, kv(4): later[kv(4)]}


def test_one_run_can_be_named(invoke: Invoke, store: Path) -> None:
    before = contents(store)
    repaired(store)
    (run,) = default_quarantine(store).iterdir()
    assert restored(invoke, run, store, "--yes")["pages"] == 2
    assert contents(store) == before


def test_a_damaged_run_is_bad_input(invoke: Invoke, store: Path) -> None:
    repaired(store)
    (run,) = runs_in(default_quarantine(store))
    for name in ("run.json", "findings.jsonl"):
        path = run / ".hicachectl" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        message = invoke("restore", default_quarantine(store), store, "--yes", exit_code=2).stderr
        assert str(path) in message
        assert message.count("\n") == 1
        path.write_bytes(whole)
    assert restored(invoke, default_quarantine(store), store, "--yes")["pages"] == 2


def test_a_store_that_is_not_there(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    repaired(store)
    invoke("restore", default_quarantine(store), tmp_path / "none", "--yes", exit_code=3)


def test_objects_of_another_kind_of_store_are_refused(invoke: Invoke, store: Path) -> None:
    repaired(store)
    (run,) = runs_in(default_quarantine(store))
    path = run / ".hicachectl" / "run.json"
    path.write_text(path.read_text().replace('"grammar": "file"', '"grammar": "hf3fs"'))
    message = invoke("restore", default_quarantine(store), store, "--yes", exit_code=2).stderr
    assert "hf3fs" in message


@pytest.mark.slow
def test_rows_of_ls_name_the_group_to_restore(invoke: Invoke, tmp_path: Path) -> None:
    """Includes orphaned Mamba states of a model with rankless kv, and ambiguous groups."""
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(4), "_m_0_2", "_m_1_2", "_n")
    put_pages(store, range(2), ".mamba_n_0_2", ".mamba_n_1_2", "_open_0_4")
    (store / f"{page(1)}_n.bin").unlink()
    before = contents(store)
    listed = tmp_path / "rows.jsonl"
    invoke("ls", store, "--format", "jsonl", "-o", listed)
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    assert {row["group"] for row in rows} == {"m tp2", "n", "n tp2", "?"}
    with FileStore(store) as opened:
        groups = scanned(opened, None)
        plan = plan_removal(np.arange(len(groups)))
        remove_groups(opened, groups, plan, mode="quarantine")
    assert contents(store) == {}
    for row in rows:
        listed.write_text(json.dumps(row))
        quarantine = default_quarantine(store)
        document = restored(invoke, quarantine, store, "--pages", listed, "--yes")
        assert [group["page"] for group in document["groups"]] == [row["page"]]
        assert document["bytes"] == row["nbytes"]
    assert contents(store) == before


def test_a_copy_that_vanishes_while_it_is_restored_fails_its_page(
    invoke: Invoke, store: Path, other_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other objects of the page stay in the quarantine."""
    repaired(store, quarantine=str(other_file_system))
    copy_from = FileStore.copy_from

    def vanish(self: FileStore, source: FileStore, origins: Any, *rest: Any, **options: Any) -> Any:
        key = origins.column("key")[0].as_py()
        os.unlink(key, dir_fd=source.objects.descriptor)
        monkeypatch.undo()
        return copy_from(self, source, origins, *rest, **options)

    monkeypatch.setattr(FileStore, "copy_from", vanish)
    document = restored(invoke, other_file_system, store, "--yes", exit_code=4)
    assert (document["pages"], document["failed"]) == (1, 1)
    (failed,) = (group for group in document["groups"] if group["state"] == "failed")
    assert failed["detail"].endswith(": missing from the quarantine")
    assert not any(name.startswith(failed["page"]) for name in contents(store))
    assert {name[:64] for name in quarantined(other_file_system)} == {failed["page"]}
    assert len(quarantined(other_file_system)) == 1
