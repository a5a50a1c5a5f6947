"""Making a 3FS store for a cluster that has not started: its data files, and its server's tables.

It is what SGLang's clients do when they start. A table that the server knows is never touched: to
make one again says nothing, and a client that comes later takes it as it is.
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

if TYPE_CHECKING:
    from hicachectl.backends.hf3fs.keys import TableName
    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.hf3fs.settings import Hf3fsSettings

_MODE = 0o666  # less the umask, as files are made by SGLang's users


class TableMaker:
    """Makes the tables that a server does not have; safe to use from threads."""

    def __init__(self, server: MetadataClient, settings: Hf3fsSettings) -> None:
        self._server = server
        self._settings = settings
        self._lock = threading.Lock()
        self.permissions = Permissions()  # of the sources: files are no more readable

    def ensure(self, table: TableName, nbytes: int) -> None:
        """Make a table of pages of `nbytes`, and its file, unless the server has it.

        Raises UsageError where nothing says how large the file is to be, or where one of another
        size is there; StoreUnavailable.
        """
        with self._lock:
            if self._server.has_table(*table):
                return
            path, size = self._settings.data_file(*table), self.file_size(table)
            if size is None:
                raise UsageError(
                    f"{path}: is not there, and nothing says how large to make it; give "
                    "file_size=, as in SGLang's config"
                )
            if size < nbytes:
                raise UsageError(f"{path}: {size} bytes hold no page of {nbytes}")
            _make_file(path, size, self.permissions)
            self._server.initialize(*table, size // nbytes)

    def file_size(self, table: TableName) -> int | None:
        """Say how large a table's file is, or is to be; None where nothing tells.

        Raises UsageError for a file of another size than the one stated.
        """
        path, stated = self._settings.data_file(*table), self._settings.file_size
        try:
            found = Path(path).stat().st_size
        except OSError:
            found = 0
        if found and stated and found != stated:
            raise UsageError(
                f"{path}: has {found} bytes, not file_size={stated}, and the metadata server has "
                "no table of it: it is another deployment's, or the server lost its snapshot"
            )
        return found or stated


def _make_file(path: str, size: int, permissions: Permissions) -> None:
    """Make a data file of a size, without its bytes; one that is empty is stretched."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, _MODE & permissions.for_group(os.getegid()))
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise UsageError(f"{path}: is no regular file")
            if not facts.st_size:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
                sync_name(path)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreUnavailable(f"{path}: cannot make the data file: {error.strerror}") from error
