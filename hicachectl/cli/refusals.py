"""The errors of click as one line, with a next step."""

from __future__ import annotations

import click
from click.core import ParameterSource

from hicachectl.cli.environment import long_name


def one_line(error: click.ClickException) -> str:
    """Return an error as `OBJECT: what happened; next step`."""
    text = _sentence(error).removesuffix(".")
    if "; " in text:
        return text
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return f"{text}; see {'hicachectl' if ctx is None else ctx.command_path} --help"


def _sentence(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        close = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
        return f"{error.option_name}: no such option{close}"
    if isinstance(error, click.BadOptionUsage):
        _, _, what = error.message.partition(f"{error.option_name!r} ")
        return f"{error.option_name}: {what or error.message}"
    if not isinstance(error, click.BadParameter) or error.param is None:
        return error.format_message()
    name = _name(error.param, error.ctx)
    if not isinstance(error, click.MissingParameter):
        return f"{name}: {error.message}"
    choices = getattr(error.param.type, "choices", ())
    instead = f"; give one of {', '.join(choices)}" if choices else ""
    return f"{name}: the {error.param.param_type_name} is missing{instead}"


def _name(parameter: click.Parameter, ctx: click.Context | None) -> str:
    """Return the option, the argument, or the variable that has the value."""
    source = None if ctx is None or not parameter.name else ctx.get_parameter_source(parameter.name)
    if source is ParameterSource.ENVIRONMENT:
        return str(parameter.envvar)
    if isinstance(parameter, click.Option):
        return long_name(parameter)
    return parameter.human_readable_name.strip("[]")
