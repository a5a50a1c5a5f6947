"""HTTP client of SGLang's 3FS metadata server, which maps keys to pages of data files.

The server cannot list keys; its snapshot can be listed (see `snapshot`). This client never clears a
table, because servers of SGLang may use its pages.
Source: sglang srt/mem_cache/storage/hf3fs/mini_3fs_metadata_server.py :: Hf3fsMetadataServer,
RankMetadata.
"""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np

from hicachectl.backends.http import HttpService
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicachectl.backends.http import Reply
    from hicachectl.formats.arrays import BoolArray

TIMEOUT_S = 15.0  # most seconds for a whole reply
# The server handles one request at a time, and takes 5 ms for this many keys.
KEYS_PER_CALL = 4096

_WHO = "3FS metadata server"
_HINT = (
    "check that the server is running, and that the address is SGLang's metadata_server_url "
    "(default port 18000)"
)
_NO_TABLE = b"not initialized"

_Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _ExistsReply(msgspec.Struct):
    exists: list[bool]


class _PageIndicesReply(msgspec.Struct):
    indices: list[_Index | None]


class _ReserveReply(msgspec.Struct):
    indices: list[tuple[bool, _Index]]


class MetadataClient:
    """Client of a metadata server, for several threads at once. Failures raise StoreUnavailable.

    A table is named by rank and namespace. Only `exists` and `has_table` leave a table unchanged.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Make a client; it connects at the first call.

        url: the checked URL of `Hf3fsSettings`.
        """
        parts = urlsplit(url)
        host, port = str(parts.hostname), parts.port or http.client.HTTP_PORT
        self.url = url
        self._root = parts.path
        self._http = HttpService(host, port, who=_WHO, hint=_HINT, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connections; pending requests of other threads fail."""
        self._http.close()

    def has_table(self, rank: int, namespace: str) -> bool:
        """Return whether the metadata server has a table."""
        reply = self._sent(rank, "exists", namespace, repeatable=True, keys=[])
        if _lacks_table(reply):
            return False
        self._values(reply, rank, "exists", namespace, 0, _ExistsReply)
        return True

    def initialize(self, rank: int, namespace: str, num_pages: int) -> None:
        """Create a table of free pages; an existing table stays unchanged."""
        self._change(rank, "initialize", namespace, num_pages=num_pages)

    def exists(self, rank: int, namespace: str, keys: Sequence[str]) -> BoolArray:
        """Return which keys exist: [n] bool."""
        found = self._asked(rank, "exists", namespace, keys, _ExistsReply)
        return np.array(found, dtype=np.bool_)

    def page_indices(self, rank: int, namespace: str, keys: Sequence[str]) -> list[int | None]:
        """Return the page of each key, None if missing.

        Existing keys become the most recently used, in request order.
        """
        return self._asked(rank, "get_page_indices", namespace, keys, _PageIndicesReply)

    def reserve(self, rank: int, namespace: str, keys: Sequence[str]) -> list[tuple[bool, int]]:
        """Reserve a page for each key. Return whether each key exists, and its page.

        A full table drops its least recently used keys and reuses their pages. Confirm or release
        the pages of new keys by `confirm`. After an error, unknown pages may stay reserved. Keys
        must be distinct, because a repeated key gets two pages. The request is sent only once, and
        is never split.
        """
        verb = "reserve_and_allocate_page_indices"
        asked = [(key, "") for key in keys]
        reply = self._sent(rank, verb, namespace, repeatable=False, keys=asked)
        if reply.status == http.client.INTERNAL_SERVER_ERROR:
            raise self._http.lost(
                f"cannot reserve {len(keys)} pages of {rank}:{namespace}",
                "probably no page is free and no key can be dropped; remove pages with "
                "hicachectl rm",
            )
        return self._values(reply, rank, verb, namespace, len(keys), _ReserveReply)

    def confirm(
        self,
        rank: int,
        namespace: str,
        written: Iterable[tuple[str, int]],
        released: Iterable[int] = (),
    ) -> None:
        """Map keys to their written pages, and free other pages, in one step.

        The server checks nothing, and gives out released pages again even if they are in use. The
        request is sent only once. After an error, the server may have executed it.
        """
        pages = {"written_keys_to_confirm": list(written), "pages_to_release": list(released)}
        self._change(rank, "confirm_write", namespace, **pages)

    def delete(self, rank: int, namespace: str, keys: Sequence[str]) -> None:
        """Delete keys in one step, and free their pages; missing keys are skipped.

        A page that several keys share becomes free, too, so delete all its keys in one call. For
        each key, the server searches its whole list of free pages, and blocks other requests. The
        request is sent only once, because a key could be stored again before a second request.
        """
        self._change(rank, "delete_keys", namespace, keys=list(keys))

    def _asked(
        self, rank: int, verb: str, namespace: str, keys: Sequence[str], kind: type[Any]
    ) -> list[Any]:
        """Query keys, in several requests if there are many. A request may be sent again."""
        values: list[Any] = []
        for start in range(0, len(keys), KEYS_PER_CALL):
            some = keys[start : start + KEYS_PER_CALL]
            reply = self._sent(rank, verb, namespace, repeatable=True, keys=some)
            values += self._values(reply, rank, verb, namespace, len(some), kind)
        return values

    def _sent(
        self, rank: int, verb: str, namespace: str, *, repeatable: bool, **fields: object
    ) -> Reply:
        body = msgspec.json.encode({"namespace": namespace, **fields})
        return self._http.post(self._path(rank, verb), body, repeatable=repeatable)

    def _change(self, rank: int, verb: str, namespace: str, **fields: object) -> None:
        """Send a request once; its reply has no values."""
        reply = self._sent(rank, verb, namespace, repeatable=False, **fields)
        if reply.status != http.client.NO_CONTENT:
            self._checked(reply, rank, verb, namespace)
            raise self._http.lost(f"gave an unexpected reply to {verb}: HTTP {reply.status}")

    def _checked(self, reply: Reply, rank: int, verb: str, namespace: str) -> bytes:
        if _lacks_table(reply):
            raise self._http.lost(
                f"has no table {rank}:{namespace}",
                "check that an SGLang with that rank and pool has started, and that the server was "
                "started with its snapshot (--persistence-path)",
            )
        if reply.status != http.client.OK:
            raise self._http.refused(self._path(rank, verb), reply)
        return reply.body

    def _values(
        self, reply: Reply, rank: int, verb: str, namespace: str, asked: int, kind: type[Any]
    ) -> list[Any]:
        body = self._checked(reply, rank, verb, namespace)
        try:
            (values,) = msgspec.structs.astuple(decode(msgspec.json.Decoder(kind), body))
        except FormatError as error:
            raise self._http.lost(f"the reply to {verb} is invalid: {error}") from None
        if len(values) != asked:
            raise self._http.lost(f"the reply to {verb} has {len(values)} keys instead of {asked}")
        found: list[Any] = values
        return found

    def _path(self, rank: int, verb: str) -> str:
        return f"{quote(self._root, safe='/%')}/{rank}/{verb}"


def _lacks_table(reply: Reply) -> bool:
    return reply.status == http.client.NOT_FOUND and _NO_TABLE in reply.body
