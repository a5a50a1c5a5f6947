"""Quarantines of stores with trailers: files come back byte for byte."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from hicachectl.backends.base import open_store
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.spec import object_specs
from hicachectl.formats.trailer import TRAILER_BYTES
from tests.served_stores import HYBRID, INDEXED, OTHER_WEIGHTS, served_by, served_store, serving
from tests.stores import OLD, contents, page

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke


@pytest.fixture(params=["renames", "copies"])
def quarantine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "renames":
        return tmp_path / "away"
    other: Path = request.getfixturevalue("other_file_system")
    return other / "away"


@pytest.mark.slow
@pytest.mark.parametrize("profile", [HYBRID, INDEXED], ids=["hybrid", "indexed"])
def test_damaged_and_foreign_objects_come_back_as_they_were(
    invoke: Invoke, tmp_path: Path, quarantine: Path, profile: Profile
) -> None:
    """A flipped bit, other weights, no trailer; none of it is mended or lost."""
    store = tmp_path / "store"
    served_store(store, profile, range(4))
    served_store(store, replace(profile, weights=OTHER_WEIGHTS), range(4, 6))
    damaged = max(store.glob(f"{page(1)}*"))
    data = bytearray(damaged.read_bytes())
    data[20] ^= 1
    damaged.write_bytes(data)
    bare = min(store.glob(f"{page(1)}*"))
    bare.write_bytes(bare.read_bytes()[:-TRAILER_BYTES])
    for path in (damaged, bare):
        os.utime(path, (OLD, OLD))
    before = contents(store)
    described = tmp_path / "profile.toml"
    described.write_text(dump_profile(profile))
    repair = ("--repair", "quarantine", "--quarantine", quarantine, "--yes", "--format", "json")
    options = ("--profile", described, "--weights", profile.weights)
    found = invoke("verify", store, *options, *repair, exit_code=4).document
    assert (found["repaired"], set(found["counts"])) == (
        3,
        {"digest-mismatch", "identity-mismatch"},
    )
    left = {name[:64] for name in contents(store)}
    assert left == {page(number) for number in (0, 2, 3)}
    assert served_by(store, profile, sorted(left)) == [True] * 3
    restored = invoke("restore", quarantine, store, "--yes", "--format", "json").document
    assert restored["pages"] == 3, restored
    assert contents(store) == before


@pytest.mark.slow
@pytest.mark.parametrize("folders", [False, True], ids=["flat", "folders"])
def test_another_directory_knows_the_trailers_of_what_is_restored_to_it(
    invoke: Invoke, tmp_path: Path, quarantine: Path, folders: bool
) -> None:
    """As after `migrate`: sizes are those of the objects, and servers and `show` know them."""
    store, other = tmp_path / "store", tmp_path / "other"
    served_store(store, INDEXED, range(4))
    served_store(store, replace(INDEXED, weights=OTHER_WEIGHTS), range(4, 6))
    described = tmp_path / "profile.toml"
    described.write_text(dump_profile(INDEXED))
    for number in (1, 4):
        min(store.glob(f"{page(number)}.indexer*")).unlink()
    before = contents(store)
    repair = ("--checks", "groups", "--repair", "quarantine", "--quarantine", quarantine, "--yes")
    invoke("verify", store, "--profile", described, *repair, "--fail-on", "never")
    url = f"file://{other}?folders=hex2" if folders else str(other)
    open_store(url, create=True).close()
    other.mkdir(exist_ok=True)  # an empty directory goes when it is closed
    invoke("restore", quarantine, other, "--yes")
    restored = {path.name: path for path in other.rglob("*.bin")}
    assert {name: path.read_bytes() for name, path in restored.items()} == {
        name: before[name][0] for name in before.keys() - contents(store).keys()
    }
    kv = next(spec for spec in object_specs(INDEXED, "file") if spec.pool == "kv")
    rows = invoke("ls", other, "--objects", "--format", "json").document["objects"]
    assert [row["nbytes"] for row in rows] == [kv.nbytes] * 2
    for number, weights in ((1, INDEXED.weights), (4, OTHER_WEIGHTS)):
        shown = invoke("show", other, page(number), "--format", "json").document
        assert [one["weights"] for one in shown["identities"].values()] == [weights]
    with serving(other, INDEXED) as (rank,):
        assert rank.exists("kv", [page(1), page(4)]) == [True, False]


def test_a_plain_store_gets_no_markers_from_a_quarantine(invoke: Invoke, tmp_path: Path) -> None:
    """Objects without trailers, of a store that has others, too."""
    store, other = tmp_path / "store", tmp_path / "other"
    served_store(store, INDEXED, range(3))
    for path in store.glob(f"{page(1)}*"):
        path.write_bytes(path.read_bytes()[:-TRAILER_BYTES])
        os.utime(path, (OLD, OLD))
    min(store.glob(f"{page(1)}.indexer*")).unlink()
    described = tmp_path / "profile.toml"
    described.write_text(dump_profile(INDEXED))
    repair = ("--checks", "groups", "--repair", "quarantine", "--yes", "--fail-on", "never")
    invoke("verify", store, "--profile", described, *repair)
    other.mkdir()
    invoke("restore", store / ".hicachectl/quarantine", other, "--yes")
    assert len(contents(other)) == 1
    assert not (other / ".hicachectl/plugin").exists()


def test_rm_counts_bytes_without_trailers(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    served_store(store, INDEXED, range(3))
    listed = tmp_path / "pages.jsonl"
    listed.write_text(f"{page(1)}\n")
    removed = invoke("rm", store, "--pages", listed, "--yes", "--format", "json").document
    sizes = [spec.nbytes for spec in object_specs(INDEXED, "file")]
    assert (removed["objects"], removed["bytes"]) == (2, sum(sizes))
    assert {name[:64] for name in contents(store)} == {page(0), page(2)}


def test_rm_of_temporaries_knows_those_of_the_plug_in(invoke: Invoke, tmp_path: Path) -> None:
    """In a flat directory and in folders; objects stay."""
    flat, folders = tmp_path / "flat", tmp_path / "folders"
    served_store(flat, INDEXED, range(2))
    invoke("migrate", flat, f"file://{folders}?folders=hex2")
    left = f".hicachectl-{'a' * 24}{'b' * 6}"
    for path in (flat / f"{left}00.tmp", folders / page(1)[:2] / f"{left}{page(1)[:2]}.tmp"):
        path.write_bytes(b"half")
        os.utime(path, (OLD, OLD))
    for store in (flat, folders):
        objects = len(list(store.rglob("*.bin")))
        invoke("rm", store, "--temporaries", "--yes")
        assert not list(store.rglob("*.tmp"))
        assert len(list(store.rglob("*.bin"))) == objects == 4
