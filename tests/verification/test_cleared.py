"""Objects that a server's `clear` made misses are no pages for any command."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hicachectl.backends.base import Status, open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.epochs import Epochs
from hicachectl.backends.testing import rows_of
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.spec import object_specs
from hicachectl.move import temporaries
from tests.served_stores import HYBRID, INDEXED, clear, served_by, served_store
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

KV, INDEXER = "_x-dsa.bin", ".indexer_x-dsa.bin"
AT_ONCE = ("--grace", "0s")
CLEARED = "from before a server cleared the store"
PAGES = [page(number) for number in range(6)]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.toml"
    path.write_text(dump_profile(INDEXED))
    return path


def put_later(store: Path, profile: Profile, wanted: Callable[[str], bool]) -> None:
    """Give objects their names now, of those that servers write; `served_store` would sweep."""
    later = store.with_name("later")
    served_store(later, profile, range(6))
    for path in later.glob("*.bin"):
        if wanted(path.name):
            folder = store / path.name[:2]
            path.rename((folder if folder.is_dir() else store) / path.name)


@pytest.fixture(params=["flat", "folders"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Pages 0 to 3 from before a clear, and the whole pages 4 and 5 from after it.

    Page 3 has its kv again, and page 2 its indexer.
    """
    directory = tmp_path / "store"
    url = f"file://{directory}?folders=hex2" if request.param == "folders" else str(directory)
    with open_store(url, create=True):
        pass
    served_store(directory, INDEXED, range(6))
    clear(directory)
    for path in [path for n in (4, 5) for path in directory.rglob(f"{PAGES[n]}*")]:
        path.unlink()
    written = {f"{PAGES[3]}{KV}", f"{PAGES[2]}{INDEXER}"}
    put_later(directory, INDEXED, lambda name: name in written or name[:64] in PAGES[4:])
    return directory


def listed(invoke: Invoke, store: Path, *options: object) -> dict[str, Any]:
    """Return the rows of `ls` by page."""
    rows = invoke.document("ls", store, *options)["pages"]
    return {row["page"]: row for row in rows}


@pytest.mark.slow
def test_ls_lists_what_servers_find(invoke: Invoke, store: Path, profile: Path) -> None:
    """As the plug-in itself answers, and with a remark on what is left."""
    rows = listed(invoke, store, "--profile", profile)
    states = {PAGES.index(name): row["state"] for name, row in rows.items()}
    assert states == {2: "orphan", 3: "partial", 4: "whole", 5: "whole"}
    assert rows[PAGES[3]]["missing"] == [f"{PAGES[3]}{INDEXER}"]
    said = invoke("ls", store, "--objects").stderr
    assert f"6 objects are {CLEARED}, so no server reads them" in said
    assert f"hicachectl rm {store} --temporaries removes them" in said
    assert served_by(store, INDEXED, PAGES) == [False] * 4 + [True] * 2


def test_a_store_of_cleared_objects_only_is_said_to_be_one(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    served_store(tmp_path / "store", INDEXED, range(2))
    clear(tmp_path / "store")
    for command, exit_code in (("ls", 0), ("verify", 3)):
        said = invoke(command, tmp_path / "store", exit_code=exit_code).stderr
        assert f"has no HiCacheFile objects, only 4 objects {CLEARED}" in said
    said = invoke("show", tmp_path / "store", PAGES[0][:9], exit_code=2).stderr
    assert f"{PAGES[0][:9]}: has only objects {CLEARED}" in said
    (tmp_path / "chain.jsonl").write_text(json.dumps(PAGES[:2]))
    hits = invoke(
        "hits", tmp_path / "store", "--pages", tmp_path / "chain.jsonl", "--profile", profile
    )
    assert f"Objects {CLEARED} stop 1 chain" in hits.stderr


@pytest.mark.slow
def test_verify_reports_them_once_and_judges_the_rest(
    invoke: Invoke, store: Path, profile: Path
) -> None:
    options = ("--profile", profile, *AT_ONCE, "--format", "json")
    found = invoke("verify", store, *options, exit_code=4).document
    by_code: dict[str, list[str]] = {}
    for finding in found["findings"]:
        by_code.setdefault(finding["code"], []).append(finding["key"])
    old = [f"{PAGES[n]}{end}" for n in (0, 1) for end in (KV, INDEXER)]
    old += [f"{PAGES[2]}{KV}", f"{PAGES[3]}{INDEXER}"]
    assert sorted(by_code.pop("stale-temporary")) == sorted(old)
    assert by_code == {
        "missing-pool": [f"{PAGES[3]}{INDEXER}"],
        "orphan-sidecar": [f"{PAGES[2]}{INDEXER}"],
    }
    assert (found["pages"], found["objects_read"]) == (4, 6)


def test_a_clear_that_servers_are_still_sweeping_is_no_finding(
    invoke: Invoke, store: Path, profile: Path
) -> None:
    options = ("--profile", profile, "--checks", "names", "--format", "json")
    assert invoke("verify", store, *options).document["findings"] == []


@pytest.mark.slow
def test_show_names_what_is_left_of_a_page(invoke: Invoke, store: Path, profile: Path) -> None:
    options = ("--profile", profile, *AT_ONCE, "--format", "json")
    shown = invoke("show", store, PAGES[3], *options).document
    assert [one["key"] for one in shown["objects"]] == [f"{PAGES[3]}{KV}"]
    codes = {finding["code"]: finding for finding in shown["findings"]}
    assert codes["stale-temporary"]["key"] == f"{PAGES[3]}{INDEXER}"
    assert CLEARED in codes["stale-temporary"]["detail"]
    assert "missing-pool" in codes


@pytest.mark.slow
def test_rm_of_temporaries_removes_them_and_nothing_else(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporaries, "DEFAULT_GRACE_SECONDS", 0.0)
    rehearsed = invoke.document("rm", store, "--temporaries", "--dry-run")
    removed = invoke.document("rm", store, "--temporaries", "--yes")
    assert rehearsed["objects"] == removed["objects"] == 6
    left = {path.name for path in store.rglob("*.bin")}
    kept = {f"{PAGES[n]}{end}" for n in (4, 5) for end in (KV, INDEXER)}
    assert left == kept | {f"{PAGES[3]}{KV}", f"{PAGES[2]}{INDEXER}"}
    assert not list(store.rglob("*.tmp"))


def test_rm_of_temporaries_waits_for_the_sweeping_servers(invoke: Invoke, store: Path) -> None:
    assert invoke.document("rm", store, "--temporaries", "--yes")["objects"] == 0


@pytest.mark.slow
def test_repair_removes_a_page_beside_whose_kv_only_a_cleared_sidecar_lies(
    invoke: Invoke, store: Path, profile: Path
) -> None:
    """The removal looks again, and does not take the old sidecar for a new one."""
    repair = ("--repair", "delete", "--yes", *AT_ONCE, "--fail-on", "never")
    found = invoke.document("verify", store, "--profile", profile, *repair)
    assert found["repaired"] == 1
    assert PAGES[3] not in listed(invoke, store, "--profile", profile)


@pytest.mark.slow
def test_restore_puts_back_no_page_from_before_a_clear(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    """The page stays in its run, and the store as it is."""
    store = tmp_path / "store"
    served_store(store, INDEXED, range(3))
    (store / f"{PAGES[0]}{INDEXER}").unlink()
    repair = ("--repair", "quarantine", "--yes", "--grace", "0s", "--fail-on", "never")
    invoke("verify", store, "--profile", profile, *repair)
    (store / f"{PAGES[0]}{KV}").write_bytes(b"of a server, later")
    clear(store)
    command = ("restore", store / ".hicachectl/quarantine", store, "--yes", "--format", "json")
    restored = invoke(*command, exit_code=4)
    assert (restored.document["pages"], restored.document["failed"]) == (0, 1)
    assert (store / f"{PAGES[0]}{KV}").read_bytes() == b"of a server, later"
    assert not list(store.glob(".hicachectl-*"))


def test_prewarm_copies_what_a_clear_took_from_the_destination(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for directory in (source, target):
        served_store(directory, INDEXED, range(3))
    clear(target)
    options = ("--from", source, "--all", "--profile", profile)
    document = invoke("prewarm", target, *options).document
    assert (document["copied_pages"], document["already_there"]) == (3, 0)
    assert served_by(target, INDEXED, PAGES[:3]) == [True] * 3


def test_prewarm_takes_nothing_that_a_clear_took_from_the_source(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    served_store(tmp_path / "source", INDEXED, range(3))
    clear(tmp_path / "source")
    chain = tmp_path / "chain.jsonl"
    chain.write_text(json.dumps(PAGES[:3]))
    for asked in (("--all",), ("--pages", chain)):
        options = ("--from", tmp_path / "source", *asked, "--profile", profile, "--allow-empty")
        assert invoke("prewarm", tmp_path / "target", *options).document["copied_pages"] == 0
    assert not list((tmp_path / "target").glob("*.bin"))


def test_the_store_of_an_untrusted_side_directory_has_no_epochs(tmp_path: Path) -> None:
    """A link could lead to anyone's epochs."""
    served_store(tmp_path / "store", INDEXED, range(1))
    clear(tmp_path / "store")
    (tmp_path / "store/.hicachectl").rename(tmp_path / "side")
    with FileStore(tmp_path / "store") as store:
        assert not Epochs(store.objects)
        (tmp_path / "store/.hicachectl").symlink_to(tmp_path / "side")
        assert not Epochs(store.objects)
        (tmp_path / "store/.hicachectl").unlink()
        (tmp_path / "side").rename(tmp_path / "store/.hicachectl")
        assert Epochs(store.objects)


def test_a_touch_leaves_cleared_objects_cleared(tmp_path: Path) -> None:
    """A touch sets the ctime, by which an object is told from cleared ones."""
    directory = tmp_path / "store"
    served_store(directory, INDEXED, range(2))
    clear(directory)
    put_later(directory, INDEXED, lambda name: name.startswith(PAGES[1]))
    keys = [f"{PAGES[n]}{KV}".encode() for n in (0, 1)]
    with FileStore(directory) as store:
        assert store.touch(rows_of(keys)).tolist() == [False, True]
        assert store.exists(rows_of(keys)).tolist() == [False, True]


def test_a_clear_during_a_touch_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served_store(tmp_path, INDEXED, range(2))
    key = f"{PAGES[0]}{KV}".encode()
    utime = os.utime

    def cleared_first(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "utime", utime)
        clear(tmp_path)
        utime(*arguments, **options)

    with FileStore(tmp_path) as store:
        monkeypatch.setattr(os, "utime", cleared_first)
        assert store.touch(rows_of([key])).tolist() == [False]
        assert store.exists(rows_of([key])).tolist() == [False]


def test_all_columns_agree_on_what_is_there(tmp_path: Path) -> None:
    """With versions, which show the ctime, and without; asked for by name, they are shown."""
    directory = tmp_path / "store"
    served_store(directory, HYBRID, range(2))
    clear(directory)
    put_later(directory, HYBRID, lambda name: name.startswith(PAGES[1]))
    count = len(object_specs(HYBRID, "file"))
    for columns in ((), ("nbytes",), ("version",), ("nbytes", "mtime_ns", "version")):
        with FileStore(directory) as store:
            rows = pa.Table.from_batches(list(store.scan(columns)))
            assert {key[:64].decode() for key in rows.column("key").to_pylist()} == {PAGES[1]}
            assert len(store.look(rows, columns)) == len(rows) == count
            every = pa.Table.from_batches(list(store.scan((*columns, "cleared_ns"))))
            assert every.column("cleared_ns").null_count == count == len(every) - count
            assert len(store.look(every, columns)) == count
            assert store.exists(every).sum() == count


def test_what_was_written_again_is_not_removed_as_cleared(tmp_path: Path) -> None:
    """A server writes a page again at any time, also between a listing and the removal."""
    directory = tmp_path / "store"
    served_store(directory, INDEXED, range(2))
    clear(directory)
    with FileStore(directory) as store:
        rows = pa.Table.from_batches(list(store.scan(("cleared_ns",))))
        put_later(directory, INDEXED, lambda name: name == f"{PAGES[1]}{KV}")
        result = store.remove_cleared(rows)
    assert sorted(result.statuses.tolist()) == [Status.OK] * 3 + [Status.GONE]
    assert [path.name for path in directory.glob("*.bin")] == [f"{PAGES[1]}{KV}"]


@pytest.mark.slow
def test_a_catalog_forgets_cleared_objects(invoke: Invoke, profile: Path, tmp_path: Path) -> None:
    """Entries of objects that are misses for ever are left out, in one process and in parts."""
    store = tmp_path / "served"
    served_store(store, INDEXED, range(6))
    whole, parts, merged = (tmp_path / f"{name}.parquet" for name in ("whole", "parts", "merged"))
    command = ("verify", store, "--profile", profile, *AT_ONCE, "--fail-on", "never")
    invoke(*command, "--catalog", whole, "--update-catalog")
    parts.write_bytes(whole.read_bytes())
    clear(store)
    for path in store.rglob(f"{PAGES[0]}*"):
        path.unlink()
    put_later(store, INDEXED, lambda name: name[:64] == PAGES[0])
    updating = ("--catalog", whole, "--update-catalog", "--allow-shrink")
    document = invoke.document(*command, *updating)
    for part in range(3):
        run = ("--shard", f"{part}/3", "--run", tmp_path / "run")
        invoke(*command, "--catalog", parts, "--update-catalog", *run)
    joined = invoke.document("merge", tmp_path / "run", "--catalog", merged)
    keys = [sorted(pq.read_table(file).column("key").to_pylist()) for file in (whole, merged)]
    assert keys[0] == keys[1]
    assert [key[:64].decode() for key in keys[0]] == [PAGES[0]] * 2
    assert joined["counts"] == document["counts"]
