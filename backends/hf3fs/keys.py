"""Keys of a 3FS store, RANK:NAMESPACE:KEY: their tables on the metadata server, and page sizes.

The grammar of KEY is in formats.keys.hf3fs. Only a profile states the sizes of pages.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import keys_of
from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.objects import PAGE_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicachectl.backends.base import Rows
    from hicachectl.backends.page_tables import PageTable, TableName
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile

Affix = tuple[bytes, bytes]  # the key before and after its page hash

# Regular expressions.
RANK = "0|[1-9][0-9]{0,8}"
NAMESPACE = "[A-Za-z0-9_.-]{1,100}"

_KEY = re.compile(rf"(?:{RANK}):{NAMESPACE}:".encode())
_PAGE_KEY = re.compile(rb"([^:]*:[^:]*:)[0-9a-f]{%d}(.*)" % PAGE_DIGITS, re.DOTALL)

_CHECK_SIZES = (
    "check that the profile is this deployment's and that the file was not truncated, or give "
    "SGLang's file size as file_size= in the URL"
)
_LONGEST = 1 << 20  # end of the compared bytes of a key, because binary_slice needs an end


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """The rows of one table.

    at: [n] int64, row indices in the call.
    keys: [n] keys with their prefix.
    skipped: bytes of the prefix, which the server's names do not have.
    """

    table: TableName
    at: IntArray
    keys: list[bytes]
    skipped: int

    def only(self, chosen: npt.NDArray[Any]) -> TableRows:
        """Return rows chosen by index or mask."""
        places = np.arange(len(self.at))[chosen]
        if len(places) == len(self.at):
            return self
        keys = [self.keys[n] for n in places.tolist()]
        return TableRows(self.table, self.at[places], keys, self.skipped)

    @property
    def names(self) -> list[str]:
        """Return the keys' names on the server."""
        return [key[self.skipped :].decode() for key in self.keys]


def rows_by_table(rows: Rows) -> list[TableRows]:
    """Group rows by table; rows with invalid keys are left out."""
    keys = keys_of(rows)
    match = _KEY.match(keys[0]) if keys else None
    # Rows of one table have a fast path, because reads of small objects would spend most of their
    # time parsing keys. ASCII keys are text, so they need no check one by one.
    if match is not None and b"".join(keys).isascii():
        prefix = match[0]
        # If the smallest and the largest key have the prefix, all keys do.
        if min(keys).startswith(prefix) and max(keys).startswith(prefix):
            return [TableRows(table_of(prefix), np.arange(len(keys)), keys, len(prefix))]
    return _rows_of_many_tables(keys)


def _rows_of_many_tables(keys: list[bytes]) -> list[TableRows]:
    places: dict[bytes, list[int]] = {}
    for at, key in enumerate(keys):
        match = _KEY.match(key)
        if match is not None and _is_text(key):  # the server's names are text
            places.setdefault(match[0], []).append(at)
    return [
        TableRows(table_of(prefix), np.array(at), [keys[n] for n in at], len(prefix))
        for prefix, at in places.items()
    ]


def table_of_key(key: bytes) -> TableName | None:
    """Return the table of a key; None if the key is invalid."""
    match = _KEY.match(key)
    return table_of(match[0]) if match else None


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def prefix_of(table: TableName) -> bytes:
    """Return the prefix of a table's keys."""
    return f"{table[0]}:{table[1]}:".encode()


def affix_of(key: bytes) -> Affix | None:
    """Split a key around its page hash; None if the key has none."""
    match = _PAGE_KEY.fullmatch(key)
    return (match[1], match[2]) if match else None


def table_of(prefix: bytes) -> TableName:
    """Parse the prefix of a table's keys."""
    rank, namespace, _ = prefix.decode().split(":")
    return int(rank), namespace


def names_of(keys: Any, table: TableName) -> list[str]:
    """Return the server's names of a table's keys.

    keys: binary array.
    """
    skipped = len(prefix_of(table))
    return [key[skipped:] for key in keys.cast(pa.string()).to_pylist()]


def shown(key: bytes) -> str:
    """Return a key as text for messages."""
    return key.decode(errors="backslashreplace")


# page sizes


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Bytes of a page by table, and the affixes of the deployment's keys."""

    nbytes: Mapping[TableName, int]
    affixes: frozenset[Affix]

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """Return the page sizes of a profile.

        Raises ProfileError if objects of one table differ in size, UnsupportedByBackend for objects
        that 3FS cannot hold.
        """
        from hicachectl.formats.spec import object_specs

        specs = object_specs(profile, "hf3fs")
        return cls.of_objects((spec.affix, spec.nbytes) for spec in specs)

    @classmethod
    def of_objects(cls, objects: Iterable[tuple[tuple[str, str], int]]) -> Self:
        """Return the page sizes of objects, given by affix and bytes. Raises ProfileError."""
        nbytes: dict[TableName, int] = {}
        affixes = set()
        for (before, after), size in objects:
            table = table_of(before.encode())
            known = nbytes.setdefault(table, size)
            if known != size:
                raise ProfileError(
                    f"pools[{table[1]}]: objects of {known} and {size} bytes cannot share a 3FS "
                    "file, which has pages of one size; check the profile"
                )
            affixes.add((before.encode(), after.encode()))
        return cls(nbytes, frozenset(affixes))

    def check_page_counts(
        self, url: str, tables: Iterable[PageTable], file_size: int, lengths: Mapping[str, int]
    ) -> str | None:
        """Compare the tables' page counts with the pages that fit into their files.

        file_size: bytes of an untruncated file.
        lengths: bytes of each table's file, by table name. They are needed if the URL does not
            state the file size; `file_size` is then the largest length.

        Returns why the page size is in doubt, else None. If any table of a namespace agrees with
        its file, the page size is right, and the tables that disagree get findings. Raises
        ProfileError if no table of a namespace agrees with its file, and truncated files cannot be
        the reason.
        """
        known = [table for table in tables if table.place in self.nbytes]
        fits = [table.num_pages == file_size // self.nbytes[table.place] for table in known]
        disagreeing = list(compress(known, map(not_, fits)))
        # Truncated files are unlikely to have equal lengths, so equal lengths show a wrong profile.
        equal = Counter(lengths.get(table.name) for table in disagreeing)
        sound = {table.namespace for table in compress(known, fits)}
        doubt = None
        for table in disagreeing:
            if table.namespace in sound:
                continue
            nbytes, length = self.nbytes[table.place], lengths.get(table.name)
            if length is None or equal[length] > 1 or table.num_pages * nbytes <= length:
                raise ProfileError(
                    f"{url}: table {table.name} has {table.num_pages} pages, but "
                    f"{file_size // nbytes} pages of {nbytes} bytes fit into a file of {file_size} "
                    f"bytes; {_CHECK_SIZES}"
                )
            doubt = doubt or (
                f"{table.name}: the table has {table.num_pages} pages, of {nbytes} bytes by the "
                f"profile, but the file has only {length} bytes; {_CHECK_SIZES}"
            )
        return doubt

    def refuse_strangers(self, url: str, keys: Sequence[bytes], sizes: IntArray) -> None:
        """Raise UnsupportedByBackend for objects of another deployment, or of a wrong size."""
        for key, size in zip(keys, sizes.tolist(), strict=True):
            affix = affix_of(key)
            if affix not in self.affixes:
                raise UnsupportedByBackend(
                    f"{url}: {shown(key)} is not a key of the profile's deployment on 3FS; "
                    "check the profile"
                )
            nbytes = self.nbytes[table_of(affix[0])]
            if size != nbytes:
                raise UnsupportedByBackend(
                    f"{url}: {shown(key)} has {size} bytes, but its file has pages of {nbytes} "
                    "bytes; check the profile"
                )

    def refuse_other_models(self, url: str, tables: Iterable[PageTable]) -> None:
        """Raise UnsupportedByBackend if a table has keys that the deployment never writes.

        Keys do not name the model, so servers would read another model's pages as their own.
        """
        for table in tables:
            prefix = prefix_of(table.place)
            ours = {after for before, after in self.affixes if before == prefix}
            if not ours:
                continue
            behind = pc.binary_slice(table.keys, len(prefix) + PAGE_DIGITS, _LONGEST)
            ends = pc.unique(behind).to_pylist()
            if strange := sorted(set(ends) - ours):
                raise UnsupportedByBackend(
                    f"{url}: {table.name} has keys such as PAGE{shown(strange[0])}, which the "
                    "profile's deployment does not write, so another model or layout uses this "
                    "server; write to a server that only this deployment uses"
                )
