"""Objects, files and owners that do not fit a 3FS store are refused, without a server."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.backends.hf3fs.creating import TableMaker, claim_path
from hicachectl.backends.hf3fs.keys import PageSizes
from hicachectl.backends.hf3fs.settings import Hf3fsSettings
from hicachectl.backends.hf3fs.snapshot import read_snapshot
from hicachectl.backends.testing import ARENA_BYTES, write
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.identity import profile_tag
from hicachectl.move.destination import refuse_other_owner
from tests.backends.hf3fs.place import FILE_SIZE, PAGE_BYTES, PROFILE
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OURS = replace(PROFILE, weights="a" * 32)
URL = "hf3fs:///x"
KEY = f"0:kv:{page(0)}-k".encode()
NOBODYS = f"0:kv:{page(0)}-z".encode()


class EmptyServer:
    """A server without tables. What is refused does not reach it."""

    def has_table(self, rank: int, namespace: str) -> bool:
        return False


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(HicacheError) as refused:
        call()
    return str(refused.value)


@pytest.mark.parametrize(
    ("key", "size", "said"),
    [
        (NOBODYS, PAGE_BYTES, f"{NOBODYS.decode()} is not a key of the profile's deployment"),
        (KEY, 7, f"{KEY.decode()} has 7 bytes, but its file has pages of {PAGE_BYTES} bytes"),
    ],
)
def test_objects_of_other_deployments_are_named(key: bytes, size: int, said: str) -> None:
    sizes = PageSizes.of(PROFILE)
    message = refusal(lambda: sizes.refuse_strangers(URL, [key], np.array([size])))
    assert message.startswith(f"{URL}: {said}")
    assert message.endswith("; check the profile")


def test_one_file_has_pages_of_one_size() -> None:
    objects = [(("0:kv:", "-k"), 8), (("0:kv:", "-v"), 16)]
    assert refusal(lambda: PageSizes.of_objects(objects)) == (
        "pools[kv]: objects of 8 and 16 bytes cannot share a 3FS file, which has pages of one "
        "size; check the profile"
    )


def test_keys_of_another_model_are_shown(tmp_path: Path) -> None:
    table = {"num_pages": 4, "free_pages": [1], "key_to_index": [[f"{page(0)}-z", 0]]}
    (tmp_path / "saved.json").write_text(json.dumps({"0:kv": table}))
    tables = read_snapshot(tmp_path / "saved.json").tables
    message = refusal(lambda: PageSizes.of(PROFILE).refuse_other_models(URL, tables))
    assert message.startswith(f"{URL}: 0:kv has keys such as PAGE-z, which the profile's")
    assert message.endswith("write to a server that only this deployment uses")


def put_a_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_a_small_file(path: Path) -> None:
    path.write_bytes(b"small")


def link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "none" / "file")


@pytest.mark.parametrize(
    ("damage", "file_size", "said"),
    [
        (None, None, "the file is missing, and its size is not known; give file_size="),
        (None, 100, f"100 bytes are too few for a page of {PAGE_BYTES} bytes; check the profile"),
        (put_a_small_file, FILE_SIZE, f"has 5 bytes instead of file_size={FILE_SIZE}, and the"),
        (put_a_fifo, FILE_SIZE, "not a regular file; check the prefix"),
        (
            link_to_nowhere,
            FILE_SIZE,
            "cannot create the data file: No such file or directory; check the mount",
        ),
    ],
)
def test_a_file_that_cannot_be_a_tables_is_named(
    tmp_path: Path, damage: Callable[[Path], None] | None, file_size: int | None, said: str
) -> None:
    settings = Hf3fsSettings(prefix=f"{tmp_path}/hicache", file_size=file_size)
    path = tmp_path / "hicache.0.bin"
    if damage is not None:
        damage(path)
    maker = TableMaker(EmptyServer(), settings)  # type: ignore[arg-type]
    message = refusal(lambda: maker.ensure((0, "kv"), PAGE_BYTES))
    assert message.startswith(f"{path}: {said}")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a store with a snapshot of no tables."""
    (tmp_path / "saved.json").write_text("{}")
    return f"hf3fs://{tmp_path}/hicache?snapshot={tmp_path}/saved.json"


def test_the_owner_of_the_data_files_is_named(tmp_path: Path, url: str) -> None:
    path = tmp_path / "hicache.hicachectl-deployment"
    assert str(path) == claim_path(f"{tmp_path}/hicache")
    path.write_text("b" * 32)
    with open_store(url) as store:
        message = refusal(lambda: refuse_other_owner(store, OURS))
        unknown = refusal(lambda: refuse_other_owner(store, None))
        path.unlink()
        path.symlink_to("elsewhere")
        unreadable = refusal(lambda: refuse_other_owner(store, OURS))
    for said in ("PREFIX.hicachectl-deployment", "b" * 32, str(profile_tag(OURS)), "; use other"):
        assert said in message
    assert "unknown without the weights; give --weights" in unknown
    assert unreadable.startswith(
        f"{path}: cannot tell which deployment's pages these are: Too many"
    )
    assert unreadable.endswith("; check the mount and the directory's mode")


def test_a_store_without_a_profile_is_not_written_to(url: str) -> None:
    with Arena(ARENA_BYTES) as arena, open_store(f"{url}&server=http://127.0.0.1:1") as store:
        store.attach(arena)
        message = refusal(lambda: write(store, {KEY: b"x"}, if_absent=True))
        assert message.startswith(f"{store.url}: writing needs ")
    assert "--profile" in message
