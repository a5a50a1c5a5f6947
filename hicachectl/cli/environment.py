"""The variables of settings: HICACHECTL_NAME for the option --name, in every command that has it.

Settings say how a command works, or what a place is always used with. What a command does, chooses
or removes is said on the command line only. An option's declaration says which it is: see `Option`.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from hicachectl.formats.errors import HicacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "HICACHECTL_"
_OF_TESTS = "HICACHECTL_TEST_"


def long_name(option: click.Parameter) -> str:
    """Return an option's long name, as --buffer-bytes."""
    return max(option.opts, key=len)


def variable_of(option: click.Parameter) -> str:
    """Return the variable of an option's name, as HICACHECTL_BUFFER_BYTES."""
    return PREFIX + long_name(option).removeprefix("--").replace("-", "_").upper()


def unused_variables(ctx: click.Context) -> Iterator[str]:
    """Yield a remark on each variable that no command reads."""
    own = {option.envvar for above in _chain(ctx) for option in above.command.params}
    asked = {
        name for name in os.environ if name.startswith(PREFIX) and not name.startswith(_OF_TESTS)
    } - own
    if not asked:
        return
    from hicachectl.profiles.server import API_KEY_VARIABLE

    if asked == {API_KEY_VARIABLE}:
        return  # without importing every command
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


@contextmanager
def named_variables(ctx: click.Context) -> Iterator[None]:
    """Name the variables whose values an error is about.

    They stand in place of their options, and before a path that they name.
    """
    try:
        yield
    except click.BadParameter:  # `one_line` names it
        raise
    except click.UsageError as error:
        raise click.UsageError(_naming_variables(ctx, error.message), error.ctx) from None
    except HicacheError as error:
        error.args = (_naming_variables(ctx, str(error)),)
        raise


def _naming_variables(ctx: click.Context, text: str) -> str:
    for above in _chain(ctx):
        for option in above.command.params:
            source = above.get_parameter_source(str(option.name))
            if source is not ParameterSource.ENVIRONMENT or str(option.envvar) in text:
                continue
            named = re.sub(rf"(?<![\w-]){long_name(option)}(?![\w-])", str(option.envvar), text)
            value = above.params.get(str(option.name))
            if named == text and isinstance(value, Path) and str(value) in text:
                named = f"{option.envvar}: {text}"
            text = named
    return text


def every_command(ctx: click.Context) -> Iterator[click.Command]:
    """Yield a group and all its commands, which are imported."""
    yield ctx.command
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            if command is not None:
                yield from every_command(click.Context(command, info_name=name, parent=ctx))


def _chain(ctx: click.Context | None) -> Iterator[click.Context]:
    while ctx is not None:
        yield ctx
        ctx = ctx.parent
