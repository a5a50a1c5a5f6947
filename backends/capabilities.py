"""What only some stores can do: subclasses of Store, asked for with isinstance.

A store inherits each class whose promise it keeps. Ask once for an operation, not for a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from hicachectl.backends.base import Store
from hicachectl.backends.disk.permissions import Permissions

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import (
        BoolArray,
        IntArray,
        ReadResult,
        Result,
        Rows,
        Status,
        StatusArray,
    )
    from hicachectl.backends.disk.directory import Directory, Trust
    from hicachectl.formats.profile import Profile


class Announces(Store):
    """Fetches objects early when they are announced."""

    announced_bytes: ClassVar[int] = 1 << 20  # smaller objects are not worth an announcement

    @abstractmethod
    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Announce the objects that are read next. Never raises for an object.

        capacities: [n] int64, the expected size of each.
        """


class Touch(Store):
    """Has an order of eviction, in which objects can be moved."""

    @abstractmethod
    def touch(self, rows: Rows) -> BoolArray:
        """Make objects the most recently used, each more recent than the rows before it.

        Returns which of them exist: [n] bool.
        """


class Pins(Store):
    """Protects objects from eviction."""

    @abstractmethod
    def pin_writes(self, seconds: float | None) -> None:
        """Pin all objects that are written from now on.

        seconds: how long pins last; None for the default of the store.
        """


class Leases(Store):
    """Leases objects to readers: a leased object is neither evicted nor deleted."""

    allow_leases: bool = False  # `scan` may use queries that grant leases
    lease_wait_seconds: float  # how long `delete` waits for leases to end


class RacyWrites(Store):
    """A write that is answered OK may have lost to another writer of the key."""

    confirms_writes: bool = True  # `write_from` reads back what it wrote, and compares

    @abstractmethod
    def unfinished(self, rows: Rows) -> BoolArray:
        """Return which keys another writer has begun and not finished: [n] bool."""


class Confirm(Store):
    """Tells damage from a race with a writer, by questions that count as use of an object.

    Ask for few objects only: those that are asked for are evicted later than others.
    """

    @property
    @abstractmethod
    def confirms(self) -> bool:
        """Whether there is a server to ask."""

    @abstractmethod
    def read_confirmed(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read objects as `read_into` does; those that a writer may have changed are GONE."""

    @abstractmethod
    def confirm(self, rows: Rows) -> StatusArray:
        """Return whether objects are where they were listed: OK, CHANGED or GONE."""


class Profiled(Store):
    """Takes the profile of its deployment."""

    @abstractmethod
    def use_profile(self, profile: Profile, *, looks_only: bool = False) -> None:
        """State which deployment writes the store. Called before the first scan or write.

        looks_only: nothing is changed, copied or recorded, so sizes that nothing in the store
            vouches for are accepted.
        Raises ProfileError where the store contradicts the profile, and UnsupportedByBackend
        where such a store cannot hold the profile's objects.
        """


class Archive(Profiled):
    """Holds the objects of another store: their keys, and the profile that describes them."""

    @abstractmethod
    def recorded_profile(self) -> Profile | None:
        """Return the profile that the archive records; None where it records none."""

    @property
    @abstractmethod
    def open_grammar(self) -> bool:
        """Whether the archive is empty and takes keys of any grammar (`use_grammar`)."""

    @abstractmethod
    def use_grammar(self, name: str) -> None:
        """State the grammar of the keys that are written. Called before the first write.

        Raises UnsupportedByBackend where the archive has keys of another grammar.
        """


class Resumable(Store):
    """Marks unfinished writes with their owner, who can go on after a kill."""

    @abstractmethod
    def own_temporaries(self, owner: str, *, sweep: bool) -> None:
        """Mark unfinished writes as those of `owner`; sweep: remove those of a killed one.

        owner: 16 hex digits that at most one living process uses.
        """


class SystemCopy(Store):
    """Copies objects of some stores without the arena."""

    @abstractmethod
    def can_copy_from(self, source: Store) -> bool:
        """Whether `copy_from` takes objects of a store."""

    @abstractmethod
    def copy_from(
        self,
        source: Store,
        origins: Rows,
        rows: Rows,
        sizes: IntArray,
        *,
        if_absent: bool,
        preserve: bool = False,
    ) -> Result:
        """Copy objects of another store unchanged; else as `write_from`.

        origins: [n] rows of the source. sizes: [n] int64, the expected bytes of each.
        preserve: keep the owner, as far as the system allows, and the whole mode; else copies
            belong to the caller and are no more readable than the sources.
        Statuses: those of `write_from`, and for objects of the source GONE, SHORT, OVERSIZED, and
        CHANGED for one that was written to meanwhile. Raises UnsupportedByBackend.
        """


class Mover(ABC):
    """Renames objects of a store to and from one directory of the same file system.

    A rename keeps the object's modification time and cannot be seen half done. One object a
    call, so that what belongs together leaves within microseconds; `flush` makes calls durable.
    Both raise OSError for one object, StoreUnavailable for a lost store.
    """

    @abstractmethod
    def take(self, key: bytes, name: str, version: bytes | None = None) -> Status:
        """Move an object out of the store to a new file `name`. OK, GONE or CHANGED.

        version: as listed; an object that has another one by now stays, and is CHANGED.
        """

    @abstractmethod
    def put_back(self, name: str, key: bytes) -> Status:
        """Move a file of the directory into the store. OK, GONE, or EXISTS: none is replaced."""

    @abstractmethod
    def drop_double(self, key: bytes, name: str) -> None:
        """Take an object's key out of the store where the file `name` is the same object.

        A power failure can leave it under both names. Raises OSError.
        """

    @abstractmethod
    def flush(self, *, into_store: bool) -> None:
        """Make every move durable, those of earlier processes as well. Raises OSError.

        into_store: the moves since the last flush were `put_back`, and not `take`.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the directory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Renames(Store):
    """Moves objects by renaming them within a file system."""

    @abstractmethod
    def mover(self, directory: Directory) -> Mover | None:
        """Open a mover between the store and a directory; None for another file system."""


class FilePermissions(Store):
    """Keeps objects in files, which users of the system may or may not read."""

    @abstractmethod
    def readable_by(self, *, listing: bool = False) -> Permissions:
        """Return who may read all the objects that were read so far.

        listing: who may list the store, whatever was read.
        """

    @abstractmethod
    def keep_private(self, permissions: Permissions, *, listing: bool = False) -> None:
        """Make files that are written from now on no more readable than this.

        listing: also narrow directories that were made for the store.
        Raises StoreUnavailable where a file that is written to cannot be narrowed.
        """


class SideFiles(Store):
    """Is a directory, and has room for files beside the objects that servers never look at."""

    @abstractmethod
    def side_directory(self) -> Path:
        """Return the path of the side directory, which need not exist."""

    @abstractmethod
    def open_side_directory(self, *, writes: bool, makes: bool = False) -> Directory | None:
        """Open the side directory; None where there is none. Raises OSError, UntrustedError.

        writes: files in the directory are changed. makes: make a missing directory.
        """

    @abstractmethod
    def trust(self, *, writes: bool) -> Trust:
        """Return whose files are used beside the store. writes: files may be created there."""


def copier_of(target: Store, source: Store) -> SystemCopy | None:
    """Return `target` if it copies objects of `source` without the arena, else None."""
    return target if isinstance(target, SystemCopy) and target.can_copy_from(source) else None


def open_mover(store: Store, directory: Directory) -> Mover | None:
    """Open a mover between a store and a directory; None where only copies get there."""
    return store.mover(directory) if isinstance(store, Renames) else None


def permissions_of(store: Store, *, listing: bool = False) -> Permissions:
    """Return who may read the objects of a store: everyone, where it keeps no files."""
    if isinstance(store, FilePermissions):
        return store.readable_by(listing=listing)
    return Permissions()


def keep_as_private(target: Store, source: Store, *, listing: bool = False) -> None:
    """Make new files of `target` no more readable than what was read of `source`.

    listing: no more readable than the list of its objects. Raises StoreUnavailable.
    """
    if isinstance(target, FilePermissions):
        target.keep_private(permissions_of(source, listing=listing), listing=listing)
