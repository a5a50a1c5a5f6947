"""Creation of a 3FS store before its cluster starts: data files and server tables.

SGLang's clients do the same at their start. Existing tables stay unchanged: the server ignores a
second initialization, and later clients use the table.
Source: sglang srt/mem_cache/storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS.__init__,
register_mem_host_pool_v2; hf3fs_client.py :: Hf3fsMockClient.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.disk.durable import sync_name
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from hicachectl.backends.hf3fs.keys import TableName
    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.hf3fs.settings import Hf3fsSettings

_MODE = 0o666  # less the umask, as in SGLang


class TableMaker:
    """Maker of the tables that a server lacks; safe to use from several threads."""

    def __init__(self, server: MetadataClient, settings: Hf3fsSettings) -> None:
        self._server = server
        self._settings = settings
        self._lock = threading.Lock()
        self.permissions = Permissions()  # of the copied objects; new files are no more readable

    def ensure(self, table: TableName, nbytes: int) -> None:
        """Create a table with pages of `nbytes` bytes, and its file, unless the server has it.

        Raises UsageError if the file size is unknown, is smaller than a page, or contradicts the
        existing file; StoreUnavailable.
        """
        with self._lock:
            if self._server.has_table(*table):
                return
            path, size = self._settings.data_file(*table), self.file_size(table)
            if size is None:
                raise UsageError(
                    f"{path}: the file is missing, and its size is not known; give file_size= in "
                    "the URL, as in SGLang's config"
                )
            if size < nbytes:
                raise UsageError(
                    f"{path}: {size} bytes are too few for a page of {nbytes} bytes; check the "
                    "profile and file_size="
                )
            _make_file(path, size, self.permissions)
            self._server.initialize(*table, size // nbytes)

    def file_size(self, table: TableName) -> int | None:
        """Return the bytes of a table's file, existing or to be made; None if unknown.

        Raises UsageError if an existing file does not have the stated size.
        """
        path, stated = self._settings.data_file(*table), self._settings.file_size
        try:
            found = Path(path).stat().st_size
        except OSError:
            found = 0
        if found and stated and found != stated:
            raise UsageError(
                f"{path}: has {found} bytes instead of file_size={stated}, and the metadata server "
                "has no table for this file; check that the prefix is this deployment's, and that "
                "the server was started with its snapshot"
            )
        return found or stated


def _make_file(path: str, size: int, permissions: Permissions) -> None:
    """Create a sparse data file; extend an existing empty one."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, _MODE & permissions.for_group(os.getegid()))
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise UsageError(f"{path}: not a regular file; check the prefix")
            if not facts.st_size:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
                sync_name(path)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreUnavailable(
            failed(path, "create the data file", error, "check the mount and the directory's mode")
        ) from error
