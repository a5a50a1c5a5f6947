"""Options from the environment: HICACHECTL_NAME for --name, in every command that has it.

The command line beats the environment, which beats the config file. What removes or overwrites
something is asked for on the command line only: consent, the options that make a command remove,
and all that chooses what is removed.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

PREFIX = "HICACHECTL_"
OTHERS = ("HICACHECTL_CONFIG", "HICACHECTL_API_KEY")  # the modules that use them read them
_OF_TESTS = "HICACHECTL_TEST_"

# Consent; what makes a command remove, release or overwrite; and what is done in place of the
# command. --config has a variable that the Python interface reads, too.
NEVER = (
    "--yes", "--repair", "--repair-code", "--writers-stopped", "--move", "--if-exists", "--output",
    "--config", "--version", "--help", "--help-all", "--print-probe",
)  # fmt: skip
# Of a command that removes pages, only these: all others choose the pages.
REMOVERS = ("rm", "purge")
OF_REMOVERS = ("--dry-run", "--format", "--lease-wait", "--lock", "--profile")
# Options that mean or offer something else in one command.
_NOT_IN = {
    "verify": ("--token-ids",),  # widens a repair
    "profile": ("--format",),
    "info": ("--format",),
    "repair": ("--format",),
}
# Filters of commands that look. A removal that ignored them would remove more than was looked at.
FILTERS = ("--model", "--state", "--before")

PROFILE = "profile_file"
# Of each set of parameters, a command takes one.
_ALTERNATIVES = (
    ("prompts", "token_ids", "pages", "trace", "plan", "all_"),
    ("match", "page"),
    ("shard", "ray"),
    ("objects", "summary"),
)
# Parameters that are of use only with one of others, in commands that have these.
_NEEDED = {
    "tokenizer": ("prompts",),
    "workers": ("ray",),
    "run_directory": ("shard", "ray"),
    "sample_slice": ("sample",),
    "pin_ttl": ("pin",),
    "update_catalog": ("catalog",),
    "quarantine": ("repair",),
    "dry_run": ("repair",),
}


def long_name(option: click.Parameter) -> str:
    """Return an option's long name, as --buffer-bytes."""
    return max(option.opts, key=len)


def variable_of(option: click.Parameter) -> str:
    """Return the variable of an option's name, as HICACHECTL_BUFFER_BYTES."""
    return PREFIX + long_name(option).removeprefix("--").replace("-", "_").upper()


def read_environment(command: click.Command) -> None:
    """Give the options of a command their variables."""
    for option in command.params:
        if isinstance(option, click.Option) and _is_read(command, option):
            option.envvar = variable_of(option)


def _is_read(command: click.Command, option: click.Option) -> bool:
    name = long_name(option)
    if name in NEVER or name in _NOT_IN.get(command.name or "", ()):
        return False
    return command.name not in REMOVERS or name in OF_REMOVERS


@contextmanager
def named_by_variable(ctx: click.Context) -> Iterator[None]:
    """Raise UsageError, which names the variable, for its wrong value."""
    try:
        yield
    except click.BadParameter as error:
        option = error.param
        if option is None or not _has_source(ctx, option.name, ParameterSource.ENVIRONMENT):
            raise
        raise UsageError(f"{option.envvar}: {error.message}") from None


def give_way(ctx: click.Context, profile_options: Collection[str]) -> None:
    """Drop values of the environment that contradict the command line, or that nothing needs.

    profile_options: parameters of which each says otherwise than --profile. Raises UsageError for
    a filter that would not be one of a removal.
    """
    _refuse_filters(ctx)
    if any(on_command_line(ctx, name) for name in profile_options if name != PROFILE):
        _drop(ctx, PROFILE)
    if is_given(ctx, PROFILE):
        _drop(ctx, *(name for name in profile_options if name != PROFILE))
    if ctx.params.get("shard") is not None:
        _drop(ctx, "lock", "resume")  # parts refuse them
    for names in _ALTERNATIVES:
        if any(on_command_line(ctx, name) for name in names):
            _drop(ctx, *names)
    for name, needed in _NEEDED.items():
        known = [other for other in needed if other in ctx.params]
        if known and not any(ctx.params[other] not in (None, "none", False) for other in known):
            _drop(ctx, name)


def on_command_line(ctx: click.Context, name: str) -> bool:
    """Return whether the command line has a parameter."""
    return _has_source(ctx, name, ParameterSource.COMMANDLINE)


def is_given(ctx: click.Context, name: str) -> bool:
    """Return whether the command line or the environment has a parameter."""
    return on_command_line(ctx, name) or _has_source(ctx, name, ParameterSource.ENVIRONMENT)


def _has_source(ctx: click.Context, name: str | None, source: ParameterSource) -> bool:
    return name is not None and ctx.get_parameter_source(name) is source


def _drop(ctx: click.Context, *names: str) -> None:
    for option in ctx.command.params:
        name = option.name
        if name in names and _has_source(ctx, name, ParameterSource.ENVIRONMENT):
            is_flag = isinstance(option, click.Option) and option.is_flag
            ctx.params[name] = False if is_flag else None
            ctx.set_parameter_source(name, ParameterSource.DEFAULT)


def _refuse_filters(ctx: click.Context) -> None:
    if ctx.command.name not in REMOVERS or ctx.resilient_parsing:
        return
    for option in ctx.command.params:
        variable = variable_of(option)
        if (
            long_name(option) in FILTERS
            and os.environ.get(variable)
            and not on_command_line(ctx, option.name or "")
        ):
            raise UsageError(
                f"{variable} is set, but {ctx.command_path} takes its filters from the command "
                f"line; give {long_name(option)}, or unset {variable}"
            )


def unused_variables(ctx: click.Context) -> Iterator[str]:
    """Yield a remark on each variable that no command reads."""
    own = {option.envvar for above in _chain(ctx) for option in above.command.params}
    asked = sorted(
        name
        for name in os.environ
        if name.startswith(PREFIX) and not name.startswith(_OF_TESTS) and name not in OTHERS
    )
    if not set(asked) - own:
        return
    options = [option for command in _commands(ctx.find_root()) for option in command.params]
    known = {option.envvar for option in options} | set(OTHERS)
    known.discard(None)
    named = {variable_of(option): long_name(option) for option in options}
    for variable in asked:
        if variable in known:
            continue
        if variable in named:
            yield (
                f"{variable}: {named[variable]} is not read from the environment; give it on the "
                "command line"
            )
        else:
            names = [str(name).removeprefix(PREFIX) for name in known]
            close = get_close_matches(variable.removeprefix(PREFIX), names, n=1)
            instead = (
                f"did you mean {PREFIX}{close[0]}?" if close else "unset it, or see hicachectl(1)"
            )
            yield f"{variable}: no option has this name; {instead}"


def _chain(ctx: click.Context | None) -> Iterator[click.Context]:
    while ctx is not None:
        yield ctx
        ctx = ctx.parent


def _commands(ctx: click.Context) -> Iterator[click.Command]:
    """Yield all commands of a group, and the group."""
    yield ctx.command
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            if command is not None:
                yield from _commands(click.Context(command, info_name=name, parent=ctx))
