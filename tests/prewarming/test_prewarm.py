"""Prewarm copies the pages that servers could restore, best first, within its limits."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec import structs

from hicachectl.backends.base import Status
from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.errors import UnsupportedByBackend, UsageError
from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.move.store_pair import CopyOptions
from hicachectl.move.survey import survey_source, verbatim_routes
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.scanning import take_inventory
from hicachectl.prewarming import prewarm as prewarming
from hicachectl.prewarming.page_plan import PrewarmRequest
from hicachectl.prewarming.prewarm import prewarm
from hicachectl.requests.chains import Hashing, Requests, requests_of
from hicachectl.requests.forms import Request as Prompt
from hicachectl.requests.hits import find_hits
from tests.move.migrations import MODEL, demo_store
from tests.stores import contents

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.prewarming.outcome import PrewarmOutcome

    IntArray = np.ndarray[Any, np.dtype[np.int64]]

PAGES = 12  # of the demo's one chain; pages 3, 7 and 11 have states
SEED = 20_251_120
MINUTE_NS = 60 * 10**9


def tokens(pages: int = PAGES) -> list[int]:
    """Return the tokens of the demo's first pages."""
    rng = np.random.default_rng(SEED)
    drawn: list[int] = rng.integers(0, 150_000, pages * PROFILE.page_size).tolist()
    return drawn


HASHES = page_hashes_hex(np.array(tokens()), PROFILE.page_size)


def chains(*lengths: int) -> Requests:
    """Return prompts for the demo's chain, each cut one token after the given number of pages."""
    prompts = [
        Prompt("test", [*tokens(), 1][: length * PROFILE.page_size + 1]) for length in lengths
    ]
    return requests_of(prompts, Hashing.of(PROFILE))


def in_turn(asked: Requests) -> IntArray:
    """Rank pages by their first position."""
    return np.arange(len(asked.names))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return demo_store(tmp_path / "source", PAGES)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "target"
    directory.mkdir()
    return directory


def warmed(source: Path, target: Path, asked: Requests | None, **options: Any) -> PrewarmOutcome:
    with FileStore(source) as one, FileStore(target) as other:
        return prewarm(
            one, other, PrewarmRequest(profile=PROFILE, requests=asked, rank=in_turn, **options)
        )


def usable_share(outcome: PrewarmOutcome) -> float:
    """Return the share of the requested tokens that servers can restore."""
    share: float = outcome.document["usable_tokens"] / outcome.document["requested_tokens"]
    return share


def usable(store: Path, asked: Requests) -> list[int]:
    with FileStore(store) as opened:
        inventory = take_inventory(opened, PROFILE)
    pages: list[int] = find_hits(inventory, 0, asked).usable_pages.tolist()
    return pages


def states(store: Path) -> set[str]:
    return {name[:64] for name in contents(store) if ".mamba" in name}


def pages_of(store: Path) -> set[str]:
    return {name[:64] for name in contents(store)}


def test_a_prompt_is_copied_as_far_as_it_can_be_restored(source: Path, target: Path) -> None:
    outcome = warmed(source, target, chains(10))
    # Only pages 7 and 11 have states, so pages 8 and 9 would be of no use.
    assert pages_of(target) == set(HASHES[:8])
    assert usable(target, chains(10)) == [8]
    assert outcome.document["requested_pages"] == 10
    assert outcome.document["copied_pages"] == 8
    assert outcome.document["missing_pages"] == 2
    assert outcome.document["usable_tokens"] == 8 * PROFILE.page_size
    assert usable_share(outcome) == 0.8
    assert outcome.document["complete"] is True


def test_only_states_that_can_be_hit_are_copied(source: Path, target: Path) -> None:
    warmed(source, target, chains(12))
    assert states(target) == {HASHES[11]}
    warmed(source, target, chains(5))
    assert states(target) == {HASHES[3], HASHES[11]}


def test_a_damaged_state_that_no_prefix_needs_keeps_nothing_back(
    source: Path, target: Path
) -> None:
    os.truncate(source / f"{HASHES[3]}.mamba_{MODEL}_0_2.bin", 5)
    outcome = warmed(source, target, chains(12))
    assert outcome.document["copied_pages"] == 12
    assert (outcome.document["failed"], outcome.problems) == (0, [])
    assert states(target) == {HASHES[11]}


def test_a_page_that_the_source_lacks_ends_what_is_copied(source: Path, target: Path) -> None:
    (source / f"{HASHES[5]}_{MODEL}_1_2.bin").unlink()
    outcome = warmed(source, target, chains(12))
    assert pages_of(target) == set(HASHES[:4])
    assert outcome.document["missing_pages"] == 8


@pytest.mark.slow
def test_what_is_there_is_not_copied_again(source: Path, target: Path) -> None:
    warmed(source, target, chains(4))
    outcome = warmed(source, target, chains(8))
    assert outcome.document["already_there"] == 4
    assert outcome.document["copied_pages"] == 4
    again = warmed(source, target, chains(8))
    assert (again.document["copied_pages"], again.document["bytes"]) == (0, 0)
    assert usable_share(again) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "whole"), [(3, 0), (4, 4), (7, 4), (8, 8), (12, 12)])
def test_a_budget_of_pages_holds_whole_prefixes_only(
    source: Path, target: Path, budget: int, whole: int
) -> None:
    outcome = warmed(source, target, chains(12), budget_pages=budget)
    assert pages_of(target) == set(HASHES[:whole])
    assert usable(target, chains(12)) == [whole]
    assert outcome.document["stopped_by"] == ("budget" if budget < PAGES else None)


@pytest.mark.parametrize(("spare", "whole"), [(0, 8), (-1, 4)])
def test_a_budget_of_bytes_is_kept_and_states_count(
    source: Path, target: Path, spare: int, whole: int
) -> None:
    need = sum(
        len(data)
        for name, (data, _) in contents(source).items()
        if name[:64] in HASHES[:8] and (".mamba" not in name or name.startswith(HASHES[7]))
    )
    outcome = warmed(source, target, chains(12), budget_bytes=need + spare)
    assert pages_of(target) == set(HASHES[:whole])
    assert (outcome.document["bytes"] == need) == (spare == 0)


def test_a_dry_run_writes_nothing_and_lists_the_plan(source: Path, target: Path) -> None:
    outcome = warmed(source, target, chains(8), dry_run=True)
    assert not contents(target)
    assert outcome.plan is not None
    assert outcome.plan.column("page").to_pylist() == HASHES[:8]
    assert outcome.document["copied_pages"] == 8
    assert outcome.document["usable_tokens"] == 0


def test_the_best_pages_are_the_newest_in_the_end(source: Path, target: Path) -> None:
    warmed(source, target, chains(8), options=CopyOptions(jobs=1))
    times = {name: mtime for name, (_, mtime) in contents(target).items()}
    newest = [max(t for name, t in times.items() if name.startswith(h)) for h in HASHES[:8]]
    assert newest == sorted(newest, reverse=True)


def test_touches_that_take_too_long_are_left_out_but_not_those_of_the_best(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[list[str]] = []
    clock = [0.0]

    def slowly(store: FileStore, rows: Any) -> Any:
        keys = [key.decode()[:64] for key in rows.column("key").to_pylist()]
        touched.append(list(dict.fromkeys(keys)))
        clock[0] += 1.0
        return np.ones(len(rows), dtype=np.bool_)

    monkeypatch.setattr(FileStore, "touch", slowly)
    monkeypatch.setattr(FileStore, "limits", replace(FileStore.limits, batch_objects=1))
    monkeypatch.setattr(prewarming, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with FileStore(source) as one, FileStore(target) as other:
        inventory = take_inventory(one, PROFILE)
        routes = verbatim_routes(inventory.table.deployments)
        (survey,) = survey_source(PageGroups(inventory), routes)
        place = pc.index_in(survey.pages, value_set=pa.array(HASHES)).to_numpy()
        prewarming.touch_pages(other, survey, np.argsort(place), until=4.5)
    assert touched == [[HASHES[at]] for at in (11, 2, 1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("chained", [True, False])
def test_pages_in_another_layout_are_not_already_there(
    source: Path, target: Path, chained: bool
) -> None:
    """Keys and sizes are those of the copies; only the bytes tell."""
    direct = structs.replace(PROFILE, layout="page_first_direct")
    asked = chains(8) if chained else None
    options: dict[str, Any] = {"destination_profile": direct}
    done = warmed(source, target, asked, **options).document
    assert done["already_there"] == 0
    again = warmed(source, target, asked, **options)
    assert (again.document["already_there"], again.document["copied_pages"]) == (
        done["copied_pages"], 0,
    )  # fmt: skip
    assert not again.result().failed
    for path in target.iterdir():
        shutil.copyfile(source / path.name, path)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    mixed = warmed(source, target, asked, **options)
    assert (mixed.document["already_there"], mixed.document["failed"]) == (0, done["copied_pages"])
    assert mixed.document["usable_tokens"] == 0
    assert "perhaps in another layout" in mixed.problems[0].detail
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_destination_that_evicts_ends_the_run_with_what_it_holds(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_from = FileStore.copy_from
    calls = []

    def evicting(store: FileStore, *arguments: Any, **options: Any) -> Any:
        result = copy_from(store, *arguments, **options)
        calls.append(result)
        for name in list(contents(target))[:-1]:
            (target / name).unlink()
        assert all(status == Status.OK for status in result.statuses)
        return result

    monkeypatch.setattr(FileStore, "copy_from", evicting)
    outcome = warmed(source, target, chains(12), options=CopyOptions(jobs=1, buffer_bytes=1 << 18))
    assert outcome.document["stopped_by"] == "destination evicts"
    assert "it holds about" in outcome.remarks[0]


def test_pins_are_refused_where_there_are_none(source: Path, target: Path) -> None:
    with pytest.raises(UnsupportedByBackend, match="--pin"):
        warmed(source, target, chains(4), options=CopyOptions(pin=True))


def test_a_store_cannot_warm_itself(source: Path) -> None:
    with pytest.raises(UsageError, match="are the same"):
        warmed(source, source, chains(4))


def test_all_whole_pages_can_be_asked_for(source: Path, target: Path) -> None:
    (source / f"{HASHES[0]}_{MODEL}_1_2.bin").unlink()
    outcome = warmed(source, target, None)
    assert pages_of(target) == set(HASHES[1:])
    assert outcome.document["requested_pages"] == outcome.document["copied_pages"] == PAGES - 1
    assert usable_share(outcome) == 1.0
    assert warmed(source, target, None).document["already_there"] == PAGES - 1


def aged(store: Path, minutes: dict[str, int]) -> None:
    """Set the age of pages in minutes; each page is one second newer than its parent."""
    newest = time.time_ns() // MINUTE_NS * MINUTE_NS
    for name in contents(store):
        moment = newest - minutes[name[:64]] * MINUTE_NS + HASHES.index(name[:64]) * 10**9
        os.utime(store / name, ns=(moment, moment))


def test_of_all_pages_the_newest_minute_is_best_and_in_it_what_others_follow(
    source: Path, target: Path
) -> None:
    # Pages 0 to 3 are the oldest, 8 to 11 the newest.
    aged(source, {page: (9, 5, 1)[at // 4] for at, page in enumerate(HASHES)})
    best_first = [*HASHES[8:], *HASHES[4:8], *HASHES[:4]]
    outcome = warmed(source, target, None, budget_pages=6)
    assert pages_of(target) == set(best_first[:6])
    assert outcome.document["stopped_by"] == "budget"
    assert outcome.plan is not None
    assert outcome.plan.column("page").to_pylist() == best_first[:6]
    warmed(source, target, None, options=CopyOptions(jobs=1))
    times = {name: mtime for name, (_, mtime) in contents(target).items()}
    newest = [max(t for name, t in times.items() if name.startswith(h)) for h in best_first]
    assert newest == sorted(newest, reverse=True)


def test_all_pages_are_copied_the_newest_first(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aged(source, {page: PAGES - at for at, page in enumerate(HASHES)})
    copy_from = FileStore.copy_from
    calls: list[int] = []

    def failing(store: FileStore, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return copy_from(store, *arguments, **options)

    monkeypatch.setattr(FileStore, "copy_from", failing)
    outcome = warmed(source, target, None, options=CopyOptions(jobs=1, buffer_bytes=1 << 18))
    held = outcome.document["copied_pages"]
    assert 0 < held < PAGES
    assert pages_of(target) >= set(HASHES[-held:])
    assert isinstance(outcome.interruption, KeyboardInterrupt)
    assert (outcome.document["complete"], outcome.document["stopped_by"]) == (False, "interrupted")


@pytest.mark.slow
def test_pages_that_were_there_are_touched_too(source: Path, target: Path) -> None:
    warmed(source, target, chains(4))
    old = {name: mtime for name, (_, mtime) in contents(target).items()}
    warmed(source, target, chains(8))
    new = {name: mtime for name, (_, mtime) in contents(target).items()}
    assert all(new[name] > old[name] for name in old if ".mamba" not in name)


def test_pages_whose_prefixes_nobody_knows_are_copied_whole(source: Path, target: Path) -> None:
    named = pa.array([HASHES[6], HASHES[2], HASHES[6], "0" * 64])
    outcome = warmed(source, target, None, pages=named)
    assert pages_of(target) == {HASHES[6], HASHES[2]}
    assert outcome.plan is not None
    assert outcome.plan.column("page").to_pylist() == [HASHES[6], HASHES[2]]
    assert (outcome.document["requested_pages"], outcome.document["missing_pages"]) == (3, 1)


def test_an_object_of_another_size_at_the_destination_is_a_failure(
    source: Path, target: Path
) -> None:
    name = f"{HASHES[1]}_{MODEL}_1_2.bin"
    (target / name).write_bytes(b"short")
    outcome = warmed(source, target, chains(4))
    assert outcome.document["failed"] == 1
    assert outcome.problems[0].page == HASHES[1]


def test_all_pages_that_are_evicted_are_not_called_usable(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_from = FileStore.copy_from

    def evicting(store: FileStore, *arguments: Any, **options: Any) -> Any:
        result = copy_from(store, *arguments, **options)
        for name in contents(target):
            (target / name).unlink()
        return result

    monkeypatch.setattr(FileStore, "copy_from", evicting)
    outcome = warmed(source, target, None)
    assert outcome.document["usable_tokens"] == 0
    assert usable_share(outcome) == 0.0
