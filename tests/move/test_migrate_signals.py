"""Ctrl-C and SIGTERM during a migration: begun batches finish, and the next run continues."""

from __future__ import annotations

import itertools
import signal
from typing import TYPE_CHECKING

import pytest

from tests.move.migrations import PAGES, demo_store, migrated
from tests.paused import paused
from tests.speed import slow
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.paused import Ended

ENDS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
# Two pages with Mamba states fit: several batches, with one at work when the signal arrives.
OPTIONS = ("--buffer-bytes", "512KiB", "--jobs", "1", "--format", "json")

SYNC = "hicachectl.backends.object_files.writing:FileWriter.sync_data"
INDEX = "hicachectl.backends.pack.writer:PackWriter.close"
SCAN = "hicachectl.backends.file.store:FileStore.scan"


def signalled(
    folder: Path, call: str, numbers: Iterable[signal.Signals], *arguments: object
) -> Ended:
    """Run a command line that gets signals at its first call of a method."""
    with paused(folder, call, 1, *arguments) as run:
        for number in numbers:
            run.send(number)
        assert run.running, "it did not wait for what is at work"
        return run.resumed()


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [
        *((number,) for number in ENDS),
        *itertools.product(ENDS, ENDS),
    ],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_a_signal_lets_groups_at_work_finish_and_the_next_run_goes_on(
    invoke: Invoke, tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    migrate = ("migrate", source, target, *OPTIONS)
    code, stdout, stderr, _ = signalled(tmp_path / "run", SYNC, numbers, *migrate)
    status, word = ENDS[numbers[0]]
    assert (code, stdout) == (status, ""), stderr
    assert [line for line in stderr.splitlines() if "same command" in line] == [
        "hicachectl: Work in progress was finished; continue with the same command"
    ]
    assert stderr.splitlines()[-1] == f"hicachectl: {word.capitalize()}"
    assert "Traceback" not in stderr
    there = contents(target)
    assert 0 < len(there) < len(contents(source))
    pages = {name[:64] for name in there}
    assert there == {n: held for n, held in contents(source).items() if n[:64] in pages}
    document = migrated(invoke, source, target)
    assert document["skipped"] == len(pages)
    assert document["pages"] == PAGES - len(pages)
    assert contents(target) == contents(source)
    assert not [path for path in target.iterdir() if path.suffix == ".tmp"]


@pytest.mark.slow
def test_a_signal_lets_a_pack_be_finished(invoke: Invoke, tmp_path: Path) -> None:
    """The pack is finished even if signals come repeatedly, or while the index is written."""
    source, pack = demo_store(tmp_path / "source"), tmp_path / "a.hcpack"
    migrate = ("migrate", source, f"pack://{pack}", *OPTIONS)
    ended = signalled(tmp_path / "run", INDEX, (signal.SIGINT, signal.SIGINT), *migrate)
    assert "Traceback" not in ended.stderr
    assert ended.code == 130
    back = tmp_path / "back"
    migrated(invoke, f"pack://{pack}", back)
    assert contents(back) == contents(source)


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_a_signal_during_a_move_leaves_each_page_somewhere(
    invoke: Invoke, tmp_path: Path, number: signal.Signals
) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    before = contents(source)
    move = ("migrate", source, target, *OPTIONS, "--move", "--yes")
    assert signalled(tmp_path / "run", SYNC, [number], *move).code == ENDS[number][0]
    assert contents(source) | contents(target) == before
    assert migrated(invoke, source, target, "--move", "--yes")["complete"]
    assert contents(target) == before
    assert contents(source) == {}


@pytest.mark.slow
def test_an_interrupted_dry_run_has_nothing_to_go_on_with(tmp_path: Path) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    look = ("migrate", source, target, *OPTIONS, "--dry-run")
    with paused(tmp_path / "run", SCAN, 1, *look) as run:
        run.send(signal.SIGINT)
        ended = run.resumed()
    assert ended.code == 130
    assert "same command" not in ended.stderr
    assert not target.exists()
