"""Tests of backends.arena."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.arena import (
    ALIGNMENT,
    Arena,
    ReservationCancelledError,
    Slab,
    SlabAllocator,
    place,
)
from hicachectl.formats.errors import UsageError
from tests.waiting import PATIENCE_S, wait_until

K = 1024


def test_an_arena_is_aligned_zeroed_and_rounded_up() -> None:
    with Arena(5000) as arena:
        assert arena.nbytes == 8192
        assert arena.address % ALIGNMENT == 0
        assert not arena.view(0, 8192).any()


def test_views_memory_and_address_are_the_same_bytes() -> None:
    with Arena(8192) as arena:
        arena.view(4096, 3)[:] = (1, 2, 3)
        assert bytes(arena.memory[4096:4099]) == b"\1\2\3"
        assert arena.view(4096, 3).ctypes.data == arena.address + 4096


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 4097), (4096, 1), (0, -1)])
def test_a_view_outside_the_arena_is_refused(offset: int, nbytes: int) -> None:
    with Arena(4096) as arena, pytest.raises(ValueError, match="arena of 4096"):
        arena.view(offset, nbytes)


def test_closing_leaves_views_that_are_in_use_alive() -> None:
    arena = Arena(4096)
    view = arena.view(0, 10)
    view[:] = 7
    arena.close()
    assert view.tolist() == [7] * 10


def test_memory_that_cannot_be_had_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--buffer-bytes"):
        Arena(1 << 62)


def test_a_named_arena_is_opened_by_others_until_its_name_is_forgotten() -> None:
    with Arena(8192, named=True) as arena:
        assert arena.name is not None
        path = Path("/dev/shm") / arena.name
        assert path.stat().st_size == 8192
        arena.view(4096, 3)[:] = (1, 2, 3)
        assert path.read_bytes()[4096:4099] == b"\1\2\3"
        arena.forget_name()
        assert arena.name is None
        assert not path.exists()
        assert arena.view(4096, 1).tolist() == [1]


def test_closing_a_named_arena_leaves_no_file_behind() -> None:
    arena = Arena(4096, named=True)
    path = Path("/dev/shm") / str(arena.name)
    assert path.exists()
    arena.close()
    assert not path.exists()


def test_shared_memory_that_cannot_be_had_is_a_usage_error_and_leaves_nothing() -> None:
    before = set(Path("/dev/shm").glob("hicachectl-*"))
    with pytest.raises(UsageError, match="--buffer-bytes"):
        Arena(1 << 50, named=True)
    assert set(Path("/dev/shm").glob("hicachectl-*")) <= before


def test_a_request_larger_than_the_arena_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"page 12ab needs 12288 bytes.*the buffer has 8192"):
        SlabAllocator(8 * K).reserve(8 * K + 1, name="page 12ab")


def test_a_full_arena_is_free_again_after_a_release() -> None:
    allocator = SlabAllocator(8 * K)
    with allocator.reserve(8 * K):
        assert allocator._free == []
    assert allocator._free == [(0, 8 * K)]
    allocator.reserve(8 * K).release()


def test_a_slab_is_released_once() -> None:
    slab = SlabAllocator(8 * K).reserve(1)
    slab.release()
    with pytest.raises(ValueError, match="not reserved"):
        slab.release()


def test_nothing_at_all_still_takes_a_slab() -> None:
    assert SlabAllocator(8 * K).reserve(0).nbytes == ALIGNMENT


def test_cancel_wakes_whoever_waits() -> None:
    allocator = SlabAllocator(8 * K)
    allocator.reserve(8 * K)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(allocator.reserve, 1) for _ in range(2)]
        allocator.cancel()
        for future in waiting:
            with pytest.raises(ReservationCancelledError):
                future.result(PATIENCE_S)


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    allocator = SlabAllocator(8 * K)
    held = allocator.reserve(4 * K)
    order: list[str] = []

    def take(name: str, nbytes: int) -> None:
        with allocator.reserve(nbytes):
            order.append(name)

    large = threading.Thread(target=take, args=("large", 8 * K))
    large.start()
    wait_until(lambda: allocator._waiting)
    small = threading.Thread(target=take, args=("small", 1))  # would fit at once
    small.start()
    wait_until(lambda: len(allocator._waiting) == 2)
    held.release()
    large.join(PATIENCE_S)
    small.join(PATIENCE_S)
    assert order == ["large", "small"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40 * K)), max_size=60))
def test_slabs_never_overlap_and_all_memory_comes_back(steps: list[tuple[bool, int]]) -> None:
    allocator = SlabAllocator(128 * K)
    held: list[Slab] = []
    for take, number in steps:
        if take:
            wanted = max(1, -(-number // ALIGNMENT)) * ALIGNMENT
            if all(length < wanted for _, length in allocator._free):  # it would wait for ever
                assert allocator._take(wanted) is None
            else:
                held.append(allocator.reserve(number))
        elif held:
            held.pop(number % len(held)).release()
        assert all(slab.offset % ALIGNMENT == 0 for slab in held)
        assert allocator._free == _gaps(held, 128 * K)
    for slab in held:
        slab.release()
    assert allocator._free == [(0, 128 * K)]


def _gaps(held: list[Slab], nbytes: int) -> list[tuple[int, int]]:
    """Return the free ranges by brute force; fail if two slabs share a page."""
    used = np.zeros(nbytes // ALIGNMENT, dtype=int)
    for slab in held:
        used[slab.offset // ALIGNMENT : (slab.offset + slab.nbytes) // ALIGNMENT] += 1
    assert used.max(initial=0) <= 1
    edges = np.flatnonzero(np.diff(np.concatenate([[1], used, [1]])))
    pairs = (edges * ALIGNMENT).reshape(-1, 2).tolist()
    return [(start, end - start) for start, end in pairs]


def test_threads_make_progress_and_never_share_bytes() -> None:
    arena = Arena(64 * K)
    allocator = SlabAllocator(arena.nbytes)

    def work(seed: int) -> None:
        sizes = np.random.default_rng(seed).integers(1, 64 * K, 60)
        for size in sizes.tolist():
            with allocator.reserve(size) as slab:
                view = arena.view(slab.offset, slab.nbytes)
                view[:] = seed
                time.sleep(0)
                assert (view == seed).all()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(1, 7)))
    assert allocator._free == [(0, arena.nbytes)]
    arena.close()


@given(st.lists(st.integers(0, 20_000), max_size=20))
def test_placed_objects_are_aligned_and_apart(sizes: list[int]) -> None:
    offsets, total = place(np.array(sizes, dtype=np.int64))
    starts = offsets.tolist()
    assert all(start % ALIGNMENT == 0 for start in starts)
    ends = [*starts[1:], total]
    pairs = zip(starts, sizes, ends, strict=False)
    assert all(size <= end - start < size + ALIGNMENT for start, size, end in pairs)


def test_memory_that_is_populated_is_resident_and_zero() -> None:
    with Arena(1 << 22) as arena:
        before = resident(arena)
        arena.populate()
        assert before == 0
        assert resident(arena) == 1 << 22
        assert not arena.array.any()


def resident(arena: Arena) -> int:
    """Return the bytes of an arena that this process has in memory."""
    first = f"{arena.address:x}-"
    entries = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(first) for line in entries)
    return next(int(line.split()[1]) << 10 for line in entries if line.startswith("Rss:"))
