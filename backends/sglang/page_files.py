"""The files of one pool's pages: HiCacheFile's names and bytes, then a trailer of ours.

Nothing here knows host memory or calls; everything raises OSError.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.formats.errors import FormatError
from hicachectl.formats.trailer import (
    CHECKSUM_AT,
    DIGEST_AT,
    PAGE_AT,
    TRAILER_BYTES,
    Trailer,
    digest_function,
    dump_trailer,
    parse_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.backends.file.folders import ObjectDirectory

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666
_PAGE = re.compile("[0-9a-f]{64}")
_MOST_PIECES = 1024  # IOV_MAX on Linux
_TOKEN_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the files of a pool look like.

    suffix: of names, after the page hash. nbytes: of a page, without trailer. identity, name: as in
    trailers. digest: kind of new trailers. bare: files without a trailer are pages too.
    """

    suffix: bytes
    nbytes: int
    identity: bytes
    name: bytes
    digest: str = "xxh3"
    bare: bool = False


class Found(NamedTuple):
    """A file as it was examined.

    problem: why it is no page of ours: "damaged", "foreign", "unstamped", "unreadable".
    """

    problem: str
    inode: int


_OURS = Found("", 0)


class PageFiles:
    """The files of one pool in a directory."""

    def __init__(self, directory: ObjectDirectory, form: Form) -> None:
        self.form = form
        self._directory = directory
        self._hash = digest_function(form.digest)
        # What trailers begin and end with, to compare without parsing.
        sample = Trailer(form.digest, bytes(32), form.nbytes, bytes(32), form.identity, form.name)
        self._head = dump_trailer(sample)[:CHECKSUM_AT]
        self._head_checksum = zlib.crc32(self._head + bytes(4))
        self._tail = form.identity + form.name
        self._token = os.urandom(_TOKEN_BYTES).hex().encode()
        self._numbers = count()

    def examine(self, page: str) -> Found | None:
        """Judge a page's file by its length and trailer, not by its digest.

        A problem "" means a page of ours. None if the file is missing.
        """
        descriptor = self._open(page)
        if descriptor is None:
            return None
        try:
            # One byte more than a trailer: a longer file shows.
            data = os.pread(descriptor, TRAILER_BYTES + 1, self.form.nbytes)
            if self._is_own(page, data):
                return _OURS
            return self._judged(page, descriptor, data)
        finally:
            os.close(descriptor)

    def read(self, page: str, memory: memoryview) -> Found | None:
        """Read a page, and check all that is stored of it.

        memory: more than `nbytes` + TRAILER_BYTES; with a problem "", its first `nbytes` bytes are
        the page's. None if the file is missing.
        """
        nbytes = self.form.nbytes
        descriptor = self._open(page)
        if descriptor is None:
            return None
        try:
            # One byte more than a trailer: a longer file shows.
            whole = nbytes + TRAILER_BYTES
            read = _fill(descriptor, memory[: whole + 1], whole)
            data = bytes(memory[nbytes:read])
            if self._is_own(page, data):
                digest = self._hash((memory[:nbytes],))
                if data[DIGEST_AT:PAGE_AT] == digest:
                    return _OURS
                return Found("damaged", os.fstat(descriptor).st_ino)
            found = self._judged(page, descriptor, data)
            if found.problem or not data:
                return found
        finally:
            os.close(descriptor)
        trailer = parse_trailer(data)  # of another digest kind than new ones
        assert trailer is not None
        digest = digest_function(trailer.digest_kind)((memory[:nbytes],))
        return found if digest == trailer.digest else Found("damaged", found.inode)

    def write(self, page: str, views: Sequence[memoryview], check: Callable[[], None]) -> int:
        """Write a page's file under its name; replace an older one. Return the bytes written.

        views: the page's bytes in order. check: raises after the page's memory may have changed;
        then, and if the bytes changed while they were written, nothing gets the name. Raises
        OSError: EAGAIN if the bytes changed.
        """
        key = page.encode() + self.form.suffix
        if not _PAGE.fullmatch(page):
            raise OSError(errno.EINVAL, "not a page hash")
        digest = self._hash(views)
        form = self.form
        trailer = Trailer(
            form.digest, digest, form.nbytes, bytes.fromhex(page), form.identity, form.name
        )
        here, name = self._directory.place_for_new(key)
        temporary = self._temporary(key)
        descriptor = os.open(temporary, _CREATE_FLAGS, _MODE, dir_fd=here)
        try:
            try:
                _write_all(descriptor, [*views, memoryview(dump_trailer(trailer))])
            finally:
                os.close(descriptor)
            check()
            if self._hash(views) != digest:
                raise OSError(errno.EAGAIN, "the page changed while it was written")
            check()
            os.rename(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=here)
            raise
        return form.nbytes + TRAILER_BYTES

    def remove(self, page: str, inode: int | None = None) -> bool:
        """Remove a page's file, only if it still has the inode. Return whether it was removed."""
        try:
            key = page.encode() + self.form.suffix
            here, name = self._directory.place(key)
            temporary = self._temporary(key)
            # Away first, then look: another writer can rename a whole file to the name at any time.
            os.rename(name, temporary, src_dir_fd=here, dst_dir_fd=here)
        except FileNotFoundError:
            return False
        taken = os.stat(temporary, dir_fd=here, follow_symlinks=False)
        is_it = inode in (None, taken.st_ino)
        if not is_it:
            with suppress(FileExistsError):  # it was replaced once more
                os.link(temporary, name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
        os.unlink(temporary, dir_fd=here)
        return is_it

    def _temporary(self, key: bytes) -> bytes:
        return self._directory.temporary_name(key, self._token, next(self._numbers))

    def _open(self, page: str) -> int | None:
        """Open a page's file for reading; None if it is missing."""
        if not _PAGE.fullmatch(page):
            return None
        try:
            here, name = self._directory.place(page.encode() + self.form.suffix)
            return os.open(name, _READ_FLAGS, dir_fd=here)
        except FileNotFoundError:
            return None

    def _is_own(self, page: str, data: bytes) -> bool:
        """Return whether bytes are a trailer as this instance writes it, whatever its digest."""
        return (
            len(data) == TRAILER_BYTES
            and data[PAGE_AT:] == bytes.fromhex(page) + self._tail
            and data.startswith(self._head)
            and zlib.crc32(data[CHECKSUM_AT + 4 :], self._head_checksum)
            == int.from_bytes(data[CHECKSUM_AT : CHECKSUM_AT + 4], "little")
        )

    def _judged(self, page: str, descriptor: int, data: bytes) -> Found:
        """Judge a file that is no page of ours at first sight.

        data: what follows the bytes of a page, one byte more than a trailer at most.
        """
        form = self.form
        facts = os.fstat(descriptor)
        return Found(self._problem(form, page, facts, data), facts.st_ino)

    @staticmethod
    def _problem(form: Form, page: str, facts: os.stat_result, data: bytes) -> str:
        if not stat.S_ISREG(facts.st_mode):
            return "unreadable"
        if facts.st_size == form.nbytes:
            return "" if form.bare else "unstamped"
        try:
            trailer = parse_trailer(data)
        except FormatError:
            return "damaged"
        if trailer is None:  # another length, too
            return "damaged"
        about = (trailer.nbytes, trailer.page, trailer.name)
        if about != (form.nbytes, bytes.fromhex(page), form.name):
            return "damaged"
        return "" if trailer.identity == form.identity else "foreign"


def _fill(descriptor: int, memory: memoryview, enough: int) -> int:
    """Read from a file's start until `enough` bytes are read, or its end; return their number."""
    done = os.preadv(descriptor, (memory,), 0)
    while 0 < done < enough:
        read = os.preadv(descriptor, (memory[done:],), done)
        if not read:
            break
        done += read
    return done


def _write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    """Write buffers one after another."""
    for start in range(0, len(views), _MOST_PIECES):
        left = list(views[start : start + _MOST_PIECES])
        while left:
            written = os.writev(descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
