"""Tell what SGLang allocates and stores for models, from their configs, without building a model.

Runs inside the SGLang environment: `model_pools.py REQUEST`. The request is a JSON object of models
by name: config (a config.json; its hf_quant_config is a file beside it), code (a file of this
folder with the config's class, put beside it), draft (the config.json of a draft with a checkpoint
of its own), flags (fields of ServerArgs; page_size is 64 unless given),
env (environment variables), gpu ("hopper" unless given, or "blackwell") and ranks (RANKS unless
given).

Prints a JSON object of answers. An answer lists the rows of one model, one for each of RANKS and
pipeline stage, for the first rank of the TP group: tp, pp, stage, page_size,
dtype (of KV) and pools: name, host (class), layers (model layer numbers), packed (layers of drafts
behind them, absent if 0), nbytes (of the object that the file backend writes), trailing (pages; 0
for all pages) and states (shape and dtype). Where SGLang refuses: refusal (its words) and where
(its step).

Windows are those of the model's class; of modules that cannot be imported here, as Inkling's, the
config's, which is a token longer.

hicachectl/profiles/probe.py asks SGLang. Here it is told each rank, and SGLang gets the answers of
a Hopper or Blackwell GPU wherever it asks the platform.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicachectl.profiles import probe
    from tests.conformance import sglang_env
else:
    import sglang_env

    sys.path.append(str(Path(__file__).parents[2] / "hicachectl" / "profiles"))
    import probe

RANKS = ((1, 1), (2, 1), (4, 1), (1, 2))  # TP and PP sizes
_CUDA = {"is_cuda": True, "has_flashinfer": True, "has_amx": False}
_GPUS = {
    "hopper": {
        **_CUDA,
        "is_sm90": True,
        "is_hopper_with_cuda_12_3": True,
        "device_sm": 90,
        "device_capability": (9, 0),
    },
    "blackwell": {
        **_CUDA,
        "is_sm100": True,
        "is_blackwell": True,
        "device_sm": 100,
        "device_capability": (10, 0),
    },
}


def main() -> None:
    """Answer the request that the command line names."""
    parser = argparse.ArgumentParser(description="Describe the pools of models.")
    parser.add_argument("request", type=Path)
    request = json.loads(parser.parse_args().request.read_text())
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr), without_a_gpu():
        answers = {name: list(_rows(model)) for name, model in request.items()}
    print(json.dumps(answers))


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Take SGLang to CUDA, and allocate nothing."""
    from sglang.srt import platforms
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    replaced = (
        mock.patch.object(platforms, "_current_platform", CudaSRTPlatform()),
        mock.patch.object(memory_pool, "_is_cuda", new=True),  # get_minimax_sparse_index_dtype
        mock.patch.dict(QUANTIZATION_METHODS, mxfp4=Mxfp4Config),  # registered on CUDA
        mock.patch.object(torch.cuda, "get_device_name", mock.Mock(return_value="NVIDIA")),
        probe.without_memory(),
    )
    with contextlib.ExitStack() as stack:
        for patch in replaced:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def on_a_gpu(name: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Answer SGLang's questions as a GPU does, in a server with these environment variables."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as compressed
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.utils import common

    capability = _GPUS[name]["device_capability"]
    asked = mock.Mock(return_value=capability)
    cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=asked)
    present = {**vars(torch), "cuda": cuda, "version": SimpleNamespace(cuda="12.9")}
    sm100 = mock.Mock(return_value=name == "blackwell")
    with (
        mock.patch.object(torch.cuda, "get_device_capability", asked),
        mock.patch.object(compressed, "torch", SimpleNamespace(**present)),
        mock.patch.object(common, "is_sm100_supported", sm100),
        mock.patch.dict(os.environ, variables),
        override_platform(**_GPUS[name]),
    ):
        yield


def _rows(model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    flags = {"page_size": 64, **model.get("flags", {})}
    gpu = on_a_gpu(model.get("gpu", "hopper"), model.get("env", {}))
    with tempfile.TemporaryDirectory() as folder, gpu:
        _write_config(Path(folder) / "target", model["config"])
        if "code" in model:
            shutil.copy(Path(__file__).parent / model["code"], Path(folder) / "target")
        if "draft" in model:
            _write_config(Path(folder) / "draft", model["draft"])
            flags["speculative_draft_model_path"] = f"{folder}/draft"
        for tp, pp in model.get("ranks", RANKS):
            staged = pp == 1 or probe.takes_stages(model["config"]["architectures"][0])
            for stage in range(pp if staged else 1):
                rank = probe.Rank(tp, pp, stage)
                yield {**rank._asdict(), **_answer(folder, flags, rank)}


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir()
    own = {name: value for name, value in config.items() if name != "hf_quant_config"}
    (folder / "config.json").write_text(json.dumps(own))
    if "hf_quant_config" in config:
        (folder / "hf_quant_config.json").write_text(json.dumps(config["hf_quant_config"]))


def _answer(folder: str, flags: Mapping[str, Any], rank: probe.Rank) -> dict[str, Any]:
    steps = ["arguments"]
    try:
        found = probe.stored(_arguments(f"{folder}/target", flags, rank), rank, steps.append)
        steps.append("attention")
        _check_heads(found.runner.model_config, rank)
        return {
            "page_size": found.runner.page_size,
            "dtype": str(found.runner.kv_cache_dtype).removeprefix("torch."),
            "pools": [_row(pool) for pool in found.pools],
        }
    except Exception as error:  # what SGLang raises is the answer
        words = f"{type(error).__name__}: {error}".replace(folder, "MODEL").splitlines()[0]
        return {"refusal": words[:300], "where": steps[-1]}


def _check_heads(config: Any, rank: probe.Rank) -> None:
    """Raise what a model's attention asserts of TP, before its pools are allocated."""
    if config.hf_config.architectures[0] != "ZayaForCausalLM":
        return
    from sglang.srt.models import zaya

    rotary = mock.patch.object(zaya, "get_rope")  # it needs a GPU
    with probe._as_rank(rank), torch.device("meta"), rotary:
        zaya.ZayaAttention(config.hf_text_config, layer_id=0)


def _arguments(path: str, flags: Mapping[str, Any], rank: probe.Rank) -> Any:
    """Return the resolved ServerArgs."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.arg_groups.validation_hook import check_pipeline_parallel_compat
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    staged = "speculative_algorithm" in flags and rank.pp > 1
    with envs.SGLANG_ENABLE_PP_SPEC.override(staged):
        server_args = ServerArgs(
            model_path=path,
            device="cuda",
            tp_size=rank.tp,
            pp_size=rank.pp,
            enable_hierarchical_cache=True,
            hicache_storage_backend="file",
            max_mamba_cache_size=probe.STATE_SLOTS,
            max_running_requests=2,
            **flags,
        )
        server_args.resolve_once()
        if staged:
            check_pipeline_parallel_compat(resolved_view(server_args))
    return server_args


def _row(pool: probe.StoredPool) -> dict[str, Any]:
    row = {
        "name": pool.name,
        "host": type(pool.host).__name__,
        "layers": _ranges(pool.layers),
        "nbytes": probe.page_bytes(pool.host),
        "trailing": pool.trailing,
    }
    if pool.packed:
        row["packed"] = pool.packed
    if pool.name == "mamba":
        states = [getattr(pool.host, "temporal_buffer", None), *(pool.host.conv_buffer or ())]
        row["states"] = [
            [list(state.shape[3:]), str(state.dtype).removeprefix("torch.")]
            for state in states
            if state is not None
        ]
    return row


def _ranges(numbers: tuple[int, ...]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


if __name__ == "__main__":
    sglang_env.prepare()
    main()
