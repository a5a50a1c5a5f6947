"""Write the report of a prewarm: metrics, summary and document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import click

    from hicachectl.prewarming.outcome import PrewarmOutcome

_PLAN = "plan"


def write_report(
    ctx: click.Context,
    outcome: PrewarmOutcome,
    options: dict[str, Any],
    output_format: str,
    output: Path | None,
) -> None:
    """Write the metrics, the summary and the document."""
    from hicachectl.cli.output import undone_line

    if options["metrics_file"]:
        from hicachectl.cli.metrics import write_prewarm_metrics

        succeeded = outcome.interruption is None and not is_failed(outcome, options)
        write_prewarm_metrics(options["metrics_file"], outcome.document, succeeded=succeeded)
    failed, dry_run = is_failed(outcome, options), options["dry_run"]
    summary = outcome.summary(dry_run=dry_run)
    gate = outcome.gate(options["min_usable"], dry_run=dry_run)
    undone = [summary, *gate] if failed or undone_line(outcome.document) else gate
    write_outcome(
        ctx,
        outcome,
        options,
        output_format,
        output,
        remarks=[summary],
        undone=undone,
        failed=failed,
    )


def is_failed(outcome: PrewarmOutcome, options: dict[str, Any]) -> bool:
    """Return whether pages or servers failed, or less is usable than --min-usable.

    A dry run fails only if --min-usable refers to no requested tokens.
    """
    if options["dry_run"]:
        return bool(outcome.gate(options["min_usable"], dry_run=True))
    return outcome.failed(options["min_usable"])


def write_outcome(
    ctx: click.Context,
    outcome: PrewarmOutcome,
    options: dict[str, Any],
    output_format: str,
    output: Path | None,
    *,
    remarks: Sequence[str] = (),
    undone: Sequence[str] = (),
    failed: bool = False,
) -> None:
    """Write the document; that of a dry run has the rows of the plan. See `write_result`."""
    from hicachectl.cli.output import write_result

    document, rows = outcome.document, outcome.rows()
    if options["dry_run"] and outcome.plan is not None:
        document, rows = {**document, _PLAN: None}, outcome.plan
    write_result(
        ctx,
        document,
        remarks=remarks,
        undone=undone,
        failed=failed,
        dry_run=options["dry_run"],
        rows=rows,
        name=_PLAN,
        output_format=output_format,
        output=output,
        text=lambda screen: outcome.lines(),
    )
