"""`hits` of stores that the plug-in wrote: exactly what plug-in servers restore."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.backends.sglang.calls import Call
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.trailer import TRAILER_BYTES
from tests.served_stores import (
    HYBRID,
    INDEXED,
    OTHER_WEIGHTS,
    WEIGHTS,
    forget_ranks,
    served_by,
    served_store,
    serving,
    swap_ranks,
)
from tests.stores import OLD, page

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

PAGES = [page(number) for number in range(5)]
models = pytest.mark.parametrize("profile", [HYBRID, INDEXED], ids=["hybrid", "indexed"])


def hits(invoke: Invoke, store: Path, profile: Profile) -> tuple[dict[str, Any], str]:
    """Return the row of the chain of all pages, and stderr."""
    asked, described = store.parent / "chain.jsonl", store.parent / "profile.toml"
    asked.write_text(json.dumps(PAGES))
    described.write_text(dump_profile(profile))
    found = invoke("hits", store, "--pages", asked, "--profile", described, "--format", "json")
    return found.document["chains"][0], found.stderr


def restored(store: Path, profile: Profile, **options: Any) -> int:
    """Return the length of the chain that plug-in servers restore: states of its end only."""
    with serving(store, profile, **options) as ranks:
        lengths = range(len(PAGES), 0, -1)
        for length in lengths:
            wanted = [
                (rank, pool, one)
                for rank in ranks
                for pool, served in rank.pools.items()
                for one in PAGES[length - 1 if served.trailing else 0 : length]
            ]
            if all(rank.exists(pool, [one]) == [True] for rank, pool, one in wanted):
                return length
    return 0


@pytest.mark.slow
@models
@pytest.mark.parametrize("foreign", [[2], [0], [4], [1, 3]], ids=str)
def test_objects_of_other_weights_stop_a_chain(
    invoke: Invoke, tmp_path: Path, profile: Profile, foreign: list[int]
) -> None:
    """The row names the object; both deployments' hits are those of their servers."""
    store, other = tmp_path / "store", replace(profile, weights=OTHER_WEIGHTS)
    served_store(store, profile, [n for n in range(5) if n not in foreign])
    served_store(store, other, foreign)
    row, said = hits(invoke, store, profile)
    assert row["usable_pages"] == foreign[0] == restored(store, profile)
    assert row["stopped_by"]["page"] == page(foreign[0])
    assert row["stopped_by"]["fault"] == "other_bytes"
    assert (store / row["stopped_by"]["key"]).is_file()
    assert "Objects of other weights, dtype, layout or rank stop 1 chain" in said
    row, _ = hits(invoke, store, other)
    assert row["usable_pages"] == restored(store, other)


def test_objects_of_another_rank_stop_a_chain(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    served_store(store, HYBRID, range(5))
    swapped = swap_ranks(store, page(3))
    row, said = hits(invoke, store, HYBRID)
    assert row["usable_pages"] == 3 == restored(store, HYBRID)
    assert row["stopped_by"]["key"] in swapped
    assert "Objects of other weights, dtype, layout or rank stop 1 chain" in said


def test_trailers_without_a_rank_stop_no_chain(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    served_store(store, HYBRID, range(5))
    forget_ranks(store)
    row, _ = hits(invoke, store, HYBRID)
    assert row["usable_pages"] == 5 == restored(store, HYBRID)


@pytest.mark.parametrize("pool", ["kv", "indexer"])
def test_one_foreign_object_of_a_page_is_enough(invoke: Invoke, tmp_path: Path, pool: str) -> None:
    store, strange = tmp_path / "store", tmp_path / "strange"
    served_store(store, INDEXED, range(5))
    served_store(strange, replace(INDEXED, weights=OTHER_WEIGHTS), range(3, 4))
    name = f"{page(3)}{'.indexer' if pool == 'indexer' else ''}_x-dsa.bin"
    (store / name).write_bytes((strange / name).read_bytes())
    row, _ = hits(invoke, store, INDEXED)
    assert (row["usable_pages"], row["stopped_by"]["key"]) == (3, name)
    assert restored(store, INDEXED) == 3


@models
def test_objects_without_a_trailer_do_not_count_beside_others(
    invoke: Invoke, tmp_path: Path, profile: Profile
) -> None:
    """As for servers that refuse such files, which is the plug-in's default."""
    store = tmp_path / "store"
    served_store(store, profile, range(5))
    for path in store.glob(f"{page(2)}*"):
        path.write_bytes(path.read_bytes()[:-TRAILER_BYTES])
        os.utime(path, (OLD, OLD))
    row, said = hits(invoke, store, profile)
    assert row["usable_pages"] == 2 == restored(store, profile)
    assert row["stopped_by"]["fault"] == "no_trailer"
    assert 'Objects without a trailer stop 1 chain; servers with "unstamped": "read"' in said
    assert restored(store, profile, unstamped="read") == 5


@models
def test_plain_files_count_in_a_store_that_no_plug_in_wrote(
    invoke: Invoke, tmp_path: Path, profile: Profile
) -> None:
    store = tmp_path / "store"
    served_store(store, profile, range(5))
    for path in store.glob("*.bin"):
        path.write_bytes(path.read_bytes()[:-TRAILER_BYTES])
    for marker in (store / ".hicachectl/plugin").iterdir():
        marker.unlink()
    row, said = hits(invoke, store, profile)
    assert (row["usable_pages"], row["stopped_by"]) == (5, None)
    assert "trailer" not in said


def test_another_models_trailers_say_nothing_of_plain_files(invoke: Invoke, tmp_path: Path) -> None:
    """Only servers of the other model use the plug-in."""
    store = tmp_path / "store"
    served_store(store, HYBRID, range(5))
    for path in store.glob("*.bin"):
        path.write_bytes(path.read_bytes()[:-TRAILER_BYTES])
    for marker in (store / ".hicachectl/plugin").iterdir():
        marker.unlink()
    served_store(store, INDEXED, range(5))
    assert hits(invoke, store, HYBRID)[0]["usable_pages"] == 5
    assert hits(invoke, store, INDEXED)[0]["usable_pages"] == 5


@pytest.mark.slow
@models
def test_what_a_server_cleared_does_not_count(
    invoke: Invoke, tmp_path: Path, profile: Profile
) -> None:
    """Although the files may stay for a while; what is written afterwards counts."""
    store = tmp_path / "store"
    served_store(store, profile, range(5))
    with serving(store, profile) as ranks:
        for rank in ranks:
            with Call(5) as call:
                rank.store.clear(call)
    row, said = hits(invoke, store, profile)
    if (store / row["stopped_by"]["key"]).exists():
        assert row["stopped_by"]["fault"] == "cleared"
        assert "from before a server cleared the store stop 1 chain" in said
    assert row["usable_pages"] == 0 == restored(store, profile)
    served_store(store, profile, range(3))
    row, _ = hits(invoke, store, profile)
    assert row["usable_pages"] == 3 == restored(store, profile)


@pytest.mark.slow
def test_weights_that_markers_leave_open_are_asked_for(invoke: Invoke, tmp_path: Path) -> None:
    store, unnamed = tmp_path / "store", replace(HYBRID, weights="")
    served_store(store, HYBRID, range(3))
    assert hits(invoke, store, unnamed)[0]["usable_pages"] == 3
    served_store(store, replace(HYBRID, weights=OTHER_WEIGHTS), range(3, 5))
    row, said = hits(invoke, store, unnamed)
    assert row["usable_pages"] == 5
    assert f"the weights {WEIGHTS}, {OTHER_WEIGHTS}; choose with --weights" in said
    assert served_by(store, HYBRID, PAGES) == [True] * 3 + [False] * 2
