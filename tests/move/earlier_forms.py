"""Stores, quarantines and journals written by earlier releases, some of them by killed runs.

Each archive of `tests/data/quarantines` and `tests/data/journals` is the state after one run; its
name ends with the commit of the code. `hicache` is the store, `before` the store's objects before
the run, `quarantine` a directory of another file system, `target` the destination, `after` the
destination after the whole migration, and `home` has the journal. Objects have tens to a thousand
bytes: pages of a model with an indexer, of a model of TP 2 with some Mamba states, and with
ambiguous keys.

A checkout keeps no paths. `place` therefore rewrites the store URLs in journals, their digests and
their file names, which depend on the URLs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stores import Contents, contents

QUARANTINES = Path(__file__).parents[1] / "data" / "quarantines"
JOURNALS = Path(__file__).parents[1] / "data" / "journals"
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
    def target(self) -> Path:
        return self.root / "target"

    @property
    def profile(self) -> Path:
        return self.root / "profile.toml"

    @property
    def quarantine(self) -> Path:
        beside = self.store / ".hicachectl" / "quarantine"
        return beside if beside.exists() else self.elsewhere

    @property
    def before(self) -> Contents:
        """Objects of the store before the run."""
        return contents(self.root / "before")

    @property
    def after(self) -> Contents:
        """Objects of the destination after the whole migration."""
        return contents(self.root / "after")


def objects(directory: Path) -> Contents:
    """Return names, bytes and times of a store's objects, without temporary files."""
    return {name: value for name, value in contents(directory).items() if name[0] != "."}


def place(archive: Path, root: Path, *, elsewhere: Path | None = None) -> Earlier:
    """Unpack an archive's tree to a directory, and its `quarantine` to another place below it."""
    elsewhere = elsewhere or root / "quarantine"
    with tarfile.open(archive) as tar:
        for member in tar:
            first, *rest = Path(member.name).parts
            path = elsewhere.joinpath(*rest) if first == "quarantine" else root / member.name
            _put(tar, member, path)
    about = json.loads((root / "about.json").read_text())
    for journal in sorted(root.glob("home/.local/state/hicachectl/migrations/*.jsonl")):
        _settle_journal(journal, root)
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


def _here(text: str, root: Path) -> str:
    """Return a text with the present paths of the stores."""
    return re.sub(rf"(?<=://){_ROOT}(?=/)", root.as_uri().removeprefix("file://"), text)


def _settle_journal(path: Path, root: Path) -> None:
    """Rewrite the URLs of a journal, and its digests, if any, after checking them."""
    old_start = new_start = 0
    made = b""
    owner = identity = ""
    for line in path.read_bytes().splitlines(keepends=True):
        entry: dict[str, Any] = json.loads(line)
        owner = owner or entry["owner"]
        digest = entry.pop("digest", None)
        assert digest in (None, _digest(owner, old_start, entry))
        entry = json.loads(_here(json.dumps(entry), root))
        identity = identity or json.dumps(entry["identity"], sort_keys=True)
        if digest is not None:
            entry["digest"] = _digest(owner, new_start, entry)
        made += json.dumps(entry).encode() + b"\n"
        old_start += len(line)
        new_start = len(made)
    path.write_bytes(made)
    path.rename(path.with_stem(hashlib.sha256(identity.encode()).hexdigest()[:32]))


def _digest(owner: str, start: int, entry: dict[str, Any]) -> str:
    """Return the digest of a line's entry, its offset and the journal's owner."""
    return hashlib.sha256(json.dumps([owner, start, entry]).encode()).hexdigest()[:32]
