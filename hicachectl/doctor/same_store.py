"""Find out whether a server writes into the store that the command was given.

An equal path proves nothing, because a container has its own mounts, and because an environment
variable that the server shows nowhere can override its settings.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.backends.urls import parse_url, without_secrets, written_store
from hicachectl.doctor.checks import FAIL, OK, SAME_STORE, UNKNOWN
from hicachectl.doctor.exposition import (
    BACKUPED,
    FOUND,
    LOST,
    REQUESTS,
    UNCACHED,
    at_least,
    growth,
)
from hicachectl.doctor.processes import (
    Place,
    environment_of,
    is_local,
    own_statuses,
    place_of,
    processes_of,
)
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.models.server_info import extra_config, is_plugin
from hicachectl.formats.wording import divided, reason_of
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.statuses import RankStatus
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.doctor.checks import Check
    from hicachectl.doctor.exposition import Look
    from hicachectl.doctor.live_server import LiveServer

_WATCH = "give --watch 30s while the server answers requests, or --write-probe"
_BACKEND = "hicache_storage_backend"
_RARELY_LOST = 0.05  # share of the found tokens
_LOOPBACK = ("127.", "localhost", "[::1]", "0.0.0.0")


class _Answer(NamedTuple):
    """A status, its reason in one sentence, and the next step."""

    status: str
    detail: str
    next: str = ""


class _Unseen(Exception):
    """The place of the server's writes is not known. The message says why."""


def same_store_checks(
    server: LiveServer, store: Store | None, first: Look, second: Look, new_pages: int | None
) -> list[Check]:
    """Return the check of whether a server and a command use one store.

    There is no check without a store, for a server that does not answer, or for a server without a
    storage backend.

    store: the open store of the command; None if it could not be opened.
    first: first look at `/metrics`.
    second: later look at `/metrics`.
    new_pages: pages of the server's deployment that appeared between the looks; None if they were
        not counted.
    """
    if server.problem or store is None or not server.settings.get(_BACKEND):
        return []
    place = _by_place(server, store)
    pages = _by_pages(server, first, second, new_pages)
    if place.status == UNKNOWN:
        answer, evidence = pages, place.detail
    elif place.status == FAIL and pages.status == OK:
        # Another server may have written the pages, or an overlay shows one directory as two.
        answer, evidence = _Answer(UNKNOWN, place.detail, place.next), pages.detail
    else:
        answer, evidence = place, ""
    return [
        server.check(
            "same-store",
            answer.status,
            answer.detail,
            group=SAME_STORE,
            evidence=evidence,
            next=answer.next,
        )
    ]


def started_of(server: LiveServer, statuses: Sequence[RankStatus] = ()) -> float | None:
    """Return the start of a server in Unix seconds; None if it is unknown.

    statuses: statuses in the store, which state the start of a server on another machine.
    """
    started = processes_of(server.url).started
    if started is not None:
        return started
    told = (one.started_ns / 1e9 for one in own_statuses(server, statuses) if one.started_ns)
    return min(told, default=None)


def _by_place(server: LiveServer, store: Store) -> _Answer:
    """Compare the place of the server's writes with the store. If this fails, say why."""
    try:
        return _compared(server, parse_url(store.url), set(store.places))
    except PermissionError:
        why = "The server's processes cannot be looked into; run hicachectl as their user, or root"
    except (_Unseen, HicacheError) as error:
        why = str(error)
    except OSError as error:
        why = f"A process or directory of the server cannot be seen: {reason_of(error)}"
    except ValueError:  # a null character in a path
        why = "The server's settings name no valid path"
    return _Answer(UNKNOWN, why)


def _compared(server: LiveServer, ours: StoreUrl, places: set[Any]) -> _Answer:
    """Compare kinds, addresses or directories. Raises _Unseen, HicacheError and OSError."""
    theirs = _written_store(server, {})
    if theirs.scheme != ours.scheme and (ours.kind.served or ours.kind.directories):
        what = f"The server writes a {theirs.scheme} store, but STORE is {_safe(ours)}"
        return _Answer(FAIL, what, "give the server's own store")
    if theirs.host:
        return _by_address(theirs, ours)
    for pid in _schedulers(server):
        theirs = _written_store(server, environment_of(pid))
        if theirs.host:
            return _by_address(theirs, ours)
        if not theirs.path:
            raise _Unseen("The server's settings do not name its store")
        answer = _by_directory(pid, theirs, ours, places, server.url)
        if answer.status != OK:
            break
    return answer


def _written_store(server: LiveServer, environment: Mapping[str, str]) -> StoreUrl:
    backend = str(server.settings[_BACKEND])
    extra = extra_config(server.settings, "server_info")
    known = backend != "dynamic" or is_plugin(extra)
    written = written_store(backend, extra, environment) if known else None
    if written is None:
        raise _Unseen(f"The server's storage backend {shown(backend)} is not known")
    return written


def _schedulers(server: LiveServer) -> Sequence[int]:
    processes = processes_of(server.url)
    if processes.problem:
        raise _Unseen(processes.problem)
    return processes.schedulers


def _by_address(theirs: StoreUrl, ours: StoreUrl) -> _Answer:
    """Compare the addresses of two services. Two names of one service are not recognised."""
    if ours.host == theirs.host and not ours.host.startswith(_LOOPBACK):
        return _Answer(OK, f"The server and STORE use one master, {_safe(theirs)}")
    return _Answer(UNKNOWN, f"The server uses {_safe(theirs)}, but STORE is {_safe(ours)}")


def _by_directory(
    pid: int, theirs: StoreUrl, ours: StoreUrl, places: set[Any], url: str
) -> _Answer:
    """Compare the directories that a scheduler sees with the store's, by device and inode."""
    for path in theirs.paths:
        try:
            place = place_of(pid, path)
        except FileNotFoundError:
            raise _Unseen(f"The server's directory {_safe(path)} does not exist") from None
        if place in places:
            continue
        both = (
            f"The server writes into {_safe(path)} (device {place.device}, inode {place.inode}, "
            f"seen by process {pid}), but STORE is {_safe(ours)}"
        )
        if not _are_apart(pid, place.device, places):
            raise _Unseen(f"{both}; their file systems can show one directory as two")
        return _Answer(FAIL, f"{both}, another directory", _examined(theirs, path, place, url))
    return _Answer(OK, f"The server and STORE use one directory, {_safe(theirs.path)}")


def _examined(theirs: StoreUrl, path: str, place: Place, url: str) -> str:
    """Return the command that examines the server's directory.

    If this process does not see the directory, return other advice.
    """
    words = shlex.quote(theirs.path if theirs.kind.directory else str(theirs))
    with suppress(OSError):
        seen = Path(path).stat()
        if path.startswith("/") and (seen.st_dev, seen.st_ino) == place:
            return f"hicachectl doctor {words} --server {url}"
    return "examine the server's directory where the server runs, or mount STORE there"


def _are_apart(pid: int, device: int, places: set[Any]) -> bool:
    """Return whether a directory with another device or inode than `places` is another directory.

    A file system that is mounted twice can show one directory with two devices.

    pid: process that sees the directory.
    device: device of the directory.
    places: devices and inodes of the store's directories.
    """
    devices = {place[0] for place in places if isinstance(place, tuple)}
    if not devices:
        return False
    return devices == {device} or (
        is_local(pid, device) and all(is_local(os.getpid(), one) for one in devices)
    )


def _by_pages(server: LiveServer, first: Look, second: Look, new_pages: int | None) -> _Answer:
    """Compare the tokens that the server wrote with the pages that appeared in the store.

    A server also counts pages as written that its store already had.
    """
    grown = growth(first, second)
    if grown is None:
        return _Answer(UNKNOWN, "The server was restarted between two looks", _WATCH)
    if grown.samples is None:
        what, next_step = divided(grown.problem)
        return _Answer(UNKNOWN, f"The writes of the server are not known: {what}", next_step)
    written = int(grown.value(BACKUPED))
    what = f"The server wrote {counted(written, 'token')} between two looks"
    if new_pages is None or not written:
        return _Answer(UNKNOWN, what if not written else f"{what}; STORE was not listed", _WATCH)
    what = f"{what}, and {counted(new_pages, 'page')} appeared in STORE"
    if new_pages:
        return _Answer(OK, what)
    if _must_be_new(server, grown, second):
        remedy = "compare the server's storage settings and mounts with STORE"
        said = f"{what}, although the server's store lacked some of the written pages"
        return _Answer(FAIL, said, remedy)
    return _Answer(UNKNOWN, f"{what}; perhaps STORE already had the written pages", _WATCH)


def _must_be_new(server: LiveServer, grown: Look, totals: Look) -> bool:
    """Return whether some of the written pages were not in the server's store before.

    A long request looks up its first page. If nothing was found, this page was missing. If all
    computed tokens were written, this page was written. This proves nothing for two kinds of
    servers:

    - A server that loses found pages computes and writes pages again that its store has.
    - A plug-in replaces pages that it refuses.
    """
    if server.deployment is None or server.settings.get(_BACKEND) == "dynamic":
        return False
    flags = server.deployment.flags
    fewest, _ = at_least(grown, flags.least_looked_up)
    whole_pages = grown.value(f"{UNCACHED}_sum") - flags.page_tokens * grown.value(REQUESTS)
    return (
        fewest > 0
        and not grown.value(FOUND)
        and grown.value(BACKUPED) >= whole_pages
        and totals.value(LOST) <= _RARELY_LOST * totals.value(FOUND)
    )


def _safe(place: object) -> str:
    return without_secrets(str(place))[:400]
