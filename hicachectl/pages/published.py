"""Write a listing to files, for processes that each read a part of the files.

The listing is divided by page hash, so all objects of a page are in one part. Objects without a
page are in part 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from hicachectl.backends.base import scan_schema, take_rows
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.resolve import Resolved
from hicachectl.formats.keys.table import page_starts
from hicachectl.formats.objects import Coordinate  # noqa: TC001 - msgspec reads it
from hicachectl.formats.profile import MAX_OBJECT_BYTES
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.io.table_files import write_divided
from hicachectl.pages.deployments import AffixTable, SizeMix, make_table
from hicachectl.pages.inventory import Inventory, first_words
from hicachectl.pages.scanning import (
    AFFIX_ID,
    MEMORY_ROWS,
    Spool,
    resolve_scan,
    scan_columns,
    take_inventory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.io.table_files import Share, TableFile


_WITNESSES = 64  # objects to look up; the store is scanned only if none of them exists


class _ListingForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """JSON form of a listing, without the data that follows from the profile.

    columns: columns of the files, besides AFFIX_ID.
    resolved: coordinate and readings of each affix id.
    sizes: object sizes of each deployment's specs.
    """

    columns: list[str]
    affixes: list[tuple[str, str]]
    resolved: list[tuple[Coordinate | None, list[Coordinate]]]
    sizes: list[list[Annotated[int, msgspec.Meta(ge=UNKNOWN_SIZE, le=MAX_OBJECT_BYTES)]]]
    mixes: list[SizeMix]


@dataclass(frozen=True, slots=True)
class Listing:
    """A listing without its objects.

    columns: names of the objects' columns.
    """

    table: AffixTable
    columns: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema:
        """The schema of a part's objects."""
        return _schema(self.columns)

    def to_mapping(self) -> dict[str, Any]:
        """Return the listing for JSON, without the profile."""
        table = self.table
        form = _ListingForm(
            columns=list(self.columns),
            affixes=list(table.affixes),
            resolved=[(one.coordinate, list(one.readings)) for one in table.resolved],
            sizes=[[spec.nbytes for spec in one.specs] for one in table.deployments],
            mixes=list(table.mixes),
        )
        mapping: dict[str, Any] = msgspec.to_builtins(form)
        return mapping

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], grammar: str, profile: Profile | None, source: str
    ) -> Listing:
        """Return the listing that `to_mapping` wrote.

        grammar: grammar of the store's keys.
        profile: profile of the listing.
        source: name of the mapping, for messages.
        Raises FormatError if the mapping has another form, or does not fit the profile.
        """
        form = convert(dict(mapping), _ListingForm, source)
        try:
            _schema(form.columns)  # raises ValueError for unknown columns
            read = [one for chosen, others in form.resolved for one in (chosen, *others)]
            if not all(one.shard.is_bounded for one in read if one is not None):
                raise ValueError("an affix has too many ranks")
            resolved = [Resolved(one, tuple(readings)) for one, readings in form.resolved]
            table = make_table(form.affixes, resolved, grammar_of(grammar), profile)
            specs = [len(deployment.specs) for deployment in table.deployments]
            if specs != [len(sizes) for sizes in form.sizes]:
                raise ValueError("the affixes have other objects than the sizes")
            deployments = [
                replace(
                    deployment,
                    specs=tuple(
                        replace(spec, nbytes=nbytes)
                        for spec, nbytes in zip(deployment.specs, sizes, strict=True)
                    ),
                )
                for deployment, sizes in zip(table.deployments, form.sizes, strict=True)
            ]
        except ValueError as error:
            raise FormatError(f"{source}: does not fit the profile: {error}") from error
        ids = [affix for mix in form.mixes for affix in mix.affix_ids]
        if not all(0 <= affix < len(form.affixes) for affix in ids):
            raise FormatError(f"{source}: states sizes for affixes that it does not list")
        table = replace(table, deployments=tuple(deployments), mixes=tuple(form.mixes))
        return cls(table, tuple(form.columns))


@dataclass(frozen=True, slots=True)
class Listed:
    """A listing that was written to files, divided into parts.
    shares: row groups of each part.
    """

    listing: Listing
    files: list[TableFile]
    shares: list[Share]


def publish_listing(
    store: Store,
    profile: Profile | None,
    folder: Directory,
    parts: int | Callable[[int], int],
    *,
    columns: Collection[str] = (),
    needs_pages: bool = False,
    on_batch: Callable[[int], None] = lambda objects: None,
    memory_rows: int = MEMORY_ROWS,
) -> Listed:
    """Scan a store, and write its objects to an empty folder, divided into parts.

    parts: number of parts, or a function of the number of objects.
    columns, needs_pages, on_batch: see `take_inventory`.
    memory_rows: largest number of objects in memory. Further objects go to files.
    The call needs about 500 bytes of memory for each of memory_rows objects, or for each of 1/256
    of all objects if these are more. If two models may share keys (`contested`), it needs another
    45 bytes for each object of the store. Raises StoreUnavailable, OSError, and ProfileError if the
    profile contradicts the store.
    """
    wanted = scan_columns(store, columns)
    with Spool(scan_schema(wanted), folder, memory_rows) as spool:
        spool.fill(store.scan(wanted), on_batch)
        table, pieces = resolve_scan(spool, store, profile, needs_pages=needs_pages)
        listing = Listing(table, tuple(wanted))
        count = parts(spool.rows) if callable(parts) else parts
        shares: list[Share] = [{} for _ in range(count)]
        starts = table.page_starts
        rows = (
            (
                piece.objects.append_column(AFFIX_ID, pa.array(piece.affix_ids)),
                np.where(piece.is_foreign, -1, starts[piece.affix_ids]),
            )
            for piece in pieces
        )
        files = _write_pieces(folder, rows, shares, dictionary=("nbytes", AFFIX_ID.name))
    pa.default_memory_pool().release_unused()
    return Listed(listing, files, shares)


def inventory_of(objects: pa.Table, table: AffixTable) -> Inventory:
    """Return the inventory of a part.

    objects: table that `read_share` returned.
    Raises FormatError if `objects` has affixes that the table lacks.
    """
    ids = objects.column(AFFIX_ID.name).to_numpy()
    if len(ids) and not -1 <= ids.min() <= ids.max() < len(table.affixes):
        raise FormatError(
            f"The listing of the part has affixes {ids.min()} to {ids.max()}, but the run has only "
            f"{len(table.affixes)}; give another --run"
        )
    inventory = Inventory(objects.drop_columns([AFFIX_ID.name]), ids, table)
    return inventory.without_unused_columns()


def refuse_unmounted(store: Store, inventory: Inventory) -> None:
    """Raise EmptyStore if a store has no page, although another process listed these objects.

    Without this check, a host that lacks the mount would take all objects for evicted. The store is
    scanned only if none of a sample of the objects exists.
    """
    rows = np.linspace(0, len(inventory.objects) - 1, _WITNESSES, dtype=np.int64)
    if not len(inventory.objects) or store.exists(inventory.take(np.unique(rows))).any():
        return
    take_inventory(store, needs_pages=True)


def _schema(columns: Collection[str]) -> pa.Schema:
    return scan_schema(columns).append(AFFIX_ID)


def publish_rows(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    folder: Directory,
    shares: Sequence[Share],
    prefix: str,
    *,
    on_batch: Callable[[int], None],
    memory_rows: int = MEMORY_ROWS,
) -> list[TableFile]:
    """Write rows about objects to a listing's folder, divided as the listing is.

    batches: rows with key and nbytes.
    shares: receive the row groups of each part.
    prefix: start of the file names.
    on_batch, memory_rows: see `publish_listing`.
    Raises OSError.
    """
    with Spool(schema, folder, memory_rows) as spool:
        spool.fill(batches, on_batch)
        starts = page_starts(spool.affixes)
        pieces = ((rows, starts[ids]) for rows, ids in spool.pieces())
        return _write_pieces(folder, pieces, shares, prefix=prefix)


def _write_pieces(
    folder: Directory,
    pieces: Iterable[tuple[pa.Table, IntArray]],
    shares: Sequence[Share],
    *,
    prefix: str = "",
    dictionary: Collection[str] = (),
) -> list[TableFile]:
    """Write each piece to a file, divided among parts.

    pieces: rows, and the byte offsets of the hashes in their keys; see `_by_part`.
    """
    files = []
    for number, (rows, starts) in enumerate(pieces):
        if len(rows):
            ordered, ends = _by_part(rows, starts, len(shares))
            name = f"{prefix}{number:02x}.parquet"
            files.append(write_divided(folder, name, ordered, ends, shares, dictionary=dictionary))
    return files


def _by_part(rows: pa.Table, starts: IntArray, parts: int) -> tuple[pa.Table, list[int]]:
    """Return rows in the order of their page hashes, and the end of each part's rows.

    starts: [rows] byte offsets of the hashes in the keys; negative for a row without a page, which
        goes to part 0.
    """
    words = first_words(rows, starts)
    order = np.argsort(words, kind="stable")
    bounds = [-(-part * 2**64 // parts) for part in range(1, parts)]
    ends = np.searchsorted(words[order], np.array(bounds, dtype=np.uint64)).tolist()
    return take_rows(rows, order).combine_chunks(), [*ends, len(order)]
