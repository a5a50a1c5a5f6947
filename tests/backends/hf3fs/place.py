"""A 3FS store for tests: page files in a directory, and tables in SGLang's own metadata server.

Puts and gets bypass the backend: plain file I/O, and direct calls of the server.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.hf3fs.settings import Hf3fsSettings
from hicachectl.backends.hf3fs.store import Hf3fsStore
from hicachectl.backends.hf3fs.tables import KeyTables, LoadedSnapshot
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.profile import Profile

if TYPE_CHECKING:
    from tests.hf3fs_server import MetadataServer

PAGE_BYTES = 4096
NUM_PAGES = 64
FILE_SIZE = NUM_PAGES * PAGE_BYTES
# K and V of 4096 bytes each, on both ranks.
PROFILE = Profile(
    model="m",
    page_size=8,
    layout="page_first",
    tp=2,
    pools=(Pool(name="kv", kind="mha", dtype="bfloat16", layers=2, kv_heads=4, head_dim=64),),
)


class FreshStore(Hf3fsStore):
    """A store for which the server saves its tables before each read of the snapshot."""

    def __init__(self, settings: Hf3fsSettings, server: MetadataServer) -> None:
        super().__init__(settings)
        self._tables = FreshTables(settings, self._server)
        self._tables.metadata_server = server


class FreshTables(KeyTables):
    metadata_server: MetadataServer

    def saved(self) -> LoadedSnapshot:
        self.metadata_server.save()
        return super().saved()


@dataclass(frozen=True, slots=True)
class Place:
    """Page files of ranks 0 and 1 under a prefix, and their tables of `NUM_PAGES` pages."""

    server: MetadataServer
    prefix: Path

    @property
    def url(self) -> str:
        """Return the URL with both the server and its snapshot."""
        return f"hf3fs://{self.prefix}?server={self.server.url}&snapshot={self.server.snapshot}"

    def settings(self, **changes: object) -> Hf3fsSettings:
        """Return the settings of the URL, with changes."""
        stated = {
            "prefix": str(self.prefix),
            "server": self.server.url,
            "snapshot": str(self.server.snapshot),
            **changes,
        }
        return Hf3fsSettings(**stated)  # type: ignore[arg-type]

    def create(self, *, ranks: int = 2, namespace: str = "kv", num_pages: int = NUM_PAGES) -> None:
        """Create files and tables, as SGLang's ranks do when they start."""
        for rank in range(ranks):
            path = self.file(f"{rank}:{namespace}:")
            path.touch()
            os.truncate(path, num_pages * PAGE_BYTES)
            self.server.initialize(rank, num_pages, namespace)

    def file(self, key: bytes | str) -> Path:
        """Return the data file of a key."""
        rank, namespace, _ = self.split(key)
        return Path(f"{self.prefix}.{rank}.bin" + ("" if namespace == "kv" else f".{namespace}"))

    @staticmethod
    def split(key: bytes | str) -> tuple[int, str, str]:
        """Return rank, namespace, and the key's name on the server."""
        rank, namespace, name = (key.decode() if isinstance(key, bytes) else key).split(":", 2)
        return int(rank), namespace, name

    def put(self, key: bytes | str, value: bytes) -> int:
        """Store or replace an object; return its page index."""
        rank, namespace, name = self.split(key)
        self.server.delete(rank, [name], namespace)
        ((_, index),) = self.server.reserve(rank, [name], namespace)
        with self.file(key).open("r+b") as file:
            os.pwrite(file.fileno(), value, index * PAGE_BYTES)
        self.server.confirm(rank, [(name, index)], namespace=namespace)
        return index

    def get(self, key: bytes | str) -> bytes | None:
        """Return an object's bytes; None if the server lacks the key."""
        rank, namespace, name = self.split(key)
        (index,) = self.server.page_indices(rank, [name], namespace)
        if index is None:
            return None
        with self.file(key).open("rb") as file:
            return os.pread(file.fileno(), PAGE_BYTES, index * PAGE_BYTES)

    def delete(self, key: bytes | str) -> None:
        """Delete a key."""
        rank, namespace, name = self.split(key)
        self.server.delete(rank, [name], namespace)

    def reserved(self, rank: int = 0, namespace: str = "kv") -> int:
        """Count the pages that are neither free nor mapped to a key."""
        table = json.loads(self.server.save().read_bytes())[f"{rank}:{namespace}"]
        held = {index for _, index in table["key_to_index"]}
        return int(table["num_pages"]) - len(held | set(table["free_pages"]))

    def open(self, *, profile: Profile | None = PROFILE, **changes: object) -> FreshStore:
        """Open the store; its listings show the server's current tables."""
        store = FreshStore(self.settings(**changes), self.server)
        if profile is not None:
            store.use_profile(profile)
        return store
