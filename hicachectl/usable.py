"""Count what servers can restore of requests, for the deployment that serves a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.formats.errors import FormatError, ProfileError, StoreUnavailable
from hicachectl.hits import find_hits, inventory_of_chains
from hicachectl.stamps import check_stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.chains import Chains
    from hicachectl.formats.profile import Profile
    from hicachectl.hits import Hits
    from hicachectl.inventory import IntArray

# Fields of a profile that decide which objects a server asks for, and the options that set them.
_OPTIONS = {
    "key_model": "--to-model {}",
    "tag": "--to-tag {}",
    "tp": "--to-tp {}",
    "pp": "--to-pp {}",
    "layout": "--to-layout {}",
    "tp_lcm_size": "--to-tp-lcm-size {}",
    "page_size": "",
    "cp": "--to-profile",
    "dcp": "--to-profile",
}


@dataclass(frozen=True, slots=True)
class Usable:
    """What a store can give to servers.

    pages: [chains] int64, leading pages that servers of `deployment` restore. target: the same in
    full for the deployment that the pages were written for. remarks: servers that differ from it.
    """

    pages: IntArray
    deployment: Profile
    target: Hits
    remarks: tuple[str, ...] = ()


def count_usable(
    store: Store,
    target: Profile,
    served: Mapping[str, Profile],
    chains: Chains,
    *,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Usable:
    """Count the leading pages of each chain that servers can restore from a store.

    target: the deployment that pages are written for; counted for where no server is known.
    served: the deployment of each live server, by URL; of several the one that can use the least
    counts. Raises StoreUnavailable, and ProfileError where the target contradicts the store.
    """
    hits = find_hits(inventory_of_chains(store, target, chains, on_batch=on_batch), 0, chains)
    counted = [] if served else [(hits.usable_pages, target)]
    remarks = []
    for url, profile in served.items():
        differing = _differing(target, profile)
        if not differing:
            counted.append((hits.usable_pages, target))
            continue
        counted.append((_restorable(store, target, profile, chains, on_batch), profile))
        remarks.append(_differs(url, target, profile, differing))
    pages, deployment = min(counted, key=lambda one: int(one[0].sum()))
    return Usable(pages, deployment, hits, tuple(remarks))


def deployment_document(profile: Profile) -> dict[str, Any]:
    """Describe the deployment of a profile in JSON's types."""
    return {
        "model": profile.model,
        "tag": profile.tag,
        "tp_size": profile.tp,
        "pp_size": profile.pp,
        "cp_size": profile.cp,
        "dcp_size": profile.dcp,
        "page_size": profile.page_size,
        "layout": profile.layout,
    }


def deployment_text(document: Mapping[str, Any]) -> str:
    """Write a described deployment for people: `org/model tp 8`."""
    sizes = [
        f"{axis} {document[f'{axis}_size']}"
        for axis in ("tp", "pp", "cp", "dcp")
        if axis == "tp" or document[f"{axis}_size"] > 1
    ]
    return " ".join([document["model"], *sizes])


def stamp_remarks(store: Store, target: Profile) -> list[str]:
    """Say where the stamp of a store names another deployment of the model than the target."""
    try:
        found = check_stamp(store, target, "").column("detail").to_pylist()
    except (FormatError, StoreUnavailable) as error:
        return [str(error)]
    if not found:
        return []
    return [
        f"{store.url} is stamped for another deployment ({'; '.join(found)}): usable tokens are "
        f"counted for {deployment_text(deployment_document(target))}; if the servers of the store "
        "run as stamped, give --to-profile"
    ]


def _restorable(
    store: Store,
    target: Profile,
    profile: Profile,
    chains: Chains,
    on_batch: Callable[[int], None],
) -> IntArray:
    nothing = np.zeros(len(chains), dtype=np.int64)
    if profile.page_size != target.page_size:  # other hashes: no page of these chains is asked for
        return nothing
    try:
        found = inventory_of_chains(store, profile, chains, on_batch=on_batch)
    except ProfileError:  # the store has pages of other deployments alone
        return nothing
    usable: IntArray = find_hits(found, 0, chains).usable_pages
    return usable


def _differing(target: Profile, served: Profile) -> list[str]:
    """Name the fields in which a server's deployment differs from the target."""
    if target.rank_replicated and target.pools == served.pools:  # all TP ranks share each object
        alone = all(pool.kind in ("mla", "logical", "dsa_indexer") for pool in target.pools)
        served = replace(served, tp=target.tp, linear_tp=target.linear_tp) if alone else served
    return [name for name in _OPTIONS if getattr(target, name) != getattr(served, name)]


def _differs(url: str, target: Profile, served: Profile, differing: list[str]) -> str:
    described = ", ".join(
        f"{name.replace('key_model', 'model')} {getattr(served, name)!r} instead of "
        f"{getattr(target, name)!r}"
        for name in differing
    )
    options = [_OPTIONS[name].format(getattr(served, name)) for name in differing]
    remedy = (
        "pages of another page size cannot be converted"
        if "page_size" in differing
        else f"give {' '.join(dict.fromkeys(options))} to write what it reads"
    )
    return f"{url} serves {described}: usable tokens are counted for it; {remedy}"
