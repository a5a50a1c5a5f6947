"""Stamps. A stamp is a file beside a store, with the profile and weights version of its pages."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import Struct, to_builtins

from hicachectl.backends.capabilities import ClearRemovesAll, SideFiles
from hicachectl.formats.documents import parse_json
from hicachectl.formats.errors import (
    FormatError,
    ProfileError,
    StoreUnavailable,
    UnsupportedByBackend,
)
from hicachectl.formats.forms import convert
from hicachectl.formats.profile import (
    Profile,
    profile_from_mapping,
    profile_to_mapping,
    stored_profile,
)
from hicachectl.formats.wording import failed, no_stamp_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory

_FORM = 1
_FOLDER = "stamps"
_MAX_BYTES = 1 << 20  # a real stamp has kilobytes
_KEYLESS = ("sglang",)  # fields that may differ between servers that share a store
_WEIGHTS = ("weights", "draft_weights")  # fields that are compared only if both profiles have them


class _StampForm(Struct):
    form: int
    weights_version: str
    profile: Any


@dataclass(frozen=True, slots=True)
class Stamp:
    """Record of the servers that filled a store.

    profile: profile of the servers.
    weights_version: version of their weights; "" if unknown.
    """

    profile: Profile
    weights_version: str = ""


def read_stamp(store: Store, key_model: str) -> Stamp | None:
    """Return a model's stamp; None if it is missing.

    key_model: name of the model in keys.
    Raises FormatError for a damaged stamp; UntrustedError for a link, a special file or an
    untrusted owner; and StoreUnavailable if the stamp cannot be read.
    """
    name = _file_name(key_model)
    with _opened(store, writes=False) as directory:
        if directory is None or not directory.has(name):
            return None
        return _parse(directory.read(name, _MAX_BYTES + 1), f"{directory.path}/{name}")


def require_stamp_place(store: Store) -> SideFiles:
    """Return the store if it has a place for a stamp. Raises UnsupportedByBackend."""
    if not isinstance(store, SideFiles):
        nameable = isinstance(store, ClearRemovesAll)
        raise UnsupportedByBackend(no_stamp_place(store.url, nameable=nameable))
    return store


def check_stamp_place(store: Store, key_model: str) -> None:
    """Raise UntrustedError or StoreUnavailable if `write_stamp` would raise it. Change nothing."""
    with _opened(store, writes=True) as directory:
        _check_place(directory, _file_name(key_model))


def write_stamp(store: Store, stamp: Stamp) -> Path:
    """Write a stamp beside a store, atomically.

    Raises UnsupportedByBackend if the store has no place for a stamp, UntrustedError as
    `read_stamp` does, and StoreUnavailable if writing fails.
    """
    side = require_stamp_place(store).side_directory()
    name = _file_name(stamp.profile.key_model)
    document = _StampForm(
        _FORM, stamp.weights_version, profile_to_mapping(stored_profile(stamp.profile))
    )
    with _opened(store, writes=True, makes=True) as directory:
        _check_place(directory, name)
        if directory is not None:
            directory.write(name, json.dumps(to_builtins(document), indent=2).encode())
    return side / _FOLDER / name


def stamp_differences(
    store: Store,
    profile: Profile | None,
    weights_version: str = "",
    remark: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Return the differences between a store's stamp and a profile and weights version.

    remark: called with the reason if the stamp cannot be read.
    """
    if profile is None or profile.inferred:
        return []
    try:
        stamp = read_stamp(store, profile.key_model)
    except StoreUnavailable as error:
        remark(f"The stamp was not compared: {error}")
        return []
    return [] if stamp is None else _differences(stamp, Stamp(profile, weights_version))


@contextmanager
def _opened(store: Store, *, writes: bool, makes: bool = False) -> Iterator[Directory | None]:
    """Open the directory of a store's stamps for a `with` block; None if it is missing.

    makes: whether to create the directory.
    """
    if not isinstance(store, SideFiles):
        yield None
        return
    try:
        with ExitStack() as exits:
            directory = store.open_side_directory(writes=writes, makes=makes)
            if directory is not None:
                side = exits.enter_context(directory)
                directory = None
                if makes:
                    directory = exits.enter_context(side.make_directory(_FOLDER, exist_ok=True))
                elif side.has(_FOLDER):
                    directory = exits.enter_context(side.directory(_FOLDER))
            yield directory
    except OSError as error:
        action = "write the stamp" if writes else "read the stamp"
        path = f"{store.side_directory()}/{_FOLDER}"
        next_step = "check its permissions and free space" if writes else "check its permissions"
        raise StoreUnavailable(failed(path, action, error, next_step)) from error


def _check_place(directory: Directory | None, name: str) -> None:
    """Raise UntrustedError if the file to replace is not a regular file of a trusted owner."""
    if directory is not None and directory.has(name):
        directory.read(name, 0)


def _differences(old: Stamp, new: Stamp) -> list[str]:
    before, after = (profile_to_mapping(stored_profile(stamp.profile)) for stamp in (old, new))
    if new.weights_version:
        before["weights_version"] = old.weights_version
        after["weights_version"] = new.weights_version
    unknown = [name for name in _WEIGHTS if not (name in before and name in after)]
    names = [n for n in {**before, **after} if n not in (*_KEYLESS, *unknown, "pools")]
    found = [
        f"{name}: {_change(before, after, name)}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    return found + _pool_differences(before["pools"], after["pools"])


def _pool_differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    old = {pool["name"]: pool for pool in before}
    new = {pool["name"]: pool for pool in after}
    return [
        f"pools[{name}]: {_pool_change(old.get(name), new.get(name))}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]


def _pool_change(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    if old is None:
        return "the stamp has no such pool"
    if new is None:
        return "the stamp has this pool, but the profile does not"
    changed = [field for field in {**old, **new} if old.get(field) != new.get(field)]
    return "; ".join(f"{field} {_change(old, new, field)}" for field in changed)


def _change(old: dict[str, Any], new: dict[str, Any], field: str) -> str:
    was, now = (repr(values[field]) if field in values else "unset" for values in (old, new))
    return f"stamped {was}, now {now}"


def _file_name(key_model: str) -> str:
    """Return the file name of a model's stamp, with unusual characters escaped."""
    plain = "".join(c if c.isalnum() or c in "-_." else f"%{ord(c):x}" for c in key_model)
    return f"{plain[:200]}.json"


def _parse(data: bytes, path: str) -> Stamp:
    try:
        document = parse_json(data[:_MAX_BYTES], path)
        stamp = convert(document, _StampForm, path)
    except FormatError as error:
        raise FormatError(f"{path}: not a stamp, or damaged; remove the file") from error
    if stamp.form != _FORM:
        raise FormatError(
            f"{path}: has stamp form {stamp.form}, but this version reads form {_FORM}; use the "
            "release that wrote it, or remove the file"
        )
    try:
        profile = profile_from_mapping(stamp.profile, source=f"{path}: profile")
    except ProfileError as error:
        raise ProfileError(f"{error}; remove the file") from error
    return Stamp(profile, stamp.weights_version)
