"""Random stores, profiles and command lines: a page that its servers would restore rightly stays.

A page may go only if a filter of the command names it, or if the profile describes the page's
deployment and the page is damaged. Deployments of one store can share a model name, and so keys of
equal form and other bytes. A seed repeats its case; HICACHECTL_ATTACK_ROUNDS multiplies them.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.__main__ import run
from hicachectl.formats.profile import Profile, profile_from_mapping
from hicachectl.formats.spec import ObjectSpec, object_specs
from tests.speed import ROUNDS
from tests.stores import page

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = 60 * ROUNDS
AGES_S = (5, 3600, 7200, 90_000)
STRUCTURE = "names,groups,sizes"


@dataclass
class Deployment:
    """The servers of one model, and the pages that they wrote.

    healthy: names of the objects of each page that the servers would restore rightly.
    """

    profile: Profile
    mapping: dict[str, Any]
    healthy: dict[str, set[str]] = field(default_factory=dict)

    @property
    def specs(self) -> tuple[ObjectSpec, ...]:
        return tuple(object_specs(self.profile, "file"))

    @property
    def keys(self) -> tuple[Any, ...]:
        return keys_of(self.mapping)

    def key(self, spec: ObjectSpec, number: int) -> str:
        before, after = spec.affix
        return f"{before}{page(number)}{after}"


def keys_of(mapping: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the keys of a deployment show of it."""
    return mapping["model"], mapping["tp"]


def deployment(rng: random.Random, model: str) -> Deployment:
    """Make a deployment with kv, and perhaps an indexer."""
    kv: dict[str, Any] = {"name": "kv", "kind": "mha", "dtype": "bfloat16", "layers": 2}
    kv |= {"kv_heads": 2, "head_dim": rng.choice([4, 8])}
    pools = [kv]
    if rng.random() < 0.6:
        pools.append({"name": "indexer", "kind": "opaque", "nbytes": rng.choice([96, 160])})
    mapping = {
        "model": model,
        "page_size": rng.choice([4, 8]),
        "layout": rng.choice(["page_first", "layer_first"]),
        "tp": rng.choice([1, 2]),
        "pools": pools,
    }
    return Deployment(profile_from_mapping(mapping), mapping)


def value(rng: random.Random, nbytes: int) -> bytes:
    """Return bfloat16 numbers around 1."""
    low = rng.randbytes(nbytes // 2)
    return bytes(byte for pair in zip(low, b"\x3f" * len(low), strict=True) for byte in pair)


def write_pages(store: Path, made: Deployment, numbers: range, rng: random.Random) -> None:
    """Write pages, some of them damaged, some of them young."""
    damage = rng.choice([0.0, 0.15, 0.4])
    for number in numbers:
        written = time.time() - rng.choice(AGES_S)
        names = {made.key(spec, number): spec.nbytes for spec in made.specs}
        if any((store / name).exists() for name in names):
            continue  # SGLang: the first writer has the name
        lost, bad = "", ""
        if rng.random() < damage:
            lost, bad = rng.choice([("lost", ""), ("", "short"), ("", "nan"), ("lost", "short")])
        victims = rng.sample(sorted(names), min(len(names), 2))
        for name, nbytes in names.items():
            if lost and name == victims[0]:
                continue
            raw = value(rng, nbytes)
            if bad and name == victims[-1]:
                raw = raw[:-2] if bad == "short" else b"\xff" * nbytes
            (store / name).write_bytes(raw)
            os.utime(store / name, (written, written))
        if rng.random() < 0.02:  # left behind by servers that had another pool
            model = made.mapping["model"].replace("/", "-")
            stray = store / f"{page(number)}.draft_{model}_0_{made.mapping['tp']}.bin"
            stray.write_bytes(b"\x3f" * 32)
            os.utime(stray, (written, written))
        if not (lost or bad):
            made.healthy[page(number)] = set(names)


def altered(rng: random.Random, mapping: dict[str, Any]) -> dict[str, Any]:
    """Return a profile that is wrong in one place."""
    wrong: dict[str, Any] = json.loads(json.dumps(mapping))
    match rng.randrange(5):
        case 0:
            wrong["page_size"] = 12 - wrong["page_size"]
        case 1:
            wrong["pools"][0]["head_dim"] = 12 - wrong["pools"][0]["head_dim"]
        case 2:
            wrong["pools"][0]["dtype"] = "float8_e4m3fn"
        case 3 if len(wrong["pools"]) == 1:
            wrong["pools"].append({"name": "indexer", "kind": "opaque", "nbytes": 96})
        case _:
            wrong["pools"][0]["layers"] = 3
    return wrong


def command_line(rng: random.Random, store: Path, profile: Path | None) -> list[str]:
    """Return a command that removes pages by their state, or moves them."""
    given = ["--profile", str(profile)] if profile else []
    grace = ["--grace", "0s"] if rng.random() < 0.3 else []
    target = f"{store.parent / 'moved'}"
    match rng.randrange(5):
        case 0:
            checks = ["--checks", STRUCTURE] if rng.random() < 0.5 else []
            sample = ["--sample", "50%", "--sample-slice", "1"] if rng.random() < 0.2 else []
            how = rng.choice(["delete", "quarantine"])
            words = [*given, *checks, *sample, *grace, "--repair", how, "--yes"]
            return ["verify", f"{store}", *words]
        case 1:
            states = rng.choice(["partial", "orphan", "partial,orphan"])
            return ["rm", f"{store}", *given, *grace, "--state", states, "--yes"]
        case 2:
            return ["rm", f"{store}", "--temporaries", "--yes"]
        case 3:
            return ["prewarm", target, "--from", f"{store}", *given, "--all"]
        case _:
            return ["migrate", f"{store}", target, *given, *grace, "--move", "--yes"]


def kept(store: Path, names: set[str]) -> bool:
    """Return whether one place has all of a page: the store, or where the command moves pages."""
    return any(all((d / name).exists() for name in names) for d in (store, store.parent / "moved"))


def is_protected(
    made: Deployment, deployments: list[Deployment], described: dict[str, Any] | None
) -> bool:
    """Return whether all healthy pages of a deployment must stay.

    described: the deployment of the profile, which may be wrong about its bytes. Another deployment
    with its keys has wrong bytes for the servers of the profile.
    """
    if described is None or made.keys != keys_of(described):
        return True
    return all(other is made or other.keys != made.keys for other in deployments)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_command_removes_a_page_that_its_servers_restore(
    tmp_path: Path, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    store = tmp_path / "store"
    store.mkdir()
    models = rng.choice([["org/a"], ["org/a", "org/b"], ["a", "a_1_2"], ["a", "a"]])
    deployments = [deployment(rng, model) for model in models]
    for number, made in enumerate(deployments):
        count = rng.choice([1, 5, 9, 30])
        write_pages(store, made, range(1000 * number, 1000 * number + count), rng)
    mapping = rng.choice(deployments).mapping
    wrong = rng.random() < 0.4
    profile = None
    if rng.random() < 0.8:
        profile = tmp_path / "profile.json"
        profile.write_text(json.dumps(altered(rng, mapping) if wrong else mapping))
    words = command_line(rng, store, profile)
    status = run(words)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    lost = [
        (made.mapping, name)
        for made in deployments
        if is_protected(made, deployments, mapping if profile else None)
        for name, objects in made.healthy.items()
        if not kept(store, objects)
    ]
    assert not lost, f"seed {seed}: {shlex.join(words)} ended with {status}\n{said}\n{lost[:3]}"
