"""Two names of one place: no page is removed from it because the other name shows the page."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.store import ObjectFiles
from hicachectl.backends.urls import SCHEMES, Scheme, StoreUrl
from hicachectl.cli.demo_store import fill
from hicachectl.move import store_pair, trial
from hicachectl.move.withdrawal import withdraw_listed
from tests.freezable_mount import freezable_mount
from tests.move.migrations import PAGES, demo_store, migrated, profile_file
from tests.served_stores import HYBRID, served_store
from tests.speed import slow
from tests.stores import contents, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.places import Places

MOVE = ("--move", "--yes")
ONE_PLACE = "SRC and DST are one place"


class OtherName(FileStore):
    """A directory under a name by which nothing shows that it is the same one."""

    places = ()

    @classmethod
    def from_url(cls, url: StoreUrl) -> OtherName:
        store = cls(url.path)
        store.url = str(url)
        return store

    create = from_url

    def shows(self, name: bytes) -> bool:
        return False


@pytest.fixture
def other_name(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """Return a function that gives a directory another name."""
    monkeypatch.setitem(SCHEMES, "other-name", Scheme(f"{__name__}:OtherName"))
    return lambda directory: f"other-name://{directory}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return demo_store(tmp_path / "source")


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


# two mounts


@pytest.mark.parametrize("options", [MOVE, ("--if-exists", "overwrite")], ids=str)
@pytest.mark.parametrize("backwards", [False, True])
def test_two_mounts_of_a_directory_are_one_place(
    invoke: Invoke, source: Path, tmp_path: Path, options: tuple[str, ...], backwards: bool
) -> None:
    before = files(source)
    with freezable_mount(source, tmp_path / "mount"):
        pair = [source, tmp_path / "mount"]
        said = invoke("migrate", *pair[:: -1 if backwards else 1], *options, exit_code=3).stderr
    assert ONE_PLACE in said
    assert options[0] in said
    assert files(source) == before


@pytest.mark.slow
def test_nixl_directories_are_probed_one_by_one(invoke: Invoke, tmp_path: Path) -> None:
    """One directory in common is enough, and side files elsewhere make no difference."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    with open_store(f"nixl://{tmp_path}/a,{tmp_path}/b") as store:
        fill(store, PAGES)
    before = {name: files(tmp_path / name) for name in "ab"}
    side = f"?side_directory={tmp_path}/side"
    with freezable_mount(tmp_path / "b", tmp_path / "mount"):
        source = f"nixl://{tmp_path}/a,{tmp_path}/b{side}"
        target = f"nixl://{tmp_path}/c,{tmp_path}/mount"
        assert ONE_PLACE in invoke("migrate", source, target, *MOVE, exit_code=3).stderr
    assert {name: files(tmp_path / name) for name in "ab"} == before


def test_a_side_directory_makes_no_other_store(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open_store(f"nixl://{tmp_path}/a") as store:
        fill(store, PAGES)
    before = files(tmp_path / "a")
    source, target = f"nixl://{tmp_path}/a", f"nixl://{tmp_path}/a?side_directory={tmp_path}/side"
    invoke("migrate", source, target, *MOVE, exit_code=2)
    invoke("migrate", target, source, *MOVE, exit_code=2)
    assert files(tmp_path / "a") == before


def test_overwriting_objects_in_common_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    source, target = (f"nixl://{tmp_path}/a,{tmp_path}/{name}" for name in "bc")
    with open_store(source) as store:
        fill(store, PAGES)
    before = files(tmp_path / "a")
    invoke("migrate", source, target, "--if-exists", "overwrite", exit_code=2)
    assert files(tmp_path / "a") == before


@pytest.mark.slow
def test_each_part_of_a_divided_move_looks_for_itself(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    """Parts run on different hosts: what is two places on one can be one place on another."""
    before, target = files(source), tmp_path / "mount"
    part = ("migrate", source, target, *MOVE, "--run", tmp_path / "run", "--shard")
    target.mkdir()
    invoke(*part, "0/2")
    left = {name for name in before if (source / name).exists()}
    assert {name[:64] for name in left} < {name[:64] for name in before}
    moved = files(target)
    with freezable_mount(source, tmp_path / "mounted"):
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "mounted")
        for name in left:
            assert (target / name).read_bytes() == before[name]
        assert ONE_PLACE in invoke(*part, "1/2", exit_code=3).stderr
    assert {**moved, **files(source)} == before


@pytest.mark.slow
def test_pages_are_converted_and_moved_within_one_place(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    """Their keys change, so that no removal takes a copy."""
    profile = profile_file(tmp_path / "profile.toml")
    with freezable_mount(source, tmp_path / "mount"):
        document = migrated(
            invoke, source, tmp_path / "mount", "--profile", profile, "--to-tp", 1, *MOVE
        )
    assert document["moved"] == PAGES
    assert {name[64:].rpartition("_")[2] for name in contents(source)} == {"1.bin"}


@pytest.mark.slow
def test_a_quarantine_in_another_mount_of_the_store_takes_no_healthy_page(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    """Its folders lie beside the objects, under names that no object has."""
    mount, profile = tmp_path / "mount", profile_file(tmp_path / "profile.toml")
    verify = ("verify", source, "--profile", profile, "--repair", "quarantine", "--yes")
    before = contents(source)
    damaged = sorted(before)[0]
    healthy = {n: c for n, c in before.items() if n[:64] != damaged[:64]}
    with freezable_mount(source, mount):
        for command in (
            ("restore", mount, source, "--yes"),
            ("quarantine", "purge", mount, "--before", "0s", "--yes"),
        ):
            put(source, damaged, 2)
            invoke(*verify, "--quarantine", mount, exit_code=4)
            assert contents(source) == healthy
            invoke(*command)
            assert {n: c for n, c in contents(source).items() if n[:64] != damaged[:64]} == healthy
            assert len(contents(source)) == len(before) if command[0] == "restore" else len(healthy)


# pages that the destination loses


def test_pages_that_left_both_names_are_written_back(
    invoke: Invoke, source: Path, other_name: Callable[[Path], str]
) -> None:
    before = contents(source)
    said = invoke("migrate", source, other_name(source), *MOVE, exit_code=3).stderr
    assert ONE_PLACE in said
    assert "3 pages" in said
    assert contents(source) == before


@pytest.mark.slow
def test_pages_are_written_back_with_their_trailers(
    invoke: Invoke, tmp_path: Path, other_name: Callable[[Path], str]
) -> None:
    source = tmp_path / "source"
    served_store(source, HYBRID)
    before = contents(source)
    invoke("migrate", source, other_name(source), *MOVE, exit_code=3)
    assert contents(source) == before


def test_a_source_of_one_page_is_tried_as_well(
    invoke: Invoke, tmp_path: Path, other_name: Callable[[Path], str]
) -> None:
    source = demo_store(tmp_path / "source", 1)
    before = contents(source)
    said = invoke("migrate", source, other_name(source), *MOVE, exit_code=3).stderr
    assert ONE_PLACE in said
    assert contents(source) == before


@pytest.mark.parametrize("kind", [slow("mooncake"), slow("hf3fs")])
def test_every_kind_of_store_gets_its_pages_back(
    invoke: Invoke,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """A second address of a server, by which nothing shows that it is the same one."""
    request.getfixturevalue("mooncake_package" if kind == "mooncake" else "sglang_python")
    place = places.source(kind, fresh=True)
    before = place.held()
    monkeypatch.setattr(store_pair, "_shared_places", lambda source, destination: set())
    options = ("--profile", profile_file(tmp_path / "profile.toml"), *MOVE)
    assert ONE_PLACE in invoke("migrate", place.url, place.url, *options, exit_code=3).stderr
    assert place.held() == before


@contextmanager
def losing(target: Path, count: int) -> Iterator[list[str]]:
    """Let the destination lose the first pages that leave the source; yield their hashes."""
    withdraw, lost = withdraw_listed, list[str]()

    def withdrawn(store: Any, groups: Any, numbers: Any) -> Any:
        removed = withdraw(store, groups, numbers)
        if len(lost) < count:
            lost.extend(removed.pages.to_pylist())
            for path in target.glob(f"{lost[-1]}*"):
                path.unlink()
        return removed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "withdraw_listed", withdrawn)
        yield lost


@pytest.mark.slow
def test_a_destination_that_loses_two_pages_is_another_place(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    """They go back into the source, and a later run moves them."""
    before, target = contents(source), tmp_path / "target"
    with losing(target, 2) as lost:
        document = migrated(invoke, source, target, *MOVE, exit_code=4)
    assert (document["moved"], document["failed"]) == (PAGES - 2, 2)
    assert {problem["page"] for problem in document["problems"]} == set(lost)
    assert contents(source) == {n: c for n, c in before.items() if n[:64] in lost}
    assert migrated(invoke, source, target, *MOVE)["moved"] == 2
    assert contents(target) == before


def test_three_lost_pages_end_the_move(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    before = contents(source)
    with losing(tmp_path / "target", 3):
        assert (
            ONE_PLACE in invoke("migrate", source, tmp_path / "target", *MOVE, exit_code=3).stderr
        )
    assert contents(source) == before


def test_an_interrupt_before_the_second_look_writes_the_page_back(
    invoke: Invoke, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(page: Any) -> bool:
        raise KeyboardInterrupt

    before = contents(source)
    monkeypatch.setattr(trial._Page, "is_in_destination", interrupted)
    invoke("migrate", source, tmp_path / "target", *MOVE, exit_code=130)
    assert contents(source) == before


@pytest.mark.slow
def test_a_page_that_cannot_be_read_again_waits_for_the_trial_of_another(
    invoke: Invoke, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, tried = trial._Page.hold, list[int]()

    def unread(page: Any) -> bool:
        tried.append(1)
        return hold(page) and len(tried) > 1

    monkeypatch.setattr(trial._Page, "hold", unread)
    assert migrated(invoke, source, tmp_path / "target", *MOVE)["moved"] == PAGES
    assert contents(source) == {}


def test_the_rest_of_a_page_stays_in_one_place(
    invoke: Invoke, source: Path, other_name: Callable[[Path], str]
) -> None:
    """The other name has no whole page of it either."""
    (source / sorted(contents(source))[0]).unlink()
    before = contents(source)
    said = invoke("migrate", source, other_name(source), *MOVE, exit_code=3).stderr
    assert ONE_PLACE in said
    assert contents(source) == before


@pytest.mark.parametrize("scheme", ["file", "nixl"])
def test_a_probe_that_a_kill_left_is_removed_by_the_next_run_of_its_owner(
    tmp_path: Path, scheme: str
) -> None:
    owner = "0123456789abcdef"
    with open_store(f"{scheme}://{tmp_path}") as store:
        assert isinstance(store, ObjectFiles)
        store.own_temporaries(owner, sweep=False)
        with store.probe() as name:
            left = tmp_path / name.decode()
            assert left.exists()
        left.touch()
        store.own_temporaries(owner, sweep=True)
    assert not left.exists()
