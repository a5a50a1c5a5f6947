"""The profile that a command works with: from its options, in design's order of sources."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.profile import Profile, parse_profile

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.formats.model_config import DeploymentFlags

# Options that describe a deployment, to the fields of DeploymentFlags.
_FLAG_OPTIONS = {
    "served_model_name": "model",
    **{
        name: name
        for name in (
            "page_size",
            "kv_cache_dtype",
            "layout",
            "tp",
            "dp",
            "enable_dp_attention",
            "pp",
            "cp",
            "enable_dsa_cache_layer_split",
            "dcp",
            "tp_lcm_size",
            "tag",
            "speculative_algorithm",
        )
    },
}
_MAX_TEXT_BYTES = 16 << 20  # a config.json or profile is kilobytes


def profile_from_options(options: Mapping[str, Any], store: Store | None = None) -> Profile | None:
    """The profile that the profile options ask for; None when none of them was given.

    store: asked for its model name where nothing else gives one. Raises UsageError on options
    that contradict one another, ProfileError and StoreUnavailable from the source.
    """
    given = {n for n in (*_FLAG_OPTIONS, "pp_partition", "draft_model_config") if options.get(n)}
    sources = [n for n in ("profile_file", "model_config", "server") if options.get(n)]
    if options.get("profile_file"):
        if len(sources) > 1 or given:
            other = sorted({*sources, *given} - {"profile_file"})[0].replace("_", "-")
            raise UsageError(f"--profile says everything; leave out --{other}")
        path = options["profile_file"]
        return parse_profile(_read_text(path), source=str(path))
    if not sources:
        if given:
            name = sorted(given)[0].replace("_", "-")
            raise UsageError(f"--{name} needs --model-config or --server")
        return None
    flags = _flags(options)
    return _build(options, flags, store)


def _flags(options: Mapping[str, Any]) -> dict[str, Any]:
    flags = {
        field: options[option] for option, field in _FLAG_OPTIONS.items() if options.get(option)
    }
    if options.get("pp_partition"):
        try:
            flags["pp_partition"] = tuple(int(n) for n in options["pp_partition"].split(","))
        except ValueError:
            raise UsageError(
                f"--pp-partition {options['pp_partition']!r}: write layers a stage, as in 30,31"
            ) from None
        flags.setdefault("pp", len(flags["pp_partition"]))
    if options.get("draft_model_config"):
        flags["draft_model_config"] = read_json(options["draft_model_config"])
    return flags


def _build(options: Mapping[str, Any], given: dict[str, Any], store: Store | None) -> Profile:
    from hicachectl.formats.model_config import DeploymentFlags, profile_from_config

    if options.get("server"):
        return _from_server(options, given)
    config = read_json(options["model_config"])
    if "model" not in given:
        given["model"] = config.get("_name_or_path") or _only_model(store)
    if store is not None:
        given.setdefault("storage_backend", store.scheme)
    return profile_from_config(config, DeploymentFlags(**given))


def _from_server(options: Mapping[str, Any], given: dict[str, Any]) -> Profile:
    from hicachectl.formats.model_config import profile_from_config
    from hicachectl.formats.server_info import flags_from_server_info, layout_contradictions
    from hicachectl.server import fetch_server

    replies = fetch_server(options["server"])
    flags, model_path = flags_from_server_info(replies.server_info)
    flags = replace(flags, **given)
    if options.get("model_config"):
        config = read_json(options["model_config"])
    else:
        config = _config_beside(model_path)
    profile = profile_from_config(config, flags)
    for problem in layout_contradictions(profile, replies.layout):
        print(f"hicachectl: {options['server']}: {problem}", file=sys.stderr)
    return profile


def _config_beside(model_path: str) -> Mapping[str, Any]:
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise UsageError(
            f"the server's model_path {model_path!r} is not readable here; add --model-config"
        )
    return read_json(path)


def _only_model(store: Store | None) -> str:
    """The model that the first keys of a store name, when it is one."""
    from hicachectl.deployments import assign_affixes
    from hicachectl.formats.keys.base import codec_for
    from hicachectl.formats.keys.table import KeySplitter

    models: set[str] = set()
    if store is not None:
        splitter = KeySplitter()
        for batch in islice(store.scan(("key",)), 4):
            splitter.split(batch.column("key"))
        table = assign_affixes(splitter.affixes, codec_for(store.scheme), None)
        models = {deployment.model for deployment in table.deployments}
    if len(models) != 1:
        seen = f"; the store has {', '.join(sorted(models))}" if models else ""
        raise UsageError(f"name the model as served: --served-model-name NAME{seen}")
    return models.pop()


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file. Raises FormatError naming the file."""
    try:
        document = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return document


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MAX_TEXT_BYTES:
        raise FormatError(f"{path}: larger than {_MAX_TEXT_BYTES} bytes, not a profile or config")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text") from error
