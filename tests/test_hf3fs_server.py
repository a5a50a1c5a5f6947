"""The test server is SGLang's, saves its state on request, and does not outlive a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hf3fs_server import MetadataServer
from tests.waiting import alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
HOLDER = """
import sys
from pathlib import Path
from tests.hf3fs_server import MetadataServer
server = MetadataServer(Path(sys.argv[1]))
print(server._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own_server(sglang_python: Path) -> Iterator[MetadataServer]:
    with MetadataServer(sglang_python) as server:
        yield server


def test_saved_keys_stand_in_order_of_recency_and_pages_come_from_the_top(
    metadata_server: MetadataServer,
) -> None:
    metadata_server.initialize(1, 4)
    assert metadata_server.put(1, ["a", "b", "c"]) == [3, 2, 1]
    assert metadata_server.page_indices(1, ["a", "x"]) == [3, None]
    assert metadata_server.exists(1, ["b", "x"]) == [True, False]
    assert metadata_server.saved() == {
        "1:kv": {
            "num_pages": 4,
            "free_pages": [0],
            "key_to_index": [["b", 2], ["c", 1], ["a", 3]],
        }
    }


def test_a_reset_leaves_no_rank(metadata_server: MetadataServer) -> None:
    metadata_server.initialize(0, 2, "indexer")
    metadata_server.reset()
    assert metadata_server.saved() == {}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        metadata_server.exists(0, ["a"], "indexer")


def test_a_killed_server_comes_back_with_what_it_had_saved(own_server: MetadataServer) -> None:
    own_server.initialize(0, 3)
    own_server.put(0, ["kept"])
    own_server.save()
    own_server.put(0, ["lost"])
    own_server.kill()
    own_server.start()
    assert own_server.exists(0, ["kept", "lost"]) == [True, False]


def test_no_server_outlives_a_killed_test_process(sglang_python: Path, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(sglang_python)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    server = int(holder.stdout.readline())
    assert alive(server)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    holder.stdin.close()
    wait_until(lambda: not alive(server))
