"""`verify --catalog`: tell rewritten, rotten and untouched objects apart."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.checks.catalogs import load_catalog
from tests.stores import OLD, page, put, put_pages
from tests.verification.in_process import brief

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    put_pages(directory, range(6), "_m_0_2", "_m_1_2", nbytes=5000)
    return directory


def verify(invoke: Invoke, store: Path, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return invoke(
        "verify", store, *arguments, "--format", "json", "--grace", "0s", exit_code=exit_code
    ).document


def record(invoke: Invoke, store: Path, *arguments: object) -> Path:
    catalog = store.parent / "catalog.parquet"
    verify(invoke, store, "--catalog", catalog, "--update-catalog", *arguments)
    return catalog


def flip(path: Path, position: int, *, quietly: bool = True) -> None:
    """Change one bit; quietly: restore mtime (ctime still changes)."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    if quietly:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_first_run_records_every_object(invoke: Invoke, store: Path) -> None:
    catalog = load_catalog(record(invoke, store))
    assert len(catalog.entries) == 12
    assert catalog.identity_fields == ("inode", "mtime", "ctime", "size")
    assert set(catalog.entries.column("pool").to_pylist()) == {"kv"}
    assert verify(invoke, store, "--catalog", store.parent / "catalog.parquet")["findings"] == []


def test_a_flipped_bit_in_the_same_file_is_an_error(invoke: Invoke, store: Path) -> None:
    catalog = record(invoke, store)
    target = store / f"{page(2)}_m_1_2.bin"
    flip(target, 4321)
    # Real rot does not change ctime, so leave ctime out of the identity.
    document = verify(
        invoke, store, "--catalog", catalog, "--identity", "inode,mtime,size", exit_code=4
    )
    assert brief(document) == [("digest-mismatch", "error", target.name)]
    assert document["checks"] == ["names", "groups", "sizes", "digests"]


@pytest.mark.slow
def test_a_mismatch_says_when_the_bytes_were_last_right(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later runs, which find the damage again, do not count."""
    catalog = store.parent / "catalog.parquet"
    options = ("--catalog", catalog, "--update-catalog", "--identity", "inode,mtime,size")
    target = store / f"{page(2)}_m_1_2.bin"
    details = []
    for day in range(1, 5):
        if day == 3:
            flip(target, 4321)
        now_ns = (OLD + day * 86_400) * 10**9
        with monkeypatch.context() as patch:
            patch.setattr("hicachectl.backends.capabilities.time.time_ns", lambda ns=now_ns: ns)
            document = verify(invoke, store, *options, exit_code=4 if day > 2 else 0)
        details += [finding["detail"] for finding in document["findings"]]
    said = "bytes differ from the recorded digest, but the store shows no rewrite since then; "
    assert details == [f"{said}they were right on 2023-11-16 22:13 UTC"] * 2


@pytest.mark.slow
def test_a_rewritten_object_is_re_recorded(invoke: Invoke, store: Path) -> None:
    catalog = record(invoke, store)
    target = store / f"{page(2)}_m_1_2.bin"
    flip(target, 0, quietly=False)
    document = verify(invoke, store, "--catalog", catalog, "--update-catalog")
    assert brief(document) == [("re-recorded", "info", target.name)]
    assert verify(invoke, store, "--catalog", catalog)["findings"] == []


@pytest.mark.slow
def test_a_copy_with_its_times_is_the_same_by_size_and_mtime(invoke: Invoke, store: Path) -> None:
    catalog = record(invoke, store)
    copy = store.parent / "copy"
    shutil.copytree(store, copy)
    flip(copy / f"{page(0)}_m_0_2.bin", 7)
    assert verify(invoke, copy, "--catalog", catalog)["counts"] == {"re-recorded": 1}
    by_time = ["--catalog", catalog, "--identity", "size,mtime"]
    assert verify(invoke, copy, *by_time, exit_code=4)["counts"] == {"digest-mismatch": 1}


@pytest.mark.slow
def test_a_mismatch_is_reported_until_it_is_repaired(invoke: Invoke, store: Path) -> None:
    catalog = record(invoke, store)
    flip(store / f"{page(2)}_m_1_2.bin", 1)
    again = ["--catalog", catalog, "--update-catalog", "--identity", "inode,size"]
    for _ in range(2):
        assert verify(invoke, store, *again, exit_code=4)["counts"] == {"digest-mismatch": 1}


def test_vanished_objects_leave_the_catalog_and_new_ones_enter(invoke: Invoke, store: Path) -> None:
    catalog = record(invoke, store)
    first = load_catalog(catalog).entries.to_pylist()
    for rank in range(2):
        (store / f"{page(0)}_m_{rank}_2.bin").unlink()
    put_pages(store, range(8, 9), "_m_0_2", "_m_1_2", nbytes=5000)
    record(invoke, store)
    second = {entry["key"]: entry for entry in load_catalog(catalog).entries.to_pylist()}
    assert len(second) == 12
    for entry in first:
        if entry["page"] != page(0):
            now = second[entry["key"]]
            assert now["first_seen_ns"] == entry["first_seen_ns"]
            assert now["last_verified_ns"] > entry["last_verified_ns"]


@pytest.mark.slow
def test_a_sample_keeps_what_it_did_not_read(invoke: Invoke, store: Path) -> None:
    put_pages(store, range(6, 60), "_m_0_2", "_m_1_2", nbytes=5000)
    catalog = record(invoke, store)
    before = {e["key"]: e for e in load_catalog(catalog).entries.to_pylist()}
    record(invoke, store, "--sample", "20%", "--sample-slice", 3)
    after = {e["key"]: e for e in load_catalog(catalog).entries.to_pylist()}
    assert before.keys() == after.keys()
    touched = [k for k in after if after[k]["last_verified_ns"] != before[k]["last_verified_ns"]]
    assert 0 < len(touched) < len(after) / 2


@pytest.mark.slow
def test_slices_cover_everything_once(invoke: Invoke, store: Path) -> None:
    put_pages(store, range(6, 60), "_m_0_2", "_m_1_2", nbytes=5000)
    sampled = [
        verify(
            invoke, store, "--catalog", record(invoke, store), "--sample", "25%",
            "--sample-slice", number,
        )["sampled"]
        for number in range(4)
    ]  # fmt: skip
    assert sum(sampled) == 60
    assert all(5 <= count <= 25 for count in sampled)


def test_a_catalog_of_another_store_is_said_and_compared(invoke: Invoke, store: Path) -> None:
    catalog = record(invoke, store)
    other = store.parent / "other"
    other.mkdir()
    put_pages(other, range(20, 22), "_m_0_2", "_m_1_2")
    said = invoke("verify", other, "--catalog", catalog, "--grace", "0s")
    assert "records file://" in said.stderr


def test_a_truncated_catalog_is_one_line(invoke: Invoke, store: Path) -> None:
    catalog = record(invoke, store)
    os.truncate(catalog, catalog.stat().st_size // 2)
    said = invoke("verify", store, "--catalog", catalog, exit_code=2).stderr
    assert "damaged" in said
    assert said.count("\n") == 1
    assert "No such file" in invoke("verify", store, "--catalog", "/no", exit_code=2).stderr


def test_a_catalog_that_is_no_file_is_refused_and_not_waited_for(
    invoke: Invoke, store: Path
) -> None:
    fifo = store.parent / "fifo"
    os.mkfifo(fifo)
    for catalog in (fifo, "/dev/zero"):
        said = invoke("verify", store, "--catalog", catalog, exit_code=2).stderr
        assert f"{catalog}: cannot read the catalog: not a regular file" in said


def test_options_that_contradict_are_refused(invoke: Invoke, store: Path) -> None:
    invoke("verify", store, "--update-catalog", exit_code=2)
    invoke("verify", store, "--catalog", "x", "--checks", "names", exit_code=2)
    invoke("verify", store, "--sample-slice", 1, exit_code=2)
    invoke("verify", store, "--sample", "5", exit_code=2)
    invoke("verify", store, "--sample", "0%", exit_code=2)


def test_a_time_limit_that_has_passed_reads_nothing_and_says_so(
    invoke: Invoke, store: Path
) -> None:
    catalog = store.parent / "catalog.parquet"
    document = verify(invoke, store, "--catalog", catalog, "--update-catalog", "--time-limit", "0s")
    assert not document["complete"]
    assert document["bytes_read"] == 0
    assert len(load_catalog(catalog).entries) == 0


def test_reading_does_not_touch_the_store(invoke: Invoke, store: Path) -> None:
    before = {
        p.name: (p.stat().st_mtime_ns, p.stat().st_ctime_ns, p.stat().st_ino)
        for p in store.iterdir()
    }
    record(invoke, store)
    after = {
        p.name: (p.stat().st_mtime_ns, p.stat().st_ctime_ns, p.stat().st_ino)
        for p in store.iterdir()
    }
    assert before == after


def test_metrics_keep_the_last_success(invoke: Invoke, store: Path) -> None:
    prom = store.parent / "hicache.prom"
    name = "hicachectl_verify_last_success_timestamp_seconds"

    def metrics() -> dict[str, float]:
        lines = [line for line in prom.read_text().splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    verify(invoke, store, "--metrics-file", prom)
    label = f'{{store="file://{store}"}}'
    first = metrics()
    assert first[f'hicachectl_verify_skipped{{store="file://{store}",check="values"}}'] == 1
    assert first[f"hicachectl_verify_complete{label}"] == 1
    assert first[f"hicachectl_verify_objects_read{label}"] == 0
    assert first[f"hicachectl_verify_objects{label}"] == 12
    assert first[name + label] > OLD
    (store / f"{page(0)}_m_0_2.bin").unlink()
    verify(invoke, store, "--metrics-file", prom, exit_code=4)
    second = metrics()
    assert second[name + label] == first[name + label]
    assert second[f'hicachectl_verify_findings{{store="file://{store}",code="missing-rank"}}'] == 1
    assert oct(prom.stat().st_mode & 0o777) == "0o644"


@pytest.mark.slow
def test_stamps_notice_another_deployment(invoke: Invoke, store: Path) -> None:
    profile = store.parent / "p.toml"
    text = (
        'model = "m"\npage_size = 5\ntp = 2\nlayout = "page_first"\n[[pools]]\nname = "kv"\n'
        'kind = "mha"\ndtype = "float16"\nlayers = 5\nkv_heads = 5\nhead_dim = 10\n'
    )
    profile.write_text(text.replace("kv_heads = 5", "kv_heads = 10"))
    arguments = ["--profile", profile, "--checks", "names,groups,sizes"]
    verify(invoke, store, *arguments, "--stamp", "--weights-version", "7")
    assert verify(invoke, store, *arguments)["findings"] == []
    changed = verify(invoke, store, *arguments, "--weights-version", "8", exit_code=4)
    assert [(f["code"], f["severity"]) for f in changed["findings"]] == [
        ("stamp-mismatch", "error")
    ]
    assert "'7'" in changed["findings"][0]["detail"]
    profile.write_text(profile.read_text().replace("float16", "bfloat16"))
    other = verify(invoke, store, *arguments, exit_code=4)
    assert [f["detail"] for f in other["findings"]] == [
        "pools[kv]: dtype stamped 'float16', now 'bfloat16'"
    ]
    said = invoke("verify", store, *arguments, exit_code=4).stdout
    first, second = said.split("\nstamp-mismatch:\n")[1].splitlines()[:2]
    assert "if the profile is wrong, or a flag was changed by mistake, correct the mistake" in first
    assert second.startswith("  hicachectl rm ")
    put(store, "clear-leaves-sub-directories")
    assert (store / ".hicachectl" / "stamps" / "m.json").is_file()


def test_a_damaged_stamp_is_one_line(invoke: Invoke, store: Path) -> None:
    profile = store.parent / "p.toml"
    profile.write_text(
        'model = "m"\ntp = 2\n[[pools]]\nname = "kv"\nkind = "opaque"\nnbytes = 5000\n'
    )
    stamps = store / ".hicachectl" / "stamps"
    stamps.mkdir(parents=True)
    for text, problem in (
        ("[" * 100_000, "not a stamp, or damaged; remove"),
        ('{"form": 1, "weights_version": "", "profile": 5}', "profile: expected table, found 5"),
        ('{"form": 1, "weights_version": "", "profile": {}}', "profile: field 'model' is missing"),
    ):
        (stamps / "m.json").write_text(text)
        said = invoke("verify", store, "--profile", profile, exit_code=2).stderr
        assert f"m.json: {problem}" in said


def test_a_stamp_needs_a_profile(invoke: Invoke, store: Path) -> None:
    assert "profile" in invoke("verify", store, "--stamp", exit_code=2).stderr
