"""`hicachectl prewarm`: its document, messages and exit codes, plans, limits and the lock."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.profile import dump_profile
from hicachectl.profiles.stamps import Stamp, write_stamp
from tests.move.migrations import MODEL, demo_store, migrated, profile_file
from tests.prewarming.test_prewarm import HASHES, PAGES, pages_of, states, tokens
from tests.stores import contents

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

SIZE = PROFILE.page_size
CONTRACT = {
    "destination", "source", "requested_pages", "already_there", "copied_pages", "bytes",
    "missing_pages", "usable_tokens", "served_tokens", "not_pinned", "gone", "failed", "seconds",
    "complete", "stopped_by",
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return demo_store(tmp_path / "source", PAGES)


def prompts(path: Path, *lengths: int) -> Path:
    """Write a file with one request per length: the demo's chain, cut after that many pages."""
    cut = [[*tokens(), 1][: length * SIZE + 1] for length in lengths]
    path.write_text("".join(f"{json.dumps(ids)}\n" for ids in cut))
    return path


def strangers(path: Path, count: int) -> Path:
    """A file of requests whose pages are in no store."""
    rng = np.random.default_rng(count)
    lines = [json.dumps(rng.integers(0, 9, 3 * SIZE + 1).tolist()) for _ in range(count)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def warmed(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    """Run a prewarm; return its document, with its stderr."""
    output = invoke("prewarm", *arguments, exit_code=exit_code)
    document = output.document
    return {**document, "stderr": output.stderr}


def test_the_document_has_all_that_other_programs_read(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    asked = prompts(tmp_path / "asked.jsonl", 8, 10)
    output = invoke("prewarm", target, "--from", source, "--profile", profile,
                    "--token-ids", asked)  # fmt: skip
    document = output.document
    assert document.keys() >= CONTRACT
    assert document["schema"] == 1
    assert document["source"].endswith("/source")
    assert document["destination"].endswith("/target")
    assert (document["requested_pages"], document["copied_pages"]) == (10, 8)
    assert (document["missing_pages"], document["usable_tokens"]) == (2, 16 * SIZE)
    assert document["bytes"] == sum(len(data) for data, _ in contents(target).values())
    assert (document["complete"], document["stopped_by"]) == (True, None)
    assert document["failed"] == document["gone"] == document["not_pinned"] == 0
    _, line = output.stderr.splitlines()  # the first line names the new directory
    assert line.startswith("hicachectl: 8 pages copied")
    assert line.endswith(f"89% of {18 * SIZE} tokens served by {PROFILE.model} tp 2")
    assert document["deployment"] == {
        "model": PROFILE.model, "tag": "", "tp_size": 2, "pp_size": 1, "cp_size": 1, "dcp_size": 1,
        "page_size": SIZE, "layout": "page_first",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--all",)])
def test_the_gate_names_the_deployment_that_it_measured(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path,
    arguments: tuple[str, ...],
) -> None:  # fmt: skip
    asked = arguments or ("--token-ids", prompts(tmp_path / "asked.jsonl", 8))
    gate = ("prewarm", target, "--from", source, "--profile", profile, *asked, "--min-usable", 0.9)
    for options, tp in (((), 2), (("--to-tp", 4), 4)):
        output = invoke(*gate, *options)
        assert output.document["deployment"]["tp_size"] == tp
        counted = "usable" if arguments else "served"  # without prefixes, nothing is known to be
        assert output.stderr.splitlines()[-1].endswith(f"{counted} by {PROFILE.model} tp {tp}")
    for output_format in ("table", "csv", "jsonl"):
        assert f"{PROFILE.model} tp 2" in invoke(*gate, "--format", output_format).stdout
    converted = tmp_path / "tp4.toml"
    converted.write_text(dump_profile(replace(PROFILE, tp=4)))
    document = invoke(*gate, "--to-profile", converted).document
    assert (document["deployment"]["tp_size"], document["copied_pages"]) == (4, 0)


@pytest.mark.slow
def test_a_stamp_of_another_topology_is_said(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    target.mkdir()
    with FileStore(target) as store:
        write_stamp(store, Stamp(replace(PROFILE, tp=4)))
    stores = ("prewarm", target, "--from", source, "--profile", profile)
    asked = ("--token-ids", prompts(tmp_path / "asked.jsonl", 8))
    said = invoke(*stores, *asked).stderr
    assert "the stamp names another deployment (tp: stamped 4, now 2" in said
    assert "usable tokens are counted for demo/hybrid-1b tp 2" in said
    assert "tamped" not in invoke(*stores, *asked, "--to-tp", 4).stderr


def test_quiet_says_nothing_and_a_file_takes_the_document(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    asked = prompts(tmp_path / "asked.jsonl", 8)
    out = tmp_path / "result.json"
    output = invoke("-q", "prewarm", target, "--from", source, "--profile", profile,
                    "--token-ids", asked, "-o", out)  # fmt: skip
    assert output == ("", "")
    assert json.loads(out.read_text())["copied_pages"] == 8


def test_a_plan_is_executed_page_by_page_in_its_order(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    asked, plan = prompts(tmp_path / "asked.jsonl", 4, 8, 12), tmp_path / "plan.jsonl"
    stores = (target, "--from", source, "--profile", profile, "--jobs", 1)
    output = invoke("prewarm", *stores, "--token-ids", asked, "--dry-run", "-o", plan)
    assert not target.exists()
    assert "12 pages to copy" in output.stderr
    listed = [json.loads(line)["page"] for line in plan.read_text().splitlines()]
    assert listed == HASHES
    document = warmed(invoke, *stores, "--plan", plan)
    assert document["copied_pages"] == 12
    times = {name: mtime for name, (_, mtime) in contents(target).items()}
    best_last = sorted(listed, key=lambda page: max(t for n, t in times.items() if page in n))
    assert best_last == listed[::-1]


@pytest.mark.slow
def test_a_plan_made_without_stores_is_executed_in_its_order(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    trace, plan = tmp_path / "trace.jsonl", tmp_path / "plan.jsonl"
    ids = [*tokens(), 1]
    rows = [
        {"timestamp": 10 * n, "token_ids": ids[: pages * SIZE + 1]}
        for n, pages in enumerate((4, 12, 4, 8, 4))
    ]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    invoke("prewarm", "--trace", trace, "--profile", profile, "--dry-run", "-o", plan)
    stores = (target, "--from", source, "--profile", profile)
    assert warmed(invoke, *stores, "--plan", plan, "--budget-pages", 7)["copied_pages"] == 4
    assert pages_of(target) == set(HASHES[:4])
    assert warmed(invoke, *stores, "--plan", plan)["copied_pages"] == 8


def test_a_trace_of_tokens_warms_and_one_of_block_ids_is_refused(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    stores = (target, "--from", source, "--profile", profile)
    trace, blocks = tmp_path / "trace.jsonl", tmp_path / "blocks.jsonl"
    trace.write_text(json.dumps({"timestamp": 1, "token_ids": [*tokens(), 1]}) + "\n")
    assert warmed(invoke, *stores, "--trace", trace)["usable_tokens"] == PAGES * SIZE
    blocks.write_text(json.dumps({"timestamp": 1, "hash_ids": [1, 2, 3]}) + "\n")
    refused = invoke("prewarm", *stores, "--trace", blocks, exit_code=2)
    assert "blocks.jsonl: has block ids, which do not give the keys of pages" in refused.stderr
    plan = tmp_path / "plan.jsonl"
    said = invoke("prewarm", "--trace", blocks, "--dry-run", "-o", plan).stderr
    assert "the plan cannot be executed" in said
    refused = invoke("prewarm", *stores, "--plan", plan, exit_code=2)
    assert refused.stdout == ""
    assert f"{plan}: line 1: page: 1 is a block id" in refused.stderr


@pytest.mark.parametrize(
    ("option", "value", "kept"),
    [("--budget-pages", 7, 4), ("--budget", "1MiB", 12), ("--budget", "500KiB", 8)],
)
def test_a_budget_ends_at_a_prefix(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path,
    option: str, value: object, kept: int,
) -> None:  # fmt: skip
    asked = prompts(tmp_path / "asked.jsonl", 12)
    document = warmed(invoke, target, "--from", source, "--profile", profile,
                      "--token-ids", asked, option, value)  # fmt: skip
    assert document["usable_tokens"] == kept * SIZE
    assert pages_of(target) == set(HASHES[:kept])
    assert document["stopped_by"] == ("budget" if kept < 12 else None)
    assert document["complete"] is (kept == 12)


def test_a_reached_deadline_is_no_error(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    asked = prompts(tmp_path / "asked.jsonl", 12)
    document = warmed(invoke, target, "--from", source, "--profile", profile,
                      "--token-ids", asked, "--deadline", "0s")  # fmt: skip
    assert (document["complete"], document["stopped_by"]) == (False, "deadline")
    assert document["usable_tokens"] == 0
    assert document["stderr"].rstrip().endswith("stopped: deadline")


@pytest.mark.slow
def test_too_little_that_is_usable_fails(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    asked = prompts(tmp_path / "asked.jsonl", 10)
    stores = (target, "--from", source, "--profile", profile, "--token-ids", asked)
    below = warmed(invoke, *stores, "--min-usable", "0.9", exit_code=4)
    assert below["usable_tokens"] == 8 * SIZE
    warmed(invoke, *stores, "--min-usable", "0.8")


@pytest.mark.slow
def test_metrics_are_text_that_prometheus_reads(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "prewarm.prom"
    asked = prompts(tmp_path / "asked.jsonl", 10)
    document = warmed(invoke, target, "--from", source, "--profile", profile,
                      "--token-ids", asked, "--metrics-file", metrics)  # fmt: skip
    values, known = {}, set()
    for line in metrics.read_text().splitlines():
        if line.startswith("# "):
            known.add(line.split()[2])
            continue
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("} ")
        assert name in known
        assert labels == f'store="{document["destination"]}"'
        values[name.removeprefix("hicachectl_prewarm_")] = float(value)
    assert values["copied_pages"] == 8
    assert values["usable_tokens"] == 8 * SIZE
    assert (values["succeeded"], values["complete"]) == (1, 1)
    failed = ("--metrics-file", metrics, "--min-usable", 1)
    warmed(invoke, target, "--from", source, "--profile", profile, "--token-ids", asked, *failed,
           exit_code=4)  # fmt: skip
    assert f'hicachectl_prewarm_succeeded{{store="{document["destination"]}"}} 0' in (
        metrics.read_text()
    )


@pytest.mark.slow
def test_a_pack_knows_its_profile(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    pack = f"pack://{tmp_path}/archive.hcpack"
    migrated(invoke, source, pack, "--profile", profile)
    asked = prompts(tmp_path / "asked.jsonl", 12)
    assert warmed(invoke, target, "--from", pack, "--token-ids", asked)["copied_pages"] == 12
    assert pages_of(target) == set(HASHES)


def test_another_topology_is_asked_for_on_the_command_line(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    asked = prompts(tmp_path / "asked.jsonl", 8)
    document = warmed(invoke, target, "--from", source, "--profile", profile,
                      "--token-ids", asked, "--to-tp", 4)  # fmt: skip
    assert document["usable_tokens"] == 8 * SIZE
    wide = profile_file(tmp_path / "wide.toml", replace(PROFILE, tp=4))
    seen = invoke("hits", target, "--profile", wide, "--token-ids", asked, "--format", "jsonl")
    assert json.loads(seen.stdout)["usable_pages"] == 8


def test_what_only_the_destination_has_is_not_missing(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    stores = (target, "--from", source, "--profile", profile)
    warmed(invoke, *stores, "--token-ids", prompts(tmp_path / "four.jsonl", 4))
    for name in contents(source):
        (source / name).unlink()
    asked = prompts(tmp_path / "eight.jsonl", 8)
    document = warmed(invoke, *stores, "--token-ids", asked, "--allow-empty")
    assert (document["already_there"], document["missing_pages"]) == (4, 4)
    assert document["usable_tokens"] == 4 * SIZE


def test_a_state_is_added_to_a_page_that_is_there_without_one(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    stores = (target, "--from", source, "--profile", profile)
    warmed(invoke, *stores, "--token-ids", prompts(tmp_path / "eight.jsonl", 8))
    assert states(target) == {HASHES[7]}
    document = warmed(invoke, *stores, "--token-ids", prompts(tmp_path / "four.jsonl", 4))
    assert states(target) == {HASHES[3], HASHES[7]}
    assert (document["already_there"], document["copied_pages"]) == (3, 1)
    assert document["usable_tokens"] == 4 * SIZE


@pytest.mark.slow
def test_pages_of_which_parts_are_there_wait_for_their_prefix(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    # The target has one rank of page 6, and none of the pages before it.
    target.mkdir()
    name = next(name for name in contents(source) if name.startswith(HASHES[6]))
    (target / name).write_bytes(contents(source)[name][0])
    asked = prompts(tmp_path / "asked.jsonl", 8)
    stores = (target, "--from", source, "--profile", profile, "--token-ids", asked)
    planned = warmed(invoke, *stores, "--dry-run", "--format", "json")
    assert [row["page"] for row in planned["plan"]] == HASHES[:8]
    warmed(invoke, *stores, "--budget-pages", 4)
    assert pages_of(target) == {*HASHES[:4], HASHES[6]}
    warmed(invoke, *stores)
    assert pages_of(target) == set(HASHES[:8])


def test_nothing_that_can_be_had_is_no_error(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    asked = strangers(tmp_path / "asked.jsonl", 3)
    document = warmed(invoke, target, "--from", source, "--profile", profile, "--token-ids", asked)
    assert (document["copied_pages"], document["missing_pages"]) == (0, 9)
    assert document["complete"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--token-ids", "a", "--prompts", "b"), "one of --prompts"),
        ((), "one of --prompts"),
        (("--token-ids", "missing.jsonl"), "missing.jsonl: cannot read"),
        (
            ("--pages", "missing.jsonl", "--through-server", "http://x:1"),
            "needs tokens; give --prompts",
        ),
        (
            ("--token-ids", "missing.jsonl", "--through-server", "ftp://x"),
            "--through-server: ",
        ),
        (("--token-ids", "missing.jsonl", "--to-key-scheme", "unified"), "--to-key-scheme"),
        (("--token-ids", "missing.jsonl", "--pin-ttl", "1h"), "--pin-ttl needs --pin"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    invoke: Invoke, source: Path, target: Path, profile: Path,
    arguments: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    refused = invoke("prewarm", target, "--from", source, "--profile", profile, *arguments,
                     exit_code=2)  # fmt: skip
    assert said in refused.stderr
    assert refused.stdout == ""


def test_chains_that_contradict_one_another_are_named(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    asked = tmp_path / "pages.jsonl"
    asked.write_text(f"{json.dumps(HASHES[:4])}\n{json.dumps(HASHES[2:4])}\n")
    refused = invoke("prewarm", target, "--from", source, "--profile", profile, "--pages", asked,
                     exit_code=2)  # fmt: skip
    assert HASHES[2] in refused.stderr


def test_an_inferred_profile_is_refused(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    asked = prompts(tmp_path / "asked.jsonl", 4)
    refused = invoke("prewarm", target, "--from", source, "--token-ids", asked, exit_code=2)
    assert "prewarm needs a given profile" in refused.stderr


def test_rows_of_ls_name_the_group_to_copy(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    listed = tmp_path / "rows.jsonl"
    invoke("ls", source, "--format", "jsonl", "-o", listed)
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    for row in rows[:3]:  # name the group of another deployment
        row["group"] = row["group"].replace("tp2", "tp4")
    listed.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    document = warmed(
        invoke, target, "--from", source, "--profile", profile, "--pages", listed,
        "--min-usable", 1, exit_code=4,
    )  # fmt: skip
    assert document["requested_pages"] == PAGES
    assert (document["copied_pages"], document["missing_pages"]) == (PAGES - 3, 3)
    assert (
        f"{listed}: 3 rows not copied, because their groups belong to another" in document["stderr"]
    )
    assert {n[:64] for n in contents(target)} == {row["page"] for row in rows[3:]}
    listed.write_text(f"{json.dumps(HASHES[:2])}\n{json.dumps(rows[0])}\n")
    refused = invoke("prewarm", target, "--from", source, "--profile", profile, "--pages", listed,
                     exit_code=2).stderr  # fmt: skip
    assert f"{listed}: has 1 row of other deployments than the profile's" in refused
    assert refused.endswith("; remove such rows from a file with chains\n")
    others = [row for row in rows[:3] if row["page"] not in HASHES[-1:]][:2]
    listed.write_text("".join(f"{json.dumps(row)}\n" for row in ([HASHES[-1]] * 2, *others)))
    refused = invoke("prewarm", target, "--from", source, "--profile", profile, "--pages", listed,
                     exit_code=2).stderr  # fmt: skip
    assert f"{listed}: has 2 rows of other deployments than the profile's" in refused


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["--all", "--pages", "--token-ids"])
@pytest.mark.parametrize("more", [-7, 7], ids=["truncated", "oversized"])
def test_an_object_of_a_wrong_size_is_left_behind_and_named(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path, asked: str, more: int
) -> None:
    page = HASHES[4]
    broken = source / f"{page}_{MODEL}_1_2.bin"
    size = broken.stat().st_size
    os.truncate(broken, size + more)
    (tmp_path / "pages").write_text("".join(f"{name}\n" for name in HASHES))
    asking: dict[str, list[object]] = {
        "--all": [],
        "--pages": [tmp_path / "pages"],
        "--token-ids": [prompts(tmp_path / "asked.jsonl", PAGES)],
    }
    stores = (target, "--from", source, "--profile", profile, asked, *asking[asked])
    document = warmed(invoke, *stores, exit_code=4)
    expected = set(HASHES[:4]) if asked == "--token-ids" else set(HASHES) - {page}
    assert pages_of(target) == expected
    assert (document["copied_pages"], document["failed"]) == (len(expected), 1)
    assert document["usable_tokens"] == len(expected) * SIZE
    assert f"{broken.name}: {size + more} bytes, expected {size}" in document["stderr"]
    planned = invoke("prewarm", tmp_path / "other", *stores[1:], "--dry-run")
    assert page not in planned.stdout
    assert broken.name in planned.stderr


def test_a_page_that_the_destination_has_whole_does_not_fail_for_its_source(
    invoke: Invoke, source: Path, target: Path, profile: Path
) -> None:
    stores = (target, "--from", source, "--profile", profile, "--all")
    warmed(invoke, *stores)
    os.truncate(source / f"{HASHES[4]}_{MODEL}_1_2.bin", 5)
    document = warmed(invoke, *stores)
    assert (document["already_there"], document["failed"]) == (PAGES, 0)


def test_a_destination_with_an_object_of_a_wrong_size_is_not_called_whole(
    invoke: Invoke, source: Path, target: Path, profile: Path
) -> None:
    stores = (target, "--from", source, "--profile", profile, "--all")
    warmed(invoke, *stores)
    for store in (source, target):
        os.truncate(store / f"{HASHES[4]}_{MODEL}_1_2.bin", 5)
    document = warmed(invoke, *stores, exit_code=4)
    assert (document["already_there"], document["failed"]) == (PAGES - 1, 1)
    assert document["usable_tokens"] == (PAGES - 1) * SIZE


@pytest.mark.slow
def test_a_prefix_below_the_threshold_is_not_served(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    """The threshold counts for each request, and those of the destination's servers count."""
    stores = (target, "--from", source, "--profile", profile)
    asked = ("--token-ids", prompts(tmp_path / "asked.jsonl", 4, 8), "--min-usable", 0.6)
    assert warmed(invoke, *stores, *asked)["served_tokens"] == 12 * SIZE
    limit = ("--prefetch-threshold", 4 * SIZE + 1)
    document = warmed(invoke, *stores, *asked, *limit)
    assert (document["usable_tokens"], document["served_tokens"]) == (12 * SIZE, 8 * SIZE)
    assert f"67% of {12 * SIZE} tokens served by" in document["stderr"]
    servers = tmp_path / "servers.toml"
    servers.write_text(dump_profile(replace(PROFILE, prefetch_threshold=8 * SIZE + 1)))
    document = warmed(invoke, *stores, *asked, "--to-profile", servers, exit_code=4)
    assert (document["usable_tokens"], document["served_tokens"]) == (12 * SIZE, 0)


@pytest.mark.slow
def test_the_threshold_is_no_fact_of_a_store(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    """A pack and a stamp take the pages of servers with another one."""
    pack, other = f"pack://{tmp_path / 'x.hcpack'}", tmp_path / "other.toml"
    other.write_text(dump_profile(replace(PROFILE, prefetch_threshold=512)))
    for stated in (profile, other):
        invoke("migrate", source, pack, "--profile", stated)
        invoke("verify", source, "--profile", stated, "--stamp", "--checks", "groups")
    assert "stamp" not in invoke("verify", source, "--profile", profile).stdout
