"""Tests of backends.disk.io: bytes that arrive in pieces, and the ways to copy them."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.disk.io import WRITE_BYTES, chunks, copy_bytes, fill, read_up_to, write_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZES = (0, 1, 4096, WRITE_BYTES - 1, WRITE_BYTES, 3 * WRITE_BYTES + 7)
WAYS = ("whole", "in pieces", "nothing", "EXDEV", "EINVAL", "ENOSYS", "EOPNOTSUPP", "EPERM")


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each system call take or give at most 100 bytes."""
    preadv, pread, writev, pwritev = os.preadv, os.pread, os.writev, os.pwritev

    def some(buffers: Sequence[Any]) -> list[memoryview]:
        views, left = [], 100
        for buffer in buffers:
            views.append(memoryview(buffer)[:left])
            left -= len(views[-1])
        return views

    monkeypatch.setattr(os, "preadv", lambda one, many, at: preadv(one, some(many), at))
    monkeypatch.setattr(os, "pread", lambda one, count, at: pread(one, min(count, 100), at))
    monkeypatch.setattr(os, "writev", lambda one, many: writev(one, some(many)))
    monkeypatch.setattr(os, "pwritev", lambda one, many, at: pwritev(one, some(many), at))


@pytest.mark.usefixtures("in_pieces")
def test_bytes_that_come_and_go_in_pieces_are_whole(tmp_path: Path) -> None:
    data = noise(1000)
    parts = [data[:0], data[:30], data[30:730], data[730:]]
    with (tmp_path / "a").open("x+b") as file:
        assert write_all(file.fileno(), parts) == 1000
        assert write_all(file.fileno(), parts) == 1000  # at the file's position
        assert write_all(file.fileno(), parts[1:2], 500) == 30
        written = data + data
        written = written[:500] + data[:30] + written[530:]
        assert (tmp_path / "a").read_bytes() == written
        halves = bytearray(333), bytearray(5000)
        assert fill(file.fileno(), [memoryview(half) for half in halves], 50) == 1950
        assert bytes(halves[0]) + bytes(halves[1][:1617]) == written[50:]
        assert read_up_to(file.fileno(), 5000, 50) == written[50:]
        assert read_up_to(file.fileno(), 500) == written[:500]
        assert b"".join(map(bytes, chunks(file.fileno(), 1500, 50))) == written[50:1500]


def test_more_buffers_than_one_call_takes_are_written_and_read(tmp_path: Path) -> None:
    data = noise(3000)
    with (tmp_path / "a").open("x+b") as file:
        assert write_all(file.fileno(), [data[n : n + 1] for n in range(3000)]) == 3000
        into = bytearray(3000)
        views = [memoryview(into)[n : n + 1] for n in range(3000)]
        assert fill(file.fileno(), views) == 3000
    assert into == data


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replace copy_file_range by a function with this result or error; return its name."""
    system = os.copy_file_range
    answer: str = request.param

    def copy(source: int, target: int, count: int, *offsets: int) -> int:
        if answer == "whole":
            return system(source, target, count, *offsets)
        if answer == "in pieces":
            return system(source, target, min(count, 10_000), *offsets)
        if answer == "nothing":
            return 0
        raise OSError(getattr(errno, answer), answer)

    monkeypatch.setattr(os, "copy_file_range", copy)
    return answer


def copied(source: Path, target: Path, nbytes: int) -> bytes:
    with source.open("rb") as one, target.open("xb") as other:
        copy_bytes(one.fileno(), nbytes, other.fileno())
    return target.read_bytes()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
def test_all_bytes_arrive_however_the_system_copies(tmp_path: Path, way: str, nbytes: int) -> None:
    (tmp_path / "a").write_bytes(noise(nbytes))
    assert copied(tmp_path / "a", tmp_path / "b", nbytes) == noise(nbytes)


def test_no_more_is_copied_than_asked_for(tmp_path: Path, way: str) -> None:
    (tmp_path / "a").write_bytes(noise(2 * WRITE_BYTES))
    assert copied(tmp_path / "a", tmp_path / "b", WRITE_BYTES + 1) == noise(2 * WRITE_BYTES)[
        : WRITE_BYTES + 1
    ]  # fmt: skip


@pytest.mark.parametrize("held", [0, 100, WRITE_BYTES, 2 * WRITE_BYTES])
def test_a_file_that_ends_early_is_noticed(tmp_path: Path, way: str, held: int) -> None:
    (tmp_path / "a").write_bytes(noise(held))
    with pytest.raises(EOFError):
        copied(tmp_path / "a", tmp_path / "b", 2 * WRITE_BYTES + 1)


def test_a_copy_goes_to_another_file_system(tmp_path: Path, other_file_system: Path) -> None:
    (other_file_system / "a").write_bytes(noise(SIZES[-1]))
    assert copied(other_file_system / "a", tmp_path / "b", SIZES[-1]) == noise(SIZES[-1])


def test_what_goes_wrong_is_not_tried_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "copy_file_range", full)
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(OSError, match="full"):
        copied(tmp_path / "a", tmp_path / "b", 3)
    assert (tmp_path / "b").read_bytes() == b""


def test_threads_do_not_share_memory(tmp_path: Path, other_file_system: Path) -> None:
    count, nbytes = 32, 2 * WRITE_BYTES + 5
    for n in range(count):
        (other_file_system / str(n)).write_bytes(noise(nbytes, n))

    def one(n: int) -> bool:
        return copied(other_file_system / str(n), tmp_path / str(n), nbytes) == noise(nbytes, n)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(count)))
