"""Checks of the tokens that a server found, restored and lost, as its own counters show them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicachectl.backends.urls import without_secrets
from hicachectl.checks.reasons import PLUGIN as PLUGIN_SOURCE
from hicachectl.checks.reasons import reason_named
from hicachectl.doctor.checks import FAIL, LIVE, OK, UNKNOWN, WARN
from hicachectl.doctor.exposition import (
    BACKUPED,
    CACHED,
    DEFERRED,
    DROPPED,
    DROPPED_BACKUPS,
    FOUND,
    HOST_BACKUPS,
    LOST,
    NO_AUXILIARY,
    PLUGIN,
    PROMPT_TOKENS,
    REQUESTS,
    RESTORED,
    UNCACHED,
    Look,
    at_least,
    growth,
)
from hicachectl.doctor.processes import own_statuses
from hicachectl.doctor.settings import has_plugin
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.plugin_status import metric_of
from hicachectl.text.units import counted
from hicachectl.verification.report_text import Mending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicachectl.backends.disk.statuses import RankStatus
    from hicachectl.checks.reasons import Reason
    from hicachectl.doctor.checks import Check
    from hicachectl.doctor.exposition import Sample
    from hicachectl.doctor.live_server import LiveServer
    from hicachectl.formats.plugin_status import PluginStatus

    Measure = Callable[[Look], tuple[float, float]]

# Lost tokens are computed again, which costs time and nothing else. A loss of less than a twentieth
# changes the load of a server less than the time of day does, and every busy server has such
# losses. If half or more is lost, the store is of little use.
_WARN_SHARE = 0.05
_FAIL_SHARE = 0.5
# If fewer tokens are lost than this many look-ups of the smallest size have, the loss can be one
# unlucky moment, and shows no rate.
_FEW_LOOKUPS = 4
# Losses for these reasons cost nothing, because the device had the tokens when they came, or the
# store was cleared.
_NO_LOSS = frozenset({"device_covered", "stale"})
# Of SGLang's reasons, only these mean that something is broken. SGLang's other reasons are effects
# of settings, limits and load, which an operator may want.
_FAULTS = frozenset({"storage_transfer"})
_NO_FAULTS_OF_PLUGIN = frozenset({"full", "gone", "unwritable"})
_UNWRITTEN = frozenset({"full", "half", "unwritable"})  # reasons why a page is not written
# SGLang's warm-up sends one short request to each data-parallel rank. Such requests are no traffic.
_FEW_REQUESTS = 5
_REFUSED = metric_of("refused", "")
_LONGEST_TEXT = 400
_SINCE_START = "since the server's start"
_BACKEND = "hicache_storage_backend"


def live_checks(
    server: LiveServer,
    first: Look,
    second: Look,
    statuses: Sequence[RankStatus] = (),
    *,
    mending: Mending | None = None,
    has_requests: bool = False,
) -> list[Check]:
    """Return the checks of the counters of a server and of its plug-in.

    There are no checks for a server that does not answer, or has no storage backend.

    first: first look at `/metrics`.
    second: later look at `/metrics`; the first look again if there was only one.
    statuses: status files of the plug-in in the store.
    mending: how suggested commands name the store and the profile.
    has_requests: whether requests were given. Other checks judge these requests.
    If a counter grew between the looks, its growth is judged. If none grew, the totals since the
    server's start are judged.
    """
    if server.problem or not server.settings.get(_BACKEND):
        return []
    flags = server.deployment.flags if server.deployment else DeploymentFlags()
    grown = growth(first, second)
    judged, period = second, _SINCE_START
    if grown is not None and any(map(grown.value, (REQUESTS, FOUND, LOST, BACKUPED))):
        judged, period = grown, f"in {second.at - first.at:.0f} s between two looks"
    counters = _Counters(server, flags, second, judged, period, mending or Mending(), has_requests)
    checks = list(_metrics(counters, restarted=grown is None))
    if server.settings[_BACKEND] == "dynamic":
        checks += _plugin(counters, own_statuses(server, statuses))
    if second.samples is not None:
        checks += _lost(counters)
        checks += _unwritten(counters)
        checks += _found(counters)
    return checks


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters of a server.

    flags: flags of the server; the defaults if the server does not state them.
    totals: counts since the server's start.
    judged: growth between two looks; the totals if no counter grew.
    period: time in which `judged` was counted, in words.
    mending: how suggested commands name the store and the profile.
    has_requests: whether requests were given.
    """

    server: LiveServer
    flags: DeploymentFlags
    totals: Look
    judged: Look
    period: str
    mending: Mending
    has_requests: bool

    def check(
        self, name: str, status: str, detail: str, evidence: str = "", remedy: str = ""
    ) -> Check:
        return self.server.check(name, status, detail, group=LIVE, evidence=evidence, next=remedy)

    def remedy(self, name: str) -> str:
        """Return the remedy of a reason, and the command that explains the reason."""
        reason = reason_named(name)
        if reason is None:
            return "look for the reason in the notes of the server's SGLang release"
        command = self.mending.command(reason.command) if reason.command else ""
        remedy = reason.remedy.format(command=f"`{command}`").rstrip(".")
        return f"{remedy}; hicachectl explain {name}"

    def loss(
        self, name: str, measure: Measure, what: str, *, reason: str = "", done: str = "lost"
    ) -> Iterator[Check]:
        """Yield the check that judges a loss by its share. Yield nothing if no token was lost.

        measure: function of a look that returns the number of lost tokens, and the number of all
            tokens that could have been lost.
        what: name of all tokens.
        reason: name of the reason (`checks.reasons`) whose meaning and remedy the check states; ""
            for `name`.
        done: verb for the lost tokens.
        """
        lost, whole = measure(self.judged)
        if not lost:
            return
        known = reason_named(reason or name)
        share = lost / max(whole, lost)
        fault = _is_fault(known, self.server)
        few = lost < _FEW_LOOKUPS * self.flags.least_looked_up
        lost_ever, whole_ever = measure(self.totals)
        status = FAIL if fault and share >= _FAIL_SHARE else WARN
        if name in _NO_LOSS or share < _WARN_SHARE:
            status = OK
        elif few and lost_ever < _WARN_SHARE * whole_ever:
            status = OK  # the loss is rare since the start, and the judged time has few tokens
        elif few and not fault:
            status = UNKNOWN
        detail = f"{share:.0%} of the {what} were {done} ({name})"
        if known is not None:
            detail = f"{detail}: {known.meaning.rstrip('.')}"
        evidence = f"{_tokens(lost)} of {_tokens(whole)}, {self.period}"
        remedy = "" if status == OK else self.remedy(reason or name)
        yield self.check(name, status, detail, evidence, remedy)


def _metrics(counters: _Counters, *, restarted: bool) -> Iterator[Check]:
    totals = counters.totals
    if totals.samples is None:
        message = f"Losses are not known: {totals.problem}"
        yield counters.server.check_of("metrics", UNKNOWN, message, group=LIVE)
        return
    requests = counted(int(totals.value(REQUESTS)), "request")
    if restarted:
        what = "The server was restarted between two looks, so only its new counters are judged"
        yield counters.check("metrics", UNKNOWN, what, f"{requests} {_SINCE_START}")
    else:
        yield counters.check("metrics", OK, f"The server shows its counters: {requests} answered")


def _plugin(counters: _Counters, statuses: Sequence[PluginStatus]) -> Iterator[Check]:
    """Judge the pages that the plug-in refuses.

    The plug-in's metrics show them or, without metrics, its status files.
    """
    excluded: dict[str, list[PluginStatus]] = {}
    for status in statuses:
        for reason in status.excluded:
            excluded.setdefault(reason, []).append(status)
    for reason, ranks in excluded.items():
        more = f", like {counted(len(ranks) - 1, 'other rank')}," if len(ranks) > 1 else ""
        what = f"The plug-in on {ranks[0].host}{more} reads and writes nothing ({reason}): "
        what += without_secrets(ranks[0].excluded[reason])[:_LONGEST_TEXT]
        yield counters.check(reason, FAIL, what, "", counters.remedy(reason))
    exported = any(name.startswith(PLUGIN) for name, _ in counters.totals.samples or ())
    silent = not exported and not statuses and counters.totals.samples is not None
    if silent and has_plugin(counters.server):
        what = "The refusals of the plug-in are not known, because its counters are neither in "
        what += "/metrics nor in a status file of the store that can be read"
        remedy = "look for lines with `hicachectl:` in the server's log"
        yield counters.check("plug-in", UNKNOWN, what, "", remedy)
    if not exported:
        told = Look(counters.totals.at, dict(_samples(statuses)))
        counters = replace(counters, totals=told, judged=told, period=_SINCE_START)
    page = counters.flags.page_tokens
    for reason in counters.totals.by_label(_REFUSED, "reason"):

        def measure(look: Look, reason: str = reason) -> tuple[float, float]:
            stage = "written" if reason in _UNWRITTEN else "found"
            refused = look.by_label(_REFUSED, "reason").get(reason, 0) * page
            return refused, refused + look.value(_stage(stage))

        if reason not in excluded:
            what = "tokens that the plug-in was asked to read or write"
            yield from counters.loss(reason, measure, what, done="refused")


def _samples(statuses: Sequence[PluginStatus]) -> Iterator[tuple[Sample, float]]:
    """Yield the counts of status files in the form of the plug-in's metrics."""
    for status in statuses:
        labels = [
            ("host", status.host),
            ("tp_rank", str(status.tp_rank)),
            ("pp_rank", str(status.pp_rank)),
            ("attn_cp_rank", str(status.cp_rank)),
            ("dp_rank", str(status.dp_rank)),
        ]
        for stage, tokens in status.tokens.items():
            yield (_stage(stage), frozenset(labels)), tokens
        for reason, pages in status.refused.items():
            yield (_REFUSED, frozenset([*labels, ("reason", reason)])), pages


def _stage(stage: str) -> str:
    """Return the metric of the plug-in that counts tokens at a stage."""
    return metric_of("tokens", stage)


def _lost(counters: _Counters) -> Iterator[Check]:
    """Judge, for each reason, the found tokens that were lost before a request could use them."""

    def of_found(name: str, **labels: str) -> Measure:
        return lambda look: (look.value(name, **labels), look.value(FOUND))

    what = "tokens found in the store"
    for reason in counters.totals.by_label(LOST, "reason"):
        yield from counters.loss(reason, of_found(LOST, reason=reason), what)
    yield from counters.loss("hicache_prefetch_aux_alloc_failed", of_found(NO_AUXILIARY), what)
    put_off = counters.judged.by_label(DEFERRED, "reason")
    if put_off:
        reason = max(put_off, key=put_off.__getitem__)
        deferred = of_found(DEFERRED)
        yield from counters.loss("deferred", deferred, what, reason=reason, done="put off")


def _unwritten(counters: _Counters) -> Iterator[Check]:
    """Judge the tokens that never reached host memory or the store."""

    def dropped(look: Look) -> tuple[float, float]:
        lost = look.value(DROPPED_BACKUPS)
        return lost, lost + look.value(BACKUPED)

    yield from counters.loss("hicache_backup_dropped", dropped, "tokens to be written")
    for reason in counters.totals.by_label(DROPPED, "reason"):

        def evicted(look: Look, reason: str = reason) -> tuple[float, float]:
            lost = look.value(DROPPED, reason=reason)
            return lost, lost + look.value(HOST_BACKUPS, pool="kv")

        yield from counters.loss(reason, evicted, "tokens to be kept in host memory")
    look = counters.judged
    copied, written = look.value(HOST_BACKUPS, pool="kv"), look.value(BACKUPED)
    # Nothing is written before a store is attached, and the totals do not show when that was.
    attached_late = not counters.server.info.get(_BACKEND)
    if written:
        what = f"The store took {_tokens(written)} from the server"
        evidence = f"{counters.period}; this includes tokens of pages that the store already had"
        yield counters.check("written", OK, what, evidence)
    elif copied >= _FEW_LOOKUPS * counters.flags.least_looked_up:
        if look is counters.totals and attached_late:
            return
        what = f"The server copied {_tokens(copied)} to host memory, and wrote none to its store"
        remedy = "look for `Write page to storage` in the server's log"
        yield counters.check("written", WARN, what, counters.period, remedy)


def _found(counters: _Counters) -> Iterator[Check]:
    """Count the tokens from the store.

    If there are none, judge whether prompts are too short for the store.
    """
    look, period = counters.judged, counters.period
    if not look.value(REQUESTS) and not look.value(FOUND):
        look, period = counters.totals, _SINCE_START
    found = look.value(FOUND)
    if found:
        restored, used = look.value(RESTORED), look.value(CACHED, cache_source="storage")
        what = f"{_tokens(found)} were found in the store, and {_tokens(restored)} were restored"
        prompts = _tokens(look.value(PROMPT_TOKENS))
        evidence = f"{_tokens(used)} of {prompts} of prompts came from the store, {period}"
        yield counters.check("found", OK, what, evidence)
        return
    requests = int(look.value(REQUESTS))
    if not requests:
        what = "The server has answered no request since its start"
        yield counters.check("found", UNKNOWN, what, "", "send requests and look again")
        return
    least = counters.flags.least_looked_up
    _, most = at_least(look, least)
    enough = (
        f"at most {most} of {counted(requests, 'request')} left {least} tokens to compute, the "
        "fewest that a server looks up"
    )
    if _are_short(counters, look):
        what = f"Prompts are too short for the store, because {enough}"
        threshold = f"prefetch_threshold is {counters.flags.prefetch_threshold}"
        evidence = f"{threshold}; {period}"
        yield counters.check("found", WARN, what, evidence, counters.remedy("below_threshold"))
        return
    what = f"Nothing was found in the store, {period}"
    written = _tokens(counters.totals.value(BACKUPED))
    pools = look.value(CACHED, cache_source="device") + look.value(CACHED, cache_source="host")
    evidence = f"{written} were written"
    if look.value(f"{UNCACHED}_count"):  # not all releases have this histogram
        evidence = f"{enough}; {evidence}"
    if pools:
        evidence += f"; {_tokens(pools)} were in device or host memory"
    if asked := look.value(_stage("asked")):
        evidence += f"; the plug-in was asked for {_tokens(asked)}"
    again = f"hicachectl doctor STORE --server {counters.server.url} --trace FILE"
    remedy = f"give requests of the server: {counters.mending.command(again)}"
    if counters.has_requests:
        remedy = "send these requests to the server, and run doctor again"
    yield counters.check("found", UNKNOWN, what, evidence, remedy)


def _are_short(counters: _Counters, look: Look) -> bool:
    """Return whether requests left too few tokens for a look-up, and nothing else served them.

    Such requests move no other counter. While nothing comes from the store, a request computes
    exactly the tokens that it would look up.
    """
    requests = look.value(f"{UNCACHED}_count")
    if requests < _FEW_REQUESTS + counters.flags.dp:
        return False
    fewest, most = at_least(look, counters.flags.least_looked_up)
    pools = look.value(CACHED, cache_source="device") + look.value(CACHED, cache_source="host")
    return not fewest and most <= requests / 2 and pools < look.value(PROMPT_TOKENS) / 2


def _is_fault(reason: Reason | None, server: LiveServer) -> bool:
    """Return whether something is broken if most tokens are lost for a reason."""
    if reason is None:
        return False
    if reason.source == PLUGIN_SOURCE:
        return reason.name not in _NO_FAULTS_OF_PLUGIN
    # The policy best_effort ends reads early, which is no fault.
    policy = server.settings.get("hicache_storage_prefetch_policy")
    return reason.name in _FAULTS and policy != "best_effort"


def _tokens(count: float) -> str:
    return counted(int(count), "token")
