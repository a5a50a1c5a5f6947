"""--quiet: a run that did everything says nothing; data, and what was not done, are still said."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from hicachectl.__main__ import run
from hicachectl.cli.exit_codes import FINDINGS
from tests.cli.test_lock_held import held
from tests.move.migrations import demo_store, flip_once_written, profile_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke, Outcome

Place = dict[str, "Path"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, its profile, and a quarantine with one page of it."""
    folder = tmp_path_factory.mktemp("made")
    store = demo_store(folder / "store")
    profile = profile_file(folder / "profile.toml")
    damaged = next(path for path in sorted(store.glob("*.bin")) if "mamba" not in path.name)
    whole = damaged.read_bytes(), damaged.stat().st_mtime
    damaged.write_bytes(whole[0][:-1])
    os.utime(damaged, (whole[1], whole[1]))
    repair = ("--repair", "quarantine", "--quarantine", str(folder / "quarantine"), "--yes")
    assert run(["verify", str(store), "--profile", str(profile), *repair]) == FINDINGS
    (folder / "tokens.jsonl").write_text(json.dumps(list(range(200))) + "\n")
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Place:
    """A copy of the store, its profile and its quarantine, and paths for more."""
    folder = tmp_path / "place"
    shutil.copytree(made, folder)
    names = {
        "STORE": "store", "PROFILE": "profile.toml", "QUARANTINE": "quarantine", "NEW": "new",
        "RUN": "run", "LOCK": "lock", "OUT": "out", "CATALOG": "catalog.parquet",
        "TOKENS": "tokens.jsonl",
    }  # fmt: skip
    return {word: folder / name for word, name in names.items()}


@pytest.fixture
def quietly(invoke: Invoke, place: Place) -> Callable[..., Outcome]:
    """Run a command line with -q, in which words stand for paths."""

    def call(line: str, *, exit_code: int = 0) -> Outcome:
        words = [place.get(word, word) for word in line.split()]
        return invoke("-q", *words, exit_code=exit_code)

    return call


RUNS = {
    "verify": "verify STORE --profile PROFILE",
    "repair": "verify STORE --profile PROFILE --repair delete --yes",
    "migrate": "migrate STORE NEW --profile PROFILE",
    "prewarm": "prewarm NEW --from STORE --profile PROFILE --all --format table",
    "rm": "rm STORE --before 1s --yes",
    "restore": "restore QUARANTINE STORE --yes",
    "purge": "quarantine purge QUARANTINE --before 0s --yes",
}
CLEAN = {
    **RUNS,
    "rm of nothing": "rm STORE --before 9000d --yes",
    "within a budget": f"{RUNS['prewarm']} --budget-pages 2",
    "part": f"{RUNS['verify']} --shard 0/1 --run RUN",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_a_run_that_did_everything_says_nothing(
    quietly: Callable[..., Outcome], invoke: Invoke, place: Place, name: str
) -> None:
    assert quietly(CLEAN[name]) == ("", "")
    if name == "part":
        assert quietly("merge RUN") == ("", "")
        assert invoke("merge", place["RUN"], "--again").stdout
    if name == "migrate":
        assert list(place["NEW"].glob("*.bin"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_data_is_written_all_the_same(quietly: Callable[..., Outcome], name: str) -> None:
    line = RUNS[name].replace(" --format table", "")
    document = json.loads(quietly(f"{line} --format json").stdout)
    assert document["complete"] or name == "purge"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_tables_in_files_are_written_all_the_same(
    quietly: Callable[..., Outcome], place: Place, name: str
) -> None:
    assert quietly(f"{RUNS[name]} -o OUT") == ("", "")
    assert place["OUT"].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name != "verify"])
def test_a_dry_run_is_shown(quietly: Callable[..., Outcome], name: str) -> None:
    assert quietly(f"{RUNS[name]} --dry-run").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["ls STORE", "ls STORE --summary", "quarantine list QUARANTINE",
     "hits STORE --token-ids TOKENS --profile PROFILE", "profile --profile PROFILE",
     "simulate --trace TOKENS --profile PROFILE"],
)  # fmt: skip
def test_what_only_looks_shows_what_it_found(quietly: Callable[..., Outcome], line: str) -> None:
    assert quietly(line).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("output", ["", " -o OUT"])
def test_a_lock_that_is_held_is_said(
    quietly: Callable[..., Outcome], place: Place, name: str, output: str
) -> None:
    with held(place["LOCK"]):
        said = quietly(f"{RUNS[name]} --lock LOCK{output}")
    assert said.stdout == ""
    assert said.stderr.endswith("LOCK: another process holds this lock; nothing was done\n".replace(
        "LOCK", str(place["LOCK"])
    ))  # fmt: skip
    assert said.stderr.count("\n") == 1


def half_written(place: Place) -> None:
    """Write a page anew, as a server that has not written all of it yet."""
    parts = sorted(path for path in place["STORE"].glob("*.bin") if "mamba" not in path.name)
    parts[0].unlink()
    os.utime(parts[1])


NOT_DONE = {
    "verify STORE --profile PROFILE": "STORE: not complete: 1 page in flight, not judged; run",
    "verify STORE --profile PROFILE --format csv": "STORE: not complete: 1 page in flight",
    "verify STORE --profile PROFILE --time-limit 0s": "not read before --time-limit: ",
    "verify STORE --model none": "--model none: no page matches",
    "migrate STORE NEW --profile PROFILE": "Not copied: 1 page still being written; run again",
    "migrate STORE NEW --model none": "--model none: no page matches",
    "prewarm NEW --from STORE --profile PROFILE --all --format table --deadline 0s": (
        "0 pages copied, 0 B; "
    ),
    "restore QUARANTINE STORE --page abc --yes": "QUARANTINE: no page that matches the filters",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", NOT_DONE)
def test_what_was_not_done_is_said(
    quietly: Callable[..., Outcome], place: Place, line: str
) -> None:
    half_written(place)
    outcome = quietly(line)
    if "--format csv" not in line:
        assert outcome.stdout == ""
    said = NOT_DONE[line]
    for word in ("STORE", "QUARANTINE"):
        said = said.replace(word, str(place[word]))
    assert f"{said}" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_divided_run_names_the_parts_that_are_missing(
    quietly: Callable[..., Outcome], place: Place
) -> None:
    part = "verify STORE --profile PROFILE --catalog CATALOG --update-catalog --run RUN --shard"
    assert quietly(f"{part} 0/2") == ("", "")
    merged = quietly("merge RUN --catalog CATALOG", exit_code=4)
    missing, unwritten = merged.stderr.splitlines()[::-1]
    assert "there is no result of part 1 of 2; run the missing parts" in missing
    assert "not written, because parts of the run are missing" in unwritten
    assert merged.stdout.endswith("Incomplete: part 1 of 2 without a result\n")
    metrics = place["OUT"]
    quietly(f"merge RUN --metrics-file {metrics} --format json -o CATALOG", exit_code=4)
    assert json.loads(place["CATALOG"].read_text())["complete"] is False
    assert 'hicachectl_verify_complete{store="' in metrics.read_text()
    assert "} 0\n" in metrics.read_text().split("hicachectl_verify_complete{", 1)[1]

    assert quietly(f"{part} 1/2") == ("", "")
    unrecorded = quietly("merge RUN").stderr
    said = "digests, which are not written; write them with: hicachectl merge RUN --again --catalog"
    assert said.replace("RUN", str(place["RUN"])) in unrecorded


@pytest.mark.slow
def test_a_part_that_is_not_complete_says_so(quietly: Callable[..., Outcome]) -> None:
    part = "verify STORE --profile PROFILE --time-limit 0s --run RUN --shard 0/1"
    assert "Part 0 of 1 is not complete; to complete the work" in quietly(part).stderr
    assert "not complete: part 0 of 1; to complete the work" in quietly("merge RUN").stderr


def test_a_failure_has_its_reason(
    quietly: Callable[..., Outcome], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = min(path.name for path in place["STORE"].glob("*.bin") if "mamba" not in path.name)
    flip_once_written(monkeypatch, place["NEW"] / first, 0)
    outcome = quietly("migrate STORE NEW --verify", exit_code=4)
    assert "1 failed" in outcome.stdout
    assert f"{first}: " in outcome.stderr


@pytest.mark.slow
def test_a_repair_that_fails_says_why(
    quietly: Callable[..., Outcome], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("hicachectl.backends.object_files.writing.FileWriter.remove", stuck)
    anchor = min(path for path in place["STORE"].glob("*.bin") if "mamba" not in path.name)
    facts = anchor.stat()
    anchor.write_bytes(b"short")
    os.utime(anchor, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    said = quietly(RUNS["repair"], exit_code=4).stderr
    assert "1 page not removed; run again\n" in said
    assert "cannot be removed: Operation not permitted" in said
