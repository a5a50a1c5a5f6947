"""Pools of a profile, and the properties of SGLang's pool names."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import force_setattr


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolName:
    """One of SGLang's `PoolName` values, with properties independent of the kind.

    trailing: only the last pages of a radix tree node have the pool (PoolHitPolicy.TRAILING_PAGES
              of hybrid_pool_assembler.py).
    draft:    the pool is of a speculative draft model. Layer numbers count the draft's layers.
    dcp:      SGLang stores the pool under decode context parallelism (cache_controller.py).
    cp_split: CP ranks divide the layers under cp_layer_split.
    follows:  name of the trailing pool that the same pages have. SGLang writes both pools of a page
              or neither (SidecarPoolSpec's indices_from_pool).
    states:   the pool holds recurrent states. Servers need the states of one page only. Keys name a
              TP rank even if ranks share the anchor.
    parts:    names of the parts that keys can name, such as "k"; a number follows a name that
              ends in an underscore.
    whole:    if all TP ranks share the pool, keys can name its whole page, without a part.
    mooncake: SGLang stores the pool on Mooncake.
    """

    name: str
    trailing: bool = False
    draft: bool = False
    dcp: bool = False
    cp_split: bool = False
    follows: str = ""
    states: bool = False
    parts: tuple[str, ...] = ()
    whole: bool = False
    mooncake: bool = False

    @property
    def part_pattern(self) -> str:
        """Regular expression of the names of parts, in one group."""
        names = (
            f"{one}(?:0|[1-9][0-9]{{0,8}})" if one.endswith("_") else one for one in self.parts
        )
        return f"({'|'.join(names)})"


_NAMES: dict[str, PoolName] = {}


def pool_name(name: str) -> PoolName:
    """Return the properties of a pool name; defaults for an unknown name."""
    return _NAMES.get(name) or PoolName(name=name)


def pool_names() -> tuple[PoolName, ...]:
    """Return every pool name that keys can have."""
    return tuple(_NAMES.values())


def add_pool_names(names: tuple[PoolName, ...]) -> None:
    """Add names to `pool_names`. Raises ValueError if a name exists."""
    known = [one.name for one in names if one.name in _NAMES]
    if known:
        raise ValueError(f"pool names already exist: {', '.join(known)}")
    _NAMES.update((one.name, one) for one in names)


def remove_pool_names(names: tuple[PoolName, ...]) -> None:
    """Undo `add_pool_names`."""
    for one in names:
        del _NAMES[one.name]


def default_hit_policy(name: str) -> str:
    """Return SGLang's hit policy for a pool name."""
    return "trailing_pages" if pool_name(name).trailing else "all_pages"


class StateTensor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One recurrent state of a Mamba-like layer, before sharding.

    groups: lengths of groups along `shard_axis`, which are sharded separately (q, k, v of a
        convolution). Their sum is shape[shard_axis]. Empty for one group.
    whole: ascending indices of the groups that every rank holds whole (B and C of Mamba2 with one
        group). Without `groups`, (0,) means the whole state.
    least: length of one head, which is the shortest share; 0 if it is not stated. If TP ranks
        outnumber heads, neighbouring ranks hold copies of one head. Only a state of one group may
        have it.
    """

    shape: tuple[int, ...]
    dtype: str
    shard_axis: int = 0
    groups: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    least: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the groups along the sharded axis. There is at least one group."""
        return self.groups or (self.shape[self.shard_axis],)


class Pool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool of the model, before sharding. Fields that do not apply keep their default.

    layers: number n of layers, for model layers 0..n-1, or model layer numbers.
    packed_draft_layers: number of EAGLE/NextN draft layers after the target's layers.
    compress_ratio: tokens of a stored row; 0 if each token has its own row.
    nbytes: bytes of one object for kind "opaque"; bytes of one layer for kind "blocks".
    trailing_pages: number of last pages that have the pool, if hit_policy is trailing_pages.
    replicated: whether all TP ranks share one object.
    """

    name: str
    kind: str
    dtype: str = ""
    layers: int | tuple[int, ...] = 0
    packed_draft_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0  # 0 means equal to head_dim
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    row: str = ""
    index_head_dim: int = 0
    compress_ratio: int = 0
    temporal: StateTensor | None = None
    conv: tuple[StateTensor, ...] = ()
    nbytes: int = 0
    hit_policy: str = ""  # "" becomes the pool's default
    trailing_pages: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        # A pool that states the default policy must equal a pool that states no policy.
        if not self.hit_policy:
            force_setattr(self, "hit_policy", default_hit_policy(self.name))

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Model layer numbers without packed draft layers."""
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers

    @property
    def trailing(self) -> bool:
        """Whether only the last pages of a radix tree node have the pool."""
        return self.hit_policy == "trailing_pages"

    @property
    def is_draft(self) -> bool:
        """Whether the pool is of a speculative draft, so that its layers are the draft's layers."""
        return pool_name(self.name).draft
