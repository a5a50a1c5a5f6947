"""3FS stores that are lost, wrong or in doubt: the file or server, and what to do."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.hf3fs.data_files import DataFiles, FilePages
from hicachectl.backends.hf3fs.metadata import MetadataClient
from hicachectl.backends.hf3fs.settings import Hf3fsSettings
from hicachectl.backends.hf3fs.store import Hf3fsStore
from hicachectl.backends.hf3fs.usrbio import Usrbio, UsrbioReader
from hicachectl.backends.hf3fs.writing import PageWrites, write_pages
from hicachectl.formats.errors import HicacheError, ProfileError, StoreUnavailable
from tests.backends.hf3fs.place import FILE_SIZE, NUM_PAGES, PAGE_BYTES, PROFILE
from tests.backends.http_scripts import Call, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Writer = Callable[[PageWrites], Any]

ONE_PAGE = FilePages(np.zeros(1, np.int64), np.zeros(1, np.int64), PAGE_BYTES)
EMPTY = {"num_pages": NUM_PAGES, "free_pages": list(range(NUM_PAGES)), "key_to_index": []}
STRANDED = (
    "2 pages of 0:kv may stay reserved; if verify reports page-leaked, release them with verify "
    "--repair and --writers-stopped"
)
HINT = (
    "check that the server is running, and that the address is SGLang's metadata_server_url "
    "(default port 18000)"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The data file of rank 0, full of holes."""
    path = tmp_path / "hicache.0.bin"
    path.touch()
    os.truncate(path, FILE_SIZE)
    return path


def refusal(kind: type[HicacheError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as refused:
        call()
    return str(refused.value)


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@contextmanager
def writer(**replies: tuple[int, object]) -> Iterator[tuple[Writer, str]]:
    """Yield a writer whose server answers each verb with a status and a document."""
    usual: dict[str, tuple[int, object]] = {
        "exists": (200, {"exists": [False, False]}),
        "reserve_and_allocate_page_indices": (200, {"indices": [[False, 3], [False, 4]]}),
        "get_page_indices": (200, {"indices": [None, None]}),
        "confirm_write": (204, None),
    }

    def answer(call: Call) -> None:
        status, document = {**usual, **replies}[call.path.rpartition("/")[2]]
        call.answer(b"" if document is None else json.dumps(document).encode(), status)

    with (
        serving(answer) as address,
        closing(MetadataClient(f"http://{address}")) as server,
        closing(DataFiles()) as files,
    ):
        yield partial(write_pages, server, files), address


def write(one: Writer, file: Path, *, if_absent: bool = True) -> Any:
    pages = [memoryview(bytes(PAGE_BYTES))] * 2
    return one(
        PageWrites(
            table=(0, "kv"), path=str(file), names=["a-k", "b-k"], pages=pages,
            num_pages=NUM_PAGES, table_pages=NUM_PAGES, if_absent=if_absent,
        )
    )  # fmt: skip


def test_a_directory_that_is_not_there_asks_for_the_mount(tmp_path: Path) -> None:
    settings = Hf3fsSettings(prefix=str(tmp_path / "unmounted/hicache"), snapshot="x.json")
    assert refusal(StoreUnavailable, lambda: Hf3fsStore(settings)) == (
        f"{tmp_path}/unmounted: no such directory; check the prefix, and whether 3FS is mounted"
    )


def test_a_truncated_file_or_another_profile_names_both_numbers(file: Path) -> None:
    snapshot = file.with_name("saved.json")
    snapshot.write_text(json.dumps({"0:kv": EMPTY}))
    os.truncate(file, FILE_SIZE // 2)
    settings = Hf3fsSettings(prefix=str(file).removesuffix(".0.bin"), snapshot=str(snapshot))
    with closing(Hf3fsStore(settings)) as store:
        store.use_profile(PROFILE, looks_only=True)
        (remark,) = [text for text in store.remarks if "0:kv" in text]
        said = refusal(ProfileError, lambda: store.use_profile(PROFILE))
    assert said == f"{settings}: {remark}"
    assert said.endswith(
        "0:kv: the table has 64 pages, of 4096 bytes by the profile, but the file has only 131072 "
        "bytes; check that the profile is this deployment's and that the file was not truncated, "
        "or give SGLang's file size as file_size= in the URL"
    )


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOTCONN])
def test_a_lost_file_system_ends_reads(
    file: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    said = f"{file}: cannot access the data file: {os.strerror(code)}; check that 3FS is mounted"
    with closing(DataFiles(direct=False)) as files:
        monkeypatch.setattr(os, "preadv", failing(code))
        memory = memoryview(bytearray(PAGE_BYTES))
        read = refusal(StoreUnavailable, lambda: files.read(str(file), ONE_PAGE, memory))
        monkeypatch.setattr(os, "lseek", failing(code))
        holes = refusal(
            StoreUnavailable, lambda: files.holes(str(file), ONE_PAGE.positions, PAGE_BYTES)
        )
    assert read == holes == said


def test_a_lost_file_system_ends_writes_and_releases_their_pages(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer() as (one, _):
        monkeypatch.setattr(os, "pwritev", failing(errno.ESTALE))
        assert refusal(StoreUnavailable, lambda: write(one, file)) == (
            f"{file}: cannot write the data file: Stale file handle; check that 3FS is mounted"
        )


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        (
            {"reserve_and_allocate_page_indices": (500, None)},
            "3FS metadata server {address}: cannot reserve 2 pages of 0:kv; probably no page is "
            f"free and no key can be dropped; remove pages with hicachectl rm; {STRANDED}",
        ),
        (
            {"reserve_and_allocate_page_indices": (200, {"indices": [[False, 3], [False, 3]]})},
            "http://{address}: the 3FS metadata server gave one page to several keys; " + STRANDED,
        ),
        (
            {"confirm_write": (503, None), "get_page_indices": (503, None)},
            "3FS metadata server {address}: /0/get_page_indices failed with HTTP 503; check its "
            f"log; {STRANDED}",
        ),
    ],
    ids=["reserve", "one page twice", "confirm"],
)
def test_pages_that_may_stay_reserved_are_counted(
    file: Path, replies: dict[str, Any], said: str
) -> None:
    with writer(**replies) as (one, address):
        message = refusal(StoreUnavailable, lambda: write(one, file))
    assert message == said.format(address=address)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_page_that_cannot_be_released_is_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with writer(confirm_write=(503, None)) as (one, address):
        monkeypatch.setattr(os, "pwritev", failing(code))
        message = refusal(StoreUnavailable, lambda: write(one, file))
    assert message == (
        f"3FS metadata server {address}: /0/confirm_write failed with HTTP 503; check its log; "
        f"{STRANDED}"
    )


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (
            404, {"detail": "Rank 0 not initialized. Please call initialize first."},
            "has no table 0:kv; check that an SGLang with that rank and pool has started, and that "
            "the server was started with its snapshot (--persistence-path)",
        ),
        (200, {"exists": [1]}, f"the reply to exists is invalid: Expected `bool`, got `int` - at "
                               f"`$.exists[0]`; {HINT}"),
        (200, {"exists": []}, f"the reply to exists has 0 keys instead of 2; {HINT}"),
        (500, None, "/0/exists failed with HTTP 500; check its log"),
    ],
)  # fmt: skip
def test_a_reply_at_fault_names_the_server_and_what_to_check(
    file: Path, status: int, body: object, said: str
) -> None:
    with writer(exists=(status, body)) as (one, address):
        message = refusal(StoreUnavailable, lambda: write(one, file))
    assert message == f"3FS metadata server {address}: {said}"


class NoMemory:
    """A module of 3FS whose daemon maps no memory."""

    def make_iovec(self, *_: object) -> None:
        failing(errno.ENOMEM)()


def test_a_daemon_that_maps_no_memory_is_named() -> None:
    usrbio = Usrbio(NoMemory(), "/3fs")
    with Arena(PAGE_BYTES, named=True) as arena:
        said = refusal(StoreUnavailable, lambda: UsrbioReader(usrbio, arena))
    assert said == (
        "/3fs: USRBIO: cannot register the buffer for reads: Cannot allocate memory; check that "
        "hf3fs_fuse runs"
    )


class NoRing:
    """A module of 3FS whose daemon ends after it has mapped the memory."""

    def make_iovec(self, memory: Any, *_: object) -> Any:
        return memory.buf

    def make_ioring(self, *_: object, **__: object) -> Any:
        return self

    def prepare(self, *_: object, **__: object) -> None:
        """Take a read."""

    def register_fd(self, _: int) -> None:
        """Take a file."""

    deregister_fd = register_fd

    def submit(self) -> None:
        failing(errno.ENOTCONN)()


def test_a_daemon_that_ends_is_named(file: Path) -> None:
    with Arena(PAGE_BYTES, named=True) as arena:
        reader = UsrbioReader(Usrbio(NoRing(), "/3fs"), arena)
        try:
            said = refusal(StoreUnavailable, lambda: reader.read(str(file), ONE_PAGE, arena.memory))
        finally:
            reader.close()
    assert said == ("/3fs: USRBIO: Transport endpoint is not connected; check that hf3fs_fuse runs")
