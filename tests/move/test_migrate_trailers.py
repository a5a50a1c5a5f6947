"""`migrate` between stores with trailers: what the plug-in accepts afterwards, and what not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.backends.base import open_store
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.spec import object_specs
from hicachectl.formats.trailer import TRAILER_BYTES
from hicachectl.formats.transfer import retargeted
from tests.move.migrations import demo_store, migrated
from tests.served_stores import (
    HYBRID,
    INDEXED,
    OTHER_WEIGHTS,
    WEIGHTS,
    clear,
    forget_ranks,
    served_by,
    served_store,
    swap_ranks,
)
from tests.stores import OLD, page

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

PAGES = [page(number) for number in range(4)]
KV = f"{page(1)}_demo-hybrid-1b_0_2.bin"
OTHER = replace(HYBRID, weights=OTHER_WEIGHTS)
UNNAMED = replace(HYBRID, weights="")
models = pytest.mark.parametrize("profile", [HYBRID, INDEXED], ids=["hybrid", "indexed"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four pages of a model of TP 2 with states."""
    served_store(tmp_path / "source", HYBRID)
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def given(directory: Path, profile: Profile = UNNAMED) -> tuple[str, Path]:
    """Return the option of a profile; without weights, since markers state them."""
    path = directory / "profile.toml"
    path.write_text(dump_profile(profile))
    return "--profile", path


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*.bin")}


def payloads(directory: Path) -> dict[str, bytes]:
    """Return the objects of a store whose files all have trailers."""
    return {name: data[:-TRAILER_BYTES] for name, data in files(directory).items()}


def bare_page(store: Path, number: int) -> None:
    """Add a page without trailers, as SGLang's own file backend writes it."""
    for path in list(store.glob(f"{page(0)}*")):
        new = path.with_name(path.name.replace(page(0), page(number)))
        new.write_bytes(path.read_bytes()[:-TRAILER_BYTES])
        os.utime(new, (OLD, OLD))


@pytest.mark.slow
@models
@pytest.mark.parametrize("arguments", [(), ("--verify",), ("--jobs", 1)], ids=str)
def test_without_a_profile_files_are_copied_as_they_are(
    invoke: Invoke, tmp_path: Path, target: Path, profile: Profile, arguments: tuple[object, ...]
) -> None:
    """Several identities, too: no trailer changes, and the plug-in accepts what it accepted."""
    source = tmp_path / "source"
    served_store(source, profile)
    other = replace(profile, weights=OTHER_WEIGHTS)
    served_store(source, other, range(4, 6))
    document = migrated(invoke, source, target, *arguments)
    assert document["pages"] == 6
    assert files(target) == files(source)
    every = [page(number) for number in range(6)]
    assert served_by(target, profile, every) == [True] * 4 + [False] * 2
    assert served_by(target, other, every) == [False] * 4 + [True] * 2


@pytest.mark.slow
def test_the_rest_of_a_page_is_copied_with_its_trailers(
    invoke: Invoke, source: Path, target: Path
) -> None:
    """Objects that are there are compared first, which reads all of them into memory."""
    migrated(invoke, source, target)
    (target / KV).unlink()
    document = migrated(invoke, source, target)
    assert (document["pages"], document["objects"]) == (1, 1)
    assert files(target) == files(source)


@pytest.mark.slow
def test_into_folders_and_back(invoke: Invoke, source: Path, target: Path, tmp_path: Path) -> None:
    target.mkdir()
    migrated(invoke, source, f"file://{target}?folders=hex2")
    assert (target / KV[:2] / KV).is_file()
    assert served_by(target, HYBRID, PAGES) == [True] * 4
    migrated(invoke, target, tmp_path / "flat")
    assert files(tmp_path / "flat") == files(source)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"tp": 4}, {"tp": 1}, {"layout": "page_first_direct"}, {"model": "org/new"}, {"pp": 2}],
    ids=str,
)
def test_transformed_objects_get_trailers_of_the_new_deployment(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The weights come from the markers; plug-in servers of the new deployment read every page."""
    new = retargeted(HYBRID, **change)
    (name, value) = next(iter(change.items()))
    document = migrated(invoke, source, target, *given(tmp_path), f"--to-{name}", value)
    assert (document["pages"], document["failed"]) == (4, 0)
    if new.pp == 1:  # the helper serves one stage
        assert served_by(target, new, PAGES) == [True] * 4
        assert served_by(target, replace(new, weights=OTHER_WEIGHTS), PAGES) == [False] * 4
    checked = ("--profile", tmp_path / "new.toml", "--format", "json")
    (tmp_path / "new.toml").write_text(dump_profile(new))
    found = invoke("verify", target, *checked).document
    assert (found["findings"], found["skipped_checks"]) == ([], [])


@pytest.mark.slow
@models
def test_out_of_a_pack_trailers_are_written_again(
    invoke: Invoke, tmp_path: Path, target: Path, profile: Profile
) -> None:
    """A pack holds the objects without trailers, and names the weights in its profile."""
    source, pack = tmp_path / "source", f"pack://{tmp_path}/a.hcpack"
    served_store(source, profile)
    migrated(invoke, source, pack, *given(tmp_path, replace(profile, weights="")))
    assert f'weights = "{WEIGHTS}"' in invoke("profile", pack).stdout
    migrated(invoke, pack, target)
    assert files(target) == files(source)
    assert served_by(target, profile, PAGES) == [True] * 4


@pytest.mark.slow
def test_plain_files_get_trailers_only_where_they_are_wanted(
    invoke: Invoke, tmp_path: Path
) -> None:
    """Wanted: by --trailers write, or in a directory that plug-in servers use."""
    plain = demo_store(tmp_path / "plain", 4)
    profile = given(tmp_path, HYBRID)
    migrated(invoke, plain, tmp_path / "same", *profile)
    assert files(tmp_path / "same") == files(plain)
    migrated(invoke, plain, tmp_path / "new", *profile, "--trailers", "write")
    served_store(tmp_path / "used", HYBRID, range(1))
    migrated(invoke, plain, tmp_path / "used", *profile)
    for name in ("new", "used"):
        held = files(tmp_path / name)
        assert {key: held[key][:-TRAILER_BYTES] for key in files(plain)} == files(plain)
    found = invoke("verify", tmp_path / "new", *profile, "--format", "json").document
    assert (found["findings"], found["skipped_checks"]) == ([], [])


def test_trailers_can_be_dropped(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """What is left are files as SGLang's own backend writes them; no markers."""
    migrated(invoke, source, target, "--trailers", "drop")
    assert files(target) == payloads(source)
    assert not (target / ".hicachectl/plugin").exists()


@pytest.mark.slow
def test_always_writing_does_not_leave_out_pages_that_are_there(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """Pages without trailers in the destination are conflicts, unless they are overwritten."""
    migrated(invoke, source, target, "--trailers", "drop")
    write = (*given(tmp_path), "--trailers", "write")
    document = migrated(invoke, source, target, *write, exit_code=4)
    assert (document["conflicts"], document["skipped"]) == (4, 0)
    document = migrated(invoke, source, target, *write, "--if-exists", "overwrite")
    assert document["pages"] == 4
    assert files(target) == files(source)
    assert migrated(invoke, source, target, *write)["skipped"] == 4


def test_trailers_that_cannot_be_written_are_refused(
    invoke: Invoke, tmp_path: Path, target: Path
) -> None:
    plain = demo_store(tmp_path / "plain", 2)
    write = ("--trailers", "write")
    refused = migrated_in_vain(invoke, plain, target, *given(tmp_path), *write)
    assert "--trailers write: the weights are unknown; give --weights" in refused
    refused = migrated_in_vain(invoke, plain, target, *write)
    assert "the weights are unknown" in refused
    pack = f"pack://{tmp_path}/a.hcpack"
    refused = migrated_in_vain(invoke, plain, pack, *given(tmp_path, HYBRID), *write)
    assert "keeps no trailers; leave out --trailers" in refused


def migrated_in_vain(invoke: Invoke, *arguments: object) -> str:
    """Return what a refused migration says."""
    said = invoke("migrate", *arguments, exit_code=2).stderr
    assert "Traceback" not in said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--to-tp", 4), ("--trailers", "drop")], ids=str)
def test_objects_of_other_weights_are_not_copied(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    """Their pages are counted, in a dry run, too."""
    served_store(source, OTHER, range(4, 6))
    options = (*given(tmp_path, HYBRID), *arguments)
    rehearsed = migrated(invoke, source, target, *options, "--dry-run")
    document = migrated(invoke, source, target, *options)
    assert rehearsed["pages"] == document["pages"] == 4
    said = "Not copied: 2 pages with objects of other weights, dtype, layout or rank"
    assert said in document["stderr"]
    assert said in rehearsed["stderr"]
    assert {name[:64] for name in files(target)} == set(PAGES)


@pytest.mark.parametrize("arguments", [(), ("--to-tp", 4), ("--trailers", "drop")], ids=str)
@pytest.mark.parametrize("named", [True, False], ids=["weights", "no profile"])
def test_objects_of_another_rank_are_not_copied(
    invoke: Invoke,
    source: Path,
    target: Path,
    tmp_path: Path,
    arguments: tuple[object, ...],
    *,
    named: bool,
) -> None:
    """Without a profile their trailers are compared only when they are read: the page fails."""
    swap_ranks(source, page(1))
    if named:
        document = migrated(invoke, source, target, *given(tmp_path, HYBRID), *arguments)
        assert "Not copied: 1 page with objects of other weights" in document["stderr"]
    elif not arguments:
        document = migrated(invoke, source, target, exit_code=4)
        assert "its trailer is of rank 1 (tp 2)" in document["problems"][0]["detail"]
    else:
        return
    assert document["pages"] == 3
    assert page(1) not in {name[:64] for name in files(target)}


@pytest.mark.slow
@models
@pytest.mark.parametrize("options", [(), ("--trailers", "write")], ids=str)
def test_trailers_without_a_rank_are_kept_unless_they_are_written(
    invoke: Invoke, tmp_path: Path, target: Path, profile: Profile, options: tuple[object, ...]
) -> None:
    source = tmp_path / "source"
    served_store(source, profile)
    ranked = files(source)
    forget_ranks(source)
    migrated(invoke, source, target, *given(tmp_path, profile), *options)
    assert files(target) == (ranked if options else files(source))
    assert served_by(target, profile, PAGES, unranked="refuse") == [bool(options)] * 4


@pytest.mark.parametrize("tp", [1, 4])
def test_transformed_objects_name_the_rank_of_their_new_key(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path, tp: int
) -> None:
    forget_ranks(source)
    migrated(invoke, source, target, *given(tmp_path), "--to-tp", tp)
    new = retargeted(HYBRID, tp=tp)
    assert served_by(target, new, PAGES, unranked="refuse") == [True] * 4


def test_a_pack_gets_no_objects_of_other_weights(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    served_store(source, OTHER, range(4, 6))
    pack = f"pack://{tmp_path}/a.hcpack"
    document = migrated(invoke, source, pack, *given(tmp_path, HYBRID))
    assert document["pages"] == 4
    rows = invoke("ls", pack, "--format", "json").document["pages"]
    assert {row["page"] for row in rows} == set(PAGES)


@pytest.mark.slow
def test_weights_are_not_mixed_up(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """Copies that lose trailers, or get new ones, need to know which objects are meant."""
    served_store(source, OTHER, range(4, 6))
    pack = f"pack://{tmp_path}/a.hcpack"
    losing: list[tuple[object, ...]] = [(pack,), (target, "--trailers", "drop")]
    for arguments in losing:
        said = migrated_in_vain(invoke, source, *arguments)
        assert "have 2 identities, which copies without trailers would mix up" in said
    changing: list[tuple[object, ...]] = [(target, "--to-tp", 4), (pack, "--to-model", "org/new")]
    for arguments in changing:
        said = migrated_in_vain(invoke, source, *arguments, *given(tmp_path))
        assert f"the weights {WEIGHTS}, {OTHER_WEIGHTS}; choose with --weights" in said
    chosen = ("--to-tp", 4, *given(tmp_path), "--weights", OTHER_WEIGHTS)
    assert migrated(invoke, source, target, *chosen)["pages"] == 2
    new = retargeted(OTHER, tp=4)
    assert served_by(target, new, [page(4), page(5)]) == [True, True]


@pytest.mark.slow
def test_another_model_beside_keeps_its_trailers(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """A profile names one deployment; objects of the others keep key, bytes and trailer."""
    served_store(source, INDEXED)
    migrated(invoke, source, target, *given(tmp_path, HYBRID))
    assert files(target) == files(source)
    again = tmp_path / "again"
    migrated(invoke, source, again, *given(tmp_path, HYBRID), "--trailers", "write")
    assert served_by(again, INDEXED, PAGES) == served_by(again, HYBRID, PAGES) == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("if_exists", ["skip", "verify", "overwrite"])
def test_an_object_of_other_weights_in_the_destination_is_a_conflict(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path, if_exists: str
) -> None:
    """Although its bytes are equal here; overwrite replaces it."""
    served_store(target, OTHER, range(2))
    options = (*given(tmp_path, HYBRID), "--if-exists", if_exists)
    replaces = if_exists == "overwrite"
    document = migrated(invoke, source, target, *options, exit_code=0 if replaces else 4)
    assert document["conflicts"] == (0 if replaces else 2)
    assert served_by(target, HYBRID, PAGES) == [replaces] * 2 + [True] * 2
    assert ("In conflict: 2 pages" in document["stderr"]) is not replaces
    named = {problem["page"] for problem in document["problems"]}
    assert named == (set() if replaces else set(PAGES[:2]))


def test_a_comparison_knows_identities_that_no_marker_states(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """The bytes are equal, so only the trailer tells the two objects apart."""
    served_store(target, HYBRID, range(2))
    served_store(target, OTHER, range(2, 3))
    for marker in (target / ".hicachectl/plugin").iterdir():
        if OTHER_WEIGHTS in marker.read_text():
            marker.unlink()
    options = (*given(tmp_path, HYBRID), "--if-exists", "verify")
    document = migrated(invoke, source, target, *options, exit_code=4)
    assert (document["skipped"], document["conflicts"], document["pages"]) == (2, 1, 1)
    assert "no marker describes it" in document["problems"][0]["detail"]


@pytest.mark.parametrize("if_exists", ["skip", "verify"])
def test_other_weights_in_the_destination_are_seen_without_a_profile(
    invoke: Invoke, source: Path, target: Path, if_exists: str
) -> None:
    served_store(target, OTHER, range(2))
    document = migrated(invoke, source, target, "--if-exists", if_exists, exit_code=4)
    assert (document["conflicts"], document["pages"]) == (2, 2)


def test_a_page_that_is_there_is_compared_by_its_bytes(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    migrated(invoke, source, target)
    document = migrated(invoke, source, target, *given(tmp_path), "--if-exists", "verify")
    assert (document["skipped"], document["conflicts"]) == (4, 0)


def test_damaged_objects_are_not_copied(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """A transform would give them new trailers, and so make them look right."""
    data = bytearray((source / KV).read_bytes())
    data[7] ^= 4
    (source / KV).write_bytes(data)
    document = migrated(invoke, source, target, *given(tmp_path), "--to-tp", 1, exit_code=4)
    assert (document["pages"], document["failed"]) == (3, 1)
    assert "differ from the xxh3 digest" in document["problems"][0]["detail"]


@pytest.mark.slow
def test_objects_without_a_trailer_beside_others_get_none_by_accident(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """Nobody vouches for their weights, unless by --trailers write."""
    bare_page(source, 9)
    options = (*given(tmp_path), "--to-tp", 1)
    document = migrated(invoke, source, target, *options)
    assert document["pages"] == 4
    assert "Not copied: 1 page with objects without a trailer" in document["stderr"]
    document = migrated(invoke, source, target, *options, "--trailers", "write")
    assert document["pages"] == 1
    new = retargeted(HYBRID, tp=1)
    assert served_by(target, new, [*PAGES, page(9)]) == [True] * 5


def test_a_move_takes_trailers_along(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    before = files(source)
    migrated(invoke, source, target, *given(tmp_path), "--move", "--yes")
    assert files(target) == before
    assert not files(source)


@pytest.mark.slow
def test_digests_are_of_the_kind_that_the_destination_has(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    new = retargeted(HYBRID, tp=1)
    served_store(target, new, range(7, 8), digest="blake3")
    migrated(invoke, source, target, *given(tmp_path), "--to-tp", 1)
    shown = invoke("show", target, page(0), "--format", "json").document["objects"]
    assert {one["trailer_digest"].split(":")[0] for one in shown} == {"blake3"}


def test_weights_of_a_destination_profile_must_be_the_sources(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """A conversion changes no values; without weights, the profile takes the source's."""
    to = tmp_path / "to.toml"
    to.write_text(dump_profile(retargeted(OTHER, tp=1)))
    options = (*given(tmp_path), "--to-profile", to)
    assert "names other weights" in migrated_in_vain(invoke, source, target, *options)
    to.write_text(dump_profile(retargeted(UNNAMED, tp=1)))
    migrated(invoke, source, target, *options)
    assert served_by(target, retargeted(HYBRID, tp=1), PAGES) == [True] * 4


def test_the_store_listing_of_copies_has_sizes_without_trailers(
    invoke: Invoke, source: Path, target: Path
) -> None:
    migrated(invoke, source, target)
    with open_store(str(target)) as store:
        sizes = {n for batch in store.scan() for n in batch.column("nbytes").to_pylist()}
    assert sizes == {spec.nbytes for spec in object_specs(HYBRID, "file")}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--to-tp", 1)], ids=str)
def test_what_a_server_cleared_is_not_copied(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    """A copy would be younger than the epoch, and so bring the page back."""
    served_store(tmp_path / "later", HYBRID, range(4, 6))
    clear(source)
    for path in (tmp_path / "later").glob("*.bin"):
        path.rename(source / path.name)
    options = (*given(tmp_path), *arguments) if arguments else ()
    document = migrated(invoke, source, target, *options)
    assert document["pages"] == 2
    count = 4 * len(object_specs(HYBRID, "file"))
    said = f"{count} objects are from before a server cleared the store, so no server reads"
    assert said in document["stderr"]
    assert "unknown keys" not in document["stderr"]
    assert {name[:64] for name in files(target)} == {page(4), page(5)}


@pytest.mark.slow
def test_what_a_server_cleared_in_the_destination_is_not_there(
    invoke: Invoke, source: Path, target: Path
) -> None:
    """Its servers miss these pages, so the copies take the place of what is left of them."""
    served_store(target, HYBRID, range(2))
    clear(target)
    document = migrated(invoke, source, target, "--dry-run")
    assert (document["pages"], document["skipped"], document["conflicts"]) == (4, 0, 0)
    document = migrated(invoke, source, target)
    assert (document["pages"], document["conflicts"]) == (4, 0)
    assert served_by(target, HYBRID, PAGES) == [True] * 4
    assert files(target) == files(source)


@pytest.mark.slow
def test_a_trailer_proves_the_layout_of_an_object(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """Servers that computed a page themselves have other bytes, and the right layout."""
    options = (*given(tmp_path, HYBRID), "--to-layout", "page_first_direct")
    served_store(target, retargeted(HYBRID, layout="page_first_direct"))
    for path in target.glob("*.bin"):
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
    before = files(target)
    document = migrated(invoke, source, target, *options)
    assert (document["skipped"], document["conflicts"]) == (len(PAGES), 0)
    assert files(target) == before
    served_store(tmp_path / "other", HYBRID)
    document = migrated(invoke, source, tmp_path / "other", *options, exit_code=4)
    assert document["conflicts"] == len(PAGES)
