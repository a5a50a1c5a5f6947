"""Write a plan to files, for processes that each copy a slice of it.

Slices are consecutive in the plan's order of value, and of about equal bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError
from hicachectl.formats.hashing import HASH_BYTES
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.io.table_files import (
    named_table,
    pieces,
    read_share,
    read_table,
    write_divided,
    write_table,
)
from hicachectl.move.copy_plan import CopyPlan
from hicachectl.move.survey import Action, decide, survey_source
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.published import Listed, Listing, inventory_of
from hicachectl.pages.scanning import AFFIX_ID
from hicachectl.parts.manifest import LIST_AGAIN
from hicachectl.prewarming.prewarm import WATCHED
from hicachectl.requests.chains import Requests, hex_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.arrays import IntArray
    from hicachectl.io.table_files import Share, TableFile
    from hicachectl.parts.job import Tables
    from hicachectl.parts.manifest import Published
    from hicachectl.prewarming.page_plan import PagePlan
    from hicachectl.prewarming.prewarm import Warming

# Wanted pages, best first. copied: whether the page is to be copied.
_PAGES = pa.schema(
    [
        pa.field("page", pa.string(), nullable=False),
        pa.field("copied", pa.bool_(), nullable=False),
    ]
)
# Distinct pages of the chains. restorable: whether servers could restore them from the source.
_NAMES = pa.schema(
    [
        pa.field("page", pa.binary(HASH_BYTES), nullable=False),
        pa.field("restorable", pa.bool_(), nullable=False),
    ]
)
# Pages of the chains, one chain after another. `name` is the row of the page in the file of names.
_CHAINS = pa.schema(
    [
        pa.field("chain", pa.int32(), nullable=False),
        pa.field("name", pa.int32(), nullable=False),
    ]
)
_PAGES_FILE, _OBJECTS_FILE = "pages.parquet", "objects.parquet"
_NAMES_FILE, _CHAINS_FILE = "names.parquet", "chains.parquet"


def planned_pages(
    warming: Warming, listing: Listing, pages: pa.Table, objects: pa.Table, *, asks: bool
) -> CopyPlan:
    """Return pages of a plan with their actions.

    pages: rows of the file of wanted pages.
    objects: objects from which the pages are copied, with affix ids.
    asks: whether to ask the destination for each object. Otherwise, the destination counts as
        empty.
    Raises FormatError if a page has no objects.
    """
    groups = PageGroups(inventory_of(objects, listing.table))
    if asks:
        (survey,) = warming.survey(groups, first_only=True, asks=True)
    else:
        (survey,) = survey_source(groups, warming.routes(groups.inventory.table)[:1])
    rows = pc.index_in(pages.column("page"), value_set=survey.pages)
    if rows.null_count:
        raise FormatError("A slice of the plan has pages without objects; give another --run")
    wanted: IntArray = rows.combine_chunks().to_numpy().astype(np.int64)
    chosen = np.zeros(len(survey.groups), dtype=np.bool_)
    chosen[wanted[pages.column("copied").to_numpy()]] = True
    actions = decide(survey, chosen, "skip")
    return CopyPlan(groups, survey, wanted, actions, together=True)


def write_plan(
    folder: Directory, plan: PagePlan, requests: Requests | None, parts: int | Callable[[int], int]
) -> Listed:
    """Write a plan and its requests to an empty folder.

    parts: number of slices, or a function of the number of objects.
    Raises OSError.
    """
    pages = plan.pages
    positions, rows = _objects(pages)
    count = parts(len(rows)) if callable(parts) else parts
    cost = np.zeros(len(pages.survey.groups), dtype=np.int64)
    cost[pages.items] = pages.cost
    copied = np.zeros(len(cost), dtype=np.bool_)
    copied[pages.items] = True
    copied[pages.rows(Action.COMPARE)] = True
    ends = slice_ends(cost[pages.order], count)
    shares: list[Share] = [{} for _ in range(count)]
    wanted = pa.table(
        [
            pages.survey.pages.take(pa.array(pages.order)).cast(pa.string()),
            pa.array(copied[pages.order]),
        ],
        schema=_PAGES,
    )
    inventory = pages.groups.inventory
    listing = Listing(inventory.table, tuple(inventory.objects.column_names))
    objects = _planned_objects(pages, rows).select(listing.schema.names).cast(listing.schema)
    object_ends = np.searchsorted(positions, ends).tolist()
    files = [
        write_divided(folder, name, table, table_ends, shares)
        for name, table, table_ends in (
            (_PAGES_FILE, wanted, ends.tolist()),
            (_OBJECTS_FILE, objects, object_ends),
        )
    ]
    if requests is not None:
        files += _write_chains(folder, plan, requests.within_reach())
    return Listed(listing, files, shares)


def slice_tables(folder: Directory, published: Published, part: int, listing: Listing) -> Tables:
    """Return functions that read the tables of a slice. Each raises FormatError for a damaged file.

    The tables `pages` and `objects` are for `planned_pages`. The table `best` has the first pages
    of the whole plan.
    """
    pages, objects = (
        named_table(folder, published.files, name, LIST_AGAIN)
        for name in (_PAGES_FILE, _OBJECTS_FILE)
    )
    schema, share = listing.schema, published.shares[part]
    return {
        "pages": lambda: read_share(folder, [pages], share, _PAGES, LIST_AGAIN),
        "objects": lambda: read_share(folder, [objects], share, schema, LIST_AGAIN),
        "best": lambda: read_share(folder, [pages], published.shares[0], _PAGES, LIST_AGAIN)[
            :WATCHED
        ],
    }


def read_plan(
    folder: Directory, files: Sequence[TableFile], listing: Listing
) -> tuple[pa.Table, pa.Table]:
    """Read the pages and the objects of all slices. Raises FormatError for a damaged file."""
    return (
        _read(folder, files, _PAGES_FILE, _PAGES),
        _read(folder, files, _OBJECTS_FILE, listing.schema),
    )


def read_chains(folder: Directory, files: Sequence[TableFile]) -> tuple[Requests, pa.StringArray]:
    """Read the chains, and the pages that servers could restore from the source.

    Raises FormatError for a damaged file.
    """
    names = _read(folder, files, _NAMES_FILE, _NAMES)
    table = _read(folder, files, _CHAINS_FILE, _CHAINS)
    raw = _raw(names.column("page").combine_chunks())
    chain, blocks = (table.column(name).to_numpy() for name in ("chain", "name"))
    ordered = (np.diff(chain, prepend=0) >= 0).all()
    if len(blocks) and not (ordered and blocks.min() >= 0 and blocks.max() < len(raw)):
        place = f"{folder.path}/{_CHAINS_FILE}"
        raise FormatError(f"{place}: has chains of unknown pages; {LIST_AGAIN}")
    starts = np.flatnonzero(np.diff(chain, prepend=-1))
    offsets = np.append(starts, len(chain)).astype(np.int64)
    lengths = np.diff(offsets)
    unknown = np.full(len(lengths), -1, dtype=np.int64)
    requests = Requests(raw, blocks, offsets, unknown, lengths, unknown, lengths)
    return requests, hex_pages(raw[names.column("restorable").to_numpy()])


def _read(folder: Directory, files: Sequence[TableFile], name: str, schema: pa.Schema) -> pa.Table:
    return read_table(folder, named_table(folder, files, name, LIST_AGAIN), schema, LIST_AGAIN)


def _raw(pages: pa.FixedSizeBinaryArray) -> npt.NDArray[np.uint8]:
    """Return the bytes of pages: [n, 32] uint8."""
    content = np.frombuffer(pages.buffers()[1] or b"", np.uint8)
    return content.reshape(-1, HASH_BYTES)[pages.offset : pages.offset + len(pages)]


def slice_ends(cost: IntArray, count: int) -> IntArray:
    """Return the end of each of `count` slices of about equal cost: [count].

    cost: cost of each page, best page first. A page belongs to the slice in which its cost begins.
    """
    before = np.cumsum(cost) - cost
    total = int(cost.sum())
    bounds = np.array([total * part // count for part in range(1, count)], dtype=np.int64)
    return np.append(np.searchsorted(before, bounds), len(cost)).astype(np.int64)


def _objects(pages: CopyPlan) -> tuple[IntArray, IntArray]:
    """Return the rows of the inventory from which the wanted targets are made, best page first.

    Also return the position of each row's page among the wanted pages.
    """
    survey = pages.survey
    route, count = survey.route, len(pages.order)
    at, targets, _ = survey.wanted.objects(pages.order)
    codes = np.unique(route.unit_of_target[targets] * count + at)
    found = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    for number, unit in enumerate(route.units):
        low, high = np.searchsorted(codes, [number * count, (number + 1) * count])
        positions = codes[low:high] - number * count
        if not len(positions) or not unit.sources:
            continue
        slots = survey.rows.slots(pages.order[positions], np.array(unit.sources, dtype=np.int64))
        found.append((np.repeat(positions, len(unit.sources)), slots.astype(np.int64).ravel()))
    positions, rows = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((rows, positions))
    return positions[order], rows[order]


def _planned_objects(pages: CopyPlan, rows: IntArray) -> pa.Table:
    """Return objects of the inventory, with the sizes of the survey and with affix ids."""
    inventory = pages.groups.inventory
    objects = inventory.take(rows).combine_chunks()
    sizes = pages.survey.sizes[rows]
    nbytes = pa.array(sizes, mask=sizes == UNKNOWN_SIZE)
    number = objects.column_names.index("nbytes")
    objects = objects.set_column(number, objects.schema.field(number), nbytes)
    return objects.append_column(AFFIX_ID, pa.array(inventory.affix_ids[rows]))


def _write_chains(folder: Directory, plan: PagePlan, requests: Requests) -> Iterator[TableFile]:
    names = requests.page_names
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(HASH_BYTES), len(names), [None, pa.py_buffer(requests.names)]
    )
    restorable = pc.is_in(names, value_set=plan.names.cast(names.type))
    chain = np.repeat(np.arange(len(requests), dtype=np.int32), np.diff(requests.offsets))
    places = pa.table([pa.array(chain), pa.array(requests.blocks)], schema=_CHAINS)
    for name, table in (
        (_NAMES_FILE, pa.table([fixed, restorable], schema=_NAMES)),
        (_CHAINS_FILE, places),
    ):
        yield write_table(folder, name, pieces(table), table.schema)
