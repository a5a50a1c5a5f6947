"""Result of a comparison of two stores, with sums, rows and commands that close the differences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.labels import label_sizes, label_text
from hicachectl.pages.listing import GroupNames
from hicachectl.results import Result
from hicachectl.text.jsontext import schema_of
from hicachectl.text.tables import human_sizes, table_lines
from hicachectl.text.terminal import escape_controls
from hicachectl.text.units import counted, human_size
from hicachectl.verification.report_text import Mending

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen


class Kind(IntEnum):
    """Result of the comparison of a page."""

    EQUAL = 0
    ONLY_IN_A = 1
    ONLY_IN_B = 2
    INCOMPLETE = 3  # one store lacks objects that the other store has
    SIZE = 4  # an object has different sizes in the two stores
    IDENTITY = 5  # an object's trailers name different weights, dtypes or layouts in the two stores
    BYTES = 6  # an object has different bytes in the two stores
    UNREADABLE = 7  # an object cannot be read in one of the stores
    IN_FLIGHT = 8  # different, but a server may still be writing the page
    GONE = 9  # an object vanished or was rewritten before its bytes were read

    @property
    def text(self) -> str:
        """Word for the kind in documents."""
        return self.name.lower().replace("_", "-")


# Kinds of pages that both stores have, but that differ between them.
DIFFERENT = (Kind.INCOMPLETE, Kind.SIZE, Kind.IDENTITY, Kind.BYTES, Kind.UNREADABLE)
_SHORT = 12  # digits of a page hash shown in a table
# Kinds of pages for which a comparison cannot tell which store is right.
_CONTESTED = (Kind.SIZE, Kind.IDENTITY, Kind.BYTES, Kind.UNREADABLE)


class DifferenceRow(GroupNames):
    """Row for a page that differs."""

    difference: str
    state_a: str | None
    state_b: str | None
    nbytes_a: int | None
    nbytes_b: int | None
    lacking_a: int
    lacking_b: int
    key: str | None


class DifferenceSum(TypedDict):
    """Sum over the pages of one deployment that have one kind of difference."""

    group: str
    difference: str
    pages: int
    nbytes_a: int | None
    nbytes_b: int | None
    page: str


class Closing(TypedDict):
    """Commands that close differences."""

    text: str
    commands: list[str]


class DiffDocument(msgspec.Struct, kw_only=True):
    """Document of `diff`."""

    a: str
    b: str
    equal: int
    only_in_a: int
    only_in_b: int
    different: int
    in_flight: int
    gone: int
    not_compared: int
    unknown_keys: int
    bytes_compared: int
    seconds: float
    complete: bool
    sums: list[DifferenceSum]
    next: list[Closing]
    differences: list[DifferenceRow] | None = None


class Closers(NamedTuple):
    """Parts of the commands that close differences.

    to_b: parts of commands that copy from A to B.
    to_a: parts of commands that copy from B to A; None if no options can express such a copy.
    undescribed: options of the commands without those that describe a deployment.
    """

    to_b: Mending = Mending(store="A", destination="B")
    to_a: Mending | None = Mending(store="B", destination="A")
    undescribed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffFacts:
    """Facts of a comparison of two stores.

    urls: URLs of A and B.
    writable: whether objects can be written to A, and to B.
    counts: number of pages of each kind.
    sums: rows in the columns of a `DifferenceSum`.
    rows: rows in the columns of a `DifferenceRow`.
    reads: whether bytes were compared.
    nbytes: number of bytes compared.
    unsized: number of equal pages with objects of unknown size.
    left_out: number of pages not compared, by reason.
    unknown_keys: number of objects with keys that SGLang does not write, in both stores together.
    resized: deployments of A, and of B, whose model the other store has only in other sizes. The
        mappings are from the label of the deployment to a label in the other store.
    described: label of the deployment that the given profile describes; "" without one.
    remarks: messages about the stores.
    allow_empty: whether to accept that no page was compared.
    """

    urls: tuple[str, str]
    writable: tuple[bool, bool]
    counts: IntArray
    sums: pa.Table
    rows: pa.Table
    reads: bool
    nbytes: int
    unsized: int
    left_out: Mapping[str, int]
    unknown_keys: int
    resized: tuple[Mapping[str, str], Mapping[str, str]]
    described: str
    remarks: Sequence[str]
    allow_empty: bool
    seconds: float

    def count(self, *kinds: Kind) -> int:
        """Return the number of pages of some kinds."""
        return int(self.counts[list(kinds)].sum())

    def result(self, closers: Closers) -> Result:
        """Return the result. A result is a failure if a page differs, or if no page was compared.

        With `allow_empty`, a comparison of no page is a success.
        """
        undone = list(self._undone())
        differing = self.count(Kind.ONLY_IN_A, Kind.ONLY_IN_B, *DIFFERENT)
        compared = differing + self.count(Kind.EQUAL)
        if not (compared or self.allow_empty):
            undone.append("No page was compared")
        document = DiffDocument(
            a=self.urls[0],
            b=self.urls[1],
            equal=self.count(Kind.EQUAL),
            only_in_a=self.count(Kind.ONLY_IN_A),
            only_in_b=self.count(Kind.ONLY_IN_B),
            different=self.count(*DIFFERENT),
            in_flight=self.count(Kind.IN_FLIGHT),
            gone=self.count(Kind.GONE),
            not_compared=sum(self.left_out.values()),
            unknown_keys=self.unknown_keys,
            bytes_compared=self.nbytes,
            seconds=round(self.seconds, 3),
            complete=not self.count(Kind.IN_FLIGHT, Kind.GONE),
            sums=self.sums.to_pylist(),
            next=list(self._closings(closers)),
        )
        return Result(
            document=msgspec.to_builtins(document),
            rows=self.rows,
            rows_name="differences",
            lines=_lines,
            remarks=[*undone, *self.remarks],
            undone=undone,
            failed=bool(differing) or not (compared or self.allow_empty),
        )

    def _undone(self) -> Iterator[str]:
        """Yield messages about pages that were not compared."""
        for why, count in self.left_out.items():
            if count:
                yield f"Not compared: {counted(count, 'page')} {why}"
        if unknown := self.unknown_keys:
            yield (
                f"Not compared: {counted(unknown, 'object')} with unknown keys; hicachectl verify "
                "lists them"
            )
        if self.unsized and not self.reads:
            yield (
                f"Compared by names alone: {counted(self.unsized, 'page')} with objects of unknown "
                "size; give --profile"
            )
        if young := self.count(Kind.IN_FLIGHT):
            yield (
                f"Not judged: {counted(young, 'page')} that differ, but are younger than --grace, "
                "so servers may still be writing them; run again later"
            )
        if gone := self.count(Kind.GONE):
            yield (
                f"Not judged: {counted(gone, 'page')} that vanished before their bytes were read; "
                "run again"
            )

    def _closings(self, closers: Closers) -> Iterator[Closing]:
        """Yield the commands that close the differences, first copies and then replacements."""
        for giver, taker, mending, only in (
            ("a", "b", closers.to_b, Kind.ONLY_IN_A),
            ("b", "a", closers.to_a, Kind.ONLY_IN_B),
        ):
            lacking = self._lacking(taker, only)
            resized = self.resized["ab".index(giver)]
            apart = pc.is_in(lacking.column("group"), pa.array(resized, pa.string()))
            yield from self._copies(giver, taker, mending, lacking.filter(pc.invert(apart)))
            counts = Counter(lacking.filter(apart).column("group").to_pylist())
            for label, pages in counts.items():
                own = mending
                if mending is not None and label != self.described:
                    own = msgspec.structs.replace(mending, options=closers.undescribed)
                yield self._conversion(taker, own, label, resized[label], pages)
        if contested := self.count(*_CONTESTED):
            yield self._contested(contested, closers)

    def _lacking(self, taker: str, only: Kind) -> pa.Table:
        """Return the rows of the pages of which one store lacks objects.

        taker: letter of this store in the columns of `rows`.
        only: kind of the pages that only the other store has.
        """
        incomplete = pc.and_(
            pc.equal(self.rows.column("difference"), Kind.INCOMPLETE.text),
            pc.greater(self.rows.column(f"lacking_{taker}"), 0),
        )
        lacking = pc.or_(pc.equal(self.rows.column("difference"), only.text), incomplete)
        return self.rows.filter(lacking)

    def _copies(
        self, giver: str, taker: str, mending: Mending | None, pages: pa.Table
    ) -> Iterator[Closing]:
        """Yield the commands that copy pages.

        giver, taker: letters of the source and the destination in the columns of `rows`.
        pages: rows of the pages.
        """
        if not len(pages):
            return
        states = Counter(pages.column(f"state_{giver}").to_pylist())
        name, ambiguous = taker.upper(), states["unknown"]
        text = f"{counted(len(pages), 'page')} that {name} lacks, or has in part"
        partly = len(pages) - states["whole"] - ambiguous
        commands = []
        if ambiguous:
            text += f", {ambiguous} of them with ambiguous keys, which a profile must decide first"
        if partly:
            text += f", {partly} of them not whole in {giver.upper()}"
        if not self.writable["ab".index(taker)]:
            text += f"; objects cannot be written to {name}"
        elif mending is None:
            text += "; for a command that copies them, give --to-profile, not other --to options"
        elif ambiguous < len(pages):
            option = " --include-partial" if partly else ""
            commands = [mending.command(f"hicachectl migrate STORE DST OPTIONS{option}")]
        yield {"text": text, "commands": commands}

    def _conversion(
        self, taker: str, mending: Mending | None, label: str, theirs: str, pages: int
    ) -> Closing:
        """Return the command that converts the pages of one deployment for another TP size.

        taker: letter of the destination.
        mending: parts of the command.
        label, theirs: labels of the deployment, and of the destination's deployment.
        """
        name = taker.upper()
        text = (
            f"{counted(pages, 'page')} of {label_text(label)} that {name} lacks. {name} has "
            f"{label_text(theirs)}, whose servers cannot read plain copies"
        )
        ours, wanted = map(label_sizes, (label, theirs))
        same = {**ours, "tp": 0} == {**wanted, "tp": 0}
        if not ("tp" in ours and "tp" in wanted and same and self.writable["ab".index(taker)]):
            return {"text": text, "commands": []}
        assert mending is not None  # with --to options, `resized` is empty
        profile = "" if label == self.described else "--profile FILE"
        text += f"; {'with their profile as FILE, ' if profile else ''}this command converts them"
        command = f"hicachectl migrate STORE DST OPTIONS {profile} --to-tp {wanted['tp']}"
        return {"text": text, "commands": [mending.command(command)]}

    def _contested(self, pages: int, closers: Closers) -> Closing:
        """Return the commands that replace contested pages in B by the pages in A."""
        verify = " --verify" if self.reads else ""
        text = (
            f"{counted(pages, 'page')} whose objects differ; hicachectl verify may show which "
            "store is right"
        )
        commands = []
        if self.writable[1]:
            text += "; if A is right"
            commands = [
                f"hicachectl diff STORE DST OPTIONS{verify} --format jsonl -o differences.jsonl",
                "hicachectl migrate STORE DST OPTIONS --pages differences.jsonl "
                "--if-exists overwrite",
            ]
        return {"text": text, "commands": [closers.to_b.command(one) for one in commands]}


def _lines(document: dict[str, Any], screen: Screen, _shown: Shown) -> Iterator[str]:
    """Yield the lines of the `table` format."""
    sums = document["sums"]
    if sums:
        yield from table_lines(_sums_for_people(sums), screen)
        yield ""
    for letter in ("a", "b"):
        yield f"{letter.upper()}: {escape_controls(document[letter])}"
    for closing in document["next"]:
        yield f"{closing['text']}:" if closing["commands"] else closing["text"]
        yield from (f"  {escape_controls(command)}" for command in closing["commands"])
    yield _sum_line(document)


def _sums_for_people(sums: Sequence[DifferenceSum]) -> pa.Table:
    """Return the text columns of the sums; ">" marks right-aligned columns."""
    columns = pa.Table.from_pylist(list(sums), schema=schema_of(DifferenceSum))
    return pa.table(
        {
            "deployment": [label_text(one["group"]) for one in sums],
            "difference": columns.column("difference"),
            ">pages": columns.column("pages").cast(pa.string()),
            ">in a": human_sizes(columns.column("nbytes_a")),
            ">in b": human_sizes(columns.column("nbytes_b")),
            "first page": pc.utf8_slice_codeunits(columns.column("page"), 0, _SHORT),
        }
    )


def _sum_line(document: Mapping[str, Any]) -> str:
    """Return a line with the numbers of equal and different pages, and what was compared."""
    differing = sum(document[name] for name in ("only_in_a", "only_in_b", "different"))
    by = "names and sizes, bytes not read"
    if document["bytes_compared"]:
        by = f"names, sizes and bytes, {human_size(document['bytes_compared'])} compared"
    unjudged = document["in_flight"] + document["gone"] + document["not_compared"]
    more = f"; {counted(unjudged, 'page')} not compared" if unjudged else ""
    return f"{counted(document['equal'], 'page')} equal ({by}); {differing} different{more}"
