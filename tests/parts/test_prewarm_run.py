"""`prewarm --shard` and `merge` do and say what `prewarm` in one process does and says."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.base import Result, Status
from hicachectl.backends.file.store import FileStore
from tests.conftest import Invoke  # noqa: TC001 - pytest reads it
from tests.killed import Runner
from tests.move.migrations import MODEL, demo_store, profile_file
from tests.parts.runs import CommandRun
from tests.prewarming.test_cli import SIZE, prompts
from tests.prewarming.test_prewarm import HASHES, SEED, tokens
from tests.speed import ROUNDS, slow, some
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


PAGES = 12  # of the demo's chain; pages 3, 7 and 11 have states
_OF_ONE_RUN = ("destination", "seconds", "listed", "parts", "missing_parts")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a source with a truncated object and a page that is not whole, not to be changed."""
    store = demo_store(tmp_path_factory.mktemp("origin") / "source", PAGES)
    os.truncate(store / f"{HASHES[5]}_{MODEL}_1_2.bin", 7)
    (store / f"{HASHES[9]}_{MODEL}_0_2.bin").unlink()
    return store


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a source without damage, not to be changed."""
    return demo_store(tmp_path_factory.mktemp("intact") / "source", PAGES)


class Runs(CommandRun):
    """A destination warmed in parts, and one warmed at once."""

    def __init__(self, invoke: Invoke, folder: Path, source: Path, *options: object) -> None:
        self.target = folder / "parts"
        self.whole_target = folder / "whole"
        profile = profile_file(folder / "p.toml")
        self.options = ("--from", source, "--profile", profile, *options)
        super().__init__(invoke, folder / "run", "prewarm", self.target, *self.options)

    def whole(self, *more: object, exit_code: int = 0) -> dict[str, Any]:
        """Warm at once; return the document."""
        return self.invoke(
            "prewarm", self.whole_target, *self.options, *more, exit_code=exit_code
        ).document

    def assert_equal(self, merged: dict[str, Any], whole: dict[str, Any]) -> None:
        """Assert that both runs report and wrote the same."""
        assert comparable(merged) == comparable(whole)
        assert _bytes(self.target) == _bytes(self.whole_target)


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in _OF_ONE_RUN}


def _bytes(store: Path) -> dict[str, bytes]:
    """Return the names and bytes of all files below a store, also of unfinished ones."""
    files = (path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def _partly_warm(intact: Path, *targets: Path) -> None:
    """Give destinations an object of another size, and a page that is damaged in the source."""
    for target in targets:
        target.mkdir()
        (target / f"{HASHES[2]}_{MODEL}_0_2.bin").write_bytes(b"another size")
        _copy_page(intact, target, HASHES[5])


def _copy_page(source: Path, target: Path, page: str) -> None:
    for path in source.glob(f"{page}*"):
        shutil.copy2(path, target)


def _trace(path: Path, lengths: Iterable[int]) -> Path:
    ids = [*tokens(), 1]
    rows = [
        {"timestamp": 10 * n, "token_ids": ids[: pages * SIZE + 1]}
        for n, pages in enumerate(lengths)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


MANY = 2 * PAGES
TOKENS, EVERY, LISTED = ("--token-ids",), ("--all",), ("--pages",)
RESHAPED = ("--trace", "--to-tp", 4, "--to-layout", "page_first_direct")
CUT = ("--trace", "--budget", "500KiB")
# Each input as one part and as three, and two of them as many parts.
DIVIDED = some(
    itertools.product((TOKENS, RESHAPED, CUT, EVERY, LISTED), (1, 3, MANY)),
    *itertools.product((TOKENS, RESHAPED, CUT, EVERY, LISTED), (1, 3)),
    (CUT, MANY),
    (LISTED, MANY),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "parts"),
    [slow(*case) if case[-1] == MANY else case for case in DIVIDED],
    ids=lambda value: str(value) if isinstance(value, int) else "".join(map(str, value)),
)
def test_merged_parts_say_what_one_process_says(
    invoke: Invoke,
    origin: Path,
    intact: Path,
    tmp_path: Path,
    given: tuple[object, ...],
    parts: int,
) -> None:
    """Document, exit status and bytes are equal for any input, number and order of parts."""
    inputs = {
        "--token-ids": [prompts(tmp_path / "asked.jsonl", 4, 8, 12)],
        "--trace": [_trace(tmp_path / "trace.jsonl", (4, 12, 4, 8, 4))],
        "--pages": [tmp_path / "pages"],
        "--all": [],
    }
    (tmp_path / "pages").write_text("".join(f"{page}\n" for page in [*HASHES[::-1], "0" * 64]))
    name, *options = given
    runs = Runs(invoke, tmp_path, origin, name, *inputs[str(name)], *options)
    if "--to-tp" not in options:
        _partly_warm(intact, runs.target, runs.whole_target)
    whole = runs.whole(exit_code=4)
    runs.all(parts)
    merged = runs.merged(exit_code=4).document
    runs.assert_equal(merged, whole)
    assert whole["copied_pages"]
    assert (merged["parts"], merged["missing_parts"]) == (parts, [])


@pytest.mark.slow
def test_the_gate_and_the_table_are_those_of_one_process(
    invoke: Invoke, intact: Path, tmp_path: Path
) -> None:
    """merge exits with 4 below --min-usable, and prints the same lines and rows."""
    asked = prompts(tmp_path / "asked.jsonl", 8, 10)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked, "--min-usable", 0.9)
    runs.all(3, range(3))
    runs.whole(exit_code=4)
    for output_format in ("table", "csv"):
        options = ("--format", output_format)
        merged = invoke("merge", runs.path, "--again", *options, exit_code=4)
        again = invoke("prewarm", runs.whole_target, *runs.options, *options, exit_code=4)
        assert len(merged.stdout.splitlines()) == len(again.stdout.splitlines())
        assert "usable" in merged.stderr.splitlines()[-1]
    metrics = tmp_path / "m.prom"
    invoke("merge", runs.path, "--again", "--metrics-file", metrics, exit_code=4)
    assert "hicachectl_prewarm_" in metrics.read_text()


@pytest.mark.slow
def test_the_best_pages_are_the_last_to_be_evicted(
    invoke: Invoke, intact: Path, tmp_path: Path
) -> None:
    """The last part touches all pages, worst first, also those that the destination had."""
    asked = prompts(tmp_path / "asked.jsonl", 4, 8, 12)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked)
    runs.target.mkdir()
    _copy_page(intact, runs.target, HASHES[0])
    runs.all(3)
    times = {name: mtime for name, (_, mtime) in contents(runs.target).items()}
    newest = [max(t for name, t in times.items() if page in name) for page in HASHES]
    assert newest == sorted(newest, reverse=True)
    assert runs.merged().document["already_there"] == 1


@pytest.mark.slow
def test_a_deadline_counts_from_the_plan_and_keeps_what_is_usable(
    invoke: Invoke, tmp_path: Path
) -> None:
    """With 16 slices for each process, a deadline costs less than a tenth of the usable tokens.

    Two processes have done 16 of 32 slices, and the first half of a slice each: half slices
    0 to 32 and 34 of 64. Then the run is made older than the deadline.
    """
    parts, pages = 64, 128
    source = demo_store(tmp_path / "source", pages)
    ids = np.random.default_rng(SEED).integers(0, 150_000, pages * SIZE).tolist()
    asked = tmp_path / "asked"
    requests = [[*ids, 1][: length * SIZE + 1] for length in range(4, pages + 1, 4)]
    asked.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    runs = Runs(invoke, tmp_path, source, "--token-ids", asked, "--deadline", "1h")
    runs.all(parts, [*range(33), 34])
    in_time = _bytes(runs.target)
    manifest = runs.path / "run.json"
    begun = manifest.stat().st_mtime
    os.utime(manifest, (begun - 7200, begun - 7200))
    runs.all(parts, [33, 33, *range(35, parts)])
    merged = runs.merged().document
    assert _bytes(runs.target) == in_time
    assert (merged["complete"], merged["stopped_by"]) == (False, "deadline")
    whole = runs.whole("--budget", merged["bytes"])
    assert merged["usable_tokens"] >= 0.9 * whole["usable_tokens"] > 0
    assert whole["stopped_by"] == "budget"


@pytest.mark.slow
def test_a_missing_part_and_a_missing_end_are_named(
    invoke: Invoke, intact: Path, tmp_path: Path
) -> None:
    """Without a part's result, or the count at the end, the run is not complete."""
    asked = prompts(tmp_path / "asked.jsonl", 12)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked)
    runs.all(3, [0, 2])
    merged = runs.merged(exit_code=4).document
    assert (merged["complete"], merged["missing_parts"]) == (False, [1])
    said = invoke("merge", runs.path, exit_code=4)
    assert "there is no result of part 1 of 3" in said.stderr
    assert "complete: False" in said.stdout
    runs.part(1, 3)
    (runs.path / "finish.json").unlink()
    merged = runs.merged(exit_code=4).document
    assert (merged["complete"], merged["missing_parts"]) == (False, [])
    assert "run any part again" in invoke("merge", runs.path, exit_code=4).stderr
    assert "was done at 20" in runs.part(0, 3)
    runs.assert_equal(runs.merged().document, runs.whole())


@pytest.mark.slow
def test_a_part_stops_if_the_best_pages_are_evicted(
    invoke: Invoke, intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that evicts the pages of the first part ends, and merge estimates the capacity."""
    asked = prompts(tmp_path / "asked.jsonl", 12)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked)
    runs.part(0, 3)
    copy_from = FileStore.copy_from

    def evicting(store: FileStore, *arguments: Any, **options: Any) -> Any:
        result = copy_from(store, *arguments, **options)
        for name in contents(runs.target):
            if name.startswith(HASHES[0]):
                (runs.target / name).unlink()
        return result

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "copy_from", evicting)
        runs.part(1, 3)
    runs.part(2, 3)
    merged = runs.merged().document
    assert (merged["complete"], merged["stopped_by"]) == (False, "destination evicts")
    assert "it holds about" in invoke("merge", runs.path, "--again").stderr


@pytest.mark.slow
def test_a_part_without_room_is_not_complete(
    invoke: Invoke, intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that finds no room exits with 4; with room, another run copies the rest."""
    asked = prompts(tmp_path / "asked.jsonl", 12)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked)
    copy_from = FileStore.copy_from

    def full(
        store: FileStore, source: Any, origins: Any, rows: Any, *rest: Any, **more: Any
    ) -> Any:
        names = [key.decode() for key in rows.column("key").to_pylist()]
        if not any(name.startswith(HASHES[5]) for name in names):
            return copy_from(store, source, origins, rows, *rest, **more)
        return Result(np.full(len(rows), Status.FULL, dtype=np.uint8), {})

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "copy_from", full)
        said = runs.part(0, 2, "--buffer-bytes", "256KiB", exit_code=4)
        assert "Part 0 of 2 is not complete; to complete the work" in said
        assert "Stopped: destination full" in said
        runs.part(1, 2)
        assert runs.merged(exit_code=4).document["stopped_by"] == "destination full"
    second = CommandRun(invoke, tmp_path / "second", *runs.command)
    second.all(2)
    assert second.merged().document["complete"]
    whole = runs.whole()
    assert second.merged().document["usable_tokens"] == whole["usable_tokens"]
    assert _bytes(runs.target) == _bytes(runs.whole_target)


@pytest.mark.slow
def test_pages_written_since_the_plan_are_not_copied_again(
    invoke: Invoke, intact: Path, tmp_path: Path
) -> None:
    """A page that a server wrote after the plan counts as there; another object as a conflict."""
    asked = prompts(tmp_path / "asked.jsonl", 8, 12)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked)
    runs.part(0, 2)
    _copy_page(intact, runs.target, HASHES[10])
    other = f"{HASHES[11]}_{MODEL}_1_2.bin"
    (runs.target / other).write_bytes(b"another size")
    runs.part(1, 2)
    merged = runs.merged(exit_code=4).document
    assert (merged["copied_pages"], merged["already_there"]) == (PAGES - 2, 1)
    assert (merged["failed"], merged["usable_tokens"]) == (1, 16 * SIZE)
    (problem,) = merged["problems"]
    assert (problem["page"], problem["key"]) == (HASHES[11], other)
    said = runs.invoke("merge", runs.path, "--again", exit_code=4).stderr
    assert f"{other}: 12 bytes in the destination" in said
    assert "migrate --if-exists overwrite" in said


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Start the process that forks the killed ones."""
    with Runner(tmp_path_factory.mktemp("runner")) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 2], ids=["lister", "finisher"])
def test_a_killed_part_is_done_again(
    invoke: Invoke, intact: Path, tmp_path: Path, runner: Runner, killed: int
) -> None:
    """A part killed at any step, and run again, leaves what an undisturbed run leaves."""
    asked = prompts(tmp_path / "asked.jsonl", 4, 8, 12)
    undisturbed = Runs(invoke, tmp_path, intact, "--token-ids", asked)
    whole = undisturbed.whole()
    others, tries = [part for part in range(3) if part != killed], 3 * ROUNDS

    def run_of(number: int, kill: int | None) -> tuple[Runs, int]:
        folder = tmp_path / f"try{number}"
        folder.mkdir()
        runs = Runs(invoke, folder, intact, "--token-ids", asked)
        if killed:
            runs.all(3, others)
        arguments = (*runs.arguments(killed, 3), "--jobs", 1)
        at = None if kill is None else ("steps", kill)
        return runs, runner.run(*arguments, home=folder, kill=at).steps  # type: ignore[arg-type]

    _, steps = run_of(0, None)
    assert steps > 20
    for number in range(1, tries + 1):
        runs, _ = run_of(number, number * steps // tries)
        if not (runs.path / "finish.json").exists():
            runs.part(killed, 3)
        if not killed:
            runs.all(3, others)
        merged = comparable(runs.merged().document)
        # The document lacks the copies of killed attempts.
        copied = merged["copied_pages"] + merged["already_there"]
        assert copied == whole["copied_pages"] + whole["already_there"]
        own = ("copied_pages", "already_there", "bytes")
        assert merged | {name: whole[name] for name in own} == comparable(whole)
        assert _bytes(runs.target) == _bytes(undisturbed.whole_target)


def test_a_plan_without_stores_has_no_parts(invoke: Invoke, tmp_path: Path) -> None:
    """--trace without stores plans for the whole run."""
    trace = _trace(tmp_path / "trace.jsonl", (4,))
    shard = ("--shard", "0/2", "--run", tmp_path / "run")
    refused = invoke("prewarm", "--trace", trace, "--dry-run", *shard, exit_code=2)
    assert "--dry-run cannot be combined with --shard" in refused.stderr


def test_a_pack_is_no_destination_of_parts(invoke: Invoke, intact: Path, tmp_path: Path) -> None:
    """Several processes cannot write one pack, so none of them begins it."""
    asked = prompts(tmp_path / "asked.jsonl", 12)
    pack = tmp_path / "new.hcpack"
    command = ("prewarm", f"pack://{pack}", "--from", intact, "--token-ids", asked)
    profile = profile_file(tmp_path / "p.toml")
    run = CommandRun(invoke, tmp_path / "run", *command, "--profile", profile)
    assert "several processes cannot write one pack" in run.part(0, 2, exit_code=2)
    assert not pack.exists()
    assert not run.path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--deadline", "5m"], "--deadline none, but this command has 300.0"),
        (["--budget", "1MiB"], "--budget none, but this command has 1048576"),
        (["--to-tp", "4"], "destination's profile: tp 2, but this command has 4"),
        (["--min-usable", "0.5"], "--min-usable none, but this command has 0.5"),
    ],
)
def test_other_options_are_refused(
    invoke: Invoke, intact: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    """A part with other options than the run's ends with one line that names both values."""
    asked = prompts(tmp_path / "asked.jsonl", 12)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked)
    runs.part(0, 2)
    refused = runs.part(1, 2, *options, exit_code=2).splitlines()[-1]
    assert said in refused
    assert "was begun with" in refused
    runs.part(1, 2)
    assert runs.merged().document["complete"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pages", "objects", "names", "chains"])
def test_a_damaged_plan_is_named(invoke: Invoke, intact: Path, tmp_path: Path, name: str) -> None:
    """A truncated file of the plan is named, with the next step."""
    asked = prompts(tmp_path / "asked.jsonl", 12)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked)
    runs.part(0, 2)
    (table,) = runs.path.glob(f"listing-*/{name}.parquet")
    table.write_bytes(table.read_bytes()[:-9])
    said = runs.part(1, 2, exit_code=2)
    assert table.name in said
    assert "give another --run" in said


def test_the_rate_is_shared(invoke: Invoke, intact: Path, tmp_path: Path) -> None:
    """Each part says that its rate is a share of --bwlimit."""
    asked = prompts(tmp_path / "asked.jsonl", 12)
    runs = Runs(invoke, tmp_path, intact, "--token-ids", asked, "--bwlimit", "1GiB")
    assert "Each of the 2 parts takes an equal share of --bwlimit" in runs.part(0, 2)
