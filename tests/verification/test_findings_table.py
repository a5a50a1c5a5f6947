"""The table of findings: groups, examples, and commands that mend what they say."""

from __future__ import annotations

import os
import shlex
import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.verification.report_text import Mending
from tests.move.migrations import demo_store, profile_file
from tests.move.repairs import dsa_store, indexer, kv, lacking_store, shorten
from tests.stores import DSA, page, put
from tests.terminals import answering

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

FIVE_DAYS, TWO_HOURS = 5 * 86400, 2 * 3600


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Twenty pages: five lack indexer for days, one for hours; one object is short."""
    directory = dsa_store(tmp_path / "the 'store'", 20)
    for path in directory.iterdir():
        set_age(path, FIVE_DAYS)
    for number in range(8, 20):
        set_age(directory / kv(number), TWO_HOURS)
    for number in range(6):
        (directory / indexer(number)).unlink()
    set_age(directory / kv(5), TWO_HOURS)
    shorten(directory / kv(6))
    put(directory, "." + "ab" * 16 + ".tmp")
    (tmp_path / "dsa.toml").write_text(DSA)
    return directory


# 64 bytes a page of DSA.
DRAFT = """
[[pools]]
name = "draft"
kind = "mha"
dtype = "bfloat16"
layers = 1
kv_heads = 1
head_dim = 4
"""


def set_age(path: Path, seconds: int) -> None:
    moment = time.time() - seconds - 60
    os.utime(path, (moment, moment))


def profile(store: Path) -> tuple[str, Path, str, str]:
    return "--profile", store.parent / "dsa.toml", "--checks", "names,groups,sizes"


def commands(table: str) -> dict[str, str]:
    """Return the first command under each list of codes."""
    lines = table.splitlines()
    return {
        name: lines[at + 1].strip()
        for at, line in enumerate(lines)
        if line.endswith(":") and not line.startswith(("To mend", " "))
        for name in line[:-1].split(" (")[0].split(", ")
    }


def test_findings_stand_by_code_deployment_and_age_worst_first(invoke: Invoke, store: Path) -> None:
    table = invoke("verify", store, *profile(store), exit_code=4).stdout
    rows = [line.split() for line in table.split("\n\n")[0].splitlines() if line[0] != " "]
    assert rows == [
        ["SEVERITY", "CODE", "DEPLOYMENT", "AGE", "COUNT"],
        ["error", "missing-pool", "x-dsa", "5d", "5"],
        ["error", "missing-pool", "x-dsa", "2h", "1"],
        ["error", "truncated", "x-dsa", "5d", "1"],
        ["warning", "stale-temporary", "-", rows[4][3], "1"],
    ]
    below = table.split("missing-pool", 1)[1].split("\nerror", 1)[0].splitlines()[1:]
    assert [line.split()[0] for line in below[:-1]] == sorted(map(indexer, range(5)))[:3]
    assert below[-1] == "  and 2 more"


def test_two_deployments_of_a_page_stand_apart(invoke: Invoke, tmp_path: Path) -> None:
    for model in ("alpha", "beta"):
        put(tmp_path, f"{page(0)}_{model}_0_2.bin")
        put(tmp_path, f"{page(1)}_{model}_0_2.bin")
        put(tmp_path, f"{page(1)}_{model}_1_2.bin")
    table = invoke("verify", tmp_path, exit_code=4).stdout
    for deployment in ("alpha tp 2", "beta tp 2"):
        assert f"missing-rank  {deployment}" in table


@pytest.mark.slow
def test_the_commands_mend_what_they_stand_under(invoke: Invoke, store: Path) -> None:
    table = invoke("verify", store, *profile(store), "--grace", "1s", exit_code=4).stdout
    said = commands(table)
    assert said["missing-pool"] == said["truncated"]
    given = shlex.join(map(str, (store, *profile(store))))
    assert said["missing-pool"] == f"hicachectl verify {given} --grace 1s --repair quarantine"
    for command in dict.fromkeys(said.values()):
        program, *words = shlex.split(command)
        assert program == "hicachectl"
        invoke(*words, "--yes", exit_code=4 if "verify" in words else 0)
    clean = invoke("verify", store, *profile(store)).stdout
    assert "no findings" in clean
    assert "To mend" not in clean


@pytest.mark.slow
def test_a_warning_of_a_code_of_errors_has_a_command_that_mends_it(
    invoke: Invoke, tmp_path: Path
) -> None:
    """A page without its draft costs hits only; a repair takes it if --repair-code names it."""
    store = tmp_path / "store"
    for number in range(8):
        for stem, nbytes in (("_x-dsa", 9216), (".indexer_x-dsa", 1056), (".draft_x-dsa", 64)):
            put(store, f"{page(number)}{stem}.bin", nbytes)
    (store / f"{page(0)}.draft_x-dsa.bin").unlink()
    described = tmp_path / "dsa.toml"
    described.write_text(DSA + DRAFT)
    given = ("--profile", described, "--checks", "groups,sizes")
    table = invoke("verify", store, *given, exit_code=4).stdout
    assert "warning" in table
    command = commands(table)["missing-pool"]
    assert "--repair-code missing-pool" in command
    invoke(*shlex.split(command)[1:], "--yes", exit_code=4)
    assert "no findings" in invoke("verify", store, *given).stdout
    assert not (store / f"{page(0)}_x-dsa.bin").exists()


def test_a_warning_is_mended_by_its_code_and_without_a_profile_one_is_asked_for(
    invoke: Invoke, tmp_path: Path
) -> None:
    put(tmp_path, f"{page(0)}_m_0_2.bin")
    put(tmp_path, f"{page(1)}_m_0_2.bin")
    put(tmp_path, f"{page(1)}_m_1_2.bin")
    table = invoke("verify", tmp_path, exit_code=4).stdout
    store = shlex.quote(str(tmp_path))
    repair = f"hicachectl verify {store} --profile FILE --repair quarantine"
    assert f"  {repair} --repair-code missing-rank" in table.splitlines()


def test_a_repair_that_a_code_asked_for_is_not_suggested_again(
    invoke: Invoke, tmp_path: Path
) -> None:
    store, described = demo_store(tmp_path / "store"), profile_file(tmp_path / "demo.toml")
    for path in store.glob("*.bin"):
        set_age(path, TWO_HOURS)
    next(path for path in store.glob("*_1_2.bin") if ".mamba" not in path.name).unlink()
    asked = ("verify", store, "--profile", described, "--checks", "groups", "--repair", "delete")
    code = ("--repair-code", "missing-rank")
    assert "--repair-code missing-rank" in invoke(*asked, "--yes", exit_code=4).stdout
    assert "To mend" in invoke(*asked, *code, "--dry-run", exit_code=4).stdout
    repaired = invoke(*asked, *code, "--yes", exit_code=4).stdout
    assert "1 page repaired" in repaired
    assert "To mend" not in repaired


def test_a_declined_repair_is_suggested_again(invoke: Invoke, tmp_path: Path) -> None:
    store, described = demo_store(tmp_path / "store"), profile_file(tmp_path / "demo.toml")
    for path in store.glob("*.bin"):
        set_age(path, TWO_HOURS)
    shortened = next(path for path in store.glob("*_0_2.bin") if ".mamba" not in path.name)
    os.truncate(shortened, 1000)
    set_age(shortened, TWO_HOURS)
    asked = ("verify", store, "--profile", described, "--checks", "sizes", "--repair", "delete")
    with answering("n"):
        declined = invoke(*asked, exit_code=4)
    assert "Nothing was repaired" in declined.stderr
    assert "\ntruncated:\n" in declined.stdout.partition("To mend")[2]
    with answering("y"):
        assert "To mend" not in invoke(*asked, exit_code=4).stdout


def test_pages_that_only_take_space_can_be_removed(invoke: Invoke, tmp_path: Path) -> None:
    """On a full disk, a quarantine inside the store frees nothing."""
    store, described = lacking_store(tmp_path / "store"), profile_file(tmp_path / "demo.toml")
    given = ("--profile", described, "--checks", "groups")
    table = invoke("verify", store, *given, exit_code=4).stdout
    lines = table.splitlines()
    for code, state in (("missing-rank", "partial"), ("orphan-sidecar", "orphan")):
        choice = "quarantine the pages, or free their space; rm has no undo"
        at = lines.index(f"{code} ({choice}):")
        assert lines[at + 1].endswith(f"--repair quarantine --repair-code {code}")
        program, *words = shlex.split(lines[at + 2])
        assert [program, *words[:4]] == ["hicachectl", "rm", str(store), "--state", state]
        invoke(*words, "--yes")
    assert "no findings" in invoke("verify", store, *given).stdout


def test_a_command_finds_the_pages_of_the_sample_also_on_another_day(
    invoke: Invoke, store: Path
) -> None:
    """Without --sample-slice, a sample is another slice each day."""
    sampled = ("verify", store, *profile(store), "--sample", "50%")
    repair = commands(invoke(*sampled, exit_code=4).stdout)["missing-pool"]
    today = str(int(time.time() // 86400) % 2)
    assert f"--sample 50% --sample-slice {today} --repair quarantine" in repair
    chosen = invoke(*sampled, "--sample-slice", "3", exit_code=4).stdout
    assert "--sample 50% --sample-slice 3 --repair quarantine" in commands(chosen)["missing-pool"]


@pytest.mark.slow
def test_limit_bounds_the_groups_and_all_findings_has_each_in_a_line(
    invoke: Invoke, store: Path
) -> None:
    table = invoke("verify", store, *profile(store), "--limit", "1", exit_code=4).stdout
    assert "and 3 groups with 3 findings; --limit shows more groups" in table
    every = invoke("verify", store, *profile(store), "--all-findings", exit_code=4).stdout
    assert [every.count(indexer(number)) for number in range(6)] == [1] * 6
    for option in (("--limit", "1"), ("--all-findings",)):
        refused = invoke("verify", store, *option, "--format", "json", exit_code=2).stderr
        assert f"{option[0]}: --format json always has every finding; leave out" in refused


def test_rows_for_programs_have_the_members_of_the_contract(invoke: Invoke, store: Path) -> None:
    found = invoke("verify", store, *profile(store), "--format", "json", exit_code=4).document
    for row in found["findings"]:
        assert [*row] == ["code", "severity", "page", "pool", "part", "key", "detail"]


@pytest.mark.slow
def test_merge_prints_the_same_groups_and_commands(invoke: Invoke, store: Path) -> None:
    run = store.parent / "run"
    for part in range(2):
        options = ("--shard", f"{part}/2", "--run", run)
        invoke("verify", store, *profile(store), *options)
    merged = invoke("merge", run, exit_code=4).stdout
    whole = invoke("verify", store, *profile(store), exit_code=4).stdout
    assert merged.split("\n\n")[:2] == whole.split("\n\n")[:2]
    limited = invoke("merge", run, "--again", "--limit", "1", exit_code=4).stdout
    assert "and 3 groups with 3 findings" in limited


def test_a_repair_is_not_asked_for_again(invoke: Invoke, store: Path) -> None:
    repair = ("--repair", "quarantine", "--yes")
    said = commands(invoke("verify", store, *profile(store), *repair, exit_code=4).stdout)
    assert [*said] == ["stale-temporary"]


def test_options_that_the_run_had_are_not_repeated() -> None:
    mending = Mending(
        program=("hicachectl", "--config", "a b"), store="prod:", options=("--catalog", "c")
    )
    template = "hicachectl verify STORE OPTIONS --catalog CATALOG --update-catalog"
    assert mending.command(template) == (
        "hicachectl --config 'a b' verify prod: --catalog c --update-catalog"
    )
    named = Mending(store="nixl:///a", quarantine="DIR", profiled=False)
    assert named.command("hicachectl verify STORE OPTIONS --repair quarantine") == (
        "hicachectl verify nixl:///a --profile FILE --repair quarantine --quarantine DIR"
    )
    kept = Mending(store="pack:///a b", deletes=False)
    assert kept.command("hicachectl rm STORE --state unknown") == (
        "hicachectl migrate 'pack:///a b' DST"
    )


@pytest.mark.parametrize(
    ("deployment", "chosen"),
    [
        ("a-b tp8", "--model a-b --tp 8"),
        ("a-b tp4 pp2 cp2", "--model a-b --tp 4 --pp 2 --cp 2"),
        ("a$b tp8", "--model 'a$b' --tp 8"),
        ("a-b tp4", "--model a-b --tp SIZE"),  # would choose the profile's, too
        ("a-b tp4 dcp2", "--model a-b --tp 4 --dcp 2"),
        ("a-b", "--model a-b --tp SIZE"),
        ("a%20b tp8", "--model MODEL --tp SIZE"),
        ("?", "--model MODEL --tp SIZE"),
        (None, "--model own --tp SIZE"),
    ],
)
def test_a_removal_names_the_other_deployment(deployment: str | None, chosen: str) -> None:
    mending = Mending(store="s:", model="own", sizes={"tp": 4, "pp": 1, "cp": 1, "dcp": 1})
    template = "hicachectl rm STORE --model MODEL --tp SIZE"
    assert mending.command(template, deployment) == f"hicachectl rm s: {chosen}"
