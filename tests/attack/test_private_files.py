"""Written files are never more readable than their sources."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.file.store import FileStore
from tests import stores
from tests.move.repairs import default_quarantine, dsa_store, indexer, kv, shorten
from tests.skips import needs_root
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Invoke

OTHER_USER = 64_321


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def objects(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file()]


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that only its owner can read, directory and files."""
    directory = dsa_store(tmp_path / "store", 4)
    for path in objects(directory):
        path.chmod(0o600)
    directory.chmod(0o700)
    (tmp_path / "profile.toml").write_text(stores.DSA)
    return directory


def migrated(invoke: Invoke, source: object, destination: object, *options: object) -> None:
    document = invoke.document("migrate", source, destination, *options)
    assert document["pages"] == 4


def made_in_memory(store: Path, destination: Path) -> None:
    """Write an object made from several, as a migration to another TP size does."""
    names = [path.name.encode() for path in objects(store)]
    sizes = np.array([path.stat().st_size for path in objects(store)])
    with Arena(1 << 20) as arena, FileStore(store) as source, FileStore(destination) as target:
        source.attach(arena)
        target.attach(arena)
        offsets = place(sizes)[0]
        assert source.read_into(pa.table({"key": pa.array(names)}), offsets, sizes).all_ok
        target.keep_private(source.readable_by())
        made = pa.table({"key": pa.array([b"made"])})
        assert target.write_from(made, offsets[:1], sizes[:1], if_absent=True).all_ok


@pytest.mark.parametrize(
    ("modes", "made"),
    [((0o644, 0o644), 0o644), ((0o644, 0o600), 0o600), ((0o640, 0o604), 0o600)],
)
def test_an_object_made_of_several_is_as_private_as_each(
    store: Path, tmp_path: Path, modes: tuple[int, int], made: int
) -> None:
    store.chmod(0o755)
    for path in objects(store):
        path.chmod(modes[path.name == kv(1)])
    (tmp_path / "there").mkdir(mode=0o755)
    made_in_memory(store, tmp_path / "there")
    assert mode(tmp_path / "there" / "made") == made


TO_MODEL = ("--to-model", "y/dsa")  # still copied; read and written if pages are compared


@pytest.mark.parametrize("options", [(), TO_MODEL, ("--verify",)])
def test_a_migration_makes_no_file_more_readable(
    invoke: Invoke, store: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    profile = ("--profile", tmp_path / "profile.toml")
    migrated(invoke, store, tmp_path / "new", *profile, *options)
    assert mode(tmp_path / "new") == 0o700
    assert {mode(path) for path in objects(tmp_path / "new")} == {0o600}
    (tmp_path / "there").mkdir(mode=0o755)
    migrated(invoke, store, tmp_path / "there", *profile, *options)
    assert mode(tmp_path / "there") == 0o755
    assert {mode(path) for path in objects(tmp_path / "there")} == {0o600}


def test_a_directory_counts_as_much_as_its_files(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    for path in objects(store):
        path.chmod(0o644)
    (tmp_path / "there").mkdir(mode=0o755)
    migrated(invoke, store, tmp_path / "there")
    assert {mode(path) for path in objects(tmp_path / "there")} == {0o600}
    migrated(invoke, store, f"pack://{tmp_path}/x.hcpack")
    assert mode(tmp_path / "x.hcpack") == 0o600


def test_what_all_may_read_stays_so(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    for path in objects(store):
        path.chmod(0o644)
    (store / kv(1)).chmod(0o640)
    store.chmod(0o755)
    migrated(invoke, store, tmp_path / "new")
    assert mode(tmp_path / "new") == 0o755
    assert mode(tmp_path / "new" / kv(0)) == 0o644
    assert mode(tmp_path / "new" / kv(1)) == 0o640
    (store / kv(1)).chmod(0o644)
    migrated(invoke, store, f"pack://{tmp_path}/x.hcpack")
    assert mode(tmp_path / "x.hcpack") == 0o644
    migrated(invoke, f"pack://{tmp_path}/x.hcpack", tmp_path / "back")
    assert mode(tmp_path / "back") == 0o755
    assert {mode(path) for path in objects(tmp_path / "back")} == {0o644}


def test_a_pack_is_no_more_readable_than_any_object_in_it(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    store.chmod(0o755)
    for path in objects(store):
        path.chmod(0o644)
    (store / indexer(2)).chmod(0o600)
    pack = tmp_path / "x.hcpack"
    migrated(invoke, store, f"pack://{pack}")
    assert mode(pack) == 0o600
    # A pack that is open to all is closed before anything private is written to it.
    other = tmp_path / "other.hcpack"
    (store / indexer(2)).chmod(0o644)
    migrated(invoke, store, f"pack://{other}")
    assert mode(other) == 0o644
    more = dsa_store(tmp_path / "more", 6)
    more.chmod(0o700)
    invoke("migrate", more, f"pack://{other}")
    assert mode(other) == 0o600


def test_a_pack_that_was_made_beforehand_keeps_its_permissions(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    store.chmod(0o755)
    for path in objects(store):
        path.chmod(0o644)
    (tmp_path / "x.hcpack").touch(mode=0o600)
    migrated(invoke, store, f"pack://{tmp_path}/x.hcpack")
    assert mode(tmp_path / "x.hcpack") == 0o600


def test_files_made_of_a_pack_are_as_private(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    pack = tmp_path / "x.hcpack"
    migrated(invoke, store, f"pack://{pack}")
    (tmp_path / "there").mkdir(mode=0o755)
    migrated(invoke, f"pack://{pack}", tmp_path / "there")
    assert {mode(path) for path in objects(tmp_path / "there")} == {0o600}
    whole = pack.read_bytes()
    pack.write_bytes(whole[:-100])
    invoke("pack", "repair", pack, "-o", tmp_path / "mended.hcpack")
    assert mode(tmp_path / "mended.hcpack") == 0o600


def repair(store: Path, *more: object) -> tuple[object, ...]:
    profile = store.parent / "profile.toml"
    options = ("--repair", "quarantine", "--checks", "groups,sizes", "--yes")
    return "verify", store, "--profile", profile, "--fail-on", "never", *options, *more


def test_a_quarantine_by_rename_is_as_private_as_the_store(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    shorten(store / indexer(1))
    for named in ((), ("--quarantine", tmp_path / "q")):
        invoke(*repair(store, *named))
        base = tmp_path / "q" if named else store / ".hicachectl"
        for path in (base, *base.rglob("*")):
            assert mode(path) == (0o700 if path.is_dir() else 0o600), path
        quarantine = tmp_path / "q" if named else default_quarantine(store)
        invoke("restore", quarantine, store, "--yes")


def test_a_quarantine_by_copy_keeps_modes(
    invoke: Invoke, store: Path, other_file_system: Path
) -> None:
    shorten(store / indexer(1))
    (store / kv(1)).chmod(0o664)
    before = {path.name: mode(path) for path in objects(store)}
    bytes_before = contents(store)
    there = other_file_system / "q"
    there.mkdir(mode=0o755)
    invoke(*repair(store, "--quarantine", there))
    (run,) = there.iterdir()
    assert mode(run) == mode(run / ".hicachectl") == 0o700
    assert {mode(path) for path in (run / ".hicachectl").iterdir()} == {0o600}
    assert sorted(map(mode, run.glob("*.bin"))) == [0o600, 0o664]
    invoke("restore", there, store, "--yes")
    assert {path.name: mode(path) for path in objects(store)} == before
    assert contents(store) == bytes_before


def test_stamps_and_catalogs_of_a_private_store_are_private(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    catalog = tmp_path / "catalog.parquet"
    profile = ("--profile", tmp_path / "profile.toml", "--fail-on", "never")
    invoke("verify", store, *profile, "--stamp", "--catalog", catalog, "--update-catalog")
    assert mode(catalog) == 0o600
    (stamp,) = (store / ".hicachectl" / "stamps").iterdir()
    assert mode(stamp) == 0o600
    assert mode(stamp.parent) == mode(stamp.parent.parent) == 0o700
    catalog.chmod(0o644)  # the owner's choice stays
    invoke("verify", store, *profile, "--catalog", catalog, "--update-catalog")
    assert mode(catalog) == 0o644


@needs_root
def test_with_roots_rights_copies_stay_of_use_to_the_owner_of_the_store(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    """If copies were root's own, the server would miss them, and its writes would conflict."""
    for path in (store, *store.iterdir()):
        os.chown(path, OTHER_USER, OTHER_USER)
    (tmp_path / "there").mkdir(mode=0o755)
    for owner in (OTHER_USER, OTHER_USER + 1):
        os.chown(tmp_path / "there", owner, owner)
        migrated(invoke, store, tmp_path / "there")
        made_in_memory(store, tmp_path / "there")
        assert len(objects(tmp_path / "there")) == 9
        for path in objects(tmp_path / "there"):
            # Another user could not read the store, so objects made from it stay with root.
            of = OTHER_USER if owner == OTHER_USER else 0
            assert (path.stat().st_uid, mode(path)) == (of, 0o600)
            path.unlink()


@needs_root
def test_root_gives_back_owner_and_mode_from_another_file_system(
    invoke: Invoke, store: Path, other_file_system: Path
) -> None:
    for path in (store, *store.iterdir()):
        os.chown(path, OTHER_USER, OTHER_USER)
    shorten(store / indexer(1))
    invoke(*repair(store, "--quarantine", other_file_system / "q"))
    invoke("restore", other_file_system / "q", store, "--yes")
    for path in objects(store):
        facts = path.stat()
        assert (facts.st_uid, facts.st_gid, mode(path)) == (OTHER_USER, OTHER_USER, 0o600)


@needs_root
def test_root_gives_no_file_of_its_own_to_the_owner_of_a_store(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    """A hard link among the objects must not give access to root's file."""
    for path in (store, *store.iterdir()):
        os.chown(path, OTHER_USER, OTHER_USER)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes((store / kv(1)).stat().st_size))
    secret.chmod(0o600)
    (store / kv(1)).unlink()
    (store / kv(1)).hardlink_to(secret)
    (tmp_path / "there").mkdir(mode=0o755)
    os.chown(tmp_path / "there", OTHER_USER, OTHER_USER)
    migrated(invoke, store, tmp_path / "there")
    copy = (tmp_path / "there" / kv(1)).stat()
    assert (copy.st_uid, stat.S_IMODE(copy.st_mode)) == (0, 0o600)
    assert (tmp_path / "there" / kv(0)).stat().st_uid == OTHER_USER
