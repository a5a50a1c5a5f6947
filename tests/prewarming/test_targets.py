"""`rm --keep-free` and `--max-size`: what leaves is enough, needed, and the least useful."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.writing import FileWriter
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.sizes import parse_size
from hicachectl.move import withdrawal
from hicachectl.prewarming import targets
from hicachectl.prewarming.targets import parse_room
from tests.move.repairs import DSA, INDEXER_BYTES, KV_BYTES, dsa_store, indexer, kv, stick
from tests.move.test_migrate_stores import place_of, settle
from tests.prewarming.rooms import BLOCK, PAGE_BYTES, PAGE_SPACE, Room, free_bytes
from tests.prewarming.test_prewarm import HASHES, tokens
from tests.served_stores import OTHER_WEIGHTS
from tests.skips import needs_root
from tests.small_file_system import small_ext4, small_file_system
from tests.speed import chance_of_run
from tests.stores import OLD, page, put, put_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

DISK = 4 << 20


def removed(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return invoke("rm", *arguments, "--yes", "--format", "json", exit_code=exit_code).document


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch removed pages shortly: no server writes them again."""
    monkeypatch.setattr(withdrawal, "SETTLE_SECONDS", 0.01)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "dsa.toml"
    path.write_text(dump_profile(DSA))
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB for 256 pages."""
    with small_file_system(tmp_path / "disk", DISK) as directory:
        yield directory


def pages_of(store: Path) -> set[str]:
    return {path.name[:64] for path in store.glob("*.bin")}


# --- a small file system ---


@needs_root
@pytest.mark.parametrize(("asked", "limit"), [("30%", DISK * 3 // 10), ("1MiB", 1 << 20)])
def test_as_much_is_free_as_asked_and_no_page_more(
    invoke: Invoke, disk: Path, asked: str, limit: int
) -> None:
    """Objects take whole blocks, more than their bytes. A second run has nothing to do."""
    store = dsa_store(disk / "store", 240)
    document = removed(invoke, store, "--keep-free", asked)
    assert limit <= free_bytes(disk) < limit + PAGE_SPACE
    assert document["free_bytes"] == free_bytes(disk)
    assert (document["lacking_bytes"], document["free"]["limit_bytes"]) == (0, limit)
    assert pages_of(store) == {page(n) for n in range(document["pages"], 240)}
    again = invoke("rm", store, "--keep-free", asked, "--yes")
    assert "; nothing to remove" in again.stdout
    assert "0 pages, 0 objects, 0 B removed" in again.stdout
    assert len(pages_of(store)) == 240 - document["pages"]


@needs_root
@pytest.mark.slow
def test_objects_with_trailers_take_more_than_their_bytes(invoke: Invoke, tmp_path: Path) -> None:
    """A trailer of 128 bytes needs a block of its own behind an object of whole blocks."""
    profile = tmp_path / "own.toml"
    profile.write_text(dump_profile(replace(PROFILE, weights=OTHER_WEIGHTS)))
    invoke("demo", tmp_path / "demo", "--pages", 200)
    with small_file_system(tmp_path / "disk", "64m") as disk:
        store = disk / "store"
        invoke("migrate", tmp_path / "demo", store, "--profile", profile, "--trailers", "write")
        limit = free_bytes(disk) + (4 << 20)
        document = removed(invoke, store, "--keep-free", limit)
        largest = max(row["nbytes"] + row["objects"] * BLOCK for row in document["groups"])
        assert limit <= free_bytes(disk) < limit + largest
    assert document["pages"] > 20


@needs_root
@pytest.mark.slow
def test_space_that_others_free_meanwhile_spares_pages(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server evicts as well: the free space is looked at after 256 pages at the latest."""
    delete, needed = FileStore.delete, 700 * PAGE_SPACE
    with small_file_system(tmp_path / "disk", 2000 * PAGE_SPACE) as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(needed))
        dsa_store(disk / "store", 900)

        def meanwhile(store: FileStore, rows: Any) -> Any:
            filler.unlink(missing_ok=True)
            return delete(store, rows)

        monkeypatch.setattr(FileStore, "delete", meanwhile)
        document = removed(invoke, disk / "store", "--keep-free", free_bytes(disk) + needed)
    assert (document["pages"], document["lacking_bytes"]) == (256, 0)


@needs_root
def test_space_that_servers_fill_after_the_choice_costs_no_page(
    invoke: Invoke, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was at the target has no question, so nobody has agreed to a removal."""
    store = dsa_store(disk / "store", 100)
    limit = free_bytes(disk) - PAGE_SPACE
    real = FileStore.free_bytes

    def then_fill(opened: FileStore) -> int | None:
        shown = real(opened)
        (disk / "filler").write_bytes(bytes(8 * PAGE_SPACE))
        return shown

    monkeypatch.setattr(FileStore, "free_bytes", then_fill)
    document = removed(invoke, store, "--keep-free", limit)
    assert (document["pages"], document["lacking_bytes"]) == (0, 0)
    assert len(pages_of(store)) == 100


@needs_root
def test_a_dry_run_foretells_what_leaves(invoke: Invoke, disk: Path) -> None:
    store = dsa_store(disk / "store", 240)
    arguments = ("rm", store, "--keep-free", "30%", "--format", "json")
    foretold = invoke(*arguments, "--dry-run").document
    assert len(pages_of(store)) == 240
    document = invoke(*arguments, "--yes").document
    assert foretold["pages"] == document["pages"] > 0
    assert foretold["free"] == document["free"]


@needs_root
@pytest.mark.slow
def test_a_share_is_that_of_df(invoke: Invoke, tmp_path: Path) -> None:
    """Blocks that are reserved for root are neither used nor free."""
    with small_ext4(tmp_path / "disk", 32 << 20, 20) as disk:
        store = dsa_store(disk / "store", 1200)
        before = os.statvfs(disk)
        used = (before.f_blocks - before.f_bfree) * before.f_frsize
        document = removed(invoke, store, "--keep-free", "40%")
        assert (
            document["free"]["limit_bytes"] == (used + before.f_bavail * before.f_frsize) * 2 // 5
        )
        assert 0 <= free_bytes(disk) - document["free"]["limit_bytes"] < PAGE_SPACE
    assert document["pages"] > 100


@needs_root
def test_a_disk_that_others_fill_costs_no_page(invoke: Invoke, disk: Path, tmp_path: Path) -> None:
    """To empty the store would not help; the metrics tell the alert."""
    store = dsa_store(disk / "store", 10)
    (disk / "other").write_bytes(bytes(free_bytes(disk) - BLOCK))
    path = tmp_path / "rm.prom"
    output = invoke("rm", store, "--keep-free", "50%", "--yes", "--metrics-file", path, exit_code=4)
    assert len(pages_of(store)) == 10
    assert "short of 2.0 MiB: the pages that may leave have only 100.3 KiB" in output.stderr
    assert "make room beside them, or give a smaller SIZE" in output.stderr
    metrics = path.read_text()
    assert f'hicachectl_rm_lacking_bytes{{store="file://{store}"}} {2 << 20}' not in metrics
    assert f'hicachectl_rm_succeeded{{store="file://{store}"}} 0\n' in metrics
    assert f'hicachectl_rm_pages{{store="file://{store}"}} 0\n' in metrics


def servers_that_write(
    monkeypatch: pytest.MonkeyPatch, other: Path, pages: int
) -> Callable[[int], None]:
    """Fill a file with the space of some pages before the first removal.

    Return a function that adds the space of further pages.
    """
    delete = FileStore.delete

    def write(pages: int) -> None:
        with other.open("ab") as stream:
            stream.write(bytes(pages * PAGE_SPACE))

    def meanwhile(opened: FileStore, rows: Any) -> Any:
        if not other.exists():
            write(pages)
        return delete(opened, rows)

    monkeypatch.setattr(FileStore, "delete", meanwhile)
    return write


@needs_root
@pytest.mark.parametrize(("writes", "left"), [(True, 6), (False, 9)])
def test_space_that_servers_fill_again_is_made_again(
    invoke: Invoke, disk: Path, monkeypatch: pytest.MonkeyPatch, *, writes: bool, left: int
) -> None:
    """Servers that write as much as leaves go on writing; else the space is held by something."""
    store, other = dsa_store(disk / "store", 10), disk / "other"
    write = servers_that_write(monkeypatch, other, 2)

    def wait(seconds: float) -> None:
        if writes and other.stat().st_size == 2 * PAGE_SPACE:
            write(1)

    monkeypatch.setattr(targets, "_LATE_SECONDS", 0.1)
    monkeypatch.setattr(time, "sleep", wait)
    limit = free_bytes(disk) + PAGE_SPACE
    document = removed(invoke, store, "--keep-free", limit, exit_code=0 if writes else 4)
    assert len(pages_of(store)) == left
    assert (document["lacking_bytes"] == 0) == writes


@needs_root
def test_the_wait_for_late_space_ends_when_servers_have_written_as_much(
    invoke: Invoke, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer wait would let the disk fill up."""
    store, waits = dsa_store(disk / "store", 40), list[float]()
    write = servers_that_write(monkeypatch, disk / "other", 3)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        write(1)

    monkeypatch.setattr(time, "sleep", wait)
    removed(invoke, store, "--keep-free", free_bytes(disk) + 2 * PAGE_SPACE)
    assert len(waits) == 2
    assert len(pages_of(store)) == 40 - 2 - 3 - 2


@needs_root
def test_a_disk_that_others_fill_meanwhile_costs_all_pages_but_one(
    invoke: Invoke, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, delete, other = dsa_store(disk / "store", 20), FileStore.delete, disk / "other"

    def meanwhile(opened: FileStore, rows: Any) -> Any:
        """Take most of what has become free."""
        other.write_bytes(bytes((20 - len(pages_of(store))) * PAGE_SPACE * 17 // 20))
        return delete(opened, rows)

    monkeypatch.setattr(FileStore, "delete", meanwhile)
    limit = free_bytes(disk) + 10 * PAGE_SPACE
    output = invoke("rm", store, "--keep-free", limit, "--yes", exit_code=4)
    assert "short of 3.8 MiB: no further page may leave" in output.stderr
    assert pages_of(store) == {page(19)}


@needs_root
def test_filters_limit_what_leaves_for_free_space(invoke: Invoke, disk: Path) -> None:
    store = dsa_store(disk / "store", 200)
    put_pages(store, range(300, 310), "_other_0_1", nbytes=BLOCK, mtime=OLD - 9)
    output = invoke("rm", store, "--keep-free", "90%", "--model", "other", "--yes", exit_code=4)
    assert (
        "no further page may leave; leave out filters, make room beside the pages" in output.stderr
    )
    assert pages_of(store) == {page(n) for n in range(200)}


@needs_root
def test_removed_bytes_that_stay_in_use_end_the_run(
    invoke: Invoke, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hard links keep the space, as snapshots do: a store is not emptied for nothing."""
    monkeypatch.setattr(targets, "_LATE_SECONDS", 0.1)
    store, backup = dsa_store(disk / "store", 240), disk / "backup"
    backup.mkdir()
    for path in store.iterdir():
        os.link(path, backup / path.name)
    needed = DISK * 3 // 10 - free_bytes(disk)
    output = invoke("rm", store, "--keep-free", "30%", "--yes", exit_code=4)
    assert "the removed bytes are not free; look for hard links, snapshots" in output.stderr
    assert len(pages_of(store)) == 240 - (needed // PAGE_SPACE + 1)


@needs_root
def test_space_that_is_freed_in_the_background_costs_no_page_more(
    invoke: Invoke, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems free the blocks of removed files later, whatever is synced."""
    store = dsa_store(disk / "store", 240)
    shown = [free_bytes(disk)]

    def background(seconds: float) -> None:
        shown[0] = free_bytes(disk)

    monkeypatch.setattr(FileStore, "free_bytes", lambda opened: shown[0])
    monkeypatch.setattr(time, "sleep", background)
    removed(invoke, store, "--keep-free", "30%")
    assert DISK * 3 // 10 <= free_bytes(disk) < DISK * 3 // 10 + PAGE_SPACE


@needs_root
def test_space_that_shows_late_costs_no_page_more(
    invoke: Invoke, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems count freed blocks only after a sync, which servers notice."""
    store = dsa_store(disk / "store", 240)
    shown = [free_bytes(disk)]
    monkeypatch.setattr(FileStore, "free_bytes", lambda opened: shown[-1])
    monkeypatch.setattr(FileStore, "flush", lambda opened: shown.append(free_bytes(disk)))
    removed(invoke, store, "--keep-free", "30%")
    assert len(shown) == 2, "one sync is enough"
    assert DISK * 3 // 10 <= free_bytes(disk) < DISK * 3 // 10 + PAGE_SPACE


@needs_root
@pytest.mark.slow
def test_free_space_is_kept_under_a_writer(
    invoke: Invoke, disk: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of 60 rounds servers write, also while pages leave, and the clock is stepped."""
    chance, repeat = chance_of_run()
    place = Room(disk / "store")
    delete = FileStore.delete

    def has_room() -> bool:
        return free_bytes(disk) > 2 * PAGE_SPACE

    credit = 0.0

    def meanwhile(store: FileStore, rows: Any) -> Any:
        """Write up to half of what has left."""
        nonlocal credit
        while credit > PAGE_SPACE and has_room():
            credit -= PAGE_SPACE
            place.write()
        credit += chance.random() / 2 * BLOCK * len(rows)  # no object takes less
        return delete(store, rows)

    leaving = 0
    for number in range(60):
        told, target = f"round {number}, {repeat}", chance.randrange(1 << 20)
        while free_bytes(disk) > target + PAGE_SPACE:
            place.write()
        place.step(chance.choice([0, 30, 90, 600]))
        for _ in range(chance.randrange(8)):
            if has_room():
                place.write()
        judging = profile if chance.random() < 0.8 else None
        limit = chance.choice([DISK // 10, DISK * 3 // 10, 1_234_567])
        options = ("--profile", judging) if judging else ()
        with monkeypatch.context() as patched:
            patched.setattr(FileStore, "delete", meanwhile)
            removal, credit = place.watch(), 0.0
            document = removed(invoke, place.store, "--keep-free", limit, *options)
        assert document["free_bytes"] == free_bytes(disk), told
        removal.check_free(document, limit, told)
        leaving += removal.check_order(document, judged=judging is not None, told=told)
    assert leaving > 60


@pytest.mark.slow
def test_a_size_is_kept_under_a_writer(invoke: Invoke, tmp_path: Path, profile: Path) -> None:
    """In each of 60 rounds servers write between two runs."""
    chance, repeat = chance_of_run()
    place, leaving = Room(tmp_path / "store"), 0
    for _ in range(150):
        place.write()
    for number in range(60):
        told = f"round {number}, {repeat}"
        place.step(chance.choice([0, 30, 90, 600]))
        for _ in range(chance.randrange(20)):
            place.write()
        limit = chance.randrange(100, 150) * PAGE_BYTES
        removal = place.watch()
        document = removed(invoke, place.store, "--max-size", f"{limit}B", "--profile", profile)
        stored = sum(path.stat().st_size for path in place.store.glob("*.bin"))
        assert stored <= limit, told
        assert not document["pages"] or stored + PAGE_BYTES > limit, told
        leaving += removal.check_order(document, judged=True, told=told)
    assert leaving > 60


# --- the order ---


def damaged(store: Path) -> tuple[set[str], set[str]]:
    """Make 20 pages, the newest of which are incomplete; return those without indexer and kv."""
    dsa_store(store, 20)
    for number in (15, 16):
        (store / indexer(number)).unlink()
    for number in (17, 18):
        (store / kv(number)).unlink()
    return {page(15), page(16)}, {page(17), page(18)}


@pytest.mark.parametrize("option", ["--free", "--max-size"])
def test_incomplete_pages_leave_first(
    invoke: Invoke, tmp_path: Path, profile: Path, option: str
) -> None:
    store = tmp_path / "store"
    partial, orphans = damaged(store)
    nbytes = 2 * KV_BYTES + 2 * INDEXER_BYTES
    stored = sum(path.stat().st_size for path in store.glob("*.bin"))
    size = nbytes + 1 if option == "--free" else stored - nbytes - 1
    document = removed(invoke, store, option, size, "--profile", profile)
    assert document["free"]["incomplete_pages"] == 4
    assert document["free"]["incomplete_bytes"] == nbytes
    assert pages_of(store) == {page(n) for n in range(1, 20)} - partial - orphans


def test_without_a_profile_only_orphans_are_certain(invoke: Invoke, tmp_path: Path) -> None:
    _, orphans = damaged(tmp_path / "store")
    text = invoke("rm", tmp_path / "store", "--free", f"{2 * INDEXER_BYTES + 1}B", "--yes").stdout
    assert "Incomplete: 2 pages, 2.1 KiB" in text
    assert pages_of(tmp_path / "store") == {page(n) for n in range(1, 20)} - orphans


def test_a_doubtful_profile_decides_nothing(invoke: Invoke, tmp_path: Path, profile: Path) -> None:
    """Most of the newest pages lack the indexer: they may be of servers without one."""
    store = dsa_store(tmp_path / "store", 40)
    for number in range(20, 40):
        (store / indexer(number)).unlink()
    output = invoke("rm", store, "--free", "1B", "--profile", profile, "--yes")
    assert "not begin with 20 pages that --profile calls partial" in output.stderr
    assert pages_of(store) == {page(n) for n in range(1, 40)}
    despite = ("--free", f"{KV_BYTES + 1}B", "--profile", profile, "--despite-profile")
    removed(invoke, store, *despite)
    assert pages_of(store) == {page(n) for n in range(1, 40) if n not in (20, 21)}


def test_a_young_incomplete_page_stays(invoke: Invoke, tmp_path: Path, profile: Path) -> None:
    store = dsa_store(tmp_path / "store", 4)
    put(store, indexer(7), INDEXER_BYTES, time.time())
    removed(invoke, store, "--free", "1B", "--profile", profile)
    assert pages_of(store) == {page(n) for n in (1, 2, 3, 7)}


def test_pages_that_cannot_be_removed_are_passed_over(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page in the way is no reason for a full disk."""
    store = dsa_store(tmp_path / "store", 5)
    stick(monkeypatch, kv(0))
    output = invoke("rm", store, "--free", f"{2 * PAGE_BYTES}B", "--yes", exit_code=4)
    assert pages_of(store) == {page(n) for n in (0, 3, 4)}
    assert "Operation not permitted" in output.stdout
    assert "short of" not in output.stderr


def test_a_store_in_which_nothing_can_be_removed_is_given_up(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tried = dsa_store(tmp_path / "store", 400), list[bytes]()

    def stuck(writer: FileWriter, key: bytes, *_: object) -> None:
        tried.append(key)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(FileWriter, "remove", stuck)
    output = invoke("rm", store, "--free", f"{110 * PAGE_BYTES}B", "--yes", exit_code=4)
    assert "short of 1.1 MiB: 110 pages could not be removed; see above, " in output.stderr
    assert len(tried) == 110


@pytest.fixture
def own_profile(tmp_path: Path) -> Path:
    """Write the profile of the demo's pages."""
    path = tmp_path / "own.toml"
    path.write_text(dump_profile(PROFILE))
    return path


def test_the_cost_of_sparing_other_deployments_is_told(
    invoke: Invoke, source: Path, own_profile: Path, tmp_path: Path
) -> None:
    put_pages(source, range(3), "_other_0_1", nbytes=1000, mtime=time.time() - 900)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 1, "token_ids": tokens()}))
    options = ("--free", "1B", "--trace", trace, "--profile", own_profile, "--dry-run")
    output = invoke("rm", source, *options)
    assert (
        "kept 3 pages (2.9 KiB) of deployments that no request names; 2.9 KiB of other pages leave "
        "instead; --and-unnamed removes the pages of these deployments first"
    ) in output.stderr
    facts = invoke("rm", source, *options, "--format", "json").document["free"]
    assert facts["in_place_bytes"] == 3000
    facts = invoke("rm", source, *options, "--and-unnamed", "--format", "json").document["free"]
    assert facts["in_place_bytes"] is None
    assert facts["bytes"] == 1000


def test_an_orphan_of_a_spared_deployment_leaves_first(
    invoke: Invoke, source: Path, own_profile: Path, tmp_path: Path
) -> None:
    """It serves nobody, whoever wrote it; the whole pages of its deployment stay."""
    before = pages_of(source)
    put(source, kv(0), KV_BYTES)
    for number in (0, 1):
        put(source, indexer(number), INDEXER_BYTES)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 1, "token_ids": tokens()}))
    options = ("--trace", trace, "--profile", own_profile)
    output = invoke("rm", source, "--free", "1B", *options, "--yes", "--format", "json")
    assert output.document["free"]["incomplete_pages"] == output.document["pages"] == 1
    assert "kept 1 page (10.0 KiB) of deployments that no request names; " in output.stderr
    assert pages_of(source) == {*before, page(0)}


# --- the size of a store ---


def test_a_size_is_kept_by_a_page(invoke: Invoke, tmp_path: Path) -> None:
    store = dsa_store(tmp_path / "store", 10)
    put(store, "notes.txt", 100)  # as ls --summary, it counts every file
    size = 4 * PAGE_BYTES + 100
    document = removed(invoke, store, "--max-size", f"{size}B")
    facts = document["free"]
    assert (document["pages"], document["lacking_bytes"]) == (6, 0)
    assert (facts["target"], facts["limit_bytes"]) == ("max-size", size)
    assert (facts["stored_bytes"], facts["asked_bytes"]) == (10 * PAGE_BYTES + 100, 6 * PAGE_BYTES)
    assert document["free_bytes"] is None
    again = invoke("rm", store, "--max-size", f"{size}B", "--yes")
    assert "nothing to remove" in again.stdout
    assert len(pages_of(store)) == 4


def test_a_size_that_only_an_empty_store_has_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    store = dsa_store(tmp_path / "store", 10)
    said = invoke("rm", store, "--max-size", "1B", "--yes", exit_code=2).stderr
    assert "1 B would take all of them; give a larger SIZE, or also a filter" in said
    assert len(pages_of(store)) == 10


def test_a_quiet_run_at_its_target_prints_nothing(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    """cron mails what is printed; a page in flight is none of the target's concern."""
    store = dsa_store(tmp_path / "store", 10)
    put(store, indexer(20), INDEXER_BYTES, time.time())
    put_pages(store, range(30, 33), "_m_0_2")  # ambiguous keys
    for size in ("1MiB", f"{8 * PAGE_BYTES}B"):
        arguments = ("rm", store, "--max-size", size, "--profile", profile, "--yes")
        output = invoke("-q", *arguments)
        assert output.stdout + output.stderr == ""
    assert "1 page in flight left alone" in invoke(*arguments).stderr
    short = ("rm", store, "--max-size", "1B", "--model", "x/dsa", "--profile", profile, "--yes")
    said = invoke("-q", *short, exit_code=4).stderr
    assert "--max-size: " in said
    assert "1 page in flight left alone" in said


# --- other stores ---


@pytest.mark.slow
def test_segments_of_a_mooncake_cluster_are_kept_free(
    invoke: Invoke,
    source: Path,
    own_profile: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Mooncake keeps no times, so a plan says what stays."""
    url = place_of("mooncake", tmp_path, request)
    invoke("migrate", source, url, "--profile", own_profile)
    settle("mooncake", request)
    plan = tmp_path / "plan.jsonl"
    plan.write_text("".join(f"{json.dumps({'page': name})}\n" for name in HASHES))
    free = invoke("ls", url, "--summary", "--format", "json").document["free_bytes"]
    arguments = ("rm", url, "--keep-plan", plan, "--profile", own_profile, "--yes", "--format")
    document = invoke(*arguments, "json", "--keep-free", free + 1).document
    assert (document["pages"], document["lacking_bytes"]) == (1, 0)
    assert document["free_bytes"] > free
    again = invoke(*arguments, "table", "--keep-free", free + 1).stdout
    assert "nothing to remove" in again
    said = invoke(*arguments, "json", "--keep-free", "99.99999%", exit_code=4).stderr
    assert "the pages that may leave have only" in said


@pytest.mark.slow
def test_snapshots_of_3fs_do_not_tell_what_a_removal_frees(
    invoke: Invoke, source: Path, own_profile: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = place_of("hf3fs", tmp_path, request)
    invoke("migrate", source, url, "--profile", own_profile)
    settle("hf3fs", request)
    plan = tmp_path / "plan.jsonl"
    plan.write_text("".join(f"{json.dumps({'page': name})}\n" for name in HASHES))
    arguments = ("rm", url, "--keep-plan", plan, "--profile", own_profile, "--yes")
    said = invoke(*arguments, "--keep-free", "1000B", exit_code=2).stderr
    assert "does not tell its free space after a removal; give --max-size SIZE" in said
    listed = (*arguments, "--format", "json")
    stored = invoke(*listed, "--max-size", "1TiB").document["free"]["stored_bytes"]
    document = invoke(*listed, "--max-size", f"{stored - 1}B").document
    assert document["pages"] == 1


# --- refusals ---


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0", "is less than 1 bytes; give more"),
        ("0%", "0% is not between 0% and 100%"),
        ("100%", "100% is not between 0% and 100%"),
        ("130%", "130% is not between 0% and 100%"),
        ("-5%", "'-5%' is not a share; write 30% or a size such as 200GiB"),
        ("%", "'%' is not a share"),
        (".%", "'.%' is not a share"),
        ("\N{ARABIC-INDIC DIGIT ONE}%", "is not a share"),
        ("half", "'half' is not a size"),
        ("30", "'30' is 30 bytes; write 30%, 30GiB or 30B"),
        ("1.5", "'1.5' is 1 bytes; write 1.5%, 1.5GiB or 1.5B"),
    ],
)
def test_room_that_makes_no_sense_is_refused(
    invoke: Invoke, tmp_path: Path, text: str, why: str
) -> None:
    store = dsa_store(tmp_path / "store", 2)
    assert why in invoke("rm", store, f"--keep-free={text}", "--yes", exit_code=2).stderr


def test_a_share_and_a_size_are_read_exactly() -> None:
    assert parse_room("30%") * 10 == 3
    assert parse_room("0.5%") * 200 == 1
    assert parse_room("200GiB") == parse_size("200GiB")
    assert [parse_room("100"), parse_room("30B")] == [100, 30]


def test_targets_exclude_each_other(invoke: Invoke, tmp_path: Path) -> None:
    store = dsa_store(tmp_path / "store", 2)
    both = ("rm", store, "--max-size", "1B", "--keep-free", "1000B", "--yes")
    said = invoke(*both, exit_code=2).stderr
    assert "--keep-free cannot be combined with --max-size; leave out one of them" in said


def test_more_than_the_file_system_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    store = dsa_store(tmp_path / "store", 2)
    said = invoke("rm", store, "--keep-free", "1EiB", "--yes", exit_code=2).stderr
    assert f"--keep-free: file://{store} can hold only " in said
    assert "so 1.0 EiB are never free; give a smaller SIZE" in said


@needs_root
def test_a_whole_file_system_is_never_free(invoke: Invoke, disk: Path) -> None:
    store = dsa_store(disk / "store", 2)
    said = invoke("rm", store, "--keep-free", DISK, "--yes", exit_code=2).stderr
    assert "can hold only 4.0 MiB, so 4.0 MiB are never free; give a smaller SIZE" in said
    assert len(pages_of(store)) == 2


def test_a_store_that_cannot_tell_is_refused(invoke: Invoke, tmp_path: Path, profile: Path) -> None:
    url = f"nixl://{tmp_path / 'disk'}?direct_io=off"
    invoke("migrate", dsa_store(tmp_path / "store", 2), url, "--profile", profile)
    said = invoke("rm", url, "--keep-free", "10%", "--yes", exit_code=2).stderr
    assert "does not tell its free space after a removal; give --max-size SIZE" in said


@pytest.mark.parametrize("target", [("--keep-free", "1%"), ("--max-size", "1GiB")])
def test_a_store_that_is_not_mounted_is_no_success(
    invoke: Invoke, tmp_path: Path, target: tuple[str, str]
) -> None:
    store, path = tmp_path / "store", tmp_path / "rm.prom"
    store.mkdir()
    arguments = ("rm", store, *target, "--yes")
    said = invoke(*arguments, "--metrics-file", path, exit_code=3).stderr
    assert "has no page; check the mount" in said
    assert f'hicachectl_rm_succeeded{{store="file://{store}"}} 0\n' in path.read_text()
    invoke(*arguments, "--allow-empty")
