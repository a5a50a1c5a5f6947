"""Changes of SGLang's keys, by release.

Source: published wheels 0.5.7 to 0.5.17 and 0.5.19 to 0.5.23, hicache_storage.py :: HiCacheFile
and mooncake_store.py :: MooncakeStore.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hicachectl.formats.errors import CollidingKeys, ProfileError
from hicachectl.formats.profile import NEWEST_SGLANG

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile

_VERSION = re.compile(r"v?([0-9]{1,9}(?:\.[0-9]{1,9})*)(?!\.?[0-9])")
_FILE_STAGE_SINCE = (0, 5, 10)
_FILE_CP_SINCE = (0, 5, 14)
_MAMBA_TP_PAIR_SINCE = (0, 5, 23)  # file and 3FS, beside an MLA target
_MOONCAKE_STAGE_SINCE = (0, 5, 8)  # MLA keys have a rank field, possibly empty
_MOONCAKE_MODEL_SINCE = (0, 5, 17)


def sglang_version(text: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version. Raises ProfileError without a number."""
    match = _VERSION.match(text)
    if match is None:
        raise ProfileError(f"sglang: {text!r:.60} is not a version; give one like {NEWEST_SGLANG}")
    return tuple(int(number) for number in match[1].split("."))


def mamba_keys_name_rank(profile: Profile) -> bool:
    """Return whether file and 3FS keys of Mamba states name the TP rank beside an MLA target."""
    return _is_since(profile, _MAMBA_TP_PAIR_SINCE)


def mooncake_keys_name_model(profile: Profile) -> bool:
    """Return whether Mooncake keys begin with the model's name, after any tag."""
    return _is_since(profile, _MOONCAKE_MODEL_SINCE)


def mooncake_keys_place_rank(profile: Profile) -> bool:
    """Return whether Mooncake keys of MLA have a (possibly empty) rank field: `__k`, not `_k`."""
    return _is_since(profile, _MOONCAKE_STAGE_SINCE)


def check_file_ranks(profile: Profile) -> None:
    """Refuse pp and cp above 1 if file keys of the release do not name the rank."""
    _check(profile, "pp", _FILE_STAGE_SINCE, "file")
    _check(profile, "cp", _FILE_CP_SINCE, "file")


def check_mooncake_ranks(profile: Profile) -> None:
    """Refuse pp above 1 if Mooncake keys of the release do not name the stage."""
    _check(profile, "pp", _MOONCAKE_STAGE_SINCE, "Mooncake")


def _is_since(profile: Profile, version: tuple[int, ...]) -> bool:
    return sglang_version(profile.sglang) >= version


def _check(profile: Profile, axis: str, since: tuple[int, ...], backend: str) -> None:
    size = getattr(profile, axis)
    if size > 1 and not _is_since(profile, since):
        raise CollidingKeys(
            f"{axis} {size}: {backend} keys of SGLang before {'.'.join(map(str, since))} do not "
            f"name the {axis} rank, so ranks overwrite each other's objects"
        )
