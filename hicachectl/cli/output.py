"""Write results as table, json, jsonl, csv, parquet or arrow.

Data goes to stdout; progress, remarks and errors go to stderr.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import contextmanager
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl import __version__
from hicachectl.backends.disk.durable import whole_file
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.session import SUCCEEDED, locked, remark
from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import lock_held, lost_stdout
from hicachectl.results import DEFAULT_LIMIT, Shown, undone_line
from hicachectl.text.jsontext import json_rows, json_text, json_values
from hicachectl.text.tables import NO_SCREEN, Screen, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    import click

    from hicachectl.results import Result

SCHEMA_VERSION = 1
_BINARY_FORMATS = ("parquet", "arrow")
_ROWS_AT_ONCE = 65_536
_FORMULA_PATTERN = "^[=+@\uff1d\uff0b\uff0d\uff20-]"  # spreadsheets accept full-width signs too


def write_document(
    document: Mapping[str, Any],
    *,
    rows: pa.Table,
    name: str,
    output_format: str,
    output: Path | None,
    text: Callable[[Screen], Iterator[str]],
) -> None:
    """Write a report: the whole document as `json`, only its rows in other formats.

    name: member of the document that has the rows.
    text: returns the lines of the `table` format for a terminal.
    """
    with _destination(output, output_format) as stream:
        if output_format == "table":
            _write_lines(stream, text(_screen(stream)))
        elif output_format == "json":
            members = {key: rows if key == name else value for key, value in document.items()}
            stream.writelines(_document_pieces(members))
        elif output_format == "jsonl":
            _write_lines(stream, _joined(rows, "\n"))
        else:
            _write_columnar(rows, output_format, stream)


def write_report(
    ctx: click.Context,
    document: Mapping[str, Any],
    rows: pa.Table,
    name: str,
    text: Callable[[Screen], Iterator[str]],
) -> None:
    """Write a report in the format and to the file that a command's options name.

    `write_document` describes the arguments.
    """
    chosen = {option: ctx.params[option] for option in ("output_format", "output")}
    write_document(document, rows=rows, name=name, text=text, **chosen)


def write_json_lines(tables: Iterable[pa.Table], output: Path | None) -> None:
    """Write the rows of several tables as JSON lines, table by table."""
    with _destination(output, "jsonl") as stream:
        for rows in tables:
            _write_lines(stream, _joined(rows, "\n"))


def write_run(
    ctx: click.Context, run: Callable[[], Result | None], nothing: Callable[[], Result]
) -> None:
    """Do a run under the lock of --lock, and write its result as `write_result` does.

    run: does the run; returns None if there is nothing to write.
    nothing: returns the result of a run that did nothing, because another process has the lock.
    """
    path = ctx.params["lock"]
    with locked(path) as is_ours:
        result = run() if is_ours else nothing().stopped_by_lock(lock_held(path))
    if result is not None:
        write_result(ctx, result, metrics=is_ours)


def write_result(ctx: click.Context, result: Result, *, metrics: bool = True) -> None:
    """Write the metrics, the messages and the document of a result, and end with its exit status.

    With --quiet, remarks are left out, unless they are about changes or about work not done. The
    table is also left out if the exit status is 0 and the run was no dry run. Without the table, a
    line on stderr says what was not done.

    metrics: whether there was a run. If not, --metrics-file is not written, and no end of a run is
        reported to --healthcheck-url.
    Raises UsageError for a command without metrics.
    """
    options = ctx.params
    if metrics:
        ctx.meta[SUCCEEDED] = result.succeeded
    if metrics and (path := options.get("metrics_file")) is not None:
        from hicachectl.cli.metrics import write_metrics

        name = result.command or str(ctx.command.name)
        write_metrics(name, path, result.document, succeeded=result.succeeded)
    kept = [*result.undone, *result.changes]
    for said in dict.fromkeys([*result.remarks, *kept]):
        remark(ctx, said, failure=said in kept)
    quiet = ctx.obj.quiet and result.succeeded and not result.dry_run
    if quiet and not result.undone and (line := undone_line(result.document)):
        remark(ctx, line, failure=True)
    if not (quiet and options["output_format"] == "table" and options["output"] is None):
        shown = Shown(options.get("limit") or DEFAULT_LIMIT, options.get("all_findings", False))

        def lines(screen: Screen) -> Iterator[str]:
            return result.lines(result.document, screen, shown)

        write_report(ctx, result.document, result.rows, result.rows_name, lines)
    if result.dry_run:
        remark(ctx, "Dry run: nothing was changed")
    if result.ending is not None:
        raise result.ending
    if result.failed and not result.excused:
        ctx.exit(FINDINGS)


def document_text(document: Mapping[str, Any]) -> str:
    """Return a report as a `json` document; its tables become lists of rows."""
    return "".join(_document_pieces(document))


def _document_pieces(document: Mapping[str, Any]) -> Iterator[str]:
    """Return the text of a `json` document in pieces.

    The text of rows is made only when a caller reads it. All other text is made at once, so that an
    error in it leaves no half document behind.
    """
    pieces: list[Iterable[str]] = [[_document_head()]]
    for key, value in document.items():
        pieces.append([f",\n{json.dumps(key)}: "])
        pieces.append(_rows_text(value) if isinstance(value, pa.Table) else [json_text(value)])
    return chain(*pieces, ["\n}\n"])


def write_text(text: str, output: Path | None) -> None:
    """Write text to stdout, or atomically to a file."""
    with _destination(output, "json") as stream:
        stream.write(text)


def _screen(stream: IO[str]) -> Screen:
    if not stream.isatty():
        return NO_SCREEN
    return Screen(not os.environ.get("NO_COLOR"), shutil.get_terminal_size().columns)


def _document_head() -> str:
    return f'{{"schema": {SCHEMA_VERSION}, "version": {json.dumps(__version__)}'


def _joined(rows: pa.Table, separator: str) -> Iterator[str]:
    """Yield texts of up to `_ROWS_AT_ONCE` JSON rows."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        text = json_rows(rows.slice(start, _ROWS_AT_ONCE))
        yield separator.join(text.to_pylist())


def _rows_text(rows: pa.Table) -> Iterator[str]:
    yield "["
    for number, text in enumerate(_joined(rows, ",\n")):
        yield (",\n" if number else "") + text
    yield "]"


def _write_lines(stream: IO[str], lines: Iterator[str]) -> None:
    for line in lines:
        stream.write(line + "\n")


def _write_columnar(rows: pa.Table, output_format: str, stream: IO[Any]) -> None:
    if output_format == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(rows.combine_chunks(), stream, compression="lz4", write_statistics=False)
    elif output_format == "arrow":
        with pa.ipc.new_file(stream, rows.schema) as writer:
            writer.write_table(rows)
    else:
        import pyarrow.csv

        target = stream.buffer if hasattr(stream, "buffer") else stream
        pyarrow.csv.write_csv(_inert(_flat(rows)), target)


def _inert(rows: pa.Table) -> pa.Table:
    """Escape text as in tables, and put ' before texts that a spreadsheet reads as formulas."""
    for index, field in enumerate(rows.schema):
        if pa.types.is_string(field.type):
            cells = printable(rows.column(index).combine_chunks())
            formulas = pc.match_substring_regex(cells, _FORMULA_PATTERN)
            cells = pc.if_else(formulas, pc.binary_join_element_wise("'", cells, ""), cells)
            rows = rows.set_column(index, field.name, cells)
    return rows


def _flat(rows: pa.Table) -> pa.Table:
    """Return the rows for CSV, with nested columns as JSON text."""
    for index, field in enumerate(rows.schema):
        if pa.types.is_nested(field.type):
            rows = rows.set_column(index, field.name, json_values(rows.column(index)))
        elif pa.types.is_dictionary(field.type):
            rows = rows.set_column(
                index, field.name, rows.column(index).cast(field.type.value_type)
            )
    return rows


@contextmanager
def _destination(output: Path | None, output_format: str) -> Iterator[IO[Any]]:
    """Yield stdout, or a stream that writes a file atomically.

    Formats for programs are UTF-8 in any locale. A table uses the locale's encoding; characters
    that the encoding lacks are escaped. Raises UsageError if the output cannot be written.
    """
    binary = output_format in _BINARY_FORMATS
    if output is not None:
        with whole_file(output, "wb" if binary else "w") as stream:
            yield stream
        return
    if binary and sys.stdout.isatty():
        raise UsageError(
            f"--format {output_format} is binary, and stdout is a terminal; add -o FILE or a "
            "redirection"
        )
    try:
        if binary:
            yield sys.stdout.buffer
        elif output_format == "table" or not hasattr(sys.stdout, "reconfigure"):
            yield sys.stdout
        else:
            before = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
            sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
            try:
                yield sys.stdout
                sys.stdout.flush()
            finally:
                sys.stdout.reconfigure(**before)
        sys.stdout.flush()  # report a write error before the command reports success
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(lost_stdout(error)) from error
