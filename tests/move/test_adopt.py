"""Trailers for the objects of a store where they are: `migrate STORE STORE --trailers write`."""

from __future__ import annotations

import os
import shutil
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.backends.disk import durable
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files import copies, tree, writing
from hicachectl.backends.object_files.epochs import begin_epoch
from hicachectl.formats.identity import profile_identities
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.trailer import TRAILER_BYTES
from tests.checks.value_cases import expected_of, tiny
from tests.freezable_mount import freezable_mount
from tests.kvgen import KvGenerator
from tests.move.migrations import migrated, profile_file
from tests.served_stores import (
    HYBRID,
    INDEXED,
    OTHER_WEIGHTS,
    WEIGHTS,
    forget_ranks,
    served_by,
    served_store,
)
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.stores import OLD, page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicachectl.backends.object_files.tree import Place
    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

PAGES = [page(number) for number in range(4)]
ANCHOR = f"{page(1)}_demo-hybrid-1b_0_2.bin"
STATE = f"{page(1)}.mamba_demo-hybrid-1b_0_2.bin"


def bare_store(directory: Path, profile: Profile = HYBRID) -> dict[str, bytes]:
    """Make a store as SGLang's own file backend writes it; return its objects."""
    served_store(directory, profile)
    shutil.rmtree(directory / ".hicachectl")
    objects = {name: data[:-TRAILER_BYTES] for name, data in files(directory).items()}
    for number, path in enumerate(sorted(directory.glob("*.bin"))):
        path.write_bytes(objects[path.name])
        path.chmod(0o640 + number % 2 * 0o4)
        os.utime(path, (OLD + 60 + number, OLD + number))
    return objects


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*.bin")}


def facts(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return mode, owner, group, mtime and atime of each object's file."""
    every = {path.name: path.stat() for path in directory.rglob("*.bin")}
    return {
        name: (s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns, s.st_atime_ns)
        for name, s in every.items()
    }


def bare(directory: Path, objects: dict[str, bytes]) -> set[str]:
    """Return the names of objects without a trailer; the others must have the same bytes."""
    found = files(directory)
    assert found.keys() == objects.keys()
    assert all(data[: len(objects[name])] == objects[name] for name, data in found.items())
    sizes = {len(data) - len(objects[name]) for name, data in found.items()}
    assert sizes <= {0, TRAILER_BYTES}
    return {name for name, data in found.items() if data == objects[name]}


class Adoption:
    """A store without trailers, and the command that writes them."""

    def __init__(self, invoke: Invoke, folder: Path, profile: Profile = HYBRID) -> None:
        self.store = folder / "store"
        self.objects = bare_store(self.store, profile)
        self.profile = folder / "profile.toml"
        self.profile.write_text(dump_profile(profile))
        self._invoke = invoke

    def run(
        self, *arguments: object, profile: Path | None = None, exit_code: int = 0
    ) -> dict[str, Any]:
        """Adopt; return the document, with stderr. profile: in place of the store's."""
        command = (self.store, self.store, "--profile", profile or self.profile)
        write = ("--trailers", "write")
        return migrated(self._invoke, *command, *write, *arguments, exit_code=exit_code)

    def refused(self, *arguments: object, trailers: str = "write", exit_code: int = 2) -> str:
        """Return why an adoption is refused."""
        command = (self.store, self.store, "--profile", self.profile, "--trailers", trailers)
        return self._invoke("migrate", *command, *arguments, exit_code=exit_code).stderr

    @property
    def bare(self) -> set[str]:
        """Names of objects without a trailer."""
        return bare(self.store, self.objects)

    @property
    def leftovers(self) -> list[str]:
        """Names of files that are no objects."""
        names = sorted(path.name for path in self.store.iterdir())
        return [name for name in names if not name.endswith(".bin") and name != ".hicachectl"]


@pytest.fixture
def adoption(invoke: Invoke, tmp_path: Path) -> Adoption:
    return Adoption(invoke, tmp_path)


@pytest.mark.parametrize("profile", [HYBRID, INDEXED], ids=["hybrid", "indexed"])
def test_servers_with_the_plug_in_read_every_page(
    invoke: Invoke, tmp_path: Path, profile: Profile
) -> None:
    adoption = Adoption(invoke, tmp_path, profile)
    before = facts(adoption.store)
    document = adoption.run()
    assert facts(adoption.store) == before
    assert (document["pages"], document["objects"]) == (4, len(adoption.objects))
    assert document["bytes"] == sum(map(len, adoption.objects.values()))
    assert (adoption.bare, adoption.leftovers) == (set(), [])
    assert served_by(adoption.store, profile, PAGES) == [True] * 4
    other = replace(profile, weights=OTHER_WEIGHTS)
    assert served_by(adoption.store, other, PAGES) == [False] * 4
    found = invoke.document("verify", adoption.store, "--profile", adoption.profile)
    assert (found["findings"], found["skipped_checks"]) == ([], [])


def test_a_further_run_changes_nothing(adoption: Adoption) -> None:
    adoption.run()
    before = {path: path.stat().st_ino for path in adoption.store.glob("*.bin")}
    document = adoption.run()
    assert (document["pages"], document["objects"], document["skipped"]) == (0, 0, 4)
    assert {path: path.stat().st_ino for path in adoption.store.glob("*.bin")} == before


def test_trailers_of_older_releases_get_their_rank(adoption: Adoption) -> None:
    adoption.run()
    forget_ranks(adoption.store)
    assert served_by(adoption.store, HYBRID, PAGES, unranked="refuse") == [False] * 4
    assert adoption.run()["objects"] == len(adoption.objects)
    assert served_by(adoption.store, HYBRID, PAGES, unranked="refuse") == [True] * 4
    assert adoption.run()["skipped"] == 4


@pytest.mark.slow
def test_parts_adopt_together(adoption: Adoption, invoke: Invoke, tmp_path: Path) -> None:
    command = ("migrate", adoption.store, adoption.store, "--profile", adoption.profile)
    for part in range(2):
        shard = ("--shard", f"{part}/2", "--run", tmp_path / "run")
        invoke(*command, "--trailers", "write", *shard)
    merged = invoke("merge", tmp_path / "run").stdout
    assert merged.startswith(f"4 pages given trailers, {len(adoption.objects)} objects")
    assert (adoption.bare, adoption.leftovers) == (set(), [])
    assert served_by(adoption.store, HYBRID, PAGES) == [True] * 4


def test_a_dry_run_counts_and_changes_nothing(adoption: Adoption) -> None:
    document = adoption.run("--dry-run")
    assert (document["pages"], document["objects"]) == (4, len(adoption.objects))
    assert files(adoption.store) == adoption.objects
    assert not (adoption.store / ".hicachectl").exists()


def test_a_half_adopted_page_gets_the_rest(adoption: Adoption, invoke: Invoke) -> None:
    """Until then the store lists and verifies as before."""
    adoption.run()
    path = adoption.store / ANCHOR
    path.write_bytes(adoption.objects[ANCHOR])
    os.utime(path, (OLD, OLD))
    found = invoke.document("verify", adoption.store, "--profile", adoption.profile)
    assert found["findings"] == []
    summary = invoke.document("ls", adoption.store, "--summary")
    assert summary["total"]["nbytes"] == sum(map(len, adoption.objects.values()))
    assert adoption.bare == {ANCHOR}
    document = adoption.run()
    assert (document["pages"], document["objects"], document["skipped"]) == (1, 1, 3)
    assert adoption.bare == set()


def test_a_store_with_folders(adoption: Adoption, invoke: Invoke, tmp_path: Path) -> None:
    target = tmp_path / "folders"
    target.mkdir()
    migrated(invoke, adoption.store, f"file://{target}?folders=hex2", "--profile", adoption.profile)
    shutil.rmtree(adoption.store)
    target.rename(adoption.store)
    assert adoption.run()["pages"] == 4
    assert adoption.bare == set()
    assert served_by(adoption.store, HYBRID, PAGES) == [True] * 4


def test_only_whole_pages_of_the_profile_are_adopted(adoption: Adoption) -> None:
    (adoption.store / ANCHOR).unlink()  # partial
    short = f"{page(2)}_demo-hybrid-1b_1_2.bin"
    (adoption.store / short).write_bytes(b"short")
    other = f"{page(0)}_x-dsa.bin"
    (adoption.store / other).write_bytes(bytes(100))
    for path in adoption.store.glob("*.bin"):
        os.utime(path, (OLD, OLD))
    adoption.objects = files(adoption.store)
    document = adoption.run()
    assert (document["pages"], document["skipped"]) == (2, 0)
    for said in ("1 page not whole", "1 page with errors", "1 page of x-dsa"):
        assert said in document["stderr"]
    kept = {name for name in adoption.objects if name[:64] in (page(1), page(2))}
    assert adoption.bare == kept | {other}


def test_objects_of_another_identity_stay(adoption: Adoption) -> None:
    theirs = replace(HYBRID, weights=OTHER_WEIGHTS)
    path = adoption.profile.with_name("theirs.toml")
    path.write_text(dump_profile(theirs))
    adoption.run("--page", page(0), profile=path)
    before = files(adoption.store)
    document = adoption.run()
    assert (document["pages"], document["skipped"]) == (3, 0)
    assert "1 page with objects of other weights" in document["stderr"]
    now = files(adoption.store)
    assert all(now[name] == before[name] for name in now if name.startswith(page(0)))


def test_a_store_of_which_no_page_can_be_adopted_is_no_success(adoption: Adoption) -> None:
    """Servers of the plug-in would find nothing."""
    adoption.run()
    path = adoption.profile.with_name("theirs.toml")
    path.write_text(dump_profile(replace(HYBRID, weights=OTHER_WEIGHTS)))
    document = adoption.run(profile=path, exit_code=4)
    assert (document["pages"], document["skipped"], document["left_out"]) == (0, 0, 4)


def test_other_deployments_keep_their_trailers(adoption: Adoption) -> None:
    """Their identities, of which one suffix has two here, need not be known."""
    for weights, number in ((INDEXED.weights, 5), (OTHER_WEIGHTS, 6)):
        served_store(adoption.store, replace(INDEXED, weights=weights), [number])
    before = files(adoption.store)
    assert adoption.run()["pages"] == 4
    now = files(adoption.store)
    assert [name for name in now if now[name] == before[name]] == [
        name for name in now if name not in adoption.objects
    ]


def test_files_with_another_hard_link_stay(adoption: Adoption, tmp_path: Path) -> None:
    """Their old bytes would stay on the disk, too."""
    os.link(adoption.store / ANCHOR, tmp_path / "link")
    document = adoption.run(exit_code=4)
    assert (document["pages"], document["failed"]) == (3, 1)
    assert f"{ANCHOR}: the file has another hard link" in document["stderr"]
    assert ANCHOR in adoption.bare
    (tmp_path / "link").unlink()
    assert adoption.run()["pages"] == 1
    assert adoption.bare == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--move", "--yes"), "--move would remove"),
        (("--if-exists", "overwrite"), "overwrite would remove"),
        (("--include-damaged",), "a trailer would prove damaged bytes right"),
    ],
    ids=str,
)
def test_refused_options(adoption: Adoption, arguments: tuple[object, ...], said: str) -> None:
    assert said in adoption.refused(*arguments)
    assert files(adoption.store) == adoption.objects


FLOAT16 = replace(HYBRID, pools=(replace(HYBRID.pools[0], dtype="float16"), *HYBRID.pools[1:]))


def assert_untouched(adoption: Adoption) -> None:
    assert files(adoption.store) == adoption.objects
    assert not (adoption.store / ".hicachectl").exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=str)
def test_pages_of_another_dtype_get_no_trailer(adoption: Adoption, dry: tuple[str, ...]) -> None:
    adoption.profile.write_text(dump_profile(FLOAT16))
    (said,) = adoption.refused(*dry).splitlines()
    assert "4 of 4 pages read have values that contradict the profile (dtype-mismatch)" in said
    assert f"hicachectl verify file://{adoption.store} --profile FILE" in said
    assert_untouched(adoption)


def test_pages_of_another_dtype_get_no_trailer_of_a_part(
    adoption: Adoption, tmp_path: Path
) -> None:
    adoption.profile.write_text(dump_profile(FLOAT16))
    for part in ("0/2", "1/2"):
        said = adoption.refused("--shard", part, "--run", tmp_path / "run")
        assert "read have values that contradict the profile (dtype-mismatch)" in said
    assert_untouched(adoption)


def test_a_page_of_no_numbers_shows_before_any_file_is_replaced(adoption: Adoption) -> None:
    adoption.objects[ANCHOR] = b"\xff" * len(adoption.objects[ANCHOR])
    overwrite(adoption, ANCHOR)
    assert "1 of 4 pages read have values that contradict the profile" in adoption.refused()
    assert "(nan)" in adoption.refused("--dry-run")
    assert_untouched(adoption)
    assert adoption.run("--page", page(2))["pages"] == 1


def test_pages_of_zeros_get_no_trailer(adoption: Adoption) -> None:
    """Zeros can be real, so that they do not speak against the profile."""
    adoption.objects[ANCHOR] = bytes(len(adoption.objects[ANCHOR]))
    overwrite(adoption, ANCHOR)
    document = adoption.run()
    assert (document["pages"], document["left_out"]) == (3, 1)
    assert "1 page with doubtful values; hicachectl verify lists them" in document["stderr"]
    assert adoption.bare == {name for name in adoption.objects if name.startswith(page(1))}


def test_pages_of_servers_with_two_dtypes_get_no_trailer(invoke: Invoke, tmp_path: Path) -> None:
    """No page by itself contradicts the profile."""
    directory = tmp_path / "store"
    directory.mkdir()
    for dtype, numbers in (("float8_e4m3fn", range(12)), ("float8_e5m2", range(12, 22))):
        made = tiny(dtype, weights=WEIGHTS)[0]
        objects = KvGenerator(expected_of(made), made, 1).objects(numbers)
        for number, content in zip(numbers, objects, strict=True):
            path = directory / f"{page(number)}_m_0_1.bin"
            path.write_bytes(content.tobytes())
            os.utime(path, (OLD + 60 * number, OLD + 60 * number))
    before = files(directory)
    adopt = ("migrate", directory, directory, "--trailers", "write", "--profile")
    said = invoke(*adopt, profile_file(tmp_path / "p.toml", made), exit_code=2).stderr
    assert "22 pages read are of servers with two dtypes or layouts (values-changed)" in said
    assert files(directory) == before


def overwrite(adoption: Adoption, name: str) -> None:
    """Write an object's bytes again, with old times."""
    path = adoption.store / name
    path.write_bytes(adoption.objects[name])
    os.utime(path, (OLD, OLD))


@pytest.mark.parametrize("trailers", ["auto", "drop"])
def test_without_trailers_to_write_nothing_would_change(adoption: Adoption, trailers: str) -> None:
    said = adoption.refused(trailers=trailers)
    assert "source and destination are the same" in said
    assert "to give its files trailers, give --trailers write" in said


@pytest.mark.parametrize("url", ["pack://{}/a.hcpack", "nixl://{}/nixl"])
def test_other_stores_are_refused_by_name(
    adoption: Adoption, invoke: Invoke, tmp_path: Path, url: str
) -> None:
    (tmp_path / "nixl").mkdir()
    place = url.format(tmp_path)
    migrated(invoke, adoption.store, place, "--profile", adoption.profile)
    write = ("--profile", adoption.profile, "--trailers", "write")
    said = invoke("migrate", place, place, *write, exit_code=2).stderr
    assert f"--trailers write: {place} keeps no trailers" in said


def test_a_store_under_two_names(adoption: Adoption, invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(adoption.store)
    write = ("--profile", adoption.profile, "--trailers", "write")
    document = migrated(invoke, adoption.store, tmp_path / "link", *write)
    assert document["pages"] == 4
    assert adoption.bare == set()


def test_a_store_that_may_not_be_mounted(adoption: Adoption) -> None:
    for path in adoption.store.iterdir():
        path.unlink()
    assert "has no page; check the mount" in adoption.refused(exit_code=3)
    assert list(adoption.store.iterdir()) == []


def test_weights_are_needed(adoption: Adoption) -> None:
    adoption.profile.write_text(dump_profile(replace(HYBRID, weights="")))
    assert "the weights are unknown; give --weights" in adoption.refused()


def test_verified_adoption(adoption: Adoption) -> None:
    assert adoption.run("--verify")["pages"] == 4
    assert adoption.bare == set()
    assert adoption.run("--verify")["skipped"] == 4


def test_an_object_that_has_its_trailer_is_left_alone(adoption: Adoption) -> None:
    """Another adoption may have been faster."""
    adoption.run()
    identities = profile_identities(HYBRID, "file")
    with FileStore(adoption.store) as store:
        rows = next(store.scan(("nbytes",)))
        inodes = {path: path.stat().st_ino for path in adoption.store.glob("*.bin")}
        store.write_trailers(identities, "xxh3")
        assert store.adopt(rows, rows.column("nbytes").to_numpy()).all_ok
    assert {path: path.stat().st_ino for path in adoption.store.glob("*.bin")} == inodes


def test_a_listing_that_began_before_the_first_marker_has_the_right_sizes(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ObjectDirectory.places

    def late(objects: ObjectDirectory, *arguments: Any) -> Iterator[Place]:
        monkeypatch.setattr(ObjectDirectory, "places", places)
        adoption.run()
        return places(objects, *arguments)

    with FileStore(adoption.store) as store:
        monkeypatch.setattr(ObjectDirectory, "places", late)
        (batch,) = store.scan(("nbytes",))
    listed = zip(batch.column("key").to_pylist(), batch.column("nbytes").to_pylist(), strict=True)
    assert {key.decode(): size for key, size in listed} == {
        name: len(data) for name, data in adoption.objects.items()
    }


def test_a_smaller_buffer_is_what_a_full_disk_needs(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files may be larger than the free space."""
    monkeypatch.setattr(FileStore, "free_bytes", lambda store: 500 << 10)
    said = adoption.refused(exit_code=3)
    assert "free; give a smaller --buffer-bytes, make room or give --no-space-check" in said
    assert "give a smaller --buffer-bytes" in adoption.run("--dry-run")["stderr"]
    assert adoption.run("--buffer-bytes", "260KiB")["pages"] == 4


@pytest.mark.slow
@needs_root
def test_the_store_grows_by_no_more_than_the_buffer(invoke: Invoke, tmp_path: Path) -> None:
    """A file system with room for the buffer suffices, however large the store is."""
    folder = tmp_path / "disk"
    with small_file_system(folder, "2m"):
        adoption = Adoption(invoke, folder)
        while True:
            number = len(list(adoption.store.glob("*.bin")))
            free = os.statvfs(folder).f_bavail * 4096
            if free < 700 << 10:
                break
            for path in adoption.store.glob(f"{page(0)}*"):
                shutil.copy2(path, path.with_name(page(number) + path.name[64:]))
        adoption.objects = files(adoption.store)
        document = adoption.run("--buffer-bytes", "300KiB")
        assert document["pages"] == len({name[:64] for name in adoption.objects})
        assert adoption.bare == set()


# Servers at the very moment of the exchange


def at_exchange(monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[Path], object]) -> None:
    """Act on a file right before its name is exchanged for the first time."""
    exchange, waiting = durable.exchange, [path.name.encode()]

    def hooked(directory: int, one: bytes, other: bytes) -> bool:
        if other in waiting:
            waiting.remove(other)
            act(path)
        return exchange(directory, one, other)

    monkeypatch.setattr(tree, "exchange", hooked)


def after_copies(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], stage: int = 0
) -> None:
    """Act each time when copies are on the disk and have no names yet.

    stage: number of calls to leave out; the anchors come after the sidecars.
    """
    sync_data, calls = writing.FileWriter.sync_data, count()

    def synced(writer: writing.FileWriter, found: Any) -> None:
        sync_data(writer, found)
        if next(calls) >= stage:
            act()

    monkeypatch.setattr(writing.FileWriter, "sync_data", synced)


def rewrite(path: Path) -> None:
    """Replace a file as HiCacheFile writes one."""
    temporary = path.with_name(".0123.tmp")
    temporary.write_bytes(path.read_bytes())
    temporary.replace(path)


def clear(path: Path) -> None:
    """Make all objects misses, as the plug-in's `clear` does."""
    names = {one.name.encode() for one in path.parent.glob("*.bin")}
    with ObjectDirectory.open(str(path.parent)) as directory:
        begin_epoch(directory, {name[64:] for name in names})


def remove_all(path: Path) -> None:
    """Remove all files, as HiCacheFile's `clear` does."""
    for one in path.parent.iterdir():
        if one.is_file():
            one.unlink()


@pytest.mark.parametrize("name", [ANCHOR, STATE])
def test_a_file_that_a_server_rewrites_stays_and_is_adopted(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inodes: list[int] = []

    def act(path: Path) -> None:
        rewrite(path)
        inodes.append(path.stat().st_ino)

    at_exchange(monkeypatch, adoption.store / name, act)
    monkeypatch.setattr("hicachectl.move.runs._WAIT_SECONDS", (0.0,))
    document = adoption.run()
    assert (document["pages"], document["failed"], len(inodes)) == (4, 0, 1)
    assert (adoption.bare, adoption.leftovers) == (set(), [])


def test_a_file_that_is_rewritten_again_and_again_fails_by_name(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, seen, last = durable.exchange, set[bytes](), list[int]()

    def hooked(directory: int, one: bytes, other: bytes) -> bool:
        if other == ANCHOR.encode() and one not in seen:
            rewrite(adoption.store / ANCHOR)
            last.append((adoption.store / ANCHOR).stat().st_ino)
        seen.add(one)
        return exchange(directory, one, other)

    monkeypatch.setattr(tree, "exchange", hooked)
    monkeypatch.setattr("hicachectl.move.runs._WAIT_SECONDS", (0.0,))
    document = adoption.run(exit_code=4)
    assert (document["pages"], document["failed"], len(last)) == (3, 1, 2)
    assert (adoption.bare, adoption.leftovers) == ({ANCHOR}, [])
    assert (adoption.store / ANCHOR).stat().st_ino == last[-1]


def test_the_last_of_two_writers_keeps_the_name(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replaces the old file, and another the copy while that takes the name."""
    exchange, last = durable.exchange, list[int]()

    def hooked(directory: int, one: bytes, other: bytes) -> bool:
        if other == ANCHOR.encode() and len(last) < 2:
            path = adoption.store / ANCHOR
            path.with_name(".0123.tmp").write_bytes(adoption.objects[ANCHOR])
            path.with_name(".0123.tmp").replace(path)
            last.append(path.stat().st_ino)
        return exchange(directory, one, other)

    monkeypatch.setattr(tree, "exchange", hooked)
    monkeypatch.setattr("hicachectl.move.runs._WAIT_SECONDS", ())
    adoption.run(exit_code=4)
    assert (adoption.bare, adoption.leftovers) == ({ANCHOR}, [])
    assert (adoption.store / ANCHOR).stat().st_ino == last[-1]


@pytest.mark.parametrize("name", [ANCHOR, STATE])
def test_a_removed_file_does_not_come_back(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    at_exchange(monkeypatch, adoption.store / name, os.unlink)
    document = adoption.run()
    assert (document["pages"], document["gone"]) == (3, 1)
    del adoption.objects[name]
    assert adoption.leftovers == []
    assert adoption.bare <= {one for one in adoption.objects if one.startswith(page(1))}


@pytest.mark.parametrize("act", [clear, remove_all])
def test_a_cleared_page_does_not_come_back(
    adoption: Adoption,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Path], object],
) -> None:
    """A copy is newer than the clear: as an object of the store it would be new again."""
    at_exchange(monkeypatch, adoption.store / ANCHOR, act)
    adoption.run("--page", page(1), exit_code=4 if act is remove_all else 0)
    listed = invoke.document("ls", adoption.store, "--objects")["objects"]
    assert [one["key"] for one in listed if one["page"]] == []
    assert adoption.leftovers == []


def test_a_file_that_is_used_meanwhile_stays_used(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in sets the atime of a page that it reads, and evicts by it."""
    path = adoption.store / ANCHOR
    mtime_ns = path.stat().st_mtime_ns
    uses: list[int] = []

    def use() -> None:
        uses.append(mtime_ns + (len(uses) + 1) * 10**15)
        os.utime(path, ns=(uses[-1], mtime_ns))

    after_copies(monkeypatch, use)
    adoption.run()
    now = path.stat()
    assert (now.st_atime_ns, now.st_mtime_ns) == (uses[-1], mtime_ns)


@pytest.fixture(params=["exchange", pytest.param("rename", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest, invoke: Invoke, tmp_path: Path) -> Iterator[Adoption]:
    """Yield an adoption, also on a file system (FUSE) that cannot exchange two names."""
    if request.param == "exchange":
        yield Adoption(invoke, tmp_path)
        return
    (tmp_path / "disk").mkdir()
    with freezable_mount(tmp_path / "disk", tmp_path / "mount"):
        adoption = Adoption(invoke, tmp_path / "mount")
        assert not _can_exchange(tmp_path / "mount")
        yield adoption


def _can_exchange(directory: Path) -> bool:
    names = (b".one.tmp", b".two.tmp")
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        for name in names:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
        return durable.exchange(descriptor, *names)
    finally:
        for name in names:
            os.unlink(name, dir_fd=descriptor)
        os.close(descriptor)


@pytest.mark.parametrize("act", [rewrite, os.unlink])
def test_a_file_that_changes_after_its_copy_stays_as_the_server_left_it(
    either: Adoption, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]
) -> None:
    path = either.store / ANCHOR
    inodes: list[int] = []

    def once() -> None:
        if not inodes:
            act(path)
            inodes.append(path.stat().st_ino if path.exists() else 0)

    after_copies(monkeypatch, once, stage=1)
    monkeypatch.setattr("hicachectl.move.runs._WAIT_SECONDS", ())
    document = either.run("--page", page(1), exit_code=4 if act is rewrite else 0)
    assert document["pages"] == 0
    assert ([path.stat().st_ino] if path.exists() else [0]) == inodes
    assert either.leftovers == []


def test_every_file_gets_its_trailer_and_keeps_its_times(either: Adoption) -> None:
    before = facts(either.store)
    assert either.run()["pages"] == 4
    assert facts(either.store) == before
    assert (either.bare, either.leftovers) == (set(), [])


def test_a_file_that_is_written_to_during_its_copy_keeps_its_bytes(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server writes in place; another program may."""
    path, copy_to = adoption.store / ANCHOR, copies.CopiedObject.copy_to

    def copied(one: copies.CopiedObject, copy: int, tail: bytes) -> None:
        copy_to(one, copy, tail)
        if one.key == ANCHOR.encode():
            path.write_bytes(bytes(len(adoption.objects[ANCHOR])))

    monkeypatch.setattr(copies.CopiedObject, "copy_to", copied)
    document = adoption.run(exit_code=4)
    assert (document["pages"], document["failed"]) == (3, 1)
    assert f"{ANCHOR}: rewritten during the copy; run again" in document["stderr"]
    assert path.read_bytes() == bytes(len(adoption.objects[ANCHOR]))
    assert adoption.leftovers == []
