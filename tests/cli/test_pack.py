"""Packs on the command line: as stores, and with `pack info` and `pack repair`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl import api
from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Profiled
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.profile import parse_profile, stored_profile
from tests.backends.pack import pack_files

if TYPE_CHECKING:
    from tests.conftest import Invoke

PAGES = 6


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    with open_store(str(tmp_path / "store")) as store:
        fill(store, PAGES)
    return tmp_path / "store"


@pytest.fixture
def pack(directory: Path, tmp_path: Path) -> Path:
    """Return a pack of the demo's objects, with their profile."""
    path = tmp_path / "x.hcpack"
    url = f"pack://{path}?keys=file"
    with (
        open_store(str(directory)) as source,
        open_store(url, create=True) as store,
        Arena(8 << 20) as arena,
    ):
        source.attach(arena)
        store.attach(arena)
        assert isinstance(store, Profiled)
        store.use_profile(PROFILE)
        for rows in source.scan():
            sizes = rows.column("nbytes").to_numpy()
            offsets, _ = place(sizes)
            assert source.read_into(rows, offsets, sizes).all_ok
            assert store.write_from(rows, np.asarray(offsets), sizes, if_absent=True).all_ok
    return path


def listed(invoke: Invoke, store: object, *options: str) -> list[dict[str, object]]:
    rows = [
        json.loads(line)
        for line in invoke("ls", store, *options, "--format", "jsonl").stdout.splitlines()
    ]
    for row in rows:
        row.pop("offset", None)
    return sorted(rows, key=lambda row: str(row.get("key", row["page"])))


def test_a_pack_is_listed_as_the_store_it_came_from(
    invoke: Invoke, directory: Path, pack: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "p.toml"
    invoke("profile", f"pack://{pack}", "-o", profile)
    assert parse_profile(profile.read_text()) == stored_profile(PROFILE)
    for options in ((), ("--objects",)):
        expected = listed(invoke, directory, *options, "--profile", str(profile))
        assert listed(invoke, f"pack://{pack}", *options) == expected
        assert expected


@pytest.mark.slow
def test_a_path_that_ends_in_hcpack_is_a_pack_in_every_command(
    invoke: Invoke, directory: Path, tmp_path: Path
) -> None:
    pack, config = tmp_path / "new.hcpack", tmp_path / "config.toml"
    config.write_text(f'[stores.saved]\nurl = "{pack}"\n')
    invoke("migrate", directory, pack)
    assert len(pack_files.indexed(pack)) == len(list(directory.glob("*.bin")))
    for command in ("ls", "verify", "report"):
        invoke(command, pack, *(("-o", tmp_path / "report.html") if command == "report" else ()))
    assert listed(invoke, pack) == listed(invoke, directory)
    with api.open_store(str(pack)) as store:
        assert store.url == f"pack://{pack}"
    back = tmp_path / "back"
    invoke("--config", config, "migrate", "saved:", back)
    assert {path.name for path in back.iterdir()} == {path.name for path in directory.glob("*.bin")}


def test_a_directory_with_the_name_of_a_pack_needs_a_slash(
    invoke: Invoke, directory: Path, tmp_path: Path
) -> None:
    """No command writes beside the objects of a directory that the user takes for a pack."""
    place = tmp_path / "old.hcpack"
    directory.rename(place)
    before = sorted(path.name for path in place.iterdir())
    (tmp_path / "other").mkdir()
    for arguments in (("ls", place), ("migrate", tmp_path / "other", place)):
        assert "end it with a slash" in invoke(*arguments, exit_code=3).stderr
    assert sorted(path.name for path in place.iterdir()) == before
    assert len(listed(invoke, f"{place}/")) == PAGES
    assert "names a pack" in invoke("demo", tmp_path / "new.hcpack", exit_code=2).stderr


def test_verify_uses_the_profile_in_the_pack(invoke: Invoke, pack: Path) -> None:
    report = invoke("verify", f"pack://{pack}", "--format", "json").document
    assert report["findings"] == []
    assert "values" in report["checks"]
    assert report["objects"] == len(pack_files.indexed(pack))
    assert report["bytes_read"] == report["bytes"]


def test_a_profile_that_is_given_wins(invoke: Invoke, pack: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(
        invoke("profile", f"pack://{pack}").stdout.replace("head_dim = 64", "head_dim = 32")
    )
    refused = invoke("verify", f"pack://{pack}", "--profile", other, exit_code=2).stderr
    assert "expected 8192 bytes for kv objects, found 16384 bytes" in refused
    assert "; check dtype, page size, layers and TP size, or list what the store has" in refused


def test_damage_in_a_pack_is_found_by_verify(invoke: Invoke, pack: Path) -> None:
    first = next(r for r in pack_files.records(pack) if r.kind == pack_files.OBJECT)
    data = bytearray(pack.read_bytes())
    data[first.offset + first.length - 1] ^= 1
    pack.write_bytes(data)
    report = invoke("verify", f"pack://{pack}", "--format", "json", exit_code=4).stdout
    (finding,) = json.loads(report)["findings"]
    assert (finding["code"], finding["key"]) == ("unreadable", first.key.decode())
    assert "damaged" in finding["detail"]


@pytest.fixture
def unprofiled(directory: Path, tmp_path: Path) -> Path:
    """Return a pack of the same objects that records no profile."""
    path = tmp_path / "unprofiled.hcpack"
    pack_files.build(path, {f.name.encode(): f.read_bytes() for f in directory.glob("*.bin")})
    return path


@pytest.mark.slow
def test_a_pack_without_a_profile_is_compared_with_its_own_digests(
    invoke: Invoke, unprofiled: Path
) -> None:
    url = f"pack://{unprofiled}"
    document = invoke("verify", url, "--format", "json").document
    assert document["checks"] == ["names", "groups", "sizes", "digests"]
    assert document["bytes_read"] == document["bytes"] > 0
    assert document["objects_read"] == document["objects"]
    assert document["skipped_checks"] == ["values", "absent-pools"]
    record = next(r for r in pack_files.records(unprofiled) if r.kind == pack_files.OBJECT)
    data = bytearray(unprofiled.read_bytes())
    data[record.offset + record.length // 2] ^= 4
    unprofiled.write_bytes(data)
    for checks in ([], ["--checks", "digests"], ["--checks", "digests", "--device", "auto"]):
        report = invoke("verify", url, *checks, "--format", "json", exit_code=4).document
        (finding,) = report["findings"]
        assert (finding["code"], finding["severity"]) == ("digest-mismatch", "error")
        assert finding["key"] == record.key.decode()
    unread = invoke("verify", url, "--checks", "names,groups,sizes", "--format", "json").stdout
    assert json.loads(unread)["bytes_read"] == 0


def test_a_pack_is_not_repaired(invoke: Invoke, pack: Path, tmp_path: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[next(r for r in pack_files.records(pack) if r.kind == pack_files.OBJECT).offset] ^= 1
    pack.write_bytes(data)
    for mode in ("delete", "quarantine"):
        refused = invoke("verify", f"pack://{pack}", "--repair", mode, "--yes", exit_code=2)
        assert (
            f"--repair: objects cannot be deleted from pack://{pack}; copy its whole pages to "
            "another store with hicachectl"
        ) in refused.stderr
    assert pack.read_bytes() == data
    copy = tmp_path / "copy"
    invoke("migrate", f"pack://{pack}", copy, exit_code=4)
    invoke("verify", copy)


def test_objects_of_a_pack_are_never_in_flight(invoke: Invoke, unprofiled: Path) -> None:
    document = json.loads(
        invoke("verify", f"pack://{unprofiled}", "--grace", "9999d", "--format", "json").stdout
    )
    assert document["in_flight"] == 0
    assert document["bytes_read"] == document["bytes"]


@pytest.mark.slow
def test_a_catalog_of_a_pack_is_compared_beside_its_own_digests(
    invoke: Invoke, unprofiled: Path, tmp_path: Path
) -> None:
    url, catalog = f"pack://{unprofiled}", ["--catalog", tmp_path / "c.parquet"]
    invoke("verify", url, *catalog, "--update-catalog")
    for identity in ("digest_0", "digest_3,digest_1"):
        invoke("verify", url, *catalog, "--identity", identity)
    refused = invoke("verify", url, *catalog, "--identity", "inode", exit_code=2).stderr
    assert "has no field inode; it has digest_0, digest_1, digest_2, digest_3" in refused


def test_a_page_is_shown(invoke: Invoke, pack: Path) -> None:
    page = listed(invoke, f"pack://{pack}")[0]["page"]
    assert "temporal" in invoke("show", f"pack://{pack}", page).stdout


def test_nothing_is_removed_from_a_pack(invoke: Invoke, pack: Path) -> None:
    refused = invoke("rm", f"pack://{pack}", "--before", "1s", "--yes", exit_code=2)
    assert "cannot be deleted" in refused.stderr


def test_info_says_what_is_in_it(invoke: Invoke, pack: Path) -> None:
    said = invoke("pack", "info", pack, "--format", "json").document
    index = pack_files.indexed(pack)
    assert said["objects"] == len(index)
    assert said["bytes"] == sum(row["nbytes"] for row in index.values())
    assert said["stored_bytes"] < said["bytes"] < said["file_bytes"] * 2
    assert said["planes"] == {"2": 12, "4": len(index) - 12}
    assert (said["grammar"], said["model"]) == ("file", PROFILE.model)
    assert f"{len(index)} as" not in invoke("pack", "info", f"pack://{pack}").stdout


@pytest.mark.slow
def test_a_pack_that_was_cut_off_is_refused_with_the_remedy_that_mends_it(
    invoke: Invoke, pack: Path
) -> None:
    count = len(pack_files.indexed(pack))
    os.truncate(pack, pack.stat().st_size - 10)
    refused = invoke("ls", f"pack://{pack}", exit_code=2)
    assert refused.stderr.count("\n") == 1
    remedy = refused.stderr.split("run hicachectl ")[1].split()
    said = invoke(*remedy, "--dry-run")
    assert f"{count} objects" in said.stdout
    assert "nothing was changed" in said.stderr
    assert invoke("ls", f"pack://{pack}", exit_code=2).stderr == refused.stderr
    invoke(*remedy)
    invoke("verify", f"pack://{pack}")
    assert "nothing to repair" in invoke(*remedy).stdout


def test_repair_says_what_was_lost_and_exits_with_4(
    invoke: Invoke, pack: Path, tmp_path: Path
) -> None:
    records = [r for r in pack_files.records(pack) if r.kind == pack_files.OBJECT]
    data = bytearray(pack.read_bytes())
    data[records[2].offset] ^= 1
    data[records[4].offset + records[4].length - 1] ^= 1
    pack.write_bytes(data[: records[-1].offset + records[-1].length - 1])
    saved = tmp_path / "saved.hcpack"
    outcome = invoke("pack", "repair", pack, "-o", saved, "--format", "json", exit_code=4)
    said = outcome.document
    assert said["objects"] == len(records) - 3
    assert (said["damaged"], said["unfinished"]) == (1, 1)
    assert said["damaged_bytes"] == records[2].length
    assert len(listed(invoke, f"pack://{saved}", "--objects")) == said["objects"]
    text = invoke("pack", "repair", pack, "--dry-run", exit_code=4).stdout
    assert "1 damaged object left out" in text
    assert "1 unfinished object lost" in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_damage_ends_in_a_traceback(
    invoke: Invoke, pack: Path, tmp_path: Path, seed: int
) -> None:
    from hicachectl.__main__ import run

    rng = np.random.default_rng(seed)
    data = pack.read_bytes()
    damaged_path = tmp_path / "damaged.hcpack"
    for _ in range(10):
        damaged = bytearray(data)
        region = len(data) if rng.random() < 0.5 else 8000  # half of them near the end
        for place_ in len(data) - 1 - rng.integers(0, region, rng.integers(1, 10)):
            damaged[place_] ^= 1 << rng.integers(8)
        damaged_path.write_bytes(damaged)
        for command in (["ls"], ["verify"], ["pack", "info"], ["pack", "repair"]):
            assert run([*command, f"pack://{damaged_path}"]) in (0, 2, 4)
    assert invoke("ls", f"pack://{pack}").stdout


UNIFIED_PACK = Path(__file__).parents[1] / "data" / "packs" / "unified.hcpack"


def test_a_pack_of_unified_keys_that_an_earlier_release_wrote_is_read(
    invoke: Invoke, tmp_path: Path
) -> None:
    """No release writes such keys any more; the pack has three pages of 128 bytes."""
    rows = listed(invoke, f"pack://{UNIFIED_PACK}")
    assert [(row["state"], row["nbytes"]) for row in rows] == [("whole", 128)] * 3
    copy = tmp_path / "copy.hcpack"
    invoke("migrate", f"pack://{UNIFIED_PACK}", f"pack://{copy}")
    assert listed(invoke, f"pack://{copy}") == rows
    refused = invoke("migrate", f"pack://{UNIFIED_PACK}", tmp_path / "files", exit_code=2)
    assert "unified" in refused.stderr


def test_unified_keys_are_no_longer_written(
    invoke: Invoke, directory: Path, tmp_path: Path
) -> None:
    target = f"pack://{tmp_path / 'new.hcpack'}"
    refused = invoke("migrate", directory, target, "--to-key-scheme", "unified", exit_code=2)
    assert "--to-key-scheme" in refused.stderr
    profile = tmp_path / "old.toml"
    profile.write_text('model = "m"\nunified_layer_partition = 2\n')
    refused = invoke("ls", directory, "--profile", profile, exit_code=2)
    assert "unified_layer_partition" in refused.stderr
