"""Quarantine and restore of objects with trailers, flat and in folders, on each file system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import stores
from tests.attack.test_hostile_trailers import filled
from tests.move.repairs import default_quarantine, indexer, kv
from tests.served_stores import age

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.mark.parametrize("folders", [False, True], ids=["flat", "folders"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["renamed", "copied"])
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_what_was_quarantined_comes_back_to_the_last_byte(
    invoke: Invoke,
    tmp_path: Path,
    other_file_system: Path,
    folders: bool,
    elsewhere: bool,
    damaged: bool,
) -> None:
    """Proves that neither trailers nor damage keep a page from being taken away, and back."""
    store = filled(tmp_path / "store", folders=folders)
    (tmp_path / "profile.toml").write_text(stores.DSA)

    def objects() -> dict[str, bytes]:
        files = [path for path in store.rglob("*.bin") if ".hicachectl" not in path.parts]
        return {path.name: path.read_bytes() for path in files}

    (missing,) = store.rglob(indexer(1))
    missing.unlink()
    if damaged:
        (broken,) = store.rglob(kv(1))
        broken.write_bytes(b"x" + broken.read_bytes()[1:])
    age(store)  # a repair watches a store with recent writes for a second
    before = objects()
    quarantine = other_file_system / "taken" if elsewhere else default_quarantine(store)
    option = ("--quarantine", quarantine) if elsewhere else ()
    repair = ("--checks", "groups,sizes", "--repair", "quarantine", "--yes", "--grace", "0s")
    invoke(
        "verify", store, "--profile", tmp_path / "profile.toml", *repair, *option,
        "--fail-on", "never",
    )  # fmt: skip
    assert objects() == {name: data for name, data in before.items() if name != kv(1)}
    assert invoke("restore", quarantine, store, "--yes", "--format", "json").document["objects"]
    assert objects() == before
