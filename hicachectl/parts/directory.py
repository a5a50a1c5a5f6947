"""The run directory, which all processes of a divided run share.

    run.json                        the manifest, published when the listing is complete
    listing-LISTER/                 the published tables
    parts/00007.json                the result of a part
    parts/00007-ATTEMPT-….parquet   tables of a result
    finish.json                     the result of `Job.finish`, made from the results of all parts
    merged.json                     a sign that the run was merged

All .json files appear whole, by link(2), and are never replaced. If several processes write the
same file, the first one counts.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hicachectl.backends.disk.directory import Directory, JointTrust, Trust
from hicachectl.backends.disk.durable import make_directories
from hicachectl.backends.disk.io import NO_ROOM, Closing, file_system_ns
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import HicacheError, UntrustedError, UsageError
from hicachectl.formats.wording import failed
from hicachectl.io.table_files import MOST_BYTES
from hicachectl.parts.manifest import MANIFEST, Manifest, dump, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = "parts"
STORES = ("store", "source", "destination")  # members of a run's identity
_OTHER_RUN = "give another run directory"
LISTING_PREFIX = "listing-"
# Entries that are allowed before the manifest is published. A run or a new file system has them.
_HARMLESS = re.compile(r"listing-[0-9a-f]{16}|\..*|lost\+found")
_RESULT = re.compile(r"([0-9]{5})\.json")


class RunDirectory(Closing):
    """An open run directory; a context manager. Its own errors are UsageError, UntrustedError.

    path: path that the option names.
    """

    def __init__(self, path: Path, directory: Directory) -> None:
        """Take over a directory; `close` closes it."""
        self.path = path
        self.directory = directory

    @classmethod
    def create(cls, path: Path, permissions: Permissions, trust: Trust) -> Self:
        """Open a run directory for work. Create it if it is missing.

        permissions: permissions of the store's listing. Files in the directory get no wider
            permissions.
        trust: trusted owners of the directory and its files.
        Raises UsageError if the directory has no manifest, but files that are not of a run.
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
                trust.permissions = within.intersection(permissions)
                run._refuse_other_files()
            except BaseException:
                run.close()
                raise
        return run

    @classmethod
    def existing(cls, path: Path) -> Self:
        """Open a run directory for merging. The users that `of` describes are trusted."""
        with usage_errors(path), Directory.named(str(path), writes=False) as here:
            return cls.of(here, path)

    @classmethod
    def of(
        cls, here: Directory, path: Path, *, writes: bool = True, any_release: bool = False
    ) -> Self:
        """Return the run directory that is open as `here`. `here` stays open, too.

        Stores of the run that are directories on this machine decide whom to trust. A user is
        trusted if each of these stores trusts the user.
        writes: see `Trust`.
        any_release: see `manifest`.
        """
        trusts = list(_trusts(here, path, writes=writes, any_release=any_release))
        trust = JointTrust(trusts, writes=writes)
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

    # the manifest and its tables

    def manifest(self, *, any_release: bool = False) -> Manifest | None:
        """Read the manifest. Return None if it is not published.

        any_release: whether to accept the manifest of another release.
        Raises FormatError if the manifest is damaged.
        """
        with usage_errors(self.path):
            try:
                content = self.directory.read(MANIFEST, MOST_BYTES + 1)
            except FileNotFoundError:
                return None
        return parse_manifest(content, str(self.path), any_release=any_release)

    def permissions(self) -> Permissions:
        """Return the permissions of the manifest. They are within those of the store's listing."""
        with usage_errors(self.path):
            return Permissions.of_file(self.directory.entries()[MANIFEST])

    def since_published_ns(self) -> int:
        """Return the age of the manifest, by the clock of its file system. Raises OSError.

        The clocks of hosts may differ, but this clock is the same for all hosts.
        """
        descriptor = self.directory.open_file(MANIFEST)
        try:
            published_ns = os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)
        return max(0, file_system_ns(self.directory.descriptor) - published_ns)

    def publish_manifest(self, manifest: Manifest) -> None:
        """Publish the manifest, unless a manifest is published already."""
        self.directory.publish(MANIFEST, dump(manifest))

    def make_listing(self, lister: str) -> Directory:
        """Create a directory for published tables.

        Raises UnsupportedByBackend on a file system without links, where the manifest could not be
        published. So no time is spent on a listing there.
        """
        probe = f".hicachectl-{lister}.tmp"
        self.directory.publish(probe, b"")
        self.directory.remove(probe)
        return self.directory.make_directory(LISTING_PREFIX + lister)

    def listing(self, manifest: Manifest) -> Directory:
        """Open the directory of the published tables."""
        with usage_errors(self.path / manifest.folder):
            return self.directory.directory(manifest.folder)

    def remove_listings(self, besides: str) -> None:
        """Remove the tables of listers that published no manifest.

        Call this only after the manifest was published, because until then another lister may
        publish its tables.
        besides: name of the published directory.
        """
        for name in self.directory.entries():
            if name.startswith(LISTING_PREFIX) and name != besides:
                with suppress(OSError, UntrustedError):  # another process may be removing it, too
                    _remove_tree(self.directory, name)

    def remove_unpublished(self, lister: str) -> None:
        """Remove the tables of a lister unless its manifest was published."""
        name = LISTING_PREFIX + lister
        with suppress(OSError, HicacheError):
            manifest = self.manifest()
            if manifest is None or manifest.folder != name:
                _remove_tree(self.directory, name)

    # results

    def results(self, *, create: bool = False) -> Directory:
        """Open the directory of the results. Raises FileNotFoundError if it is missing."""
        if create:
            return self.directory.make_directory(PARTS, exist_ok=True)
        return self.directory.directory(PARTS)

    def parts_with_result(self) -> set[int]:
        """Return the parts that have a result."""
        with usage_errors(self.path):
            try:
                with self.results() as results:
                    names = results.entries()
            except FileNotFoundError:
                return set()
        return {int(match[1]) for match in map(_RESULT.fullmatch, names) if match}

    def _refuse_other_files(self) -> None:
        names = self.directory.entries()
        strange = next((name for name in names if not _HARMLESS.fullmatch(name)), None)
        # Look for the manifest after listing, because another process may have published it and
        # written results meanwhile.
        if strange is not None and not self.directory.has(MANIFEST):
            raise UsageError(
                f"{self.path}: has other files, such as {strange}; give --run an empty or a new "
                "directory"
            )


def _trusts(
    directory: Directory, path: Path, *, writes: bool, any_release: bool
) -> Iterator[Trust]:
    """Yield the trust of each store of a run that is a directory on this machine."""
    with suppress(FileNotFoundError):
        content = directory.read(MANIFEST, MOST_BYTES + 1)
        manifest = parse_manifest(content, str(path), any_release=any_release)
        for member in manifest.identity.keys() & set(STORES):
            with suppress(UsageError, OSError):
                store = Path(parse_url(str(manifest.identity[member])).path)
                if store.is_absolute() and store.is_dir():
                    yield Trust(store.stat(), writes=writes)


def result_name(part: int) -> str:
    """Return the name of a part's result, without `.json`."""
    return f"{part:05}"


@contextmanager
def usage_errors(path: Path) -> Iterator[None]:
    """Raise UsageError in place of OSError. It has a next step, which depends on the error."""
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
