"""Count the pages of requests that live servers can restore from a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.formats.errors import FormatError, ProfileError, StoreUnavailable
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.restorable import fetched
from hicachectl.pages.naming import deployment_text, profile_document
from hicachectl.profiles.stamps import stamp_differences
from hicachectl.requests.elsewhere import find_elsewhere, miss_remarks
from hicachectl.requests.hits import hits_of_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.hits import Hits

# Settings that decide which objects a server requests and how it reads them. Each has the option
# that converts pages to the server's value, or "" if no option converts pages.
_OPTIONS = {
    "model": "--to-model {}",
    "tag": "--to-tag {}",
    "tp": "--to-tp {}",
    "pp": "--to-pp {}",
    "layout": "--to-layout {}",
    "cp": "--to-profile FILE",
    "dcp": "--to-profile FILE",
    "page_size": "",
    "kv_cache_dtype": "",
}
# Keys do not show these settings, so objects written with other values have the server's keys, too.
_NOT_IN_KEYS = {"layout", "page_size", "kv_cache_dtype"}


@dataclass(frozen=True, slots=True)
class Usable:
    """Pages that servers can restore from a store.

    pages: [chains] int64, number of leading pages that servers of `deployment` can restore.
    served: [chains] int64, number of these pages that servers fetch.
    deployment: profile of the servers for which pages are counted.
    target: hits of the deployment for which pages are written.
    remarks: messages about servers of another deployment, and about missing pages.
    """

    pages: IntArray
    served: IntArray
    deployment: Profile
    target: Hits
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, pages: IntArray, server: Profile, deployment: Profile, target: Hits) -> Usable:
        """Count the pages that a server fetches. server: profile of this server."""
        served = fetched(
            pages, server.page_size, server.prefetch_threshold, trailing=server.trailing
        )
        return cls(pages, served, deployment, target)


def count_usable(
    store: Store,
    target: Profile,
    served: Mapping[str, Profile],
    chains: Requests,
    *,
    explains: bool = False,
    needs_pages: bool = False,
    without: pa.StringArray | None = None,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Usable:
    """Count the leading pages of each chain that servers can restore from a store.

    target: profile for which pages are written. If no server is known, pages are counted for this
        profile.
    served: profile of each live server, by URL. Pages are counted for the server that fetches the
        fewest pages.
    explains: whether to add remarks on why pages are missing.
    needs_pages: see `take_inventory`.
    without: pages that count as missing.
    Raises StoreUnavailable, and ProfileError if the target contradicts the store.
    """
    inventory, hits = hits_of_store(
        store, target, chains, needs_pages=needs_pages, without=without, on_batch=on_batch
    )
    counted = [] if served else [Usable.of(hits.usable_pages, target, target, hits)]
    remarks = []
    for url, profile in served.items():
        differing = _differences(target, profile)
        usable = hits.usable_pages
        if differing:
            remarks.append(_described(url, differing))
            usable = (
                np.zeros(len(chains), dtype=np.int64)
                if _NOT_IN_KEYS.intersection(differing)
                else _restorable(store, profile, chains, on_batch)
            )
        counted.append(Usable.of(usable, profile, profile if differing else target, hits))
    fewest = min(counted, key=lambda one: (int(one.served.sum()), int(one.pages.sum())))
    if explains and fewest.deployment is target:
        elsewhere = find_elsewhere(inventory, hits)
        remarks += miss_remarks(store, inventory, hits, elsewhere)
    return replace(fewest, remarks=tuple(remarks))


def stamp_remarks(store: Store, target: Profile) -> list[str]:
    """Return a remark if a store's stamp names another deployment than the target."""
    try:
        found = stamp_differences(store, target)
    except (FormatError, StoreUnavailable) as error:
        return [str(error)]
    if not found:
        return []
    return [
        f"{store.url}: the stamp names another deployment ({'; '.join(found)}), but usable tokens "
        f"are counted for {deployment_text(profile_document(target))}; if the store's servers "
        "match the stamp, give --to-profile"
    ]


def _restorable(
    store: Store, profile: Profile, chains: Requests, on_batch: Callable[[int], None]
) -> IntArray:
    try:
        return hits_of_store(store, profile, chains, on_batch=on_batch)[1].usable_pages
    except ProfileError:  # the store's objects have other sizes
        return np.zeros(len(chains), dtype=np.int64)


def _differences(target: Profile, served: Profile) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, each with the server's value and the target's value."""
    theirs, ours = _features(served), _features(target)
    if all(kind_of(pool).shards is False for pool in target.pools):
        theirs["tp"] = ours["tp"]  # all TP ranks share each object
    return {name: (theirs[name], ours[name]) for name in ours if theirs[name] != ours[name]}


def _features(profile: Profile) -> dict[str, Any]:
    pool = profile.pools[0]
    dtype = kind_of(pool).cache_dtype(pool)
    features = {name: getattr(profile, name, None) for name in _OPTIONS}
    return features | {"model": profile.key_model, "kv_cache_dtype": dtype}


def _described(url: str, differing: Mapping[str, tuple[Any, Any]]) -> str:
    found = ", ".join(
        f"{name} {theirs!r} instead of {ours!r}" for name, (theirs, ours) in differing.items()
    )
    options = {name: _OPTIONS[name].format(theirs) for name, (theirs, _) in differing.items()}
    if "tag" in differing and not differing["tag"][0]:
        options["tag"] = "--to-no-tag"
    fixed = [name for name, option in options.items() if not option]
    remedy = (
        f"pages of another {fixed[0]} cannot be converted"
        if fixed
        else f"give {' '.join(dict.fromkeys(options.values()))} to write pages for it"
    )
    return f"{url}: serves {found}, so usable tokens are counted for this server; {remedy}"
