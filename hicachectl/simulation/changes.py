"""What-ifs: other settings of a deployment, which change the bytes of its pages."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.formats.errors import ProfileError, UsageError
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.models.dtypes import stated_kv_dtype
from hicachectl.formats.profile import validate_profile
from hicachectl.formats.transfer import retargeted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.profile import Profile

_NUMBERS = ("page_size", "tp")
_NUMBER = re.compile("[1-9][0-9]{0,8}")
SETTINGS = (*_NUMBERS, "kv_cache_dtype", "layout")


def parse_changes(text: str) -> dict[str, str]:
    """Return the settings in a text such as `page_size=128,tp=4`. Raises UsageError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in SETTINGS:
            raise UsageError(f"{name!r} is not one of {', '.join(SETTINGS)}")
        if not equals or not value:
            raise UsageError(f"{part!r} has no value; write {name}=VALUE")
        if name in found:
            raise UsageError(f"{name} is given twice; leave one out")
        if name in _NUMBERS and not _NUMBER.fullmatch(value):
            raise UsageError(f"{part!r:.40} is no number in 1..999999999; write {name}=64")
        found[name] = value
    return found


def changes_text(changes: Mapping[str, str]) -> str:
    """Return settings as text, such as `page_size=128,tp=4`."""
    return ",".join(f"{name}={value}" for name, value in changes.items())


def changed(profile: Profile, changes: Mapping[str, str]) -> Profile:
    """Return the profile with other settings.

    changes: new values by the names in `SETTINGS`.
    Raises UsageError and ProfileError for settings that no deployment can have.
    """
    said = changes_text(changes)
    tp = changes.get("tp")
    new = retargeted(profile, tp=None if tp is None else int(tp), layout=changes.get("layout"))
    if "page_size" in changes:
        new = replace(new, page_size=int(changes["page_size"]))
    if (name := changes.get("kv_cache_dtype")) is not None:
        anchor, dtype = new.pools[0], stated_kv_dtype(name)
        of_dtype = partial(kind_of(anchor).with_cache_dtype, anchor)
        if dtype is None or of_dtype("bfloat16") == of_dtype("float8_e4m3fn"):
            raise UsageError(
                f"what_if: {said}: the bytes of a page with {name} do not follow from the profile; "
                "give the profile of such servers with --profile"
            )
        new = replace(new, pools=(of_dtype(dtype), *new.pools[1:]))
    if problems := validate_profile(new):
        raise ProfileError(f"what_if: {said}: {'; '.join(problems)}")
    return new
