"""--jobs: each command hands it to its stores, which make no more calls at once."""

from __future__ import annotations

from shutil import copytree
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.capabilities import jobs_of
from hicachectl.backends.object_files.store import ObjectFiles
from hicachectl.cli.parameters import options_of
from hicachectl.cli.prose import Item, prose
from tests.bench.slow_files.mounting import slow_mount
from tests.cli.test_help import every_command
from tests.skips import needs_root
from tests.speed import slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.bench.slow_files.mounting import SlowMount
    from tests.conftest import Invoke

ENDS = {"verify": 4}  # exit status, if it is not 0
REPAIR = ("--repair", "quarantine", "--repair-code", "missing-rank", "--grace", "0s", "--yes")
DELAY_MS = 1.0
PAGES = 40
OLD = ("--before", "2100-01-01", "--yes")


def words_by_command(folder: Path) -> dict[str, list[list[object]]]:
    """Return the words with which each command uses stores, in an order that goes well.

    folder: has the demo store `store`, and the copy `copy` of it that lacks an object.
    """
    store, copy, pack = folder / "store", folder / "copy", folder / "store.hcpack"
    profile = ["--profile", store / ".hicachectl" / "demo.toml"]
    asked = folder / "asked.jsonl"
    asked.write_text("[1, 2, 3]\n")
    page = next(store.glob("*.bin")).name[:64]
    return {
        "ls": [[store]],
        "show": [[store, page]],
        "hits": [[store, "--token-ids", asked, *profile]],
        "simulate": [[store, "--trace", asked, *profile]],
        "doctor": [[store, *profile]],
        "profile": [[store]],
        "report": [[store, *profile, "-o", folder / "report.html"]],
        "migrate": [[store, folder / "new", *profile], [store, pack, *profile]],
        "diff": [[store, folder / "new", *profile]],
        "prewarm": [[folder / "new", "--from", store, "--token-ids", asked, *profile]],
        "verify": [[copy, *profile, *REPAIR]],
        "quarantine list": [[copy]],
        "restore": [[copy, copy, "--dry-run"]],
        "rm": [[copy, *OLD]],
        "quarantine purge": [[copy, *OLD]],
    }


def test_every_command_hands_the_number_to_its_stores(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each store of files that a command opens has the number, also a run of a quarantine."""
    invoke("demo", tmp_path / "store", "--pages", 6)
    copytree(tmp_path / "store", tmp_path / "copy")
    next((tmp_path / "copy").glob("*_0_2.bin")).unlink()
    words = words_by_command(tmp_path)
    assert set(words) == {
        " ".join(own)
        for own, command in every_command()
        if "--jobs" in (name for option in options_of(command) for name in option.opts)
    }
    opened: list[ObjectFiles] = []
    prepare = ObjectFiles.__init__

    def noted(store: ObjectFiles, *given: Any, **named: Any) -> None:
        prepare(store, *given, **named)
        opened.append(store)

    monkeypatch.setattr(ObjectFiles, "__init__", noted)
    for command, runs in words.items():
        for given in runs:
            opened.clear()
            invoke(*command.split(), *given, "--jobs", 7, exit_code=ENDS.get(command, 0))
            assert opened, command
            assert {jobs_of(store) for store in opened} == {7}, command


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[SlowMount]:
    """A directory whose calls wait."""
    backing = tmp_path / "backing"
    backing.mkdir()
    with slow_mount(backing, tmp_path / "mount", 0) as mounted:
        yield mounted


class Commands:
    """Commands on a store of a slow directory, and their most calls at once."""

    def __init__(self, invoke: Invoke, mount: SlowMount, local: Path, jobs: int) -> None:
        """Make the store. local: a directory that is not there yet, and does not wait."""
        self._invoke, self._mount, self._local, self._jobs = invoke, mount, local, jobs
        self.store = mount.path / "store"
        invoke("demo", self.store, "--pages", PAGES)
        self._profile = ("--profile", self.store / ".hicachectl" / "demo.toml")

    def most(self, command: str, *words: Any, exit_code: int = 0) -> int:
        """Run a command; return the most calls that were in flight."""
        self._mount.delay_ms = DELAY_MS
        self._mount.forget_calls()
        self._invoke(*command.split(), *words, "--jobs", self._jobs, exit_code=exit_code)
        self._mount.delay_ms = 0
        return self._mount.most_in_flight

    def all(self) -> Iterator[tuple[str, int]]:
        """Run each command; yield its name and its most calls."""
        store, local, profile = self.store, self._local, self._profile
        copy = self._mount.path / "copy"
        yield "ls", self.most("ls", store)
        page = self._invoke("ls", store, "--format", "json").document["pages"][0]["page"]
        yield "show", self.most("show", store, page, *profile)
        yield "verify", self.most("verify", store, *profile)
        yield "report", self.most("report", store, *profile, "-o", local.with_name("r.html"))
        yield "migrate from", self.most("migrate", store, local, *profile)
        yield "migrate to", self.most("migrate", local, copy, *profile)
        yield "diff", self.most("diff", local, copy, *profile)
        for path in sorted(copy.glob("*_0_2.bin")):
            path.unlink()
        yield "repair", self.most("verify", copy, *profile, *REPAIR, exit_code=4)
        yield "list", self.most("quarantine list", copy)
        yield "restore", self.most("restore", copy, copy, "--yes", *profile)
        self._invoke("verify", copy, *profile, *REPAIR, exit_code=4)
        yield "purge", self.most("quarantine purge", copy, *OLD)
        yield "rm", self.most("rm", store, *OLD)


@needs_root
@pytest.mark.parametrize("jobs", [slow(1), slow(8)])
def test_no_command_makes_more_calls_at_once(
    invoke: Invoke, mount: SlowMount, tmp_path: Path, jobs: int
) -> None:
    """With --jobs 1 one call follows the other; with more, most commands make several."""
    most = dict(Commands(invoke, mount, tmp_path / "local", jobs).all())
    assert {name: calls for name, calls in most.items() if calls > jobs} == {}
    for name in most.keys() - {"show", "list"}:
        assert most[name] >= min(jobs, 2), name


@needs_root
@pytest.mark.slow
def test_the_manual_states_the_calls_for_each_object(invoke: Invoke, tmp_path: Path) -> None:
    """A client that knows no file yet makes at most the calls that hicachectl(1) states."""
    stated = [
        int(item.text.split()[0]) for item in prose("hicachectl")["CALLS"] if isinstance(item, Item)
    ]
    backing, local = tmp_path / "backing", tmp_path / "local"
    invoke("demo", backing / "store", "--pages", 160)
    objects = len(list((backing / "store").glob("*.bin")))
    profile = ("--profile", backing / "store" / ".hicachectl" / "demo.toml")
    commands: list[tuple[str, list[object]]] = [
        ("ls", ["store"]),
        ("verify", ["store", *profile]),
        ("migrate", ["store", local]),
        ("migrate", [local, "copy"]),
        ("rm", ["copy", *OLD]),
    ]
    for number, (command, words) in zip(stated, commands, strict=True):
        mount = tmp_path / "mount"
        with slow_mount(backing, mount, 0, attribute_seconds=60) as slow:
            places = {name: slow.path / name for name in ("store", "copy")}
            invoke(command, *(places.get(str(word), word) for word in words))
            calls = sum(slow.calls().values()) / objects
        assert number / 2 < calls < number + 0.5, command
