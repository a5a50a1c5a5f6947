"""Random stores of two models with confusable keys: no healthy object of the other is planned."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.profile import Profile, profile_from_mapping
from hicachectl.move.removal_plan import plan_removal, plan_repair
from hicachectl.pages.selection import Selection
from tests.move.repairs import scanned, structure_findings
from tests.stores import page, put

if TYPE_CHECKING:
    from pathlib import Path

WIDE, NARROW = "m", "m_1_4"
RANKS = [f"_m_{rank}_4.bin" for rank in range(4)]
SHARED = RANKS[1]
WIDE_BYTES, NARROW_BYTES = 64, 96


def profile_of(model: str, nbytes: int, *, replicated: bool) -> Profile:
    pool = {"name": "kv", "kind": "opaque", "nbytes": nbytes, "replicated": replicated}
    return profile_from_mapping({"model": model, "page_size": 4, "tp": 4, "pools": [pool]})


PROFILES = {
    WIDE: profile_of(WIDE, WIDE_BYTES, replicated=False),
    NARROW: profile_of(NARROW, NARROW_BYTES, replicated=True),
}


def fill(directory: Path, rng: random.Random) -> dict[str, str]:
    """Write pages of both models; return the owner of each healthy object.

    Some ranks are lost, some objects are cut, and for some pages the other model wrote the key
    first.
    """
    owners: dict[str, str] = {}

    def write(name: str, owner: str) -> None:
        if name in owners or (directory / name).exists():
            return  # as in SGLang: the first writer has the name
        nbytes = WIDE_BYTES if owner == WIDE else NARROW_BYTES
        damaged = rng.random() < 0.05
        put(directory, name, nbytes - 7 if damaged else nbytes)
        if not damaged:
            owners[name] = owner

    for number in range(60):
        kinds = rng.choice([[WIDE], [NARROW], [WIDE], [NARROW], [WIDE, NARROW], [NARROW, WIDE]])
        for kind in kinds:
            lost = rng.random() < 0.1
            ranks = RANKS if not lost else rng.sample(RANKS, rng.randint(1, 3))
            for suffix in ranks if kind == WIDE else [SHARED]:
                write(f"{page(number)}{suffix}", kind)
    return owners


@pytest.mark.parametrize("seed", range(24))
def test_nothing_healthy_of_the_other_model_is_planned(tmp_path: Path, seed: int) -> None:
    owners = fill(tmp_path, random.Random(seed))
    for given in (None, WIDE, NARROW):
        with FileStore(tmp_path) as store:
            groups = scanned(store, PROFILES[given] if given else None)
            found = structure_findings(store, groups)
            plans = {
                model: plan_removal(np.flatnonzero(Selection(model=model).chosen(groups)))
                for model in (WIDE, NARROW)
            }
            repair = plan_repair(found)
        keys = [key.decode() for key in groups.inventory.objects.column("key").to_pylist()]
        chosen = {
            name: {key for key, group in zip(keys, groups.of_object, strict=True) if group in plan}
            for name, plan in (
                *((model, set(plan.groups.tolist())) for model, plan in plans.items()),
                ("repair", set(repair.groups.tolist())),
            )
        }
        for model in (WIDE, NARROW):
            theirs = {owners[key] for key in chosen[model] if key in owners}
            assert theirs <= {model}, (given, model)
        # A damaged object of m removes its whole page; a page of m_1_4 has one object.
        assert not {key for key in chosen["repair"] if owners.get(key) == NARROW}, given
