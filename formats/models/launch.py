"""Resolve the command line of an SGLang server as far as SGLang does without model and GPU.

Source: SGLang srt/server_args.py :: ServerArgs.add_cli_args; srt/arg_groups/.
"""

from __future__ import annotations

import json
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import ProfileError, UsageError
from hicachectl.formats.models.flag_table import OPTIONS
from hicachectl.formats.models.flags import normalised_layout, refused_flags
from hicachectl.formats.models.recorded import recorded
from hicachectl.formats.models.server_info import ServerDeployment, read_deployment
from hicachectl.formats.releases import NEWEST_SGLANG

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

SOURCE = "launch command"
WAYS_OUT = (
    "give pid:N of the running server, the command as bash -x prints it, or --server URL instead"
)
_NUMBERS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(
        ("attn_cp_size", "attn_dp_size", "dcp_size", "dp_size", "page_size", "pp_size",
         "speculative_num_steps", "tp_size"),
        int,
    ),
    "disaggregation_decode_host_receive_threshold": float,
}  # fmt: skip
_FA4_PAGE_SIZE = 128  # overrides.py :: _fa4_page_constraint
# Flags that can change pages in ways that a profile of the model's config does not show.
_UNREAD = (
    "c128_page_size", "enable_page_major_kv_layout", "model_config_parser", "model_impl",
    "radix_cache_backend",
)  # fmt: skip
_ROLES = ("attention_backend", "decode_attention_backend", "prefill_attention_backend",
          "speculative_draft_attention_backend")  # fmt: skip
# A row has an attention backend, the number of _ROLES (from the first on) that count for it, and
# the page sizes that it takes. SGLang replaces other page sizes by 64 (overrides.py ::
# _mla_backend_page_constraints).
_PAGES_OF_BACKENDS = (
    ("flashmla", 2, (64,)),
    ("trtllm_mla", 2, (32, 64)),
    ("cutedsl_mla", 3, (32, 64)),
    ("trtllm_mha", 4, (16, 32, 64, 128)),
    ("hpc_ops", 3, (64,)),
)


@cache
def server_parser() -> argparse.ArgumentParser:
    """Return a parser of SGLang's flags. Values are texts, or booleans for switches.

    Flags that are not given are absent from its result.

    The parser takes the same abbreviations as SGLang's parser, such as `--tp` for `--tp-size`.
    """
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(message.removeprefix("argument "))

    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for flag in recorded().flags:
        if flag.values != 0:
            parser.add_argument(*flag.names, nargs=flag.values)
        elif any(name.startswith("--no-") for name in flag.names):
            parser.add_argument(flag.names[0], action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(*flag.names, action="store_true")
    return parser


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ServerArgs that arguments state, as texts or, for switches, booleans.

    Raises UsageError for flags that SGLang lacks, and for words that belong to no flag. If SGLang
    has a flag of similar name, the message names that flag.
    """
    found, others = server_parser().parse_known_args(list(arguments))
    if others:
        raise UsageError("; ".join(_unknown(word) for word in others if word.startswith("-"))
                         or f"{others[0]!r:.80} belongs to no flag; leave it out")  # fmt: skip
    return vars(found)


def _unknown(word: str) -> str:
    flag = word.split("=", 1)[0]
    known = [name for flag in recorded().flags for name in flag.names]
    near = get_close_matches(flag.replace("_", "-"), known, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out if another release has it"
    named = f"{flag:.80}" if flag.isascii() and flag.isprintable() else f"{flag!r:.80}"
    return f"SGLang {NEWEST_SGLANG} has no flag {named}; {hint}"


def config_arguments(document: Mapping[str, Any], source: str) -> list[str]:
    """Return the arguments that a file of SGLang's --config stands for.

    source: names the file in messages.
    Raises UsageError for a flag that such a file cannot have.
    Source: SGLang srt/utils/server_args_config_parser.py :: ConfigArgumentMerger.
    """
    arguments: list[str] = []
    names = {flag: {name.removeprefix("--") for name in flag.names} for flag in recorded().flags}
    switches = {x for flag, spelt in names.items() if flag.values == 0 for x in spelt}
    refused = {x for flag, spelt in names.items() if not flag.in_config for x in spelt}
    for key, value in document.items():
        name = str(key).replace("_", "-")
        if name in refused:
            raise UsageError(
                f"{source}: {key}: SGLang does not take this flag from a config file; give it in "
                "the command"
            )
        if isinstance(value, bool) and name in switches:
            arguments += [f"--{key}"] if value else []
        elif isinstance(value, bool):
            arguments += [f"--{key}", str(value).lower()]
        elif isinstance(value, list):
            arguments += [f"--{key}", *map(str, value)] if value else []
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"--{key}", text]
    return arguments


def launched_deployment(
    stated: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    unknown: Mapping[str, str],
    version: str = "",
) -> ServerDeployment:
    """Return the deployment of a server with these arguments.

    stated: fields of ServerArgs, which `parse_arguments` returns.
    environment: the server's environment.
    unknown: parts of values that the command does not tell, with the reason for each part.
    version: SGLang's version; "" for the newest known release.

    Raises ProfileError, which names the flag at fault, also for flags with which a server has no L3
    cache.
    """
    values = _Values({**stated, "env_vars": _Values(environment, unknown)}, unknown)
    values.update(_numbers(values))
    if refused := refused_flags(values):
        raise ProfileError(
            f"{SOURCE}: {flag_of(refused.name)}: {refused.why}; leave it out, or give another "
            "server's command"
        )
    if values.get("attn_dp_size") == 1:  # handle_deprecated_dp_attention ignores this value
        del values["attn_dp_size"]
    values["page_size"] = _page_size_of_backends(values)
    if float(values.get("disaggregation_decode_host_receive_threshold", 1)) < 1:
        values["hicache_mem_layout"] = "layer_first"
    found = read_deployment(values, SOURCE, version=version or NEWEST_SGLANG, launched=True)
    flags = found.flags
    if values.get("enable_unified_memory") and normalised_layout(flags) == "page_first_direct":
        # resolve_unified_memory_layout_io
        flags = replace(flags, layout="page_first", io_backend="kernel")
    return replace(found, flags=flags, notes=(*found.notes, *_notes(values)))


def logged_deployment(
    fields: Mapping[str, Any], *, unknown: Mapping[str, str], version: str = ""
) -> ServerDeployment:
    """Return the deployment of a server whose log shows these fields of ServerArgs.

    unknown, version: see `launched_deployment`.
    Raises ProfileError, which names the field at fault.
    """
    values = _Values(fields, unknown)
    found = read_deployment(values, "server_args", version=version or NEWEST_SGLANG)
    told = (
        f"a log does not name SGLang's release; {NEWEST_SGLANG} is taken; give --sglang for another"
    )
    return found if version else replace(found, notes=(*found.notes, told))


class _Values(dict[str, Any]):
    """Fields of ServerArgs, or an environment. `get` raises ProfileError for an unknown value.

    Only `get` checks this. Code that needs a value must not use `values[name]`.
    """

    def __init__(self, values: Mapping[str, Any], unknown: Mapping[str, str]) -> None:
        super().__init__(values)
        self._unknown = unknown

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value. Raises ProfileError if a part of its text is unknown."""
        value = super().get(name, default)
        for part, why in self._unknown.items() if isinstance(value, str) else ():
            if part in value:
                options = (flag.parameter for flag in OPTIONS if flag.argument == name)
                give = "".join(f" give {flag_of(option)}," for option in options)
                raise ProfileError(
                    f"{SOURCE}: {flag_of(name)}: {part:.80} is unknown ({why}); write its value in "
                    f"its place,{give} or {WAYS_OUT}"
                )
        return value


def flag_of(name: str) -> str:
    """Return the flag of a field of ServerArgs. Return a variable of the environment unchanged."""
    return name if name.isupper() else "--" + name.replace("_", "-")


def _numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for name, kind in _NUMBERS.items():
        value = values.get(name)
        if value is not None:
            try:
                found[name] = kind(value)
            except ValueError:
                raise ProfileError(
                    f"{SOURCE}: {flag_of(name)}: expected a number, found {shown(value)}"
                ) from None
    return found


def _page_size_of_backends(values: Mapping[str, Any]) -> int | None:
    """Return --page-size after the overrides of the attention backends that the command names.

    Returns None if the command neither states --page-size nor names a backend that overrides it.
    """
    page_size: int | None = values.get("page_size")
    for backend, roles, sizes in _PAGES_OF_BACKENDS:
        named = any(values.get(role) == backend for role in _ROLES[:roles])
        if named and page_size not in sizes:
            page_size = 64
    return page_size


def _notes(values: Mapping[str, Any]) -> Iterator[str]:
    for name in _UNREAD:
        if values.get(name):
            yield f"{flag_of(name)} can change pages, and is not read; check the profile"
    if str(values.get("device", "cuda")).split(":", 1)[0] != "cuda":
        yield "--device: the rules of CUDA are applied, and other devices have other rules"
    page_size = values.get("page_size")
    if "fa4" in [values.get(role) for role in _ROLES[:3]] and page_size != _FA4_PAGE_SIZE:
        yield (
            f"fa4 takes pages of {_FA4_PAGE_SIZE} tokens on Blackwell, except for MLA models; if "
            f"the servers have such GPUs, give --page-size {_FA4_PAGE_SIZE}"
        )
