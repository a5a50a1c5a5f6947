"""A real SGLang server reads and writes a file store through the plug-in.

A second server, whose pages have another dtype and layout, shares directories with the first. It is
killed by the last test.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, NamedTuple

import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.verification.request import VerifyRequest
from tests.checks.value_cases import profile_of
from tests.conformance import tiny_llama
from tests.conformance.cpu_server import (
    DEVICE_TOKENS,
    MODEL,
    PAGE_SIZE,
    CpuServer,
    page_files,
    prompt,
)
from tests.conformance.plugin_site import PAGE_BYTES, Site, full_hit, plugin_config
from tests.conformance.tiny_llama import HEAD_DIM, KV_HEADS, LAYERS
from tests.stores import OLD
from tests.verification.in_process import verify_store
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT = prompt(1)
FULL = full_hit(PROMPT)
SERVERS = ("cpu_server", "direct_server")
POLICIES = ("write_through", "write_through_selective", "write_back")


class Direct(NamedTuple):
    """A server of float16 pages with layout page_first_direct and direct I/O, and its model."""

    server: CpuServer
    model: Path


@pytest.fixture(scope="module")
def direct(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Direct]:
    folder = tmp_path_factory.mktemp("server")
    model = folder / "tiny"
    tiny_llama.write_model(model, seed=7)
    options = ("--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct")
    log = folder / "direct.log"
    with CpuServer(sglang_python, model, log, *options, "--dtype", "float16") as server:
        yield Direct(server, model)


@pytest.fixture
def direct_server(direct: Direct) -> Iterator[CpuServer]:
    """The second server, detached, with empty pools."""
    direct.server.detach()
    yield direct.server
    direct.server.detach()


@pytest.fixture(params=SERVERS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(request.getfixturevalue(request.param), tmp_path / "store")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flushed_server_answers_equally_out_of_the_store(site: Site, policy: str) -> None:
    site.attach(policy)
    cold = site.server.generate(PROMPT)
    if policy == "write_through_selective":
        site.server.generate(PROMPT)  # written at the second use
    if policy == "write_back":  # written when it leaves the device
        for seed in range(DEVICE_TOKENS // FULL + 1):
            site.server.generate(prompt(100 + seed))
    site.await_stored(PROMPT)
    warm = site.warm(PROMPT)
    assert (cold.storage, warm.storage) == (0, FULL)
    assert warm.same(cold)


def test_a_store_is_attached_and_detached_at_run_time(site: Site) -> None:
    without = site.server.generate(PROMPT)
    site.server.flush()
    site.attach()
    assert site.cold(PROMPT).same(without)
    site.server.detach()
    assert (site.warm(PROMPT)).storage == 0
    site.server.flush()
    site.attach()
    again = site.warm(PROMPT)
    assert again.storage == FULL
    assert again.same(without)


def test_hicachefile_reads_what_the_plugin_wrote(site: Site) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    site.server.detach()
    site.server.attach("file", {"file_storage_path": str(site.directory)})
    warm = site.warm(PROMPT)
    assert warm.storage == FULL
    assert warm.same(cold)


def test_the_plugin_reads_what_hicachefile_wrote_if_told_to(site: Site) -> None:
    site.server.attach("file", {"file_storage_path": str(site.directory)})
    cold = site.server.generate(PROMPT)
    files = page_files(site.directory, PROMPT)
    wait_until(lambda: all(path.exists() for path in files))
    site.server.detach()
    site.attach(unstamped="read")
    warm = site.warm(PROMPT)
    assert warm.storage == FULL
    assert warm.same(cold)
    assert {path.stat().st_size for path in files} == {PAGE_BYTES}


def test_objects_without_trailers_are_misses_and_are_written_again(
    cpu_server: CpuServer, tmp_path: Path
) -> None:
    site = Site(cpu_server, tmp_path / "store")
    cpu_server.attach("file", {"file_storage_path": str(site.directory)})
    cold = cpu_server.generate(PROMPT)
    wait_until(lambda: all(path.exists() for path in site.files(PROMPT)))
    cpu_server.detach()
    site.attach()
    missed = site.warm(PROMPT)
    assert missed.storage == 0
    site.await_stored(PROMPT)
    warm = site.warm(PROMPT)
    assert warm.storage == FULL
    assert missed.same(cold)
    assert warm.same(cold)


def test_a_cleared_store_misses_at_once_and_is_filled_again(
    cpu_server: CpuServer, tmp_path: Path
) -> None:
    site = Site(cpu_server, tmp_path / "store")
    site.attach()
    cold = site.cold(PROMPT)
    written = [path.stat().st_mtime_ns for path in site.files(PROMPT)]
    cpu_server.clear()
    missed = site.warm(PROMPT)
    wait_until(lambda: _written_since(site, written))
    warm = site.warm(PROMPT)
    assert (missed.storage, warm.storage) == (0, FULL)
    assert missed.same(cold)
    assert warm.same(cold)


def _written_since(site: Site, times: list[int]) -> bool:
    files = site.files(PROMPT)
    return all(path.exists() for path in files) and all(
        path.stat().st_mtime_ns > time for path, time in zip(files, times, strict=True)
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"treads": 2}, "treads"),
        ({"digest": "md5"}, "md5"),
        ({"op_timeout": 9}, "op_timeout"),
    ],
)
def test_a_wrong_config_is_refused_by_name_and_the_server_lives(
    cpu_server: CpuServer, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    config = plugin_config(tmp_path / "store", **change)
    assert named in cpu_server.refusal("dynamic", config)
    site = Site(cpu_server, tmp_path / "store")
    site.attach()
    site.cold(PROMPT)


def test_the_servers_metrics_count_what_the_plugin_moved(
    cpu_server: CpuServer, tmp_path: Path
) -> None:
    before = _moved(cpu_server)
    site = Site(cpu_server, tmp_path / "store")
    site.attach()
    site.cold(PROMPT)
    site.warm(PROMPT)
    wait_until(lambda: _moved(cpu_server) == tuple(count + FULL for count in before))


def _moved(server: CpuServer) -> tuple[int, ...]:
    """Return the tokens that were backed up and prefetched."""
    counts = []
    for name in ("backuped_tokens_total", "prefetched_tokens_total"):
        lines = [
            line for line in server.metrics().splitlines() if line.startswith(f"sglang:{name}")
        ]
        counts.append(int(sum(float(line.rpartition(" ")[2]) for line in lines)))
    return tuple(counts)


def test_pages_of_another_dtype_are_found_without_the_plugin(
    cpu_server: CpuServer, direct_server: CpuServer, tmp_path: Path
) -> None:
    """HiCacheFile's keys and sizes are equal; prompts of one token and of few are among them."""
    prompts = [prompt(seed) for seed in range(2)]
    prompts += [[7] * len(PROMPT), [11, 12, 99, 5, 6] * (len(PROMPT) // 5)]
    for server, name in ((cpu_server, "bfloat16"), (direct_server, "float16")):
        (tmp_path / name).mkdir()
        server.attach("file", {"file_storage_path": str(tmp_path / name)})
        for tokens in prompts:
            server.generate(tokens)
        server.detach()
    profile = profile_of(
        {"kind": "mha", "dtype": "float16", "layers": LAYERS, "kv_heads": KV_HEADS,
         "head_dim": HEAD_DIM}, page_size=PAGE_SIZE, model=MODEL,
    )  # fmt: skip
    names = sorted(path.name for path in (tmp_path / "float16").glob("*.bin"))
    assert len(names) >= 20
    found = {}
    for later in (len(names), len(names) // 2, 9):
        store = tmp_path / f"store-{later}"
        store.mkdir()
        for number, name in enumerate(names):
            dtype = "float16" if number >= len(names) - later else "bfloat16"
            shutil.copy(tmp_path / dtype / name, store)
            os.utime(store / name, (OLD + number, OLD + number))
        verified = verify_store(FileStore(store), VerifyRequest(profile=profile))
        found[later] = verified.document["counts"].get("values-changed", 0)
    assert list(found.values()) == [0, 1, 1]


# the last test: it ends the second server

SHARED = prompt(5)


def test_a_directory_is_shared_with_another_dtype_other_weights_and_a_killed_writer(
    cpu_server: CpuServer, direct: Direct, tmp_path: Path
) -> None:
    here, there = Site(cpu_server, tmp_path / "store"), Site(direct.server, tmp_path / "store")
    there.server.detach()
    _replace_each_other(here, there)
    _miss_other_weights(there, direct.model)
    _miss_while_updated(there, direct.model, seed=9, version=None)
    _miss_while_updated(there, direct.model, seed=10, version="next")
    _die_while_writing(here, there)


def _replace_each_other(here: Site, there: Site) -> None:
    """One server's bfloat16 pages are misses for the other's float16, and the reverse."""
    here.attach()
    cold = here.cold(SHARED)
    alone = there.server.generate(SHARED)
    there.attach()
    missed = there.warm(SHARED)
    assert missed.storage == 0
    assert missed.same(alone)
    _await_hit(there)
    again = here.warm(SHARED)
    assert again.storage == 0
    assert again.same(cold)
    here.server.detach()


def _miss_other_weights(there: Site, model: Path) -> None:
    """Weights that change between two attachments make the pages of before misses."""
    _await_hit(there)
    before = there.server.generate(SHARED)
    there.server.detach()
    tiny_llama.write_weights(model, seed=8)
    there.server.update_weights(model)
    alone = there.server.generate(SHARED)
    assert not alone.same(before)
    there.server.flush()
    there.attach()
    missed = there.warm(SHARED)
    assert missed.storage == 0
    assert missed.same(alone)
    _await_hit(there)
    assert there.warm(SHARED).same(alone)


def _miss_while_updated(there: Site, model: Path, seed: int, version: str | None) -> None:
    """After an update from files, nothing is read or written until the next attachment."""
    tiny_llama.write_weights(model, seed)
    there.server.update_weights(model, version)
    there.server.flush()
    unseen = prompt(1000 + seed)
    first, other = there.server.generate(SHARED), there.server.generate(unseen)
    assert (first.storage, other.storage) == (0, 0)
    assert there.warm(SHARED).same(first)
    assert not any(path.exists() for path in there.files(unseen))
    there.server.detach()
    there.attach()
    assert there.warm(SHARED).same(first)
    _await_hit(there)
    assert there.warm(SHARED).same(first)


def _die_while_writing(here: Site, there: Site) -> None:
    """A killed writer's unfinished pages are misses, and are written again."""
    unseen = prompt(7)
    with there.server.holding(there.directory, "rename", "link", "replace") as held:
        there.server.generate(unseen)
        wait_until(lambda: held.begun, there.server.log_end())
        there.server.kill_first()
    assert any(path.name.endswith(".tmp") for path in there.directory.rglob("*"))
    assert not any(path.exists() for path in here.files(unseen))
    here.attach()
    cold = here.cold(unseen)
    warm = here.warm(unseen)
    assert warm.storage == full_hit(unseen)
    assert warm.same(cold)


def _await_hit(site: Site) -> None:
    """Answer the prompt until it is read out of the store."""
    wait_until(lambda: site.warm(SHARED).storage == full_hit(SHARED), site.server.log_end())
