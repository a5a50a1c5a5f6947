"""Which source of a parameter counts.

The command line beats the environment, which beats the profile, catalog and lock that the config
file states for the store of a command.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hicachectl.cli.session import config_of, remark
from hicachectl.formats.errors import HicacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hicachectl.backends.urls import Config

_SOURCES = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)
_PROFILE = "profile_file"
# A parameter, the member of a store that fills it, and the parameters that name the store; the
# first that is given counts.
_SETTINGS = (
    (_PROFILE, "profile", ("store", "source", "destination")),
    ("catalog", "catalog", ("store",)),
    ("lock", "lock", ("store", "destination", "quarantine")),
)
# A command with --repair writes to the store with one of these only.
_WRITES = ("repair", "stamp", "update_catalog")


def on_command_line(ctx: click.Context, name: str) -> bool:
    """Return whether the command line has a parameter."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def contradiction_remark(ctx: click.Context) -> Callable[[str], None] | None:
    """Return a function that reports a profile the store contradicts, or None to refuse it.

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
    for name, setting, stores in _SETTINGS:
        _fill(ctx, name, setting, stores)
    strongest = max((_strength(ctx, name) for name in profile_options), default=0)
    _drop(ctx, (_PROFILE,) if strongest > _strength(ctx, _PROFILE) else profile_options)
    if not _writes(ctx.params):
        _drop(ctx, ("lock",))


@contextmanager
def named_settings(ctx: click.Context) -> Iterator[None]:
    """Name the config file and the store's entry in an error about a file that they state."""
    try:
        yield
    except HicacheError as error:
        for name, setting, stores in _SETTINGS:
            text, value = str(error), ctx.params.get(name)
            is_stated = ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
            if is_stated and value is not None and str(value) in text:
                config = config_of(ctx)
                entry = _entry(ctx, config, setting, stores, value)
                text = text.removeprefix(f"--{setting} ").removeprefix(f"--{setting}: ")
                error.args = (f"{config.source}: {entry}: {setting}: {text}",)
                break
        raise


def _entry(
    ctx: click.Context, config: Config, setting: str, stores: tuple[str, ...], value: object
) -> str:
    """Return the table of the config file that states a setting for the store of a command."""
    own = (_store_text(ctx, stores) or "").removesuffix(":")
    names = [own, *config.stores]  # a store's URL may name another, which has the setting
    found = next(n for n in names if getattr(config.stores.get(n), setting, None) == value)
    return f"stores.{found}"


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
    text = _store_text(ctx, stores)
    if text is None or ":" not in text or "/" in text:
        return
    named = named_store(text, config_of(ctx))
    value = None if named is None else getattr(named, setting)
    if value is not None:
        ctx.params[name] = value
        ctx.set_parameter_source(name, ParameterSource.DEFAULT_MAP)


def _store_text(ctx: click.Context, stores: tuple[str, ...]) -> str | None:
    """Return the first of some parameters that is given, if it is a text."""
    text = next((ctx.params[store] for store in stores if ctx.params.get(store)), None)
    return text if isinstance(text, str) else None


def _drop(ctx: click.Context, names: Collection[str]) -> None:
    """Reset parameters, except those of the command line."""
    for option in ctx.command.params:
        name = option.name
        if name in names and _strength(ctx, name) and not on_command_line(ctx, name):
            is_flag = isinstance(option, click.Option) and option.is_flag
            ctx.params[name] = False if is_flag else None
            ctx.set_parameter_source(name, ParameterSource.DEFAULT)
