"""Adoption gives the objects of a file store trailers in place.

Each file is replaced by a copy that ends with a trailer. Servers may read, write, evict and clear
the store meanwhile. That is safe for these reasons:

- Readers. The name of an object always names a whole file, the old one or the new one
  (`Temporaries.replace_unchanged`). HiCacheFile opens a file and reads the bytes that it expects
  from the beginning (hicache_storage.py :: HiCacheFile.get), so it reads old and new file alike.
  The plug-in accepts the new file, and treats the old file as its setting `unstamped` says. An open
  file stays readable after its name is gone.
- Listings. The markers are durable before the first file is replaced. With a marker, a listing
  counts a file that is 128 bytes longer as an object with a trailer, and a file of the object's own
  size as an object without a trailer. Unfinished copies have names
  that SGLang ignores and that `rm --temporaries` removes. ext4 lists each name once. tmpfs may miss
  or repeat names that any process renames during a listing (tried with Linux 6.18).
- Writers. HiCacheFile never writes over an object. The plug-in replaces an object that it refuses,
  by a rename. Adoption exchanges the names of the copy and of the object's file. The replaced file
  then has the temporary name, and is compared with the file that was copied. If it is another file,
  which a writer has written since, it gets the object's name back, and the status is EXISTS.
- Removals. HiCacheFile's evictor and `clear` unlink names. The plug-in's evictor renames a file to
  a temporary name, and compares it again. An exchange fails if the name is missing, so a removed
  object never comes back. HiCacheFile counts a file's size when it writes or first sees the file.
  So it learns of the 128 bytes at its next start.
- The order of eviction. The new file has the mtime and the atime of the old file, also if the old
  file was used during the copy.
- The plug-in's `clear`. It sets an epoch, and a file is stale if its ctime is not later than the
  epoch. The new file has a new ctime. So the epoch is read again after the exchange, and an object
  whose old file is stale is removed.
- Rights. The new file has the owner, group and mode of the old file. If it cannot get them, the old
  file stays, because a server could no longer read, mark or evict the new file.
- Hard links. The old bytes of a file with a second name would stay on the disk, and the store
  would grow. Such files stay as they are.
- Room. Only one batch of copies is on the disk beside the old files. Each old file is removed right
  after the exchange.
- Kills and power failures. The copies are durable before the exchange. Before and after the
  exchange, the object's name names a whole file. The other file has a temporary name. The next run
  of the same request removes the temporary file, and skips objects that have their trailers.
- A second adoption at the same time counts as a writer, so the first copy stays.
- File systems without an exchange of names, such as NFS. There, the file is compared and then
  replaced by a rename. If a file is removed between the comparison and the rename, it comes back.
  If a file is replaced between them, it is replaced again, by bytes of the same page.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from hicachectl.backends.base import Result, Rows, Status, keys_of
from hicachectl.backends.disk.permissions import give_file
from hicachectl.backends.object_files.copies import (
    CopiedObject,
    FileCopier,
    discarded,
    excess_of,
)
from hicachectl.backends.object_files.epochs import EpochReader
from hicachectl.backends.object_files.trailers import Verdict, split_key
from hicachectl.backends.object_files.writing import Ownership

if TYPE_CHECKING:
    from hicachectl.backends.object_files.store_files import StoreFiles
    from hicachectl.backends.object_files.trailers import NewTrailers
    from hicachectl.backends.object_files.writing import FileWriter, Temporary
    from hicachectl.formats.arrays import IntArray

_OTHER_RIGHTS = "its owner, group or mode cannot be kept; run as the owner of the files, or as root"
_LINKED = (
    "the file has another hard link, so its old bytes would stay on the disk; remove the other "
    "name, or migrate to another directory"
)


class FileAdopter(FileCopier):
    """Replaces the files of one store by copies with trailers."""

    def __init__(self, files: StoreFiles, writer: FileWriter, trailers: NewTrailers) -> None:
        super().__init__(files, writer, preserve=False)
        self._trailers = trailers
        self._epochs: dict[bytes, EpochReader] = {}

    def adopt(self, rows: Rows, sizes: IntArray) -> Result:
        """Replace objects as `Trailed.adopt` does."""
        keys, nbytes = keys_of(rows), sizes.tolist()
        seen: dict[int, os.stat_result] = {}

        def stage(index: int, errors: dict[int, str]) -> Temporary | Status:
            def make(source: int) -> Temporary | Verdict:
                seen[index] = os.fstat(source)
                item = CopiedObject(keys[index], keys[index], nbytes[index], source)
                return self._copy_with_trailer(item, seen[index])

            return self.staged(index, keys[index], make, errors)

        def name(index: int, file: Temporary) -> Status:
            return self._replace(keys[index], file, seen[index])

        markers = self._trailers.markers(keys, nbytes)
        return self._writer.publish(keys, stage, markers, name)

    def _copy_with_trailer(self, item: CopiedObject, before: os.stat_result) -> Temporary | Verdict:
        """Copy an open file to a temporary file, with its rights and times.

        The verdict is OK for an object that needs no new trailer.
        before: stat of the open file.
        """
        excess = excess_of(before, item.nbytes)
        if isinstance(excess, Verdict):
            return excess
        tail = self.tail(item, excess)
        if isinstance(tail, Verdict):
            return tail
        if tail == os.pread(item.source, excess, item.nbytes):
            return Verdict(Status.OK)
        if before.st_nlink > 1:
            return Verdict(Status.ERROR, _LINKED)

        def fill(copy: int) -> None:
            give_file(copy, before.st_uid, before.st_gid, mode=before.st_mode)
            if _rights(os.fstat(copy)) != _rights(before):
                raise OSError(errno.EPERM, _OTHER_RIGHTS)
            item.copy_to(copy, tail)
            os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))

        new, nbytes = Ownership(0o600, None), item.nbytes + len(tail)
        file = self._writer.write_temporary(item.key, fill, None, new, nbytes=nbytes)
        return file if item.is_still(before) else discarded(file)

    def _replace(self, key: bytes, file: Temporary, seen: os.stat_result) -> Status:
        """Put a copy in place of the object's file. Raises FileNotFoundError if the copy is gone.

        seen: stat of the object's file when it was copied.
        """
        temporaries = self._writer.temporaries
        try:
            replaced = temporaries.replace_unchanged(file.name, key, seen)
        except FileNotFoundError:
            os.stat(file.name, dir_fd=file.directory, follow_symlinks=False)
            return Status.GONE
        if not replaced:
            return Status.EXISTS
        # Compare the old file's ctime, because the copy is newer than the epoch. Use the epoch that
        # `look` returns, because another thread may store an earlier epoch in the reader.
        if seen.st_ctime_ns <= self._epoch(key).look():
            with suppress(FileNotFoundError):
                here, name = self._writer.files.objects.place(key)
                now = os.stat(name, dir_fd=here, follow_symlinks=False)
                temporaries.remove_unchanged(key, now, even_if_read=True)
            return Status.GONE
        return Status.OK

    def _epoch(self, key: bytes) -> EpochReader:
        parts = split_key(key)
        suffix = b"" if parts is None else parts[1]
        if suffix not in self._epochs:
            self._epochs[suffix] = EpochReader(self._writer.files.objects, suffix)
        return self._epochs[suffix]


def _rights(st: os.stat_result) -> tuple[int, int, int]:
    return st.st_uid, st.st_gid, stat.S_IMODE(st.st_mode) & 0o777
