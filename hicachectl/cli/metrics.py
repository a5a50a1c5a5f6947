"""Metrics files for Prometheus' textfile collector."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.disk.durable import whole_file
from hicachectl.formats.errors import EmptyStore, HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

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


def write_metrics_of(
    command: str, path: Path, report: Mapping[str, Any], *, succeeded: bool
) -> None:
    """Write the metrics of a command's document. Raises UsageError for one without metrics."""
    writers = {"verify": write_metrics, "prewarm": write_prewarm_metrics}
    if command not in writers:
        raise UsageError(f"--metrics-file: {command} writes no metrics; leave it out")
    writers[command](path, report, succeeded=succeeded)


def write_metrics(path: Path, report: Mapping[str, Any], *, succeeded: bool) -> None:
    """Write the metrics of a verification atomically.

    succeeded: whether the run ended without failing findings; if not, the time of the last success
    is taken from the replaced file. Raises UsageError if the file cannot be written.
    """
    last = _time_of(report) if succeeded else _last_success(path)
    samples = _from_document("verify", report) | {
        "skipped": [({"check": name}, 1) for name in report["skipped_checks"]],
        "findings": [({"code": code}, count) for code, count in report["counts"].items()],
        "last_success_timestamp_seconds": [({}, last)],
    }
    _write(path, "verify", report["store"], samples, _time_of(report))


def write_prewarm_metrics(path: Path, report: Mapping[str, Any], *, succeeded: bool) -> None:
    """Write the metrics of a prewarm atomically.

    Raises UsageError if the file cannot be written.
    """
    samples = _from_document("prewarm", report) | {"succeeded": [({}, succeeded)]}
    _write(path, "prewarm", report["destination"], samples, _time_of(report))


@contextmanager
def metrics_if_empty(command: str, path: Path | None, store: str) -> Iterator[None]:
    """Write the metrics of a run that does nothing in the block, since a store has no pages.

    path: None writes nothing. store: URL of the store that the metrics name.
    """
    try:
        yield
    except EmptyStore:
        if path is not None:
            write_metrics_of(command, path, _nothing_done(command, store), succeeded=False)
        raise


def _nothing_done(command: str, store: str) -> dict[str, Any]:
    from hicachectl.prewarming.outcome import nothing_copied
    from hicachectl.verification.report import VerifyReport

    if command == "verify":
        return VerifyReport.empty(store).document
    return nothing_copied(None, store).document | {"complete": False}


def _from_document(command: str, report: Mapping[str, Any]) -> dict[str, Samples]:
    """Return the gauges whose values are members of the document."""
    known = (name for name in METRICS[command] if report.get(name) is not None)
    return {name: [({}, report[name])] for name in known}


def _time_of(report: Mapping[str, Any]) -> float:
    """Return the time that a run's metrics tell, in Unix seconds.

    A run in parts is as old as its listing, whenever it is merged.
    """
    listed: float | None = report.get("listed")
    return time.time() if listed is None else listed


def _write(path: Path, command: str, store: str, samples: dict[str, Samples], at: float) -> None:
    """Write the gauges, and the time of the run."""
    samples = {**samples, "last_run_timestamp_seconds": [({}, at)]}
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
