"""Tell the prefetch thresholds that SGLang reads from options of its storage backend.

Runs inside the SGLang environment.
"""

from __future__ import annotations


def answer(question: list[str | None]) -> list[int]:
    """Return the threshold that SGLang reads from each text of options."""
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller

    parse = hybrid_cache_controller.HybridCacheController.parse_storage_backend_extra_config
    return [parse(stated)[1] for stated in question]
