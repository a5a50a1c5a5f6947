"""Every architecture of SGLang has an answer, and every profile is what SGLang allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.architectures import (
    ARCHITECTURES,
    UNVERIFIED,
    Refusal,
    family_of,
)
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.families.base import Family
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.models.hf_config import open_config
from hicachectl.formats.spec import object_specs
from tests.model_records import CLASSES, MODELS

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile

SERVED = sorted(
    name for name, x in ARCHITECTURES.items() if isinstance(x, Family) and not x.draft_only
)
_ONE_STAGE = {"IQuestLoopCoderForCausalLM", "NanbeigeForCausalLM"}  # layer numbers unknown
_HOSTS = {
    "MHATokenToKVPoolHost": "mha",
    "AsymmetricMHATokenToKVPoolHost": "mha",
    "MLATokenToKVPoolHost": "mla",
    "DSAIndexerPoolHost": "dsa_indexer",
    "MambaPoolHost": "mamba",
}


def test_every_registered_architecture_has_an_answer() -> None:
    """The table names each class that SGLang registers, and no other."""
    assert set(CLASSES) == set(ARCHITECTURES)
    assert len(CLASSES) == 290


def test_every_served_architecture_was_compared_with_sglang() -> None:
    assert set(SERVED) == set(MODELS)


def test_configs_written_by_hand_are_marked_as_unverified() -> None:
    by_hand = {name for name, model in MODELS.items() if "by hand" in model["origin"]}
    assert by_hand == UNVERIFIED


@pytest.mark.parametrize("name", sorted(MODELS))
def test_profiles_are_what_sglang_allocates(name: str) -> None:
    """Pools, kinds, layers, bytes, hit policies and states, on all ranks that SGLang was asked."""
    model = MODELS[name]
    for row in model["rows"]:
        if name in _ONE_STAGE and row["pp"] > 1:
            with pytest.raises(ProfileError, match=r"pp: .* only for one stage"):
                _profile(model["config"], row)
            continue
        profile = _profile(model["config"], row)
        assert _pools(profile, row) == {
            pool["name"]: (
                _HOSTS[pool["host"]],
                pool["layers"],
                pool["nbytes"],
                pool["trailing"],
                [state for state in pool.get("states", []) if 0 not in state[0]],
            )
            for pool in row["pools"]
        }


def _profile(config: dict[str, Any], row: dict[str, Any]) -> Profile:
    indexed = any(pool["name"] == "indexer" for pool in row["pools"])
    flags = DeploymentFlags(
        model="tests/Model",
        page_size=row["page_size"],
        tp=row["tp"],
        pp=row["pp"],
        kv_cache_dtype="bfloat16" if indexed else "auto",  # auto depends on the GPU
    )
    return profile_from_config(config, flags)


def _pools(profile: Profile, row: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what the first rank of a stage stores, by pool, in the form of a record."""
    found: dict[str, tuple[Any, ...]] = {}
    # Mooncake has each of K, V and the states in an object; the file backend refuses wider K.
    for spec in object_specs(profile, "mooncake"):
        shard = spec.coordinate.shard
        if (shard.tp_rank or 0) or (shard.pp_rank or 0) != row["stage"]:
            continue
        pool = profile.pool(spec.pool)
        assert pool is not None
        *_, nbytes, trailing, states = found.get(spec.pool, (0, spec.trailing_pages, []))
        if pool.kind == "mamba":
            tensors = [[list(x.shape[1:]), x.dtype] for x in spec.tensors]
            states = [*states, *tensors]
        layers = _ranges(spec.layers)
        found[spec.pool] = (pool.kind, layers, nbytes + spec.nbytes, trailing, states)
    return found


def _ranges(numbers: tuple[int, ...]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


@pytest.mark.parametrize(
    "name", sorted(name for name, x in ARCHITECTURES.items() if isinstance(x, Refusal))
)
def test_other_architectures_are_refused_with_the_reason(name: str) -> None:
    config = open_config({"architectures": [name]}, source="prod.json")
    with pytest.raises(ProfileError, match=rf"^prod\.json: architectures: '{name}' (is|answers) "):
        family_of(config)


@pytest.mark.parametrize("name", SERVED)
def test_fields_without_which_sglang_uses_numbers_of_its_own_are_asked_for(name: str) -> None:
    """A config that leaves such a field out is refused by the field's name."""
    family = ARCHITECTURES[name]
    assert isinstance(family, Family)
    for field in family.stated:
        config = _without(MODELS[name]["config"], field)
        with pytest.raises(ProfileError, match=f"{field}: missing"):
            _profile(config, MODELS[name]["rows"][0])


def _without(config: dict[str, Any], field: str) -> dict[str, Any]:
    return {
        key: _without(value, field) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != field
    }
