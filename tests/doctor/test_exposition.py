"""Reading the counters of a server's /metrics, and refusing pages that no server writes."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from hicachectl.doctor.exposition import Look, at_least, growth, look_at, read_look
from hicachectl.profiles.server import server_service
from tests.backends.http_scripts import serving

if TYPE_CHECKING:
    from tests.backends.http_scripts import Call

REQUESTS = "sglang:num_requests_total"
FOUND = "sglang:storage_prefetch_hit_tokens_total"
LOST = "sglang:storage_prefetch_unfulfilled_tokens_total"
# Lines of a real server, with a second rank and a second rank of data parallelism.
PAGE = b"""\
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{engine_type="unified",is_streaming="false",model_name="tiny"} 7.0
sglang:num_requests_total{engine_type="unified",is_streaming="true",model_name="tiny"} 2.0
sglang:token_usage{engine_type="unified",model_name="tiny",moe_ep_rank="0",tp_rank="0"} 0.19
# TYPE sglang:storage_prefetch_hit_tokens_total counter
sglang:storage_prefetch_hit_tokens_total{dp_rank="0",storage_backend="file",tp_rank="0"} 512.0
sglang:storage_prefetch_hit_tokens_total{dp_rank="0",storage_backend="file",tp_rank="1"} 512.0
sglang:storage_prefetch_hit_tokens_total{dp_rank="1",storage_backend="file",tp_rank="0"} 64.0
sglang:storage_prefetch_unfulfilled_tokens_total{dp_rank="0",reason="deadline",tp_rank="0"} 128.0
sglang:storage_prefetch_unfulfilled_tokens_total{dp_rank="0",reason="dropped",tp_rank="0"} 0.0
"""


def histogram(total: float, **buckets: int) -> bytes:
    """Return the histogram of uncached prompt tokens, with the requests up to each bound."""
    name = "sglang:uncached_prompt_tokens_histogram"
    lines = [f'{name}_bucket{{le="{bound[1:]}"}} {count}' for bound, count in buckets.items()]
    return "\n".join([f"{name}_sum {total}", *lines]).encode()


def test_ranks_count_once_and_data_parallel_ranks_apart() -> None:
    """Every tensor-parallel rank counts the same tokens; other labels tell other requests."""
    look = read_look(PAGE, 1.5)
    assert (look.at, look.problem) == (1.5, "")
    assert look.value(FOUND) == 512 + 64
    assert look.value(FOUND, dp_rank="1") == 64
    assert look.value(REQUESTS) == 9
    assert look.value("sglang:backuped_tokens_total") == 0
    assert look.by_label(LOST, "reason") == {"deadline": 128, "dropped": 0}


def test_growth_is_the_difference_of_two_looks() -> None:
    """A counter that appears later has grown from 0."""
    first = read_look(PAGE, 1)
    later = PAGE.replace(b"512.0", b"576.0") + b"sglang:backuped_tokens_total 320.0\n"
    grown = growth(first, read_look(later, 2))
    assert grown is not None
    assert (grown.value(FOUND), grown.value(REQUESTS)) == (64, 0)
    assert grown.value("sglang:backuped_tokens_total") == 320


@pytest.mark.parametrize("later", [PAGE.replace(b" 7.0", b" 1.0"), b"sglang:token_usage 0\n"])
def test_a_counter_that_falls_or_vanishes_tells_a_restart(later: bytes) -> None:
    assert growth(read_look(PAGE, 1), read_look(later, 2)) is None


def test_looks_without_metrics_have_no_growth() -> None:
    grown = growth(read_look(PAGE, 1), Look(2, None, "why"))
    assert grown is not None
    assert (grown.samples, grown.problem) == (None, "why")


def test_the_sum_bounds_the_requests_of_a_wide_bucket() -> None:
    """Two prompts of 138 tokens lie in the bucket up to 300, but none can have 256."""
    look = read_look(histogram(276, _100=0, _300=2, _500=2), 1)
    assert at_least(look, 256) == (0, 0)
    assert at_least(look, 138) == (0, 2)
    assert at_least(look, 64) == (2, 2)


def test_requests_beyond_a_bound_are_certain() -> None:
    """Requests of 330, 330 and 10 tokens: two have 256, and the buckets do not tell about 320."""
    look = read_look(histogram(670, _100=1, _300=1, _500=3), 1)
    assert at_least(look, 256) == (2, 2)
    assert at_least(look, 320) == (0, 2)
    assert at_least(read_look(PAGE, 1), 256) == (0, 0)


def test_odd_buckets_are_counted_once() -> None:
    """A hostile histogram has no bound that breaks the sums."""
    odd = {"_-Inf": 1, "_NaN": 2, "_much": 2, "_+Inf": 2, "_1e400": 2, "_100": 1, "_-5": 1}
    assert at_least(read_look(histogram(9, **odd), 1), 50) == (1, 1)


@pytest.mark.parametrize(
    "value", ["NaN", "-1", "1e999", "-Inf", "9" * 5000, "9" * 500, "0x10", "", "much"]
)
def test_a_value_that_is_no_count_is_a_problem(value: str) -> None:
    look = read_look(f"{REQUESTS} {value}\n".encode(), 1)
    assert look.samples is None
    assert "not valid Prometheus text" in look.problem
    assert len(look.problem) < 200


@pytest.mark.parametrize(
    "labels",
    [b'{a="\xff"}', b'{a="b', b"{", b"{,,,}", b'{a="\\"}', b'{__name__="x"}', b'{a="b",a="b"}'],
)
def test_hostile_labels_are_a_problem(labels: bytes) -> None:
    look = read_look(REQUESTS.encode() + labels + b" 1\n", 1)
    assert look.samples is None
    assert look.problem.isprintable()


@pytest.mark.parametrize(
    "page",
    [
        REQUESTS.encode() + b"{" + b",".join(b'a%d="b"' % i for i in range(2000)) + b"} 1\n",
        b"".join(b'%s{a="%d"} 1\n' % (REQUESTS.encode(), i) for i in range(150_000)),
        b"".join(b'%s{reason="r%d"} 1\n' % (LOST.encode(), i) for i in range(20_000)),
    ],
    ids=["a long line", "many lines", "many reasons"],
)
def test_a_page_beyond_all_servers_is_refused(page: bytes) -> None:
    """The parser, or a check of each reason, would take minutes."""
    assert "larger than the page of any SGLang server" in read_look(page, 1).problem


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, PAGE, ""),
        (404, b"{}", "--enable-metrics"),
        (200, b"<html>", "--enable-metrics"),
        (200, b"node_load1 0.3\n", "--enable-metrics"),
        (500, b"Internal", "HTTP 500"),
    ],
)
def test_an_answer_is_a_look_or_a_problem(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, said: str
) -> None:
    """The page below the URL's path is asked for, with the server's key; failures are told."""
    monkeypatch.setenv("HICACHECTL_API_KEY", "sesame")
    calls: list[tuple[str, str]] = []

    def script(call: Call) -> None:
        calls.append((call.path, call.headers["authorization"]))
        call.answer(body, status)

    with serving(script) as address:
        service, base = server_service(f"http://{address}/worker", "--server", timeout_s=10)
        with closing(service):
            look = look_at(service, base)
    assert calls == [("/worker/metrics", "Bearer sesame")]
    assert (look.samples is None) == bool(said)
    assert said in look.problem
    assert "sesame" not in look.problem


def test_nobody_there_is_a_problem() -> None:
    with serving(lambda call: call.answer(b"")) as address:
        pass
    service, base = server_service(f"http://{address}", "--server", timeout_s=10)
    with closing(service):
        look = look_at(service, base)
    assert "connection refused" in look.problem
