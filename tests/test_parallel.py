"""Parallel runs keep tests of one group in one process, so that each server starts once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.test_skips import pytest_run

if TYPE_CHECKING:
    from pathlib import Path

GROUPED = """
    import os
    import time
    from pathlib import Path
    import pytest
    pytestmark = pytest.mark.xdist_group("server")
    @pytest.fixture(scope="module")
    def server():
        Path(__file__).with_suffix(f".{os.getpid()}").touch()
    @pytest.mark.parametrize("number", range(8))
    def test_one(server, number):
        time.sleep(0.02)  # the other process has time to take a test
"""


@pytest.mark.slow
def test_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    options = ["-p", "xdist.plugin", "-n", "2", "--dist", "loadgroup"]
    status, said = pytest_run(
        tmp_path, *options, test_a=GROUPED, test_b=GROUPED, test_c=GROUPED, test_d=GROUPED
    )
    assert status == 0, said
    started = list(tmp_path.glob("test_*.[0-9]*"))
    assert len(started) == 4
    assert len({path.suffix for path in started}) == 1, "a group ran in several processes"
