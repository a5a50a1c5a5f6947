"""Metrics for Prometheus' textfile collector."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.disk.durable import whole_file
from hicachectl.formats.errors import HicacheError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_MAX_BYTES = 1 << 20  # of a file that is replaced; ours have some 10 KB


def write_metrics(path: Path, report: Mapping[str, Any], *, succeeded: bool) -> None:
    """Write a verification's metrics, whole or not at all. Raises UsageError.

    succeeded: whether the run ended without findings that fail it; else the time of the last
    success is carried over from the file that is replaced.
    """
    last = time.time() if succeeded else _last_success(path)
    with whole_file(path, "w", permissions=0o644) as stream:  # the collector is another user
        stream.writelines(f"{line}\n" for line in _lines(report, last))


def write_prewarm_metrics(path: Path, report: Mapping[str, Any], *, succeeded: bool) -> None:
    """Write the metrics of a prewarm, whole or not at all. Raises UsageError."""
    labels = f'store="{_label(report["destination"])}"'
    gauges = {
        "requested_pages": "Pages that were asked for.",
        "copied_pages": "Pages that were copied.",
        "missing_pages": "Pages that the source could not give.",
        "bytes": "Bytes that were written.",
        "requested_tokens": "Tokens of the requests, as far as a store can give them.",
        "usable_tokens": "Of these, those that servers can restore.",
        "failed": "Pages that failed or are in conflict.",
        "seconds": "Seconds the run took.",
    }
    with whole_file(path, "w", permissions=0o644) as stream:  # the collector is another user
        for name, text in gauges.items():
            lines = _gauge(f"hicachectl_prewarm_{name}", text, [(labels, report[name])])
            stream.writelines(f"{line}\n" for line in lines)
        for name, text, value in (
            ("succeeded", "1 when the last run ended well, else 0.", int(succeeded)),
            ("complete", "1 when all was copied that was asked for.", int(report["complete"])),
            ("last_run_timestamp_seconds", "When a run last ended.", time.time()),
        ):
            lines = _gauge(f"hicachectl_prewarm_{name}", text, [(labels, value)])
            stream.writelines(f"{line}\n" for line in lines)


def _lines(report: Mapping[str, Any], last_success: float) -> Iterator[str]:
    store = _label(report["store"])
    gauges = {
        "objects": "Objects the store holds.",
        "pages": "Pages the store holds.",
        "bytes": "Bytes the store holds.",
        "gone": "Objects that vanished while they were looked at.",
        "in_flight": "Page groups that were being written.",
        "seconds": "Seconds the run took.",
        "objects_read": "Objects whose bytes were read, or tried to.",
        "complete": "1 when every object was read that was to be read, 0 after --time-limit.",
    }
    for name, text in gauges.items():
        if report[name] is not None:
            value = int(report[name]) if name == "complete" else report[name]
            samples = [(f'store="{store}"', value)]
            yield from _gauge(f"hicachectl_verify_{name}", text, samples)
    skipped = [(f'store="{store}",check="{_label(name)}"', 1) for name in report["skipped_checks"]]
    yield from _gauge("hicachectl_verify_skipped", "What was not checked.", skipped)
    counts = [
        (f'store="{store}",code="{_label(code)}"', count)
        for code, count in report["counts"].items()
    ]
    yield from _gauge("hicachectl_verify_findings", "Findings by code.", counts)
    yield from _gauge(
        "hicachectl_verify_last_success_timestamp_seconds",
        "When a run last ended without failing findings; 0 when never.",
        [(f'store="{store}"', last_success)],
    )
    yield from _gauge(
        "hicachectl_verify_last_run_timestamp_seconds",
        "When a run last ended.",
        [(f'store="{store}"', time.time())],
    )


def _gauge(name: str, text: str, samples: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} gauge"
    yield from (f"{name}{{{labels}}} {value}" for labels, value in samples)


def _label(value: str) -> str:
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
