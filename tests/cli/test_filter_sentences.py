"""`ls` with filters lists the groups among which the other commands choose, on random stores."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from hicachectl.__main__ import run
from tests.speed import examples
from tests.stores import DSA, OLD, page, put

Group = tuple[str, str | None]  # page, model; None if the keys are ambiguous

OWN = "x-dsa"
STEMS = {
    OWN: {"_x-dsa": 9216, ".indexer_x-dsa": 1056},
    "y": {"_y_0_2": 64, "_y_1_2": 64, ".draft_y_0_2": 32, ".draft_y_1_2": 32},
    "z": {f"_z_{rank}_4": 48 for rank in range(4)},
    "open": {"_open_0_2": 64},
}
PAGES = 8
DAYS = (0, 1, 5, 9)  # ages of groups; those of today may be in flight
DAY = 86400


@dataclass(frozen=True)
class Case:
    """Groups of a store, and filters.

    groups: of each page and model, the objects that it has, their damage, and its age in days.
    copied: pages of the profile's model that the destination has.
    """

    groups: dict[tuple[int, str], tuple[tuple[str, ...], bool, int]]
    filters: tuple[str, ...]
    listed: tuple[tuple[int, str | None], ...] | None
    copied: frozenset[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = {}
    for key in draw(st.sets(st.tuples(st.integers(0, PAGES - 1), st.sampled_from(list(STEMS))))):
        stems = list(STEMS[key[1]])
        has = draw(st.just(stems) | st.lists(st.sampled_from(stems), min_size=1, unique=True))
        groups[key] = tuple(has), draw(st.booleans()), draw(st.sampled_from(DAYS))
    texts = {
        "--model": st.sampled_from(["x/dsa", "y", "z", "none"]),
        "--tp": st.sampled_from(["1", "2", "4"]),
        "--pool": st.sampled_from(["kv", "indexer", "draft"]),
        "--page": st.sampled_from("0123456789abcdef"),
        "--state": st.sampled_from(["whole", "partial", "orphan", "unknown", "whole,orphan"]),
        "--since": st.sampled_from(["3d", "7d"]),
        "--before": st.sampled_from(["12h", "3d", "7d"]),
    }
    chosen = draw(st.lists(st.sampled_from([*texts, "--no-tag"]), unique=True, max_size=3))
    filters = [
        text for name in chosen for text in ((name, draw(texts[name])) if name in texts else [name])
    ]
    row = st.tuples(st.integers(0, PAGES - 1), st.sampled_from([None, "x-dsa", "y tp2", "?"]))
    listed = draw(st.none() | st.lists(row, max_size=6).map(tuple))
    if not filters and listed is None:
        filters = ["--before", "12h"]
    return Case(groups, tuple(filters), listed, draw(st.frozensets(st.integers(0, PAGES - 1))))


def write_whole(directory: Path) -> None:
    """Write pages that fit the profile: a store that has none of them is refused."""
    for number in range(PAGES, PAGES + 3):
        for stem, nbytes in STEMS[OWN].items():
            put(directory, f"{page(number)}{stem}.bin", nbytes)


def write(case: Case, directory: Path) -> None:
    write_whole(directory)
    for (number, model), (stems, is_damaged, days) in case.groups.items():
        for at, stem in enumerate(stems):
            nbytes = STEMS[model][stem] - (1 if is_damaged and at == 0 else 0)
            moment = OLD if days == DAYS[-1] else time.time() - days * DAY
            put(directory, f"{page(number)}{stem}.bin", nbytes, moment)


def document(*arguments: object) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        words = [*map(str, arguments), "--format", "json", "-o", str(output)]
        assert run(words) in (0, 4), words
        read: dict[str, Any] = json.loads(output.read_text())
    return read


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file()}


def groups_of(rows: list[dict[str, Any]]) -> set[Group]:
    return {(row["page"], row["model"]) for row in rows}


def group_of(name: str) -> Group:
    """Return the group of a file name of a model that the profile or all its ranks show."""
    return name[:64], name[64:].removesuffix(".bin").split("_")[1]


@examples(25)
@given(cases())
def test_other_commands_choose_among_what_ls_lists(case: Case) -> None:
    with TemporaryDirectory() as folder:
        store, target = Path(folder) / "store", Path(folder) / "target"
        store.mkdir()
        target.mkdir()
        write(case, store)
        write_whole(target)
        for number in case.copied:
            for stem in case.groups.get((number, OWN), ((), False, 0))[0]:
                shutil.copy2(store / f"{page(number)}{stem}.bin", target)
        profile = Path(folder) / "profile.toml"
        profile.write_text(DSA)
        filters: list[object] = list(case.filters)
        if case.listed is not None:
            rows = [{"page": page(number), "group": group} for number, group in case.listed]
            (path := Path(folder) / "pages").write_text("\n".join(map(json.dumps, rows)))
            filters += ["--pages", path]
        words = [store, "--profile", profile, *filters]
        listed = document("ls", *words)["pages"]
        event(f"groups listed: {min(len(listed), 4)}")
        check_rm(words, filters, listed)
        check_migrate(words, target, listed)
        check_repair(words, store, profile, listed)


def check_rm(words: list[object], filters: list[object], listed: list[dict[str, Any]]) -> None:
    more = ["--all-deployments"] if "--pages" in filters else []
    if "partial" in filters:
        more.append("--despite-profile")
    removed = document("rm", *words, *more, "--dry-run")
    named = "--pages" in filters or "unknown" in filters
    ambiguous = [row for row in listed if row["model"] is None and not named]
    taken = {(row["page"], row["model"] or None) for row in removed["groups"]}
    assert taken <= groups_of(listed)
    assert len(taken) + removed["in_flight"] + len(ambiguous) == len(listed)


def check_migrate(words: list[object], target: Path, listed: list[dict[str, Any]]) -> None:
    before = names(target)
    store, *filters = words
    copied = document("migrate", store, target, *filters, "--allow-empty")
    new = {group_of(name) for name in names(target) - before if name.endswith(".bin")}
    assert new <= groups_of(listed)
    assert copied["pages"] == len(new)
    not_copied = copied["conflicts"] + copied["failed"] + copied["gone"]
    assert copied["pages"] + copied["skipped"] + copied["left_out"] + not_copied == len(listed)


def check_repair(
    words: list[object], store: Path, profile: Path, listed: list[dict[str, Any]]
) -> None:
    checks = ("--checks", "names,groups,sizes", "--allow-empty")
    found = document("verify", store, "--profile", profile, *checks)["findings"]
    wrong = {group_of(row["key"]) for row in found if row["severity"] == "error"}
    before = names(store)
    repair = ("--repair", "delete", "--yes", "--despite-profile")
    document("verify", *words, *checks, *repair)
    gone = {group_of(name) for name in before - names(store)}
    own = {(name, model) for name, model in groups_of(listed) if model == OWN}
    assert gone == wrong & own
