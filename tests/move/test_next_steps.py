"""After wrong pages were removed, `verify --repair` and `rm` say what to do about servers."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from hicachectl.verification.report_text import Mending
from tests.move.repairs import INDEXER_BYTES, dsa_store, indexer, kv, shorten, stick
from tests.parts.runs import CommandRun
from tests.stores import DSA, put

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

FLUSH = "ervers that have loaded these pages keep them in memory: while no request runs"
COMPUTED = "ages that a server computed after a wrong one are wrong, too"
IF_WRONG = "hicachectl: If the removed pages were wrong: "
DAMAGED = 2  # the page that lacks its indexer
BEGAN_S = 1_700_000_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Five pages, one a minute; one of them has no indexer."""
    directory = dsa_store(tmp_path / "store", 5)
    for number in range(5):
        for name in (kv(number), indexer(number)):
            os.utime(directory / name, (0, BEGAN_S + 60 * number))
    (directory / indexer(DAMAGED)).unlink()
    (tmp_path / "dsa.toml").write_text(DSA)
    return directory


def repair(store: Path) -> list[object]:
    profile = store.parent / "dsa.toml"
    return ["verify", store, "--profile", profile, "--checks", "groups", "--repair", "delete"]


def shown_by_the_second_step(invoke: Invoke, said: str) -> int:
    """Run the command of the second step; return the number of pages that it shows."""
    command = re.search(r"with hicachectl (rm .* --dry-run)$", said, re.MULTILINE)
    assert command is not None, said
    document = invoke(*shlex.split(command[1]), "--format", "json").document
    assert document["dry_run"]
    pages: int = document["pages"]
    return pages


def test_a_repair_says_how_to_reach_what_servers_hold_and_computed(
    invoke: Invoke, store: Path
) -> None:
    """The command of the second step shows the pages written after the wrong one, no earlier."""
    said = invoke(*repair(store), "--yes", exit_code=4).stderr
    assert f"hicachectl: S{FLUSH}" in said
    assert f"hicachectl: P{COMPUTED}" in said
    assert "--model x-dsa --since 2023-11-14T22:15:20Z --dry-run" in said
    assert "which can be all that are left" in said
    assert shown_by_the_second_step(invoke, said) == 4 - DAMAGED


def test_a_repair_in_parts_says_the_same_once(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    options = ("--yes", "--despite-profile")  # a part has few pages beside the wrong one
    run = CommandRun(invoke, tmp_path / "run", *repair(store), *options)
    run.all(2)
    said = invoke("-q", "merge", run.path, exit_code=4).stderr
    assert ": 1 page deleted" in said
    assert (said.count(FLUSH), said.count(COMPUTED)) == (1, 1)
    assert shown_by_the_second_step(invoke, said) == 4 - DAMAGED


def test_a_dry_run_has_no_next_step(invoke: Invoke, store: Path) -> None:
    assert FLUSH not in invoke(*repair(store), "--dry-run", exit_code=4).stderr


def test_a_finding_that_misleads_no_server_has_no_next_step(invoke: Invoke, store: Path) -> None:
    (store / kv(DAMAGED)).unlink()
    (store / indexer(0)).rename(store / indexer(7))
    (store / kv(0)).unlink()
    by_code = ("--yes", "--repair-code", "orphan-sidecar")
    said = invoke(*repair(store), *by_code, exit_code=4).stderr
    assert "1 page deleted" in said
    assert FLUSH not in said


def test_a_short_object_misleads_servers_unless_it_is_the_kv_of_a_file_store(
    invoke: Invoke, store: Path
) -> None:
    """HiCacheFile's read of a short object fails, so servers compute nothing from short kv."""
    put(store, indexer(DAMAGED), INDEXER_BYTES)
    asked = [word if word != "groups" else "sizes" for word in repair(store)]
    shorten(store / kv(1))
    said = invoke(*asked, "--yes", exit_code=4).stderr
    assert "1 page deleted" in said
    assert FLUSH not in said
    shorten(store / indexer(3))
    assert FLUSH in invoke(*asked, "--yes", exit_code=4).stderr


@pytest.mark.parametrize(("fail_on", "status"), [("warning", 4), ("never", 0)])
def test_quiet_keeps_the_place_and_the_steps_of_a_repair(
    invoke: Invoke, store: Path, fail_on: str, status: int
) -> None:
    """Without a repair, -q is silent, and a page in flight is named besides the steps."""
    os.utime(store / kv(0))
    quietly = ("-q", *repair(store)[:-1], "quarantine", "--yes", "--fail-on", fail_on)
    said = invoke(*quietly, exit_code=status).stderr.splitlines()
    assert f"1 page quarantined to {store}/.hicachectl/quarantine" in said[0]
    assert (FLUSH in said[1], COMPUTED in said[2]) == (True, True)
    assert ("not complete: 1 page in flight" in said[-1]) == (fail_on == "never")
    os.utime(store / kv(0), (0, BEGAN_S))
    assert invoke(*quietly) == ("", "")


def test_quiet_keeps_the_steps_and_the_reason_of_a_repair_that_did_not(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two wrong pages cannot be removed."""
    (store / indexer(1)).unlink()
    stick(monkeypatch, kv(1))
    said = invoke("-q", *repair(store), "--yes", exit_code=4).stderr
    assert f"{kv(1)}: cannot be removed" in said
    assert FLUSH in said
    assert COMPUTED in said


def test_rm_says_the_same_if_the_pages_were_wrong(invoke: Invoke, store: Path) -> None:
    page = ("rm", store, "--page", kv(1)[:16])
    assert FLUSH not in invoke(*page, "--dry-run").stderr
    said = invoke(*page, "--yes").stderr
    assert [line.startswith(IF_WRONG) for line in said.splitlines()] == [True, True]
    assert shown_by_the_second_step(invoke, said) == 3
    assert not invoke("-q", "rm", store, "--page", kv(0)[:16], "--yes").stderr


def test_rm_of_what_was_written_since_has_the_first_step_only(invoke: Invoke, store: Path) -> None:
    """With --since, rm is the second step, and prints the first one only."""
    said = invoke("rm", store, "--since", "2023-11-14T22:15:20Z", "--yes").stderr
    assert FLUSH in said
    assert COMPUTED not in said


@pytest.mark.parametrize("options", [["--free", "1KiB"], ["--temporaries"]])
def test_rm_for_room_has_no_next_step(invoke: Invoke, store: Path, options: list[str]) -> None:
    stale = store / f".{'0a' * 16}.tmp"
    stale.touch()
    os.utime(stale, (BEGAN_S, BEGAN_S))
    assert FLUSH not in invoke("rm", store, *options, "--yes").stderr


def test_without_write_times_all_pages_of_the_model_are_shown() -> None:
    _, second = Mending(store="prod:", model="m").next_steps(None)
    assert second.endswith(
        "see all pages of the model, because the store keeps no write times, with "
        "hicachectl rm prod: --model m --dry-run"
    )
