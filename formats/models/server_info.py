"""Read an SGLang server's flags.

Source: SGLang srt/entrypoints/http_server.py :: server_info (`/server_info`); srt/server_args.py ::
ServerArgs.resolved_dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from hicachectl.formats.documents import parse_json, shown, storable
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.models.dtypes import stated_kv_dtype
from hicachectl.formats.models.flag_table import FLAGS
from hicachectl.formats.models.flags import (
    DeploymentFlags,
    attention_tp,
    normalised_layout,
    stage_layers,
)
from hicachectl.formats.models.loading import SETTINGS
from hicachectl.formats.profile import PREFETCH_THRESHOLD, Profile
from hicachectl.formats.releases import NEWEST_SGLANG
from hicachectl.formats.transfer import retargeted
from hicachectl.formats.wording import WRITE_PROFILE

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.models.flag_table import Flag

_SOURCE = "server_info"
_USUAL = DeploymentFlags()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDeployment:
    """A server's flags and model paths.

    model_path: path on the server's machine, or Hub name.
    draft_model_path: path or Hub name of the draft model; "" without a separate draft model.
    settings: settings that change the loaded weights (`formats.models.loading.SETTINGS`).
    tagged: whether the server writes to Mooncake through our storage plug-in, so that its keys have
        the tag `identity.profile_tag`.
    notes: messages about facts that are missing or that users should check.
    """

    flags: DeploymentFlags
    model_path: str
    settings: Mapping[str, Any]
    draft_model_path: str = ""
    tagged: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Arguments:
    """A server's arguments.

    source: names the arguments in messages.
    """

    values: Mapping[str, Any]
    source: str

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ProfileError(
                f"{self.source}: {name}: expected text, found {type(value).__name__}; "
                f"{WRITE_PROFILE}"
            )
        return storable(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int:
            raise ProfileError(
                f"{self.source}: {name}: "
                + ("missing" if value is None else f"expected a whole number, found {shown(value)}")
                + f"; {WRITE_PROFILE}"
            )
        return value

    def flag(self, name: str) -> bool:
        return self.values.get(name) is True


def flags_from_server_info(reply: Mapping[str, Any]) -> ServerDeployment:
    """Read a `/server_info` reply. Raises ProfileError, which names the field at fault."""
    if not isinstance(reply, Mapping):
        raise ProfileError(
            f"{_SOURCE}: expected a JSON object, found {type(reply).__name__}; check that the URL "
            "is that of an SGLang server"
        )
    if not reply.get("model_path"):
        raise ProfileError(
            f"{_SOURCE}: has no model_path, so it is not an SGLang server's answer, but perhaps a "
            "router's; give the URL of a worker"
        )
    states = reply.get("internal_states")
    scheduler = states[0] if isinstance(states, list) and states else {}
    # The scheduler's current values override the arguments.
    values = {**reply, **(scheduler if isinstance(scheduler, Mapping) else {})}
    return read_deployment(values, _SOURCE, version=str(reply.get("version") or NEWEST_SGLANG))


def read_deployment(
    values: Mapping[str, Any], source: str, *, version: str, launched: bool = False
) -> ServerDeployment:
    """Read the fields of a server's ServerArgs; `env_vars` has its environment.

    source: names the values in messages.
    launched: whether the values are arguments of a launch command, some of which SGLang will
        override.
    Raises ProfileError, which names the field at fault.
    """
    arguments = _Arguments(values, source)
    if arguments.flag("enable_hisparse"):
        raise ProfileError(f"{source}: enable_hisparse: not supported; {WRITE_PROFILE}")
    model_path = arguments.text("model_path")
    if not model_path:
        raise ProfileError(f"{source}: model_path: missing; give the whole command")
    draft_path = arguments.text("speculative_draft_model_path")
    return ServerDeployment(
        flags=_flags(arguments, model_path, version, launched=launched),
        model_path=model_path,
        draft_model_path="" if draft_path == model_path else draft_path,
        settings={name: values.get(name) for name in SETTINGS},
        tagged=_is_tagged(arguments),
        notes=_notes(arguments),
    )


def served_profile(profile: Profile, reply: Mapping[str, Any]) -> Profile:
    """Return a profile with the fields that a server's reply states, such as names and TP size.

    profile: profile of the same model.
    reply: `/server_info` reply.
    If the reply lacks model_path, tp_size or page_size, all fields stay unchanged. Otherwise, a
    model name or parallel size that the reply lacks gets SGLang's default, and other fields that
    the reply lacks stay unchanged.
    Raises ProfileError, which names the field at fault.
    """
    if any(reply.get(name) is None for name in ("model_path", "tp_size", "page_size")):
        return profile
    flags = flags_from_server_info(reply).flags
    changes: dict[str, Any] = {
        "model": flags.model if flags.model != profile.key_model else None,
        "tp": attention_tp(flags),
        "pp": flags.pp,
        "pp_partition": flags.pp_partition or None,
        "layout": normalised_layout(flags) if flags.layout else None,
    }
    extra = reply.get("hicache_storage_backend_extra_config")
    if flags.storage_backend == "mooncake" and not str(extra).startswith("@"):
        changes["tag"] = flags.tag
    served = retargeted(profile, **changes)
    unknown = "hicache_storage_backend_extra_config" not in reply or str(extra).startswith("@")
    return replace(
        served,
        prefetch_threshold=served.prefetch_threshold if unknown else flags.prefetch_threshold,
        page_size=(flags.page_size or 0) * flags.dcp,
        cp=flags.cp,
        dcp=flags.dcp,
        pools=(_of_dtype(profile.pools[0], flags.kv_cache_dtype), *profile.pools[1:]),
    )


def _of_dtype(pool: Pool, kv_cache_dtype: str) -> Pool:
    """Return the kv pool with a server's dtype; the same pool for auto."""
    stated = stated_kv_dtype(kv_cache_dtype)
    return pool if stated is None else kind_of(pool).with_cache_dtype(pool, stated)


def _flags(
    arguments: _Arguments, model_path: str, version: str, *, launched: bool
) -> DeploymentFlags:
    # If attn_dp_size (attention DP size) is stated, dp_size counts replicas, which share keys, and
    # enable_dp_attention is redundant.
    attn_dp = arguments.count("attn_dp_size", 0)
    dp = attn_dp or arguments.count("dp_size", 1)
    extra = extra_config(arguments.values, arguments.source)
    environment = _environment(arguments)
    partition = "SGLANG_PP_LAYER_PARTITION"
    lcm = extra.get("tp_lcm_size")
    threshold = extra.get("prefetch_threshold", PREFETCH_THRESHOLD)
    return DeploymentFlags(
        model=arguments.text("served_model_name", model_path),
        page_size=(arguments.count("page_size", 0) or None)
        if launched
        else arguments.count("page_size"),
        tp=arguments.count("tp_size", 1 if launched else None),
        dp=dp,
        enable_dp_attention=attn_dp > 1 or (not attn_dp and arguments.flag("enable_dp_attention")),
        pp_partition=stage_layers(environment.text(partition), f"{arguments.source}: {partition}"),
        tp_lcm_size=lcm if type(lcm) is int else 0,
        tag=storable(str(extra.get("extra_backend_tag") or "")),
        prefetch_threshold=max(threshold, 0) if type(threshold) is int else PREFETCH_THRESHOLD,
        mamba_ssm_dtype=environment.text("SGLANG_MAMBA_SSM_DTYPE")
        or arguments.text("mamba_ssm_dtype"),
        indexer_dtype=(
            "fp4"
            if arguments.flag("enable_deepseek_v4_fp4_indexer")
            else arguments.text("qsa_indexer_dtype")
        ),
        **{
            flag.field: _stated(flag, arguments, environment)
            for flag in FLAGS
            if flag.argument and not flag.derived
        },
        sglang=version,
        resolved=not launched,
        launched=launched,
    )


def _stated(flag: Flag, arguments: _Arguments, environment: _Arguments) -> Any:
    """Return the value that a server states for a flag, or its default."""
    source = environment if flag.argument.isupper() else arguments
    usual = getattr(_USUAL, flag.field)
    if flag.kind == "switch":
        return source.flag(flag.argument)
    if flag.kind == "count":
        return source.count(flag.argument, usual)
    return source.text(flag.argument) or usual


def extra_config(values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the parsed --hicache-storage-backend-extra-config; {} if it names a file or is absent.

    values: a server's arguments.
    source: names the arguments in messages.
    Raises ProfileError.
    """
    stated = values.get("hicache_storage_backend_extra_config")
    if isinstance(stated, str) and not stated.startswith("@"):
        where = f"{source}: hicache_storage_backend_extra_config"
        stated = parse_json(stated or "{}", where, refusal=ProfileError)
    return stated if isinstance(stated, Mapping) else {}


def _is_tagged(arguments: _Arguments) -> bool:
    """Return whether the server has our plug-in, with Mooncake as the first of its stores."""
    extra = extra_config(arguments.values, arguments.source)
    store = extra.get("store")
    first = store[0] if isinstance(store, list) and store else store
    return is_plugin(extra) and isinstance(first, str) and first.startswith("mooncake:")


def is_plugin(extra: Mapping[str, Any]) -> bool:
    """Return whether an extra config of the backend `dynamic` loads this package's plug-in."""
    return extra.get("module_path") == "hicachectl.backends.sglang"


def _environment(arguments: _Arguments) -> _Arguments:
    """Return the server's environment; empty if the arguments have no `env_vars`.

    A live server reports its environment only under SGLANG_EXPOSE_OWN_ENV_VARS.
    """
    stated = arguments.values.get("env_vars")
    return _Arguments(stated if isinstance(stated, Mapping) else {}, arguments.source)


def _notes(arguments: _Arguments) -> tuple[str, ...]:
    notes = []
    if not arguments.flag("enable_hierarchical_cache"):
        notes.append("the server runs without --enable-hierarchical-cache")
    elif not arguments.text("hicache_storage_backend"):
        notes.append("the server was started without an L3 store")
    stated = arguments.values.get("hicache_storage_backend_extra_config")
    if isinstance(stated, str) and stated.startswith("@"):
        notes.append(
            "the server reads its store options from a file, so its tag, tp_lcm_size and "
            "prefetch_threshold are unknown; give --tag, --tp-lcm-size and --prefetch-threshold if "
            "they are set"
        )
    tells_partition = isinstance(arguments.values.get("env_vars"), Mapping)
    if not tells_partition and arguments.count("pp_size", 1) != 1:
        notes.append(
            "the server does not report SGLANG_PP_LAYER_PARTITION; give --pp-partition if it is set"
        )
    return tuple(notes)
