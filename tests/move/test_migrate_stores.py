"""Migration between stores of every kind, there and back: every byte is equal."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Archive
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.identity import profile_tag
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.profile import dump_profile, stored_profile
from hicachectl.formats.spec import object_specs
from tests.move.migrations import PAGES, migrated, profile_file
from tests.speed import slow
from tests.stores import contents

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke
    from tests.mooncake_cluster import Cluster

FILE_BYTES = 8 << 20
KINDS = ("file", "pack", "mooncake", "hf3fs")
PAIRS = [
    pair if {*pair} == {"file", "pack"} else slow(*pair)
    for pair in itertools.permutations(KINDS, 2)
] + [("file", "nixl"), ("nixl", "pack"), slow("mooncake", "nixl"), slow("nixl", "hf3fs")]


def place_of(kind: str, folder: Path, request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty store of a kind."""
    if kind == "file":
        return f"file://{folder}/files"
    if kind == "nixl":
        return f"nixl://{folder}/one,{folder}/two?high_watermark=100"
    if kind == "pack":
        return f"pack://{folder}/archive.hcpack"
    if kind == "mooncake":
        cluster = request.getfixturevalue("mooncake_cluster")
        return str(cluster.url)
    server = request.getfixturevalue("metadata_server")
    for expected in object_specs(PROFILE, "hf3fs"):
        number, pool, _ = grammar_of("hf3fs").affix(expected.coordinate)[0].split(":")
        path = folder / f"hicache.{number}.bin{'' if pool == 'kv' else '.' + pool}"
        path.touch()
        os.truncate(path, FILE_BYTES)
        server.initialize(int(number), FILE_BYTES // expected.nbytes, namespace=pool)
    server.save()
    return (
        f"hf3fs://{folder}/hicache?server={server.url}"
        f"&snapshot={server.snapshot}&file_size={FILE_BYTES}"
    )


def settle(kind: str, request: pytest.FixtureRequest) -> None:
    """Bring the listing of a store up to date."""
    if kind == "hf3fs":
        request.getfixturevalue("metadata_server").save()


@pytest.mark.slow
@pytest.mark.parametrize(("through", "then"), PAIRS)
def test_pages_come_back_through_any_two_stores(
    invoke: Invoke,
    source: Path,
    profile: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    through: str,
    then: str,
) -> None:
    first = place_of(through, tmp_path, request)
    second = place_of(then, tmp_path, request)
    options = ("--profile", profile, "--verify")
    assert migrated(invoke, source, first, *options)["pages"] == PAGES
    settle(through, request)
    assert migrated(invoke, first, second, *options)["pages"] == PAGES
    settle(then, request)
    back = tmp_path / "back"
    assert migrated(invoke, second, back, *options)["pages"] == PAGES
    assert {name: data for name, (data, _) in contents(back).items()} == {
        name: data for name, (data, _) in contents(source).items()
    }
    # A second run finds every page at the destination.
    assert migrated(invoke, first, second, *options)["skipped"] == PAGES
    compared = invoke.document("diff", first, second, *options, "--grace", "0s")
    assert (compared["equal"], compared["bytes_compared"] > 0) == (PAGES, True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["migrate", "prewarm"])
def test_3fs_gets_pages_of_one_deployment_only(
    invoke: Invoke, source: Path, tmp_path: Path, request: pytest.FixtureRequest, how: str
) -> None:
    """Its keys do not tell weights apart, so servers of the first would read those of another."""
    place = place_of("hf3fs", tmp_path, request)
    claim = tmp_path / "hicache.hicachectl-deployment"
    one, other = (replace(PROFILE, weights=letter * 32) for letter in "ab")

    def copy(profile: Profile, *options: object, exit_code: int = 0) -> str:
        described = ("--profile", profile_file(tmp_path / "weights.toml", profile), *options)
        if how == "migrate":
            return invoke("migrate", source, place, *described, exit_code=exit_code).stderr
        asked = ("--from", source, "--all")
        return invoke("prewarm", place, *asked, *described, exit_code=exit_code).stderr

    copy(PROFILE)
    copy(one, "--dry-run")
    assert not claim.exists()
    for _ in range(2):
        copy(one)
        assert claim.read_text() == profile_tag(one)
        settle("hf3fs", request)
    invoke("rm", place, "--state", "whole", "--profile", tmp_path / "weights.toml", "--yes")
    settle("hf3fs", request)
    for options in ((), ("--dry-run",)):
        said = copy(other, *options, exit_code=2)
        assert f"servers of deployment {profile_tag(one)} use the store" in said
        assert f"is {profile_tag(other)}, of another model, weights" in said
        said = copy(PROFILE, *options, exit_code=2)
        assert "is unknown without the weights; give --weights" in said
    profile = profile_file(tmp_path / "weights.toml", one)
    rows = invoke("ls", place, "--profile", profile, "--format", "json").document["pages"]
    assert rows == []


@pytest.mark.slow
def test_a_pack_keeps_keys_times_and_profile(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    pack = f"pack://{tmp_path}/archive.hcpack"
    migrated(invoke, source, pack, "--profile", profile)
    with open_store(pack) as store:
        assert store.grammar == "file"
        assert isinstance(store, Archive)
        recorded = store.recorded_profile()
    assert recorded is not None
    assert dump_profile(recorded) == dump_profile(stored_profile(PROFILE))
    back = tmp_path / "back"
    migrated(invoke, pack, back)
    assert contents(back) == contents(source)


def test_a_dry_run_leaves_no_pack(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "archive.hcpack"
    migrated(invoke, source, f"pack://{pack}", "--profile", profile, "--dry-run")
    assert not pack.exists()


def test_nothing_can_be_moved_out_of_a_pack(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    pack = f"pack://{tmp_path}/archive.hcpack"
    migrated(invoke, source, pack, "--profile", profile)
    output = invoke("migrate", pack, tmp_path / "back", "--move", "--yes", exit_code=2)
    assert "objects cannot be deleted from this store" in output.stderr


def test_mooncake_keys_of_another_tp_size_are_refused(
    invoke: Invoke, source: Path, profile: Path, mooncake_cluster: Cluster
) -> None:
    migrated(invoke, source, mooncake_cluster.url, "--profile", profile)
    before = mooncake_cluster.list_keys()
    options = ("--profile", profile, "--to-tp", 1)
    output = invoke("migrate", source, mooncake_cluster.url, *options, exit_code=2)
    assert "topology" in output.stderr or "TP size" in output.stderr
    assert mooncake_cluster.list_keys() == before
