"""Read facts about the running server that its registered host pools do not show.

Source: SGLang srt/runtime_context.py; the fields are in srt/arg_groups/fields/.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.weights import hub_snapshot, read_checkpoint
from hicachectl.backends.sglang.calls import Call, Workers
from hicachectl.backends.urls import without_secrets
from hicachectl.formats.errors import FormatError, ProfileError
from hicachectl.formats.models.dtypes import stated_kv_dtype
from hicachectl.formats.models.loading import SETTINGS, loaded_weights
from hicachectl.formats.weights import Checkpoint, served_weights
from hicachectl.formats.wording import NAME_WEIGHTS, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.sglang.settings import Settings

_LONGEST_READ_S = 300.0  # most time to read the weights, because other ranks wait for this rank
_AUTO = "identity: 'auto' does not suffice"

# Variables that change the order or the form of rows, but not their size. Sources: memory_pool.py
# :: MHATokenToKVPool, deepseek_v4_memory_pool.py :: select_dsv4_kv_layout, kv_cache_configurator.py
_ROW_FORMS = (
    "SGLANG_AITER_KV_CACHE_LAYOUT",
    "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
    "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
    "SGLANG_DSV4_KV_LAYOUT",
    "SGLANG_DSV4_UNIFIED_KV_FP8",
    "SGLANG_USE_HND_KVCACHE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Facts about a server at the time when a store is attached.

    weights: name of the target's weights, for `Identity`.
    draft_weights: name of the draft's weights, for `Identity`; "" without speculation.
    unreadable: why this host cannot name the weights, which makes all pages misses; "" if it can.
    weight_version: result of `weight_version` when the store is attached.
    page_size: tokens of a page.
    fp8: dtype of the target's fp8 numbers, which SGLang keeps in pools of bytes.
    draft_fp8: dtype of the draft's fp8 numbers.
    row_form: environment variables that change the form of rows, with their values; "" if none
        does.
    pp_partition: number of layers of each pipeline stage, if the environment states it; else ().
    opaque_rows: text that changes with the form of rows that hicachectl does not interpret.
    """

    weights: str
    draft_weights: str = ""
    unreadable: str = ""
    weight_version: str = ""
    page_size: int = 1
    fp8: str = "float8_e4m3fn"
    draft_fp8: str = "float8_e4m3fn"
    row_form: str = ""
    pp_partition: tuple[int, ...] = ()
    opaque_rows: str = "uint8"


def read_context(settings: Settings) -> Context:
    """Return the context of this process's server. Read the files of the weights if needed.

    Raises ValueError for a server that cannot be served; the reasons are equal on all its ranks.
    """
    from sglang.srt import runtime_context as runtime

    model, spec, memory = runtime.get_model(), runtime.get_spec(), runtime.get_memory()
    if memory.hicache_host_memory_mode == "buffer_only":
        raise ValueError(
            "hicache_host_memory_mode: 'buffer_only' is not supported, as SGLang then assumes that "
            "pages exist without asking the store; start with --hicache-host-memory-mode cache"
        )
    bags = model, spec, runtime.get_exec().moe
    loading = {name: _leaf(bags, name) for name in SETTINGS}
    weights = _Weights(settings.identity, loading, model.download_dir)
    names = [weights.name("model_path", model.model_path, model.revision, draft=False)]
    adapter = _adapter(spec, runtime.get_lora())
    if adapter and settings.identity == "auto":
        raise ValueError(f"{_AUTO}: {adapter}")
    if spec.speculative_algorithm not in (None, "NGRAM"):  # NGRAM drafts without a model
        path = spec.speculative_draft_model_path or model.model_path
        revision = spec.speculative_draft_model_revision or model.revision
        names.append(weights.name("speculative_draft_model_path", path, revision, draft=True))
    dtype = model.kv_cache_dtype
    return Context(
        weights=names[0],
        draft_weights=names[1] if len(names) > 1 else "",
        unreadable=weights.unreadable,
        weight_version=weight_version(),
        page_size=runtime.get_schedule().page_size,
        fp8=_fp8(dtype),
        draft_fp8=_fp8(spec.speculative_draft_kv_cache_dtype or dtype),
        row_form=_row_form(),
        pp_partition=_pp_partition(),
        opaque_rows="+".join(["uint8", str(dtype), *_kernels(runtime)]),
    )


def weight_version() -> str:
    """Return a text that changes when other weights are loaded.

    The text has SGLang's weight version (scheduler.py :: record_weight_version_change) and the
    number of updates from files (model_runner.py :: update_model_fields). Any other update that
    keeps the version leaves the text unchanged.
    """
    from sglang.srt.runtime_context import get_context

    files = sum("model_path" in fields for _, fields in get_context().overrides_log())
    return f"{_version()}, update {files} from files" if files else _version()


def _version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


class _Weights:
    """Names of the weights that a server loaded.

    identity: see `Settings`.
    loading: values of `formats.models.loading.SETTINGS`.
    cache: directory of the Hugging Face cache; None for the default.
    unreadable: the first reason why this host cannot name a model's weights; "" if it can.
    """

    def __init__(self, identity: str, loading: Mapping[str, Any], cache: str | None) -> None:
        self._identity = identity
        self._loading = loading
        self._cache = cache
        # A checkpoint is read only once, even if the target's checkpoint also holds the draft.
        self._read: dict[tuple[str, str | None], Checkpoint] = {}
        self.unreadable = ""

    def name(self, field: str, path: str, revision: str | None, *, draft: bool) -> str:
        """Return the name of a model's weights; "" if unreadable. Raises ValueError."""
        if self._identity != "auto":
            return _updated(self._identity)
        # The settings are checked before any file is read, so that all ranks refuse alike.
        try:
            loaded_weights(Checkpoint("", {}), self._loading, draft=draft)
        except ProfileError as error:
            raise ValueError(f"{_AUTO}: {error}") from None
        if "://" in path or path.lower().endswith(".gguf"):
            raise ValueError(
                f"{_AUTO}: {field}: {without_secrets(path)} is not a directory of safetensors "
                f"files; {NAME_WEIGHTS}"
            )
        try:
            if (path, revision) not in self._read:
                self._read[path, revision] = self._checkpoint(path, revision)
            return _updated(loaded_weights(self._read[path, revision], self._loading, draft=draft))
        # Any error is caught, because the other ranks would wait for a rank that raised alone.
        except Exception as error:
            self.unreadable = self.unreadable or f"{_AUTO}: {reason_of(error)}"
            return ""

    def _checkpoint(self, path: str, revision: str | None) -> Checkpoint:
        """Read a model directory, or the Hub's snapshot of a model. Raises HicacheError."""
        workers = Workers(1, "weights")  # in a thread, because a file system may hang
        work = [(path, revision, self._cache)]
        try:
            (found,) = workers.map(Call(_LONGEST_READ_S), _read, work)
        finally:
            workers.close()
        if found is None:
            raise FormatError(
                f"{path}: was not read within {_LONGEST_READ_S:.0f} s; {NAME_WEIGHTS}"
            )
        return found


def _adapter(spec: Any, lora: Any) -> str:
    """Return the setting by which adapters change KV values, with the next step, or "".

    The page hashes of an adapter depend on the adapter's name and path (lora_registry.py ::
    deterministic_id). So the hashes stay the same when the adapter is trained again. A server with
    this setting can also load adapters later.
    """
    if spec.speculative_algorithm == "UNO":
        return f"speculative_algorithm: 'UNO': the draft's weights are an adapter; {NAME_WEIGHTS}"
    if lora.enable_lora or (lora.enable_lora is None and lora.lora_paths):
        return (
            "enable_lora: True: keys name adapters, but not the adapters' weights, so the name of "
            f"the weights must change with every adapter; {NAME_WEIGHTS}"
        )
    return ""


def _read(path: str, revision: str | None, cache: str | None) -> Checkpoint:
    """Read a model directory, or the files from which SGLang loaded a model of the Hub.

    Source: model_loader/weight_utils.py :: download_weights_from_hf. Raises FormatError.
    """
    directory = Path(path)
    found = directory if directory.exists() else hub_snapshot(path, revision, cache)
    if found is None:
        raise FormatError(
            f"{path}: neither a directory nor in this host's Hugging Face cache; {NAME_WEIGHTS}"
        )
    return read_checkpoint(found)


def _updated(name: str) -> str:
    """Return a name of weights. If online updates gave the weights a version, add the version."""
    from sglang.srt.runtime_context import get_context

    if not any("weight_version" in fields for _, fields in get_context().overrides_log()):
        return name
    return served_weights(name, weight_version=_version())


def _leaf(bags: tuple[Any, ...], name: str) -> Any:
    """Return a setting from the namespace that has it; None if no namespace has it."""
    return next((value for bag in bags if (value := getattr(bag, name, None)) is not None), None)


def _fp8(dtype: str) -> str:
    """Return the dtype of fp8 KV (mem_cache/kv_cache_dtype.py :: configure_kv_cache_dtype)."""
    import torch

    if torch.version.hip is not None:
        from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype

        return str(fp8_dtype).removeprefix("torch.")
    stated = stated_kv_dtype(dtype) or ""
    return stated if stated.startswith("float8") else "float8_e4m3fn"


def _pp_partition() -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage, if the environment states it; else ().

    Source: distributed/utils.py :: get_pp_indices.
    """
    stated = os.environ.get("SGLANG_PP_LAYER_PARTITION")
    try:
        return tuple(map(int, stated.split(","))) if stated else ()
    # With an invalid value, SGLang starts no server with stages. So this server has no stages.
    except ValueError:
        return ()


def _row_form() -> str:
    from sglang.srt.environ import envs

    known = [getattr(envs, name) for name in _ROW_FORMS if hasattr(envs, name)]
    changed = [field for field in known if field.get() != field.default]
    return "+".join(f"{field.name}={field.get()}" for field in changed)


def _kernels(runtime: Any) -> tuple[str, ...]:
    """Return attention backend and GPU capability, by which DeepSeek-V4 chooses its rows.

    Source: select_dsv4_kv_layout.
    """
    import torch

    device = torch.cuda.get_device_capability() if torch.cuda.is_available() else ()
    backend = getattr(runtime.get_exec().kernel, "dsv4_attn_backend", None)
    return str(backend), ".".join(map(str, device))
