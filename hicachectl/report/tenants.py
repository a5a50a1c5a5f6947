"""Divide a deployment's pages by the salt or the adapter of the requests that reach them.

A request reaches the pages of its chain. Pages that no request reaches are counted, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.pages.census import byte_sums
from hicachectl.prewarming.ranking import places_among

if TYPE_CHECKING:
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.groups import PageGroups
    from hicachectl.requests.chains import Labels, Requests

_KINDS = ("salt", "adapter")
_SHARED, _UNREACHED = 0, 1  # owner codes of pages; tenant n has code n + 2


@dataclass(frozen=True, slots=True)
class Tenant:
    """Pages in the store that only the requests of one tenant reach.

    name: salt or adapter of the requests; None for requests that have none.
    requests: number of requests of the tenant.
    pages: number of these pages.
    nbytes: bytes of these pages; None if a size in the deployment is unknown.
    reached: number of pages that the tenant's requests reach, including those that other tenants
        also reach.
    """

    name: str | None
    requests: int
    pages: int
    nbytes: int | None
    reached: int


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Pages of a deployment by tenant. Every page counts once.

    kind: kind of tenants, "salt" or "adapter".
    pages: number of all pages of the deployment.
    nbytes: bytes of all pages; None if a size is unknown.
    tenants: tenants, most pages first.
    shared: number and bytes of the pages that several tenants reach.
    unreached: number and bytes of the pages that no request reaches.
    """

    kind: str
    pages: int
    nbytes: int | None
    tenants: tuple[Tenant, ...]
    shared: tuple[int, int | None]
    unreached: tuple[int, int | None]


class Unused(NamedTuple):
    """Pages of a deployment that no request reaches.

    pages: number of these pages.
    nbytes: bytes of these pages; None if a size is unknown.
    of_pages: number of all pages of the deployment.
    of_bytes: bytes of all pages; None if a size is unknown.
    """

    pages: int
    nbytes: int | None
    of_pages: int
    of_bytes: int | None


def unused_of(groups: PageGroups, deployment_id: int, requests: Requests) -> Unused:
    """Return the pages of a deployment that no request reaches."""
    span = groups.span(deployment_id)
    every = np.arange(span.start, span.stop)
    chosen = every[places_among(groups.pages_at(span), requests.page_names) < 0]
    return Unused(len(chosen), groups.total_bytes(chosen), len(every), groups.total_bytes(every))


def tenancies_of(groups: PageGroups, deployment_id: int, requests: Requests) -> list[Tenancy]:
    """Return the pages of a deployment by salt and by adapter, if requests name these."""
    labels = {kind: requests.labels[kind] for kind in _KINDS if kind in requests.labels}
    if not labels:
        return []
    span = groups.span(deployment_id)
    places = places_among(groups.pages_at(span), requests.page_names)
    return [_tenancy(groups, span, places, requests, kind, label) for kind, label in labels.items()]


def _tenancy(
    groups: PageGroups,
    span: slice,
    places: IntArray,
    requests: Requests,
    kind: str,
    label: Labels,
) -> Tenancy:
    """Return the pages by tenant.

    places: [pages] index of the page among the names of the requests; -1 if no request names it.
    """
    distinct, count = len(requests.names), len(label.names)
    owners = np.repeat(label.ids, np.diff(requests.offsets)).astype(np.int64)
    reached = pc.unique(pa.array(owners * distinct + requests.blocks)).to_numpy()
    tenants, blocks = np.divmod(reached, distinct)
    owner_of = np.full(distinct + 1, _UNREACHED)  # entry -1: pages that no request names
    owner_of[blocks] = tenants + 2
    owner_of[:-1][np.bincount(blocks, minlength=distinct) > 1] = _SHARED
    owner = owner_of[places]
    pages = np.bincount(owner, minlength=count + 2).tolist()
    total = groups.total_bytes(np.arange(span.start, span.stop))
    sums: list[int | None] = [None] * (count + 2)
    if total is not None:
        sums = [*byte_sums(groups.nbytes[span], owner, count + 2).tolist()]
    held = np.bincount(tenants[np.isin(blocks, places)], minlength=count).tolist()
    number = np.bincount(label.ids, minlength=count).tolist()
    every = [
        Tenant(*one) for one in zip(label.names, number, pages[2:], sums[2:], held, strict=True)
    ]
    return Tenancy(
        kind=kind,
        pages=len(places),
        nbytes=total,
        tenants=tuple(sorted(every, key=lambda one: (-one.pages, -one.reached))),
        shared=(pages[_SHARED], sums[_SHARED]),
        unreached=(pages[_UNREACHED], sums[_UNREACHED]),
    )
