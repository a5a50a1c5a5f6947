"""Watch a file store while a command removes or restores objects, and break chosen steps.

After every rename and unlink, check the directory as a server could see it: a page with an anchor
must have all its sidecars. In the demo and in the DSA store, an anchor has "_" after the page hash,
and a sidecar ".".
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk import durable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import pytest

HASH_DIGITS = 64


def is_anchor(name: str) -> bool:
    return name[HASH_DIGITS] == "_"


def anchors(names: Collection[str], page: str = "") -> list[str]:
    """Return the anchors of a page, or of all pages."""
    return [name for name in sorted(names) if is_anchor(name) and name.startswith(page)]


def sidecars(names: Collection[str], page: str = "") -> list[str]:
    """Return the sidecars of a page, or of all pages."""
    return [name for name in sorted(names) if not is_anchor(name) and name.startswith(page)]


class Watch:
    """Looks at a directory. half: pages seen with an anchor but without one of their sidecars."""

    def __init__(self, directory: Path, whole: Collection[str]) -> None:
        self.half: set[str] = set()
        self.steps = 0
        self._directory = directory
        self._sidecars = sidecars(whole)

    def look(self) -> None:
        """Record the pages that a server would now wrongly treat as present."""
        self.steps += 1
        there = set(os.listdir(self._directory))  # noqa: PTH208 - also within a patched os
        believed = {n[:HASH_DIGITS] for n in there if len(n) > HASH_DIGITS and is_anchor(n)}
        lacking = (name[:HASH_DIGITS] for name in self._sidecars if name not in there)
        self.half |= believed.intersection(lacking)

    def holds(self, descriptor: int | None) -> bool:
        """Return whether a descriptor belongs to the directory."""
        if descriptor is None:
            return False
        return Path(f"/proc/self/fd/{descriptor}").readlink() == self._directory


@contextmanager
def watched(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    whole: Collection[str],
    *,
    stuck: Collection[str] = (),
    refused: Collection[str] = (),
) -> Iterator[Watch]:
    """Watch a directory. stuck: names that cannot leave; refused: names that cannot arrive.

    whole: names of all objects of its pages.
    """
    watch = Watch(directory, whole)
    unlink, rename, link = os.unlink, os.rename, os.link
    rename_noreplace = durable.rename_noreplace

    def check(name: Any, descriptor: int | None, broken: Collection[str]) -> None:
        if watch.holds(descriptor) and os.fsdecode(name) in broken:
            raise OSError(errno.EIO, "broken on purpose")

    def unlinked(name: Any, *, dir_fd: int | None = None) -> None:
        check(name, dir_fd, stuck)
        unlink(name, dir_fd=dir_fd)
        watch.look()

    def two_named(call: Callable[..., None]) -> Callable[..., None]:
        def named(
            name: Any,
            new: Any,
            *,
            src_dir_fd: int | None = None,
            dst_dir_fd: int | None = None,
            **options: Any,
        ) -> None:
            if call is rename:
                check(name, src_dir_fd, stuck)
            check(new, dst_dir_fd, refused)
            call(name, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **options)
            watch.look()

        return named

    def renamed(here: int, name: Any, there: int, new: Any) -> bool:
        check(name, here, stuck)
        check(new, there, refused)
        done = rename_noreplace(here, name, there, new)
        watch.look()
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlinked)
        patch.setattr(os, "rename", two_named(rename))
        patch.setattr(os, "link", two_named(link))
        patch.setattr(durable, "rename_noreplace", renamed)
        yield watch
