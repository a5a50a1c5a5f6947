"""Put into words which keys of a store can be read in several ways, and what was decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hicachectl.formats.objects import Coordinate
    from hicachectl.pages.inventory import Inventory


def ambiguous_affixes(inventory: Inventory) -> dict[int, str]:
    """Describe the keys that stay ambiguous: by affix id, how many, and what they can be."""
    table, counts = inventory.table, _counts(inventory)
    found = {}
    for number, resolved in enumerate(table.resolved):
        if resolved.ambiguous and counts[number]:
            meanings = " or ".join(map(_words, resolved.readings))
            found[number] = f"{_keys(inventory, number, counts[number])} can be {meanings}"
    return found


def ambiguity_remark(inventory: Inventory) -> str:
    """Describe the ambiguous keys in one line, and what would tell; "" without any."""
    found = list(ambiguous_affixes(inventory).values())
    if not found:
        return ""
    more = f" (and {len(found) - 1} more forms)" if len(found) > 1 else ""
    return f"{found[0]}{more}; {remedy(inventory)}"


def split_remarks(inventory: Inventory) -> list[str]:
    """Describe the keys that two models share and that were told apart object by object."""
    table, counts = inventory.table, _counts(inventory)
    said: dict[str, list[str]] = {}
    for number, is_split in enumerate(table.split):
        coordinate = table.resolved[number].coordinate
        if is_split and coordinate is not None and counts[number]:
            said.setdefault("<hash>".join(table.affixes[number]), []).append(
                f"{counts[number]} are {_words(coordinate)}"
            )
    return [
        f"keys {example}: {', '.join(parts)}, told apart by their pages and sizes"
        for example, parts in said.items()
        if len(parts) > 1
    ]


def remedy(inventory: Inventory) -> str:
    """Say what to do about ambiguous keys."""
    profile = inventory.table.profile
    if profile is None or profile.inferred:
        return "give a profile to tell"
    return "neither the profile nor their pages and sizes tell; rm --state unknown removes them"


def _counts(inventory: Inventory) -> list[int]:
    count = len(inventory.table.affixes)
    counts: list[int] = np.bincount(inventory.affix_ids + 1, minlength=count + 1)[1:].tolist()
    return counts


def _keys(inventory: Inventory, number: int, count: int) -> str:
    noun = "key" if count == 1 else "keys"
    return f"{count} {noun} {'<hash>'.join(inventory.table.affixes[number])}"


def _words(reading: Coordinate) -> str:
    return f"{reading.pool} of model {reading.model!r} {reading.shard.ranks_text()}".rstrip()
