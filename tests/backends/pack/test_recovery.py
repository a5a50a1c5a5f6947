"""Repair of packs that were cut off or damaged: which objects are saved, and no wrong bytes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status, open_store
from hicachectl.backends.pack import recovery as pack_recovery
from hicachectl.backends.pack.recovery import repair
from hicachectl.backends.testing import read, rows_of, write
from hicachectl.formats.errors import FormatError, HicacheError, StoreUnavailable, UsageError
from tests.backends.pack import pack_files
from tests.backends.pack.pack_files import INDEX, METADATA, OBJECT
from tests.backends.pack.test_store import KEYS, OBJECTS, contents, opened, put
from tests.speed import some

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MANY = {
    f"{n:064x}_m_0_1.bin".encode(): np.random.default_rng(n).bytes(200 + 37 * n) for n in range(30)
}


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(4 << 20) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.hcpack"


@pytest.fixture
def whole(path: Path, arena: Arena) -> Path:
    """A pack of two runs: some objects and an index, more objects and the last index."""
    keys = list(MANY)
    put(path, arena, {key: MANY[key] for key in keys[:12]})
    put(path, arena, {key: MANY[key] for key in keys[12:]})
    return path


def ends(path: Path, kind: int) -> list[tuple[int, int]]:
    """Return the start and end offsets of the records of a kind, in an undamaged file."""
    return [(r.offset, r.offset + r.length) for r in pack_files.records(path) if r.kind == kind]


def written_before(records: list[pack_files.Found], size: int) -> dict[bytes, bytes]:
    """Return the objects whose records end within the first `size` bytes."""
    return {r.key: r.content for r in records if r.kind == OBJECT and r.offset + r.length <= size}


# cut off


@pytest.mark.slow
def test_cut_at_every_percent_the_whole_objects_are_saved(whole: Path, arena: Arena) -> None:
    data = whole.read_bytes()
    records = pack_files.records(whole)
    (_, readable_from), *_ = ends(whole, METADATA)
    for percent in some(range(100), *range(0, 100, 4), 99):
        size = len(data) * percent // 100
        expected = written_before(records, size)
        whole.write_bytes(data[:size])
        with pytest.raises(FormatError, match=str(whole)):
            opened(whole, arena)
        if size < readable_from:
            with pytest.raises(FormatError, match=str(whole)):
                repair(str(whole))
            continue
        found = repair(str(whole))
        assert found.objects == len(expected)
        assert found.damaged == found.damaged_bytes == 0
        assert contents(whole, arena) == expected


def test_cut_within_the_last_index_nothing_is_lost(whole: Path, arena: Arena) -> None:
    data = whole.read_bytes()
    start, end = ends(whole, INDEX)[-1]
    for size in (start, start + 1, start + 104, end - 1, end, end + 1, len(data) - 1):
        whole.write_bytes(data[:size])
        found = repair(str(whole))
        cut = size - start if size < end else size - end
        assert (found.objects, found.cut_bytes, found.unfinished) == (len(MANY), cut, False)
        assert contents(whole, arena) == MANY


@pytest.mark.slow
def test_a_writer_goes_on_where_another_was_cut_off(whole: Path, arena: Arena) -> None:
    data = whole.read_bytes()
    for percent in range(0, 100, 7):
        whole.write_bytes(data[: len(data) * percent // 100])
        with opened(whole, arena, create=True) as store:
            assert percent < 1 or store.remarks
            result = write(store, MANY, if_absent=True)
            assert not result.errors
        assert contents(whole, arena) == MANY


def test_a_pack_that_was_complete_but_for_its_end_is_finished_without_a_write(
    whole: Path, arena: Arena
) -> None:
    os.truncate(whole, whole.stat().st_size - 5)
    with opened(whole, arena, create=True) as store:
        store.own_temporaries("0" * 16, sweep=True)  # like a run that continues the pack
    assert contents(whole, arena) == MANY


def test_nothing_that_was_cut_off_is_left_behind_what_is_written_next(
    whole: Path, arena: Arena
) -> None:
    start = max(start for start, _ in ends(whole, OBJECT))
    os.truncate(whole, start + 500)  # most of an object, then a small one in its place
    with opened(whole, arena, create=True) as store:
        write(store, {b"small": b"x"}, if_absent=True)
        assert whole.stat().st_size < start + 200
    assert contents(whole, arena)[b"small"] == b"x"


def test_a_withdrawn_object_does_not_come_back(path: Path, arena: Arena) -> None:
    put(path, arena, {KEYS[0]: b"a", KEYS[1]: b"b"})
    with opened(path, arena, create=True) as store:
        write(store, {KEYS[2]: b"c"}, if_absent=True)
        assert store.undo_writes(rows_of([KEYS[0], KEYS[2]])).all_ok
    os.truncate(path, path.stat().st_size - 1)
    assert repair(str(path)).objects == 1
    assert contents(path, arena) == {KEYS[1]: b"b"}
    put(path, arena, {KEYS[2]: b"d"})
    os.truncate(path, path.stat().st_size - 1)
    repair(str(path))
    assert contents(path, arena) == {KEYS[1]: b"b", KEYS[2]: b"d"}


@pytest.mark.slow
def test_every_acknowledged_object_of_a_killed_writer_is_saved(path: Path, arena: Arena) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from hicachectl.backends.arena import Arena
        from tests.backends.pack.test_store import opened, write
        with Arena(1 << 20) as arena, opened(Path({str(path)!r}), arena, create=True) as store:
            for n in range(100_000):
                key = b"%064x_m_0_1.bin" % n
                assert write(store, {{key: key * 500}}, if_absent=True).all_ok
                print(n, flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 25:
                writer.send_signal(signal.SIGKILL)
                break
        acknowledged = max([25, *map(int, writer.stdout.read().split())])
    with pytest.raises(FormatError, match="not finished"):
        opened(path, arena)
    assert repair(str(path)).objects > acknowledged
    found = contents(path, arena)
    assert set(found) >= {b"%064x_m_0_1.bin" % n for n in range(acknowledged + 1)}
    assert all(value == key * 500 for key, value in found.items())


# damaged


def test_objects_behind_a_damaged_one_are_found(whole: Path, arena: Arena) -> None:
    offset, end = ends(whole, OBJECT)[3]
    data = bytearray(whole.read_bytes())
    data[offset + 20] ^= 1
    whole.write_bytes(data[:-1])
    found = repair(str(whole))
    lost = list(MANY)[3]
    assert (found.objects, found.damaged, found.damaged_bytes) == (29, 0, end - offset)
    assert contents(whole, arena) == {k: v for k, v in MANY.items() if k != lost}


@pytest.mark.slow
@pytest.mark.parametrize("block", [7, 64])
def test_a_record_is_found_wherever_the_blocks_of_the_search_end(
    path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """The magic of the record after the damage is in one block, across two, or at a block's end."""
    monkeypatch.setattr(pack_recovery, "_SEARCH_BYTES", block)
    for size in range(300, 300 + block):
        pack_files.build(path, {KEYS[0]: b"x" * size, KEYS[1]: b"kept"})
        data = bytearray(path.read_bytes())
        data[ends(path, OBJECT)[0][0]] ^= 1
        path.write_bytes(data[:-1])
        repair(str(path))
        assert contents(path, arena) == {KEYS[1]: b"kept"}, size


def test_content_that_was_never_written_is_left_out(whole: Path, arena: Arena) -> None:
    """After a power failure a file can be longer than its data on the disk."""
    offset, end = ends(whole, OBJECT)[-1]
    data = bytearray(whole.read_bytes())[:end]
    data[offset + 250 : end] = bytes(end - offset - 250)
    whole.write_bytes(data)
    assert repair(str(whole)).damaged == 1
    assert contents(whole, arena) == dict(list(MANY.items())[:-1])


def test_without_its_metadata_record_the_copy_in_an_index_is_taken(
    whole: Path, arena: Arena
) -> None:
    data = bytearray(whole.read_bytes())
    data[40] ^= 1
    whole.write_bytes(data[:-1])
    assert repair(str(whole)).objects == len(MANY)
    assert contents(whole, arena) == MANY


def test_an_object_that_is_a_pack_itself_is_not_taken_for_records(
    path: Path, tmp_path: Path, arena: Arena
) -> None:
    put(path, arena, OBJECTS)
    inner = path.read_bytes()
    outer = tmp_path / "outer.hcpack"
    put(outer, arena, {KEYS[0]: inner + b"\xa5" * 9, KEYS[1]: b"last"})
    data = bytearray(outer.read_bytes())
    data[ends(outer, OBJECT)[0][0] + 20] ^= 1
    outer.write_bytes(data[:-1])
    repair(str(outer))
    assert contents(outer, arena) == {KEYS[1]: b"last"}


# the options of the command


def test_a_valid_pack_is_left_as_it_is(whole: Path) -> None:
    before = whole.read_bytes(), whole.stat().st_mtime_ns
    nbytes = sum(map(len, MANY.values()))
    found = repair(str(whole))
    assert (found.objects, found.nbytes, found.was_valid) == (len(MANY), nbytes, True)
    assert (whole.read_bytes(), whole.stat().st_mtime_ns) == before


def test_a_dry_run_changes_nothing_and_says_the_same(whole: Path) -> None:
    os.truncate(whole, whole.stat().st_size // 2)
    before = whole.read_bytes()
    said = repair(str(whole), dry_run=True)
    assert whole.read_bytes() == before
    assert repair(str(whole)) == said
    assert said.unfinished


def test_a_new_pack_leaves_the_old_one_alone(whole: Path, tmp_path: Path, arena: Arena) -> None:
    records = pack_files.records(whole)
    os.truncate(whole, whole.stat().st_size * 3 // 4)
    before = whole.read_bytes()
    saved = tmp_path / "saved.hcpack"
    said = repair(str(whole), output=str(saved))
    assert whole.read_bytes() == before
    assert contents(saved, arena) == written_before(records, len(before))
    assert said.unfinished
    with pytest.raises(UsageError, match=f"{saved}: already exists"):
        repair(str(whole), output=str(saved))


def test_two_repairs_do_not_write_the_same_new_pack(
    whole: Path, tmp_path: Path, arena: Arena
) -> None:
    saved, partial = tmp_path / "saved.hcpack", tmp_path / ".saved.hcpack.tmp"
    partial.write_bytes(b"half of another pack")
    with partial.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match=f"{partial}: another process is writing"):
            repair(str(whole), output=str(saved))
        assert partial.read_bytes() == b"half of another pack"
        assert not saved.exists()
    repair(str(whole), output=str(saved))  # for example after a kill
    assert contents(saved, arena) == MANY
    assert not partial.exists()


def test_a_new_pack_of_a_replaced_object_has_the_later_one(
    whole: Path, tmp_path: Path, arena: Arena
) -> None:
    key = next(iter(MANY))
    with opened(whole, arena, create=True) as store:
        write(store, {key: b"new"}, if_absent=False)
    saved = tmp_path / "saved.hcpack"
    repair(str(whole), output=str(saved))
    assert contents(saved, arena) == {**MANY, key: b"new"}
    assert saved.stat().st_size < whole.stat().st_size


def test_a_pack_that_is_being_written_is_not_repaired(path: Path, arena: Arena) -> None:
    with opened(path, arena, create=True) as store:
        write(store, OBJECTS, if_absent=True)
        with pytest.raises(StoreUnavailable, match="another process is writing"):
            repair(str(path))


# fuzzed


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(8), 0, 1, 2))
def test_a_flipped_file_gives_what_was_written_or_an_error(
    whole: Path, tmp_path: Path, arena: Arena, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    data = whole.read_bytes()
    damaged_path = tmp_path / "damaged.hcpack"
    for _ in range(40):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), rng.integers(1, 30)):
            damaged[place] ^= 1 << rng.integers(8)
        if rng.random() < 0.3:
            del damaged[rng.integers(len(damaged)) :]
        damaged_path.write_bytes(damaged)
        check_all_is_true(damaged_path, arena)
        with suppress(HicacheError):
            repair(str(damaged_path))
            check_all_is_true(damaged_path, arena)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["damaged.hcpack", "x.hcpack"]


def check_all_is_true(path: Path, arena: Arena) -> None:
    """Read a damaged pack, if it opens: each object that it returns is the one written."""
    with suppress(HicacheError), open_store(f"pack://{path}") as store:
        store.attach(arena)
        for batch in store.scan(("nbytes", "locator")):
            result, found = read(store, batch, batch.column("nbytes").to_pylist())
            for index, key in enumerate(batch.column("key").to_pylist()):
                if result.statuses[index] == Status.OK:
                    assert found[index] == MANY[key]
                else:
                    assert result.errors[index].startswith("damaged: ")
