"""Verify while SGLang's own HiCacheHF3FS evicts, and writes to the pages that this frees."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.store_cases import DEFAULT_LAYOUT, HF3FS_CASES
from tests.hf3fs_server import MetadataServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-hf3fs")]

import os
def test_proto(sglang_session, sglang_python, tmp_path, invoke):
    case = os.environ.get("CASE", "gqa_tp2")
    size = int(os.environ.get("SIZE", 1 << 20))
    pages = int(os.environ.get("PAGES", 192))
    clear = int(os.environ.get("CLEAR", 0))
    with MetadataServer(sglang_python, save_interval_s=1) as server, ThreadPoolExecutor(1) as pool:
        (tmp_path / "data").mkdir()
        config = tmp_path / "hf3fs.json"
        config.write_text(json.dumps({
            "file_path_prefix": str(tmp_path / "data" / "hicache"),
            "file_size": size, "numjobs": 2, "entries": 4, "metadata_server_url": server.url}))
        profile = tmp_path / "profile.json"
        profile.write_text(json.dumps({**HF3FS_CASES[case].deployments[0].profile, "layout": DEFAULT_LAYOUT}))
        stop = tmp_path / "stop"
        done = pool.submit(sglang_session.run, "live_hf3fs", case, config, f"--pages={pages}", f"--until={stop}", f"--clear-every={clear}")
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                if done.done():
                    done.result()
                try:
                    tables = json.loads(server.snapshot.read_text())
                except FileNotFoundError:
                    tables = {}
                if "0:kv" in tables and (clear or not tables["0:kv"]["free_pages"]):
                    break
                time.sleep(.1)
            print({k: (v["num_pages"], len(v["free_pages"]), len(v["key_to_index"])) for k, v in tables.items()})
            url = f"hf3fs:?config={config}&snapshot={server.snapshot}"
            catalog = tmp_path / "c"
            for n in range(int(os.environ.get("RUNS", 6))):
                import subprocess, sys
                t = time.monotonic()
                from hicachectl.__main__ import run
                out = invoke
                import io, contextlib
                args = ["verify", url, "--profile", profile, "--grace", os.environ.get("GRACE", "2s"), "--format", "json", "--update-catalog", "--catalog", catalog]
                if n % 2 == 0 and os.environ.get("SAVE"): server.save()
                r = subprocess.run([sys.executable, "-m", "hicachectl", *map(str, args)], capture_output=True, text=True)
                if not r.stdout: print(r.stderr)
                d = json.loads(r.stdout)
                print(round(time.monotonic() - t, 2), r.returncode, d["objects"], d["gone"], d["in_flight"], d["bytes_read"], d["counts"], [x for x in r.stderr.splitlines() if "asked" in x])
                for f in d["findings"]:
                    if f["code"] not in ("re-recorded", "orphan-sidecar","missing-part","missing-rank", "missing-pool"):
                        print("   ", f)
        finally:
            stop.touch()
            print("nodes", done.result())
