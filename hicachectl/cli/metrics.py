"""Metrics files for Prometheus' textfile collector."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.disk.durable import whole_file
from hicachectl.formats.errors import HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Gauge = tuple[str, list[tuple[dict[str, str], float]]]  # help text, (labels, value) pairs

_MAX_BYTES = 1 << 20  # of a replaced file; our files have about 10 KB
_VERIFY = {
    "objects": "Objects in the store.",
    "pages": "Pages in the store.",
    "bytes": "Bytes in the store.",
    "gone": "Objects that vanished during the run.",
    "in_flight": "Page groups that were being written, and so were not judged.",
    "seconds": "Duration of the run in seconds.",
    "objects_read": "Objects read, including failed reads.",
    "complete": "1 if all selected objects were read, 0 if --time-limit ended the run.",
}
_PREWARM = {
    "requested_pages": "Requested pages.",
    "copied_pages": "Copied pages.",
    "missing_pages": "Requested pages that the source does not have.",
    "bytes": "Bytes written.",
    "requested_tokens": "Requested tokens that a store can serve: whole pages, without "
    "the last token of each request.",
    "usable_tokens": "Requested tokens that servers can restore.",
    "failed": "Pages that failed or are in conflict.",
    "seconds": "Duration of the run in seconds.",
}


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
    store = {"store": report["store"]}
    last = time.time() if succeeded else _last_success(path)
    found = {name: (text, [(store, report[name])]) for name, text in _VERIFY.items()}
    found = {name: gauge for name, gauge in found.items() if report[name] is not None}
    skipped = [({**store, "check": name}, 1) for name in report["skipped_checks"]]
    found["skipped"] = "Checks, or parts of checks, that did not run.", skipped
    counts = [({**store, "code": code}, count) for code, count in report["counts"].items()]
    found["findings"] = "Findings by code.", counts
    found["last_success_timestamp_seconds"] = (
        "Time when a run last ended without failing findings; 0 if never.",
        [(store, last)],
    )
    _write(path, "hicachectl_verify", store, found)


def write_prewarm_metrics(path: Path, report: Mapping[str, Any], *, succeeded: bool) -> None:
    """Write the metrics of a prewarm atomically.

    Raises UsageError if the file cannot be written.
    """
    store = {"store": report["destination"]}
    found = {name: (text, [(store, report[name])]) for name, text in _PREWARM.items()}
    found["succeeded"] = "1 if the last run succeeded, else 0.", [(store, succeeded)]
    complete = [(store, report["complete"])]
    found["complete"] = "1 if the last run was not cut short, else 0.", complete
    _write(path, "hicachectl_prewarm", store, found)


def _write(path: Path, prefix: str, store: dict[str, str], found: dict[str, Gauge]) -> None:
    """Write the gauges and the run's end time."""
    ended = "Time when a run last ended.", [(store, time.time())]
    found["last_run_timestamp_seconds"] = ended
    with whole_file(path, "w", permissions=0o644) as stream:  # the collector runs as another user
        for name, (text, samples) in found.items():
            stream.write(f"# HELP {prefix}_{name} {text}\n# TYPE {prefix}_{name} gauge\n")
            for labels, value in samples:
                said = ",".join(f'{label}="{_escaped(to)}"' for label, to in labels.items())
                number = int(value) if isinstance(value, bool) else value
                stream.write(f"{prefix}_{name}{{{said}}} {number}\n")


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
