"""Objects that claim 1 TiB are left out by name; sums of exbibytes do not overflow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from tests.attack.children import run
from tests.move.migrations import PAGES, demo_store, profile_file
from tests.report.page_texts import text_of
from tests.stores import OLD, page, put

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Invoke

HUGE = 1 << 40
MOST_BYTES = 64 << 20


def written_bytes(folder: Path) -> int:
    """Return the bytes on disk of a file, or of the files in a folder."""
    files = [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, str]:
    """A store with one page that has an object of 1 TiB; and that page."""
    store = demo_store(tmp_path / "store")
    file = next(path for path in sorted(store.glob("*.bin")) if "mamba" not in path.name)
    times = file.stat()
    os.truncate(file, HUGE)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns - 3600 * 10**9))
    return store, file.name[:64]


@pytest.mark.parametrize("profile", [False, True], ids=["inferred", "profile"])
@pytest.mark.parametrize("to", ["directory", "pack"])
def test_a_migration_leaves_it_behind_and_copies_the_rest(
    tmp_path: Path, store: tuple[Path, str], to: str, profile: bool
) -> None:
    target = tmp_path / "new" if to == "directory" else tmp_path / "new.hcpack"
    options = ["--profile", profile_file(tmp_path / "p.toml")] if profile else []
    url = target if to == "directory" else f"pack://{target}"
    done = run(
        "migrate", store[0], url, "--include-damaged", "--format", "json", *options, home=tmp_path
    )
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["pages"] == PAGES - 1, done.stderr
    assert written_bytes(target) < MOST_BYTES
    assert done.returncode == 4
    assert (document["failed"], document["complete"]) == (1, True)
    (problem,) = document["problems"]
    assert problem["page"] == store[1]
    assert "--buffer-bytes is 1073741824" in problem["detail"]
    assert problem["page"] in done.stderr


def test_a_prewarm_leaves_it_behind_and_copies_the_rest(
    tmp_path: Path, store: tuple[Path, str]
) -> None:
    target, profile = tmp_path / "new", profile_file(tmp_path / "p.toml")
    options = ("--from", store[0], "--all", "--profile", profile)
    done = run("prewarm", target, *options, home=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, document["copied_pages"], document["failed"]) == (4, PAGES - 1, 1)
    assert store[1] in done.stderr
    assert f"{HUGE} bytes, expected " in done.stderr
    assert written_bytes(target) < MOST_BYTES
    again = json.loads(run("prewarm", target, *options, home=tmp_path).stdout)
    assert (again["already_there"], again["copied_pages"]) == (PAGES - 1, 0)


def test_a_budget_is_spent_on_the_rest(tmp_path: Path, store: tuple[Path, str]) -> None:
    target, profile = tmp_path / "new", profile_file(tmp_path / "p.toml")
    os.utime(store[0] / next(p.name for p in store[0].glob(f"{store[1]}*")))
    done = run(
        "prewarm", target, "--from", store[0], "--all", "--profile", profile, "--budget", "1GiB",
        home=tmp_path,
    )  # fmt: skip
    assert json.loads(done.stdout)["copied_pages"] == PAGES - 1, done.stderr


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_it_is_listed_and_verified_without_reading_it(
    tmp_path: Path, store: tuple[Path, str], command: str
) -> None:
    profile = profile_file(tmp_path / "p.toml")
    options = ["--profile", profile, "--format", "json"]
    done = run(command, store[0], *options, home=tmp_path)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    if command == "verify":
        assert done.returncode == 4
        assert document["counts"] == {"oversized": 1}
        assert document["findings"][0]["page"] == store[1]
    else:
        assert done.returncode == 0
        assert sum(row["nbytes"] for row in document["pages"]) > HUGE


@pytest.mark.parametrize("profile", [False, True], ids=["inferred", "profile"])
def test_its_page_is_shown_without_reading_it(
    tmp_path: Path, store: tuple[Path, str], profile: bool
) -> None:
    options = ["--profile", profile_file(tmp_path / "p.toml")] if profile else []
    done = run("show", *store, *options, "--format", "json", home=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (huge,) = [row for row in document["objects"] if row["nbytes"] == HUGE]
    assert [row["key"] for row in document["objects"] if row["digest"] is None] == [huge["key"]]
    (finding,) = document["findings"]
    assert (finding["code"], finding["key"]) == ("oversized", huge["key"])
    assert f"{HUGE} bytes, expected " in finding["detail"]


def test_a_page_of_which_no_size_is_known_is_shown_too(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    page = "5" * 64
    file = store / f"{page}_org-m_0_1.bin"
    file.touch()
    os.truncate(file, HUGE)
    done = run("show", store, page, "--format", "json", home=tmp_path)
    assert done.returncode == 0, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["code"], finding["key"]) == ("unreadable", file.name)
    assert str(HUGE) in finding["detail"]


def test_digests_of_the_others_are_recorded(tmp_path: Path, store: tuple[Path, str]) -> None:
    catalog = ("--catalog", tmp_path / "c.parquet", "--update-catalog")
    done = run("verify", store[0], *catalog, "--format", "json", home=tmp_path)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert done.returncode == 4
    assert [finding["page"] for finding in document["findings"]] == [store[1]]
    assert document["objects_read"] == document["objects"] - 1


@pytest.fixture
def exbibytes() -> Iterator[Path]:
    """A store with two pages of three ranks, each of 4 EiB or 8 EiB less a byte."""
    with TemporaryDirectory(dir="/dev/shm") as directory:  # ext4 has no such files
        store = Path(directory, "store")
        store.mkdir()
        for rank in range(3):
            for number, nbytes in ((1, 1 << 62), (2, (1 << 63) - 1)):
                os.truncate(put(store, f"{page(number)}_m_{rank}_3.bin", 0, OLD), nbytes)
        for path in store.iterdir():
            os.utime(path, (OLD, OLD))
        yield store


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["ls", "--summary"], ["verify", "--fail-on", "never"],
     ["rm", "--model", "m", "--dry-run"], ["rm", "--free", "1EiB", "--model", "m", "--dry-run"]],
    ids=" ".join,
)  # fmt: skip
def test_sums_of_exbibytes_are_shown_as_the_largest_sum(
    invoke: Invoke, exbibytes: Path, arguments: list[str]
) -> None:
    command, *options = arguments
    assert "2.0 EiB" in invoke(command, exbibytes, *options).stdout
    document = invoke(command, exbibytes, *options, "--format", "json").document
    sums = [
        document.get("bytes"),
        document.get("total", {}).get("nbytes"),
        *(row["nbytes"] for row in document.get("pages" if command == "ls" else "groups", [])),
    ]
    nbytes = {one for one in sums if one is not None}
    assert nbytes == {1 << 61}


def test_a_page_of_exbibytes_is_not_copied(invoke: Invoke, exbibytes: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    said = invoke("migrate", exbibytes, target, exit_code=4)
    assert f"{page(1)}: not copied: needs" in said.stderr
    assert said.stdout.startswith("0 pages copied")


def test_a_report_of_exbibytes_is_drawn(invoke: Invoke, exbibytes: Path, tmp_path: Path) -> None:
    made = tmp_path / "page.html"
    invoke("report", exbibytes, "-o", made, exit_code=4)
    assert "Bytes 2.0 EiB" in text_of(made)
