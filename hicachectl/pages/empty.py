"""Stores without pages: what they have instead, and why they are refused as a source."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hicachectl.backends.disk.names import OWN_PREFIX
from hicachectl.backends.file.folders import folder_of
from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import EmptyStore, StoreUnavailable
from hicachectl.formats.quarantine import is_quarantine
from hicachectl.formats.wording import failed, with_next

if TYPE_CHECKING:
    import pyarrow as pa

    from hicachectl.backends.base import Store


def describe_empty(store: Store, objects: pa.Table) -> str:
    """Return what a store without pages has instead, in one line. objects: its listing."""
    return _contents(store, objects) or f"{store.url} is empty; check the URL"


def refuse_empty(store: Store, objects: pa.Table) -> None:
    """Raise EmptyStore, which says what the store has instead of pages. objects: its listing."""
    why = f"{store.url} has no page: not mounted? --allow-empty if that is right"
    raise EmptyStore(with_next(why, _contents(store, objects)))


def _contents(store: Store, objects: pa.Table) -> str:
    """Return what a store without pages has, and the next step; "" if it has nothing."""
    if not isinstance(store, FileStore):
        keys = objects.column("key")
        if not len(keys):
            return ""
        first = keys[0].as_py().decode("utf-8", "backslashreplace")
        return (
            f"{store.url} has no pages, only other objects ({len(keys)}), such as {first}; "
            "hicachectl verify --allow-empty describes them"
        )
    directories, others = _entries(store, objects)
    if is_quarantine(store.path, directories):
        return (
            f"{store.path} is a quarantine, not a store; each run in it is one; put its pages back "
            f"with hicachectl restore {store.path} STORE"
        )
    cleared = _cleared(objects)
    others = sorted(set(others) - set(map(os.fsdecode, cleared)))
    first = sorted(directories)[:1] or others[:1] or list(map(os.fsdecode, cleared[:1]))
    if not first:
        return ""
    before = "from before a server cleared the store"
    kinds = (
        (len(directories), "sub-directory", "sub-directories"),
        (len(others), "other file", "other files"),
        (len(cleared), f"object {before}", f"objects {before}"),
    )
    said = " and ".join(f"{n} {one if n == 1 else many}" for n, one, many in kinds if n)
    name = os.fsencode(first[0]).decode("utf-8", "backslashreplace")
    return (
        f"{store.path} has no HiCacheFile objects, only {said}, the first named {name}; check the "
        "path"
    )


def _cleared(objects: pa.Table) -> list[bytes]:
    """Return the keys of objects that are misses since a server's `clear`."""
    if "cleared_ns" not in objects.column_names:
        return []
    keys: list[bytes] = (
        objects.filter(objects.column("cleared_ns").is_valid()).column("key").to_pylist()
    )
    return keys


def _entries(store: FileStore, objects: pa.Table) -> tuple[list[str], list[str]]:
    """Return the names in a directory, except our own: sub-directories, and the rest.

    The folders of a store that has folders are our own; the listing names their files.
    """
    directories: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(store.path) as entries:
            for entry in entries:
                is_directory = entry.is_dir(follow_symlinks=False)
                if entry.name == os.fsdecode(OWN_PREFIX) or (
                    is_directory and store.objects.is_folder(os.fsencode(entry.name))
                ):
                    continue
                (directories if is_directory else others).append(entry.name)
    except OSError as error:
        next_step = "check that the file system is mounted"
        raise StoreUnavailable(
            failed(store.path, "read the directory", error, next_step)
        ) from error
    if store.objects.folders:
        keys = map(os.fsdecode, objects.column("key").to_pylist())
        others += [key for key in keys if folder_of(os.fsencode(key)) is not None]
    return directories, others
