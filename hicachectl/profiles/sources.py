"""Build a command's profile from its options, or take the profile that the store records."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.models.flag_table import OPTIONS
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.formats.releases import unknown_release
from hicachectl.formats.spec import collision_of
from hicachectl.formats.wording import needs_profile
from hicachectl.profiles.weights import WEIGHTS_OPTIONS, with_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hicachectl.backends.base import Store

# The options of flags, and their fields in DeploymentFlags.
_FLAG_OPTIONS = {flag.parameter: flag.field for flag in OPTIONS if flag.kind != "layers"}
_SOURCES = ("profile_file", "model_config", "server", "launch")
_MAX_PROFILE_BYTES = 16 << 20  # a profile is kilobytes


def profile_from_options(
    options: Mapping[str, Any],
    store: Store | None = None,
    *,
    looks_only: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> Profile | None:
    """Return the profile of the options, else the store's recorded profile, else None.

    store: receives the profile, and shows the model's name and weights if no option does.
    looks_only: see `Profiled.use_profile`. warn: called with warnings about a server's answer.
    Raises UsageError if options contradict each other, ProfileError and StoreUnavailable from the
    source or store.
    """
    profile = _asked_for(options, store, warn)
    if store is not None:
        profile = agree_on_profile(store, profile, looks_only=looks_only)
    return profile if profile is None else with_threshold(profile, options)


def with_threshold(profile: Profile, options: Mapping[str, Any]) -> Profile:
    """Return a profile with the prefetch threshold of --prefetch-threshold, if that is given."""
    stated = options.get("prefetch_threshold")
    return profile if stated is None else replace(profile, prefetch_threshold=stated)


def profile_to_look(
    options: Mapping[str, Any],
    store: Store,
    *,
    looks_only: bool = True,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[Profile | None, str]:
    """Return `profile_from_options`, and "".

    If its ranks overwrite each other's objects in this store, no profile describes the objects:
    then, for a command that only looks, return None and the reason.
    """
    return agree_to_look(store, _asked_for(options, store, warn), looks_only=looks_only)


def agree_to_look(
    store: Store, profile: Profile | None, *, looks_only: bool = True
) -> tuple[Profile | None, str]:
    """Return `agree_on_profile`, and ""; or None and a reason, as `profile_to_look` does."""
    collision = "" if profile is None else collision_of(profile, store.grammar)
    if collision and looks_only:
        return None, collision
    return agree_on_profile(store, profile, looks_only=looks_only), ""


def agree_on_profile(
    store: Store, profile: Profile | None, *, looks_only: bool = False
) -> Profile | None:
    """Pass a profile to a store. Return it, completed by what the store records.

    Every process that opens the store for a command does this. Arguments and errors as of
    `profile_from_options`.
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
    """Return the profile of the options, if any; warn about a release that is not known."""
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
        if named := [name for name in WEIGHTS_OPTIONS if options.get(name)]:
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
    try:
        return parse_profile(data.decode("utf-8-sig"), source=str(path))
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text; save the file as UTF-8") from error


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
        overrides=_flags(options),
    )

    def remark(text: str) -> None:
        warn(f"{server or '--launch'}: {text}")

    for text in found.warnings:
        remark(text)
    profile = with_weights(found.profile, options, found.deployment, remark)
    return _tagged(profile, remark) if found.deployment.tagged else profile


def _tagged(profile: Profile, warn: Callable[[str], None]) -> Profile:
    """Return the profile with the tag of the storage plug-in's keys on Mooncake."""
    from hicachectl.formats.identity import profile_tag

    tag = profile.tag or profile_tag(profile)
    if tag is None:
        warn("the tag of its keys names the weights, which are unknown; give --weights")
        return profile
    return replace(profile, tag=tag)


def _from_config(options: Mapping[str, Any], store: Store | None) -> Profile:
    from hicachectl.formats.models.config import profile_from_config
    from hicachectl.formats.models.flags import DeploymentFlags
    from hicachectl.profiles.server import read_models

    paths = options["model_config"], options.get("draft_model_config")
    given = _flags(options)
    if store is not None:
        given["storage_backend"] = store.grammar
    config, flags = read_models(paths, DeploymentFlags(**given), {})
    if flags.model is None:
        name = config.get("_name_or_path") or _only_model(store)
        flags = dataclasses.replace(flags, model=name)
    return profile_from_config(config, flags, source=str(paths[0]))


def _flags(options: Mapping[str, Any]) -> dict[str, Any]:
    flags = {
        field: options[option] for option, field in _FLAG_OPTIONS.items() if options.get(option)
    }
    if options.get("pp_partition"):
        flags["pp_partition"] = stage_layers(options["pp_partition"], "--pp-partition")
        flags.setdefault("pp", len(flags["pp_partition"]))
    return flags


def stage_layers(text: str, option: str) -> tuple[int, ...]:
    """Return the layers of each pipeline stage. Raises UsageError."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option}: {text!r} is not a list of layers per stage, such as 30,31"
        ) from None


def _only_model(store: Store | None) -> str:
    """Return the one model in the first keys of a store. Raises UsageError for none or several."""
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
