"""`prewarm --through-server`: requests to servers, and servers that refuse, fail or hang."""

from __future__ import annotations

import json
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.cli.demo_store import PROFILE
from hicachectl.prewarming import through_server
from tests.backends.http_scripts import Call, serving
from tests.move.migrations import demo_store, profile_file
from tests.paused import Paused, paused
from tests.prewarming.test_cli import prompts, strangers, warmed
from tests.prewarming.test_prewarm import PAGES, tokens
from tests.prewarming.test_through_server import answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

    Script = Callable[[Call, int], None]

SIZE = PROFILE.page_size
QUICK_S = 60  # half the time limit of one request


class Server:
    """A scripted SGLang server, which records the bodies of /generate requests."""

    def __init__(self, script: Script, **info: Any) -> None:
        self._script, self._info = script, info
        self._lock = threading.Lock()
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()

    def __call__(self, call: Call) -> None:
        if call.path == "/server_info":
            self.keys.add(call.headers.get("authorization", ""))
            call.answer(json.dumps({"dp_size": 1, **self._info}).encode())
        elif call.path == "/generate":
            with self._lock:
                self.asked.append(json.loads(call.body))
                number = len(self.asked) - 1
            self.keys.add(call.headers.get("authorization", ""))
            self._script(call, number)
        else:
            call.answer(b"{}", 404)


def answer(call: Call, _number: int) -> None:
    call.answer(answer_of(call.body))


@pytest.fixture
def stores(tmp_path: Path) -> tuple[object, ...]:
    """A target and the options that fill it."""
    source = demo_store(tmp_path / "source", PAGES)
    profile = profile_file(tmp_path / "profile.toml")
    return tmp_path / "target", "--from", source, "--profile", profile


@pytest.fixture
def started() -> Iterator[float]:
    """Fail the test if it takes too long; yield its start."""
    began = time.monotonic()
    yield began
    assert time.monotonic() - began < QUICK_S


def test_servers_are_asked_for_what_the_store_has(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHECTL_API_KEY", "secret")
    asked = prompts(tmp_path / "asked.jsonl", 10, 12, 3)
    server = Server(answer)
    with serving(server) as place:
        document = warmed(
            invoke, *stores, "--token-ids", asked, "--through-server", f"http://{place}"
        )
    # Of 10 pages, 8 are usable; of 3 pages none, since no state is at their end.
    wanted = [[*tokens(), 1][: pages * SIZE + 1] for pages in (8, 12)]
    assert sorted((body["input_ids"] for body in server.asked), key=len) == wanted
    assert all(body["sampling_params"]["max_new_tokens"] == 1 for body in server.asked)
    assert not any("routed_dp_rank" in body for body in server.asked)
    assert server.keys == {"Bearer secret"}
    (pulled,) = document["pulled"]
    assert (pulled["server"], pulled["failed"]) == (f"http://{place}", 0)
    assert (pulled["complete"], pulled["error"]) == (True, None)
    rows = sorted(pulled["requests"], key=lambda row: row["request"])
    assert [(row["request"], row["tokens"], row["error"]) for row in rows] == [
        (0, 8 * SIZE, None),
        (1, 12 * SIZE, None),
    ]
    assert rows[0]["cached_tokens"] == 8 * SIZE
    assert rows[0]["cached_tokens_details"]["storage"] == 8 * SIZE - 4
    assert pulled["cached_tokens"] == 20 * SIZE


def deployed(**changes: Any) -> dict[str, Any]:
    """Return the /server_info of a server of the demo's model."""
    return {
        "model_path": PROFILE.model, "served_model_name": PROFILE.model, "tp_size": PROFILE.tp,
        "page_size": SIZE, "hicache_mem_layout": "page_first", "version": PROFILE.sglang, **changes,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "remedy", "converted"),
    [
        ({"tp_size": 4}, "--to-tp 4", True),
        ({"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}, "--to-tp 4", True),
        ({"pp_size": 2}, "--to-pp 2", True),
        ({"served_model_name": "other/name"}, "--to-model other-name", True),
        ({"hicache_mem_layout": "page_first_direct"}, "--to-layout page_first_direct", True),
        ({"page_size": 64}, "pages of another page_size cannot be converted", False),
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            "kv_cache_dtype 'float8_e4m3fn' instead of 'bfloat16'",
            False,
        ),
    ],
)
def test_pages_that_a_live_server_does_not_ask_for_are_not_usable(
    invoke: Invoke,
    stores: tuple[object, ...],
    tmp_path: Path,
    changes: dict[str, Any],
    remedy: str,
    converted: bool,
) -> None:
    asked = ("--token-ids", prompts(tmp_path / "asked.jsonl", 12), "--min-usable", "0.9")
    server = Server(answer, **deployed(**changes))
    with serving(server) as place:
        through = ("--through-server", f"http://{place}")
        document = warmed(invoke, *stores, *asked, *through, exit_code=4)
        assert (document["copied_pages"], document["usable_tokens"]) == (12, 0)
        assert f"http://{place}: serves " in document["stderr"]
        assert remedy in document["stderr"]
        assert server.asked == []
        again = warmed(invoke, stores[0], *stores[3:], *asked, *through, exit_code=4)
        assert (again["usable_tokens"], again["deployment"]) == (0, document["deployment"])
        if converted:
            options = remedy.split()
            if "layout" in remedy:  # what the first run wrote has these keys, and other bytes
                document = warmed(invoke, *stores, *asked, *through, *options, exit_code=4)
                assert (document["failed"], document["usable_tokens"]) == (12, 0)
                stores = (tmp_path / "new", *stores[1:])
            document = warmed(invoke, *stores, *asked, *through, *options)
            assert document["usable_tokens"] == 12 * SIZE
            assert "serves" not in document["stderr"]
            assert server.asked


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "served"), [(128, 128), (129, 0), (None, 0)])
def test_what_a_live_server_would_not_fetch_is_not_served(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path, threshold: int | None, served: int
) -> None:
    """The profile of the store states 16; that of the server counts."""
    asked = ("--token-ids", prompts(tmp_path / "asked.jsonl", 8), "--min-usable", "1")
    extra = "{}" if threshold is None else json.dumps({"prefetch_threshold": threshold})
    server = Server(answer, **deployed(hicache_storage_backend_extra_config=extra))
    with serving(server) as place:
        through = ("--through-server", f"http://{place}")
        for command in (stores, (stores[0], *stores[3:])):
            document = warmed(invoke, *command, *asked, *through, exit_code=0 if served else 4)
            assert (document["usable_tokens"], document["served_tokens"]) == (8 * SIZE, served)
            more = "(0 of 128, and 128 usable tokens are below the servers' thresholds)"
            assert (more in document["stderr"]) == (served == 0)


@pytest.mark.slow
def test_a_server_that_is_not_understood_is_said(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path
) -> None:
    asked = ("--token-ids", prompts(tmp_path / "asked.jsonl", 12), "--min-usable", "0.9")
    for changes in ({"enable_hisparse": True}, {"tp_size": 10**9}, {"page_size": "16"}):
        with serving(Server(answer, **deployed(**changes))) as place:
            document = warmed(invoke, *stores, *asked, "--through-server", f"http://{place}")
        assert "the server's deployment was not compared with the pages: " in document["stderr"]
        assert document["deployment"]["tp_size"] == PROFILE.tp


@pytest.mark.slow
def test_a_server_of_the_deployment_itself_can_restore_the_pages(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path
) -> None:
    asked = ("--token-ids", prompts(tmp_path / "asked.jsonl", 12), "--min-usable", "0.9")
    same = Server(answer, **deployed(kv_cache_dtype="bfloat16", attn_cp_size=1))
    other = Server(answer, **deployed(tp_size=4))
    with serving(same) as place, serving(other) as second:
        through = ("--through-server", f"http://{place}")
        document = warmed(invoke, *stores, *asked, *through)
        assert document["usable_tokens"] == 12 * SIZE
        assert document["deployment"]["tp_size"] == PROFILE.tp
        assert same.asked
        both = (*through, "--through-server", f"http://{second}")
        document = warmed(invoke, *stores, *asked, *both, exit_code=4)
        assert (document["usable_tokens"], document["deployment"]["tp_size"]) == (0, 4)


def test_every_dp_rank_is_asked(invoke: Invoke, stores: tuple[object, ...], tmp_path: Path) -> None:
    server = Server(answer, dp_size=2)
    with serving(server) as place:
        document = warmed(
            invoke, *stores, "--token-ids", prompts(tmp_path / "asked.jsonl", 4, 8),
            "--through-server", f"http://{place}",
        )  # fmt: skip
    asked = {(len(body["input_ids"]), body["routed_dp_rank"]) for body in server.asked}
    assert asked == {(pages * SIZE + 1, rank) for pages in (4, 8) for rank in (0, 1)}
    assert len(document["pulled"][0]["requests"]) == 4


def test_without_a_source_servers_only_pull(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path
) -> None:
    _, _, source, *profile = stores
    asked = prompts(tmp_path / "asked.jsonl", 12)
    server = Server(answer)
    with serving(server) as place:
        document = warmed(
            invoke, source, *profile, "--token-ids", asked, "--through-server", f"http://{place}"
        )
    assert len(server.asked) == 1
    assert (document["source"], document["copied_pages"]) == (None, 0)
    assert (document["requested_pages"], document["already_there"]) == (12, 12)
    assert document["usable_tokens"] == 12 * SIZE


def test_of_a_trace_each_prefix_is_asked_for_once_the_best_first(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    alien = [7] * (4 * SIZE + 1)
    cut = [[*tokens(), 1][: pages * SIZE + 1] for pages in (8, 4)]
    rows = [
        {"timestamp": 5, "token_ids": cut[0], "output_length": 3},
        {"timestamp": 9, "token_ids": cut[0]},
        {"timestamp": 1, "token_ids": alien},
        {"timestamp": 3, "input_ids": cut[1], "rid": "x"},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = Server(answer)
    with serving(server) as place:
        document = warmed(
            invoke, *stores, "--trace", trace, "--jobs", 1, "--through-server", f"http://{place}"
        )
    # The demo has states; only a request that ends at page 4 restores that page's state.
    assert [body["input_ids"] for body in server.asked] == cut[::-1]
    assert [row["request"] for row in document["pulled"][0]["requests"]] == [3, 0]
    assert document["usable_tokens"] == (4 + 8 + 8) * SIZE


def test_a_trace_of_block_ids_has_nothing_that_servers_could_be_asked(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path
) -> None:
    _, _, source, *profile = stores
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "hash_ids": [1, 2]}\n')
    server = Server(answer)
    with serving(server) as place:
        refused = invoke("prewarm", source, *profile, "--trace", trace, "--through-server",
                         f"http://{place}", exit_code=2)  # fmt: skip
    assert "has block ids, which do not give the keys of pages" in refused.stderr
    assert not server.asked


def test_nobody_is_asked_where_nothing_is_there_or_nothing_is_to_be_done(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path
) -> None:
    server = Server(answer)
    with serving(server) as place:
        through = ("--through-server", f"http://{place}")
        asked = strangers(tmp_path / "asked.jsonl", 2)
        document = warmed(invoke, *stores, "--token-ids", asked, *through)
        assert document["pulled"][0]["requests"] == []
        asked = prompts(tmp_path / "more.jsonl", 12)
        invoke("prewarm", *stores, "--token-ids", asked, "--dry-run", *through)
    assert not server.asked


def test_a_key_that_is_wanted_is_said_before_anything_is_copied(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path
) -> None:
    asked = prompts(tmp_path / "asked.jsonl", 8)
    with serving(lambda call: call.answer(b"{}", 401)) as place:
        refused = invoke("prewarm", *stores, "--token-ids", asked, "--through-server",
                         f"http://{place}", exit_code=3)  # fmt: skip
    (line,) = refused.stderr.splitlines()
    assert "401" in line
    assert "HICACHECTL_API_KEY" in line
    assert not (tmp_path / "target").exists()


def test_a_server_that_refuses_later_fails_and_the_document_is_there(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path, started: float
) -> None:
    asked = prompts(tmp_path / "asked.jsonl", 8)
    metrics = tmp_path / "metrics.prom"
    with serving(Server(lambda call, _: call.answer(b"{}", 403))) as place:
        document = warmed(invoke, *stores, "--token-ids", asked, "--metrics-file", metrics,
                          "--through-server", f"http://{place}", exit_code=3)  # fmt: skip
    assert document["copied_pages"] == 8
    assert "403" in document["pulled"][0]["error"]
    assert document["complete"] is False
    assert "HICACHECTL_API_KEY" in document["stderr"].splitlines()[-1]
    assert "hicachectl_prewarm_succeeded" in metrics.read_text()


@pytest.mark.slow
def test_a_busy_server_is_waited_for(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path, started: float
) -> None:
    def busy(call: Call, number: int) -> None:
        if number < 2:
            call.answer(b"{}", 429, "Retry-After: 1")
        else:
            answer(call, number)

    server = Server(busy)
    with serving(server) as place:
        document = warmed(
            invoke, *stores, "--token-ids", prompts(tmp_path / "asked.jsonl", 8),
            "--through-server", f"http://{place}",
        )  # fmt: skip
    assert time.monotonic() - started > 1
    assert len(server.asked) == 3
    assert document["pulled"][0]["failed"] == 0


@pytest.mark.slow
def test_a_request_that_fails_is_a_finding(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path, started: float
) -> None:
    with serving(Server(lambda call, _: call.answer(b"out of order", 500))) as place:
        document = warmed(
            invoke, *stores, "--token-ids", prompts(tmp_path / "asked.jsonl", 8),
            "--through-server", f"http://{place}", exit_code=4,
        )  # fmt: skip
    (row,) = document["pulled"][0]["requests"]
    assert "500" in row["error"]
    assert document["pulled"][0]["failed"] == 1


@pytest.mark.slow
def test_a_server_that_hangs_is_left_at_the_deadline(
    invoke: Invoke, stores: tuple[object, ...], tmp_path: Path, started: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Three seconds of the hour are left for the servers.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 - 3)
    monkeypatch.setattr(through_server, "time", clock)
    with serving(Server(lambda call, _: call.hang())) as place:
        document = warmed(
            invoke, *stores, "--token-ids", prompts(tmp_path / "asked.jsonl", 8, 12),
            "--through-server", f"http://{place}", "--deadline", "1h",
        )  # fmt: skip
    assert document["copied_pages"] == 12
    assert (document["complete"], document["stopped_by"]) == (False, "deadline")
    assert document["pulled"][0]["requests"] == []


@pytest.mark.slow
def test_terminated_while_servers_pull_it_says_what_they_did(
    stores: tuple[object, ...], tmp_path: Path, started: float
) -> None:
    runs: list[Paused] = []

    def answer_once(call: Call, number: int) -> None:
        if number:
            runs[0].send(signal.SIGTERM)
            call.hang()
        answer(call, number)

    asked, folder = prompts(tmp_path / "asked.jsonl", 8, 12), tmp_path / "paused"
    with serving(Server(answer_once)) as place:
        through = ("--jobs", 1, "--through-server", f"http://{place}")
        arguments = ("prewarm", *stores, "--token-ids", asked, *through)
        call = "hicachectl.prewarming.through_server:ThroughServer.pull"
        with paused(folder, call, 1, *arguments) as run:
            runs.append(run)
            ended = run.resumed()
    assert ended.code == 143, ended
    document = json.loads(ended.stdout)
    assert (document["copied_pages"], document["stopped_by"]) == (12, "terminated")
    (pulled,) = document["pulled"]
    assert [row["request"] for row in pulled["requests"]] == [0]
    assert pulled["complete"] is document["complete"] is False
