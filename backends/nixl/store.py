"""SGLang's NIXL store on local files: one file per object, in folders of one or more directories.

A file lies at a place that its key and the number and order of the directories determine
(`formats.keys.nixl`). Files elsewhere are no objects. Servers write into the files themselves, so
an object can be short while it is written. The directories hold no side files of ours: a server's
`clear` removes every file below them. Side files lie in the directory that the URL names for them.
Source: sglang srt/mem_cache/storage/nixl/.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import Emptied, SideFiles
from hicachectl.backends.disk.directory import Directory, Trust, existing_part
from hicachectl.backends.nixl.disks import MAX_DIRECTORIES, NixlDisks
from hicachectl.backends.object_files.faults import unavailable
from hicachectl.backends.object_files.store import ObjectFiles
from hicachectl.backends.urls import SIDE_PARAMETER, NixlParams, params_of
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.keys.nixl import BUFFERED, DIRECT
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from hicachectl.backends.urls import StoreUrl

_GRAMMARS = {"on": DIRECT, "off": BUFFERED}


class NixlStore(ObjectFiles, Emptied):
    """The directories of a `nixl:` URL."""

    objects: NixlDisks

    def __init__(self, url: StoreUrl, *, made: list[str] | None = None) -> None:
        """Open the directories of a URL. made: create missing ones, and collect their paths."""
        params = params_of(url, NixlParams)
        self._grammar = _GRAMMARS[params.direct_io]
        paths = _directories_in(url, params.directories)
        try:
            objects = NixlDisks.open(
                paths,
                high_watermark=params.high_watermark,
                complete=params.directories is not None,
                made=made,
            )
        except OSError as error:
            if made is None:
                raise unavailable(str(error.filename or url.path), error) from error
            next_step = "check the path and the permissions of its parent directories"
            raise StoreUnavailable(
                failed(url.path, "create the directories", error, next_step)
            ) from error
        super().__init__(objects, objects.path, str(url), objects.sample)
        self._made = made or []

    @property
    def grammar(self) -> str:
        """See `Store`: servers without direct I/O divide pages otherwise."""
        return self._grammar

    @classmethod
    def from_url(cls, url: StoreUrl) -> NixlStore:
        """Open the directories of a URL."""
        return _class_for(url)(url)

    @classmethod
    def create(cls, url: StoreUrl) -> NixlStore:
        """Open or create the directories, as SGLang does; `close` removes empty new ones."""
        return _class_for(url)(url, made=[])

    @property
    def directories(self) -> tuple[Path, ...]:
        """Return the directories of the URL, in order."""
        return tuple(Path(path) for path in self.path.split(","))

    def free_bytes(self) -> int | None:
        """Return the bytes that fit below the servers' high watermark."""
        return self.objects.free_bytes()


class NixlStoreWithSideFiles(NixlStore, SideFiles):
    """The directories of a `nixl:` URL that names a directory for side files."""

    def __init__(self, url: StoreUrl, *, made: list[str] | None = None) -> None:
        """See `NixlStore`. Raises UsageError if side files would lie inside the store."""
        self._side = Path(url.params[SIDE_PARAMETER])
        if not self._side.is_absolute():
            raise UsageError(f"{url}: {SIDE_PARAMETER}: give an absolute path")
        super().__init__(url, made=made)
        try:
            self.refuse_inside(self._side, f"{url}: {SIDE_PARAMETER}")
        except BaseException:
            self.close()
            raise

    def side_directory(self) -> Path:
        """Return the directory that the URL names."""
        return self._side

    def open_side_directory(self, *, writes: bool, makes: bool = False) -> Directory | None:
        """Open the directory that the URL names; None if it is missing. makes: create it."""
        trust = self.trust(writes=writes)
        return Directory.at(self._side, writes=writes, makes=makes, trust=trust)

    def trust(self, *, writes: bool) -> Trust:
        """Return the trust of the directory; new files are no more readable than the store."""
        trust = Trust(existing_part(self._side)[0].stat(), writes=writes)
        trust.permissions = trust.permissions.both(self.readable_by(listing=True))
        return trust


def _class_for(url: StoreUrl) -> type[NixlStore]:
    return NixlStoreWithSideFiles if SIDE_PARAMETER in url.params else NixlStore


def _directories_in(url: StoreUrl, stated: int | None) -> list[str]:
    """Return the directories of a URL, in order (hicache_nixl.py :: _parse_storage_dirs).

    stated: their number, if the URL has it.
    """
    paths = [path.strip() for path in url.path.split(",")]
    for path in paths:
        if not path.startswith("/"):
            raise UsageError(
                f"{url}: each directory must be an absolute path, as in nixl:///disk0,/disk1"
            )
    if len(paths) > MAX_DIRECTORIES:
        raise UsageError(f"{url}: has {len(paths)} directories; give at most {MAX_DIRECTORIES}")
    if stated not in (None, len(paths)):
        raise UsageError(
            f"{url}: directories is {stated}, but the URL has {len(paths)}; give all "
            "directories of the servers, and their number"
        )
    return paths
