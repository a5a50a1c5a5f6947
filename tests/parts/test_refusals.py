"""What does not belong to a run is refused in one line, with both values, before any change."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
import pytest

from hicachectl.cli.command import Command
from hicachectl.cli.commands.parts import (
    check_division,
    is_divided,
    opened_destination,
    run_divided,
)
from hicachectl.cli.group import COMMANDS
from hicachectl.cli.options import lock_option, output_options, parts_options
from hicachectl.cli.session import opened_store
from hicachectl.formats.errors import HicacheError, StoreUnavailable, UsageError
from hicachectl.parts import manifest
from hicachectl.parts.directory import RunDirectory
from tests.conftest import Invoke  # noqa: TC001 - pytest reads it
from tests.move.migrations import demo_store
from tests.parts.runs import ToyRun, names_in, toy_run  # noqa: F401 - a fixture
from tests.parts.toy import LISTED_NS, ToyJob

if TYPE_CHECKING:
    from collections.abc import Callable


@click.command("toy", cls=Command)
@click.argument("store", type=click.Path())
@click.argument("destination", type=click.Path())
@click.option("--factor", default=1)
@lock_option
@parts_options
@output_options
@click.pass_context
def toy_command(ctx: click.Context, /, store: str, destination: str, **options: Any) -> None:
    """Copy numbers."""
    check_division(ctx, options)
    if is_divided(options):
        job = ToyJob(Path(store), Path(destination), factor=options["factor"])
        run_divided(ctx, options, job, ToyJob, [])


# Options of the whole run that merge has.
MERGED = {"--metrics-file", "--output", "--format"}


@pytest.fixture
def toy_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the toy command, and `merge`."""
    monkeypatch.setitem(COMMANDS, "merge", "Join.")
    monkeypatch.setitem(COMMANDS, "toy", "Copy numbers.")
    module = SimpleNamespace(command=toy_command)
    monkeypatch.setitem(sys.modules, "hicachectl.cli.commands.toy", module)


@pytest.mark.usefixtures("toy_commands")
def test_parts_and_merge_on_the_command_line(invoke: Invoke, toy_run: ToyRun) -> None:  # noqa: F811
    """A part prints one line on stderr and exits with 0; merge prints the document once."""
    run = ["toy", toy_run.store, toy_run.destination, "--run", toy_run.path]
    done = invoke(*run, "--shard", "0/2")
    assert done.stdout == ""
    assert done.stderr == (
        "hicachectl: Part 0 of 2 is done; when all parts are done, join them with: "
        f"hicachectl merge {toy_run.path}\n"
    )
    partly = invoke("merge", toy_run.path, "--format", "json", exit_code=4)
    assert partly.document["missing_parts"] == [1]
    assert partly.stderr == (
        f"hicachectl: {toy_run.path}: there is no result of part 1 of 2; run the missing parts\n"
    )
    assert "Part 0 of 2 was done at 20" in invoke(*run, "--shard", "0/2").stderr
    invoke(*run, "--shard", "1/2")
    again = invoke(*run, "--shard", "1/2", exit_code=2).stderr
    assert "the run of 2023-11-14 22:13 UTC is finished; give a new --run, such as" in again
    merged = invoke("merge", toy_run.path, "--format", "json").document
    assert (merged["copied"], merged["listed"]) == (12, LISTED_NS / 1e9)
    refused = invoke("merge", toy_run.path, exit_code=2)
    assert refused.stdout == ""
    assert "was merged before; check that the parts have a new --run each time" in refused.stderr
    assert invoke("merge", toy_run.path, "--again").stdout == "12 copied\n"
    assert len(invoke("merge", toy_run.path, "--again", "--format", "jsonl").rows) == 12
    metrics = toy_run.folder / "metrics"
    refused = invoke("merge", toy_run.path, "--again", "--metrics-file", metrics, exit_code=2)
    said = "hicachectl: --metrics-file: toy writes no metrics; leave it out"
    assert refused.stderr.splitlines()[-1] == said
    assert not metrics.exists()


@pytest.mark.usefixtures("toy_commands")
@pytest.mark.parametrize("words", [["--shard", "1/2"], ["--shard=1/2"]])
def test_a_part_that_waits_in_vain_gives_the_command_of_part_0(
    invoke: Invoke,
    toy_run: ToyRun,  # noqa: F811
    words: list[str],
) -> None:
    command = ["toy", toy_run.store, toy_run.destination, "--run", toy_run.path]
    said = invoke(*command, *words, "--wait", "0s", exit_code=3).stderr
    of_part_0 = [word.replace("1/2", "0/2") for word in words]
    first = shlex.join(["hicachectl", *map(str, command), *of_part_0, "--wait", "0s"])
    assert said.endswith(f": part 0 has not published run.json within 0s; run part 0: {first}\n")
    invoke(*command, "--shard", "0/2")
    invoke(*command, *words, "--wait", "0s")


@pytest.mark.usefixtures("toy_commands")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--run", "RUN"], "--run needs --shard"),
        (["--wait", "5m"], "--wait needs --shard"),
        (["--shard", "0/2"], "--shard needs --run DIR"),
        (["--shard", "0/2", "--run", "RUN", "--lock", "L"], "leave it out, since two processes"),
        (["--shard", "0/2", "--run", "RUN", "-o", "F"], "; give --output to hicachectl merge"),
        (["--shard", "0/2", "--run", ""], "--run: empty; give a value"),
        (["--shard", "0/2", "--run", "file:///x"], "--run: file:///x is a URL; give the path"),
        (["--shard", "0/2", "--run", "RUN", "--format", "json"], "--format cannot be combined"),
        (["--shard", "2/2", "--run", "RUN"], "the last is 1"),
        (["--shard", "/2", "--run", "RUN"], "neither is set"),
    ],
)
def test_options_that_do_not_go_together(
    invoke: Invoke,
    toy_run: ToyRun,  # noqa: F811
    options: list[str],
    said: str,
) -> None:
    given = [str(toy_run.path) if option == "RUN" else option for option in options]
    refused = invoke("toy", toy_run.store, toy_run.destination, *given, exit_code=2)
    assert said in refused.stderr
    assert not toy_run.path.exists()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("verify", {"--lock": "L", "--metrics-file": "M", "--output": "O", "--format": "json"}),
        ("migrate", {"--lock": "L", "--output": "O", "--format": "json"}),
        (
            "prewarm",
            {
                "--lock": "L",
                "--metrics-file": "M",
                "--output": "O",
                "--format": "json",
                "--dry-run": None,
                "--through-server": "http://127.0.0.1:9",
            },
        ),
    ],
)
def test_options_of_the_whole_run_are_refused(
    invoke: Invoke, tmp_path: Path, command: str, options: dict[str, str | None]
) -> None:
    """A part refuses each option of the whole run by name, before anything is written."""
    source, asked = demo_store(tmp_path / "source"), tmp_path / "asked.jsonl"
    asked.write_text("[1, 2, 3]\n")
    places: dict[str, list[object]] = {
        "verify": [source],
        "migrate": [source, tmp_path / "target"],
        "prewarm": [tmp_path / "target", "--from", source, "--token-ids", asked],
    }
    before = names_in(tmp_path)
    for name, value in options.items():
        given = [name] if value is None else [name, value]
        line = [*places[command], *given, "--shard", "0/2", "--run", tmp_path / "run"]
        refused = invoke(command, *line, exit_code=2).stderr
        assert f"{name} cannot be combined with --shard" in refused
        assert ("hicachectl merge" in refused) == (name in MERGED)
        assert names_in(tmp_path) == before


def test_another_run_is_refused(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.part(0, 2)
    other = ToyRun(folder_of(toy_run, "other"))
    other.path, other.destination = toy_run.path, toy_run.destination
    before = names_in(toy_run.path)
    cases: list[tuple[Callable[[], object], str, str, str]] = [
        (lambda: toy_run.part(0, 3), "parts", "2", "3"),
        (lambda: toy_run.part(0, 2, factor=5), "--factor", "1", "5"),
        (lambda: other.part(0, 2), "store", str(toy_run.store), str(other.store)),
    ]
    for call, name, theirs, mine in cases:
        with pytest.raises(HicacheError) as refusal:
            call()
        assert str(refusal.value) == (
            f"{toy_run.path}: was begun with {name} {theirs}, but this command has {mine}; give "
            "the same options, or another --run"
        )
    assert names_in(toy_run.path) == before
    assert toy_run.part(1, 2).record.settled


def folder_of(run: ToyRun, name: str) -> Path:
    folder = run.folder / name
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("member", "value", "said"),
    [
        ("version", "0.0.1", "version '0.0.1', but this hicachectl has "),
        ("form", 9, "form 9, but this hicachectl has 1"),
        ("form", None, "form None, but this hicachectl has 1"),
        ("command", "other", "was begun with command other, but this command has toy"),
        ("folder", "../outside", "run.json: folder: expected `?str"),
        ("run", "x", "run.json: run: expected"),
        ("identity", [], "run.json: identity: expected"),
    ],
)
def test_other_releases_commands_and_forms(
    toy_run: ToyRun,  # noqa: F811
    member: str,
    value: object,
    said: str,
) -> None:
    toy_run.part(0, 2)
    before = names_in(toy_run.path / "parts")
    path = toy_run.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {member: value}))
    with pytest.raises(HicacheError, match=said) as refusal:
        toy_run.part(1, 2)
    assert "\n" not in str(refusal.value)
    assert names_in(toy_run.path / "parts") == before


def test_a_directory_with_other_files_is_refused(toy_run: ToyRun) -> None:  # noqa: F811
    toy_run.path.mkdir()
    (toy_run.path / "lost+found").mkdir()
    (toy_run.path / "notes.txt").write_text("mine")
    with pytest.raises(HicacheError, match=r"has other files, such as notes.txt; give --run an"):
        toy_run.part(0, 1)
    assert names_in(toy_run.path) == ["lost+found", "notes.txt"]
    (toy_run.path / "notes.txt").unlink()
    assert toy_run.part(0, 1).record.settled


def test_a_manifest_that_another_process_removes_at_once_is_named(
    toy_run: ToyRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "publish_manifest", lambda *_: None)
        said = f"^{toy_run.path}: run.json was removed; run the part again$"
        with pytest.raises(UsageError, match=said):
            toy_run.part(0, 2)
    assert toy_run.part(0, 2).record.settled


def test_a_record_that_no_reader_would_take_is_not_written(
    toy_run: ToyRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifest, "MOST_BYTES", 99)
    said = r"^A record of the run takes \d{3} bytes, more than 99; give fewer parts$"
    with pytest.raises(UsageError, match=said):
        toy_run.part(0, 2)
    assert not (toy_run.path / "run.json").exists()


def test_a_destination_that_a_node_lacks_is_named(tmp_path: Path) -> None:
    """The driver has made it, so the node does not mount the same file system."""
    said = f"^file://{tmp_path}/new: does not exist on this node; mount it there$"
    with (
        pytest.raises(StoreUnavailable, match=said),
        opened_destination(partial(opened_store, str(tmp_path / "new"))),
    ):
        pass
    assert not (tmp_path / "new").exists()
