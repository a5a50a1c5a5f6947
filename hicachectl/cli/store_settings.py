"""What the config file states for the store of a command: its profile, catalog and lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from click.core import ParameterSource

from hicachectl.cli.environment import is_given
from hicachectl.cli.session import config_of

if TYPE_CHECKING:
    from collections.abc import Collection

    import click

# Parameters that name the store of each setting; the first that is given counts.
_PROFILE_OF = ("store", "source", "destination")
_CATALOG_OF = ("store",)
_LOCK_OF = ("store", "destination", "quarantine")
# A command with --repair writes to the store with one of these only.
_WRITES = ("repair", "stamp", "update_catalog")


def use_store_settings(ctx: click.Context, profile_options: Collection[str]) -> None:
    """Fill parameters that neither the command line nor the environment has.

    profile_options: parameters of which each says otherwise than a profile of the config file.
    Raises UsageError and FormatError for the config file.
    """
    if not any(is_given(ctx, name) for name in profile_options):
        _fill(ctx, "profile_file", "profile", _PROFILE_OF)
    _fill(ctx, "catalog", "catalog", _CATALOG_OF)
    if _writes(ctx.params):
        _fill(ctx, "lock", "lock", _LOCK_OF)


def is_of_config(ctx: click.Context, name: str) -> bool:
    """Return whether the config file gave a parameter its value."""
    return ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP


def _writes(params: dict[str, Any]) -> bool:
    """Return whether the command changes the store as one run."""
    if params.get("dry_run") or params.get("shard") is not None:
        return False
    return "repair" not in params or any(params[name] not in ("none", False) for name in _WRITES)


def _fill(ctx: click.Context, name: str, setting: str, stores: tuple[str, ...]) -> None:
    from hicachectl.backends.urls import named_store

    if name not in ctx.params or is_given(ctx, name):
        return
    text = next((ctx.params[store] for store in stores if ctx.params.get(store)), None)
    if not isinstance(text, str) or ":" not in text or "/" in text:
        return
    named = named_store(text, config_of(ctx))
    value = None if named is None else getattr(named, setting)
    if value is not None:
        ctx.params[name] = value
        ctx.set_parameter_source(name, ParameterSource.DEFAULT_MAP)
