"""The share of tokens that servers can restore, and the gate that it must pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.pages.naming import deployment_text
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping


def usable_share(document: Mapping[str, Any]) -> float | None:
    """Return the share of the requested tokens that is usable; None if none is requested.

    document: the result of `hits` or `prewarm`.
    """
    share, requested = document.get("usable_share"), document["requested_tokens"]
    if share is None and requested:
        share = document["usable_tokens"] / requested
    return None if share is None else float(share)


def usable_text(document: Mapping[str, Any], *, now: bool = False) -> str:
    """Return the share as a text: `89% of 1152 tokens usable by org/model tp 2`.

    now: whether it will change.
    """
    requested = document["requested_tokens"]
    if usable_share(document) is None:
        return "0 tokens requested"
    of = "the requested pages" if requested is None else counted(requested, "token")
    by = document["deployment"] and f" by {deployment_text(document['deployment'])}"
    return f"{_percent(document)}% of {of} usable{' now' if now else ''}{by or ''}"


def _percent(document: Mapping[str, Any]) -> int:
    """Return the share in percent, rounded; 100 means all, and 0 means nothing."""
    share = usable_share(document) or 0.0
    return round(share * 100) if share in (0, 1) else min(max(round(share * 100), 1), 99)


def passes(document: Mapping[str, Any], min_usable: float | None) -> bool:
    """Return whether the share is at least --min-usable. Of nothing requested, it never is."""
    share = usable_share(document)
    return min_usable is None or (share is not None and share >= min_usable)


def failed_text(document: Mapping[str, Any], min_usable: float, next_step: str) -> str:
    """Return why a gate failed, in one line."""
    deployment = document["deployment"]
    by = f"servers of {deployment_text(deployment)}" if deployment else "servers"
    share, requested = usable_share(document), document["requested_tokens"]
    if share is None:
        return f"--min-usable {min_usable:g}: no tokens were requested; check the requests"
    what = (
        "of the requested pages"
        if requested is None
        else f"of the requested tokens ({document['usable_tokens']} of {requested})"
    )
    return f"--min-usable {min_usable:g}: {by} can restore {share:.1%} {what}; {next_step}"
