"""Stores of DeepSeek-V4: `ls`, `hits` and `verify` know its pools, and the numbers in its rows."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.checks.values import ValueChecker
from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.formats.kinds.dsv4 import DSV4_ROWS
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.profile import Profile, dump_profile
from hicachectl.formats.spec import ObjectSpec, object_specs
from tests.model_records import MODELS
from tests.stores import OLD

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.conftest import Invoke

TOKENS = list(range(4 * 256 + 1))
PAGES = page_hashes_hex(TOKENS, 256)


def small(pp: int = 1) -> Profile:
    """Return DeepSeek-V4 with six layers, of every ratio."""
    few = {"num_hidden_layers": 6, "compress_ratios": [0, 0, 4, 128, 4, 128]}
    config = {**MODELS["DeepseekV4ForCausalLM"]["config"], **few}
    return profile_from_config(config, DeploymentFlags(model="m", pp=pp))


def healthy(spec: ObjectSpec, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return bytes without NaN in any dtype; scales of index keys are 1."""
    found = rng.integers(1, 0x7F, spec.nbytes, dtype=np.uint8)
    if spec.pool.endswith("_indexer"):
        scales = found.reshape(-1, 64 * 132)[:, 64 * 128 :]
        scales[:] = np.full(64, 1.0, "<f4").view(np.uint8)
    return found


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, Path]:
    """Return a directory with four pages, two with window rows and states, and its profile."""
    directory, rng = tmp_path / "store", np.random.default_rng(3)
    directory.mkdir()
    for number, name in enumerate(PAGES):
        for spec in object_specs(small(), "file"):
            if not spec.trailing or number % 2:
                path = directory / (name + spec.affix[1])
                path.write_bytes(healthy(spec, rng).tobytes())
                os.utime(path, (OLD, OLD))
    (tmp_path / "profile.toml").write_text(dump_profile(small()))
    return directory, tmp_path / "profile.toml"


def damage(path: Path, offset: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)
    os.utime(path, (OLD, OLD))


def codes(invoke: Invoke, store: tuple[Path, Path], exit_code: int) -> dict[str, str]:
    document = invoke.document("verify", store[0], "--profile", store[1], exit_code=exit_code)
    assert document["checks"] == ["names", "groups", "sizes", "values"]
    return {finding["code"]: finding["detail"] for finding in document["findings"]}


def test_ls_and_verify_find_every_page_whole(invoke: Invoke, store: tuple[Path, Path]) -> None:
    pages = invoke("ls", store[0], "--profile", store[1], "--format", "jsonl").rows
    assert [page["state"] for page in pages] == ["whole"] * 4
    assert codes(invoke, store, 0) == {}


def test_hits_reach_the_last_page_with_window_rows(
    invoke: Invoke, store: tuple[Path, Path], tmp_path: Path
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps(TOKENS) + "\n")
    options = ("hits", store[0], "--token-ids", requests, "--profile", store[1], "--format", "json")
    (chain,) = invoke(*options).document["chains"]
    assert (chain["usable_pages"], chain["usable_tokens"]) == (4, 1024)
    (store[0] / f"{PAGES[2]}.deepseek_v4_c4_indexer_m.bin").unlink()
    (chain,) = invoke(*options).document["chains"]
    assert chain["usable_pages"] == 2
    assert chain["stopped_by"]["pool"] == "deepseek_v4_c4_indexer"


def test_verify_names_what_no_healthy_row_holds(invoke: Invoke, store: tuple[Path, Path]) -> None:
    c4 = store[0] / f"{PAGES[0]}.deepseek_v4_c4_m.bin"  # layers 2 and 4, 64 rows each
    damage(c4, 37_440 + 576 * 5 + 7, b"\x7f")
    damage(c4, 576 * 3 + 448, b"\x80\x7f")  # bf16 infinity
    damage(c4, 36_864 + 8 * 9 + 1, b"\xff")
    damage(c4, 36_864 + 8 * 9 + 7, b"\xff")  # unused
    found = codes(invoke, store, 4)
    assert found == {
        "nan": "rows: 1 NaN in layer 4, the first at layer 4, row 5, number 7 of codes",
        "inf": "rows: 1 Inf in layer 2, the first at layer 2, row 3, number 0 of rope",
        "bad-scale": "rows: 1 bad scale in layer 2, the first at layer 2, row 9, number 1 of "
        "scales",
    }


def test_verify_finds_unwritten_layers_and_other_sizes(
    invoke: Invoke, store: tuple[Path, Path]
) -> None:
    states = store[0] / f"{PAGES[3]}.deepseek_v4_c4_state_m.bin"
    damage(states, 65_536, bytes(65_536))
    damage(c128 := store[0] / f"{PAGES[1]}.deepseek_v4_c128_m.bin", 0, b"")
    os.truncate(c128, 1728)
    os.utime(c128, (OLD, OLD))
    found = codes(invoke, store, 4)
    assert found.keys() == {"all-zero", "truncated"}
    assert "layer 4" in found["all-zero"]


@pytest.mark.parametrize("row", DSV4_ROWS)
def test_each_form_of_rows_is_judged_by_its_own_places(row: str) -> None:
    """Random healthy rows are clean; a NaN in the last row's first code or scale is found."""
    form, rows = DSV4_ROWS[row], 16
    pool = Pool(name="swa", kind="dsv4", layers=2, row=row)
    profile = Profile(model="m", page_size=rows, pools=(Pool(name="kv", kind="logical"), pool))
    spec = next(spec for spec in object_specs(profile, "file") if spec.pool == "swa")
    clean = np.random.default_rng(1).integers(1, 0x7F, (1, spec.nbytes), dtype=np.uint8)
    checker = ValueChecker(spec, profile)
    assert checker.check(clean) == []
    step = form.data + form.scales if form.interleaved else form.data
    last = form.page_bytes(rows) + (rows - 1) * step
    if form.in_data:
        broken = clean.copy()
        broken[0, last] = 0xFF
        (issue,) = checker.check(broken)
        assert (issue.code, "layer 1, row 15, number 0" in issue.detail) == ("nan", True)
    if form.in_scales:
        scales = last + form.data
        if not form.interleaved:
            scales = form.page_bytes(rows) + rows * form.data + (rows - 1) * form.scales
        broken = clean.copy()
        broken[0, scales] = 0xFF
        (issue,) = checker.check(broken)
        assert (issue.code, "layer 1, row 15, number 0" in issue.detail) == ("bad-scale", True)


@pytest.mark.slow
def test_stages_are_joined_and_divided(invoke: Invoke, tmp_path: Path) -> None:
    """`migrate --to-pp` moves the layers of every pool, compressed rows and states too."""
    source, target, back = (tmp_path / name for name in ("source", "target", "back"))
    for directory in (source, target, back):
        directory.mkdir()
    rng = np.random.default_rng(5)
    for spec in object_specs(small(2), "file"):
        (source / (PAGES[0] + spec.affix[1])).write_bytes(healthy(spec, rng).tobytes())
    (tmp_path / "two.toml").write_text(dump_profile(small(2)))
    (tmp_path / "one.toml").write_text(dump_profile(small()))
    invoke("migrate", source, target, "--profile", tmp_path / "two.toml", "--to-pp", 1)
    for spec in object_specs(small(), "file"):
        assert (target / (PAGES[0] + spec.affix[1])).stat().st_size == spec.nbytes
    invoke("migrate", target, back, "--profile", tmp_path / "one.toml", "--to-pp", 2)
    for path in source.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes()
