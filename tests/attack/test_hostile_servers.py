"""SGLang servers that lie or stall are refused in one line, within limits of time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import StoreUnavailable
from hicachectl.prewarming.through_server import Prefix, ThroughServer
from hicachectl.profiles.server import fetch_server
from hicachectl.requests.forms import Request
from tests.attack.children import Ended, attacked
from tests.backends.http_scripts import PATIENCE_S, SOON_S, Call, reply, serving
from tests.stores import DSA

if TYPE_CHECKING:
    from tests.backends.http_scripts import Script

MODEL = Path(__file__).parent.parent / "data" / "configs" / "llama-3.1-8b.json"
INFO: dict[str, Any] = {
    "model_path": "/models/llama",
    "served_model_name": "m",
    "page_size": 64,
    "tp_size": 2,
    "version": "0.5.23",
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
}
LAYOUT = {"enabled": True, "page_size": 64, "hicache_object_layout": {"pools": []}}
COUNTS = ["page_size", "tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size"]
BEYOND = [10**9, 10**12, 2**70, -1, 10**4000]
META = {"cached_tokens": 4, "finish_reason": {"type": "length"}}


def info_server(info: dict[str, Any], layout: dict[str, Any] | None = None) -> Script:
    def script(call: Call) -> None:
        answers = {"/server_info": info, "/get_hicache_l3_cache_layout": layout or LAYOUT}
        call.answer(json.dumps(answers[call.path]).encode())

    return script


def profiled(place: str) -> Ended:
    return attacked("profile", "--server", f"http://{place}", "--model-config", MODEL)


# --- what servers state ---


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_beyond_belief_is_refused_by_name(name: str) -> None:
    for value in (10**12, -1):
        with serving(info_server({**INFO, name: value})) as place:
            line = profiled(place).refusal
        assert str(value) in line
        assert "must be at most" in line or "must be at least 1" in line
        field = name.removeprefix("attn_").removesuffix("_size")
        assert field in line


@pytest.mark.parametrize("name", ["dp_size", "attn_dp_size"])
@pytest.mark.parametrize("value", [10**9, 10**12])
def test_a_server_of_too_many_dp_ranks_is_refused(name: str, value: int, tmp_path: Path) -> None:
    with serving(info_server({**INFO, name: value})) as place:
        line = pulled_through(place, tmp_path).refusal
    assert name in line
    assert f"must be at most 4096, but is {value}" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"served_model_name": "\ud800"},
        {"model_path": "\ud800", "served_model_name": None},
        {"version": "\ud800"},
        {"version": [["deep"]]},
        {"kv_cache_dtype": "\ud800"},
        {"hicache_mem_layout": "\u202e\x1b[2J"},
        {"internal_states": [{"tp_size": 10**30}]},
        {"internal_states": "x"},
        {"env_vars": {"SGLANG_PP_LAYER_PARTITION": "1," * 100_000 + "1"}},
        {"hicache_storage_backend_extra_config": '{"extra_backend_tag": "\\ud800"}'},
        {"hicache_storage_backend_extra_config": '{"tp_lcm_size": 1000000000000}'},
        {"hicache_storage_backend_extra_config": "[" * 100_000},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_lying_server_info_never_crashes(changes: dict[str, Any]) -> None:
    with serving(info_server({**INFO, **changes})) as place:
        found = profiled(place)
    found.stdout.decode()
    assert "\x1b" not in found.stderr
    assert "\u202e" not in found.stderr


@pytest.mark.parametrize("layout", [{"hicache_object_layout": {"pools": [{"pool": "\ud800\x1b"}]}}])
def test_a_lying_layout_never_crashes(layout: dict[str, Any]) -> None:
    with serving(info_server(INFO, layout)) as place:
        assert "\x1b" not in profiled(place).stderr


# --- what servers answer to /generate ---


def pulled_through(place: str, tmp_path: Path, *options: object) -> Ended:
    store, profile, requests = (tmp_path / name for name in ("store", "p.toml", "requests.jsonl"))
    store.mkdir()
    profile.write_text(DSA)
    requests.write_text(json.dumps(list(range(9))) + "\n")
    given = ("--profile", profile, "--token-ids", requests, "--through-server", f"http://{place}")
    return attacked("prewarm", store, *given, *options)


def pull_one(script: Script) -> Any:
    with serving(script) as place:
        server = ThroughServer(f"http://{place}", api_key="", jobs=1, request_timeout_s=SOON_S)
        server.pull([Prefix(0, 8, Request("test", list(range(9))))])
        (result,) = server.pulled
    return result


@pytest.mark.parametrize("value", [2**70, 10, -1, 1.5, True, "4", None, [4]])
@pytest.mark.parametrize("where", ["cached_tokens", "storage"])
def test_tokens_that_cannot_be_are_an_error_of_the_request(where: str, value: Any) -> None:
    details = {"device": 0, "host": 0, "storage": value if where == "storage" else 4}
    meta = {**META, "cached_tokens_details": details}
    if where == "cached_tokens":
        meta["cached_tokens"] = value
    result = pull_one(lambda call: call.answer(json.dumps({"meta_info": meta}).encode()))
    if where == "storage" and value is None:
        assert (result["error"], result["cached_tokens_details"]) == (
            None,
            {"device": 0, "host": 0},
        )
        return
    assert result["cached_tokens"] == 0
    assert not result["cached_tokens_details"]
    assert where in result["error"]
    assert "9 tokens" in result["error"]


def test_an_abort_message_is_fit_to_be_written() -> None:
    reason = {"type": "abort", "message": "no \ud800\x1b[2J\u202e room" + "x" * 10_000}
    body = json.dumps({"meta_info": {**META, "finish_reason": reason}}).encode()
    error = pull_one(lambda call: call.answer(body))["error"]
    assert error.startswith("no ")
    assert error.isprintable()
    assert len(error) <= 200
    error.encode()


# --- how servers answer ---

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "interim replies": b"HTTP/1.1 100 Continue\r\n\r\n",
    "early hints": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
    "interim replies with headers": b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n",
}


def forever(piece: bytes, first: bytes = b"") -> Script:
    def script(call: Call) -> None:
        call.send(first)
        while True:  # until the client closes the connection
            call.send(piece * 100)

    return script


SCRIPTS: dict[str, Script] = {
    **{name: forever(piece) for name, piece in ENDLESS.items()},
    "endless headers": forever(b"X: y\r\n", b"HTTP/1.1 200 OK\r\n"),
    "an endless header": forever(b"x", b"HTTP/1.1 200 OK\r\nX: "),
    "an endless status": forever(b"x", b"HTTP/1.1 200 "),
    "an endless chunk size": forever(
        b"0", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    ),
    "endless chunks": forever(b"1\r\nx\r\n", CHUNKED),
    "endless trailers": forever(b"X: y\r\n", CHUNKED + b"0\r\n"),
    "a length beyond belief": forever(
        b"x" * 1000, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % 10**30
    ),
    "a negative length": lambda call: call.send(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"),
    "trickled interim replies": lambda call: call.trickle(ENDLESS["interim replies"] * 9999, 0.02),
    "trickled headers": lambda call: call.trickle(reply(b"{}", header="X: " + "y" * 60_000), 0.02),
    "a trickled body": lambda call: call.trickle(reply(b" " * 60_000), 0.02),
    "silence": lambda call: call.hang(),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_answer_without_end_is_given_up(name: str) -> None:
    with serving(SCRIPTS[name]) as place:
        with pytest.raises(StoreUnavailable, match="SGLang server"):
            fetch_server(f"http://{place}", timeout_s=0.5)
        server = ThroughServer(f"http://{place}", jobs=1, request_timeout_s=0.5, pause_s=0.01)
        prefixes = [Prefix(number, 8, Request("test", list(range(9)))) for number in range(3)]
        with pytest.raises(StoreUnavailable, match="SGLang server"):
            server.pull(prefixes)


@pytest.mark.parametrize("name", ENDLESS)
def test_interim_replies_are_counted_not_only_timed(name: str) -> None:
    with (
        serving(SCRIPTS[name]) as place,
        pytest.raises(StoreUnavailable, match="not valid HTTP"),
    ):
        fetch_server(f"http://{place}", timeout_s=PATIENCE_S)
