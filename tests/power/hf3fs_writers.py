"""Commands that write to 3FS, and rules for every state after a power failure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from hicachectl.formats.keys import grammar_of
from hicachectl.formats.spec import object_specs
from tests.move.repairs import DSA
from tests.power.crash_states import Kind
from tests.power.writers import PAGES, Writer
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hf3fs_server import MetadataServer
    from tests.power.crash_states import State

FILE_BYTES = 8 * 9216


class PageWrites(Writer):
    """File to 3FS: data files are made and written, and the metadata server is told.

    The server runs on another machine and keeps everything that it was told.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        "file": Kind("fsync", "*/hicache.0.bin*"),
        "file-name": Kind("fsync", "*/mount/cache"),
        "pages": Kind("fdatasync", "*/hicache.0.bin*"),
    }

    def __init__(self, folder: Path, server: MetadataServer) -> None:
        super().__init__(folder)
        self.cache = folder / "mount" / "cache"
        self.url = f"hf3fs://{self.cache}/hicache?server={server.url}&file_size={FILE_BYTES}"

    @property
    def roots(self) -> list[Path]:
        return [self.store.parent, self.cache.parent]

    def prepare(self) -> None:
        super().prepare()
        self.cache.mkdir()

    def arguments(self) -> list[object]:
        return [
            *("migrate", self.store, self.url, "--profile", self.profile),
            *("--buffer-bytes", "64KiB", "--format", "json"),
        ]

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        files = state.directly_in(self.cache)
        for body in _told(state):
            pool = body["namespace"]
            data = files.get("hicache.0.bin" + ("" if pool == "kv" else f".{pool}"), b"")
            if len(data) != FILE_BYTES:
                yield f"the server has a table of {pool}, and its file has {len(data)} bytes"
            for key, index in body.get("written_keys_to_confirm", ()):
                value = self.value(key, pool)
                if data[index * len(value) : (index + 1) * len(value)] != value:
                    yield f"{key} was confirmed, and its page {index} has other bytes"

    def value(self, key: str, pool: str) -> bytes:
        """Return the bytes of a key's object."""
        stem = "" if pool == "kv" else f".{pool}"
        return self.original[f"{key[:64]}{stem}_x-dsa.bin"][0]

    def recover(self, state: State) -> Iterator[str]:
        raise NotImplementedError  # the server cannot return to its earlier state


def _told(state: State) -> Iterator[dict[str, Any]]:
    """Return the bodies of the requests that make tables and confirm pages."""
    for sent in state.sent:
        if sent.startswith(b"{"):
            body = json.loads(sent)
            if body.keys() & {"num_pages", "written_keys_to_confirm"}:
                yield body


class RepairedSnapshot(Writer):
    """A snapshot without a server, with two keys on one page: a repair writes one without them."""

    kinds: ClassVar[dict[str, Kind]] = {
        "data": Kind("fsync", "*/meta/.*"),
        "name": Kind("fsync", "*/disk/meta"),
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.snapshot = folder / "disk" / "meta" / "metadata.json"
        self.repaired = self.snapshot.with_name("metadata.json.repaired")

    def prepare(self) -> None:
        super().prepare()
        self.snapshot.parent.mkdir()
        tables: dict[str, Any] = {}
        for expected in object_specs(DSA, "hf3fs"):
            prefix, suffix = grammar_of("hf3fs").affix(expected.coordinate)
            rank, pool, start = prefix.split(":", 2)
            names = [f"{start}{page(number)}{suffix}" for number in range(PAGES)]
            pages = FILE_BYTES // expected.nbytes
            tables[f"{rank}:{pool}"] = {
                "num_pages": pages,
                "free_pages": list(range(PAGES, pages)),
                "key_to_index": [[name, max(1, n)] for n, name in enumerate(names)],
            }
            side = "" if pool == "kv" else f".{pool}"
            path = self.snapshot.parent / f"hicache.{rank}.bin{side}"
            path.write_bytes(b"\1" * FILE_BYTES)
        self.snapshot.write_text(json.dumps(tables))

    def arguments(self) -> list[object]:
        url = f"hf3fs://{self.snapshot.parent}/hicache?snapshot={self.snapshot}"
        return [
            *("verify", f"{url}&file_size={FILE_BYTES}", "--profile", self.profile),
            *("--checks", "names,groups,sizes", "--repair", "delete", "--yes", "--grace", "0s"),
            *("--fail-on", "never", "--format", "json"),
        ]

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        if str(self.snapshot) not in state.files:
            yield "the snapshot is gone"
        data = state.files.get(str(self.repaired))
        if data is None:
            if document is not None:
                yield "the repaired snapshot was reported, and is missing"
            return
        try:
            tables = json.loads(data)
        except ValueError:
            yield "the repaired snapshot is torn"
            return
        if not all(len(table["key_to_index"]) == PAGES - 2 for table in tables.values()):
            yield "the repaired snapshot has other keys"

    def recover(self, state: State) -> Iterator[str]:
        # 2: an existing file is never replaced.
        yield from self.run(*self.arguments(), codes=(2,) if self.repaired.exists() else (0,))
        if not self.repaired.exists():
            yield "the repair was run again, and wrote no snapshot"


WRITERS = (RepairedSnapshot,)
