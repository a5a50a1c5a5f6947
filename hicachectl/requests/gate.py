"""The share of tokens that servers fetch from a store, and the gate that it must pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.pages.naming import deployment_text
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping


def served_share(document: Mapping[str, Any]) -> float | None:
    """Return the share of the requested tokens that servers fetch; None if none is requested.

    document: the result of `hits` or `prewarm`. Where that does not tell the served tokens, since
    the prefixes or the page size are unknown, the share is that of the usable ones.
    """
    requested = document["requested_tokens"]
    if requested is None:
        share: float | None = document["usable_share"]
        return share
    return _counted(document) / requested if requested else None


def served_text(document: Mapping[str, Any], *, now: bool = False) -> str:
    """Return the share as a text: `89% of 1152 tokens served by org/model tp 2`.

    now: whether it will change.
    """
    requested = document["requested_tokens"]
    if served_share(document) is None:
        return "0 tokens requested"
    of = "the requested pages" if requested is None else counted(requested, "token")
    verb = "usable" if document["served_tokens"] is None else "served"
    by = document["deployment"] and f" by {deployment_text(document['deployment'])}"
    return f"{_percent(document)}% of {of} {verb}{' now' if now else ''}{by or ''}"


def _counted(document: Mapping[str, Any]) -> int:
    """Return the served tokens, else the usable ones."""
    served, usable = document["served_tokens"], document["usable_tokens"]
    return int(usable if served is None else served)


def _percent(document: Mapping[str, Any]) -> int:
    """Return the share in percent, rounded; 100 means all, and 0 means nothing."""
    share = served_share(document) or 0.0
    return round(share * 100) if share in (0, 1) else min(max(round(share * 100), 1), 99)


def passes(document: Mapping[str, Any], min_usable: float | None) -> bool:
    """Return whether the share is at least --min-usable. Of nothing requested, it never is."""
    share = served_share(document)
    return min_usable is None or (share is not None and share >= min_usable)


def failed_text(document: Mapping[str, Any], min_usable: float, next_step: str) -> str:
    """Return why a gate failed, in one line."""
    deployment = document["deployment"]
    by = f"servers of {deployment_text(deployment)}" if deployment else "servers"
    share, requested = served_share(document), document["requested_tokens"]
    if share is None:
        return f"--min-usable {min_usable:g}: no tokens were requested; check the requests"
    what = "of the requested pages"
    if requested is not None:
        counted_tokens = _counted(document)
        below = document["usable_tokens"] - counted_tokens
        more = f", and {below} usable ones are below the prefetch threshold" if below else ""
        what = f"of the requested tokens ({counted_tokens} of {requested}{more})"
    return f"--min-usable {min_usable:g}: {by} can restore {share:.1%} {what}; {next_step}"
