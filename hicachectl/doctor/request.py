"""The request of `doctor`: servers, their profile, and what to examine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicachectl.text.vocabulary import SAMPLE_PAGES
from hicachectl.verification.report_text import Mending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from hicachectl.requests.chains import Hashing, Requests

WATCH_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """Servers to ask, and how to examine them and their store.

    servers: URLs of the servers that use the store. If empty, only the store is checked.
    profile: profile of the servers. If a server's own replies suffice for a profile, they are used
        instead.
    model_config: config.json of the servers' model, or its directory; None for the servers'
        `model_path`, if it is on this machine.
    draft_model_config: config.json of a separate draft model, or its directory.
    overrides: fields of DeploymentFlags that replace the fields of the servers.
    weights: values of --weights and --draft-weights, by parameter.
    read: function that reads the requests; None if no requests are examined. The function's
        argument states how tokens are hashed. If the argument is None (unknown), the function may
        raise UsageError.
    threshold: prefetch threshold of the servers in tokens; None for the threshold that the servers
        state.
    watch_seconds: time between two looks at the servers' counters.
    sample_pages: number of pages to read; 0 reads none.
    write_probe: whether to send each server a random prompt, and look for its pages in the store.
    mending: how suggested commands name the store and the profile.
    request_words: options that name the requests in suggested commands, such as `--trace FILE`.
    """

    servers: tuple[str, ...] = ()
    profile: Profile | None = None
    model_config: Path | None = None
    draft_model_config: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Hashing | None], Requests] | None = None
    threshold: int | None = None
    watch_seconds: float = WATCH_SECONDS
    sample_pages: int = SAMPLE_PAGES
    write_probe: bool = False
    mending: Mending = field(default_factory=Mending)
    request_words: str = ""
