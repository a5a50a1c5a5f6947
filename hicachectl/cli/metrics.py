"""Metrics files for Prometheus' textfile collector."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.disk.durable import whole_file
from hicachectl.formats.errors import EmptyStore, HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import click

    Samples = list[tuple[dict[str, str], float]]  # (labels other than store, value)


class Metric(NamedTuple):
    """Help text of a gauge, and its label beside store."""

    text: str
    label: str = ""


_LAST_RUN = Metric("Time when the last run ended; of a run in parts, when it listed the store.")
# By command; the name of a gauge is hicachectl_COMMAND_NAME. Names that are members of the
# command's document have its values.
METRICS = {
    "verify": {
        "objects": Metric("Objects in the store."),
        "pages": Metric("Pages in the store."),
        "bytes": Metric("Bytes in the store."),
        "gone": Metric("Objects that vanished during the run."),
        "in_flight": Metric("Page groups that were being written, and so were not judged."),
        "seconds": Metric("Duration of the run in seconds."),
        "objects_read": Metric("Objects read, including failed reads."),
        "complete": Metric(
            "1 if all selected objects were read, 0 if --time-limit ended the run, or if the store "
            "has no page."
        ),
        "skipped": Metric("Checks, or parts of checks, that did not run.", "check"),
        "findings": Metric("Findings by code.", "code"),
        "last_success_timestamp_seconds": Metric(
            "Time of the last run without failing findings, as in last_run; 0 if never."
        ),
        "last_run_timestamp_seconds": _LAST_RUN,
    },
    "prewarm": {
        "requested_pages": Metric("Requested pages."),
        "copied_pages": Metric("Copied pages."),
        "missing_pages": Metric("Requested pages that the source does not have."),
        "bytes": Metric("Bytes written."),
        "requested_tokens": Metric(
            "Requested tokens that a store can serve: whole pages, without the last token of each "
            "request; all tokens of a request without such a page."
        ),
        "usable_tokens": Metric("Requested tokens that servers can restore."),
        "served_tokens": Metric(
            "Usable tokens that servers fetch: none of a request below the prefetch threshold. "
            "Without known prefixes, left out."
        ),
        "failed": Metric("Pages that failed or are in conflict."),
        "seconds": Metric("Duration of the run in seconds."),
        "succeeded": Metric("1 if the last run succeeded, else 0."),
        "complete": Metric("1 if the last run was not cut short, else 0."),
        "last_run_timestamp_seconds": _LAST_RUN,
    },
}
# A replaced file may have this size; our files have about 10 KB.
_MAX_BYTES = 1 << 20


def write_metrics(
    command: str, path: Path, document: Mapping[str, Any], *, succeeded: bool
) -> None:
    """Write the metrics of a command's document atomically.

    succeeded: whether the run ended without failing findings; if not, the time of the last success
    is taken from the replaced file. A run in parts is as old as its listing, whenever it is merged.
    Raises UsageError for a command without metrics, and if the file cannot be written.
    """
    if command not in METRICS:
        raise UsageError(f"--metrics-file: {command} writes no metrics; leave it out")
    listed: float | None = document.get("listed")
    at = time.time() if listed is None else listed
    samples: dict[str, Samples] = {
        name: [({}, document[name])] for name in METRICS[command] if document.get(name) is not None
    }
    if command == "verify":
        samples["skipped"] = [({"check": name}, 1) for name in document["skipped_checks"]]
        samples["findings"] = [({"code": code}, n) for code, n in document["counts"].items()]
        last = at if succeeded else _last_success(path)
        samples["last_success_timestamp_seconds"] = [({}, last)]
    else:
        samples["succeeded"] = [({}, succeeded)]
    samples["last_run_timestamp_seconds"] = [({}, at)]
    store = document["store" if command == "verify" else "destination"]
    with whole_file(path, "w", permissions=0o644) as stream:  # the collector runs as another user
        for short, values in samples.items():
            name = f"hicachectl_{command}_{short}"
            text = METRICS[command][short].text
            stream.write(f"# HELP {name} {text}\n# TYPE {name} gauge\n")
            for labels, value in values:
                all_labels = {"store": store, **labels}
                said = ",".join(f'{label}="{_escaped(to)}"' for label, to in all_labels.items())
                number = int(value) if isinstance(value, bool) else value
                stream.write(f"{name}{{{said}}} {number}\n")


@contextmanager
def metrics_if_empty(
    ctx: click.Context, nothing: Callable[[], Mapping[str, Any]]
) -> Iterator[None]:
    """Write the metrics of a run that does nothing in the block, since a store has no pages.

    nothing: returns the document of such a run.
    """
    try:
        yield
    except EmptyStore:
        path = ctx.params["metrics_file"]
        if path is not None:
            document = {**nothing(), "complete": False}
            write_metrics(str(ctx.command.name), path, document, succeeded=False)
        raise


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _last_success(path: Path) -> float:
    """Return the last success in the replaced file; 0 if not stated."""
    try:
        data = read_bounded(path, _MAX_BYTES, what="metrics", regular=True)
        text = data.decode()
        name = "hicachectl_verify_last_success_timestamp_seconds{"
        line = next(line for line in text.splitlines() if line.startswith(name))
        return float(line.rpartition(" ")[2])
    except (HicacheError, ValueError, StopIteration):
        return 0.0
