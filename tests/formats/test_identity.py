"""Tags of Mooncake keys are equal on all ranks of a deployment, and differ where bytes do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from hicachectl.formats.identity import (
    Identity,
    deployment_tag,
    profile_identities,
    profile_tag,
)
from hicachectl.formats.profile import dump_profile, parse_profile
from hicachectl.formats.spec import object_specs
from tests.formats.small_models import LOGICAL, gdn, indexer, mha, mla, opaque, profile

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

DRAFTED = profile(mha(layers=8), mha("draft", layers=1), tp=2, pp=2, weights="w", draft_weights="d")
PACKED = profile(mla(layers=8, packed_draft_layers=1), indexer(layers=8), pp=2, weights="w")


def rank_tags(model: Profile, draft_weights: str) -> set[str]:
    """Return the tag of each rank, from the rank's own anchor."""
    files = profile_identities(model, "file")
    specs = object_specs(model, "file")

    def others(mine: ObjectSpec) -> dict[str, str]:
        """Return the dtypes of a rank's sidecars, without drafts."""
        return {
            spec.pool: files[spec.affix].dtype
            for spec in specs
            if spec.shares_rank(mine) and not spec.anchor and spec.pool != "draft"
        }

    return {
        deployment_tag(
            files[spec.affix],
            others(spec),
            tp_size=spec.coordinate.shard.tp_size,
            pp_size=spec.coordinate.shard.pp_size or 1,
            draft_weights=draft_weights,
        )
        for spec in specs
        if spec.anchor
    }


@pytest.mark.parametrize(
    ("model", "draft_weights"),
    [
        (DRAFTED, "d"),
        (PACKED, "w"),
        (profile(mha(), tp=2, weights="w"), ""),
        (profile(mla(), indexer(), tp=2, weights="w"), ""),
        (profile(mha(), gdn(), tp=2, weights="w"), ""),
    ],
)
def test_all_ranks_have_the_tag_of_the_profile(model: Profile, draft_weights: str) -> None:
    """A draft, sidecar or packed, is on the last stage only."""
    assert rank_tags(model, draft_weights) == {profile_tag(model)}
    assert profile_tag(parse_profile(dump_profile(model))) == profile_tag(model)


def test_a_profile_without_weights_has_no_tag() -> None:
    assert profile_tag(profile(mha())) is None


def test_a_profile_with_bytes_of_unknown_form_has_no_tag() -> None:
    assert profile_tag(profile(LOGICAL, opaque("deepseek_v4_c4"), weights="w")) is None


def test_states_of_equal_size_and_other_dtype_have_another_tag() -> None:
    states = gdn()
    halves = structs.replace(
        states, conv=tuple(structs.replace(one, dtype="float16") for one in states.conv)
    )
    tags = {profile_tag(profile(mha(), pool, weights="w")) for pool in (states, halves)}
    assert len(tags) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"model": "a/c"},
        {"weights": "other"},
        {"draft_weights": "other"},
        {"page_size": 4},
        {"layout": "page_first_direct"},
        {"tp": 4},
        {"pp": 4},
        {"pools": (mha(layers=8, dtype="float16"), mha("draft", layers=1))},
        {"pools": (mha(layers=8, head_dim=16), mha("draft", layers=1))},
    ],
)
def test_what_changes_bytes_or_shares_changes_the_tag(change: dict[str, Any]) -> None:
    assert profile_tag(structs.replace(DRAFTED, **change)) != profile_tag(DRAFTED)


def test_tp_sizes_share_the_pages_of_an_mla_model() -> None:
    """Each has its own pages of an MHA model, since ranks of equal number can hold other heads."""
    latent = profile(mla(), weights="w")
    assert profile_tag(latent) == profile_tag(structs.replace(latent, tp=4))
    few_heads = profile(mha(kv_heads=2), tp=2, weights="w")
    assert profile_tag(few_heads) != profile_tag(structs.replace(few_heads, tp=4))


def test_a_tag_is_32_hex_digits_and_stays() -> None:
    """Stored keys have it: it must not change from release to release."""
    anchor = Identity(model="a-b", weights="w", dtype="bfloat16", page_size=64, layer_bytes=1024)
    assert deployment_tag(anchor, {}, tp_size=2, pp_size=1) == "a976bbf19f419314aeedcfcd394110c6"
