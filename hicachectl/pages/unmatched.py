"""Explain why a command found no page."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.formats.keys import grammar_of
from hicachectl.pages.empty import describe_empty
from hicachectl.pages.groups import PageGroups
from hicachectl.text.units import counted, human_age
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.backends.base import Store
    from hicachectl.pages.inventory import Inventory
    from hicachectl.pages.selection import Selection

_NAMED = 8


def explain_selection(store: Store, listed: Inventory, selection: Selection) -> str:
    """Return why a selection matches no page, in one line. listed: the whole store."""
    groups = PageGroups(listed)
    if not len(groups):
        return describe_empty(store, listed.objects)
    filters = selection.alone()
    if not filters:
        return ""
    several = len(filters) > 1
    alone = [text for text, one in filters.items() if not (several and one.chosen(groups).any())]
    if not alone:
        return f"{', '.join(filters)}: no page matches all of these; leave out one of them"
    known = [_what_is_there(store, groups, listed, text.split(" ", 1)[0]) for text in alone]
    return "; ".join(
        [f"{' or '.join(alone)}: no page matches", *filter(None, dict.fromkeys(known))]
    )


def explain_parts(parts: Iterable[tuple[int, str]]) -> str:
    """Return why no page was chosen in any part of a store, as the largest part tells.

    parts: number of listed objects of each part, and what explains it there.
    """
    counted_parts = list(parts)
    listed, text = max(counted_parts)
    whole = listed == sum(number for number, _ in counted_parts)
    return text if whole or not text else f"{text}; this is counted in the largest part only"


def _what_is_there(store: Store, groups: PageGroups, listed: Inventory, option: str) -> str:
    """Return the values that the store has for an option."""
    used = np.bincount(groups.deployment_ids[groups.deployment_ids >= 0])
    counted = list(zip(groups.deployments, used.tolist(), strict=False))
    said = ""
    match option:
        case "--model":
            said = _listed("models", ((d.names.model, pages) for d, pages in counted))
        case "--tag" | "--no-tag":
            tags = _listed("tags", ((d.names.tag, pages) for d, pages in counted))
            said = tags or _no_tags(store, groups)
        case "--tp" | "--pp" | "--cp" | "--dcp":
            name = f"{option[2:]}_size"
            sizes = ((getattr(d.shard, name), n) for d, n in counted)
            said = _listed(f"{option[2:]} sizes", sizes)
        case "--pool":
            present = np.unique(listed.affix_ids[listed.affix_ids >= 0]).tolist()
            resolved = [listed.table.resolved[affix].coordinate for affix in present]
            said = _listed("pools", ((r.pool, 0) for r in resolved if r is not None))
        case "--state":
            states = np.bincount(groups.states, minlength=len(STATES)).tolist()
            said = _listed("states", ((s, n) for s, n in zip(STATES, states, strict=True) if n))
        case "--since" | "--before":
            said = _ages(groups)
    return said


def _listed(what: str, found: Iterable[tuple[Any, int]]) -> str:
    pages: Counter[Any] = Counter()
    for name, count in found:
        if name or name == 0:
            pages[name] += count
    if not pages:
        return ""
    named = [
        f"{name} ({counted(count, 'page')})" if count else str(name)
        for name, count in sorted(pages.items(), key=lambda item: str(item[0]))
    ]
    more = [f"{len(named) - _NAMED} more"] if len(named) > _NAMED else []
    return f"{what} in the store: {', '.join([*named[:_NAMED], *more])}"


def _no_tags(store: Store, groups: PageGroups) -> str:
    if not grammar_of(store.grammar).has_tag:
        return f"keys of {store.grammar} stores have no tag"
    if any(deployment.profile is not None for deployment in groups.deployments):
        return "no key in the store has a tag"
    return "without a profile, tags cannot be distinguished from model names; give --profile"


def _ages(groups: PageGroups) -> str:
    times = groups.newest_ns[groups.newest_ns > 0]
    if not len(times):
        return ""
    now = time.time()
    oldest, newest = (human_age(max(now - ns / 1e9, 0)) for ns in (times.min(), times.max()))
    span = newest if oldest == newest else f"{oldest} to {newest}"
    return f"pages in the store were written {span} ago"
