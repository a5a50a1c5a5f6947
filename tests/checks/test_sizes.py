"""Check `sizes` without a profile: several sizes of one kind of object, and rarer ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from tests.stores import OLD, page, put, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

RANKS = ("_m_0_2", "_m_1_2")
DAY = 86_400


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Twelve old pages of 16 KiB a rank, and eight new ones of 8 KiB."""
    directory = tmp_path / "store"
    put_pages(directory, range(12), *RANKS, nbytes=16384)
    put_pages(directory, range(12, 20), *RANKS, nbytes=8192, mtime=OLD + 30 * DAY)
    return directory


@pytest.mark.slow
def test_pages_of_two_sizes_are_one_finding_and_none_is_called_truncated(
    invoke: Invoke, store: Path
) -> None:
    document = invoke.document("verify", store, exit_code=4)
    (finding,) = document["findings"]
    named = {name: finding[name] for name in ("code", "severity", "page", "pool", "part", "key")}
    assert named == {
        "code": "mixed-sizes", "severity": "warning", "page": None, "pool": "kv", "part": None,
        "key": None,
    }  # fmt: skip
    assert "16384 bytes on 12 pages (60%), written 2023-11-14 22:13 UTC" in finding["detail"]
    assert "8192 bytes on 8 pages (40%), written 2023-12-14 22:13 UTC" in finding["detail"]
    assert "the ratio 2 suggests different KV cache dtypes or page sizes" in finding["detail"]
    changed = "between 2023-11-14 22:13 and 2023-12-14 22:13 UTC"
    assert f"the size changed from 16384 to 8192 bytes {changed}" in finding["detail"]
    assert "sizes" not in document["skipped_checks"]
    assert invoke.document("verify", store, "--fail-on", "error")["counts"] == {"mixed-sizes": 1}
    assert "1 mixed-sizes" in invoke("verify", store, exit_code=4).stdout


def test_rarer_sizes_are_judged_against_the_common_one(invoke: Invoke, store: Path) -> None:
    small = put(store, f"{page(0)}_m_0_2.bin", 100)
    large = put(store, f"{page(13)}_m_1_2.bin", 16385)
    empty = [put(store, f"{page(number)}_m_0_2.bin", 0) for number in range(3, 7)]
    found = invoke.document("verify", store, exit_code=4)["findings"]
    wrong = {f["key"]: (f["code"], f["detail"]) for f in found if f["key"]}
    assert wrong == {
        small.name: ("truncated", "100 bytes, expected 16384"),
        large.name: ("oversized", "16385 bytes, expected 16384"),
        **{path.name: ("truncated", "0 bytes, expected 16384") for path in empty},
    }
    (mixed,) = [f for f in found if f["code"] == "mixed-sizes"]
    assert "16384 bytes on 12 pages" in mixed["detail"]
    assert "8192 bytes on 8 pages" in mixed["detail"]


@pytest.mark.parametrize(("old", "new"), [(5, 2), (100, 4)])
def test_a_size_of_few_pages_is_damage(invoke: Invoke, tmp_path: Path, old: int, new: int) -> None:
    put_pages(tmp_path, range(old), *RANKS, nbytes=512)
    put_pages(tmp_path, range(old, old + new), *RANKS, nbytes=256)
    assert invoke.document("verify", tmp_path, exit_code=4)["counts"] == {"truncated": 2 * new}


def test_three_pages_of_sixty_are_enough(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(57), *RANKS, nbytes=512)
    put_pages(tmp_path, range(57, 60), *RANKS, nbytes=256)
    assert invoke.document("verify", tmp_path, exit_code=4)["counts"] == {"mixed-sizes": 1}


@pytest.mark.slow
def test_each_kind_of_key_has_its_finding(invoke: Invoke, store: Path) -> None:
    put_pages(store, range(4), ".draft_m_0_2", ".draft_m_1_2", nbytes=300)
    put_pages(store, range(4, 20), ".draft_m_0_2", ".draft_m_1_2", nbytes=100)
    put_pages(store, range(20), "_n", nbytes=40)
    found = invoke.document("verify", store, exit_code=4)["findings"]
    by_pool = {f["pool"]: f for f in found}
    assert {f["code"] for f in found} == {"mixed-sizes"}
    assert sorted(f["pool"] for f in found) == ["draft", "kv"]
    settings = "not the same in every pool, suggests different layer counts or head counts"
    assert f"the ratio 3, {settings}" in by_pool["draft"]["detail"]
    draft = invoke.document("verify", store, "--pool", "draft", exit_code=4)
    assert draft["counts"] == {"mixed-sizes": 2}
    assert invoke.document("verify", store, "--model", "n")["counts"] == {}


def test_two_mixes_have_sizes_of_their_own(invoke: Invoke, store: Path) -> None:
    """A size that is common in one deployment is damage in another."""
    put_pages(store, range(12), "_n_0_1", nbytes=300)
    put_pages(store, range(12, 20), "_n_0_1", nbytes=100)
    wrong = {
        put(store, f"{page(0)}_n_0_1.bin", 8192).name: "8192 bytes, expected 300",
        put(store, f"{page(1)}_m_0_2.bin", 300).name: "300 bytes, expected 16384",
    }
    found = invoke.document("verify", store, exit_code=4)["findings"]
    assert {f["key"]: f["detail"] for f in found if f["key"]} == wrong


def test_a_size_that_changes_alike_in_every_pool_suggests_the_page_size(
    invoke: Invoke, store: Path
) -> None:
    """States do not count: a state belongs to a request, whatever the size of its pages."""
    put_pages(store, range(12), ".indexer_m_0_2", ".indexer_m_1_2", nbytes=400)
    put_pages(store, range(12, 20), ".indexer_m_0_2", ".indexer_m_1_2", nbytes=200)
    put_pages(store, range(20), ".mamba_m_0_2", ".mamba_m_1_2", nbytes=90)
    found = invoke.document("verify", store, exit_code=4)["findings"]
    assert sorted(finding["pool"] for finding in found) == ["indexer", "kv"]
    for finding in found:
        reason = "the ratio 2, the same in every pool, suggests different page sizes;"
        assert reason in finding["detail"]


def test_sizes_written_in_the_same_time_are_of_servers_that_run_together(
    invoke: Invoke, store: Path
) -> None:
    put_pages(store, range(12, 14), *RANKS, nbytes=16384, mtime=OLD + 40 * DAY)
    (finding,) = invoke.document("verify", store, exit_code=4)["findings"]
    assert "servers with both settings may run" in finding["detail"]
    assert "the size changed" not in finding["detail"]


def test_the_table_names_the_deployment_of_a_mix_and_its_age(invoke: Invoke, store: Path) -> None:
    lines = invoke("verify", store, exit_code=4).stdout.splitlines()
    (row,) = [line for line in lines if line.startswith("warning")]
    assert row.split()[1:5] == ["mixed-sizes", "m", "tp", "2"]
    assert row.split()[-2].endswith("d")


def test_an_object_of_a_page_in_flight_has_no_size_yet(invoke: Invoke, store: Path) -> None:
    """A server may still write it: neither size is damage."""
    for number, nbytes in ((30, 100), (31, 20_000)):
        put_pages(store, range(number, number + 1), *RANKS, nbytes=nbytes, mtime=time.time())
    document = invoke.document("verify", store, exit_code=4)
    assert document["counts"] == {"mixed-sizes": 1}
    assert document["in_flight"] == 2
    old = invoke.document("verify", store, "--grace", "0s", exit_code=4)["counts"]
    assert (old["truncated"], old["oversized"]) == (2, 2)


def test_pipeline_stages_of_unequal_size_are_no_mix(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(9), "_m_0_1_2_0", nbytes=512)
    put_pages(tmp_path, range(9), "_m_0_1_2_1", nbytes=256)
    assert "mixed-sizes" not in invoke.document("verify", tmp_path)["counts"]


def test_a_store_without_times_has_no_ages(invoke: Invoke, tmp_path: Path) -> None:
    url = f"pack://{tmp_path}/x.hcpack?keys=file"
    with open_store(url, create=True) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        for number in range(8):
            sizes = np.full(2, 4096 if number % 2 else 2048)
            rows = pa.table({"key": [f"{page(number)}{rank}.bin".encode() for rank in RANKS]})
            assert store.write_from(rows, np.array([0, 8192]), sizes, if_absent=True).all_ok
    (finding,) = invoke.document("verify", url, exit_code=4)["findings"]
    assert "2048 bytes on 4 pages (50%); 4096 bytes on 4 pages (50%); the" in finding["detail"]


def test_pages_of_a_mix_are_never_repaired(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    """Another deployment has two sizes; only the profile's own damaged page is removed."""
    profile = tmp_path / "p.toml"
    profile.write_text('model = "n"\n[[pools]]\nname = "kv"\nkind = "opaque"\nnbytes = 40\n')
    put_pages(store, range(20), "_n_0_1", nbytes=40)
    put(store, f"{page(7)}_n_0_1.bin", 39)
    before = {path.name for path in store.glob("*.bin")}
    repair = ["--profile", profile, "--repair", "quarantine", "--yes"]
    document = invoke.document("verify", store, *repair, exit_code=4)
    assert document["counts"] == {"mixed-sizes": 1, "truncated": 1}
    assert document["quarantined"] == 1
    assert before - {path.name for path in store.glob("*.bin")} == {f"{page(7)}_n_0_1.bin"}
    refused = invoke("verify", store, *repair, "--repair-code", "mixed-sizes", exit_code=2)
    assert "give --profile" in refused.stderr


def test_no_profile_is_inferred_from_a_mix(invoke: Invoke, store: Path) -> None:
    refused = invoke("profile", store, exit_code=2).stderr
    assert "several sizes" in refused


@pytest.mark.slow
@pytest.mark.parametrize(("nbytes", "newest"), [(16384, True), (8192, False)])
def test_a_repair_by_an_old_profile_must_be_told_so(
    invoke: Invoke, store: Path, tmp_path: Path, nbytes: int, newest: bool
) -> None:
    """It takes the newest pages and leaves older ones."""
    profile = tmp_path / "p.toml"
    pool = f'[[pools]]\nname = "kv"\nkind = "opaque"\nnbytes = {nbytes}\n'
    profile.write_text(f'model = "m"\ntp = 2\n{pool}')
    repair = ["--profile", profile, "--repair", "quarantine", "--dry-run"]
    refused = invoke("verify", store, *repair, exit_code=2 if newest else 4).stderr
    assert ("8 of the 8 newest pages, and 8 of all 20, have truncated" in refused) is newest
    said = invoke("verify", store, *repair, "--despite-profile", exit_code=4).stderr
    assert ("The repair takes the 8 newest pages and leaves older pages" in said) is newest
