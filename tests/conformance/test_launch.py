"""`profile --launch` reads commands as SGLang does: its parser, and its own pools."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from msgspec.structs import replace

from hicachectl.formats.errors import UsageError
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.profiles.launch import read_arguments
from tests.model_records import MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("probe")]

# Lines of SGLang's documentation and of its cookbooks, and corners of its parser.
_PARSED = {
    "abbreviations": "--model m --tp 8 --dp 2 --pp-s 2 --ep 4 --served x --mem-frac 0.8",
    "aliases": "--model-path m --tensor-parallel-size 8 --data-parallel-size 8 "
    "--enable-dp-attention --pipeline-parallel-size=2 --attention-context-parallel-size 2 "
    "--enable-hicache",
    "equals": "--model-path=m --page-size=64 --hicache-mem-layout=page_first_direct",
    "last wins": "--model-path m --tp 2 --tp-size 4",
    "lists": "--model m --cuda-graph-bs-decode 1 2 4 --lora-paths a=/x b=/y --port 30000",
    "json": "--model m --hicache-storage-backend-extra-config '{\"tp_lcm_size\": 8}' "
    "--json-model-override-args '{\"num_hidden_layers\": 4}'",
    "negative": "--model m --max-total-tokens -1",
    "no": "--model m --no-dllm-fdfo --enable-fused-qk-norm-rope",
    "file": "--config FOLDER/flags.yaml --tp 4",
    "file in front": "--tp 4 --model other --config FOLDER/flags.yaml",
    "empty file": "--model m --config FOLDER/empty.yaml",
    "unknown": "--model m --tp_size 4",
    "ambiguous": "--model m --page 64",
    "no value": "--model m --tp",
    "value of a switch": "--model m --enable-hicache true",
    "file with a retired switch": "--config FOLDER/retired.yaml",
    "file with underscores": "--config FOLDER/underscores.yaml",
}
_FILES = {
    "flags.yaml": "model-path: m\ntp-size: 2\nenable-hierarchical-cache: true\n"
    "disable-radix-cache: false\nhicache-storage-backend: file\n"
    "hicache-storage-backend-extra-config:\n  extra_backend_tag: blue\n"
    "cuda-graph-bs-decode: [1, 2]\nmem-fraction-static: 0.7\n",
    "empty.yaml": "",
    "retired.yaml": "model-path: m\nenable-dp-attention: true\n",
    "underscores.yaml": "model-path: m\ntp_size: 2\n",
}


class _Case(NamedTuple):
    """A model of the records, a server's flags, and the GPU."""

    architecture: str
    flags: str
    gpu: str = "hopper"


_HICACHE = "--enable-hierarchical-cache --hicache-storage-backend"
_RESOLVED = {
    "layout of direct I/O": _Case("LlamaForCausalLM",
        f"--tp 2 --page-size 64 {_HICACHE} file --hicache-io-backend direct"),
    "layout of Mooncake": _Case("LlamaForCausalLM",
        f"--page-size 32 {_HICACHE} mooncake --hicache-mem-layout layer_first"),
    "layer first": _Case("LlamaForCausalLM",
        f"--page-size 32 {_HICACHE} file --hicache-mem-layout layer_first"),
    "page size of a backend": _Case("LlamaForCausalLM",
        f"--page-size 8 {_HICACHE} file --attention-backend trtllm_mha", "blackwell"),
    "page size of a decode backend": _Case("DeepseekV3ForCausalLM",
        f"--tp 4 {_HICACHE} file --decode-attention-backend flashmla --prefill-attention-backend "
        "fa3 --page-size 1"),
    "page size of a model": _Case("GlmMoeDsaForCausalLM",
        f"--tp 8 --page-size 16 --kv-cache-dtype bf16 {_HICACHE} file"),
    "attention DP": _Case("LlamaForCausalLM",
        f"--tp 8 --dp 4 --enable-dp-attention --page-size 64 {_HICACHE} file"),
    "attention DP by its new name": _Case("LlamaForCausalLM",
        f"--tp 8 --attn-dp-size 2 --page-size 64 {_HICACHE} file"),
    "replicas": _Case("LlamaForCausalLM", f"--tp 2 --dp 2 --page-size 64 {_HICACHE} file"),
    "stages": _Case("LlamaForCausalLM",
        f"--tp 2 --pp-size 2 --page-size 64 --kv-cache-dtype fp8_e5m2 {_HICACHE} file"),
    "tag": _Case("LlamaForCausalLM",
        f"--tp 2 --page-size 64 {_HICACHE} mooncake "
        """--hicache-storage-backend-extra-config '{"extra_backend_tag": "blue"}'"""),
    "overrides": _Case("LlamaForCausalLM",
        f"--page-size 64 {_HICACHE} file "
        """--json-model-override-args '{"num_hidden_layers": 3}'"""),
    "overrides within a config": _Case("Qwen3_5ForConditionalGeneration",
        f"--page-size 64 {_HICACHE} file "
        """--json-model-override-args '{"text_config": {"num_key_value_heads": 8}}'"""),
    "packed draft": _Case("GlmMoeDsaForCausalLM",
        f"--tp 8 --kv-cache-dtype fp8_e4m3 {_HICACHE} file --speculative-algorithm NEXTN "
        "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"),
    "states": _Case("Qwen3_5ForConditionalGeneration",
        f"--tp 2 --page-size 64 --mamba-ssm-dtype bfloat16 {_HICACHE} file"),
}  # fmt: skip
# Flags that SGLang refuses or for which it has no HiCache, and a word of its reason or of ours.
_REFUSED = {
    "diffusion": _Case("SDARForCausalLM", f"--dllm-algorithm LowConfidence {_HICACHE} file"),
    "no radix cache": _Case("LlamaForCausalLM",
        f"--page-size 64 --disable-radix-cache {_HICACHE} file"),
    "LMCache": _Case("LlamaForCausalLM", f"--page-size 64 --enable-lmcache {_HICACHE} file"),
    "linker": _Case("LlamaForCausalLM",
        f"--page-size 64 --enable-unified-cache-external-linker {_HICACHE} file"),
    "int8 states": _Case("Qwen3_5ForConditionalGeneration",
        f"--page-size 64 --enable-int8-mamba-checkpoint {_HICACHE} file"),
    "sharded KV": _Case("LlamaForCausalLM",
        f"--tp 2 --page-size 64 --enable-kv-cache-sharding {_HICACHE} file"),
    "draft under DCP": _Case("DeepseekV3ForCausalLM",
        f"--tp 8 --dcp-size 4 --page-size 64 --speculative-algorithm EAGLE {_HICACHE} file"),
    "buffer under DCP": _Case("DeepseekV3ForCausalLM",
        "--tp 8 --dcp-size 4 --page-size 64 --hicache-host-memory-mode buffer_only "
        f"{_HICACHE} file"),
    "buffer of decoding": _Case("LlamaForCausalLM",
        "--page-size 64 --hicache-host-memory-mode buffer_only --disaggregation-mode decode "
        f"{_HICACHE} file"),
    "shared host pool": _Case("LlamaForCausalLM",
        "--page-size 64 --disaggregation-mode decode "
        f"--disaggregation-decode-host-receive-threshold 0.5 {_HICACHE} mooncake"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of flags that commands name."""
    made = tmp_path_factory.mktemp("launch")
    for name, text in _FILES.items():
        (made / name).write_text(text)
    return made


@pytest.fixture(scope="module")
def parsed(modelling_session: SglangSession, folder: Path) -> dict[str, Any]:
    """Ask SGLang's parser for all lines, in one process."""
    request = {name: _words(line, folder) for name, line in _PARSED.items()}
    found: dict[str, Any] = modelling_session.ask("parse_launch", request)
    return found


@pytest.fixture(scope="module")
def answers(modelling_session: SglangSession, folder: Path) -> dict[str, Any]:
    """Ask SGLang's pools for all models, by the printed script, in one process."""
    command = [sys.executable, "-m", "hicachectl", "profile", "--print-probe"]
    subprocess.run([*command, "-o", folder / "probe.py"], check=True)
    request = {
        name: {
            "config": MODELS[case.architecture]["config"],
            "arguments": [*shlex.split(case.flags), "--served-model-name", "org/m"],
            "gpu": case.gpu,
        }
        for name, case in (_RESOLVED | _REFUSED).items()
    }
    question = {"probe": str(folder / "probe.py"), "models": request}
    found: dict[str, Any] = modelling_session.ask("run_probe", question)
    return found


@pytest.mark.parametrize("name", _PARSED)
def test_arguments_are_parsed_as_by_sglang(name: str, parsed: dict[str, Any], folder: Path) -> None:
    words = _words(_PARSED[name], folder)
    theirs = parsed[name]
    if "refusal" in theirs:
        with pytest.raises(UsageError):
            read_arguments(words)
        return
    usual = parsed["empty file"]  # but for model_path, "m" in all lines
    ours = read_arguments(words)
    assert {field: _plain(ours[field]) for field in ours if field in theirs} == {
        field: _plain(theirs[field]) for field in ours if field in theirs
    }
    assert {field for field in theirs if theirs[field] != usual[field]} <= ours.keys()


def _words(line: str, folder: Path) -> list[str]:
    return shlex.split(line.replace("FOLDER", str(folder)))


def _plain(value: Any) -> Any:
    """Return a value as text, as on the command line."""
    return list(map(_plain, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("name", _RESOLVED)
def test_profiles_are_those_of_sglangs_pools(
    name: str, answers: dict[str, Any], tmp_path: Path, invoke: Invoke
) -> None:
    """Keys, bytes, tensors and layers of every rank agree."""
    answer = answers[name]
    assert answer["code"] == 0, answer["stderr"]
    ours = invoke("profile", "--launch", _command(_RESOLVED[name], tmp_path))
    assert _normal(parse_profile(answer["stdout"])) == _normal(parse_profile(ours.stdout))


@pytest.mark.parametrize("name", _REFUSED)
def test_servers_without_hicache_have_no_profile(
    name: str, answers: dict[str, Any], tmp_path: Path, invoke: Invoke
) -> None:
    assert answers[name]["code"] == 2, answers[name]["stdout"]
    said = invoke("profile", "--launch", _command(_REFUSED[name], tmp_path), exit_code=2).stderr
    assert "launch command: --" in said
    assert "leave it out, or give another server's command" in said


def _command(case: _Case, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(MODELS[case.architecture]["config"]))
    return f"sglang serve {folder} {case.flags} --served-model-name org/m"


def _normal(profile: Profile) -> Profile:
    """Return the profile with layer numbers instead of counts."""
    pools = tuple(replace(pool, layers=pool.layer_numbers) for pool in profile.pools)
    return replace(profile, pools=pools)
