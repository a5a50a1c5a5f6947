"""Prewarm and `pack repair` killed at any point, and runs killed while they hold a lock.

A destination always has whole pages only, result files are whole or absent, a repair never makes a
pack worse, and the same command run again completes the work. HICACHECTL_TEST_SEED repeats a run,
HICACHECTL_ATTACK_ROUNDS makes it longer.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.arena import Arena
from tests.backends.pack import pack_files
from tests.backends.pack.test_store import contents as pack_contents
from tests.backends.pack.test_store import put
from tests.move.migrations import demo_store, migrated
from tests.paused import paused
from tests.places import half_pages
from tests.prewarming.test_cli import prompts
from tests.speed import ROUNDS, seed_of_run, some
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.killed import Run, Unit
    from tests.places import Place, Places

KILLS = 4 * ROUNDS
SEED = seed_of_run()
WORDS = f"HICACHECTL_TEST_SEED={SEED}"
PAGES = 8
OBJECTS = {
    f"{n:064x}_m_0_1.bin".encode(): random.Random(n).randbytes(300 + 41 * n) for n in range(20)
}


def points(name: str, whole: Run, *, bytes_too: bool) -> Iterator[tuple[Unit, int]]:
    """Yield points to be killed at: before a step, or in the middle of a write."""
    chance = random.Random(f"{SEED} {name}")
    for number in range(KILLS):
        unit: Unit = "bytes" if bytes_too and number % 2 and whole.written else "steps"
        yield unit, chance.randint(1, whole.written if unit == "bytes" else whole.steps)


@pytest.mark.parametrize("kind", ["file", "pack", "mooncake", "hf3fs", "nixl"])
def test_a_prewarm_killed_anywhere_is_completed_by_the_next(
    places: Places, tmp_path: Path, kind: str
) -> None:
    source, destination = places.source("file", fresh=False), places.destination(kind)
    asked = prompts(tmp_path / "asked.jsonl", PAGES, 3)
    results, metrics = tmp_path / "result.json", tmp_path / "hicache.prom"
    command = (
        "prewarm", destination.url, "--from", source.url, "--profile", places.profile,
        "--token-ids", asked, "--buffer-bytes", 1 << 20, "--lock", tmp_path / "lock",
        "-o", results, "--metrics-file", metrics,
    )  # fmt: skip
    whole = places.runner.run(*command, home=tmp_path)
    assert whole.code == 0, whole
    document = json.loads(results.read_text())
    assert document["copied_pages"] == PAGES
    held = destination.held()
    arrived = bytes_of(destination)

    for kill in points(kind, whole, bytes_too=kind != "mooncake"):
        words = f"{WORDS}, {kill}"
        destination.empty()
        for path in (results, metrics):
            path.unlink(missing_ok=True)
        run = places.runner.run(*command, home=tmp_path, kill=kill)
        assert half_pages(destination, held) == [], words
        assert set(map(str.encode, destination.keys())) <= arrived.keys(), words
        check_whole_or_absent(results, metrics, words)
        if run.killed:
            run = places.runner.run(*command, home=tmp_path)
        assert run.code == 0, (words, run)
        document = json.loads(results.read_text())
        assert document["copied_pages"] + document["already_there"] == PAGES, words
        assert document["complete"], words
        assert bytes_of(destination) == arrived, words
        assert metrics.read_text().endswith("\n"), words


def bytes_of(place: Place) -> dict[bytes, bytes]:
    """Return all objects of a place, without times, which a prewarm sets anew."""
    return {
        key: value for key, (value, _) in place.held().items() if not key.startswith(b".hicachectl")
    }


def check_whole_or_absent(results: Path, metrics: Path, words: str) -> None:
    if results.exists():
        json.loads(results.read_text())
    if metrics.exists():
        text = metrics.read_text()
        assert text.endswith("\n"), words
        assert "hicachectl_last_run" in text or "_timestamp" in text, (words, text)


def test_a_plan_that_is_killed_while_it_is_written_is_whole_or_absent(
    places: Places, tmp_path: Path
) -> None:
    source = places.source("file", fresh=False)
    asked = prompts(tmp_path / "asked.jsonl", PAGES, 3)
    plan = tmp_path / "plan.jsonl"
    command = (
        "prewarm", tmp_path / "target", "--from", source.url, "--profile", places.profile,
        "--token-ids", asked, "--dry-run", "--format", "jsonl", "-o", plan,
    )  # fmt: skip
    whole = places.runner.run(*command, home=tmp_path)
    assert whole.code == 0, whole
    written = plan.read_bytes()
    assert written
    for _, step in points("plan", whole, bytes_too=False):
        plan.write_bytes(b"the one before\n")
        places.runner.run(*command, home=tmp_path, kill=("steps", step))
        assert plan.read_bytes() in (b"the one before\n", written), step
        target = tmp_path / "target"
        assert not target.exists() or list(target.iterdir()) == []


REPAIRS = tuple(itertools.product(("cut off", "damaged"), ("in place", "as a new file")))


@pytest.mark.parametrize(("damage", "where"), some(REPAIRS, REPAIRS[0], REPAIRS[-1]))
def test_a_pack_repair_killed_anywhere_loses_nothing_and_is_completed_by_the_next(
    places: Places, tmp_path: Path, damage: str, where: str
) -> None:
    elsewhere = where == "as a new file"
    pack, saved = tmp_path / "x.hcpack", tmp_path / "saved.hcpack"
    with Arena(4 << 20) as arena:
        put(pack, arena, dict(list(OBJECTS.items())[:8]))
        put(pack, arena, dict(list(OBJECTS.items())[8:]))
        objects = [r for r in pack_files.records(pack) if r.kind == pack_files.OBJECT]
        data = bytearray(pack.read_bytes())
        if damage == "damaged":  # also without its end
            data[objects[5].offset + 20] ^= 1
            expected = {k: v for k, v in OBJECTS.items() if k != objects[5].key}
            broken = bytes(data[:-9])
        else:
            broken = bytes(data[: objects[-3].offset + 50])
            expected = dict(list(OBJECTS.items())[:-3])
        code = 4 if damage == "damaged" else 0
        command = ("pack", "repair", pack, *(("-o", saved) if elsewhere else ()))
        result = saved if elsewhere else pack

        pack.write_bytes(broken)
        whole = places.runner.run(*command, home=tmp_path)
        assert whole.code == code, whole
        assert pack_contents(result, arena) == expected
        repaired = result.read_bytes()
        name = f"repair {damage} {elsewhere}"
        for kill in [("steps", n) for n in range(1, whole.steps + 1)] + list(
            points(name, whole, bytes_too=True)
        ):
            words = f"{WORDS}, {kill}"
            pack.write_bytes(broken)
            saved.unlink(missing_ok=True)
            run = places.runner.run(*command, home=tmp_path, kill=kill)
            if elsewhere:
                assert pack.read_bytes() == broken, words
                assert not saved.exists() or saved.read_bytes() == repaired, words
            if run.killed and not saved.exists():
                run = places.runner.run(*command, home=tmp_path)
                assert run.code in (0, code), (words, run)
            assert pack_contents(result, arena) == expected, words
            assert left_in(tmp_path) <= {"x.hcpack", "saved.hcpack"}, words


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


# --- the lock ---


@pytest.mark.parametrize("command", ["migrate", "prewarm"])
def test_a_lock_keeps_others_out_until_its_holder_is_killed(
    invoke: Invoke, places: Places, tmp_path: Path, command: str
) -> None:
    source, target, lock = demo_store(tmp_path / "source"), tmp_path / "target", tmp_path / "lock"
    call = "hicachectl.backends.file.store:FileStore.copy_from"
    arguments: tuple[Any, ...] = ("migrate", source, target)
    if command == "prewarm":
        asked = prompts(tmp_path / "asked.jsonl", PAGES)
        arguments = ("prewarm", target, "--from", source, "--token-ids", asked)
    arguments = (*arguments, "--profile", places.profile, "--lock", lock)
    with paused(tmp_path / "paused", call, 1, *arguments) as holder:
        before = contents(target)
        other = places.runner.run(*arguments, home=tmp_path)
        assert other.code == 0, other
        assert str(lock) in other.stderr
        assert contents(target) == before
        assert holder.running
        holder.end()
    invoke(*arguments)
    # A prewarm copies only the trailing states that end a prefix.
    here, there = contents(source), contents(target)
    assert all(here[name][0] == data for name, (data, _) in there.items())
    assert {name[:64] for name in there} == {name[:64] for name in here}
    if command == "migrate":
        assert migrated(invoke, source, target, "--lock", lock)["skipped"] == PAGES
