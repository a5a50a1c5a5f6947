"""Records of a part: its plan, and the result of each attempt, with their tables.

Tables are written first, under names of their own. Then the record is published, so a record names
only whole tables.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.io.interrupts import deferred
from hicachectl.io.table_files import TableFile, read_table, write_table
from hicachectl.parts.directory import usage_errors
from hicachectl.parts.manifest import FORM, MOST_BYTES, Owner, Seconds, dump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa

    from hicachectl.backends.disk.directory import Directory

_MOST_VALUES = 16_000_000
_ROWS_AT_ONCE = 131_072


@dataclass(frozen=True, slots=True)
class StageResult:
    """Plan or result of a part.

    facts: values for JSON: sums, flags and texts. tables: in the schemas of the job's kind.
    planned: tables of the part's plan that are the result's, too; a plan has none.
    settled: complete, and nothing failed, so that it need not be done again.
    """

    facts: dict[str, Any]
    tables: dict[str, pa.Table] = field(default_factory=dict)
    settled: bool = True
    planned: tuple[str, ...] = ()


class RecordForm(Struct, kw_only=True):
    """A record in JSON. part: -1 for the record of the whole run.

    tables: files beside the record, by table name; a result may name tables of its plan.
    host: where the attempt ran. seconds: its duration.
    """

    form: Annotated[int, Meta(ge=FORM, le=FORM)]
    run: Owner
    part: int
    attempt: int
    owner: Owner
    host: str
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
        """The values of the plan or result."""
        return self.form.facts

    def table(self, name: str) -> pa.Table:
        """Read a table. Raises FormatError for a missing or damaged one."""
        file = self.form.tables.get(name)
        if file is None:
            raise FormatError(f"{self.path}: has no table {name!r}; {self.next_step}")
        with usage_errors(Path(self.path)), self.opened() as directory:
            return read_table(directory, file, self.schemas[name], self.next_step)

    def whole(self) -> StageResult:
        """Read all tables."""
        tables = {name: self.table(name) for name in self.form.tables if name in self.schemas}
        return StageResult(self.form.facts, tables, self.form.settled)


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
    written: list[TableFile] = []
    try:
        for table_name, table in tables.items():
            file_name = f"{name}-{form.owner}-{table_name}.parquet"
            pieces = _pieces(table)
            file = write_table(directory, file_name, pieces, schemas[table_name])
            written.append(file)
            form.tables[table_name] = file
        with deferred():  # a signal must not hide whose record it is
            ours = directory.publish(f"{name}.json", dump(form))
    except BaseException:
        if not directory.has(f"{name}.json"):  # else the record may be ours
            _remove(directory, written)
        raise
    if not ours:
        _remove(directory, written)
    return ours


def _remove(directory: Directory, files: list[TableFile]) -> None:
    for file in files:
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
    path = f"{directory.path}/{name}.json"
    content = directory.read(f"{name}.json", MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise FormatError(f"{path}: larger than {MOST_BYTES} bytes; {next_step}")
    try:
        document = parse_json_object(content, path, max_values=_MOST_VALUES)
        form = convert(document, RecordForm, path)
    except FormatError as error:
        raise FormatError(f"{error}; {next_step}") from None
    return Record(form, path, next_step, opened, schemas)


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, len(table), _ROWS_AT_ONCE):
        yield table.slice(start, _ROWS_AT_ONCE)
