"""Metrics for Prometheus' textfile collector."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.disk.durable import whole_file
from hicachectl.formats.errors import HicacheError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Gauge = tuple[str, list[tuple[dict[str, str], float]]]  # help text, values by their labels

_MAX_BYTES = 1 << 20  # of a file that is replaced; ours have some 10 KB
_VERIFY = {
    "objects": "Objects the store holds.",
    "pages": "Pages the store holds.",
    "bytes": "Bytes the store holds.",
    "gone": "Objects that vanished while they were looked at.",
    "in_flight": "Page groups that were being written.",
    "seconds": "Seconds the run took.",
    "objects_read": "Objects whose bytes were read, or tried to.",
    "complete": "1 when every object was read that was to be read, 0 after --time-limit.",
}
_PREWARM = {
    "requested_pages": "Pages that were asked for.",
    "copied_pages": "Pages that were copied.",
    "missing_pages": "Pages that the source could not give.",
    "bytes": "Bytes that were written.",
    "requested_tokens": "Tokens of the requests, as far as a store can give them.",
    "usable_tokens": "Of these, those that servers can restore.",
    "failed": "Pages that failed or are in conflict.",
    "seconds": "Seconds the run took.",
}


def write_metrics(path: Path, report: Mapping[str, Any], *, succeeded: bool) -> None:
    """Write a verification's metrics, whole or not at all. Raises UsageError.

    succeeded: whether the run ended without findings that fail it; else the time of the last
    success is carried over from the file that is replaced.
    """
    store = {"store": report["store"]}
    last = time.time() if succeeded else _last_success(path)
    found = {name: (text, [(store, report[name])]) for name, text in _VERIFY.items()}
    found = {name: gauge for name, gauge in found.items() if report[name] is not None}
    skipped = [({**store, "check": name}, 1) for name in report["skipped_checks"]]
    found["skipped"] = "What was not checked.", skipped
    counts = [({**store, "code": code}, count) for code, count in report["counts"].items()]
    found["findings"] = "Findings by code.", counts
    found["last_success_timestamp_seconds"] = (
        "When a run last ended without failing findings; 0 when never.",
        [(store, last)],
    )
    _write(path, "hicachectl_verify", store, found)


def write_prewarm_metrics(path: Path, report: Mapping[str, Any], *, succeeded: bool) -> None:
    """Write the metrics of a prewarm, whole or not at all. Raises UsageError."""
    store = {"store": report["destination"]}
    found = {name: (text, [(store, report[name])]) for name, text in _PREWARM.items()}
    found["succeeded"] = "1 when the last run ended well, else 0.", [(store, succeeded)]
    complete = [(store, report["complete"])]
    found["complete"] = "1 when all was copied that was asked for.", complete
    _write(path, "hicachectl_prewarm", store, found)


def _write(path: Path, prefix: str, store: dict[str, str], found: dict[str, Gauge]) -> None:
    """Write gauges by name, and that the run has ended."""
    ended = "When a run last ended.", [(store, time.time())]
    found["last_run_timestamp_seconds"] = ended
    with whole_file(path, "w", permissions=0o644) as stream:  # the collector is another user
        for name, (text, samples) in found.items():
            stream.write(f"# HELP {prefix}_{name} {text}\n# TYPE {prefix}_{name} gauge\n")
            for labels, value in samples:
                said = ",".join(f'{label}="{_escaped(to)}"' for label, to in labels.items())
                number = int(value) if isinstance(value, bool) else value
                stream.write(f"{prefix}_{name}{{{said}}} {number}\n")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _last_success(path: Path) -> float:
    """Read the time that the file to be replaced states; 0 where there is none to believe."""
    try:
        data = read_bounded(path, _MAX_BYTES, what="metrics", regular=True)
        text = data.decode()
        name = "hicachectl_verify_last_success_timestamp_seconds{"
        line = next(line for line in text.splitlines() if line.startswith(name))
        return float(line.rpartition(" ")[2])
    except (HicacheError, ValueError, StopIteration):
        return 0.0
