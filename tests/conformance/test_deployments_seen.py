"""Pages of several settings, all written by SGLang's own classes: findings, hits and suspicions."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.mooncake_cluster import Cluster
from tests.stores import OLD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession, WriteStore
    from tests.conftest import Invoke

DAY = 86_400

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]


@pytest.fixture(scope="module")
def cluster(mooncake_package: None) -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def copy_pages(written: tuple[Path, Manifest], store: Path, pages: list[str], mtime: float) -> None:
    """Copy the objects of some pages into a store, with a time of writing."""
    source, manifest = written
    store.mkdir(exist_ok=True)
    for entry in manifest["objects"]:
        if entry["page"] in pages:
            shutil.copyfile(source / entry["file"], store / entry["file"])
            os.utime(store / entry["file"], (mtime, mtime))


def profile_of(manifest: Manifest, path: Path) -> Path:
    path.write_text(json.dumps(manifest["profile"]))
    return path


def asked(manifest: Manifest, tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps([*manifest["tokens"], 1]) + "\n")
    return path


def findings(invoke: Invoke, *arguments: object, exit_code: int = 0) -> list[dict[str, Any]]:
    output = invoke("verify", *arguments, "--format", "json", exit_code=exit_code)
    found: list[dict[str, Any]] = output.document["findings"]
    return found


def test_a_change_of_the_topology_is_seen(
    sglang_store: WriteStore, invoke: Invoke, tmp_path: Path
) -> None:
    """Servers with two stages have written two pages so far; one stage wrote the others."""
    old, new = sglang_store("gqa_tp2"), sglang_store("pp2")
    pages = new[1]["pages"]
    assert pages == old[1]["pages"]
    store = tmp_path / "store"
    copy_pages(old, store, pages, OLD)
    copy_pages(new, store, pages[:2], OLD + 30 * DAY)
    profile = profile_of(new[1], tmp_path / "pp2.json")
    (found,) = findings(invoke, store, "--profile", profile)
    assert (found["code"], found["severity"]) == ("other-deployment", "info")
    assert found["detail"].startswith(f"{len(pages)} pages at pp 1 (")
    assert "written 2023-11-14 22:13 UTC" in found["detail"]
    requests = ("--token-ids", asked(new[1], tmp_path), "--profile", profile)
    output = invoke("hits", store, *requests, "--format", "json", "--min-usable", 0.9, exit_code=4)
    assert output.document["chains"][0]["usable_pages"] == 2


def test_a_change_of_the_dtype_is_a_mix_with_its_time_and_reason(
    sglang_store: WriteStore, invoke: Invoke, tmp_path: Path
) -> None:
    """The index keys keep their size, so the page size is not the reason."""
    old, new = sglang_store("mla_indexer"), sglang_store("mla_fp8_indexer")
    pages = new[1]["pages"]
    store = tmp_path / "store"
    copy_pages(old, store, pages[:4], OLD)
    copy_pages(new, store, pages[4:], OLD + 30 * DAY)
    (found,) = findings(invoke, store, exit_code=4)
    assert (found["code"], found["pool"]) == ("mixed-sizes", "kv")
    assert "between 2023-11-14 22:13 and 2023-12-14 22:13 UTC" in found["detail"]
    assert "not the same in every pool, suggests different layer counts" in found["detail"]


def test_a_wrong_page_size_is_named(
    sglang_store: WriteStore, invoke: Invoke, tmp_path: Path
) -> None:
    store, manifest = sglang_store("gqa_tp2")
    page_size = manifest["page_size"]
    requests = ("--token-ids", asked(manifest, tmp_path))
    said = invoke("hits", store, *requests, "--page-size", 2 * page_size).stderr
    assert f"give --page-size {page_size}, or correct page_size in the profile" in said
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps({**manifest["profile"], "hash_unit": "bigram"}))
    stores = ("prewarm", tmp_path / "new", "--from", store)
    said = invoke(*stores, *requests, "--profile", pairs).stderr
    assert "give no --speculative-algorithm, or correct hash_unit in the profile" in said


def test_a_wrong_page_size_and_other_stages_are_named_on_mooncake(
    cluster: Cluster, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path
) -> None:
    """Mooncake keys state stages, but not of how many."""
    cluster.clear()
    manifest = sglang_session.run("write_store", "pp2", cluster.master, "--backend=mooncake")
    page_size, pages = manifest["page_size"], manifest["pages"]
    requests = ("--token-ids", asked(manifest, tmp_path))
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps({**manifest["profile"], "hash_unit": "bigram"}))
    said = invoke("hits", cluster.url, *requests, "--profile", pairs).stderr
    assert f"with --page-size {page_size}, the store has pages of the first request" in said
    single = tmp_path / "single.json"
    fields = {name: value for name, value in manifest["profile"].items() if "pp" not in name}
    single.write_text(json.dumps(fields))
    output = invoke("hits", cluster.url, *requests, "--profile", single, "--format", "json")
    (other,) = output.document["elsewhere"]
    assert (other["place"], other["pages"]) == ("pp ranks 0, 1", len(pages))
