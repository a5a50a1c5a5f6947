"""Migrations to and from stores that fill up, break, vanish or cannot be written to."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from hicachectl.__main__ import run
from hicachectl.backends.base import open_store
from tests.hf3fs_server import MetadataServer
from tests.mooncake_cluster import Cluster
from tests.move.migrations import PAGES, demo_store, flip_once_written, migrated
from tests.paused import paused
from tests.places import FilePlace, Hf3fsPlace, MooncakePlace, half_pages
from tests.small_file_system import small_file_system
from tests.stores import contents
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.paused import Ended

COPY = "hicachectl.backends.file.store:FileStore.copy_from"
PUT = "hicachectl.backends.mooncake.client:MooncakeClient.put_from"
RESERVE = "hicachectl.backends.hf3fs.metadata:MetadataClient.reserve"
CONFIRM = "hicachectl.backends.hf3fs.metadata:MetadataClient.confirm"
# Small batches, one after the other.
SMALL = ("--buffer-bytes", "512KiB", "--jobs", "1")


def met(
    folder: Path, call: str, number: int, then: Callable[[], object], *arguments: object
) -> Ended:
    """Migrate; let something happen right before a call."""
    command = ("migrate", *arguments, *SMALL, "--format", "json")
    with paused(folder / "paused", call, number, *command) as process:
        then()
        ended = process.resumed()
    assert "Traceback" not in ended.stderr
    shutil.rmtree(folder / "paused")
    return ended


def assert_lost(ended: Ended, word: str) -> None:
    """Check exit code 3, one line with the reason and one with the next step."""
    assert (ended.code, ended.stdout) == (3, ""), ended
    said = [line for line in ended.stderr.splitlines() if line.startswith("hicachectl:")]
    said = [line for line in said if not line.startswith("hicachectl: Created ")]
    assert len(said) == 2, ended.stderr
    assert "continue with the same command" in said[0]
    assert word in said[1]


# --- no room, no right ---


@pytest.mark.slow
def test_a_pack_on_a_full_disk_keeps_whole_pages_and_is_valid(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    size = sum(len(data) for data, _ in contents(source).values())
    # An eighth of the file system is kept for the index, which is always written.
    with small_file_system(tmp_path / "small", size // 2 // 4096 * 4096) as small:
        pack = f"pack://{small}/a.hcpack"
        document = migrated(invoke, source, pack, "--no-space-check", *SMALL, exit_code=4)
        assert document["stopped_by"] == "destination full"
        assert document["failed"] == 0
        assert 0 < document["pages"] < PAGES
        with open_store(pack) as store:
            keys = {key.decode() for batch in store.scan() for key in batch["key"].to_pylist()}
        pages = {key[:64] for key in keys}
        assert len(pages) == document["pages"]
        assert keys == {name for name in contents(source) if name[:64] in pages}
        # With more room, the same command completes the migration.
        subprocess.run(["mount", "-o", f"remount,size={1 << 24}", small], check=True)
        assert migrated(invoke, source, pack)["pages"] == PAGES - len(pages)
        migrated(invoke, pack, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.slow
def test_jobs_that_take_the_last_room_from_one_another_leave_a_pack_full(
    invoke: Invoke, tmp_path: Path
) -> None:
    """Forgotten objects of a pack still take room, so no batch that may not fit is begun."""
    demo_store(tmp_path / "source", 96)
    with small_file_system(tmp_path / "small", "3m") as small:
        pack = f"pack://{small}/a.hcpack"
        batches = ("--jobs", 3, "--buffer-bytes", "6MiB")
        document = migrated(
            invoke, tmp_path / "source", pack, "--no-space-check", *batches, exit_code=4
        )
        assert document["stopped_by"] == "destination full"
        with open_store(pack) as store:
            assert sum(len(batch) for batch in store.scan()) == document["objects"]
        size = (small / "a.hcpack").stat().st_size
        assert document["bytes"] > size / 2  # little of it is forgotten
        # One megabyte is kept for the index; less than another is begun at once.
        assert (3 << 20) - size < 2 << 20
        again = migrated(invoke, tmp_path / "source", pack, "--no-space-check", exit_code=4)
        assert again["skipped"] == document["pages"]


def test_a_read_only_destination_ends_the_run_with_one_clear_line(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    with small_file_system(tmp_path / "fixed", 1 << 24) as fixed:
        subprocess.run(["mount", "-o", "remount,ro", fixed], check=True)
        output = invoke("migrate", source, fixed, exit_code=3)
    assert output.stdout == ""
    assert f"{fixed}: cannot write to the store: Read-only file system" in output.stderr


def full(descriptor: int, *_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fault", ["no directory", "full"])
def test_a_run_without_a_mark_says_so(
    invoke: Invoke,
    source: Path,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    if fault == "full":
        monkeypatch.setattr(os, "pwrite", full)
    else:
        state.write_text("no directory")
    document = migrated(invoke, source, target)
    assert document["pages"] == PAGES
    assert f"{state}/hicachectl/marks: cannot keep a mark of this run: " in document["stderr"]
    assert "set XDG_STATE_HOME to a writable directory" in document["stderr"]
    assert contents(target) == contents(source)


@pytest.mark.slow
def test_a_destination_that_is_removed_meanwhile_ends_the_run(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    ended = met(tmp_path, COPY, 3, lambda: shutil.rmtree(target), source, target)
    assert_lost(ended, str(target))
    assert migrated(invoke, source, target)["pages"] == PAGES
    assert contents(target) == contents(source)


# --- other bytes ---


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--verify",), ("--move", "--yes")], ids=" ".join)
def test_a_byte_that_changes_before_it_is_read_back_is_noticed(
    invoke: Invoke,
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    before = contents(source)
    name = sorted(before)[3]

    with monkeypatch.context() as patch:
        flip_once_written(patch, target / name, 100)
        document = migrated(invoke, source, target, *options, exit_code=4)
    assert (document["failed"], document["pages"]) == (1, PAGES - 1)
    (problem,) = document["problems"]
    assert (problem["key"], problem["page"]) == (name, name[:64])
    assert "the bytes read back differ from the bytes written" in problem["detail"]
    page = {n: held for n, held in before.items() if n[:64] == name[:64]}
    # No server treats the page as present at the destination, and the source still has the page.
    assert contents(target) == {n: held for n, held in before.items() if n not in page}
    assert contents(source) == (page if "--move" in options else before)
    assert migrated(invoke, source, target, *options)["complete"]
    assert contents(target) == before


# --- Mooncake ---


def test_a_master_killed_meanwhile_ends_the_run_and_a_rerun_completes(
    mooncake_package: None, invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    with Cluster() as cluster:
        place = MooncakePlace(cluster)
        arguments = (source, cluster.url, "--profile", profile)
        assert_lost(met(tmp_path, PUT, 3, cluster.kill_master, *arguments), cluster.master)
        cluster.restart_master()
        assert migrated(invoke, *arguments)["pages"] == PAGES
        check_arrived(invoke, place, source, profile, tmp_path)


def test_a_storage_process_killed_meanwhile_fails_what_it_had_and_a_rerun_completes(
    mooncake_package: None, invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    with Cluster(client_ttl=4) as cluster:
        place = MooncakePlace(cluster)
        arguments = (source, cluster.url, "--profile", profile)
        ended = met(tmp_path, PUT, 3, cluster.kill_store, *arguments)
        assert ended.code in (3, 4), ended
        if ended.code == 4:
            document = json.loads(ended.stdout)
            # Once the master notices, there is no segment, which looks like a full store.
            assert document["failed"] or document["stopped_by"] == "destination full"
            assert document["pages"] < PAGES
        cluster.add_store()
        # The master still lists the objects of the killed process.
        wait_until(lambda: len(cluster.ask("get_all_segments").split()) == 1)
        assert migrated(invoke, *arguments)["complete"]
        check_arrived(invoke, place, source, profile, tmp_path)


def test_a_cluster_that_is_too_small_is_refused_or_filled_and_said_to_evict(
    mooncake_package: None,
    invoke: Invoke,
    tmp_path: Path,
    profile: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = demo_store(tmp_path / "large", 300)
    with Cluster(16 << 20) as cluster:
        arguments = ("migrate", source, cluster.url, "--profile", profile)
        output = invoke(*arguments, exit_code=3)
        assert "24.8 MiB to write" in output.stderr
        assert MooncakePlace(cluster).keys() == set()
        # A race decides whether the master refuses objects or evicts in time.
        status = run([str(argument) for argument in (*arguments, "--no-space-check")])
    assert status in (0, 4)
    assert "evicts, so the pages copied first may be evicted already" in capfd.readouterr().err


def check_arrived(
    invoke: Invoke, place: MooncakePlace, source: Path, profile: Path, tmp_path: Path
) -> None:
    """Check that a cluster has all objects of a source."""
    assert half_pages(place, place.held()) == []
    back = tmp_path / "back"
    assert migrated(invoke, place.url, back, "--profile", profile)["pages"] == PAGES
    assert {n: data for n, (data, _) in contents(back).items()} == {
        n: data for n, (data, _) in contents(source).items()
    }


# --- 3FS ---


@pytest.mark.parametrize(("call", "number"), [(RESERVE, 1), (RESERVE, 5), (CONFIRM, 1)])
def test_a_metadata_server_killed_meanwhile_ends_the_run_and_a_rerun_completes(
    sglang_python: Path,
    invoke: Invoke,
    source: Path,
    profile: Path,
    tmp_path: Path,
    call: str,
    number: int,
) -> None:
    (tmp_path / "3fs").mkdir()
    with MetadataServer(sglang_python) as server:
        place = Hf3fsPlace(tmp_path / "3fs", server)
        place.empty()
        arguments = (source, place.url, "--profile", profile)
        assert_lost(met(tmp_path, call, number, server.kill, *arguments), "metadata server")
        server.start()
        assert migrated(invoke, *arguments)["complete"]
        back = FilePlace(tmp_path)
        server.save()
        migrated(invoke, place.url, back.url, "--profile", profile)
    assert {n.decode(): data for n, (data, _) in back.held().items()} == {
        n: data for n, (data, _) in contents(source).items()
    }
