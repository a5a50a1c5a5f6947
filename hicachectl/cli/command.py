"""Commands and groups on click: help in sections, settings, and errors in one line."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from difflib import get_close_matches
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource, augment_usage_errors

from hicachectl.cli.parameters import (
    OWN,
    OWN_VALUE,
    Option,
    Section,
    long_name,
    on_command_line,
    refuse_lonely,
    sections,
    takes_one_value,
)
from hicachectl.cli.session import Settings, remark
from hicachectl.cli.settings import (
    named_sources,
    refuse_server_variables,
    settle,
    unused_variables,
)
from hicachectl.formats.errors import UsageError
from hicachectl.text.terminal import MessageHandler

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

GLOBAL = Section("Global options", repeats=False, divided=OWN_VALUE)
_SCREEN = 40  # lines of --help
_NAMED = 3  # --help names at most so many options of a section that does not fit
_COLUMN = 24  # characters; the text of an option with longer names is on the next line
_HELP = ("--help", "--help-all")
_WORDS = "hicachectl.words"  # key in the context's meta


class Command(click.Command):
    """A command with a --help for one screen, where possible; --help-all shows everything.

    --help has the first paragraph of the description, the command's own options (section `OWN`)
    and the examples, then other sections while there is room. It only names the sections that do
    not fit.
    """

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **_with_examples(attributes))
        show_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show the whole description and all options, and exit.",
        )
        self.params += [show_all, *global_options()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments for `words_of`, then parse them.

        While a shell completes an option, parse only the arguments before it.
        """
        ctx.meta[_WORDS] = list(args)
        if ctx.resilient_parsing and args and args[-1].startswith("-"):
            args = args[:-1]  # the option still lacks its value, and the parser would refuse it
        with augment_usage_errors(ctx):  # errors of click's parser do not name the command
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with settings from the environment and the config file."""
        ctx.obj = _begin(ctx.find_root().params)
        refuse_server_variables(self)
        remark(ctx, *unused_variables(ctx))
        with named_sources(ctx), _pinged(ctx):
            settle(ctx)
            refuse_lonely(ctx)
            return super().invoke(ctx)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help for one screen."""
        own, *others = sections(self.get_params(ctx)).items()
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(cleandoc(self.help or "").split("\n\n")[0])
        described = [option for option in own[1] if long_name(option) not in _HELP]
        _write_section(ctx, formatter, own[0], described, brief=True)
        self.format_epilog(ctx, formatter)
        free = _SCREEN - formatter.getvalue().count("\n") - len(others) - 2
        named = []
        for title, options in others:
            part = click.HelpFormatter(width=formatter.width)
            _write_section(ctx, part, title, options, brief=True)
            lines = part.getvalue().count("\n")
            # The empty line before the section replaces the line that would name it.
            if lines <= free:
                free -= lines
                formatter.write_paragraph()
                formatter.write(part.getvalue())
            else:
                named.append((title, _names(options)))
        whole = f"{ctx.command_path} --help-all"
        formatter.write_paragraph()
        formatter.write_text(f"More options ({whole}):" if named else f"The whole help: {whole}")
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
                f"Environment variables can set options, such as {setting.envvar} for "
                f"{long_name(setting)}; see ENVIRONMENT in hicachectl(1)."
            )


class Group(click.Group):
    """A group of commands. For an unknown command, it suggests commands with similar names.

    is_program: whether the group is the program itself.
    """

    command_class = Command
    is_program = False

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **_with_examples(attributes))
        self.params += global_options(of_program=self.is_program)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command with its arguments.

        Raises UsageError for an unknown command. The message suggests commands.
        """
        name = args[0]
        if name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name):
            return super().resolve_command(ctx, args)
        close = get_close_matches(name, self.list_commands(ctx), n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(close)}?" if close else f"see {ctx.command_path} -h"
        raise UsageError(f"No such command {name!r}; {self.other_name(name) or meant}")

    def other_name(self, name: str) -> str:
        """Return which command does what other programs call `name`; "" for an unknown name."""
        return ""


def global_options(*, of_program: bool = False) -> list[click.Parameter]:
    """Return the options that can stand before and after the name of a command.

    of_program: return the program's own options, which environment variables can also set.
        Otherwise return the options of a command, which set the program's options.
    """
    own: dict[str, Any] = {"section": OWN, "variable": True}
    above: dict[str, Any] = {"section": GLOBAL, "expose_value": False, "callback": _set_above}
    where = own if of_program else above
    return [
        Option(
            ["-v", "--verbose"],
            count=True,
            help="Log more on stderr; -vv adds debug messages.",
            **where,
        ),
        Option(
            ["-q", "--quiet"],
            is_flag=True,
            help="Print no remarks, and no table if the exit status is 0.",
            **where,
        ),
        Option(
            ["--config"],
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Read named stores from FILE.  [default: ~/.config/hicachectl/config.toml]",
            **where,
        ),
    ]


def _set_above(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    """Set the program's option of the same name.

    Raises BadParameter if the program's option was given another value.
    """
    name, root = str(option.name), ctx.find_root()
    if not on_command_line(ctx, name):
        return
    given = on_command_line(root, name)
    if getattr(option, "count", False):
        value += root.params[name] if given else 0
    elif given and root.params[name] != value:
        said = takes_one_value([root.params[name], value])
        raise click.BadParameter(said, ctx=ctx, param=option)
    root.params[name] = value
    root.set_parameter_source(name, ParameterSource.COMMANDLINE)


def _begin(options: dict[str, Any]) -> Settings:
    """Set up the log, and return the settings of the program's options."""
    verbose, quiet = options["verbose"], options["quiet"]
    level = logging.ERROR if quiet else logging.WARNING - 10 * min(verbose, 2)
    logging.basicConfig(level=level, format="%(message)s", force=True, handlers=[MessageHandler()])
    return Settings(options["config"], quiet, bool(verbose))


def _with_examples(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a command with the examples of its docstring as its epilog."""
    text, title, examples = cleandoc(attributes.get("help") or "").partition("\n\nExamples:\n")
    shown = {"help": text, "epilog": f"\b\nExamples:\n{examples}"} if title else {}
    return {**attributes, **shown}


def _pinged(ctx: click.Context) -> AbstractContextManager[None]:
    """Return a context that pings --healthcheck-url. It pings nothing for dry runs and parts."""
    options = ctx.params
    url = options.get("healthcheck_url")
    if url is None or options.get("dry_run") or options.get("shard") is not None:
        return nullcontext()
    from hicachectl.cli.healthcheck import pinged

    return pinged(ctx, url)


def words_of(ctx: click.Context) -> list[str]:
    """Return the arguments of a command as they were given."""
    words: list[str] = list(ctx.meta[_WORDS])
    return words


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    formatter = ctx.make_formatter()
    assert isinstance(ctx.command, Command)  # no other class has the option
    ctx.command.format_whole_help(ctx, formatter)
    click.echo(formatter.getvalue().rstrip("\n"), color=ctx.color)
    ctx.exit()


def _write_section(
    ctx: click.Context,
    formatter: click.HelpFormatter,
    title: str,
    options: list[click.Option],
    *,
    brief: bool = False,
) -> None:
    """Write the options of a section, if it has options.

    brief: write only the first sentence of each option's text.
    """
    records = [record for option in options if (record := option.get_help_record(ctx))]
    if records:
        with formatter.section(title):
            if brief:
                short = [(names, _first_sentence(text)) for names, text in records]
                formatter.write_dl(short, col_max=_COLUMN)
            else:
                formatter.write_dl(records)


def _first_sentence(text: str) -> str:
    """Return the first sentence of an option's help, with the default and the bounds."""
    match = re.fullmatch(r"(.*?\.)(?:\s+[A-Z].*?)?(\s+\[[^\[\]]*\])?", text)
    return text if match is None else match[1] + (match[2] or "")


def _names(options: list[click.Option]) -> str:
    names = list(map(long_name, options))
    return ", ".join([*names[:_NAMED], *(["…"] if len(names) > _NAMED else [])])


def one_line(error: click.ClickException) -> str:
    """Return an error as `OBJECT: what happened; next step`."""
    text = _refusal(error).removesuffix(".")
    if "; " in text:
        return text
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return f"{text}; see {'hicachectl' if ctx is None else ctx.command_path} --help"


def _refusal(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        close = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
        return f"{error.option_name}: no such option{close}"
    if isinstance(error, click.BadOptionUsage):
        _, _, what = error.message.partition(f"{error.option_name!r} ")
        return f"{error.option_name}: {what or error.message}"
    if not isinstance(error, click.BadParameter) or error.param is None:
        return error.format_message()
    name = _place_of(error.param, error.ctx)
    if not isinstance(error, click.MissingParameter):
        return f"{name}: {error.message}"
    choices = getattr(error.param.type, "choices", ())
    instead = f"; give one of {', '.join(choices)}" if choices else ""
    return f"{name}: the {error.param.param_type_name} is missing{instead}"


def _place_of(parameter: click.Parameter, ctx: click.Context | None) -> str:
    """Return the name of the option, argument or environment variable that gave the value."""
    source = None if ctx is None or not parameter.name else ctx.get_parameter_source(parameter.name)
    if source is ParameterSource.ENVIRONMENT:
        return str(parameter.envvar)
    if isinstance(parameter, click.Option):
        return long_name(parameter)
    return parameter.human_readable_name.strip("[]")
