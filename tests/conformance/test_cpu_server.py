"""A damaged page of SGLang's own file backend changes the CPU server's answers.

The tests of the plug-in rely on it. test_plugin_serves.py has answers out of whole stores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance.cpu_server import PAGE_SIZE, ROOT, page_files, prompt
from tests.waiting import alive, wait_until

if TYPE_CHECKING:
    from tests.conformance.cpu_server import Answer, CpuServer

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT = prompt(1)
PAGES = len(PROMPT) // PAGE_SIZE
_HOLDER = """
import sys
from pathlib import Path
from tests.conformance.cpu_server import CpuServer
CpuServer(*map(Path, sys.argv[1:]))
"""


@pytest.mark.parametrize("page", [0, PAGES - 1])
def test_one_flipped_bit_of_a_page_changes_the_answer(
    cpu_server: CpuServer, tmp_path: Path, page: int
) -> None:
    cold = _stored(cpu_server, tmp_path)
    damaged = page_files(tmp_path, PROMPT)[page]
    data = bytearray(damaged.read_bytes())
    data[10001] ^= 0x40  # the highest bit of an exponent
    damaged.write_bytes(data)
    cpu_server.flush()
    warm = cpu_server.generate(PROMPT)
    assert warm.storage == PAGES * PAGE_SIZE
    assert not warm.same(cold)


def _stored(server: CpuServer, directory: Path) -> Answer:
    """Answer the prompt with an empty store, and wait until HiCacheFile has stored its pages."""
    server.attach("file", {"file_storage_path": str(directory)})
    answer = server.generate(PROMPT)
    wait_until(lambda: all(path.exists() for path in page_files(directory, PROMPT)))
    return answer


def test_a_test_run_that_is_killed_leaves_no_process(
    sglang_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Also while the server starts; test_plugin_serves.py kills one with all its processes."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, sglang_python, tiny_model, tmp_path / "log"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        wait_until(lambda: any(map(_is_server, _descendants(holder.pid))))
        started = _descendants(holder.pid)
    finally:
        holder.kill()
        holder.wait()
    wait_until(lambda: not any(map(alive, started)))


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return []
    return [n for child in map(int, children) for n in (child, *_descendants(child))]


def _is_server(pid: int) -> bool:
    """Return whether a process has begun to execute the server."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1].endswith(b"serve.py")
    except (OSError, IndexError):
        return False
