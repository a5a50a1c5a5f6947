"""Read the facts about SGLang's models and flags in `sglang-RELEASE.json` beside this module.

`python -m tests.conformance.record_sglang` writes this file for an installed release.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from hicachectl.formats.releases import NEWEST_SGLANG


class Architecture(msgspec.Struct, frozen=True):
    """A model class that SGLang registers.

    family: key of `FAMILIES` or `REFUSALS` in `architectures`.
    stages: "divided" if each pipeline stage has the pools of its own layers. "undivided" if each
        stage has pools of all layers. Empty if SGLang refuses several stages.
    keeps_quant: whether the model keeps its quantisation, which decides the dtype of KV with
        --kv-cache-dtype auto.
    dsa: whether a config with index_topk has DeepSeek Sparse Attention.
    filled: fields that the config's class fills with its own number if the config lacks them.
    draft: new name of this architecture, if SGLang renames it for a draft; else empty.
    nextn: number of MTP layers that SGLang then writes into the draft's config; None if it keeps
        the config's number.
    unverified: whether the model was compared with SGLang only by a config written by hand.
    """

    family: str
    stages: Literal["", "divided", "undivided"] = ""
    keeps_quant: bool = False
    dsa: bool = False
    filled: tuple[str, ...] = ()
    draft: str = ""
    nextn: int | None = None
    unverified: bool = False


class ServerFlag(msgspec.Struct, frozen=True, array_like=True):
    """A flag of `sglang.launch_server`.

    names: spellings of the flag.
    values: number of values of the flag, as argparse counts them.
    in_config: whether a file of --config can have the flag.
    """

    names: tuple[str, ...]
    values: Any
    in_config: bool


class Recorded(msgspec.Struct, frozen=True):
    """The contents of a release's file.

    read_again: model types that SGLang reads again with its own config class. SGLang then does not
        see a quantisation that only the language model's section states.
    """

    architectures: dict[str, Architecture]
    flags: tuple[ServerFlag, ...]
    read_again: frozenset[str]


@cache
def recorded() -> Recorded:
    """Return the facts about the newest release."""
    file = files(__package__).joinpath(f"sglang-{NEWEST_SGLANG}.json")
    return msgspec.json.decode(file.read_bytes(), type=Recorded)


def architecture(name: str) -> Architecture:
    """Return the facts about an architecture; defaults if SGLang does not register its name."""
    return recorded().architectures.get(name, _UNKNOWN)


_UNKNOWN = Architecture("", keeps_quant=True)
