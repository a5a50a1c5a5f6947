"""The stamp: the profile and weights version that a store was filled with, kept beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hicachectl.findings import SCHEMA, findings
from hicachectl.formats.documents import parse_json
from hicachectl.formats.errors import FormatError, StoreUnavailable, UnsupportedByBackend
from hicachectl.formats.profile import Profile, profile_from_mapping, profile_to_mapping
from hicachectl.wholefile import whole_file

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import Store

_FORM = 1
_MAX_BYTES = 1 << 20  # a stamp is kilobytes
_KEYLESS = ("sglang",)  # may differ between servers that share a store


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who filled a store. weights_version is "" where it was not said."""

    profile: Profile
    weights_version: str = ""


def read_stamps(store: Store) -> dict[str, Stamp]:
    """Read the stamps of a store, by model. Raises FormatError on a damaged one."""
    directory = _directory(store)
    if directory is None:
        return {}
    try:
        paths = sorted(directory.glob("*.json"))
        return {path.stem: _parse(path) for path in paths}
    except OSError as error:
        raise StoreUnavailable(f"cannot read {directory}: {error.strerror}") from error


def write_stamp(store: Store, stamp: Stamp) -> Path:
    """Write the stamp of the profile's model beside a store, whole or not at all.

    Raises UnsupportedByBackend where the store has no place for it, StoreUnavailable.
    """
    directory = _directory(store)
    if directory is None:
        raise UnsupportedByBackend(f"{store.url}: there is no place beside this store for a stamp")
    path = directory / f"{_file_name(stamp.profile.key_model)}.json"
    document = {
        "form": _FORM,
        "weights_version": stamp.weights_version,
        "profile": profile_to_mapping(stamp.profile),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"cannot write {directory}: {error.strerror}") from error
    with whole_file(path, "w", durable=True, refusal=StoreUnavailable) as stream:
        json.dump(document, stream, indent=2)
    return path


def check_stamp(store: Store, profile: Profile | None, weights_version: str) -> pa.Table:
    """Find where the profile, or the weights version, is not the one a store was stamped with."""
    if profile is None or profile.inferred:
        return SCHEMA.empty_table()
    stamp = read_stamps(store).get(_file_name(profile.key_model))
    differences = [] if stamp is None else _differences(stamp, Stamp(profile, weights_version))
    return findings(
        "stamp-mismatch",
        "error",
        keys=pa.nulls(len(differences), pa.string()),
        detail=pa.array(differences, pa.string()),
    )


def _differences(old: Stamp, new: Stamp) -> list[str]:
    before, after = profile_to_mapping(old.profile), profile_to_mapping(new.profile)
    if new.weights_version:
        before["weights_version"] = old.weights_version
        after["weights_version"] = new.weights_version
    names = [n for n in {**before, **after} if n not in (*_KEYLESS, "pools")]
    found = [
        f"{name}: stamped {before.get(name)!r}, now {after.get(name)!r}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    return found + _pool_differences(before["pools"], after["pools"])


def _pool_differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    old = {pool["name"]: pool for pool in before}
    new = {pool["name"]: pool for pool in after}
    return [
        f"pools[{name}]: stamped {old.get(name)}, now {new.get(name)}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]


def _directory(store: Store) -> Path | None:
    beside = store.side_directory()
    return None if beside is None else beside / "stamps"


def _file_name(key_model: str) -> str:
    """Spell a model name as a file name: without "/" already, it may be anything else."""
    return "".join(c if c.isalnum() or c in "-_." else f"%{ord(c):x}" for c in key_model)[:200]


def _parse(path: Path) -> Stamp:
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    try:
        document = parse_json(data[:_MAX_BYTES], str(path))
        if document["form"] != _FORM or type(document["weights_version"]) is not str:
            raise FormatError(f"{path}: not a stamp of this version")
        profile = profile_from_mapping(document["profile"], source=str(path))
        return Stamp(profile, document["weights_version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path}: not a stamp, or damaged; remove it to go on") from error
