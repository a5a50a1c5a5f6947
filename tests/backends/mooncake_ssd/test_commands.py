"""The commands on files of the SSD tier: what is lost is a finding, CRCs need no profile."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Archive
from hicachectl.backends.testing import listing, read, scanned_rows
from hicachectl.cli.demo_store import fill
from tests.backends.mooncake_ssd.test_store import VALUES, A, B, C, url_of
from tests.mooncake_ssd_files import TENANT, Record, offset_meta, put_bucket, put_offset_files
from tests.move.migrations import profile_file
from tests.report.page_texts import text_of
from tests.stores import OLD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke


def lost(document: dict[str, Any]) -> dict[str, str]:
    return {f["key"]: f["detail"] for f in document["findings"] if f["code"] == "lost-objects"}


def buckets(folder: Path) -> Path:
    """Return a store of two buckets."""
    store = folder / "store"
    store.mkdir()
    put_bucket(store, 1, {A: VALUES[A]})
    put_bucket(store, 2, {B: VALUES[B], C: VALUES[C]})
    return store


def damaged(store: Path, damage: Callable[[Path], None]) -> None:
    """Damage a store that no client writes to any more."""
    damage(store)
    for path in store.iterdir():
        os.utime(path, (OLD, OLD))


def without_meta(directory: Path) -> None:
    (directory / "2.meta").unlink()


def without_bucket(directory: Path) -> None:
    (directory / "2.bucket").unlink()


def damaged_meta(directory: Path) -> None:
    path = directory / "2.meta"
    path.write_bytes(path.read_bytes()[:-1])


def truncated(directory: Path) -> None:
    os.truncate(directory / "2.bucket", 4000)


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (without_meta, "2.bucket", "a restart of the client deletes the bucket"),
        (without_bucket, "2.meta", "the objects are lost"),
        (damaged_meta, "2.meta", "the objects of the bucket are left out: cut off"),
        (truncated, "2.bucket", "1 objects lie partly or wholly behind the end of the file"),
    ],
)
def test_lost_objects_of_a_bucket_are_a_finding(
    tmp_path: Path, invoke: Invoke, damage: Callable[[Path], None], name: str, words: str
) -> None:
    """Proves exit 4 without a profile, with the file; the other buckets are still listed."""
    store = buckets(tmp_path)
    assert lost(invoke.document("verify", url_of(store))) == {}
    damaged(store, damage)
    document = invoke.document("verify", url_of(store), exit_code=4)
    ((place, detail),) = lost(document).items()
    assert (place, words in detail) == (str(store / name), True)
    assert document["counts"]["lost-objects"] == 1
    rows = invoke("ls", url_of(store), "--objects", "--format", "jsonl").rows
    assert A.decode() in {row["key"] for row in rows}


@pytest.mark.slow
def test_a_report_and_parts_name_lost_objects_as_one_process_does(
    tmp_path: Path, invoke: Invoke
) -> None:
    store = buckets(tmp_path)
    damaged(store, without_meta)
    document = invoke.document("verify", url_of(store), exit_code=4)
    ((place, detail),) = lost(document).items()
    invoke("report", url_of(store), "-o", tmp_path / "page.html", exit_code=4)
    text = text_of(tmp_path / "page.html")
    assert f"in no deployment {place} {detail}" in text
    assert "Free in the store unknown" in text
    assert "Objects that were removed from the cluster may still be listed" in text
    run = tmp_path / "run"
    for part in ("0/2", "1/2"):
        invoke("verify", url_of(store), "--shard", part, "--run", run)
    merged = invoke.document("merge", run, exit_code=4)
    assert merged["findings"] == document["findings"]


def test_a_bucket_that_a_client_may_be_writing_is_no_finding(
    tmp_path: Path, invoke: Invoke
) -> None:
    put_bucket(tmp_path, 1, {A: VALUES[A]}).with_suffix(".meta").unlink()
    document = invoke("verify", url_of(tmp_path), "--allow-empty", "--format", "json")
    assert lost(document.document) == {}
    assert "no .meta file says which objects" in document.stderr
    assert lost(
        invoke.document("verify", url_of(tmp_path), "--grace", "0s", "--allow-empty", exit_code=4)
    )


@pytest.mark.parametrize("rank", ["rank_0_0_0_0", "rank_0_1_0_0"])
def test_one_damaged_offset_file_does_not_hide_the_other(
    tmp_path: Path, invoke: Invoke, rank: str
) -> None:
    for number, (name, key) in enumerate((("rank_0_0_0_0", A), ("rank_0_1_0_0", B))):
        (tmp_path / name).mkdir()
        put_offset_files(tmp_path / name, [Record(TENANT + key, VALUES[key], 0, number + 1)])
    meta = tmp_path / rank / "kv_cache.meta"
    meta.write_bytes(meta.read_bytes()[:200])
    document = invoke.document("verify", url_of(tmp_path), exit_code=4)
    assert [*lost(document)] == [str(meta)]
    assert document["objects"] == 1


def test_an_offset_file_without_metadata_does_not_hide_the_other(
    tmp_path: Path, invoke: Invoke
) -> None:
    """As a relaxed client leaves it that was killed before its first checkpoint."""
    for number, (name, key) in enumerate((("rank_0_0_0_0", A), ("rank_0_1_0_0", B))):
        (tmp_path / name).mkdir()
        put_offset_files(tmp_path / name, [Record(TENANT + key, VALUES[key], 0, number + 1)])
    (tmp_path / "rank_0_0_0_0" / "kv_cache.meta").unlink()
    command = ("verify", url_of(tmp_path), "--grace", "0s", "--format", "json")
    document = invoke(*command, exit_code=4).document
    assert [*lost(document)] == [str(tmp_path / "rank_0_0_0_0" / "kv_cache.data")]
    assert document["objects"] == 1


def test_crcs_are_checked_without_a_profile(tmp_path: Path, invoke: Invoke) -> None:
    """Proves that a flipped bit is found, and that a record without CRC is said to be unchecked."""
    records = [
        Record(TENANT + A, VALUES[A], 0, 1),
        Record(TENANT + B, VALUES[B], 1 << 14, 2, crc=False),
        Record(TENANT + C, VALUES[C], 1 << 15, 3),
    ]
    path = put_offset_files(tmp_path, records)
    command = ("verify", url_of(tmp_path), "--grace", "0s", "--format", "json")
    clean = invoke(*command).document
    assert (clean["findings"], clean["bytes_read"]) == ([], sum(map(len, VALUES.values())))
    assert "digests" in clean["checks"]
    assert "undigested-objects" in clean["skipped_checks"]
    with path.open("r+b") as file:
        for start in (4096 + 17, (1 << 14) + 4096 + 17):
            byte = os.pread(file.fileno(), 1, start)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), start)
    document = invoke(*command, exit_code=4).document
    assert [(f["code"], f["key"]) for f in document["findings"]] == [
        ("digest-mismatch", A.decode())
    ]


def test_records_that_a_restart_drops_are_a_finding(tmp_path: Path, invoke: Invoke) -> None:
    """Proves that objects newer than the last checkpoint of the relaxed mode are named as lost."""
    records = [Record(TENANT + A, VALUES[A], 0, 1), Record(TENANT + B, VALUES[B], 1 << 14, 2)]
    path = put_offset_files(tmp_path, records)
    extents = [(record.start, len(record.content)) for record in records]
    (tmp_path / "kv_cache.meta").write_bytes(offset_meta(extents, 2))
    command = ("verify", url_of(tmp_path), "--grace", "0s", "--format", "json")
    document = invoke(*command, exit_code=4).document
    assert [*lost(document)] == [str(path)]
    assert (
        "1 records are left out, because they are newer than the last checkpoint"
        in lost(document)[str(path)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "nixl", "pack"])
def test_pages_are_migrated_into_other_stores(tmp_path: Path, invoke: Invoke, kind: str) -> None:
    """`tests/conformance` migrates into Mooncake."""
    with open_store(f"pack://{tmp_path}/demo.hcpack", create=True) as pack:
        assert isinstance(pack, Archive)
        pack.use_grammar("mooncake")
        fill(pack, 4)
    with open_store(f"pack://{tmp_path}/demo.hcpack") as pack, Arena(8 << 20) as arena:
        pack.attach(arena)
        sizes = listing(pack)
        capacities = [size or 0 for size in sizes.values()]
        values = read(pack, scanned_rows(pack, list(sizes)), capacities)[1]
        pack.detach()
    (tmp_path / "ssd").mkdir()
    put_bucket(tmp_path / "ssd", 1, {key: bytes(v) for key, v in zip(sizes, values, strict=True)})
    urls = {
        "file": f"file://{tmp_path}/to",
        "nixl": f"nixl://{tmp_path}/to,{tmp_path}/too?high_watermark=100",
        "pack": f"pack://{tmp_path}/to.hcpack",
    }
    options = ("--profile", profile_file(tmp_path / "profile.toml"), "--grace", "0s")
    invoke("migrate", url_of(tmp_path / "ssd"), urls[kind], *options, "--verify")
    document = invoke.document("verify", urls[kind], *options)
    assert (document["pages"], document["findings"]) == (4, [])
    assert document["objects_read"] == document["objects"]


@pytest.mark.slow
def test_reading_changes_no_byte_and_no_time(tmp_path: Path, invoke: Invoke) -> None:
    store = tmp_path / "store"
    store.mkdir()
    put_bucket(store, 1, VALUES)
    put_offset_files(store, [Record(TENANT + A, VALUES[A], 0, 9)])
    copy = shutil.copytree(store, tmp_path / "copy")

    def state(directory: Path) -> dict[str, tuple[bytes, int]]:
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in directory.iterdir()}

    for command in (("ls",), ("verify", "--grace", "0s"), ("show",)):
        name, *options = command
        page = (A[2:66].decode(),) if name == "show" else ()
        invoke(name, url_of(store), *page, *options)
    invoke("migrate", url_of(store), f"pack://{tmp_path}/rescued.hcpack")
    assert state(store) == state(copy)
