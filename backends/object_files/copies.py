"""Copy object files by the system, and give the copies their trailers."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.backends.base import Result, Rows, Status, keys_of, values_of
from hicachectl.backends.disk.io import chunks, copy_bytes, write_all
from hicachectl.backends.disk.names import check_key
from hicachectl.backends.disk.permissions import Permissions, give_file
from hicachectl.backends.object_files.reading import open_file
from hicachectl.backends.object_files.trailers import Verdict, split_key, trailer_in
from hicachectl.backends.object_files.writing import Ownership
from hicachectl.formats.errors import UntrustedError
from hicachectl.formats.trailer import TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.backends.object_files.markers import Marker
    from hicachectl.backends.object_files.store_files import StoreFiles
    from hicachectl.backends.object_files.writing import FileWriter, Temporary
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.trailer import Trailer


class CopiedObject(NamedTuple):
    """One object to copy.

    key: key of the object in its store.
    new_key: key of the copy.
    nbytes: bytes of the object, without a trailer.
    source: descriptor of the object's file.
    """

    key: bytes
    new_key: bytes
    nbytes: int
    source: int

    def value(self) -> Iterator[memoryview]:
        """Return `chunks` of the object."""
        return chunks(self.source, self.nbytes)

    def copy_to(self, copy: int, tail: bytes) -> None:
        """Copy the object to a new file, and append its trailer. Raises OSError, EOFError.

        copy: descriptor of the new file.
        tail: the trailer, or no bytes.
        """
        copy_bytes(self.source, self.nbytes, copy)
        if tail:
            write_all(copy, (tail,), self.nbytes)

    def is_still(self, before: os.stat_result) -> bool:
        """Return whether no writer has changed the file since a stat."""
        now = os.fstat(self.source)
        return (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def excess_of(st: os.stat_result, nbytes: int) -> int | Verdict:
    """Return the number of bytes after the object in a file, or a verdict on a wrong size.

    nbytes: bytes of the object.
    Raises OSError for a file that is not regular.
    """
    if not stat.S_ISREG(st.st_mode):
        raise OSError(errno.ENXIO, "")
    excess = st.st_size - nbytes
    if excess in (0, TRAILER_BYTES):
        return excess
    return Verdict(Status.SHORT if excess < 0 else Status.OVERSIZED)


def discarded(file: Temporary) -> Verdict:
    """Remove the copy of a file that a writer changed meanwhile. Return the verdict CHANGED."""
    os.unlink(file.name, dir_fd=file.directory)
    return Verdict(Status.CHANGED)


class FileCopier:
    """Copies objects into one store.

    origin: files of the store that objects are copied from.
    preserve: whether copies keep mode, owner and every trailer.
    """

    def __init__(self, origin: StoreFiles, writer: FileWriter, *, preserve: bool) -> None:
        self._origin = origin
        self._writer = writer
        self._preserve = preserve
        self._within = Permissions.within(os.fstat(origin.objects.descriptor))
        self._markers = {
            (
                marker.suffix.encode(errors="surrogatepass"),
                marker.nbytes,
                marker.identity.hash(),
            ): marker
            for marker in origin.sizes.current()
        }

    def copy(self, origins: Rows, rows: Rows, sizes: IntArray, *, if_absent: bool) -> Result:
        """Copy objects as `SystemCopy.copy_from` does."""
        files, keys, times = keys_of(origins), keys_of(rows), values_of(rows, "mtime_ns")
        nbytes = sizes.tolist()

        def stage(index: int, errors: dict[int, str]) -> Temporary | Status:
            def make(source: int) -> Temporary | Verdict:
                item = CopiedObject(files[index], keys[index], nbytes[index], source)
                return self._copy_temporary(item, times[index])

            return self.staged(index, files[index], make, errors)

        markers = self._new_markers(files, keys, nbytes)
        naming = self._writer.naming(keys, if_absent=if_absent)
        return self._writer.publish(keys, stage, markers, naming)

    def staged(
        self,
        index: int,
        key: bytes,
        make: Callable[[int], Temporary | Verdict],
        errors: dict[int, str],
    ) -> Temporary | Status:
        """Open an object's file, and copy it. Return the copy, or the row's status.

        index: row of the object.
        make: takes the open file. It returns a copy, or a verdict if it makes no copy.
        """
        try:
            check_key(key)
            directory, name = self._origin.objects.place(key)
            source = open_file(name, directory)
        except (OSError, UntrustedError) as error:
            return self._origin.unread(index, key, error, errors)
        try:
            made = make(source)
        except EOFError:
            made = Verdict(Status.SHORT)
        finally:
            os.close(source)
        if not isinstance(made, Verdict):
            return made
        if made.why:
            errors[index] = made.why
        return made.status

    def _new_markers(self, files: list[bytes], keys: list[bytes], nbytes: list[int]) -> set[Marker]:
        """Return the markers of all trailers that the copies can have."""
        if self._preserve:
            return set()
        if self._writer.trailers is not None:
            return self._writer.trailers.markers(keys, nbytes)
        if not self._markers:
            return set()
        suffixes = {parts[1] for key in files if (parts := split_key(key)) is not None}
        sizes = set(nbytes)
        return {
            marker
            for (suffix, size, _), marker in self._markers.items()
            if suffix in suffixes and size in sizes
        }

    def _copy_temporary(self, item: CopiedObject, mtime_ns: int | None) -> Temporary | Verdict:
        """Copy an open file to a temporary file.

        The verdict is CHANGED if a writer changes the file meanwhile.
        """
        before = os.fstat(item.source)
        excess = excess_of(before, item.nbytes)
        if isinstance(excess, Verdict):
            return excess
        new = Ownership(0o600, None)
        if not self._preserve:
            mode, owner = self._writer.ownership(
                self._within.intersection(Permissions.of_file(before))
            )
            new = Ownership(mode & before.st_mode | 0o600, owner)
        tail = self.tail(item, excess)
        if isinstance(tail, Verdict):
            return tail

        def fill(copy: int) -> None:
            if self._preserve:
                give_file(copy, before.st_uid, before.st_gid, mode=before.st_mode)
            item.copy_to(copy, tail)

        nbytes = item.nbytes + len(tail)
        file = self._writer.write_temporary(item.new_key, fill, mtime_ns, new, nbytes=nbytes)
        return file if item.is_still(before) else discarded(file)

    # trailers

    def tail(self, item: CopiedObject, excess: int) -> bytes | Verdict:
        """Return the trailer of the copy, b"" if it gets none, or a verdict if no copy is allowed.

        excess: number of bytes after the object in the source.
        """
        if excess:
            old = os.pread(item.source, excess, item.nbytes)
            trailer = trailer_in(old)
            if isinstance(trailer, Verdict):
                kept = self._preserve and trailer.status == Status.DAMAGED
                return old if kept else trailer
            if self._preserve:
                return old
            verdict = self._origin.checks.compare(item.key, item.nbytes, trailer)
            if verdict.status != Status.OK:
                return verdict
            if self._keeps(item, trailer):
                return old
            # The copy does not get this trailer. Without it, a damaged object would look whole.
            verdict = self._origin.checks.check(item.key, trailer, item.value(), item.nbytes)
            if verdict.status != Status.OK:
                return verdict
        trailers = self._writer.trailers
        made = trailers.make(item.new_key, item.value(), item.nbytes) if trailers else None
        return made or b""

    def _keeps(self, item: CopiedObject, trailer: Trailer) -> bool:
        """Return whether the copy gets its source's trailer."""
        if not self._writer.files.checks.belongs(item.new_key, item.nbytes, trailer):
            return False
        if self._writer.trailers is not None:
            return self._writer.trailers.wants(item.new_key, trailer)
        parts = split_key(item.new_key)
        if parts is None or item.key != item.new_key:
            return False
        return (parts[1], item.nbytes, trailer.identity) in self._markers
