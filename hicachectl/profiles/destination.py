"""Build the profile of a destination from the --to-* options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import needs_profile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.profile import Profile

_FIELDS = ("model", "tag", "tp", "pp", "tp_lcm_size", "layout", "sglang")


def destination_profile(profile: Profile | None, options: Mapping[str, Any]) -> Profile | None:
    """Return the profile that pages are written for; None without a --to-* option.

    Raises UsageError if options contradict each other, or if the profile to change is missing or
    inferred; ProfileError for a release whose objects it does not describe.
    """
    from hicachectl.formats.transfer import retargeted
    from hicachectl.profiles.sources import read_profile, stage_layers, with_threshold

    changes = {name: options[f"to_{name}"] for name in _FIELDS if options[f"to_{name}"] is not None}
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
                f"{_option(changes)} cannot be combined with --to-profile; leave out one of them"
            )
        target = with_threshold(read_profile(options["to_profile"]), options)
        return _with_weights_of(profile, target)
    if not changes:
        return None
    if profile is None or profile.inferred:
        raise UsageError(needs_profile(_option(changes)))
    if "sglang" in changes and (options.get("model_config") or options.get("launch")):
        changes["pools"] = _pools_of(options, profile.model, changes["sglang"])
    return retargeted(profile, **changes)


def _pools_of(options: Mapping[str, Any], model: str, sglang: str) -> tuple[Pool, ...] | None:
    """Return the pools of another release's servers; None if a live server described them.

    Raises like `profile_from_options`.
    """
    from hicachectl.profiles.sources import profile_from_options

    if options.get("server"):
        return None
    named = {"served_model_name": options.get("served_model_name") or model}
    found = profile_from_options({**options, **named, "sglang": sglang})
    return None if found is None else found.pools


def _option(changes: Mapping[str, Any]) -> str:
    """Return the option of the first change."""
    name, value = next(iter(changes.items()))
    return "--to-no-tag" if value == "" else f"--to-{name.replace('_', '-')}"


def _with_weights_of(source: Profile | None, target: Profile) -> Profile:
    """Return the destination's profile with the source's weights, which no conversion changes.

    Raises UsageError if it names others.
    """
    from msgspec.structs import replace

    if source is None or not source.weights:
        return target
    named = replace(target, weights=source.weights, draft_weights=source.draft_weights)
    if target.weights and target != named:
        raise UsageError(
            "--to-profile: names other weights than the source's profile, but the copies have the "
            "values of the source's; leave out the weights"
        )
    return named
