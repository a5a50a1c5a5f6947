"""Attach the plug-in with settings and pools that it refuses, and attach it again afterwards.

Runs inside the SGLang environment: `plugin_refusals.py REQUEST`. The request is a JSON list of
requests like those of plugin_ranks.py, without steps, each with `rank`: the coordinates [pp, cp,
tp]. A setting of null is absent. `pools` maps names of host pools to attributes that take other
values; `buffer_only` is SGLang's mode of that name.

Prints a JSON list with an entry for each: refused, the exception's message, "" if there was none;
attachable, whether the next backend could be attached at once; detachable, whether it could be
after a detaching.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import attached_rank, plugin_ranks, rank_pools
    from tests.conformance.attached_rank import AttachedRank
else:
    import attached_rank
    import plugin_ranks
    import rank_pools
    from attached_rank import AttachedRank


def answer(question: list[dict[str, Any]]) -> list[Any]:
    """Attach as the requests ask; return the refusals."""
    with tempfile.TemporaryDirectory() as folder:
        return [_attached(request, folder) for request in question]


def _attached(request: dict[str, Any], folder: str) -> dict[str, Any]:
    deployment = plugin_ranks.requested(request)
    rank = rank_pools.Rank(*request.get("rank", (0, 0, 0)))
    mode = "buffer_only" if request.get("buffer_only") else "cache"
    with (
        rank_pools.parallel(deployment, rank),
        attached_rank.server_arguments(deployment, hicache_host_memory_mode=mode),
    ):
        attached = AttachedRank(deployment, rank, pages=2)
        for name, changes in request.get("pools", {}).items():
            for attribute, value in changes.items():
                setattr(attached.pools.host[name], attribute, value)
        refused = ""
        try:
            with attached.attached(request["settings"]):
                pass
        except ValueError as error:
            refused = str(error)
        attachable = _takes_files(attached, folder)
        if not attachable:
            attached.detach()
        detachable = attachable or _takes_files(attached, folder)
        return {"refused": refused, "attachable": attachable, "detachable": detachable}


def _takes_files(attached: AttachedRank, folder: str) -> bool:
    """Return whether SGLang's file backend can be attached and detached."""
    try:
        with attached.attached({"file_storage_path": folder}, "file"):
            return bool(attached.controller.enable_storage)
    except RuntimeError:  # already attached
        return False
