"""Build the profiles of a command from its options, or take the profile that the store records.

The --to options describe the destination. --weights names the weights.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.formats.documents import decoded
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.models.flag_table import OPTIONS
from hicachectl.formats.models.flags import DeploymentFlags, stage_layers
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.formats.releases import unknown_release
from hicachectl.formats.spec import collision_of
from hicachectl.formats.weights import FINGERPRINT_DIGITS
from hicachectl.formats.wording import needs_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.models.server_info import ServerDeployment

# Options that state flags of servers, with their fields in DeploymentFlags.
_FLAG_OPTIONS = {flag.parameter: flag.field for flag in OPTIONS if flag.kind != "layers"}
_SOURCES = ("profile_file", "model_config", "server", "launch")
# Options of weights, and --to options. Both have the names of fields of a profile.
_WEIGHTS = ("weights", "draft_weights")
_TO_FIELDS = ("model", "tag", "tp", "pp", "tp_lcm_size", "layout", "sglang")
_WEIGHTS_NAME = re.compile(f"[0-9a-f]{{{FINGERPRINT_DIGITS}}}")
_MAX_PROFILE_BYTES = 16 << 20  # a real profile has kilobytes


def profile_from_options(
    options: Mapping[str, Any],
    store: Store | None = None,
    *,
    warn: Callable[[str], None] = lambda text: None,
) -> Profile | None:
    """Return the profile that the options describe.

    If they describe none, return the profile that the store records; None if it records none.

    store: store that receives the profile. The store gives the model's name and weights if no
        option gives them.
    warn: function that is called with warnings, such as warnings about a server's answer.
    Raises UsageError if options contradict each other, and ProfileError and StoreUnavailable from
    the source or store.
    """
    profile = _asked_for(options, store, warn)
    if store is not None:
        profile = agree_on_profile(store, profile)
    return profile if profile is None else with_threshold(profile, options)


def with_threshold(profile: Profile, options: Mapping[str, Any]) -> Profile:
    """Return a profile with the threshold of --prefetch-threshold, if this option is given."""
    stated = options.get("prefetch_threshold")
    return profile if stated is None else replace(profile, prefetch_threshold=stated)


def profile_to_look(
    options: Mapping[str, Any],
    store: Store,
    *,
    looks_only: bool = True,
    warn: Callable[[str], None],
) -> tuple[Profile | None, str]:
    """Return the result of `profile_from_options`, and the reason why no profile can be used.

    The reason is "" if the profile can be used. If the ranks of the profile overwrite each other's
    objects in this store, no profile describes the objects. A command that only looks then gets
    None and the reason.
    looks_only: whether the command only looks.
    """
    return agree_to_look(store, _asked_for(options, store, warn), looks_only=looks_only)


def agree_to_look(
    store: Store, profile: Profile | None, *, looks_only: bool = True
) -> tuple[Profile | None, str]:
    """Return the result of `agree_on_profile`, and the reason why no profile can be used.

    The result and the reason are those of `profile_to_look`.
    """
    collision = "" if profile is None else collision_of(profile, store.grammar)
    if collision and looks_only:
        return None, collision
    return agree_on_profile(store, profile, looks_only=looks_only), ""


def agree_on_profile(
    store: Store, profile: Profile | None, *, looks_only: bool = False
) -> Profile | None:
    """Pass a profile to a store. Return the profile with facts that the store records.

    Every process that opens the store for a command calls this function.
    profile: profile of the command; None for the profile that an archive records.
    looks_only: see `Profiled.use_profile`.
    Raises as `profile_from_options` does.
    """
    from hicachectl.backends.capabilities import Archive, Profiled
    from hicachectl.profiles.identities import expect_identities, with_marked_weights

    if profile is None and isinstance(store, Archive):
        profile = store.recorded_profile()
    if profile is not None and isinstance(store, Profiled):
        store.use_profile(profile, looks_only=looks_only)
    if profile is not None:
        profile = with_marked_weights(profile, store)
        expect_identities(store, profile)
    return profile


def states_source(options: Mapping[str, Any]) -> bool:
    """Return whether the options name a source of a profile."""
    return any(options.get(name) for name in _SOURCES)


def _asked_for(
    options: Mapping[str, Any], store: Store | None, warn: Callable[[str], None]
) -> Profile | None:
    """Return the profile of the options, if any. Warn about an unknown release."""
    profile = _stated(options, store, warn)
    told = None if profile is None else unknown_release(profile.sglang)
    if told is not None:
        warn(told)
    return profile


def _stated(
    options: Mapping[str, Any], store: Store | None, warn: Callable[[str], None]
) -> Profile | None:
    given = sorted(
        name for name in (*_FLAG_OPTIONS, "pp_partition", "draft_model_config") if options.get(name)
    )
    sources = [name for name in _SOURCES if options.get(name)]
    if options.get("profile_file"):
        others = [*sources[1:], *given]
        if others:
            raise UsageError(
                f"{_option(others[0])} cannot be combined with --profile; leave out one of them"
            )
        return with_weights(read_profile(options["profile_file"]), options)
    if not sources:
        if given:
            raise UsageError(f"{_option(given[0])} needs --model-config or --server")
        if named := [name for name in _WEIGHTS if options.get(name)]:
            raise UsageError(needs_profile(_option(named[0])))
        return None
    if options.get("server") or options.get("launch"):
        return _from_deployment(options, warn)
    return with_weights(_from_config(options, store), options)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_profile(path: Path) -> Profile:
    """Read a profile file. Raises UsageError, FormatError and ProfileError."""
    data = read_bounded(path, _MAX_PROFILE_BYTES, what="a profile")
    return parse_profile(decoded(data, str(path)), source=str(path))


def _from_deployment(options: Mapping[str, Any], warn: Callable[[str], None]) -> Profile:
    """Return the profile of a live server, or of a launch command."""
    from hicachectl.profiles.launch import profile_from_launch
    from hicachectl.profiles.server import profile_from_server

    server, launch = options.get("server"), options.get("launch", "")
    if server and launch:
        raise UsageError("--launch cannot be combined with --server; leave out one of them")
    read = partial(profile_from_server, server) if server else partial(profile_from_launch, launch)
    found = read(
        model_config=options.get("model_config"),
        draft_model_config=options.get("draft_model_config"),
        overrides=given_flags(options),
    )

    def remark(text: str) -> None:
        warn(f"{server or '--launch'}: {text}")

    for text in found.warnings:
        remark(text)
    profile = with_weights(found.profile, options, found.deployment, remark)
    return _tagged(profile, remark) if found.deployment.tagged else profile


def _tagged(profile: Profile, warn: Callable[[str], None]) -> Profile:
    """Return the profile with the tag that the plug-in's keys have on Mooncake."""
    from hicachectl.formats.identity import profile_tag

    tag = profile.tag or profile_tag(profile)
    if tag is None:
        warn("the tag of its keys names the weights, which are unknown; give --weights")
        return profile
    return replace(profile, tag=tag)


def _from_config(options: Mapping[str, Any], store: Store | None) -> Profile:
    from hicachectl.formats.models.config import profile_from_config
    from hicachectl.profiles.server import read_models

    paths = options["model_config"], options.get("draft_model_config")
    given = given_flags(options)
    if store is not None:
        given["storage_backend"] = store.grammar
    config, flags = read_models(paths, DeploymentFlags(**given), {})
    if flags.model is None:
        name = config.get("_name_or_path") or _only_model(store)
        flags = dataclasses.replace(flags, model=name)
    return profile_from_config(config, flags, source=str(paths[0]))


def given_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server flags that options state, as fields of DeploymentFlags."""
    flags = {
        field: options[option] for option, field in _FLAG_OPTIONS.items() if options.get(option)
    }
    if options.get("pp_partition"):
        flags["pp_partition"] = stage_layers(options["pp_partition"], "--pp-partition")
        flags.setdefault("pp", len(flags["pp_partition"]))
    return flags


def _only_model(store: Store | None) -> str:
    """Return the only model in the first keys of a store.

    Raises UsageError if there is no model, or several.
    """
    from hicachectl.formats.keys import grammar_of
    from hicachectl.formats.keys.table import KeySplitter
    from hicachectl.pages.deployments import assign_affixes

    models: set[str] = set()
    if store is not None:
        splitter = KeySplitter()
        for batch in islice(store.scan(("key",)), 4):
            splitter.split(batch.column("key"))
        table = assign_affixes(splitter.affixes, grammar_of(store.grammar), None)
        models = {deployment.names.model for deployment in table.deployments}
    if len(models) != 1:
        seen = f" (the store has the models {', '.join(sorted(models))})" if models else ""
        raise UsageError(f"The model's name is unknown{seen}; give --served-model-name NAME")
    return models.pop()


def destination_profile(profile: Profile | None, options: Mapping[str, Any]) -> Profile | None:
    """Return the profile for which pages are written; None without a --to option.

    Raises UsageError if options contradict each other, or if the profile to change is missing or
    inferred. Raises ProfileError for a release that has other objects than the profile describes.
    """
    from hicachectl.formats.transfer import retargeted

    changes = {
        name: options[f"to_{name}"] for name in _TO_FIELDS if options[f"to_{name}"] is not None
    }
    if options["to_no_tag"]:
        if "tag" in changes:
            raise UsageError("--to-tag cannot be combined with --to-no-tag; leave out one of them")
        changes["tag"] = ""
    if options["to_pp_partition"]:
        changes["pp_partition"] = stage_layers(options["to_pp_partition"], "--to-pp-partition")
        changes.setdefault("pp", len(changes["pp_partition"]))
    if options["to_profile"]:
        if changes:
            raise UsageError(
                f"{_to_option(changes)} cannot be combined with --to-profile; leave out one of them"
            )
        target = with_threshold(read_profile(options["to_profile"]), options)
        return _with_weights_of(profile, target)
    if not changes:
        return None
    if profile is None or profile.inferred:
        raise UsageError(needs_profile(_to_option(changes)))
    if "sglang" in changes and (options.get("model_config") or options.get("launch")):
        changes["pools"] = _pools_of(options, profile.model, changes["sglang"])
    return retargeted(profile, **changes)


def _pools_of(options: Mapping[str, Any], model: str, sglang: str) -> tuple[Pool, ...] | None:
    """Return the pools of servers of another release; None if a live server describes the pools.

    Raises as `profile_from_options` does.
    """
    if options.get("server"):
        return None
    named = {"served_model_name": options.get("served_model_name") or model}
    found = profile_from_options({**options, **named, "sglang": sglang})
    return None if found is None else found.pools


def _to_option(changes: Mapping[str, Any]) -> str:
    """Return the option of the first change."""
    name, value = next(iter(changes.items()))
    return "--to-no-tag" if value == "" else f"--to-{name.replace('_', '-')}"


def _with_weights_of(source: Profile | None, target: Profile) -> Profile:
    """Return the destination's profile with the source's weights, which a conversion keeps.

    Raises UsageError if the destination's profile names other weights.
    """
    if source is None or not source.weights:
        return target
    named = replace(target, weights=source.weights, draft_weights=source.draft_weights)
    if target.weights and target != named:
        raise UsageError(
            "--to-profile: names other weights than the source's profile, but the copies have the "
            "values of the source; leave out the weights"
        )
    return named


def with_weights(
    profile: Profile,
    options: Mapping[str, Any],
    server: ServerDeployment | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Return a profile with the weights of the options.

    If no option gives weights, take the weights that the server loads, if its directories are on
    this machine. A directory in an option is read as the server loads it. Without a server, the
    directory is read as SGLang loads it by default.
    warn: function that is called with the reason if a directory of the server gives no name.
    Raises UsageError or FormatError if an option gives no name.
    """
    from hicachectl.backends.disk.weights import read_checkpoint
    from hicachectl.formats.models.loading import loaded_weights

    read = cache(read_checkpoint)  # target and draft can have the same directory
    settings = {} if server is None else server.settings

    def load(field: str, path: Path) -> str:
        """Return the name of the weights that a server loads from a directory."""
        return loaded_weights(read(path), settings, draft=field == "draft_weights")

    given = [field for field in _WEIGHTS if options.get(field)]
    names = {field: _of_option(field, options[field], load) for field in given}
    if server is not None and not given:
        try:
            names = _of_server(profile, server, load)
        except (FormatError, UsageError) as error:
            warn(f"the weights are unknown: {error}")
    if names.get("draft_weights") == names.get("weights", profile.weights):
        names["draft_weights"] = ""  # the draft has the weights of the model
    named = replace(profile, **names)
    if named.draft_weights and not named.weights:
        raise UsageError("--draft-weights needs --weights")
    return named


def _of_option(field: str, text: str, load: Callable[[str, Path], str]) -> str:
    if Path(text).exists():
        return load(field, Path(text))
    if not _WEIGHTS_NAME.fullmatch(text):
        raise UsageError(
            f"--{field.replace('_', '-')}: {text!r:.200} is neither a model directory nor "
            f"{FINGERPRINT_DIGITS} hexadecimal digits"
        )
    return text


def _of_server(
    profile: Profile, server: ServerDeployment, load: Callable[[str, Path], str]
) -> dict[str, str]:
    places = {"weights": server.model_path}
    if any(pool.is_draft or pool.packed_draft_layers for pool in profile.pools):
        places["draft_weights"] = server.draft_model_path or server.model_path
    # A relative path is relative to the server's working directory, or is a name on the Hub.
    if not all(Path(place).is_absolute() and Path(place).is_dir() for place in places.values()):
        return {}
    return {field: load(field, Path(place)) for field, place in places.items()}
