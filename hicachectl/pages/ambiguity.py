"""Describe keys with several readings, and the decisions about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hicachectl.formats.objects import Coordinate
    from hicachectl.pages.inventory import Inventory


def ambiguous_affixes(inventory: Inventory) -> dict[int, str]:
    """Return the number and the readings of ambiguous keys as text, by affix id."""
    table, counts = inventory.table, _counts(inventory)
    found = {}
    for number, resolved in enumerate(table.resolved):
        if resolved.ambiguous and counts[number]:
            meanings = " or ".join(map(_words, resolved.readings))
            found[number] = f"{_keys(inventory, number, counts[number])} can be {meanings}"
    return found


def ambiguity_remark(inventory: Inventory) -> str:
    """Return one line about the ambiguous keys and the remedy; "" without any."""
    found = list(ambiguous_affixes(inventory).values())
    if not found:
        return ""
    more = f" (and {len(found) - 1} more forms)" if len(found) > 1 else ""
    return f"{found[0]}{more}; {remedy(inventory)}"


def split_remarks(inventory: Inventory) -> list[str]:
    """Return lines about keys that two models share, with the number of each model."""
    table, counts = inventory.table, _counts(inventory)
    said: dict[str, list[str]] = {}
    for number, is_split in enumerate(table.split):
        coordinate = table.resolved[number].coordinate
        if is_split and coordinate is not None and counts[number]:
            said.setdefault("<hash>".join(table.affixes[number]), []).append(
                f"{counts[number]} are {_words(coordinate)}"
            )
    return [
        f"{example}: {', '.join(parts)}; pages and sizes distinguish them"
        for example, parts in said.items()
        if len(parts) > 1
    ]


def remedy(inventory: Inventory) -> str:
    """Return the next step for ambiguous keys."""
    profile = inventory.table.profile
    if profile is None or profile.inferred:
        return "give --profile to decide"
    return (
        "the profile, the pages and the sizes do not decide; remove the keys with "
        "hicachectl rm STORE --state unknown"
    )


def _counts(inventory: Inventory) -> list[int]:
    count = len(inventory.table.affixes)
    counts: list[int] = np.bincount(inventory.affix_ids + 1, minlength=count + 1)[1:].tolist()
    return counts


def _keys(inventory: Inventory, number: int, count: int) -> str:
    noun = "key" if count == 1 else "keys"
    return f"{count} {noun} {'<hash>'.join(inventory.table.affixes[number])}"


def _words(reading: Coordinate) -> str:
    return f"{reading.pool} of model {reading.model!r} {reading.shard.ranks_text()}".rstrip()
