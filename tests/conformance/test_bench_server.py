"""`bench --probe-server` with a real SGLang server, which restores prompts of the bench.

tests/bench/bench_break_even.py measures whether the server's times are right.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.bench.report import BenchedPrompts
from hicachectl.profiles.server import API_KEY_VARIABLE
from tests.conformance.cpu_server import DEVICE_TOKENS, KEY, PAGE_SIZE, page_files, prompt
from tests.conformance.plugin_site import plugin_config
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.cpu_server import CpuServer
    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT = prompt(1)
OF_PROBE = ("--probe-server", "--prefetch-threshold", PAGE_SIZE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    monkeypatch.setattr("hicachectl.bench.prompts._ROUNDS", 1)
    monkeypatch.setattr("hicachectl.bench.prompts._HALVINGS", 1)
    monkeypatch.setattr("hicachectl.bench.prompts._STORED_S", 3.0)


def attach(server: CpuServer, kind: str, store: Path) -> None:
    """Attach SGLang's file backend or the plug-in, and fill the store with a prompt."""
    config: dict[str, Any] = {"file_storage_path": str(store)}
    server.attach(kind, config if kind == "file" else plugin_config(store))
    server.generate(PROMPT)
    wait_until(lambda: all(path.exists() for path in page_files(store, PROMPT)))


def objects(store: Path) -> set[str]:
    return {path.name for path in store.glob("*.bin")}


def restored_tokens(server: CpuServer) -> float:
    found = re.findall(r"^sglang:prefetched_tokens_total{.*} (\S+)$", server.metrics(), re.M)
    return sum(map(float, found))


@pytest.mark.parametrize("kind", ["file", "dynamic"])
def test_the_server_restores_prompts_out_of_the_store(
    cpu_server: CpuServer, tmp_path: Path, invoke: Invoke, kind: str
) -> None:
    store = tmp_path / "store"
    attach(cpu_server, kind, store)
    stored, restored = objects(store), restored_tokens(cpu_server)
    outcome = invoke("bench", store, "--server", cpu_server.url, *OF_PROBE, "--format", "json")
    document = outcome.document
    assert document["prompts"][0].keys() == BenchedPrompts.__annotations__.keys()
    lengths = [row["tokens"] for row in document["prompts"]]
    assert {PAGE_SIZE << double for double in range(4)} <= {*lengths}
    assert lengths == sorted(lengths)
    assert max(lengths) <= DEVICE_TOKENS
    # The first prompt is sent once more, and so may be one that is too long for the server.
    assert restored_tokens(cpu_server) - restored >= sum(lengths) + PAGE_SIZE
    assert "than" in document["verdicts"][-1]
    assert "reading is faster" not in "".join(document["verdicts"])
    assert objects(store) == stored


def test_a_server_with_another_store_is_told(
    cpu_server: CpuServer, tmp_path: Path, invoke: Invoke
) -> None:
    store = tmp_path / "store"
    attach(cpu_server, "file", store)
    cpu_server.detach()
    cpu_server.attach("file", {"file_storage_path": str(tmp_path / "other")})
    stored = objects(store)
    outcome = invoke("bench", store, "--server", cpu_server.url, *OF_PROBE, exit_code=4)
    assert re.search(r"was not timed: 1 of its 1 objects are not in .*doctor", outcome.stderr)
    assert objects(store) == stored


def test_an_interrupt_leaves_no_page_of_a_prompt(cpu_server: CpuServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    attach(cpu_server, "file", store)
    stored = objects(store)
    words = [sys.executable, "-m", "hicachectl", "bench", store, "--server", cpu_server.url]
    process = subprocess.Popen(
        [*map(str, words), *map(str, OF_PROBE)],
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: objects(store) != stored)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert objects(store) == stored
