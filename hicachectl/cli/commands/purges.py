"""What `hicachectl quarantine` and `hicachectl runs` share: lists of runs, and their deletion."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from hicachectl.cli.session import agreed, remark, require_consent
from hicachectl.results import Result
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import click
    import msgspec
    import pyarrow as pa

    from hicachectl.move.quarantine import PurgeReport
    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen

    Human = Callable[[pa.Table], pa.Table]

# Members of documents that are sums, each with the column that it sums.
_SUMS = {"pages": "groups", "objects": "objects", "bytes": "nbytes"}


def write_list(
    ctx: click.Context,
    report: PurgeReport,
    make: Callable[..., msgspec.Struct],
    human: Human,
    done: str,
) -> None:
    """Write a list of runs.

    make: returns the document with the sums that it is given.
    human: returns the text columns of a table.
    done: see `last_line`.
    """
    from hicachectl.cli.output import write_report

    document = to_builtins(make(**_sums(report.rows)))
    remark(ctx, *report.left)
    lines = partial(_lines, report.rows, human, done, document)
    write_report(ctx, document, report.rows, "runs", lines)


def purge_runs(
    ctx: click.Context,
    directory: Path,
    purge: Callable[..., PurgeReport],
    columns: pa.Schema,
    make: Callable[..., msgspec.Struct],
    human: Human,
) -> None:
    """Delete runs after a question, and write the result.

    directory: directory of the runs.
    purge: deletes the runs; takes dry_run.
    columns: columns of the runs.
    make: returns the document with the members that it is given.
    human: see `write_list`.
    """
    from hicachectl.cli.output import write_run
    from hicachectl.move.quarantine import PURGED_RUN, WOULD_PURGE, PurgeReport

    options = ctx.params
    require_consent(options)
    dry_run = options["dry_run"]

    def run() -> Result | None:
        """Delete runs. Return None if the operator declines."""
        if not (options["yes"] or dry_run):
            found = _sums(purge(dry_run=True).rows, WOULD_PURGE)
            pages = f" with {counted(found['pages'], 'page')}" if "pages" in found else ""
            runs = f"{counted(found['count'], 'run')}{pages} ({human_size(found['bytes'])})"
            question = f"Delete {runs} from {directory} for good?"
            if found["count"] and not agreed(ctx, question, "deleted"):
                return None
        return result(purge(dry_run=dry_run))

    def result(report: PurgeReport) -> Result:
        sums = _sums(report.rows, WOULD_PURGE if dry_run else PURGED_RUN)
        sums |= {"failed": len(report.failures), **report.counts}
        document = make(**sums, dry_run=dry_run)
        return Result(
            document=to_builtins(document),
            rows=report.rows,
            rows_name="runs",
            lines=partial(_lines, report.rows, human, "deleted"),
            remarks=report.remarks,
            undone=[*report.left, *(f"{run}: {why}" for run, why in report.failures)],
            failed=bool(report.failures),
            dry_run=dry_run,
        )

    write_run(ctx, run, lambda: result(PurgeReport(columns.empty_table())))


def _sums(rows: pa.Table, state: str = "") -> dict[str, Any]:
    """Return the number of runs and the sums of their columns.

    state: count only runs in this state; "" to count all runs.
    """
    import pyarrow.compute as pc

    if state:
        rows = rows.filter(pc.equal(rows.column("state"), state))
    sums = {
        member: pc.sum(rows.column(name)).as_py() or 0
        for member, name in _SUMS.items()
        if name in rows.column_names
    }
    return {"count": len(rows), **sums}


def _lines(
    rows: pa.Table,
    human: Human,
    done: str,
    document: dict[str, Any],
    screen: Screen,
    _shown: Shown | None = None,
) -> Iterator[str]:
    from hicachectl.cli.text_tables import last_line
    from hicachectl.text.tables import table_lines

    if len(rows):
        yield from table_lines(human(rows), screen)
    counts = {"run": document["count"]}
    counts |= {noun: document[f"{noun}s"] for noun in ("page", "object") if f"{noun}s" in document}
    yield last_line(document, counts, done)
