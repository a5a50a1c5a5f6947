"""Read the lines of request files, also of rotated logs, compressed files and pipes.

Inputs are files, directories and patterns; `-` is stdin. The files of a directory or pattern are
read in the order of their last change, because this is the order of rotated logs. Files that
changed at the same time are read in the order of their names. gzip and zstd are recognised by the
first bytes of a file. A byte order mark is left out.
"""

from __future__ import annotations

import bisect
import glob
import io
import itertools
import stat
import tempfile
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import pyarrow as pa

from hicachectl.backends.disk.bounded import MAX_LINE_BYTES
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

STDIN = "-"
_KINDS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_UTF8 = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MAX_DOCUMENT_BYTES = 4 << 30
_BUFFER_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
_CHECK = "check the path"

Identity = tuple[int, int]  # device and inode


class Line(NamedTuple):
    """A line that is not blank, or a whole file.

    where: file and line, for messages.
    place: number by which `Inputs.lines_from` finds the line again.
    data: bytes of the line, with its line end.
    file: path of the file.
    """

    where: str
    place: int
    data: bytes
    file: str


class Inputs:
    """Files that are read as one sequence of lines. This is a context manager.

    keeps: whether to copy compressed files and pipes to a file without a name, because their lines
        could not be found again otherwise.
    """

    def __init__(self, names: Sequence[str], *, keeps: bool = False) -> None:
        """Find the files. Raises UsageError for a directory or pattern that has no file."""
        self.source = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        found = [one for name in names for one in _files_of(name)]
        self._paths = [path for path, _ in found]
        self._identities = [identity for _, identity in found]
        self._keeps = keeps
        self._ends: list[int] = []  # place after the last line of each file
        self._kept: dict[int, BinaryIO] = {}
        self._begun: dict[int, tuple[io.BufferedReader, bool]] = {}
        self._files = ExitStack()

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Copies are lost."""
        self._files.close()
        for file, _ in self._begun.values():
            file.close()

    def head(self) -> bytes:
        """Return the first bytes of the first file that is not empty. `lines` yields them again.

        Raises UsageError if a file cannot be read.
        """
        for number in range(len(self._paths)):
            with self._reading(number):
                file, is_plain = self._opened(number)
                self._begun[number] = file, is_plain
                if begin := file.peek(_HEAD_BYTES)[:_HEAD_BYTES]:
                    return begin.removeprefix(_UTF8)
        return b""

    def lines(self) -> Iterator[Line]:
        """Yield every line. Raises UsageError for unreadable files, FormatError for long lines."""
        self._ends = []
        for number, path in enumerate(self._paths):
            begin = place = self._ends[-1] if self._ends else 0
            for count, data in enumerate(self._data_of(number, MAX_LINE_BYTES), 1):
                at, place = place, place + len(data)
                text = data.removeprefix(_UTF8) if at == begin else data
                if not text.isspace():
                    yield Line(f"{path}: line {count}", at, text, str(path))
            self._ends.append(place)

    def documents(self) -> Iterator[Line]:
        """Yield every file as one line. Raises as `lines` does."""
        self._ends = []
        for number, path in enumerate(self._paths):
            begin, text = self._ends[-1] if self._ends else 0, io.BytesIO()
            for data in self._data_of(number, _MAX_DOCUMENT_BYTES):
                text.write(data)
                if text.tell() > _MAX_DOCUMENT_BYTES:
                    raise FormatError(f"{path}: larger than {_MAX_DOCUMENT_BYTES} bytes; split it")
            if text.tell():
                yield Line(str(path), begin, text.getvalue().removeprefix(_UTF8), str(path))
            self._ends.append(begin + text.tell())

    def lines_from(self, place: int) -> Iterator[Line]:
        """Yield the line at a place, which may lie inside the line, and the lines after it.

        Call this after `lines` has ended. Raises UsageError if the file cannot be read.
        """
        number = bisect.bisect_right(self._ends, place)
        begin, path = self._ends[number - 1] if number else 0, self._paths[number]
        copy = self._kept.get(number)
        try:
            with path.open("rb") if copy is None else nullcontext(copy) as file:
                file.seek(_line_begin(file, place - begin))
                place = begin + file.tell()
                while data := file.readline(MAX_LINE_BYTES):
                    text = data.removeprefix(_UTF8) if place == begin else data
                    yield Line(f"{path}: byte {place - begin}", place, text, str(path))
                    place += len(data)
        except OSError as error:
            raise UsageError(
                failed(path, "read the requests again", error, "check the file")
            ) from error

    def _data_of(self, number: int, limit: int) -> Iterator[bytes]:
        """Yield the bytes of each line of a file, from its copy if there is one."""
        path = self._paths[number]
        if (copy := self._kept.get(number)) is not None:
            copy.seek(0)
            yield from copy
            return
        with self._reading(number):
            begun = self._begun.pop(number) if number in self._begun else self._opened(number)
            file, is_plain = begun
            if self._keeps and not is_plain:
                copy = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
                self._kept[number] = copy
            with closing(file):
                count = 0
                while data := file.readline(limit + 1):
                    count += 1
                    if len(data) > limit:
                        raise FormatError(
                            f"{path}: line {count}: longer than {limit} bytes; write one JSON "
                            "value per line"
                        )
                    if copy is not None:
                        copy.write(data)
                    yield data

    def _opened(self, number: int) -> tuple[io.BufferedReader, bool]:
        """Return a stream of a file, and whether its lines can be found again in the file."""
        path = self._paths[number]
        is_stdin = str(path) == STDIN
        if is_stdin:
            raw = _Filling(0, closefd=False)
        else:
            identity = self._identities[number]
            raw = _Filling(path if identity is None else _now_at(path, identity))
        stream = cast("io.BufferedReader", io.BufferedReader(raw, _BUFFER_BYTES))
        begin = stream.peek(4)
        if begin.startswith(_UTF16):
            raise FormatError(
                f"{path}: has a byte order mark of UTF-16; write it in UTF-8, such as by iconv -f "
                "UTF-16 -t UTF-8"
            )
        for magic, kind in _KINDS.items():
            if begin.startswith(magic):
                unpacked: Any = pa.CompressedInputStream(pa.PythonFile(stream, "r"), kind)
                return io.BufferedReader(unpacked, _BUFFER_BYTES), False
        return stream, stream.seekable() and not is_stdin

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a zero byte in the path raises ValueError
            is_damaged = (
                getattr(error, "errno", 0) is None
            )  # the decompressor's errors have no errno
            remedy = "it is damaged or not complete; copy it again" if is_damaged else _CHECK
            raise UsageError(failed(self._paths[number], "read", error, remedy)) from error


class _Filling(io.FileIO):
    """A file whose reads fill the buffer, although the system may read single bytes of a pipe."""

    def readinto(self, buffer: Any) -> int:
        """Read until the buffer is full or the file ends. Return the number of bytes."""
        view, count = memoryview(buffer).cast("B"), 0
        while count < len(view) and (read := super().readinto(view[count:])):
            count += read
        return count


def _line_begin(file: BinaryIO, place: int) -> int:
    """Return the offset of the start of the line that contains the byte at `place`."""
    while place:
        begin = max(place - _HEAD_BYTES, 0)
        file.seek(begin)
        if (found := file.read(place - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        place = begin
    return 0


def _files_of(name: str) -> list[tuple[Path, Identity | None]]:
    """Return the files of an input. The file that changed last comes last.

    Files of a directory or pattern come with their identity. If a file has several names there, it
    comes once. Raises UsageError.
    """
    if not name:
        raise UsageError("the name of a request file is empty; give a file")
    path = Path(name)
    try:
        if name != STDIN and path.is_dir():
            names = [one for one in path.iterdir() if not one.name.startswith(".")]
        elif glob.has_magic(name) and not path.exists():
            names = [Path(one) for one in glob.glob(name)]  # noqa: PTH207
        else:
            return [(path, None)]
        found = []
        for one in names:
            with suppress(FileNotFoundError):  # a dangling link, or a file that was rotated
                if stat.S_ISREG((status := one.stat()).st_mode):
                    found.append((status.st_mtime_ns, one.is_symlink(), one.name, one, status))
    except OSError as error:
        raise UsageError(failed(name, "read", error, _CHECK)) from error
    if not found:
        raise UsageError(f"{name}: has no file; {_CHECK}")
    distinct: dict[Identity, Path] = {}
    for *_, one, status in sorted(found, key=lambda entry: entry[:3]):
        distinct.setdefault(_identity_of(status), one)
    return [(one, identity) for identity, one in distinct.items()]


def _identity_of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _now_at(path: Path, identity: Identity) -> Path:
    """Return the present path of a file, which its server may have rotated."""
    for one in itertools.chain([path], path.parent.iterdir()):
        with suppress(FileNotFoundError):
            if _identity_of(one.stat()) == identity:
                return one
    raise UsageError(f"{path}: was rotated while other files were read; run again")
