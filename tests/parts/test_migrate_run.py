"""`migrate --shard` and `merge` do what `migrate` does in one process, whatever ends the parts."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.move.migration import carry_out
from hicachectl.parts.job import PartInput
from tests.conftest import Invoke  # noqa: TC001 - pytest reads it
from tests.move.migrations import damaged_stores, demo_store, profile_file
from tests.parts.runs import CommandRun, names_in
from tests.places import SOURCE_PAGES, half_pages, whole_pages
from tests.served_stores import HYBRID, served_store
from tests.small_file_system import small_file_system
from tests.speed import chance_of_run, some
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.conftest import Outcome
    from tests.killed import Run, Unit
    from tests.places import Places

KILLS = 8
VERIFY, MOVE = ("--verify",), ("--move", "--yes")
LISTER_STEPS = 15  # at least
Files = dict[str, tuple[bytes, int]]
_OF_ONE = {"source", "destination", "seconds", "listed", "parts", "missing_parts"}
_OF_ATTEMPT = {"pages", "objects", "bytes", "skipped", "moved"}


def comparable(document: Mapping[str, Any], *, interrupted: bool = False) -> dict[str, Any]:
    """Return what must be equal for one process and for parts.

    interrupted: a part counts what its last attempt did.
    """
    without = _OF_ONE | (_OF_ATTEMPT if interrupted else set())
    kept = {name: value for name, value in document.items() if name not in without}
    return kept | {"problems": sorted(document["problems"], key=repr)}


def files(store: Path) -> Files:
    """Return bytes, with trailers, and times of all objects, and the bytes of markers."""
    found = {path.relative_to(store): path for path in store.rglob("*.bin")}
    held = {str(name): (path.read_bytes(), path.stat().st_mtime_ns)
            for name, path in found.items()}  # fmt: skip
    markers = (store / ".hicachectl/plugin").glob("*")
    return held | {path.name: (path.read_bytes(), 0) for path in markers}


class Sites:
    """Two equal pairs of stores: for one process, and for parts.

    source, target: with {} for the folder of the pair. options: of the command.
    """

    def __init__(
        self,
        invoke: Invoke,
        folder: Path,
        *options: object,
        source: str = "{}/source",
        target: str = "{}/target",
    ) -> None:
        self.invoke = invoke
        self.one, self.divided = folder / "one", folder / "divided"
        self._whole, command = (
            ("migrate", source.format(pair), target.format(pair), *options)
            for pair in (self.one, self.divided)
        )
        self.run = CommandRun(invoke, folder / "run", *command)

    def in_one_process(self, exit_code: int = 0) -> Outcome:
        """Migrate the first pair in one process."""
        return self.invoke(*self._whole, "--format", "json", exit_code=exit_code)

    def check(
        self, whole: Outcome, parts: int, exit_code: int = 0, *, interrupted: bool = False
    ) -> None:
        """Check that the parts have done what one process did."""
        merged = self.run.merged(exit_code=exit_code)
        expected = comparable(whole.document, interrupted=interrupted)
        assert comparable(merged.document, interrupted=interrupted) == expected
        assert (merged.document["parts"], merged.document["missing_parts"]) == (parts, [])
        said = whole.stderr.replace(str(self.one), str(self.divided)).splitlines()
        # A part says this, not the merge of the parts.
        said = [line for line in said if not line.startswith("hicachectl: Created ")]
        assert sorted(merged.stderr.splitlines()) == sorted(said)
        for name in ("source", "target"):
            assert files(self.divided / name) == files(self.one / name)


PROFILED = ("--profile", "PROFILE")
OPTIONS: dict[str, tuple[object, ...]] = {
    "verbatim": (),
    "reshaped": (*PROFILED, "--to-tp", 4, "--to-layout", "page_first_direct"),
    "verified": (*PROFILED, "--verify", "--if-exists", "verify"),
    "overwritten": (*PROFILED, "--if-exists", "overwrite", "--include-partial"),
    "moved": (*PROFILED, "--move", "--yes"),
    "rehearsed": (*PROFILED, "--to-tp", 4, "--dry-run"),
    "listed": ("--pages-from", "PAGES"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_do_what_one_process_does(invoke: Invoke, tmp_path: Path, name: str) -> None:
    """Document, messages, exit status and both stores are equal; repeats do not count."""
    given = {"PROFILE": profile_file(tmp_path / "profile.toml"), "PAGES": tmp_path / "pages"}
    rows = [{"page": page(0), "group": "none"}, {"page": page(1), "group": "other"}]
    given["PAGES"].write_text("\n".join([*map(json.dumps, rows), page(2)]))
    sites = Sites(invoke, tmp_path, *(given.get(str(one), one) for one in OPTIONS[name]))
    damaged_stores(sites.one)
    shutil.copytree(sites.one, sites.divided)
    exit_code = 0 if name in ("reshaped", "overwritten", "listed", "rehearsed") else 4
    whole = sites.in_one_process(exit_code)
    for part in (0, 2, 2, 1):
        sites.run.part(part, 3)
    sites.check(whole, 3, exit_code)
    if name == "rehearsed":
        text = invoke("merge", sites.run.path, "--again").stdout
        assert text == invoke(*sites.run.command).stdout
        assert not (sites.divided / "target/.hicachectl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pack", "trailers", "folders"])
def test_packs_trailers_and_folders(invoke: Invoke, tmp_path: Path, kind: str) -> None:
    """A pack as source, new trailers, and folders in the destination give the same files."""
    options = ["--profile", profile_file(tmp_path / "profile.toml", HYBRID)]
    target, source = "{}/target", "{}/source"
    if kind == "pack":
        source = "pack://{}/source/all.hcpack"
    elif kind == "trailers":
        options += ["--trailers", "write", "--to-tp", "4"]
    else:
        target = "file://{}/target?folders=hex2"
    sites = Sites(invoke, tmp_path, *options, source=source, target=target)
    sites.one.mkdir()
    if kind == "folders":
        served_store(sites.one / "source", HYBRID)
    else:
        demo_store(sites.one / "source")
    if kind == "pack":
        invoke("migrate", sites.one / "source", source.format(sites.one))
    shutil.copytree(sites.one, sites.divided)
    whole = sites.in_one_process()
    sites.run.all(3)
    sites.check(whole, 3)
    assert whole.document["pages"] >= 4


@pytest.fixture
def sites(invoke: Invoke, tmp_path: Path) -> Sites:
    """Return pairs with the demo's pages, to be written for TP 4."""
    profile = profile_file(tmp_path / "profile.toml")
    made = Sites(invoke, tmp_path, "--profile", profile, "--to-tp", 4)
    made.one.mkdir()
    demo_store(made.one / "source")
    shutil.copytree(made.one, made.divided)
    return made


@pytest.mark.slow
def test_other_commands_are_refused(invoke: Invoke, sites: Sites, tmp_path: Path) -> None:
    """A part of another migration changes nothing; merge names the part that is missing."""
    sites.run.part(0, 2)
    before = names_in(sites.run.path / "parts")
    target = files(sites.divided / "target")
    other = profile_file(tmp_path / "other.toml", HYBRID)
    command = sites.run.command
    for changed, said in (
        ([*command[:2], tmp_path / "elsewhere", *command[3:]], "destination file://"),
        ([*command[:-1], 1], "destination's profile: tp 4, but this command has 1"),
        ([*command[:3], "--profile", other, *command[5:]], "profile: weights none, but"),
        ([*command, "--verify"], "--verify False, but this command has True"),
        ([*command, "--grace", "2h"], "--grace 60.0, but this command has 7200.0"),
        ([*command, "--model", "a/b"], "--model none, but this command has a/b"),
    ):
        refused = CommandRun(invoke, sites.run.path, *changed).part(1, 2, exit_code=2)
        assert said in refused
        assert "was begun with" in refused.splitlines()[-1]
    assert (names_in(sites.run.path / "parts"), files(sites.divided / "target")) == (before, target)
    merged = sites.run.merged(exit_code=4)
    assert (merged.document["complete"], merged.document["missing_parts"]) == (False, [1])
    assert f"{sites.run.path}: there is no result of part 1 of 2" in merged.stderr


def test_a_pack_is_no_destination_of_parts(invoke: Invoke, sites: Sites) -> None:
    """Several processes cannot write one pack, so none of them begins it."""
    command = [*sites.run.command[:2], f"pack://{sites.divided}/all.hcpack"]
    refused = CommandRun(invoke, sites.run.path, *command).part(0, 2, exit_code=2)
    assert "several processes cannot write one pack; give a directory" in refused
    assert names_in(sites.divided) == ["source"]
    assert not sites.run.path.exists()


@pytest.mark.slow
def test_limits_are_divided(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has its share of --bwlimit, and says so.

    The parts of one machine, and only they, share the readers of a store whose reads grant leases.
    """
    shares = []
    parts_here = 1

    def on_machine(**members: Any) -> PartInput:
        return PartInput(**{**members, "parts_here": parts_here})

    def noted(*arguments: Any, **options: Any) -> Any:
        given = arguments[0].options
        shares.append((given.bytes_per_second, given.jobs))
        return carry_out(*arguments, **options)

    monkeypatch.setattr("hicachectl.parts.migrate.carry_out", noted)
    said = sites.run.part(0, 4, "--bwlimit", "40MB")
    assert "Each of the 4 parts takes an equal share of --bwlimit" in said
    monkeypatch.setattr("hicachectl.parts.job.Leases", FileStore)
    sites.run.part(1, 4, "--bwlimit", "40MB")
    monkeypatch.setattr("hicachectl.parts.running.PartInput", on_machine)
    parts_here = 3
    sites.run.part(2, 4, "--bwlimit", "40MB")
    sites.run.part(3, 4, "--bwlimit", "40MB", "--jobs", 2)
    assert shares == [(10_000_000, jobs) for jobs in (None, None, 1, 2)]


@pytest.mark.slow
def test_a_full_destination(sites: Sites, tmp_path: Path) -> None:
    """Parts that find no room say so, and keep whole pages only; another run copies the others."""
    sites.in_one_process()
    target = sites.divided / "target"
    with small_file_system(target, "400k"):
        said = sites.run.part(0, 1, "--no-space-check", exit_code=4)
        assert "Part 0 of 1 is not complete; to complete the work" in said
        assert "stopped: destination full" in said
        merged = sites.run.merged(exit_code=4)
        assert (merged.document["complete"], merged.document["stopped_by"]) == (
            False, "destination full"
        )  # fmt: skip
        assert "not complete: part 0 of 1; to complete the work" in merged.stderr
        assert 0 < len(files(target)) < len(files(sites.one / "target"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(target)], check=True)
        second = CommandRun(sites.invoke, tmp_path / "second", *sites.run.command)
        second.part(0, 1, "--no-space-check")
        assert second.merged().document["complete"]
        assert files(target) == files(sites.one / "target")


@pytest.mark.slow
def test_a_full_run_directory(sites: Sites) -> None:
    """A part that cannot record its result says so, and is completed later."""
    sites.in_one_process()
    with small_file_system(sites.run.path, "1m"):
        sites.run.part(0, 2)
        filler = sites.run.path / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        refused = sites.run.part(1, 2, exit_code=2)
        assert "No space left on device; make room, then run the part again" in refused
        filler.unlink()
        sites.run.part(1, 2)
        assert sites.run.merged().document["complete"]
        for name in ("source", "target"):
            assert files(sites.divided / name) == files(sites.one / name)


class KilledParts:
    """A migration between directories in parts, each in a process that is killed at some steps."""

    def __init__(self, places: Places, home: Path, options: tuple[object, ...]) -> None:
        self._places = places
        self._home = home
        self._options = options
        self.source = places.source("file", fresh=True)
        self.before = self.source.held()
        self.destination = places.destination("file")
        self.whole = self._run("--format", "json")
        self.after = self.source.held()
        self.arrived = self.destination.held()
        self.source.fill(SOURCE_PAGES)
        self.source.set_times(self.before)
        self.destination.empty()

    def _run(self, *more: object, kill: tuple[Unit, int] | None = None) -> Run:
        return self._places.runner.run(
            "migrate", self.source.url, self.destination.url, "--profile", self._places.profile,
            "--buffer-bytes", 512 << 10, "--jobs", 1, *self._options, *more, home=self._home,
            kill=kill,
        )  # fmt: skip

    def part(self, part: int, parts: int, kill: tuple[Unit, int] | None) -> Run:
        """Do a part; check that no page is lost and no server finds half a page."""
        run = self._run("--shard", f"{part}/{parts}", "--run", self._home / "run", kill=kill)
        assert half_pages(self.destination, self.arrived) == []
        kept = whole_pages(self.source, self.before)
        assert len(kept | whole_pages(self.destination, self.arrived)) == SOURCE_PAGES
        return run


@pytest.mark.slow
@pytest.mark.parametrize("options", some([VERIFY, MOVE], MOVE), ids=" ".join)
def test_killed_parts_are_completed(
    invoke: Invoke, places: Places, tmp_path: Path, options: tuple[object, ...]
) -> None:
    """The lister and parts killed anywhere lose nothing; run again, they complete the run."""
    killed = KilledParts(places, tmp_path, options)
    chance, words = chance_of_run()
    parts, ended, deaths = 3, set[int](), 0
    while len(ended) < parts:
        todo = [part for part in range(parts) if part not in ended]
        listed = (tmp_path / "run/run.json").exists()
        part = chance.choice(todo) if listed else 0
        # A part has fewer steps than the whole.
        last = killed.whole.steps // chance.choice((2, 4, 8)) if deaths else LISTER_STEPS
        kill: tuple[Unit, int] | None = ("steps", chance.randint(1, last))
        run = killed.part(part, parts, kill if deaths < KILLS else None)
        deaths += run.killed
        if (tmp_path / f"run/parts/{part:05}.json").exists():  # maybe killed right afterwards
            ended.add(part)
    assert deaths, words
    merged = invoke("merge", tmp_path / "run", "--format", "json").document
    whole = killed.whole.document
    # A part counts what it did itself.
    counted = {"pages", "objects", "bytes", "skipped", "moved", "gone"}
    assert {name for name in whole if merged[name] != whole[name]} - _OF_ONE <= counted, words
    assert merged["pages"] <= whole["pages"], words
    assert killed.destination.held() == killed.arrived, words
    assert killed.destination.leftovers() == [], words
    assert killed.source.held() == killed.after, words
