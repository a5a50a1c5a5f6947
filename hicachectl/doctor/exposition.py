"""Look at the counters that an SGLang server shows at `/metrics`, and compare two looks."""

from __future__ import annotations

import http.client
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.http import HttpService

    Sample = tuple[str, frozenset[tuple[str, str]]]  # name and labels

ENABLE_METRICS = "start the server with --enable-metrics"
CHECK_URL = "check that this is the URL of an SGLang server"
BACKUPED = "sglang:backuped_tokens_total"
CACHED = "sglang:cached_tokens_total"
DEFERRED = "sglang:storage_prefetch_deferred_tokens_total"
DROPPED = "sglang:hicache_dropped_tokens_total"
DROPPED_BACKUPS = "sglang:hicache_backup_dropped_tokens_total"
FOUND = "sglang:storage_prefetch_hit_tokens_total"
HOST_BACKUPS = "sglang:hicache_backup_tokens_total"
LOST = "sglang:storage_prefetch_unfulfilled_tokens_total"
NO_AUXILIARY = "sglang:hicache_prefetch_aux_alloc_failed_tokens_total"
PROMPT_TOKENS = "sglang:prompt_tokens_total"
REQUESTS = "sglang:num_requests_total"
RESTORED = "sglang:prefetched_tokens_total"
UNCACHED = "sglang:uncached_prompt_tokens_histogram"
STAGE_SECONDS = "sglang:per_stage_req_latency_seconds_sum"
PLUGIN = "hicachectl_plugin_"  # prefix of the metrics of this package's storage plug-in

_SGLANG = b"sglang:"
_COUNTERS = (
    BACKUPED, CACHED, DEFERRED, DROPPED, DROPPED_BACKUPS, FOUND, HOST_BACKUPS, LOST, NO_AUXILIARY,
    PROMPT_TOKENS, REQUESTS, RESTORED,
)  # fmt: skip
_KEPT = tuple(
    name.encode()
    for name in (
        *(f"{counter}{end}" for counter in _COUNTERS for end in "{ "),
        *(f"{UNCACHED}_{end}" for end in ("bucket", "count", "sum")),
        f"{STAGE_SECONDS}{{",
        PLUGIN,
    )
)
# All ranks of these kinds find and restore the same pages, so each rank counts the same tokens. But
# each data-parallel rank has its own requests, so its label is not among these.
_RANKS = frozenset({"tp_rank", "pp_rank", "attn_cp_rank", "moe_ep_rank", "dcp_rank", "rank"})
# A real server has 4 KB of lines to keep for each rank. A line has 200 bytes. The parser takes a
# second for a megabyte, and quadratic time for a long line.
_MAX_KEPT_BYTES = 4 << 20
_MAX_LINE_BYTES = 1 << 13
_MOST_REASONS = 256  # each reason gets its own check; a real server has fewer than 40 reasons
_MOST = 2.0**53  # larger counters are not exact

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """Counters of a server at one moment, or their growth.

    at: time of the look on the monotonic clock, in seconds.
    samples: value of each counter or histogram bucket, by name and labels; None without metrics.
    problem: why `samples` is None, in one sentence with the next step; else empty.
    """

    at: float
    samples: Mapping[Sample, float] | None
    problem: str = ""

    def value(self, name: str, **labels: str) -> float:
        """Return the total of a name over the samples that have these labels; 0 without samples.

        Of samples that differ only in the rank, only the largest counts.
        """
        return sum(self._split(name, "", labels).values())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the totals of a name, counted like `value`, for each value of a label."""
        return self._split(name, label, {})

    def _split(self, name: str, label: str, wanted: Mapping[str, str]) -> dict[str, float]:
        largest: dict[frozenset[tuple[str, str]], float] = {}
        for (sample, pairs), value in (self.samples or {}).items():
            if sample == name and wanted.items() <= pairs:
                apart = frozenset(pair for pair in pairs if pair[0] not in _RANKS)
                largest[apart] = max(value, largest.get(apart, 0.0))
        totals: dict[str, float] = {}
        for pairs, value in largest.items():
            text = dict(pairs).get(label, "")
            totals[text] = totals.get(text, 0.0) + value
        return totals


def look_at(service: HttpService, base: str) -> Look:
    """Return one look at a server's metrics.

    If the metrics are off, or cannot be read, the look has a `problem`. Raises nothing.
    service, base: client and path of `profiles.server.server_service`.
    """
    path = f"{base}/metrics"
    _log.debug("GET %s", path)
    try:
        reply = service.get(path)
        if reply.status == http.client.NOT_FOUND:
            return Look(time.monotonic(), None, f"The server has no /metrics; {ENABLE_METRICS}")
        if reply.status != http.client.OK:
            raise service.refused(path, reply)
    except StoreUnavailable as error:
        return Look(time.monotonic(), None, str(error))
    return read_look(reply.body, time.monotonic())


def read_look(text: bytes, at: float) -> Look:
    """Return the counters of a metrics page in Prometheus' text format.

    If the page has no metrics of SGLang, or has a line that is not valid, the look has a `problem`.
    """
    from prometheus_client.parser import text_string_to_metric_families

    lines = text.split(b"\n")
    if not any(line.startswith(_SGLANG) for line in lines):
        return Look(at, None, f"/metrics has no metrics of SGLang; {ENABLE_METRICS}")
    kept = [line for line in lines if line.startswith(_KEPT)]
    too_large = Look(
        at, None, f"/metrics is larger than the page of any SGLang server; {CHECK_URL}"
    )
    if sum(map(len, kept)) > _MAX_KEPT_BYTES or max(map(len, kept), default=0) > _MAX_LINE_BYTES:
        return too_large
    samples, reasons = {}, set()
    try:
        for family in text_string_to_metric_families(b"\n".join(kept).decode()):
            for name, labels, value, *_ in family.samples:
                if not 0 <= value <= _MOST:  # also NaN
                    raise ValueError(f"{name} is {shown(value)}, which is no count")
                samples[name, frozenset(labels.items())] = float(value)
                reasons.add(labels.get("reason"))
    except (ValueError, IndexError, KeyError) as error:
        said = shown(str(error))
        return Look(at, None, f"/metrics is not valid Prometheus text: {said}; {CHECK_URL}")
    return too_large if len(reasons) > _MOST_REASONS else Look(at, samples)


def growth(first: Look, second: Look) -> Look | None:
    """Return by how much each counter grew between two looks; None if the server has restarted.

    A counter that falls or vanishes shows a restart. If one of the looks has no metrics, the result
    has no metrics.
    """
    if first.samples is None or second.samples is None:
        return Look(second.at, None, second.problem or first.problem)
    if not first.samples.keys() <= second.samples.keys():
        return None
    grown = {
        sample: value - first.samples.get(sample, 0.0) for sample, value in second.samples.items()
    }
    return None if min(grown.values(), default=0.0) < 0 else Look(second.at, grown)


def at_least(look: Look, tokens: int) -> tuple[int, int]:
    """Return bounds on the number of requests that computed `tokens` or more prompt tokens.

    The bounds come from the histogram of uncached prompt tokens. Its buckets are wide, but the sum
    over all requests narrows the bounds.
    """
    buckets: dict[float, float] = {}
    for text, up_to in look.by_label(f"{UNCACHED}_bucket", "le").items():
        bound = _bound(text)
        buckets[bound] = max(up_to, buckets.get(bound, 0.0))
    lower, before, fewest, undecided = 0.0, 0.0, 0.0, (0.0, 0.0)
    # Tokens of the sum that remain if each request has the fewest tokens that its bucket allows.
    spare = look.value(f"{UNCACHED}_sum")
    for upper, up_to in sorted(buckets.items()):
        count = max(up_to - before, 0.0)
        spare -= lower * count
        if lower >= tokens:
            fewest += count
        elif upper >= tokens:
            undecided = (count, tokens - lower)
        lower, before = upper, up_to
    count, missing = undecided
    return int(fewest), int(fewest + min(count, max(spare, 0.0) // missing if missing else 0.0))


def _bound(text: str) -> float:
    """Return the upper bound of a bucket. A negative bound becomes 0, and other text infinity."""
    try:
        bound = float(text)
    except ValueError:
        return math.inf
    return math.inf if math.isnan(bound) else max(bound, 0.0)
