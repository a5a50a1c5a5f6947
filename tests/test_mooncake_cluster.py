"""The test cluster holds real data, and no part of it outlives the test process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.waiting import alive, wait_until

if TYPE_CHECKING:
    from tests.mooncake_cluster import Cluster

ROOT = Path(__file__).parents[1]
HOLDER = """
import sys
from tests.mooncake_cluster import Cluster
cluster = Cluster()
print(cluster._master.pid, *(store.pid for store in cluster._stores.values()), flush=True)
sys.stdin.read()
"""


def test_what_was_put_is_listed_and_read_until_it_is_cleared(mooncake_cluster: Cluster) -> None:
    mooncake_cluster.put("a", b"old")
    mooncake_cluster.put("a", b"new!")
    assert mooncake_cluster.client().get("a") == b"new!"
    assert mooncake_cluster.list_keys() == ["a"]
    mooncake_cluster.clear()
    assert mooncake_cluster.list_keys() == []


def test_no_process_outlives_a_killed_test_process(mooncake_package: None, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    children = [int(pid) for pid in holder.stdout.readline().split()]
    assert len(children) == 2
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    wait_until(lambda: not any(map(alive, children)))
