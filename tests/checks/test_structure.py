"""Finding `other-deployment`: pages that servers of the profile cannot reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.stores import OLD, page, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

DAY = 86_400
TP2 = 'model = "m"\ntp = 2\n[[pools]]\nname = "kv"\nkind = "opaque"\nnbytes = 64\n'


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "tp2.toml"
    path.write_text(TP2)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four pages of TP 2, nine older ones of TP 1, five of TP 4 in two stages, two of n."""
    directory = tmp_path / "store"
    put_pages(directory, range(4), "_m_0_2", "_m_1_2", mtime=OLD + 30 * DAY)
    put_pages(directory, range(9), "_m_0_1", nbytes=128)
    staged = [f"_m_{rank}_4_2_{stage}" for rank in range(4) for stage in range(2)]
    put_pages(directory, range(5), *staged, nbytes=32, mtime=OLD + DAY)
    put_pages(directory, range(2), "_n_0_1")
    return directory


def test_each_other_deployment_of_the_model_is_one_finding(
    invoke: Invoke, store: Path, profile: Path
) -> None:
    document = invoke.document("verify", store, "--profile", profile, "--checks", "groups")
    assert document["counts"] == {"other-deployment": 2}
    details = [finding.pop("detail") for finding in document["findings"]]
    same: dict[str, str | None] = {"code": "other-deployment", "severity": "info"}
    same |= dict.fromkeys(("page", "pool", "part", "key"))
    assert document["findings"] == [same, same]
    asked = "servers of the profile (m tp 2) do not ask for these keys"
    assert sorted(details) == [
        f"5 pages at tp 4 pp 2 (1.2 KiB, written 2023-11-15 22:13 UTC); {asked}",
        f"9 pages at tp 1 (1.1 KiB, written 2023-11-14 22:13 UTC); {asked}",
    ]
    said = invoke("verify", store, "--profile", profile, "--checks", "groups").stderr
    assert "objects of m tp 1, m tp 4 pp 2, n tp 1 that the profile does not describe" in said


def test_it_changes_no_exit_code_and_is_in_the_table(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "x.prom"
    arguments = ("verify", store, "--profile", profile, "--fail-on", "warning")
    table = invoke(*arguments, "--metrics-file", metrics).stdout
    rows = [line.split()[1:5] for line in table.splitlines() if line.startswith("info")]
    assert sorted(rows) == [["other-deployment", "m", "tp", size] for size in ("1", "4")]
    lines = table.partition("To mend")[2].splitlines()
    mended = [line.split() for line in lines]
    # The sizes of each other deployment, so that the command can be pasted.
    for sizes in (["--tp", "4", "--pp", "2"], ["--tp", "1"]):
        at = mended.index(["hicachectl", "rm", str(store), "--model", "m", *sizes])
        assert lines[at - 1].startswith("  If no server of that deployment runs any more, ")
    convert = f"hicachectl migrate {store} {store} --profile OLD --to-profile {profile}"
    assert convert.split() == mended[at - 2]
    assert "other-deployment (convert the pages, or remove them; rm has no undo):" in lines
    assert 'code="other-deployment"} 2' in metrics.read_text()


def test_without_a_profile_no_deployment_is_another_one(invoke: Invoke, store: Path) -> None:
    assert invoke.document("verify", store, "--checks", "groups")["findings"] == []


@pytest.mark.slow
def test_filters_choose_what_is_counted(invoke: Invoke, store: Path, profile: Path) -> None:
    arguments = ("--profile", profile, "--checks", "groups")
    (found,) = invoke.document("verify", store, *arguments, "--page", page(8))["findings"]
    assert found["detail"].startswith("1 page at tp 1 (128 B, ")
    assert invoke.document("verify", store, *arguments, "--model", "n")["counts"] == {}
    assert invoke.document("verify", store, *arguments[:2], "--checks", "names")["counts"] == {}


def test_repair_leaves_other_deployments_alone(invoke: Invoke, store: Path, profile: Path) -> None:
    before = {path.name for path in store.glob("*.bin")}
    (store / f"{page(2)}_m_1_2.bin").unlink()
    repair = ("--profile", profile, "--repair", "quarantine", "--yes")
    invoke("verify", store, *repair, "--repair-code", "missing-rank", exit_code=4)
    assert before - {path.name for path in store.glob("*.bin")} == {
        f"{page(2)}_m_{rank}_2.bin" for rank in range(2)
    }
    refused = invoke("verify", store, *repair, "--repair-code", "other-deployment", exit_code=2)
    assert "other-deployment" in refused.stderr
    assert "hicachectl rm" in refused.stderr


@pytest.mark.slow
def test_parts_find_the_same(invoke: Invoke, store: Path, profile: Path, tmp_path: Path) -> None:
    arguments = ("verify", store, "--profile", profile, "--checks", "groups")
    whole = invoke.document(*arguments)
    for part in range(3):
        invoke(*arguments, "--run", tmp_path / "run", "--shard", f"{part}/3")
    merged = invoke.document("merge", tmp_path / "run")
    assert merged["findings"] == whole["findings"]
    assert merged["counts"] == {"other-deployment": 2}
