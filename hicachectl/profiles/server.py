"""Fetch the deployment of a live SGLang server over HTTP."""

from __future__ import annotations

import http.client
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.http import HttpService, service_url
from hicachectl.formats.documents import parse_json_object, shown
from hicachectl.formats.errors import FormatError, ProfileError, UsageError
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.dtypes import BESIDE
from hicachectl.formats.models.flags import attention_tp, normalised_layout
from hicachectl.formats.models.loading import overridden_config
from hicachectl.formats.models.server_info import flags_from_server_info
from hicachectl.formats.wording import RUN_PROBE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicachectl.formats.models.flags import DeploymentFlags
    from hicachectl.formats.models.server_info import ServerDeployment
    from hicachectl.formats.profile import Profile

API_KEY_VARIABLE = "HICACHECTL_API_KEY"
MAX_REPLY_BYTES = 32 << 20  # a real reply has about 50 KB for each attention-DP rank
MAX_CONFIG_BYTES = 32 << 20
_MOST_POOLS = 256  # most entries of a key layout that are read

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerReplies:
    """Replies of a server.

    info: reply to `/server_info`.
    layout: reply to `/get_hicache_l3_cache_layout`; None if the server lacks it.
    """

    info: Mapping[str, Any]
    layout: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """Profile of a server. The profile does not name the weights.

    deployment: flags and settings of the server.
    warnings: warnings to show.
    """

    profile: Profile
    deployment: ServerDeployment
    warnings: tuple[str, ...]


def fetch_server(url: str, option: str = "--server", *, timeout_s: float = 10.0) -> ServerReplies:
    """Fetch the deployment and key layout of a server.

    url: `http://host:port`, or https.
    option: option that messages name.
    timeout_s: time limit of each whole request.
    Raises UsageError for a bad URL, and StoreUnavailable if no answer is usable.
    """
    service, base = server_service(url, option, timeout_s=timeout_s)
    try:
        info = _get_json(service, f"{base}/server_info")
        if info is None:
            info = _get_json(service, f"{base}/get_server_info")  # name in older releases
        if info is None:
            what = f"has neither /server_info nor /get_server_info; {service.hint}"
            raise service.lost(what)
        return ServerReplies(info, _get_json(service, f"{base}/get_hicache_l3_cache_layout"))
    finally:
        service.close()


def server_service(
    url: str, option: str, *, api_key: str | None = None, timeout_s: float
) -> tuple[HttpService, str]:
    """Return a client of an SGLang server, and the path of its endpoints.

    option: option that messages name.
    api_key: key of the server; None for the value of HICACHECTL_API_KEY.
    timeout_s: see `fetch_server`.
    Raises UsageError for a malformed URL or key.
    """
    parts = urlsplit(checked_url(url, option))
    key = checked_key(api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE, ""))
    tls = parts.scheme == "https"
    service = HttpService(
        str(parts.hostname),
        parts.port or (443 if tls else 80),
        who="SGLang server",
        hint="check that this is the URL of an SGLang server",
        timeout_s=timeout_s,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        tls=tls,
        max_reply_bytes=MAX_REPLY_BYTES,
    )
    return service, quote(parts.path, safe="/%:@!$&'()*+,;=~")


def profile_from_server(url: str, *, timeout_s: float = 10.0, **given: Any) -> ServerProfile:
    """Return the profile of a live server.

    given: arguments of `profile_of_replies`.
    Raises the errors of `profile_of_replies` and `fetch_server`.
    """
    return profile_of_replies(fetch_server(url, timeout_s=timeout_s), **given)


def profile_of_replies(
    replies: ServerReplies,
    *,
    model_config: Path | None = None,
    draft_model_config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ServerProfile:
    """Return the profile of a server from its replies.

    model_config: config.json of the model, or its directory; None for the server's `model_path`, if
        that is a local directory.
    draft_model_config: config.json of a separate draft model, or its directory; None for the path
        of the server's draft model, if that is a local directory.
    overrides: fields of DeploymentFlags that replace the fields of the server.
    Raises ProfileError if sizes are unknown.
    """
    server = flags_from_server_info(replies.info)
    paths = local_models(server, (model_config, draft_model_config), _absolute)
    flags = replace(server.flags, **(overrides or {}))
    config, flags = read_models(paths, flags, server.settings)
    try:
        profile = profile_from_config(config, flags, source=str(paths[0]))
    except ProfileError as error:
        why = str(error).removesuffix(f"; {RUN_PROBE}")  # `_told` adds this next step itself
        raise ProfileError(f"{why}; {_told(flags, told_pools(replies.layout))}") from error
    others = _contradictions(profile, replies.layout or {})
    return ServerProfile(profile, server, (*server.notes, *others))


def read_model_config(path: Path) -> dict[str, Any]:
    """Read a config.json, or the config.json in a directory. Raises ProfileError.

    A ModelOpt `hf_quant_config.json` in the same directory becomes the member `hf_quant_config`.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_json(file)
    beside = file.with_name("hf_quant_config.json")
    if file.name == "config.json" and beside.is_file():
        config[BESIDE] = _read_json(beside)
    return config


def told_pools(layout: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the hit policy of each pool in a server's key layout.

    Only servers with Mooncake have such a layout. It has an entry for each pool and pipeline stage.
    Source: MooncakeStore.describe_l3_object_layout.
    """
    described = layout.get("hicache_object_layout") if layout else None
    pools = described.get("pools") if isinstance(described, Mapping) else None
    return {
        str(pool.get("pool")): str(pool.get("hit_policy"))
        for pool in (pools if isinstance(pools, list) else [])[:_MOST_POOLS]
        if isinstance(pool, Mapping)
    }


def _contradictions(profile: Profile, layout: Mapping[str, Any]) -> list[str]:
    """Return a message for each fact in a server's key layout that the profile contradicts.

    The layout shows what the server really does. The profile can differ, because options can
    replace its flags.
    """
    described = layout.get("hicache_object_layout")
    described = described if isinstance(described, Mapping) else {}
    compared = {
        "page_size": (profile.page_size // profile.dcp, layout.get("page_size")),
        "is_mla_backend": (profile.rank_replicated, described.get("is_mla_backend")),
        "pp_size": (profile.pp, described.get("pp_size")),
        "key_prefix": (_key_prefix(profile), described.get("key_prefix")),
    }
    ours = {pool.name: pool.hit_policy for pool in profile.pools if kind_of(pool).has_bytes}
    told = told_pools(layout)
    for name in ours.keys() & told:
        compared[f"pools[{name}].hit_policy"] = (ours[name], told[name])
    return [
        *(
            f"{name}: the server has {shown(theirs)}, but the profile has {mine!r}"
            for name, (mine, theirs) in compared.items()
            if theirs is not None and theirs != mine
        ),
        *(
            f"pools: only the {'profile' if name in ours else 'server'} has {name}"
            for name in sorted(ours.keys() ^ told if told else ())
        ),
    ]


def _key_prefix(profile: Profile) -> str:
    """Return Mooncake's key prefix. Source: MooncakeStore.config_prefix."""
    dcp = f"tp{profile.tp}_dcp{profile.dcp}_page{profile.page_size}_pp{profile.pp}_cp{profile.cp}"
    return "_".join(filter(None, [profile.names.text, dcp if profile.dcp > 1 else ""]))


def _told(flags: DeploymentFlags, pools: Mapping[str, str]) -> str:
    """Return a message for a model without a profile: facts from the server, and the next step."""
    facts = {
        "model": flags.model, "sglang": flags.sglang, "page_size": flags.page_size,
        "layout": normalised_layout(flags), "tp": attention_tp(flags), "pp": flags.pp,
        "cp": flags.cp, "dcp": flags.dcp,
    }  # fmt: skip
    told = ", ".join(f"{name} {shown(value)}" for name, value in facts.items() if value != 1)
    names = [f"{shown(name)} ({shown(policy)})" for name, policy in pools.items()]
    return (
        f"the server tells {told}{', pools ' * bool(names)}{', '.join(names)}, but not the layers "
        f"and bytes of its pools; {RUN_PROBE}"
    )


def local_models(
    server: ServerDeployment,
    configs: tuple[Path | None, Path | None],
    places: Callable[[str], Iterable[Path]],
) -> tuple[Path, Path | None]:
    """Return the config or directory of a server's model, and of its separate draft model.

    configs: config or directory of the model and of the draft, as options give them; None for an
        option that is not given.
    places: function that returns the places on this machine where a model of the server can be.
    Raises ProfileError for a model that is not on this machine.
    """

    def local(model_path: str, option: str) -> Path:
        for path in places(model_path):
            if is_file(path / "config.json"):
                return path
        raise ProfileError(
            f"The server's model path {model_path!r} is not a directory with a config.json on this "
            f"machine; give {option}"
        )

    model, draft = configs
    model = model or local(server.model_path, "--model-config")
    if draft is None and server.draft_model_path:
        draft = local(server.draft_model_path, "--draft-model-config")
    return model, draft


def read_models(
    paths: tuple[Path, Path | None], flags: DeploymentFlags, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], DeploymentFlags]:
    """Read the configs of a server's model and draft.

    paths: config or directory of the model and of the draft.
    Return the model's config, changed by the server's settings, and the flags with the draft's
    config.
    Raises ProfileError.
    """
    model, draft = paths
    if draft is not None:
        flags = replace(flags, draft_model_config=read_model_config(draft))
    return overridden_config(read_model_config(model), settings), flags


def is_file(path: Path) -> bool:
    """Return whether a path is a file. False for a text that cannot be a path."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # the text is too long, or has a null character
        return False


def _absolute(model_path: str) -> Iterable[Path]:
    """Return a list with a server's model path; an empty list if the path is relative.

    A relative path is in the server's working directory, or is a name on the Hub.
    """
    path = Path(model_path)
    return [path] if path.is_absolute() else []


def _read_json(file: Path) -> dict[str, Any]:
    data = read_bounded(file, MAX_CONFIG_BYTES, what="a model config", refusal=ProfileError)
    try:
        return parse_json_object(data, str(file), refusal=ProfileError)
    except ProfileError as error:
        raise ProfileError(f"{error}; give a model's config.json") from error


def checked_url(url: str, option: str = "--server") -> str:
    """Return a server's URL in one normal form that is safe to show.

    option: option that messages name.
    Raises UsageError for a URL that is malformed, or has credentials, a query or a fragment.
    """
    parts = service_url(url)
    if parts is None:
        raise UsageError(f"{option}: not a URL; give http://host:port")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{option}: the URL has credentials; set {API_KEY_VARIABLE} instead")
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"{option}: {url!r} is not an http or https URL; give http://host:port")
    if parts.query or parts.fragment:
        raise UsageError(f"{option}: the URL must not have ? or #; give http://host:port")
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"


def checked_key(key: str) -> str:
    """Return the stripped key. Raises UsageError if it is not printable ASCII.

    A key with other characters must not reach http.client, whose error message would show the key.
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{API_KEY_VARIABLE}: must be printable ASCII text")
    return key


def _get_json(service: HttpService, path: str) -> dict[str, Any] | None:
    """Get a JSON object; None if the server lacks the endpoint. Raises StoreUnavailable."""
    _log.debug("GET %s", path)
    reply = service.get(path)
    if reply.status == http.client.NOT_FOUND:
        return None
    if reply.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        what = f"HTTP {reply.status}: the server requires its API key"
        raise service.lost(what, f"set {API_KEY_VARIABLE} to the --api-key of the server")
    if 300 <= reply.status < 400:
        what = f"HTTP {reply.status}: redirects are not followed"
        raise service.lost(what, "give the server's own URL")
    if reply.status != http.client.OK:
        raise service.refused(path, reply)
    try:
        return parse_json_object(reply.body, path)
    except FormatError as error:
        raise service.lost(str(error), service.hint) from None
