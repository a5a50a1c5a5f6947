"""Stamps that cannot be used: the file, what is wrong and what to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.errors import HicacheError
from hicachectl.profiles.stamps import Stamp, read_stamp, write_stamp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
