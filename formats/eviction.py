"""Policies by which caches and stores evict objects, and the key grammar for each policy."""

from __future__ import annotations

from enum import StrEnum


class Policy(StrEnum):
    """A policy of eviction, named as in options and results."""

    LRU = "lru"
    HICACHEFILE = "hicachefile"
    HF3FS = "3fs"
    PLUGIN = "plugin"
    MOONCAKE = "mooncake"
    OPTIMAL = "optimal"

    @property
    def grammar(self) -> str:
        """Name of the key grammar that divides a page into objects."""
        return {Policy.HF3FS: "hf3fs", Policy.MOONCAKE: "mooncake"}.get(self, "file")

    @property
    def limit(self) -> str:
        """Part of a store that the limit in its settings bounds: "store", "rank" or "table"."""
        limits = {Policy.HICACHEFILE: "rank", Policy.PLUGIN: "rank", Policy.HF3FS: "table"}
        return limits.get(self, "store")
