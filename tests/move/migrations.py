"""Stores for tests of migrations, and their contents."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from hicachectl.backends.base import keys_of
from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.profile import dump_profile
from tests.stores import page, put

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

PAGES = 8
MODEL = "demo-hybrid-1b"


def demo_store(directory: Path, pages: int = PAGES) -> Path:
    """Make the demo's pages: MHA of TP 2, Mamba states on each fourth page and the last."""
    directory.mkdir()
    with FileStore(directory) as store:
        fill(store, pages)
    return directory


def damaged_stores(folder: Path) -> tuple[Path, Path]:
    """Make a source and a target in a new folder, with groups of every fate.

    In the source: whole and partial pages, wrong sizes, other deployments and other files. In the
    target: some of its pages, whole, in part, of other bytes and of other sizes.
    """
    folder.mkdir()
    source = demo_store(folder / "source", 12)
    target = folder / "target"
    target.mkdir()
    anchors = sorted(path for path in source.iterdir() if ".mamba" not in path.name)
    pages = sorted({path.name[:64] for path in anchors})
    for path in source.iterdir():
        if path.name[:64] in pages[:2] or path == anchors[6]:
            shutil.copy2(path, target / path.name)
    for at, change in ((8, b"x"), (10, b"\0" * 8192)):
        shutil.copy2(anchors[at], target / anchors[at].name)
        with (target / anchors[at].name).open("r+b") as file:
            file.write(change)
            if len(change) > 1:
                file.truncate(len(change))
    anchors[12].unlink()
    anchors[14].write_bytes(b"short")
    for number in range(3):
        put(source, f"{page(number)}_other.bin", 100 + number)
    (source / "README").write_text("not an object")
    put(target, "README.md")
    return source, target


def profile_file(path: Path, profile: Profile = PROFILE) -> Path:
    path.write_text(dump_profile(profile))
    return path


def migrated(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    """Run a migration; return its document, with stderr."""
    output = invoke("migrate", *arguments, "--format", "json", exit_code=exit_code)
    document = output.document
    return {**document, "stderr": output.stderr}


def marks(home: Path) -> list[Path]:
    """Return the marks of migrations that were killed or are running."""
    return sorted((home / ".local/state/hicachectl/marks").glob("*"))


def flip_once_written(monkeypatch: pytest.MonkeyPatch, path: Path, at: int) -> None:
    """Change a byte of an object right after a migration wrote the object."""
    write_from = FileStore.write_from

    def flipped(store: FileStore, rows: Any, *arguments: Any, **options: Any) -> Any:
        result = write_from(store, rows, *arguments, **options)
        if store.path == str(path.parent) and path.name.encode() in keys_of(rows):
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)
        return result

    monkeypatch.setattr(FileStore, "write_from", flipped)
