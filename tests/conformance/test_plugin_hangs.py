"""A store that hangs holds a real server up for `op_timeout` at most, and spoils nothing later.

HICACHECTL_TEST_ALL=1 holds more calls: reads of trailers, and what a write looks at first.
Without a server, each run of tests/backends/sglang/test_file_pages.py holds the open of late
writes, and test_calls.py any work.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.conformance.cpu_server import DEVICE_TOKENS, prompt
from tests.conformance.plugin_site import Site, full_hit, is_whole
from tests.freezable_mount import freezable_mount
from tests.speed import some
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.cpu_server import CpuServer, HeldCalls

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT, OTHER = prompt(3), prompt(4)
FULL = full_hit(PROMPT)
TIMEOUT_S = 1.0  # the calls below hang until the test lets them go: any end before proves it
READS = ("pread", "preadv", "read", "readv")
DATA_READS = ("preadv", "readv")
WRITES = ("pwrite", "pwritev", "write", "writev")
NAMING = ("rename", "replace", "link")


@pytest.fixture
def site(cpu_server: CpuServer, tmp_path: Path) -> Iterator[Site]:
    site = Site(cpu_server, tmp_path / "store")
    yield site
    assert cpu_server.alive


@pytest.mark.parametrize(
    "calls", some((("open",), READS, DATA_READS), ("open",), DATA_READS), ids="-".join
)
def test_reads_that_come_late_leave_the_pool_alone(site: Site, calls: tuple[str, ...]) -> None:
    site.attach(op_timeout=TIMEOUT_S)
    cold, other = site.cold(PROMPT), site.cold(OTHER)
    with site.server.holding(site.directory, *calls) as held:
        missed = site.warm(PROMPT)
        assert held.begun
        assert missed.storage == 0
        site.server.detach()  # also flushes
        # Without a store, the other prompt takes the memory that the held reads were meant for.
        assert site.server.generate(OTHER).same(other)
        assert not held.made
    _await_made(held)
    _leave_the_device(site.server)
    reused = site.server.generate(OTHER)
    assert (reused.device, reused.host) == (0, FULL)
    assert reused.same(other)
    assert missed.same(cold)
    _assert_served(site, cold.tokens)


@pytest.mark.parametrize(
    "calls", some((("open",), WRITES, NAMING, ("stat", *READS)), WRITES, NAMING), ids="-".join
)
def test_writes_that_come_late_leave_no_page(site: Site, calls: tuple[str, ...]) -> None:
    site.attach(op_timeout=TIMEOUT_S)
    stored = site.cold(OTHER)
    with site.server.holding(site.directory, *calls) as held:
        cold = site.server.generate(PROMPT)
        wait_until(lambda: held.begun, "no write begins")
        site.server.detach()  # also flushes
        # Other prompts take the memory that the held writes were meant to read.
        for seed in range(3):
            site.server.generate(prompt(300 + seed))
        assert site.server.generate(OTHER).same(stored)
        assert not held.made
    _await_made(held)
    # A write that was waited for can end at the same moment as its call: then it is right.
    assert all(is_whole(path) for path in site.files(PROMPT) if path.exists())
    wait_until(lambda: not _temporaries(site.directory), "temporary files are left")
    _assert_served(site, cold.tokens)


def test_a_hanging_store_is_attached_cleared_and_detached(site: Site) -> None:
    site.attach(op_timeout=TIMEOUT_S)
    cold = site.cold(PROMPT)
    site.server.detach()
    everything = ("open", "stat", "statvfs", "listdir", "scandir", "mkdir", *READS, *WRITES)
    with site.server.holding(site.directory, *everything, *NAMING) as held:
        site.attach(op_timeout=TIMEOUT_S)
        assert site.server.generate(PROMPT).same(cold)
        site.server.clear()
        assert site.warm(PROMPT).same(cold)
        site.server.detach()
        assert held.begun
    _assert_served(site, cold.tokens)


def test_a_frozen_file_system_holds_nothing_up(cpu_server: CpuServer, tmp_path: Path) -> None:
    source, mount = tmp_path / "mirrored", tmp_path / "mount"
    source.mkdir()
    with freezable_mount(source, mount) as daemon:
        site = Site(cpu_server, mount / "store")
        site.attach(op_timeout=TIMEOUT_S)
        cold = site.cold(PROMPT)
        os.kill(daemon, signal.SIGSTOP)
        try:
            assert site.warm(PROMPT).same(cold)
            cpu_server.generate(OTHER)
            cpu_server.clear()
            cpu_server.detach()
            assert cpu_server.alive
        finally:
            os.kill(daemon, signal.SIGCONT)
        _assert_served(site, cold.tokens)
        cpu_server.detach()


def _await_made(held: HeldCalls) -> None:
    """Wait until all calls that were held have been made."""
    wait_until(lambda: held.made == held.begun, "held calls are not made")


def _leave_the_device(server: CpuServer) -> None:
    """Fill the device pool with other prompts, so that all before are in host memory only."""
    for seed in range(DEVICE_TOKENS // FULL + 1):
        server.generate(prompt(200 + seed))


def _assert_served(site: Site, tokens: list[int]) -> None:
    """Assert that a new attachment serves the prompt, once it is stored again."""
    site.server.detach()
    site.attach()
    wait_until(lambda: site.warm(PROMPT).storage == FULL, site.server.log_end())
    assert site.server.generate(PROMPT).tokens == tokens


def _temporaries(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.name.endswith(".tmp")]
