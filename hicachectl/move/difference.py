"""Compare the pages of two stores. Find pages that one store lacks, or has in another form."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import place
from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Confirm
from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys.labels import label_name
from hicachectl.formats.objects import Coordinate, Names
from hicachectl.formats.spec import ObjectSpec, fits
from hicachectl.formats.wording import GIVE_PROFILE
from hicachectl.io.pipeline import Pace, Pipeline
from hicachectl.move.copy_plan import PageWork
from hicachectl.move.destination import listed_targets
from hicachectl.move.difference_outcome import Closers, DifferenceRow, DiffFacts, Kind
from hicachectl.move.store_pair import CopyOptions, StorePair
from hicachectl.move.survey import Action, survey_source
from hicachectl.move.trial import read_now
from hicachectl.pages.census import column_sums
from hicachectl.pages.deployments import UNRESOLVED, Deployment
from hicachectl.pages.group_table import ABSENT, UNKNOWN, UNSIZED, fill_table
from hicachectl.pages.groups import UNKNOWN_BYTES, PageGroups
from hicachectl.pages.in_flight import ListingTime, groups_in_flight, look_if_needed
from hicachectl.pages.listing import group_columns, key_text
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import EVERYTHING, Selection, explain_selection
from hicachectl.text.jsontext import schema_of
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS, STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.io.pipeline import Loaded
    from hicachectl.move.copy_plan import PageBatch
    from hicachectl.move.survey import Objects, Survey
    from hicachectl.pages.inventory import Inventory
    from hicachectl.results import Result

    OnWait = Callable[[float, int], None]

# Batches are large enough that objects share calls, and small enough that several are read at once.
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRequest:
    """Pages to compare, and options of the comparison.

    profile: profile of the first store; None if only its keys are known.
    other_profile: profile of the second store; None if it is the same as `profile`.
    selection: filters. A page is compared if the filters choose it in at least one store.
    allow_empty: whether to accept stores without pages, and filters that match no page.
    options: options of the reads. With `verify`, bytes are compared, too.
    """

    profile: Profile | None = None
    other_profile: Profile | None = None
    selection: Selection = EVERYTHING
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    allow_empty: bool = False
    options: CopyOptions = field(default_factory=CopyOptions)


def compare_stores(
    a: Store,
    b: Store,
    request: DiffRequest,
    *,
    closers: Closers = Closers(),  # noqa: B008 - frozen
    on_listed: Callable[[int], None] = lambda objects: None,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: OnWait = lambda seconds, pages: None,
) -> Result:
    """Compare the pages of two stores, and change nothing.

    closers: words for the suggested commands that copy the missing pages from A to B and from B to
        A.
    on_read: takes the bytes of each batch compared, and the bytes of all batches.
    on_wait: see `pages.in_flight.look_again`.

    Raises UsageError, ProfileError and UnsupportedByBackend if the stores cannot be compared, and
        StoreUnavailable if a store is lost or has no page.
    """
    started = time.monotonic()
    if isinstance(a, type(b)) and a.places == b.places and request.other_profile is None:
        raise UsageError(f"{a.url}: both arguments name this store; give another store")
    plain = request.other_profile is None
    target = request.other_profile or request.profile
    pair = StorePair(a, b, request.profile, target, request.options)
    remarks: list[str] = []

    def listed(store: Store, profile: Profile | None) -> _Side:
        listing = ListingTime.now(store, changes=False)
        inventory = take_inventory(
            store,
            profile,
            needs_pages=not request.allow_empty,
            on_contradiction=lambda error: remarks.append(str(error)),
            on_batch=on_listed,
        )
        listing = listing.ended()
        groups = PageGroups(_with_ambiguous(inventory) if pair.unchanged else inventory)
        remarks.extend(store.remarks)
        return _Side(store, groups, listing, request.selection.chosen(groups))

    first = listed(a, request.profile)
    second = listed(b, target)
    if not (first.chosen.any() or second.chosen.any() or request.allow_empty):
        why = explain_selection(a, first.groups.inventory, request.selection)
        raise UsageError(f"Nothing to compare: {why}")
    pages = _Comparison(pair, first, second)
    pages.judge_in_flight(request.grace_seconds, on_wait)
    if request.options.verify:
        pages.read(on_read)
    return DiffFacts(
        urls=(a.url, b.url),
        writable=(a.traits.writes, b.traits.writes),
        counts=np.bincount(pages.kinds, minlength=len(Kind)),
        sums=pages.sums(),
        rows=pages.rows(),
        reads=request.options.verify,
        nbytes=pages.nbytes,
        unsized=int((pages.unsized & (pages.kinds == Kind.EQUAL)).sum()),
        left_out=pages.left_out(),
        unknown_keys=sum(int(side.groups.inventory.is_foreign.sum()) for side in (first, second)),
        resized=_resized(first.groups, second.groups) if plain else ({}, {}),
        described=_described(first.groups) or _described(second.groups) if plain else "",
        remarks=remarks,
        allow_empty=request.allow_empty,
        seconds=time.monotonic() - started,
    ).result(closers)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two stores, as listed.

    groups: the groups of its listing.
    listing: time of the listing.
    chosen: [groups] whether the filters choose the group.
    """

    store: Store
    groups: PageGroups
    listing: ListingTime
    chosen: BoolArray

    def states(self, groups: IntArray) -> pa.Array:
        """Return the states of some groups, null for ABSENT."""
        ambiguous = self.groups.label_ids == 0
        states = np.append(np.where(ambiguous, UNKNOWN, self.groups.states), 0)[groups]
        return pa.array(STATES).take(pa.array(states, mask=groups == ABSENT))

    def nbytes(self, groups: IntArray) -> pa.Array:
        """Return the bytes of some groups, 0 for ABSENT, null if unknown."""
        nbytes = np.append(self.groups.nbytes, 0)[groups]
        return pa.array(nbytes, mask=nbytes == UNKNOWN_BYTES)

    def young(self, suspects: IntArray, grace_seconds: float, on_wait: OnWait) -> BoolArray:
        """Return which groups servers may still be writing: [groups + 1].

        The last entry is for ABSENT, and is False.
        suspects: groups that differ between the stores, or ABSENT.
        """
        store, groups = self.store, self.groups
        young = groups_in_flight(store, groups, self.listing, grace_seconds)
        suspects = suspects[suspects != ABSENT]
        young |= look_if_needed(
            store, groups, self.listing, grace_seconds, suspects, on_wait=on_wait
        )
        return np.append(young, False)


def _resized(a: PageGroups, b: PageGroups) -> tuple[dict[str, str], dict[str, str]]:
    """Find the deployments of each store whose model the other store has only in other sizes.

    Return a mapping for the deployments of `a`, and one for those of `b`. Each maps the label of
    the deployment to a label in the other store.
    """
    of_a, of_b = ({groups.labels[one] for one in np.unique(groups.label_ids)} for groups in (a, b))

    def only(ours: set[str], theirs: set[str]) -> dict[str, str]:
        named = {label_name(label): label for label in sorted(theirs)}
        found = {label: named.get(label_name(label)) for label in sorted(ours - theirs)}
        return {label: other for label, other in found.items() if other and label_name(label)}

    return only(of_a, of_b), only(of_b, of_a)


def _described(groups: PageGroups) -> str:
    """Return the label of the deployment that a given profile describes; "" if it has no page."""
    own = groups.deployments[:1]
    if not own or own[0].profile is None or own[0].profile.inferred:
        return ""
    numbers = groups.label_ids[groups.span(0)]
    return groups.labels[numbers[0]] if len(numbers) else ""


def _with_ambiguous(inventory: Inventory) -> Inventory:
    """Return the inventory with one more deployment, which has the ambiguous keys.

    Objects of equal keys can be compared whatever the keys mean.
    """
    table = inventory.table
    ids = [
        number
        for number, (owner, one) in enumerate(
            zip(table.deployment_ids, table.resolved, strict=True)
        )
        if owner == UNRESOLVED and one.readings
    ]
    if not ids:
        return inventory
    specs = tuple(
        ObjectSpec(
            affix=table.affixes[one],
            coordinate=Coordinate(Names(), table.resolved[one].readings[0].pool),
            trailing_pages=1,
        )
        for one in ids
    )
    owners, places = list(table.deployment_ids), list(table.spec_ids)
    for position, one in enumerate(ids):
        owners[one], places[one] = len(table.deployments), position
    return replace(
        inventory,
        table=replace(
            table,
            deployments=(*table.deployments, Deployment(Names(), None, specs)),
            deployment_ids=tuple(owners),
            spec_ids=tuple(places),
        ),
    )


class _Comparison:
    """The pages of two stores, side by side.

    a, b: [pages] groups of the two stores, or ABSENT.
    kinds: [pages] int8 of Kind.
    lacking_a, lacking_b: [pages] number of objects that only the other store has.
    nbytes: number of bytes compared.
    unsized: [pages] whether the stores have a common object whose size in one of them is unknown.
    """

    def __init__(self, pair: StorePair, first: _Side, second: _Side) -> None:
        """Compare the names and sizes of objects."""
        self._pair, self._first, self._second = pair, first, second
        self._keys: list[tuple[IntArray, pa.Array]] = []  # groups of A, and a key of each
        self.nbytes = 0
        groups_a, groups_b = first.groups, second.groups
        count_a, count_b = len(groups_a), len(groups_b)
        # For each group, the group of the other store that has at least one of its objects.
        self._in_b, self._in_a = np.full(count_a, ABSENT), np.full(count_b, ABSENT)
        self._kind_of = np.full(count_a, Kind.EQUAL, dtype=np.int8)
        self._unsized = np.zeros(count_a, dtype=np.bool_)
        surveys = survey_source(groups_a, pair.routes(groups_a.inventory.table))
        # Number of objects of each group that only one store has.
        own = np.bincount(groups_b.of_object[self._comparable(surveys)], minlength=count_b)
        self._only_a, self._only_b = np.zeros(count_a, dtype=np.int64), own.copy()
        in_b = listed_targets(surveys, groups_b.inventory)
        self._surveys = [self._with_b(*each) for each in zip(surveys, in_b, strict=True)]
        routed = np.zeros(count_a, dtype=np.bool_)
        for survey in self._surveys:
            routed[survey.groups] = True
        also_b = np.append(second.chosen, False)[self._in_b]
        alone = self._in_a == ABSENT
        a = np.flatnonzero((first.chosen | also_b) & routed)
        b = np.flatnonzero(second.chosen & alone & (own > 0))
        self.a = np.append(a, np.full(len(b), ABSENT))
        self.b = np.append(self._in_b[a], b)
        self.unsized = np.append(self._unsized[a], np.zeros(len(b), dtype=np.bool_))
        extra = np.zeros(count_a + 1, dtype=np.int64)
        np.add.at(extra, self._in_a, self._only_b)
        self.lacking_a = np.append(extra[a], own[b])
        self.lacking_b = np.append(self._only_a[a], np.zeros(len(b), dtype=np.int64))
        self.kinds = np.append(self._kind_of[a], np.full(len(b), Kind.ONLY_IN_B, dtype=np.int8))
        lacks = (self.lacking_a > 0) | (self.lacking_b > 0)
        self.kinds[lacks & (self.kinds == Kind.EQUAL)] = Kind.INCOMPLETE
        self.kinds[self.b == ABSENT] = Kind.ONLY_IN_A
        self._page_of = np.full(count_a, ABSENT)
        self._page_of[a] = np.arange(len(a))
        self._left_out = first.chosen & ~routed, second.chosen & alone & (own == 0)

    def _comparable(self, surveys: Sequence[Survey]) -> BoolArray:
        """Return which objects of B can be compared with objects of A: [objects]."""
        inventory = self._second.groups.inventory
        table = inventory.table
        if self._pair.unchanged:
            known = [number != UNRESOLVED for number in table.deployment_ids]
        else:
            wanted = {target.affix for one in surveys for target in one.route.targets}
            known = [affix in wanted for affix in table.affixes]
        return inventory.by_affix(known, False)

    def _with_b(self, bare: Survey, found: Objects) -> Survey:
        """Return a survey of A with the targets found in B. Record how its groups compare with B's.

        bare: survey of A alone.
        found: the targets that B has, as `listed_targets` yields them.
        """
        at, targets, rows = found
        groups_b = self._second.groups
        numbers, of_b = bare.groups, groups_b.of_object
        self._in_b[numbers[at]] = of_b[rows]
        self._in_a[of_b[rows]] = numbers[at]
        table = fill_table(bare.route.targets, len(numbers), at, targets, rows)
        for block, theirs in zip(bare.wanted.blocks, table.blocks, strict=True):
            both = block.match(theirs)
            self._only_b -= np.bincount(of_b[both[both != ABSENT]], minlength=len(groups_b))
        sizes = groups_b.inventory.sizes[rows]
        survey = bare.having([(at, targets, np.where(sizes < 0, UNSIZED, sizes))])
        objects = self._first.groups.inventory.objects
        survey = self._pair.trailers.with_foreign(survey, objects)
        self._only_a[numbers] = survey.lacking.counts
        self._kind_of[numbers[survey.foreign]] = Kind.IDENTITY
        for ours, theirs in zip(survey.wanted.blocks, survey.existing.blocks, strict=True):
            found_sizes = ours.match(theirs)
            unsized = (found_sizes != ABSENT) & ((found_sizes < 0) | (ours.values < 0))
            self._unsized[numbers[ours.owners[unsized]]] = True
        items, unlike = self._unlike(survey)
        self._kind_of[numbers[items]] = Kind.SIZE
        self._keys.append((numbers[items], survey.keys(items, unlike)))
        return survey

    def _unlike(self, survey: Survey) -> tuple[IntArray, IntArray]:
        """Return the groups with an object whose size differs in B, and such an object of each.

        The groups are numbered within the survey. The objects are slots of its blocks.
        """
        items, targets = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for block, theirs in zip(survey.wanted.blocks, survey.existing.blocks, strict=True):
            unlike = ~fits(block.match(theirs), block.values)
            if not self._pair.unchanged:
                unlike |= block.values == UNSIZED  # a source of the target has the wrong size
            items.append(block.owners[unlike])
            targets.append(block.positions[unlike])
        first, at = np.unique(np.concatenate(items), return_index=True)
        return first, np.concatenate(targets)[at]

    def judge_in_flight(self, grace_seconds: float, on_wait: OnWait) -> None:
        """Mark pages as in flight if they differ and servers may still be writing them."""
        differs = self.kinds != Kind.EQUAL
        for side, numbers in ((self._first, self.a), (self._second, self.b)):
            young = side.young(numbers[differs], grace_seconds, on_wait)
            self.kinds[differs & young[numbers]] = Kind.IN_FLIGHT

    def read(self, on_read: Callable[[int, int], None]) -> None:
        """Compare the bytes of the pages that are EQUAL so far, and set their kinds.

        Raises UsageError if a size is unknown or a page is larger than the buffer. Raises
        StoreUnavailable.
        """
        source, destination = self._pair.source, self._pair.destination
        options = self._pair.options
        works = []
        for survey in self._surveys:
            pages = self._page_of[survey.groups]
            items = np.flatnonzero(pages != ABSENT)
            items = items[self.kinds[pages[items]] == Kind.EQUAL]
            if survey.unfit[items].any():
                raise UsageError(
                    f"{source.url}: the sizes of its objects are unknown; {GIVE_PROFILE}"
                )
            works.append(PageWork(survey, items, Action.COMPARE))
        total = sum(int(work.survey.wanted.sums[work.items].sum()) for work in works)
        batches = (
            work.batches(
                verify=False,
                copies=False,
                most_bytes=min(_BATCH_BYTES, options.buffer_bytes // self._pair.jobs),
                most_objects=destination.limits.batch_objects,
            )
            for work in works
            if len(work.items)
        )
        pipeline = Pipeline(
            source,
            self._first.groups.inventory.objects,
            chain.from_iterable(batches),
            self._judged,
            buffer_bytes=options.buffer_bytes,
            jobs=self._pair.jobs,
            pace=None if options.bytes_per_second is None else Pace(options.bytes_per_second),
            identify=False,
            confirm=isinstance(source, Confirm) and source.confirms,
            destination=destination,
        )
        with closing(iter(pipeline)) as results:
            for batch, kinds, named, keys in results:
                numbers = batch.survey.groups[batch.items]
                self.kinds[self._page_of[numbers]] = kinds
                self._keys.append((numbers[named], keys))
                self.nbytes += int(batch.sizes.sum())
                on_read(int(batch.sizes.sum()), total)

    def _judged(
        self, loaded: Loaded
    ) -> tuple[PageBatch, npt.NDArray[np.int8], IntArray, pa.BinaryArray]:
        """Compare a batch with B. Return four things.

        - the batch
        - the kind of each group
        - the groups with an object whose bytes differ or cannot be read in B
        - the key of one such object of each of these groups
        """
        batch: PageBatch = loaded.task  # type: ignore[assignment]
        kinds = np.full(len(batch.pages), Kind.EQUAL, dtype=np.int8)
        for index in np.flatnonzero(loaded.read.statuses).tolist():
            kinds[batch.owners[index]] = _KINDS.get(loaded.read.statuses[index], Kind.UNREADABLE)
        base = int(loaded.offsets[0]) if len(loaded.offsets) else loaded.room
        memory = loaded.arena.array[base : loaded.room + batch.room]
        for transform in batch.transforms:
            transform.apply(memory)
        back = place(batch.sizes)[0] + base + batch.back
        statuses = read_now(self._pair.destination, batch.targets, back, batch.sizes).statuses
        owners, places = batch.objects.owners, batch.offsets + base
        named: dict[int, int] = {}
        for at in np.flatnonzero(kinds[owners] == Kind.EQUAL).tolist():
            size, status = int(batch.sizes[at]), Status(int(statuses[at]))
            ours, theirs = (loaded.arena.view(int(o[at]), size) for o in (places, back))
            if status is not Status.OK or not np.array_equal(ours, theirs):
                kinds[owners[at]] = _KINDS.get(status, Kind.UNREADABLE)
                named.setdefault(int(owners[at]), at)
        keys = batch.objects.keys.take(pa.array(named.values(), pa.int64()))
        return batch, kinds, np.array([*named], dtype=np.int64), keys

    def sums(self) -> pa.Table:
        """Return the columns of a `DifferenceSum`, a row for each deployment and kind."""
        groups_a, groups_b = self._first.groups, self._second.groups
        labels = {
            label: n for n, label in enumerate(dict.fromkeys([*groups_a.labels, *groups_b.labels]))
        }
        of_a, of_b = (
            np.array([labels[label] for label in groups.labels])[
                np.append(groups.label_ids, 0)[numbers]
            ]
            for groups, numbers in ((groups_a, self.a), (groups_b, self.b))
        )
        label_ids = np.where(self.a == ABSENT, of_b, of_a)
        codes = label_ids * len(Kind) + self.kinds
        distinct, first, rows = np.unique(codes, return_index=True, return_inverse=True)
        of_label, kinds = np.divmod(distinct, len(Kind))
        sides = ((self._first, self.a), (self._second, self.b))
        return pa.table(
            {
                "group": pa.array(list(labels), pa.string()).take(pa.array(of_label)),
                "difference": _texts(kinds),
                "pages": np.bincount(rows, minlength=len(distinct)),
                **{
                    f"nbytes_{letter}": column_sums(side.nbytes(numbers), rows, len(distinct))
                    for letter, (side, numbers) in zip("ab", sides, strict=True)
                },
                "page": self._named(first)["page"],
            }
        )

    def rows(self) -> pa.Table:
        """Return the columns of a `DifferenceRow`, a row for each page that differs."""
        equal = (Kind.EQUAL, Kind.IN_FLIGHT, Kind.GONE)
        pages = np.flatnonzero(~np.isin(self.kinds, equal))
        keys = [pa.array([], pa.binary()), *(keys for _, keys in self._keys)]
        key_of = np.full(len(self.kinds), ABSENT)
        named = np.concatenate([np.zeros(0, np.int64), *(groups for groups, _ in self._keys)])
        known = self._page_of[named] != ABSENT
        key_of[self._page_of[named[known]]] = np.flatnonzero(known)
        a, b = self.a[pages], self.b[pages]
        columns = {
            **self._named(pages),
            "difference": _texts(self.kinds[pages]),
            "state_a": self._first.states(a),
            "state_b": self._second.states(b),
            "nbytes_a": self._first.nbytes(a),
            "nbytes_b": self._second.nbytes(b),
            "lacking_a": self.lacking_a[pages],
            "lacking_b": self.lacking_b[pages],
            "key": key_text(
                pa.concat_arrays(keys).take(pa.array(key_of[pages], mask=key_of[pages] == ABSENT))
            ),
        }
        return pa.table(columns, schema=schema_of(DifferenceRow))

    def _named(self, pages: IntArray) -> dict[str, pa.ChunkedArray]:
        """Return the columns that name some pages, from A or, if A lacks the page, from B."""
        in_a = self.a[pages] != ABSENT
        tables = [
            pa.table(group_columns(side.groups, numbers[pages[chosen]]))
            for side, numbers, chosen in (
                (self._first, self.a, in_a),
                (self._second, self.b, ~in_a),
            )
        ]
        order = np.argsort(np.append(np.flatnonzero(in_a), np.flatnonzero(~in_a)))
        joined = pa.concat_tables(tables).take(pa.array(order))
        return dict(zip(joined.column_names, joined.columns, strict=True))

    def left_out(self) -> dict[str, int]:
        """Return the number of pages that were not compared, by reason."""
        counts = {}
        sides = ((self._first, "A"), (self._second, "B"))
        for (side, letter), left_out in zip(sides, self._left_out, strict=True):
            ambiguous = side.groups.deployment_ids == UNRESOLVED
            why = f"with ambiguous keys in {letter}; hicachectl ls describes them"
            counts[why] = int((left_out & ambiguous).sum())
            why = f"of other deployments than the profile's in {letter}"
            counts[why] = int((left_out & ~ambiguous).sum())
        return counts


# Kind of a page by the status of a read. OK gives BYTES, because the status OK is looked up only if
# the bytes differ. A status that is no key makes the page UNREADABLE.
_KINDS = {
    Status.OK: Kind.BYTES,
    Status.GONE: Kind.GONE,
    Status.CHANGED: Kind.GONE,
    Status.SHORT: Kind.SIZE,
    Status.OVERSIZED: Kind.SIZE,
    Status.FOREIGN: Kind.IDENTITY,
}


def _texts(kinds: npt.NDArray[Any]) -> pa.StringArray:
    return pa.array([kind.text for kind in Kind]).take(pa.array(kinds))
