"""The prefetch threshold that SGLang reads from the options of its storage backend."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hicachectl.formats.models.server_info import flags_from_server_info

_CODE = """
import json, sys
from tests.conformance import sglang_env
sglang_env.prepare()
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
_, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(json.loads(sys.argv[1]))
print(json.dumps(threshold))
"""


@pytest.mark.parametrize("stated", [None, "{}", '{"prefetch_threshold": 64}'])
def test_the_threshold_is_what_sglang_reads(sglang_python: Path, stated: str | None) -> None:
    command = [str(sglang_python), "-c", _CODE, json.dumps(stated)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    read = flags_from_server_info(
        {
            "model_path": "m",
            "tp_size": 1,
            "page_size": 16,
            "hicache_storage_backend_extra_config": stated,
        }
    )
    assert json.loads(done.stdout.splitlines()[-1]) == read.flags.prefetch_threshold
