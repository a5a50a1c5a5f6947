"""Terminated prewarms, and stores that fill up, evict or lose pages during a prewarm."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.backends.mooncake.master import MasterAdmin
from hicachectl.cli.demo_store import PROFILE
from hicachectl.io import pipeline
from tests.mooncake_cluster import Cluster
from tests.move.migrations import demo_store
from tests.paused import paused
from tests.places import Hf3fsPlace
from tests.prewarming.test_cli import prompts, warmed
from tests.prewarming.test_prewarm import HASHES, PAGES, pages_of
from tests.small_file_system import small_file_system
from tests.speed import slow, some
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from tests.conftest import Invoke
    from tests.hf3fs_server import MetadataServer

SIZE = PROFILE.page_size
COPY = "hicachectl.backends.file.store:FileStore.copy_from"
READ = "hicachectl.backends.file.store:FileStore.read_into"
SMALL = ("--jobs", 1, "--buffer-bytes", "300KiB")  # one or two pages per batch


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return demo_store(tmp_path / "source", PAGES)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Prompts of 4, 8 and 12 pages; each ends with states."""
    return prompts(tmp_path / "asked.jsonl", 4, 8, 12)


def reach(invoke: Invoke, store: object, profile: Path, asked: Path) -> list[int]:
    """Return the usable pages of each prompt."""
    out = invoke("hits", store, "--profile", profile, "--token-ids", asked, "--format", "jsonl")
    return [json.loads(line)["usable_pages"] for line in out.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "signals", "code", "why"),
    [
        slow(2, [signal.SIGTERM], 143, "terminated"),
        slow(5, [signal.SIGTERM, signal.SIGTERM], 143, "terminated"),
        (4, [signal.SIGINT], 130, "interrupted"),
    ],
)
def test_terminated_it_leaves_prefixes_says_so_and_a_second_run_completes_them(
    invoke: Invoke, source: Path, profile: Path, asked: Path, tmp_path: Path,
    number: int, signals: list[int], code: int, why: str,
) -> None:  # fmt: skip
    target, metrics = tmp_path / "target", tmp_path / "prewarm.prom"
    stores = (target, "--from", source, "--profile", profile, "--token-ids", asked)
    more = (*SMALL, "--metrics-file", metrics)
    with paused(tmp_path / "paused", COPY, number, "prewarm", *stores, *more) as run:
        for each in signals:
            run.send(each)
        ended = run.resumed()
    assert ended.code == code, ended
    created, *said = ended.stderr.splitlines()
    assert created.startswith(f"hicachectl: Created {target} ")
    assert said[0].endswith(f"stopped: {why}")
    assert said[-1] == f"hicachectl: {why.capitalize()}"
    held = pages_of(target)
    assert held == set(HASHES[: len(held)])
    assert 0 < len(held) < PAGES
    assert not [name for name in contents(target) if name.startswith(".")]
    reached = [min(n, len(held) // 4 * 4) for n in (4, 8, 12)]
    assert reach(invoke, target, profile, asked) == reached
    document = json.loads(ended.stdout)
    assert (document["complete"], document["stopped_by"]) == (False, why)
    assert document["copied_pages"] == len(held)
    assert document["usable_tokens"] == sum(reached) * SIZE
    assert "hicachectl_prewarm_succeeded" in metrics.read_text()
    assert touched_best_last(target, len(held))
    document = warmed(invoke, *stores)
    assert document["already_there"] + document["copied_pages"] == PAGES
    assert reach(invoke, target, profile, asked) == [4, 8, 12]


def touched_best_last(target: Path, held: int) -> bool:
    """Return whether the pages, written best first, would be evicted worst first."""
    times = {name: mtime for name, (_, mtime) in contents(target).items()}
    newest = [max(t for name, t in times.items() if name.startswith(h)) for h in HASHES[:held]]
    return newest == sorted(newest, reverse=True)


@pytest.mark.slow
def test_a_file_system_that_is_full_ends_the_run_with_whole_prefixes(
    invoke: Invoke, source: Path, profile: Path, asked: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with small_file_system(target, "500k"):
        document = warmed(
            invoke, target, "--from", source, "--profile", profile, "--token-ids", asked, *SMALL,
            exit_code=4,
        )  # fmt: skip
        held = pages_of(target)
        assert held == set(HASHES[: len(held)])
        assert reach(invoke, target, profile, asked) == [4, 4, 4]
    assert (document["complete"], document["stopped_by"]) == (False, "destination full")
    assert document["usable_tokens"] == 12 * SIZE
    assert document["stderr"].rstrip().endswith("stopped: destination full")


@pytest.mark.slow
def test_several_jobs_leave_no_more_behind_the_page_that_found_no_room_than_they_had_begun(
    invoke: Invoke, profile: Path, tmp_path: Path
) -> None:
    jobs, target = 3, tmp_path / "target"
    source, asked = many_pages(tmp_path, 160)
    whole = json.loads(asked.read_text())
    cut = [[*whole[: pages * SIZE], 1] for pages in range(4, 164, 4)]  # each ends with a state
    asked.write_text("".join(f"{json.dumps(ids)}\n" for ids in cut))
    with small_file_system(target, "8m"):
        document = warmed(
            invoke, target, "--from", source, "--profile", profile, "--token-ids", asked,
            "--jobs", jobs, "--buffer-bytes", f"{300 * jobs}KiB", exit_code=4,
        )  # fmt: skip
        held = pages_of(target)
        assert not [name for name in contents(target) if name.startswith(".")]
        usable = reach(invoke, target, profile, asked)
    assert (document["complete"], document["stopped_by"]) == (False, "destination full")
    assert document["usable_tokens"] == sum(usable) * SIZE
    in_batch = 300 // 32  # KiB
    at_once = 2 * jobs  # batches that may begin while an earlier batch is unfinished
    assert max(usable) >= len(held) - at_once * in_batch - 3
    assert len(held) > 80


@pytest.mark.slow
def test_pages_that_leave_the_source_meanwhile_are_counted_and_nothing_claims_them(
    invoke: Invoke, source: Path, profile: Path, asked: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    stores = (target, "--from", source, "--profile", profile, "--token-ids", asked)
    with paused(tmp_path / "paused", READ, 2, "prewarm", *stores, *SMALL) as run:
        for name in contents(source):
            if name.startswith(HASHES[6]):
                (source / name).unlink()
        ended = run.resumed()
    assert ended.code == 0, ended
    document = json.loads(ended.stdout)
    assert (document["gone"], document["failed"]) == (1, 0)
    assert document["copied_pages"] == PAGES - 1
    assert document["usable_tokens"] == 12 * SIZE
    assert reach(invoke, target, profile, asked) == [4, 4, 4]


def many_pages(folder: Path, pages: int) -> tuple[Path, Path]:
    """Return a store of one long chain, and the prompt for the whole chain."""
    source = demo_store(folder / "many", pages)
    drawn = np.random.default_rng(20_251_120).integers(0, 150_000, pages * SIZE)
    asked = folder / "many.jsonl"
    asked.write_text(f"{json.dumps([*drawn.tolist(), 1])}\n")
    return source, asked


@pytest.mark.parametrize("jobs", some([1, 3], 3))
def test_a_cluster_that_evicts_ends_the_run_and_says_what_it_holds(
    mooncake_package: None, invoke: Invoke, profile: Path, tmp_path: Path, jobs: int
) -> None:
    source, asked = many_pages(tmp_path, 400)
    with Cluster(16 << 20, lease_ms=100, eviction_high_watermark_ratio=0.5) as cluster:
        document = warmed(
            invoke, cluster.url, "--from", source, "--profile", profile, "--token-ids", asked,
            "--jobs", jobs, "--buffer-bytes", f"{jobs}MiB", "--bwlimit", "5MiB",
        )  # fmt: skip
        left = reach(invoke, cluster.url, profile, asked)
    assert (document["complete"], document["stopped_by"]) == (False, "destination evicts")
    assert "evicts newly written objects; it holds about" in document["stderr"]
    assert document["copied_pages"] < 400
    assert document["usable_tokens"] == left[0] * SIZE


def test_mooncake_protects_what_is_copied_or_found_and_says_what_is_not(
    mooncake_cluster: Cluster, invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    stores = (mooncake_cluster.url, "--from", source, "--profile", profile)
    warmed(invoke, *stores, "--token-ids", prompts(tmp_path / "four.jsonl", 4))
    assert "soft-pinned: 0" in mooncake_cluster.ask("metrics/summary")
    before = time.time()
    both = prompts(tmp_path / "both.jsonl", 4, 8)
    document = warmed(invoke, *stores, "--token-ids", both, "--pin")
    assert document["copied_pages"] == 4
    if mooncake_cluster.can_pin:
        pinned, not_pinned = HASHES[:8], 0
        assert before + 1800 - 0.001 <= document["pinned_until"] <= time.time() + 1800
        assert "pinned until 2" in document["stderr"]
    else:
        pinned, not_pinned = HASHES[4:8], 4
        assert document["pinned_until"] is None
        assert "; 4 not pinned" in document["stderr"]
    assert document["not_pinned"] == not_pinned
    objects = [k for k in mooncake_cluster.list_keys() if any(h in k for h in pinned)]
    assert f"soft-pinned: {len(objects)}" in mooncake_cluster.ask("metrics/summary")


@pytest.mark.parametrize("parts", [[], ["--shard", "0/1"]], ids=["alone", "part"])
def test_pages_that_only_the_destination_has_are_pinned(
    pinning_cluster: Cluster,
    invoke: Invoke,
    source: Path,
    profile: Path,
    tmp_path: Path,
    parts: list[str],
) -> None:
    asked = ("--profile", profile, "--token-ids", prompts(tmp_path / "eight.jsonl", 8))
    warmed(invoke, pinning_cluster.url, "--from", source, *asked)
    assert "soft-pinned: 0" in pinning_cluster.ask("metrics/summary")
    shorter = tmp_path / "shorter"
    shutil.copytree(source, shorter)
    for path in shorter.iterdir():
        if any(page in path.name for page in HASHES[4:]):
            path.unlink()
    stores = (pinning_cluster.url, "--from", shorter, *asked, "--pin")
    if parts:
        run = tmp_path / "run"
        invoke("prewarm", *stores, *parts, "--run", run)
        document = invoke.document("merge", run)
    else:
        document = warmed(invoke, *stores)
    # The shorter source has a state that the copy above had no use for.
    assert (document["already_there"], document["copied_pages"]) == (7, 1)
    assert document["not_pinned"] == 0
    objects = len(pinning_cluster.list_keys())
    assert f"soft-pinned: {objects})" in pinning_cluster.ask("metrics/summary")


def test_a_page_that_loses_an_object_before_its_pin_is_not_pinned(
    pinning_cluster: Cluster,
    invoke: Invoke,
    source: Path,
    profile: Path,
    asked: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores = (pinning_cluster.url, "--from", source, "--profile", profile, "--token-ids", asked)
    warmed(invoke, *stores)
    (lost, *_), pin = pinning_cluster.list_keys(), MasterAdmin.pin

    def evicted_before(
        self: MasterAdmin, keys: Sequence[str], milliseconds: int | None
    ) -> npt.NDArray[np.int64]:
        if lost in pinning_cluster.list_keys():
            pinning_cluster.remove(lost)
        return pin(self, keys, milliseconds)

    monkeypatch.setattr(MasterAdmin, "pin", evicted_before)
    document = warmed(invoke, *stores, "--pin")
    assert (document["already_there"], document["not_pinned"]) == (PAGES, 1)
    assert "; 1 not pinned" in document["stderr"]


def test_pins_last_as_long_as_is_asked(
    mooncake_package: None, invoke: Invoke, source: Path, profile: Path, asked: Path
) -> None:
    day_ms = 86_400_000  # newer masters allow a week by default
    with Cluster(max_kv_soft_pin_ttl=day_ms) as cluster:
        stores = (cluster.url, "--from", source, "--profile", profile, "--token-ids", asked)
        too_long = (*stores, "--pin", "--pin-ttl", "2d")
        if cluster.can_pin:  # the master can be asked beforehand
            said = invoke("prewarm", *too_long, exit_code=2).stderr
        else:
            refused = warmed(invoke, *too_long, exit_code=4)
            assert refused["failed"] == PAGES
            said = refused["stderr"]
        assert "longer than the master's --max_kv_soft_pin_ttl; give a shorter time" in said
        assert not cluster.list_keys()
        assert warmed(invoke, *stores, "--pin", "--pin-ttl", "20h")["copied_pages"] == PAGES
        pinned = f"soft-pinned: {len(cluster.list_keys())})"
        assert pinned in cluster.ask("metrics/summary")


def test_the_most_valuable_pages_are_the_last_that_3fs_evicts(
    metadata_server: MetadataServer, invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    place = Hf3fsPlace(tmp_path, metadata_server)
    place.empty()
    stores = (place.url, "--from", source, "--profile", profile)
    warmed(invoke, *stores, "--token-ids", prompts(tmp_path / "four.jsonl", 4))
    document: dict[str, Any] = warmed(
        invoke, *stores, "--token-ids", prompts(tmp_path / "eight.jsonl", 8), *SMALL
    )
    assert (document["already_there"], document["copied_pages"]) == (4, 4)
    assert document["usable_tokens"] == 8 * SIZE
    for rank in (0, 1):
        keys = metadata_server.keys_by_recency(rank)
        pages = [page for key in keys for page in HASHES if page in key]  # separate K and V
        assert list(dict.fromkeys(pages)) == HASHES[:8][::-1]


def test_the_best_is_the_newest_also_when_a_deadline_ends_it(
    invoke: Invoke, source: Path, profile: Path, asked: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target = tmp_path / "target"
    copy_from, calls, late = FileStore.copy_from, itertools.count(1), threading.Event()

    def third_is_late(store: FileStore, *arguments: Any, **options: Any) -> Any:
        if next(calls) == 3:
            late.set()
        return copy_from(store, *arguments, **options)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * late.is_set())
    monkeypatch.setattr(pipeline, "time", clock)
    monkeypatch.setattr(FileStore, "copy_from", third_is_late)
    document = warmed(
        invoke, target, "--from", source, "--profile", profile, "--token-ids", asked, *SMALL,
        "--deadline", "1h",
    )  # fmt: skip
    assert document["stopped_by"] == "deadline"
    held = HASHES[: document["copied_pages"]]
    assert pages_of(target) == set(held)
    assert 0 < len(held) < PAGES
    assert touched_best_last(target, len(held))
