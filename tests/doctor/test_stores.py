"""What `doctor` says of a store itself: sampled pages, space, times, services."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import replace as replaced
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from hicachectl.backends.file.store import FileStore
from hicachectl.backends.mooncake.master import MasterAdmin, Segment
from hicachectl.cli.demo_store import PROFILE
from hicachectl.doctor.listed_store import list_store
from hicachectl.doctor.stores import store_checks
from hicachectl.formats.profile import dump_profile
from hicachectl.profiles.stamps import Stamp, write_stamp
from tests.checks.value_cases import expected_of, tiny
from tests.doctor.replies import checks_of
from tests.hf3fs_places import Place
from tests.kvgen import KvGenerator
from tests.move.migrations import demo_store, profile_file
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.stores import OLD, page

if TYPE_CHECKING:
    from tests.conftest import Invoke
    from tests.hf3fs_server import MetadataServer
    from tests.mooncake_cluster import Cluster


def objects(store: Path) -> list[Path]:
    return sorted(store.glob("*.bin"))


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """Return size and mtime of everything below a directory."""
    facts = ((path, path.lstat()) for path in directory.rglob("*"))
    return {str(path): (one.st_size, one.st_mtime_ns) for path, one in facts}


def test_a_whole_store_is_healthy_and_stays_as_it_is(
    invoke: Invoke, store: Path, profile: Path
) -> None:
    """A probe without a server: reachable, readable, room, age; exit status 0; nothing changes."""
    before = contents(store)
    checks = checks_of(invoke, store, "--profile", profile)
    assert {name: check["status"] for name, check in checks.items()} == dict.fromkeys(
        ("store/reachable", "store/readable", "store/structure", "store/values", "store/space",
         "store/last-write"), "ok",
    )  # fmt: skip
    assert "written" in checks["store/last-write"]["detail"]
    assert contents(store) == before
    assert {check["status"] for check in checks_of(invoke, store).values()} == {"ok"}


def test_a_store_of_which_nothing_was_read_is_not_called_readable(
    invoke: Invoke, store: Path
) -> None:
    checks = checks_of(invoke, store, "--sample", 0)
    assert checks["store/readable"]["status"] == "unknown"
    assert "--sample" in checks["store/readable"]["next"]


def test_a_pack_is_healthy_and_has_no_room_to_lack(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    """A pack has no check of free space, and its digests are compared."""
    url = f"pack://{tmp_path}/pages.hcpack"
    invoke("migrate", store, url)
    checks = checks_of(invoke, url)
    assert {name: check["status"] for name, check in checks.items()} == dict.fromkeys(
        ("store/reachable", "store/readable", "store/structure", "store/last-write"), "ok"
    )
    with (tmp_path / "pages.hcpack").open("r+b") as file:
        file.seek(20_000)
        data = file.read(1)
        file.seek(20_000)
        file.write(bytes([data[0] ^ 1]))
    checks = checks_of(invoke, url, exit_code=4)
    assert checks["store/values"]["evidence"] == "1 digest-mismatch"


def test_a_store_that_cannot_be_opened_is_the_only_cause(invoke: Invoke, tmp_path: Path) -> None:
    (check,) = checks_of(invoke, tmp_path / "missing", exit_code=4).values()
    assert (check["name"], check["status"]) == ("reachable", "fail")
    assert "No such file or directory" in check["detail"]
    assert check["next"]


def test_a_directory_without_pages_is_said_to_have_none(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    checks = checks_of(invoke, tmp_path / "other", exit_code=4)
    assert checks["store/pages"]["status"] == "fail"
    assert "notes.txt" in checks["store/pages"]["detail"]


@pytest.mark.parametrize("served", ["float8_e4m3fn", "float8_e5m2"])
def test_a_change_of_the_fp8_dtype_is_dated(invoke: Invoke, tmp_path: Path, served: str) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    for dtype, numbers in (("float8_e4m3fn", range(12)), ("float8_e5m2", range(12, 22))):
        made = tiny(dtype)[0]
        objects = KvGenerator(expected_of(made), made, 1).objects(numbers)
        for number, content in zip(numbers, objects, strict=True):
            path = directory / f"{page(number)}_m_0_1.bin"
            path.write_bytes(content.tobytes())
            os.utime(path, (OLD + 60 * number, OLD + 60 * number))
    (tmp_path / "p.toml").write_text(dump_profile(tiny(served)[0]))
    checks = checks_of(invoke, directory, "--profile", tmp_path / "p.toml", exit_code=4)
    found = checks["store/changes"]
    assert found["status"] == "fail"
    assert found["detail"].endswith(
        ": float8_e4m3fn before 2023-11-14T22:25:20Z, float8_e5m2 since then (12 and 10 objects "
        "compared)"
    )
    assert found["next"].startswith(f"hicachectl verify {directory}")


@pytest.mark.parametrize(("written", "served"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_pages_of_another_16_bit_dtype_are_the_first_cause(
    invoke: Invoke, tmp_path: Path, written: str, served: str
) -> None:
    """Pages of another dtype, with the servers' keys and sizes, are recognised by their numbers."""
    directory = tmp_path / "store"
    directory.mkdir()
    made = tiny(written)[0]
    for number, content in enumerate(KvGenerator(expected_of(made), made, 1).objects(range(5))):
        path = directory / f"{page(number)}_m_0_1.bin"
        path.write_bytes(content.tobytes())
        os.utime(path, (OLD, OLD))
    (tmp_path / "p.toml").write_text(dump_profile(tiny(served)[0]))
    checks = checks_of(invoke, directory, "--profile", tmp_path / "p.toml", exit_code=4)
    first = next(iter(checks.values()))
    assert (first["name"], first["status"]) == ("dtype", "fail")
    assert first["detail"].startswith("5 of 5 pages read are of another dtype than the servers'")
    assert first["detail"].endswith(f"numbers are {written}, not {served}")
    assert [name for name, check in checks.items() if check["status"] == "fail"] == ["store/dtype"]
    (tmp_path / "p.toml").write_text(dump_profile(made))
    assert checks_of(invoke, directory, "--profile", tmp_path / "p.toml")


def test_damage_is_counted_by_its_kind(invoke: Invoke, store: Path, profile: Path) -> None:
    """Pages that give wrong data fail; no key of an object is shown."""
    first, second = objects(store)[0], objects(store)[-1]
    first.write_bytes(first.read_bytes()[:-8])
    data = bytearray(second.read_bytes())
    data[:8] = b"\xff\x7f" * 4  # NaN in bfloat16
    second.write_bytes(data)
    for path in (first, second):
        os.utime(path, (OLD, OLD))
    checks = checks_of(invoke, store, "--profile", profile, exit_code=4)
    assert checks["store/structure"]["status"] == "fail"
    assert checks["store/structure"]["evidence"] == "1 truncated"
    assert checks["store/values"]["status"] == "fail"
    assert "1 nan" in checks["store/values"]["evidence"]
    assert first.name[:64] not in str(checks)
    assert second.name[:64] not in str(checks)


def test_a_store_of_foreign_files_has_no_page(invoke: Invoke, store: Path) -> None:
    for path in objects(store):
        path.rename(path.with_name(f"x{path.name}"))
    checks = checks_of(invoke, store, exit_code=4)
    assert checks["store/pages"]["status"] == "fail"


def test_pages_of_other_sizes_are_one_cause(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    """A profile that contradicts every object is a failure without a server."""
    other = profile_file(tmp_path / "p.toml", replace(PROFILE, page_size=32))
    checks = checks_of(invoke, store, "--profile", other, exit_code=4)
    failed = [name for name, check in checks.items() if check["status"] == "fail"]
    assert failed == ["store/structure"]
    assert "contradicts the store" in checks["store/structure"]["detail"]


def test_a_store_of_other_deployments_has_no_page_of_the_profile(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    other = profile_file(tmp_path / "p.toml", replace(PROFILE, model="someone/else"))
    checks = checks_of(invoke, store, "--profile", other)
    assert checks["store/pages"]["status"] == "warn"
    assert "ls" in checks["store/pages"]["next"]


def test_pages_of_another_tp_size_are_named_with_the_command_that_converts_them(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    other = profile_file(tmp_path / "p.toml", replace(PROFILE, tp=1))
    check = checks_of(invoke, store, "--profile", other)["store/pages"]
    assert check["evidence"].endswith(f"of {PROFILE.key_model} tp 2")
    command = check["next"].rpartition("OLD: ")[2].replace("--profile OLD", f"--profile {profile}")
    invoke(*shlex.split(command)[1:])
    assert "store/pages" not in checks_of(invoke, store, "--profile", other)


def test_a_profile_judges_only_the_pages_of_its_deployment(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    """The suggested verify accepts its options, also if the profile describes no page."""

    def judged(profile: Path, exit_code: int = 0) -> dict[str, str]:
        checks = checks_of(invoke, store, "--profile", profile, exit_code=exit_code)
        return checks["store/structure"]

    other = profile_file(tmp_path / "p.toml", replace(PROFILE, tp=1))
    assert judged(other)["detail"].endswith("whole, by comparison with each other")
    assert judged(profile)["detail"].endswith("whole, by the profile")
    invoke("migrate", store, store, "--profile", profile, "--to-tp", 4)
    assert judged(profile)["detail"].endswith(
        "whole, by the profile or, for other deployments, by comparison with each other"
    )
    damaged = objects(store)[0]
    damaged.write_bytes(damaged.read_bytes()[:-8])
    os.utime(damaged, (OLD, OLD))
    for given in (other, profile):
        command = shlex.split(judged(given, exit_code=4)["next"])
        assert invoke.document(*command[1:], exit_code=4)["counts"]["truncated"] == 1


def test_young_pages_are_not_judged(invoke: Invoke, store: Path, profile: Path) -> None:
    """A server writes the objects of a page one by one."""
    removed = objects(store)[0]
    removed.unlink()
    now = time.time()
    for path in objects(store):
        os.utime(path, (now, now))
    checks = checks_of(invoke, store, "--profile", profile)
    assert {checks[f"store/{name}"]["status"] for name in ("readable", "structure")} == {"unknown"}
    assert "all pages are younger than 10 s" in checks["store/structure"]["detail"]
    for path in objects(store):
        if path.name[:64] != removed.name[:64]:
            os.utime(path, (now - 30, now - 30))
    checks = checks_of(invoke, store, "--profile", profile)
    assert checks["store/structure"]["detail"].startswith("7 of 7 judged pages are whole")
    assert checks["store/structure"]["evidence"] == "not judged: 1 page younger than 10 s"
    assert "1 page younger than 10 s not read" in checks["store/readable"]["evidence"]


def test_the_suggested_verify_finds_the_same(invoke: Invoke, store: Path, profile: Path) -> None:
    """Pages are judged when they are ten seconds old, which verify alone would not do yet."""
    first = objects(store)[0]
    first.write_bytes(first.read_bytes()[:-8])
    age = time.time() - 30
    for path in objects(store):
        os.utime(path, (age, age))
    checks = checks_of(invoke, store, "--profile", profile, exit_code=4)
    command = shlex.split(checks["store/structure"]["next"])
    assert command[-2:] == ["--grace", "10s"]
    assert invoke.document(*command[1:], exit_code=4)["counts"] == {"truncated": 1}


def test_a_sample_bounds_what_is_read(invoke: Invoke, store: Path, profile: Path) -> None:
    checks = checks_of(invoke, store, "--profile", profile, "--sample", "1")
    read = int(checks["store/readable"]["detail"].split()[0])
    assert 0 < read < len(objects(store))
    none = checks_of(invoke, store, "--profile", profile, "--sample", "0")
    assert "store/values" not in none


@pytest.mark.slow
@needs_root
def test_an_object_of_another_user_is_the_first_cause(tmp_path: Path) -> None:
    """The check names the reason and no key; the space is judged nevertheless."""
    # The first run imports what only root may read.
    code = (
        "import os, sys; from hicachectl.__main__ import run; run(sys.argv[1:]); print('now');"
        "os.setgid(65534); os.setuid(65534); sys.exit(run(sys.argv[1:]))"
    )
    # Each run of pytest closes the folder of all runs to other users.
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        store = demo_store(folder / "store")
        for path in [store, *store.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        hidden = objects(store)[0]
        hidden.chmod(0o600)
        found = subprocess.run(
            [sys.executable, "-c", code, "doctor", str(store)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HOME": str(folder)},
        )
    assert found.returncode == 4, found.stderr
    first = found.stdout.partition("now\n")[2].splitlines()[0]
    assert first.startswith("fail")
    assert f"page {hidden.name[:8]}…: cannot read: Permission denied" in first
    assert "run as the server's user" in found.stdout
    assert "store  space" in found.stdout
    assert hidden.name[:64] not in found.stdout


def test_unfinished_writes_are_a_warning(invoke: Invoke, store: Path) -> None:
    left = store / f".{'0' * 32}.tmp"
    left.write_bytes(b"x" * 100)
    os.utime(left, (OLD, OLD))
    checks = checks_of(invoke, store)
    assert checks["store/temporaries"]["status"] == "warn"
    assert checks["store/temporaries"]["next"].endswith("--temporaries")


def test_a_stamp_of_other_weights_fails(invoke: Invoke, store: Path, profile: Path) -> None:
    with FileStore(store) as opened:
        write_stamp(opened, Stamp(replace(PROFILE, weights="old")))
    ours = profile_file(profile, replace(PROFILE, weights="new"))
    checks = checks_of(invoke, store, "--profile", ours, exit_code=4)
    assert checks["store/stamp"]["status"] == "fail"
    assert "weights: stamped 'old', now 'new'" in checks["store/stamp"]["evidence"]


# --- space and times ---


def test_a_full_file_system_fails(invoke: Invoke, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "16m") as small:
        store = demo_store(small / "store")
        checks = checks_of(invoke, store, exit_code=4)
    assert checks["store/space"]["status"] == "fail"
    assert checks["store/space"]["next"].startswith("give the store a larger file system")
    assert "max_size" in checks["store/space"]["evidence"]


@pytest.mark.slow
def test_the_rate_of_the_last_day_tells_when_a_store_is_full(
    invoke: Invoke, tmp_path: Path
) -> None:
    """Two hours of writes, and room for one more. The suggested command makes room for a day's."""
    now = time.time()
    with small_file_system(tmp_path / "small", "400m") as small:
        store = small / "store"
        store.mkdir()
        for number in range(20):
            path = store / f"{page(number)}_m_0_1.bin"
            path.write_bytes(bytes(12 << 20))
            os.utime(path, (now - 7200 + 300 * number,) * 2)
        checks = checks_of(invoke, store)
        words = checks["store/space"]["next"].split()
        assert words[:4] == ["hicachectl", "rm", str(store), "--keep-free"]
        assert "would be removed" in invoke(*words[1:], "--dry-run").stdout
        invoke(*words[1:], "--yes")
        assert "; nothing to remove" in invoke(*words[1:], "--yes").stdout
    assert checks["store/space"]["status"] == "warn"
    assert " last 1h at the rate of the last day" in checks["store/space"]["detail"]


@pytest.mark.parametrize(("hours", "status"), [(0.1, "ok"), (3, "unknown")])
def test_nothing_stored_since_the_server_started_is_told(
    store: Path, hours: float, status: str
) -> None:
    """The demo's newest page is hours old."""
    with FileStore(store) as opened:
        seen = replaced(list_store(opened), started=time.time() - hours * 3600)
        (check,) = (one for one in store_checks(seen) if one.name == "last-write")
    assert check.status == status


# --- services ---


def test_a_mooncake_cluster_tells_its_segments(invoke: Invoke, mooncake_cluster: Cluster) -> None:
    url = f"mooncake://{mooncake_cluster.master}?admin={mooncake_cluster.admin}"
    checks = checks_of(invoke, url, exit_code=4)
    assert checks["store/segments"]["status"] == "ok"
    assert "0% used" in checks["store/segments"]["detail"]
    assert checks["store/pages"]["status"] == "fail"


def test_a_cluster_without_memory_stores_nothing(
    invoke: Invoke, mooncake_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"mooncake://{mooncake_cluster.master}?admin={mooncake_cluster.admin}"
    monkeypatch.setattr(MasterAdmin, "segments", lambda admin: [])
    checks = checks_of(invoke, url, exit_code=4)
    assert checks["store/segments"]["status"] == "fail"
    half = [Segment("a", "a:1", "tcp", "OK", 30, 100), Segment("b", "b:1", "tcp", "GONE", 0, 100)]
    monkeypatch.setattr(MasterAdmin, "segments", lambda admin: half)
    assert checks_of(invoke, url)["store/segments"]["status"] == "warn"


def test_a_3fs_metadata_server_answers_or_is_the_cause(
    invoke: Invoke, tmp_path: Path, metadata_server: MetadataServer
) -> None:
    place = Place(tmp_path, metadata_server)
    checks = checks_of(invoke, place.url(), "--profile", place.profile)
    assert checks["store/metadata-server"]["status"] == "ok"
    assert checks["store/readable"]["status"] == "ok"
    # A server that has lost its tables, and none at all.
    metadata_server.reset()
    checks = checks_of(invoke, place.url(), "--profile", place.profile, exit_code=4)
    assert "has no table 0:kv" in checks["store/reachable"]["detail"]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = place.url(f"http://127.0.0.1:{closed.getsockname()[1]}")
        checks = checks_of(invoke, url, exit_code=4)
    assert [check["status"] for check in checks.values()] == ["fail"]
    assert "3FS metadata server 127.0.0.1" in checks["store/reachable"]["detail"]
