"""The profile of a destination, from the options that say what is to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.profile import Profile

_FIELDS = ("model", "tag", "tp", "pp", "tp_lcm_size", "layout", "sglang")


def destination_profile(profile: Profile | None, options: Mapping[str, Any]) -> Profile | None:
    """Give the profile that pages are to be written for; None where nothing is to change.

    Raises UsageError where the options contradict one another, or there is no profile to change.
    """
    from hicachectl.formats.transfer import retargeted
    from hicachectl.profiles.sources import read_profile, stage_layers

    changes = {name: options[f"to_{name}"] for name in _FIELDS if options[f"to_{name}"] is not None}
    if options["to_pp_partition"]:
        changes["pp_partition"] = stage_layers(options["to_pp_partition"], "--to-pp-partition")
        changes.setdefault("pp", len(changes["pp_partition"]))
    if options["to_profile"]:
        if changes:
            name = next(iter(changes)).replace("_", "-")
            raise UsageError(f"--to-profile says everything; leave out --to-{name}")
        return read_profile(options["to_profile"])
    if not changes:
        return None
    if profile is None or profile.inferred:
        name = next(iter(changes)).replace("_", "-")
        raise UsageError(f"--to-{name} needs a profile of the source: --profile, --model-config")
    return retargeted(profile, **changes)
