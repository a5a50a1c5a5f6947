"""Check `groups`: what an absent object means depends on the objects that are there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.file.store import FileStore
from hicachectl.checks.findings import combine
from hicachectl.checks.registry import CheckInput
from hicachectl.checks.structure import check_groups
from tests.move.repairs import dsa_store, kv, scanned
from tests.stores import page, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

STEMS = ("_m_0_2", "_m_1_2", ".indexer_m_0_2", ".indexer_m_1_2")


class Apart(FileStore):
    """A store that evicts the pools of a page separately, as 3FS does."""

    traits = replace(FileStore.traits, evicts_pools_apart=True)


def test_a_rank_without_its_anchor_lacks_no_pool(invoke: Invoke, tmp_path: Path) -> None:
    """Another rank's kv does not make a server read this rank's page: hits are lost, no more."""
    put_pages(tmp_path, range(4), *STEMS)
    for stem in STEMS[1::2]:
        (tmp_path / f"{page(0)}{stem}.bin").unlink()
    (tmp_path / f"{page(1)}{STEMS[3]}.bin").unlink()
    options = ("--checks", "groups", "--format", "json")
    document = invoke("verify", tmp_path, *options, exit_code=4).document
    found = {(one["code"], one["page"], one["pool"]) for one in document["findings"]}
    assert found == {
        ("missing-rank", page(0), "kv"),
        ("missing-rank", page(0), "indexer"),
        ("missing-pool", page(1), "indexer"),
    }


def test_orphans_are_normal_where_pools_are_evicted_apart(tmp_path: Path) -> None:
    directory = dsa_store(tmp_path / "store", 2)
    (directory / kv(0)).unlink()
    severities = {}
    for kind in (FileStore, Apart):
        with kind(directory) as store:
            groups = scanned(store)
            in_flight = np.zeros(len(groups), dtype=np.bool_)
            given = CheckInput(store=store, groups=groups, in_flight=in_flight)
            (finding,) = combine(check_groups(given)).to_pylist()
        assert finding["code"] == "orphan-sidecar"
        severities[kind] = finding["severity"]
    assert severities == {FileStore: "warning", Apart: "info"}
