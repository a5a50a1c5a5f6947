"""Identities of a deployment's objects: what parts them, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from hicachectl.formats.identity import Identity, object_identity, profile_identities
from hicachectl.formats.spec import object_specs
from tests.formats.small_models import LOGICAL, gdn, indexer, mha, mla, opaque, profile

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.profile import Profile

TARGET, DRAFT, OTHER = "5" * 32, "6" * 32, "7" * 32
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def weighted(*pools: Pool, **more: Any) -> Profile:
    return profile(*pools, **{"weights": TARGET, "draft_weights": DRAFT, **more})


def by_pool(found: Profile, scheme: str = "file") -> dict[str, set[Identity]]:
    """Return the identities of each pool's objects on all ranks."""
    identities: dict[str, set[Identity]] = {}
    for spec in object_specs(found, scheme):
        identity = object_identity(found, spec)
        assert identity is not None
        identities.setdefault(spec.pool, set()).add(identity)
    return identities


def test_hashes_are_those_of_earlier_releases() -> None:
    """They are on disk, in trailers and markers, and in Mooncake's keys."""
    identity = Identity(
        model="a-b", weights=TARGET, dtype="bfloat16", page_size=64, layer_bytes=512
    )
    assert identity.hash().hex() == "1388e3a0dae155a98d74cb0cece4e725"
    drafted = Identity(model="m", weights="w", draft_weights="d", pool="draft", part="k")
    assert drafted.hash().hex() == "53dbaed126295886640de63f6c3887e1"


def test_every_fact_changes_the_hash() -> None:
    values: dict[str, Any] = {"page_size": 2, "layer_bytes": 9}
    base = Identity(model="a", weights="b")
    hashes = {base.hash()}
    for field in fields(Identity):
        values[field.name] = values.get(field.name, f"another {field.name}")
        changed = {name: getattr(base, name) for name in Identity.__struct_fields__}
        hashes.add(Identity(**{**changed, field.name: values[field.name]}).hash())
    assert len(hashes) == len(fields(Identity)) + 1


@given(
    tp=st.sampled_from((1, 2, 4)),
    pp=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
    target=st.sampled_from((mha, mla)),
    scheme=st.sampled_from(("file", "mooncake")),
)
def test_ranks_of_a_deployment_have_one_identity_for_each_pool_and_part(
    tp: int, pp: int, layout: str, target: Any, scheme: str
) -> None:
    """An identity has no rank: the keys name it, where objects of ranks differ."""
    if scheme == "mooncake" and layout == "layer_first":
        layout = "page_first"
    found = weighted(target(layers=7), tp=tp, pp=pp, layout=layout)
    specs = object_specs(found, scheme)
    parts = {spec.coordinate.part for spec in specs}
    identities = by_pool(found, scheme)
    assert {identity.part for identity in identities["kv"]} == parts
    assert len(identities["kv"]) == len(parts)
    one = next(iter(identities["kv"]))
    assert (one.model, one.weights, one.draft_weights) == ("a-b", TARGET, "")
    assert (one.layout, one.page_size, one.dtype) == (layout, 3, "bfloat16")
    assert profile_identities(found, scheme) == {
        spec.affix: object_identity(found, spec) for spec in specs
    }


@given(layout=st.sampled_from(LAYOUTS[1:]), tp=st.sampled_from((1, 2, 4)), pp=st.integers(1, 2))
def test_mla_pages_are_shared_between_tp_sizes(layout: str, tp: int, pp: int) -> None:
    """Key and identity of an MLA page and its indexer are the same at every TP size."""
    one, other = (
        profile_identities(weighted(mla(), indexer(), tp=size, pp=pp, layout=layout), "file")
        for size in (1, tp)
    )
    assert one == other
    assert len(one) == 2 * pp


def test_mha_pages_of_another_tp_size_differ() -> None:
    """A rank's heads halve; the bytes of a layer tell, beside the key."""
    sizes = [by_pool(weighted(mha(), tp=tp))["kv"].pop().layer_bytes for tp in (1, 2, 4)]
    assert sizes == [384, 192, 96]


def test_states_have_the_dtypes_of_their_tensors_and_the_linear_tp() -> None:
    identity = by_pool(weighted(mha(), gdn(), tp=2))["mamba"]
    assert {one.dtype for one in identity} == {"float32+bfloat16"}
    assert len(identity) == 1
    assert by_pool(weighted(mha(), gdn(), tp=2, linear_tp=1))["mamba"] != identity
    parts = by_pool(weighted(mha(), gdn(), tp=2), "mooncake")["mamba"]
    assert {(one.part, one.dtype) for one in parts} == {
        ("temporal", "float32"),
        ("conv_0", "bfloat16"),
    }


def test_drafts_are_named_by_both_weights() -> None:
    """The draft's KV depends on the target's hidden states, the target's KV not on the draft."""
    found = weighted(mha(), mha("draft", layers=1))
    names = {
        pool: {(i.weights, i.draft_weights) for i in ids} for pool, ids in by_pool(found).items()
    }
    assert names == {"kv": {(TARGET, "")}, "draft": {(TARGET, DRAFT)}}
    other = by_pool(replace(found, draft_weights=OTHER))
    assert other["kv"] == by_pool(found)["kv"]
    assert other["draft"].isdisjoint(by_pool(found)["draft"])
    assert by_pool(replace(found, weights=OTHER))["draft"].isdisjoint(by_pool(found)["draft"])


@pytest.mark.parametrize("pp", [1, 2])
def test_packed_drafts_are_part_of_the_last_stage_only(pp: int) -> None:
    pools = (mla(packed_draft_layers=1), indexer(packed_draft_layers=1))
    found = weighted(*pools, pp=pp, layout="page_first")
    for spec in object_specs(found, "file"):
        identity = object_identity(found, spec)
        assert identity is not None
        last = spec.coordinate.shard.pp_rank in (None, pp - 1)
        assert identity.draft_weights == (DRAFT if last else "")
    bare = weighted(mla(), indexer(), pp=pp, layout="page_first")
    assert by_pool(bare)["kv"].isdisjoint(by_pool(found)["kv"]) is (pp == 1)


def test_a_draft_without_weights_of_its_own_is_named_by_the_targets() -> None:
    """NextN layers come from the target's checkpoint."""
    found = weighted(mla(packed_draft_layers=1), draft_weights="")
    assert {identity.draft_weights for identity in by_pool(found)["kv"]} == {TARGET}
    assert by_pool(replace(found, draft_weights=TARGET)) == by_pool(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "c"},
        {"weights": OTHER},
        {"layout": "page_first_direct"},
        {"page_size": 6},
        {"pools": (mha(dtype="float16"),)},
        {"pools": (mha(kv_heads=8),)},
        {"pools": (mha(head_dim=16),)},
        {"pools": (mla(),)},
    ],
)
def test_other_models_weights_dtypes_layouts_and_sizes_have_other_identities(
    changes: dict[str, Any],
) -> None:
    found = weighted(mha())
    assert by_pool(replace(found, **changes))["kv"].isdisjoint(by_pool(found)["kv"])


@pytest.mark.parametrize("changes", [{"sglang": "0.5.20"}, {"speculative_algorithm": "EAGLE"}])
def test_what_changes_no_bytes_changes_no_identity(changes: dict[str, Any]) -> None:
    found = weighted(mha())
    assert by_pool(replace(found, **changes)) == by_pool(found)


def test_without_weights_or_a_known_form_there_is_no_identity() -> None:
    assert profile_identities(profile(mha()), "file") == {}
    found = weighted(mha(), opaque("swa"))
    assert {identity.pool for identity in profile_identities(found, "file").values()} == {"kv"}


def test_a_logical_anchor_has_an_identity_without_bytes() -> None:
    (identity,) = profile_identities(weighted(LOGICAL), "file").values()
    assert (identity.pool, identity.dtype, identity.layer_bytes) == ("kv", "", 0)


def test_another_division_of_the_layers_is_another_identity() -> None:
    """A stage's key does not say which layers it has. SGLang's own division needs no statement."""
    found = weighted(mha(layers=5), pp=2)
    assert by_pool(replace(found, pp_partition=(2, 3))) == by_pool(found)
    assert by_pool(replace(found, pp_partition=(3, 2)))["kv"].isdisjoint(by_pool(found)["kv"])
