"""Tell the prefetch thresholds that SGLang reads from options of its storage backend.

Runs inside the SGLang environment: `read_thresholds.py OPTIONS`, a JSON list of texts or nulls.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print the thresholds as a JSON list."""
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller

    parse = hybrid_cache_controller.HybridCacheController.parse_storage_backend_extra_config
    print(json.dumps([parse(stated)[1] for stated in json.loads(sys.argv[1])]))
