"""Optional abilities of stores, each a subclass of Store.

Callers test for an ability with isinstance, once for each operation and not for each batch.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hicachectl.backends.base import Store
from hicachectl.backends.disk.directory import JointTrust, Trust
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

    from hicachectl.backends.base import ReadResult, Result, Rows, StatusArray
    from hicachectl.backends.concurrency import Concurrency
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.marker import Marker
    from hicachectl.formats.profile import Profile


class ReadsAhead(Store):
    """Store that can be told which objects are read next, and fetches these objects early."""

    # Callers announce only batches with an object of at least this many bytes: announcing smaller
    # objects saves no time.
    announced_bytes: ClassVar[int] = 1 << 20

    @abstractmethod
    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Announce the objects that the caller reads next. No error of an object is raised.

        capacities: [n] int64, expected bytes of each object.
        """


class Spreads(Store):
    """Store that spreads the work of a call over threads, and finds the best number of threads."""

    @property
    @abstractmethod
    def concurrency(self) -> Concurrency:
        """Return the threads of the store."""


def jobs_of(store: Store) -> int | None:
    """Return the fixed number of a store's calls at once; None if the number is not fixed."""
    return store.concurrency.jobs if isinstance(store, Spreads) else None


class Digesting(Store):
    """Store that can digest objects while it reads them, in pieces that fit the processor cache."""

    @abstractmethod
    def digest(
        self, rows: Rows, capacities: IntArray, wanted: BoolArray
    ) -> tuple[ReadResult, npt.NDArray[np.uint8]]:
        """Read whole objects as `read_into` does, but keep no bytes, and use no arena.

        capacities: [n] int64, expected bytes of each object.
        wanted:     [n] bool, objects that get a digest.
        Returns also the BLAKE3 digests: [n, 32] uint8, undefined for objects that are not OK.
        """


class Touch(Store):
    """Store whose eviction order callers can change."""

    @abstractmethod
    def touch(self, rows: Rows) -> BoolArray:
        """Make objects the most recently used, the last row most recently.

        Return which objects exist: [n] bool.
        """


class Pins(Store):
    """Store that can protect objects from eviction for a time."""

    @abstractmethod
    def pin_writes(self, seconds: float) -> None:
        """Pin all objects written from now on. seconds: duration of each pin."""

    @abstractmethod
    def can_pin(self, seconds: float) -> bool:
        """Return whether `pin` and `unpin` work. If they do not, only `pin_writes` works.

        seconds: duration of the pins.
        Raises StoreUnavailable. Raises UsageError if the store can tell that it refuses pins of
        this duration.
        """

    @abstractmethod
    def pin(self, rows: Rows, seconds: float) -> Result:
        """Pin objects from now on. The new pin of an object replaces its old pin.

        Statuses: OK, GONE, ERROR. Raises StoreUnavailable, and UsageError as `can_pin` does.
        """

    @abstractmethod
    def unpin(self, rows: Rows) -> Result:
        """Remove the pins of objects.

        Statuses: OK, also for an object without a pin; GONE, ERROR.
        """


class Leases(Store):
    """Store that grants leases. An object with a lease is neither evicted nor deleted."""

    allow_leases: bool = False  # `scan` may use queries that grant leases
    lease_wait_seconds: float  # how long `delete` waits for leases to end


@dataclass(frozen=True, slots=True)
class Loss:
    """Objects that a listing leaves out, and that no server can read any more.

    code: code of the finding.
    place: the file, or the directory with the files.
    what: number of objects, the reason, and the next step.
    changed_ns: modification time of a file that a server may be writing, Unix ns; 0 without one.
    """

    code: str
    place: str
    what: str
    changed_ns: int = 0

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


class ReportsLosses(Store):
    """Store whose listing reports objects that servers have lost."""

    @property
    @abstractmethod
    def losses(self) -> tuple[Loss, ...]:
        """Return the losses that the last listing found. `remarks` has them as text."""


class RacyWrites(Store):
    """Store where a write can return OK although the store keeps another writer's object."""

    confirms_writes: bool = True  # `write_from` reads objects back and compares them


class Confirm(Store):
    """Store that can tell damage from a race with a writer.

    `read_confirmed` and `confirm` query the store's server. A query counts as a use of the object
    and delays its eviction, so callers query few objects.
    """

    @property
    @abstractmethod
    def confirms(self) -> bool:
        """Return whether the store has a server to query."""

    @abstractmethod
    def read_confirmed(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read as `read_into` does, but an object that a writer may have changed is GONE."""

    @abstractmethod
    def confirm(self, rows: Rows) -> StatusArray:
        """Return the present status of each listed object: [n] OK if unchanged, CHANGED or GONE."""


class Profiled(Store):
    """Store that needs its deployment's profile."""

    @abstractmethod
    def use_profile(self, profile: Profile, *, looks_only: bool = False) -> None:
        """Set the deployment's profile. Call before the first scan or write.

        looks_only: the run does not change, copy or record objects. The store then accepts sizes
            that it cannot confirm.
        Raises ProfileError if the store contradicts the profile. Raises UnsupportedByBackend if the
        store cannot hold the profile's objects.
        """


class SingleDeployment(Store):
    """Store that can hold only one deployment.

    Its keys name no deployment, and its pages state no size. Callers state the sizes of the
    objects, by a profile or by `use_sizes`.
    """

    @abstractmethod
    def use_sizes(self, sizes: Mapping[tuple[str, str], int]) -> None:
        """Set the size in bytes of each affix's objects, in place of `Profiled.use_profile`.

        Raises ProfileError if the store cannot hold objects of these sizes together.
        """

    @abstractmethod
    def claimed_by(self, tag: str, *, writes: bool) -> str | None:
        """Return the tag of the deployment that has claimed the store; None without a claim.

        tag: tag of the caller's deployment. With `writes`, an unclaimed store is claimed for it.
        Raises StoreUnavailable.
        """


class Archive(Profiled):
    """Store with the objects, keys and profile of another store."""

    @abstractmethod
    def recorded_profile(self) -> Profile | None:
        """Return the profile recorded in the archive; None if the archive records none."""

    @property
    @abstractmethod
    def open_grammar(self) -> bool:
        """Return whether the archive is writable and `use_grammar` may set any grammar."""

    @abstractmethod
    def use_grammar(self, name: str) -> None:
        """Set the grammar of the keys to write. Call before the first write.

        Raises UnsupportedByBackend if the archive has keys of another grammar.
        """


class Resumable(Store):
    """Store whose unfinished writes a later run of the same owner removes or resumes."""

    @abstractmethod
    def own_temporaries(self, owner: str, *, sweep: bool) -> None:
        """Mark unfinished writes from now on with `owner`.

        owner: 16 hex digits, used by at most one living process.
        sweep: remove unfinished writes of an earlier, killed process of this owner.
        """


class SystemCopy(Store):
    """Store that copies objects of some other stores without the arena."""

    @abstractmethod
    def can_copy_from(self, source: Store) -> bool:
        """Return whether `copy_from` accepts objects of `source`."""

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
        """Copy objects of another store unchanged. In all else, do as `write_from` does.

        origins: [n] rows of the source.
        sizes: [n] int64, expected bytes of each object.
        preserve: keep the full mode, and the owner if the system allows it. Without `preserve`, the
            copies belong to the caller and are no more readable than the sources.
        Statuses: the statuses of `write_from`. Also GONE, SHORT or OVERSIZED if a read of the
        source's object would return that status. Also CHANGED if a writer changed the source's
        object during the copy. Raises UnsupportedByBackend if `can_copy_from` returns False.
        """


class Trailed(Store):
    """Store whose objects may have trailers with digest and identity (`formats.trailer`).

    Sizes in listings, reads and copies do not count trailers. Reads compare an object with its
    trailer. The status is DAMAGED if the digest, page, pool or length differs, and FOREIGN if the
    rank differs.
    """

    @abstractmethod
    def markers(self) -> list[Marker]:
        """Return the markers, which describe the objects with trailers; an empty list without any.

        Raises StoreUnavailable, UntrustedError, and FormatError, which names the marker's file.
        """

    @abstractmethod
    def expect_identities(self, identities: Mapping[Affix, Identity]) -> None:
        """Let reads of these affixes return FOREIGN for objects that have another identity.

        Reads of objects without a trailer, and of objects of other affixes, do not change. The
        identities replace those of an earlier call.
        """

    @abstractmethod
    def write_trailers(self, identities: Mapping[Affix, Identity], digest: str) -> None:
        """Give new objects of these affixes trailers, and new objects of other affixes none.

        digest: one of `trailer.DIGEST_KINDS`.
        `write_from` digests the arena's bytes, and writes the markers before the objects.
        `copy_from` keeps a trailer with the right page, pool, identity and rank, drops any other
        trailer, and adds a missing trailer. With `preserve`, `copy_from` keeps every trailer.
        Without this call, `write_from` writes no trailers, and `copy_from` keeps the trailers of
        objects that keep their key.
        """

    @abstractmethod
    def adopt(self, rows: Rows, sizes: IntArray) -> Result:
        """Give existing objects the trailers of `write_trailers`, while servers use the store.

        Each object is whole at every moment, and keeps its bytes, times, owner and mode.
        sizes: [n] int64, expected bytes of each object.
        Statuses: OK, also for an object that has its trailer already or gets no trailer. EXISTS if
        a writer has replaced the object meanwhile. CHANGED if a writer wrote to the object during
        the copy. Also GONE, SHORT, OVERSIZED, DAMAGED, FOREIGN, FULL and ERROR.
        """

    @abstractmethod
    def remove_cleared(self, rows: Rows) -> Result:
        """Delete objects that are misses since a server's `clear`.

        Statuses: OK, GONE, ERROR. An object written again after the `clear` stays, and its status
        is GONE.
        """

    @abstractmethod
    def cleared_since(self, rows: Rows, since_ns: int) -> BoolArray:
        """Return which keys a server cleared at `since_ns` or later: [n] bool.

        since_ns: Unix nanoseconds, by the clock of the store.
        Raises StoreUnavailable.
        """

    @abstractmethod
    def add_markers(self, markers: Iterable[Marker]) -> None:
        """Write the markers that the store lacks. Call before objects with trailers are added.

        `write_from`, and `copy_from` without `preserve`, write the markers themselves.
        Raises StoreUnavailable, UntrustedError.
        """

    @abstractmethod
    def read_trailers(self, rows: Rows) -> Any:
        """Return the objects' trailers: a table with `trailer_schema()`, one row for each object.

        A row is null for an object that is missing, unreadable, or without a whole trailer.
        """

    @abstractmethod
    def unchecked(self) -> AbstractContextManager[None]:
        """Read objects without comparing them with their trailers, while the context is open."""


@contextmanager
def as_stored(*stores: Store) -> Iterator[None]:
    """Read objects of these stores as they are, damaged or not, while the context is open."""
    with ExitStack() as contexts:
        for store in stores:
            if isinstance(store, Trailed):
                contexts.enter_context(store.unchecked())
        yield


def trailer_schema() -> Any:
    """Return the columns of `Trailed.read_trailers`.

    identity: 16 bytes of the identity's hash.
    digest_kind: one of `trailer.DIGEST_KINDS`.
    digest: 32 bytes, zero-padded.
    own_rank: whether the trailer names the key's rank, or no rank.
    ranked: whether the trailer names a rank.
    """
    import pyarrow as pa

    return pa.schema(
        [
            ("identity", pa.binary(16)),
            ("digest_kind", pa.string()),
            ("digest", pa.binary(32)),
            ("own_rank", pa.bool_()),
            ("ranked", pa.bool_()),
        ]
    )


def keeps_digests(store: Store) -> bool:
    """Return whether reads compare objects with digests that the store keeps.

    Raises the errors of `Trailed.markers`.
    """
    if isinstance(store, Trailed):
        return any(marker.digest != "off" for marker in store.markers())
    return store.traits.keeps_digests


class Mover(ABC):
    """Moves objects by renames between a store and a quarantine run on the same file system.

    A rename is atomic and keeps the modification time. `flush` makes renames durable. `take` and
    `put_back` raise StoreUnavailable if the store or the run cannot be used.
    """

    @abstractmethod
    def take(self, rows: Rows) -> Result:
        """Move objects out of the store into the run. Statuses: OK, GONE, CHANGED, ERROR.

        rows: rows of the objects. If they have the column `version`, an object of another version
            stays in the store, and its status is CHANGED.
        """

    @abstractmethod
    def put_back(self, rows: Rows) -> Result:
        """Move objects of the run into the store. Statuses: OK, GONE, EXISTS, ERROR.

        An object that the store has is not replaced: its status is EXISTS.
        """

    @abstractmethod
    def flush(self, *, into_store: bool) -> None:
        """Make every move durable, also the moves of earlier processes. Raises OSError.

        into_store: True if the moves since the last flush were by `put_back`, False if by `take`.
        """


class Renames(Store):
    """Store that moves objects by renaming them within a file system."""

    @abstractmethod
    def mover(self, run: Store) -> Mover | None:
        """Return a mover between the store and a run; None if renames between them fail."""


class FilePermissions(Store):
    """Store that keeps objects in files with owners and modes."""

    @abstractmethod
    def readable_by(self, *, listing: bool = False) -> Permissions:
        """Return which users may read every object that this store has read so far.

        listing: instead, return which users may list the store.
        """

    @abstractmethod
    def keep_private(self, permissions: Permissions, *, listing: bool = False) -> None:
        """Make files written from now on no more readable than `permissions`.

        listing: also reduce the modes of directories created for the store.
        Raises StoreUnavailable if the store writes to an existing file whose mode cannot be
        reduced.
        """


class InFiles(Store):
    """Store with a file for each object, so that the object's bytes go through the page cache."""

    @abstractmethod
    def place_of(self, key: bytes) -> tuple[int, bytes]:
        """Return the open directory of an object's file, and the file's name.

        Raises OSError, such as FileNotFoundError for a missing directory, and UntrustedError.
        """


class Mounted(Store):
    """Store in directories, to which mounts can give several paths and device numbers."""

    @abstractmethod
    def probe(self) -> AbstractContextManager[bytes]:
        """Keep a file with a random name in each directory while the context is open.

        Yields the name. A directory on a full file system gets no file. Raises StoreUnavailable.
        """

    @abstractmethod
    def shows(self, name: bytes) -> bool:
        """Return whether one of the directories has a file of this name.

        The answer comes from open(2), which asks the file server. Clients of network file systems
        answer listings and stat(2) from their caches.
        Raises StoreUnavailable.
        """


class FileTimes(Store):
    """Store whose times are file times, set by the clock of the file system."""

    @abstractmethod
    def clock_ns(self) -> int:
        """Return the present time of the file system, Unix nanoseconds.

        The first call touches the outer directories. If the store lies on several file systems, the
        time is the earliest of their times. Raises StoreUnavailable.
        """


class OtherFiles(Store):
    """Store in a directory that can also have directories and files of other programs.

    path: path of the directory.
    """

    path: str

    @abstractmethod
    def other_files(self, objects: Any) -> tuple[list[str], list[str]]:
        """Return the names of sub-directories, and of files of other programs.

        objects: the listed objects, none of which belongs to a page.
        Raises StoreUnavailable.
        """


class SideFiles(Store):
    """Store that can keep side files, which servers ignore.

    Side files lie in the store's directory. If a server's `clear` would remove them there, they
    lie outside (`ClearRemovesAll`).
    """

    @abstractmethod
    def side_directory(self) -> Path:
        """Return the path of the side directory, which may be missing."""

    @abstractmethod
    def open_side_directory(self, *, writes: bool, makes: bool = False) -> Directory | None:
        """Open the side directory; return None if it is missing. Raises OSError, UntrustedError.

        writes: the caller changes files in the side directory.
        makes: create a missing side directory.
        """

    @abstractmethod
    def trust(self, *, writes: bool) -> Trust:
        """Return the users whose side files are trusted.

        writes: the caller may create side files.
        """


class ClearRemovesAll(Store):
    """Store without side files inside, because a `clear` removes every file in its directories.

    A store whose URL names a side directory elsewhere (`urls.SIDE_PARAMETER`) is also `SideFiles`.
    """

    @property
    @abstractmethod
    def directories(self) -> tuple[Path, ...]:
        """Return the directories in which a server's `clear` removes every file."""

    def refuse_inside(self, path: Path, what: str) -> None:
        """Raise UsageError for a path in the directories. what: the option that gives the path."""
        real = Path(os.path.realpath(path))
        for directory in self.directories:
            if real.is_relative_to(os.path.realpath(directory)):
                raise UsageError(
                    f"{what}: a server's clear removes every file below {directory}; give a "
                    "directory outside the store"
                )


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition of a service behind a store.

    name: fixed name, such as `segments`.
    text: the state of the service, in a sentence.
    problem: what is wrong, and the next step; empty if nothing is wrong.
    is_lost: whether servers cannot use the store.
    """

    name: str
    text: str
    problem: str = ""
    is_lost: bool = False


class Serviced(Store):
    """Store behind services whose condition can be asked for."""

    @abstractmethod
    def conditions(self) -> Iterator[Condition]:
        """Yield the condition of each service, and change nothing. Raises StoreUnavailable."""


def copier_of(target: Store, source: Store) -> SystemCopy | None:
    """Return `target` if it copies objects of `source` without the arena, else None."""
    return target if isinstance(target, SystemCopy) and target.can_copy_from(source) else None


def mover_of(store: Store, run: Store) -> Mover | None:
    """Return a mover between a store and a run; None if renames between them fail."""
    return store.mover(run) if isinstance(store, Renames) else None


def permissions_of(store: Store, *, listing: bool = False) -> Permissions:
    """Return which users may read a store's objects; all users if the store has no files.

    listing: instead, return which users may list the store.
    """
    if isinstance(store, FilePermissions):
        return store.readable_by(listing=listing)
    return Permissions()


def present_ns(store: Store, *, changes: bool) -> int:
    """Return the time from which to compute the ages of a store's objects, Unix nanoseconds.

    changes: the command may change the store. If the store has file times, the time is then that
        of the store's file system. Reading the file system's clock writes to the store, so a
        command that only looks gets the time of this host.
    Raises StoreUnavailable.
    """
    if changes and isinstance(store, FileTimes):
        return store.clock_ns()
    return time.time_ns()


def trust_of(*stores: Store) -> Trust:
    """Return the users who may own a file outside these stores that controls changes of the stores.

    They are the users whom every store with a directory trusts. If no store has a directory, they
    are this process's user and root. To learn the owner of new files, the result may create a
    file in a directory (see `Trust`). Raises OSError.
    """
    trusts = []
    for store in stores:
        if isinstance(store, SideFiles):
            trusts.append(store.trust(writes=True))
        elif isinstance(store, ClearRemovesAll):
            trusts += [Trust(path.stat(), writes=True) for path in store.directories]
    return JointTrust(trusts)


def keep_as_private(target: Store, source: Store, *, listing: bool = False) -> None:
    """Make new files of `target` no more readable than the objects read from `source`.

    listing: make them no more readable than the source's listing.
    Raises StoreUnavailable.
    """
    if isinstance(target, FilePermissions):
        target.keep_private(permissions_of(source, listing=listing), listing=listing)
