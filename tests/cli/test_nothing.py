"""Nothing asked for and nothing found: no command takes either for success."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import hicachectl
from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.cli.demo_store import PROFILE
from tests.move.migrations import demo_store
from tests.stores import put
from tests.tiny_tokenizers import make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke

SIZE = PROFILE.page_size

# Command lines that read requests from the file EMPTY.
READERS = """
doctor SRC --token-ids EMPTY --profile PROFILE
doctor SRC --trace EMPTY --profile PROFILE
doctor SRC --prompts EMPTY --tokenizer TOKENIZER --profile PROFILE
doctor SRC --pages EMPTY --profile PROFILE
hits SRC --token-ids EMPTY --profile PROFILE
hits SRC --pages EMPTY --profile PROFILE
hits SRC --trace EMPTY --profile PROFILE
hits SRC --prompts EMPTY --tokenizer TOKENIZER --profile PROFILE
hits SRC --pages EMPTY --page-size 16
prewarm DST --from SRC --token-ids EMPTY --profile PROFILE
prewarm DST --from SRC --pages EMPTY --profile PROFILE
prewarm DST --from SRC --prompts EMPTY --tokenizer TOKENIZER --profile PROFILE
prewarm DST --from SRC --trace EMPTY --profile PROFILE
prewarm DST --from SRC --plan EMPTY --profile PROFILE
prewarm DST --from SRC --token-ids EMPTY --profile PROFILE --dry-run
prewarm DST --from SRC --token-ids EMPTY --profile PROFILE --shard 0/1 --run RUN
prewarm --trace EMPTY --profile PROFILE --dry-run
prewarm --trace EMPTY --dry-run
report SRC --token-ids EMPTY --profile PROFILE -o PAGE
report SRC --pages EMPTY --profile PROFILE -o PAGE
report SRC --trace EMPTY --profile PROFILE -o PAGE
simulate --trace EMPTY --profile PROFILE
simulate SRC --trace EMPTY --profile PROFILE --plan EMPTY
rm SRC --free 1KiB --trace EMPTY --profile PROFILE --yes
rm SRC --free 1KiB --keep-plan EMPTY --profile PROFILE --yes
"""


@pytest.mark.parametrize("line", READERS.strip().splitlines())
@pytest.mark.parametrize("text", ["", "\n \n"], ids=["empty", "blank"])
def test_a_file_without_requests_is_refused(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path, line: str, text: str
) -> None:
    empty = tmp_path / "requests.jsonl"
    empty.write_text(text)
    names = {
        "SRC": source,
        "DST": tmp_path / "target",
        "PROFILE": profile,
        "EMPTY": empty,
        "RUN": tmp_path / "run",
        "PAGE": tmp_path / "page.html",
    }
    if "TOKENIZER" in line:
        names["TOKENIZER"] = make_tokenizer(tmp_path / "tokenizer", "qwen")
    before = sorted(source.iterdir())
    said = invoke(*(names.get(word, word) for word in line.split()), exit_code=2).stderr
    what = "pages" if "plan" in line else "requests"
    assert f"{empty}: has no {what}; check the path" in said
    assert sorted(source.iterdir()) == before
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_a_request_shorter_than_a_page_counts_as_lost(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    asked = tmp_path / "asked.jsonl"
    alone, with_others = [[5] * SIZE], [[5] * 7, [5] * SIZE, [5] * (2 * SIZE + 1)]
    for requests, tokens in ((alone, SIZE), (with_others, 7 + SIZE + 2 * SIZE)):
        asked.write_text("".join(f"{json.dumps(ids)}\n" for ids in requests))
        gate = ("--token-ids", asked, "--profile", profile, "--min-usable", "0.9")
        for command in (("hits", source), ("prewarm", tmp_path / "target", "--from", source)):
            output = invoke(*command, *gate, "--format", "json", exit_code=4)
            document = output.document
            assert (document["usable_tokens"], document["requested_tokens"]) == (0, tokens)
            assert f"(0 of {tokens})" in output.stderr
    assert document.get("usable_share", 0.0) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)], ids=["", "dry run"])
def test_no_share_of_no_tokens_passes(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path, dry_run: tuple[str, ...]
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text("[]\n")
    gate = ("--token-ids", asked, "--profile", profile, "--min-usable", "0")
    why = "--min-usable 0: no tokens were requested; check the requests"
    prewarm = ("prewarm", tmp_path / "target", "--from", source)
    assert why in invoke("hits", source, *gate, exit_code=4).stderr
    assert why in invoke("-q", *prewarm, *gate, *dry_run, exit_code=4).stderr
    said = invoke(*prewarm, "--token-ids", asked, "--profile", profile, *dry_run).stderr
    assert "100%" not in said
    assert "0 tokens requested" in said


def test_a_dry_run_is_not_judged_by_the_share_of_before_the_copy(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps(list(range(3 * SIZE + 1))))
    rehearsed = ("prewarm", tmp_path / "target", "--from", source, "--dry-run")
    invoke(*rehearsed, "--token-ids", asked, "--profile", profile, "--min-usable", "1")


# --- stores without pages ---

# Command lines for which STORE is a source. CATALOG and STAMP were recorded before.
SOURCES = """
verify STORE
verify STORE --profile PROFILE --checks names,groups,sizes
verify STORE --profile PROFILE --repair quarantine --yes
verify STORE --model nobody/nothing
verify STORE --profile PROFILE --stamp --weights-version 2
verify STORE --shard 0/2 --run RUN
report STORE -o PAGE
migrate STORE DST
migrate STORE DST --dry-run
migrate STORE DST --model nobody/nothing
migrate STORE DST --profile PROFILE --shard 0/2 --run RUN
prewarm DST --from STORE --profile PROFILE --all
prewarm DST --from STORE --profile PROFILE --token-ids ASKED
prewarm DST --from STORE --profile PROFILE --token-ids ASKED --dry-run
prewarm DST --from STORE --profile PROFILE --all --shard 0/2 --run RUN
"""


@pytest.fixture
def words(profile: Path, tmp_path: Path) -> dict[str, Path]:
    """Return the paths that command lines name; STORE does not exist yet."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps(list(range(3 * SIZE + 1))))
    return {
        "STORE": tmp_path / "store",
        "DST": tmp_path / "target",
        "PROFILE": profile,
        "ASKED": asked,
        "RUN": tmp_path / "run",
        "PAGE": tmp_path / "page.html",
    }


def line_of(text: str, words: dict[str, Path]) -> list[object]:
    return [words.get(word, word) for word in text.split()]


@pytest.mark.parametrize("line", SOURCES.strip().splitlines())
def test_a_source_without_pages_is_refused(
    invoke: Invoke, words: dict[str, Path], line: str
) -> None:
    words["STORE"].mkdir()
    arguments = line_of(line, words)
    said = invoke(*arguments, exit_code=3)
    next_step = "check the mount, or give --allow-empty if it may be empty"
    why = f"file://{words['STORE']} has no page; {next_step}"
    assert said == ("", f"hicachectl: {why}\n")
    assert not list(words["STORE"].rglob("*.json*"))
    invoke(*arguments, "--allow-empty")


@pytest.mark.slow
def test_files_that_are_no_pages_do_not_make_a_source(
    invoke: Invoke, words: dict[str, Path]
) -> None:
    words["STORE"].mkdir()
    put(words["STORE"], "notes.txt")
    for line in SOURCES.strip().splitlines():
        said = invoke(*line_of(line, words), exit_code=3).stderr
        assert "only 1 other file, the first named notes.txt; check the path" in said


def test_a_pack_without_pages_is_refused(invoke: Invoke, words: dict[str, Path]) -> None:
    url = f"pack://{words['STORE']}.hcpack?keys=file"
    with open_store(url, create=True) as pack, Arena(1 << 16) as arena:
        pack.attach(arena)
        rows = pa.table({"key": [b"notes.txt"]})
        assert pack.write_from(rows, np.array([0]), np.array([64]), if_absent=True).all_ok
    for command in (("verify", url), ("migrate", url, words["DST"])):
        said = invoke(*command, exit_code=3).stderr
        assert "has no page; check the mount" in said
        assert "only other objects (1), such as notes.txt" in said


@pytest.mark.slow
def test_a_filter_and_a_part_may_match_nothing(invoke: Invoke, words: dict[str, Path]) -> None:
    demo_store(words["STORE"], 1)
    invoke("verify", words["STORE"], "--model", "nobody/nothing")
    invoke("migrate", words["STORE"], words["DST"], "--model", "nobody/nothing")
    for part in range(4):
        invoke("verify", words["STORE"], "--shard", f"{part}/4", "--run", words["RUN"])
    assert "1 page" in invoke("merge", words["RUN"]).stdout


def test_a_run_in_parts_goes_on_when_the_store_is_mounted(
    invoke: Invoke, words: dict[str, Path]
) -> None:
    words["STORE"].mkdir()
    part = ("verify", words["STORE"], "--run", words["RUN"], "--shard")
    for number in range(2):
        invoke(*part, f"{number}/2", "--wait", "0s", exit_code=3)
    words["STORE"].rmdir()
    demo_store(words["STORE"])
    for number in range(2):
        invoke(*part, f"{number}/2")
    assert "8 pages" in invoke("merge", words["RUN"]).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "verify STORE",
        "migrate STORE DST --profile PROFILE",
        "prewarm DST --from STORE --profile PROFILE --all",
    ],
)
def test_a_part_on_a_host_without_the_mount_finds_no_store(
    invoke: Invoke, words: dict[str, Path], command: str
) -> None:
    demo_store(words["STORE"])
    part = (*(words.get(word, word) for word in command.split()), "--run", words["RUN"], "--shard")
    invoke(*part, "0/2")
    mounted = words["STORE"].rename(words["STORE"].with_name("mounted"))
    words["STORE"].mkdir()
    assert "has no page; check the mount" in invoke(*part, "1/2", exit_code=3).stderr
    words["STORE"].rmdir()
    mounted.rename(words["STORE"])
    invoke(*part, "1/2")
    merged = invoke("merge", words["RUN"], "--format", "json").document
    assert (merged["gone"], merged["complete"]) == (0, True)


def test_a_part_whose_objects_were_all_evicted_is_done(
    invoke: Invoke, words: dict[str, Path]
) -> None:
    demo_store(words["STORE"])
    part = ("verify", words["STORE"], "--run", words["RUN"], "--shard")
    invoke(*part, "0/2")
    for path in words["STORE"].glob("[89a-f]*.bin"):
        path.unlink()
    invoke(*part, "1/2")


def test_a_source_that_was_moved_before_is_done(invoke: Invoke, words: dict[str, Path]) -> None:
    demo_store(words["STORE"])
    move = ("migrate", words["STORE"], words["DST"], "--move", "--yes")
    assert "8 pages copied" in invoke(*move).stdout
    assert f"file://{words['STORE']} is empty" in invoke(*move).stderr


def metrics(path: Path) -> dict[str, float]:
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.slow
def test_records_of_a_store_outlive_its_absence(invoke: Invoke, words: dict[str, Path]) -> None:
    """The metrics say that nothing was done; the catalog and the stamp stay."""
    folder = words["STORE"].parent
    catalog, written = folder / "store.parquet", folder / "store.prom"
    demo_store(words["STORE"])
    verify = ("verify", words["STORE"], "--profile", words["PROFILE"], "--catalog", catalog)
    recording = (*verify, "--update-catalog", "--stamp", "--metrics-file", written)
    invoke(*recording)
    before, recorded = metrics(written), catalog.read_bytes()
    stamp = next(words["STORE"].rglob("stamps/*"))
    stamped = stamp.read_bytes()
    for path in words["STORE"].glob("*.bin"):
        path.unlink()
    invoke(*recording, exit_code=3)
    after = metrics(written)
    names = ("objects", "complete", "last_success_timestamp_seconds")
    found = [after[f"hicachectl_verify_{name}"] for name in names]
    assert found == [0, 0, before["hicachectl_verify_last_success_timestamp_seconds"]]
    assert (catalog.read_bytes(), stamp.read_bytes()) == (recorded, stamped)
    said = invoke("-q", *recording, "--allow-empty", exit_code=4).stderr
    assert f"{catalog}: not written, because its entries would fall from " in said
    assert " to 0; " in said
    assert metrics(written)["hicachectl_verify_last_success_timestamp_seconds"] == found[2]
    assert catalog.read_bytes() == recorded
    invoke(*recording, "--allow-empty", "--allow-shrink")
    assert catalog.read_bytes() != recorded


def test_metrics_of_a_prewarm_say_that_its_source_has_no_pages(
    invoke: Invoke, words: dict[str, Path], tmp_path: Path
) -> None:
    words["STORE"].mkdir()
    written = tmp_path / "warm.prom"
    line = line_of("prewarm DST --from STORE --profile PROFILE --all", words)
    invoke(*line, "--metrics-file", written, exit_code=3)
    found = metrics(written)
    names = ("succeeded", "complete", "requested_tokens")
    assert [found[f"hicachectl_prewarm_{name}"] for name in names] == [0, 0, 0]
    assert f'store="file://{words["DST"]}"' in written.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True], ids=["one process", "parts"])
@pytest.mark.parametrize(("removed", "exit_code"), [(4, 0), (5, 4)])
def test_a_catalog_that_would_lose_more_than_half_stays(
    invoke: Invoke, words: dict[str, Path], *, divided: bool, removed: int, exit_code: int
) -> None:
    catalog = words["STORE"].with_name("store.parquet")
    words["STORE"].mkdir()
    for number in range(8):
        put(words["STORE"], f"{number:064x}_m_0_1.bin")
    verify: tuple[object, ...] = ("verify", words["STORE"], "--catalog", catalog)
    verify += ("--update-catalog",)
    invoke(*verify)
    before = catalog.read_bytes()
    for number in range(removed):
        (words["STORE"] / f"{number:064x}_m_0_1.bin").unlink()
    if divided:
        for number in range(2):
            invoke(*verify, "--shard", f"{number}/2", "--run", words["RUN"])
        verify = ("merge", words["RUN"], "--catalog", catalog)
    said = invoke("-q", *verify, exit_code=exit_code).stderr
    assert (catalog.read_bytes() == before) == bool(exit_code)
    if exit_code:
        assert f"{catalog}: not written, because its entries would fall from 8 to 3" in said
        invoke(*verify, "--allow-shrink")
        assert catalog.read_bytes() != before


def test_the_python_interface_refuses_a_source_without_pages(
    words: dict[str, Path], tmp_path: Path
) -> None:
    asked = hicachectl.hash_requests([list(range(3 * SIZE + 1))], PROFILE)
    warming = hicachectl.PrewarmRequest(profile=PROFILE, requests=asked)
    words["STORE"].mkdir()
    with (
        hicachectl.open_store(str(words["STORE"])) as store,
        hicachectl.open_store(str(words["DST"]), create=True) as target,
    ):
        calls: list[tuple[Callable[[Any], object], Any]] = [
            (partial(hicachectl.verify, store), hicachectl.VerifyRequest()),
            (partial(hicachectl.migrate, store, target), hicachectl.MigrationRequest()),
            (partial(hicachectl.plan, store, target), warming),
            (partial(hicachectl.prewarm, store, target), warming),
        ]
        for call, request in calls:
            with pytest.raises(hicachectl.EmptyStore, match="has no page; check the mount"):
                call(request)
            call(replace(request, allow_empty=True))
        measured = hicachectl.hits(store, hicachectl.HitsRequest(requests=asked, profile=PROFILE))
        assert measured.document["usable_share"] == 0
