"""The profile, which has the model, sharding and pools of the deployment that wrote a store.

A profile describes the whole model before sharding. `formats.spec` derives a page's objects from a
profile.
Profile files are TOML, or JSON with the same keys.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import fields, replace

from hicachectl.formats.documents import parse_json, parse_toml, shown
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.forms import convert
from hicachectl.formats.kinds import kind_names, kind_of, kinds
from hicachectl.formats.kinds.pool import Pool, StateTensor, default_hit_policy
from hicachectl.formats.layouts import DTYPE_BYTES, LAYOUTS, UNSTORED_DTYPES
from hicachectl.formats.objects import ANCHOR, MAX_RANKS, Names
from hicachectl.formats.releases import NEWEST_SGLANG
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


# SGLang's default (HybridCacheController.parse_storage_backend_extra_config).
PREFETCH_THRESHOLD = 256

HIT_POLICIES = ("all_pages", "trailing_pages")

# Bounds far above any deployment. They refuse mistyped and hostile profiles before any allocation.
MAX_ALL_RANKS = 65_536
MAX_LAYERS = 10_000
MAX_PAGE_SIZE = 1 << 20
MAX_LENGTH = 1 << 40  # largest number of heads, dims or states
MAX_OBJECT_BYTES = 1 << 62
_MAX_AXES = 8
_MAX_STATES = 16
_MAX_POOLS = 32  # SGLang has 23
HASH_UNITS = ("token", "bigram")

_NO_TEXT = "not valid Unicode (a lone surrogate)"

# Numeric fields with their lower and upper bounds.
_PROFILE_BOUNDS = {
    "page_size": (1, MAX_PAGE_SIZE),
    **dict.fromkeys(("tp", "pp", "cp", "dcp"), (1, MAX_RANKS)),
    **dict.fromkeys(("linear_tp", "tp_lcm_size"), (0, MAX_RANKS)),
    "prefetch_threshold": (0, MAX_LENGTH),
}
_POOL_BOUNDS = {
    "trailing_pages": (1, MAX_LENGTH),
    "packed_draft_layers": (0, MAX_LAYERS),
    "kv_heads": (0, MAX_LENGTH),
    "head_dim": (0, MAX_LENGTH),
    "v_head_dim": (0, MAX_LENGTH),
    "kv_lora_rank": (0, MAX_LENGTH),
    "qk_rope_head_dim": (0, MAX_LENGTH),
    "index_head_dim": (0, MAX_LENGTH),
    "compress_ratio": (0, MAX_PAGE_SIZE),
    "nbytes": (0, MAX_OBJECT_BYTES - 1),
}


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment. `tp` is the attention TP size, as in the keys.

    prefetch_threshold: number of tokens. A server fetches nothing for a request that has fewer
        tokens in the store.
    inferred: whether the profile was built from a store's listing. Then only the model, the sizes
        of TP, PP, CP and DCP, the pools and the sizes of objects are valid. Commands that interpret
        bytes refuse such a profile.
    """

    model: str
    inferred: bool = False
    sglang: str = NEWEST_SGLANG
    page_size: int = 1
    layout: str = "page_first"
    tp: int = 1
    linear_tp: int = 0  # 0 means equal to tp
    pp: int = 1
    pp_partition: tuple[int, ...] = ()
    cp: int = 1
    cp_layer_split: bool = False  # SGLang --enable-dsa-cache-layer-split
    dcp: int = 1
    tp_lcm_size: int = 0
    tag: str = ""
    weights: str = ""  # name of the weights (`formats.weights`); "" if unknown
    draft_weights: str = ""  # "" means equal to weights
    hash_unit: str = "token"
    speculative_algorithm: str = ""
    prefetch_threshold: int = PREFETCH_THRESHOLD
    pools: tuple[Pool, ...] = ()

    @property
    def key_model(self) -> str:
        """Model name as in keys of HiCacheFile and MooncakeStore, with "-" in place of "/"."""
        return self.model.replace("/", "-")

    @property
    def names(self) -> Names:
        """The names in keys."""
        return Names(self.key_model, self.tag)

    @property
    def rank_replicated(self) -> bool:
        """Whether TP ranks share one KV object (SGLang's `is_mla_model`)."""
        anchor = self.pools[0]
        return kind_of(anchor).shards is False or anchor.replicated

    @property
    def trailing(self) -> bool:
        """Whether servers need at least one of the pools only at the end of a prefix."""
        return any(pool.trailing for pool in self.pools)

    def pool(self, name: str) -> Pool | None:
        """Return the pool of this name; None if the profile has no such pool."""
        return next((pool for pool in self.pools if pool.name == name), None)


def parse_profile(text: str, *, source: str = "profile") -> Profile:
    """Parse a profile from TOML or JSON text. Raises ProfileError, which names the wrong field."""
    text = text.removeprefix("\ufeff")
    try:
        if text.lstrip().startswith("{"):
            document = parse_json(text, source, refusal=ProfileError, unique=True)
        else:
            document = parse_toml(text, source, refusal=ProfileError)
        return profile_from_mapping(document, source=source)
    except ProfileError as error:
        raise ProfileError(f"{error}; see hicachectl-profile(1)") from None


def profile_from_mapping(document: Any, *, source: str = "profile") -> Profile:
    """Build and validate a profile from parsed TOML/JSON. Raises ProfileError."""
    profile = convert(document, Profile, source, refusal=ProfileError)
    problems = validate_profile(profile)
    if problems:
        raise ProfileError(f"{source}: " + "; ".join(problems))
    return profile


def dump_profile(profile: Profile) -> str:
    """Return a profile as TOML; inverse of `parse_profile`."""
    import tomli_w

    return tomli_w.dumps(profile_to_mapping(profile))


def profile_to_mapping(profile: Profile) -> dict[str, Any]:
    """Convert a profile to plain dicts and lists, without fields at their default."""
    mapping: dict[str, Any] = _plain(profile)
    return mapping


def stored_profile(profile: Profile) -> Profile:
    """Return a profile without the fields that do not change what servers store."""
    return replace(profile, prefetch_threshold=PREFETCH_THRESHOLD)


def validate_profile(profile: Profile) -> list[str]:
    """Return a message for each problem of a profile; an empty list for a valid profile."""
    sizes = [*_size_problems(profile)]
    problems = [*sizes, *_scalar_problems(profile)]
    if sizes:
        return problems  # the other checks would calculate with these wrong numbers
    problems += _parallel_problems(profile)
    if not profile.pools:
        return [*problems, "pools: missing; a profile needs at least the kv pool"]
    anchor = profile.pools[0]
    if anchor.name != ANCHOR:
        problems.append(f"pools: the first pool must be kv, but is {anchor.name!r}")
    elif anchor.kind in kind_names() and not kind_of(anchor).anchors:
        known = [kind.name for kind in kinds() if kind.anchors]
        problems.append(not_one_of("pools[kv].kind", anchor.kind, known))
    names = [pool.name for pool in profile.pools]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"pools: {name!r} occurs twice" for name in twice]
    for pool in profile.pools:
        own = [*_pool_problems(pool)] or [*_object_problems(profile, pool)]
        problems += [f"pools[{pool.name}].{problem}" for problem in own]
    return problems


def above(name: str, value: int, most: int) -> Iterator[str]:
    """Yield a message if a number exceeds its bound."""
    if value > most:
        yield f"{name}: must be at most {most}, but is {shown(value)}"


def too_many(name: str, things: str, count: int, most: int) -> Iterator[str]:
    """Yield a message if a field has more things than its bound."""
    if count > most:
        yield f"{name}: has {count} {things}; at most {most} are allowed"


def _within(value: Any, bounds: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yield a message for each field of a struct that is out of its bounds."""
    for name, (least, most) in bounds.items():
        number = getattr(value, name)
        yield from above(name, number, most)
        if number < least:
            words = f"must be at least {least}" if least else "must not be negative"
            yield f"{name}: {words}, but is {number}"


def _size_problems(profile: Profile) -> Iterator[str]:
    yield from _within(profile, _PROFILE_BOUNDS)
    sizes = (profile.tp, profile.pp, profile.cp)
    if all(0 < size <= MAX_RANKS for size in sizes) and prod(sizes) > MAX_ALL_RANKS:
        yield f"tp x pp x cp: {prod(sizes)} ranks; at most {MAX_ALL_RANKS} are allowed"
    yield from above("pp_partition", max(profile.pp_partition, default=0), MAX_LAYERS)
    yield from too_many("pools", "pools", len(profile.pools), _MAX_POOLS)
    for pool in profile.pools[:_MAX_POOLS]:
        for problem in _pool_size_problems(pool):
            yield f"pools[{pool.name}].{problem}"


def _pool_size_problems(pool: Pool) -> Iterator[str]:
    highest = pool.layers if isinstance(pool.layers, int) else max(pool.layers, default=0)
    yield from above("layers", highest, MAX_LAYERS)
    yield from _within(pool, _POOL_BOUNDS)
    yield from too_many("conv", "states", len(pool.conv), _MAX_STATES)
    for where, state in _named_states(pool):
        yield from above(f"{where}.shard_axis", state.shard_axis, _MAX_AXES)
        yield from too_many(f"{where}.shape", "axes", len(state.shape), _MAX_AXES)
        yield from above(f"{where}.shape", max(state.shape, default=0), MAX_LENGTH)
        yield from above(f"{where}.groups", max(state.groups, default=0), MAX_LENGTH)


def _object_problems(profile: Profile, pool: Pool) -> Iterator[str]:
    """Yield a message if an unsharded object of the pool can reach MAX_OBJECT_BYTES."""
    layers = pool.layers if isinstance(pool.layers, int) else len(pool.layers)
    layers += pool.packed_draft_layers + 1  # CP layer split can add one layer of padding
    rows = {name: row for kind in kinds() for name, row in kind.row_items(pool).items()}
    items = {name: profile.page_size * row for name, row in rows.items()}
    items |= {f"{where}.shape": prod(state.shape) for where, state in _named_states(pool)}
    if sum(items.values()) * layers * max(DTYPE_BYTES.values()) >= MAX_OBJECT_BYTES:
        largest = max(items, key=lambda name: items[name])
        yield f"{largest}: too large; an object must be smaller than 2^62 bytes"


def _named_states(pool: Pool) -> Iterator[tuple[str, StateTensor]]:
    if pool.temporal is not None:
        yield "temporal", pool.temporal
    for index, state in enumerate(pool.conv):
        yield f"conv[{index}]", state


def _scalar_problems(profile: Profile) -> Iterator[str]:
    if not profile.model:
        yield "model: missing"
    if profile.draft_weights and not profile.weights:
        yield "draft_weights: needs weights"
    for name in ("model", "sglang", "tag", "weights", "draft_weights", "speculative_algorithm"):
        if not _is_text(getattr(profile, name)):
            yield f"{name}: {_NO_TEXT}"
    yield from _choice("layout", profile.layout, LAYOUTS)
    yield from _choice("hash_unit", profile.hash_unit, HASH_UNITS)


def _parallel_problems(profile: Profile) -> Iterator[str]:
    if profile.pp_partition and len(profile.pp_partition) != profile.pp:
        yield f"pp_partition: states {len(profile.pp_partition)} stages, but pp is {profile.pp}"
    if any(layers < 1 for layers in profile.pp_partition):
        yield f"pp_partition: {list(profile.pp_partition)} has a stage without layers"
    if profile.dcp > 1 and profile.page_size % profile.dcp:
        yield f"page_size: {profile.page_size} is not a multiple of dcp {profile.dcp}"
    if profile.dcp > 1 and profile.tp % profile.dcp:
        yield f"tp: {profile.tp} is not a multiple of dcp {profile.dcp}"
    if profile.tp_lcm_size and profile.tp > 0 and profile.tp_lcm_size % profile.tp:
        yield f"tp_lcm_size: {profile.tp_lcm_size} is not a multiple of tp {profile.tp}"


def _pool_problems(pool: Pool) -> Iterator[str]:
    if pool.kind not in kind_names():
        yield from _choice("kind", pool.kind, kind_names())
        return
    kind = kind_of(pool)
    if not _is_text(pool.name):
        yield f"name: {_NO_TEXT}"
    yield from (f"{name}: missing" for name in kind.required if not getattr(pool, name))
    yield from _layer_problems(pool.layers)
    yield from kind.problems(pool)
    yield from _choice("hit_policy", pool.hit_policy, HIT_POLICIES)
    if pool.dtype in UNSTORED_DTYPES:
        yield f"dtype: {UNSTORED_DTYPES[pool.dtype]}"
    elif pool.dtype:
        yield from _choice("dtype", pool.dtype, tuple(DTYPE_BYTES))
    for where, state in _named_states(pool):
        yield from (f"{where}.{problem}" for problem in _state_problems(state))


def _layer_problems(layers: int | tuple[int, ...]) -> Iterator[str]:
    if isinstance(layers, int):
        if layers < 0:
            yield f"layers: must not be negative, but is {layers}"
    elif any(b <= a for a, b in zip((-1, *layers), layers, strict=False)):
        yield "layers: layer numbers must be at least 0 and strictly ascending"


def _state_problems(state: StateTensor) -> Iterator[str]:
    yield from _choice("dtype", state.dtype, tuple(DTYPE_BYTES))
    if not state.shape or any(length < 1 for length in state.shape):
        yield f"shape: every length must be at least 1, but is {list(state.shape)}"
    elif not 0 <= state.shard_axis < len(state.shape):
        yield f"shard_axis: {state.shard_axis} is not an axis of {list(state.shape)}"
    elif any(group < 1 for group in state.groups):
        yield f"groups: every length must be at least 1, but is {list(state.groups)}"
    elif state.groups and sum(state.groups) != state.shape[state.shard_axis]:
        yield (
            f"groups: sum to {sum(state.groups)}, but the sharded axis has length "
            f"{state.shape[state.shard_axis]}"
        )
    elif not set(state.whole) <= set(range(len(state.lengths))):
        yield f"whole: {list(state.whole)} must name groups from 0 to {len(state.lengths) - 1}"
    elif any(b <= a for a, b in pairwise(state.whole)):
        yield f"whole: {list(state.whole)} must be strictly ascending"
    elif state.least < 0 or (state.least and state.shape[state.shard_axis] % state.least):
        yield (
            f"least: {state.least} must be a divisor of the length of the sharded axis, "
            f"{state.shape[state.shard_axis]}"
        )
    elif state.least and (state.groups or state.whole):
        yield "least: only for a state without groups and whole"


def _choice(name: str, value: str, known: tuple[str, ...]) -> Iterator[str]:
    if value not in known:
        yield not_one_of(name, value, known)


def _is_text(text: str) -> bool:
    """Return whether a text has no lone surrogates, which JSON allows."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, (Profile, Pool, StateTensor)):
        return value
    always = {"model", "tp", "name", "kind", "pools"}
    if isinstance(value, Profile) and not value.inferred:
        always |= {"sglang", "page_size", "layout"}
    plain = {
        f.name: _plain(getattr(value, f.name))
        for f in fields(value)
        if f.name in always or getattr(value, f.name) != f.default
    }
    if isinstance(value, Pool) and value.hit_policy == default_hit_policy(value.name):
        del plain["hit_policy"]
    return plain
