"""`verify`: each kind of damage is named exactly, and nothing else is."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.hicachectl.stores import page, put, put_pages
from tests.hicachectl.test_groups import DSA

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    """Eight pages of a TP=2 model, Mamba states on two of them."""
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(8), "_m_0_2", "_m_1_2", nbytes=512)
    put_pages(store, range(6, 8), ".mamba_m_0_2", ".mamba_m_1_2", nbytes=2048)
    return store


@pytest.fixture
def dsa(tmp_path: Path) -> Path:
    """Four pages of a model with an indexer, and its profile beside the store."""
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(4), "_x-dsa", nbytes=4 * 2 * 1152)
    put_pages(store, range(4), ".indexer_x-dsa", nbytes=4 * 2 * 132)
    (tmp_path / "dsa.toml").write_text(DSA)
    return store


def verify(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    outcome = invoke("verify", *arguments, "--format", "json", exit_code=exit_code)
    document: dict[str, Any] = json.loads(outcome.stdout)
    return document


def brief(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return sorted((f["code"], f["severity"], f["key"]) for f in document["findings"])


def test_a_healthy_store_is_clean(invoke: Invoke, hybrid: Path) -> None:
    document = verify(invoke, hybrid)
    assert document["findings"] == []
    assert (document["objects"], document["pages"]) == (20, 8)
    assert document["bytes"] == 16 * 512 + 4 * 2048
    assert document["checks"] == ["names", "groups", "sizes"]
    assert document["skipped_checks"] == ["absent-pools"]


def test_the_document_has_the_members_of_the_contract(invoke: Invoke, hybrid: Path) -> None:
    assert list(verify(invoke, hybrid)) == [
        "schema",
        "version",
        "store",
        "profile",
        "objects",
        "pages",
        "bytes",
        "seconds",
        "complete",
        "gone",
        "in_flight",
        "sampled",
        "repaired",
        "quarantined",
        "checks",
        "skipped_checks",
        "findings",
        "counts",
    ]


def test_a_missing_rank_is_a_warning(invoke: Invoke, hybrid: Path) -> None:
    (hybrid / f"{page(3)}_m_1_2.bin").unlink()
    document = verify(invoke, hybrid, exit_code=4)
    assert brief(document) == [("missing-rank", "warning", f"{page(3)}_m_1_2.bin")]
    assert document["counts"] == {"missing-rank": 1}
    assert document["findings"][0]["page"] == page(3)
    assert document["findings"][0]["pool"] == "kv"


def test_a_trailing_pool_in_part_is_a_warning(invoke: Invoke, hybrid: Path) -> None:
    (hybrid / f"{page(7)}.mamba_m_0_2.bin").unlink()
    assert brief(verify(invoke, hybrid, exit_code=4)) == [
        ("missing-rank", "warning", f"{page(7)}.mamba_m_0_2.bin")
    ]


def test_a_trailing_pool_that_is_absent_is_no_finding(invoke: Invoke, hybrid: Path) -> None:
    for rank in range(2):
        (hybrid / f"{page(7)}.mamba_m_{rank}_2.bin").unlink()
    assert verify(invoke, hybrid)["findings"] == []


def test_kv_without_its_indexer_is_an_error(invoke: Invoke, dsa: Path) -> None:
    (dsa / f"{page(2)}.indexer_x-dsa.bin").unlink()
    document = verify(invoke, dsa, "--profile", dsa.parent / "dsa.toml", exit_code=4)
    assert brief(document) == [("missing-pool", "error", f"{page(2)}.indexer_x-dsa.bin")]


def test_a_missing_draft_is_a_warning(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_m_0_1", ".draft_m_0_1")
    (tmp_path / f"{page(0)}.draft_m_0_1.bin").unlink()
    document = verify(invoke, tmp_path, exit_code=4)
    assert brief(document) == [("missing-pool", "warning", f"{page(0)}.draft_m_0_1.bin")]


def test_sidecars_without_their_anchor_are_orphans(invoke: Invoke, dsa: Path) -> None:
    (dsa / f"{page(2)}_x-dsa.bin").unlink()
    document = verify(invoke, dsa, "--profile", dsa.parent / "dsa.toml", exit_code=4)
    assert brief(document) == [("orphan-sidecar", "warning", f"{page(2)}.indexer_x-dsa.bin")]


@pytest.mark.parametrize(
    ("size", "code"), [(8000, "truncated"), (9217, "oversized"), (0, "truncated")]
)
def test_sizes_are_compared_with_the_profile(
    invoke: Invoke, dsa: Path, size: int, code: str
) -> None:
    damaged = dsa / f"{page(1)}_x-dsa.bin"
    os.truncate(damaged, size)
    document = verify(
        invoke, dsa, "--profile", dsa.parent / "dsa.toml", "--grace", "0s", exit_code=4
    )
    assert brief(document) == [(code, "error", damaged.name)]
    assert document["findings"][0]["detail"] == f"{size} bytes, expected 9216"


def test_without_a_profile_sizes_are_compared_with_the_majority(
    invoke: Invoke, hybrid: Path
) -> None:
    put(hybrid, f"{page(0)}_m_0_2.bin", 100)
    document = verify(invoke, hybrid, exit_code=4)
    assert brief(document) == [("truncated", "error", f"{page(0)}_m_0_2.bin")]


def test_young_groups_are_in_flight(invoke: Invoke, hybrid: Path) -> None:
    put(hybrid, f"{page(20)}_m_0_2.bin", 512, mtime=time.time())
    document = verify(invoke, hybrid)
    assert document["in_flight"] == 1
    assert verify(invoke, hybrid, "--grace", "0s", exit_code=4)["counts"] == {"missing-rank": 1}


def test_names(invoke: Invoke, hybrid: Path) -> None:
    put(hybrid, "README.txt")
    put(hybrid, ".0123456789abcdef0123456789abcdef.tmp")
    put(hybrid, ".fedcba9876543210fedcba9876543210.tmp", mtime=time.time())
    put_pages(hybrid, range(2), "_other_0_4")
    document = verify(invoke, hybrid, exit_code=4)
    assert brief(document) == [
        ("ambiguous-key", "warning", document["findings"][1]["key"]),
        ("foreign-object", "info", "README.txt"),
        ("stale-temporary", "warning", ".0123456789abcdef0123456789abcdef.tmp"),
    ]
    assert "2 keys <hash>_other_0_4.bin can be kv of model 'other_0_4' or" in json.dumps(document)
    assert document["skipped_checks"] == ["absent-pools", "ambiguous-groups"]


def test_fail_on_decides_the_exit_code_only(invoke: Invoke, hybrid: Path) -> None:
    (hybrid / f"{page(3)}_m_1_2.bin").unlink()
    assert verify(invoke, hybrid, "--fail-on", "error")["counts"] == {"missing-rank": 1}
    assert verify(invoke, hybrid, "--fail-on", "never")["counts"] == {"missing-rank": 1}


def test_checks_can_be_chosen(invoke: Invoke, hybrid: Path) -> None:
    (hybrid / f"{page(3)}_m_1_2.bin").unlink()
    document = verify(invoke, hybrid, "--checks", "names,sizes")
    assert document["findings"] == []
    assert document["checks"] == ["names", "sizes"]


def test_the_worst_comes_first(invoke: Invoke, dsa: Path) -> None:
    put(dsa, "README.txt")
    (dsa / f"{page(0)}_x-dsa.bin").unlink()
    (dsa / f"{page(1)}.indexer_x-dsa.bin").unlink()
    document = verify(invoke, dsa, exit_code=4)
    assert [f["severity"] for f in document["findings"]] == ["error", "warning", "info"]


def test_the_table_ends_with_a_verdict(invoke: Invoke, hybrid: Path) -> None:
    assert "20 objects, 8 pages, 16.0 KiB: no findings" in invoke("verify", hybrid).stdout
    (hybrid / f"{page(3)}_m_1_2.bin").unlink()
    out = invoke("verify", hybrid, exit_code=4).stdout
    assert f"{page(3)}_m_1_2.bin" in out
    assert "1 missing-rank" in out


def test_a_profile_of_another_topology_is_refused_with_both_numbers(
    invoke: Invoke, dsa: Path
) -> None:
    other = dsa.parent / "other.toml"
    other.write_text(
        DSA.replace(
            'kind = "mla"', 'kind = "mha"\ndtype = "bfloat16"\nkv_heads = 4\nhead_dim = 8'
        ).replace("page_size = 4", "page_size = 4\ntp = 2")
    )
    message = invoke("verify", dsa, "--profile", other, exit_code=2).stderr
    assert "contradicts" in message
    assert "tp size 2" in message
    assert "without TP ranks" in message


def test_a_profile_of_another_size_is_refused_with_both_numbers(invoke: Invoke, dsa: Path) -> None:
    other = dsa.parent / "other.toml"
    other.write_text(DSA.replace('row = "bf16"', 'row = "fp8_scaled"'))
    message = invoke("verify", dsa, "--profile", other, exit_code=2).stderr
    assert "5248" in message
    assert "9216" in message
    assert message.count("\n") == 1
