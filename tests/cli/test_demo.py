"""`demo` writes a store that every command accepts as whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.small_file_system import small_file_system

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


def test_the_demo_is_whole_under_its_own_profile(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "demo"
    invoke("demo", store, "--pages", 9)
    profile = store / ".hicachectl" / "demo.toml"
    document = invoke("verify", store, "--profile", profile, "--format", "json").document
    assert document["findings"] == []
    assert (document["pages"], document["objects"]) == (9, 9 * 2 + 3 * 2)
    assert document["skipped_checks"] == ["digests"]


def test_the_demo_refuses_a_directory_with_files(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    assert "not empty" in invoke("demo", tmp_path, exit_code=2).stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["mine"]


def test_a_demo_for_which_there_is_no_room_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "64k") as small:
        said = invoke("demo", small / "demo", exit_code=3).stderr
    assert said.startswith(f"hicachectl: file://{small}/demo: cannot write page ")
    assert said.endswith(
        ": No space left on device; name a new directory that you can write to, with free space\n"
    )


def test_the_demo_is_the_same_each_time(invoke: Invoke, tmp_path: Path) -> None:
    for name in ("one", "two"):
        invoke("demo", tmp_path / name, "--pages", 2)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.bin")}
        for name in ("one", "two")
    )
    assert one == two
