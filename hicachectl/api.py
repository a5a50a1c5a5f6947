"""The Python interface: what the commands do, without a command line and without output.

Each function takes open stores, raises the errors of `hicachectl.formats.errors`, and returns what
the command of its name writes as JSON. Messages of a run are in the result's `remarks`.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.checks.registry import group_names
from hicachectl.formats.errors import (
    CollidingKeys,
    DeviceError,
    EmptyStore,
    FormatError,
    HicacheError,
    ProfileError,
    StoreUnavailable,
    UnsupportedByBackend,
    UntrustedError,
    UsageError,
)
from hicachectl.formats.profile import Profile
from hicachectl.formats.transfer import retargeted
from hicachectl.io.interrupts import deferred
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES
from hicachectl.pages.selection import Selection
from hicachectl.requests.files import Request
from hicachectl.requests.measuring import HitsReport, HitsRequest, measure_hits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.backends.urls import Config
    from hicachectl.move.batches import TrailerMode
    from hicachectl.move.migration_outcome import MigrationOutcome
    from hicachectl.move.survey import IfExists
    from hicachectl.prewarming.outcome import PrewarmOutcome
    from hicachectl.requests.chains import Requests
    from hicachectl.verification.report import VerifyReport

    ProfileSource = Profile | str | Path | None
    Tokens = Request | Sequence[int]

__all__ = [
    "CollidingKeys",
    "DeviceError",
    "EmptyStore",
    "FormatError",
    "HicacheError",
    "HitsReport",
    "Profile",
    "ProfileError",
    "Request",
    "StoreUnavailable",
    "UnsupportedByBackend",
    "UntrustedError",
    "UsageError",
    "hits",
    "migrate",
    "model_profile",
    "open_store",
    "plan",
    "prewarm",
    "read_profile",
    "retargeted",
    "verify",
]


@contextmanager
def open_store(
    url: str,
    *,
    config: Config | str | Path | None = None,
    create: bool = False,
    allow_leases: bool = False,
    lease_wait: float | None = None,
) -> Iterator[Store]:
    """Open a store, and close it after the block.

    url: as a STORE argument, such as "file:///mnt/hicache" or "prod:". config: the file that names
    stores; None: the user's. create: make a missing directory or pack. allow_leases: let look-ups
    on Mooncake grant leases. lease_wait: seconds to wait before a Mooncake object is replaced;
    None: the store's default. Raises UsageError, FormatError and StoreUnavailable.
    """
    from hicachectl.backends.base import open_store as opened
    from hicachectl.backends.capabilities import Leases
    from hicachectl.backends.urls import Config, load_config

    if not isinstance(config, Config):
        config = load_config(None if config is None else str(config))
    store = opened(url, config=config, create=create)
    try:
        if isinstance(store, Leases):
            store.allow_leases = allow_leases
            if lease_wait is not None:
                store.lease_wait_seconds = lease_wait
        yield store
    finally:
        with deferred():  # close() writes the index of a pack
            store.close()


def read_profile(path: str | Path) -> Profile:
    """Read a profile file, TOML or JSON. Raises UsageError, FormatError and ProfileError."""
    from hicachectl.profiles.sources import read_profile as read

    return read(Path(path))


def model_profile(config: str | Path, **flags: Any) -> Profile:
    """Return the profile of a model's config.json and the flags of its servers.

    flags: fields of `formats.models.flags.DeploymentFlags`, such as model, tp, page_size and
    storage_backend ("file", "hf3fs" or "mooncake"). Raises UsageError, FormatError and
    ProfileError.
    """
    from hicachectl.formats.models.config import profile_from_config
    from hicachectl.formats.models.flags import DeploymentFlags
    from hicachectl.profiles.server import read_model_config

    path = Path(config)
    return profile_from_config(read_model_config(path), DeploymentFlags(**flags), source=str(path))


def verify(
    store: Store,
    profile: ProfileSource = None,
    *,
    checks: Sequence[str] | None = None,
    model: str | None = None,
    pool: str | None = None,
    page: str | None = None,
    since: float | None = None,
    grace_seconds: float = 60.0,
    sample_percent: float | None = None,
    sample_slice: int | None = None,
    time_limit_seconds: float | None = None,
    catalog: str | Path | None = None,
    weights_version: str = "",
    allow_empty: bool = False,
    device: str = "cpu",
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    bytes_per_second: int | None = None,
    jobs: int | None = None,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> VerifyReport:
    """Check a store, and change nothing.

    profile: the deployment to expect; None: what a pack records, else objects are compared with
    each other. checks: names of check groups; None: all that apply. model, pool, page, since: as in
    `Selection`. catalog: file of digests to compare with. allow_empty: accept a store without
    pages. Callbacks: see `check_store`.

    Raises UsageError if a check in `checks` cannot run, and for options; ProfileError if the
    profile contradicts the store; EmptyStore; StoreUnavailable; DeviceError.
    """
    from hicachectl.checks.catalogs import load_catalog
    from hicachectl.device.devices import parse_devices
    from hicachectl.profiles.sources import agree_to_look
    from hicachectl.verification.report import describe_store, report_of
    from hicachectl.verification.request import VerifyRequest
    from hicachectl.verification.sampling import Sample
    from hicachectl.verification.verify import check_store

    agreed, collision = agree_to_look(store, _profile(profile))
    request = VerifyRequest(
        profile=agreed,
        collision=collision,
        checks=_check_names(checks),
        selection=Selection(model=model, pool=pool, page=page, since=since),
        grace_seconds=grace_seconds,
        sample=None if sample_percent is None else Sample.of(sample_percent, sample_slice),
        time_limit_seconds=time_limit_seconds,
        catalog=None if catalog is None else load_catalog(Path(catalog)),
        weights_version=weights_version,
        allow_empty=allow_empty,
        devices=parse_devices(device),
        buffer_bytes=buffer_bytes,
        bytes_per_second=bytes_per_second,
        jobs=jobs,
    )
    if checks is not None:
        for check, why in request.impossible(store).items():
            raise UsageError(f"checks: {check} cannot run: {why}; or leave out {check}")
    checked = check_store(store, request, on_listed=on_listed, on_read=on_read, on_wait=on_wait)
    described = describe_store(store, request)
    return report_of([checked.result], described, checked.inventory.table, request)


def hits(
    store: Store,
    requests: Iterable[Tokens],
    profile: ProfileSource = None,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> HitsReport:
    """Return how much of each request a store can serve, and which object stops it.

    requests: token ids of each, or `Request` where a cache salt or an extra key counts.
    profile: of the servers; None: what a pack records. Raises UsageError without either,
    FormatError naming the request, ProfileError and StoreUnavailable.
    """
    from hicachectl.requests.chains import Hashing, requests_of

    agreed = _agreed(store, profile, "hits")
    hashed = requests_of(_requests(requests), Hashing.of(agreed))
    return measure_hits(store, HitsRequest(requests=hashed, profile=agreed), on_listed=on_listed)


def migrate(
    source: Store,
    destination: Store,
    profile: ProfileSource = None,
    *,
    to_profile: ProfileSource = None,
    pages: Iterable[str] | None = None,
    model: str | None = None,
    pool: str | None = None,
    page: str | None = None,
    since: float | None = None,
    grace_seconds: float = 60.0,
    if_exists: IfExists = "skip",
    verify: bool = False,
    move: bool = False,
    partial: bool = False,
    damaged: bool = False,
    resume: bool = False,
    allow_empty: bool = False,
    dry_run: bool = False,
    space_check: bool = True,
    trailers: TrailerMode = "auto",
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    bytes_per_second: int | None = None,
    jobs: int | None = None,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> MigrationOutcome:
    """Copy or move pages to another store, layout or topology.

    profile: of the source; None: objects keep their keys and bytes. to_profile: of the destination,
    such as `retargeted(profile, tp=8)`; None: the same. pages: only these page hashes. move: delete
    pages from the source after they were verified in the destination. Without it, EmptyStore is
    raised for a source without pages, unless allow_empty is set. Other options and callbacks:
    see `MigrationRequest`, `CopyOptions` and `move.migrate.migrate`, which names the errors.
    """
    from hicachectl.move.batches import CopyOptions
    from hicachectl.move.migrate import migrate as migrated
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.profiles.sources import agree_on_profile
    from hicachectl.requests.files import PageList

    listed = None if pages is None else list(pages)
    request = MigrationRequest(
        profile=agree_on_profile(source, _profile(profile)),
        destination_profile=_profile(to_profile),
        selection=Selection(model=model, pool=pool, page=page, since=since),
        pages=None
        if listed is None
        else PageList("pages", listed, [None] * len(listed), [1] * len(listed)),
        grace_seconds=grace_seconds,
        if_exists=if_exists,
        partial=partial,
        damaged=damaged,
        resume=resume,
        allow_empty=allow_empty,
        dry_run=dry_run,
        space_check=space_check,
        options=CopyOptions(
            buffer_bytes=buffer_bytes,
            jobs=jobs,
            bytes_per_second=bytes_per_second,
            verify=verify or move,
            move=move,
            trailers=trailers,
        ),
    )
    return migrated(source, destination, request, on_listed=on_listed, on_moved=on_moved)


def prewarm(
    source: Store,
    destination: Store,
    requests: Iterable[Tokens] | None = None,
    profile: ProfileSource = None,
    *,
    trace: str | Path | None = None,
    to_profile: ProfileSource = None,
    budget_bytes: int | None = None,
    budget_pages: int | None = None,
    deadline_seconds: float | None = None,
    dry_run: bool = False,
    allow_empty: bool = False,
    pin: bool = False,
    pin_seconds: float | None = None,
    trailers: TrailerMode = "auto",
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    bytes_per_second: int | None = None,
    jobs: int | None = None,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_copied: Callable[[int, int], None] = lambda nbytes, total: None,
) -> PrewarmOutcome:
    """Copy the pages that serve requests best and that the destination lacks, the best first.

    requests: token ids of each, or `Request`; or trace: a file of requests with their times.
    profile: of the source's servers; None: what a pack records. to_profile: of the destination's.
    allow_empty: accept a source without pages.
    Raises UsageError unless requests or a trace are given, and without a profile; else as
    `prewarm.prewarm.prewarm`. After KeyboardInterrupt, pages that were begun are whole.
    """
    from hicachectl.move.batches import CopyOptions
    from hicachectl.prewarming.page_plan import PrewarmRequest
    from hicachectl.prewarming.prewarm import prewarm as warmed

    agreed = _agreed(source, profile, "prewarm")
    request = PrewarmRequest(
        profile=agreed,
        requests=_wanted(requests, trace, agreed),
        destination_profile=_profile(to_profile),
        budget_bytes=budget_bytes,
        budget_pages=budget_pages,
        deadline_seconds=deadline_seconds,
        dry_run=dry_run,
        allow_empty=allow_empty,
        options=CopyOptions(
            buffer_bytes=buffer_bytes,
            jobs=jobs,
            bytes_per_second=bytes_per_second,
            pin=pin,
            pin_seconds=pin_seconds,
            trailers=trailers,
        ),
    )
    outcome = warmed(source, destination, request, on_listed=on_listed, on_copied=on_copied)
    if outcome.interruption is not None:
        raise outcome.interruption
    return outcome


def plan(
    source: Store,
    destination: Store,
    requests: Iterable[Tokens] | None = None,
    profile: ProfileSource = None,
    **options: Any,
) -> pa.Table:
    """Return the pages that `prewarm` would copy, best first: page, parent, depth, bytes.

    Arguments and errors as of `prewarm`.
    """
    outcome = prewarm(source, destination, requests, profile, **options, dry_run=True)
    assert outcome.plan is not None
    return outcome.plan


def _profile(source: ProfileSource) -> Profile | None:
    return read_profile(source) if isinstance(source, str | Path) else source


def _agreed(store: Store, source: ProfileSource, what: str) -> Profile:
    """Return the given profile, or that of a pack; it states the page size of the requests."""
    from hicachectl.profiles.sources import agree_on_profile

    agreed = agree_on_profile(store, _profile(source))
    if agreed is None:
        raise UsageError(f"{what} needs profile=, a profile or the path of one")
    return agreed


def _check_names(names: Sequence[str] | None) -> tuple[str, ...]:
    known = group_names()
    if names is None:
        return tuple(known)
    if not names:
        raise UsageError("checks: empty; give names of checks, or None for all that apply")
    for name in names:
        if name not in known:
            raise UsageError(f"checks: {name!r} is not one of {', '.join(known)}")
    return tuple(names)


def _requests(requests: Iterable[Tokens]) -> Iterator[Request]:
    """Yield each request; plain token ids are named by their number, from 0."""
    for number, one in enumerate(requests):
        yield one if isinstance(one, Request) else Request(f"request {number}", list(one))


def _wanted(
    requests: Iterable[Tokens] | None, trace: str | Path | None, profile: Profile
) -> Requests:
    from hicachectl.requests.chains import Hashing, requests_of
    from hicachectl.requests.files import read_requests

    if (requests is None) == (trace is None):
        raise UsageError("prewarm: give either requests or a trace")
    if requests is not None:
        return requests_of(_requests(requests), Hashing.of(profile))
    assert trace is not None
    read = requests_of(read_requests(Path(trace)), Hashing.of(profile), source=str(trace))
    read.refuse_block_ids("record token ids")
    return read
