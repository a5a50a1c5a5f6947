"""Messages about no match: what the store has instead, or the filter that matches nothing."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import EVERYTHING, explain_selection
from tests.move.repairs import default_quarantine, dsa_store, repaired, shorten
from tests.move.repairs import kv as kv_name
from tests.stores import DSA, page, put, put_pages
from tests.terminals import answering

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

LOOKING = [("ls",), ("ls", "--objects"), ("ls", "--summary"), ("verify", "--allow-empty")]


def said(invoke: Invoke, *arguments: object, exit_code: int = 0) -> str:
    """Return the only line that a command writes to stderr."""
    lines = invoke(*arguments, exit_code=exit_code).stderr.splitlines()
    told = [line for line in lines if "ry run" not in line and "Not copied" not in line]
    assert len(told) == 1, told
    return told[0]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Pages of two models, one of them with an indexer."""
    directory = tmp_path / "store"
    put_pages(directory, range(4), "_x-a_0_2", "_x-a_1_2")
    put_pages(directory, range(4, 6), "_c", ".indexer_c")
    return directory


@pytest.mark.parametrize("command", LOOKING)
def test_an_empty_directory_is_an_empty_store(
    invoke: Invoke, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / ".hicachectl").mkdir()
    assert f"{tmp_path} is empty; check the mount" in said(
        invoke, command[0], tmp_path, *command[1:]
    )


@pytest.mark.parametrize("command", LOOKING)
def test_a_directory_of_another_layout_is_not_called_empty(
    invoke: Invoke, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """As with NIXL and LMCache: objects in sub-directories, beside other names."""
    for shard in ("0a", "0b", "0c"):
        (tmp_path / shard).mkdir()
        put(tmp_path / shard, f"{page(1)}_x-a_0_2_k")
    put(tmp_path, "lookup.idx")
    (tmp_path / "newest").symlink_to("0a")
    told = said(invoke, command[0], tmp_path, *command[1:])
    assert "empty" not in told
    assert f"{tmp_path} has no HiCacheFile objects, only 3 sub-directories" in told
    assert told.endswith(" and 2 other files, the first named 0a; check the path")


@pytest.mark.slow
@pytest.mark.parametrize("command", LOOKING)
def test_a_store_with_folders_and_no_objects_is_empty(
    invoke: Invoke, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Its folders stay when its objects are removed, and are no other layout."""
    flat, store = tmp_path / "flat", tmp_path / "store"
    flat.mkdir()
    put_pages(flat, range(3), "_c")
    invoke("migrate", flat, f"file://{store}?folders=hex2")
    invoke("rm", store, "--model", "c", "--yes")
    assert len(list(store.iterdir())) == 4
    assert f"{store} is empty; check the mount" in said(invoke, command[0], store, *command[1:])
    name = f"{page(0)}.txt"
    put(store / name[:2], name)
    (store / "other").mkdir()
    told = said(invoke, command[0], store, *command[1:])
    assert told.endswith(
        "only 1 sub-directory and 1 other file, the first named other; check the path"
    )


def test_names_that_are_not_text_are_escaped_as_keys_are(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9\n")).mkdir()
    assert said(invoke, "ls", tmp_path).endswith(r", the first named caf\xe9\x0a; check the path")


def test_one_sub_directory_is_enough(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    told = said(invoke, "rm", tmp_path, "--model", "x/a", "--dry-run")
    assert told.endswith(
        f"{tmp_path} has no HiCacheFile objects, only 1 sub-directory, the first named objects; "
        "check the path"
    )
    told = said(invoke, "migrate", tmp_path, tmp_path.with_name("new"), "--dry-run", exit_code=3)
    assert "1 sub-directory" in told
    told = said(invoke, "show", tmp_path, "ab", exit_code=2)
    assert "1 sub-directory" in told


@pytest.mark.parametrize("command", LOOKING)
def test_a_quarantine_is_said_to_be_one_with_the_next_command(
    invoke: Invoke, tmp_path: Path, command: tuple[str, ...]
) -> None:
    source = dsa_store(tmp_path / "store", 2)
    shorten(source / kv_name(1))
    repaired(source)
    quarantine = default_quarantine(source)
    elsewhere = tmp_path / "elsewhere"
    quarantine.rename(elsewhere)
    told = said(invoke, command[0], elsewhere, *command[1:])
    assert f"{elsewhere} is a quarantine, not a store" in told
    assert f"hicachectl restore {elsewhere} STORE" in told
    quarantine.mkdir()
    assert "is a quarantine" in said(invoke, command[0], quarantine, *command[1:])


MODELS = "no page matches; models in the store: c (2 pages), x-a (4 pages)"
STATES = "no page matches; states in the store: whole (6 pages)"
FILTERED = [
    (("--model", "no/such"), f"--model no/such: {MODELS}"),
    (("--pool", "mamba"), "--pool mamba: no page matches; pools in the store: indexer, kv"),
    (("--page", "0123456789"), "--page 0123456789: no page matches"),
    (("--since", "1h"), "--since: no page matches; pages in the store were written "),
]


@pytest.mark.parametrize(("options", "told"), FILTERED)
@pytest.mark.parametrize("command", LOOKING)
def test_a_filter_that_matches_nothing_is_named(
    invoke: Invoke, store: Path, command: tuple[str, ...], options: tuple[str, ...], told: str
) -> None:
    assert told in said(invoke, command[0], store, *command[1:], *options)
    if command[0] == "verify":
        out = invoke("verify", store, *options, "--format", "json").stdout
        assert json.loads(out)["skipped_checks"] == ["everything"]


def test_states_are_counted(invoke: Invoke, store: Path) -> None:
    told = said(invoke, "ls", store, "--state", "orphan,partial")
    assert f"--state orphan,partial: {STATES}" in told


def test_filters_that_match_apart_but_not_together(invoke: Invoke, store: Path) -> None:
    told = said(invoke, "ls", store, "--model", "x/a", "--pool", "indexer")
    assert "--model x/a, --pool indexer: no page matches all of these; leave out" in told
    told = said(invoke, "ls", store, "--model", "nosuch", "--pool", "indexer")
    assert "--model nosuch: no page matches; models" in told
    assert "indexer" not in told


REMOVED = [
    (("--model", "no/such"), f"--model no/such: {MODELS}"),
    (("--tag", "prod"), "--tag prod: no page matches; keys of file stores have no tag"),
    (("--before", "9000d"), "--before: no page matches; pages in the store were written "),
    (("--state", "orphan"), f"--state orphan: {STATES}"),
]


@pytest.mark.parametrize(("options", "told"), REMOVED)
@pytest.mark.parametrize("how", ["--dry-run", "--yes"])
def test_rm_names_the_filter_that_matches_nothing(
    invoke: Invoke, store: Path, options: tuple[str, ...], told: str, how: str
) -> None:
    assert told in said(invoke, "rm", store, *options, how)


def test_rm_names_a_list_of_pages_that_are_not_there(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    listed = tmp_path / "pages"
    listed.write_text(page(77))
    assert "--pages: no page matches" in said(invoke, "rm", store, "--pages", listed, "--yes")
    listed.write_text(page(1))
    told = said(invoke, "rm", store, "--pages", listed, "--model", "c", "--yes")
    assert "no page matches all of" in told


def test_migrate_names_what_matches_nothing(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    told = said(invoke, "migrate", store, new, "--model", "nosuch")
    assert "--model nosuch: no page matches; models in the store: c (2 pages)" in told
    assert "--page 0123456789: no page matches" in said(
        invoke, "migrate", store, new, "--match", "0123456789"
    )
    listed = tmp_path / "pages"
    listed.write_text(page(77))
    told = said(invoke, "migrate", store, new, "--pages-from", listed)
    assert "--pages: no page matches" in told


def test_prewarm_says_that_the_source_has_no_pages(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "profile.toml").write_text(DSA)
    other = tmp_path / "other"
    (other / "0a").mkdir(parents=True)
    new = tmp_path / "new"
    arguments = ("prewarm", new, "--from", other, "--all", "--profile", tmp_path / "profile.toml")
    for how in ((), ("--dry-run",)):
        said_lines = invoke(*arguments, *how, "--allow-empty").stderr
        assert f"{other} has no HiCacheFile objects, only 1 sub-directory" in said_lines


def test_restore_says_that_there_is_nothing_to_restore(invoke: Invoke, tmp_path: Path) -> None:
    source = dsa_store(tmp_path / "store", 2)
    shorten(source / kv_name(1))
    repaired(source)
    quarantine = default_quarantine(source)
    told = said(invoke, "restore", quarantine, source, "--page", "0123456789", "--yes")
    assert f"{quarantine}: no page that matches the filters" in told
    with answering("n"):
        told = said(invoke, "restore", quarantine, source, "--page", "0123456789")
    assert "Put" not in told
    invoke("restore", quarantine, source, "--yes")
    told = said(invoke, "restore", quarantine, source, "--yes")
    assert f"{quarantine}: no quarantined page" in told


def test_what_matches_gets_no_such_remark(invoke: Invoke, store: Path) -> None:
    for arguments in (("ls", store, "--model", "c"), ("rm", store, "--model", "c", "--dry-run")):
        assert "match" not in invoke(*arguments).stderr


def test_a_directory_that_is_gone_after_the_listing_is_named(tmp_path: Path) -> None:
    place = tmp_path / "store"
    place.mkdir()
    with FileStore(place) as store:
        listed = take_inventory(store, None)
        place.rmdir()
        with pytest.raises(StoreUnavailable) as refusal:
            explain_selection(store, listed, EVERYTHING)
    assert str(refusal.value) == (
        f"{place}: cannot read the directory: No such file or directory; check that the file "
        "system is mounted"
    )
