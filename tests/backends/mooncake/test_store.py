"""Tests of backends.mooncake: the shared suite on a real cluster, and tests for Mooncake only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status, Store, open_store
from hicachectl.backends.mooncake import client as mooncake_client
from hicachectl.backends.mooncake.client import Code
from hicachectl.backends.mooncake.store import MooncakeStore
from hicachectl.backends.testing import (
    ARENA_BYTES,
    PAGE_HASHES,
    StoreSuite,
    listing,
    read,
    rows_of,
    scanned_rows,
    write,
)
from hicachectl.formats.errors import StoreUnavailable, UsageError
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE_MS = 3000
DISCARD_S = 8  # after this time the master discards an unfinished put
KEY = f"m_{PAGE_HASHES[0]}_0_k".encode()
SPLIT_HEADS_KEY = f"m_{PAGE_HASHES[1]}_['4', '5']_mamba_temporal".encode()


@pytest.fixture(scope="module")
def brief_cluster(mooncake_package: None) -> Iterator[Cluster]:
    """A cluster with short leases: an object cannot be removed while a read's lease lasts."""
    with Cluster(lease_ms=LEASE_MS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def brief_store(brief_cluster: Cluster) -> Iterator[MooncakeStore]:
    """One store for all tests of `brief_cluster`: Mooncake's client takes a second to close."""
    with opened(brief_cluster) as store:
        yield store


@pytest.fixture(scope="module")
def opened_store(shared_mooncake_cluster: Cluster) -> Iterator[MooncakeStore]:
    """One store for all tests of a cluster whose leases outlast the tests."""
    with opened(shared_mooncake_cluster) as store:
        yield store


def opened(cluster: Cluster) -> MooncakeStore:
    store = open_store(cluster.url)
    assert isinstance(store, MooncakeStore)
    return store


@pytest.fixture
def cluster(mooncake_cluster: Cluster) -> Cluster:
    return mooncake_cluster


@pytest.fixture
def store(
    cluster: Cluster, opened_store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MooncakeStore]:
    for name in ("allow_leases", "confirms_writes", "lease_wait_seconds"):
        monkeypatch.setattr(opened_store, name, getattr(MooncakeStore, name))
    with Arena(ARENA_BYTES) as arena:
        opened_store.attach(arena)
        yield opened_store
        opened_store.detach()


class TestMooncakeStore(StoreSuite):
    keys = tuple(f"m_{page}_0_k".encode() for page in PAGE_HASHES)
    empty_objects = False

    @pytest.fixture
    def store(self, brief_cluster: Cluster, brief_store: MooncakeStore) -> Iterator[Store]:
        brief_cluster.clear()
        self.cluster = brief_cluster
        yield brief_store
        brief_store.detach()

    def reopen(self, store: Store) -> Store:
        return open_store(self.cluster.url)

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        self.cluster.put(key.decode(), value)

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        return self.cluster.client().get(key.decode()) or None

    def raw_delete(self, store: Store, key: bytes) -> None:
        self.cluster.client().remove(key.decode(), True)


def test_a_replica_in_memory_is_listed_with_its_place(
    store: MooncakeStore, cluster: Cluster
) -> None:
    cluster.put(KEY.decode(), b"x" * 5000)
    (replica,) = scanned_rows(store, [KEY]).column("replicas").to_pylist()[0]
    assert replica["kind"] == "memory"
    assert replica["nbytes"] == 5000
    assert replica["location"].startswith("127.0.0.1:")


def test_a_key_with_a_comma_is_listed_without_a_size_but_is_there(
    store: MooncakeStore, cluster: Cluster
) -> None:
    cluster.put(SPLIT_HEADS_KEY.decode(), b"x" * 5000)
    assert listing(store) == {SPLIT_HEADS_KEY: None}
    assert store.exists(rows_of([SPLIT_HEADS_KEY, SPLIT_HEADS_KEY + b","])).tolist() == [
        True,
        False,
    ]
    assert store.look(rows_of([SPLIT_HEADS_KEY, KEY])).column("key").to_pylist() == [
        SPLIT_HEADS_KEY
    ]


def test_a_longer_object_under_a_key_with_a_comma_says_its_size(
    store: MooncakeStore, cluster: Cluster
) -> None:
    cluster.put(SPLIT_HEADS_KEY.decode(), b"x" * 5000)
    result, _ = read(store, rows_of([SPLIT_HEADS_KEY]), [4000])
    assert result.statuses.tolist() == [Status.OVERSIZED]
    assert result.nbytes.tolist() == [5000]


def test_with_leases_allowed_a_key_with_a_comma_has_a_size(
    store: MooncakeStore, cluster: Cluster
) -> None:
    cluster.put(SPLIT_HEADS_KEY.decode(), b"x" * 5000)
    store.allow_leases = True
    assert listing(store) == {SPLIT_HEADS_KEY: 5000}


def test_looking_leaves_no_lease_and_reading_does(store: MooncakeStore, cluster: Cluster) -> None:
    cluster.put(KEY.decode(), b"x" * 5000)
    rows = scanned_rows(store, [KEY])
    store.exists(rows)
    store.look(rows)
    client = cluster.client()
    assert client.remove(KEY.decode()) == 0
    cluster.put(KEY.decode(), b"x" * 5000)
    read(store, rows, [5000])
    assert client.remove(KEY.decode()) == -706


def test_a_removal_that_cannot_wait_for_readers_says_so(
    store: MooncakeStore, cluster: Cluster
) -> None:
    cluster.put(KEY.decode(), b"x" * 5000)
    rows = scanned_rows(store, [KEY])
    read(store, rows, [5000])
    store.lease_wait_seconds = 0
    refused = store.delete(rows)
    assert refused.statuses.tolist() == [Status.ERROR]
    assert "lease" in refused.errors[0]
    assert "--lease-wait" in refused.errors[0]
    assert set(listing(store)) == {KEY}


def test_a_removal_waits_for_readers(
    brief_cluster: Cluster, brief_store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brief_store, "lease_wait_seconds", 60)
    brief_cluster.put(KEY.decode(), b"x" * 5000)
    assert brief_cluster.client().is_exist(KEY.decode()) == 1  # leases it
    began = time.monotonic()
    assert brief_store.delete(rows_of([KEY])).all_ok
    assert time.monotonic() - began < 30
    assert KEY.decode() not in brief_cluster.list_keys()


def test_what_another_writer_put_meanwhile_is_not_called_ours(
    store: MooncakeStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put returns 0 even if it did not write; this test stages a race of query and put."""
    cluster.put(KEY.decode(), b"theirs" * 1000)
    nothing = np.zeros(1, dtype=np.bool_)
    monkeypatch.setattr(store, "_found", lambda rows: (nothing, nothing))
    result = write(store, {KEY: b"ours!!" * 1000}, if_absent=True)
    assert result.statuses.tolist() == [Status.EXISTS]
    assert cluster.client().get(KEY.decode()) == b"theirs" * 1000


_PUT_UNTIL_KILLED = """
import sys
import numpy as np
from mooncake.store import MooncakeDistributedStore

store, memory = MooncakeDistributedStore(), np.ones(32 << 20, dtype=np.uint8)
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
store.register_buffer(memory.ctypes.data, memory.nbytes)
while True:
    store.batch_put_from([sys.argv[2]], [memory.ctypes.data], [memory.nbytes])
    store.remove(sys.argv[2], True)
"""


def test_what_a_killed_writer_had_begun_is_not_called_ours(mooncake_package: None) -> None:
    """A put of a key with an unfinished put also returns 0, until the master discards that."""
    with (
        Cluster(put_start_discard_timeout_sec=DISCARD_S) as cluster,
        opened(cluster) as store,
        Arena(ARENA_BYTES) as arena,
    ):
        store.attach(arena)  # before the kill, as this takes a second of DISCARD_S
        kill_while_it_puts(cluster, KEY.decode())
        assert write(store, {KEY: b"ours"}, if_absent=True).statuses.tolist() == [Status.EXISTS]
        time.sleep(DISCARD_S + 0.5)
        assert write(store, {KEY: b"ours"}, if_absent=True).all_ok
        assert cluster.client().get(KEY.decode()) == b"ours"


def kill_while_it_puts(cluster: Cluster, key: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _PUT_UNTIL_KILLED, cluster.master, key]) as writer:
        deadline = time.monotonic() + 120
        while "REPLICA_IS_NOT_READY" not in cluster.ask(f"batch_query_keys?keys={key}"):
            assert time.monotonic() < deadline
            writer.send_signal(signal.SIGCONT)
            time.sleep(0.003)
            writer.send_signal(signal.SIGSTOP)
        writer.kill()


def test_an_empty_object_is_refused_before_it_is_put(store: MooncakeStore) -> None:
    result = write(store, {KEY: b""}, if_absent=True)
    assert result.statuses.tolist() == [Status.ERROR]
    assert "empty" in result.errors[0]


def test_objects_that_find_no_room_are_errors_and_the_others_are_written(cluster: Cluster) -> None:
    with Cluster(segment_bytes=16 << 20, lease_ms=60_000) as small, Arena(32 << 20) as arena:
        with open_store(small.url) as store:
            store.attach(arena)
            keys = [f"m_{n:064x}_0_k".encode() for n in range(24)]
            result = write(store, dict.fromkeys(keys, b"x" * (1 << 20)), if_absent=True)
            written = set(listing(store))
        assert 0 < result.ok.sum() < len(keys)
        assert written == {key for key, ok in zip(keys, result.ok, strict=True) if ok}
        assert "no room" in next(iter(result.errors.values()))


def test_leases_that_end_within_a_batch_say_nothing_against_its_objects(
    mooncake_package: None,
) -> None:
    """A slow network must not cause an error finding, since a repair would delete the objects."""
    keys = [f"m_{n:064x}_0_k".encode() for n in range(48)]
    with Cluster(128 << 20, lease_ms=10) as hasty, Arena(64 << 20) as arena:
        for key in keys:
            hasty.put(key.decode(), bytes(1 << 20))
        with open_store(hasty.url) as store:
            store.attach(arena)
            sizes = np.full(len(keys), 1 << 20, dtype=np.int64)
            offsets = np.arange(len(keys)) * (1 << 20)
            client_codes = _codes_of_one_batch(hasty, keys, arena)
            result = store.read_into(rows_of(keys), offsets, sizes)
    assert -707 in client_codes  # the codes of the whole batch
    assert set(result.statuses.tolist()) <= {Status.OK, Status.UNREACHABLE}
    assert result.ok.any()


def _codes_of_one_batch(cluster: Cluster, keys: list[bytes], arena: Arena) -> list[int]:
    addresses = [arena.address + (at << 20) for at in range(len(keys))]
    names = [key.decode() for key in keys]
    codes: list[int] = cluster.client().batch_get_into(names, addresses, [1 << 20] * len(keys))
    return codes


def test_a_read_that_outlasts_its_lease_is_repeated(
    store: MooncakeStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.put(KEY.decode(), b"x" * 5000)
    rows, client = scanned_rows(store, [KEY]), store._data()
    real, left = client.get_into, [Code.LEASE_EXPIRED] * 3

    def get_into(keys: Any, addresses: Any, capacities: Any) -> Any:
        answer = real(keys, addresses, capacities)
        return np.array([left.pop()]) if left else answer

    monkeypatch.setattr(client, "get_into", get_into)
    assert read(store, rows, [5000])[1] == [b"x" * 5000]
    left += [Code.LEASE_EXPIRED] * 4
    result, _ = read(store, rows, [5000])
    assert result.statuses.tolist() == [Status.UNREACHABLE]
    assert left == []


def test_only_waiting_for_large_transfers_gives_way_to_other_threads(
    store: MooncakeStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = SPLIT_HEADS_KEY
    cluster.put(KEY.decode(), b"x" * 5000)
    cluster.put(large.decode(), b"x" * (1 << 20))
    client = store._data()
    recorder = Recorder(client._store)
    monkeypatch.setattr(client, "_store", recorder)
    result, _ = read(store, scanned_rows(store, [KEY]), [5000])
    assert result.all_ok
    result, _ = read(store, scanned_rows(store, [large]), [1 << 20])
    assert result.all_ok
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert recorder.niceness == [here, min(here + 10, 19)]


class Recorder:
    """A Mooncake client that records the niceness of reading threads."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.niceness: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_get_into(self, *arguments: Any) -> Any:
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return self._client.batch_get_into(*arguments)


def test_a_call_after_the_end_is_an_error_and_no_crash(cluster: Cluster) -> None:
    with Arena(ARENA_BYTES) as arena:
        store = open_store(cluster.url)
        store.attach(arena)
        store.close()
        store.close()
        with pytest.raises(ValueError, match="closed"):
            store.attach(arena)


def test_pinning_is_known_to_the_master(store: MooncakeStore, cluster: Cluster) -> None:
    assert "soft-pinned: 0" in cluster.ask("metrics/summary")
    one = np.full(1, 4096, dtype=np.int64)
    with open_store(cluster.url) as pinning:
        assert isinstance(pinning, MooncakeStore)
        assert store.arena is not None
        pinning.pin_writes(60)
        pinning.attach(store.arena)
        written = pinning.write_from(
            rows_of([KEY]), np.zeros(1, dtype=np.int64), one, if_absent=True
        )
    assert written.all_ok
    assert "soft-pinned: 1" in cluster.ask("metrics/summary")


def test_a_master_that_was_restarted_is_reached_by_the_same_process(
    mooncake_package: None,
) -> None:
    with Cluster() as cluster, Arena(ARENA_BYTES) as arena:
        for life in range(2):
            if life:
                cluster.kill_master()
                cluster.restart_master()
            with open_store(cluster.url) as store:
                store.attach(arena)


def test_a_pin_that_the_master_does_not_allow_is_refused(
    pinning_cluster: Cluster, store: MooncakeStore
) -> None:
    for refused in (lambda: store.can_pin(864_000), lambda: store.pin(rows_of([KEY]), 864_000)):
        with pytest.raises(UsageError, match="pins of 864000 s are longer than the master's"):
            refused()
    pinning_cluster.put(KEY.decode(), b"x")
    odd = rows_of([KEY, b"\xff"])
    assert store.pin(odd, 60).statuses.tolist() == [Status.OK, Status.ERROR]
    assert "not UTF-8" in store.unpin(odd).errors[1]


def test_a_client_that_is_closed_while_a_call_hangs_waits_no_longer_than_the_call(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_client, "_PATIENCE_SECONDS", 1.0)
    store = open_store(cluster.url)
    assert isinstance(store, MooncakeStore)
    client, hangs, goes_on = store._data(), threading.Event(), threading.Event()
    real = client._store

    class Hanging:
        def batch_remove(self, *_: Any) -> list[int]:
            hangs.set()
            goes_on.wait(120)
            return [0]

    monkeypatch.setattr(client, "_store", Hanging())
    with ThreadPoolExecutor(2) as pool:
        removal = pool.submit(client.remove, ["key"])
        assert hangs.wait(60)
        try:
            pool.submit(store.close).result(timeout=60)
        finally:
            goes_on.set()
        with pytest.raises(StoreUnavailable, match="hang"):
            removal.result()
    real.close()


def test_a_storage_process_that_hangs_is_given_up(
    mooncake_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster() as cluster, Arena(ARENA_BYTES) as arena:
        cluster.put(KEY.decode(), b"x" * 5000)
        store = open_store(cluster.url)
        store.attach(arena)
        rows = scanned_rows(store, [KEY])
        cluster.pause_store()
        monkeypatch.setattr(mooncake_client, "_PATIENCE_SECONDS", 1.0)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="hang"):
            read(store, rows, [5000])
        store.close()
        assert time.monotonic() - began < 20  # less than the usual 25 s, or than minutes
