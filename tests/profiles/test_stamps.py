"""Stamps that cannot be used: the file, what is wrong and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.errors import HicacheError, StoreUnavailable, UnsupportedByBackend
from hicachectl.profiles.stamps import Stamp, read_stamp, write_stamp
from tests.small_file_system import small_file_system

if TYPE_CHECKING:
    from collections.abc import Callable


def of_the_future(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"form": 9}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def swollen(path: Path) -> None:
    path.write_bytes(bytes(2 << 20))


def file_instead_of_folder(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()
    path.parent.touch()


FORM = "has stamp form 9, but this version reads form 1; use the release that wrote it, or remove"
DAMAGED = "not a stamp, or damaged; remove the file"


@pytest.mark.parametrize(
    ("damage", "said"), [(of_the_future, FORM), (cut, DAMAGED), (swollen, DAMAGED)]
)
def test_a_stamp_that_this_release_cannot_read_is_named(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    with FileStore(tmp_path) as store:
        path = write_stamp(store, Stamp(PROFILE))
        damage(path)
        with pytest.raises(HicacheError) as refusal:
            read_stamp(store, PROFILE.key_model)
    assert str(refusal.value).startswith(f"{path}: {said}")


def test_a_place_for_stamps_that_is_none_is_named(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        path = write_stamp(store, Stamp(PROFILE))
        file_instead_of_folder(path)
        with pytest.raises(HicacheError) as read:
            read_stamp(store, PROFILE.key_model)
        with pytest.raises(HicacheError) as written:
            write_stamp(store, Stamp(PROFILE))
    for refusal in (read, written):
        said = f"{path.parent}: is a regular file, not a directory; move it out of "
        assert str(refusal.value).startswith(said)


def test_a_stamp_for_which_there_is_no_room_is_named(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "full", "64k") as full, FileStore(full) as store:
        (full / "other").write_bytes(bytes(60 << 10))
        write_stamp(store, Stamp(PROFILE))  # the last block
        (full / "more").touch()
        with pytest.raises(StoreUnavailable) as refusal:
            write_stamp(store, Stamp(PROFILE))
    assert str(refusal.value) == (
        f"{full}/.hicachectl/stamps: cannot write the stamp: No space left on device; check its "
        "permissions and free space"
    )


def test_a_store_without_a_place_for_stamps_is_named(tmp_path: Path) -> None:
    url = f"pack://{Path(__file__).parents[1]}/data/packs/unified.hcpack"
    said = f"^{url}: no directory for a stamp; leave out --stamp and --weights-version$"
    with open_store(url) as store, pytest.raises(UnsupportedByBackend, match=said):
        write_stamp(store, Stamp(PROFILE))
