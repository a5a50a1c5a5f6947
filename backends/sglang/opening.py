"""Open the stores that the plug-in's settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages
from hicachectl.backends.sglang.layers import Layers
from hicachectl.backends.urls import without_secrets

if TYPE_CHECKING:
    from hicachectl.backends.sglang.served import PageStore
    from hicachectl.backends.sglang.settings import Settings
    from hicachectl.backends.urls import StoreUrl


def open_layers(settings: Settings, draft_weights: str = "") -> Layers:
    """Return the stores of a server, not yet open.

    draft_weights: of the deployment's draft, also on ranks without it; "" without one.
    """
    writes = not settings.reads_only
    stores = [
        _store(settings, url, draft_weights, written=writes and not n)
        for n, url in enumerate(settings.stores)
    ]
    return Layers(stores, Counters(_name(settings.stores[0])), writes=writes)


def _store(settings: Settings, url: StoreUrl, draft_weights: str, *, written: bool) -> PageStore:
    if url.kind.directory:
        return FilePages(
            url,
            Counters(_name(url)),
            digest=settings.digest,
            reads_unstamped=settings.unstamped == "read",
            reads_unranked=settings.unranked == "read",
            replaces_foreign=settings.on_foreign == "replace",
            reads_only=not written,
            threads=settings.threads,
            max_size=settings.max_size or 0 if written else 0,
            min_free_space=settings.min_free_space if written else 0,
            evict=settings.evict,
        )
    # Imported late: servers on a file store do without pyarrow.
    from hicachectl.backends.sglang.stores import StorePages

    return StorePages(
        url,
        Counters(_name(url)),
        writes=written,
        draft_weights=draft_weights,
        reads_unstamped=settings.unstamped == "read",
        threads=settings.threads,
    )


def _name(url: StoreUrl) -> str:
    return without_secrets(str(url))
