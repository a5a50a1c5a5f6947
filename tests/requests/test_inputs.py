"""Files of requests as people have them: rotated, compressed, damaged, in folders with others."""

from __future__ import annotations

import gzip
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.errors import UsageError
from hicachectl.requests.inputs import Inputs
from hicachectl.requests.reading import Trace

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_is_read_in_the_order_of_its_changes_and_each_file_once(tmp_path: Path) -> None:
    _write(tmp_path / "b.log", b"old\n", at=1)
    _write(tmp_path / "a.log", b"new\n", at=2)
    (tmp_path / "A.log").symlink_to("a.log")
    (tmp_path / "nothing").symlink_to("nowhere")
    (tmp_path / "above").symlink_to("..")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    assert _lines(tmp_path) == [("b.log", b"old\n"), ("a.log", b"new\n")]
    assert _lines(tmp_path / "*.log") == [("b.log", b"old\n"), ("a.log", b"new\n")]


def test_a_file_that_is_rotated_while_others_are_read_is_read(tmp_path: Path) -> None:
    for number, name in enumerate(("server.log.1", "server.log")):
        _write(tmp_path / name, f"{name}\n".encode(), at=number)
    with Inputs([str(tmp_path)]) as inputs:
        lines = inputs.lines()
        assert next(lines).data == b"server.log.1\n"
        (tmp_path / "server.log").rename(tmp_path / "server.log.2")
        _write(tmp_path / "server.log", b"later\n", at=3)
        assert [line.data for line in lines] == [b"server.log\n"]


def test_a_file_that_is_gone_meanwhile_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("server.log.1", "server.log")):
        _write(tmp_path / name, b"1\n", at=number)
    with Inputs([str(tmp_path)]) as inputs:
        lines = inputs.lines()
        next(lines)
        (tmp_path / "server.log").unlink()
        with pytest.raises(UsageError, match=r"server\.log: was rotated.*run again"):
            next(lines)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_pipe_is_read_however_its_bytes_come(
    tmp_path: Path, step: int, *, compressed: bool
) -> None:
    data = b"\xef\xbb\xbf[1, 2]\n[3]\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        sent = gzip.compress(data) if compressed else data
        with pipe.open("wb", buffering=0) as file:
            for at in range(0, len(sent), step):
                file.write(sent[at : at + step])
                if at < 4:  # the bytes that tell the kind of file come one by one
                    time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    with Trace([str(pipe)]) as trace:
        assert [request.token_ids for request in trace.each()] == [[1, 2], [3]]
    writer.join()


def test_a_compressed_file_that_ends_early_is_no_shorter_one(tmp_path: Path) -> None:
    whole = gzip.compress(b"[1, 2]\n" * 1000)
    for end in (3, 12, len(whole) - 8, len(whole) - 1):
        (tmp_path / "day.gz").write_bytes(whole[:end])
        with (
            Trace([str(tmp_path / "day.gz")]) as trace,
            pytest.raises(UsageError, match="damaged or not complete; copy it again"),
        ):
            list(trace.each())


def test_several_compressed_files_in_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "days.gz").write_bytes(gzip.compress(b"[1]\n") + gzip.compress(b"[2]\n"))
    with Trace([str(tmp_path / "days.gz")]) as trace:
        assert [request.token_ids for request in trace.each()] == [[1], [2]]


@pytest.mark.parametrize("name", ["", "\0", "nowhere", "nowhere*", "/dev/null/a*", "/proc/1/mem"])
def test_what_cannot_be_read_is_named(name: str) -> None:
    with pytest.raises(UsageError), Trace([name]) as trace:
        list(trace.each())


def _write(path: Path, data: bytes, at: int) -> None:
    path.write_bytes(data)
    os.utime(path, (at, at))


def _lines(place: Path) -> list[tuple[str, bytes]]:
    with Inputs([str(place)]) as inputs:
        return [(line.file.rpartition("/")[2], line.data) for line in inputs.lines()]
