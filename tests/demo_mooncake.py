"""`make demo-mooncake`: run the main commands on a Mooncake cluster on this machine.

Run as `python -m tests.demo_mooncake`. The cluster ends with the program.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from hicachectl.backends.base import open_store
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.profile import dump_profile
from hicachectl.text.terminal import mute_native_logs
from tests.mooncake_cluster import Cluster

PAGES = 8


def main() -> None:
    """Start and fill a cluster, list and verify it, then damage it and verify again."""
    mute_native_logs()
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder) / "demo.toml")
        Path(profile).write_text(dump_profile(PROFILE), encoding="utf-8")
        with open_store(cluster.url) as store:
            fill(store, PAGES)
        show("ls", cluster.url, "--profile", profile)
        show("ls", cluster.url, "--summary")
        show("verify", cluster.url, "--profile", profile)
        print("\n# One object removed, as by an eviction.", flush=True)
        cluster.remove(next(key for key in cluster.list_keys() if key.endswith("_1_v")))
        show("verify", cluster.url, "--profile", profile, "--grace", "0s", status=4)


def show(*arguments: str, status: int = 0) -> None:
    """Run a command as a user would, and check its exit status."""
    print(f"\n$ hicachectl {shlex.join(arguments)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "hicachectl", *arguments], stderr=sys.stderr, check=False
    )
    if done.returncode != status:
        sys.exit(f"exit status {done.returncode}, not {status}")


if __name__ == "__main__":
    main()
