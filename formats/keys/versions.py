"""Keys that depend on SGLang's release (`formats.releases`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.releases import release_of, since

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile


def mamba_keys_name_rank(profile: Profile) -> bool:
    """Return whether file and 3FS keys of Mamba states name the TP rank beside an MLA target."""
    return release_of(profile.sglang).file_state_rank


def mooncake_keys_name_model(profile: Profile) -> bool:
    """Return whether Mooncake keys begin with the model's name, after any tag."""
    return release_of(profile.sglang).mooncake_model


def mooncake_keys_place_rank(profile: Profile) -> bool:
    """Return whether Mooncake keys of MLA have a (possibly empty) rank field: `__k`, not `_k`."""
    return release_of(profile.sglang).mooncake_stage


def check_file_ranks(profile: Profile) -> None:
    """Refuse pp and cp above 1 if file keys of the release do not name the rank."""
    _check(profile, "pp", "file_stage", "file")
    _check(profile, "cp", "file_cp", "file")


def check_mooncake_ranks(profile: Profile) -> None:
    """Refuse pp above 1 if Mooncake keys of the release do not name the stage."""
    _check(profile, "pp", "mooncake_stage", "Mooncake")


def _check(profile: Profile, axis: str, fact: str, backend: str) -> None:
    size = getattr(profile, axis)
    if size > 1 and not getattr(release_of(profile.sglang), fact):
        raise UnsupportedByBackend(
            f"{axis} {size}: {backend} keys of SGLang before {since(fact)} do not name the {axis} "
            f"rank, so ranks overwrite each other's objects; use SGLang {since(fact)} or later"
        )
