"""The script of `hicachectl profile --print-probe` prints the profiles that hicachectl derives."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from msgspec.structs import replace

from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.formats.spec import object_specs
from tests.model_records import DRAFTS, MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conftest import Invoke

# One worker asks SGLang, once.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("probe")]

_RECORDS = {**MODELS, **DRAFTS}


class _Case(NamedTuple):
    """A model of the records; a server's flags, and those that hicachectl names otherwise."""

    architecture: str
    flags: tuple[str, ...] = ("--tp", "2", "--page-size", "64")
    server_only: tuple[str, ...] = ()
    ours_only: tuple[str, ...] = ()
    gpu: str = "hopper"


# One model for each kind of pool.
_KNOWN = {
    "mha": _Case("LlamaForCausalLM"),
    "stages": _Case("LlamaForCausalLM", ("--tp", "2", "--page-size", "1", "--kv-cache-dtype",
                    "fp8_e5m2"), ("--pp-size", "2"), ("--pp", "2")),
    "swa": _Case("Llama4ForConditionalGeneration"),
    "asymmetric": _Case("MiMoV2FlashForCausalLM"),
    "gdn": _Case("Qwen3_5ForConditionalGeneration"),
    "mla and states": _Case("KimiLinearForCausalLM"),
    "mamba2": _Case("NemotronHForCausalLM"),
    "mamba2 of one group": _Case("FalconH1ForCausalLM"),
    "convolutions": _Case("ZayaForCausalLM", ("--tp", "2", "--page-size", "1")),
    "convolutions of heads": _Case(
        "InklingForConditionalGeneration few heads", ("--tp", "4", "--page-size", "64")
    ),
    "packed states": _Case(
        "InklingForConditionalGeneration InklingForConditionalGenerationMTP windows",
        ("--tp", "2", "--page-size", "64", "--speculative-algorithm", "EAGLE",
         "--speculative-num-steps", "3", "--enable-multi-layer-eagle"),
        ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ),
    "indexer and packed draft, attention DP": _Case(
        "GlmMoeDsaForCausalLM",
        ("--tp", "8", "--dp", "4", "--enable-dp-attention", "--kv-cache-dtype", "fp8_e4m3",
         "--speculative-algorithm", "EAGLE"),
        ("--speculative-num-steps", "1", "--speculative-eagle-topk", "1",
         "--speculative-num-draft-tokens", "2", "--hicache-storage-backend", "mooncake",
         "--hicache-storage-backend-extra-config", '{"extra_backend_tag": "blue"}'),
        ("--tag", "blue"),
    ),
}  # fmt: skip
_UNKNOWN = {
    "form": _Case("DeepseekV4ForCausalLM", ("--tp", "2", "--page-size", "256")),
    "refused": _Case("LlamaForCausalLM", ("--kv-cache-dtype", "mxfp8")),
    "ranks": _Case("LlamaForCausalLM", ("--tp", "4", "--page-size", "64", "--attn-cp-size", "2")),
    "stages of a form": _Case("DeepseekV4ForCausalLM",
                              ("--tp", "2", "--page-size", "256", "--pp-size", "2")),
    "disabled": _Case("SDARForCausalLM", ("--dllm-algorithm", "LowConfidence")),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(
    modelling_session: SglangSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Run the printed script for all cases, in one process."""
    folder = tmp_path_factory.mktemp("probe")
    command = [sys.executable, "-m", "hicachectl", "profile", "--print-probe"]
    subprocess.run([*command, "-o", folder / "probe.py"], check=True)
    request = {
        name: {
            "config": _RECORDS[case.architecture]["config"],
            "arguments": [*case.flags, *case.server_only, "--served-model-name", "org/m"],
            "gpu": case.gpu,
        }
        for name, case in (_KNOWN | _UNKNOWN).items()
    }
    question = {"probe": str(folder / "probe.py"), "models": request}
    found: dict[str, Any] = modelling_session.ask("run_probe", question)
    return found


@pytest.mark.parametrize("name", _KNOWN)
def test_profiles_of_known_models_are_equal(
    name: str, answers: dict[str, Any], tmp_path: Path, invoke: Invoke
) -> None:
    """Keys, bytes, tensors and layers of every rank agree with `profile --model-config`."""
    case, answer = _KNOWN[name], answers[name]
    assert answer["code"] == 0, answer["stderr"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(_RECORDS[case.architecture]["config"]))
    ours = invoke(
        "profile", "--model-config", config, "--served-model-name", "org/m",
        *case.flags, *case.ours_only,
    )  # fmt: skip
    assert _normal(parse_profile(answer["stdout"])) == _normal(parse_profile(ours.stdout))
    assert "#" not in answer["stdout"]


def test_a_form_unknown_to_the_script_is_opaque_and_said(answers: dict[str, Any]) -> None:
    """DeepSeek-V4: each object has the key and bytes of hicachectl's profile; comments say more."""
    text = answers["form"]["stdout"]
    assert answers["form"]["code"] == 0, answers["form"]["stderr"]
    profile = parse_profile(text)
    flags = DeploymentFlags(model="org/m", tp=2, page_size=256, dsv4_kv_layout="v4")
    ours = profile_from_config(MODELS["DeepseekV4ForCausalLM"]["config"], flags)
    for scheme in ("file", "mooncake"):
        assert _objects(profile, scheme) == _objects(ours, scheme)
    assert {pool.kind for pool in profile.pools} == {"logical", "opaque"}
    assert "# pools[swa]: this script does not know" in text


def test_what_sglang_refuses_is_told_in_its_words(answers: dict[str, Any]) -> None:
    """The exit code is 2, and no profile is printed."""
    answer = answers["refused"]
    assert (answer["code"], answer["stdout"]) == (2, "")
    assert "requires an SM100+ (Blackwell) GPU" in answer["stderr"]


def test_flags_for_which_sglang_disables_hicache_have_no_profile(answers: dict[str, Any]) -> None:
    """SGLang only logs that it does, for diffusion language models."""
    answer = answers["disabled"]
    assert (answer["code"], answer["stdout"]) == (2, "")
    said = "probe: SGLang disables HiCache for these flags; the server stores no pages\n"
    assert answer["stderr"] == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ranks", "cp 2: without DP attention, keys name the full TP size, but heads are "),
        ("stages of a form", "pools[swa]: the objects of DeepSeekV4PagedHostPool have "
         "[3144960, 3294720] bytes in different stages"),
    ],
)  # fmt: skip
def test_servers_that_no_profile_describes_are_told(
    name: str, said: str, answers: dict[str, Any]
) -> None:
    answer = answers[name]
    assert (answer["code"], answer["stdout"]) == (2, "")
    line = answer["stderr"].splitlines()[-1]
    assert line.startswith(f"probe: {said}")
    assert line.endswith("; check the store without a profile")


def test_print_probe_takes_no_source(invoke: Invoke, tmp_path: Path) -> None:
    """A script of a STORE or a server would be another thing than what is printed."""
    for others in ((tmp_path,), ("--tp", "2"), ("--server", "http://127.0.0.1:1")):
        outcome = invoke("profile", "--print-probe", *others, exit_code=2)
        assert "--print-probe takes no STORE" in outcome.stderr


def _objects(profile: Profile, scheme: str) -> set[tuple[Any, ...]]:
    return {(spec.affix, spec.nbytes) for spec in object_specs(profile, scheme)}


def _normal(profile: Profile) -> Profile:
    """Return the profile with layer numbers instead of counts."""
    pools = tuple(replace(pool, layers=pool.layer_numbers) for pool in profile.pools)
    return replace(profile, pools=pools)
