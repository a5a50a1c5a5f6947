"""The plug-in's counters agree with what a real server says of the same requests, to the token.

Both are compared as growth: other tests have used the same server before.
"""

from __future__ import annotations

import errno
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.statuses import CLOSED, ENDED, SERVING, read_statuses
from hicachectl.formats.plugin_status import COUNTED, PluginStatus
from tests.conformance import tiny_llama
from tests.conformance.cpu_server import MODEL, PAGE_SIZE, CpuServer, prompt
from tests.conformance.plugin_site import Site, full_hit
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

REQUESTS = 200
READS = ("pread", "preadv", "read", "readv")
# Why SGLang does not use all that was restored (unified_radix_cache.py :: _handle_prefetch_result,
# schedule_policy.py :: _account_prefill_cache_admission).
DISCARDED = ("dropped", "device_capacity", "cache_admission_shortfall")
# Others grow with each request for the metrics.
COMPARED = (
    "hicachectl_plugin_",
    "sglang:storage_prefetch_",
    "sglang:prefetched_tokens",
    "sglang:backuped_tokens",
)
UNFULFILLED = "sglang:storage_prefetch_unfulfilled_tokens_total"


class Counts(NamedTuple):
    """Counters of one server, by name and reason."""

    values: dict[tuple[str, str], int]

    @classmethod
    def of(cls, server: CpuServer) -> Counts:
        values: dict[tuple[str, str], int] = {}
        for family in text_string_to_metric_families(server.metrics()):
            for sample in family.samples:
                if sample.name.startswith(COMPARED) and sample.name.endswith("_total"):
                    key = sample.name, sample.labels.get("reason", "")
                    values[key] = values.get(key, 0) + int(sample.value)
        return cls(values)

    def since(self, before: Counts) -> Counts:
        return Counts(
            {key: value - before.values.get(key, 0) for key, value in self.values.items()}
        )

    def get(self, name: str, reason: str = "") -> int:
        return self.values.get((name, reason), 0)

    def tokens(self, stage: str) -> int:
        return self.get(f"hicachectl_plugin_{stage}_tokens_total")

    def refused(self, reason: str) -> int:
        return self.get("hicachectl_plugin_refused_pages_total", reason)

    def unfulfilled(self, *reasons: str) -> int:
        return sum(self.get(UNFULFILLED, reason) for reason in reasons)


def settled(server: CpuServer) -> Counts:
    """Return the counters once the server has nothing to do, and they rest."""
    server.flush()
    seen = [Counts.of(server)]

    def rests() -> bool:
        time.sleep(0.3)
        seen.append(Counts.of(server))
        return seen[-1] == seen[-2]

    wait_until(rests, "the counters do not rest")
    return seen[-1]


def statuses(directory: Path) -> dict[str, PluginStatus]:
    """Return the statuses in a store by their standing, which must differ."""
    with Directory.named(str(directory / ".hicachectl"), writes=False) as side:
        seen = read_statuses(side)
    assert not seen.problems
    found = {one.standing: one.status for one in seen.statuses}
    assert len(found) == len(seen.statuses)
    return found


def last_status(site: Site) -> PluginStatus:
    """Detach the backend; return the status that it leaves."""
    site.server.detach()
    wait_until(lambda: set(statuses(site.directory)) == {CLOSED}, "no last status")
    return statuses(site.directory)[CLOSED]


@pytest.fixture
def site(cpu_server: CpuServer, tmp_path: Path) -> Site:
    return Site(cpu_server, tmp_path / "store")


# faults in one page


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(10001)
        byte = file.read(1)[0]
        file.seek(10001)
        file.write(bytes([byte ^ 0x40]))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


FAULTS: tuple[Callable[[Path], None] | None, ...] = (None, None, None, _flip, _cut, os.remove)


def test_counters_and_the_servers_answers_agree_over_many_requests_with_faults(site: Site) -> None:
    """Restored tokens are those that answers name and those that SGLang discards, by reason."""
    chance = random.Random(4)
    server = site.server
    site.attach()
    # Some prompts begin alike, and some end with a page.
    whole = [prompt(seed, chance.randrange(1, 8)) for seed in range(60, 70)]
    prompts = [*whole, *(tokens[: len(tokens) // PAGE_SIZE * PAGE_SIZE] for tokens in whole)]
    prompts += [[*tokens[: 2 * PAGE_SIZE], *prompt(90, 3)] for tokens in whole if len(tokens) > 200]
    before = settled(server)
    told, faults = 0, 0
    for number in range(REQUESTS):
        tokens = chance.choice(prompts)
        if chance.random() < 0.8:
            server.flush()
        stored = [path for path in site.files(tokens) if path.exists()]
        fault = chance.choice(FAULTS)
        if fault is not None and stored:
            fault(chance.choice(stored))
            faults += 1
        if number % 20 == 13:
            server.flush()
            broken = chance.choice(stored or [site.directory])
            with server.holding(broken, *READS, error=errno.EIO):
                told += server.generate(tokens).storage
            faults += 1
        elif number % 50 == 37:
            server.clear()
            told += server.generate(tokens).storage
        else:
            told += server.generate(tokens).storage
    grown = settled(server).since(before)
    assert faults > 60
    restored = grown.tokens("restored")
    assert restored > 100 * PAGE_SIZE
    assert restored == grown.get("sglang:prefetched_tokens_total")
    assert restored == told + grown.unfulfilled(*DISCARDED)
    found = grown.tokens("found")
    assert found == grown.get("sglang:storage_prefetch_hit_tokens_total")
    assert found - restored == grown.unfulfilled("storage_transfer", "host_capacity")
    assert found - restored > 0
    assert grown.tokens("asked") >= found
    assert 0 < grown.tokens("written") <= grown.get("sglang:backuped_tokens_total")
    assert grown.refused("damaged") > 0
    assert grown.refused("stale") > 0
    assert not any(
        value for (name, _), value in grown.values.items() if "failed_operations" in name
    )


def test_counts_go_on_when_the_backend_is_attached_again(site: Site) -> None:
    """Nothing is registered twice, and the status is that of the new attachment."""
    tokens, server = prompt(95), site.server
    full = full_hit(tokens)
    before = settled(server)
    site.attach()
    site.cold(tokens)
    wait_until(lambda: SERVING in statuses(site.directory))
    first = statuses(site.directory)[SERVING]
    closed = last_status(site)
    assert (closed.closed, closed.pid, closed.tokens["written"]) == (True, first.pid, full)
    site.attach()
    assert site.warm(tokens).storage == full
    server.detach()
    site.attach(digest="off")
    assert site.warm(tokens).storage == full
    grown = settled(server).since(before)
    assert grown.tokens("written") == full
    assert grown.tokens("restored") == grown.tokens("found") == 2 * full
    assert grown.tokens("asked") >= 3 * full
    last = last_status(site)
    assert last.attached_ns > closed.attached_ns
    assert {stage: last.tokens[stage] for stage in ("written", "restored")} == {
        "written": full,
        "restored": 2 * full,
    }


def test_pages_that_are_stored_already_are_not_counted_as_written(site: Site) -> None:
    tokens, server = prompt(96), site.server
    site.attach()
    site.cold(tokens)
    server.detach()
    before = settled(server)
    site.attach()
    server.flush()
    site.files(tokens)[1].rename(site.directory / "aside")  # the pages behind it are not found
    assert server.generate(tokens).storage == PAGE_SIZE
    site.await_stored(tokens)
    grown = settled(server).since(before)
    assert grown.tokens("written") == PAGE_SIZE


def test_every_reason_exists_from_the_start_and_each_has_one_rank(site: Site) -> None:
    """All counters begin at 0, so a rate is known at the first event."""
    site.attach()
    site.server.generate(prompt(97))
    families = {
        family.name: family for family in text_string_to_metric_families(site.server.metrics())
    }
    ours = {name: family for name, family in families.items() if name.startswith("hicachectl_")}
    assert {family.type for family in ours.values()} == {"counter"}
    by_kind = {
        "refused": "hicachectl_plugin_refused_pages",
        "noted": "hicachectl_plugin_noted_pages",
        "removed": "hicachectl_plugin_removed_files",
        "failed": "hicachectl_plugin_failed_operations",
    }
    for kind, name in by_kind.items():
        assert {sample.labels["reason"] for sample in ours[name].samples} == set(COUNTED[kind])
    stages = {f"hicachectl_plugin_{stage}_tokens" for stage in COUNTED["tokens"]}
    assert ours.keys() == stages | set(by_kind.values())
    theirs = families["sglang:storage_prefetch_unfulfilled_tokens"].samples[0].labels
    for family in ours.values():
        for sample in family.samples:
            ranks = {label: value for label, value in sample.labels.items() if label != "reason"}
            assert ranks.items() <= theirs.items()
            assert len(ranks) == 4


def test_a_server_says_in_its_store_who_it_is_and_what_it_refused(site: Site) -> None:
    tokens = prompt(98)
    site.attach()
    site.cold(tokens)
    _flip(site.files(tokens)[1])
    site.warm(tokens)
    site.await_stored(tokens)
    status = last_status(site)
    assert (status.model, status.page_size, status.tp_rank, status.tp_size) == (MODEL, 64, 0, 1)
    assert (status.dtype, status.layout, status.pools) == ("bfloat16", "page_first", ("kv",))
    assert status.weights
    assert status.stores == (f"file://{site.directory}",)
    assert status.refused["damaged"] == 1
    assert status.removed == {"damaged": 1}
    assert not status.failed
    assert not status.excluded


def test_a_hanging_store_holds_up_neither_the_status_nor_a_detach(site: Site) -> None:
    """The thread of the status hangs alone; once the store answers, it writes its last one."""
    site.attach()
    site.cold(prompt(99))
    with site.server.holding(site.directory, "open", "rename", "stat") as held:
        begun = time.monotonic()
        site.server.detach()
        assert time.monotonic() - begun < 10
        wait_until(lambda: held.begun, "the status is not written")
    wait_until(lambda: set(statuses(site.directory)) == {CLOSED}, "no last status")


def test_the_lines_of_the_log_begin_with_the_name_and_a_level(site: Site) -> None:
    tokens = prompt(100)
    before = len(site.server.log())
    site.attach()
    site.cold(tokens)
    _flip(site.files(tokens)[1])
    site.warm(tokens)
    lines = [line for line in site.server.log()[before:].splitlines() if "hicachectl:" in line]
    levels = {line.split("hicachectl: ")[1].split(":")[0] for line in lines}
    assert {"info", "warning"} <= levels <= {"info", "warning", "error"}
    assert any(f"hicachectl: warning: file://{site.directory}: damaged: " in line for line in lines)
    ours = ("serves kv of", ": damaged: ", "objects of this rank")
    for line in site.server.log()[before:].splitlines():
        assert "hicachectl: " in line or not any(text in line for text in ours)


def test_a_server_without_metrics_leaves_its_status_also_when_it_is_killed(
    sglang_python: Path, tmp_path: Path
) -> None:
    model, tokens = tmp_path / "tiny", prompt(101)
    tiny_llama.write_model(model, seed=7)
    with CpuServer(sglang_python, model, tmp_path / "log", metrics=False) as server:
        site = Site(server, tmp_path / "store")
        site.attach()
        site.cold(tokens)
        assert site.warm(tokens).storage == full_hit(tokens)

        def restored() -> int:
            status = statuses(site.directory).get(SERVING)
            return status.tokens.get("restored", 0) if status else 0

        wait_until(lambda: restored() == full_hit(tokens), "the status is not written again")
        assert "hicachectl: warning: metrics" not in server.log()
        running = statuses(site.directory)[SERVING]
    assert statuses(site.directory) == {ENDED: running}


def test_counters_agree_while_requests_overlap_and_sglang_itself_fails_calls(
    sglang_python: Path, tmp_path: Path
) -> None:
    """SGLang's own injector lets calls fail before they reach the plug-in.

    Overlapping requests restore the same pages, of which SGLang credits one request alone.
    """
    model, chance = tmp_path / "tiny", random.Random(5)
    tiny_llama.write_model(model, seed=7)
    prompts = [prompt(seed, 4) for seed in range(110, 114)]
    with CpuServer(
        sglang_python,
        model,
        tmp_path / "log",
        SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE="0.2",
    ) as server:
        Site(server, tmp_path / "store").attach()
        told = 0
        with ThreadPoolExecutor(4) as threads:
            for _ in range(15):
                server.flush()
                asked = [chance.choice(prompts) for _ in range(6)]
                told += sum(answer.storage for answer in threads.map(server.generate, asked))
        counts = settled(server)
    restored, found = counts.tokens("restored"), counts.tokens("found")
    assert told > 0
    assert restored == counts.get("sglang:prefetched_tokens_total")
    assert restored >= told + counts.unfulfilled(*DISCARDED)
    assert found == counts.get("sglang:storage_prefetch_hit_tokens_total")
    lost = counts.unfulfilled("storage_transfer", "host_capacity", "below_threshold")
    assert found - restored == lost > 0
