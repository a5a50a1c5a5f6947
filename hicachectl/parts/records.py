"""Results of parts, and of finishing a run, with their tables.

Tables are written first, under names of their own. Then the record is published, so a record names
only whole tables.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from hicachectl.formats.errors import FormatError
from hicachectl.io.interrupts import deferred
from hicachectl.io.table_files import TableFile, pieces, read_document, read_table, write_table
from hicachectl.parts.directory import usage_errors
from hicachectl.parts.manifest import FORM, Moment, Owner, Seconds, dump

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from hicachectl.backends.disk.directory import Directory


@dataclass(frozen=True, slots=True)
class StageResult:
    """Result of a part, or of finishing a run.

    facts: values for JSON: sums, flags and texts.
    tables: in the schemas of the job's kind.
    settled: whether the work is complete and nothing failed.
    """

    facts: dict[str, Any]
    tables: dict[str, pa.Table] = field(default_factory=dict)
    settled: bool = True


class RecordForm(Struct, kw_only=True):
    """A result in JSON.

    part: number of the part; -1 for the record of the whole run.
    host: where the work was done.
    ended_ns: Unix time of its end, by that host's clock.
    seconds: duration of the work.
    tables: files beside the record, by table name.
    """

    form: Annotated[int, Meta(ge=FORM, le=FORM)]
    run: Owner
    part: int
    host: str
    ended_ns: Moment
    seconds: Seconds
    settled: bool
    facts: dict[str, Any]
    tables: dict[str, TableFile]


@dataclass(frozen=True, slots=True)
class Record:
    """A published record; its tables are read when asked for."""

    form: RecordForm
    path: str
    next_step: str
    opened: Callable[[], Directory]
    schemas: Mapping[str, pa.Schema]

    @property
    def facts(self) -> dict[str, Any]:
        """The values of the result."""
        return self.form.facts

    def table(self, name: str) -> pa.Table:
        """Read a table. Raises FormatError for a missing or damaged one."""
        file = self.form.tables.get(name)
        if file is None:
            raise FormatError(f"{self.path}: has no table {name!r}; {self.next_step}")
        with usage_errors(Path(self.path)), self.opened() as directory:
            return read_table(directory, file, self.schemas[name], self.next_step)


def save(
    directory: Directory,
    name: str,
    form: RecordForm,
    tables: Mapping[str, pa.Table],
    schemas: Mapping[str, pa.Schema],
) -> bool:
    """Write tables and publish a record, unless its name exists; return whether it is ours.

    name: without `.json`. Removes the tables of an unpublished record. Raises OSError,
    UntrustedError, UnsupportedByBackend.
    """
    attempt = os.urandom(8).hex()  # two attempts at a part may write at once
    try:
        for table_name, table in tables.items():
            file_name = f"{name}-{attempt}-{table_name}.parquet"
            schema = schemas[table_name]
            form.tables[table_name] = write_table(directory, file_name, pieces(table), schema)
        with deferred():  # a signal must not hide whose record it is
            ours = directory.publish(f"{name}.json", dump(form))
    except BaseException:
        if not directory.has(f"{name}.json"):  # else the record may be ours
            _remove(directory, form)
        raise
    if not ours:
        _remove(directory, form)
    return ours


def _remove(directory: Directory, form: RecordForm) -> None:
    for file in form.tables.values():
        with suppress(OSError):
            directory.remove(file.name)


def load(
    directory: Directory,
    name: str,
    schemas: Mapping[str, pa.Schema],
    opened: Callable[[], Directory],
    next_step: str,
) -> Record:
    """Read a record.

    opened: opens the directory again, for the tables. next_step: ends the message for a damaged
    record or table. Raises FormatError, OSError (FileNotFoundError if missing), UntrustedError.
    """
    form = read_document(directory, f"{name}.json", RecordForm, next_step)
    return Record(form, f"{directory.path}/{name}.json", next_step, opened, schemas)
