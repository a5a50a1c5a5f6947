"""Stores of the NIXL backend for commands that write: two directories of the DSA model's objects.

Objects have the names that a file store would give them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hicachectl.formats.keys.nixl import route
from tests.power.writers import Writer
from tests.stores import contents

if TYPE_CHECKING:
    from pathlib import Path

    from tests.power.crash_states import State
    from tests.stores import Contents

_DIRECTORIES = ("one", "two")


def nixl_directories(folder: Path) -> list[Path]:
    """Return the directories of a store below a folder, in order."""
    return [folder / name for name in _DIRECTORIES]


def nixl_url(folder: Path) -> str:
    """Return the URL of a store below a folder."""
    places = ",".join(map(str, nixl_directories(folder)))
    return f"nixl://{places}?direct_io=off&high_watermark=100"


def name_in_files(key: str) -> str:
    """Return the file store's name of a key; other names unchanged."""
    if key.startswith("."):
        return key
    pool = ".indexer" if key.endswith("_indexer") else ""
    return f"{key[:64]}{pool}{key[64:].removesuffix('_indexer').removesuffix('_k')}.bin"


def nixl_file(folder: Path, name: str) -> Path:
    """Return where a store below a folder has an object."""
    component = "_indexer" if name[64:].startswith(".indexer") else "_k"
    key = f"{name[:64]}{name[64:].removeprefix('.indexer').removesuffix('.bin')}{component}"
    number, inner = route(key.encode(), len(_DIRECTORIES))
    return folder / _DIRECTORIES[number] / os.fsdecode(inner) / key


def nixl_files(state: State, folder: Path) -> dict[str, bytes]:
    """Return the files of a store in a state."""
    files = state.below(folder).items()
    return {name_in_files(name.rpartition("/")[2]): data for name, data in files}


def nixl_objects(folder: Path) -> Contents:
    """Return the files of a store."""
    held = [contents(inner) for inner in folder.glob("*/[0-9a-f][0-9a-f]")]
    return {name_in_files(name): value for one in held for name, value in one.items()}


class OnNixl(Writer):
    """A writer whose store is one of the NIXL backend."""

    @property
    def place(self) -> object:
        return nixl_url(self.store)

    def prepare(self) -> None:
        super().prepare()
        for name in self.original:
            self.file(name).parent.mkdir(parents=True, exist_ok=True)
            (self.store / name).rename(self.file(name))

    def file(self, name: str) -> Path:
        return nixl_file(self.store, name)

    def present(self, directory: Path | None = None) -> Contents:
        return super().present(directory) if directory else nixl_objects(self.store)

    def present_in(self, state: State) -> dict[str, bytes]:
        return nixl_files(state, self.store)
