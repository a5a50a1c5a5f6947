"""The run directory, which all processes of a divided run share.

    run.json                     the manifest, published last: it publishes the listing and the plan
    claim.K                      claims of the lister
    listing-OWNER/               the published tables
    parts/00007/claim.K          claims of a part; K numbers its attempts
    parts/00007/plan.json        the changes that the part will make: the first one counts
    parts/00007/result-K.json    of an attempt: the highest one counts
    finish.claim.K               claims of the process that finishes the run
    finish-G.json                the result of finishing; needs the results of all parts

Tables of a record lie beside it. Published files are never replaced.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hicachectl.backends.disk.directory import Directory, JointTrust, Trust
from hicachectl.backends.disk.durable import NO_ROOM, make_directories
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import UntrustedError, UsageError
from hicachectl.formats.wording import failed
from hicachectl.parts.manifest import MANIFEST, MOST_BYTES, Manifest, dump, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = "parts"
_STORES = {"store", "source", "destination"}  # members of a run's identity
_OTHER_RUN = "give another run directory"
_LISTING = "listing-"
# Entries before the manifest is published: ours, and what a mounted volume has by itself.
_HARMLESS = re.compile(r"claim\.\d+|listing-[0-9a-f]{16}|\..*|lost\+found")
_RESULT = re.compile(r"result-(\d{1,9})\.json")


class RunDirectory:
    """An open run directory; a context manager. Its own errors are UsageError, UntrustedError.

    path: as the option names it.
    """

    def __init__(self, path: Path, directory: Directory) -> None:
        """Take over a directory; `close` closes it."""
        self.path = path
        self.directory = directory

    @classmethod
    def create(cls, path: Path, permissions: Permissions, trust: Trust) -> Self:
        """Open a run directory for work; create it if it is missing.

        permissions: of the store's listing; files in the directory get no wider ones. trust: in
        its owner and those of its files. Raises UsageError if it has other files.
        """
        with usage_errors(path):
            made = make_directories(path)
            directory = Directory.named(str(path), writes=True, trust=trust)
            run = cls(path, directory)
            try:
                directory.check_owner(_OTHER_RUN)
                if made:
                    facts = os.fstat(directory.descriptor)
                    mode = stat.S_IMODE(facts.st_mode)
                    mode &= permissions.for_group(facts.st_gid)
                    os.fchmod(directory.descriptor, mode | 0o700)
                within = Permissions.within(os.fstat(directory.descriptor))
                trust.permissions = within.both(permissions)
                run._refuse_other_files()
            except BaseException:
                run.close()
                raise
        return run

    @classmethod
    def existing(cls, path: Path) -> Self:
        """Open a run directory for reading.

        Trusted are the users whom those of the run's stores trust that are directories here.
        """
        with usage_errors(path), Directory.named(str(path), writes=False) as here:
            trust = JointTrust(list(_trusts(here, path)), writes=True)
            run = cls(path, Directory(os.dup(here.descriptor), here.path, trust))
            try:
                run.directory.check_owner(_OTHER_RUN)
            except BaseException:
                run.close()
                raise
        return run

    def close(self) -> None:
        """Close the directory."""
        self.directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def again(self) -> Directory:
        """Open the directory once more."""
        mine = self.directory
        return Directory(os.dup(mine.descriptor), mine.path, mine.trust)

    # the manifest and its tables

    def has_manifest(self) -> bool:
        """Return whether a manifest is published. Raises OSError."""
        return self.directory.has(MANIFEST)

    def manifest(self) -> Manifest | None:
        """Read the manifest; None if it is not published. Raises FormatError for a damaged one."""
        with usage_errors(self.path):
            try:
                content = self.directory.read(MANIFEST, MOST_BYTES + 1)
            except FileNotFoundError:
                return None
        return parse_manifest(content, str(self.path))

    def permissions(self) -> Permissions:
        """Return the permissions of the manifest: those that the store's listing allows."""
        with usage_errors(self.path):
            return Permissions.of_file(self.directory.entries()[MANIFEST])

    def published_ns(self) -> int:
        """Return when the manifest was written, by its file system's clock. Raises OSError."""
        descriptor = self.directory.open_file(MANIFEST)
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    def publish_manifest(self, manifest: Manifest) -> bool:
        """Publish the manifest, unless there is one; return whether it is this one."""
        return self.directory.publish(MANIFEST, dump(manifest))

    def make_listing(self, owner: str) -> Directory:
        """Create a directory for published tables."""
        return self.directory.make_directory(_LISTING + owner)

    def listing(self, manifest: Manifest) -> Directory:
        """Open the directory of the published tables."""
        with usage_errors(self.path / manifest.folder):
            return self.directory.directory(manifest.folder)

    def remove_listings(self, besides: str) -> None:
        """Remove the tables of listers that published no manifest.

        besides: name of the published directory. Call this only after the manifest was published:
        until then, a lister that was taken over may still publish.
        """
        for name in self.directory.entries():
            if name.startswith(_LISTING) and name != besides:
                with suppress(OSError, UntrustedError):  # others may be removing it too
                    _remove_tree(self.directory, name)

    def remove_listing(self, owner: str) -> None:
        """Remove the tables of a lister that cannot publish them."""
        with suppress(OSError, UntrustedError):
            _remove_tree(self.directory, _LISTING + owner)

    # parts

    def part_path(self, part: int) -> Path:
        """Return the path of a part's directory, for messages."""
        return self.path / PARTS / part_name(part)

    def part(self, part: int, *, create: bool = False) -> Directory:
        """Open a part's directory. Raises FileNotFoundError if it is missing."""
        name = part_name(part)
        if not create:
            with self.directory.directory(PARTS) as parts:
                return parts.directory(name)
        with self.directory.make_directory(PARTS, exist_ok=True) as parts:
            return parts.make_directory(name, exist_ok=True)

    def _refuse_other_files(self) -> None:
        names = self.directory.entries()
        strange = next((name for name in names if not _HARMLESS.fullmatch(name)), None)
        # Looks for the manifest last: another process may be publishing it.
        if strange is not None and not self.has_manifest():
            raise UsageError(
                f"{self.path}: has other files, such as {strange}; give --run an empty or a new "
                "directory"
            )


def _trusts(directory: Directory, path: Path) -> Iterator[Trust]:
    """Yield the trust of each store of a run that is a directory on this machine."""
    with suppress(FileNotFoundError):
        manifest = parse_manifest(directory.read(MANIFEST, MOST_BYTES + 1), str(path))
        for member in _STORES & manifest.identity.keys():
            with suppress(UsageError, OSError):
                store = Path(parse_url(str(manifest.identity[member])).path)
                if store.is_absolute() and store.is_dir():
                    yield Trust(store.stat(), writes=True)


def part_name(part: int) -> str:
    """Return the name of a part's directory."""
    return f"{part:05}"


def attempts_with_result(directory: Directory) -> list[int]:
    """Return the attempts at a part that have a result, in ascending order. Raises OSError."""
    found = (_RESULT.fullmatch(name) for name in directory.entries())
    return sorted(int(match[1]) for match in found if match)


@contextmanager
def usage_errors(path: Path) -> Iterator[None]:
    """Raise UsageError in place of OSError, with a next step if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            next_step = "make room, then run the part again"
            raise UsageError(failed(path, "write", error, next_step)) from error
        raise UsageError(failed(path, "use the run directory", error, "check the path")) from error


def _remove_tree(parent: Directory, name: str) -> None:
    with parent.directory(name) as directory:
        for entry, facts in directory.entries().items():
            if stat.S_ISDIR(facts.st_mode):
                _remove_tree(directory, entry)
            else:
                directory.remove(entry)
    parent.remove_directory(name)
