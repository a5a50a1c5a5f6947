"""Commands and groups of our own on click: help in sections, and settings from elsewhere."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from functools import partial
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import click
from click.core import ParameterSource, augment_usage_errors

from hicachectl.cli.environment import (
    long_name,
    named_variables,
    unused_variables,
    variable_of,
)
from hicachectl.cli.precedence import named_settings, settle
from hicachectl.cli.session import remark
from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

F = TypeVar("F", bound="Callable[..., Any]")

OWN = "Options"
FILTERS = "Filters"
CHECKS = "Checks"
REPAIR = "Repair"
RECORDS = "Catalogs and stamps"
OUTPUT = "Output"
TRANSFORM = "Another deployment"
PARTS = "Parts of a run"
RESOURCES = "Resources"
MOONCAKE = "Mooncake"
PROFILE = "Profile"
SERVERS = "Server flags"  # with which --model-config and --server build a profile
_SETTINGS = (OUTPUT, RESOURCES, MOONCAKE, PROFILE)  # their options have a variable
_SCREEN = 40  # lines of --help
_NAMED = 3  # options of a section that --help only names
_COLUMN = 24  # characters of an option's names, else its text is on the next line
_HELP = ("--help", "--help-all")


class CommaList(click.ParamType[Any]):
    """A text of members between commas; subclasses parse it further."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Pass the text through."""
        return value


class _Given(click.Parameter):
    """A parameter that refuses an empty text, and a second value if it takes one.

    A script with an unset variable gives an empty text, which must not choose everything.
    """

    absence = ""

    def consume_value(self, ctx: click.Context, opts: Any) -> tuple[Any, ParameterSource]:
        """Return the value as given, and its source.

        Raises BadParameter for an empty text, for a list with an empty member, and for several
        values of a parameter that takes one.
        """
        given = opts.get(self.name)
        if isinstance(given, list) and not self.multiple:
            opts = {**opts, str(self.name): self._single(ctx, given)}
        value, source = super().consume_value(ctx, opts)
        if source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            ctx.set_parameter_source(str(self.name), source)  # so that an error names the variable
            for text in value if isinstance(value, (list, tuple)) else [value]:
                self._refuse_empty(ctx, text)
        return value, source

    def _single(self, ctx: click.Context, values: list[Any]) -> Any:
        different = list(dict.fromkeys(values))
        if len(different) > 1 and not ctx.resilient_parsing:
            named = " and ".join(map(repr, different))
            self._refuse(ctx, f"takes one value, but has {named}; leave out all but one")
        return values[-1]

    def _refuse_empty(self, ctx: click.Context, text: Any) -> None:
        if ctx.resilient_parsing or not isinstance(text, str):
            return
        if not text.strip():
            instead = self.absence or ("" if self.required else "leave it out")
            self._refuse(ctx, f"empty; give a value{instead and ', or '}{instead}")
        if isinstance(self.type, CommaList) and not all(map(str.strip, text.split(","))):
            self._refuse(ctx, f"{text!r} has an empty member; write one comma between members")

    def _refuse(self, ctx: click.Context, text: str) -> NoReturn:
        raise click.BadParameter(text, ctx=ctx, param=self)


class Argument(_Given, click.Argument):
    """An argument."""


class Option(_Given, click.Option):
    """An option of a section of the help; click's own options belong to the section `OWN`.

    variable: whether the option is a setting, which has a variable; None: as others of its section.
    absence: the option that says in a word what an empty value could mean.
    """

    def __init__(
        self,
        *args: Any,
        section: str,
        variable: bool | None = None,
        absence: str = "",
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.section = section
        self.absence = absence
        if section in _SETTINGS if variable is None else variable:
            self.envvar = variable_of(self)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Make the parser keep every value, of which click would keep the last."""
        if self.is_flag or self.count or self.multiple:
            super().add_to_parser(parser, ctx)
        else:
            parser.add_option(
                obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs
            )


class OptionOfSection(Protocol):
    """`click.option` for the options of a section."""

    def __call__(self, *names: str, **attributes: Any) -> Callable[[F], F]:
        """Return the decorator of an option."""


def in_section(title: str) -> OptionOfSection:
    """Return `click.option` for the options of a section."""

    def option(*names: str, **attributes: Any) -> Callable[[F], F]:
        return click.option(*names, cls=Option, section=title, **attributes)

    return option


own_option = in_section(OWN)
"""`click.option` for a command's own option."""

own_setting = partial(own_option, variable=True)
"""`click.option` for a command's own option that is a setting."""


def removed_option(name: str, instead: str) -> Callable[[F], F]:
    """Return the decorator of an option that is refused, with what to do instead."""

    def refuse(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None and not ctx.resilient_parsing:
            raise click.UsageError(f"{name}: no longer an option; {instead}")

    return own_option(name, hidden=True, expose_value=False, callback=refuse)


argument = partial(click.argument, cls=Argument)
"""`click.argument` for every command."""


def section_of(parameter: click.Parameter) -> str:
    """Return the section of an option."""
    return parameter.section if isinstance(parameter, Option) else OWN


def sections(parameters: Iterable[click.Parameter]) -> dict[str, list[click.Option]]:
    """Return the options that help shows by section: `OWN` first, then as declared."""
    found: dict[str, list[click.Option]] = {OWN: []}
    for parameter in parameters:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            found.setdefault(section_of(parameter), []).append(parameter)
    return found


def _refuse_server_flags(parameters: Iterable[click.Parameter]) -> None:
    """Raise UsageError for a variable of a server's flag, which earlier releases read."""
    for option in parameters:
        if section_of(option) == SERVERS and os.environ.get(variable := variable_of(option)):
            raise UsageError(
                f"{variable}: flags of servers are no longer read from the environment; unset it, "
                f"and give {long_name(option)} or --profile"
            )


class Command(click.Command):
    """A command whose --help fits a screen if it can; --help-all shows everything.

    --help has the first paragraph of the description, the options of `OWN` and the examples, then
    other sections while there is room. The rest are named.
    """

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show the whole description and all options, and exit.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, or those before an option that a shell completes."""
        if ctx.resilient_parsing and args and args[-1].startswith("-"):
            args = args[:-1]  # without its value, which a shell asks for, nothing would be parsed
        with augment_usage_errors(ctx):  # those of the parser do not know their command
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with its settings of the environment and the config file."""
        _refuse_server_flags(self.params)
        for text in unused_variables(ctx):
            remark(ctx, text)
        with named_variables(ctx):
            settle(ctx, self._profile_options())
            with named_settings(ctx):
                return super().invoke(ctx)

    def _profile_options(self) -> frozenset[str]:
        """Return the parameters that choose a profile otherwise than --profile."""
        chosen = (o.name for o in self.params if section_of(o) in (PROFILE, SERVERS))
        return frozenset(name for name in chosen if name) - {
            "profile_file",
            "weights",
            "draft_weights",
        }

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help that fits a screen."""
        own, *others = sections(self.get_params(ctx)).items()
        self.format_usage(ctx, formatter)
        _write_paragraph(formatter, cleandoc(self.help or "").split("\n\n")[0])
        described = [option for option in own[1] if long_name(option) not in _HELP]
        _write_section(ctx, formatter, own[0], described, brief=True)
        self.format_epilog(ctx, formatter)
        free = _SCREEN - formatter.getvalue().count("\n") - len(others) - 2
        named = []
        for title, options in others:
            part = click.HelpFormatter(width=formatter.width)
            _write_section(ctx, part, title, options, brief=True)
            lines = part.getvalue().count("\n")  # and an empty one, but none among the named
            if lines <= free:
                free -= lines
                formatter.write_paragraph()
                formatter.write(part.getvalue())
            else:
                named.append((title, _names(options)))
        rest = f"{ctx.command_path} --help-all describes"
        formatter.write_paragraph()
        formatter.write_text(f"{rest} {'these, too:' if named else 'more.'}")
        with formatter.indentation():
            if named:
                formatter.write_dl(named)

    def format_whole_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the whole description and all options by section."""
        own, *others = sections(self.get_params(ctx)).items()
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        _write_section(ctx, formatter, *own)
        self.format_epilog(ctx, formatter)
        for title, options in others:
            _write_section(ctx, formatter, title, options)
        setting = next((option for option in self.get_params(ctx) if option.envvar), None)
        if setting is not None:
            formatter.write_paragraph()
            formatter.write_text(
                f"The environment can have settings, such as {setting.envvar} for "
                f"{long_name(setting)}; see ENVIRONMENT in hicachectl(1)."
            )


class Group(click.Group):
    """A group that suggests commands."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command with its arguments. Raises UsageError, which names close commands."""
        name = args[0]
        if name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name):
            return super().resolve_command(ctx, args)
        close = get_close_matches(name, self.list_commands(ctx), n=3, cutoff=0.5)
        instead = f"did you mean {' or '.join(close)}?" if close else f"see {ctx.command_path} -h"
        raise UsageError(f"No such command {name!r}; {instead}")


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    formatter = ctx.make_formatter()
    assert isinstance(ctx.command, Command)  # no other class has the option
    ctx.command.format_whole_help(ctx, formatter)
    click.echo(formatter.getvalue().rstrip("\n"), color=ctx.color)
    ctx.exit()


def _write_paragraph(formatter: click.HelpFormatter, text: str) -> None:
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(text)


def _write_section(
    ctx: click.Context,
    formatter: click.HelpFormatter,
    title: str,
    options: list[click.Option],
    *,
    brief: bool = False,
) -> None:
    """Write the options of a section; nothing without options. brief: only first sentences."""
    records = [record for option in options if (record := option.get_help_record(ctx))]
    if records:
        with formatter.section(title):
            if brief:
                short = [(names, _first_sentence(text)) for names, text in records]
                formatter.write_dl(short, col_max=_COLUMN)
            else:
                formatter.write_dl(records)


def _first_sentence(text: str) -> str:
    """Return the first sentence of an option's help, with the defaults and bounds at its end."""
    match = re.fullmatch(r"(.*?\.)(?:\s+[A-Z].*?)?(\s+\[[^\[\]]*\])?", text)
    return text if match is None else match[1] + (match[2] or "")


def _names(options: list[click.Option]) -> str:
    names = list(map(long_name, options))
    return ", ".join([*names[:_NAMED], *(["…"] if len(names) > _NAMED else [])])
