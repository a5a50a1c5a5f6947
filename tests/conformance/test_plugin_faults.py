"""A damaged, foreign or unreadable store costs a real server hits, but changes no answer.

Each run tries flipped, cut and removed pages, pages of other weights, dtype and layout, FIFOs and
directories, and EACCES and ESTALE of a whole store. HICACHECTL_TEST_ALL=1 adds what each run of
tests/backends/sglang/test_file_pages.py tries without a server: any flipped bit, files of other
lengths, and links. It also adds another model's trailer, which differs by its identity as those of
other weights do, and EIO of a whole store, which each run tries on one page.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest

from hicachectl.formats.identity import Identity
from hicachectl.formats.trailer import digest_function, dump_trailer, parse_trailer
from tests.conformance.cpu_server import PAGE_SIZE, prompt
from tests.conformance.plugin_site import PAGE_BYTES, Site, full_hit
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.speed import some
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conformance.cpu_server import CpuServer

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT = prompt(2)
FULL = full_hit(PROMPT)
SECOND = PAGE_SIZE  # tokens before the second page, which most tests damage
READS = ("pread", "preadv", "read", "readv")


@pytest.fixture
def site(cpu_server: CpuServer, tmp_path: Path) -> Site:
    return Site(cpu_server, tmp_path / "store")


def test_nothing_but_the_faults_below_costs_hits(site: Site) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    assert site.warm(PROMPT).storage == FULL
    assert site.warm(PROMPT).same(cold)


# one damaged page


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10001] ^= 0x40
    path.write_bytes(data)


def _flip_in_trailer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[PAGE_BYTES + 60] ^= 1
    path.write_bytes(data)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(PAGE_BYTES) + path.read_bytes()[PAGE_BYTES:])


def _zero_all(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _truncate(path: Path) -> None:
    os.truncate(path, PAGE_BYTES // 2)


def _truncate_trailer(path: Path) -> None:
    os.truncate(path, PAGE_BYTES + 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


DAMAGES: tuple[Callable[[Path], None], ...] = (
    *(_flip, _flip_in_trailer, _zero, _zero_all, _truncate, _truncate_trailer, _empty),
    *(_lengthen, os.remove),
)


@pytest.mark.parametrize("damage", some(DAMAGES, _flip, _truncate_trailer, os.remove))
def test_a_damaged_page_is_a_miss_and_is_written_again(
    site: Site, damage: Callable[[Path], None]
) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    damage(site.files(PROMPT)[1])
    warm = site.warm(PROMPT)
    assert warm.storage == SECOND
    assert warm.same(cold)
    _assert_healed(site)


def test_another_pages_bytes_under_the_name_are_a_miss(site: Site) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    _, second, third, *_ = site.files(PROMPT)
    shutil.copy(third, second)
    warm = site.warm(PROMPT)
    assert warm.storage == SECOND
    assert warm.same(cold)
    _assert_healed(site)


def _assert_healed(site: Site) -> None:
    """Assert that the prompt is stored whole again, and read."""
    site.await_stored(PROMPT)
    before = site.server.generate(PROMPT)
    again = site.warm(PROMPT)
    assert again.storage == FULL
    assert again.same(before)


# foreign pages: the right length, and bytes that fit their digest


class Foreign(NamedTuple):
    model: str = "tiny"
    weights: str = "others"
    dtype: str = "bfloat16"
    layout: str = "page_first"


def _make_foreign(path: Path, foreign: Foreign) -> None:
    """Give a page other bytes, and the trailer that another server would have written."""
    data = path.read_bytes()
    payload = data[:PAGE_BYTES][::-1]
    trailer = parse_trailer(data[PAGE_BYTES:])
    assert trailer is not None
    identity = Identity(**foreign._asdict(), page_size=PAGE_SIZE, layer_bytes=PAGE_BYTES // 2)
    written = trailer._replace(
        digest=digest_function(trailer.digest_kind)((payload,)), identity=identity.hash()
    )
    path.write_bytes(payload + dump_trailer(written))


FOREIGN = {
    "weights": Foreign(),
    "dtype": Foreign(dtype="float16"),
    "layout": Foreign(layout="page_head"),
    "model": Foreign(model="tiny_0_1"),  # an MLA model's keys equal those of rank 0 of "tiny"
}


@pytest.mark.parametrize("foreign", some(FOREIGN, "weights", "dtype", "layout"))
def test_a_foreign_page_is_a_miss_and_is_replaced(site: Site, foreign: str) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    _make_foreign(site.files(PROMPT)[1], FOREIGN[foreign])
    warm = site.warm(PROMPT)
    assert warm.storage == SECOND
    assert warm.same(cold)
    _assert_healed(site)


def test_a_foreign_page_stays_if_told_so(site: Site) -> None:
    site.attach(on_foreign="leave")
    cold = site.cold(PROMPT)
    foreign = site.files(PROMPT)[1]
    _make_foreign(foreign, Foreign())
    data = foreign.read_bytes()
    for _ in range(2):
        warm = site.warm(PROMPT)
        assert warm.storage == SECOND
        assert warm.same(cold)
    assert foreign.read_bytes() == data


# what is not a file of ours


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize("replaced", some((_fifo, _directory, _link), _fifo, _directory))
def test_what_is_no_file_is_a_miss_that_holds_nothing_up(
    site: Site, replaced: Callable[[Path], None]
) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    replaced(site.files(PROMPT)[1])
    warm = site.warm(PROMPT)
    assert warm.storage == SECOND
    assert warm.same(cold)
    assert site.warm(PROMPT).same(cold)
    assert site.server.alive


# the directory


def test_a_removed_directory_is_made_and_filled_again(site: Site) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    shutil.rmtree(site.directory)
    warm = site.warm(PROMPT)
    assert warm.storage == 0
    assert warm.same(cold)
    _fill(site)
    assert site.warm(PROMPT).same(cold)


@pytest.mark.parametrize(
    "error",
    some((errno.EIO, errno.EACCES, errno.ESTALE), errno.EACCES, errno.ESTALE),
    ids=errno.errorcode.get,
)
@pytest.mark.parametrize("calls", [("open", "stat"), READS], ids=["open", "read"])
def test_an_unreadable_store_is_a_miss_until_it_is_readable(
    site: Site, calls: tuple[str, ...], error: int
) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    with site.server.holding(site.directory, *calls, error=error) as failed:
        warm = site.warm(PROMPT)
        assert failed.begun
    assert warm.storage == 0
    assert warm.same(cold)
    assert site.server.alive
    _fill(site)
    assert site.warm(PROMPT).same(cold)


@pytest.mark.parametrize("calls", [("open",), READS, ("preadv",)], ids=["open", "read", "data"])
def test_a_page_that_cannot_be_read_is_written_again(site: Site, calls: tuple[str, ...]) -> None:
    site.attach()
    cold = site.cold(PROMPT)
    second = site.files(PROMPT)[1]
    written = _changed_at(second)
    with site.server.holding(second, *calls, error=errno.EIO):
        warm = site.warm(PROMPT)
        assert warm.storage == SECOND
        assert warm.same(cold)
        wait_until(lambda: _changed_at(second) > written, site.server.log_end())
    _assert_healed(site)


def _changed_at(path: Path) -> int:
    """Return a file's ctime, 0 without one; the inode's number can be that of the removed file."""
    return path.stat().st_ctime_ns if path.exists() else 0


@needs_root
def test_a_full_disk_costs_only_hits(cpu_server: CpuServer, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", 3 * PAGE_BYTES) as directory:
        site = Site(cpu_server, directory)
        site.attach(min_free_space=0)
        cold = cpu_server.generate(PROMPT)
        assert site.warm(PROMPT).storage < FULL
        assert site.warm(PROMPT).same(cold)
        assert cpu_server.alive
        subprocess.run(["mount", "-o", "remount,size=16m", str(directory)], check=True)
        _fill(site)
        assert site.warm(PROMPT).same(cold)
        cpu_server.detach()


def _fill(site: Site) -> None:
    """Answer the prompt until it is read out of the store."""
    wait_until(lambda: site.warm(PROMPT).storage == FULL, site.server.log_end())
    site.await_stored(PROMPT)
