"""Write the report of a prewarm: metrics, summary and document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.cli.session import remark

if TYPE_CHECKING:
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
    if options["metrics_file"]:
        from hicachectl.cli.metrics import write_prewarm_metrics

        succeeded = outcome.interruption is None and not is_failed(outcome, options)
        write_prewarm_metrics(options["metrics_file"], outcome.document, succeeded=succeeded)
    remark(ctx, outcome.summary(dry_run=options["dry_run"]), failure=is_failed(outcome, options))
    for text in outcome.gate(options["min_usable"], dry_run=options["dry_run"]):
        remark(ctx, text, failure=True)
    write_outcome(outcome, output_format, output, with_plan=options["dry_run"])


def is_failed(outcome: PrewarmOutcome, options: dict[str, Any]) -> bool:
    """Return whether pages or servers failed, or less is usable than --min-usable.

    A dry run fails only if --min-usable refers to no requested tokens.
    """
    if options["dry_run"]:
        return bool(outcome.gate(options["min_usable"], dry_run=True))
    return outcome.failed(options["min_usable"])


def write_outcome(
    outcome: PrewarmOutcome, output_format: str, output: Path | None, *, with_plan: bool = False
) -> None:
    """Write the document; with_plan: with the rows of the plan."""
    from hicachectl.cli.output import write_document

    document, rows = outcome.document, outcome.rows()
    if with_plan and outcome.plan is not None:
        document, rows = {**document, _PLAN: None}, outcome.plan
    write_document(
        document,
        rows=rows,
        name=_PLAN,
        output_format=output_format,
        output=output,
        text=lambda screen: outcome.lines(),
    )
