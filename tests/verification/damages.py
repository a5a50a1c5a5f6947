"""A sample store, and damage to it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tests.move.repairs import shorten
from tests.stores import page, put, put_pages

if TYPE_CHECKING:
    from pathlib import Path

PAGES = 24


def objects(store: Path, kind: str) -> list[Path]:
    """Return the demo's objects of a kind, such as `.mamba`, in one order."""
    return sorted(path for path in store.glob("*.bin") if path.name[64:].startswith(kind))


def lacking(store: Path) -> None:
    """Remove an anchor of one page, and a Mamba state of another."""
    objects(store, "_")[5].unlink()
    objects(store, ".mamba")[3].unlink()


def cut(store: Path) -> None:
    """Shorten some objects and lengthen others."""
    for nbytes, path in enumerate(objects(store, "_")[1:40:9], 1):
        shorten(path, nbytes)
    with objects(store, "_")[2].open("ab") as stream:
        stream.write(b"more")


def odd_values(store: Path) -> None:
    """Write NaNs into one object, and zeros over another."""
    for number, content in ((7, b"\xc0\x7f" * 64), (30, bytes(1 << 14))):
        path = objects(store, "_")[number]
        facts = path.stat()
        with path.open("r+b") as stream:
            stream.write(content)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def flipped(store: Path) -> None:
    """Change bytes without a change of size or time."""
    for path in objects(store, "")[::11]:
        facts = path.stat()
        with path.open("r+b") as stream:
            stream.write(b"\x01\x02\x03\x04")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def foreign(store: Path) -> None:
    """Add files that are no objects, and temporary ones."""
    put(store, "notes.txt")
    put(store, ".hicachectl-0123456789abcdef0123456789abcdef.tmp")
    put(store, f"{page(1)}.bin")


def ambiguous(store: Path) -> None:
    """Add keys with two readings."""
    put_pages(store, range(9), "_m_0_1_2", "_m_0_2_2")


def several_sizes(store: Path) -> None:
    """Add another model, whose pages have two common sizes."""
    put_pages(store, range(100, 112), "_other_0_1", nbytes=512)
    put_pages(store, range(112, 124), "_other_0_1", nbytes=1024)


def fresh(store: Path) -> None:
    """Add incomplete pages that were written just now."""
    put_pages(store, range(200, 206), "_m_0_2", mtime=time.time())


def emptied(store: Path) -> None:
    """Remove everything."""
    for path in objects(store, ""):
        path.unlink()


def at_once(store: Path) -> None:
    """Do all damage at once."""
    for damage in (lacking, cut, odd_values, flipped, foreign, ambiguous, several_sizes, fresh):
        damage(store)


DAMAGE = (
    lambda store: None,
    lacking,
    cut,
    odd_values,
    flipped,
    foreign,
    ambiguous,
    several_sizes,
    fresh,
    emptied,
    at_once,
)
