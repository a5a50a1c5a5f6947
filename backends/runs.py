"""Quarantine runs, opened as stores (`formats.quarantine`).

A run has files of the same form as the store that its objects left, or one pack.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NoReturn, Self

import msgspec
from msgspec import Meta, Struct

from hicachectl import __version__
from hicachectl.backends.base import Store, Traits
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.io import errors_as
from hicachectl.backends.file.folders import ObjectDirectory, mark_folders
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.nixl.store import NixlDisks, NixlStore
from hicachectl.backends.object_files.store import ObjectFiles
from hicachectl.backends.object_files.tree import give_like
from hicachectl.backends.pack.store import PackStore
from hicachectl.backends.urls import StoreUrl, without_secrets
from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError, StoreUnavailable, UnfinishedPackError, UsageError
from hicachectl.formats.forms import convert
from hicachectl.formats.quarantine import PACK_FILE, RUN_FILE, SIDE

if TYPE_CHECKING:
    from collections.abc import Callable

FORM = 1
_MAX_RUN_BYTES = 64 << 10
_LAST_MOMENT = 1e11  # latest possible time, Unix seconds


class RunForm(Struct, frozen=True, kw_only=True):
    """The content of run.json.

    run: name of the folder.
    store: URL of the store, without secrets.
    scheme: `file` or `nixl` if the run has files, `pack` if it has one pack.
    grammar: key grammar of the store.
    begin: time at which the removal began, by the clock of the store, Unix seconds.
    version: version of hicachectl that made the run.
    """

    form: int
    run: str
    store: str
    scheme: Literal["file", "nixl", "pack"]
    grammar: str
    begin: Annotated[float, Meta(ge=0, le=_LAST_MOMENT)]
    version: str


def _dump_run(form: RunForm) -> bytes:
    """Return the content of run.json."""
    return msgspec.json.format(msgspec.json.encode(form), indent=2) + b"\n"


def _parse_run(text: bytes, source: str) -> RunForm:
    """Parse run.json. Raises FormatError."""
    next_step = "move its folder out of the quarantine to go on without it"
    try:
        document = parse_json_object(text, "JSON")
        if document.get("form") != FORM:
            raise FormatError(
                f"has form {document.get('form')!r:.60}, but this version reads form {FORM}"
            )
        return convert(document, RunForm, "JSON")
    except FormatError as error:
        why = f"not a quarantine run of form {FORM} ({str(error)[:200]})"
        raise FormatError(f"{source}: {why}; {next_step}") from error


def begin_run(
    run: Directory,
    name: str,
    store: Store,
    begin_ns: int,
    *,
    describe: Callable[[Directory, RunForm], None] = lambda side, form: None,
) -> RunForm:
    """Turn an empty folder into a run for objects of a store, durably. Raises OSError.

    describe: writes the other files that describe the run, durably. run.json is written last, so a
        folder without run.json has never had an object.
    """
    scheme: Literal["file", "nixl", "pack"] = "pack"
    if isinstance(store, ObjectFiles):
        scheme = "nixl" if isinstance(store, NixlStore) else "file"
    form = RunForm(
        form=FORM,
        run=name,
        store=without_secrets(store.url),
        scheme=scheme,
        grammar=store.grammar,
        begin=begin_ns // 1000 / 1e6,
        version=__version__,
    )
    with run.make_directory(SIDE) as side:
        if isinstance(store, FileStore) and store.objects.folders:
            mark_folders(side)
        describe(side, form)
        side.write(RUN_FILE, _dump_run(form))
    return form


def make_run_folder(parent: Directory, name: str, store: Store) -> Directory:
    """Make the folder of a run durably.

    In a store of files, the folder gets the owner, group and mode of the store's directory.
    Raises OSError, and FileNotFoundError if another process has removed the folder.
    """
    made = parent.make_directory(name)
    if not isinstance(store, ObjectFiles):
        return made
    with made:
        give_like(made.descriptor, os.fstat(store.objects.descriptor))
    return open_run_folder(parent, name, writes=True)


def open_run_folder(parent: Directory, name: str, *, writes: bool) -> Directory:
    """Open the folder of a run.

    The users who may own its files are derived from the owner, group and mode of the folder; see
    `Directory.again`. In a store of files, the folder and the store's directory have one owner.
    Raises OSError. Raises UntrustedError if the folder's owner is not trusted and users other than
    the owner of the quarantine may have made the folder.
    """
    with parent.directory(name, any_owner=not parent.mode & 0o022) as opened:
        return Directory.again(opened.descriptor, opened.path, writes=writes)


def read_run(run: Directory) -> RunForm | None:
    """Return the content of a folder's run.json; None if the file is missing.

    Raises OSError, UntrustedError, FormatError.
    """
    try:
        with run.directory(SIDE) as side:
            text = side.read(RUN_FILE, _MAX_RUN_BYTES + 1)
    except FileNotFoundError:
        return None
    source = f"{run.path}/{SIDE}/{RUN_FILE}"
    if len(text) > _MAX_RUN_BYTES:
        raise FormatError(f"{source}: larger than {_MAX_RUN_BYTES} bytes; move its folder away")
    return _parse_run(text, source)


def open_run(
    run: Directory, form: RunForm, *, create: bool = False, jobs: int | None = None
) -> Store:
    """Open a run as a store, which no server writes to.

    create: open the run for a repair that fills it.
    jobs: number of calls at once in a run with files; None finds the number while calls run.
    Raises OSError, StoreUnavailable, UntrustedError. Raises UnfinishedPackError if the run's pack
    is missing or not finished. Then the repair was killed before an object left the store.
    """
    if form.scheme != "pack":
        files = _open_files(run, form)
        if jobs is not None:
            files.concurrency.limit(jobs)
        return files
    path = f"{run.path}/{PACK_FILE}"
    if create:
        url = StoreUrl("pack", path, params={"keys": form.grammar})
        return PackStore.create(url)
    try:
        st = os.stat(PACK_FILE, dir_fd=run.descriptor, follow_symlinks=False)
    except FileNotFoundError as error:
        raise UnfinishedPackError(f"{path}: missing; no page has left the store") from error
    if not stat.S_ISREG(st.st_mode):
        raise StoreUnavailable(f"{path}: not a regular file; move it out of the run")
    run.check(PACK_FILE, st)
    return PackStore(path)


def _open_files(run: Directory, form: RunForm) -> ObjectFiles:
    descriptor = os.dup(run.descriptor)
    if form.scheme == "file":
        return _RunFiles(run.path, ObjectDirectory.within(run.path, descriptor))
    return _RunNixl(form.grammar, NixlDisks.of_run(run.path, descriptor))


class _RunFiles(FileStore):
    """A run with the files of a file store."""

    traits: ClassVar[Traits] = replace(FileStore.traits, live=False, writes=False, deletes=False)


class _RunNixl(NixlStore):
    """A run with the files of a NIXL store, in one directory."""

    traits: ClassVar[Traits] = replace(NixlStore.traits, live=False, writes=False, deletes=False)

    def __init__(self, grammar: str, disks: NixlDisks) -> None:
        self._grammar = grammar
        url = str(StoreUrl("file", disks.path))
        ObjectFiles.__init__(self, disks, disks.path, url, disks.sample)


class QuarantineRun(Store):
    """Opener of runs. `from_url` returns a store of another class."""

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the run in the directory of a `file:` URL, as its run.json says."""
        action, next_step = "open the quarantine run", "check its permissions"
        with (
            errors_as(StoreUnavailable, url.path, action, next_step),
            Directory.named(url.path, writes=False) as run,
        ):
            form = read_run(run)
            if form is None:
                raise StoreUnavailable(f"{run.path}: is no longer a quarantine run; run again")
            return open_run(run, form)  # type: ignore[return-value]

    @classmethod
    def create(cls, url: StoreUrl) -> NoReturn:
        """Raise UsageError, because only a repair fills a run."""
        raise UsageError(
            f"{url.path}: is a quarantine run, which only verify --repair fills; give another "
            "directory"
        )
