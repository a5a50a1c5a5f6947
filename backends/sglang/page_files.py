"""The files of one pool's pages: HiCacheFile's names and bytes, then a trailer of ours.

Nothing here knows host pools; everything raises OSError.
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

from hicachectl.backends.file.epochs import owner_of
from hicachectl.formats.errors import FormatError
from hicachectl.formats.trailer import (
    CHECKSUM_AT,
    DIGEST_AT,
    DIGEST_KINDS,
    KIND_AT,
    PAGE_AT,
    TRAILER_BYTES,
    Trailer,
    digest_function,
    dump_trailer,
    parse_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.file.folders import ObjectDirectory
    from hicachectl.backends.sglang.calls import Call
    from hicachectl.backends.sglang.capacity import Capacity

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
_BAD_FILE = {errno.EACCES, errno.EIO}  # of a file that a rename can replace
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666
_PAGE = re.compile("[0-9a-f]{64}")
_MOST_PIECES = 1024  # IOV_MAX on Linux
_PROCESS_BYTES = 4  # of the 12 in a token


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

    problem: why it is no page of ours: "damaged", "foreign", "unstamped", "unreadable", "stale";
    "" for a page of ours. facts: of the open file.
    """

    problem: str
    facts: os.stat_result


class PageFiles:
    """The files of one pool in a directory."""

    def __init__(
        self, directory: ObjectDirectory, form: Form, capacity: Capacity, *, touches: bool = True
    ) -> None:
        """touches: reads count as use, for the order of eviction."""
        self.form = form
        self._directory = directory
        self._capacity = capacity
        self._touches = touches
        self._epoch = capacity.epoch(form.suffix)
        self._hash = digest_function(form.digest)
        self._whole = form.nbytes + TRAILER_BYTES
        # What trailers begin and end with, to compare without parsing.
        sample = Trailer(form.digest, bytes(32), form.nbytes, bytes(32), form.identity, form.name)
        self._head = dump_trailer(sample)[:CHECKSUM_AT]
        self._head_checksum = zlib.crc32(self._head + bytes(4))
        self._tail = form.identity + form.name
        self._token = owner_of(form.suffix) + os.urandom(_PROCESS_BYTES).hex().encode()
        self._numbers = count()

    def look(self) -> None:
        """Learn which files a `clear` has made stale; once per call of SGLang."""
        self._epoch.look()

    def examine(self, page: str) -> Found | None:
        """Judge a page's file by its length and trailer, not by its digest; None if missing."""
        try:
            return self._examined(page)
        except OSError as error:
            if error.errno not in _BAD_FILE:
                raise
            here, name = self._directory.place(page.encode() + self.form.suffix)
            return Found("unreadable", os.stat(name, dir_fd=here, follow_symlinks=False))

    def _examined(self, page: str) -> Found | None:
        descriptor = self._open(page)
        if descriptor is None:
            return None
        try:
            facts = os.fstat(descriptor)
            data = b""
            if facts.st_size == self._whole:
                data = os.pread(descriptor, TRAILER_BYTES, self.form.nbytes)
            return Found(self._problem(page, facts, data), facts)
        finally:
            os.close(descriptor)

    def read(self, page: str, memory: memoryview) -> Found | None:
        """Read a page, and check all that is stored of it; None if missing.

        memory: at least `nbytes` + TRAILER_BYTES. Without a problem, its first `nbytes` bytes are
        the page's.
        """
        nbytes = self.form.nbytes
        descriptor = self._open(page)
        if descriptor is None:
            return None
        try:
            facts = os.fstat(descriptor)
            if facts.st_size not in (nbytes, self._whole):
                return Found(self._problem(page, facts, b""), facts)
            if not _is_filled(descriptor, memory[: facts.st_size]):
                return Found("damaged", facts)
            data = bytes(memory[nbytes : facts.st_size])
            problem = self._problem(page, facts, data)
            if not problem and data:
                kind = DIGEST_KINDS[data[KIND_AT]]
                if digest_function(kind)((memory[:nbytes],)) != data[DIGEST_AT:PAGE_AT]:
                    problem = "damaged"
            if not problem and self._touches:
                self._capacity.used(page.encode() + self.form.suffix, descriptor, facts)
            return Found(problem, facts)
        finally:
            os.close(descriptor)

    def keep(self, page: str, found: Found) -> bool:
        """Mark a page that a write found in place; False if it has to be written after all."""
        return self._capacity.keep(page.encode() + self.form.suffix, found.facts)

    def write(
        self,
        page: str,
        views: Sequence[memoryview],
        call: Call,
        replaced: Found | None = None,
    ) -> None:
        """Write a page's file under its name.

        views: the page's bytes in order, in memory that may change after the call. Then, and if the
        bytes changed while they were written, nothing gets the name. replaced: the file in its
        place. Raises Ended, and OSError: ENOSPC without room, EAGAIN if the bytes changed.
        """
        if not _PAGE.fullmatch(page):
            raise OSError(errno.EINVAL, "not a page hash")
        if not self._capacity.admit(self._whole):
            raise OSError(errno.ENOSPC, "no room within max_size and min_free_space")
        try:
            self._write(page.encode() + self.form.suffix, page, views, call)
        except BaseException:
            self._capacity.release(self._whole)
            raise
        if replaced is not None:
            self._capacity.release(replaced.facts.st_size)

    def _write(self, key: bytes, page: str, views: Sequence[memoryview], call: Call) -> None:
        form = self.form
        digest = self._digest(views, call)
        trailer = Trailer(
            form.digest, digest, form.nbytes, bytes.fromhex(page), form.identity, form.name
        )
        here, name = self._directory.place_for_new(key)
        temporary = self._temporary(key)
        descriptor = os.open(temporary, _CREATE_FLAGS, _MODE, dir_fd=here)
        try:
            try:
                call.check()
                _write_all(descriptor, [*views, memoryview(dump_trailer(trailer))])
            finally:
                os.close(descriptor)
            if self._digest(views, call) != digest:
                raise OSError(errno.EAGAIN, "the page changed while it was written")
            call.check()
            os.rename(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=here)
            raise

    def _digest(self, views: Sequence[memoryview], call: Call) -> bytes:
        """Return the digest of a page while its call lasts. Raises Ended."""
        call.hold()
        try:
            return self._hash(views)
        finally:
            call.let_go()

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

    def _problem(self, page: str, facts: os.stat_result, data: bytes) -> str:
        """Return why a file is no page of ours; "" if it is one, whatever its digest.

        data: the trailer's bytes; b"" for a file without room for one.
        """
        if self._epoch.stale(facts):
            return "stale"
        return "" if self._is_own(page, data) else self._judged(page, facts, data)

    def _is_own(self, page: str, data: bytes) -> bool:
        """Return whether bytes are a trailer as this instance writes it, whatever its digest."""
        return (
            data[PAGE_AT:] == bytes.fromhex(page) + self._tail
            and data.startswith(self._head)
            and zlib.crc32(data[CHECKSUM_AT + 4 :], self._head_checksum)
            == int.from_bytes(data[CHECKSUM_AT : CHECKSUM_AT + 4], "little")
        )

    def _judged(self, page: str, facts: os.stat_result, data: bytes) -> str:
        form = self.form
        if not stat.S_ISREG(facts.st_mode):
            return "unreadable"
        if facts.st_size == form.nbytes:
            return "" if form.bare else "unstamped"
        try:
            trailer = parse_trailer(data)
        except FormatError:
            return "damaged"
        if trailer is None:  # of another length, too
            return "damaged"
        about = (trailer.nbytes, trailer.page, trailer.name)
        if about != (form.nbytes, bytes.fromhex(page), form.name):
            return "damaged"
        return "" if trailer.identity == form.identity else "foreign"


def _is_filled(descriptor: int, memory: memoryview) -> bool:
    """Read a file's start; return whether it has as many bytes, and all of them can be read."""
    done, read = 0, 1
    try:
        while read and done < len(memory):
            read = os.preadv(descriptor, (memory[done:],), done)
            done += read
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    return done == len(memory)


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
