"""Copies between file stores by the system, with the trailers that the copies shall have."""

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
    from collections.abc import Iterator

    from hicachectl.backends.object_files.faults import StoreFiles
    from hicachectl.backends.object_files.markers import Marker
    from hicachectl.backends.object_files.writing import FileWriter, Temporary
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.trailer import Trailer

_Tail = bytes | Verdict  # what follows a copy's bytes, or why there is no copy


class _Object(NamedTuple):
    """One object to copy. nbytes: without a trailer. source: its open file."""

    key: bytes
    new_key: bytes
    nbytes: int
    source: int

    def bytes(self) -> Iterator[memoryview]:
        """Return `chunks` of the object."""
        return chunks(self.source, self.nbytes)


class FileCopier:
    """Copies objects into one store.

    origin: files of the store that objects are copied from. preserve: keep mode, owner and every
    trailer.
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
            try:
                check_key(files[index])
                directory, name = self._origin.objects.place(files[index])
                source = open_file(name, directory)
            except (OSError, UntrustedError) as error:
                return self._origin.status(index, error, errors)
            try:
                one = _Object(files[index], keys[index], nbytes[index], source)
                made = self._copy_temporary(one, times[index])
            finally:
                os.close(source)
            if not isinstance(made, Verdict):
                return made
            if made.why:
                errors[index] = made.why
            return made.status

        return self._writer.publish(
            keys, stage, self._new_markers(files, keys, nbytes), if_absent=if_absent
        )

    def _new_markers(self, files: list[bytes], keys: list[bytes], nbytes: list[int]) -> set[Marker]:
        """Return the markers of all trailers that the copies may have."""
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

    def _copy_temporary(self, one: _Object, mtime_ns: int | None) -> Temporary | Verdict:
        """Copy an open file, which must stay unchanged, to a temporary file."""
        before = os.fstat(one.source)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(errno.ENXIO, "")
        excess = before.st_size - one.nbytes
        if excess not in (0, TRAILER_BYTES):
            return Verdict(Status.SHORT if excess < 0 else Status.OVERSIZED)
        new = Ownership(0o600, None)
        if not self._preserve:
            mode, owner = self._writer.ownership(self._within.both(Permissions.of_file(before)))
            new = Ownership(mode & before.st_mode | 0o600, owner)
        try:
            tail = self._tail(one, excess)
            if isinstance(tail, Verdict):
                return tail

            def fill(copy: int) -> None:
                if self._preserve:
                    give_file(copy, before.st_uid, before.st_gid, mode=before.st_mode)
                copy_bytes(one.source, one.nbytes, copy)
                if tail:
                    write_all(copy, (tail,), one.nbytes)

            nbytes = one.nbytes + len(tail or b"")
            file = self._writer.write_temporary(one.new_key, fill, mtime_ns, new, nbytes=nbytes)
        except EOFError:
            return Verdict(Status.SHORT)
        after = os.fstat(one.source)
        if (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
            return file
        os.unlink(file.name, dir_fd=file.directory)
        return Verdict(Status.CHANGED)

    # trailers

    def _tail(self, one: _Object, excess: int) -> _Tail:
        """Return the trailer of the copy, or no bytes.

        excess: bytes of the source after the object's.
        """
        if excess:
            old = os.pread(one.source, excess, one.nbytes)
            trailer = trailer_in(old)
            if isinstance(trailer, Verdict):
                kept = self._preserve and trailer.status == Status.DAMAGED
                return old if kept else trailer
            if self._preserve:
                return old
            verdict = self._origin.checks.compare(one.key, one.nbytes, trailer)
            if verdict.status != Status.OK:
                return verdict
            if self._keeps(one, trailer):
                return old
            # Without its trailer, a damaged object would look like a whole one.
            verdict = self._origin.checks.check(one.key, trailer, one.bytes(), one.nbytes)
            if verdict.status != Status.OK:
                return verdict
        trailers = self._writer.trailers
        made = trailers.make(one.new_key, one.bytes(), one.nbytes) if trailers else None
        return made or b""

    def _keeps(self, one: _Object, trailer: Trailer) -> bool:
        """Return whether the copy gets its source's trailer."""
        if not self._writer.files.checks.belongs(one.new_key, one.nbytes, trailer):
            return False
        if self._writer.trailers is not None:
            return self._writer.trailers.wants(one.new_key, trailer)
        parts = split_key(one.new_key)
        if parts is None or one.key != one.new_key:
            return False
        return (parts[1], one.nbytes, trailer.identity) in self._markers
