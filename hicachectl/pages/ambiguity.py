"""Describe keys with several readings, and the decisions about them.

objects: [affixes + 1] number of objects by affix, from `pages.tally`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicachectl.formats.objects import Coordinate
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.inventory import IntArray


def ambiguous_affixes(table: AffixTable, objects: IntArray) -> dict[int, str]:
    """Return the number and the readings of ambiguous keys as text, by affix id."""
    found = {}
    for affix, resolved in enumerate(table.resolved):
        if resolved.ambiguous and objects[affix]:
            meanings = " or ".join(map(_words, resolved.readings))
            noun = "key" if objects[affix] == 1 else "keys"
            form = "<hash>".join(table.affixes[affix])
            found[affix] = f"{objects[affix]} {noun} {form} can be {meanings}"
    return found


def ambiguity_remark(table: AffixTable, objects: IntArray) -> str:
    """Return one line about the ambiguous keys and the remedy; "" without any."""
    found = list(ambiguous_affixes(table, objects).values())
    if not found:
        return ""
    more = f" (and {len(found) - 1} more forms)" if len(found) > 1 else ""
    return f"{found[0]}{more}; {remedy(table)}"


def split_remarks(table: AffixTable, objects: IntArray) -> list[str]:
    """Return lines about keys that two models share, with the number of each model."""
    said: dict[str, list[str]] = {}
    for affix, is_split in enumerate(table.split):
        coordinate = table.resolved[affix].coordinate
        if is_split and coordinate is not None and objects[affix]:
            said.setdefault("<hash>".join(table.affixes[affix]), []).append(
                f"{objects[affix]} are {_words(coordinate)}"
            )
    return [
        f"{example}: {', '.join(parts)}; pages and sizes distinguish them"
        for example, parts in said.items()
        if len(parts) > 1
    ]


def remedy(table: AffixTable) -> str:
    """Return the next step for ambiguous keys."""
    profile = table.profile
    if profile is None or profile.inferred:
        return "give --profile to decide"
    return (
        "the profile, the pages and the sizes do not decide; remove the keys with "
        "hicachectl rm STORE --state unknown"
    )


def _words(reading: Coordinate) -> str:
    return f"{reading.pool} of model {reading.model!r} {reading.shard.ranks_text()}".rstrip()
