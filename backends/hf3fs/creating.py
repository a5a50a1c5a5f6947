"""Create a 3FS store: data files, server tables, and the file that names its deployment.

SGLang's clients make files and tables at their start, too. Existing tables stay unchanged, because
the server ignores a second initialization. Clients that start later use the existing table.

Keys name neither model nor weights, so servers of another deployment would read a store's pages as
their own. PREFIX.hicachectl-deployment, which SGLang ignores, names the deployment.
Source: sglang srt/mem_cache/storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS.__init__,
register_mem_host_pool_v2; hf3fs_client.py :: Hf3fsMockClient.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.disk.durable import new_file, sync_name
from hicachectl.backends.disk.io import OPEN_FILE, closing_descriptor, errors_as, write_all
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.formats.errors import StoreUnavailable, UsageError

if TYPE_CHECKING:
    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.hf3fs.settings import Hf3fsSettings
    from hicachectl.backends.page_tables import TableName

_CHECK_DIRECTORY = "check the mount and the directory's mode"
_MODE = 0o666  # less the umask, as in SGLang
_TAG = re.compile(rb"[0-9a-f]{32}")
_LONGEST_TAG = 64


class TableMaker:
    """Creates the tables that a server lacks. Several threads may use it at once."""

    def __init__(self, server: MetadataClient, settings: Hf3fsSettings) -> None:
        self._server = server
        self._settings = settings
        self._lock = threading.Lock()
        # Limit for new files, which must not be more readable than the objects copied into them.
        self.permissions = Permissions()

    def ensure(self, table: TableName, nbytes: int) -> None:
        """Create a table with pages of `nbytes` bytes, and its file, unless the server has it.

        Raises StoreUnavailable. Raises UsageError if the file size is unknown, is smaller than a
        page, or contradicts the existing file.
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
    """Create a sparse data file, or extend an existing file that is empty."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    mode = _MODE & permissions.for_group(os.getegid())
    with (
        errors_as(StoreUnavailable, path, "create the data file", _CHECK_DIRECTORY),
        closing_descriptor(os.open(path, flags, mode)) as descriptor,
    ):
        st = os.fstat(descriptor)
        if not stat.S_ISREG(st.st_mode):
            raise UsageError(f"{path}: not a regular file; check the prefix")
        if not st.st_size:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
            sync_name(path)


# the deployment


def claim_path(prefix: str) -> str:
    """Return the path of the file that names the deployment."""
    return f"{prefix}.hicachectl-deployment"


def claimed_by(prefix: str, tag: str, *, writes: bool) -> str | None:
    """Return the tag of the deployment that has claimed the data files; None without a claim.

    tag: tag of the caller's deployment.
    writes: whether to claim unclaimed data files for this deployment.
    Raises StoreUnavailable.
    """
    path = claim_path(prefix)
    action = "tell which deployment's pages these are"
    with errors_as(StoreUnavailable, path, action, _CHECK_DIRECTORY):
        if writes:
            _claim(path, tag)
        return _read(path)


def _claim(path: str, tag: str) -> None:
    """Create the file together with its content, unless it exists."""
    if os.path.lexists(path):
        return
    with suppress(FileExistsError), new_file(path, _MODE, replaces=False) as descriptor:
        write_all(descriptor, (tag.encode(),))


def _read(path: str) -> str | None:
    try:
        descriptor = os.open(path, OPEN_FILE)
    except FileNotFoundError:
        return None
    with closing_descriptor(descriptor):
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        text = os.read(descriptor, _LONGEST_TAG) if regular else b""
    if not _TAG.fullmatch(text):
        raise StoreUnavailable(f"{path}: does not hold the tag of a deployment; remove it")
    return text.decode()
