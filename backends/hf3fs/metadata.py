"""SGLang's 3FS metadata server: which page of a data file a key lies on, asked over HTTP.

There is no list of keys: see hf3fs_snapshot. Nothing here clears a table, which would take the
pages away from the engines that use them.
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
from hicachectl.formats.errors import FormatError, UnsupportedByBackend, UsageError
from hicachectl.formats.forms import decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicachectl.backends.base import BoolArray
    from hicachectl.backends.http import Reply

TIMEOUT_S = 15.0  # for a whole answer
# The server answers one request at a time, on one thread: this many keys take it 5 ms.
KEYS_PER_CALL = 4096

_WHO = "3FS metadata server"
_HINT = "name it as in SGLang's metadata_server_url; its --port is 18000 by default"
_NO_TABLE = b"not initialized"

_Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _ExistsReply(msgspec.Struct):
    exists: list[bool]


class _PageIndicesReply(msgspec.Struct):
    indices: list[_Index | None]


class _ReserveReply(msgspec.Struct):
    indices: list[tuple[bool, _Index]]


class MetadataClient:
    """One metadata server; safe to call from threads. Every failure is StoreUnavailable.

    A table is named by the rank and namespace that its engines use. Only `exists` and `has_table`
    leave a table as it is.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or http.client.HTTP_PORT
        except ValueError:  # a port that is no number, brackets that do not match
            host, port = None, 0
        if not host:
            raise UsageError(f"{url}: no address; write http://HOST:18000")
        if parts.scheme != "http":
            raise UnsupportedByBackend(f"{url}: a 3FS metadata server speaks plain http alone")
        self.url = url.rstrip("/")
        self._root = parts.path.rstrip("/")
        self._http = HttpService(host, port, who=_WHO, hint=_HINT, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connections; what other threads ask fails."""
        self._http.close()

    def has_table(self, rank: int, namespace: str) -> bool:
        """Say whether an engine, or `initialize`, has made a table."""
        body = msgspec.json.encode({"namespace": namespace, "keys": []})
        reply = self._http.post(self._path(rank, "exists"), body, repeatable=True)
        if _lacks_table(reply):
            return False
        self._values(reply, rank, "exists", namespace, 0, _ExistsReply)
        return True

    def initialize(self, rank: int, namespace: str, num_pages: int) -> None:
        """Make a table whose pages are all free; one that is there stays as it is."""
        verb = "initialize"
        self._done(self._changed(rank, verb, namespace, num_pages=num_pages), rank, verb, namespace)

    def exists(self, rank: int, namespace: str, keys: Sequence[str]) -> BoolArray:
        """Say which keys are there, [n] bool, without a change to their recency."""
        found = self._asked(rank, "exists", namespace, keys, _ExistsReply)
        return np.array(found, dtype=np.bool_)

    def page_indices(self, rank: int, namespace: str, keys: Sequence[str]) -> list[int | None]:
        """Give the page of each key, None where it is not there.

        Those that are there become the most recently used, in the order asked.
        """
        return self._asked(rank, "get_page_indices", namespace, keys, _PageIndicesReply)

    def reserve(self, rank: int, namespace: str, keys: Sequence[str]) -> list[tuple[bool, int]]:
        """Take a page to write to for each key: whether the key is there already, and its page.

        Where nothing is free the least recently used keys are dropped, and their pages given. A
        page that is not there already has to be confirmed or released by `confirm`: after an
        error, some may be held by nobody, since the server tells no one which. Keys have to be
        distinct: one that comes twice is given two pages. Never sent twice, nor in parts.
        """
        verb = "reserve_and_allocate_page_indices"
        reply = self._changed(rank, verb, namespace, keys=[(key, "") for key in keys])
        if reply.status == http.client.INTERNAL_SERVER_ERROR:
            raise self._http.lost(
                f"cannot reserve {len(keys)} pages of {rank}:{namespace}",
                "it fails so when no page is free and no key is left to drop; pages that it had "
                "taken for this request are leaked",
            )
        return self._values(reply, rank, verb, namespace, len(keys), _ReserveReply)

    def confirm(
        self,
        rank: int,
        namespace: str,
        written: Iterable[tuple[str, int]],
        released: Iterable[int] = (),
    ) -> None:
        """Map keys to the pages that were written for them, and free other pages, in one step.

        The server believes it all: a released page that somebody holds is given out again. Not
        sent twice; after an error it may have happened.
        """
        verb = "confirm_write"
        body = {"written_keys_to_confirm": list(written), "pages_to_release": list(released)}
        self._done(self._changed(rank, verb, namespace, **body), rank, verb, namespace)

    def delete(self, rank: int, namespace: str, keys: Sequence[str]) -> None:
        """Delete keys, in one step, and free their pages; those that are not there are passed over.

        A page that another key shares becomes free all the same: delete them together. The server
        looks through the whole list of free pages for each key, and answers nobody meanwhile.
        Not sent twice: a key could have been stored anew in between.
        """
        verb = "delete_keys"
        self._done(self._changed(rank, verb, namespace, keys=list(keys)), rank, verb, namespace)

    def _asked(
        self, rank: int, verb: str, namespace: str, keys: Sequence[str], kind: type[Any]
    ) -> list[Any]:
        """Ask about keys, some at a time; doing so twice does no more than once."""
        values: list[Any] = []
        for start in range(0, len(keys), KEYS_PER_CALL):
            some = keys[start : start + KEYS_PER_CALL]
            body = msgspec.json.encode({"namespace": namespace, "keys": some})
            reply = self._http.post(self._path(rank, verb), body, repeatable=True)
            values += self._values(reply, rank, verb, namespace, len(some), kind)
        return values

    def _changed(self, rank: int, verb: str, namespace: str, **fields: object) -> Reply:
        body = msgspec.json.encode({"namespace": namespace, **fields})
        return self._http.post(self._path(rank, verb), body, repeatable=False)

    def _done(self, reply: Reply, rank: int, verb: str, namespace: str) -> None:
        if reply.status != http.client.NO_CONTENT:
            self._checked(reply, rank, verb, namespace)
            raise self._http.lost(f"answers {verb} in a way of its own", _HINT)

    def _checked(self, reply: Reply, rank: int, verb: str, namespace: str) -> bytes:
        if _lacks_table(reply):
            raise self._http.lost(
                f"has no table {rank}:{namespace}",
                "an SGLang with that rank and pool has not started there yet, or the server was "
                "started without its snapshot",
            )
        if reply.status != http.client.OK:
            raise self._http.refused(self._path(rank, verb), reply)
        return reply.body

    def _values(
        self, reply: Reply, rank: int, verb: str, namespace: str, asked: int, kind: type[Any]
    ) -> list[Any]:
        """Take the list out of a reply: a value for each key asked about."""
        body = self._checked(reply, rank, verb, namespace)
        try:
            (values,) = msgspec.structs.astuple(decode(msgspec.json.Decoder(kind), body))
        except FormatError as error:
            raise self._http.lost(f"its answer to {verb} cannot be read: {error}") from None
        if len(values) != asked:
            raise self._http.lost(
                f"its answer to {verb} is about {len(values)} keys instead of {asked}"
            )
        found: list[Any] = values
        return found

    def _path(self, rank: int, verb: str) -> str:
        return f"{quote(self._root, safe='/%')}/{rank}/{verb}"


def _lacks_table(reply: Reply) -> bool:
    return reply.status == http.client.NOT_FOUND and _NO_TABLE in reply.body
