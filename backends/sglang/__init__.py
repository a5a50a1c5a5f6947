"""SGLang's `dynamic` storage plug-in: servers read and write these stores themselves.

Only `plugin` and `context` import SGLang.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `HiCacheStore` when SGLang asks for it by name."""
    if name == "HiCacheStore":
        from hicachectl.backends.sglang.plugin import HiCacheStore

        return HiCacheStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
