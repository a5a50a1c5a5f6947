"""Killed writers, hanging stores, load and refusals, under SGLang's own controller.

Each script runs one rank: plugin_kills.py, plugin_hangs.py, plugin_load.py, plugin_refusals.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.trailer import TRAILER_BYTES, parse_trailer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conformance.store_cases import PLUGIN_CASES
    from tests.conftest import Invoke

    Run = Callable[..., Any]
else:
    from store_cases import PLUGIN_CASES

pytestmark = pytest.mark.conformance

KILLS = 10
LOAD_S = 2
OP_TIMEOUT_S = 1.0
LATE_S = 0.5  # for the end of a call after its time-out
LONG_NODE, SLOW_S = 640, 0.004  # pages, and seconds for each
SLOW_TIMEOUT_S = 2.0
ALONE: dict[str, Any] = {"tp": 1}
KILLED = "mla_indexer"


@pytest.fixture
def run(sglang_session: SglangSession, tmp_path: Path) -> Run:
    """Return a function that runs a script with a request, on a store in tmp_path."""

    def run_script(script: str, case: str, **request: Any) -> Any:
        settings = {"store": f"file://{tmp_path}/store", **request.pop("settings", {})}
        whole = {"case": case, "profile": ALONE, "settings": settings, **request}
        return sglang_session.ask(script, whole)

    return run_script


def check_kills(run: Run, folder: Path, kills: int) -> None:
    """Kill backups; every page is whole or missing, and the next server writes it again."""
    results = run("plugin_kills", KILLED, kills=kills)
    assert len(results) == kills
    for result in results:
        assert not any(result["wrong"]), result
        # A server reads a page's sidecars only after its kv.
        assert all("kv" not in pools or pools == ["indexer", "kv"] for pools in result["pages"]), (
            result
        )
        assert result["healed"] == len(result["pages"])
    # Killed at various points: some pages were there, and some were not.
    assert {"kv" in pools for result in results for pools in result["pages"]} == {True, False}
    for path in (folder / "store").glob("*.bin"):
        assert parse_trailer(path.read_bytes()[-TRAILER_BYTES:]) is not None, path


def check_load(run: Run, seconds: float) -> dict[str, Any]:
    """Ask, read and write at once; no byte is wrong."""
    result: dict[str, Any] = run("plugin_load", "mha_draft", seconds=seconds, prompts=16)
    assert result["wrong"] == {}
    assert min(result["found"], result["read"], result["written"]) > 0
    return result


def test_killed_writers_leave_whole_pages(run: Run, tmp_path: Path, invoke: Invoke) -> None:
    """`verify` compares digests, identities and values, and finds temporary files only."""
    check_kills(run, tmp_path, KILLS)
    profile = {
        **PLUGIN_CASES[KILLED].deployments[0].profile,
        **ALONE,
        "weights": "weights of the tests",
    }
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    verify = ("verify", tmp_path / "store", "--profile", tmp_path / "profile.json")
    found = invoke(*verify, "--grace", "0s", "--fail-on", "error", "--format", "json").document
    assert {"groups", "values", "digests"} <= set(found["checks"])
    assert found["skipped_checks"] == []  # identities would be named here
    assert found["pages"] == 8 * (KILLS + 1)
    assert set(found["counts"]) <= {"stale-temporary"}


def test_all_threads_at_once(run: Run) -> None:
    check_load(run, LOAD_S)


def test_a_store_that_hangs(run: Run) -> None:
    """Operations and detaching end in time; late reads and writes change nothing.

    A long node is written whole to a store that is only slow: each batch of it has the time of a
    call.
    """
    slow = {"node_pages": LONG_NODE, "write_seconds": SLOW_S, "slow_timeout": SLOW_TIMEOUT_S}
    results = run("plugin_hangs", "mla_indexer", settings={"op_timeout": OP_TIMEOUT_S}, **slow)
    assert results.pop("slow") == LONG_NODE
    assert LONG_NODE * SLOW_S > SLOW_TIMEOUT_S
    for result in results.values():
        assert result["hung"] > 0
        assert OP_TIMEOUT_S - 0.1 < result["seconds"] < OP_TIMEOUT_S + LATE_S
        assert result["pages"] == 0
        assert result["detached"] < 10  # then SGLang gives up, and its scheduler with it
    assert results["read"]["untouched"]
    assert results["write"]["untouched"]
    assert results["write"]["new"] == []


# What is refused, and words of the message: the key or pool, its value, and the remedy.
REFUSED: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"settings": {"interface_v1": None}}, ("interface_v1: 0", 'set "interface_v1": 1')),
    ({"settings": {"interface_v1": 0}}, ("interface_v1: 0", 'set "interface_v1": 1')),
    ({"settings": {"thread": 2}}, ("'thread'", "known:", "threads")),
    ({"settings": {"op_timeout": 9}}, ("op_timeout: 9", "at most 8 seconds")),
    (
        {"settings": {"tp_lcm_size": 4}, "profile": {"layout": "page_head"}},
        ("tp_lcm_size: 4", "remove the key"),
    ),
    (
        {"settings": {"store": "mooncake://127.0.0.1:1"}, "profile": {"layout": "layer_first"}},
        ("layout layer_first", "use page_first", "--hicache-mem-layout"),
    ),
    (
        {"pools": {"kv": {"layout": "page_first_kv_split"}}},
        ("'page_first_kv_split'", "--hicache-mem-layout page_first"),
    ),
    (
        {"pools": {"kv": {"stores_page_envelope": True}}},
        ("pool kv", "page envelope", "without unified memory"),
    ),
    ({"case": "asymmetric"}, ("pool kv", "K and V differ in width", "mooncake")),
    (
        {"case": "mla_indexer", "profile": {"layout": "layer_first"}},
        ("pool indexer", "layer_first", "--hicache-mem-layout page_first"),
    ),
    ({"buffer_only": True}, ("'buffer_only'", "--hicache-host-memory-mode cache")),
    (
        {"case": "mla_mha_draft", "rank": [0, 0, 0]},
        ("pool draft", "tp_size 2", "without this draft"),
    ),
    (
        {"case": "mla_mha_draft", "rank": [0, 0, 1]},
        ("pool draft", "tp_size 2", "without this draft"),
    ),
)


def test_what_is_refused_leaves_the_controller_usable(
    sglang_session: SglangSession, tmp_path: Path
) -> None:
    """Each refusal names what, its value and the remedy; another backend can then be attached.

    SGLang does not undo an attachment for the pools after the anchor's: that takes a detaching.
    """
    store = {"store": f"file://{tmp_path}/store"}
    requests = [
        {"case": "gqa_tp2", **request, "settings": {**store, **request.get("settings", {})}}
        for request, _ in REFUSED
    ]
    served = [{"case": case, "settings": store} for case in ("gqa_tp2", "mla_draft")]
    results = sglang_session.ask("plugin_refusals", [*requests, *served])
    for result, (request, words) in zip(results, REFUSED, strict=False):
        assert all(word in result["refused"] for word in words), (request, result)
        side_pool = result["refused"].startswith(("pool draft", "pool indexer"))
        assert result["attachable"] == (not side_pool), (request, result)
        assert result["detachable"], (request, result)
    assert [result["refused"] for result in results[len(REFUSED) :]] == ["", ""]
