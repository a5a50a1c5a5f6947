"""Trailers for the objects of a store where they are: `migrate STORE STORE --trailers write`."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.backends.disk import durable
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files import tree
from hicachectl.backends.object_files.epochs import begin_epoch
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.trailer import TRAILER_BYTES
from tests.move.migrations import migrated
from tests.served_stores import HYBRID, INDEXED, OTHER_WEIGHTS, served_by, served_store
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.stores import OLD, page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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

    def refused(self, *arguments: object, trailers: str = "write") -> str:
        """Return why an adoption is refused."""
        command = (self.store, self.store, "--profile", self.profile, "--trailers", trailers)
        return self._invoke("migrate", *command, *arguments, exit_code=2).stderr

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
    other = f"{page(0)}_other-model_0_2.bin"
    (adoption.store / other).write_bytes(bytes(100))
    for path in adoption.store.glob("*.bin"):
        os.utime(path, (OLD, OLD))
    adoption.objects = files(adoption.store)
    document = adoption.run()
    assert document["pages"] == 2
    for said in ("1 page not whole", "1 page with errors", "1 page with ambiguous keys"):
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


@pytest.mark.parametrize("trailers", ["auto", "drop"])
def test_without_trailers_to_write_nothing_would_change(adoption: Adoption, trailers: str) -> None:
    said = adoption.refused(trailers=trailers)
    assert "source and destination are the same" in said
    assert "to give its files trailers, --trailers write" in said


def test_weights_are_needed(adoption: Adoption) -> None:
    adoption.profile.write_text(dump_profile(replace(HYBRID, weights="")))
    assert "the weights are unknown; give --weights" in adoption.refused()


def test_verified_adoption(adoption: Adoption) -> None:
    assert adoption.run("--verify")["pages"] == 4
    assert adoption.bare == set()
    assert adoption.run("--verify")["skipped"] == 4


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
    sync_data = "hicachectl.backends.object_files.writing.FileWriter.sync_data"
    path = adoption.store / ANCHOR
    mtime_ns = path.stat().st_mtime_ns

    def used(*_: object) -> None:
        os.utime(path, ns=(mtime_ns + 10**15, mtime_ns))

    monkeypatch.setattr(sync_data, used)
    adoption.run()
    now = path.stat()
    assert (now.st_atime_ns, now.st_mtime_ns) == (mtime_ns + 10**15, mtime_ns)


def test_a_file_system_that_cannot_exchange_names(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "exchange", lambda *_: False)
    before = facts(adoption.store)
    assert adoption.run()["pages"] == 4
    assert facts(adoption.store) == before
    assert (adoption.bare, adoption.leftovers) == (set(), [])
