"""Examine servers and their store with every check of `doctor`. Basic causes come first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import pyarrow as pa

from hicachectl.backends.capabilities import SideFiles
from hicachectl.backends.disk.statuses import SERVING, read_statuses
from hicachectl.checks.codes import STORE
from hicachectl.doctor.checks import (
    FAIL,
    OK,
    REQUESTS,
    UNKNOWN,
    WARN,
    Check,
    CheckRow,
    ordered,
    verdict_of,
)
from hicachectl.doctor.deployments import deployment_checks
from hicachectl.doctor.exposition import CACHED
from hicachectl.doctor.listed_store import ListedStore, list_store
from hicachectl.doctor.live import live_checks
from hicachectl.doctor.live_server import LiveServer, ask_server
from hicachectl.doctor.probing import write_probe
from hicachectl.doctor.requests import GivenRequests, request_checks
from hicachectl.doctor.same_store import same_store_checks, started_of
from hicachectl.doctor.settings import setting_checks
from hicachectl.doctor.stores import store_checks
from hicachectl.doctor.text import check_lines
from hicachectl.doctor.watching import Watched, watch
from hicachectl.formats.errors import HicacheError, ProfileError, UsageError
from hicachectl.profiles.sources import agree_to_look
from hicachectl.requests.chains import Hashing
from hicachectl.requests.measuring import HitsRequest
from hicachectl.results import Result
from hicachectl.text.jsontext import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from fractions import Fraction

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.statuses import RankStatus
    from hicachectl.doctor.request import DoctorRequest
    from hicachectl.formats.profile import Profile
    from hicachectl.requests.chains import Requests
    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen

_ROWS = "checks"
_SERVERS_AT_ONCE = 32
_LONGEST_TEXT = 4000


class DoctorDocument(TypedDict):
    """Document of `doctor`."""

    checks: list[CheckRow]
    verdict: str


def examine(
    request: DoctorRequest,
    store: Store | None,
    *,
    problem: str = "",
    on_wait: Callable[[float], None] = lambda seconds: None,
) -> Result:
    """Check servers and their store. Nothing is changed without `write_probe`.

    store: the open store; None if it cannot be opened.
    problem: why the store cannot be opened, and the next step; "" if it is open.
    on_wait: function that is called before the wait between two looks, with its seconds.
    For an unreachable server or store, the result has a check that fails. Raises UsageError for a
    malformed URL, and for requests that cannot be read.
    """
    with ThreadPoolExecutor(_SERVERS_AT_ONCE) as pool:  # a server that hangs takes ten seconds
        servers = list(pool.map(lambda url: ask_server(url, request), request.servers))
    profile = _profile(servers, request)
    statuses = _statuses(store)
    servers = [replace(one, started=started_of(one, statuses)) for one in servers]
    given = None if request.read is None else _requests(request, profile, servers)
    listed = _listed(store, profile, request, problem)
    listed = replace(
        listed,
        has_servers=bool(servers),
        started=next((one.started for one in servers if one.started is not None), None),
        weights=frozenset(
            one.status.weights for one in statuses if one.standing == SERVING and one.status.weights
        ),
    )
    looks = watch(servers, listed, request.watch_seconds, on_wait)
    statuses = _statuses(store)
    checks: list[Check] = []
    explained: set[Fraction] = set()
    shared: set[str] = set()
    for server, look in zip(servers, looks, strict=True):
        settings = setting_checks(server)
        same = same_store_checks(server, store, look.first, look.second, look.new_pages)
        hashing = _hashing(server.profile, [server])
        if request.write_probe and hashing is not None and verdict_of(same) != FAIL:
            probed = write_probe(server, listed, hashing)
            known = [check for check in same if check.status != UNKNOWN]
            same = [*(same if probed.status == UNKNOWN else known), probed]
        checks += settings + same
        shared.add(verdict_of(same))
        if verdict_of(same) != FAIL:  # another store has no pages of this server to compare
            compared, scale = deployment_checks(
                server, listed, request.profile, request.request_words
            )
            checks += compared
            explained |= set() if scale is None else {scale}
    listed = replace(
        listed,
        explained=frozenset(explained),
        is_shared=shared == {OK},
        is_explained=verdict_of(checks) == FAIL,
    )
    checks += store_checks(listed)
    for server, look in zip(servers, looks, strict=True):
        checks += live_checks(
            server,
            look.first,
            look.second,
            statuses,
            mending=listed.mending,
            has_requests=given is not None,
        )
    if isinstance(given, Check):
        checks.append(given)
    elif given is not None:
        measured = _given(request, given, listed, servers, looks)
        checks += request_checks(listed, measured, explained=verdict_of(checks) in (WARN, FAIL))
    return result_of(checks, list(_unchecked(request, listed)))


def _unchecked(request: DoctorRequest, listed: ListedStore) -> Iterator[str]:
    """Yield what is not checked, each with the option that makes `doctor` check it."""
    if not request.servers:
        yield "servers (--server)"
        if listed.profile is None or listed.profile.inferred:
            yield "the values and the deployment of the pages (--profile)"
    if request.read is None:
        yield "requests (--trace)"


def result_of(checks: Sequence[Check], unchecked: Sequence[str] = ()) -> Result:
    """Return checks as the result of `doctor`. unchecked: see `verdict_text`."""
    found = [_bounded(check) for check in ordered(checks)]
    rows: list[CheckRow] = [
        {
            "name": check.name,
            "group": check.group,
            "server": check.server or None,
            "status": check.status,
            "detail": check.detail,
            "evidence": check.evidence or None,
            "next": check.next or None,
        }
        for check in found
    ]
    verdict = verdict_of(found)

    def lines(document: dict[str, Any], screen: Screen, shown: Shown) -> Iterator[str]:
        return check_lines(found, screen, unchecked)

    return Result(
        document={_ROWS: rows, "verdict": verdict},
        rows=pa.Table.from_pylist(rows, schema_of(CheckRow)),
        rows_name=_ROWS,
        lines=lines,
        failed=verdict == FAIL,
    )


def _bounded(check: Check) -> Check:
    """Return a check with its texts cut, because a server can send megabytes."""
    texts = {name: getattr(check, name)[:_LONGEST_TEXT] for name in ("detail", "evidence", "next")}
    return replace(check, **texts)


def _profile(servers: Sequence[LiveServer], request: DoctorRequest) -> Profile | None:
    """Return the profile of the first server that has one; else the profile of the request."""
    return next((server.profile for server in servers if server.profile), request.profile)


def _listed(
    store: Store | None,
    profile: Profile | None,
    request: DoctorRequest,
    problem: str,
) -> ListedStore:
    if store is None:
        return ListedStore(mending=request.mending, problem=problem, profile=profile)
    contradiction = ""
    try:
        profile, contradiction = agree_to_look(store, profile)
    except UsageError:
        raise
    except HicacheError as error:
        contradiction = str(error)
    listed = list_store(store, profile, sample_pages=request.sample_pages)
    return replace(
        listed,
        contradiction=contradiction or listed.contradiction,
        mending=listed.mending if request.mending.store == STORE else request.mending,
    )


def _statuses(store: Store | None) -> Sequence[RankStatus]:
    """Return the statuses of the servers' plug-ins in the store; none if they cannot be read."""
    if not isinstance(store, SideFiles):
        return ()
    try:
        side = store.open_side_directory(writes=False)
        if side is None:
            return ()
        with side:
            return read_statuses(side).statuses
    except (OSError, HicacheError):
        return ()  # `live_checks` reports that the counters of the plug-in are not known


def _requests(
    request: DoctorRequest, profile: Profile | None, servers: Sequence[LiveServer]
) -> Requests | Check:
    """Read the requests; return a check if their tokens cannot be hashed."""
    assert request.read is not None
    hashing = _hashing(profile, servers)
    try:
        return request.read(hashing)
    except UsageError:
        if hashing is not None:
            raise
        return Check(
            "hashing",
            UNKNOWN,
            "Requests are not judged, because neither a server nor a profile states the page size",
            group=REQUESTS,
            next="give --page-size, or --profile",
        )


def _given(
    request: DoctorRequest,
    requests: Requests,
    listed: ListedStore,
    servers: Sequence[LiveServer],
    looks: Sequence[Watched],
) -> GivenRequests:
    """Return the requests, and how many tokens the first answering server has restored."""
    measured = HitsRequest(requests=requests, profile=listed.profile, threshold=request.threshold)
    for server, look in zip(servers, looks, strict=True):
        if not server.problem:
            counted = look.second.samples is not None
            restored = int(look.second.value(CACHED, cache_source="storage")) if counted else None
            return GivenRequests(
                request=measured, words=request.request_words, server=server.url, restored=restored
            )
    return GivenRequests(request=measured, words=request.request_words)


def _hashing(profile: Profile | None, servers: Sequence[LiveServer]) -> Hashing | None:
    """Return the hashing of the profile or, without a profile, of a server's flags.

    Return None if neither tells.
    """
    if profile is not None:
        return Hashing.of(profile)
    for server in servers:
        if server.deployment is None:
            continue
        flags = server.deployment.flags
        with suppress(ProfileError):  # a release or an algorithm that is not known
            return Hashing.of_flags(flags.page_tokens, flags.speculative_algorithm, flags.sglang)
    return None
