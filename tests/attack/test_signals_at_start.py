"""SIGINT and SIGTERM at any time after the entry point: one line, 130 or 143, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.stores import put_pages
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

SIGNALS = {
    signal.SIGINT: (130, "hicachectl: Interrupted\n"),
    signal.SIGTERM: (143, "hicachectl: Terminated\n"),
}
# Sends itself a signal when the import of a module begins, as the entry point imports it.
AT_IMPORT = """
import builtins, os, signal, sys
wanted, number = sys.argv.pop(1), int(sys.argv.pop(1))
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), number)
        return None
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from hicachectl.cli.startup import main
main()
"""
AS_MODULE = AT_IMPORT.replace(
    "from hicachectl.cli.startup import main\nmain()",
    "import runpy\nrunpy.run_module('hicachectl', run_name='__main__', alter_sys=True)",
)
MODULES = [
    "hicachectl.__main__",
    "hicachectl.text.terminal",
    "click",
    "hicachectl.cli.group",
    "hicachectl.cli.exit_codes",
    "hicachectl.cli.commands.verify",
    "hicachectl.cli.options",
    "numpy",
    "numpy._core",
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.lib",
    "hicachectl.backends.file.store",
    "hicachectl.cli.output",
]


def child_of(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def check_ended(child: subprocess.Popen[bytes], number: signal.Signals) -> bytes:
    """Assert that a child ended by the signal, or had finished; return its output.

    Its last line says so. C code that imports a module (numpy's `import_array`) prints a signal's
    exception before it passes the exception on, so the traceback of an import may come first. The
    `_decimal` module warns if its import is tried again.
    """
    stdout, stderr = child.communicate(timeout=PATIENCE_S)
    status, text = SIGNALS[number]
    if child.returncode:
        printed, last, after = stderr.decode().rpartition(text)
        assert (child.returncode, last, after) == (status, text, "")
        # click ends the line of a ^C.
        in_import = "<frozen importlib._bootstrap>" in printed or "libmpdec" in printed
        assert not printed.strip("\n") or in_import, printed
    return stdout


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("module", MODULES)
def test_a_signal_while_a_module_is_imported(
    module: str, number: signal.Signals, tmp_path: Path
) -> None:
    put_pages(tmp_path, range(2), "_m_0_1")
    child = child_of(AT_IMPORT, module, int(number), "verify", tmp_path)
    check_ended(child, number)
    assert child.returncode


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("module", ["hicachectl.text.terminal", "click", "pyarrow"])
def test_a_signal_while_python_m_imports_a_module(
    module: str, number: signal.Signals, tmp_path: Path
) -> None:
    put_pages(tmp_path, range(2), "_m_0_1")
    child = child_of(AS_MODULE, module, int(number), "verify", tmp_path)
    check_ended(child, number)
    assert child.returncode


STARTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import hicachectl.cli.startup
os.write(1, b"+")
hicachectl.cli.startup.main()
"""


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_at_any_time_after_the_start(number: signal.Signals, tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_m_0_1")
    found = []
    for step in range(24):
        child = child_of(STARTED, "-q", "ls", tmp_path, "--format", "jsonl")
        assert child.stdout is not None
        assert child.stdout.read(1) == b"+"
        time.sleep(step * 0.02)  # any time in the run
        child.send_signal(number)
        stdout = check_ended(child, number)
        found.append(child.returncode)
        assert child.returncode or stdout.count(b"\n") == 2
    assert SIGNALS[number][0] in found


def test_an_ignored_sigint_stays_ignored(tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_m_0_1")
    code = AT_IMPORT.replace("signal.default_int_handler", "signal.SIG_IGN")
    child = child_of(code, "click", int(signal.SIGINT), "-q", "ls", tmp_path)
    check_ended(child, signal.SIGINT)
    assert not child.returncode
