"""Run the tool on a terminal that answers its questions."""

from __future__ import annotations

import os
import pty
import subprocess
import sys


def on_a_terminal(*arguments: object, answer: str) -> tuple[str, str]:
    """Run the tool on a terminal that answers; return its stdout and stderr."""
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "hicachectl", *map(str, arguments)]
    done = subprocess.Popen(
        command, stdin=secondary, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.write(primary, f"{answer}\n".encode())
    out, err = done.communicate(timeout=60)
    os.close(primary)
    os.close(secondary)
    assert done.returncode in (0, 4), err
    return out, err
