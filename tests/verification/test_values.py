"""`verify --checks values`: findings and counts from reading."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.profile import dump_profile, parse_profile
from hicachectl.kernels.values import to_float32
from hicachectl.verification.request import VerifyRequest
from tests.checks.value_cases import expected_of, tiny
from tests.kvgen import KvGenerator
from tests.stores import OLD, page
from tests.verification.in_process import verify_store

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

# Four ranks share two KV heads: ranks 0 and 1 have the same head, and so have 2 and 3.
GQA = """
model = "m"
page_size = 4
tp = 4
layout = "page_first"
[[pools]]
name = "kv"
kind = "mha"
dtype = "bfloat16"
layers = 2
kv_heads = 2
head_dim = 16
"""
OBJECT_BYTES = 2 * 4 * 2 * 16 * 2  # k and v, tokens, layers, one head of 16, bfloat16
PAGES = 6


def healthy(seed: int) -> np.ndarray:
    """Return normal, finite bfloat16 values."""
    values = np.random.default_rng(seed).standard_normal(OBJECT_BYTES // 2).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    directory.mkdir()
    (tmp_path / "p.toml").write_text(GQA)
    for number in range(PAGES):
        for rank in range(4):
            write(directory / f"{page(number)}_m_{rank}_4.bin", healthy(2 * number + rank // 2))
    return directory


def write(path: Path, values: np.ndarray) -> None:
    values.tofile(path)
    os.utime(path, (OLD, OLD))


def verify(invoke: Invoke, store: Path, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    out = invoke(
        "verify", store, "--profile", store.parent / "p.toml", *arguments, "--format", "json",
        exit_code=exit_code,
    ).stdout  # fmt: skip
    document: dict[str, Any] = json.loads(out)
    return document


def test_a_healthy_store_is_read_whole_and_clean(invoke: Invoke, store: Path) -> None:
    document = verify(invoke, store)
    assert document["findings"] == []
    assert document["checks"] == ["names", "groups", "sizes", "values"]
    assert document["bytes_read"] == document["bytes"] == PAGES * 4 * OBJECT_BYTES
    assert document["sampled"] == PAGES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (["--time-limit", "0s"], {"values", "unread-objects"}),
        (["--sample", "0.001%", "--sample-slice", "77777"], {"values"}),
        (["--grace", "9999d"], {"values", "in-flight"}),
        (["--pool", "mamba"], {"everything"}),
    ],
)
def test_a_run_that_reads_nothing_checks_no_values(
    invoke: Invoke, store: Path, limits: list[str], left: set[str]
) -> None:
    document = verify(invoke, store, *limits)
    assert (document["objects_read"], document["bytes_read"]) == (0, 0)
    assert document["findings"] == []
    assert "values" not in document["checks"]
    assert set(document["skipped_checks"]) - {"digests", "dtypes"} == left
    said = invoke("verify", store, "--profile", store.parent / "p.toml", *limits)
    assert "not checked: " in said.stdout or "nothing was checked" in said.stdout
    assert all(f" {name}: " in said.stderr for name in left - {"everything"})


def test_a_sample_says_how_many_pages_were_read(invoke: Invoke, store: Path) -> None:
    arguments = ["--sample", "50%", "--sample-slice", "0"]
    document = verify(invoke, store, *arguments)
    sampled = document["sampled"]
    assert 0 < sampled < PAGES
    said = invoke("verify", store, "--profile", store.parent / "p.toml", *arguments).stdout
    assert f" read ({sampled} of {document['pages']} pages): no findings" in said


def test_a_time_limit_leaves_a_count_of_what_was_not_read(invoke: Invoke, store: Path) -> None:
    document = verify(invoke, store, "--bwlimit", "1KiB", "--time-limit", "1s")
    assert not document["complete"]
    assert document["objects_read"] < document["objects"]
    assert "unread-objects" in document["skipped_checks"]


def write_pages(directory: Path, profile: Profile, count: int = 3) -> Path:
    """Write a store with pages of a profile of one rank."""
    store = directory / "store"
    store.mkdir()
    objects = KvGenerator(expected_of(profile), profile, seed=1).objects(range(count))
    for number, content in enumerate(objects):
        write(store / f"{page(number)}_m_0_1.bin", content)
    return store


@pytest.mark.parametrize(("written", "claimed"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_16_bit_numbers_show_their_dtype(
    invoke: Invoke, tmp_path: Path, written: str, claimed: str
) -> None:
    """Pages of the other dtype are found; a repair doubts the profile, and removes none."""
    store = write_pages(tmp_path, tiny(written)[0], 8)
    file = tmp_path / "p.toml"
    file.write_text(dump_profile(tiny(written)[0]))
    document = verify(invoke, store)
    assert (document["findings"], document["skipped_checks"]) == ([], ["digests"])

    file.write_text(dump_profile(tiny(claimed)[0]))
    found = verify(invoke, store, exit_code=4)["findings"]
    assert {row["code"] for row in found} == {"dtype-mismatch"}
    assert {row["page"] for row in found} == {page(number) for number in range(8)}
    assert found[0]["detail"].startswith(f"numbers are {written}, not {claimed}: of ")
    said = invoke(
        "verify", store, "--profile", file, "--repair", "delete", "--yes", exit_code=2
    ).stderr
    assert "have dtype-mismatch" in said
    assert len(list(store.glob("*.bin"))) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "claimed", "page_size"),
    [("bfloat16", "float16", 1), ("float8_e4m3fn", "float8_e5m2", 4)],
)
def test_dtypes_of_one_width_are_said_to_be_unchecked(
    invoke: Invoke, tmp_path: Path, written: str, claimed: str, page_size: int
) -> None:
    """Finite values of fp8, and few 16-bit values, do not show the dtype that wrote them."""
    profiles = {dtype: tiny(dtype, page_size=page_size)[0] for dtype in (written, claimed)}
    directory = write_pages(tmp_path, profiles[written])
    for dtype, known in profiles.items():
        profile = tmp_path / "dtype.toml"
        profile.write_text(dump_profile(known))
        outcome = invoke("verify", directory, "--profile", profile, "--format", "json")
        document = outcome.document
        assert document["findings"] == []
        assert "dtypes" in document["skipped_checks"]
        assert f"dtypes of the profile (kv: {dtype})" in outcome.stderr


def test_a_pool_that_the_profile_does_not_list_has_no_values_to_check(
    invoke: Invoke, store: Path
) -> None:
    for rank in range(4):
        write(store / f"{page(0)}.mamba_m_{rank}_4.bin", np.full(8, 0x7FC1, "<u2"))
    document = verify(invoke, store)
    assert document["findings"] == []
    assert "values" in document["checks"]
    assert document["skipped_checks"] == ["digests", "dtypes", "unlisted-pools"]
    bare = invoke("show", store, page(0))
    assert "No --profile: show prints statistics and quartiles of values only with" in bare.stderr
    shown = invoke("show", store, page(0), "--profile", store.parent / "p.toml").stdout
    assert ".mamba_m_3_4.bin" in shown


def test_ranks_that_share_heads_must_agree(invoke: Invoke, store: Path) -> None:
    other = store / f"{page(3)}_m_1_4.bin"
    write(other, healthy(999))
    document = verify(invoke, store, exit_code=4)
    found = [(f["code"], f["severity"], f["key"]) for f in document["findings"]]
    assert found == [("replica-mismatch", "warning", other.name)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_all_share_one_head_are_compared_within_each_page(
    invoke: Invoke, tmp_path: Path, ranks: int
) -> None:
    """Each page has one replica set; the next page's set follows, with other bytes."""
    text = GQA.replace("tp = 4", f"tp = {ranks}").replace("kv_heads = 2", "kv_heads = 1")
    (tmp_path / "p.toml").write_text(text)
    store = tmp_path / "store"
    store.mkdir()
    for number in range(PAGES):
        for rank in range(ranks):
            write(store / f"{page(number)}_m_{rank}_{ranks}.bin", healthy(number))
    assert verify(invoke, store)["findings"] == []
    other = store / f"{page(3)}_m_{ranks - 1}_{ranks}.bin"
    write(other, healthy(999))
    found = verify(invoke, store, exit_code=4)["findings"]
    assert [(f["code"], f["key"]) for f in found] == [("replica-mismatch", other.name)]


def test_a_nan_is_an_error_that_says_where(invoke: Invoke, store: Path) -> None:
    damaged = store / f"{page(2)}_m_2_4.bin"
    values = healthy(2 * 2 + 1)
    values[70] = 0x7FC1
    write(damaged, values)
    document = verify(invoke, store, exit_code=4)
    assert document["counts"] == {"nan": 1, "replica-mismatch": 1}
    nan = document["findings"][0]
    assert (nan["code"], nan["severity"], nan["key"]) == ("nan", "error", damaged.name)
    assert "layer" in nan["detail"]


def test_groups_in_flight_are_not_read(invoke: Invoke, store: Path) -> None:
    for path in store.glob(f"{page(0)}*"):
        path.write_bytes(b"\xff" * OBJECT_BYTES)
    document = verify(invoke, store)
    assert document["findings"] == []
    assert document["in_flight"] == 1
    assert document["sampled"] == PAGES - 1


def test_a_file_that_shrinks_between_listing_and_reading(store: Path) -> None:
    target = store / f"{page(1)}_m_0_4.bin"

    class Shrinking(FileStore):
        def attach(self, arena: Any) -> None:
            super().attach(arena)
            os.truncate(target, 100)

    report = verify_store(Shrinking(store), VerifyRequest(profile=parse_profile(GQA)))
    found = report.findings.to_pylist()
    assert [(f["code"], f["key"]) for f in found] == [("truncated", target.name)]
    assert "100 bytes when read" in found[0]["detail"]


def test_an_object_that_cannot_be_read_is_a_finding_and_the_run_goes_on(store: Path) -> None:
    target = store / f"{page(1)}_m_0_4.bin"

    class Failing(FileStore):
        """Raise EIO for one file, as a bad disk does; no real file can."""

        def read_into(self, rows: Any, offsets: Any, capacities: Any, **options: Any) -> Any:
            result = super().read_into(rows, offsets, capacities, **options)
            for index, key in enumerate(rows.column("key").to_pylist()):
                if key.decode() == target.name:
                    result.statuses[index] = 5
                    result.errors[index] = "Input/output error"
            return result

    report = verify_store(Failing(store), VerifyRequest(profile=parse_profile(GQA)))
    found = report.findings.to_pylist()
    assert [(f["code"], f["severity"], f["key"]) for f in found] == [
        ("unreadable", "error", target.name)
    ]
    assert report.document["bytes_read"] == (PAGES * 4 - 1) * OBJECT_BYTES


def test_evicted_while_reading_is_gone(store: Path) -> None:
    class Evicting(FileStore):
        def attach(self, arena: Any) -> None:
            super().attach(arena)
            for path in store.glob(f"{page(1)}*"):
                path.unlink()

    report = verify_store(Evicting(store), VerifyRequest(profile=parse_profile(GQA)))
    assert len(report.findings) == 0
    assert report.document["gone"] == 4


@pytest.mark.slow
def test_repair_takes_the_whole_group_and_restore_gives_it_back(
    invoke: Invoke, store: Path
) -> None:
    damaged = store / f"{page(2)}_m_2_4.bin"
    write(damaged, np.full(OBJECT_BYTES // 2, 0x7FC1, dtype="<u2"))
    before = {path.name: path.read_bytes() for path in store.glob("*.bin")}
    dry = verify(invoke, store, "--repair", "quarantine", "--dry-run", exit_code=4)
    assert dry["repaired"] == 0
    assert {path.name for path in store.glob("*.bin")} == before.keys()
    document = verify(invoke, store, "--repair", "quarantine", "--yes", exit_code=4)
    assert (document["repaired"], document["quarantined"]) == (1, 4)
    assert not list(store.glob(f"{page(2)}*"))
    assert verify(invoke, store)["findings"] == []
    invoke("restore", store / ".hicachectl" / "quarantine", store, "--yes")
    assert {path.name: path.read_bytes() for path in store.glob("*.bin")} == before


def test_repair_is_refused_where_it_could_take_too_much(invoke: Invoke, store: Path) -> None:
    said = invoke("verify", store, "--repair", "delete", "--yes", exit_code=2).stderr
    assert "--repair needs a given profile" in said
    assert said.endswith("; hicachectl profile --server URL -o prod.toml writes a profile file\n")
    assert (
        "--yes"
        in invoke(
            "verify", store, "--profile", store.parent / "p.toml", "--repair", "delete", exit_code=2
        ).stderr
    )
    assert "--repair" in invoke("verify", store, "--yes", exit_code=2).stderr


@pytest.mark.slow
def test_warnings_are_repaired_only_when_asked_by_code(invoke: Invoke, store: Path) -> None:
    (store / f"{page(4)}_m_3_4.bin").unlink()
    repair = ["--repair", "delete", "--yes"]
    assert verify(invoke, store, *repair, exit_code=4)["repaired"] == 0
    asked = verify(invoke, store, *repair, "--repair-code", "missing-rank", exit_code=4)
    assert asked["repaired"] == 1
    assert not list(store.glob(f"{page(4)}*"))
    assert verify(invoke, store)["findings"] == []


def test_show_says_digests_and_statistics(invoke: Invoke, store: Path) -> None:
    profile = ["--profile", store.parent / "p.toml"]
    document = invoke("show", store, page(0), *profile, "--format", "json").document
    assert all(len(row["digest"]) == 64 for row in document["objects"])
    assert len({row["digest"] for row in document["objects"]}) == 2
    tensors = {(row["tensor"], row["layer"]) for row in document["contents"]}
    assert tensors == {("k", 0), ("k", 1), ("v", 0), ("v", 1)}
    first = document["contents"][0]
    assert first["nan"] == first["inf"] == 0
    assert first["minimum"] < 0 < first["maximum"]


@pytest.mark.slow
def test_show_reads_the_quartiles_in_each_dtype(invoke: Invoke, tmp_path: Path) -> None:
    """They are those of the same numbers, rounded: quarters of the magnitudes lie between them."""
    profile = tiny("float8_e4m3fn", page_size=16)[0]
    directory = write_pages(tmp_path, profile)
    file = tmp_path / "p.toml"
    file.write_text(dump_profile(profile))
    arguments = ["show", directory, page(1), "--profile", file]
    readings = invoke(*arguments, "--format", "json").document["readings"]
    assert [row["dtype"] for row in readings] == ["float8_e4m3fn", "float8_e5m2"]
    (path,) = directory.glob(f"{page(1)}*")
    magnitudes = np.abs(to_float32(np.fromfile(path, np.uint8), "float8_e4m3fn"))
    shares = [
        np.mean(magnitudes <= readings[0][name]) for name in ("quarter", "half", "three_quarters")
    ]
    np.testing.assert_allclose(shares, [0.25, 0.5, 0.75], atol=0.08)
    half, other = (to_float32(np.arange(128, dtype=np.uint8), row["dtype"]) for row in readings)
    assert np.argmax(half == readings[0]["half"]) == np.argmax(other == readings[1]["half"]) > 0
    assert "…_m_0_1.bin  float8_e5m2 " in invoke(*arguments).stdout
