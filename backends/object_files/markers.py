"""Markers on disk: one file each in `.hicachectl/plugin/` of a file store."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from hicachectl.backends.disk.io import entries_of
from hicachectl.backends.object_files.tree import SIDE_DIRECTORY
from hicachectl.formats.errors import FormatError
from hicachectl.formats.marker import MAX_MARKER_BYTES, Marker, dump_marker, parse_marker

if TYPE_CHECKING:
    from hicachectl.backends.disk.directory import Directory

MARKER_DIRECTORY = "plugin"
MAX_MARKERS = 1 << 16  # of all identities that ever wrote to the store
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}\.json")

__all__ = ["Marker", "read_markers", "write_marker"]


def write_marker(directory: Directory, marker: Marker) -> None:
    """Write a marker durably, unless it is there; several processes may write it at once.

    directory: the store's. Raises OSError, UntrustedError.
    """
    with (
        directory.make_directory(SIDE_DIRECTORY, exist_ok=True) as side,
        side.make_directory(MARKER_DIRECTORY, exist_ok=True) as markers,
    ):
        if not markers.has(marker.name):
            markers.write(marker.name, dump_marker(marker), shared=True)


def read_markers(directory: Directory) -> list[Marker]:
    """Return the markers of a store, sorted by file name.

    directory: the store's. Files with other names, such as unfinished ones, are ignored.
    Raises OSError, UntrustedError, and FormatError, which names the file.
    """
    found: list[Marker] = []
    with (
        suppress(FileNotFoundError),
        directory.directory(SIDE_DIRECTORY) as side,
        side.directory(MARKER_DIRECTORY) as markers,
    ):
        for name in _names(markers):
            with suppress(FileNotFoundError):  # removed since it was listed
                found.append(_read(markers, name))
    return found


def _names(markers: Directory) -> list[str]:
    with entries_of(markers.descriptor) as entries:
        names = [entry.name for entry in islice(entries, MAX_MARKERS + 1)]
    if len(names) > MAX_MARKERS:
        raise FormatError(
            f"{markers.path}: has more than {MAX_MARKERS} files; remove those of identities that "
            "no server uses"
        )
    return sorted(name for name in names if _NAME.fullmatch(name))


def _read(markers: Directory, name: str) -> Marker:
    source = f"{markers.path}/{name}"
    marker = parse_marker(markers.read(name, MAX_MARKER_BYTES + 1), source)
    if marker.name != name:
        raise FormatError(f"{source}: its content belongs under {marker.name}; remove the file")
    return marker
