"""A live server, described by its own replies. The replies are fetched once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replaced

from hicachectl.doctor.checks import SERVER, Check
from hicachectl.formats.errors import HicacheError, StoreUnavailable
from hicachectl.formats.models.server_info import flags_from_server_info, served_profile
from hicachectl.formats.releases import sglang_version
from hicachectl.profiles.server import checked_url, fetch_server, profile_of_replies
from hicachectl.profiles.sources import with_weights

if TYPE_CHECKING:
    from hicachectl.doctor.request import DoctorRequest
    from hicachectl.formats.models.server_info import ServerDeployment
    from hicachectl.formats.profile import Profile
    from hicachectl.profiles.server import ServerReplies

_MOST_STATES = 4096  # most data-parallel ranks that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveServer:
    """A server, as its replies describe it. Replies hold secrets, so no reply is shown whole.

    url: URL without secrets, in the normal form of `checked_url`.
    info: parsed `/server_info`; empty if the server cannot be reached.
    layout: parsed `/get_hicache_l3_cache_layout`; empty if the server has none.
    states: `internal_states`, one for each data-parallel rank; empty if the reply has none.
    settings: current arguments of the server. These are the members of `info`, but members of the
        first state replace members of the same name.
    deployment: flags and model paths; None if the reply does not state them.
    profile: profile made from the replies, with the weights if they can be read. If the replies do
        not suffice, this is the profile of the request, with the server's names and sizes. None if
        the request also has no profile.
    why_no_profile: why the replies do not suffice for a profile, with the next step; "" if they do.
    problem: why the server cannot be reached, with the next step; "" if it can be reached.
    started: start of the server's process in Unix seconds; None if unknown. It does not come from
        the replies, because they have only durations (`startup_time`).
    """

    url: str
    info: Mapping[str, Any] = field(default_factory=dict, repr=False)
    layout: Mapping[str, Any] = field(default_factory=dict, repr=False)
    states: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    deployment: ServerDeployment | None = None
    profile: Profile | None = None
    why_no_profile: str = ""
    problem: str = ""
    started: float | None = None

    def check(
        self,
        name: str,
        status: str,
        detail: str,
        *,
        evidence: str = "",
        next: str = "",
        group: str = SERVER,
    ) -> Check:
        """Return a check about the server. Arguments: see `Check`."""
        return Check(
            name, status, detail, group=group, evidence=evidence, next=next, server=self.url
        )

    def check_of(self, name: str, status: str, message: str, *, group: str = SERVER) -> Check:
        """Return a check about the server, with the detail and next step of a message."""
        return Check.of_message(name, status, message, group=group, server=self.url)


def ask_server(url: str, request: DoctorRequest) -> LiveServer:
    """Ask a server once for its deployment. An unreachable server has a `problem`.

    Raises UsageError for a malformed URL.
    """
    url = checked_url(url)
    try:
        replies = fetch_server(url)
    except StoreUnavailable as error:
        return LiveServer(url=url, problem=str(error))
    return _described(url, replies, request)


def _described(url: str, replies: ServerReplies, request: DoctorRequest) -> LiveServer:
    info = replies.info
    listed = info.get("internal_states")
    states = tuple(
        state
        for state in (listed if isinstance(listed, list) else [])[:_MOST_STATES]
        if isinstance(state, Mapping)
    )
    settings = {**info, **(states[0] if states else {})}
    server = LiveServer(
        url=url,
        info=info,
        layout=replies.layout or {},
        states=states,
        settings=settings,
    )
    try:
        deployment = flags_from_server_info(info)
    except HicacheError as error:
        if not info.get("model_path"):  # a router, or another service
            return LiveServer(url=url, problem=str(error))
        return replace(server, why_no_profile=str(error))
    server = replace(server, deployment=deployment)
    try:
        return replace(server, profile=_profile(replies, deployment, request))
    except HicacheError as error:
        server = replace(server, why_no_profile=str(error))
    if request.profile is None:
        return server
    try:
        return replace(server, profile=served_profile(request.profile, info))
    except HicacheError as error:
        return replace(server, why_no_profile=str(error))


def _profile(
    replies: ServerReplies, deployment: ServerDeployment, request: DoctorRequest
) -> Profile:
    """Return the profile of a server, made from its replies.

    Raises ProfileError, UsageError and FormatError.
    """
    profile = profile_of_replies(
        replies,
        model_config=request.model_config,
        draft_model_config=request.draft_model_config,
        overrides=request.overrides,
    ).profile
    sglang_version(profile.sglang)
    profile = with_weights(profile, request.weights, deployment)
    if not profile.weights and request.profile is not None:
        stated = request.profile
        profile = replaced(profile, weights=stated.weights, draft_weights=stated.draft_weights)
    return profile
