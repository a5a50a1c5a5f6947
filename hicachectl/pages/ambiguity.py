"""Describe keys with several readings.

objects: [affixes + 1] number of objects by affix, from `pages.tally`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.objects import Coordinate
    from hicachectl.pages.deployments import AffixTable


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


def remedy(table: AffixTable) -> str:
    """Return the next step for ambiguous keys."""
    profile = table.profile
    if profile is None or profile.inferred:
        return "give --profile to decide"
    return (
        "the profile does not decide; give the profile of the servers that wrote the pages, or "
        "remove them with hicachectl rm STORE --state unknown if no server uses them"
    )


def _words(reading: Coordinate) -> str:
    return f"{reading.pool} of model {reading.names.model!r} {reading.shard.ranks_text()}".rstrip()
