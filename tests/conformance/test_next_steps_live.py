"""What a repair prints about servers is needed, and enough: a real server, one page of zeros."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.conformance.cpu_server import KEY, PAGE_SIZE, page_files, prompt
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conformance.cpu_server import Answer, CpuServer
    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT = prompt(1)
LONGER = [*PROMPT[: 5 * PAGE_SIZE], *prompt(2, 2)]


def stored(server: CpuServer, store: Path, tokens: Sequence[int]) -> Answer:
    """Ask a server with empty pools; wait until the store has the prompt's pages."""
    server.flush()
    answer = server.generate(tokens)
    wait_until(lambda: all(path.exists() for path in page_files(store, tokens)))
    return answer


def flushed(said: str, server: CpuServer) -> None:
    """Run the command that `said` has, in a shell, without the key and with it."""
    command = re.search(r" with (curl .*/flush_cache)$", said, re.MULTILINE)
    assert command is not None, said
    assert server.url in command[1]
    for key, answer in (("", "Unauthorized"), (KEY, "Cache flushed")):
        shell, given = ["bash", "-c", command[1]], {**os.environ, "ADMIN_KEY": key}
        ran = subprocess.run(shell, env=given, capture_output=True, check=True, timeout=60)
        assert answer in ran.stdout.decode(), ran


def test_memory_and_later_pages_stay_wrong_until_the_next_steps_are_done(
    cpu_server: CpuServer, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check finds the pages that the server computed after the page of zeros."""
    monkeypatch.setenv("HICACHECTL_API_KEY", KEY)
    clean, store = tmp_path / "clean", tmp_path / "store"
    cpu_server.attach("file", {"file_storage_path": str(clean)})
    right = stored(cpu_server, clean, LONGER)
    cpu_server.detach()
    cpu_server.attach("file", {"file_storage_path": str(store)})
    stored(cpu_server, store, PROMPT)
    pages = page_files(store, LONGER)
    hour_ago = time.time() - 3600
    pages[1].write_bytes(bytes(pages[1].stat().st_size))
    for page in pages[:5]:
        os.utime(page, (hour_ago, hour_ago))

    assert not stored(cpu_server, store, LONGER).same(right)
    assert pages[6].read_bytes() != page_files(clean, LONGER)[6].read_bytes()
    checks = ["--server", cpu_server.url, "--grace", "0s", "--despite-profile"]
    repair = ["--repair", "delete", "--repair-code", "all-zero", "--yes"]
    ran = invoke("verify", store, *checks, *repair, exit_code=4)
    assert "1 all-zero" in ran.stdout
    assert not pages[1].exists()

    assert not cpu_server.generate(LONGER).same(right), "memory has the page no more"
    assert stored(cpu_server, store, LONGER).same(right)  # page 1 is missing, so it is computed
    flushed(ran.stderr, cpu_server)
    again = cpu_server.generate(LONGER)
    assert again.storage == 7 * PAGE_SIZE
    assert not again.same(right), "the later pages were right"
    command = re.search(r"with hicachectl (rm .*) --dry-run$", ran.stderr, re.MULTILINE)
    assert command is not None
    assert invoke(*shlex.split(command[1]), "--yes", "--format", "json").document["pages"] == 7
    assert stored(cpu_server, store, LONGER).same(right)
    cpu_server.flush()
    last = cpu_server.generate(LONGER)
    assert (last.storage, last.same(right)) == (7 * PAGE_SIZE, True)
