"""The plug-in on a file store loads neither click nor pyarrow: servers may lack them, and start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[3]

# The names that plugin.py takes from SGLang, which is not in this environment.
SGLANG = """
    import sys, types
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        sys.modules[name] = types.ModuleType(name)
    storage = types.ModuleType("sglang.srt.mem_cache.hicache_storage")
    storage.HiCacheStorage = object
    storage.PoolHitPolicy = storage.PoolName = storage.PoolTransferResult = None
    sys.modules[storage.__name__] = storage
"""


def test_a_page_is_written_and_read_without_click_and_pyarrow(tmp_path: Path) -> None:
    code = dedent(SGLANG) + dedent(
        f"""
        sys.modules["click"] = sys.modules["pyarrow"] = None  # importing them fails
        from hicachectl.backends.sglang import HiCacheStore
        from hicachectl.backends.sglang.calls import Call
        from hicachectl.backends.sglang.store_list import open_stores
        from hicachectl.backends.sglang.settings import parse_settings
        from tests.backends.sglang.pages import HostPool, hashes

        stores = open_stores(parse_settings({{"interface_v1": 1, "store": {str(tmp_path)!r}}}))
        host, pages = HostPool(), hashes(2)
        stores.add(host.pool)
        for act in (stores.write, stores.read):
            with Call(5) as call:
                print(*act(host.pool, pages, host.pieces(range(2)), call))
        stores.close()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["True"] * 4, "")
