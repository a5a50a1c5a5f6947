"""The name of weights covers what SGLang loads, by the settings and files that decide it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.weights import read_checkpoint
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.loading import SETTINGS, loaded_weights, own_quantizations
from hicachectl.formats.weights import SAME_LOAD_FORMATS, Checkpoint
from tests.checkpoints import write_checkpoint, write_shard
from tests.formats.models.test_loading import DEFAULTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]

TENSORS: dict[str, Any] = {"a": ("F32", (8,))}
# File names of model directories, and those that an index names.
DIRECTORIES = (
    (("model.safetensors",), ()),
    (
        ("model-1.safetensors", "model-2.safetensors"),
        ("model-1.safetensors", "model-2.safetensors"),
    ),
    (("model-1.safetensors", "consolidated.safetensors"), ("model-1.safetensors",)),
    (("model.safetensors", "consolidated.safetensors"), ()),
    (("consolidated.safetensors",), ()),
)
QUANTIZATIONS: list[dict[str, Any]] = [
    {"quantization": {"quant_algo": "FP8"}},
    {"quantization": {"quant_algo": "NVFP4"}},
    {"quantization": {"quant_algo": "W4A16_NVFP4"}},
    {"quantization": {"quant_algo": "MXFP8"}},
    {"quantization": {"quant_algo": "MIXED_PRECISION"}},
    {
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"0": {"quant_algo": "NVFP4"}},
        }
    },
    {"quant_method": "modelopt", "quant_algo": "FP8"},
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = []
    for names, indexed in DIRECTORIES:
        directory = tmp_path_factory.mktemp("model")
        write_checkpoint(directory, dict.fromkeys(indexed, TENSORS), index=bool(indexed))
        for seed, name in enumerate(names):
            write_shard(directory / name, TENSORS, seed=seed)
        found.append(directory)
    return found


@pytest.fixture(scope="module")
def told(sglang_session: SglangSession, directories: list[Path]) -> dict[str, Any]:
    question = {
        "settings": SETTINGS,
        "directories": list(map(str, directories)),
        "quantizations": QUANTIZATIONS,
    }
    answer: dict[str, Any] = sglang_session.ask("load_weights", question)
    return answer


def test_sglangs_defaults_are_the_bare_case(told: dict[str, Any]) -> None:
    assert told["defaults"] == DEFAULTS
    assert loaded_weights(Checkpoint("5" * 32, {}), told["defaults"]) == "5" * 32


def test_load_formats_of_one_name_read_the_same_files(told: dict[str, Any]) -> None:
    accepted = set()
    for load_format in told["load_formats"]:
        try:
            loaded_weights(Checkpoint("5" * 32, {}), {"load_format": load_format})
        except ProfileError:
            continue
        accepted.add(load_format)
    assert accepted == {*SAME_LOAD_FORMATS, "bitsandbytes", "mistral", "sharded_state"}
    for files in told["files"]:
        same = [names for load_format, names in files.items() if load_format in SAME_LOAD_FORMATS]
        assert len(same) > 3
        assert all(names == files["auto"] for names in same)


def test_every_file_that_a_loader_reads_counts(
    told: dict[str, Any], directories: list[Path]
) -> None:
    for directory, files in zip(directories, told["files"], strict=True):
        before = read_checkpoint(directory)
        for name in set().union(*files.values()):
            kept = (directory / name).read_bytes()
            write_shard(directory / name, TENSORS, seed=99)
            assert read_checkpoint(directory) != before
            (directory / name).write_bytes(kept)
        assert read_checkpoint(directory) == before


def test_auto_means_mistral_where_sglang_says_so(
    told: dict[str, Any], directories: list[Path]
) -> None:
    assert set(told["native"]) == {True, False}
    for directory, native in zip(directories, told["native"], strict=True):
        found = read_checkpoint(directory)
        name = loaded_weights(found, {"load_format": "mistral"})
        assert (name == found.fingerprint) is native


def test_a_checkpoints_own_quantisation_has_sglangs_names(told: dict[str, Any]) -> None:
    assert len(set(told["methods"])) == 5
    for stated, method in zip(QUANTIZATIONS, told["methods"], strict=True):
        place = "config.json" if "quant_method" in stated else "hf_quant_config.json"
        inside = {"quantization_config": stated} if place == "config.json" else stated
        assert method in own_quantizations({place: inside})
