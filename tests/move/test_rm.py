"""`rm`: the requested groups leave, one by one; nothing else does."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.file.store import FileStore
from tests.move.repairs import (
    default_quarantine,
    dsa_store,
    indexer,
    kv,
    repaired,
    shorten,
)
from tests.paused import paused
from tests.stores import Contents, contents, page, put, put_pages
from tests.terminals import answering

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Make a store of two models, one with Mamba states on its last pages."""
    directory = tmp_path / "store"
    directory.mkdir()
    put_pages(directory, range(4), "_x-a_0_2", "_x-a_1_2", nbytes=100)
    put_pages(directory, range(2, 4), ".mamba_x-a_0_2", ".mamba_x-a_1_2", nbytes=30)
    put_pages(directory, range(6), "_b_0_1", nbytes=10)
    (directory / "README").write_text("not ours")
    return directory


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Describe the pages of the first model."""
    path = tmp_path / "x-a.toml"
    path.write_text(
        """
model = "x/a"
page_size = 4
tp = 2
[[pools]]
name = "kv"
kind = "opaque"
nbytes = 100
[[pools]]
name = "mamba"
kind = "opaque"
nbytes = 30
hit_policy = "trailing_pages"
trailing_pages = 1
"""
    )
    return path


def removed(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return invoke("rm", *arguments, "--format", "json", exit_code=exit_code).document


def left(before: Contents, *parts: str) -> Contents:
    return {name: value for name, value in before.items() if not any(p in name for p in parts)}


@pytest.mark.parametrize("model", ["x/a", "x-a"])
def test_a_model_goes_with_all_its_pools(invoke: Invoke, store: Path, model: str) -> None:
    before = contents(store)
    document = removed(invoke, store, "--model", model, "--yes")
    assert contents(store) == left(before, "_x-a_")
    assert (document["pages"], document["objects"], document["bytes"]) == (4, 12, 920)
    assert (document["failed"], document["remaining"], document["dry_run"]) == (0, 0, False)
    assert not default_quarantine(store).exists()


def test_the_document_has_the_members_of_the_contract(invoke: Invoke, store: Path) -> None:
    assert list(removed(invoke, store, "--model", "b", "--yes")) == [
        "schema",
        "version",
        "store",
        "pages",
        "objects",
        "bytes",
        "gone",
        "kept",
        "in_flight",
        "failed",
        "remaining",
        "lacking_bytes",
        "free_bytes",
        "seconds",
        "complete",
        "stopped_by",
        "dry_run",
        "free",
        "failures",
        "groups",
    ]


def test_a_dry_run_says_the_same_and_changes_nothing(invoke: Invoke, store: Path) -> None:
    before = contents(store)
    rehearsed = removed(invoke, store, "--model", "b", "--dry-run")
    assert contents(store) == before
    assert not (store / ".hicachectl").exists()
    done = removed(invoke, store, "--model", "b", "--yes")
    assert rehearsed.pop("dry_run")
    assert {row.pop("state") for row in rehearsed["groups"]} == {"would-remove"}
    assert {row.pop("state") for row in done["groups"]} == {"removed"}
    for document in (rehearsed, done):
        document.pop("seconds")
    assert rehearsed == {name: done[name] for name in rehearsed}
    assert (
        "Dry run: nothing was changed" in invoke("rm", store, "--model", "x-a", "--dry-run").stderr
    )


def test_an_object_that_is_listed_twice_is_counted_once(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = FileStore.scan

    def twice(opened: FileStore, *arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in scan(opened, *arguments, **options):
            yield batch
            yield batch

    monkeypatch.setattr(FileStore, "scan", twice)
    for options in (("--dry-run",), ("--yes",)):
        document = removed(invoke, store, "--model", "x-a", *options)
        assert (document["pages"], document["objects"], document["bytes"]) == (4, 12, 920)
        assert document["gone"] == 0


def test_pages_come_from_a_list(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    before = contents(store)
    listed = tmp_path / "pages"
    listed.write_text(f"{page(1)}\n\n  {page(3)}\n{page(99)}\n")
    arguments = [store, "--pages", listed, "--all-deployments", "--yes"]
    assert removed(invoke, *arguments)["pages"] == 4
    assert contents(store) == left(before, page(1), page(3))


@pytest.fixture
def two_sizes(tmp_path: Path) -> Path:
    """Make a store with pages 0 to 5 at TP 4 and pages 3 to 7 at TP 8."""
    directory = tmp_path / "sizes"
    directory.mkdir()
    put_pages(directory, range(6), *(f"_m_{rank}_4" for rank in range(4)))
    put_pages(directory, range(3, 8), *(f"_m_{rank}_8" for rank in range(8)))
    return directory


def listing(invoke: Invoke, store: Path, path: Path, *arguments: object) -> list[dict[str, Any]]:
    """Write the rows of `ls` to a file; return them."""
    invoke("ls", store, *arguments, "--format", "jsonl", "-o", path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_of_ls_name_their_group_only(invoke: Invoke, two_sizes: Path, tmp_path: Path) -> None:
    before = contents(two_sizes)
    path = tmp_path / "rows.jsonl"
    rows = [r for r in listing(invoke, two_sizes, path) if r["tp_size"] == 4]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    document = removed(invoke, two_sizes, "--pages", path, "--yes")
    assert document["pages"] == 6
    assert contents(two_sizes) == left(before, "_4.bin")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hashes", "rows of an older release"])
def test_bare_pages_of_several_deployments_are_refused(
    invoke: Invoke, two_sizes: Path, tmp_path: Path, form: str
) -> None:
    before = contents(two_sizes)
    path = tmp_path / "pages"
    rows = listing(invoke, two_sizes, path, "--page", page(3))
    for row in rows:
        del row["group"]
    path.write_text(page(3) if form == "hashes" else json.dumps(rows[0]))
    for more in ("--yes", "--dry-run"):
        message = invoke("rm", two_sizes, "--pages", path, more, exit_code=2).stderr
        assert f"page {page(3)} has groups of 2 deployments: m tp 4, m tp 8" in message
        assert "--all-deployments" in message
        assert "--format jsonl" in message
    assert contents(two_sizes) == before
    assert removed(invoke, two_sizes, "--pages", path, "--tp", 8, "--yes")["pages"] == 1
    assert contents(two_sizes) == {
        name: value for name, value in before.items() if not (page(3) in name and "_8." in name)
    }
    path.write_text(f"{page(0)}\n{page(3)}\n{page(4)}")
    arguments = [two_sizes, "--pages", path, "--all-deployments", "--yes"]
    assert removed(invoke, *arguments)["pages"] == 4
    assert contents(two_sizes) == left(before, page(0), page(3), page(4))


def test_sizes_are_filters(invoke: Invoke, two_sizes: Path) -> None:
    stems = [f"_m_{rank}_4_2_{stage}" for rank in range(4) for stage in range(2)]
    put_pages(two_sizes, range(2), *stems, *(f"_n_0_1_cp{rank}_2" for rank in range(2)))
    before = contents(two_sizes)
    assert removed(invoke, two_sizes, "--pp", 2, "--dry-run")["pages"] == 2
    assert removed(invoke, two_sizes, "--cp", 2, "--dry-run")["pages"] == 2
    assert removed(invoke, two_sizes, "--tp", 4, "--dry-run")["pages"] == 8
    assert removed(invoke, two_sizes, "--tp", 4, "--pp", 2, "--yes")["pages"] == 2
    assert contents(two_sizes) == left(before, "_2_0.bin", "_2_1.bin")
    assert removed(invoke, two_sizes, "--tp", 2, "--yes")["pages"] == 0


def test_rows_of_groups_that_are_not_there_name_nothing_else(
    invoke: Invoke, two_sizes: Path, tmp_path: Path
) -> None:
    before = contents(two_sizes)
    path = tmp_path / "rows.jsonl"
    rows = [{"page": page(3), "group": "m tp2"}, {"page": page(0), "group": "m tp8"}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    outcome = invoke("rm", two_sizes, "--pages", path, "--yes")
    assert f"{path}: the store has no group for 2 rows" in outcome.stderr
    assert contents(two_sizes) == before


def test_an_ambiguous_group_is_named_by_its_row(
    invoke: Invoke, two_sizes: Path, tmp_path: Path
) -> None:
    put_pages(two_sizes, range(2), "_open_0_2")
    before = contents(two_sizes)
    path = tmp_path / "rows.jsonl"
    rows = listing(invoke, two_sizes, path, "--state", "unknown")
    assert [row["group"] for row in rows] == ["?", "?"]
    assert removed(invoke, two_sizes, "--pages", path, "--yes")["pages"] == 2
    assert contents(two_sizes) == left(before, "_open_")


def test_what_ls_prints_can_be_removed(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    (store / f"{page(3)}_x-a_0_2.bin").unlink()
    before = contents(store)
    listed = tmp_path / "pages.jsonl"
    invoke("ls", store, "--state", "partial", "--format", "jsonl", "-o", listed)
    removed(invoke, store, "--pages", listed, "--model", "x/a", "--yes")
    assert contents(store) == left(before, f"{page(3)}_x", f"{page(3)}.m")


def test_old_pages_go_by_their_newest_object(invoke: Invoke, store: Path) -> None:
    hour_ago = time.time() - 3600
    os.utime(store / f"{page(2)}_x-a_1_2.bin", (hour_ago, hour_ago))
    before = contents(store)
    assert removed(invoke, store, "--model", "x-a", "--before", "1d", "--yes")["pages"] == 3
    kept = {name for name in before if name.startswith(page(2)) and "_x-a_" in name}
    assert set(contents(store)) == set(left(before, "_x-a_")) | kept
    assert removed(invoke, store, "--before", "1999-01-01", "--yes")["pages"] == 0


def test_pages_go_by_their_state(invoke: Invoke, store: Path, profile: Path) -> None:
    (store / f"{page(0)}_x-a_1_2.bin").unlink()
    (store / f"{page(3)}_x-a_0_2.bin").unlink()
    (store / f"{page(3)}_x-a_1_2.bin").unlink()
    before = contents(store)
    document = removed(invoke, store, "--state", "partial,orphan", "--profile", profile, "--yes")
    assert [(g["page"], g["model"], g["state"]) for g in document["groups"]] == sorted(
        [(page(0), "x-a", "removed"), (page(3), "x-a", "removed")]
    )
    assert contents(store) == left(before, f"{page(0)}_x", f"{page(3)}.m")


def test_conditions_are_joined(invoke: Invoke, store: Path) -> None:
    before = contents(store)
    assert removed(invoke, store, "--model", "b", "--state", "orphan", "--yes")["pages"] == 0
    assert removed(invoke, store, "--tag", "t", "--yes")["pages"] == 0
    assert contents(store) == before


def test_ambiguous_pages_stay_and_are_said(invoke: Invoke, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    put_pages(directory, range(3), "_m_0_2")
    outcome = invoke("rm", directory, "--model", "m", "--yes")
    assert "3 page groups with ambiguous keys left alone: 3 keys <hash>_m_0_2.bin" in outcome.stderr
    assert len(contents(directory)) == 3
    assert removed(invoke, directory, "--before", "1d", "--yes")["objects"] == 0
    outcome = invoke("rm", directory, "--state", "unknown", "--yes")
    assert "3 page groups with ambiguous keys selected for removal: 3 keys" in outcome.stderr
    assert contents(directory) == {}


@pytest.mark.parametrize(("answer", "pages"), [("n", 0), ("y", 6)])
def test_on_a_terminal_it_asks(invoke: Invoke, store: Path, answer: str, pages: int) -> None:
    before = contents(store)
    with answering(answer):
        out, err = invoke("rm", store, "--model", "b")
    assert f"Remove 6 pages (60 B) from file://{store}?" in err
    assert len(before) - len(contents(store)) == pages
    assert ("removed" in out) == bool(pages)


def tree(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def test_a_restore_changes_nothing_before_the_answer(invoke: Invoke, tmp_path: Path) -> None:
    store = dsa_store(tmp_path / "store", 2)
    shorten(store / kv(0))
    repaired(store)
    quarantine = default_quarantine(store)
    (quarantine / "20260101T000000Z-abcdef").mkdir()  # a repair was killed at its begin
    before = tree(store)
    with answering("n"):
        invoke("restore", quarantine, store)
    assert tree(store) == before


# temporary files


_OLD = ("sglang", "ours", "sglang-0.5.14", "hour")


def temporaries(store: Path) -> dict[str, Path]:
    """Write leftovers of SGLang's and our own writes, one of them young, and similar names."""
    now = time.time()
    return {
        "sglang": put(store, "." + "0a" * 16 + ".tmp", 5),
        "ours": put(store, ".hicachectl-" + "0b" * 16 + ".tmp", 6),
        "sglang-0.5.14": put(store, f"{'0e' * 32}_m_0_1.bin.tmp.47.1398.{'0a' * 16}", 10),
        "hour": put(store, "." + "0c" * 16 + ".tmp", 7, now - 3600),
        "young": put(store, "." + "0d" * 16 + ".tmp", 8, now),
        "other": put(store, "notes.tmp", 9),
        "backup": put(store, f"{'0e' * 32}_m_0_1.bin.tmp.47", 11),
    }


def test_temporaries_are_what_verify_calls_stale(invoke: Invoke, store: Path) -> None:
    files = temporaries(store)
    before = contents(store)
    found = invoke("verify", store, "--format", "json", exit_code=4).document
    stale = {f["key"] for f in found["findings"] if f["code"] == "stale-temporary"}
    rehearsed = removed(invoke, store, "--temporaries", "--dry-run")
    assert contents(store) == before
    document = removed(invoke, store, "--temporaries", "--yes")
    for outcome, state in ((rehearsed, "would-remove"), (document, "removed")):
        assert (outcome["pages"], outcome["objects"], outcome["bytes"]) == (0, 4, 28)
        assert {(g["key"], g["page"], g["state"]) for g in outcome["groups"]} == {
            (key, None, state) for key in stale
        }
    assert contents(store) == left(before, *(files[n].name for n in _OLD))


def test_temporaries_can_be_left_for_longer(invoke: Invoke, store: Path) -> None:
    files = temporaries(store)
    assert removed(invoke, store, "--temporaries", "--before", "1d", "--yes")["objects"] == 3
    assert files["hour"].exists()
    assert removed(invoke, store, "--temporaries", "--before", "1s", "--yes")["objects"] == 1
    assert files["young"].exists()
    said = invoke("rm", store, "--temporaries", "--yes")
    assert "no temporary file" in said.stderr
    assert said.stdout == "0 files, 0 B removed\n"


def test_a_temporary_that_is_still_written_stays(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written to, finished or removed after the listing."""
    files = temporaries(store)
    look = FileStore.look

    def meanwhile(self: FileStore, *arguments: Any) -> Any:
        if files["sglang"].exists():
            with files["sglang"].open("ab") as stream:
                stream.write(b"more")
            files["ours"].unlink()
        return look(self, *arguments)

    monkeypatch.setattr(FileStore, "look", meanwhile)
    document = removed(invoke, store, "--temporaries", "--yes")
    assert (document["objects"], document["kept"], document["gone"]) == (2, 1, 1)
    assert files["sglang"].exists()
    assert sorted(row["state"] for row in document["groups"]) == [
        "gone",
        "kept",
        "removed",
        "removed",
    ]


def test_temporaries_that_cannot_be_deleted_are_said(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = temporaries(store)

    def stuck(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr("hicachectl.backends.file.store.os.unlink", stuck)
        document = removed(invoke, store, "--temporaries", "--yes", exit_code=4)
    assert (document["objects"], document["failed"], document["remaining"]) == (0, 4, 4)
    assert {f["key"] for f in document["failures"]} >= {files["ours"].name}


def test_stores_without_temporaries_say_so(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    pack = tmp_path / "x.hcpack"
    invoke("migrate", store, f"pack://{pack}")
    said = invoke("rm", f"pack://{pack}", "--temporaries", "--yes").stderr
    assert "only file stores have temporary files" in said


def test_failures_are_listed_and_exit_with_4(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicachectl.backends.object_files.writing import FileWriter

    def stuck(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(FileWriter, "remove", stuck)
    document = removed(invoke, store, "--model", "b", "--yes", exit_code=4)
    assert (document["pages"], document["failed"], document["remaining"]) == (0, 6, 6)
    assert {f["detail"] for f in document["failures"]} == {
        "cannot be removed: Operation not permitted"
    }
    assert {group["state"] for group in document["groups"]} == {"failed"}


def test_people_get_totals(invoke: Invoke, store: Path) -> None:
    lines = invoke("rm", store, "--before", "1d", "--yes").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "TAG", "SIZES", "PAGES", "OBJECTS", "SIZE", "STATE"]
    assert lines[1].split() == ["b", "-", "tp", "1", "6", "6", "60", "B", "removed"]
    assert lines[-1] == "10 pages, 18 objects, 980 B removed"


def test_a_damaged_page_can_be_removed_without_a_profile(invoke: Invoke, tmp_path: Path) -> None:
    store = dsa_store(tmp_path / "store", 3)
    shorten(store / kv(1))
    before = contents(store)
    listed = tmp_path / "pages"
    listed.write_text(page(1))
    assert removed(invoke, store, "--pages", listed, "--yes")["objects"] == 2
    assert contents(store) == left(before, kv(1), indexer(1))


TAKE = "hicachectl.backends.object_files.writing:FileWriter.remove"
MANY = 1100  # objects: more than one batch


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_removal_says_what_is_gone_and_the_next_run_removes_the_rest(
    invoke: Invoke, tmp_path: Path, number: signal.Signals
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(MANY), "_m_0_1", nbytes=8)
    arguments = ("rm", store, "--model", "m", "--yes", "--format", "json")
    with paused(tmp_path / "run", TAKE, MANY - 20, *arguments) as run:
        run.send(number)
        ended = run.resumed()
    assert (ended.code, ended.stdout) == (128 + number, "")
    left = len(list(store.glob("*.bin")))
    assert left < MANY
    said = re.search(
        r"hicachectl: Removed at least (\d+) objects of \1 pages \([\d.]+ KiB\) of 1100 pages "
        r"before the end; run the same command again to remove the rest\n", ended.stderr
    )  # fmt: skip
    assert said, ended.stderr
    assert 1024 <= int(said[1]) <= MANY - left
    document = invoke(*arguments).document
    assert document["pages"] <= left
    assert not list(store.glob("*.bin"))


@pytest.mark.slow
def test_an_interrupted_removal_of_a_size_says_how_much_is_left_to_free(
    invoke: Invoke, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(MANY), "_m_0_1", nbytes=8)
    arguments = ("rm", store, "--free", 8 * (MANY - 10), "--model", "m", "--yes")
    with paused(tmp_path / "run", TAKE, MANY - 20, *arguments) as run:
        run.send(signal.SIGINT)
        ended = run.resumed()
    assert ended.code == 130
    said = re.search(r"to free the rest, run the command again with --free (\d+)B\n", ended.stderr)
    assert said, ended.stderr
    assert 0 < int(said[1]) <= 8 * (MANY - 10 - 1024)


@pytest.mark.slow
def test_interrupted_temporaries_are_counted(store: Path, tmp_path: Path) -> None:
    files = temporaries(store)
    call = "hicachectl.backends.object_files.store:ObjectFiles.delete"
    with paused(tmp_path / "run", call, 1, "rm", store, "--temporaries", "--yes") as run:
        run.send(signal.SIGINT)
        ended = run.resumed()
    assert ended.code == 130
    assert re.search(
        r"Removed at least 0 files \(0 B\) of \d files before the end; run the same", ended.stderr
    )
    assert files["sglang"].exists()
