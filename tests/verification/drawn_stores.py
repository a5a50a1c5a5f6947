"""Stores of models, drawn at random: healthy ones, and ones with a change of dtype or layout.

Only what keys and sizes do not show differs between the pages before and after a change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace as with_fields

from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.kinds.pool import StateTensor
from hicachectl.formats.spec import object_specs
from hicachectl.kernels.values import to_float32
from tests.checks.value_cases import profile_of
from tests.kvgen import KvGenerator, encode, uniform_noise
from tests.stores import OLD, page

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LAYOUTS = ("layer_first", "page_first", "page_head")
DTYPES = {
    "bfloat16": "float16", "float16": "bfloat16",
    "float8_e4m3fn": "float8_e5m2", "float8_e5m2": "float8_e4m3fn",
}  # fmt: skip
_SPAN = 30 * 86400  # seconds in which the pages are written


@dataclass(frozen=True)
class Model:
    """A model's deployment.

    kind: of the first pool, or `mamba`, `indexer` with a pool beside it. dtype: of its numbers, of
    the states for `mamba`. seed: of the weights. noise: values without structure.
    """

    name: str
    kind: str
    dtype: str
    layout: str
    layers: int
    heads: int
    width: int
    page_size: int
    tp: int
    seed: int
    noise: bool

    @property
    def profile(self) -> Profile:
        """The profile of the servers."""
        mha = {"kind": "mha", "dtype": self.dtype, "layers": self.layers, "kv_heads": self.heads}
        mha |= {"head_dim": self.width}
        row = {"bfloat16": "bf16", "float16": "bf16"}.get(self.dtype, "fp8")
        mla = {"kind": "mla", "layers": self.layers, "kv_lora_rank": 128, "qk_rope_head_dim": 64}
        mla |= {"row": row}
        indexer = {"kind": "dsa_indexer", "layers": self.layers, "index_head_dim": 128}
        temporal = StateTensor(shape=(4, 8, 16), dtype="float32", shard_axis=0)
        conv = StateTensor(shape=(1024, 3), dtype=self.dtype, shard_axis=0)
        states = {"kind": "mamba", "layers": self.layers, "temporal": temporal, "conv": (conv,)}
        pools: tuple[dict[str, Any], ...] = {
            "mha": (mha,),
            "mla": (mla,),
            "indexer": (mla, indexer),
            "mamba": (mha, states),
        }[self.kind]
        profile = profile_of(*pools, page_size=self.page_size, layout=self.layout, tp=self.tp)
        return with_fields(profile, model=self.name)

    def objects(self, spec: ObjectSpec, pages: range) -> Bytes:
        """Return the objects of a spec of the profile: [pages, nbytes]."""
        profile = self.profile
        if self.noise and len(pages):
            made = uniform_noise(spec, profile, len(pages), self.seed)
        else:
            made = KvGenerator(spec, profile, self.seed).objects(pages)
        if self.kind in ("mla", "indexer") and spec.pool == "kv":
            made = _as(self.dtype, made, "float8_e4m3fn" if "8" in self.dtype else "bfloat16")
        return made


def _as(dtype: str, made: Bytes, written: str) -> Bytes:
    """Return numbers of one dtype in another one of the same width."""
    if dtype == written:
        return made
    values = to_float32(made.view(f"<u{2 if '16' in dtype else 1}"), written)
    return encode(values, dtype).view(np.uint8).reshape(made.shape)


def _layouts_of(kind: str) -> tuple[str, ...]:
    layouts = {"mamba": ("page_first", "page_first_direct"), "mha": LAYOUTS}
    return layouts.get(kind, LAYOUTS[:2])


def draw_model(rng: np.random.Generator, number: int = 0, kind: str = "") -> Model:
    """Draw a model."""
    kind = kind or str(rng.choice(["mha", "mha", "mla", "indexer", "mamba"]))
    dtypes = ["bfloat16", "float16"] if kind == "mamba" else list(DTYPES)
    if kind in ("mla", "indexer"):
        dtypes = ["bfloat16", "float8_e4m3fn"]
    headless = kind in ("mla", "indexer")
    tp = 1 if headless else int(rng.choice([1, 1, 2]))
    return Model(
        name=f"model{number}",
        kind=kind,
        dtype=str(rng.choice(dtypes)),
        layout=str(rng.choice(_layouts_of(kind))),
        layers=int(rng.integers(4, 13)),
        heads=tp * int(rng.choice([1, 2, 4])),
        width=int(rng.choice([32, 64, 128])),
        page_size=int(rng.choice([16, 32])),
        tp=tp,
        seed=int(rng.integers(1 << 30)),
        noise=bool(rng.random() < 0.1),
    )


def write(directory: Path, model: Model, pages: range, times: np.ndarray) -> None:
    """Write the pages of a model with these times, Unix seconds."""
    directory.mkdir(exist_ok=True)
    for spec in object_specs(model.profile, "file"):
        suffix = FileGrammar().affix(spec.coordinate)[1]
        for number, content, time in zip(pages, model.objects(spec, pages), times, strict=True):
            path = directory / f"{page(number)}{suffix}"
            content.tofile(path)
            os.utime(path, (time, time))


def draw_times(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw ascending times: even, in bursts, or a store that grows ever faster."""
    shares = [rng.random(count), rng.integers(0, 4, count) / 4, rng.random(count) ** 0.3]
    return OLD + np.sort(shares[rng.integers(3)] + rng.random(count) * 1e-3) * _SPAN


def write_healthy(directory: Path, rng: np.random.Generator) -> list[Model]:
    """Write a store of some models. Of some, the weights change, as no key shows either."""
    models = [draw_model(rng, number) for number in range(int(rng.integers(1, 3)))]
    for model in models:
        count = int(rng.integers(20, 90))
        times = draw_times(rng, count)
        other = replace(model, seed=int(rng.integers(1 << 30)))
        cut = int(rng.integers(count)) if rng.random() < 0.3 else 0
        write(directory, other, range(cut), times[:cut])
        write(directory, model, range(cut, count), times[cut:])
    return models


@dataclass(frozen=True)
class Changed:
    """A store's models before and after a change.

    last: time of the last page before it.
    time: time of the first page after it.
    """

    before: Model
    after: Model
    last: float
    time: float

    @property
    def pools(self) -> set[str]:
        """The pools that have changed."""
        return {"kv", "mamba"} if self.before.kind == "mamba" else {"kv"}


def write_changed(directory: Path, rng: np.random.Generator, what: str) -> Changed:
    """Write a store with a change. what: `layout`, or the first dtype's name."""
    kinds = {"layout": ["mha", "mla"], "bfloat16": ["mha", "mla", "mamba", "indexer"]}
    kinds |= {"float16": ["mha", "mamba"], "float8_e4m3fn": ["mha", "mla"]}
    before = replace(draw_model(rng, kind=str(rng.choice(kinds.get(what, ["mha"])))), noise=False)
    if what == "layout":
        before = replace(before, layers=before.layers + 1, heads=2 * before.tp)
        others = [one for one in _layouts_of(before.kind) if one != before.layout]
        after = replace(before, layout=str(rng.choice(others)))
    else:
        before = replace(before, dtype=what)
        after = replace(before, dtype=DTYPES[what])
    count = int(rng.integers(80, 140))
    times = draw_times(rng, count)
    cut = int(count * rng.uniform(0.1, 0.9))
    write(directory, before, range(cut), times[:cut])
    write(directory, after, range(cut, count), times[cut:])
    return Changed(before, after, float(times[cut - 1]), float(times[cut]))
