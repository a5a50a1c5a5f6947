"""Optional abilities of stores: subclasses of Store, tested with isinstance.

Use isinstance once per operation, not once per batch.
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
    """Store that can be told which objects are read next, and fetches them early."""

    announced_bytes: ClassVar[int] = 1 << 20  # announcing smaller objects saves no time

    @abstractmethod
    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Announce the objects to be read next. Never raises for a single object.

        capacities: [n] int64, expected bytes of each.
        """


class Spreads(Store):
    """Store that spreads the work of each call over threads, and finds the best number of them."""

    @property
    @abstractmethod
    def concurrency(self) -> Concurrency:
        """Return the threads of the store."""


def jobs_of(store: Store) -> int | None:
    """Return the number of calls at once that a store must keep to; None if it finds the number."""
    return store.concurrency.jobs if isinstance(store, Spreads) else None


class Digesting(Store):
    """Store that can digest objects while it reads them, in pieces that fit the processor cache."""

    @abstractmethod
    def digest(
        self, rows: Rows, capacities: IntArray, wanted: BoolArray
    ) -> tuple[ReadResult, npt.NDArray[np.uint8]]:
        """Read whole objects as `read_into` does, but keep no bytes, and use no arena.

        capacities: [n] int64, expected bytes of each.
        wanted:     [n] bool, objects that get a digest.
        Returns also the BLAKE3 digests: [n, 32] uint8, undefined for objects that are not OK.
        """


class Touch(Store):
    """Store whose eviction order callers can change."""

    @abstractmethod
    def touch(self, rows: Rows) -> BoolArray:
        """Make objects the most recently used, in row order. Return which exist: [n] bool."""


class Pins(Store):
    """Store that can protect objects from eviction for a time."""

    @abstractmethod
    def pin_writes(self, seconds: float) -> None:
        """Pin all objects written from now on. seconds: duration of each pin."""

    @abstractmethod
    def can_pin(self, seconds: float) -> bool:
        """Return whether `pin` and `unpin` work; else only `pin_writes` does.

        seconds: duration of the pins.
        Raises StoreUnavailable, and UsageError if the store can tell that no pin may last so long.
        """

    @abstractmethod
    def pin(self, rows: Rows, seconds: float) -> Result:
        """Pin objects from now on, in place of the pins that they have.

        Statuses: OK, GONE, ERROR. Raises StoreUnavailable, and UsageError as `can_pin` does.
        """

    @abstractmethod
    def unpin(self, rows: Rows) -> Result:
        """Remove the pins of objects. Statuses: OK even without a pin, GONE, ERROR."""


class Leases(Store):
    """Store that grants leases: a leased object is neither evicted nor deleted."""

    allow_leases: bool = False  # `scan` may use queries that grant leases
    lease_wait_seconds: float  # how long `delete` waits for leases to end


@dataclass(frozen=True, slots=True)
class Loss:
    """Objects that a listing leaves out, and that no server can read any more.

    code: code of the finding.
    place: the file, or the directory with the files.
    what: number of objects, the reason, and the next step.
    changed_ns: modification time of a file that a server may be writing, Unix ns.
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
    """Store where a write can return OK although another writer's object is kept."""

    confirms_writes: bool = True  # `write_from` reads objects back and compares them


class Confirm(Store):
    """Store that can tell damage from a race with a writer.

    Its queries count as use, which delays an object's eviction: query few objects.
    """

    @property
    @abstractmethod
    def confirms(self) -> bool:
        """Return whether the store has a server to query."""

    @abstractmethod
    def read_confirmed(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read as `read_into` does; objects that a writer may have changed are GONE."""

    @abstractmethod
    def confirm(self, rows: Rows) -> StatusArray:
        """Return the status of each listed object now: [n] OK if unchanged, CHANGED or GONE."""


class Profiled(Store):
    """Store that needs its deployment's profile."""

    @abstractmethod
    def use_profile(self, profile: Profile, *, looks_only: bool = False) -> None:
        """Set the deployment's profile. Call before the first scan or write.

        looks_only: the run does not change, copy or record objects, so accept sizes that the store
            cannot confirm.
        Raises ProfileError if the store contradicts the profile, UnsupportedByBackend if it cannot
        hold the profile's objects.
        """


class SingleDeployment(Store):
    """Store that holds one deployment: its keys name no deployment, and its pages state no size.

    Callers give it the sizes of its objects, by a profile or by `use_sizes`.
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
        """Return the profile recorded in the archive, else None."""

    @property
    @abstractmethod
    def open_grammar(self) -> bool:
        """Return whether the archive is empty and takes keys of any grammar (`use_grammar`)."""

    @abstractmethod
    def use_grammar(self, name: str) -> None:
        """Set the grammar of the keys to write. Call before the first write.

        Raises UnsupportedByBackend if the archive has keys of another grammar.
        """


class Resumable(Store):
    """Store that marks unfinished writes with an owner; a later run of that owner resumes them."""

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
        """Copy objects of another store unchanged; otherwise like `write_from`.

        origins: [n] rows of the source.
        sizes: [n] int64, expected bytes of each object.
        preserve: keep the full mode, and the owner if the system allows it. Otherwise copies belong
            to the caller and are no more readable than the sources.
        Statuses: those of `write_from`; GONE, SHORT or OVERSIZED if the source's object is; CHANGED
        if a writer changed it during the copy. Raises UnsupportedByBackend unless `can_copy_from`
        is True.
        """


class Trailed(Store):
    """Store whose objects may have trailers with digest and identity (`formats.trailer`).

    Sizes in listings, reads and copies do not count trailers. Reads compare an object with its
    trailer: DAMAGED if digest, page, pool or length differ, FOREIGN if the rank differs.
    """

    @abstractmethod
    def markers(self) -> list[Marker]:
        """Return the markers, which describe the objects with trailers; empty without such objects.

        Raises StoreUnavailable, UntrustedError, and FormatError, which names the marker's file.
        """

    @abstractmethod
    def expect_identities(self, identities: Mapping[Affix, Identity]) -> None:
        """Let reads of these affixes return FOREIGN for objects that have another identity.

        Objects without a trailer, and objects of other affixes, are read as before. Replaces the
        identities of an earlier call.
        """

    @abstractmethod
    def write_trailers(self, identities: Mapping[Affix, Identity], digest: str) -> None:
        """Give new objects of these affixes trailers, and new objects of other affixes none.

        digest: one of `trailer.DIGEST_KINDS`.
        `write_from` digests the arena's bytes, and writes the markers before the objects.
        `copy_from` keeps a trailer with the right page, pool, identity and rank, drops others,
        and adds missing ones; with `preserve`, it keeps every trailer.
        Without this call, `write_from` writes no trailers, and `copy_from` keeps the trailers of
        objects that keep their key.
        """

    @abstractmethod
    def adopt(self, rows: Rows, sizes: IntArray) -> Result:
        """Give existing objects the trailers of `write_trailers`, while servers use the store.

        Each object is whole at every moment, and keeps its bytes, times, owner and mode.
        sizes: [n] int64, expected bytes of each object.
        Statuses: OK, also for an object that has its trailer already, or gets none. EXISTS if a
        writer has replaced the object meanwhile. CHANGED if a writer wrote to it during the copy.
        Also GONE, SHORT, OVERSIZED, DAMAGED, FOREIGN, FULL and ERROR.
        """

    @abstractmethod
    def remove_cleared(self, rows: Rows) -> Result:
        """Delete objects that are misses since a server's `clear`.

        Statuses: OK, GONE, ERROR. An object that was written again stays, and its status is GONE.
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

    identity: 16 bytes. digest_kind: one of `trailer.DIGEST_KINDS`. digest: 32 bytes, zero-padded.
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

    Raises like `Trailed.markers`.
    """
    if isinstance(store, Trailed):
        return any(marker.digest != "off" for marker in store.markers())
    return store.traits.keeps_digests


class Mover(ABC):
    """Moves objects by renames between a store and a quarantine run on the same file system.

    A rename is atomic and keeps the modification time. `flush` makes renames durable. `take` and
    `put_back` raise StoreUnavailable for a lost store.
    """

    @abstractmethod
    def take(self, rows: Rows) -> Result:
        """Move objects out of the store into the run: OK, GONE, CHANGED or ERROR.

        rows: with the column `version`, an object of another version stays, and is CHANGED.
        """

    @abstractmethod
    def put_back(self, rows: Rows) -> Result:
        """Move objects of the run into the store: OK, GONE, EXISTS or ERROR. Replace nothing."""

    @abstractmethod
    def flush(self, *, into_store: bool) -> None:
        """Make every move durable, also the moves of earlier processes. Raises OSError.

        into_store: the moves since the last flush were `put_back`, not `take`.
        """


class Renames(Store):
    """Store that moves objects by renaming them within a file system."""

    @abstractmethod
    def mover(self, run: Store) -> Mover | None:
        """Return a mover between the store and a run; None if a rename is impossible."""


class FilePermissions(Store):
    """Store that keeps objects in files with owners and modes."""

    @abstractmethod
    def readable_by(self, *, listing: bool = False) -> Permissions:
        """Return which users may read every object that this store has read so far.

        listing: return which users may list the store instead.
        """

    @abstractmethod
    def keep_private(self, permissions: Permissions, *, listing: bool = False) -> None:
        """Make files written from now on no more readable than `permissions`.

        listing: also reduce the modes of directories created for the store.
        Raises StoreUnavailable if the mode of an existing file to write to cannot be reduced.
        """


class InFiles(Store):
    """Store with each object in a file of its own, which the system's page cache holds."""

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

        Yields the name. A file system without room gets no file. Raises StoreUnavailable.
        """

    @abstractmethod
    def shows(self, name: bytes) -> bool:
        """Return whether one of the directories has a file of this name, by open(2).

        open(2) asks the server. Clients of network file systems answer listings and stat(2) from
        their caches.
        Raises StoreUnavailable.
        """


class FileTimes(Store):
    """Store whose times are file times, set by the clock of the file system."""

    @abstractmethod
    def clock_ns(self) -> int:
        """Return the present time of the file system, Unix nanoseconds.

        The first call touches the outer directories. Of several file systems, the earliest time
        counts. Raises StoreUnavailable.
        """


class OtherFiles(Store):
    """Store in a directory that can also have directories and files of other programs.

    path: path of the directory.
    """

    path: str

    @abstractmethod
    def other_files(self, objects: Any) -> tuple[list[str], list[str]]:
        """Return the names of sub-directories, and of files that are no objects and not our own.

        objects: the listing of a store without pages.
        Raises StoreUnavailable.
        """


class SideFiles(Store):
    """Store that can keep side files, which servers ignore.

    They lie in the store's directory, or outside if a server's `clear` would remove them
    (`ClearRemovesAll`).
    """

    @abstractmethod
    def side_directory(self) -> Path:
        """Return the path of the side directory, which may be missing."""

    @abstractmethod
    def open_side_directory(self, *, writes: bool, makes: bool = False) -> Directory | None:
        """Open the side directory; None if it is missing. Raises OSError, UntrustedError.

        writes: the caller changes files in it. makes: create a missing directory.
        """

    @abstractmethod
    def trust(self, *, writes: bool) -> Trust:
        """Return which users' side files are trusted. writes: the caller may create such files."""


class ClearRemovesAll(Store):
    """Store without side files inside: a server's `clear` removes every file in its directories.

    The parameter `urls.SIDE_PARAMETER` of its URL names a side directory elsewhere; then the store
    is also `SideFiles`.
    """

    @property
    @abstractmethod
    def directories(self) -> tuple[Path, ...]:
        """Return the directories."""

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
    """Return a mover between a store and a run; None if a rename is impossible."""
    return store.mover(run) if isinstance(store, Renames) else None


def permissions_of(store: Store, *, listing: bool = False) -> Permissions:
    """Return which users may read a store's objects: all users if the store has no files."""
    if isinstance(store, FilePermissions):
        return store.readable_by(listing=listing)
    return Permissions()


def present_ns(store: Store, *, changes: bool) -> int:
    """Return the present time, by which the ages of a store's objects are judged, Unix nanoseconds.

    changes: the command may change the store. Then the clock of the store's file system counts, if
        the store has one. Reading that clock writes to the store, so a command that only looks uses
        this host's clock.
    Raises StoreUnavailable.
    """
    if changes and isinstance(store, FileTimes):
        return store.clock_ns()
    return time.time_ns()


def trust_of(*stores: Store) -> Trust:
    """Return which owners to trust for files elsewhere that control changes of these stores.

    These are the users whom all stores trust; for stores without a directory, this process's user
    and root. The caller may create such files, see `Trust`. Raises OSError.
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
