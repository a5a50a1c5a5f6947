"""Tests of backends.pack: the shared suite, and tests that only packs need."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status, open_store, scan_schema
from hicachectl.backends.pack import writer as pack_writer
from hicachectl.backends.pack.file import open_pack
from hicachectl.backends.pack.store import PackStore
from hicachectl.backends.testing import (
    OLD_TIME_NS,
    PAGE_HASHES,
    StoreSuite,
    listing,
    read,
    rows_of,
    scanned_rows,
    write,
)
from hicachectl.cli.demo_store import PROFILE as DEMO
from hicachectl.formats.errors import (
    FormatError,
    ProfileError,
    StoreUnavailable,
    UnsupportedByBackend,
    UsageError,
)
from hicachectl.formats.profile import stored_profile
from tests.backends.pack import pack_files
from tests.backends.pack.pack_files import OBJECT, record
from tests.small_file_system import small_file_system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile

PROFILE = stored_profile(DEMO)
KEYS = tuple(f"{page}_m_0_1.bin".encode() for page in PAGE_HASHES)
OBJECTS = {key: np.random.default_rng(n).bytes(3000 + n) for n, key in enumerate(KEYS)}


class TestPackStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with open_store(f"pack://{tmp_path}/x.hcpack?keys=file", create=True) as opened:
            yield opened

    def reopen(self, store: Store) -> Store:
        return PackStore(str(_path(store)))

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        path = _path(store)
        if not path.stat().st_size:
            pack_files.build(path, {})
        kept = pack_files.indexed(path)
        data = path.read_bytes()
        entry = pack_files.record(pack_files.OBJECT, key, value, mtime_ns=len(data))
        path.write_bytes(data + entry)
        (found,) = (one for one in pack_files.records(path) if one.offset == len(data))
        kept.pop(key, None)
        pack_files.finish(path, [*kept.values(), pack_files.row_of(found)])
        _reload(store)

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        found = [one.content for one in pack_files.records(_path(store)) if one.key == key]
        return found[-1] if found else None

    def raw_delete(self, store: Store, key: bytes) -> None:
        kept = pack_files.indexed(_path(store))
        kept.pop(key, None)
        pack_files.finish(_path(store), kept.values())
        _reload(store)


def _path(store: Store) -> Path:
    assert isinstance(store, PackStore)
    return Path(store.path)


def _reload(store: Store) -> None:
    """Reload a store after the test has written to its file despite the lock."""
    assert isinstance(store, PackStore)
    assert store._writer is not None
    store._writer._continue()
    store._pack_id = store._writer.pack_id
    store._listed = store._writer.entries


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.hcpack"


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(4 << 20) as made:
        yield made


def opened(path: Path, arena: Arena, *, create: bool = False, keys: str = "file") -> PackStore:
    store = open_store(f"pack://{path}" + (f"?keys={keys}" if create else ""), create=create)
    assert isinstance(store, PackStore)
    store.attach(arena)
    return store


def put(path: Path, arena: Arena, objects: dict[bytes, bytes], **more: Any) -> None:
    """Write the objects of one call in a separate run."""
    with opened(path, arena, create=True) as store:
        assert write(store, objects, if_absent=True, **more).all_ok


def contents(path: Path, arena: Arena) -> dict[bytes, bytes]:
    """Return all objects of a valid pack."""
    columns = ("nbytes", "locator")
    with opened(path, arena) as store:
        rows = pa.Table.from_batches(list(store.scan(columns)), schema=scan_schema(columns))
        result, found = read(store, rows, rows.column("nbytes").to_pylist())
        assert result.all_ok, result.errors
        return dict(zip(rows.column("key").to_pylist(), found, strict=True))


# writing


def test_what_was_written_is_there_in_another_run(path: Path, arena: Arena) -> None:
    put(path, arena, OBJECTS)
    assert contents(path, arena) == OBJECTS
    assert {key: row["nbytes"] for key, row in pack_files.indexed(path).items()} == {
        key: len(value) for key, value in OBJECTS.items()
    }


def test_a_valid_pack_is_appended_to(path: Path, arena: Arena) -> None:
    keys = list(OBJECTS)
    put(path, arena, {key: OBJECTS[key] for key in keys[:3]})
    before = path.read_bytes()
    put(path, arena, {key: OBJECTS[key] for key in keys[3:]})
    assert path.read_bytes().startswith(before)
    assert contents(path, arena) == OBJECTS


def test_a_pack_that_was_opened_for_nothing_stays_as_it_was(path: Path, arena: Arena) -> None:
    opened(path, arena, create=True).close()
    assert not path.exists()
    put(path, arena, OBJECTS)
    before = path.read_bytes()
    with opened(path, arena, create=True) as store:
        assert write(store, OBJECTS, if_absent=True).statuses.tolist() == [Status.EXISTS] * 8
    assert path.read_bytes() == before


def test_the_later_of_two_objects_wins(path: Path, arena: Arena) -> None:
    put(path, arena, OBJECTS)
    with opened(path, arena, create=True) as store:
        assert write(store, {KEYS[1]: b"new"}, if_absent=False).all_ok
        assert listing(store)[KEYS[1]] == 3
    assert contents(path, arena) == {**OBJECTS, KEYS[1]: b"new"}


def test_a_row_listed_before_it_was_replaced_gives_the_new_object(path: Path, arena: Arena) -> None:
    put(path, arena, OBJECTS)
    with opened(path, arena, create=True) as store:
        old = scanned_rows(store, KEYS[:1])
        assert write(store, {KEYS[0]: b"new"}, if_absent=False).all_ok
        result, _ = read(store, old, [3])
        assert result.all_ok


def test_a_key_twice_in_one_call_is_written_once_if_absent(path: Path, arena: Arena) -> None:
    arena.view(0, 8)[:] = np.frombuffer(b"firstnew", dtype=np.uint8)
    with opened(path, arena, create=True) as store:
        rows = rows_of([KEYS[0], KEYS[0]])
        result = store.write_from(rows, np.array([0, 5]), np.array([5, 3]), if_absent=True)
        assert result.statuses.tolist() == [Status.OK, Status.EXISTS]
    assert contents(path, arena) == {KEYS[0]: b"first"}


def test_threads_write_at_the_same_time(path: Path, arena: Arena) -> None:
    many = [f"{n:064x}_m_0_1.bin".encode() for n in range(400)]
    arena.array[:] = np.random.default_rng(0).integers(0, 256, arena.nbytes, dtype=np.uint8)
    sizes = np.full(400, 3000)
    offsets = np.arange(400) * 3000

    def put_part(part: slice) -> list[int]:
        rows = rows_of(many[part])
        answers: list[int] = store.write_from(
            rows, offsets[part], sizes[part], if_absent=True
        ).statuses.tolist()
        assert store.exists(rows).all()
        assert len(store.look(rows)) == len(rows)
        return answers

    parts = [slice(start, start + 80) for start in range(0, 400, 40)]  # each object twice
    with opened(path, arena, create=True) as store, ThreadPoolExecutor(4) as pool:
        answers = list(chain.from_iterable(pool.map(put_part, parts)))
        assert answers.count(Status.OK) == 400
        assert set(answers) == {Status.OK, Status.EXISTS}
        assert len(listing(store)) == 400
    expected = {key: arena.view(n * 3000, 3000).tobytes() for n, key in enumerate(many)}
    assert contents(path, arena) == expected
    assert [r.kind for r in pack_files.records(path)].count(OBJECT) == 400


def test_there_is_one_writer(path: Path, arena: Arena) -> None:
    writing = f"{path}: another process is writing"
    with opened(path, arena, create=True), pytest.raises(StoreUnavailable, match=writing):
        opened(path, arena, create=True)
    opened(path, arena, create=True).close()


def test_a_pack_that_its_writer_removes_while_another_opens_it_is_not_written_to(
    path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that wrote no object removes the file: a later writer's objects would be lost."""
    first = opened(path, arena, create=True)

    def open_late(path: str, flags: int) -> int:
        descriptor = open_pack(path, flags)
        first.close()
        return descriptor

    monkeypatch.setattr("hicachectl.backends.pack.writer.open_pack", open_late)
    with pytest.raises(StoreUnavailable, match="was removed or replaced while it was opened"):
        opened(path, arena, create=True)
    assert not path.exists()


def test_a_pack_that_is_being_written_cannot_be_read(path: Path, arena: Arena) -> None:
    with opened(path, arena, create=True) as store:
        write(store, OBJECTS, if_absent=True)
        store.flush()
        with pytest.raises(FormatError, match=f"not finished.*pack repair {path}"):
            opened(path, arena)
    assert contents(path, arena) == OBJECTS


def test_a_pack_opened_to_be_read_is_not_written_to(path: Path, arena: Arena) -> None:
    put(path, arena, OBJECTS)
    refusal = pytest.raises(UnsupportedByBackend, match="reading only; open it with create")
    with opened(path, arena) as store, refusal:
        write(store, OBJECTS, if_absent=True)


def test_keys_may_be_any_bytes_but_none_and_too_many(path: Path, arena: Arena) -> None:
    odd = {b"../up.bin": b"a", b"\xff\x00/": b"b", b"k" * 0xFFFF: b"c"}
    with opened(path, arena, create=True) as store:
        result = write(store, {**odd, b"": b"d", b"k" * 0x10000: b"e"}, if_absent=True)
        assert result.statuses.tolist() == [Status.OK] * 3 + [Status.ERROR] * 2
        assert "0 bytes" in result.errors[3]
    assert contents(path, arena) == odd
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["x.hcpack"]


def test_times_are_kept_and_unknown_ones_stay_unknown(path: Path, arena: Arena) -> None:
    put(path, arena, {KEYS[0]: b"a"}, mtime_ns=[OLD_TIME_NS])
    put(path, arena, {KEYS[1]: b"b"}, mtime_ns=[None])
    with opened(path, arena) as store:
        times = scanned_rows(store, KEYS[:2]).column("mtime_ns").to_pylist()
    assert times == [OLD_TIME_NS, None]


def test_a_failed_sync_gives_the_pack_up_and_leaves_it_for_repair(
    path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    store = opened(path, arena, create=True)
    assert write(store, {KEYS[0]: b"a"}, if_absent=True).all_ok
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StoreUnavailable, match=r"Input/output error.*pack repair"):
            write(store, {KEYS[1]: b"b"}, if_absent=True)
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        write(store, {KEYS[2]: b"c"}, if_absent=True)
    store.close()
    with pytest.raises(FormatError, match="not finished"):
        opened(path, arena)


def test_a_full_file_system_leaves_a_valid_pack_of_what_fits(tmp_path: Path, arena: Arena) -> None:
    with small_file_system(tmp_path, "4m"):
        noise = np.random.default_rng(0).bytes(900 << 10)
        written = 0
        with opened(tmp_path / "x.hcpack", arena, create=True) as store:
            for key in KEYS:
                result = write(store, {key: noise}, if_absent=True)
                written += result.all_ok
            assert result.errors == {0: "No space left on device"}
        assert written == 3
        assert list(contents(tmp_path / "x.hcpack", arena).values()) == [noise] * 3


def test_an_append_that_fails_midway_leaves_no_trace(
    path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        os.pwrite(descriptor, bytes(buffers[0])[:50], offset)
        raise OSError(28, "No space left on device")

    with opened(path, arena, create=True) as store:
        assert write(store, {KEYS[0]: b"a"}, if_absent=True).all_ok
        size = path.stat().st_size
        with monkeypatch.context() as patch:
            patch.setattr(pack_writer, "write_all", half)
            result = write(store, {KEYS[1]: b"b"}, if_absent=True)
        assert result.errors == {0: "No space left on device"}
        assert path.stat().st_size == size
        assert write(store, {KEYS[2]: b"c"}, if_absent=True).all_ok
    assert contents(path, arena) == {KEYS[0]: b"a", KEYS[2]: b"c"}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put_if_absent", "undo", "reopen", "cut", "read")),
        st.integers(0, 3),
        st.integers(0, 200),
    ),
    max_size=12,
)


@pytest.mark.slow
@given(steps=STEPS)
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_order_of_writes_and_of_runs_cut_off_behaves_like_a_dict(
    path: Path, arena: Arena, steps: list[tuple[str, int, int]]
) -> None:
    path.unlink(missing_ok=True)
    model: dict[bytes, bytes] = {}
    store = opened(path, arena, create=True)
    for verb, which, number in steps:
        key, value = KEYS[which], b"%d" % number * number
        if verb in ("reopen", "cut"):
            store.close()
            if verb == "cut" and path.exists():  # in the trailer: the index itself may stay
                os.truncate(path, path.stat().st_size - 1 - number % 32)
            store = opened(path, arena, create=True)
        elif verb == "read" and key in model:
            result, found = read(store, rows_of([key]), [len(model[key])])
            assert result.all_ok
            assert found == [model[key]]
        elif verb == "undo":
            answer = Status.OK if key in model else Status.GONE
            assert store.undo_writes(rows_of([key])).statuses.tolist() == [answer]
            model.pop(key, None)
        elif verb != "read":
            kept = verb == "put_if_absent" and key in model
            result_ = write(store, {key: value}, if_absent=verb == "put_if_absent")
            assert result_.statuses.tolist() == [Status.EXISTS if kept else Status.OK]
            model.update({} if kept else {key: value})
        assert listing(store) == {key: len(value) for key, value in model.items()}
    store.own_temporaries("0" * 16, sweep=True)  # `close` must finish the pack in any case
    store.close()
    if model:
        assert contents(path, arena) == model


def test_a_cut_pack_that_is_only_looked_at_stays_as_it_is(path: Path, arena: Arena) -> None:
    with opened(path, arena, create=True) as store:
        write(store, OBJECTS, if_absent=True)
    os.truncate(path, path.stat().st_size - 5)
    before = path.read_bytes()
    with opened(path, arena, create=True) as store:
        assert listing(store).keys() == OBJECTS.keys()
    assert path.read_bytes() == before


# metadata


def test_the_profile_is_recorded_and_another_is_refused(path: Path, arena: Arena) -> None:
    with opened(path, arena, create=True) as store:
        store.use_profile(PROFILE)
        write(store, OBJECTS, if_absent=True)
    with opened(path, arena) as store:
        assert store.recorded_profile() == PROFILE
    with opened(path, arena, create=True) as store:
        store.use_profile(PROFILE)
        other = type(PROFILE)(model="other", pools=PROFILE.pools)
        with pytest.raises(ProfileError, match="another deployment"):
            store.use_profile(other)


def test_a_pack_has_objects_of_one_weights(path: Path, arena: Arena) -> None:
    """Servers may read a pack as objects of the weights that its profile names."""
    weighted = replace(PROFILE, weights="5" * 32)
    with opened(path, arena, create=True) as store:
        store.use_profile(weighted)
        write(store, OBJECTS, if_absent=True)
    with opened(path, arena, create=True) as store:
        store.use_profile(weighted)
        for other in (PROFILE, replace(PROFILE, weights="6" * 32)):
            with pytest.raises(ProfileError, match="or other weights"):
                store.use_profile(other)
    with opened(path, arena) as store:
        assert store.recorded_profile() == weighted


@pytest.mark.parametrize("recorded", [None, PROFILE])
def test_objects_of_unknown_weights_stay_such(
    path: Path, arena: Arena, recorded: Profile | None
) -> None:
    with opened(path, arena, create=True) as store:
        if recorded is not None:
            store.use_profile(recorded)
        write(store, OBJECTS, if_absent=True)
    with opened(path, arena, create=True) as store:
        store.use_profile(replace(PROFILE, weights="5" * 32, draft_weights="6" * 32))
        write(store, {b"0" * 64 + b"_m_0_1.bin": b"more"}, if_absent=True)
    with opened(path, arena) as store:
        assert store.recorded_profile() == PROFILE


def test_a_profile_is_added_to_a_pack_without_one(path: Path, arena: Arena) -> None:
    put(path, arena, {KEYS[0]: b"a"})
    with opened(path, arena, create=True) as store:
        store.use_profile(PROFILE)
        write(store, {KEYS[1]: b"b"}, if_absent=True)
    with opened(path, arena) as store:
        assert store.recorded_profile() == PROFILE


def test_an_inferred_profile_is_not_recorded(path: Path, arena: Arena) -> None:
    with opened(path, arena, create=True) as store:
        store.use_profile(type(PROFILE)(model="m", inferred=True, pools=PROFILE.pools))
        write(store, OBJECTS, if_absent=True)
        assert store.recorded_profile() is None


def test_a_pack_has_keys_of_one_grammar(path: Path, arena: Arena) -> None:
    with opened(path, arena, create=True, keys="mooncake") as store:
        write(store, {b"key": b"a"}, if_absent=True)
    with opened(path, arena) as store:
        assert store.grammar == "mooncake"
        with pytest.raises(UnsupportedByBackend, match="mooncake keys"):
            store.use_grammar("file")
    with pytest.raises(UnsupportedByBackend, match="mooncake keys"):
        opened(path, arena, create=True, keys="hf3fs")
    with pytest.raises(UsageError, match="mooncake keys, not file"):
        open_store(f"pack://{path}?keys=file")
    with pytest.raises(UsageError, match="Key scheme: "):
        open_store(f"pack://{path}?keys=s3", create=True)


def test_a_new_pack_has_to_be_told_its_keys(path: Path, arena: Arena) -> None:
    with open_store(f"pack://{path}", create=True) as store:
        assert isinstance(store, PackStore)
        store.attach(arena)
        with pytest.raises(UnsupportedByBackend, match=r"keys=file"):
            write(store, OBJECTS, if_absent=True)
        store.use_grammar("hf3fs")
        assert write(store, OBJECTS, if_absent=True).all_ok
        assert store.grammar == "hf3fs"


# untrusted files


def test_what_is_no_pack_is_refused_and_left_alone(tmp_path: Path, arena: Arena) -> None:
    for name, data in {
        "a": b"",
        "b": b"text, not a pack, and some more of it",
        "c": b"\x89H",
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FormatError, match=f"{tmp_path / name}: not a pack"):
            opened(tmp_path / name, arena)
    with pytest.raises(FormatError, match="not a pack"):
        opened(tmp_path / "b", arena, create=True)
    assert (tmp_path / "b").read_bytes().startswith(b"text")
    for name, text in {"none": "No such file.*; check the path", ".": "not a regular file"}.items():
        with pytest.raises(StoreUnavailable, match=text):
            opened(tmp_path / name, arena)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StoreUnavailable, match="not a regular file"):
        opened(tmp_path / "fifo", arena)


def hostile(path: Path, entry: bytes, **lies: Any) -> None:
    """Write a pack of one object by hand, with the given index row."""
    path.write_bytes(pack_files.header() + pack_files.metadata())
    at = path.stat().st_size
    path.write_bytes(path.read_bytes() + entry)
    sound = {
        "key": KEYS[0],
        "nbytes": 8,
        "mtime_ns": 0,
        "offset": at,
        "length": len(entry),
        "planes": 1,
        "digest": entry[64:96],
    }
    pack_files.finish(path, [{**sound, **lies}])


@cache
def bomb() -> bytes:
    """Return a frame of 32 KiB for 1 GiB of zeros."""
    return zstandard.ZstdCompressor().compress(bytes(1 << 30))


DAMAGED: dict[str, tuple[bytes, dict[str, Any]]] = {
    "a digest that is another's": (record(OBJECT, KEYS[0], b"12345678", digest=bytes(32)), {}),
    "another key": (record(OBJECT, KEYS[1], b"12345678"), {}),
    "another size": (record(OBJECT, KEYS[0], b"1234567890"), {"length": 104 + len(KEYS[0]) + 8}),
    "metadata": (record(1, KEYS[0], b"12345678"), {}),
    "another pack's": (record(OBJECT, KEYS[0], b"12345678", pack_id=b"another."), {}),
    "no record": (b"x" * 200, {"length": 104 + len(KEYS[0]) + 8}),
    "a digest the record has not": (record(OBJECT, KEYS[0], b"12345678"), {"digest": bytes(32)}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_object_that_is_not_what_the_index_says_is_damaged(
    path: Path, arena: Arena, name: str
) -> None:
    entry, lies = DAMAGED[name]
    hostile(path, entry, **lies)
    with opened(path, arena) as store:
        size = listing(store)[KEYS[0]]
        assert size is not None
        result, _ = read(store, scanned_rows(store, KEYS[:1]), [size])
    other_content = name == "a digest that is another's"
    assert result.statuses.tolist() == [Status.DAMAGED if other_content else Status.ERROR]
    assert result.errors[0].startswith("damaged: ")
    assert "offset" in result.errors[0]


@pytest.mark.slow
def test_a_frame_of_more_than_was_declared_is_refused_within_the_declared_memory(
    path: Path, arena: Arena
) -> None:
    content = bytes(1 << 18)
    hostile(
        path,
        record(OBJECT, KEYS[0], content, planes=[bomb()], nbytes=len(content)),
        nbytes=len(content),
    )
    with opened(path, arena) as store:
        rows = scanned_rows(store, KEYS[:1])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result, _ = read(store, rows, [len(content)])
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "zstd frame has 1073741824 bytes" in result.errors[0]
    assert after - before < 64 << 10  # KiB


def test_an_object_declared_larger_than_it_is_needs_no_memory(path: Path, arena: Arena) -> None:
    nbytes = 1 << 50
    hostile(path, record(OBJECT, KEYS[0], b"", planes=[bomb()], nbytes=nbytes), nbytes=nbytes)
    with opened(path, arena) as store:
        result, _ = read(store, scanned_rows(store, KEYS[:1]), [8])
    assert result.statuses.tolist() == [Status.OVERSIZED]


def test_an_end_that_lies_is_refused(path: Path, arena: Arena) -> None:
    hostile(path, record(OBJECT, KEYS[0], b"12345678"))
    data = path.read_bytes()[: -pack_files.TRAILER_BYTES]
    for offset, length in ((0, 10), (2**64 - 1, 1), (32, 2**64 - 40), (len(data) - 8, 8), (32, 9)):
        path.write_bytes(data + pack_files.trailer(offset, length))
        with pytest.raises(FormatError, match=f"{path}: .*index.*offset.*{offset}.*pack repair"):
            opened(path, arena)
    path.write_bytes(data + pack_files.trailer(32, len(data) - 32))  # the metadata, not an index
    with pytest.raises(FormatError, match="damaged"):
        opened(path, arena)


def test_a_file_that_is_cut_under_a_reader_is_an_error_of_the_object(
    path: Path, arena: Arena
) -> None:
    put(path, arena, OBJECTS)
    with opened(path, arena) as store:
        rows = scanned_rows(store, KEYS)
        os.truncate(path, rows.column("locator").to_pylist()[-1] + 200)
        result, _ = read(store, rows, [len(value) for value in OBJECTS.values()])
    assert result.statuses.tolist() == [Status.OK] * 7 + [Status.ERROR]
    assert "ends within a record" in result.errors[7]


def test_rows_of_another_store_are_found_by_their_keys(path: Path, arena: Arena) -> None:
    put(path, arena, OBJECTS)
    with opened(path, arena) as store:
        right = scanned_rows(store, KEYS).column("locator").to_pylist()
        for locators in ([None] * 8, [7] * 8, right[::-1]):
            rows = rows_of(list(KEYS), locator=locators)
            result, found = read(store, rows, [len(value) for value in OBJECTS.values()])
            assert result.all_ok
            assert found == list(OBJECTS.values())


def test_forked_readers_read(path: Path, arena: Arena) -> None:
    put(path, arena, OBJECTS)
    with opened(path, arena) as store:
        rows = scanned_rows(store, KEYS)
        for _ in range(3):
            if not (child := os.fork()):
                result, _ = read(store, rows, [len(value) for value in OBJECTS.values()])
                os._exit(not result.all_ok)
            assert os.waitpid(child, 0)[1] == 0
