"""Pages in Mooncake, 3FS and packs: what is read is what was written, or a miss."""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Archive
from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.sglang.stores import StorePages, archive_problem, page_form
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.identity import profile_tag
from hicachectl.formats.spec import object_specs
from tests.backends.sglang.pages import hashes
from tests.backends.sglang.rank_pools import rank_pools
from tests.backends.test_tar_store import put_tar
from tests.formats.small_models import gdn, indexer, kda, mha, mla, profile
from tests.mooncake_cluster import Cluster
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.hf3fs_server import MetadataServer

PAGES = hashes(6)
SECONDS = 20.0
FILE_BYTES = 1 << 20
DSA = profile(mla(), indexer(), page_size=4, weights="w", layout="page_first_direct")
MHA = profile(mha(), gdn(), page_size=4, weights="w", tp=2)
KIMI = profile(mla(), kda(), page_size=4, weights="w", tp=2)
DRAFTED = profile(mha(), mha("draft", layers=1), page_size=4, weights="w", pp=2)
MODELS = {"mla, indexer": DSA, "mha, mamba": MHA, "mla, mamba": KIMI}


def _settings(url: str, options: dict[str, Any]) -> Settings:
    """Return the settings of a store; take them out of the options."""
    chosen = {name: options.pop(name) for name in ("unstamped", "threads") if name in options}
    return Settings(stores=(parse_url(url),), **{"threads": 2, **chosen})


class Served:
    """A rank's pools, and the pages of one store."""

    def __init__(self, url: str, model: Profile, **options: Any) -> None:
        ranks = {name: options.pop(name, 0) for name in ("tp_rank", "pp_rank")}
        self.pools = rank_pools(model, **ranks)
        self.counters = Counters(url)
        without = options.pop("without", "")
        self.store = StorePages(parse_url(url), self.counters, _settings(url, options), **options)
        for name, host in self.pools.items():
            if name != without:
                self.store.add(host.pool)
        with Call(SECONDS) as call:
            self.store.open(call)

    def write(self, name: str = "kv", pages: list[str] = PAGES, seconds: float = SECONDS) -> Any:
        host = self.pools[name]
        with Call(seconds) as call:
            return self.store.write(host.pool, pages, host.pieces(_numbers(pages)), call)

    def read(self, name: str = "kv", pages: list[str] = PAGES, seconds: float = SECONDS) -> Any:
        host = self.pools[name]
        with Call(seconds) as call:
            return self.store.read(host.pool, pages, host.pieces(_numbers(pages)), call)

    def exists(self, name: str = "kv", pages: list[str] = PAGES, seconds: float = SECONDS) -> Any:
        with Call(seconds) as call:
            return self.store.exists(self.pools[name].pool, pages, call)

    @property
    def counts(self) -> dict[str, int]:
        return self.counters.tally.of("refused")


def _numbers(pages: list[str]) -> list[int]:
    return [PAGES.index(page) for page in pages]


@contextmanager
def served(url: str, model: Profile, **options: Any) -> Iterator[Served]:
    found = Served(url, model, **options)
    try:
        yield found
    finally:
        found.store.close()


def written(found: Served, count: int = len(PAGES)) -> dict[str, list[bytes]]:
    """Write pages of all pools; return their bytes, and clear the host pools."""
    held = {}
    for seed, (name, host) in enumerate(found.pools.items()):
        host.fill(seed)
        held[name] = host.pages(count)
        assert found.write(name, PAGES[:count]) == [True] * count, found.counts
        host.fill(99)
    return held


def expect_all(found: Served, held: dict[str, list[bytes]]) -> None:
    """Check that exactly the written pages can be read."""
    for name, pages in held.items():
        wanted = [n < len(pages) for n in range(len(PAGES))]
        assert found.exists(name) == wanted, found.counts
        assert found.read(name) == wanted, found.counts
        assert found.pools[name].pages(len(pages)) == pages


@pytest.fixture
def hf3fs_url(metadata_server: MetadataServer, tmp_path: Path) -> str:
    return f"hf3fs://{tmp_path}/hicache?server={metadata_server.url}&file_size={FILE_BYTES}"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_pages_on_mooncake_are_read_as_they_were_written(
    mooncake_cluster: Cluster, model: Profile
) -> None:
    """Each rank has its own objects; the keys are those that SGLang has with the profile's tag."""
    with served(mooncake_cluster.url, model) as found:
        held = written(found, 4)
        expect_all(found, held)
    tagged = structs.replace(model, tag=profile_tag(model) or "")
    keys = {
        f"{spec.affix[0]}{page}{spec.affix[1]}"
        for spec in object_specs(tagged, "mooncake")
        for page in PAGES[:4]
        if spec.coordinate.shard.tp_rank in (None, 0)
    }
    assert set(mooncake_cluster.list_keys()) == keys


@pytest.mark.parametrize("kind", ["3fs", "pack"])
def test_a_draft_that_comes_after_the_attach_is_served(
    hf3fs_url: str, tmp_path: Path, kind: str
) -> None:
    """As SGLang registers it. 3FS needs the sizes of its pages; a pack is compared once more."""
    model = profile(mla(), mla("draft", layers=1), page_size=4, weights="w", draft_weights="d")
    pack, held = packed(tmp_path / "pages.hcpack", model)
    writes = kind == "3fs"
    options = {"without": "draft", "draft_weights": "d", "writes": writes}
    with served(hf3fs_url if writes else pack, model, **options) as found:
        assert not any(found.exists("kv")[4:] + found.exists("draft"))
        found.store.add(found.pools["draft"].pool)
        expect_all(found, written(found, 4) if writes else held)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_pages_on_3fs_are_read_as_they_were_written(hf3fs_url: str, model: Profile) -> None:
    """Tables and files are made where an engine has not made them."""
    with served(hf3fs_url, model) as found:
        held = written(found, 4)
        expect_all(found, held)
    with served(hf3fs_url, model, writes=False) as found:
        expect_all(found, held)


def test_ranks_and_stages_share_a_tag_and_no_objects(mooncake_cluster: Cluster) -> None:
    """The draft is on the last stage only."""
    model = structs.replace(DRAFTED, tp=2, draft_weights="d")
    for tp_rank, pp_rank in ((0, 0), (1, 0), (0, 1), (1, 1)):
        ranks = {"tp_rank": tp_rank, "pp_rank": pp_rank}
        with served(mooncake_cluster.url, model, **ranks, draft_weights="d") as found:
            assert not any(found.exists())
            expect_all(found, written(found, 1))
    tags = {key.partition("_")[0] for key in mooncake_cluster.list_keys()}
    assert tags == {profile_tag(model)}


def test_other_weights_miss_on_mooncake(mooncake_cluster: Cluster) -> None:
    with served(mooncake_cluster.url, DSA) as found:
        written(found)
    with served(mooncake_cluster.url, structs.replace(DSA, weights="other")) as found:
        assert not any(found.exists())
        assert not any(found.read())


@pytest.mark.slow
def test_an_object_of_wrong_size_is_a_miss_and_is_written_again(mooncake_package: None) -> None:
    """Mooncake reads a short object as success. A reader's lease protects an object."""
    with Cluster(lease_ms=1000) as cluster, served(cluster.url, MHA) as found:
        held = written(found)
        keys = cluster.list_keys()
        for page, nbytes in ((PAGES[0], 10), (PAGES[1], 5000)):
            wrong = next(key for key in keys if page in key and key.endswith("_v"))
            cluster.put(wrong, bytes(nbytes))
        assert found.exists() == [False] * 2 + [True] * 4
        assert found.read() == [False] * 2 + [True] * 4
        assert found.counts["damaged"] == 4
        found.pools["kv"].fill(0)
        assert found.write()[0] is False  # the read granted a lease
        time.sleep(1.2)
        assert found.write() == [True] * 6
        found.pools["kv"].fill(99)
        expect_all(found, held)


def test_a_page_without_one_of_its_objects_is_a_miss(mooncake_cluster: Cluster) -> None:
    with served(mooncake_cluster.url, MHA) as found:
        held = written(found)
        keys = mooncake_cluster.list_keys()
        mooncake_cluster.remove(next(key for key in keys if PAGES[2] in key and "_k" in key))
        assert found.exists() == found.read() == [True, True, False, True, True, True]
        found.pools["kv"].fill(0)
        assert found.write() == [True] * 6
        expect_all(found, held)


def test_a_page_that_3fs_moves_during_a_read_is_a_miss(
    hf3fs_url: str, metadata_server: MetadataServer
) -> None:
    """Another page gets the place of the first one while it is read."""
    with served(hf3fs_url, DSA) as found:
        held = written(found)
        store: Any = found.store._store
        read, key = store._files.read, PAGES[0]

        def read_late(*arguments: Any) -> Any:
            metadata_server.delete(0, [key])
            metadata_server.put(0, ["f" * 64])
            metadata_server.put(0, [key])
            return read(*arguments)

        store._reader.read = read_late
        assert found.read() == [False] + [True] * 5
        assert found.counts["gone"] == 1
        assert found.pools["kv"].page(1) == held["kv"][1]


def test_pages_of_other_weights_on_3fs_are_misses(hf3fs_url: str, tmp_path: Path) -> None:
    """Keys name neither model nor weights, so a file beside the data names the deployment."""
    other = structs.replace(DSA, weights="other")
    claim = tmp_path / "hicache.hicachectl-deployment"
    with served(hf3fs_url, other, writes=False) as found:
        assert not any(found.exists())
        assert not claim.exists()
    with served(hf3fs_url, DSA) as found:
        held = written(found)
    assert claim.read_text() == profile_tag(DSA)
    for writes in (True, False):
        with served(hf3fs_url, other, writes=writes) as found:
            assert not any(found.exists() + found.read() + (found.write() if writes else []))
            assert found.counts["other-deployment"]
    with served(hf3fs_url, DSA) as found:
        expect_all(found, held)


def test_a_store_whose_keys_name_no_deployment_is_a_miss(tmp_path: Path) -> None:
    """A backend of another program could hold pages of other weights under our keys."""
    form = page_form("file", rank_pools(DSA)["kv"].pool)
    keys, sizes = form.named(PAGES)
    objects = zip(keys, sizes.tolist(), strict=True)
    put_tar(tmp_path / "a.tar", {key.decode(): bytes(nbytes) for key, nbytes in objects})
    with served(f"tar:{tmp_path}/a.tar", DSA, writes=False) as found:
        assert not any(found.exists() + found.read())
        assert found.counts["other-deployment"]


def test_a_rank_that_cannot_name_its_weights_claims_no_3fs(hf3fs_url: str, tmp_path: Path) -> None:
    pool = rank_pools(DSA)["kv"].pool
    store = StorePages(parse_url(hf3fs_url), Counters("test"), _settings(hf3fs_url, {}))
    store.add(replace(pool, identity=structs.replace(pool.identity, weights="")))
    with Call(SECONDS) as call:
        store.open(call)
    store.close()
    assert not (tmp_path / "hicache.hicachectl-deployment").exists()


@pytest.mark.parametrize("content", ["", "x" * 32, "a" * 33])
def test_a_claim_that_is_no_tag_is_a_miss(hf3fs_url: str, tmp_path: Path, content: str) -> None:
    claim = tmp_path / "hicache.hicachectl-deployment"
    claim.write_text(content)
    with served(hf3fs_url, DSA) as found:
        assert not any(found.exists() + found.write())
        assert found.counters.tally.of("failed") == {"unopened": 1}
        claim.unlink()
        found.store._open_again_at = 0.0
        assert found.write() == [True] * 6


def test_a_hanging_read_ends_at_the_deadline_and_touches_nothing_later(hf3fs_url: str) -> None:
    """Its memory is not used again before it comes back; there is none left in the end."""
    with served(hf3fs_url, DSA, threads=1) as found:
        held = written(found)
        store: Any = found.store._store
        read, release = store.read_confirmed, threading.Event()

        def read_late(*arguments: Any, **named: Any) -> Any:
            release.wait()
            return read(*arguments, **named)

        store.read_confirmed = read_late
        found.pools["kv"].fill(7)
        reused = found.pools["kv"].pages(6)
        for _ in range(4):
            found.store._readers._paused_until = 0.0
            begun = time.monotonic()
            assert not any(found.read(seconds=0.3))
            assert time.monotonic() - begun < SECONDS  # the call is released after it
        store.read_confirmed = read
        found.store._readers._paused_until = 0.0
        assert not any(found.read())
        assert found.counts["timeout"] == 5 * 6
        release.set()
        while found.store._hangs:
            time.sleep(0.01)
        assert found.pools["kv"].pages(6) == reused
        found.store._readers._paused_until = 0.0
        expect_all(found, held)


def test_a_hanging_write_stores_what_it_was_given(hf3fs_url: str) -> None:
    """The host pages hold another request's data when the write comes back."""
    with served(hf3fs_url, DSA, threads=1) as found:
        store: Any = found.store._store
        write, release = store.write_from, threading.Event()

        def write_late(*arguments: Any, **named: Any) -> Any:
            release.wait()
            return write(*arguments, **named)

        store.write_from = write_late
        found.pools["kv"].fill(1)
        held = found.pools["kv"].pages(6)
        assert not any(found.write(seconds=0.3))
        found.pools["kv"].fill(2)
        release.set()
        while found.store._hangs:
            time.sleep(0.01)
        found.store._writers._paused_until = 0.0
        assert found.exists() == found.read() == [True] * 6
        assert found.pools["kv"].pages(6) == held


@pytest.mark.slow
def test_a_master_that_comes_back_is_used_again(mooncake_package: None) -> None:
    with Cluster() as cluster, served(cluster.url, DSA) as found:
        written(found)
        cluster.kill_master()
        begun = time.monotonic()
        assert not any(found.exists(seconds=2))
        assert not any(found.read(seconds=2))
        assert time.monotonic() - begun < SECONDS
        cluster.restart_master()
        deadline = time.monotonic() + 60
        while not all(found.write(seconds=5)):
            assert time.monotonic() < deadline, found.counts
            time.sleep(0.5)
        assert found.exists() == found.read() == [True] * 6


def test_a_store_that_is_not_there_is_a_miss_and_is_opened_later(
    metadata_server: MetadataServer, tmp_path: Path
) -> None:
    folder = tmp_path / "later"
    url = f"hf3fs://{folder}/hicache?server={metadata_server.url}&file_size={FILE_BYTES}"
    with served(url, DSA) as found:
        assert not any(found.exists() + found.read() + found.write())
        assert found.counters.tally.of("failed") == {"unopened": 1}
        folder.mkdir()
        found.store._open_again_at = 0.0
        expect_all(found, written(found))


def test_a_store_in_which_a_call_hangs_is_closed_after_it(hf3fs_url: str) -> None:
    """A client library may crash if it is closed while it is used. Its memory goes with it."""
    with served(hf3fs_url, DSA, threads=1) as found:
        written(found)
        store: Any = found.store._store
        look, release, closed = store.look, threading.Event(), threading.Event()

        def look_late(*arguments: Any, **named: Any) -> Any:
            release.wait()
            return look(*arguments, **named)

        close, buffers = store.close, found.store._buffers
        store.look, store.exists = look_late, look_late
        store.close = closed.set
        assert not any(found.exists(seconds=0.3))
        begun = time.monotonic()
        found.store.close()
        assert time.monotonic() - begun < SECONDS  # the call is released after it
        assert not closed.is_set()
        release.set()
        assert closed.wait(10)
        wait_until(lambda: buffers is not None and not buffers.arena.memory, "the memory stays")
        close()


def test_a_store_that_cannot_be_closed_says_so(hf3fs_url: str) -> None:
    """No thread stays, and its memory is released."""
    with served(hf3fs_url, DSA) as found:
        store: Any = found.store._store
        close, buffers = store.close, found.store._buffers

        def fail() -> None:
            close()
            raise UnsupportedByBackend("it refuses")

        store.close = fail
        found.store.close()
        assert buffers is not None
        assert not buffers.arena.memory
        assert found.counters.tally.of("failed")["unclosed"] == 1
        names = [thread.name for thread in threading.enumerate()]
        assert "hicachectl-close" not in names


def test_a_store_that_opens_after_its_close_is_closed(
    hf3fs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, closed = threading.Event(), threading.Event()

    def open_late(*arguments: Any, **named: Any) -> Any:
        release.wait()
        store: Any = open_store(*arguments, **named)
        close = store.close

        def closing() -> None:
            close()
            closed.set()

        store.close = closing
        return store

    monkeypatch.setattr("hicachectl.backends.sglang.stores.open_store", open_late)
    store = StorePages(parse_url(hf3fs_url), Counters(hf3fs_url), _settings(hf3fs_url, {}))
    for host in rank_pools(DSA).values():
        store.add(host.pool)
    with Call(0.3) as call:
        store.open(call)
    store.close()
    assert not closed.is_set()
    release.set()
    assert closed.wait(10)


def test_memory_that_a_store_takes_after_its_close_is_released(
    hf3fs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, closed = threading.Event(), threading.Event()
    arenas: list[Arena] = []

    def open_now(*arguments: Any, **named: Any) -> Any:
        store: Any = open_store(*arguments, **named)
        attach, close = store.attach, store.close

        def attach_late(arena: Arena) -> None:
            arenas.append(arena)
            release.wait()
            attach(arena)

        def closing() -> None:
            close()
            closed.set()

        store.attach, store.close = attach_late, closing
        return store

    monkeypatch.setattr("hicachectl.backends.sglang.stores.open_store", open_now)
    store = StorePages(parse_url(hf3fs_url), Counters(hf3fs_url), _settings(hf3fs_url, {}))
    for host in rank_pools(DSA).values():
        store.add(host.pool)
    with Call(0.3) as call:
        store.open(call)
    store.close()
    assert not closed.is_set()
    release.set()
    assert closed.wait(10)
    wait_until(lambda: not arenas[0].memory, "the memory stays")


def test_a_closed_store_is_a_miss(hf3fs_url: str) -> None:
    with served(hf3fs_url, DSA) as found:
        written(found)
    assert not any(found.exists() + found.read() + found.write())


def test_clear_removes_nothing_and_says_so(
    hf3fs_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with served(hf3fs_url, DSA) as found:
        held = written(found)
        found.store.clear(Call(SECONDS))
        expect_all(found, held)
    assert "not cleared, since other servers may use its objects" in caplog.text


@pytest.mark.parametrize(
    ("url", "model", "reason"),
    [
        ("mooncake://127.0.0.1:1", structs.replace(DRAFTED, layout="layer_first"), "layer_first"),
        (
            "hf3fs:///a/b?server=http://127.0.0.1:1",
            DRAFTED,
            "pp 2: 3FS keys do not name the pp rank",
        ),
        (
            "hf3fs:///a/b?server=http://127.0.0.1:1",
            structs.replace(DRAFTED, pp=1),
            "MHA pools beside",
        ),
    ],
)
def test_what_a_store_can_never_hold_is_refused(url: str, model: Profile, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{url.partition('?')[0]}.*{reason}"):
        Served(url, model, pp_rank=model.pp - 1)


# packs


def packed(path: Path, model: Profile, grammar: str = "file") -> tuple[str, dict[str, list[bytes]]]:
    """Pack the first four pages of a deployment's first rank; return the URL, and bytes by pool."""
    url = f"pack://{path}"
    pools = rank_pools(structs.replace(model, weights="w"))
    with open_store(url, create=True) as store, Arena(1 << 20) as arena:
        assert isinstance(store, Archive)
        store.use_grammar(grammar)
        store.use_profile(model)
        store.attach(arena)
        for seed, host in enumerate(pools.values()):
            host.fill(seed)
        for spec in object_specs(model, grammar):
            if spec.coordinate.shard.tp_rank in (None, 0):
                for number, page in enumerate(PAGES[:4]):
                    host = pools[spec.pool]
                    data = host.page(number)
                    if spec.coordinate.part and len(host.pool.parts) > 1:
                        names = [part.name for part in host.pool.parts]
                        data = host.part(number, names.index(spec.coordinate.part))
                    arena.memory[: len(data)] = data
                    rows = pa.RecordBatch.from_pydict(
                        {"key": [f"{spec.affix[0]}{page}{spec.affix[1]}".encode()]}
                    )
                    sizes = np.array([len(data)])
                    assert store.write_from(rows, sizes * 0, sizes, if_absent=True).all_ok
        store.detach()
    return url, {name: host.pages(4) for name, host in pools.items()}


@pytest.mark.parametrize("grammar", ["file", "mooncake", "hf3fs"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_pack_is_read_by_servers_of_its_deployment(
    tmp_path: Path, model: Profile, grammar: str
) -> None:
    tagged = structs.replace(model, tag="own") if grammar == "mooncake" else model
    url, held = packed(tmp_path / "pages.hcpack", tagged, grammar)
    with served(url, model, writes=False) as found:
        expect_all(found, held)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "a/c"}, "model a-c instead of a-b"),
        ({"tp": 4}, "tp 4 instead of 2"),
        ({"pp": 2}, "pp 2 instead of none"),
        ({"cp": 2}, "cp 2 instead of none"),
        ({"layout": "page_first_direct"}, "layout page_first_direct instead of page_first"),
        ({"page_size": 8}, "bytes .* page size 8 instead of 4"),
        ({"pools": (mha(dtype="float16"), gdn())}, "dtype float16 instead of bfloat16"),
        ({"weights": "other"}, "weights other instead of w"),
        ({"weights": ""}, "does not name the weights"),
        ({"inferred": True}, "does not record its deployment"),
    ],
)
def test_a_pack_of_another_deployment_is_a_miss_and_one_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    """It is never refused: ranks on other hosts may see another pack, and would wait."""
    path = tmp_path / "pages.hcpack"
    url, _ = packed(path, structs.replace(MHA, **change))
    with served(url, MHA, writes=False) as found:
        for _ in range(2):
            assert not any(found.exists() + found.read())
        assert found.counts == {"other-deployment": 4 * len(PAGES)}
    (error,) = caplog.records
    assert error.levelname == "ERROR"
    assert re.search(rf"{path}: other-deployment: .*{reason}.*misses", error.getMessage())


def test_a_pack_of_a_nixl_store_is_a_miss_and_one_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = packed(tmp_path / "pages.hcpack", MHA, "nixl-buffered")
    with served(url, MHA, writes=False) as found:
        assert not any(found.exists() + found.read())
    (error,) = caplog.records
    assert "has the keys of a NIXL store" in error.getMessage()


def test_a_pack_without_weights_is_read_on_request(tmp_path: Path) -> None:
    url, held = packed(tmp_path / "pages.hcpack", structs.replace(MHA, weights=""))
    with served(url, MHA, writes=False, unstamped="read") as found:
        expect_all(found, held)


@pytest.mark.parametrize("profile", [None, structs.replace(MHA, inferred=True)], ids=str)
def test_an_archive_that_does_not_record_its_deployment_is_not_used(
    profile: Profile | None,
) -> None:
    """Also if objects without weights are read: what a listing shows says nothing of bytes."""
    archive = mock.create_autospec(Archive, instance=True, grammar="file")
    archive.recorded_profile.return_value = profile
    pools = [host.pool for host in rank_pools(structs.replace(MHA, weights="w")).values()]
    why = archive_problem(archive, pools, reads_unstamped=True)
    assert why.startswith("does not record its deployment; pack the pages again with --profile")


def test_a_damaged_object_of_a_pack_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "pages.hcpack"
    url, held = packed(path, MHA)
    data = bytearray(path.read_bytes())
    data[data.index(held["kv"][1]) + 5] ^= 1
    path.write_bytes(data)
    with served(url, MHA, writes=False) as found:
        assert found.exists() == [True] * 4 + [False] * 2
        assert found.read() == [True, False, True, True, False, False]
        assert found.counts["damaged"] == 1


def test_a_pack_that_fails_on_this_host_alone_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised: the other ranks wait for this one after the registration."""
    url, _ = packed(tmp_path / "pages.hcpack", MHA)

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("odd pack")

    monkeypatch.setattr("hicachectl.backends.sglang.stores.open_store", fail)
    with served(url, MHA, writes=False) as found:
        assert not any(found.exists() + found.read())
        assert found.counts["unopened"] >= 1


def test_an_unfinished_pack_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "pages.hcpack"
    url, _ = packed(path, MHA)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with served(url, MHA, writes=False) as found:
        assert not any(found.exists() + found.read())
        assert found.counters.tally.of("failed") == {"unopened": 1}
        path.write_bytes(whole)
        found.store._open_again_at = 0.0
        assert found.exists() == [True] * 4 + [False] * 2


def test_a_pack_of_another_deployment_that_comes_later_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "pages.hcpack"
    with served(f"pack://{path}", MHA, writes=False) as found:
        packed(path, structs.replace(MHA, weights="other"))
        found.store._open_again_at = 0.0
        assert not any(found.exists() + found.read())
        assert found.counts["other-deployment"]
