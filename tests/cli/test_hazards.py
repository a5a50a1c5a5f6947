"""What no command may take for success or for a reason to remove, tried on every command.

An empty value, a store without pages (as one that is not mounted), an input without requests,
times in the future, and a wrong clock of this host. The command tree says which commands can meet
them: a new command, or a new file to read, needs its row here.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, NamedTuple

import click
import pytest

from hicachectl.__main__ import run
from hicachectl.cli.exit_codes import DONE, FINDINGS
from tests.cli.test_help import every_command
from tests.cli.test_nothing import READERS
from tests.cli.test_parameters import with_values
from tests.move.migrations import demo_store, profile_file
from tests.stores import contents
from tests.tiny_tokenizers import make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

DAY_S = 86_400
TEMPORARY = f".hicachectl-{'0' * 32}.tmp"
NAMES = {
    "STORE": "store", "PROFILE": "profile.toml", "QUARANTINE": "quarantine", "RUN": "run",
    "PACK": "x.hcpack", "TOKENIZER": "tokenizer", "EMPTY": "empty", "TOKENS": "tokens",
    "NEW": "new", "OUT": "page.html",
}  # fmt: skip

# Arguments by what they name. Commands read those of the first kind.
PLACES = {"store", "source", "destination", "quarantine", "run", "runs", "pack"}
OTHERS = {"page", "named", "directory", "shell", "words"}
# Options for files that do not hold requests or pages.
NOT_REQUESTS = {
    "profile_file", "model_config", "draft_model_config", "to_profile", "catalog", "metrics_file",
    "lock", "open_since", "output", "config",
}  # fmt: skip


class Row(NamedTuple):
    """A command line, and what must come of it.

    removed: number of pages that leave the store.
    """

    line: str
    status: int
    said: str
    removed: int


def rows(text: str) -> list[Row]:
    """Return a row for each line `command line | exit status | said | pages removed`."""
    split = (map(str.strip, line.split("|")) for line in text.strip().splitlines())
    return [Row(line, int(status), said, int(removed)) for line, status, said, removed in split]


# STORE, the quarantine, the run and the pack hold nothing.
EMPTY_PLACES = rows("""
doctor STORE                                            | 4 | is empty; next: check the mount   | 0
ls STORE                                                | 0 | STORE is empty; check the mount   | 0
show STORE adbff698                                     | 2 | STORE is empty; check the mount   | 0
verify STORE                                            | 3 | STORE has no page; check the mount | 0
verify STORE --profile PROFILE --repair delete --yes    | 3 | STORE has no page; check the mount | 0
report STORE -o OUT                                     | 3 | STORE has no page; check the mount | 0
hits STORE --token-ids TOKENS --profile PROFILE         | 0 | 0% of 192 tokens served           | 0
simulate STORE --trace TOKENS --profile PROFILE         | 3 | STORE has no page; check the mount | 0
bench STORE                                             | 3 | STORE has no page; check the mount | 0
bench STORE --write                                     | 3 | STORE has no page; check the mount | 0
restore QUARANTINE STORE --yes                          | 0 | QUARANTINE: no quarantined page   | 0
quarantine list QUARANTINE                              | 0 | 0 runs, 0 pages                   | 0
quarantine purge QUARANTINE --before 0s --yes           | 0 | 0 runs, 0 pages                   | 0
prewarm NEW --from STORE --profile PROFILE --all        | 3 | STORE has no page; check the mount | 0
prewarm NEW --from STORE --profile PROFILE --all --dry-run --min-usable 0 | 3 | check the mount | 0
prewarm NEW --from STORE --all --min-usable 0 --open-after 0.1s | 0 | OPENED ANYWAY             | 0
pin STORE --state whole                                 | 2 | STORE: cannot pin objects         | 0
unpin STORE --state whole                               | 2 | STORE: cannot pin objects         | 0
migrate STORE NEW                                       | 3 | STORE has no page; check the mount | 0
migrate STORE NEW --move --yes                          | 0 | STORE is empty; check the mount   | 0
diff STORE QUARANTINE                                   | 3 | STORE has no page; check the mount | 0
merge RUN                                               | 2 | RUN: has no run.json              | 0
merge RUN --if-complete                                 | 2 | RUN: has no run.json              | 0
runs list RUN                                           | 0 | 0 runs                            | 0
runs status RUN                                         | 2 | RUN: has no run.json              | 0
runs purge RUN --before 0s --unmerged --yes             | 0 | 0 runs                            | 0
rm STORE --before 0s --yes                              | 0 | STORE is empty; check the mount   | 0
rm STORE --free 1KiB --yes                              | 4 | only 0 B of 1.0 KiB               | 0
rm STORE --keep-free 1% --yes                           | 3 | STORE has no page; check the mount | 0
rm STORE --max-size 1KiB --yes                          | 3 | STORE has no page; check the mount | 0
rm STORE --temporaries --yes                            | 0 | no temporary file                 | 0
pack info PACK                                          | 2 | PACK: not a pack; check the path  | 0
pack repair PACK                                        | 2 | PACK: not a pack; check the path  | 0
profile STORE                                           | 2 | no pages to infer a profile from  | 0
""")

# Every file is dated a day ahead. Of the 7 pages, a server has written one only in part.
FUTURE = rows("""
doctor STORE --profile PROFILE                          | 0 | 1 missing-rank                    | 0
ls STORE                                                | 0 | ahead of this host's clock        | 0
show STORE adbff698                                     | 0 | ahead of this host's clock        | 0
verify STORE --profile PROFILE                          | 4 | ahead of this host's clock        | 0
verify STORE --profile PROFILE --repair delete --yes    | 4 | ahead of this host's clock        | 0
report STORE --profile PROFILE -o OUT                   | 4 | ahead of this host's clock        | 0
hits STORE --token-ids TOKENS --profile PROFILE         | 0 | ahead of this host's clock        | 0
simulate STORE --trace TOKENS --profile PROFILE         | 0 | ahead of this host's clock        | 0
bench STORE --profile PROFILE --prefill 1               | 0 | reading is faster for every       | 0
restore QUARANTINE STORE --yes                          | 0 | 1 page, 4 objects                 | 0
quarantine list QUARANTINE                              | 0 | 1 run, 1 page                     | 0
quarantine purge QUARANTINE --before 1h --yes           | 0 | 0 runs, 0 pages                   | 0
prewarm NEW --from STORE --profile PROFILE --all        | 0 | 6 pages copied                    | 0
prewarm NEW --from STORE --profile PROFILE --all        | 0 | ahead of this host's clock        | 0
pin STORE --state whole                                 | 2 | STORE: cannot pin objects         | 0
unpin STORE --state whole                               | 2 | STORE: cannot pin objects         | 0
migrate STORE NEW --profile PROFILE                     | 0 | ahead of this host's clock        | 0
migrate STORE NEW --profile PROFILE                     | 0 | Not copied: 1 page not whole      | 0
migrate STORE NEW --profile PROFILE --move --yes        | 0 | 6 removed from the source         | 6
migrate STORE NEW --profile PROFILE --since 1h          | 0 | 6 pages copied                    | 0
diff STORE PACK                                         | 4 | 1 different                       | 0
diff STORE PACK --since 1h                              | 4 | 1 different                       | 0
merge RUN                                               | 0 | no findings                       | 0
runs list RUN                                           | 0 | finished                          | 0
runs status RUN                                         | 0 | Next: hicachectl merge RUN        | 0
runs purge RUN --before 1h --unmerged --yes             | 0 | 0 runs, 0 B deleted               | 0
rm STORE --before 1h --yes                              | 0 | --before: no page matches         | 0
rm STORE --max-size 400KiB --profile PROFILE --yes      | 0 | --max-size 400.0 KiB              | 2
rm STORE --temporaries --yes                            | 0 | no temporary file                 | 0
pack info PACK                                          | 0 | 16, 434.0 KiB                     | 0
pack repair PACK                                        | 0 | nothing to repair                 | 0
profile STORE                                           | 0 | tp = 2                            | 0
""")

# This host's clock is 5 minutes ahead or behind. The page that a server is writing is 30 seconds
# old by the store's clock. Commands that only look take the host's clock, and judge the page.
WRONG_CLOCK = rows("""
doctor STORE --profile PROFILE                          | 0 | 1 missing-rank                    | 0
ls STORE                                                | 0 | partial                           | 0
show STORE adbff698                                     | 0 | whole                             | 0
verify STORE --profile PROFILE                          | 4 | 1 missing-rank                    | 0
verify STORE --profile PROFILE --repair delete --yes    | 0 | 1 in flight                       | 0
report STORE --profile PROFILE -o OUT                   | 4 | 1 missing-rank                    | 0
hits STORE --token-ids TOKENS --profile PROFILE         | 0 | 0% of 192 tokens served           | 0
simulate STORE --trace TOKENS --profile PROFILE         | 0 | no cache of any size serves more  | 0
bench STORE --profile PROFILE --prefill 1               | 0 | reading is faster for every       | 0
restore QUARANTINE STORE --yes                          | 0 | 1 page, 4 objects                 | 0
quarantine list QUARANTINE                              | 0 | 1 run, 1 page                     | 0
quarantine purge QUARANTINE --before 150s --yes         | 0 | 0 runs, 0 pages                   | 0
prewarm NEW --from STORE --profile PROFILE --all        | 0 | 6 pages copied                    | 0
pin STORE --state whole                                 | 2 | STORE: cannot pin objects         | 0
unpin STORE --state whole                               | 2 | STORE: cannot pin objects         | 0
migrate STORE NEW --profile PROFILE                     | 0 | 6 pages copied                    | 0
migrate STORE NEW --profile PROFILE --move --yes        | 0 | 1 page still being written        | 6
diff STORE PACK --profile PROFILE                       | 4 | 1 different                       | 0
merge RUN                                               | 0 | no findings                       | 0
runs list RUN                                           | 0 | finished                          | 0
runs status RUN                                         | 0 | Next: hicachectl merge RUN        | 0
runs purge RUN --before 150s --unmerged --yes           | 0 | 0 runs, 0 B deleted               | 0
rm STORE --before 150s --yes                            | 0 | 6 pages                           | 6
rm STORE --state partial,orphan --profile PROFILE --yes | 0 | 1 page in flight left alone       | 0
rm STORE --max-size 400KiB --profile PROFILE --yes      | 0 | 1 page in flight left alone       | 1
rm STORE --temporaries --yes                            | 0 | no temporary file                 | 0
pack info PACK                                          | 0 | 16, 434.0 KiB                     | 0
pack repair PACK                                        | 0 | nothing to repair                 | 0
profile STORE                                           | 0 | tp = 2                            | 0
""")

# An input without requests, beside those of READERS, all refused. A list of pages may be empty.
EMPTY_INPUTS = rows("""
report STORE --profile PROFILE --prompts EMPTY --tokenizer TOKENIZER -o OUT | 2 | no requests | 0
rm STORE --pages EMPTY --yes                            | 0 | --pages: no page matches          | 0
ls STORE --pages EMPTY                                  | 0 | --pages: no page matches          | 0
verify STORE --pages EMPTY --profile PROFILE            | 0 | --pages: no page matches          | 0
migrate STORE NEW --pages EMPTY --move --yes            | 0 | --pages: no page matches          | 0
migrate STORE NEW --pages-from EMPTY --move --yes       | 0 | --pages: no page matches          | 0
diff STORE PACK --pages EMPTY                           | 2 | --pages: no page matches          | 0
pin STORE --pages EMPTY                                 | 2 | STORE: cannot pin objects         | 0
unpin STORE --pages EMPTY                               | 2 | STORE: cannot pin objects         | 0
restore QUARANTINE STORE --pages EMPTY --yes            | 0 | no page that matches the filters  | 0
""")

COMMANDS = {" ".join(words): command for words, command in every_command()}


def names(parameters: Iterable[click.Parameter], *, of_arguments: bool) -> set[str]:
    return {
        str(parameter.name)
        for parameter in parameters
        if isinstance(parameter, click.Argument) == of_arguments
    }


def commands_of(table: Iterable[Row]) -> set[str]:
    return {
        next(name for name in COMMANDS if f"{row.line} ".startswith(f"{name} ")) for row in table
    }


@pytest.mark.parametrize(
    "table", [EMPTY_PLACES, FUTURE, WRONG_CLOCK], ids=["empty", "future", "clock"]
)
def test_every_command_that_reads_a_store_has_a_row(table: list[Row]) -> None:
    reading = set()
    for name, command in COMMANDS.items():
        arguments = names(command.params, of_arguments=True)
        assert arguments <= PLACES | OTHERS, "say which of the two an argument is"
        if arguments & PLACES:
            reading.add(name)
    assert commands_of(table) == reading


def test_every_file_of_requests_has_a_row() -> None:
    tried = [line.split() for line in READERS.strip().splitlines()]
    tried += [row.line.split() for row in EMPTY_INPUTS]
    for name, command in COMMANDS.items():
        for parameter, option, _ in with_values(command):
            is_file = isinstance(parameter.type, click.Path) or "FILE" in (parameter.metavar or "")
            if isinstance(parameter, click.Argument) or not is_file:
                continue
            if parameter.name not in NOT_REQUESTS and not is_directory(parameter):
                found = [t for t in tried if t[0] == name and option in t]
                assert any(t[t.index(option) + 1] == "EMPTY" for t in found), (name, option)


def is_directory(parameter: click.Parameter) -> bool:
    return isinstance(parameter.type, click.Path) and not parameter.type.file_okay


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what command lines name, made once."""
    folder = tmp_path_factory.mktemp("hazards")
    store = demo_store(folder / "store")
    profile = profile_file(folder / "profile.toml")
    shorten(anchors(store)[0])
    repair = ["--repair", "quarantine", "--quarantine", str(folder / "quarantine"), "--yes"]
    assert run(["-q", "verify", str(store), "--profile", str(profile), *repair]) == FINDINGS
    assert run(["-q", "verify", str(store), "--shard", "0/1", "--run", str(folder / "run")]) == DONE
    assert run(["-q", "migrate", str(store), str(folder / "x.hcpack")]) == DONE
    make_tokenizer(folder / "tokenizer", "qwen")
    (folder / "empty").write_text("")
    (folder / "tokens").write_text(json.dumps(list(range(200))) + "\n")
    return folder


@pytest.fixture
def place(template: Path, tmp_path: Path) -> dict[str, Path]:
    """Return what command lines name; a server is writing one of the pages in the store."""
    shutil.copytree(template, tmp_path / "place")
    paths = {word: tmp_path / "place" / name for word, name in NAMES.items()}
    half, other, *_ = anchors(paths["STORE"])
    assert other.name[:64] == half.name[:64]
    half.unlink()
    (paths["STORE"] / TEMPORARY).touch()
    for path in (other, paths["STORE"] / TEMPORARY):
        date(path, 30)
    return paths


def anchors(store: Path) -> list[Path]:
    return sorted(path for path in store.glob("*.bin") if "mamba" not in path.name)


def shorten(path: Path) -> None:
    facts = path.stat()
    path.write_bytes(path.read_bytes()[:-1])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def date(path: Path, age_s: float) -> None:
    """Set the age of a file by the clock of its file system."""
    os.utime(path)
    moment = path.stat().st_mtime - age_s
    os.utime(path, (moment, moment))


def pages(store: Path) -> set[str]:
    return {name[:64] for name in contents(store) if name.endswith(".bin")}


def check(invoke: Invoke, paths: dict[str, Path], row: Row) -> None:
    """Run a row, and compare."""
    before = pages(paths["STORE"])
    outcome = invoke(*(paths.get(word, word) for word in row.line.split()), exit_code=row.status)
    said = row.said
    for word in ("STORE", "QUARANTINE", "RUN", "PACK"):
        said = said.replace(word, str(paths[word]))
    assert said in outcome.stdout + outcome.stderr
    assert len(before - pages(paths["STORE"])) == row.removed
    if row.status in (2, 3):
        assert outcome.stdout == ""
        assert not paths["NEW"].exists()
        assert not paths["OUT"].exists()


def by_line(table: list[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", table, ids=[row.line for row in table])


@by_line(EMPTY_PLACES)
def test_a_place_that_holds_nothing(invoke: Invoke, place: dict[str, Path], row: Row) -> None:
    for name in ("STORE", "QUARANTINE", "RUN"):
        shutil.rmtree(place[name], ignore_errors=True)
        place[name].mkdir()
    place["PACK"].write_bytes(b"")
    check(invoke, place, row)


@by_line(FUTURE)
def test_times_in_the_future(invoke: Invoke, place: dict[str, Path], row: Row) -> None:
    for name in ("STORE", "QUARANTINE", "RUN"):
        for path in files(place[name]):
            date(path, -DAY_S)
    check(invoke, place, row)


def files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


@by_line(WRONG_CLOCK)
@pytest.mark.parametrize("skew_s", [300, -300])
def test_a_wrong_clock_of_this_host(
    invoke: Invoke,
    place: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    row: Row,
    skew_s: int,
) -> None:
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + skew_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + skew_s * 10**9)
    check(invoke, place, row)
    assert (place["STORE"] / TEMPORARY).exists()


@by_line(EMPTY_INPUTS)
def test_an_input_without_requests(invoke: Invoke, place: dict[str, Path], row: Row) -> None:
    check(invoke, place, row)
