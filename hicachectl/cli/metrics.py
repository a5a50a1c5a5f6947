"""Metrics files for Prometheus' textfile collector."""

from __future__ import annotations

import time
import tomllib
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.disk.durable import whole_file
from hicachectl.formats.errors import EmptyStore, HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import click

    Samples = list[tuple[dict[str, str], float]]  # (labels other than store, value)


LABELS = {"skipped": "check", "findings": "code"}
"""The label of each metric that has a label in addition to `store`."""

# Most bytes that are read of the file to replace. Files of this module have about 10 KB.
_MAX_BYTES = 1 << 20


@cache
def metrics() -> dict[str, dict[str, str]]:
    """Return the help text of each gauge by its command and its name, from `metrics.toml`."""
    return tomllib.loads(files("hicachectl.cli").joinpath("metrics.toml").read_text("utf-8"))


def write_metrics(
    command: str, path: Path, document: Mapping[str, Any], *, succeeded: bool
) -> None:
    """Write the metrics of a command's document atomically.

    The time of a run in parts is the time of its listing, even if it is merged much later.

    succeeded: `Result.succeeded` of the run. If False, `verify` keeps the time of the last success
        from the replaced file.
    Raises UsageError for a command without metrics, and if the file cannot be written.
    """
    texts = metrics().get(command)
    if texts is None:
        raise UsageError(f"--metrics-file: {command} writes no metrics; leave it out")
    listed: float | None = document.get("listed")
    at = time.time() if listed is None else listed
    samples: dict[str, Samples] = {
        name: [({}, document[name])] for name in texts if document.get(name) is not None
    }
    if command == "verify":
        samples["skipped"] = [({"check": name}, 1) for name in document["skipped_checks"]]
        samples["findings"] = [({"code": code}, n) for code, n in document["counts"].items()]
        last = at if succeeded else _last_success(path)
        samples["last_success_timestamp_seconds"] = [({}, last)]
    else:
        samples["succeeded"] = [({}, succeeded)]
    samples["last_run_timestamp_seconds"] = [({}, at)]
    store = document["destination"] if "destination" in document else document["store"]
    with whole_file(path, "w", permissions=0o644) as stream:  # the collector runs as another user
        for short, values in samples.items():
            name = f"hicachectl_{command}_{short}"
            stream.write(f"# HELP {name} {texts[short]}\n# TYPE {name} gauge\n")
            for labels, value in values:
                all_labels = {"store": store, **labels}
                said = ",".join(f'{label}="{_escaped(to)}"' for label, to in all_labels.items())
                number = int(value) if isinstance(value, bool) else value
                stream.write(f"{name}{{{said}}} {number}\n")


@contextmanager
def metrics_if_empty(
    ctx: click.Context, nothing: Callable[[], Mapping[str, Any]]
) -> Iterator[None]:
    """If the block raises EmptyStore, write the metrics of a run that did nothing.

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
    """Return the time of the last success in the replaced file; 0 if the file states none."""
    try:
        data = read_bounded(path, _MAX_BYTES, what="metrics", regular=True)
        text = data.decode()
        name = "hicachectl_verify_last_success_timestamp_seconds{"
        line = next(line for line in text.splitlines() if line.startswith(name))
        return float(line.rpartition(" ")[2])
    except (HicacheError, ValueError, StopIteration):
        return 0.0
