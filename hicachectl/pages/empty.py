"""Stores without pages: what they have instead, and why they are refused as a source."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import OtherFiles
from hicachectl.formats.errors import EmptyStore
from hicachectl.formats.quarantine import is_quarantine
from hicachectl.formats.wording import with_next

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
    if not isinstance(store, OtherFiles):
        keys = objects.column("key")
        if not len(keys):
            return ""
        first = keys[0].as_py().decode("utf-8", "backslashreplace")
        return (
            f"{store.url} has no pages, only other objects ({len(keys)}), such as {first}; "
            "hicachectl verify --allow-empty describes them"
        )
    directories, others = store.other_files(objects)
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
