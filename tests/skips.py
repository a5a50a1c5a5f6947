"""Allowed reasons for skipped tests, and their report at the end of a run.

A skip names what is missing, in one of the forms below. Any other skip fails the run; otherwise a
test could stop running unnoticed. HICACHECTL_REQUIRE_ALL=1 (set by .ci/run on the reference
platform) also fails the run for skips that an installation would avoid.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from typing import NoReturn

REQUIRE_ALL = "HICACHECTL_REQUIRE_ALL"

NO_CUDA = "no CUDA device"
ON_CUDA = "a CUDA device is present: the kernels run there, not in the interpreter"
_LACKS = "the store lacks a capability: "  # wording of hicachectl/backends/testing.py
_MISSING = "missing "
_NEEDS_ROOT = _MISSING + "root's rights: run the tests as root"

_DEV = "`pip install -e '.[dev]'` installs it"
_SKIPPED = re.compile(r"^Skipped: ")


def missing(what: str, remedy: str) -> NoReturn:
    """Skip a test because this machine lacks something; `remedy`: how to install it."""
    pytest.skip(f"{_MISSING}{what}: {remedy}", allow_module_level=True)


def need_tool(name: str, package: str | None = None) -> str:
    """Return the path of a program; skip if it is not installed."""
    path = shutil.which(name)
    if path is None:
        missing(name, f"`apt-get install {package or name}` installs it")
    return path


def need_module(name: str, remedy: str = _DEV) -> Any:
    """Import a module; skip if it is not installed."""
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        missing(f"the module {name} ({error})".replace(":", ""), remedy)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason=_NEEDS_ROOT)


def lacking(what: str) -> NoReturn:
    """Skip a test of something that the store under test cannot do."""
    pytest.skip(f"{_LACKS}{what}")


class Skip(NamedTuple):
    """One kind of skip: its reason, and whether it is allowed."""

    reason: str
    allowed: bool


def classify(reason: str, *, require_all: bool) -> Skip:
    """Return the kind of a skip, from pytest's reason."""
    reason = _SKIPPED.sub("", reason)
    if reason in (NO_CUDA, ON_CUDA) or reason.startswith(_LACKS):
        return Skip(reason, allowed=True)
    if reason.startswith(_MISSING) and ": " in reason:
        return Skip(reason, allowed=not require_all)
    return Skip(f"not a reason of tests/skips.py: {reason}", allowed=False)


class SkipReport:
    """Count the skips of a run by reason, print them, and fail the run if one is not allowed."""

    def __init__(self) -> None:
        self._require_all = os.environ.get(REQUIRE_ALL) == "1"
        self._skips: dict[Skip, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a skipped test, also with an xfail mark."""
        if hasattr(report, "wasxfail"):
            self._count(f"xfail {report.wasxfail}", report.nodeid)
        else:
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that was skipped as a whole."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self._count(str(reason), report.nodeid)

    def _count(self, reason: str, node: str) -> None:
        skip = classify(reason, require_all=self._require_all)
        self._skips.setdefault(skip, Counter())[node.partition("::")[0]] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a passed run with skips that are not allowed."""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and any(
            not skip.allowed for skip in self._skips
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the skips by reason, with their files."""
        if not self._skips:
            return
        total = sum(files.total() for files in self._skips.values())
        terminalreporter.section(f"not run: {total}")
        for skip, files in sorted(self._skips.items(), key=lambda item: item[0]):
            verdict = "" if skip.allowed else "FAILED, a skip that is not allowed: "
            terminalreporter.write_line(f"{files.total():5} {verdict}{skip.reason}")
            for file, count in sorted(files.items()):
                terminalreporter.write_line(f"      {count:5} {file}")


def register(config: pytest.Config) -> None:
    """Report the skips of a run once, in the process that collects the results."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipReport(), "hicachectl-skips")
