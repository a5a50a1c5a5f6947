"""The report of skipped tests, in separate runs of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.skips import REQUIRE_ALL
from tests.speed import slow

ROOT = Path(__file__).parents[1]
CONFTEST = "from tests.skips import register as pytest_configure\n"
# Other plugins take longer to load than the tests to run.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONPATH": str(ROOT),
}
LACKING = (
    "from tests.skips import *\ndef test_one(): missing('bindfs', '`apt-get install bindfs`')\n"
)


def pytest_run(
    folder: Path, *options: str, require_all: bool = False, **files: str
) -> tuple[int, str]:
    """Run pytest on test files in a folder; return its exit status and its output."""
    for name, text in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(dedent(text))
    done = subprocess.run(
        pytest_of(folder, *options),
        env={**ENVIRONMENT, REQUIRE_ALL: str(int(require_all))},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def pytest_of(folder: Path, *options: str) -> list[str]:
    """Return the command that runs the tests of a folder."""
    alone = ["-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", *alone, *options, str(folder)]


PARALLEL = pytest.mark.parametrize(
    "options", [[], slow(["-p", "xdist.plugin", "-n", "1"])], ids=["alone", "xdist"]
)


@PARALLEL
def test_what_is_missing_is_listed_with_its_remedy(tmp_path: Path, options: list[str]) -> None:
    whole = "from tests.skips import *\nneed_module('no_such_module')\n"
    status, said = pytest_run(tmp_path, *options, test_a=LACKING, test_whole=whole)
    assert status == 0, said
    assert "not run: 2" in said
    assert "1 missing bindfs: `apt-get install bindfs`" in said
    assert "1 test_a.py" in said
    assert "1 missing the module no_such_module" in said
    assert "pip install -e '.[dev]'" in said
    assert "1 test_whole.py" in said


def test_what_is_missing_fails_a_run_that_requires_everything(tmp_path: Path) -> None:
    passing = "def test_two(): pass\n"
    status, said = pytest_run(tmp_path, require_all=True, test_a=LACKING, test_b=passing)
    assert status == 1, said
    assert "FAILED, a skip that is not allowed: missing bindfs: `apt-get install bindfs`" in said


@pytest.mark.slow
def test_a_fixture_that_skips_counts_too(tmp_path: Path) -> None:
    text = """
        import pytest
        from tests.skips import need_tool
        @pytest.fixture
        def tool(): need_tool("no-such-program", "programs")
        def test_one(tool): pass
    """
    assert pytest_run(tmp_path, require_all=True, test_a=text)[0] == 1
    status, said = pytest_run(tmp_path, test_a=text)
    assert status == 0
    assert "1 missing no-such-program: `apt-get install programs` installs it" in said


@pytest.mark.slow
def test_cuda_and_what_a_store_lacks_may_always_be_skipped(tmp_path: Path) -> None:
    text = """
        import pytest
        from tests.skips import *
        @pytest.mark.skipif(True, reason=NO_CUDA)
        def test_one(): pass
        def test_two(): pytest.skip("the store lacks a capability: Store empty")
    """
    status, said = pytest_run(tmp_path, require_all=True, test_a=text)
    assert status == 0, said
    assert "1 no CUDA device" in said
    assert "1 the store lacks a capability: Store empty" in said


@pytest.mark.parametrize(
    "text",
    [
        "import pytest\n@pytest.mark.skip(reason='later')\ndef test_one(): pass\n",
        slow("import pytest\npytest.importorskip('no_such_module')\ndef test_one(): pass\n"),
        slow("import pytest\n@pytest.mark.parametrize('n', [])\ndef test_one(n): pass\n"),
        slow("import pytest\n@pytest.mark.xfail\ndef test_one(): assert False\n"),
        slow("import pytest\n@pytest.mark.xfail\ndef test_one(): pass\n"),
    ],
    ids=["skip", "importorskip", "no parameters", "xfail", "xpass"],
)
def test_any_other_skip_fails_the_run(tmp_path: Path, text: str) -> None:
    status, said = pytest_run(tmp_path, test_a=text)
    assert status == 1, said
    assert "FAILED, a skip that is not allowed: not a reason of tests/skips.py" in said


@pytest.mark.slow
def test_a_run_without_skips_says_nothing_of_them(tmp_path: Path) -> None:
    status, said = pytest_run(tmp_path, require_all=True, test_a="def test_one(): pass\n")
    assert status == 0, said
    assert "not run" not in said


def test_children_can_be_interrupted_when_the_tests_run_in_the_background(tmp_path: Path) -> None:
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    text = f"""
        import subprocess, sys
        def test_one():
            child = [sys.executable, "-c", {child!r}]
            assert subprocess.check_output(child, text=True) == "True\\n"
    """
    conftest = "import tests.conftest\n"
    for name, content in (("conftest", conftest), ("test_a", dedent(text))):
        (tmp_path / f"{name}.py").write_text(content)
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *pytest_of(tmp_path)],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
