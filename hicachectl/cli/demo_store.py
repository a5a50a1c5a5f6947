"""A sample store, written without SGLang, for the demo and the README's examples."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.backends.urls import is_pack_path
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.profile import Profile, dump_profile
from hicachectl.formats.spec import ObjectSpec, object_specs
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.formats.layouts import TensorLayout

PROFILE = Profile(
    model="demo/hybrid-1b",
    page_size=16,
    layout="page_first",
    tp=2,
    prefetch_threshold=16,  # so that a demo of few pages is served
    pools=(
        Pool(name="kv", kind="mha", dtype="bfloat16", layers=(3, 7), kv_heads=4, head_dim=64),
        Pool(
            name="mamba",
            kind="mamba",
            layers=(0, 1, 2, 4, 5, 6),
            temporal=StateTensor(shape=(8, 32, 32), dtype="float32"),
            conv=(StateTensor(shape=(512, 3), dtype="bfloat16", groups=(128, 128, 256)),),
        ),
    ),
)
_PAGES_PER_NODE = 4  # Mamba states exist only at the end of a radix node
_SEED = 20_251_120
_AGE_S = 6 * 3600
_NEXT_STEP = "name a new directory that you can write to, with free space"


def write_demo(directory: Path, pages: int) -> Path:
    """Write the sample store and return the path of its profile.

    Raises UsageError if the directory is not empty, StoreUnavailable if it cannot be written.
    """
    if is_pack_path(str(directory)):
        raise UsageError(f"{directory}: a path that ends in .hcpack names a pack; name a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory}: the directory is not empty; name a new directory")
        profile_path = directory / ".hicachectl" / "demo.toml"
        profile_path.parent.mkdir()
        profile_path.write_text(dump_profile(PROFILE), encoding="utf-8")
    except OSError as error:
        raise StoreUnavailable(
            failed(directory, "write the demo store", error, _NEXT_STEP)
        ) from error
    with open_store(str(directory)) as store:
        fill(store, pages)
    return profile_path


def fill(store: Store, pages: int) -> None:
    """Write the sample pages into a store, under the keys that SGLang would use.

    Raises StoreUnavailable if a page cannot be written.
    """
    rng = np.random.default_rng(_SEED)
    tokens = rng.integers(0, 150_000, pages * PROFILE.page_size)
    hashes = page_hashes_hex(tokens, PROFILE.page_size)
    members = object_specs(PROFILE, store.grammar)
    spell = grammar_of(store.grammar).affix
    with Arena(sum(m.nbytes for m in members)) as arena:
        store.attach(arena)
        start_ns = time.time_ns() - _AGE_S * 10**9
        for number, page in enumerate(hashes):
            ends_node = (number + 1) % _PAGES_PER_NODE == 0 or number + 1 == pages
            # Every writer must write the sidecars first and the anchor last.
            present = [m for m in reversed(members) if ends_node or not m.trailing]
            sizes = np.array([m.nbytes for m in present], dtype=np.int64)
            offsets = np.cumsum(sizes) - sizes
            for member, offset in zip(present, offsets.tolist(), strict=True):
                arena.view(offset, member.nbytes)[:] = _values(member, rng)
            rows = pa.table(
                {
                    "key": pa.array(
                        [page.join(spell(m.coordinate)).encode() for m in present], pa.binary()
                    ),
                    "mtime_ns": pa.array([start_ns + number * 10**9] * len(present)),
                }
            )
            written = store.write_from(rows, offsets, sizes, if_absent=True)
            if not written.all_ok:
                why = next(iter(written.errors.values()), "it has the page already")
                raise StoreUnavailable(
                    f"{store.url}: cannot write page {page}: {why}; {_NEXT_STEP}"
                )
        store.detach()


def _values(member: ObjectSpec, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return an object's bytes, with plausible values in each tensor."""
    return np.concatenate([_tensor_values(tensor, rng) for tensor in member.tensors])


def _tensor_values(tensor: TensorLayout, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    scales = rng.lognormal(sigma=1.0, size=tensor.shape[-1])
    values = (rng.standard_normal(tensor.shape) * scales).astype("<f4")
    if tensor.dtype == "float32":
        return values.reshape(-1).view(np.uint8)
    # bfloat16 is the upper half of a float32.
    return (values.reshape(-1).view("<u4") >> 16).astype("<u2").view(np.uint8)
