"""Name the deployment of a page group by what its keys show, the same with and without a profile.

A label is the tag and the model as they stand in the keys, then the sizes that the keys state:
`Qwen-Qwen3-32B tp4 pp2`. A profile knows more (the TP size of Mooncake pages, where a tag ends and
a model begins), so nothing of a label comes from one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import AXES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.formats.keys.base import Affix, KeyCodec
    from hicachectl.formats.objects import Coordinate, Shard

AMBIGUOUS = "?"  # the label of objects whose keys can be read in several ways
_NAMELESS = "-"  # of keys that show neither a tag nor a model

# What would make two deployments share a label: white space ends the name.
_RESERVED = re.compile(rf"[%\s\x00-\x1f]|^[{AMBIGUOUS}{_NAMELESS}]$")
_SIZES = (*AXES, "page")


def group_label(codec: KeyCodec, model: str, tag: str, affixes: Iterable[Affix]) -> str:
    """Return the label of a group that has objects of some affixes, all of one deployment.

    Mamba states name a TP size even beside an anchor without one, so any other object goes first.
    """
    of_states = ""
    for affix in affixes:
        reading = _reading(codec, key_name(model, tag), affix)
        if reading is not None:
            label = " ".join([_spelled(key_name(model, tag)), *_sizes(reading.shard)])
            if not pool_name(reading.pool).states:
                return label
            of_states = of_states or label
    return of_states or AMBIGUOUS


def key_name(model: str, tag: str) -> str:
    """Return a tag and a model as one text: keys do not show where the one ends."""
    return "_".join(filter(None, (tag, model)))


def _reading(codec: KeyCodec, name: str, affix: Affix) -> Coordinate | None:
    """Return the reading of an affix that has this name; its name decides its sizes."""
    readings = codec.readings(*affix)
    return next((r for r in readings if key_name(r.model, r.tag) == name), None)


def _sizes(shard: Shard) -> list[str]:
    named = zip(_SIZES, shard.sizes, strict=True)
    return [f"{name}{size}" for name, size in named if size is not None]


def _spelled(name: str) -> str:
    def percent(match: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in match[0].encode())

    return _RESERVED.sub(percent, name) or _NAMELESS
