"""Look for false findings in many healthy pages, and for pages of another layout; run by hand.

    python -m tests.soak.soak_values [--pages 10000] [--seed N]

Each page comes from a model with its own kind and seed. Prints the seed. Exits with 1 if a healthy
page has a finding, or if a decidable wrong layout is missed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from hicachectl.checks.values import ValueChecker
from hicachectl.formats.layouts import LAYOUTS
from tests.checks.value_cases import (
    DEEPSEEK,
    GDN,
    INDEXER,
    LLAMA_8B,
    QWEN3_32B,
    QWEN3_NEXT,
    expected_of,
    profile_of,
)
from tests.kvgen import KvGenerator, uniform_noise

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

PAGES_OF_A_MODEL = 32
FEWEST_LAYERS = 4  # with fewer, orders may be indistinguishable
KINDS: tuple[tuple[str, tuple[dict[str, Any], ...], dict[str, Any], str], ...] = (
    ("llama bf16 tp8", (LLAMA_8B,), {"tp": 8}, "kv"),
    ("llama bf16 tp2", (LLAMA_8B | {"layers": 16},), {"tp": 2}, "kv"),
    ("llama fp16 page 16", (LLAMA_8B | {"dtype": "float16"},), {"tp": 8, "page_size": 16}, "kv"),
    ("llama e4m3fn", (LLAMA_8B | {"dtype": "float8_e4m3fn"},), {"tp": 8}, "kv"),
    ("llama e4m3fnuz", (LLAMA_8B | {"dtype": "float8_e4m3fnuz"},), {"tp": 8}, "kv"),
    ("llama e5m2", (LLAMA_8B | {"dtype": "float8_e5m2"},), {"tp": 8}, "kv"),
    ("llama page 1", (LLAMA_8B,), {"page_size": 1}, "kv"),
    ("qwen3-32b tp8", (QWEN3_32B,), {"tp": 8}, "kv"),
    ("qwen3-next tp2", (QWEN3_NEXT,), {"tp": 2}, "kv"),
    ("draft, one layer", (LLAMA_8B | {"layers": 1},), {"tp": 2}, "kv"),
    ("mla bf16 page 16", (DEEPSEEK,), {"page_size": 16}, "kv"),
    ("mla raw fp8", (DEEPSEEK | {"row": "fp8", "layers": 30},), {}, "kv"),
    ("mla 656", (DEEPSEEK | {"row": "fp8_scaled", "layers": 30},), {}, "kv"),
    ("mla 656, two layers", (DEEPSEEK | {"row": "fp8_scaled", "layers": 2},), {}, "kv"),
    ("indexer", (DEEPSEEK, INDEXER), {}, "indexer"),
    ("gdn tp8", (QWEN3_NEXT, GDN | {"layers": 12}), {"linear_tp": 8}, "mamba"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    options = parser.parse_args()
    print(f"--pages {options.pages} --seed {options.seed}")
    rng = np.random.default_rng(options.seed)
    healthy: Counter[str] = Counter()
    swapped: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    bad = 0
    while sum(healthy.values()) < options.pages:
        name, pools, fields, pool = KINDS[int(rng.integers(len(KINDS)))]
        profile, expected = random_layout(rng, pools, fields, pool)
        seed = int(rng.integers(2**31))
        checker = ValueChecker(expected, profile)
        objects = KvGenerator(expected, profile, seed).objects(range(PAGES_OF_A_MODEL))
        issues = checker.check(objects)
        issues += checker.check(uniform_noise(expected, profile, 4, seed))
        healthy[name] += len(objects)
        for issue in issues:
            print(f"FALSE: {name} {profile.layout} seed {seed}: {issue}")
        bad += len(issues)
        other, other_expected = random_layout(rng, pools, fields, pool)
        if visible_axes(other_expected) != visible_axes(expected):
            found = ValueChecker(other_expected, other).check(objects)
            mismatches = sum(issue.code == "layout-mismatch" for issue in found)
            swapped[name] += len(objects)
            missed[name] += len(objects) - mismatches
    for name, count in sorted(healthy.items()):
        print(f"{name:24}{count:7} healthy pages {swapped[name]:7} swapped {missed[name]:5} missed")
    print(f"{sum(healthy.values())} healthy pages, {bad} false findings")
    print(f"{sum(swapped.values())} swapped pages, {sum(missed.values())} not found")
    sys.exit(bool(bad or sum(missed.values())))


def random_layout(
    rng: np.random.Generator, pools: Any, fields: dict[str, Any], pool: str
) -> tuple[Profile, ObjectSpec]:
    kinds = {table["kind"] for table in pools}
    layouts = list(LAYOUTS)
    if "mla" in kinds:
        layouts.remove("page_head")
    if "mamba" in kinds:
        layouts = ["page_first", "page_first_direct"]
    profile = replace(profile_of(*pools, **fields), layout=str(rng.choice(layouts)))
    return profile, expected_of(profile, pool)


def visible_axes(expected: ObjectSpec) -> list[str]:
    """Return the axes whose order shows in the bytes, for pages with enough tokens and layers."""
    tensor = expected.tensors[0]
    lengths = dict(zip(tensor.axes, tensor.shape, strict=True))
    if lengths.get("token", 1) == 1 or lengths["layer"] < FEWEST_LAYERS:
        return []
    return [axis for axis in tensor.axes if lengths[axis] > 1]


if __name__ == "__main__":
    main()
