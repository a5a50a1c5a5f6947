"""`rm --free`: the least useful pages leave, tails before prefixes; what is lost is said."""

from __future__ import annotations

import json
import os
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.formats.spec import object_specs
from hicachectl.text.units import human_size
from tests.move.repairs import INDEXER_BYTES, KV_BYTES, dsa_store, indexer, kv
from tests.move.test_migrate_stores import place_of, settle
from tests.prewarming.test_prewarm import HASHES, tokens
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.speed import slow
from tests.stores import OLD, contents, page, put, put_pages

if TYPE_CHECKING:
    from tests.conftest import Invoke

SIZE = PROFILE.page_size
NBYTES = 100


def freed(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return invoke("rm", *arguments, "--format", "json", exit_code=exit_code).document


def pages_of(store: Path) -> set[str]:
    return {name[:64] for name in contents(store)}


def trace_file(path: Path, prompts: list[list[int]]) -> Path:
    rows = (
        {"timestamp": at, "token_ids": prompt, "output_length": 5}
        for at, prompt in enumerate(prompts)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def aged(tmp_path: Path) -> Path:
    """Make a store of six pages of two objects; page n was written at OLD + 1000 n."""
    store = tmp_path / "aged"
    for n in range(6):
        put_pages(store, range(n, n + 1), "_m_0_2", "_m_1_2", nbytes=NBYTES, mtime=OLD + 1000 * n)
    return store


@pytest.mark.parametrize(
    ("asked", "left"), [(1, 5), (2 * NBYTES, 5), (2 * NBYTES + 1, 4), (7 * NBYTES, 2)]
)
def test_the_longest_unused_pages_leave(invoke: Invoke, aged: Path, asked: int, left: int) -> None:
    document = freed(invoke, aged, "--free", f"{asked}B", "--yes")
    assert pages_of(aged) == {page(n) for n in range(6 - left, 6)}
    facts = document["free"]
    assert (document["pages"], facts["kept_pages"]) == (6 - left, left)
    assert (facts["bytes"], facts["kept_bytes"]) == (document["bytes"], 2 * NBYTES * left)
    assert (facts["asked_bytes"], facts["order"]) == (asked, "last-use")
    assert facts["last_use"] == OLD + 1000 * (5 - left)
    assert facts["requested_tokens"] is facts["valued_pages"] is None


def test_without_values_the_end_of_a_request_leaves_first(invoke: Invoke, tmp_path: Path) -> None:
    """Two requests share the pages 0 to 4. A read marks the shared pages as the second writes."""
    store, shared = tmp_path / "store", range(5)
    first, second = [*shared, *range(5, 10)], [*shared, *range(10, 15)]
    for began, numbers in ((OLD, first), (OLD + 600, second)):
        for at, number in enumerate(numbers, began):
            path = store / f"{page(number)}_m_0_1.bin"
            if path.exists():
                os.utime(path, (at, path.stat().st_mtime))
            else:
                put_pages(store, range(number, number + 1), "_m_0_1", nbytes=NBYTES, mtime=at)
    for leaves in (*reversed(first[5:]), *reversed(second[1:])):
        output = invoke("rm", store, "--free", "1B", "--yes")
        assert not [*store.glob(f"{page(leaves)}*")]
    assert pages_of(store) == {page(0)}
    assert (
        "hicachectl: rm does not know which page follows which, because neither --trace nor "
        "--keep-plan is given; servers cannot use the pages that follow a removed page, so give "
        "--trace if you have a log of requests"
    ) in output.stderr


@pytest.mark.parametrize(
    ("seconds", "leaves"),
    [
        pytest.param([0, 59], 1, id="one span"),
        pytest.param([0, 60], 0, id="two spans"),
        pytest.param([0, 30, 60], 1, id="the second span has one use"),
        pytest.param([0, 100, 130, 170], 0, id="a span after a pause"),
    ],
)
def test_uses_within_a_minute_are_one_use(
    invoke: Invoke, tmp_path: Path, seconds: list[int], leaves: int
) -> None:
    for number, second in enumerate(seconds):
        put_pages(tmp_path, range(number, number + 1), "_m_0_1", nbytes=NBYTES, mtime=OLD + second)
    freed(invoke, tmp_path, "--free", "1B", "--yes")
    assert pages_of(tmp_path) == {page(n) for n in range(len(seconds))} - {page(leaves)}


def test_a_read_is_a_use(invoke: Invoke, aged: Path) -> None:
    os.utime(aged / f"{page(0)}_m_1_2.bin", (OLD + 9000, OLD))
    freed(invoke, aged, "--free", "1B", "--yes")
    assert pages_of(aged) == {page(n) for n in (0, 2, 3, 4, 5)}


def test_other_filters_limit_what_leaves(invoke: Invoke, aged: Path) -> None:
    put_pages(aged, range(10, 12), "_other_0_1", nbytes=NBYTES, mtime=OLD - 5)
    freed(invoke, aged, "--free", "1B", "--model", "m", "--yes")
    assert pages_of(aged) == {page(n) for n in (1, 2, 3, 4, 5, 10, 11)}


def test_too_little_that_matches_is_all_removed_and_said(invoke: Invoke, aged: Path) -> None:
    before = datetime.fromtimestamp(OLD + 2500, UTC).isoformat()
    output = invoke("rm", aged, "--free", "1GiB", "--before", before, "--yes", exit_code=4)
    assert "--free: the matching pages have only 600 B of 1.0 GiB" in output.stdout
    assert pages_of(aged) == {page(n) for n in (3, 4, 5)}


def test_a_store_is_never_emptied(invoke: Invoke, aged: Path) -> None:
    before = contents(aged)
    said = invoke("rm", aged, "--free", "1101B", "--yes", exit_code=2).stderr
    assert f"--free: file://{aged} has only 1.2 KiB in pages" in said
    assert "give a smaller SIZE, or also a filter" in said
    assert contents(aged) == before


def test_a_dry_run_tells_people_what_is_lost(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    before = contents(source)
    trace = trace_file(tmp_path / "trace.jsonl", [[*tokens(), 1]])
    text = invoke("rm", source, "--free", "1B", "--trace", trace, "--profile", profile,
                  "--dry-run").stdout  # fmt: skip
    assert "Kept: 7 pages, " in text
    assert "Of 8 pages in the trace, 1 leave" in text
    assert "Usable tokens of the trace: 66.7% before, 33.3% after" in text
    assert "Used by no request" not in text
    assert contents(source) == before


@pytest.mark.parametrize("form", ["trace", "plan"])
def test_pages_that_nothing_uses_are_told_from_incomplete_ones(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path, form: str
) -> None:
    """Of the four pages that no request uses, one is incomplete; others are of another model."""
    sizes = {
        name: sum(path.stat().st_size for path in source.glob(f"{name}*"))
        for name in page_hashes_hex(tokens(), SIZE)
    }
    incomplete, *unused = list(sizes)[4:]
    next(source.glob(f"{incomplete}_*")).unlink()
    put_pages(source, range(2), "_other_0_1", mtime=OLD)
    trace = trace_file(tmp_path / "trace.jsonl", [[*tokens()[: 4 * SIZE], 1]])
    options = ["--trace", trace, "--profile", profile]
    if form == "plan":
        given = ("prewarm", tmp_path / "none", "--from", source, *options, "--dry-run")
        invoke(*given, "-o", tmp_path / "plan.jsonl")
        options[:2] = "--keep-plan", tmp_path / "plan.jsonl"
    options += ["--and-unnamed", "--grace", "0s", "--dry-run"]
    options += ["--free", f"{sum(sizes.values()) // 2 + 128}B"]
    output = invoke("rm", source, *options)
    free = invoke.document("rm", source, *options)["free"]
    nbytes = sum(sizes[name] for name in unused)
    assert (free["incomplete_pages"], free["unused_pages"], free["unused_bytes"]) == (1, 3, nbytes)
    which = "Used by no request" if form == "trace" else "Not in the plan"
    assert f"{which}: 3 pages, {human_size(nbytes)}" in output.stdout


def forest(random: np.random.Generator, requests: int) -> list[list[int]]:
    """Draw prompts, many of which continue a part of an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(requests):
        start: list[int] = []
        if prompts and random.random() < 0.7:
            earlier = prompts[int(random.integers(len(prompts)))]
            start = earlier[: SIZE * int(random.integers(1, len(earlier) // SIZE + 1))]
        fresh = random.integers(0, 1 << 17, SIZE * int(random.integers(1, 4)) + 1).tolist()
        prompts.append([*start, *fresh])
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_tails_leave_before_prefixes_and_the_loss_is_foretold(
    invoke: Invoke, tmp_path: Path, profile: Path, seed: int
) -> None:
    random = np.random.default_rng(seed)
    prompts = forest(random, 12)
    store = tmp_path / "store"
    chains = [page_hashes_hex(prompt, SIZE) for prompt in prompts]
    for chain in chains:
        for spec in object_specs(PROFILE, "file"):
            for name in chain[-1:] if spec.trailing else chain:
                put(store, name.join(spec.affix), spec.nbytes, OLD + float(random.random()))
    put_pages(store, range(3), "_demo-hybrid-1b_0_2", "_demo-hybrid-1b_1_2", mtime=OLD + 9e6)
    put_pages(store, range(3, 5), "_other_0_1", mtime=OLD - 9e6)
    trace = trace_file(tmp_path / "trace.jsonl", prompts)
    used = {name for chain in chains for name in chain}
    total = sum(len(data) for name, (data, _) in contents(store).items() if name[:64] in used)
    options = ("--trace", trace, "--profile", profile)
    asked = int(total * random.uniform(0.2, 0.8))
    foretold = freed(invoke, store, "--free", f"{asked}B", *options, "--dry-run")["free"]
    output = invoke("rm", store, "--free", f"{asked}B", *options, "--yes")
    left = pages_of(store)
    assert (
        "kept 2 pages (128 B) of deployments that no request names; 128 B of other pages leave "
        "instead; --and-unnamed removes the pages of these deployments first"
    ) in output.stderr
    assert "No request names other tp 1: 2 pages, 128 B" in output.stdout
    assert {page(n) for n in range(5)} & left == {page(3), page(4)}  # unused by the trace
    for chain in chains:  # what is left of each chain is a prefix of it
        kept = [name in left for name in chain]
        assert kept == sorted(kept, reverse=True)
    assert foretold["valued_pages"] == len(used)
    assert foretold["valued_pages_removed"] == len(used - left)
    token_ids = tmp_path / "ids.jsonl"
    token_ids.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    rows = invoke("hits", store, "--token-ids", token_ids, "--profile", profile, "--format",
                  "json").document["chains"]  # fmt: skip
    assert foretold["usable_tokens_after"] == sum(row["usable_tokens"] for row in rows)
    assert foretold["requested_tokens"] == SIZE * sum(map(len, chains))
    assert foretold["usable_tokens_before"] == foretold["requested_tokens"]


def test_deployments_that_no_request_names_can_go_first(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    """Another model's pages leave first, also those of the same prompts, before unused pages."""
    own = set(contents(source))
    others = [HASHES[0], page(0)]
    for name in others:
        put(source, f"{name}_other_0_1.bin", mtime=time.time() - 900)
    put_pages(source, range(2, 3), "_third_0_1", nbytes=NBYTES, mtime=time.time() - 900)
    options = ("--trace", trace_file(tmp_path / "trace", [tokens()]), "--profile", profile)
    named = [{"group": "other tp1", "pages": 2, "bytes": 128},
             {"group": "third tp1", "pages": 1, "bytes": NBYTES}]  # fmt: skip
    arguments = ("--free", f"{2 * 64 + NBYTES}B", *options)
    facts = freed(invoke, source, *arguments, "--dry-run")["free"]
    assert facts["unnamed"] == named
    document = freed(invoke, source, *arguments, "--and-unnamed", "--yes")
    assert (document["pages"], document["free"]["unnamed"]) == (3, named)
    assert document["free"]["valued_pages_removed"] == 0
    assert set(contents(source)) == own


def test_pages_of_other_sizes_are_told_apart(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    """After a change of --tp-size, pages of both sizes leave by their last use."""
    for name in HASHES[:2]:
        for rank in range(4):
            put(source, f"{name}_demo-hybrid-1b_{rank}_4.bin", NBYTES, OLD)
    options = ("--free", f"{8 * NBYTES + 1}B", "--profile", profile, "--dry-run")
    output = invoke("rm", source, *options)
    rows = [line.split() for line in output.stdout.splitlines()[:3]]
    assert [row[2] for row in rows] == ["SIZES", "tp", "tp"]
    assert [row[3:5] for row in rows[1:]] == [["2", "1"], ["4", "2"]]
    assert "2 pages (800 B) at tp 4 may leave, too" in output.stderr
    command = f"hicachectl rm {source} --model demo-hybrid-1b --tp 4 --dry-run"
    assert command in output.stderr
    assert "2 pages, 8 objects, 800 B would be removed" in invoke(*command.split()[1:]).stdout
    sizes = ("tp_size", "pp_size", "cp_size", "dcp_size")
    listed = {row["page"]: [row[name] for name in sizes]
              for row in invoke.document("ls", source, "--tp", 4)["pages"]}  # fmt: skip
    leaves = freed(invoke, source, *options)["groups"]
    assert {row["page"]: [row[name] for name in sizes] for row in leaves}.items() >= listed.items()
    trace = trace_file(tmp_path / "trace.jsonl", [[*tokens(), 1]])
    for others in (("--tp", 2), ("--trace", trace)):
        assert "may leave, too" not in invoke("rm", source, *options, *others).stderr


def test_ambiguous_keys_have_no_value(invoke: Invoke, tmp_path: Path) -> None:
    """A plan is of one deployment; ambiguous keys may be of any."""
    store = tmp_path / "store"
    put_pages(store, range(3), "_m_0_2", nbytes=NBYTES)
    plan = tmp_path / "plan.jsonl"
    plan.write_text(json.dumps({"page": page(0)}))
    facts = freed(
        invoke, store, "--free", "1B", "--keep-plan", plan, "--state", "unknown", "--dry-run"
    )["free"]
    assert (facts["valued_pages"], facts["valued_pages_removed"]) == (0, 0)


def test_a_plan_says_what_is_kept(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    held = sorted(pages_of(source), key=HASHES.index)
    plan = tmp_path / "plan.jsonl"
    plan.write_text("".join(f"{json.dumps({'page': name})}\n" for name in held[:5]))
    put_pages(source, range(1), "_demo-hybrid-1b_0_2", "_demo-hybrid-1b_1_2", nbytes=10)
    document = freed(invoke, source, "--free", "21B", "--keep-plan", plan, "--yes")
    assert len({*held[5:]} - pages_of(source)) == 1
    assert {*held[:5]} < pages_of(source)
    assert document["free"]["order"] == "plan"
    assert (document["free"]["valued_pages"], document["free"]["valued_pages_removed"]) == (5, 0)
    most = sum(len(data) for name, (data, _) in contents(source).items()
               if name[:64] in held[5:]) + 1  # fmt: skip
    freed(invoke, source, "--free", f"{most}B", "--keep-plan", plan, "--yes")
    assert pages_of(source) == {*held[:4]}


def test_a_plan_is_of_one_deployment(invoke: Invoke, aged: Path, tmp_path: Path) -> None:
    put_pages(aged, range(2), *(f"_m_{rank}_4" for rank in range(4)), nbytes=NBYTES)
    plan = tmp_path / "plan.jsonl"
    plan.write_text(json.dumps({"page": page(0)}))
    arguments = ("rm", aged, "--free", "1B", "--keep-plan", plan, "--yes")
    said = invoke(*arguments, exit_code=2).stderr
    assert "has pages of 2 deployments (m tp 2, m tp 4), but a plan is of one" in said
    assert "give --profile, or choose the deployment by --model, --tp, --pp or --cp" in said
    invoke(*arguments, "--tp", 2)
    assert {name for name in contents(aged) if "_2.bin" in name and page(0) in name}


@pytest.mark.parametrize("what", ["plan", "trace"])
def test_a_plan_or_trace_of_other_pages_is_refused(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path, what: str
) -> None:
    """A plan of another page size or tokenizer would make all pages count as unused."""
    before = contents(source)
    if what == "plan":
        value = tmp_path / "plan.jsonl"
        other = page_hashes_hex(tokens(), 2 * SIZE)
        value.write_text("".join(f"{json.dumps({'page': name})}\n" for name in other))
    else:
        value = trace_file(tmp_path / "trace.jsonl", [[token + 1 for token in tokens()]])
    option = "--keep-plan" if what == "plan" else "--trace"
    said = invoke("rm", source, "--free", "1B", option, value, "--profile", profile, "--yes",
                  exit_code=2).stderr  # fmt: skip
    assert said.count("\n") == 1
    assert f"{option}: file://{source} has none of its pages" in said
    assert f"or leave out {option}" in said
    assert contents(source) == before


def test_filters_may_leave_out_every_page_of_a_plan(
    invoke: Invoke, aged: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.jsonl"
    plan.write_text(json.dumps({"page": page(5)}))
    before = datetime.fromtimestamp(OLD + 2500, UTC).isoformat()
    freed(invoke, aged, "--free", "1B", "--keep-plan", plan, "--before", before, "--yes")
    assert pages_of(aged) == {page(n) for n in range(1, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", slow("hf3fs"), slow("mooncake"), "nixl"])
def test_every_store_makes_room_by_a_trace(
    invoke: Invoke,
    source: Path,
    profile: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    place = place_of(kind, tmp_path, request)
    invoke("migrate", source, place, "--profile", profile)
    settle(kind, request)
    trace = trace_file(tmp_path / "trace.jsonl", [[*tokens(), 1]])
    kv = sum(spec.nbytes for spec in object_specs(PROFILE, "file") if spec.pool == "kv")
    # The demo's last page has states too.
    document = freed(invoke, place, "--free", f"{kv + 1}B", "--trace", trace, "--profile", profile,
                     "--yes")  # fmt: skip
    assert document["pages"] == 1
    settle(kind, request)
    document = freed(invoke, place, "--free", f"{kv + 1}B", "--trace", trace, "--profile", profile,
                     "--yes")  # fmt: skip
    assert {row["page"] for row in document["groups"]} == {*HASHES[5:7]}
    assert document["free"]["usable_tokens_after"] == 4 * SIZE
    assert document["free"]["kept_pages"] == 5
    if kind in ("hf3fs", "mooncake"):
        said = invoke("rm", place, "--free", "1B", "--yes", exit_code=2).stderr
        assert "keeps no timestamps, so the oldest pages are unknown; give --trace or" in said


def test_pages_of_unknown_size_stay(
    invoke: Invoke, aged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pages(aged, range(7, 9), "_other_0_1", mtime=OLD - 9)
    scan = FileStore.scan

    def without_sizes(store: FileStore, *arguments: Any, **options: Any) -> Any:
        """Scan; sizes of the other model are unknown."""
        for batch in scan(store, *arguments, **options):
            other = pc.match_substring(batch.column("key"), b"other")
            at = batch.schema.get_field_index("nbytes")
            yield batch.set_column(at, "nbytes", pc.if_else(other, None, batch.column("nbytes")))

    monkeypatch.setattr(FileStore, "scan", without_sizes)
    said = invoke("rm", aged, "--free", "1B", "--model", "other", "--yes", exit_code=2).stderr
    assert "does not tell the sizes of its objects" in said
    output = invoke("rm", aged, "--free", "1B", "--dry-run", "--format", "json")
    assert "2 pages with objects of unknown size left alone" in output.stderr
    assert [row["page"] for row in output.document["groups"]] == [page(0)]
    facts = output.document["free"]
    assert (facts["kept_pages"], facts["kept_bytes"]) == (7, None)


def test_sizes_of_exbibytes_do_not_disturb_the_order(invoke: Invoke) -> None:
    with TemporaryDirectory(dir="/dev/shm") as directory:  # ext4 has no such files
        store = Path(directory)
        for n in range(6):
            sparse = put(store, f"{page(n)}_m_0_1.bin", 0, OLD)
            os.truncate(sparse, 1 << (62 if n < 4 else 10))
            os.utime(sparse, (OLD + 60 * n, OLD + 60 * n))
        freed(invoke, store, "--free", "1B", "--model", "m", "--yes")
        left = {path.name[:64] for path in store.glob("*.bin")}
        assert left == {page(n) for n in range(1, 6)}


def test_a_page_that_a_server_rewrites_meanwhile_stays_and_others_leave(
    invoke: Invoke, aged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = FileStore.look

    def meanwhile(store: FileStore, *arguments: Any) -> Any:
        put_pages(aged, range(1), "_m_0_2", "_m_1_2", nbytes=NBYTES, mtime=OLD + 7)
        return look(store, *arguments)

    monkeypatch.setattr(FileStore, "look", meanwhile)
    output = invoke("rm", aged, "--free", f"{3 * NBYTES}B", "--yes")
    assert "1 page left alone, because of writes after the listing" in output.stderr
    assert pages_of(aged) == {page(n) for n in (0, 3, 4, 5)}
    before = datetime.fromtimestamp(OLD + 3500, UTC).isoformat()
    put_pages(aged, range(1), "_m_0_2", "_m_1_2", nbytes=NBYTES, mtime=OLD + 8)
    short = invoke("rm", aged, "--free", f"{3 * NBYTES}B", "--before", before, "--yes", exit_code=4)
    said = (
        "--free: servers rewrote 1 page (200 B), so rm left them alone; run again with --free 100B"
    )
    assert said in short.stderr
    assert pages_of(aged) == {page(n) for n in (0, 4, 5)}


def test_a_further_hard_link_keeps_its_bytes(invoke: Invoke, aged: Path, tmp_path: Path) -> None:
    """Each name counts, as `ls` counts it, and the other name stays."""
    backup = tmp_path / "backup"
    backup.mkdir()
    for path in aged.iterdir():
        os.link(path, backup / path.name)
    assert freed(invoke, aged, "--free", "1B", "--yes")["bytes"] == 2 * NBYTES
    assert pages_of(aged) == {page(n) for n in range(1, 6)}
    assert len(contents(backup)) == 12


@pytest.mark.slow
def test_a_page_that_a_server_is_writing_is_last_and_never_half(
    invoke: Invoke, tmp_path: Path
) -> None:
    """Without a grace, the server writes the anchor after its sidecar has left: it cannot know."""
    store = dsa_store(tmp_path / "store", 2)
    sidecar, anchor = store / indexer(7), store / kv(7)
    put(store, sidecar.name, INDEXER_BYTES, time.time())
    nbytes = KV_BYTES + INDEXER_BYTES
    freed(invoke, store, "--free", f"{nbytes}B", "--yes")
    assert pages_of(store) == {page(1), page(7)}

    def finish() -> None:
        while sidecar.exists():
            time.sleep(0.01)
        put(store, anchor.name, KV_BYTES, time.time())

    writer = Thread(target=finish, daemon=True)
    writer.start()
    freed(invoke, store, "--free", f"{nbytes + 1}B", "--model", "x/dsa", "--grace", "0s", "--yes")
    writer.join(timeout=10)
    assert not writer.is_alive()
    assert pages_of(store) == set()


@pytest.mark.slow
@needs_root
def test_a_read_only_store_loses_nothing(invoke: Invoke, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "fixed", 1 << 20) as fixed:
        put_pages(fixed, range(3), "_m_0_1", nbytes=NBYTES)
        subprocess.run(["mount", "-o", "remount,ro", fixed], check=True)
        output = invoke("rm", fixed, "--free", "1B", "--yes", exit_code=3)
        rehearsed = freed(invoke, fixed, "--free", "1B", "--dry-run")
        assert len(contents(fixed)) == 3
    assert output.stdout == ""
    assert output.stderr.count("\n") == 1
    assert "Read-only file system" in output.stderr
    assert rehearsed["pages"] == 1
