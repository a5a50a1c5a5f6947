"""Migration between file stores: copied pages, pages left out, and the messages."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.transfer import retargeted
from hicachectl.move.results import Problem, problem_lines
from tests.move.migrations import MODEL, PAGES, demo_store, marks, migrated, profile_file
from tests.small_file_system import small_file_system
from tests.stores import DSA, contents, page, put

if TYPE_CHECKING:
    from tests.conftest import Invoke

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def kv_names(store: Path) -> list[str]:
    return sorted(name for name in contents(store) if ".mamba" not in name)


def test_without_a_profile_objects_keep_keys_bytes_and_times(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    document = migrated(invoke, source, target)
    assert contents(target) == contents(source)
    assert document["pages"] == PAGES
    assert document["objects"] == len(contents(source))
    assert document["bytes"] == sum(len(data) for data, _ in contents(source).values())
    assert document["complete"] is True
    assert document["stopped_by"] is None
    assert not marks(tmp_path / "home")


@pytest.mark.parametrize("kind", ["file", "nixl", "prewarm", "shard"])
def test_a_new_directory_is_named_with_its_file_system(
    invoke: Invoke, source: Path, tmp_path: Path, kind: str
) -> None:
    """The remark shows a missing mount. A later copy into the directory has no remark."""
    profile = ("--profile", profile_file(tmp_path / "p.toml"))
    with small_file_system(tmp_path / "small", "16m") as small:
        new = small / "new" / "hicache"
        words: tuple[object, ...] = ("migrate", source, new)
        if kind == "nixl":
            words = ("migrate", source, f"nixl://{small}/other,{new}", *profile)
            (small / "other").mkdir()
        elif kind == "prewarm":
            words = ("prewarm", new, "--from", source, "--all", "--budget-pages", PAGES, *profile)
        elif kind == "shard":
            words = (*words, *profile, "--shard", "0/1", "--run", tmp_path / "run")
        remark = f"Created {new} on the file system {small}, which has "
        said = invoke(*words).stderr
        assert said.count("Created ") == 1
        assert re.search(rf"^hicachectl: {re.escape(remark)}\d+\.\d MiB free$", said, re.MULTILINE)
        again = (*words[:-1], tmp_path / "again") if kind == "shard" else words
        assert "Created" not in invoke(*again).stderr


def test_a_directory_that_gets_no_copy_is_not_called_created(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    for words, exit_code in (
        (("--dry-run",), 0),
        (("--model", "none", "--allow-empty"), 0),
        (("--to-tp", 3), 2),
    ):
        said = invoke("migrate", source, tmp_path / "new", *words, exit_code=exit_code).stderr
        assert "Created" not in said
        assert not (tmp_path / "new").exists()


def test_several_deployments_move_at_once(invoke: Invoke, source: Path, target: Path) -> None:
    for number in range(3):
        put(source, f"{page(number)}_other.bin", 100 + number)
        put(source, f"{page(number)}.indexer_other.bin", 50)
    migrated(invoke, source, target)
    assert contents(target) == contents(source)


def test_a_rerun_reads_and_writes_nothing(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrated(invoke, source, target)
    before = {name: (target / name).stat().st_ino for name in contents(target)}
    monkeypatch.setattr(FileStore, "read_into", None)
    document = migrated(invoke, source, target)
    assert document["pages"] == document["bytes"] == 0
    assert document["skipped"] == PAGES
    assert {name: (target / name).stat().st_ino for name in contents(target)} == before


@pytest.mark.slow
def test_pages_become_another_topology_and_come_back(
    invoke: Invoke, source: Path, target: Path, profile: Path, tmp_path: Path
) -> None:
    options = ("--to-tp", 4, "--to-layout", "page_first_direct", "--to-model", "new/model")
    document = migrated(invoke, source, target, "--profile", profile, *options, "--verify")
    assert document["pages"] == PAGES
    assert {name.rpartition(".bin")[0][-4:] for name in kv_names(target)} == {
        f"_{rank}_4" for rank in range(4)
    }
    there = profile_file(
        tmp_path / "there.toml",
        retargeted(PROFILE, tp=4, layout="page_first_direct", model="new/model"),
    )
    assert (
        '"findings": []'
        in invoke(
            "verify",
            target,
            "--profile",
            there,
            "--checks",
            "names,groups,sizes",
            "--format",
            "json",
        ).stdout
    )
    back = tmp_path / "back"
    migrated(invoke, target, back, "--profile", there, "--to-profile", profile)
    assert contents(back) == contents(source)


@pytest.mark.slow
def test_pages_in_another_layout_under_the_keys_to_write_are_conflicts(
    invoke: Invoke, source: Path, target: Path, profile: Path
) -> None:
    """A change of the layout keeps keys and sizes: only bytes show what the destination has."""
    shutil.copytree(source, target)
    before = contents(target)
    options = ("--profile", profile, "--to-layout", "page_first_direct")
    document = migrated(invoke, source, target, *options, exit_code=4)
    assert (document["conflicts"], document["skipped"], document["pages"]) == (PAGES, 0, 0)
    assert contents(target) == before
    said = document["problems"][0]["detail"]
    assert said.startswith("the destination has other bytes under this key, perhaps in another lay")
    replaced = migrated(invoke, source, target, *options, "--if-exists", "overwrite")
    assert (replaced["pages"], contents(target).keys()) == (PAGES, before.keys())
    assert contents(target) != before
    done = contents(target)
    again = migrated(invoke, source, target, *options)
    assert (again["skipped"], again["conflicts"], again["pages"]) == (PAGES, 0, 0)
    assert contents(target) == done


def test_index_keys_of_another_release_are_cut_out_where_the_layers_are_known(
    invoke: Invoke, tmp_path: Path
) -> None:
    """SGLang 0.5.22 and later store GLM-5.2's index keys of layers with an indexer only."""
    config = json.loads((CONFIGS / "glm-5.2.json").read_text())
    kinds = config["indexer_types"][:7]
    config |= {"num_hidden_layers": len(kinds), "indexer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags: dict[str, Any] = {"page_size": 64, "layout": "page_first", "kv_cache_dtype": "bf16"}
    described = ["--model-config", tmp_path / "config.json", "--served-model-name", "org/glm"]
    for name, value in flags.items():
        described += [f"--{name.replace('_', '-')}", value]
    old = profile_from_config(config, DeploymentFlags(model="org/glm", sglang="0.5.20", **flags))
    store = tmp_path / "store"
    store.mkdir()
    blocks = [os.urandom(64 * 132) for _ in kinds]
    put(store, f"{page(1)}_org-glm.bin", len(kinds) * 64 * 1152)
    put(store, f"{page(1)}.indexer_org-glm.bin").write_bytes(b"".join(blocks))
    profiled = ("--profile", profile_file(tmp_path / "old.toml", old), "--to-sglang", "0.5.23")
    for arguments in (
        ("migrate", store, tmp_path / "new", *profiled),
        ("prewarm", tmp_path / "new", "--from", store, "--all", *profiled),
    ):
        said = invoke(*arguments, exit_code=2).stderr
        assert "sglang 0.5.23: pools[indexer]: cannot convert from 0.5.20, because" in said
        assert "--to-profile FILE" in said
        assert not (tmp_path / "new").exists()
    migrated(
        invoke, store, tmp_path / "new", *described, "--sglang", "0.5.20", "--to-sglang", "0.5.23"
    )
    written = (tmp_path / "new" / f"{page(1)}.indexer_org-glm.bin").read_bytes()
    kept = [block for block, kind in zip(blocks, kinds, strict=True) if kind != "shared"]
    assert 0 < len(kept) < len(kinds)
    assert written == b"".join(kept)


def test_a_partial_page_at_the_destination_is_completed(
    invoke: Invoke, source: Path, target: Path
) -> None:
    shutil.copytree(source, target)
    names = sorted(contents(source))
    for name in names[::3]:
        (target / name).unlink()
    document = migrated(invoke, source, target)
    assert contents(target).keys() == contents(source).keys()
    assert {n: d for n, (d, _) in contents(target).items()} == {
        n: d for n, (d, _) in contents(source).items()
    }
    assert document["objects"] == len(names[::3])


def test_a_partial_page_of_other_bytes_is_a_conflict_and_stays(
    invoke: Invoke, source: Path, target: Path
) -> None:
    shutil.copytree(source, target)
    first, second = kv_names(source)[:2]
    assert first[:64] == second[:64]
    (target / first).unlink()
    data = bytearray((target / second).read_bytes())
    data[100] ^= 1
    (target / second).write_bytes(data)
    before = contents(target)
    document = migrated(invoke, source, target, exit_code=4)
    assert document["conflicts"] == 1
    assert document["problems"][0]["key"] == second
    assert contents(target) == before


@pytest.mark.slow
def test_an_object_of_another_size_is_a_conflict(
    invoke: Invoke, source: Path, target: Path
) -> None:
    shutil.copytree(source, target)
    name = kv_names(source)[0]
    size = (source / name).stat().st_size
    os.truncate(target / name, 10)
    for options in (("--dry-run",), ()):
        document = migrated(invoke, source, target, *options, exit_code=4)
        assert document["conflicts"] == 1
        (problem,) = document["problems"]
        assert (problem["page"], problem["key"]) == (name[:64], name)
        assert f"10 bytes in the destination, {size} bytes to write" in problem["detail"]
        assert f"{name}: {problem['detail']}" in document["stderr"]
    assert (target / name).stat().st_size == 10
    assert "--if-exists overwrite" in document["stderr"]
    assert migrated(invoke, source, target, "--if-exists", "overwrite")["conflicts"] == 0
    assert contents(target) == contents(source)


def test_conflicts_that_are_not_named_are_counted() -> None:
    problems = [Problem(page(number), None, "why") for number in range(30)]
    *shown, last = problem_lines(problems, 5000)
    assert shown == [f"{page(number)}: why" for number in range(20)]
    assert last.startswith("Problems of 4980 other pages are not shown")
    assert len([*problem_lines(problems[:3], 3)]) == 3


@pytest.mark.parametrize(("how", "conflicts"), [("skip", 0), ("verify", 1), ("overwrite", 0)])
def test_a_whole_page_of_other_bytes(
    invoke: Invoke, source: Path, target: Path, how: str, conflicts: int
) -> None:
    shutil.copytree(source, target)
    name = kv_names(source)[0]
    size = (target / name).stat().st_size
    (target / name).write_bytes(b"z" * size)
    document = migrated(invoke, source, target, "--if-exists", how, exit_code=4 if conflicts else 0)
    assert document["conflicts"] == conflicts
    written = (target / name).read_bytes() == (source / name).read_bytes()
    assert written == (how == "overwrite")
    if how == "verify":
        assert document["skipped"] == PAGES - 1


def test_what_is_not_whole_damaged_or_in_flight_stays_behind(
    invoke: Invoke, source: Path, target: Path, profile: Path
) -> None:
    names = kv_names(source)
    (source / names[0]).unlink()
    os.truncate(source / names[2], 100)
    (source / names[4]).unlink()
    os.utime(source / names[5])
    document = migrated(invoke, source, target, "--profile", profile)
    assert document["pages"] == PAGES - 3
    assert "1 page not whole" in document["stderr"]
    assert "1 page with errors" in document["stderr"]
    assert "1 page still being written" in document["stderr"]
    assert {name[:64] for name in names[:6]}.isdisjoint(name[:64] for name in contents(target))


def test_partial_pages_move_when_asked_for(invoke: Invoke, source: Path, target: Path) -> None:
    (source / kv_names(source)[0]).unlink()
    document = migrated(invoke, source, target, "--include-partial")
    assert contents(target) == contents(source)
    assert document["pages"] == PAGES


@pytest.mark.slow
def test_only_the_chosen_pages_move(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    chosen = sorted({name[:64] for name in contents(source)})[:3]
    (tmp_path / "pages").write_text("\n".join(chosen[:2]))
    assert migrated(invoke, source, target, "--pages-from", tmp_path / "pages")["pages"] == 2
    assert migrated(invoke, source, target, "--match", chosen[2][:12])["pages"] == 1
    assert {name[:64] for name in contents(target)} == set(chosen)


@pytest.mark.slow
def test_rows_of_ls_name_the_group_to_copy(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """A row with a group names one of a page's two deployments; the bare hash names both."""
    listed = tmp_path / "rows.jsonl"
    invoke("ls", source, "--format", "jsonl", "-o", listed)
    shared = json.loads(listed.read_text().splitlines()[0])["page"]
    for rank in range(4):
        put(source, f"{shared}_{MODEL}_{rank}_4.bin")
    invoke("ls", source, "--page", shared, "--format", "jsonl", "-o", listed)
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    listed.write_text(json.dumps(next(row for row in rows if row["tp_size"] == 4)))
    migrated(invoke, source, target, "--pages-from", listed)
    assert set(contents(target)) == {f"{shared}_{MODEL}_{rank}_4.bin" for rank in range(4)}
    listed.write_text(json.dumps({"page": shared, "group": f"{MODEL} tp16"}))
    document = migrated(invoke, source, target, "--pages-from", listed)
    assert document["pages"] == document["skipped"] == 0
    assert "--pages: 1 row without a matching group" in document["stderr"]
    listed.write_text(shared)
    migrated(invoke, source, target, "--pages-from", listed)
    assert set(contents(target)) == {n for n in contents(source) if n.startswith(shared)}


def test_a_dry_run_names_the_deployments_and_the_room(
    invoke: Invoke, source: Path, target: Path, profile: Path
) -> None:
    words = ("migrate", source, target, "--profile", profile)
    said = invoke(*words, "--to-tp", 4, "--dry-run").stdout.splitlines()
    assert said[1] == "The copies are converted from demo/hybrid-1b tp 2 to demo/hybrid-1b tp 4"
    free, where = said[2].split(" free in ")
    assert (where, free.split()[1][1:]) == ("the destination", "iB")
    assert "converted" not in invoke(*words, "--to-tp", 2, "--dry-run").stdout
    assert "free in the destination" not in invoke("migrate", source, target).stdout


@pytest.mark.slow
def test_a_dry_run_counts_and_writes_nothing(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    document = migrated(invoke, source, target, "--dry-run")
    assert (document["pages"], document["objects"]) == (PAGES, len(contents(source)))
    assert not target.exists()
    assert not marks(tmp_path / "home")
    assert document.pop("estimated_seconds") is None
    assert f"{PAGES} pages to copy" in invoke("migrate", source, target, "--dry-run").stdout
    assert document == {**migrated(invoke, source, target), **_timed(document)}


def _timed(document: dict[str, object]) -> dict[str, object]:
    return {name: document[name] for name in ("seconds", "stderr") if name in document}


def test_moved_pages_leave_the_source_once_they_are_verified(
    invoke: Invoke, source: Path, target: Path
) -> None:
    before = contents(source)
    document = migrated(invoke, source, target, "--move", "--yes")
    assert document["moved"] == PAGES
    assert contents(target) == before
    assert not contents(source)


@pytest.mark.slow
def test_a_move_takes_along_what_was_there_already_only_when_it_is_the_same(
    invoke: Invoke, source: Path, target: Path
) -> None:
    shutil.copytree(source, target)
    name = kv_names(source)[0]
    (target / name).write_bytes(b"z" * (target / name).stat().st_size)
    document = migrated(invoke, source, target, "--move", "--yes", exit_code=4)
    assert document["conflicts"] == 1
    assert {left[:64] for left in contents(source)} == {name[:64]}


def test_another_name_of_the_same_place_is_refused(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    """Proves that --move between two names of a directory does not empty it."""
    link = tmp_path / "link"
    link.symlink_to(source)
    before = contents(source)
    for name in (link, f"file://{link}", f"{source.parent}/../{source.parent.name}/{source.name}"):
        for more in ((), ("--move", "--yes")):
            assert "are the same" in invoke("migrate", source, name, *more, exit_code=2).stderr
        options = ("--profile", profile, "--to-layout", "page_first_direct")
        output = invoke("migrate", source, name, *options, "--if-exists", "overwrite", exit_code=2)
        assert "keys of the objects being read" in output.stderr
    assert contents(source) == before


def test_pages_can_get_other_keys_in_the_same_place(
    invoke: Invoke, source: Path, profile: Path
) -> None:
    before = contents(source)
    migrated(invoke, source, source, "--profile", profile, "--to-model", "new/name")
    renamed = {name.replace(MODEL, "new-name"): value for name, value in before.items()}
    assert contents(source) == {**before, **renamed}


def test_a_source_object_that_is_cut_short_meanwhile_fails_its_page_alone(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kv_names(source)[0]
    read_into = FileStore.read_into

    def cut(store: FileStore, *arguments: object, **options: object) -> object:
        os.truncate(source / name, 10)
        return read_into(store, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(FileStore, "read_into", cut)
    document = migrated(invoke, source, target, exit_code=4)
    assert (document["failed"], document["pages"]) == (1, PAGES - 1)
    (problem,) = document["problems"]
    assert problem == {"page": name[:64], "key": name, "detail": problem["detail"]}
    assert name[:64] not in {written[:64] for written in contents(target)}


def test_pages_that_leave_the_source_meanwhile_are_counted(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kv_names(source)[0]
    read_into = FileStore.read_into

    def evict(store: FileStore, *arguments: object, **options: object) -> object:
        (source / name).unlink(missing_ok=True)
        return read_into(store, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(FileStore, "read_into", evict)
    document = migrated(invoke, source, target)
    assert (document["gone"], document["pages"]) == (1, PAGES - 1)


def test_a_destination_without_room_is_refused_before(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileStore, "free_bytes", lambda _: 1000)
    output = invoke("migrate", source, target, exit_code=3)
    assert "1000 B free" in output.stderr
    assert not target.exists()


def test_a_destination_that_fills_up_keeps_whole_pages(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    full = tmp_path / "small"
    size = sum(len(data) for data, _ in contents(source).values())
    with small_file_system(full, size // 2):
        document = migrated(
            invoke, source, full, "--no-space-check", "--buffer-bytes", "1MiB", exit_code=4
        )
        assert document["stopped_by"] == "destination full"
        assert document["complete"] is False
        names = contents(full).keys()
        assert 0 < document["pages"] < PAGES
        pages = {name[:64] for name in names}
        assert len(pages) == document["pages"]
        assert names == {name for name in contents(source) if name[:64] in pages}


@pytest.mark.slow
def test_jobs_that_take_the_last_room_from_one_another_leave_it_full(
    invoke: Invoke, tmp_path: Path
) -> None:
    """If the room ends with three jobs at once, the destination keeps as much as with one job."""
    source, full, pages = tmp_path / "source", tmp_path / "small", 96
    demo_store(source, pages)
    with small_file_system(full, "2m"):
        batches = ("--jobs", 3, "--buffer-bytes", "6MiB")
        document = migrated(invoke, source, full, "--no-space-check", *batches, exit_code=4)
        free = shutil.disk_usage(full).free
        held = {name[:64] for name in contents(full)}
        assert contents(full).items() <= contents(source).items()
    assert (document["complete"], document["stopped_by"]) == (False, "destination full")
    assert len(held) == document["pages"]
    assert free < 1 << 20


def test_a_writer_that_comes_between_is_compared_with(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, other = kv_names(source)[0], kv_names(source)[2]
    copy_from = FileStore.copy_from
    size = (source / other).stat().st_size

    def race(store: FileStore, *arguments: object, **options: object) -> object:
        if not (target / same).exists():
            shutil.copy2(source / same, target / same)
            (target / other).write_bytes(b"z" * size)
        return copy_from(store, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(FileStore, "copy_from", race)
    document = migrated(invoke, source, target, exit_code=4)
    assert document["conflicts"] == 1
    assert document["problems"][0]["key"] == other
    assert document["pages"] == PAGES - 1


def test_a_buffer_that_is_too_small_for_a_page_names_it(
    invoke: Invoke, source: Path, target: Path
) -> None:
    document = migrated(invoke, source, target, "--buffer-bytes", "8KiB", exit_code=4)
    assert (document["pages"], document["failed"]) == (0, PAGES)
    assert {problem["page"] for problem in document["problems"]} == {
        name[:64] for name in contents(source)
    }
    assert "memory, but --buffer-bytes is 8192; give a larger --buffer-bytes" in document["stderr"]


def test_mla_pages_with_an_indexer_change_their_layout(
    invoke: Invoke, tmp_path: Path, target: Path
) -> None:
    source, profile = tmp_path / "source", tmp_path / "dsa.toml"
    source.mkdir()
    profile.write_text(DSA)
    rng = np.random.default_rng(1)
    for number in range(4):
        put(source, f"{page(number)}_x-dsa.bin").write_bytes(rng.bytes(9216))
        put(source, f"{page(number)}.indexer_x-dsa.bin").write_bytes(rng.bytes(1056))
    migrated(
        invoke, source, target, "--profile", profile, "--to-layout", "layer_first", "--grace", "0s"
    )
    for name, (data, _) in contents(source).items():
        moved = (target / name).read_bytes()
        if ".indexer" in name:
            assert moved == data
        else:
            rows = [data[at : at + 1152] for at in range(0, 9216, 1152)]  # 4 tokens of 2 layers
            assert moved == b"".join(rows[::2] + rows[1::2])


def test_verbatim_copies_are_not_put_under_keys_of_another_size(
    invoke: Invoke, source: Path, target: Path, profile: Path
) -> None:
    target.mkdir()
    for number in range(5):
        put(target, f"{page(number)}_{MODEL}_0_2.bin", 8192)
    before = contents(target)
    output = invoke("migrate", source, target, "--profile", profile, exit_code=2)
    assert output.stderr == (
        f"hicachectl: file://{target}: already has kv objects of 8192 bytes under the keys to "
        "write, but they should have 16384 bytes, so a deployment with another topology or dtype "
        "wrote them; remove them (hicachectl rm), or give another --to-tag or --to-model\n"
    )
    assert contents(target) == before


def test_keys_without_a_tp_size_are_not_shared_with_a_larger_topology(
    invoke: Invoke, source: Path, target: Path, profile: Path
) -> None:
    url = f"pack://{target}.hcpack?keys=mooncake"
    with open_store(url, create=True) as store:
        fill(store, 2)  # of TP 2; too few to tell by their sizes
    assert invoke(
        "migrate", source, url, "--profile", profile, "--to-tp", 1, "--grace", "0s", exit_code=2
    ).stderr == (
        f"hicachectl: pack://{target}.hcpack: already has objects of TP rank 1 of {MODEL}, but the "
        "new TP size is 1, and Mooncake keys carry no TP size, so both deployments would share "
        "keys; remove the objects (hicachectl rm), or give another --to-tag\n"
    )


def test_a_dry_run_of_comparing_copies_nothing(invoke: Invoke, source: Path, target: Path) -> None:
    migrated(invoke, source, target)
    document = migrated(invoke, source, target, "--if-exists", "verify", "--dry-run")
    assert (document["pages"], document["skipped"]) == (0, PAGES)


def test_a_dry_run_says_what_room_is_lacking(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileStore, "free_bytes", lambda _: 1000)
    document = migrated(invoke, source, target, "--dry-run")
    assert "1000 B free" in document["stderr"]
    assert document["pages"] == PAGES


def test_a_dry_run_leaves_no_directories(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    migrated(invoke, source, tmp_path / "a" / "b" / "c", "--dry-run")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_pages_that_are_too_large_for_the_buffer_are_left_behind_and_named(
    invoke: Invoke, source: Path, target: Path
) -> None:
    document = migrated(invoke, source, target, "--buffer-bytes", "64KiB", exit_code=4)
    assert (document["pages"], document["failed"]) == (PAGES - 2, 2)
    large = {problem["page"] for problem in document["problems"]}
    assert len(large) == 2
    assert {name[:64] for name in contents(target)} == {
        name[:64] for name in contents(source)
    } - large
    assert migrated(invoke, source, target)["pages"] == 2


def test_pages_of_another_deployment_are_left_behind_with_its_name(
    invoke: Invoke, tmp_path: Path
) -> None:
    """A renaming within a store names whose pages stay."""
    for number in range(5):
        put(tmp_path / "store", f"{page(number)}_{'old' if number < 3 else 'new'}_0_1.bin")
    profile = tmp_path / "p.toml"
    profile.write_text('model = "old"\n[[pools]]\nname = "kv"\nkind = "opaque"\nnbytes = 64\n')
    way = ("--profile", profile, "--to-model", "new", "--grace", "0s")
    document = migrated(invoke, tmp_path / "store", tmp_path / "store", *way)
    assert document["pages"] == 3
    said = "Not copied: 2 pages of new tp 1; only pages of old tp 1 are copied"
    assert said in document["stderr"]


def test_objects_of_foreign_names_are_left_behind_and_counted(
    invoke: Invoke, source: Path, target: Path
) -> None:
    put(source, "notes.txt")
    document = migrated(invoke, source, target)
    assert "Not copied: 1 object with unknown keys" in document["stderr"]
    assert not (target / "notes.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_pages_that_the_destination_has_are_verified_too(
    invoke: Invoke, source: Path, target: Path, resume: tuple[str, ...]
) -> None:
    """As after a run without --verify; --resume has no effect."""
    migrated(invoke, source, target)
    name = kv_names(target)[0]
    data = bytearray((target / name).read_bytes())
    data[5] ^= 1
    (target / name).write_bytes(data)
    assert migrated(invoke, source, target, *resume)["skipped"] == PAGES
    document = migrated(invoke, source, target, "--verify", *resume, exit_code=4)
    assert (document["conflicts"], document["skipped"]) == (1, PAGES - 1)
    assert document["problems"][0]["key"] == name
