"""The Python interface. Its functions are the operations of the commands.

The function of a command takes open stores and one request, and raises the errors of
`hicachectl.formats.errors`. Its result has what the command writes as JSON, and the messages of the
run as `remarks`. Requests are frozen dataclasses, which the commands use, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.bench.bench import BenchRequest
from hicachectl.checks.catalogs import load_catalog
from hicachectl.device.devices import parse_devices
from hicachectl.doctor.request import DoctorRequest
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
from hicachectl.io.opening import open_store
from hicachectl.move.difference import DiffRequest
from hicachectl.move.migration import MigrationRequest
from hicachectl.move.store_pair import CopyOptions
from hicachectl.pages.selection import PageList, Selection
from hicachectl.prewarming.page_plan import PrewarmRequest
from hicachectl.requests.chains import Hashing, Requests, requests_of
from hicachectl.requests.forms import Request
from hicachectl.requests.measuring import HitsReport, HitsRequest, measure_hits
from hicachectl.simulation.simulate import SimulateRequest
from hicachectl.verification.request import Sample, VerifyRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.results import Result

__all__ = [
    "BenchRequest",
    "CollidingKeys",
    "CopyOptions",
    "DeviceError",
    "DiffRequest",
    "DoctorRequest",
    "EmptyStore",
    "FormatError",
    "HicacheError",
    "HitsReport",
    "HitsRequest",
    "MigrationRequest",
    "PageList",
    "PrewarmRequest",
    "Profile",
    "ProfileError",
    "Request",
    "Requests",
    "Sample",
    "Selection",
    "SimulateRequest",
    "StoreUnavailable",
    "UnsupportedByBackend",
    "UntrustedError",
    "UsageError",
    "VerifyRequest",
    "diff",
    "examine",
    "hash_requests",
    "hits",
    "load_catalog",
    "measure",
    "migrate",
    "model_profile",
    "open_store",
    "parse_devices",
    "plan",
    "prewarm",
    "read_profile",
    "read_requests",
    "recorded_profile",
    "retargeted",
    "simulate",
    "verify",
]


def read_profile(path: str | Path) -> Profile:
    """Read a profile from a TOML or JSON file. Raises UsageError, FormatError and ProfileError."""
    from hicachectl.profiles.sources import read_profile as read

    return read(Path(path))


def recorded_profile(store: Store) -> Profile:
    """Return the profile that a pack records. Raises UsageError if the store records no profile."""
    from hicachectl.profiles.sources import agree_on_profile

    profile = agree_on_profile(store, None)
    if profile is None:
        raise UsageError(f"{store.url}: records no profile; read a profile from a file")
    return profile


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


def read_requests(path: str | Path, profile: Profile | None, *, outputs: bool = False) -> Requests:
    """Read a trace from a file or a directory, in any form that the commands read.

    profile: profile that states how tokens are hashed; None for a trace of block ids. Only
        `simulate` takes a trace of block ids.
    outputs: whether a chain includes the tokens that the server generated, for `simulate`.
    Raises UsageError, and FormatError with the line that is wrong.
    """
    from hicachectl.requests.reading import Trace

    with Trace([str(path)]) as trace:
        hashing = None if profile is None else Hashing.of(profile)
        requests = trace.requests(hashing, outputs=outputs)
    if profile is not None:
        requests.refuse_block_ids("record token ids")
    return requests


def hash_requests(requests: Iterable[Request | Sequence[int]], profile: Profile) -> Requests:
    """Hash the tokens of requests into pages.

    requests: token ids of each request, or a `Request` if it has a salt, an extra key or a time.
    profile: profile that states how tokens are hashed.
    Raises UsageError if there are no requests. Raises FormatError with the number of the request
    that is wrong, counted from 0.
    """
    named = (
        given if isinstance(given, Request) else Request(f"request {number}", list(given))
        for number, given in enumerate(requests)
    )
    return requests_of(named, Hashing.of(profile))


def verify(
    store: Store,
    request: VerifyRequest = VerifyRequest(),  # noqa: B008 - frozen
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> Result:
    """Check a store, and change nothing.

    request: what to check. If the request has no profile, a pack is checked with the profile
        that it records. The objects of any other store are then compared with each other.
    on_listed, on_read, on_wait: see `check_store`.

    Raises UsageError if a named check cannot run, and ProfileError if the profile contradicts the
    store. Raises EmptyStore, StoreUnavailable and DeviceError.
    """
    from hicachectl.checks.registry import group_names
    from hicachectl.move.repair import doubted_repairs
    from hicachectl.profiles.sources import agree_to_look
    from hicachectl.verification.report import describe_store, report_of
    from hicachectl.verification.verify import check_store

    agreed, collision = agree_to_look(store, request.profile)
    request = replace(request, profile=agreed, collision=collision)
    if request.checks != group_names():
        for check, why in request.impossible(request.unmet(store)).items():
            raise UsageError(f"checks: {check} cannot run: {why}; or leave out {check}")
    checked = check_store(store, request, on_listed=on_listed, on_read=on_read, on_wait=on_wait)
    checked.result.facts.doubted = doubted_repairs(checked)
    described = describe_store(store, request)
    return report_of([checked.result], described, checked.groups.inventory.table, request).result()


def hits(
    store: Store,
    request: HitsRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> HitsReport:
    """Return how much of each request a store can serve, and which object stops each request.

    Raises ProfileError and StoreUnavailable.
    """
    from hicachectl.profiles.sources import agree_on_profile

    agreed = agree_on_profile(store, request.profile)
    return measure_hits(store, replace(request, profile=agreed), on_listed=on_listed)


def migrate(
    source: Store,
    destination: Store,
    request: MigrationRequest = MigrationRequest(),  # noqa: B008 - frozen
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> Result:
    """Copy or move pages to another store, layout, TP or PP size.

    Callbacks and errors: see `move.migration.migrate`.
    """
    from hicachectl.move.migration import migrate as migrated
    from hicachectl.profiles.sources import agree_on_profile

    request = replace(request, profile=agree_on_profile(source, request.profile))
    return migrated(source, destination, request, on_listed=on_listed, on_moved=on_moved)


def diff(
    a: Store,
    b: Store,
    request: DiffRequest = DiffRequest(),  # noqa: B008 - frozen
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
) -> Result:
    """Compare the pages of two stores, and change nothing.

    Callbacks and errors: see `move.difference.compare_stores`.
    """
    from hicachectl.move.difference import compare_stores
    from hicachectl.profiles.sources import agree_on_profile

    profile = agree_on_profile(a, request.profile) or agree_on_profile(b, None)
    request = replace(request, profile=profile)
    return compare_stores(a, b, request, on_listed=on_listed, on_read=on_read)


def prewarm(
    source: Store,
    destination: Store,
    request: PrewarmRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_copied: Callable[[int, int], None] = lambda nbytes, total: None,
) -> Result:
    """Copy the pages that serve requests best, best page first.

    Pages that the destination has are skipped. Callbacks and errors: see
    `prewarming.prewarm.prewarm`. After KeyboardInterrupt, every page whose copy had begun is whole.
    """
    from hicachectl.prewarming.prewarm import prewarm as warmed
    from hicachectl.profiles.sources import agree_on_profile

    agreed = agree_on_profile(source, request.profile)
    assert agreed is not None  # the request has a profile
    request = replace(request, profile=agreed)
    outcome = warmed(source, destination, request, on_listed=on_listed, on_copied=on_copied)
    if outcome.interruption is not None:
        raise outcome.interruption
    return outcome.result(dry_run=request.dry_run)


def plan(
    source: Store,
    destination: Store,
    request: PrewarmRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> pa.Table:
    """Return a row for each page that `prewarm` would copy, best page first.

    The columns are page, parent, depth and bytes.
    Errors: see `prewarm`.
    """
    request = replace(request, dry_run=True)
    return prewarm(source, destination, request, on_listed=on_listed).rows


def simulate(
    request: SimulateRequest,
    store: Store | None = None,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> Result:
    """Return the share of the prompt tokens that caches of each capacity and policy serve.

    store: store whose pages the caches have at the start, unless the request has a plan or `cold`.
        With a store, the result also says where hits of the store are lost.
    Errors: see `simulation.simulate.simulate`.
    """
    from hicachectl.profiles.sources import agree_on_profile
    from hicachectl.simulation.simulate import simulate as simulated

    if store is not None:
        request = replace(request, profile=agree_on_profile(store, request.profile))
    return simulated(request, store, on_listed=on_listed)


def examine(
    store: Store | None,
    request: DoctorRequest,
    *,
    on_wait: Callable[[float], None] = lambda seconds: None,
) -> Result:
    """Return why servers get no hits or wrong hits from a store, as `hicachectl doctor` does.

    The store is changed only if the request has `write_probe`. Arguments and errors: see
    `doctor.examine.examine`.
    """
    from hicachectl.doctor.examine import examine as examined

    return examined(request, store, on_wait=on_wait)


def measure(
    store: Store,
    request: BenchRequest = BenchRequest(),  # noqa: B008 - frozen
    *,
    compare: Store | None = None,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> Result:
    """Measure how fast a store gives pages, as `bench` does.

    compare: second store, which is measured in the same way.
    Errors: see `bench.bench.bench`.
    """
    from hicachectl.bench.bench import bench

    stores = [store] if compare is None else [store, compare]
    return bench(stores, request, on_listed=on_listed)
