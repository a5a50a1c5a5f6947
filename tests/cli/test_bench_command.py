"""`hicachectl bench` on real stores: what it reads, says, writes and leaves."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.backends.base import open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.bench.estimate import Cost, cost_of
from hicachectl.bench.prompts import PromptTimes, break_even_of, check_probed
from hicachectl.bench.reads import Timing, cached_bytes
from hicachectl.bench.report import prompts_verdict
from hicachectl.bench.sample import BATCH_PAGES, OWN_MODEL, batch_lengths
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.errors import UsageError
from tests.doctor.replies import answering, info
from tests.hf3fs_places import Place
from tests.move.migrations import demo_store, profile_file
from tests.small_file_system import small_ext4, small_file_system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Invoke
    from tests.hf3fs_server import MetadataServer
    from tests.mooncake_cluster import Cluster

PAGE_BYTES = 16384  # of one rank of the demo, without Mamba states
PATIENCE_S = 60


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_file(tmp_path / "profile.toml")


def stored(directory: Path) -> None:
    """Write what is in the page cache to the disk, so that it can be dropped."""
    for path in directory.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def facts(directory: Path) -> dict[str, tuple[int, ...]]:
    seen = {path.name: path.stat() for path in directory.iterdir()}
    return {
        name: (one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_atime_ns)
        for name, one in seen.items()
    }


def from_disk() -> int:
    """Return the bytes that this process and its children that have ended read from disks."""
    facts = Path("/proc/self/io").read_text().split()
    return int(facts[facts.index("read_bytes:") + 1])


def caches(document: dict[str, Any]) -> list[str | None]:
    return [row["cache"] for row in document["rows"]]


@pytest.mark.slow
def test_cold_reads_of_a_disk_are_told_from_those_of_memory(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    with small_ext4(tmp_path / "disk", 16 << 20, 0) as disk:
        store = demo_store(disk / "store", 24)
        stored(store)
        words = ("bench", store, "--profile", profile, "--prefill", 1, "--ranks", 2)
        before = from_disk()
        dropped = invoke.document(*words, "--drop-cache")
        read = from_disk() - before
        again = invoke.document(*words)
        assert from_disk() == before + read
    assert caches(dropped) == ["cold", "cached"]
    assert caches(again) == ["cached"]
    assert read >= 24 * 2 * PAGE_BYTES
    cold, cached = dropped["rows"]
    assert cold["share_of_bare"] is None
    assert cached["share_of_bare"] > 0
    first, second = dropped["verdicts"]
    assert "not from the page cache of this host" in first
    assert "from memory, not the disk" in second
    assert all("memory, not the disk" in text for text in again["verdicts"])


@pytest.mark.slow
def test_a_file_system_in_memory_is_never_called_a_disk(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    with small_file_system(tmp_path / "memory", "16m") as memory:
        store = demo_store(memory / "store", 24)
        document = invoke.document("bench", store, "--profile", profile, "--drop-cache")
    assert caches(document) == ["cached"]
    assert "from memory, not the disk" in document["verdicts"][0]


def test_bytes_in_the_page_cache_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_001))
    with path.open("rb") as file:
        assert cached_bytes(file.fileno(), 200_000) == 100_001
        assert cached_bytes(file.fileno(), 5000) == 5000
        assert cached_bytes(file.fileno(), 0) == 0


def test_a_read_changes_nothing(invoke: Invoke, tmp_path: Path, profile: Path) -> None:
    store = demo_store(tmp_path / "store")
    before = facts(store)
    table = invoke("bench", store, "--profile", profile, "--prefill", 1, "--compare", store)
    assert facts(store) == before
    assert table.stdout.count("reading is faster for every prompt that servers restore") == 2
    assert "8 of 8 whole pages read" in table.stdout


@pytest.mark.parametrize(("ranks", "shares"), [((), 2), ((1,), 1), ((3,), 3)])
def test_each_rank_reads_its_own_objects(
    invoke: Invoke, tmp_path: Path, ranks: tuple[int, ...], shares: int
) -> None:
    store = demo_store(tmp_path / "store")
    words = [word for count in ranks for word in ("--ranks", count)]
    document = invoke.document("bench", store, *words, "--threads", 2)
    (one,) = document["stores"]
    assert (one["ranks"], one["shards"]) == (shares, 2)
    assert one["page_bytes"] == PAGE_BYTES
    assert one["nbytes"] % (shares * 8 * PAGE_BYTES) == 0
    assert one["nbytes"] >= 2 * shares * 8 * PAGE_BYTES  # once as found, and again
    assert document["rows"][-1]["tokens_per_second"] is None
    assert document["verdicts"] == []


def test_no_more_is_read_than_stated(invoke: Invoke, tmp_path: Path) -> None:
    store = demo_store(tmp_path / "store")
    document = invoke.document("bench", store, "--most", 2 * 2 * PAGE_BYTES + 1)
    assert document["stores"][0]["read_pages"] == 2
    said = invoke("bench", store, "--most", "20KiB", exit_code=2).stderr
    assert "--most 20.0 KiB: one page has 32.0 KiB; give more" in said


@pytest.mark.slow
def test_the_time_limit_ends_a_run(invoke: Invoke, tmp_path: Path) -> None:
    store = demo_store(tmp_path / "store", 400)
    words = ("bench", store, "--ranks", 1, "--time-limit", "0.001s")
    document = invoke.document(*words)
    assert (document["complete"], document["stopped_by"]) == (False, "deadline")
    assert document["stores"][0]["read_pages"] == BATCH_PAGES


@pytest.mark.parametrize(("cut", "exit_code"), [(False, 0), (True, 4)])
def test_objects_that_are_not_read(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool, exit_code: int
) -> None:
    """An eviction after the listing is no failure; an object that became shorter is one."""
    store = demo_store(tmp_path / "store")
    scan = FileStore.scan

    def late(self: FileStore, *arguments: Any) -> Iterator[Any]:
        yield from scan(self, *arguments)
        path = min(path for path in store.glob("*.bin") if ".mamba" not in path.name)
        if cut:
            os.truncate(path, 100)
        else:
            path.unlink()

    monkeypatch.setattr(FileStore, "scan", late)
    outcome = invoke("bench", store, "--format", "json", exit_code=exit_code)
    (one,) = outcome.document["stores"]
    assert (one["gone"], one["failed"]) == (not cut, cut)
    assert ("could not be read; see hicachectl verify" in outcome.stderr) == cut


def test_memory_is_bounded(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicachectl.bench.reads._MOST_MEMORY", 64 << 10)
    words = ("bench", demo_store(tmp_path / "store"), "--ranks", 2, "--threads")
    invoke(*words, 2)
    assert "give fewer --ranks or --threads" in invoke(*words, 4, exit_code=2).stderr


@pytest.mark.slow
def test_the_time_of_a_batch_is_that_of_the_store(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than 3 % of a batch's time is spent outside the store's own calls."""
    store = demo_store(tmp_path / "store", 300)
    calls: list[float] = []
    read_into = FileStore.read_into

    def timed(self: FileStore, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = read_into(self, *arguments, **named)
        calls.append(time.perf_counter() - began)
        return result

    monkeypatch.setattr(FileStore, "read_into", timed)
    row = invoke.document("bench", store, "--ranks", 1)["rows"][-1]
    full = sorted(calls)[-row["batches"] :]
    assert median(full) > 0.97 * row["p50_seconds"]


@pytest.mark.parametrize("pages", [1, 127, 128, 300, 5000])
@pytest.mark.parametrize("short", [1, 16, 64, 128])
def test_batches_are_full_or_short(pages: int, short: int) -> None:
    lengths = batch_lengths(pages, short)
    assert sum(lengths) <= pages
    if pages < BATCH_PAGES:
        assert lengths == [pages]
        return
    assert set(lengths) <= {BATCH_PAGES, short}
    assert pages - sum(lengths) < BATCH_PAGES
    assert sum(one for one in lengths if one != BATCH_PAGES) <= pages / 4


def timing(pages: int, seconds: float) -> Timing:
    return Timing(rank=0, cache="cold", pages=pages, nbytes=1, failed=0, seconds=seconds)


def test_the_cost_of_a_batch_is_that_of_its_start_and_its_pages() -> None:
    cost = cost_of([timing(128, 1.5 + 128 * 0.01), timing(4, 1.54), timing(4, 1.54)])
    assert cost.start == pytest.approx(1.5)
    assert cost.page == pytest.approx(0.01)
    assert cost.seconds(129) == pytest.approx(2 * 1.5 + 1.29)
    assert cost_of([timing(128, 2.56)]) == Cost(0.0, 0.02)
    assert cost_of([timing(128, 1.28), timing(4, 2.0)]) == Cost(0.0, 0.01)


@pytest.mark.parametrize("prefill", [100.0, 3000.0, 4500.0, 6000.0, 1e9])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_the_break_even_is_the_first_length_from_which_all_are_faster(
    prefill: float, page_tokens: int
) -> None:
    cost = Cost(0.3, page_tokens / 5000)
    first = cost.faster_from(page_tokens, 256, prefill)
    pages = range(-(-256 // page_tokens), 1_000_000 // page_tokens + 1, 1)
    slower = [n for n in pages[:20_000] if cost.seconds(n) >= n * page_tokens / prefill]
    if first is None:
        assert cost.seconds(pages[-1]) >= pages[-1] * page_tokens / prefill
    else:
        assert first == (max(slower) + 1 if slower else pages[0]) * page_tokens


def test_the_prefill_rate_is_that_of_the_servers_metrics(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    """The names are those of a real server's page (tests/conformance)."""
    from hicachectl.bench.estimate import prefill_of

    text = (
        'sglang:uncached_prompt_tokens_histogram_sum{model_name="m"} 30000.0\n'
        'sglang:per_stage_req_latency_seconds_sum{stage="prefill_forward",tp_rank="0"} 2.0\n'
        'sglang:per_stage_req_latency_seconds_sum{stage="prefill_forward",tp_rank="1"} 2.0\n'
        'sglang:per_stage_req_latency_seconds_sum{stage="decode_forward",tp_rank="0"} 9.0\n'
    )
    with answering(info(), metrics=text.encode()) as server:
        assert prefill_of(server) == (15000.0, "")
    with answering(info(), metrics=text.replace("30000", "0").encode()) as server:
        rate, why = prefill_of(server)
    assert rate is None
    assert "--prefill" in why


# ---- pages of its own


def own_names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if OWN_MODEL in path.name]


@pytest.mark.slow
def test_written_pages_are_removed(invoke: Invoke, tmp_path: Path, profile: Path) -> None:
    store = demo_store(tmp_path / "store")
    before = sorted(path.name for path in store.iterdir())
    document = invoke.document("bench", store, "--profile", profile, "--write", "--most", "1MiB")
    assert [row["step"] for row in document["rows"]] == ["read", "write"]
    assert document["rows"][1]["bytes_per_second"] > 0
    assert sorted(path.name for path in store.iterdir() if path.name != ".hicachectl") == [
        name for name in before if name != ".hicachectl"
    ]


def test_pages_that_cannot_be_removed_are_told(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from hicachectl.backends.base import Result, Status

    store = demo_store(tmp_path / "store")

    def refuse(self: FileStore, rows: Any) -> Result:
        return Result(np.full(len(rows), Status.ERROR, dtype=np.uint8), {0: "is held"})

    monkeypatch.setattr(FileStore, "delete", refuse)
    outcome = invoke("bench", store, "--write", "--most", "256KiB", exit_code=4)
    assert "could not be removed: is held" in outcome.stderr


def begun(store: Path) -> subprocess.Popen[str]:
    """Start a bench that writes for a minute; return it once it has written pages."""
    words = [sys.executable, "-m", "hicachectl", "bench", str(store), "--write"]
    process = subprocess.Popen(
        [*words, "--most", "4GiB", "--time-limit", "60s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + PATIENCE_S
    while not own_names(store):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_an_interrupt_removes_the_pages_and_a_kill_leaves_them(
    invoke: Invoke, tmp_path: Path
) -> None:
    store = demo_store(tmp_path / "store")
    before = sorted(path.name for path in store.glob("*.bin"))
    process = begun(store)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert sorted(path.name for path in store.iterdir() if path.name != ".hicachectl") == before
    process = begun(store)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert own_names(store)
    said = invoke("bench", store, "--most", "64KiB").stderr
    assert "of a bench that was killed; bench --write removes them" in said
    assert own_names(store)
    invoke("bench", store, "--write", "--most", "256KiB")
    assert sorted(path.name for path in store.glob("*.bin")) == before


# ---- other stores


def test_a_pack_is_read_and_not_written(invoke: Invoke, tmp_path: Path, profile: Path) -> None:
    pack = tmp_path / "store.hcpack"
    invoke("migrate", demo_store(tmp_path / "store"), pack, "--profile", profile)
    content = pack.read_bytes()
    document = invoke.document("bench", pack)
    assert caches(document) == ["unknown"]
    assert document["page_size"] == 16
    assert "--write" in invoke("bench", pack, "--write", exit_code=2).stderr
    assert "--drop-cache" in invoke("bench", pack, "--drop-cache", exit_code=2).stderr
    assert pack.read_bytes() == content


def test_nixl_is_read_and_written(invoke: Invoke, tmp_path: Path, profile: Path) -> None:
    """Ranks are processes, each with two threads."""
    directory = tmp_path / "nixl"
    url = f"nixl://{directory}?direct_io=off"
    invoke("migrate", demo_store(tmp_path / "store"), url, "--profile", profile)
    before = sorted(directory.rglob("*"))
    words = ("--profile", profile, "--write", "--most", "1MiB", "--ranks", 2, "--threads", 2)
    document = invoke.document("bench", url, *words)
    assert [(row["step"], row["cache"]) for row in document["rows"]] == [
        ("read", "cached"),
        ("write", None),
    ]
    (one,) = document["stores"]
    assert (one["failed"], one["gone"], one["ranks"], document["threads"]) == (0, 0, 2, 2)
    assert set(before) <= set(directory.rglob("*"))
    assert not [path for path in directory.rglob("*") if OWN_MODEL in path.name]


def test_3fs_is_read_and_not_written(
    invoke: Invoke, metadata_server: MetadataServer, tmp_path: Path
) -> None:
    place = Place(tmp_path, metadata_server, metadata_server.snapshot)
    held = place.tables()
    words = ("bench", place.url(), "--profile", place.profile)
    document = invoke.document(*words, "--threads", 2)
    assert caches(document) == ["unknown"]
    assert document["stores"][0]["failed"] == 0
    said = invoke(*words, "--write", exit_code=2).stderr
    assert "its keys name no model" in said
    assert place.tables() == held


def test_mooncake_is_read_and_written(
    invoke: Invoke, mooncake_cluster: Cluster, profile: Path
) -> None:
    with open_store(mooncake_cluster.url) as store:
        fill(store, 8)
    before = sorted(mooncake_cluster.list_keys())
    words = ("--profile", profile, "--write", "--most", "1MiB", "--prefill", 1)
    document = invoke.document("bench", mooncake_cluster.url, *words)
    assert [(row["step"], row["cache"]) for row in document["rows"]] == [
        ("read", "unknown"),
        ("write", None),
    ]
    assert document["stores"][0]["failed"] == 0
    assert "reading is faster" in document["verdicts"][0]
    assert sorted(mooncake_cluster.list_keys()) == before


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast"])
def test_a_prefill_rate_is_a_finite_number_above_0(
    invoke: Invoke, tmp_path: Path, rate: str
) -> None:
    store = demo_store(tmp_path / "store")
    assert "--prefill: " in invoke("bench", store, f"--prefill={rate}", exit_code=2).stderr


# ---- prompts of a server


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([1, 1, 1], (None, 64)),
        ([-1, 1, 1], (64, 128)),
        ([-1, 0.1, 0.1, 1], (64, 512)),
        ([-1, -1, 3], (128, 256)),
        ([0.1, -0.1, 1], (None, 256)),
        ([1, 1, -3], (256, None)),
        ([-1, 0.1], (64, None)),
        ([0.1, -0.1], (None, None)),
        ([5, -1, 5], (None, 64)),
    ],
)
def test_the_break_even_is_where_most_gains_change_their_sign(
    gains: list[float], expected: tuple[int | None, int | None]
) -> None:
    """Gains below 3 % decide nothing, and neither does one that the others contradict."""
    times = [
        PromptTimes(64 << at, computed=[10.0 + gain, 20.0 + gain], restored=[10.0, 20.0])
        for at, gain in enumerate(gains)
    ]
    assert break_even_of(times) == expected
    said = prompts_verdict("file:///store", times, break_even_of(times))
    assert all(f"{tokens:,} tokens" in said for tokens in expected if tokens is not None)


def test_a_gain_that_the_median_contradicts_decides_nothing() -> None:
    times = PromptTimes(64, computed=[10.0, 20.0, 20.0], restored=[8.0, 21.0, 21.0])
    assert times.restored_faster is None


def test_a_probe_without_its_server_is_refused(
    invoke: Invoke, tmp_path: Path, profile: Path
) -> None:
    words = ("bench", demo_store(tmp_path / "store"), "--profile", profile, "--probe-server")
    assert "--probe-server needs --server URL" in invoke(*words, exit_code=2).stderr


@pytest.mark.parametrize("why", ["cannot be written", "releases from 0.5.20 on do not"])
def test_a_probe_that_cannot_be_is_refused(
    invoke: Invoke, tmp_path: Path, profile: Path, why: str
) -> None:
    directory = demo_store(tmp_path / "store")
    invoke("migrate", directory, tmp_path / "store.hcpack", "--profile", profile)
    place, release = directory, "0.5.19"
    if why == "cannot be written":
        place, release = tmp_path / "store.hcpack", "0.5.23"
    with open_store(str(place)) as store, pytest.raises(UsageError, match=why):
        check_probed(store, replace(PROFILE, sglang=release))


def test_nothing_is_measured_while_another_process_has_the_lock(
    invoke: Invoke, tmp_path: Path
) -> None:
    store, lock = demo_store(tmp_path / "store"), tmp_path / "lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        words = ("bench", store, "--write", "--most", "256KiB", "--lock", lock)
        document = invoke.document(*words)
    assert (document["stopped_by"], document["complete"], document["rows"]) == ("lock", False, [])
    assert invoke.document(*words)["rows"]
