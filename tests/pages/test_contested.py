"""Two models with keys that look alike: pages that may be of either are ambiguous."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.profile import dump_profile, profile_from_mapping
from tests.stores import contents, page, put, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

WIDE, NARROW = "x-8B", "x-8B_0_2"  # the first at TP 2; the second without TP ranks
WIDE_BYTES, NARROW_BYTES = 4096, 9216
RANKS = (f"_{WIDE}_0_2", f"_{WIDE}_1_2")
BARE = f"_{NARROW}"  # the key of the first model's rank 0, too
MINE, THEIRS = range(30), range(50, 80)


def write_profile(path: Path, model: str, **fields: object) -> Path:
    """Write the profile of one of the models, with the size that the tests write."""
    if model == WIDE:
        pool = {"kind": "mha", "dtype": "bfloat16", "layers": 2, "kv_heads": 4, "head_dim": 64}
    else:
        pool = {"kind": "mla", "layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                "row": "bf16"}  # fmt: skip
    mapping = {"model": model, "page_size": 4, "tp": 2, "pools": [{"name": "kv", **pool}], **fields}
    path.write_text(dump_profile(profile_from_mapping(mapping)))
    return path


@pytest.fixture
def profiles(tmp_path: Path) -> dict[str, Path]:
    return {
        model: write_profile(tmp_path / f"{number}.toml", model)
        for number, model in enumerate((WIDE, NARROW))
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Each model on pages of its own."""
    directory = tmp_path / "store"
    put_pages(directory, MINE, *RANKS, nbytes=WIDE_BYTES)
    put_pages(directory, THEIRS, BARE, nbytes=NARROW_BYTES)
    return directory


def rows(invoke: Invoke, store: Path, *arguments: object) -> list[dict[str, Any]]:
    return invoke("ls", store, *arguments, "--format", "jsonl").rows


def states(found: list[dict[str, Any]]) -> dict[tuple[str | None, str], int]:
    counts: dict[tuple[str | None, str], int] = {}
    for row in found:
        key = row["model"], row["state"]
        counts[key] = counts.get(key, 0) + 1
    return counts


def verified(invoke: Invoke, store: Path, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    checks = ("--checks", "names,groups,sizes", "--format", "json")
    out = invoke("verify", store, *checks, *arguments, exit_code=exit_code).stdout
    document: dict[str, Any] = json.loads(out)
    return document


def test_the_tests_write_what_the_profiles_expect(
    invoke: Invoke, tmp_path: Path, profiles: dict[str, Path]
) -> None:
    for model, stems, nbytes in ((WIDE, RANKS, WIDE_BYTES), (NARROW, (BARE,), NARROW_BYTES)):
        directory = tmp_path / model
        directory.mkdir()
        put_pages(directory, MINE, *stems, nbytes=nbytes)
        found = verified(invoke, directory, "--profile", profiles[model])
        assert found["findings"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "expected", "keys"),
    [
        (None, {(WIDE, "whole"): 30, (None, "unknown"): 30}, 1),
        (WIDE, {(WIDE, "whole"): 30, (None, "unknown"): 30}, 1),
        (NARROW, {(NARROW, "whole"): 30, (None, "unknown"): 30}, 2),
    ],
)
def test_pages_of_the_other_model_are_said_and_not_judged(
    invoke: Invoke,
    store: Path,
    profiles: dict[str, Path],
    given: str | None,
    expected: dict[tuple[str | None, str], int],
    keys: int,
) -> None:
    arguments = ["--profile", profiles[given]] if given else []
    assert states(rows(invoke, store, *arguments)) == expected
    said = invoke("ls", store, *arguments).stderr
    assert f"30 keys <hash>{BARE}.bin can be kv of model '{WIDE}' tp 0/2 or kv of" in said
    document = verified(invoke, store, *arguments, exit_code=4)
    assert document["counts"] == {"ambiguous-key": keys}
    assert all("30 keys" in finding["detail"] for finding in document["findings"])


@pytest.mark.slow
@pytest.mark.parametrize("given", [WIDE, NARROW])
def test_repair_takes_what_is_damaged_and_nothing_else(
    invoke: Invoke, store: Path, profiles: dict[str, Path], given: str
) -> None:
    """Without a fellow rank, a size of neither model decides nothing."""
    for name in (f"{page(0)}{RANKS[0]}.bin", f"{page(50)}{BARE}.bin"):
        put(store, name, 5)
    before = contents(store)
    invoke("verify", store, "--profile", profiles[given], "--repair", "quarantine", "--yes",
           "--checks", "names,groups,sizes", exit_code=4)  # fmt: skip
    gone = before.keys() - contents(store).keys()
    assert gone == ({f"{page(0)}{stem}.bin" for stem in RANKS} if given == WIDE else set())


@pytest.mark.parametrize("given", [None, WIDE, NARROW])
@pytest.mark.parametrize("model", [WIDE, NARROW])
def test_rm_by_model_takes_no_page_of_the_other(
    invoke: Invoke, store: Path, profiles: dict[str, Path], given: str | None, model: str
) -> None:
    before = contents(store)
    arguments = ["--profile", profiles[given]] if given else []
    said = invoke("rm", store, "--model", model, "--yes", *arguments).stderr
    known = {page(number) for number in (THEIRS if given == NARROW else MINE)}
    taken = known if model == (given or WIDE) else set()
    assert contents(store) == {n: value for n, value in before.items() if n[:64] not in taken}
    assert "30 page groups with ambiguous keys left alone" in said


@pytest.mark.slow
@pytest.mark.parametrize("model", [WIDE, NARROW])
def test_a_move_takes_one_only(
    invoke: Invoke, store: Path, tmp_path: Path, profiles: dict[str, Path], model: str
) -> None:
    before = contents(store)
    target = tmp_path / "target"
    options = ["--profile", profiles[model], "--to-model", "new"]
    said = invoke("migrate", store, target, *options, "--move", "--yes").stderr
    assert "Not copied: 30 pages with ambiguous keys" in said
    own = {page(number) for number in (MINE if model == WIDE else THEIRS)}
    assert {name[:64] for name in contents(target)} == own
    assert contents(store) == {n: value for n, value in before.items() if n[:64] not in own}


@pytest.mark.slow
def test_a_page_of_both_is_left_alone(
    invoke: Invoke, store: Path, profiles: dict[str, Path]
) -> None:
    """The file backend skips an existing name, so the first writer has the key."""
    put(store, f"{page(0)}{BARE}.bin", NARROW_BYTES)  # with rank 1 of the other model
    before = contents(store)
    repair = ("--repair", "delete", "--repair-code", "missing-rank", "--checks", "groups", "--yes")
    for arguments in ([], ["--profile", profiles[WIDE]], ["--profile", profiles[NARROW]]):
        (found,) = (row for row in rows(invoke, store, *arguments) if row["page"] == page(0))
        assert (found["model"], found["state"]) == (None, "unknown")
        assert found["nbytes"] == WIDE_BYTES + NARROW_BYTES
        document = verified(invoke, store, *arguments, exit_code=4)
        assert set(document["counts"]) == {"ambiguous-key"}
        if arguments:
            invoke("verify", store, *arguments, *repair)
        assert contents(store) == before
    invoke("rm", store, "--model", WIDE, "--yes")
    left = {name[:64] for name in contents(store)}
    assert left == {page(number) for number in (0, *THEIRS)}


@pytest.mark.slow
def test_sizes_that_do_not_tell_leave_lone_objects_open(invoke: Invoke, tmp_path: Path) -> None:
    directory = tmp_path / "equal"
    put_pages(directory, MINE, *RANKS, nbytes=WIDE_BYTES)
    put_pages(directory, THEIRS, BARE, nbytes=WIDE_BYTES)
    assert states(rows(invoke, directory)) == {
        (WIDE, "whole"): len(MINE), (None, "unknown"): len(THEIRS)
    }  # fmt: skip
    said = invoke("ls", directory).stderr
    meanings = f"kv of model '{WIDE}' tp 0/2 or kv of model '{NARROW}'"
    assert f"{len(THEIRS)} keys <hash>{BARE}.bin can be {meanings}" in said
    document = verified(invoke, directory, exit_code=4)
    assert document["counts"] == {"ambiguous-key": 1}
    assert meanings in document["findings"][0]["detail"]
    for arguments in (["--model", WIDE], ["--model", NARROW], ["--before", "1d"]):
        out = invoke("rm", directory, *arguments, "--dry-run", "--format", "json")
        groups = out.document["groups"]
        assert {g["page"] for g in groups} <= {page(number) for number in MINE}
        assert f"{len(THEIRS)} page groups with ambiguous keys left alone" in out.stderr
    target = tmp_path / "target"
    out = invoke("migrate", directory, target, "--move", "--yes", "--include-partial")
    assert f"{len(THEIRS)} pages with ambiguous keys" in out.stderr
    assert {name[:64] for name in contents(directory)} == {page(number) for number in THEIRS}
    out = invoke("rm", directory, "--state", "unknown", "--yes")
    assert f"{len(THEIRS)} page groups with ambiguous keys selected for removal" in out.stderr
    assert contents(directory) == {}


def test_a_profile_and_the_fellow_ranks_tell_equal_sizes(invoke: Invoke, tmp_path: Path) -> None:
    directory = tmp_path / "equal"
    put_pages(directory, MINE, *RANKS, nbytes=NARROW_BYTES)
    put_pages(directory, THEIRS, BARE, nbytes=NARROW_BYTES)
    profile = write_profile(tmp_path / "narrow.toml", NARROW)
    found = rows(invoke, directory, "--profile", profile)
    assert states(found) == {(NARROW, "whole"): len(THEIRS), (None, "unknown"): len(MINE)}


@pytest.mark.parametrize("lost", [1, 12])
def test_lost_ranks_are_no_other_model(invoke: Invoke, tmp_path: Path, lost: int) -> None:
    put_pages(tmp_path, MINE, *RANKS, nbytes=WIDE_BYTES)
    for number in range(lost):
        (tmp_path / f"{page(number)}{RANKS[1]}.bin").unlink()
    assert verified(invoke, tmp_path, exit_code=4)["counts"] == {"missing-rank": lost}
    found = states(rows(invoke, tmp_path))
    assert found == {(WIDE, "whole"): len(MINE) - lost, (WIDE, "partial"): lost}


def test_a_dtype_change_is_no_other_model(invoke: Invoke, tmp_path: Path) -> None:
    """Old pages of another size, some without their rank 1."""
    put_pages(tmp_path, MINE, *RANKS, nbytes=WIDE_BYTES)
    put_pages(tmp_path, THEIRS, *RANKS, nbytes=WIDE_BYTES // 2)
    for number in THEIRS[:5]:
        (tmp_path / f"{page(number)}{RANKS[1]}.bin").unlink()
    assert {row["model"] for row in rows(invoke, tmp_path)} == {WIDE}
    assert {row["state"] for row in rows(invoke, tmp_path)} == {"whole", "partial"}


def test_damage_beside_a_fellow_rank_is_damage(
    invoke: Invoke, store: Path, profiles: dict[str, Path]
) -> None:
    put(store, f"{page(1)}{RANKS[0]}.bin", 100)
    put(store, f"{page(2)}{RANKS[1]}.bin", 100)
    document = verified(invoke, store, "--profile", profiles[WIDE], exit_code=4)
    assert document["counts"] == {"truncated": 2, "ambiguous-key": 1}
    cut = {f["page"] for f in document["findings"] if f["code"] == "truncated"}
    assert cut == {page(1), page(2)}


@pytest.mark.slow
def test_a_lone_object_of_no_known_size_stays_open(
    invoke: Invoke, store: Path, profiles: dict[str, Path]
) -> None:
    put(store, f"{page(50)}{BARE}.bin", 100)
    before = contents(store)
    for given in (WIDE, NARROW):
        document = verified(invoke, store, "--profile", profiles[given], exit_code=4)
        assert set(document["counts"]) == {"ambiguous-key"}
        invoke("verify", store, "--profile", profiles[given], "--repair", "delete", "--yes",
               "--checks", "names,groups,sizes", exit_code=4)  # fmt: skip
        assert contents(store) == before
    listed = store.parent / "pages"
    listed.write_text(page(50))
    out = invoke("rm", store, "--pages", listed, "--yes")
    assert "1 page group with ambiguous keys selected for removal" in out.stderr
    assert before.keys() - contents(store).keys() == {f"{page(50)}{BARE}.bin"}


@pytest.mark.slow
def test_sidecars_go_with_the_anchor_of_their_page(invoke: Invoke, store: Path) -> None:
    put_pages(store, MINE, *(f".draft{stem}" for stem in RANKS), nbytes=100)
    put_pages(store, THEIRS, f".indexer{BARE}", f".draft{BARE}", nbytes=1056)
    put_pages(store, THEIRS[:3], *(f".mamba{BARE}_{rank}_4" for rank in range(4)), nbytes=30)
    expected = {(WIDE, "whole"): len(MINE), (None, "unknown"): len(THEIRS)}
    assert states(rows(invoke, store)) == expected
    found = {row["page"]: row for row in rows(invoke, store)}
    assert found[page(50)]["nbytes"] == NARROW_BYTES + 2 * 1056 + 4 * 30
    (store / f"{page(1)}{RANKS[0]}.bin").unlink()
    found = {row["page"]: row for row in rows(invoke, store)}
    assert (found[page(1)]["model"], found[page(1)]["state"]) == (WIDE, "partial")
    before = contents(store)
    invoke("rm", store, "--model", WIDE, "--yes")
    theirs = {page(number) for number in THEIRS}
    assert contents(store) == {n: value for n, value in before.items() if n[:64] in theirs}


def test_the_name_can_end_like_a_pipeline_stage(invoke: Invoke, tmp_path: Path) -> None:
    """x at PP 2 without TP ranks, and a model x_2_0."""
    put_pages(tmp_path, MINE, "_x_2_0", nbytes=100)
    put_pages(tmp_path, MINE, "_x_2_1", nbytes=150)
    put_pages(tmp_path, THEIRS, "_x_2_0", nbytes=700)
    assert states(rows(invoke, tmp_path)) == {
        ("x", "whole"): len(MINE), (None, "unknown"): len(THEIRS)
    }  # fmt: skip


def test_a_name_can_end_like_the_first_of_two_pairs(invoke: Invoke, tmp_path: Path) -> None:
    """x at TP 4 and PP 2, and a model x_0_4 at PP 2 without TP ranks."""
    stems = [f"_x_{rank}_4_2_{stage}" for rank in range(4) for stage in range(2)]
    put_pages(tmp_path, MINE, *stems, nbytes=100)
    put_pages(tmp_path, THEIRS, "_x_0_4_2_0", "_x_0_4_2_1", nbytes=700)
    assert states(rows(invoke, tmp_path)) == {
        ("x", "whole"): len(MINE), (None, "unknown"): len(THEIRS)
    }  # fmt: skip


def test_only_one_rank_is_in_the_store(
    invoke: Invoke, tmp_path: Path, profiles: dict[str, Path]
) -> None:
    """Without any fellow rank, only a profile decides."""
    (directory := tmp_path / "store").mkdir()
    put_pages(directory, MINE, BARE, nbytes=WIDE_BYTES)
    assert states(rows(invoke, directory)) == {(None, "unknown"): len(MINE)}
    found = rows(invoke, directory, "--profile", profiles[WIDE])
    assert states(found) == {(WIDE, "partial"): len(MINE)}
    message = invoke("verify", directory, "--profile", profiles[NARROW], exit_code=2).stderr
    assert f"{NARROW_BYTES} bytes" in message


def test_hits_are_by_the_key_as_servers_ask(
    invoke: Invoke, store: Path, profiles: dict[str, Path], tmp_path: Path
) -> None:
    chain = tmp_path / "chain.jsonl"
    chain.write_text(json.dumps([page(50), page(51), page(0)]))
    out = invoke("hits", store, "--pages", chain, "--profile", profiles[NARROW], "--format", "json")
    (found,) = out.document["chains"]
    assert (found["usable_pages"], found["stopped_by"]["page"]) == (2, page(0))


def test_prewarm_copies_no_other_models_objects(
    invoke: Invoke, tmp_path: Path, profiles: dict[str, Path]
) -> None:
    """With equal sizes a server cannot distinguish the models; the fellow rank does."""
    source = tmp_path / "source"
    put_pages(source, range(4), *RANKS, nbytes=NARROW_BYTES)
    put_pages(source, range(4, 8), BARE, nbytes=NARROW_BYTES)
    listed = tmp_path / "chain.jsonl"
    listed.write_text(json.dumps([page(4), page(5), page(0), page(6)]))
    target = tmp_path / "target"
    invoke("prewarm", target, "--from", source, "--profile", profiles[NARROW], "--pages", listed)
    assert set(contents(target)) == {f"{page(number)}{BARE}.bin" for number in (4, 5)}


def test_many_pages_are_decided_without_python_for_each(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(100), *RANKS, nbytes=8)
    put_pages(tmp_path, range(100, 200), BARE, nbytes=16)
    assert states(rows(invoke, tmp_path)) == {(WIDE, "whole"): 100, (None, "unknown"): 100}
