"""`prewarm` between stores with trailers: servers with the plug-in accept what was copied."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.formats.profile import dump_profile
from hicachectl.formats.trailer import TRAILER_BYTES
from hicachectl.formats.transfer import retargeted
from tests.served_stores import HYBRID, INDEXED, OTHER_WEIGHTS, served_by, served_store
from tests.stores import OLD, page

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

PAGES = [page(number) for number in range(5)]


def prewarm(
    invoke: Invoke, directory: Path, profile: Profile, *arguments: object, exit_code: int = 0
) -> dict[str, Any]:
    """Warm directory/target out of directory/source."""
    described = directory / "profile.toml"
    described.write_text(dump_profile(profile))
    stores = (directory / "target", "--from", directory / "source", "--profile", described)
    found = invoke("prewarm", *stores, *arguments, exit_code=exit_code)
    return {**found.document, "stderr": found.stderr}


def chain(directory: Path) -> tuple[str, Path]:
    path = directory / "chain.jsonl"
    path.write_text(json.dumps(PAGES))
    return "--pages", path


@pytest.mark.slow
@pytest.mark.parametrize("profile", [HYBRID, INDEXED], ids=["hybrid", "indexed"])
@pytest.mark.parametrize("every", [True, False])
def test_servers_accept_a_warmed_store(
    invoke: Invoke, tmp_path: Path, profile: Profile, every: bool
) -> None:
    """A new directory; the weights come from the source's markers."""
    served_store(tmp_path / "source", profile, range(5))
    wanted = ("--all",) if every else chain(tmp_path)
    document = prewarm(invoke, tmp_path, replace(profile, weights=""), *wanted)
    assert (document["failed"], document["missing_pages"]) == (0, 0)
    last = [served_by(tmp_path / "target", profile, [one]) for one in PAGES]
    if every or profile is INDEXED:  # else states of the chain's end only
        assert last == [[True]] * 5
    assert last[-1] == [True]
    assert document["usable_tokens"] == 5 * profile.page_size


def test_servers_of_another_topology_accept_what_was_converted(
    invoke: Invoke, tmp_path: Path
) -> None:
    served_store(tmp_path / "source", HYBRID, range(5))
    options = ("--to-tp", 1, "--to-layout", "page_first_direct")
    document = prewarm(invoke, tmp_path, HYBRID, *chain(tmp_path), *options)
    assert document["usable_tokens"] == 5 * HYBRID.page_size
    new = retargeted(HYBRID, tp=1, layout="page_first_direct")
    assert served_by(tmp_path / "target", new, PAGES[-1:]) == [True]


@pytest.mark.slow
@pytest.mark.parametrize("every", [True, False])
def test_objects_of_other_weights_are_missing(invoke: Invoke, tmp_path: Path, every: bool) -> None:
    """Nothing of them is copied, not even with a conversion."""
    served_store(tmp_path / "source", INDEXED, range(3))
    served_store(tmp_path / "source", replace(INDEXED, weights=OTHER_WEIGHTS), range(3, 5))
    wanted = ("--all",) if every else chain(tmp_path)
    document = prewarm(invoke, tmp_path, INDEXED, *wanted, "--to-model", "org/new")
    assert (document["copied_pages"], document["missing_pages"]) == (3, 2)
    new = retargeted(INDEXED, model="org/new")
    assert served_by(tmp_path / "target", new, PAGES) == [True] * 3 + [False] * 2


def test_usable_tokens_are_those_of_servers_with_the_plug_in(
    invoke: Invoke, tmp_path: Path
) -> None:
    """Pages of other weights in the destination are conflicts, and no hits."""
    served_store(tmp_path / "source", INDEXED, range(5))
    served_store(tmp_path / "target", replace(INDEXED, weights=OTHER_WEIGHTS), range(3, 4))
    document = prewarm(invoke, tmp_path, INDEXED, *chain(tmp_path), exit_code=4)
    assert document["failed"] == 1
    assert document["usable_tokens"] == 3 * INDEXED.page_size
    assert served_by(tmp_path / "target", INDEXED, PAGES) == [True] * 3 + [False, True]


def test_a_plan_of_unknown_weights_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    served_store(tmp_path / "source", INDEXED, range(2))
    served_store(tmp_path / "source", replace(INDEXED, weights=OTHER_WEIGHTS), range(2, 4))
    described = tmp_path / "profile.toml"
    described.write_text(dump_profile(replace(INDEXED, weights="")))
    stores = (tmp_path / "target", "--from", tmp_path / "source", "--profile", described)
    said = invoke("prewarm", *stores, "--all", "--to-model", "org/new", exit_code=2).stderr
    assert "choose with --weights" in said


def test_trailers_can_be_dropped(invoke: Invoke, tmp_path: Path) -> None:
    served_store(tmp_path / "source", INDEXED, range(2))
    prewarm(invoke, tmp_path, INDEXED, "--all", "--trailers", "drop")
    assert served_by(tmp_path / "target", INDEXED, PAGES[:2]) == [False] * 2
    target = tmp_path / "target"
    assert served_by(target, INDEXED, PAGES[:2], unstamped="read") == [True] * 2


def test_copies_of_unknown_weights_are_no_hits_of_servers_with_the_plug_in(
    invoke: Invoke, tmp_path: Path
) -> None:
    """The source has no trailers, and nobody names its weights."""
    served_store(tmp_path / "marked", INDEXED, range(5))
    invoke("migrate", tmp_path / "marked", tmp_path / "source", "--trailers", "drop")
    served_store(tmp_path / "target", INDEXED, range(2))
    unnamed = replace(INDEXED, weights="")
    document = prewarm(invoke, tmp_path, unnamed, *chain(tmp_path))
    assert document["copied_pages"] == 3
    assert document["usable_tokens"] == 2 * INDEXED.page_size
    assert "its servers read objects with trailers, but the copies get none" in document["stderr"]
    assert served_by(tmp_path / "target", INDEXED, PAGES) == [True] * 2 + [False] * 3


def test_named_weights_make_plain_files_hits(invoke: Invoke, tmp_path: Path) -> None:
    served_store(tmp_path / "marked", INDEXED, range(5))
    invoke("migrate", tmp_path / "marked", tmp_path / "source", "--trailers", "drop")
    served_store(tmp_path / "target", INDEXED, range(2))
    document = prewarm(invoke, tmp_path, INDEXED, *chain(tmp_path))
    assert document["usable_tokens"] == 5 * INDEXED.page_size
    assert served_by(tmp_path / "target", INDEXED, PAGES) == [True] * 5


def test_a_page_without_trailers_beside_others_is_missing(invoke: Invoke, tmp_path: Path) -> None:
    """Its copy would have none either, and the servers would refuse it."""
    served_store(tmp_path / "source", INDEXED, range(5))
    for path in (tmp_path / "source").glob(f"{page(3)}*"):
        path.write_bytes(path.read_bytes()[:-TRAILER_BYTES])
        os.utime(path, (OLD, OLD))
    document = prewarm(invoke, tmp_path, INDEXED, *chain(tmp_path))
    assert (document["copied_pages"], document["missing_pages"]) == (3, 2)
    assert served_by(tmp_path / "target", INDEXED, PAGES) == [True] * 3 + [False] * 2
