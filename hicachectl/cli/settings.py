"""Settings: values of options from the environment and the config file.

A setting says how a command works, or what belongs to a store. The environment variable
HICACHECTL_NAME sets the option --name of every command that has it. The config file states some
options of a store. Only the command line says what a command does, chooses or removes. `Option`
declares which options are settings.

The command line beats the environment, which beats the config file.
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from hicachectl.cli.parameters import (
    PREFIX,
    SERVERS,
    TRANSFORM,
    Option,
    long_name,
    on_command_line,
    options_of,
    variable_of,
)
from hicachectl.cli.session import config_of, remark
from hicachectl.formats.errors import ContradictionError, HicacheError, UsageError
from hicachectl.formats.wording import divided, with_next

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hicachectl.cli.parameters import Entry

_OF_TESTS = "HICACHECTL_TEST_"
_SOURCES = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)
_PROFILE = "profile_file"


def every_command(ctx: click.Context) -> Iterator[click.Command]:
    """Yield a group and all commands below it. This imports their modules."""
    yield ctx.command
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            if command is not None:
                yield from every_command(click.Context(command, info_name=name, parent=ctx))


def unused_variables(ctx: click.Context) -> Iterator[str]:
    """Yield a remark on each environment variable with our prefix that no command reads."""
    own = {option.envvar for above in _chain(ctx) for option in above.command.params}
    asked = {
        name for name in os.environ if name.startswith(PREFIX) and not name.startswith(_OF_TESTS)
    } - own
    if not asked:
        return
    from hicachectl.profiles.server import API_KEY_VARIABLE

    if asked == {API_KEY_VARIABLE}:
        return  # the code below imports every command
    options = [option for command in every_command(ctx.find_root()) for option in command.params]
    known = {str(option.envvar) for option in options if option.envvar} | {API_KEY_VARIABLE}
    named = {variable_of(option): long_name(option) for option in options}
    for variable in sorted(asked - known):
        if variable in named:
            yield f"{variable}: no command reads it; give {named[variable]} on the command line"
        else:
            names = [name.removeprefix(PREFIX) for name in known]
            close = get_close_matches(variable.removeprefix(PREFIX), names, n=1)
            instead = (
                f"did you mean {PREFIX}{close[0]}?" if close else "unset it, or see hicachectl(1)"
            )
            yield f"{variable}: no option has this name; {instead}"


def refuse_server_variables(command: click.Command) -> None:
    """Raise UsageError for the variable of a server flag, which earlier releases read."""
    for option in options_of(command):
        if option.section is SERVERS and os.environ.get(variable := variable_of(option)):
            raise UsageError(
                f"{variable}: flags of servers are no longer read from the environment; unset it, "
                f"and give {long_name(option)} or --profile"
            )


@contextmanager
def named_sources(ctx: click.Context) -> Iterator[None]:
    """Make errors of the block name the variable or config entry that gave the wrong value.

    This name replaces the option's name. In an error about a path, the name stands before the
    message.
    """
    try:
        yield
    except click.BadParameter:  # `one_line` names the variable
        raise
    except click.UsageError as error:
        raise click.UsageError(_naming_sources(ctx, error.message), error.ctx) from None
    except HicacheError as error:
        text = _with_profile(ctx, error) if isinstance(error, ContradictionError) else str(error)
        error.args = (_naming_sources(ctx, text),)
        raise


def _naming_sources(ctx: click.Context, text: str) -> str:
    for above in _chain(ctx):
        for option in above.command.params:
            place = _place(above, option)
            if not place or place in text:
                continue
            name, value = long_name(option), above.params.get(str(option.name))
            if isinstance(value, Path) and str(value) in text:
                text = f"{place}: {text.removeprefix(f'{name} ').removeprefix(f'{name}: ')}"
            else:
                text = re.sub(rf"(?<![\w-]){name}(?![\w-])", place.replace("\\", r"\\"), text)
    return text


def _place(ctx: click.Context, option: click.Parameter) -> str:
    """Return the variable or the config entry that gave an option its value; else ""."""
    source = ctx.get_parameter_source(str(option.name))
    if source is ParameterSource.ENVIRONMENT:
        return str(option.envvar)
    if source is not ParameterSource.DEFAULT_MAP or not isinstance(option, Option):
        return ""
    assert option.entry is not None  # only `_fill` sets this source, from the entry
    config, member, value = config_of(ctx), option.entry.member, ctx.params[str(option.name)]
    own = (_store_text(ctx, option.entry) or "").removesuffix(":")
    names = [own, *config.stores]  # a store's URL may name another store, which has the setting
    name = next(n for n in names if getattr(config.stores.get(n), member, None) == value)
    return f"{config.source}: stores.{name}: {member}"


def _chain(ctx: click.Context | None) -> Iterator[click.Context]:
    while ctx is not None:
        yield ctx
        ctx = ctx.parent


def contradiction_remark(ctx: click.Context) -> Callable[[ContradictionError], None] | None:
    """Return a function that reports a profile which the store contradicts.

    Return None if such a profile must be refused, because the command line gives it.
    A profile from the environment or the config file describes today's servers. A store that has
    only pages of earlier servers contradicts it, and must still be listed and cleaned.
    """
    if ctx.params.get(_PROFILE) is None or on_command_line(ctx, _PROFILE):
        return None
    return lambda error: remark(ctx, _with_profile(ctx, error))


def _with_profile(ctx: click.Context, error: ContradictionError) -> str:
    """Return the message of an error with the file of the profile.

    If the store has only pages of other deployments, the next step is to run `doctor`. With
    --to options, the error may be about the profile that these options make of the file's profile.
    """
    file = ctx.params.get(_PROFILE)
    changes = (option.name for option in options_of(ctx.command) if option.section is TRANSFORM)
    if file is None or any(map(ctx.params.get, changes)):
        return str(error)
    problem, next_step = divided(str(error))
    if not error.has_own_pages:
        command = shlex.join(["hicachectl", "doctor", error.store, "--profile", str(file)])
        next_step = f"{command} shows whose pages the store has, and what to do"
    return with_next(f"{file}: {problem}", next_step)


def settle(ctx: click.Context) -> None:
    """Fill parameters from the config file. Drop parameters that a stronger source overrides.

    Raises UsageError and FormatError for the config file.
    """
    options = options_of(ctx.command)
    for option in options:
        _fill(ctx, option)
    # --profile and the options that describe servers exclude each other. The stronger source wins.
    others = {str(option.name) for option in options if option.describes} - {_PROFILE}
    strongest = max((_strength(ctx, name) for name in others), default=0)
    _drop(ctx, {_PROFILE} if strongest > _strength(ctx, _PROFILE) else others)
    if not _writes(ctx, options):
        _drop(ctx, {"lock"})


def _strength(ctx: click.Context, name: str) -> int:
    """Return the rank of a parameter's source: 0 for a default, more for a stronger source."""
    source = ctx.get_parameter_source(name)
    return _SOURCES.index(source) + 1 if source in _SOURCES else 0


def _writes(ctx: click.Context, options: Collection[Option]) -> bool:
    """Return whether the command changes the store, and is not a part of a run."""
    if ctx.params.get("dry_run") or ctx.params.get("shard") is not None:
        return False
    asked = [ctx.params[str(option.name)] for option in options if option.writes]
    return not asked or any(value not in ("none", False) for value in asked)


def _fill(ctx: click.Context, option: Option) -> None:
    from hicachectl.backends.urls import named_store

    name, entry = str(option.name), option.entry
    if entry is None or _strength(ctx, name):
        return
    text = _store_text(ctx, entry)
    if text is None or ":" not in text or "/" in text:
        return
    named = named_store(text, config_of(ctx))
    value = None if named is None else getattr(named, entry.member)
    if value is not None:
        ctx.params[name] = value
        ctx.set_parameter_source(name, ParameterSource.DEFAULT_MAP)


def _store_text(ctx: click.Context, entry: Entry) -> str | None:
    """Return the STORE argument that an entry is about; None if it is not given."""
    text = next((ctx.params[store] for store in entry.stores if ctx.params.get(store)), None)
    return text if isinstance(text, str) else None


def _drop(ctx: click.Context, names: Collection[str]) -> None:
    """Reset parameters to their defaults, except parameters on the command line."""
    for option in ctx.command.params:
        name = str(option.name)
        if name in names and _strength(ctx, name) and not on_command_line(ctx, name):
            is_flag = isinstance(option, click.Option) and option.is_flag
            ctx.params[name] = False if is_flag else None
            ctx.set_parameter_source(name, ParameterSource.DEFAULT)
