"""`verify --checks values` on objects in another layout."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.profile import dump_profile
from tests.checks.value_cases import expected_of, profile_of
from tests.kvgen import KvGenerator, uniform_noise
from tests.stores import OLD, page

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

PAGES = 4
MHA = profile_of(
    {"kind": "mha", "dtype": "bfloat16", "layers": 12, "kv_heads": 2, "head_dim": 64},
    page_size=16,
)
MLA = profile_of(
    {"kind": "mla", "layers": 9, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "row": "bf16"},
    page_size=16,
)
MODELS = pytest.mark.parametrize("model", [MHA, MLA], ids=["mha", "mla"])


def made(model: Profile, layout: str) -> Bytes:
    """Return pages [PAGES, nbytes] in a layout, with the same values in each layout."""
    profile = replace(model, layout=layout)
    return KvGenerator(expected_of(profile), profile, seed=1).objects(range(PAGES))


def write_store(directory: Path, model: Profile, layout: str, objects: Bytes) -> list[Path]:
    """Write a store of some bytes, and a profile with a layout."""
    profile = replace(model, layout=layout)
    (directory / "p.toml").write_text(dump_profile(profile))
    before, after = FileGrammar().affix(expected_of(profile).coordinate)
    (directory / "store").mkdir()
    paths = [directory / "store" / f"{before}{page(n)}{after}" for n in range(len(objects))]
    for path, content in zip(paths, objects, strict=True):
        put(path, content)
    return paths


def put(path: Path, content: Bytes) -> None:
    path.write_bytes(content.tobytes())
    os.utime(path, (OLD, OLD))


def found(invoke: Invoke, directory: Path, exit_code: int = 0) -> list[dict[str, Any]]:
    out = invoke(
        "verify", directory / "store", "--profile", directory / "p.toml", "--checks", "values",
        "--format", "json", exit_code=exit_code,
    ).stdout  # fmt: skip
    document = json.loads(out)
    assert document["bytes_read"] == document["bytes"] > 0
    findings: list[dict[str, Any]] = document["findings"]
    return findings


@pytest.mark.slow
@MODELS
@pytest.mark.parametrize(
    ("said", "stored"), [("page_first", "layer_first"), ("layer_first", "page_first")]
)
def test_the_one_object_of_another_layout_is_found(
    invoke: Invoke, tmp_path: Path, model: Profile, said: str, stored: str
) -> None:
    right, wrong = made(model, said), made(model, stored)
    assert np.array_equal(np.sort(right.view("<u2")), np.sort(wrong.view("<u2")))
    paths = write_store(tmp_path, model, said, right)
    assert found(invoke, tmp_path) == []

    put(paths[2], wrong[2])
    (finding,) = found(invoke, tmp_path, exit_code=4)
    assert (finding["code"], finding["severity"]) == ("layout-mismatch", "error")
    assert (finding["key"], finding["page"]) == (paths[2].name, page(2))
    seen, _, rest = finding["detail"].removeprefix("rows lie in the order of ").partition(", ")
    assert stored in seen.split(" or ")
    assert rest.startswith(f"not of {said}:")


@MODELS
@pytest.mark.parametrize(
    ("said", "stored"),
    [("page_first_direct", "layer_first"), ("layer_first", "page_first_direct")],
)
def test_layouts_of_the_same_order_are_the_same(
    invoke: Invoke, tmp_path: Path, model: Profile, said: str, stored: str
) -> None:
    write_store(tmp_path, model, said, made(model, stored))
    assert found(invoke, tmp_path) == []


@MODELS
@pytest.mark.parametrize("said", ["page_first", "layer_first"])
def test_values_without_structure_are_of_any_layout(
    invoke: Invoke, tmp_path: Path, model: Profile, said: str
) -> None:
    profile = replace(model, layout=said)
    objects = uniform_noise(expected_of(profile), profile, PAGES, seed=3)
    write_store(tmp_path, model, said, objects)
    assert found(invoke, tmp_path) == []
