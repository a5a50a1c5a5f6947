"""Identities, which name the facts that decide whether a server may use an object's bytes.

Two objects under one key can differ in weights, dtype or layout, which no key shows. An identity
names such facts. Its hash is in each trailer. The tag of Mooncake keys is a hash of the identity of
the anchor and of some other facts (`deployment_tag`). An identity has no paths, times or ranks, so
that all hosts of a deployment compute the same identity.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from hicachectl.formats.keys import WHOLE_PAGES
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.pools import model_layer_count, partition_text
from hicachectl.formats.spec import object_specs
from hicachectl.formats.trailer import IDENTITY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec


_Text = Annotated[str, Meta(max_length=4096)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 48)]


class Identity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the bytes of one kind of object.

    model: the model's name in keys, with "-" for "/".
    weights: name of the target's weights, from `formats.weights` or chosen by the user.
    draft_weights: name of the draft's weights for draft pools and packed draft layers; else "".
    pool, part: see `objects.Coordinate`.
    dtype: dtypes of the object's tensors in order, without repetitions, joined by "+".
    layout: SGLang's --hicache-mem-layout after its overrides.
    page_size: tokens of a page.
    layer_bytes: bytes of one layer of the object; 0 for a logical anchor.
    pp_partition: result of `pools.partition_text`. If the layers are divided among the stages in
        another way, an object with the same key has other layers.
    """

    model: _Text
    weights: _Text
    draft_weights: _Text = ""
    pool: _Text = ANCHOR
    part: _Text | None = None
    dtype: _Text = ""
    layout: _Text = "page_first"
    page_size: Bytes = 1
    layer_bytes: Bytes = 0
    pp_partition: _Text = ""

    def hash(self) -> bytes:
        """Return the identity's hash: 16 bytes."""
        text = json.dumps(_hashed(self), sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()


def _hashed(identity: Identity) -> dict[str, object]:
    """Return the facts that a hash covers.

    A field that a later release has added counts only if it is stated, so that earlier hashes stay
    valid.
    """
    facts = asdict(identity)
    if not identity.pp_partition:
        del facts["pp_partition"]
    return facts


def object_identity(profile: Profile, spec: ObjectSpec) -> Identity | None:
    """Return the identity of a spec's objects.

    Returns None if the profile does not name the weights, or if the form of the bytes is unknown.
    """
    layers = len(spec.layers) + spec.padding_layers
    if not profile.weights or (spec.nbytes and not (spec.tensors and layers)):
        return None
    pool = profile.pool(spec.pool)
    if spec.nbytes and pool is not None and not kind_of(pool).has_identity(pool):
        return None
    return Identity(
        model=profile.key_model,
        weights=profile.weights,
        # A draft without a name for its weights comes from the target's checkpoint (NextN).
        draft_weights=(profile.draft_weights or profile.weights) if _drafts(profile, spec) else "",
        pool=spec.pool,
        part=spec.coordinate.part,
        dtype="+".join(dict.fromkeys(tensor.dtype for tensor in spec.tensors)),
        layout=profile.layout,
        page_size=profile.page_size,
        layer_bytes=spec.nbytes // layers if layers else 0,
        pp_partition=partition_text(profile.pp_partition, profile.pp),
    )


def _drafts(profile: Profile, spec: ObjectSpec) -> bool:
    """Return whether a spec has draft layers. Only the last stage has packed draft layers."""
    pool = profile.pool(spec.pool)
    if pool is None or not spec.layers:
        return False
    packed = pool.packed_draft_layers > 0 and spec.layers[-1] >= model_layer_count(profile)
    return pool.is_draft or packed


def differences(found: Identity, expected: Identity) -> str:
    """Return the differences as text, such as `dtype float16 instead of bfloat16`; "" if equal."""
    return ", ".join(unlike(asdict(found), asdict(expected)))


def unlike(theirs: Mapping[str, object], ours: Mapping[str, object]) -> list[str]:
    """Return a text for each fact that differs, in the order of `ours`."""
    return [
        f"{name.replace('_', ' ')} {theirs[name] or 'none'} instead of {value or 'none'}"
        for name, value in ours.items()
        if theirs[name] != value
    ]


@lru_cache(maxsize=8)
def profile_identities(profile: Profile, grammar: str) -> Mapping[Affix, Identity]:
    """Return the identity of the objects of each affix, as far as the profile tells.

    Raises the errors of `spec.object_specs`.
    """
    found = {spec.affix: object_identity(profile, spec) for spec in object_specs(profile, grammar)}
    return {affix: identity for affix, identity in found.items() if identity is not None}


def deployment_tag(
    anchor: Identity,
    sidecars: Mapping[str, str],
    *,
    tp_size: int | None,
    pp_size: int,
    draft_weights: str = "",
) -> str:
    """Return the `extra_backend_tag` of a deployment's Mooncake keys: 32 hex digits.

    All objects of a group need one tag, so all ranks and stages compute the same tag. Ranks and
    stages have the same pools, except for drafts. The tag covers no sizes of objects, because each
    read compares sizes.

    anchor: identity of an anchor object that holds all parts of a rank's page. Its part and its
        draft weights do not count.
    sidecars: dtypes of the other pools by name, without drafts.
    tp_size: attention TP size, if keys name the TP rank; None if the ranks share the anchor. The
        tag covers the TP size because of models with fewer heads than ranks. In such a model, an
        object of equal rank and equal size has other heads under another TP size.
    draft_weights: name of the draft's weights, also on stages without the draft; "" without a
        draft.
    """
    facts = _hashed(replace(anchor, part=None, draft_weights=draft_weights))
    text = json.dumps([facts, dict(sidecars), tp_size, pp_size], sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=IDENTITY_BYTES).hexdigest()


def profile_tag(profile: Profile) -> str | None:
    """Return the `deployment_tag` of a profile.

    Returns None if the profile does not name the weights, or if the form of some bytes is unknown.
    Raises the errors of `spec.object_specs`.
    """
    specs = object_specs(profile, WHOLE_PAGES)
    own = [spec for spec in specs if not pool_name(spec.pool).draft]
    found = {spec.pool: object_identity(profile, spec) for spec in own}
    dtypes = {pool: identity.dtype for pool, identity in found.items() if identity is not None}
    anchor = found.pop(next(spec.pool for spec in specs if spec.anchor))
    if anchor is None or len(dtypes) <= len(found):
        return None
    drafted = profile.draft_weights or any(
        pool.is_draft or pool.packed_draft_layers for pool in profile.pools
    )
    return deployment_tag(
        anchor,
        {pool: dtypes[pool] for pool in found},
        tp_size=None if profile.rank_replicated else profile.tp,
        pp_size=profile.pp,
        draft_weights=(profile.draft_weights or profile.weights) if drafted else "",
    )
