"""`rm` takes nothing that a server is still writing, or has written since the listing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.formats.profile import dump_profile
from hicachectl.pages import in_flight
from tests.move.repairs import (
    DSA,
    INDEXER_BYTES,
    KV_BYTES,
    dsa_store,
    indexer,
    kv,
)
from tests.stores import OLD, contents, page, put, put_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

    Meanwhile = Callable[[Callable[[], object]], None]

PAGES = 6
YOUNG = PAGES  # number of the page that a server begins to write


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Make whole old pages, and one of which a server has just written the sidecar."""
    directory = dsa_store(tmp_path / "store", PAGES)
    put(directory, indexer(YOUNG), INDEXER_BYTES, time.time())
    return directory


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "dsa.toml"
    path.write_text(dump_profile(DSA))
    return path


def removed(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return invoke("rm", *arguments, "--yes", "--format", "json", exit_code=exit_code).document


# without a profile


def test_partial_pages_are_known_by_a_profile_only(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    """A stray sidecar makes healthy pages look partial, of a deployment without a profile."""
    store = dsa_store(tmp_path / "store", 3)
    put_pages(store, range(4), "_other_0_1")
    put_pages(store, range(1), ".indexer_other_0_1")
    (store / kv(0)).unlink()
    (store / indexer(0)).rename(store / kv(0))
    before = contents(store)
    said = invoke("rm", store, "--state", "partial", "--yes", exit_code=2).stderr
    assert "--state partial needs --profile" in said
    arguments = ("rm", store, "--state", "orphan,partial", "--profile", profile, "--yes")
    said = invoke(*arguments).stderr
    assert "Left out 3 pages that may be partial, because the profile describes another" in said
    assert contents(store) == {name: value for name, value in before.items() if name != kv(0)}


def test_orphans_need_no_profile(invoke: Invoke, tmp_path: Path) -> None:
    store = dsa_store(tmp_path / "store", 3)
    (store / kv(1)).unlink()
    assert removed(invoke, store, "--state", "orphan")["objects"] == 1
    assert set(contents(store)) == {name(n) for n in (0, 2) for name in (kv, indexer)}


# groups that a server is writing


def _listed(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


WAYS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "state": lambda path: ("--state", "orphan"),
    "states": lambda path: ("--state", "partial,orphan", "--profile", path / "dsa.toml"),
    "model": lambda path: ("--model", "x-dsa"),
    "profile": lambda path: ("--model", "x-dsa", "--profile", path / "dsa.toml"),
    "pages": lambda path: ("--pages", _listed(path / "pages", page(YOUNG))),
    "all": lambda path: (
        "--pages", _listed(path / "pages", page(YOUNG), page(0)), "--all-deployments",
    ),
    "free": lambda path: ("--free", "1PiB", "--model", "x-dsa"),
    "trace": lambda path: (
        "--free", "1PiB", "--model", "x-dsa", "--profile", path / "dsa.toml", "--trace",
        _listed(path / "trace", json.dumps({"token_ids": list(range(8))})),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_page_that_is_being_written_stays(
    invoke: Invoke, store: Path, profile: Path, way: str
) -> None:
    if way == "trace":
        for name in page_hashes_hex(list(range(8)), 4):
            put(store, f"{name}_x-dsa.bin", KV_BYTES)
            put(store, f"{name}.indexer_x-dsa.bin", INDEXER_BYTES)
    options = WAYS[way](profile.parent)
    short = 4 if "--free" in options else 0  # the pages have less than what is asked
    for before in ("--dry-run", "--yes"):
        outcome = invoke("-q", "rm", store, *options, before, exit_code=short)
        assert "1 page in flight left alone, because servers may still be" in outcome.stderr
    document = removed(invoke, store, *options, exit_code=short)
    assert (document["in_flight"], document["failed"], document["remaining"]) == (1, 0, 0)
    assert (store / indexer(YOUNG)).exists()
    if way == "trace":
        return  # no page of the trace is left
    document = removed(invoke, store, *options, "--grace", "0s", exit_code=short)
    assert (document["in_flight"], document["objects"]) == (0, 1)
    assert not (store / indexer(YOUNG)).exists()


def test_whole_pages_have_no_grace(invoke: Invoke, store: Path) -> None:
    put(store, kv(YOUNG), KV_BYTES, time.time())
    assert removed(invoke, store, "--model", "x-dsa")["pages"] == PAGES + 1
    assert contents(store) == {}


def test_free_takes_other_pages_instead(invoke: Invoke, store: Path) -> None:
    """The page in flight was used last by its time; here it is the oldest."""
    for name in contents(store):
        os.utime(store / name, (time.time() + 30, time.time() + 30))
    os.utime(store / indexer(YOUNG), (time.time() - 30, time.time() - 30))
    document = removed(invoke, store, "--free", "1B")
    assert (document["pages"], document["in_flight"]) == (1, 1)
    assert (store / indexer(YOUNG)).exists()
    said = invoke("rm", store, "--free", "1PiB", "--yes", exit_code=2).stderr
    assert "would take all" in said


# stores without times


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make file stores keep no times. Return how often the command waited."""
    times = ("mtime_ns", "atime_ns")
    traits = FileStore.traits
    monkeypatch.setattr(FileStore, "traits", replace(traits, columns=traits.columns - {*times}))

    def forgotten(table: Any) -> Any:
        for name in times:
            if name in table.schema.names:
                at = table.schema.get_field_index(name)
                table = table.set_column(at, name, pa.nulls(len(table), pa.int64()))
        return table

    scan, look, waited = FileStore.scan, FileStore.look, list[float]()

    def scanned(self: FileStore, *arguments: Any) -> Iterator[Any]:
        yield from map(forgotten, scan(self, *arguments))

    monkeypatch.setattr(FileStore, "scan", scanned)
    monkeypatch.setattr(FileStore, "look", lambda *arguments: forgotten(look(*arguments)))
    monkeypatch.setattr(
        in_flight, "time", SimpleNamespace(sleep=waited.append, monotonic=time.monotonic)
    )
    return waited


def test_a_store_without_times_is_looked_at_twice(
    invoke: Invoke, store: Path, timeless: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, indexer(YOUNG + 1), INDEXER_BYTES)

    def written(seconds: float) -> None:
        timeless.append(seconds)
        put(store, kv(YOUNG), KV_BYTES)

    monkeypatch.setattr(in_flight, "time", SimpleNamespace(sleep=written, monotonic=time.monotonic))
    outcome = invoke("rm", store, "--state", "orphan", "--yes", "--format", "json")
    assert "looks again in" in outcome.stderr
    assert (outcome.document["pages"], outcome.document["in_flight"]) == (1, 1)
    assert {kv(YOUNG), indexer(YOUNG)} <= set(contents(store))
    assert not (store / indexer(YOUNG + 1)).exists()
    (waited,) = timeless
    assert 50 < waited <= 60


def test_whole_pages_of_a_store_without_times_go_at_once(
    invoke: Invoke, store: Path, timeless: list[float], tmp_path: Path
) -> None:
    listed = _listed(tmp_path / "pages", page(0))
    assert removed(invoke, store, "--pages", listed)["pages"] == 1
    assert removed(invoke, store, "--state", "orphan", "--grace", "0s")["pages"] == 1
    assert timeless == []


# what a server writes between the listing and the removal


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Let a server's thread do something as soon as the store is listed."""
    scan = FileStore.scan

    def after_the_listing(work: Callable[[], object]) -> None:
        def scanned(self: FileStore, *arguments: Any) -> Iterator[Any]:
            yield from scan(self, *arguments)
            server = Thread(target=work)
            server.start()
            server.join()

        monkeypatch.setattr(FileStore, "scan", scanned)

    return after_the_listing


@pytest.mark.parametrize("way", ["state", "model", "pages"])
def test_a_page_that_became_whole_stays(
    invoke: Invoke, store: Path, profile: Path, meanwhile: Meanwhile, way: str
) -> None:
    os.utime(store / indexer(YOUNG), (0, 0))
    meanwhile(lambda: put(store, kv(YOUNG), KV_BYTES, time.time()))
    outcome = invoke("-q", "rm", store, *WAYS[way](profile.parent), "--yes", "--format", "json")
    assert "1 page left alone, because of writes after the listing" in outcome.stderr
    assert (outcome.document["kept"], outcome.document["failed"]) == (1, 0)
    assert {kv(YOUNG), indexer(YOUNG)} <= set(contents(store))


def test_a_page_that_was_rewritten_is_no_longer_old(
    invoke: Invoke, store: Path, meanwhile: Meanwhile
) -> None:
    meanwhile(lambda: put(store, kv(2), KV_BYTES, time.time()))
    document = removed(invoke, store, "--before", "7d")
    assert (document["pages"], document["kept"]) == (PAGES - 1, 1)
    assert set(contents(store)) == {kv(2), indexer(2), indexer(YOUNG)}


def test_a_page_that_was_only_read_leaves(
    invoke: Invoke, store: Path, meanwhile: Meanwhile
) -> None:
    """The plug-in notes a read by the access time, which changes the version of the file."""
    modified = (store / kv(2)).stat().st_mtime_ns
    meanwhile(lambda: os.utime(store / kv(2), ns=(time.time_ns(), modified)))
    document = removed(invoke, store, "--before", "7d")
    assert (document["pages"], document["kept"]) == (PAGES, 0)


def test_a_page_is_looked_at_right_before_it_leaves(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes after the listing, right before the removal looks at the page."""
    os.utime(store / indexer(YOUNG), (0, 0))
    look, looks = FileStore.look, list[int]()

    def seen(self: FileStore, *arguments: Any) -> Any:
        looks.append(1)
        if len(looks) == 1:
            put(store, kv(YOUNG), KV_BYTES)
        return look(self, *arguments)

    monkeypatch.setattr(FileStore, "look", seen)
    document = removed(invoke, store, "--state", "orphan")
    assert (document["pages"], document["kept"]) == (0, 1)
    assert {kv(YOUNG), indexer(YOUNG)} <= set(contents(store))


# pages that move


def test_a_moved_page_stays_with_what_was_written_meanwhile(
    invoke: Invoke, store: Path, tmp_path: Path, meanwhile: Meanwhile
) -> None:
    """The object that is new in the source was not copied: it is the only one."""
    os.utime(store / indexer(YOUNG), (0, 0))
    meanwhile(lambda: put(store, kv(YOUNG), KV_BYTES))
    options = ("--move", "--yes", "--include-partial", "--include-damaged", "--format", "json")
    document = invoke("migrate", store, tmp_path / "new", *options, exit_code=4).document
    assert (document["moved"], document["failed"]) == (PAGES, 1)
    (problem,) = document["problems"]
    assert problem["page"] == page(YOUNG)
    assert "in the source, because a server has written to it meanwhile" in problem["detail"]
    assert set(contents(store)) == {kv(YOUNG), indexer(YOUNG)}


@pytest.mark.slow
@pytest.mark.usefixtures("timeless")
def test_a_moved_page_of_a_store_without_times_is_looked_at_twice(
    invoke: Invoke, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, indexer(YOUNG + 1), INDEXER_BYTES)
    written = lambda seconds: put(store, kv(YOUNG), KV_BYTES)  # noqa: E731
    monkeypatch.setattr(in_flight, "time", SimpleNamespace(sleep=written, monotonic=time.monotonic))
    options = ("--move", "--yes", "--include-partial", "--include-damaged", "--format", "json")
    outcome = invoke("migrate", store, tmp_path / "new", *options)
    assert "looks again in" in outcome.stderr
    assert outcome.document["moved"] == PAGES + 1
    assert set(contents(store)) == {kv(YOUNG), indexer(YOUNG)}


# a profile that may be wrong


def test_a_pool_that_the_newest_pages_lack_makes_the_profile_doubtful(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    """The servers have no indexer: their pages are whole, whatever the profile states."""
    store = tmp_path / "store"
    store.mkdir()
    for number in range(20):
        put(store, kv(number), KV_BYTES)
    before = contents(store)
    partial = ("rm", store, "--state", "partial", "--profile", profile, "--yes")
    said = invoke(*partial, exit_code=2).stderr
    assert "nothing was removed: 20 of the 20 newest pages" in said
    assert "missing-pool" in said
    assert "--despite-profile removes" in said
    assert contents(store) == before
    invoke(*partial, "--despite-profile")
    assert contents(store) == {}


def test_old_partial_pages_are_no_reason_to_doubt_the_profile(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    store = dsa_store(tmp_path / "store", 20)
    for number in range(12):
        (store / indexer(number)).unlink()
        os.utime(store / kv(number), (OLD - 1000, OLD - 1000))
    document = removed(invoke, store, "--state", "partial", "--profile", profile)
    assert document["pages"] == 12
