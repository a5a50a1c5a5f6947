"""The check that tells float16 numbers from bfloat16 ones, of equal keys and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.checks.dtypes import dtype_check
from hicachectl.checks.values import ValueChecker
from hicachectl.formats.kinds.pool import StateTensor
from hicachectl.formats.spec import object_specs
from tests.checks.value_cases import expected_of, profile_of
from tests.kvgen import KvGenerator, encode, uniform_noise

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.formats.profile import Profile

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

PAGES = 6
DTYPES = ("bfloat16", "float16")
KINDS = ("mha", "mla", "mamba")
WAYS = pytest.mark.parametrize(
    ("said", "stored"), [("bfloat16", "float16"), ("float16", "bfloat16")]
)


def model(kind: str, dtype: str, **fields: Any) -> Profile:
    """Return a profile whose pool `pool_of(kind)` has numbers of a dtype."""
    mha = {"kind": "mha", "dtype": dtype, "layers": 12, "kv_heads": 2, "head_dim": 64}
    mla = {
        "kind": "mla", "dtype": dtype, "layers": 9, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "row": "bf16",
    }  # fmt: skip
    states = {
        "kind": "mamba",
        "layers": 3,
        "temporal": StateTensor(shape=(4, 8, 16), dtype="float32"),
        "conv": (StateTensor(shape=(2048, 3), dtype=dtype),),
    }
    pools = {"mha": (mha,), "mla": (mla,), "mamba": (mha, states)}[kind]
    return profile_of(*pools, **{"page_size": 16} | fields)


def spec_of(profile: Profile, kind: str) -> Any:
    return expected_of(profile, "mamba" if kind == "mamba" else "kv")


def made(kind: str, dtype: str, seed: int = 1, **fields: Any) -> Bytes:
    profile = model(kind, dtype, **fields)
    return KvGenerator(spec_of(profile, kind), profile, seed).objects(range(PAGES))


def found(kind: str, dtype: str, objects: Bytes, **fields: Any) -> list[tuple[int, str]]:
    """Return the objects with findings, and their codes, under a profile of a dtype."""
    profile = model(kind, dtype, **fields)
    checker = ValueChecker(spec_of(profile, kind), profile)
    assert "dtype" in {check.name for check in checker.prepared}
    return [(issue.index, issue.code) for issue in checker.check(objects)]


@WAYS
@pytest.mark.parametrize("kind", ["mha", "mamba"])
def test_every_object_of_the_other_dtype_is_found_and_no_healthy_one(
    kind: str, said: str, stored: str
) -> None:
    assert found(kind, said, made(kind, said)) == []
    mixed = made(kind, said)
    mixed[1::2] = made(kind, stored)[1::2]
    assert found(kind, said, mixed) == [(i, "dtype-mismatch") for i in range(1, PAGES, 2)]


def test_latent_rows_of_float16_are_found() -> None:
    """Latent rows are bfloat16 in every profile."""
    profile = model("mla", "")
    spec = spec_of(profile, "mla")
    healthy = KvGenerator(spec, profile, 1).objects(range(PAGES))
    assert found("mla", "", healthy) == []
    values = (healthy.view("<u2").astype(np.uint32) << 16).view(np.float32)
    half = encode(values, "float16").view(np.uint8).reshape(healthy.shape)
    assert found("mla", "", half) == [(i, "dtype-mismatch") for i in range(PAGES)]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
@WAYS
def test_the_memory_layout_does_not_matter(layout: str, said: str, stored: str) -> None:
    codes = {code for _, code in found("mha", said, made("mha", stored), layout=layout)}
    assert "dtype-mismatch" in codes
    assert found("mha", said, made("mha", said, layout=layout), layout=layout) == []


def _values(draw: Callable[[np.random.Generator, int], Any]) -> Callable[[str, Bytes], Bytes]:
    def make(dtype: str, like: Bytes) -> Bytes:
        rng = np.random.default_rng(5)
        values = np.asarray(draw(rng, like.size // 2), np.float32)
        return encode(values, dtype).view(np.uint8).reshape(like.shape)

    return make


ODD: dict[str, Callable[[str, Bytes], Bytes]] = {
    "zeros": _values(lambda _, n: np.zeros(n)),
    "constant": _values(lambda _, n: np.full(n, 1.25)),
    "two values": _values(lambda rng, n: rng.choice([0.5, 3.0], n)),
    "one octave": _values(lambda rng, n: rng.uniform(1, 2, n)),
    "three quarters of an octave": _values(lambda rng, n: rng.uniform(1, 1.75, n)),
    "more than an octave": _values(lambda rng, n: rng.uniform(1, 2.1, n)),
    "uniform": _values(lambda rng, n: rng.uniform(-1, 1, n)),
    "small": _values(lambda rng, n: 1e-3 * rng.standard_normal(n)),
    "heavy tails": _values(lambda rng, n: np.clip(rng.standard_cauchy(n), -6e4, 6e4)),
    "a scale of its own for each": _values(
        lambda rng, n: rng.standard_normal(n) * np.exp(2 * rng.standard_normal(n))
    ),
    "sparse": _values(lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.02)),
    "rectified": _values(lambda rng, n: np.maximum(rng.standard_normal(n), 0)),
    "integers": _values(lambda rng, n: rng.integers(-100, 100, n)),
    "a ramp": _values(lambda _, n: np.arange(n) / n),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", list(ODD))
def test_odd_values_of_the_right_dtype_are_not_called_the_other(values: str, dtype: str) -> None:
    objects = ODD[values](dtype, made("mha", dtype))
    assert "dtype-mismatch" not in {code for _, code in found("mha", dtype, objects)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bytes_are_of_no_dtype(dtype: str) -> None:
    like = made("mha", dtype)
    objects = np.random.default_rng(3).integers(0, 256, like.shape, np.uint8)
    assert "dtype-mismatch" not in {code for _, code in found("mha", dtype, objects)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_healthy_page_of_many_models_is_called_the_other(dtype: str) -> None:
    """Two hundred models, with noise and with channels of their own, and six pages of each."""
    for seed in range(200):
        assert found("mha", dtype, made("mha", dtype, seed)) == []
    profile = model("mha", dtype)
    noise = uniform_noise(spec_of(profile, "mha"), profile, 200, seed=4)
    assert found("mha", dtype, noise) == []


def test_padding_layers_are_not_compared() -> None:
    """Layers are rounded up under a CP layer split; the padding can hold anything."""
    pool = {"kind": "mla", "layers": 9, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "row": "bf16"}
    profile = profile_of(pool, page_size=16, cp=2, cp_layer_split=True, layout="layer_first")
    spec = next(one for one in object_specs(profile, "file") if one.padding_layers)
    pages = KvGenerator(spec, profile, 1).objects(range(PAGES))
    layers = pages.reshape(PAGES, len(spec.layers) + spec.padding_layers, -1)
    values = (layers[:, -1].copy().view("<u2").astype(np.uint32) << 16).view(np.float32)
    layers[:, -1] = encode(values, "float16").view(np.uint8).reshape(layers[:, -1].shape)
    check = dtype_check(spec, profile)
    assert check is not None
    assert list(check(pages)) == []
    last = 4 * check.places // layers.shape[2] == layers.shape[1] - 1
    assert not last.any()
