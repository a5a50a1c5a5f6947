"""Run directories altered on disk: the file, what is wrong with it and what to do."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hicachectl.__main__ import run
from hicachectl.backends.disk.directory import Directory
from hicachectl.formats.errors import FormatError
from hicachectl.io.table_files import TableFile, read_table
from tests.move.migrations import demo_store, profile_file
from tests.prewarming.test_cli import prompts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke

AGAIN = "give another --run"
RESULT = "remove 00000.json and run part 0 again"
HUGE = (64 << 20) + 1
FIRST = "parts/00000.json"


class Begun(NamedTuple):
    """A run of which part 0 of 2 is done. command: without --shard and --run."""

    command: list[str]
    path: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Begun]:
    """Return a begun run of each command, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    store = demo_store(folder / "store")
    profile = ("--profile", profile_file(folder / "profile.toml"))
    asked = prompts(folder / "asked.jsonl", 8)
    commands = {
        "verify": ("verify", store, *profile, "--grace", "0s"),
        "migrate": ("migrate", store, folder / "migrated", *profile, "--grace", "0s"),
        "prewarm": ("prewarm", folder / "warm", "--from", store, *profile, "--token-ids", asked),
    }
    begun = {name: Begun([*map(str, command)], folder / name) for name, command in commands.items()}
    for one in begun.values():
        assert run(["-q", *one.command, "--shard", "0/2", "--run", str(one.path)]) == 0
    return begun


def edited(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Return a change of a JSON file of the run."""

    def edit(path: Path) -> None:
        document = json.loads((path / name).read_text())
        change(document)
        (path / name).write_text(json.dumps(document))

    return edit


def rewritten(name: str, change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    """Return a change of a published table, which keeps its row groups and its entry in run.json.

    `change` takes one row group.
    """

    def rewrite(path: Path) -> None:
        (place,) = path.glob(f"listing-*/{name}")
        _rewrite(place, change)

        def size(document: Any) -> None:
            (entry,) = (e for e in document["published"]["files"] if e["name"] == name)
            entry["nbytes"] = place.stat().st_size

        edited("run.json", size)(path)

    return rewrite


def restated(name: str, change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    """Return a change of a table of part 0's result, which keeps its entry there."""

    def rewrite(path: Path) -> None:
        (place,) = path.glob(f"parts/00000-*-{name}.parquet")
        _rewrite(place, change)

        def size(record: Any) -> None:
            record["tables"][name]["nbytes"] = place.stat().st_size

        edited(FIRST, size)(path)

    return rewrite


def _rewrite(place: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    file = pq.ParquetFile(place)
    groups = [change(file.read_row_group(at)) for at in range(file.num_row_groups)]
    with pq.ParquetWriter(place, file.schema_arrow) as writer:
        for group in groups:
            writer.write_table(group)


def swollen(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, HUGE)


def unlisted(name: str) -> Callable[[Path], None]:
    def leave_out(document: Any) -> None:
        files = document["published"]["files"]
        document["published"]["files"] = [file for file in files if file["name"] != name]

    return edited("run.json", leave_out)


def column(name: str, value: object) -> Callable[[pa.Table], pa.Table]:
    def fill(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        values = pa.repeat(pa.scalar(value, field.type), len(table))
        return table.set_column(at, field, values)

    return fill


def strange_mix(document: Any) -> None:
    table = document["published"]["table"]
    coordinate = table["resolved"][0][0]
    mix = {"affix_ids": [99], "coordinate": coordinate, "sizes": [], "pages": 1}
    table["mixes"] = [mix]


MERGED: list[tuple[str, Callable[[Path], None], str]] = [
    ("verify", swollen("run.json"), f"run.json: larger than {HUGE - 1} bytes; {AGAIN}"),
    ("verify", swollen(FIRST), f"{FIRST}: larger than {HUGE - 1} bytes; {RESULT}"),
    (
        "verify",
        edited(FIRST, lambda record: record["facts"]["tally"].update(objects=[1])),
        f"{FIRST}: facts: has counts of other affixes or deployments; {RESULT}",
    ),
    (
        "verify",
        edited(FIRST, lambda record: record["tables"].clear()),
        f"{FIRST}: has no table 'found'; {RESULT}",
    ),
    (
        "verify",
        restated("evidence", column("affix", 99)),
        f"{FIRST}: has evidence about unknown objects; {RESULT}",
    ),
    (
        "verify",
        edited("run.json", lambda manifest: manifest.update(command="ls")),
        "is a run of 'ls', which has no parts; give another run",
    ),
]
CONTINUED: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "verify", edited("run.json", strange_mix),
        f"run.json: states sizes for affixes that it does not list; {AGAIN}",
    ),
    (
        "verify", rewritten("00.parquet", column("affix_id", 99)),
        f"The listing of the part has affixes 99 to 99, but the run has only 4; {AGAIN}",
    ),
    (
        "migrate", unlisted("found.parquet"),
        f"found.parquet: the manifest does not list it; {AGAIN}",
    ),
    (
        "prewarm", unlisted("pages.parquet"),
        f"pages.parquet: the manifest does not list it; {AGAIN}",
    ),
    (
        "prewarm", rewritten("pages.parquet", column("page", "0" * 64)),
        f"A slice of the plan has pages without objects; {AGAIN}",
    ),
    (
        "prewarm", rewritten("chains.parquet", column("name", 99)),
        f"chains.parquet: has chains of unknown pages; {AGAIN}",
    ),
]  # fmt: skip


def copied(begun: Begun, folder: Path, damage: Callable[[Path], None]) -> Path:
    path = shutil.copytree(begun.path, folder / "run")
    damage(path)
    return path


@pytest.mark.parametrize(("command", "damage", "said"), MERGED, ids=[case[2] for case in MERGED])
def test_a_merge_names_the_altered_file(
    invoke: Invoke,
    runs: dict[str, Begun],
    tmp_path: Path,
    command: str,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    path = copied(runs[command], tmp_path, damage)
    (message,) = invoke("-q", "merge", path, exit_code=2).stderr.splitlines()
    assert message.startswith(f"hicachectl: {path}")
    assert said in message


@pytest.mark.parametrize(
    ("command", "damage", "said"), CONTINUED, ids=[case[2] for case in CONTINUED]
)
def test_a_part_names_the_altered_file(
    invoke: Invoke,
    runs: dict[str, Begun],
    tmp_path: Path,
    command: str,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    path = copied(runs[command], tmp_path, damage)
    shard = ("--shard", "1/2", "--run", path)
    (message,) = invoke("-q", *runs[command].command, *shard, exit_code=2).stderr.splitlines()
    assert said in message


TEXTS = pa.schema([pa.field("text", pa.string(), nullable=False)])


@pytest.mark.parametrize(
    ("rows", "texts", "said"),
    [
        (3, ["a"], "has 1 rows, expected 3; try again"),
        (1, ["a" * (3 << 20)], r"is damaged, because 1 rows cannot have 31\d+ bytes; try"),
    ],
)
def test_a_table_that_claims_too_much_is_refused(
    tmp_path: Path, rows: int, texts: list[str], said: str
) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table([texts], schema=TEXTS), path, compression="zstd")
    file = TableFile(name=path.name, nbytes=path.stat().st_size, rows=rows)
    with (
        Directory.named(str(tmp_path), writes=False) as directory,
        pytest.raises(FormatError, match=f"^{path}: {said}"),
    ):
        read_table(directory, file, TEXTS, "try again")
