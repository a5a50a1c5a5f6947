"""Checks of `doctor` about a server's settings, which the server's own replies show.

Sources, in SGLang's srt:

- managers/scheduler_components/internal_state.py: what each data-parallel rank tells
- mem_cache/unified_cache/storage_attachment.py: what attaching changes
- mem_cache/pool_host/base.py :: HostKVCache: the size of the host pool beside the device pool
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hicachectl.doctor.checks import FAIL, OK, UNKNOWN, WARN
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.server_info import extra_config, is_plugin
from hicachectl.formats.releases import NEWEST_SGLANG, unknown_release
from hicachectl.formats.wording import divided
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicachectl.doctor.checks import Check
    from hicachectl.doctor.live_server import LiveServer

_BACKEND = "hicache_storage_backend"
_EXTRA = "hicache_storage_backend_extra_config"
# Settings that attaching changes, and settings that decide about keys and bytes. None of these
# settings is a secret, so their values may be shown.
_COMPARED = (
    _BACKEND, "hicache_write_policy", "hicache_storage_prefetch_policy", "page_size",
    "kv_cache_dtype", "hicache_mem_layout", "served_model_name", "model_path", "weight_version",
)  # fmt: skip
# If the backend is already attached, this request changes its policies.
_PUT = (
    'curl -X PUT {url}/hicache/storage-backend -H "Authorization: Bearer $ADMIN_KEY" '
    "-H 'Content-Type: application/json' -d {body}"
)
# The effect of each value of a setting: status, detail, better value.
_POLICIES = {
    "write-policy": (
        "hicache_write_policy",
        {
            "write_through": (OK, "Pages are written after their first use", ""),
            "write_through_selective": (
                WARN,
                "With the write policy write_through_selective, a page is written when it is used "
                "a second time, so the first hit from the store can come at the third use",
                "write_through",
            ),
            "write_back": (
                WARN,
                "With the write policy write_back, a page is written when host memory runs out, so "
                "a restart, or another server, finds only pages that were evicted from host memory",
                "write_through",
            ),
        },
    ),
    "prefetch-policy": (
        "hicache_storage_prefetch_policy",
        {
            "wait_complete": (OK, "Requests wait until their pages are read", ""),
            "timeout": (OK, "Requests wait for their pages, but not longer than the timeout", ""),
            "best_effort": (
                WARN,
                "With the prefetch policy best_effort, a request that is scheduled at once "
                "computes the pages that are not read yet",
                "timeout",
            ),
        },
    ),
}


def setting_checks(server: LiveServer) -> list[Check]:
    """Judge a server's settings. The most basic causes of misses come first.

    Settings that matter only with a storage backend are judged only if a backend is attached.
    """
    judged: list[Callable[[LiveServer], Iterable[Check]]] = [_reachable]
    if not server.problem:
        judged.append(_hicache)
        if server.settings.get("enable_hierarchical_cache") is not False and not _is_treeless(
            server
        ):
            judged.append(_attached)
            if _backends(server) != {None}:
                judged += [_agreement, _policies, _threshold, _host_pool]
        judged += [_weights, _release, _described]
    return [check for judge in judged for check in judge(server)]


def _reachable(server: LiveServer) -> Iterable[Check]:
    if not server.problem:
        yield server.check("reachable", OK, "The server answers")
        return
    yield server.check_of("reachable", FAIL, server.problem)


def _hicache(server: LiveServer) -> Iterable[Check]:
    settings = server.settings
    enabled, has_tree = settings.get("enable_hierarchical_cache"), not _is_treeless(server)
    if enabled is True and has_tree:
        yield server.check("hicache", OK, "HiCache is on")
        return
    evidence = _evidence(server, "enable_hierarchical_cache", "disable_radix_cache")
    if settings.get("disaggregation_mode") == "decode" and not has_tree:
        yield server.check(
            "hicache",
            FAIL,
            "This is a decode server without a radix cache, which takes nothing from a store",
            evidence=evidence,
            next="give the URL of a prefill server",
        )
    elif enabled is None:
        yield server.check(
            "hicache",
            UNKNOWN,
            "The server does not say whether HiCache is on, because its reply lacks "
            "enable_hierarchical_cache",
            next="check the server's command line for --enable-hierarchical-cache",
        )
    else:
        yield server.check(
            "hicache",
            FAIL,
            "HiCache is off, so the server neither reads nor writes a store",
            evidence=evidence,
            next="start the server with --enable-hierarchical-cache"
            + ("" if has_tree else " and without --disable-radix-cache"),
        )


def _is_treeless(server: LiveServer) -> bool:
    """Return whether the radix cache is off. Without a radix cache, HiCache does nothing.

    SGLang turns the radix cache off for decode servers (arg_groups/pd_disaggregation_hook.py).
    """
    return server.settings.get("disable_radix_cache") is True


def _backends(server: LiveServer) -> set[str | None]:
    """Return the storage backend of each rank; None for a rank without one."""
    at_start = server.info.get(_BACKEND)  # the ranks of older releases do not state their backend
    of_ranks = [state.get(_BACKEND, at_start) for state in server.states or (server.info,)]
    return {shown(backend) if backend else None for backend in of_ranks}


def _attached(server: LiveServer) -> Iterable[Check]:
    backends = _backends(server)
    remedy = _changing(server)
    evidence = _evidence(server, _BACKEND)
    if backends == {None}:
        detail = "No storage backend is attached, so the server neither reads nor writes a store"
        if server.info.get(_BACKEND):
            detail += "; the backend that it started with was detached"
        yield server.check("attached", FAIL, detail, evidence=evidence, next=remedy)
    elif None in backends:
        at_start = server.info.get(_BACKEND)
        lacking = sum(not state.get(_BACKEND, at_start) for state in server.states)
        yield server.check(
            "attached",
            FAIL,
            f"{lacking} of {len(server.states)} data-parallel ranks have no storage backend",
            evidence=evidence,
            next=remedy,
        )
    else:
        named = " and ".join(sorted(backend for backend in backends if backend))
        yield server.check(
            "attached", OK, f"A storage backend is attached: {named}", evidence=evidence
        )


def _changing(server: LiveServer, **settings: str) -> str:
    """Return the command that attaches a backend or, with settings, changes the attached backend.

    In the command, OPTIONS stands for the backend's options, because these can hold secrets. A
    command that changes settings leaves the options out, because the server keeps them.
    """
    named = (one.get(_BACKEND) for one in (server.settings, *server.states, server.info))
    backend = next((one for one in named if isinstance(one, str) and one), "NAME")
    options = {} if settings or not server.info.get(_EXTRA) else {f"{_EXTRA}_json": "OPTIONS"}
    body = json.dumps({_BACKEND: backend, **options, **settings})
    put = _PUT.format(url=shlex.quote(server.url), body=shlex.quote(body))
    flags = settings or {_BACKEND: backend}
    words = [f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in flags.items()]
    return f"{put}; or start the server with {' '.join(words)}"


def _agreement(server: LiveServer) -> Iterable[Check]:
    """Compare the settings of data-parallel ranks, if there are several."""
    if len(server.states) < 2:
        return
    differing = [
        name
        for name in (*_COMPARED, _EXTRA)
        if len({repr(state.get(name)) for state in server.states}) > 1
    ]
    if not differing:
        yield server.check(
            "ranks", OK, f"{len(server.states)} data-parallel ranks have equal settings"
        )
        return
    yield server.check(
        "ranks",
        WARN,
        f"The data-parallel ranks differ in {', '.join(differing)}",
        evidence="; ".join(
            f"{name}: {_values(server.states, name)}" for name in differing if name != _EXTRA
        ),
        next=f"DELETE {server.url}/hicache/storage-backend, then PUT it again for all ranks",
    )


def _policies(server: LiveServer) -> Iterable[Check]:
    for name, (setting, effects) in _POLICIES.items():
        policy = server.settings.get(setting)
        known = effects.get(policy) if isinstance(policy, str) else None
        status, detail, better = known or (UNKNOWN, f"The server's {name} is not known", "")
        yield server.check(
            name,
            status,
            detail,
            evidence=_evidence(server, setting),
            next=_changing(server, **{setting: better}) if better else "",
        )


def _threshold(server: LiveServer) -> Iterable[Check]:
    """State how many tokens a request needs before the server looks up its pages."""
    stated = server.settings.get(_EXTRA)
    if isinstance(stated, str) and stated.startswith("@"):
        yield server.check(
            "threshold",
            UNKNOWN,
            "The prefetch threshold is unknown, because the server reads the options of its store "
            "from a file",
            next="look for prefetch_threshold in that file, and give --prefetch-threshold",
        )
    elif server.deployment is not None:
        flags = server.deployment.flags
        yield server.check(
            "threshold",
            OK,
            f"The server looks up only requests that have {flags.least_looked_up} or more tokens "
            "to compute",
            evidence=f"prefetch_threshold {flags.prefetch_threshold}, "
            f"page size {flags.page_tokens}",
        )


def _host_pool(server: LiveServer) -> Iterable[Check]:
    """Compare the host pool with the device pool, as SGLang does when it allocates host memory."""
    settings = server.settings
    size, ratio = _number(settings.get("hicache_size")), _number(settings.get("hicache_ratio"))
    usage = settings.get("memory_usage")
    device = _number(usage.get("kvcache")) if isinstance(usage, Mapping) else None
    small, evidence = None, ""
    if size and device:
        on_device = int(device * (1 << 30))
        small = size * 1e9 < on_device
        evidence = f"hicache_size {size:g} GB a rank, device pool {human_size(on_device)} a rank"
    elif not size and ratio and settings.get("hicache_host_memory_fraction") is None:
        small, evidence = ratio <= 1, f"hicache_ratio {ratio:g}"
    if small:
        yield server.check(
            "host-pool",
            WARN,
            "The host pool is no larger than the device pool, so pages from the store soon lack "
            "room",
            evidence=evidence,
            next="start the server with a larger --hicache-ratio or --hicache-size",
        )
    elif small is not None:
        yield server.check(
            "host-pool",
            OK,
            "The host pool is larger than the device pool",
            evidence=evidence,
        )


def _weights(server: LiveServer) -> Iterable[Check]:
    """Compare the ranks' model path and weight version with the values at the start."""
    updated = [
        name
        for name in ("model_path", "weight_version")
        if {shown(server.info.get(name)), *(shown(state.get(name)) for state in server.states)}
        - {shown(None), shown(server.info.get(name))}
    ]
    version = server.settings.get("weight_version")
    if updated:
        evidence = "; ".join(
            f"{name}: {shown(server.info.get(name))} at the start, now "
            f"{_values(server.states, name)}"
            for name in updated
        )
        if has_plugin(server):
            yield server.check(
                "weights",
                OK,
                "The weights were updated since the start, and the storage backend tells pages of "
                "other weights apart",
                evidence=evidence,
            )
            return
        yield server.check(
            "weights",
            WARN,
            "The weights were updated since the start, and pages of the old weights have the same "
            "keys",
            evidence=evidence,
            next="remove the old pages with hicachectl rm, or use hicachectl's storage backend, "
            "which tells weights apart (hicachectl-plugin(7))",
        )
    elif isinstance(version, str):
        yield server.check(
            "weights",
            OK,
            "No update of the weights since the start is known",
            evidence=f"weight_version {shown(version)}",
        )


def has_plugin(server: LiveServer) -> bool:
    """Return whether hicachectl's storage backend is attached."""
    try:
        return is_plugin(extra_config(server.settings, "server_info"))
    except ProfileError:
        return False


def _release(server: LiveServer) -> Iterable[Check]:
    version = server.info.get("version")
    try:
        told = unknown_release(version) if isinstance(version, str) else "version: missing"
    except ProfileError as error:
        told = str(error)
    if told is None:
        yield server.check("release", OK, f"SGLang {version} is known")
    else:
        yield server.check(
            "release",
            UNKNOWN,
            f"The server's release is not known: {told}",
            next=f"compare its keys and settings with those of {NEWEST_SGLANG}",
        )


def _described(server: LiveServer) -> Iterable[Check]:
    if server.why_no_profile and server.profile is None:
        what, next_step = divided(server.why_no_profile)
        yield server.check(
            "profile",
            UNKNOWN,
            f"Sizes and values are not judged: {what}",
            next=next_step or "give --model-config or --profile",
        )


def _number(value: object) -> float | None:
    """Return a positive number of a reply; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15:
        return float(value)
    return None


def _values(states: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return the value of a setting. If ranks differ, each value has its number of ranks."""
    counts: dict[str, int] = {}
    for state in states:
        value = shown(state.get(name))
        counts[value] = counts.get(value, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({counted(number, 'rank')})" for value, number in counts.items())


def _evidence(server: LiveServer, *names: str) -> str:
    """Return the values of settings, and where the server states them.

    If ranks state a setting, take their values, because these are current.
    """
    found = []
    for name in names:
        if any(name in state for state in server.states):
            found.append(f"{name} {_values(server.states, name)} in internal_states")
        elif name in server.info:
            found.append(f"{name} {shown(server.info[name])} in server_info")
    return ", ".join(found)
