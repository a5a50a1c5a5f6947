"""`verify --shard` and `merge` say what `verify` of the whole store says."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hicachectl.io.pipeline import Pace
from hicachectl.verification.verify import PartCheck, check_part
from tests.conftest import Invoke  # noqa: TC001 - pytest reads it
from tests.killed import Runner
from tests.move.migrations import demo_store, profile_file
from tests.move.repairs import DSA, dsa_store, indexer, kv, shorten, stick
from tests.parts.runs import CommandRun
from tests.speed import ROUNDS, slow
from tests.verification.damages import PAGES, at_once, cut, flipped, lacking, objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicachectl.verification.request import VerifyRequest


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with all kinds of damage, not to be changed."""
    store = demo_store(tmp_path_factory.mktemp("damaged") / "store", PAGES)
    at_once(store)
    return store


@pytest.fixture
def own(damaged: Path, tmp_path: Path) -> Path:
    """Return a copy of the damaged store."""
    return shutil.copytree(damaged, tmp_path / "store")


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal for one process and for parts."""
    kept = {name: value for name, value in document.items() if name not in _OF_ONE}
    return kept | {"findings": sorted(document["findings"], key=repr)}


_OF_ONE = {"seconds", "listed", "parts", "missing_parts", "dry_run"}


def verified(invoke: Invoke, run: Path, store: Path, *options: object) -> CommandRun:
    """Return a run of `verify` in parts that has not begun."""
    return CommandRun(invoke, run, "verify", store, *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "parts"),
    [(False, 1), (False, PAGES), (True, 1), (True, 3), slow(True, PAGES)],
)
def test_merged_parts_say_what_one_process_says(
    invoke: Invoke, damaged: Path, tmp_path: Path, profile: bool, parts: int
) -> None:
    """Findings, counts, sums and exit status are equal, for any number and order of parts."""
    options: list[object] = ["--grace", "2h"]
    options += ["--profile", profile_file(tmp_path / "p.toml")] if profile else []
    options += ["--sample", "60%", "--sample-slice", "0"] if parts == 1 else []
    whole = invoke("verify", damaged, *options, "--format", "json", exit_code=4)
    run = verified(invoke, tmp_path / "run", damaged, *options)
    run.all(parts)
    merged = run.merged(exit_code=4).document
    assert comparable(merged) == comparable(whole.document)
    assert merged["counts"]["truncated" if profile else "ambiguous-key"]
    assert (merged["parts"], merged["missing_parts"]) == (parts, [])


@pytest.mark.slow
def test_a_missing_part_makes_the_result_incomplete(
    invoke: Invoke, damaged: Path, tmp_path: Path
) -> None:
    """merge names missing parts, and ends with 4 also where findings fail nothing."""
    run = verified(invoke, tmp_path / "run", damaged, "--fail-on", "never")
    run.part(0, 3)
    merged = run.merged(exit_code=4).document
    assert (merged["complete"], merged["missing_parts"]) == (False, [1, 2])
    run.part(1, 3)
    run.part(2, 3)
    assert run.merged().document["complete"]


@pytest.mark.slow
def test_why_nothing_was_checked_is_true_of_the_store(
    invoke: Invoke, damaged: Path, tmp_path: Path
) -> None:
    """A part without objects does not tell that the store has none: the largest part tells."""
    options = ("--model", "no/such")
    run = verified(invoke, tmp_path / "a run", damaged, *options)
    said = [run.part(part, PAGES) for part in range(PAGES)]
    assert f"hicachectl merge '{run.path}'" in said[0]
    shares = json.loads((run.path / "run.json").read_text())["published"]["shares"]
    assert not all(shares), "every part has objects"
    merged = invoke("merge", run.path)
    known = "--model no/such: no page matches; models in the store: "
    assert known in invoke("verify", damaged, *options).stderr
    assert known in merged.stderr
    assert "; this is counted in the largest part only" in merged.stderr


def test_a_part_without_pages_does_not_tell_that_the_store_has_none(
    invoke: Invoke, tmp_path: Path
) -> None:
    run = verified(invoke, tmp_path / "run", demo_store(tmp_path / "store"))
    run.part(0, 8)
    shares = json.loads((run.path / "run.json").read_text())["published"]["shares"]
    assert not shares[0]
    assert any(shares)
    told = invoke("merge", run.path, exit_code=4).stderr
    assert "no part with a result has a page" in told
    assert "check the path" not in told


@pytest.mark.slow
def test_the_process_of_the_last_part_merges(invoke: Invoke, damaged: Path, tmp_path: Path) -> None:
    """Each process does its part, then merges if all are done; nothing is merged twice."""
    run = CommandRun(invoke, tmp_path / "run", "verify", damaged)
    merge = ("merge", run.path, "--if-complete", "--format", "json")
    (tmp_path / "run").mkdir()
    assert "has no run.json" in invoke(*merge, exit_code=2).stderr
    for part, waits_for in enumerate(["parts 1-2", "part 2"]):
        run.part(part, 3)
        output = invoke(*merge)
        said = f"run: not merged, because there is no result of {waits_for} of 3 yet"
        assert said in output.stderr
        assert output.stdout == ""
    run.part(2, 3)
    document = invoke(*merge, exit_code=4).document
    assert (document["parts"], document["missing_parts"]) == (3, [])
    output = invoke(*merge)
    assert "was merged before" in output.stderr
    assert output.stdout == ""
    refused = invoke("merge", run.path, "--if-complete", "--again", exit_code=2).stderr
    assert "--if-complete cannot be combined with --again" in refused


def test_merge_writes_metrics(invoke: Invoke, damaged: Path, tmp_path: Path) -> None:
    """The metrics of a merged run have the labels and values of a run in one process."""
    options = ("--profile", profile_file(tmp_path / "p.toml"), "--fail-on", "error")
    run = verified(invoke, tmp_path / "run", damaged, *options)
    run.all(2)
    merged = run.merged("--metrics-file", tmp_path / "m.prom", exit_code=4).document
    lines = (tmp_path / "m.prom").read_text().splitlines()
    labels = f'store="file://{damaged}"'
    assert f"hicachectl_verify_last_run_timestamp_seconds{{{labels}}} {merged['listed']}" in lines
    assert f"hicachectl_verify_objects{{{labels}}} {merged['objects']}" in lines
    assert f"hicachectl_verify_last_success_timestamp_seconds{{{labels}}} 0.0" in lines


@pytest.mark.slow
def test_the_second_night_is_told_that_the_run_is_finished(
    invoke: Invoke, own: Path, tmp_path: Path
) -> None:
    """A schedule that uses a directory twice fails; it writes no document and no metrics again."""
    run = verified(invoke, tmp_path / "run", own, "--fail-on", "never")
    metrics = tmp_path / "m.prom"
    run.all(2)
    invoke("merge", run.path, "--metrics-file", metrics)
    first = metrics.read_text()
    for path in objects(own, "_0_2.bin")[:5]:
        os.truncate(path, 100)
    for part in range(2):
        assert "is finished; give a new --run, such as --run" in run.part(part, 2, exit_code=2)
    refused = invoke("merge", run.path, "--metrics-file", metrics, exit_code=2)
    assert (refused.stdout, metrics.read_text()) == ("", first)
    assert "was merged before" in refused.stderr
    invoke("merge", run.path, "--again", "--metrics-file", metrics)
    assert metrics.read_text() == first


@pytest.mark.slow
def test_the_lister_decides_for_all_parts(
    invoke: Invoke, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--since, the slice of a sample and the time of the listing are those of part 0."""
    now = time.time()
    for number, path in enumerate(objects(own, "")):
        os.utime(path, (now, now - number % 30 * 3600 - 60))
    profile = profile_file(tmp_path / "p.toml")
    options = ("--profile", profile, "--since", "20h", "--sample", "50%", "--grace", "2h")

    def at(seconds: float) -> None:
        monkeypatch.setattr("time.time", lambda: seconds)
        monkeypatch.setattr("time.time_ns", lambda: int(seconds * 1e9))

    at(now)
    whole = invoke("verify", own, *options, "--format", "json", exit_code=4).document
    assert whole["in_flight"]
    run = verified(invoke, tmp_path / "run", own, *options)
    run.part(0, 2)
    at(now + 5 * 86_400)
    run.part(1, 2)
    assert comparable(run.merged(exit_code=4).document) == comparable(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--grace", "2h"], "--grace 60.0, but this command has 7200.0"),
        (["--checks", "names"], "--checks names,groups"),
        (["--sample", "5%"], "--sample none, but this command has 1/20"),
        (["--fail-on", "error"], "--fail-on warning, but this command has error"),
        (["--profile", "PROFILE"], "profile: model none, but this command has demo"),
        (["STORE"], "store file://"),
    ],
)
def test_other_options_are_refused(
    invoke: Invoke, damaged: Path, own: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    """A part with other options than the run's ends with one line that names both values."""
    run = verified(invoke, tmp_path / "run", damaged)
    run.part(0, 2)
    if options == ["STORE"]:
        run = verified(invoke, tmp_path / "run", own)
        options = []
    given = [profile_file(tmp_path / "p.toml") if one == "PROFILE" else one for one in options]
    refused = run.part(1, 2, *given, exit_code=2)
    assert said in refused.splitlines()[-1]
    assert "was begun with" in refused.splitlines()[-1]
    assert not (tmp_path / "run/parts/00001.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["kubernetes", "slurm"])
def test_a_scheduler_names_the_part(
    invoke: Invoke,
    damaged: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: str,
) -> None:
    """--shard /N takes the part from Kubernetes, or from Slurm less the first task."""
    for part in range(2):
        if scheduler == "kubernetes":
            monkeypatch.setenv("JOB_COMPLETION_INDEX", str(part))
        else:
            monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(5 + part))
            monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "5")
        run = ("--shard", "/2", "--run", tmp_path / "run")
        said = invoke("verify", damaged, *run).stderr
        assert f"Part {part} of 2 is done" in said
    assert invoke("merge", tmp_path / "run", exit_code=4).stdout


def entries(catalog: Path) -> list[dict[str, Any]]:
    """Return a catalog's entries in one order, without times of runs."""
    rows = pq.read_table(catalog).drop_columns(["first_seen_ns", "last_verified_ns"]).to_pylist()
    return sorted(rows, key=lambda row: row["key"])


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 5])
def test_merge_writes_the_catalog_of_one_process(
    invoke: Invoke, own: Path, tmp_path: Path, parts: int
) -> None:
    """Parts compare with a catalog, and merge writes the one that one process would write."""
    before, after = tmp_path / "before.parquet", tmp_path / "after.parquet"
    options = ("--grace", "2h", "--profile", profile_file(tmp_path / "p.toml"))
    recorded = (*options, "--catalog", before, "--update-catalog")
    run = verified(invoke, tmp_path / "first", own, *recorded)
    run.all(parts)
    assert not before.exists()
    run.merged("--catalog", before, exit_code=4)
    whole = tmp_path / "whole.parquet"
    chosen = ("--catalog", whole, "--update-catalog", "--format", "json")
    invoke("verify", own, *options, *chosen, exit_code=4)
    assert entries(before) == entries(whole)
    assert len(entries(before)) > PAGES

    flipped(own)
    objects(own, "_")[0].unlink()
    run = verified(invoke, tmp_path / "second", own, *recorded)
    before_bytes = before.read_bytes()
    run.all(parts)
    merged = run.merged("--catalog", after, exit_code=4).document
    assert before.read_bytes() == before_bytes
    document = invoke("verify", own, *options, *chosen, exit_code=4).document
    assert comparable(merged) == comparable(document)
    assert merged["counts"]["re-recorded"]
    assert entries(after) == entries(whole)


@pytest.mark.slow
def test_merge_writes_no_catalog_of_some_parts(
    invoke: Invoke, damaged: Path, tmp_path: Path
) -> None:
    """No catalog is written that lacks a part's entries, or of a run that recorded none."""
    catalog = tmp_path / "c.parquet"
    run = verified(invoke, tmp_path / "run", damaged, "--catalog", catalog, "--update-catalog")
    run.part(0, 2)
    said = invoke("merge", run.path, "--catalog", catalog, exit_code=4).stderr
    assert f"{catalog}: not written, because parts of the run are missing" in said
    other = verified(invoke, tmp_path / "other", damaged)
    other.part(0, 1)
    said = invoke("merge", other.path, "--catalog", catalog, exit_code=2).stderr
    assert "the run recorded no digests" in said
    missing = verified(invoke, tmp_path / "missing", damaged, "--catalog", catalog)
    assert "read the catalog" in missing.part(0, 1, exit_code=2)
    assert not catalog.exists()


@pytest.mark.slow
def test_merge_writes_nothing_into_the_run(invoke: Invoke, damaged: Path, tmp_path: Path) -> None:
    """Each file option that names a place in the run directory is refused; the run stays whole."""
    catalog = ("--catalog", tmp_path / "c.parquet", "--update-catalog", "--fail-on", "never")
    run = verified(invoke, tmp_path / "run", damaged, *catalog)
    run.part(0, 1)
    (tmp_path / "link").symlink_to(run.path)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    for option in ("--catalog", "--metrics-file", "--output"):
        for name in ("run/run.json", "run/parts/00000/new", "link/new"):
            refused = invoke("merge", run.path, option, tmp_path / name, exit_code=2).stderr
            # Two options refuse a file of the run before its place is looked at.
            why = "" if name.endswith(".json") else "is in the run directory"
            assert f"{tmp_path / name}: {why}" in refused
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert run.merged("--catalog", tmp_path / "c.parquet").document["complete"]


@pytest.mark.slow
def test_a_part_that_the_time_limit_cut_is_not_complete(
    invoke: Invoke, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part and merge say so; run again, the part ends as it ended."""
    options = ("--profile", profile_file(tmp_path / "p.toml"), "--grace", "2h")
    limits = ("--time-limit", "1h", "--bwlimit", "1GiB")
    run = verified(invoke, tmp_path / "run", damaged, *options, *limits)
    with monkeypatch.context() as patch:
        patch.setattr(Pace, "wait", lambda *given, **named: False)  # as after the limit
        said = run.part(0, 2)
    assert "Part 0 of 2 is not complete; to complete the work, run all parts with another" in said
    again = run.part(0, 2)
    assert "Part 0 of 2 was done at 20" in again
    assert "and is not complete; to complete the work" in again
    run.part(1, 2)
    cut = run.merged(exit_code=4)
    assert (cut.document["complete"], cut.document["stopped_by"]) == (False, "deadline")
    assert "not complete: part 0 of 2; to complete the work" in cut.stderr


@pytest.mark.parametrize(("column", "value"), [("severity", "bogus"), ("code", None)])
def test_other_findings_are_refused(
    invoke: Invoke, damaged: Path, tmp_path: Path, column: str, value: str | None
) -> None:
    """Findings that no release writes end merge with one line that names the result."""
    run = verified(invoke, tmp_path / "run", damaged)
    run.all(1)
    record = run.path / "parts/00000.json"
    document = json.loads(record.read_text())
    file = document["tables"]["found"]
    path = record.parent / file["name"]
    table = pq.read_table(path)
    at = table.schema.get_field_index(column)
    pq.write_table(table.set_column(at, column, pa.array([value] * len(table), pa.string())), path)
    record.write_text(
        json.dumps(document | {"tables": {"found": file | {"nbytes": path.stat().st_size}}})
    )
    said = invoke("merge", run.path, exit_code=2).stderr
    assert "00000.json: has findings without a known severity or a code; remove 00000" in said


def test_a_truncated_result_is_named(invoke: Invoke, damaged: Path, tmp_path: Path) -> None:
    """A result that is not whole is refused with the file to remove."""
    run = verified(invoke, tmp_path / "run", damaged)
    run.all(2)
    (table,) = (tmp_path / "run/parts").glob("00001-*-found.parquet")
    table.write_bytes(table.read_bytes()[:-9])
    refused = invoke("merge", tmp_path / "run", exit_code=2).stderr
    assert table.name in refused
    assert "remove 00001.json and run part 1 again" in refused


def remains(store: Path) -> dict[str, bytes]:
    """Return the objects of a store."""
    return {path.name: path.read_bytes() for path in objects(store, "")}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("mode", ["quarantine", "delete"])
def test_a_repair_in_parts_is_that_of_one_process(
    invoke: Invoke, tmp_path: Path, mode: str, parts: int
) -> None:
    """The same pages leave the store, whole pages only, and restore puts them back."""
    store = demo_store(tmp_path / "store", PAGES)
    cut(store)
    lacking(store)
    before = remains(store)
    twin = shutil.copytree(store, tmp_path / "twin", copy_function=shutil.copy2)
    profile = profile_file(tmp_path / "p.toml")
    options = ("--profile", profile, "--repair", mode, "--repair-code", "missing-rank")
    whole = invoke("verify", twin, *options, "--yes", "--format", "json", exit_code=4).document
    rehearsed = verified(invoke, tmp_path / "rehearsed", store, *options, "--dry-run")
    rehearsed.all(parts)
    assert rehearsed.merged(exit_code=4).document["dry_run"]
    assert remains(store) == before

    run = verified(invoke, tmp_path / "run", store, *options, "--yes")
    run.all(parts)
    merged = run.merged(exit_code=4).document
    whole["store"] = merged["store"]
    assert comparable(merged) == comparable(whole)
    assert merged["repaired"] > 2
    assert remains(store) == remains(twin) != before
    if mode == "quarantine":
        quarantine = store / ".hicachectl/quarantine"
        if parts > 1:
            assert len(list(quarantine.iterdir())) > 1  # a run of each part with bad pages
        invoke("restore", quarantine, store, "--yes")
        assert remains(store) == before


def test_a_part_that_left_a_page_is_not_complete(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that cannot be removed makes the part not complete; the next run removes the page."""
    store, profile = dsa_store(tmp_path / "store", 12), profile_file(tmp_path / "p.toml", DSA)
    shorten(store / indexer(3))
    options = ("--profile", profile, "--checks", "sizes", "--repair", "delete", "--yes")
    run = verified(invoke, tmp_path / "run", store, *options, "--fail-on", "never")
    with monkeypatch.context() as patch:
        stick(patch, kv(3))
        assert "Part 0 of 1 is not complete; to complete the work" in run.part(0, 1)
    assert (store / kv(3)).exists()
    assert run.merged(exit_code=4).document["repaired"] == 0
    run = verified(invoke, tmp_path / "second", store, *options, "--fail-on", "never")
    assert "Part 0 of 1 is done" in run.part(0, 1)
    assert not (store / kv(3)).exists()
    assert not (store / indexer(3)).exists()
    assert run.merged().document["complete"]


@pytest.mark.slow
def test_a_time_limit_is_divided_among_the_parts(
    invoke: Invoke, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def noted(store: object, request: VerifyRequest, *arguments: Any, **options: Any) -> PartCheck:
        limits.append(request.time_limit_seconds)
        return check_part(store, request, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("hicachectl.parts.verify.check_part", noted)
    run = verified(invoke, tmp_path / "run", damaged, "--time-limit", "2h")
    run.all(4)
    assert limits == [1800.0] * 4


def split(store: Path, pages: int) -> tuple[list[int], list[int]]:
    """Make pages of growing times; return those with the lower and the higher hashes."""
    dsa_store(store, pages)
    order = sorted(range(pages), key=kv)
    return sorted(order[: pages // 2]), sorted(order[pages // 2 :])


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_part_judges_its_own_pages_and_merge_names_it(
    invoke: Invoke, tmp_path: Path, dry_run: bool
) -> None:
    """A part whose newest pages contradict the profile repairs nothing; another one does."""
    store, profile = tmp_path / "store", profile_file(tmp_path / "p.toml", DSA)
    lower, higher = split(store, 40)
    bad = *lower[-12:], higher[0]
    for number in bad:
        (store / indexer(number)).unlink()
    options = ("--profile", profile, "--checks", "groups,sizes", "--repair", "quarantine")
    way = "--dry-run" if dry_run else "--yes"
    run = verified(invoke, tmp_path / "run", store, *options, way, "--fail-on", "never")
    said = run.invoke("-q", *run.arguments(0, 2)).stderr
    assert "Part 0: nothing was repaired: " in said
    assert "Part 0: nothing was repaired: " in run.part(0, 2)  # it ends as it ended
    assert "nothing was repaired" not in run.part(1, 2)
    gone = {number for number in bad if not (store / kv(number)).exists()}
    assert gone == (set() if dry_run else {higher[0]})
    merged = run.merged("--metrics-file", tmp_path / "m.prom", exit_code=2)
    assert "part 0 repaired nothing: " in merged.stderr
    assert "--despite-profile repairs" in merged.stderr
    document = merged.document
    (refusal,) = document["repair_refused"]
    assert (refusal["part"], refusal["code"], refusal["affected"]) == (0, "missing-pool", 12)
    assert (document["repaired"], document["complete"]) == (0 if dry_run else 1, True)
    assert document["counts"] == {"missing-pool": 13}
    metrics = (tmp_path / "m.prom").read_text()
    assert f'last_success_timestamp_seconds{{store="file://{store}"}} 0.0' in metrics
    refused = run.part(1, 2, "--despite-profile", exit_code=2)
    assert "was begun with --despite-profile" in refused
    again = verified(invoke, tmp_path / "again", store, *options, way, "--despite-profile")
    again.all(2)
    assert again.merged(exit_code=4).document["repair_refused"] == []


def test_merge_says_beforehand_that_a_part_would_refuse_a_repair(
    invoke: Invoke, tmp_path: Path
) -> None:
    """The first part alone contradicts the profile; the run has no repair."""
    store, profile = tmp_path / "store", profile_file(tmp_path / "p.toml", DSA)
    for number in split(store, 40)[0][-12:]:
        (store / indexer(number)).unlink()
    options = ("--profile", profile, "--checks", "groups,sizes", "--fail-on", "never")
    run = verified(invoke, tmp_path / "run", store, *options)
    run.all(2)
    said = invoke("merge", run.path).stdout
    assert "is refused, because 6 of the 8 newest pages, and 12 of all 24, have" in said
    assert "--repair quarantine --despite-profile\n" in said


@pytest.mark.slow
def test_a_repair_shows_progress_while_it_reads(
    invoke: Invoke, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair reads all objects, and reports their bytes."""
    moved: list[tuple[int, int]] = []

    @contextmanager
    def noted(*_: object) -> Iterator[Callable[[int, int], None]]:
        yield lambda new, total: moved.append((new, total))

    monkeypatch.setattr("hicachectl.cli.commands.parts.bytes_progress", noted)
    options = ("--profile", profile_file(tmp_path / "p.toml"), "--repair", "delete", "--dry-run")
    run = verified(invoke, tmp_path / "run", damaged, *options)
    run.part(0, 1)
    read = run.merged(exit_code=4).document["bytes_read"]
    assert read > 0
    assert moved[-1][1] == sum(new for new, _ in moved) >= read


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Start the process that forks the killed ones."""
    with Runner(tmp_path_factory.mktemp("runner")) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["quarantine", "delete"])
def test_a_killed_repair_is_completed_by_the_next_attempt(
    runner: Runner, tmp_path: Path, mode: str
) -> None:
    """Killed at any step and run again, a part leaves what an undisturbed one leaves.

    It counts what it did itself.
    """
    profile = profile_file(tmp_path / "p.toml", DSA)

    def command(name: str) -> tuple[object, ...]:
        store = tmp_path / name
        dsa_store(store, 12)
        for number in (1, 4, 7, 10):
            shorten(store / indexer(number), number)
        checks = ("--profile", profile, "--checks", "groups,sizes", "--fail-on", "never")
        shard = ("--shard", "0/1", "--run", tmp_path / f"run-{name}")
        return "verify", store, *checks, "--repair", mode, "--yes", *shard

    def repaired(name: str) -> int:
        merge = ("merge", tmp_path / f"run-{name}", "--format", "json")
        document = runner.run(*merge, home=tmp_path).document
        assert document["pages"] == 12
        assert document["complete"]
        groups: int = document["repaired"]
        return groups

    steps = runner.run(*command("undisturbed"), home=tmp_path).steps
    assert repaired("undisturbed") == 4
    chance = random.Random(steps)
    for at in sorted({*chance.sample(range(1, steps), min(2 * ROUNDS, steps - 1)), steps - 1}):
        name = f"killed-{at}"
        again = command(name)
        before = remains(tmp_path / name)
        killed = runner.run(*again, home=tmp_path, kill=("steps", at))
        assert killed.killed, (at, killed)
        if not (tmp_path / f"run-{name}/parts/00000.json").exists():
            assert runner.run(*again, home=tmp_path).code == 0
        assert repaired(name) <= 4
        store = tmp_path / name
        assert remains(store) == remains(tmp_path / "undisturbed"), (at, steps)
        if mode == "quarantine":
            quarantine = store / ".hicachectl/quarantine"
            runner.run("restore", quarantine, store, "--yes", home=tmp_path)
            assert remains(store) == before, (at, steps)
