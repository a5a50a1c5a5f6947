"""Pulling through a server that answers, refuses, is busy, fails and hangs, over real sockets."""

from __future__ import annotations

import itertools
import json
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import FormatError, ProfileError, StoreUnavailable, UsageError
from hicachectl.formats.hashing import page_hashes_hex, restorable_pages
from hicachectl.prewarming import through_server
from hicachectl.prewarming.through_server import (
    Prefix,
    PulledRequest,
    ThroughServer,
    dp_ranks,
    prefix_of,
)
from hicachectl.requests.chains import Hashing
from hicachectl.requests.forms import Request
from tests.backends.http_scripts import Call, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Play = Callable[..., tuple[list[PulledRequest], list[Call]]]

FAST: dict[str, Any] = {"pause_s": 0.005, "api_key": "", "request_timeout_s": 10.0}
PATIENCE_S = 60
PATIENT: dict[str, Any] = {**FAST, "request_timeout_s": PATIENCE_S}
PREFIXES = [
    Prefix(number, 8, Request("test", list(range(number, number + 9)))) for number in range(6)
]


def answer_of(body: bytes, **meta: Any) -> bytes:
    """Return SGLang's reply to a /generate request."""
    asked = len(json.loads(body)["input_ids"])
    details = {"device": 0, "host": 4, "storage": asked - 5, "storage_backend": "file"}
    found = {
        "id": "x",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": asked,
        "cached_tokens": asked - 1,
        "cached_tokens_details": details,
        **meta,
    }
    return json.dumps({"text": " a", "output_ids": [1], "meta_info": found}).encode()


@pytest.fixture
def play() -> Play:
    """A function that pulls PREFIXES from a scripted server and returns results and requests."""

    def pull(
        script: Callable[[Call, int], None], **options: Any
    ) -> tuple[list[PulledRequest], list[Call]]:
        calls: list[Call] = []
        lock = threading.Lock()

        def numbered(call: Call) -> None:
            with lock:
                calls.append(call)
                number = len(calls) - 1
            script(call, number)

        prefixes = options.pop("prefixes", PREFIXES)
        deadline = options.pop("deadline", None)
        with serving(numbered) as place:
            server = ThroughServer(f"http://{place}", **{**FAST, **options})
            server.pull(prefixes, deadline)
            return server.pulled, calls

    return pull


def answer(call: Call, _number: int) -> None:
    call.answer(answer_of(call.body))


def test_each_prefix_is_asked_for_once_and_said_where_it_came_from(play: Play) -> None:
    pulled, calls = play(answer, jobs=3, api_key="secret")
    assert sorted(result["request"] for result in pulled) == list(range(6))
    sources = {"device": 0, "host": 4, "storage": 4}
    assert all(
        (r["cached_tokens"], r["cached_tokens_details"], r["error"]) == (8, sources, None)
        for r in pulled
    )
    bodies = [json.loads(call.body) for call in calls]
    assert sorted(body["input_ids"] for body in bodies) == [p.request.token_ids for p in PREFIXES]
    assert bodies[0]["sampling_params"]["max_new_tokens"] == 1
    assert {call.path for call in calls} == {"/generate"}
    assert {call.headers["authorization"] for call in calls} == {"Bearer secret"}
    assert "routed_dp_rank" not in bodies[0]


def test_the_key_comes_from_the_environment(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHECTL_API_KEY", " from-env\n")
    _, calls = play(answer, api_key=None)
    assert {call.headers["authorization"] for call in calls} == {"Bearer from-env"}


@pytest.mark.parametrize(
    ("info", "ranks"),
    [
        ({}, (None,)),
        ({"dp_size": 1, "attn_dp_size": 1}, (None,)),
        ({"dp_size": 2}, (0, 1)),
        ({"dp_size": 1, "attn_dp_size": 3}, (0, 1, 2)),
        ({"dp_size": None, "attn_dp_size": "2"}, (None,)),
    ],
)
def test_dp_ranks_are_replicas_times_attention_groups(
    info: dict[str, Any], ranks: tuple[int | None, ...]
) -> None:
    assert dp_ranks(info) == ranks


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"dp_size": 10**6}, "server_info: dp_size: must be at most 4096, but is 1000000; check "),
        ({"dp_size": 4096, "attn_dp_size": 4096}, "dp_size x attn_dp_size: must be at most "),
    ],
)
def test_more_ranks_than_a_server_has_are_refused(info: dict[str, Any], said: str) -> None:
    with pytest.raises(ProfileError, match=f"{said}.*that --through-server names an SGLang server"):
        dp_ranks(info)


def test_no_more_requests_than_jobs_are_under_way(play: Play) -> None:
    lock, running, most = threading.Lock(), set[int](), [0]
    together = threading.Barrier(2, timeout=PATIENCE_S)

    def slow(call: Call, number: int) -> None:
        with lock:
            running.add(number)
            most[0] = max(most[0], len(running))
        if number < 2:
            together.wait()
        time.sleep(0.05)  # time for a third to arrive
        with lock:
            running.discard(number)
        call.answer(answer_of(call.body))

    play(slow, jobs=2, request_timeout_s=PATIENCE_S)
    assert most == [2]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_it_at_once(play: Play, status: int) -> None:
    calls: list[int] = []

    def refuse(call: Call, number: int) -> None:
        calls.append(number)
        call.answer(b'{"error": "Unauthorized"}', status)

    with pytest.raises(StoreUnavailable, match="HICACHECTL_API_KEY"):
        play(refuse, jobs=1)
    assert len(calls) == 1


@pytest.mark.parametrize("status", [404, 302])
def test_what_is_no_sglang_server_ends_it_at_once(play: Play, status: int) -> None:
    with pytest.raises(StoreUnavailable, match="/generate"):
        play(lambda call, _: call.answer(b"no", status))
    for body in (b"<html>", b"[]", b'{"meta_info": 3}', b'{"meta_info": {}}'):
        with pytest.raises(StoreUnavailable, match="the answer is not from an SGLang server"):
            play(lambda call, _, body=body: call.answer(body))


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_given_time(play: Play, status: int) -> None:
    times: list[float] = []

    def busy_first(call: Call, number: int) -> None:
        times.append(time.monotonic())
        if number < 5:
            call.answer(b"busy", status)
        else:
            call.answer(answer_of(call.body))

    pulled, calls = play(busy_first, jobs=1)
    assert [result["error"] for result in pulled] == [None] * 6
    assert len(calls) == 11
    pauses = [b - a for a, b in itertools.pairwise(times[:6])]
    assert sum(pauses) >= 0.005 * (1 + 2 + 4 + 8 + 16)  # each twice as long as the last


@pytest.mark.slow
def test_a_busy_server_says_how_long(play: Play) -> None:
    times: list[float] = []

    def busy_first(call: Call, number: int) -> None:
        times.append(time.monotonic())
        if number == 0:
            call.answer(b"", 429, "Retry-After: 1")
        else:
            call.answer(answer_of(call.body))

    play(busy_first, jobs=1)
    assert times[1] - times[0] >= 1


def test_a_server_that_stays_busy_is_given_up(play: Play) -> None:
    with pytest.raises(StoreUnavailable, match="HTTP 429: full"):
        play(lambda call, _: call.answer(b"full", 429), busy_patience_s=0.1)


def test_a_server_error_is_tried_again(play: Play) -> None:
    def fail_twice(call: Call, number: int) -> None:
        if number < 2:
            call.answer(b"oops", 500)
        else:
            call.answer(answer_of(call.body))

    pulled, calls = play(fail_twice, jobs=1)
    assert [result["error"] for result in pulled] == [None] * 6
    assert len(calls) == 8


def test_a_server_that_only_fails_is_given_up(play: Play) -> None:
    with pytest.raises(StoreUnavailable, match="HTTP 500: oops"):
        play(lambda call, _: call.answer(b"oops", 500), jobs=1)


def test_one_request_that_always_fails_is_reported_and_the_rest_go_on(play: Play) -> None:
    def fail_third(call: Call, _number: int) -> None:
        if json.loads(call.body)["input_ids"][0] == 2:
            call.answer(b"oops", 500)
        else:
            call.answer(answer_of(call.body))

    pulled, _ = play(fail_third, jobs=1)
    errors = {result["request"]: result["error"] for result in pulled if result["error"]}
    assert errors.keys() == {2}
    assert "HTTP 500: oops" in (errors[2] or "")


def test_a_refused_request_is_reported_and_not_repeated(play: Play) -> None:
    reason = b'{"error": {"message": "input is longer than the context\x1b[2J"}}'
    pulled, calls = play(lambda call, _: call.answer(reason, 400))
    assert len(calls) == 6
    assert all(
        "HTTP 400" in (r["error"] or "") and "longer than the context" in (r["error"] or "")
        for r in pulled
    )
    assert all((r["error"] or "").isprintable() for r in pulled)


def test_an_aborted_request_is_no_success(play: Play) -> None:
    reason = {"type": "abort", "message": "The request queue is full."}
    pulled, _ = play(
        lambda call, _: call.answer(answer_of(call.body, finish_reason=reason, cached_tokens=0))
    )
    assert {result["error"] for result in pulled} == {"The request queue is full."}


def test_details_may_be_absent(play: Play) -> None:
    meta = {"cached_tokens": 0, "cached_tokens_details": None}
    pulled, _ = play(lambda call, _: call.answer(answer_of(call.body, **meta)))
    assert {
        (r["cached_tokens"], tuple(r["cached_tokens_details"] or ()), r["error"]) for r in pulled
    } == {(0, (), None)}


def test_a_server_that_hangs_is_given_up(play: Play) -> None:
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no answer within 0.1 s"):
        play(lambda call, _: call.hang(), request_timeout_s=0.1, jobs=2)
    assert time.monotonic() - started < 10


def test_the_deadline_holds_while_a_server_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is a tenth of a second away when the first two prefixes are answered."""
    now = [0.0]
    monkeypatch.setattr(through_server, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def hang_later(call: Call) -> None:
        if json.loads(call.body)["input_ids"][0] < 2:
            call.answer(answer_of(call.body))
        else:
            call.hang()

    with serving(hang_later) as place:
        server = ThroughServer(f"http://{place}", **PATIENT, jobs=2)

        def note(_requests: int) -> None:
            now[0] = 99.9 if len(server.pulled) == 2 else 0.0

        server.pull(PREFIXES, 100.0, note)
    assert sorted(result["request"] for result in server.pulled) == [0, 1]
    assert not server.complete


def test_an_interruption_loses_no_answer_and_is_not_kept_waiting() -> None:
    """The exception is raised where a signal's would be, while other requests are under way."""

    def hang_later(call: Call) -> None:
        if json.loads(call.body)["input_ids"][0]:
            call.hang()
        call.answer(answer_of(call.body))

    def interrupt(_requests: int) -> None:
        raise KeyboardInterrupt

    with serving(hang_later) as place:
        server = ThroughServer(f"http://{place}", **PATIENT, jobs=4)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            server.pull(PREFIXES, on_done=interrupt)
        assert time.monotonic() - started < PATIENCE_S / 2
        assert not [t for t in threading.enumerate() if t.name.startswith("pull-")]
    assert [result["request"] for result in server.pulled] == [0]


def test_answers_that_came_during_the_interruption_are_kept() -> None:
    def interrupt(_requests: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while len(server.pulled) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with serving(lambda call: call.answer(answer_of(call.body))) as place:
        server = ThroughServer(f"http://{place}", **FAST, jobs=3)
        with pytest.raises(KeyboardInterrupt):
            server.pull(PREFIXES[:3], on_done=interrupt)
    assert sorted(result["request"] for result in server.pulled) == [0, 1, 2]


def test_what_is_wrong_with_a_request_is_raised_to_the_caller(play: Play) -> None:
    def prefixes() -> Iterator[Prefix]:
        yield PREFIXES[0]
        raise FormatError("line 2: not JSON")

    with pytest.raises(FormatError, match="line 2"):
        play(answer, prefixes=prefixes())


@pytest.mark.parametrize("url", ["host:30000", "http://u:p@host", "ftp://host", "http://h/?a=1"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--through-server"):
        ThroughServer(url)


@pytest.mark.parametrize("bigram", [False, True])
def test_a_prefix_has_the_tokens_that_its_pages_need(bigram: bool) -> None:
    hashing = Hashing(4, bigram)
    request = Request("x", list(range(100, 140)), "lora", "salt")
    for pages in range(9):
        prefix = prefix_of(7, request, pages, hashing)
        count = len(prefix.request.token_ids)
        assert restorable_pages(count, 4, bigram=bigram) == pages
        assert restorable_pages(count - 1, 4, bigram=bigram) == max(pages - 1, 0)
        whole = page_hashes_hex(request.token_ids, 4, bigram=bigram)
        assert page_hashes_hex(prefix.request.token_ids, 4, bigram=bigram)[:pages] == whole[:pages]
        asked = prefix.request
        assert (prefix.number, asked.extra_key, asked.cache_salt) == (7, "lora", "salt")


def test_the_token_beyond_the_last_page_may_be_any() -> None:
    request = Request("x", list(range(8)))
    assert prefix_of(0, request, 2, Hashing(4)).request.token_ids == [*range(8), 7]
    with pytest.raises(
        FormatError, match=r"tokens \(8\) are too few for the pages to restore \(3\)"
    ):
        prefix_of(0, request, 3, Hashing(4))
