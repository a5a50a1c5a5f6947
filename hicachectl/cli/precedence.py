"""Which source of a parameter counts.

The command line beats the environment, which beats the profile, catalog and lock that the config
file states for the store of a command.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hicachectl.cli.session import config_of, remark

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_SOURCES = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)
_PROFILE = "profile_file"
# Parameters that name the store of each setting; the first that is given counts.
_PROFILE_OF = ("store", "source", "destination")
_CATALOG_OF = ("store",)
_LOCK_OF = ("store", "destination", "quarantine")
# A command with --repair writes to the store with one of these only.
_WRITES = ("repair", "stamp", "update_catalog")


def on_command_line(ctx: click.Context, name: str) -> bool:
    """Return whether the command line has a parameter."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def contradiction_remark(ctx: click.Context) -> Callable[[str], None] | None:
    """Return what is called if the profile contradicts the store; None: refuse.

    A profile from elsewhere than the command line is about the store that servers use now. It may
    have pages of their predecessors only, and they can be listed and removed all the same.
    """
    if ctx.params.get(_PROFILE) is None or on_command_line(ctx, _PROFILE):
        return None
    return partial(remark, ctx)


def settle(ctx: click.Context, profile_options: Collection[str]) -> None:
    """Fill parameters from the config file; drop those that give way to a stronger source.

    profile_options: parameters that choose a profile otherwise than --profile. Raises UsageError
    and FormatError for the config file.
    """
    _fill(ctx, _PROFILE, "profile", _PROFILE_OF)
    _fill(ctx, "catalog", "catalog", _CATALOG_OF)
    _fill(ctx, "lock", "lock", _LOCK_OF)
    strongest = max((_strength(ctx, name) for name in profile_options), default=0)
    _drop(ctx, (_PROFILE,) if strongest > _strength(ctx, _PROFILE) else profile_options)
    if not _writes(ctx.params):
        _drop(ctx, ("lock",))


def _strength(ctx: click.Context, name: str) -> int:
    """Return 0 for a default."""
    source = ctx.get_parameter_source(name)
    return _SOURCES.index(source) + 1 if source in _SOURCES else 0


def _writes(params: dict[str, Any]) -> bool:
    """Return whether the command changes the store as one run."""
    if params.get("dry_run") or params.get("shard") is not None:
        return False
    return "repair" not in params or any(params[name] not in ("none", False) for name in _WRITES)


def _fill(ctx: click.Context, name: str, setting: str, stores: tuple[str, ...]) -> None:
    from hicachectl.backends.urls import named_store

    if name not in ctx.params or _strength(ctx, name):
        return
    text = next((ctx.params[store] for store in stores if ctx.params.get(store)), None)
    if not isinstance(text, str) or ":" not in text or "/" in text:
        return
    named = named_store(text, config_of(ctx))
    value = None if named is None else getattr(named, setting)
    if value is not None:
        ctx.params[name] = value
        ctx.set_parameter_source(name, ParameterSource.DEFAULT_MAP)


def _drop(ctx: click.Context, names: Collection[str]) -> None:
    """Reset parameters, except those of the command line."""
    for option in ctx.command.params:
        name = option.name
        if name in names and _strength(ctx, name) and not on_command_line(ctx, name):
            is_flag = isinstance(option, click.Option) and option.is_flag
            ctx.params[name] = False if is_flag else None
            ctx.set_parameter_source(name, ParameterSource.DEFAULT)
