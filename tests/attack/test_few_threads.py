"""A system that refuses threads: the result is one line, and nothing is half-written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.attack import children
from tests.move.migrations import PAGES, demo_store, profile_file

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

# As under RLIMIT_NPROC, which does not limit root: only N threads start.
LIMIT = """
import threading
start = threading._start_new_thread
def refuse(*arguments, **options):
    global left
    left -= 1
    if left < 0:
        raise RuntimeError("can't start new thread")
    return start(*arguments, **options)
threading._start_new_thread = refuse
"""


def run(threads: int, *arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line with a limit of started threads."""
    return children.run(*arguments, home=home, before=f"left = {threads}\n{LIMIT}")


@pytest.mark.parametrize("threads", [0, 1, 2])
@pytest.mark.parametrize("command", ["verify", "migrate", "prewarm", "pack"])
def test_too_few_threads_are_one_line_and_a_later_run_completes(
    tmp_path: Path, command: str, threads: int
) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    profile = profile_file(tmp_path / "p.toml")
    arguments: list[object] = {
        "verify": ["verify", source, "--profile", profile],
        "migrate": ["migrate", source, target],
        "prewarm": ["prewarm", target, "--from", source, "--all", "--profile", profile],
        "pack": ["migrate", source, f"pack://{tmp_path}/a.hcpack"],
    }[command]
    done = run(threads, *arguments, home=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Cannot start another thread; raise the limit (ulimit -u)" in done.stderr
    assert "Traceback" not in done.stderr
    written = {path.name for path in target.glob("*.bin")}
    pages = {name[:64] for name in written}
    assert written == {path.name for path in source.glob("*.bin") if path.name[:64] in pages}

    enough = run(1000, *arguments, home=tmp_path)
    assert enough.returncode == 0, enough.stderr
    if command in ("migrate", "prewarm"):
        assert len({path.name[:64] for path in target.glob("*.bin")}) == PAGES
