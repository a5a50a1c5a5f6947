"""3FS stores as engines make them, with the demo's pages, and SGLang's own metadata server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Profiled
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.spec import object_specs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hf3fs_server import MetadataServer

FILE_BYTES = 4 << 20
PAGES = 6
BFLOAT16_NAN = b"\xc0\x7f"


class Place:
    """Data files with the demo's pages, as engines make them, and a snapshot.

    snapshot: path of a snapshot; by default a copy, because the server can write its own at any
        time.
    """

    def __init__(self, folder: Path, server: MetadataServer, snapshot: Path | None = None) -> None:
        self.server = server
        self.folder = folder
        self.snapshot = snapshot or folder / "saved.json"
        self.page_bytes: dict[tuple[int, str], int] = {}
        for expected in object_specs(PROFILE, "hf3fs"):
            rank, pool, _ = grammar_of("hf3fs").affix(expected.coordinate)[0].split(":")
            self.page_bytes[int(rank), pool] = expected.nbytes
        for (number, namespace), nbytes in self.page_bytes.items():
            with self.file(number, namespace).open("wb") as stream:
                stream.truncate(FILE_BYTES)
            server.initialize(number, FILE_BYTES // nbytes, namespace)
        self.profile = folder / "profile.toml"
        self.profile.write_text(dump_profile(PROFILE))
        self.save()
        with open_store(self.url()) as store:
            assert isinstance(store, Profiled)
            store.use_profile(PROFILE)
            fill(store, PAGES)
        self.save()

    def save(self) -> None:
        saved = self.server.save()
        if saved != self.snapshot:
            self.snapshot.write_bytes(saved.read_bytes())

    def url(self, server: str | None = None) -> str:
        """Return the URL of the store.

        server: URL of the metadata server; None for its own, "" for no server.
        """
        asked = f"server={self.server.url if server is None else server}&" if server != "" else ""
        return (
            f"hf3fs://{self.folder}/hicache?{asked}snapshot={self.snapshot}&file_size={FILE_BYTES}"
        )

    def file(self, rank: int, namespace: str) -> Path:
        side = "" if namespace == "kv" else f".{namespace}"
        return self.folder / f"hicache.{rank}.bin{side}"

    def arguments(self, *more: object, server: str | None = None) -> list[object]:
        """Return arguments of `verify` with one read at a time."""
        fixed = ["--profile", self.profile, "--grace", "0s", "--jobs", "1", "--fail-on", "error"]
        return ["verify", self.url(server), *fixed, "--format", "json", *more]

    @property
    def recording(self) -> tuple[object, ...]:
        """Return options with which `verify` asks the server about all pages read."""
        return "--catalog", self.folder / "catalog.parquet", "--update-catalog"

    def tables(self) -> dict[str, Any]:
        """Return the tables of the snapshot."""
        tables: dict[str, Any] = json.loads(self.snapshot.read_text())
        return tables

    def held(self, name: str) -> dict[str, int]:
        """Return the keys of a table with their page indices."""
        return dict(self.tables()[name]["key_to_index"])

    def pages(self) -> list[str]:
        """Return page hashes in order of eviction."""
        return list(dict.fromkeys(key[:64] for key, _ in self.tables()["0:kv"]["key_to_index"]))

    def of_page(self, page: str) -> dict[tuple[int, str], dict[str, int]]:
        """Return the keys of a page with their page indices, by rank and namespace."""
        found = {}
        for name, table in self.tables().items():
            rank, namespace = name.split(":")
            held = {key: index for key, index in table["key_to_index"] if key.startswith(page)}
            found[int(rank), namespace] = held
        return found

    def write(self, rank: int, namespace: str, index: int, value: bytes) -> None:
        with self.file(rank, namespace).open("r+b") as stream:
            stream.seek(index * self.page_bytes[rank, namespace])
            stream.write(value)

    def evict(self, page: str) -> None:
        for (rank, namespace), keys in self.of_page(page).items():
            self.server.delete(rank, list(keys), namespace)

    def reuse(self, page: str) -> None:
        """Evict a page, reserve its indices for another page, and overwrite only its kv."""
        before = self.of_page(page)
        self.evict(page)
        for (rank, namespace), keys in before.items():
            strangers = [f"stranger-{n}" for n in range(len(keys))]
            indices = [index for _, index in self.server.reserve(rank, strangers, namespace)]
            assert sorted(indices) == sorted(keys.values())
            if namespace == "kv":
                for index in indices:
                    self.write(rank, namespace, index, BFLOAT16_NAN)

    def store_again(self, page: str) -> None:
        """Store an evicted page again, as engines do, at any free indices."""
        for (rank, namespace), keys in self.of_page(page).items():
            now = dict(zip(keys, self.server.put(rank, list(keys), namespace), strict=True))
            assert not set(now.values()) & set(keys.values())

    def keys_of(self, page: str) -> int:
        return sum(map(len, self.of_page(page).values()))
