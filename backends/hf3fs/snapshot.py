"""Snapshot of SGLang's 3FS metadata server: the page of each key, and the free pages.

The JSON text is parsed as a stream, so that the parser takes little more memory than the columns.
The columns take about 90 bytes per key.
Source: sglang srt/mem_cache/storage/hf3fs/mini_3fs_metadata_server.py ::
GlobalMetadataState.save_to_disk, load_from_disk.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.disk.durable import new_file
from hicachectl.backends.disk.io import errors_as
from hicachectl.backends.disk.permissions import give_file
from hicachectl.backends.hf3fs.keys import NAMESPACE, RANK
from hicachectl.backends.page_tables import MAX_KEY_BYTES, PageTable, Snapshot
from hicachectl.formats.errors import FormatError, StoreUnavailable
from hicachectl.formats.forms import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import IO, NoReturn

    from hicachectl.formats.arrays import IntArray


# The server keeps free pages in a Python list, in which this many pages would take 160 GB.
MAX_PAGES = 1 << 32

# With 1,000,000 keys, pieces of this size were parsed twice as fast as pieces of 4 MiB, which
# exceed the processor's cache.
_PIECE_BYTES = 256 << 10
_BLOCK_BYTES = 1 << 20
_MAX_ENTRY_BYTES = 1 << 20  # most bytes of one key with its index
_MAX_NAME_BYTES = 4 << 10
_WRITE_ROWS = 16 << 10
_CHUNK_ROWS = 16 << 10
_NUMBER_BYTES = 8
_REPAIRED_MODE = 0o644  # the server may run as another user

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]|\\.)*"')
_OPEN_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]|\\.)*\\?\Z')
_INTEGER = re.compile(rb"(?:0|[1-9][0-9]*)(?![0-9.eE])")
_ARRAY_END = re.compile(rb"\][ \t\r\n]*\]")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_TABLE_NAME = re.compile(rf"({RANK})(?::({NAMESPACE}))?")
_OLD_NAMESPACE = "kv"  # namespace of tables in files that were written before namespaces existed

_Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_PAGES = msgspec.json.Decoder(list[_Index])
_NAME = msgspec.json.Decoder(str)
_ENTRIES = msgspec.json.Decoder(list[tuple[str, _Index]])


def read_snapshot(path: Path | str) -> Snapshot:
    """Read a snapshot.

    Raises FormatError if the file is not a snapshot as the server writes it, and StoreUnavailable
    if the file cannot be read.
    """
    next_step = "check the path and its permissions"
    with (
        errors_as(StoreUnavailable, path, "read the snapshot", next_step),
        Path(path).open("rb", buffering=0) as file,  # unbuffered: the parser has its own buffer
    ):
        saved_at_ns = os.fstat(file.fileno()).st_mtime_ns
        snapshot = Snapshot(saved_at_ns, tuple(_Parser(file, str(path)).tables()))
    pa.default_memory_pool().release_unused()
    return snapshot


class _Parser:
    """Parser of the whole document; `_text[_at:]` is read but not yet parsed."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._path = path
        self._text = b""
        self._at = 0
        self._dropped = 0  # bytes of the file before `_text`
        self._ended = False
        self._place = "the document"

    def tables(self) -> Iterator[PageTable]:
        seen: set[str] = set()
        for name in self._members():
            match = _TABLE_NAME.fullmatch(name)
            if match is None:
                self._fail(f"{name[:100]!r} is not RANK:NAMESPACE")
            table = self._table(int(match[1]), match[2] or _OLD_NAMESPACE)
            if table.name in seen:
                self._fail(f"{table.name} occurs twice")
            seen.add(table.name)
            self._place = "the document"
            yield table
        if self._peek():
            self._fail("text after the end of the document")

    def _table(self, rank: int, namespace: str) -> PageTable:
        name = f"{rank}:{namespace}"
        self._place = name
        num_pages: int | None = None
        free: IntArray | None = None
        entries: tuple[Any, IntArray] | None = None
        for field in self._members():
            self._place = f"{field[:100]!r} of {name}"
            if field == "num_pages" and num_pages is None:
                num_pages = self._num_pages()
            elif field == "free_pages" and free is None:
                free = self._free_pages()
            elif field == "key_to_index" and entries is None:
                entries = self._entries(f"{name}:")
            else:
                self._fail("occurs twice, or is unknown to this version of hicachectl")
            self._place = name
        if num_pages is None or free is None or entries is None:
            self._fail("num_pages, free_pages or key_to_index is missing")
        return PageTable(rank, namespace, num_pages, free, *entries)

    def _num_pages(self) -> int:
        self._peek()
        match = _INTEGER.match(self._text, self._at)
        if match is None:
            self._fail("not a whole number")
        self._at = match.end()
        if len(match[0]) > len(str(MAX_PAGES)) or int(match[0]) > MAX_PAGES:
            self._fail(f"more than {MAX_PAGES} pages, which no server can hold")
        return int(match[0])

    def _free_pages(self) -> IntArray:
        pages = bytearray()  # one buffer that grows, because many arrays would have to be joined
        for piece in self._pieces(self._pages_end):
            pages += np.array(self._decoded(_PAGES, piece, pages), dtype=np.int64).data
        return np.frombuffer(pages, dtype=np.int64)

    def _entries(self, prefix: str) -> tuple[Any, IntArray]:
        chunks: list[Any] = []
        texts: list[Any] = []  # texts of the current chunk
        indices, hashes = bytearray(), bytearray()
        nbytes = gathered = 0
        for piece in self._pieces(self._entries_end):
            entries = self._decoded(_ENTRIES, piece, indices)
            names, pages = zip(*entries, strict=True)
            texts.append(pa.array(names, pa.string()))
            indices += np.array(pages, dtype=np.int64).data
            hashes += np.fromiter(map(hash, names), np.int64, len(names)).data
            gathered += len(names)
            if gathered >= _CHUNK_ROWS:
                chunks.append(listed_keys(prefix, texts))
                nbytes += chunks[-1].nbytes
                texts, gathered = [], 0
                if nbytes > MAX_KEY_BYTES:
                    self._fail(f"more than {MAX_KEY_BYTES} bytes of keys")
        if texts:
            chunks.append(listed_keys(prefix, texts))
        keys = pa.chunked_array(chunks, pa.binary())
        twice = repeated_key(keys, np.frombuffer(hashes, dtype=np.int64))
        if twice is not None:
            name = twice.decode().removeprefix(prefix)
            self._fail(f"the key {_quoted(name)} occurs twice")
        return keys, np.frombuffer(indices, dtype=np.int64)

    def _decoded(self, decoder: Any, piece: bytes, before: bytearray) -> Any:
        """Decode elements of an array.

        before: the array's earlier elements, 8 bytes each, so that messages can number elements.
        """
        try:
            return decode(decoder, b"[" + piece + b"]")
        except FormatError as error:
            number = len(before) // _NUMBER_BYTES
            said = re.sub(
                r" - at `\$\[(\d+)\](?:\[\d\])?`",
                lambda m: f" (entry {number + int(m[1])})",
                str(error),
            )
            self._fail(re.sub(r" ?\(byte \d+\)", "", said), self._dropped + self._at - len(piece))

    # arrays, a few elements at a time

    def _pieces(self, find_end: Callable[[int], int]) -> Iterator[bytes]:
        """Yield an array's text in pieces of whole elements, without brackets."""
        self._expect(b"[", "not an array")
        if self._peek() == b"]":
            self._at += 1
            return
        while True:
            piece = self._piece(find_end)
            if not piece.strip():
                self._fail("an element of the array is missing")
            yield piece
            mark = self._peek()
            self._at += 1
            if mark == b"]":
                return
            if mark != b",":
                self._fail("expected a comma or the end after an element")

    def _piece(self, find_end: Callable[[int], int]) -> bytes:
        size = _PIECE_BYTES
        while True:
            self._fill(size)
            limit = min(len(self._text), self._at + size)
            end = find_end(limit)
            if end >= 0:
                piece = self._text[self._at : end]
                self._at = end
                return piece
            if self._ended and limit == len(self._text):
                self._cut_short()
            if size >= _MAX_ENTRY_BYTES:
                self._fail(f"an entry of more than {_MAX_ENTRY_BYTES} bytes")
            size *= 2

    def _pages_end(self, limit: int) -> int:
        """Return the end of the last complete number before `limit`; -1 if there is none."""
        end = self._text.find(b"]", self._at, limit)
        return end if end >= 0 else self._text.rfind(b",", self._at, limit)

    def _entries_end(self, limit: int) -> int:
        """Return the end of the last whole `[key, index]` before `limit`; -1 if there is none."""
        quotes, counted = 0, self._at
        for match in _ARRAY_END.finditer(self._text, self._at, limit):
            quotes += self._quotes(counted, match.start())
            counted = match.start()
            if not quotes % 2:
                return match.start() + 1
        quotes += self._quotes(counted, limit)
        end = limit
        while (bracket := self._text.rfind(b"]", self._at, end)) >= 0:
            quotes -= self._quotes(bracket, end)
            if not quotes % 2:
                return bracket + 1
            end = bracket
        return -1

    def _quotes(self, start: int, end: int) -> int:
        """Count the quotes that begin or end a string.

        After an odd number of quotes, a bracket lies inside a key, and does not end an entry.
        """
        if self._text.find(b"\\", start, end) < 0:
            return self._text.count(b'"', start, end)
        return _ESCAPE.sub(b"", self._text[start:end]).count(b'"')

    # the rest of the grammar

    def _members(self) -> Iterator[str]:
        """Yield the names of an object's members; the caller parses each value."""
        self._expect(b"{", "not an object")
        if self._peek() == b"}":
            self._at += 1
            return
        while True:
            yield self._name()
            mark = self._peek()
            self._at += 1
            if mark == b"}":
                return
            if mark != b",":
                self._fail("expected a comma or the end after a member")

    def _name(self) -> str:
        self._peek()
        self._fill(_MAX_NAME_BYTES)
        match = _STRING.match(self._text, self._at, self._at + _MAX_NAME_BYTES)
        if match is None:
            if self._ended and _OPEN_STRING.match(self._text, self._at):
                self._cut_short()
            self._fail("expected a name in quotes")
        self._at = match.end()
        self._expect(b":", "expected a colon after a name")
        try:
            return decode(_NAME, match[0])
        except FormatError as error:
            self._fail(str(error))

    def _expect(self, mark: bytes, complaint: str) -> None:
        if self._peek() != mark:
            self._fail(complaint)
        self._at += 1

    def _peek(self) -> bytes:
        """Skip white space; return the next byte, b"" at the end of the file."""
        while True:
            self._fill(64)
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]

    def _fill(self, nbytes: int) -> None:
        """Read until `nbytes` bytes can be parsed, or the file ends."""
        while not self._ended and len(self._text) - self._at < nbytes:
            block = self._file.read(_BLOCK_BYTES)
            self._ended = not block
            self._dropped += self._at
            self._text = self._text[self._at :] + block
            self._at = 0

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        if self._ended and self._at >= len(self._text):
            self._cut_short()
        byte = self._dropped + self._at if at is None else at
        raise FormatError(
            f"{self._path}: not a valid snapshot of a 3FS metadata server: {self._place}, near "
            f"byte {byte}: {what}; check that the server's --persistence-path is this file"
        )

    def _cut_short(self) -> NoReturn:
        size = self._dropped + len(self._text)
        raise FormatError(
            f"{self._path}: the snapshot is cut short: it ends after {size} bytes, "
            f"within {self._place}; copy it again, or wait for the server's next save"
        )


def listed_keys(prefix: str, names: Sequence[Any]) -> Any:
    """Return the keys that listings have for the server's names, as a binary array."""
    joined = pc.binary_join_element_wise(prefix, pa.concat_arrays(names), "")
    return joined.cast(pa.binary())


def repeated_key(keys: Any, hashes: IntArray) -> bytes | None:
    """Return a key that occurs twice in a chunked binary array; None if all are distinct.

    hashes: [n] hash of each key. Only keys with equal hashes are compared.
    """
    ordered = np.sort(hashes)
    recurring = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(recurring):
        return None
    counts = pc.value_counts(keys.filter(pa.array(np.isin(hashes, recurring))))
    found = counts.filter(pc.greater(counts.field("counts"), 1))
    twice: bytes | None = found[0]["values"].as_py() if len(found) else None
    return twice


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "…")


# writing


def write_repaired(
    tables: Sequence[PageTable], path: Path | str, like: Path | str | None = None
) -> None:
    """Write a new file, atomically, with a snapshot that the metadata server can load.

    like: the original snapshot. Only users who can read the original can read the new file. If the
        caller is root, the new file gets the original's owner.
    Raises FormatError if the file exists, and StoreUnavailable if it cannot be written.
    """
    next_step = "check the directory and its free space"
    with errors_as(StoreUnavailable, path, "write the snapshot", next_step):
        try:
            with new_file(str(path), 0o600, replaces=False) as descriptor:
                with open(descriptor, "w", encoding="ascii", closefd=False) as file:
                    file.writelines(_document(tables))
                if like is None:
                    os.fchmod(descriptor, _REPAIRED_MODE)
                else:
                    st = Path(like).stat()
                    mode = st.st_mode & _REPAIRED_MODE | 0o600
                    give_file(descriptor, st.st_uid, st.st_gid, mode=mode)
        except FileExistsError:
            raise FormatError(f"{path}: already exists; choose another name") from None


def _document(tables: Sequence[PageTable]) -> Iterator[str]:
    """Yield the text of the document in bounded parts."""
    mark = "{"
    for table in tables:
        yield f'{mark}"{table.name}": {{"num_pages": {table.num_pages}, "free_pages": '
        yield from _array(table.free[rows].tolist() for rows in _slices(len(table.free)))
        yield ', "key_to_index": '
        yield from _array(_entries(table, rows) for rows in _slices(len(table.keys)))
        yield "}"
        mark = ",\n"
    yield "}" if tables else "{}"


def _array(parts: Iterable[list[Any]]) -> Iterator[str]:
    """Yield the text of an array, given its elements in parts."""
    mark = "["
    for part in parts:
        yield mark + json.dumps(part)[1:-1]
        mark = ",\n"
    yield "[]" if mark == "[" else "]"


def _slices(count: int) -> list[slice]:
    return [slice(start, start + _WRITE_ROWS) for start in range(0, count, _WRITE_ROWS)]


def _entries(table: PageTable, rows: slice) -> list[tuple[str, int]]:
    """Return the server's names of some keys, each with its page."""
    names = table.names_at(np.arange(len(table.keys))[rows]).to_pylist()
    pages = table.indices[rows].tolist()
    return [(name.decode(), page) for name, page in zip(names, pages, strict=True)]
