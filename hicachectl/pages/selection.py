"""Filters on page groups, for every command; lists of pages; reasons why no group matched."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.labels import label_text
from hicachectl.formats.objects import AXES
from hicachectl.pages.group_table import PARTIAL
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import describe_empty
from hicachectl.text.units import counted, first_of, human_age
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.inventory import Inventory


@dataclass(frozen=True, slots=True)
class PageList:
    """Pages that a file names, in the file's order.

    source: the file, for messages.
    pages: page hashes.
    groups: group label of each page, which `ls` shows as "group"; None for all groups of the page.
    lengths: number of pages in each line. A line of several pages is a chain.
    """

    source: str
    pages: list[str]
    groups: list[str | None]
    lengths: list[int]

    @property
    def labelled(self) -> int:
        """Number of rows with a group label."""
        return sum(group is not None for group in self.groups)

    @property
    def is_chained(self) -> bool:
        """Whether any line is a chain of several pages."""
        return any(length > 1 for length in self.lengths)

    def chains(self) -> Iterator[list[str]]:
        """Yield the pages of each line."""
        pages = iter(self.pages)
        return (list(islice(pages, length)) for length in self.lengths)

    def only_in_others(self, label: str) -> list[str]:
        """Return the pages that rows name only in groups other than `label`."""
        rows = list(zip(self.pages, self.groups, strict=True))
        named = {page for page, group in rows if group in (None, label)}
        return [page for page, _ in rows if page not in named]


@dataclass(frozen=True)
class NamedGroups:
    """Groups of a store that a page list names.

    A row with a group label names one group of its page. A row without a label names all groups of
    its page.
    """

    listed: PageList
    groups: PageGroups

    @cached_property
    def _distinct(self) -> pa.StringArray:
        return pc.unique(pa.array(self.listed.pages, pa.string()))

    @cached_property
    def _at(self) -> IntArray:
        """Index of each group's page among the distinct pages, -1 if not listed: [groups]."""
        at: IntArray = pc.index_in(self.groups.pages, value_set=self._distinct).fill_null(-1)
        return np.asarray(at, dtype=np.int64)

    @cached_property
    def _rows(self) -> tuple[IntArray, IntArray]:
        """Index of each row's distinct page, and of its label.

        The index of the label is -1 for no label, and -2 for a label that the store lacks.
        """
        numbers: dict[str | None, int] = {t: n for n, t in enumerate(self.groups.labels)}
        numbers[None] = -1
        labels = [numbers.get(group, -2) for group in self.listed.groups]
        pages = pa.array(self.listed.pages, pa.string())
        at = pc.index_in(pages, value_set=self._distinct).to_numpy(zero_copy_only=False)
        return at.astype(np.int64), np.array(labels, dtype=np.int64)

    @cached_property
    def by_page(self) -> BoolArray:
        """Whether a row without a label names the group: [groups]."""
        at, labels = self._rows
        is_bare = np.zeros(len(self._distinct) + 1, dtype=np.bool_)
        is_bare[at[labels == -1]] = True
        named: BoolArray = is_bare[self._at]
        return named

    @cached_property
    def chosen(self) -> BoolArray:
        """Whether any row names the group: [groups]."""
        at, labels = self._rows
        known = labels >= 0
        wanted = at[known] * len(self.groups.labels) + labels[known]
        named: BoolArray = np.isin(self._codes, wanted) | self.by_page
        return named

    @property
    def matched(self) -> int:
        """Number of rows with a label whose group is in the store."""
        at, labels = self._rows
        codes = at * len(self.groups.labels) + labels
        return int(((labels >= 0) & np.isin(codes, self._codes)).sum())

    @cached_property
    def _codes(self) -> IntArray:
        """One number for each group's page and label, -1 if not listed: [groups]."""
        codes = self._at * len(self.groups.labels) + self.groups.label_ids
        return np.where(self._at >= 0, codes, -1)

    def refuse_several(self, among: BoolArray, store: str) -> None:
        """Raise UsageError if a row without a label names groups of several deployments.
        among: [groups] whether other filters select the group.
        """
        count = len(self.groups.labels)
        codes = np.unique(self._codes[self.by_page & among])
        pages, first, groups = np.unique(codes // count, return_index=True, return_counts=True)
        several = np.flatnonzero(groups > 1)
        if not len(several):
            return
        one, number = first[several[0]], groups[several[0]]
        labels = [self.groups.labels[c % count] for c in codes[one : one + number].tolist()]
        shown = first_of(map(label_text, labels))
        page = self._distinct[int(pages[several[0]])].as_py()
        more = f" ({len(several)} such pages)" if len(several) > 1 else ""
        raise UsageError(
            f"{self.listed.source}: page {page} has groups of {number} deployments: {shown}{more}; "
            f"write rows that name the group (hicachectl ls {store} --format jsonl), choose a "
            "deployment with --model, --tag, --tp, --pp or --cp, or give --all-deployments to "
            "remove all"
        )


_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filters on page groups. All objects of a group that fits all given filters are selected.

    model: served name. A "/" in it equals a "-".
    tag: tag of Mooncake keys; "" selects groups without one.
    tp, pp, cp, dcp: sizes of the deployment, as `ls` shows them.
    pool: selects groups with an object of the pool.
    page: prefix of page hashes.
    since: Unix seconds. Selects groups whose newest object was written at this time or later.
    before: Unix seconds. Selects groups whose newest object was written before this time.
    states: names in `vocabulary.STATES`. With a profile, only groups of its deployment count as
        partial. The specs of other deployments are inferred, so one stray object would make all
        their pages partial.
    pages: list that names pages or groups.
    Raises UsageError for an empty model, pool or page, because a script with an unset variable
    gives an empty text. Also raises UsageError for a prefix that is not hexadecimal.
    """

    model: str | None = None
    tag: str | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dcp: int | None = None
    pool: str | None = None
    page: str | None = None
    since: float | None = None
    before: float | None = None
    states: tuple[str, ...] = ()
    pages: PageList | None = None

    def __post_init__(self) -> None:
        for name in ("model", "pool", "page"):
            text = getattr(self, name)
            if text is not None and not text.strip():
                raise UsageError(f"{name}: empty; give a {name}, or leave it out")
        if self.page is not None and not _HEX.issuperset(self.page.lower()):
            raise UsageError(f"Page prefix {self.page!r}: must be hexadecimal digits")

    def __bool__(self) -> bool:
        return self != EVERYTHING

    @property
    def names_deployment(self) -> bool:
        """Whether a filter on the deployment is given."""
        asked = (self.model, self.tag, *(getattr(self, axis) for axis in AXES))
        return any(value is not None for value in asked)

    def fits(self, deployment: Deployment, sizes: Mapping[str, int] | None = None) -> bool:
        """Return whether a deployment fits.

        sizes: size of each axis; None for the sizes that `ls` shows.
        """
        model, tag = deployment.names.columns.values()
        if self.model is not None and model != self.model.replace("/", "-"):
            return False
        if sizes is None:
            sizes = {axis: getattr(deployment.shard, f"{axis}_size") for axis in AXES}
        wanted = ((getattr(self, axis), sizes[axis]) for axis in AXES)
        return self.tag in (None, tag or "") and all(n in (None, size) for n, size in wanted)

    def chosen(self, groups: PageGroups) -> BoolArray:
        """Return which groups are selected: [groups].

        Raises UsageError if `since` or `before` is given and the store keeps no times.
        """
        chosen = np.ones(len(groups), dtype=np.bool_)
        if self.names_deployment:
            fitting = [self.fits(deployment) for deployment in groups.deployments]
            chosen &= np.array([*fitting, False])[groups.deployment_ids]
        if self.page is not None:
            chosen &= pc.starts_with(groups.pages, self.page.lower()).to_numpy(zero_copy_only=False)
        for option, moment in (("--since", self.since), ("--before", self.before)):
            if moment is None:
                continue
            if len(groups) and not groups.has_times:
                raise no_times(option)
            # A float holds today's Unix seconds to the microsecond, as precisely as options do.
            older = groups.newest_ns < round(moment * 1e6) * 1000
            chosen &= (groups.newest_ns > 0) & (older if option == "--before" else ~older)
        if self.states:
            chosen &= np.isin(groups.states, [STATES.index(state) for state in self.states])
            chosen &= ~unjudged_partial(groups)
        if self.pool is not None:
            chosen &= groups.having(self.pool)
        if self.pages is not None:
            chosen &= NamedGroups(self.pages, groups).chosen
        return chosen

    def unjudged(self, groups: PageGroups) -> int:
        """Return how many groups look partial, but are not selected, because of their deployment.

        See `unjudged_partial`.
        """
        if STATES[PARTIAL] not in self.states:
            return 0
        unjudged = unjudged_partial(groups) & replace(self, states=()).chosen(groups)
        return int(unjudged.sum())

    def alone(self) -> dict[str, Selection]:
        """Return a selection by each given filter alone, keyed by the option's text."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            _option_text(name, value): Selection(**{name: value})
            for name, value in given.items()
            if value != getattr(EVERYTHING, name)
        }


EVERYTHING = Selection()


def select(inventory: Inventory, selection: Selection) -> Inventory:
    """Return the inventory of the selected groups. Raises UsageError as `Selection.chosen`."""
    if not selection:
        return inventory
    groups = PageGroups(inventory)
    return inventory.only(groups.rows_in(selection.chosen(groups)))


def no_times(option: str) -> UsageError:
    """Return the refusal of an option about times for a store that keeps no times."""
    return UsageError(f"{option}: the store keeps no timestamps; leave out {option}")


def unjudged_partial(groups: PageGroups) -> BoolArray:
    """Return which groups look partial, but are of other deployments than the profile's: [groups].

    Without a profile, there are no such groups.
    """
    profiled = np.array([*(d.profile is not None for d in groups.deployments), False])
    if not profiled.any():
        return np.zeros(len(groups), dtype=np.bool_)
    unjudged: BoolArray = (groups.states == PARTIAL) & ~profiled[groups.deployment_ids]
    return unjudged


def _option_text(name: str, value: Any) -> str:
    """Return a filter as on the command line. The values of times and lists are left out."""
    if name == "tag" and not value:
        return "--no-tag"
    if name in ("since", "before", "pages"):
        return f"--{name}"
    if name == "states":
        return f"--state {','.join(value)}"
    return f"--{name} {value}"


def explain_selection(store: Store, listed: Inventory, selection: Selection) -> str:
    """Return why a selection matches no page, in one line.

    Return "" if the selection has no filter and the store has pages.
    listed: inventory of all objects of the store.
    """
    groups = PageGroups(listed)
    if not len(groups):
        return describe_empty(store, listed)
    filters = selection.alone()
    if not filters:
        return ""
    several = len(filters) > 1
    alone = [text for text, one in filters.items() if not (several and one.chosen(groups).any())]
    if not alone:
        return f"{', '.join(filters)}: no page matches all of these; leave out one of them"
    known = [_stored_values(store, groups, listed, text.split(" ", 1)[0]) for text in alone]
    return "; ".join(
        [f"{' or '.join(alone)}: no page matches", *filter(None, dict.fromkeys(known))]
    )


def explain_parts(parts: Iterable[tuple[int, str]]) -> str:
    """Return why no page was chosen in any part of a store.

    This is the explanation of the part with the most objects.
    parts: number of listed objects of each part, and the explanation of the part.
    """
    counted_parts = list(parts)
    listed, text = max(counted_parts)
    whole = listed == sum(number for number, _ in counted_parts)
    return text if whole or not text else f"{text}; this is counted in the largest part only"


def _stored_values(store: Store, groups: PageGroups, listed: Inventory, option: str) -> str:
    """Return the values of the store that an option can select, as text."""
    used = np.bincount(groups.deployment_ids[groups.deployment_ids >= 0])
    counted = list(zip(groups.deployments, used.tolist(), strict=False))
    said = ""
    match option:
        case "--model":
            said = _values("models", ((d.names.model, pages) for d, pages in counted))
        case "--tag" | "--no-tag":
            tags = _values("tags", ((d.names.tag, pages) for d, pages in counted))
            said = tags or _no_tags(store, groups)
        case "--tp" | "--pp" | "--cp" | "--dcp":
            name = f"{option[2:]}_size"
            sizes = ((getattr(d.shard, name), n) for d, n in counted)
            said = _values(f"{option[2:]} sizes", sizes)
        case "--pool":
            present = np.unique(listed.affix_ids[listed.affix_ids >= 0]).tolist()
            resolved = [listed.table.resolved[affix].coordinate for affix in present]
            said = _values("pools", ((r.pool, 0) for r in resolved if r is not None))
        case "--state":
            states = np.bincount(groups.states, minlength=len(STATES)).tolist()
            said = _values("states", ((s, n) for s, n in zip(STATES, states, strict=True) if n))
        case "--since" | "--before":
            said = _ages(groups)
    return said


def _values(what: str, found: Iterable[tuple[Any, int]]) -> str:
    pages: Counter[Any] = Counter()
    for name, count in found:
        if name or name == 0:
            pages[name] += count
    if not pages:
        return ""
    named = (
        f"{name} ({counted(count, 'page')})" if count else str(name)
        for name, count in pages.items()
    )
    return f"{what} in the store: {first_of(named)}"


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
