"""`verify`: exact findings for each kind of damage, and no others."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.pages.scanning import take_inventory
from hicachectl.verification.report import describe_store, report_of
from hicachectl.verification.request import VerifyRequest
from hicachectl.verification.verify import check_part, start_run
from tests.stores import DSA, page, put, put_pages
from tests.verification.in_process import brief, verify_store

if TYPE_CHECKING:
    from collections.abc import Collection, Generator
    from pathlib import Path

    from hicachectl.verification.verify import RunStart
    from tests.conftest import Invoke


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    """Eight pages of a TP=2 model, Mamba states on two of them."""
    store = tmp_path / "store"
    put_pages(store, range(8), "_m_0_2", "_m_1_2", nbytes=512)
    put_pages(store, range(6, 8), ".mamba_m_0_2", ".mamba_m_1_2", nbytes=2048)
    return store


@pytest.fixture
def dsa(tmp_path: Path) -> Path:
    """Four pages of a model with an indexer, and its profile beside the store."""
    store = tmp_path / "store"
    put_pages(store, range(4), "_x-dsa", nbytes=4 * 2 * 1152)
    put_pages(store, range(4), ".indexer_x-dsa", nbytes=4 * 2 * 132)
    (tmp_path / "dsa.toml").write_text(DSA)
    return store


def verify(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    checks = [] if "--checks" in arguments else ["--checks", "names,groups,sizes"]
    return invoke("verify", *arguments, *checks, "--format", "json", exit_code=exit_code).document


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
        "stopped_by",
        "gone",
        "in_flight",
        "sampled",
        "objects_read",
        "bytes_read",
        "unranked",
        "device",
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


@pytest.mark.parametrize("grace", [(), ("--grace", "1h")])
def test_sidecars_whose_anchor_may_still_come_are_in_flight(
    invoke: Invoke, dsa: Path, grace: tuple[str, ...]
) -> None:
    """SGLang writes sidecars first: young sidecars are not orphans."""
    young = dsa / f"{page(2)}.indexer_x-dsa.bin"
    (dsa / f"{page(2)}_x-dsa.bin").unlink()
    now = time.time()
    os.utime(young, (now, now))
    arguments = (dsa, "--profile", dsa.parent / "dsa.toml", *grace)
    document = verify(invoke, *arguments)
    assert (document["findings"], document["in_flight"]) == ([], 1)
    os.utime(young, (now - 7200, now - 7200))
    document = verify(invoke, *arguments, exit_code=4)
    assert brief(document) == [("orphan-sidecar", "warning", young.name)]
    assert document["in_flight"] == 0


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
    """Whole pages are in flight, too. A remark says how to check pages in flight."""
    put(hybrid, f"{page(20)}_m_0_2.bin", 512, mtime=time.time())
    for rank in range(2):
        put(hybrid, f"{page(21)}_m_{rank}_2.bin", 512, mtime=time.time())
    out = invoke("verify", hybrid)
    assert "pages, 2 in flight, " in out.stdout
    assert "Not checked: 2 pages in flight, which servers may still be writing; run" in out.stderr
    judged = invoke("verify", hybrid, "--grace", "0s", exit_code=4)
    assert "1 missing-rank; not checked" in judged.stdout
    assert "in flight" not in judged.stdout + judged.stderr


def test_names(invoke: Invoke, hybrid: Path) -> None:
    put(hybrid, "README.txt")
    put(hybrid, ".0123456789abcdef0123456789abcdef.tmp")
    put(hybrid, ".fedcba9876543210fedcba9876543210.tmp", mtime=time.time())
    put(hybrid, ".hicachectl-0123456789abcdef0123456789abcdef.tmp")
    put_pages(hybrid, range(2), "_other_0_4")
    document = verify(invoke, hybrid, exit_code=4)
    assert brief(document) == [
        ("ambiguous-key", "warning", document["findings"][0]["key"]),
        ("foreign-object", "info", "README.txt"),
        ("stale-temporary", "warning", ".0123456789abcdef0123456789abcdef.tmp"),
        ("stale-temporary", "warning", ".hicachectl-0123456789abcdef0123456789abcdef.tmp"),
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


@pytest.mark.parametrize(
    ("check", "remedy"), [("values", "--profile"), ("digests", "--catalog FILE")]
)
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_check_that_was_named_and_cannot_run_is_refused(
    invoke: Invoke, hybrid: Path, tp2_profile: Path, check: str, remedy: str, device: str
) -> None:
    profile = ["--profile", tp2_profile] if check == "digests" else []
    for named in (check, f"names,{check}", "names,groups,sizes,values,digests"):
        refused = invoke(
            "verify", hybrid, *profile, "--checks", named, "--device", device, exit_code=2
        )
        assert refused.stdout == ""
        assert f"--checks {check}: " in refused.stderr or named.endswith("values,digests")
        assert remedy in refused.stderr or named.endswith("values,digests")


def test_values_are_refused_under_a_profile_that_describes_none(
    invoke: Invoke, hybrid: Path, tp2_profile: Path
) -> None:
    arguments = [hybrid, "--profile", tp2_profile]
    refused = invoke("verify", *arguments, "--checks", "values", exit_code=2).stderr
    assert "--checks values: the profile describes no values" in refused
    document = invoke("verify", *arguments, "--format", "json").document
    assert document["skipped_checks"][:2] == ["values", "digests"]


def test_each_check_of_the_default_set_that_did_not_run_is_said(
    invoke: Invoke, hybrid: Path
) -> None:
    outcome = invoke("verify", hybrid, "--format", "json")
    document = outcome.document
    assert document["checks"] == ["names", "groups", "sizes"]
    assert document["skipped_checks"] == ["values", "digests", "absent-pools"]
    for check, remedy in (("values", "--profile"), ("digests", "--catalog FILE")):
        (line,) = [line for line in outcome.stderr.splitlines() if f" {check}: " in line]
        assert remedy in line
    said = invoke("verify", hybrid).stdout
    assert said.endswith("no findings; not checked: values, digests, absent-pools\n")
    assert "nothing was checked" in invoke("verify", hybrid, "--model", "typo").stdout


def test_a_store_of_pages_in_flight_alone_is_not_called_clean(
    invoke: Invoke, tmp_path: Path
) -> None:
    put_pages(tmp_path, range(4), "_m_0_2", "_m_1_2", mtime=time.time())
    document = verify(invoke, tmp_path)
    assert document["findings"] == []
    assert "in-flight" in document["skipped_checks"]
    assert (
        "not checked: in-flight"
        in invoke("verify", tmp_path, "--checks", "names,groups,sizes").stdout
    )


def test_the_worst_comes_first(invoke: Invoke, dsa: Path) -> None:
    put(dsa, "README.txt")
    (dsa / f"{page(0)}_x-dsa.bin").unlink()
    (dsa / f"{page(1)}.indexer_x-dsa.bin").unlink()
    document = verify(invoke, dsa, exit_code=4)
    assert [f["severity"] for f in document["findings"]] == ["error", "warning", "info"]


def test_the_table_ends_with_a_verdict(invoke: Invoke, hybrid: Path) -> None:
    said = invoke("verify", hybrid).stdout
    assert "20 objects, 8 pages, 16.0 KiB: no findings; not checked: " in said
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
    assert "tp 2" in message
    assert "without TP ranks" in message


TP2 = """
model = "m"
tp = 2
[[pools]]
name = "kv"
kind = "opaque"
nbytes = 512
"""


@pytest.fixture
def tp2_profile(tmp_path: Path) -> Path:
    path = tmp_path / "tp2.toml"
    path.write_text(TP2)
    return path


def test_a_pool_that_the_profile_does_not_list_is_no_orphan(
    invoke: Invoke, hybrid: Path, tp2_profile: Path
) -> None:
    document = verify(invoke, hybrid, "--profile", tp2_profile)
    assert document["findings"] == []
    assert document["skipped_checks"] == ["unlisted-pools"]
    rows = invoke("ls", hybrid, "--profile", tp2_profile, "--format", "json").document
    assert len(rows["pages"]) == 8
    assert {row["state"] for row in rows["pages"]} == {"whole"}


def test_mamba_of_another_tp_size_beside_one_mla_anchor_is_no_orphan(
    invoke: Invoke, tmp_path: Path
) -> None:
    put_pages(tmp_path, range(7), "_k", nbytes=90)
    put_pages(tmp_path, range(3), ".mamba_k_0_2", ".mamba_k_1_2", nbytes=80)
    put_pages(tmp_path, range(3, 7), *(f".mamba_k_{r}_4" for r in range(4)), nbytes=40)
    assert verify(invoke, tmp_path)["findings"] == []
    profile = tmp_path.parent / f"{tmp_path.name}.toml"
    profile.write_text(
        'model = "k"\ntp = 2\n[[pools]]\nname = "kv"\nkind = "opaque"\nnbytes = 90\n'
        'replicated = true\n[[pools]]\nname = "mamba"\nkind = "opaque"\nnbytes = 80\n'
    )
    document = verify(invoke, tmp_path, "--profile", profile)
    assert document["findings"] == []
    assert "unlisted-pools" in document["skipped_checks"]


def test_pages_evicted_during_the_scan_are_gone_and_no_finding(tmp_path: Path) -> None:
    put_pages(tmp_path, range(40), "_m_0_2", "_m_1_2")
    (tmp_path / f"{page(0)}_m_0_2.bin").unlink()

    class Evicting(FileStore):
        """A store that loses ten pages and regains one between the listing and the checks."""

        def scan(self, columns: Collection[str] = ()) -> Generator[Any, None, None]:
            (tmp_path / f"{page(39)}_m_0_2.bin").rename(tmp_path / "kept")
            for number in range(20, 30):
                (tmp_path / f"{page(number)}_m_0_2.bin").unlink()
            yield from super().scan(columns)
            for number in range(20, 30):
                (tmp_path / f"{page(number)}_m_1_2.bin").unlink()
            (tmp_path / "kept").rename(tmp_path / f"{page(39)}_m_0_2.bin")

    report = verify_store(Evicting(tmp_path), VerifyRequest(checks=("groups", "sizes")))
    assert report.findings.column("key").to_pylist() == [f"{page(0)}_m_0_2.bin"]
    assert report.document["gone"] == 10


def test_a_contradiction_shows_through_some_damage(
    invoke: Invoke, hybrid: Path, tp2_profile: Path
) -> None:
    put(hybrid, f"{page(0)}_m_0_2.bin", 10)
    wrong = tp2_profile.with_name("wrong.toml")
    wrong.write_text(TP2.replace("512", "600"))
    message = invoke("verify", hybrid, "--profile", wrong, exit_code=2).stderr
    assert "600" in message
    assert "512" in message
    assert verify(invoke, hybrid, "--profile", tp2_profile, exit_code=4)["counts"] == {
        "truncated": 1
    }


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_every_command_refuses_a_profile_that_contradicts_the_store(
    invoke: Invoke, hybrid: Path, tp2_profile: Path, command: str
) -> None:
    wrong = tp2_profile.with_name("wrong.toml")
    wrong.write_text(TP2.replace("tp = 2", "tp = 4"))
    arguments = [page(0)] if command == "show" else []
    message = invoke(command, hybrid, *arguments, "--profile", wrong, exit_code=2).stderr
    assert message.startswith(
        f"hicachectl: {wrong}: The profile contradicts the store file://{hybrid}: expected model "
        "'m' tp 4, found model 'm' tp 2; "
    )
    next_command = message.partition("; hicachectl ")[2].partition(" shows ")[0]
    assert next_command == f"doctor file://{hybrid} --profile {wrong}"
    assert "tp 2" in invoke(*next_command.split()).stdout


def test_a_contradiction_of_sizes_names_profile_and_store(
    invoke: Invoke, hybrid: Path, tp2_profile: Path
) -> None:
    wrong = tp2_profile.with_name("wrong.toml")
    wrong.write_text(TP2.replace("512", "256"))
    message = invoke("verify", hybrid, "--profile", wrong, exit_code=2).stderr
    assert f"{wrong}: The profile contradicts the store file://{hybrid}: expected 256" in message
    next_command = message.rstrip().rpartition("hicachectl ")[2]
    assert next_command == f"ls file://{hybrid} --summary"
    assert invoke(*next_command.split()).stdout


def test_a_contradiction_names_no_file_of_another_profile(
    invoke: Invoke, hybrid: Path, tp2_profile: Path
) -> None:
    """With --to options, the profile can be one that no file states."""
    wrong = tp2_profile.with_name("wrong.toml")
    wrong.write_text(TP2.replace("tp = 2", "tp = 4"))
    new = hybrid.parent / "new"
    given = ("--profile", wrong, "--to-model", "n")
    message = invoke("migrate", hybrid, new, *given, exit_code=2).stderr
    assert message.startswith("hicachectl: The profile contradicts the store file:")


def test_an_absurd_rank_in_a_name_is_a_model(invoke: Invoke, hybrid: Path) -> None:
    put(hybrid, f"{page(0)}.mamba_m_0_999999999.bin")
    document = verify(invoke, hybrid, exit_code=4)
    assert document["counts"] == {"orphan-sidecar": 1}


def test_a_pool_filter_chooses_whole_pages_that_have_the_pool(invoke: Invoke, dsa: Path) -> None:
    (dsa / f"{page(2)}.indexer_x-dsa.bin").unlink()
    (dsa / f"{page(3)}_x-dsa.bin").unlink()
    arguments = [dsa, "--profile", dsa.parent / "dsa.toml"]
    of_indexer = verify(invoke, *arguments, "--pool", "indexer", exit_code=4)
    assert of_indexer["counts"] == {"orphan-sidecar": 1}
    of_kv = verify(invoke, *arguments, "--pool", "kv", exit_code=4)
    assert of_kv["counts"] == {"missing-pool": 1}


def test_what_was_not_judged_is_said(invoke: Invoke, hybrid: Path, tp2_profile: Path) -> None:
    put_pages(hybrid, range(2), "_n", nbytes=10)
    others = invoke("verify", hybrid, "--profile", tp2_profile, "--checks", "groups")
    assert "other-deployments: objects of n" in others.stderr
    put_pages(hybrid, range(2, 4), "_n", nbytes=20)
    assert "sizes" in verify(invoke, hybrid)["skipped_checks"]
    assert verify(invoke, hybrid, "--model", "typo")["skipped_checks"] == ["everything"]


def test_objects_whose_size_is_not_listed_are_said(tmp_path: Path) -> None:
    put_pages(tmp_path, range(6), "_m_0_2", "_m_1_2")

    class Silent(FileStore):
        """A store that lists no sizes of rank 1."""

        def scan(self, columns: Collection[str] = ()) -> Generator[Any, None, None]:
            for batch in super().scan(columns):
                known = pc.match_substring(batch.column("key"), "_m_0_2")
                sizes = pc.if_else(known, batch.column("nbytes"), None)
                at = batch.schema.get_field_index("nbytes")
                yield batch.set_column(at, "nbytes", sizes)

    report = verify_store(Silent(tmp_path), VerifyRequest(checks=("sizes",)))
    assert report.document["findings"] is None
    assert not len(report.findings)
    assert "sizes" in report.document["skipped_checks"]
    assert any("the store lists no size for 6 objects" in text for text in report.remarks)


def test_what_is_written_while_a_long_listing_goes_on_is_in_flight(tmp_path: Path) -> None:
    put_pages(tmp_path, range(4), "_m_0_2", "_m_1_2", mtime=time.time() - 3600)
    put_pages(tmp_path, range(4, 8), "_m_0_2", mtime=time.time())
    with FileStore(tmp_path) as store:
        request = VerifyRequest(checks=("groups",))
        start = start_run(store, request)
        early = replace(start.listing, start_ns=time.time_ns() - 300 * 10**9)
        before = replace(start, listing=early)
        listed = take_inventory(store)

        def document(start: RunStart) -> dict[str, Any]:
            result = check_part(store, request, listed, start).result
            described = describe_store(store, request)
            return report_of([result], described, listed.table, request).document

        assert document(before)["counts"] == {"missing-rank": 4}  # the clock is wrong
        late = replace(early, duration_ns=300 * 10**9)
        long = document(replace(start, listing=late))
    assert (long["counts"], long["in_flight"]) == ({}, 4)


@pytest.mark.slow
def test_many_ranks_are_judged_in_time(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), *(f"_m_{rank}_512" for rank in range(512)), nbytes=1)
    (tmp_path / f"{page(0)}_m_77_512.bin").unlink()
    assert verify(invoke, tmp_path, exit_code=4)["counts"] == {"missing-rank": 1}


def test_under_dcp_only_ranks_that_can_be_are_expected(invoke: Invoke, tmp_path: Path) -> None:
    dcp = [f"_tp4_dcp{rank}_2_page64" for rank in range(2)]
    put_pages(tmp_path, range(3), *(f"_k{part}" for part in dcp))
    put_pages(tmp_path, range(1), *(f".mamba_k_{rank}_4{dcp[rank % 2]}" for rank in range(4)))
    assert verify(invoke, tmp_path)["findings"] == []
