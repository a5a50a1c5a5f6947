"""Write the report of a prewarm: metrics, summary and document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.cli.session import remark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import click

    from hicachectl.prewarm.prewarm import PrewarmOutcome

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
    remark(ctx, _summary(outcome.document, dry_run=options["dry_run"]))
    write_outcome(outcome, output_format, output, with_plan=options["dry_run"])


def is_failed(outcome: PrewarmOutcome, options: dict[str, Any]) -> bool:
    """Return whether pages or servers failed, or less is usable than --min-usable."""
    if options["dry_run"]:
        return False
    document = outcome.document
    failed = bool(document["failed"]) or document["stopped_by"] == "destination full"
    failed |= any(server["failed"] or server["error"] for server in document.get("pulled", ()))
    if options["min_usable"] is not None:
        wanted = document["requested_tokens"]
        failed |= document["usable_tokens"] < options["min_usable"] * wanted
    return failed


def _summary(document: dict[str, Any], *, dry_run: bool) -> str:
    from hicachectl.requests.restorable import deployment_text
    from hicachectl.text.units import counted, human_size

    wanted = document["requested_tokens"]
    share = document["usable_tokens"] / wanted if wanted else 1.0
    parts = [
        f"{counted(document['copied_pages'], 'page')} {'to copy' if dry_run else 'copied'}, "
        f"{human_size(document['bytes'])}",
        f"{document['already_there']} already in the destination",
        f"{document['missing_pages']} not found in the source",
        f"{share:.0%} of {counted(wanted, 'token')} usable{' now' if dry_run else ''} by "
        f"{deployment_text(document['deployment'])}",
    ]
    if document["stopped_by"]:
        parts.append(f"stopped: {document['stopped_by']}")
    return "; ".join(parts)


def write_outcome(
    outcome: PrewarmOutcome, output_format: str, output: Path | None, *, with_plan: bool = False
) -> None:
    """Write the document; with_plan: with the rows of the plan."""
    import pyarrow as pa

    from hicachectl.cli.output import write_document
    from hicachectl.requests.restorable import deployment_text

    document, plan = outcome.document, outcome.plan if with_plan else None
    rows = pa.table({"page": pa.array([], pa.string())}) if plan is None else plan
    if plan is not None:
        document = {**document, _PLAN: None}
    elif output_format != "json":
        deployment = document["deployment"]
        flat = {**document, "deployment": deployment and deployment_text(deployment)}
        rows = pa.Table.from_pylist([{k: v for k, v in flat.items() if k != "pulled"}])
    write_document(
        document,
        rows=rows,
        name=_PLAN,
        output_format=output_format,
        output=output,
        text=lambda colour: _lines(document),
    )


def _lines(document: dict[str, Any]) -> Iterator[str]:
    from hicachectl.requests.restorable import deployment_text

    deployment = document["deployment"]
    document = {**document, "deployment": deployment and deployment_text(deployment)}
    for name, value in document.items():
        if value is not None and name not in (_PLAN, "pulled"):
            yield f"{name.replace('_', ' ')}: {value}"
