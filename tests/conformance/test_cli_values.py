"""`verify` finds exactly the damaged values that the tests put into stores written by SGLang."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.layouts import TensorLayout
from hicachectl.formats.profile import Profile, profile_from_mapping
from hicachectl.formats.spec import ObjectSpec, object_specs

if TYPE_CHECKING:
    from tests.conftest import Invoke

pytestmark = pytest.mark.conformance

Manifest = dict[str, Any]
SglangStore = Callable[..., tuple[Path, Manifest]]
Place = tuple[Path, TensorLayout]

NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000, "float8_e4m3fn": 0x7F}
INFINITY = {"bfloat16": 0xFF80, "float16": 0x7C00, "float32": 0xFF800000}
WORDS = {1: "<u1", 2: "<u2", 4: "<u4"}

CASES = ("gqa_tp2", "mla_indexer", "mla_fp8_indexer", "hybrid_mamba", "mha_draft", "swa", "pp2",
         "fp8_mha", "dcp2", "side_states")  # fmt: skip


@pytest.fixture
def damaged(
    sglang_store: SglangStore, tmp_path: Path
) -> Callable[[str], tuple[Path, Path, Profile, Manifest]]:
    """Return a function that copies a case's store, to damage it, and writes its profile."""

    def make(case: str) -> tuple[Path, Path, Profile, Manifest]:
        store, manifest = sglang_store(case)
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store, copy)
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(manifest["profile"]))
        return copy, path, profile_from_mapping(manifest["profile"]), manifest

    return make


def objects_of(
    profile: Profile, manifest: Manifest, store: Path
) -> Iterator[tuple[Path, ObjectSpec]]:
    """Return one object of each kind, from the last page that has it."""
    present = {entry["file"] for entry in manifest["objects"]}
    for expected in object_specs(profile, "file"):
        suffix = FileGrammar().affix(expected.coordinate)[1]
        page = next(p for p in reversed(manifest["pages"]) if p + suffix in present)
        yield store / f"{page}{suffix}", expected


def found(
    invoke: Invoke, store: Path, profile: Path, *, exit_code: int = 4
) -> list[tuple[str, str]]:
    out = invoke(
        "verify", store, "--profile", profile, "--grace", "0s", "--format", "json",
        exit_code=exit_code,
    ).stdout  # fmt: skip
    return [(f["code"], f["key"]) for f in json.loads(out)["findings"]]


def write_word(path: Path, tensor: TensorLayout, element: int, word: int) -> None:
    """Overwrite one element of a tensor of a stored object."""
    data = np.fromfile(path, dtype=np.uint8)
    view = data[tensor.offset : tensor.offset + tensor.nbytes].view(WORDS[tensor.itemsize])
    view[element] = word
    data.tofile(path)


@pytest.mark.parametrize("case", CASES)
def test_one_bad_value_is_found_in_any_tensor(
    damaged: Callable[[str], tuple[Path, Path, Profile, Manifest]], invoke: Invoke, case: str
) -> None:
    rng = np.random.default_rng()
    for code, words in (("nan", NAN), ("inf", INFINITY)):
        store, profile_path, profile, manifest = damaged(case)
        for path, expected in objects_of(profile, manifest, store):
            for tensor in expected.tensors:
                if tensor.dtype not in words:
                    continue
                element = int(rng.integers(np.prod(tensor.shape)))
                before = path.read_bytes()
                write_word(path, tensor, element, words[tensor.dtype])
                wanted = [(code, path.name)]
                assert found(invoke, store, profile_path) == wanted, (tensor.name, element)
                path.write_bytes(before)


@pytest.mark.parametrize("case", ["gqa_tp2", "mla_indexer", "hybrid_mamba", "mha_draft"])
def test_an_object_of_zeros_is_found(
    damaged: Callable[[str], tuple[Path, Path, Profile, Manifest]], invoke: Invoke, case: str
) -> None:
    store, profile_path, profile, manifest = damaged(case)
    for path, _ in objects_of(profile, manifest, store):
        before = path.read_bytes()
        path.write_bytes(bytes(len(before)))
        codes = found(invoke, store, profile_path)
        assert ("all-zero", path.name) in codes
        assert {key for _, key in codes} == {path.name}
        assert {code for code, _ in codes} <= {"all-zero", "bad-scale"}
        path.write_bytes(before)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 1e-9])
def test_a_bad_scale_of_the_indexer_is_found(
    damaged: Callable[[str], tuple[Path, Path, Profile, Manifest]], invoke: Invoke, scale: float
) -> None:
    store, profile_path, profile, manifest = damaged("mla_indexer")
    path, expected = next(
        (p, e) for p, e in objects_of(profile, manifest, store) if e.coordinate.pool == "indexer"
    )
    data = np.fromfile(path, dtype=np.uint8)
    layer_bytes = profile.page_size * 132
    scales_at = profile.page_size * 128  # keys of the page, then a scale a token
    at = layer_bytes * (len(expected.layers) - 1) + scales_at + 4 * 3
    data[at : at + 4] = np.array([scale], dtype="<f4").view(np.uint8)
    data.tofile(path)
    assert found(invoke, store, profile_path) == [("bad-scale", path.name)]


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_bad_scale_of_an_fp8_row_is_found(
    damaged: Callable[[str], tuple[Path, Path, Profile, Manifest]], invoke: Invoke, scale: float
) -> None:
    store, profile_path, profile, manifest = damaged("mla_fp8_indexer")
    path, _ = next(objects_of(profile, manifest, store))
    data = np.fromfile(path, dtype=np.uint8).reshape(-1, 656)
    data[-2, 516:520] = np.array([scale], dtype="<f4").view(np.uint8)
    data.tofile(path)
    assert found(invoke, store, profile_path) == [("bad-scale", path.name)]


def test_any_flipped_bit_is_found_with_a_catalog(
    damaged: Callable[[str], tuple[Path, Path, Profile, Manifest]], invoke: Invoke, tmp_path: Path
) -> None:
    rng = np.random.default_rng()
    for case in CASES:
        store, _, profile, manifest = damaged(case)
        catalog = tmp_path / f"{case}.parquet"
        checks = ["--checks", "digests", "--grace", "0s", "--catalog", catalog]
        invoke("verify", store, *checks, "--update-catalog")
        for path, _ in objects_of(profile, manifest, store):
            before = path.read_bytes()
            position = int(rng.integers(len(before)))
            damaged_bytes = bytearray(before)
            damaged_bytes[position] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged_bytes)
            out = invoke(
                "verify",
                store,
                *checks,
                "--identity",
                "inode,size",
                "--format",
                "json",
                exit_code=4,
            ).stdout
            found_now = [(f["code"], f["severity"], f["key"]) for f in json.loads(out)["findings"]]
            assert found_now == [("digest-mismatch", "error", path.name)], position
            path.write_bytes(before)
