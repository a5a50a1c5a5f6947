"""The program that delays calls counts what strace counts, in each form that a call has."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.delayed_calls import delayed, delayed_command, read_report
from tests.skips import need_tool

if TYPE_CHECKING:
    from pathlib import Path

# Calls by the standard library, by Arrow, by libc from ctypes, raw, from threads and from a child.
CALLS = """
import ctypes, os, sys, threading
import pyarrow.fs
directory = sys.argv[1]
def work(name):
    path = os.path.join(directory, name)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(descriptor, b"four")
    os.pwrite(descriptor, b"more", 4)
    os.pread(descriptor, 4, 0)
    os.preadv(descriptor, [bytearray(4)], 0)
    os.preadv(descriptor, [bytearray(4)], 0, os.RWF_HIPRI)
    os.lseek(descriptor, 0, 0)
    os.read(descriptor, 4)
    os.readv(descriptor, [bytearray(4)])
    os.fstat(descriptor), os.stat(path), os.lstat(path)
    os.utime(descriptor), os.utime(path), os.fchmod(descriptor, 0o600)
    os.fsync(descriptor), os.fdatasync(descriptor)
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.stat(name, dir_fd=place)
    os.link(name, name + ".link", src_dir_fd=place, dst_dir_fd=place)
    os.rename(path, path + ".new")
    os.rename(name + ".new", name, src_dir_fd=place, dst_dir_fd=place)
    os.unlink(path + ".link")
    other = os.open(name + ".copy", os.O_CREAT | os.O_WRONLY, dir_fd=place)
    os.copy_file_range(descriptor, other, 4)
    os.unlink(name + ".copy", dir_fd=place)
    list(os.scandir(place)), os.listdir(directory)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.renameat2(place, name.encode(), place, name.encode() + b".other", 1)
    libc.syscall(257, place, name.encode() + b".other", os.O_RDONLY)
    libc.syscall(316, -100, path.encode() + b".other", -100, path.encode(), 0)
    libc.syncfs(place)
    pyarrow.fs.LocalFileSystem().get_file_info([path, path + ".none"])
    pyarrow.fs.LocalFileSystem().open_input_file(path).read()
work("one")
thread = threading.Thread(target=work, args=["two"])
thread.start()
thread.join()
if os.fork() == 0:
    work("three")
    os._exit(0)
os.wait()
os.stat(os.path.dirname(directory)), open("/proc/self/stat").read()
"""


def traced_calls(trace: str, directory: Path) -> Counter[str]:
    """Count the calls of a trace by strace -y that name a directory or something below it."""
    below = re.escape(str(directory))
    names = re.compile(rf'^\d+ +(\w+)\(.*?(?:"|<){below}(?:/[^">]*)?(?:"|>|\(deleted\))')
    return Counter(match[1] for line in trace.splitlines() if (match := names.match(line)))


@pytest.mark.slow
def test_calls_are_counted_in_each_form(tmp_path: Path) -> None:
    directory, trace, report = tmp_path / "files", tmp_path / "trace", tmp_path / "report"
    directory.mkdir()
    command = delayed_command(directory, 0, report, [sys.executable, "-c", CALLS, directory])
    strace = [need_tool("strace"), "-f", "-qq", "-y", "-s", "400", "-o", str(trace)]
    subprocess.run([*strace, "-e", "trace=%file,%desc", *command], check=True)
    calls, _ = read_report(report)
    expected = traced_calls(trace.read_text(), directory)
    for uncounted in ("close", "lseek", "fcntl", "mmap"):
        del expected[uncounted]
    for of_the_program_itself in ("execve", "readlink"):
        del expected[of_the_program_itself]
    assert calls == dict(expected)
    assert len(calls) > 20


def test_calls_elsewhere_go_on_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    begun = time.monotonic()
    done = delayed(directory, 60_000, ["cat", "/proc/self/status"], tmp_path)
    assert (done.status, done.calls, done.at_once) == (0, {}, 0)
    assert time.monotonic() - begun < 60


def test_calls_wait_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    program = (
        "import os, sys; from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "with Pool(8) as pool: list(pool.map(os.stat, [sys.argv[1]] * 64))"
    )
    begun = time.monotonic()
    done = delayed(directory, 50, [sys.executable, "-c", program, directory], tmp_path)
    assert (done.calls.get("stat") or done.calls.get("newfstatat")) == 64
    assert done.at_once == 8
    assert time.monotonic() - begun > 8 * 0.05


def test_a_command_ends_as_it_would(tmp_path: Path) -> None:
    done = delayed(tmp_path, 0, ["sh", "-c", "echo said; exit 3"], tmp_path)
    assert (done.status, done.stdout) == (3, "said\n")
    assert delayed(tmp_path, 0, ["sh", "-c", "kill -9 $$"], tmp_path).status == 128 + 9
