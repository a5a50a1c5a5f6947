"""What `doctor` says of a server's counters, by the texts that a real server shows.

tests/conformance/test_doctor_live.py has the real server itself.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.statuses import SERVING, RankStatus
from hicachectl.checks.reasons import reason_named
from hicachectl.doctor.checks import verdict_of
from hicachectl.doctor.exposition import Look, read_look
from hicachectl.doctor.live import live_checks
from hicachectl.doctor.live_server import LiveServer
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.models.server_info import ServerDeployment
from hicachectl.formats.plugin_status import PluginStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.doctor.checks import Check

BOUNDS = (100, 300, 500, 1000, 10_000)
UNCACHED = "sglang:uncached_prompt_tokens_histogram"
# A million pages were found, one of them could not be read; the device had some already.
HEALTHY = {
    "storage_prefetch_hit_tokens_total": 64e6,
    "prefetched_tokens_total": 64e6 - 64,
    'storage_prefetch_unfulfilled_tokens_total{reason="storage_transfer"}': 64,
    'storage_prefetch_unfulfilled_tokens_total{reason="below_threshold"}': 640_000,
    'storage_prefetch_unfulfilled_tokens_total{reason="device_covered"}': 40e6,
    'storage_prefetch_deferred_tokens_total{reason="host_capacity"}': 1000,
    "backuped_tokens_total": 32e6,
    'hicache_backup_tokens_total{pool="kv"}': 32e6,
    'hicache_dropped_tokens_total{pool="kv",reason="host_pressure"}': 64,
    'cached_tokens_total{cache_source="storage"}': 64e6,
    "prompt_tokens_total": 128e6,
    "num_requests_total": 64_000,
}


def page(counters: Mapping[str, float], *uncached: int, at: float = 1.0) -> Look:
    """Return a look at counters. uncached: tokens that each request has computed."""
    lines = [f"sglang:{name} {float(value)}" for name, value in counters.items()]
    for bound in (*BOUNDS, float("inf")):
        label = "+Inf" if bound == float("inf") else f"{bound:.1f}"
        lines.append(f'{UNCACHED}_bucket{{le="{label}"}} {sum(n <= bound for n in uncached)}')
    lines += [f"{UNCACHED}_sum {sum(uncached)}", f"{UNCACHED}_count {len(uncached)}"]
    look = read_look("\n".join(lines).encode(), at)
    assert look.samples is not None, look.problem
    return look


def server(backend: str = "file", **info: Any) -> LiveServer:
    flags = DeploymentFlags(model="tiny", page_size=64, prefetch_threshold=256)
    return LiveServer(
        url="http://h:1",
        info=info,
        settings={"hicache_storage_backend": backend},
        deployment=ServerDeployment(flags=flags, model_path="/model", settings={}),
    )


def judged(first: Look, second: Look | None = None, **options: Any) -> dict[str, Check]:
    return {
        check.name: check
        for check in live_checks(server(), first, second or first, **options)
        if check.status != "ok"
    }


def requests(*uncached: int, **counters: float) -> Look:
    """Return a look at a server that has answered requests and cached none of their tokens."""
    return page(
        {"num_requests_total": len(uncached), "prompt_tokens_total": sum(uncached), **counters},
        *uncached,
    )


def test_a_healthy_server_has_no_warning() -> None:
    """Neither one lost page in a million, nor tokens that the device had already, are one."""
    assert judged(page(HEALTHY)) == {}
    (found,) = [c for c in live_checks(server(), page(HEALTHY), page(HEALTHY)) if c.name == "found"]
    assert "64000000 tokens were found" in found.detail
    assert "since the server's start" in found.evidence


@pytest.mark.parametrize(
    ("reason", "lost", "status"),
    [
        ("storage_transfer", 0.04, "ok"),
        ("storage_transfer", 0.2, "warn"),
        ("storage_transfer", 0.8, "fail"),
        ("dropped", 1.0, "warn"),
        ("host_capacity", 1.0, "warn"),
        ("deadline", 0.3, "warn"),
        ("below_threshold", 0.9, "warn"),
        ("device_covered", 1.0, "ok"),
        ("of_a_later_release", 0.9, "warn"),
    ],
)
def test_a_loss_is_judged_by_its_share_and_kind(reason: str, lost: float, status: str) -> None:
    """Losses by settings, by load or for an unknown reason warn and never fail."""
    counters = {
        "storage_prefetch_hit_tokens_total": 64_000,
        f'storage_prefetch_unfulfilled_tokens_total{{reason="{reason}"}}': 64_000 * lost,
        "num_requests_total": 9,
    }
    (check,) = [
        c for c in live_checks(server(), page(counters), page(counters)) if c.name == reason
    ]
    assert check.status == status
    assert f"{lost:.0%} of the tokens found" in check.detail
    assert f"{64_000 * lost:.0f} tokens of 64000 tokens" in check.evidence
    known = reason_named(reason)
    assert bool(check.next) == (status != "ok")
    if known is not None:
        assert known.meaning.rstrip(".") in check.detail
        assert (f"explain {reason}" in check.next) == (status != "ok")


def test_one_request_is_a_fault_but_no_rate() -> None:
    """Pages that cannot be read are told at once; a few short hits are left open."""
    found = {"storage_prefetch_hit_tokens_total": 192, "num_requests_total": 1}
    name = "storage_prefetch_unfulfilled_tokens_total"
    unread = judged(page({**found, f'{name}{{reason="storage_transfer"}}': 192}))
    assert unread["storage_transfer"].status == "fail"
    short = judged(page({**found, f'{name}{{reason="below_threshold"}}': 192}))
    assert short["below_threshold"].status == "unknown"


def test_growth_counts_where_something_moved() -> None:
    """What was lost before the first look is not told while the store gives what it has."""
    name = 'storage_prefetch_unfulfilled_tokens_total{reason="storage_transfer"}'
    lost = {"storage_prefetch_hit_tokens_total": 64_000, name: 64_000, "num_requests_total": 9}
    served = {**lost, "storage_prefetch_hit_tokens_total": 96_000, "num_requests_total": 12}
    assert judged(page(lost))["storage_transfer"].status == "fail"
    assert judged(page(lost), page(served, at=11)) == {}
    worse = {**served, "storage_prefetch_hit_tokens_total": 128_000, name: 80_000}
    found = judged(page(served), page(worse, at=11))["storage_transfer"]
    assert (found.status, found.evidence) == (
        "fail",
        "16000 tokens of 32000 tokens, in 10 s between two looks",
    )


def test_reads_that_the_policy_breaks_off_are_no_failure() -> None:
    """SGLang counts the rest of a read under best_effort as one that the store did not give."""
    name = 'storage_prefetch_unfulfilled_tokens_total{reason="storage_transfer"}'
    look = page({"storage_prefetch_hit_tokens_total": 64_000, name: 64_000})
    eager = server()
    settings = {**eager.settings, "hicache_storage_prefetch_policy": "best_effort"}
    (check,) = (
        one
        for one in live_checks(replace(eager, settings=settings), look, look)
        if one.name == "storage_transfer"
    )
    assert check.status == "warn"


def test_late_writes_alone_are_no_traffic() -> None:
    """What was found before the first look is told while no request ends between the looks."""
    later = {**HEALTHY, "backuped_tokens_total": HEALTHY["backuped_tokens_total"] + 64}
    checks = live_checks(server(), page(HEALTHY), page(later, at=11))
    (found,) = [check for check in checks if check.name == "found"]
    assert found.status == "ok"
    assert "since the server's start" in found.evidence


def test_one_unlucky_request_between_two_looks_is_no_failure() -> None:
    """Growth of few tokens is judged with the totals beside it."""
    name = 'storage_prefetch_unfulfilled_tokens_total{reason="storage_transfer"}'
    found = HEALTHY["storage_prefetch_hit_tokens_total"] + 320
    later = {**HEALTHY, "storage_prefetch_hit_tokens_total": found, name: 64 + 320}
    assert judged(page(HEALTHY), page(later, at=11)) == {}


def test_a_restart_between_two_looks_is_told() -> None:
    found = judged(page(HEALTHY), page({"num_requests_total": 2}))
    assert found["metrics"].status == "unknown"
    assert "restarted" in found["metrics"].detail


def test_metrics_that_are_off_leave_losses_unknown() -> None:
    off = Look(1, None, "The server has no /metrics; start the server with --enable-metrics")
    found = judged(off)
    assert list(found) == ["metrics"]
    assert (found["metrics"].status, found["metrics"].next) == (
        "unknown",
        "start the server with --enable-metrics",
    )


@pytest.mark.parametrize("uncached", [(), (6,)])
def test_a_server_without_requests_is_unknown(uncached: tuple[int, ...]) -> None:
    """SGLang's own warm-up is a request of some tokens."""
    assert verdict_of(judged(requests(*uncached)).values()) == "unknown"


def test_prompts_below_the_threshold_are_told() -> None:
    """They move no other counter. One long prompt among ten shows that look-ups happen."""
    found = judged(requests(*[138] * 9))
    assert found["found"].status == "warn"
    assert "at most 2 of 9 requests" in found["found"].detail
    assert "prefetch_threshold is 256" in found["found"].evidence
    assert judged(requests(*[138] * 8, 900, 900))["found"].status == "unknown"


def test_requests_that_were_given_are_not_asked_for() -> None:
    look = requests(1000, 1000)
    assert "--trace" in judged(look)["found"].next
    assert judged(look, has_requests=True)["found"].next.startswith("send these requests")


def test_short_rests_of_long_prompts_are_healthy() -> None:
    """The device and host pools have the rest, so that the store need not be asked."""
    counters = {
        "num_requests_total": 9,
        "prompt_tokens_total": 9000,
        'cached_tokens_total{cache_source="device"}': 8000,
    }
    assert judged(page(counters, *[111] * 9))["found"].status == "unknown"


def test_tokens_that_never_reach_the_store_are_told() -> None:
    """Totals say nothing of a store that was attached later, to which older tokens never go."""
    look = requests(*[2000] * 9, **{'hicache_backup_tokens_total{pool="kv"}': 18_000})
    assert "written" not in judged(look)
    checks = live_checks(server(hicache_storage_backend="file"), look, look)
    (check,) = [check for check in checks if check.name == "written"]
    assert check.status == "warn"
    assert "wrote none" in check.detail
    assert judged(requests(at_zero=0), look)["written"].status == "warn"


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("hicache_backup_dropped", "hicache_backup_dropped_tokens_total"),
        ("deferred", 'storage_prefetch_deferred_tokens_total{reason="host_capacity"}'),
        ("host_pressure", 'hicache_dropped_tokens_total{pool="kv",reason="host_pressure"}'),
        ("hicache_prefetch_aux_alloc_failed", "hicache_prefetch_aux_alloc_failed_tokens_total"),
    ],
)
def test_other_losses_have_checks_of_their_own(name: str, lost: str) -> None:
    found = judged(page({**HEALTHY, lost: 40e6}))
    assert {check.name: check.status for check in found.values()} == {name: "warn"}
    assert "explain" in found[name].next


def status(**members: Any) -> RankStatus:
    told = PluginStatus(
        release="1", host="gpu1", pid=7, model="tiny", written_ns=time.time_ns(), **members
    )
    return RankStatus(told, SERVING)


def plugin(*statuses: RankStatus, look: Look | None = None) -> dict[str, Check]:
    look = look or page({"num_requests_total": 3})
    checks = live_checks(server("dynamic"), look, look, statuses)
    return {check.name: check for check in checks if check.status not in ("ok", "unknown")}


def test_a_store_that_the_plugin_refuses_is_the_first_failure() -> None:
    """Without metrics of the plug-in, the status files of the ranks tell; ranks count once."""
    ranks = [
        status(tp_rank=rank, tokens={"asked": 640, "found": 0}, refused={"foreign": 10})
        for rank in (0, 1)
    ]
    found = plugin(*ranks)
    assert list(found) == ["foreign"]
    assert found["foreign"].status == "fail"
    assert "640 tokens of 640 tokens" in found["foreign"].evidence
    assert found["foreign"].next.endswith("hicachectl explain foreign")


def test_an_excluded_rank_is_a_failure_with_its_words() -> None:
    excluded = {"unnamed-weights": "file:///kv: the weights cannot be read"}
    found = plugin(status(excluded=excluded))
    assert found["unnamed-weights"].status == "fail"
    assert "on gpu1" in found["unnamed-weights"].detail
    assert "the weights cannot be read" in found["unnamed-weights"].detail


def test_excluded_ranks_are_counted() -> None:
    """One check tells how many ranks a reason excludes."""
    ranks = [status(tp_rank=rank, excluded={"unserved": "why"}) for rank in range(3)]
    found = plugin(*ranks)
    assert found["unserved"].detail == (
        "The plug-in on gpu1, like 2 other ranks, reads and writes nothing (unserved): why"
    )


def test_ranks_of_others_and_few_refusals_are_no_failure() -> None:
    """Statuses stay when a server ends; other models use the store as well."""
    old = status(refused={"foreign": 10})._replace(standing="closed")
    busy = status(tokens={"found": 640_000}, refused={"foreign": 10, "stale": 9000})
    other = RankStatus(
        PluginStatus(
            release="1",
            host="gpu2",
            pid=7,
            model="other",
            written_ns=1,
            excluded={"unserved": "why"},
        ),
        SERVING,
    )
    assert plugin(old, busy, other) == {}


def test_metrics_of_the_plugin_win_over_its_statuses() -> None:
    """They are the server's own, and have growth."""
    name = "hicachectl_plugin"
    text = (
        f'{name}_refused_pages_total{{tp_rank="0",reason="damaged"}} 10\n'
        f'{name}_refused_pages_total{{tp_rank="0",reason="foreign"}} 0\n'
        f'{name}_found_tokens_total{{tp_rank="0"}} 1280\nsglang:num_requests_total 3\n'
    )
    found = plugin(status(refused={"foreign": 10}), look=read_look(text.encode(), 1))
    assert {name: check.status for name, check in found.items()} == {"damaged": "warn"}


def test_a_plugin_that_tells_nothing_is_unknown() -> None:
    """Neither metrics nor a status file that can be read: what it refuses is not called clean."""
    extra = {"module_path": "hicachectl.backends.sglang"}
    settings = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
    ours = replace(server(), settings=settings)
    look = page({"num_requests_total": 3})

    def told(one: LiveServer, seen: Look, *statuses: RankStatus) -> list[str]:
        return [c.status for c in live_checks(one, seen, seen, statuses) if c.name == "plug-in"]

    assert told(ours, look) == ["unknown"]
    assert told(ours, look, status()) == []
    assert told(server("dynamic"), look) == []  # another package's backend
    assert told(ours, Look(1, None, "why; next")) == []  # the check `metrics` says so


def test_an_absent_histogram_is_no_count_of_short_requests() -> None:
    """A server that does not tell the lengths of its prompts had, perhaps, long ones."""
    silent = read_look(b"sglang:num_requests_total 10\nsglang:prompt_tokens_total 5000\n", 1)
    assert "requests left" not in judged(silent)["found"].evidence
    assert "0 of 10 requests left" in judged(requests(*[10] * 10, x=0))["found"].detail


def test_nothing_is_judged_without_a_store() -> None:
    """Counters stay when a backend is detached; the settings tell that none is attached."""
    look = page(HEALTHY)
    assert live_checks(LiveServer(url="http://h:1", problem="no"), look, look) == []
    assert live_checks(LiveServer(url="http://h:1"), look, look) == []
