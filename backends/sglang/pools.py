"""Make served pools from SGLang's host pools: keys, identities, and places in memory.

A page's object has HiCacheFile's name and HiCacheFile's bytes (hicache_storage.py :: HiCacheFile,
get_data_page of the pool), so that HiCacheFile and the plug-in read each other's files.

A pool is refused if no object can hold its pages, or if wrong data could be read. All ranks refuse
for the same reasons, because SGLang's ranks wait for one another after a registration
(cache_controller.py :: attach_storage_backend). `ThisRankError` is the exception.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hicachectl.backends.sglang.page_store import Part, ServedPool
from hicachectl.formats.identity import Identity
from hicachectl.formats.keys.base import Ranks
from hicachectl.formats.kinds.pool import pool_name, pool_names
from hicachectl.formats.layouts import LAYOUTS
from hicachectl.formats.pools import partition_text
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicachectl.backends.sglang.context import Context
    from hicachectl.backends.sglang.page_store import Piece, Pieces

# Attributes with a pool's memory: tensors, or lists of tensors.
_BUFFERS = (
    "kv_buffer",
    "k_buffer",
    "v_buffer",
    "index_k_with_scale_buffer",
    "temporal_buffer",
    "conv_buffer",
)
_COMPARED_PAGES = 8
_BYTES = "uint8"  # dtype of structured rows, and of fp8 (memory_pool.py :: KVCache.store_dtype)


class EvenPages:
    """`HostPages` at equal distances, as in all of SGLang's pools.

    page_indices: number of host indices of a page.
    count: number of pages of the pool.
    pieces: the pieces of a page, in the object's order. Each has its address in page 0, the
        distance in bytes to the same piece of the next page, and its length in bytes.
    """

    def __init__(
        self, page_indices: int, count: int, pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        self._page_indices = page_indices
        self._count = count
        self._pieces = tuple(pieces)

    def pieces(self, host_indices: Sequence[int]) -> list[Pieces]:
        """See `HostPages`."""
        # This is plain Python, because the first use of numpy in a call takes longer than this loop
        # takes for 128 pages.
        pages = [index // self._page_indices for index in host_indices]
        for index, page in zip(host_indices, pages, strict=True):
            if page * self._page_indices != index or not 0 <= page < self._count:
                raise ValueError(
                    f"host index {index}: not the first index of one of {self._count} pages of "
                    f"{self._page_indices} indices"
                )
        if not self._pieces:
            return [()] * len(pages)
        columns = [
            [(at + step * page, nbytes) for page in pages] for at, step, nbytes in self._pieces
        ]
        return list(zip(*columns, strict=True))


def host_pages(
    name: str, host_pool: Any, alternating: int = 1
) -> tuple[EvenPages, tuple[int, ...]]:
    """Return where a pool's pages lie, and the bytes of each piece of a page.

    name: name of the pool, in messages.
    alternating: number of parts whose pieces SGLang lists by turns. The result has all pieces of
        the first part before the pieces of the next part.
    Raises ValueError if SGLang does not know the places of the pages, or if the pages are unevenly
    spaced or lie outside the pool's memory.
    """
    whole = f"pool {name}: {type(host_pool).__name__} in layout {host_pool.layout}"
    count = host_pool.size // host_pool.page_size

    def stated(page: int) -> Pieces:
        pieces = _stated(whole, host_pool, page)
        turns = range(alternating)
        return tuple(pieces[at] for turn in turns for at in range(turn, len(pieces), alternating))

    first, second = stated(0), stated(min(1, count - 1))
    pages = EvenPages(
        host_pool.page_size,
        count,
        [(at, then - at, n) for (at, n), (then, _) in zip(first, second, strict=True)],
    )
    buffers = list(_buffers(host_pool))
    for page in _some_pages(count):
        (pieces,) = pages.pieces([page * host_pool.page_size])
        if pieces != stated(page) or not all(_within(piece, buffers) for piece in pieces):
            raise ValueError(
                f"{whole}: its pages are unevenly spaced or outside its memory; use a newer "
                "hicachectl"
            )
    return pages, tuple(nbytes for _, nbytes in first)


def _stated(whole: str, host_pool: Any, page: int) -> Pieces:
    """Return the pieces of a page, as SGLang states them; () for a pool without memory."""
    import torch

    start = page * host_pool.page_size
    try:
        stated = host_pool.get_page_buffer_meta(torch.arange(start, start + host_pool.page_size))
    except Exception as error:  # SGLang's pools refuse with several kinds of exceptions
        raise ValueError(
            f"{whole}: SGLang cannot store it from its place in memory ({error}); start with "
            "--hicache-mem-layout page_first or page_first_direct"
        ) from error
    return (
        () if stated is None else tuple(zip(map(int, stated[0]), map(int, stated[1]), strict=True))
    )


def _some_pages(count: int) -> list[int]:
    """Return the first and the last page, and some between them."""
    between = random.Random(count).sample(range(count), min(count, _COMPARED_PAGES))
    return [0, *between, count - 1]


def _buffers(host_pool: Any) -> Iterator[Piece]:
    """Yield the memory of each of a pool's tensors."""
    for name in _BUFFERS:
        found = getattr(host_pool, name, None)
        for tensor in found if isinstance(found, (list, tuple)) else [found]:
            if tensor is not None:
                yield tensor.data_ptr(), tensor.nbytes


def _within(piece: Piece, buffers: Sequence[Piece]) -> bool:
    address, nbytes = piece
    return any(start <= address and address + nbytes <= start + length for start, length in buffers)


class ThisRankError(ValueError):
    """Raised for a pool that this rank cannot serve, although other ranks may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The form of a pool's pages.

    dtype: see `Identity`.
    layers: number of layers in a page.
    packed: whether some layers belong, or may belong, to the draft.
    parts: names of the parts, which have equally many pieces; () if all pieces are one part.
    alternating: whether SGLang lists the pieces of the parts by turns, although the object holds
        one part after the other.
    sharded: whether TP ranks hold different bytes.
    """

    dtype: str
    layers: int
    packed: bool = False
    parts: tuple[str, ...] = ()
    alternating: bool = False
    sharded: bool = False


def served_pool(name: object, host_pool: Any, config: Any, context: Context) -> ServedPool:
    """Return a pool of this rank that stores can serve.

    name: SGLang's PoolName, or the name as text.
    host_pool: SGLang's host pool.
    config: HiCacheStorageConfig.
    Raises ValueError for a pool or deployment that is not supported, and ThisRankError if other
    ranks may support it.
    """
    pool = str(name)
    _check_deployment(config)
    _check_pool(pool, host_pool)
    form = _FORMS[type(host_pool).__name__](pool, host_pool, context)
    if form.sharded and config.is_mla_model and config.tp_size > 1:
        raise ValueError(
            f"pool {pool}: its TP ranks hold different heads, but SGLang stores the pool of only "
            f"one rank, because the TP ranks share the target's kv (tp_size {config.tp_size}); "
            "start without this draft"
        )
    host, sizes = host_pages(pool, host_pool, len(form.parts) if form.alternating else 1)
    nbytes = sum(sizes)
    drafted = pool_name(pool).draft or form.packed
    return ServedPool(
        name=pool,
        ranks=Ranks(
            tp=config.tp_size,
            pp=config.pp_size,
            cp=config.attn_cp_size,
            tp_rank=config.tp_rank,
            pp_rank=config.pp_rank,
            cp_rank=config.attn_cp_rank,
        ),
        shared_anchor=config.is_mla_model,
        identity=Identity(
            model=str(config.model_name).replace("/", "-"),
            weights=context.weights,
            draft_weights=(context.draft_weights or context.weights) if drafted else "",
            pool=pool,
            dtype=form.dtype if nbytes else "",
            layout="+".join(filter(None, (host_pool.layout, context.row_form))),
            page_size=context.page_size,
            layer_bytes=nbytes // form.layers if form.layers else 0,
            pp_partition=partition_text(context.pp_partition, config.pp_size),
        ),
        page_indices=host_pool.page_size,
        nbytes=nbytes,
        parts=tuple(_parts(form, sizes)),
        # the ranks that write in SGLang: hybrid_cache_controller.py :: should_backup
        writes=pool_name(pool).states or config.is_storage_writer,
        host=host,
    )


def _check_deployment(config: Any) -> None:
    if config.dcp_size > 1:
        raise ValueError(
            f"dcp_size: {config.dcp_size} is not supported: with decode context parallelism, only "
            "SGLang's own file and Mooncake backends store pages; start with --dcp-size 1"
        )
    if config.should_split_heads or config.tp_lcm_size:
        raise ValueError(
            f"tp_lcm_size: {config.tp_lcm_size} is not supported: objects hold all heads of a "
            "rank; remove the key"
        )
    if not config.model_name:
        raise ValueError(
            "model_name: missing, so pages of all models would mix; give --served-model-name"
        )


def _check_pool(name: str, host_pool: Any) -> None:
    known = [one.name for one in pool_names()]
    if name not in known:
        raise ValueError(not_one_of("pool", name, known) + "; use a newer hicachectl")
    kind, layout = type(host_pool).__name__, host_pool.layout
    if kind in _REFUSED:
        raise ValueError(f"pool {name}: {_REFUSED[kind]}")
    if getattr(host_pool, "stores_page_envelope", False):
        raise ValueError(f"pool {name}: {_REFUSED['UnifiedPageEnvelopeHostPool']}")
    if kind not in _FORMS:
        raise ValueError(
            f"pool {name}: {kind}: the host pool's form is not known; use a newer hicachectl"
        )
    if getattr(host_pool, "_is_dummy", False):
        raise ThisRankError(
            f"pool {name}: {kind}: has no memory on this rank (MLA host deduplication); attach the "
            "store at the start of the server"
        )
    if layout not in LAYOUTS:
        raise ValueError(
            not_one_of(f"pool {name}: layout", layout, LAYOUTS)
            + "; start with --hicache-mem-layout page_first"
        )


def _parts(form: _Form, sizes: Sequence[int]) -> Iterator[Part]:
    names: tuple[str | None, ...] = form.parts or (None,)
    if not sum(sizes):
        return
    count = len(sizes) // len(names)
    for number, name in enumerate(names):
        pieces = slice(number * count, (number + 1) * count)
        yield Part(name=name, nbytes=sum(sizes[pieces]), pieces=pieces)


def _mha(name: str, pool: Any, context: Context) -> _Form:
    if pool.head_dim != pool.v_head_dim:
        raise ValueError(f"pool {name}: {_REFUSED['AsymmetricMHATokenToKVPoolHost']}")
    return _Form(
        dtype=_rows_dtype(name, pool, context),
        layers=pool.layer_num,
        packed=pool.layer_num > pool.target_layer_num,
        parts=("k", "v"),
        alternating=True,
        sharded=True,
    )


def _mla(name: str, pool: Any, context: Context) -> _Form:
    scaled = pool.dsa_kv_cache_store_fp8  # codes, scales and rope part in one row of bytes
    return _Form(
        dtype=_BYTES if scaled else _rows_dtype(name, pool, context),
        layers=pool.layer_num,
        packed=pool.layer_num > pool.target_layer_num,
    )


def _dsa_indexer(name: str, pool: Any, context: Context) -> _Form:
    packed = pool.layer_num > pool.target_layer_num
    return _Form(dtype=_BYTES, layers=pool.layer_num, packed=packed)


def _mamba(name: str, pool: Any, context: Context) -> _Form:
    parts = [f"conv_{number}" for number in range(len(pool.conv_buffer))]
    dtypes = [_dtype(pool.conv_dtype)]
    if pool.temporal_state_elem_size:  # a layer that is only a convolution has no temporal state
        parts.insert(0, "temporal")
        dtypes.insert(0, _dtype(pool.temporal_dtype))
    return _Form(
        dtype="+".join(dict.fromkeys(dtypes)),
        layers=pool.num_mamba_layers,
        packed=bool(pool.mtp_draft_buffer_infos),
        parts=tuple(parts),
    )


def _k_only(name: str, pool: Any, context: Context) -> _Form:
    return _Form(dtype=_rows_dtype(name, pool, context), layers=pool.layer_num)


def _opaque(name: str, pool: Any, context: Context) -> _Form:
    """Return the form of rows that hicachectl does not interpret.

    Such pools do not show whether they hold layers of the draft.
    """
    packed = bool(context.draft_weights)
    return _Form(dtype=context.opaque_rows, layers=pool.layer_num, packed=packed)


def _opaque_halves(name: str, pool: Any, context: Context) -> _Form:
    return replace(_opaque(name, pool, context), parts=("k", "v"), sharded=True)


def _logical(name: str, pool: Any, context: Context) -> _Form:
    return _Form(dtype="", layers=0)


def _rows_dtype(name: str, pool: Any, context: Context) -> str:
    dtype = _dtype(pool.dtype)
    if dtype != _BYTES:
        return dtype
    return context.draft_fp8 if pool_name(name).draft else context.fp8


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# Keys are exact names of classes, because a subclass may order its bytes differently.
_FORMS: dict[str, Callable[[str, Any, Context], _Form]] = {
    "DSAIndexerPoolHost": _dsa_indexer,
    "DeepSeekV4PagedHostPool": _opaque,
    "DeepSeekV4StateHostPool": _opaque,
    "LogicalHostPool": _logical,
    "MHATokenToKOnlyPoolHost": _k_only,
    "MHATokenToKVPoolHost": _mha,
    "MLATokenToKVPoolHost": _mla,
    "MambaPoolHost": _mamba,
    "MiniMaxM3Nvfp4IndexKPoolHost": _opaque,
    "MiniMaxM3Nvfp4MainKVPoolHost": _opaque_halves,
    "QSAIndexerPoolHost": _opaque,
}
_REFUSED = {
    "AsymmetricMHATokenToKVPoolHost": (
        "K and V differ in width, which SGLang stores on Mooncake only; use "
        "--hicache-storage-backend mooncake"
    ),
    "MHATokenToKVPoolMXFP8Host": (
        "the scales of MXFP8 lie outside its pages; give another --kv-cache-dtype"
    ),
    "PageInterleaveHostPool": (
        "its pages are divided over ranks; start without --enable-kv-cache-sharding"
    ),
    "UnifiedPageEnvelopeHostPool": (
        "one page holds all pools (page envelope); start without unified memory, or with "
        "separate host pools"
    ),
}
