"""Lists of pages or groups, and the groups of a store that they name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys.labels import label_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.groups import PageGroups
_SHOWN_LABELS = 4


@dataclass(frozen=True, slots=True)
class PageList:
    """Pages that a file names, in the file's order.

    source: the file, for messages.
    pages: page hashes.
    groups: each page's group label (`ls` shows it as "group"); None: all groups.
    lengths: pages in each line; a line of several is a chain.
    """

    source: str
    pages: list[str]
    groups: list[str | None]
    lengths: list[int]

    @classmethod
    def of_pages(cls, pages: Iterable[str], source: str = "pages") -> PageList:
        """Return a list of pages, each in all its groups."""
        listed = list(pages)
        return cls(source, listed, [None] * len(listed), [1] * len(listed))

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

    A row with a group label names that group; a bare page names all its groups.
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
        """Indices of each row's distinct page and of its label; labels: -1 bare, -2 unknown."""
        numbers: dict[str | None, int] = {t: n for n, t in enumerate(self.groups.labels)}
        numbers[None] = -1
        labels = [numbers.get(group, -2) for group in self.listed.groups]
        pages = pa.array(self.listed.pages, pa.string())
        at = pc.index_in(pages, value_set=self._distinct).to_numpy(zero_copy_only=False)
        return at.astype(np.int64), np.array(labels, dtype=np.int64)

    @cached_property
    def by_page(self) -> BoolArray:
        """Groups named by their page alone: [groups]."""
        at, labels = self._rows
        is_bare = np.zeros(len(self._distinct) + 1, dtype=np.bool_)
        is_bare[at[labels == -1]] = True
        named: BoolArray = is_bare[self._at]
        return named

    @cached_property
    def chosen(self) -> BoolArray:
        """Groups named by page or label: [groups]."""
        at, labels = self._rows
        known = labels >= 0
        wanted = at[known] * len(self.groups.labels) + labels[known]
        named: BoolArray = np.isin(self._codes, wanted) | self.by_page
        return named

    @property
    def matched(self) -> int:
        """Number of rows with a label that name a group of the store."""
        at, labels = self._rows
        codes = at * len(self.groups.labels) + labels
        return int(((labels >= 0) & np.isin(codes, self._codes)).sum())

    @cached_property
    def _codes(self) -> IntArray:
        """One number for each group's page and label, -1 if not listed: [groups]."""
        codes = self._at * len(self.groups.labels) + self.groups.label_ids
        return np.where(self._at >= 0, codes, -1)

    def refuse_several(self, among: BoolArray, store: str) -> None:
        """Raise UsageError if a bare page names groups of several deployments.

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
        shown = ", ".join(map(label_text, labels[:_SHOWN_LABELS])) + (
            ", …" if number > _SHOWN_LABELS else ""
        )
        page = self._distinct[int(pages[several[0]])].as_py()
        more = f" ({len(several)} such pages)" if len(several) > 1 else ""
        raise UsageError(
            f"{self.listed.source}: page {page} has groups of {number} deployments: {shown}{more}; "
            f"list rows that name the group (hicachectl ls {store} --format jsonl), choose one "
            "with --model, --tag, --tp, --pp or --cp, or give --all-deployments to remove all"
        )
