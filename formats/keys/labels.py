"""Labels of deployments, which are the same with and without a profile.

A label is the tag and model as in the keys, then the sizes that the keys state, such as
`Qwen-Qwen3-32B tp4 pp2`. It omits two facts that only a profile states. One is the TP size of
Mooncake pages. The other is where the tag (Mooncake's `extra_backend_tag`) ends and the model
begins. Documents have labels. Texts for
people have `label_text`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import AXES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.formats.keys.base import Affix, Grammar
    from hicachectl.formats.objects import Coordinate, Names, Shard

AMBIGUOUS = "?"  # label of objects with ambiguous keys
_NAMELESS = "-"  # label of keys without tag and model

# Text that is escaped in names, because white space would end a name, and ? or - alone would be a
# label.
_RESERVED = re.compile(rf"[%\s\x00-\x1f]|^[{AMBIGUOUS}{_NAMELESS}]$")
_SIZE = re.compile(r"^([a-z]+)(?=[0-9]+$)")
_SIZES = (*AXES, "page")


def group_label(grammar: Grammar, names: Names, affixes: Iterable[Affix]) -> str:
    """Return a group's label from the affixes of its objects.

    Mamba keys can state a TP size that anchor keys lack, so keys of other pools take precedence.
    affixes: affixes of one deployment.
    """
    of_states = ""
    for affix in affixes:
        reading = _reading(grammar, names.text, affix)
        if reading is not None:
            label = " ".join([_spelled(names.text), *_sizes(reading.shard)])
            if not pool_name(reading.pool).states:
                return label
            of_states = of_states or label
    return of_states or AMBIGUOUS


def label_text(label: str) -> str:
    """Return a label for people, with sizes as in messages, such as `Qwen-Qwen3-32B tp 4 pp 2`."""
    name, *sizes = label.split(" ")
    return " ".join([name, *(_SIZE.sub(r"\1 ", size) for size in sizes)])


def label_name(label: str) -> str:
    """Return the tag and model in a label; "" for a label that states none."""
    name = label.partition(" ")[0]
    return "" if name in (AMBIGUOUS, _NAMELESS) else name


def label_sizes(label: str) -> dict[str, int]:
    """Return the sizes in a label by axis, such as {"tp": 2, "pp": 2}."""
    sizes = [_SIZE.match(word) for word in label.split(" ")[1:]]
    return {found[1]: int(found.string[found.end() :]) for found in sizes if found}


def _reading(grammar: Grammar, name: str, affix: Affix) -> Coordinate | None:
    """Return the first reading of an affix with this name; None if no reading has the name.

    All readings with the name have the same sizes.
    """
    readings = grammar.readings(*affix)
    return next((r for r in readings if r.names.text == name), None)


def _sizes(shard: Shard) -> list[str]:
    named = zip(_SIZES, shard.sizes, strict=True)
    return [f"{name}{size}" for name, size in named if size is not None]


def _spelled(name: str) -> str:
    def percent(match: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in match[0].encode())

    return _RESERVED.sub(percent, name) or _NAMELESS
