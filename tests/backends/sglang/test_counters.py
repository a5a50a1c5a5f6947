"""Counters of the plug-in: each sample is taken once, and each event is counted and logged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicachectl.backends.sglang import log
from hicachectl.backends.sglang.counters import Counters, Moved, tally_of
from hicachectl.formats.plugin_status import COUNTED, metric_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Let threads switch as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient_threads")
def test_samples_come_once_while_others_are_added() -> None:
    """No call of SGLang is missing in its metrics, or counted twice."""
    moved, threads, samples = Moved(), 4, 50_000
    done = threading.Barrier(threads + 1)

    def add(first: int) -> None:
        for number in range(first, first + samples):
            moved.add(number, 1000, 0.5)
        done.wait()

    adding = [threading.Thread(target=add, args=(n * samples,)) for n in range(threads)]
    for thread in adding:
        thread.start()
    found = []
    while done.n_waiting != threads:
        found += moved.take()
    done.wait()
    for thread in adding:
        thread.join()
    found += moved.take()
    assert sorted(pages for pages, _ in found) == list(range(threads * samples))
    assert moved.take() == []


def test_a_sample_has_pages_and_rate() -> None:
    moved = Moved()
    moved.add(4, 1 << 30, 2.0)
    ((pages, rate),) = moved.take()
    assert (pages, round(rate, 3)) == (4, 2.147)


def test_counts_go_on_in_a_later_attachment_of_the_same_stores() -> None:
    """Counts belong to a list of stores; an attachment begins without an exclusion."""
    stores = ("file:///a", "pack:///b")
    first = Counters("file:///a", tally_of(stores))
    first.moved("restored", 64)
    first.refused("damaged", "kv of a page")
    first.excluded("unserved", "no such pool")
    again = Counters("file:///a", tally_of(list(stores)))
    assert again.tally.excluded
    again.tally.begin((0, 0, 0, 0))
    again.moved("restored", 64)
    assert again.tally.of("tokens") == {"restored": 128}
    assert again.tally.of("refused") == {"damaged": 1}
    assert again.tally.excluded == {}
    assert tally_of(("file:///a",)).of("tokens") == {}


@pytest.mark.usefixtures("impatient_threads")
def test_threads_lose_no_counts() -> None:
    counters, threads, times = Counters("test"), 4, 20_000

    def count() -> None:
        for _ in range(times):
            counters.count("gone", 2)
            counters.moved("asked", 3)

    running = [threading.Thread(target=count) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert counters.tally.of("refused") == {"gone": 2 * threads * times}
    assert counters.tally.of("tokens") == {"asked": 3 * threads * times}


def test_a_line_says_how_many_it_stands_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the name, the level, the store and the reason, in one line whatever a name holds."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    counters = Counters("file:///a")
    counters.refused("damaged", "kv of page 1\nhicachectl: error: \x1b[31mforged %s")
    for _ in range(3):
        counters.refused("damaged", "kv of page 2", 5)
    counters.failed("unswept", "Permission denied")
    now[0] += 11
    counters.refused("damaged", "kv of page 3")
    counters.noted("unranked", "page 4")
    counters.noted("unranked", "page 5")
    counters.excluded("unserved", "no such pool")
    assert [record.getMessage() for record in caplog.records if record.levelno > 20] == [
        "hicachectl: warning: file:///a: damaged: kv of page 1\\nhicachectl: error: "
        "\\x1b[31mforged %s",
        "hicachectl: warning: file:///a: unswept: Permission denied",
        "hicachectl: warning: file:///a: damaged: kv of page 3 (16 pages since the last line)",
        "hicachectl: error: file:///a: unserved: no such pool; all its pages are misses until the "
        "next attach",
    ]
    assert counters.tally.of("refused") == {"damaged": 17}
    assert counters.tally.of("noted") == {"unranked": 2}


def test_every_line_goes_through_the_helper() -> None:
    """No other module of the plug-in has a logger, prints, or lets a traceback into the log."""
    for path in (Path(log.__file__).parent).glob("*.py"):
        text = path.read_text()
        assert path.name == "log.py" or not re.search(r"getLogger|import logging|\bprint\(", text)
        assert "logger.exception" not in text


# metrics, in a process of its own: prometheus_client decides at its import where values lie

EXPORTED = """
    import sys
    from hicachectl.backends.sglang.counters import Counters, tally_of

    assert "prometheus_client" not in sys.modules
    for attachment in range(2):
        tally = tally_of(("file:///a",))
        tally.begin((1, 0, 2, 0))
        counters = Counters("file:///a", tally)
        counters.moved("found", 64)
        counters.refused("damaged", "a page")
    other = tally_of(("file:///b",))
    other.begin((1, 0, 2, 0))
    Counters("file:///b", other).moved("found", 1)
"""


def exported(folder: Path, code: str) -> dict[tuple[str, str], float]:
    """Return what a process exports: values by name and labels."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", dedent(code)], env=environment, check=True)
    collected = """
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        print(generate_latest(registry).decode())
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(collected)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    families = text_string_to_metric_families(done.stdout)
    samples = [sample for family in families for sample in family.samples]
    return {(one.name, one.labels.pop("reason", "")): one.value for one in samples}


def test_counts_are_exported_once_for_all_attachments(tmp_path: Path) -> None:
    """Every metric and reason exists at 0; those of several stores are summed."""
    values = exported(tmp_path, EXPORTED)
    expected = {
        (metric_of(kind, name), "" if kind == "tokens" else name): 0.0
        for kind, names in COUNTED.items()
        for name in names
    }
    expected["hicachectl_plugin_found_tokens_total", ""] = 129
    expected["hicachectl_plugin_refused_pages_total", "damaged"] = 2
    assert values == expected


def test_without_the_variable_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    code = """
        import sys
        from hicachectl.backends.sglang.counters import tally_of

        tally_of(("file:///a",)).begin((0, 0, 0, 0))
        assert "prometheus_client" not in sys.modules
    """
    subprocess.run(
        [sys.executable, "-c", dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )


def test_metrics_that_cannot_be_written_cost_nothing_else(tmp_path: Path) -> None:
    """The directory of the values is missing: one line says so, and counting goes on."""
    code = """
        from hicachectl.backends.sglang.counters import Counters, tally_of

        tally = tally_of(("file:///a",))
        tally.begin((0, 0, 0, 0))
        Counters("file:///a", tally).moved("found", 64)
        assert tally.of("tokens") == {"found": 64}
    """
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("hicachectl: warning: metrics: not exported: ")
