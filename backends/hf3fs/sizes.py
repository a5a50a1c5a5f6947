"""Page sizes and key affixes of a 3FS store, which only a profile states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Self

from hicachectl.backends.hf3fs.keys import Affix, affix_of, prefix_of, shown, table_of
from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.objects import PAGE_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicachectl.backends.page_tables import PageTable, TableName
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile

_CHECK_SIZES = (
    "check that the profile is this deployment's and that the file was not truncated, or give "
    "SGLang's file size as file_size= in the URL"
)
_LONGEST = 1 << 20  # bytes of the longest key; binary_slice needs an end


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
        lengths: bytes of each table's file by table name. Needed if `file_size` is not stated, but
            only the largest of these.
        Return why the page size is in doubt, else None. If any table of a namespace agrees with its
        file, the size is right; the tables that disagree get findings. Raises ProfileError if
        no table of a namespace agrees, and truncated files do not explain it.
        """
        known = [table for table in tables if table.place in self.nbytes]
        fits = [table.num_pages == file_size // self.nbytes[table.place] for table in known]
        disagreeing = list(compress(known, map(not_, fits)))
        # Truncated files have different lengths.
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
        """Raise UnsupportedByBackend for objects of other deployments."""
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
        import pyarrow.compute as pc  # imported late: costs 20 ms at start-up

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
                    "profile's deployment does not write: another model or layout uses this "
                    "server; write to a server that only this deployment uses"
                )
