"""Parts into and out of servers and packs do what one process does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.parts.test_prewarm_run import comparable
from tests.places import SOURCE_PAGES, page_of
from tests.prewarming.test_cli import prompts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.places import Places

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parts-places")]


@pytest.mark.parametrize("kind", ["mooncake", "hf3fs"])
def test_parts_into_servers(places: Places, tmp_path: Path, kind: str) -> None:
    """Parts write into Mooncake and 3FS what one process writes."""
    source, destination = places.source("file", fresh=False), places.destination(kind)
    command = ("migrate", source.url, destination.url, "--profile", places.profile)
    assert places.runner.run(*command, home=tmp_path).code == 0
    whole = destination.held()
    destination.empty()
    for part in (0, 1):
        divided = ("--shard", f"{part}/2", "--run", tmp_path / "run")
        assert places.runner.run(*command, *divided, home=tmp_path).code == 0
    assert len({page_of(key.decode()) for key in whole}) == SOURCE_PAGES
    assert {key: value for key, (value, _) in destination.held().items()} == {
        key: value for key, (value, _) in whole.items()
    }


@pytest.mark.parametrize(
    ("source", "destination"),
    [("file", "mooncake"), ("mooncake", "hf3fs"), ("pack", "file")],
)
def test_parts_between_stores_of_all_kinds(
    places: Places, tmp_path: Path, source: str, destination: str
) -> None:
    """Parts into and out of servers and packs give the document and objects of one process."""
    origin, target = places.source(source, fresh=False), places.destination(destination)
    asked = prompts(tmp_path / "asked.jsonl", 4, 8, 12)
    options = ("--from", origin.url, "--profile", places.profile, "--token-ids", asked)
    command = ("prewarm", target.url, *options)
    whole = places.runner.run(*command, home=tmp_path)
    expected = target.held()
    target.empty()
    for part in (0, 2, 2, 1):
        divided = ("--shard", f"{part}/3", "--run", tmp_path / "run")
        assert places.runner.run(*command, *divided, home=tmp_path).code == 0
    merged = places.runner.run("merge", tmp_path / "run", "--format", "json", home=tmp_path)
    assert comparable(merged.document) == comparable(whole.document)
    assert merged.document["copied_pages"]
    found = target.held()
    assert {key: data for key, (data, _) in found.items()} == {
        key: data for key, (data, _) in expected.items()
    }
