"""Stores and quarantines written by earlier releases, some of them by killed runs.

Each archive of `tests/data/quarantines` is the state after one run; its name ends with the commit
of the code. `hicache` is the store, and `quarantine` a directory of another file system. Objects
have tens to a thousand bytes: pages of a model with an indexer, of a model of TP 2 with some Mamba
states, and with ambiguous keys.
"""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

QUARANTINES = Path(__file__).parents[1] / "data" / "quarantines"
RELEASES = ("c343c6e", "e5bd0ea")

_ROOT = "/mnt"  # parent of the trees when they were written


@dataclass(frozen=True, slots=True)
class Earlier:
    """A tree of an earlier release. elsewhere: its directory of another file system."""

    root: Path
    elsewhere: Path
    command: tuple[str, ...]

    @property
    def store(self) -> Path:
        return self.root / "hicache"

    @property
    def profile(self) -> Path:
        return self.root / "profile.toml"

    @property
    def quarantine(self) -> Path:
        beside = self.store / ".hicachectl" / "quarantine"
        return beside if beside.exists() else self.elsewhere


def place(archive: Path, root: Path, *, elsewhere: Path | None = None) -> Earlier:
    """Unpack an archive's tree to a directory, and its `quarantine` to another place below it."""
    elsewhere = elsewhere or root / "quarantine"
    with tarfile.open(archive) as tar:
        for member in tar:
            first, *rest = Path(member.name).parts
            path = elsewhere.joinpath(*rest) if first == "quarantine" else root / member.name
            _put(tar, member, path)
    about = json.loads((root / "about.json").read_text())
    command = (word.replace(_ROOT, str(root)) for word in about.get("command", ()))
    return Earlier(root, elsewhere, tuple(command))


def _put(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
    else:
        stream = tar.extractfile(member)
        assert stream is not None
        path.write_bytes(stream.read())
        seconds, _, fraction = member.pax_headers.get("mtime", "0").partition(".")
        time_ns = int(seconds) * 10**9 + int(fraction.ljust(9, "0"))  # a float would round it
        os.utime(path, ns=(time_ns, time_ns))
    path.chmod(member.mode)
