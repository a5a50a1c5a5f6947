"""Arguments and options: their sections in the help, and what the program does with their values.

The declaration of an option, or its section, states all its properties. No other module has a list
of options.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import click
from click.core import ParameterSource

from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from click.shell_completion import CompletionItem

F = TypeVar("F", bound="Callable[..., Any]")

PREFIX = "HICACHECTL_"


class Entry(NamedTuple):
    """Where the config file states the value of an option.

    member: member of a store's table.
    stores: parameters that can name the store; the first parameter with a value counts.
    """

    member: str
    stores: tuple[str, ...]


@dataclass(frozen=True)
class Divided:
    """What a run in parts does with an option.

    same: whether all parts must have the same value.
    shared_by: options that divide the run (--shard, --ray) and with which each part takes an equal
        share of the value.
    instead: next step of the message with which a part refuses the option; empty if parts take the
        option. {} stands for the option's name.
    on_cluster: whether a run with --ray takes the option.
    """

    same: bool = False
    shared_by: tuple[str, ...] = ()
    instead: str = ""
    on_cluster: bool = True


SAME = Divided(same=True)
"""All parts must have the same value."""

OWN_VALUE = Divided()
"""Each part has a value of its own."""

SHARED = Divided(shared_by=("--shard", "--ray"))
"""Each part takes an equal share of the value."""

AT_MERGE = Divided(instead="give {} to hicachectl merge")
"""The value is for the result of the whole run, so only hicachectl merge takes the option."""


@dataclass(frozen=True)
class Section:
    """A section of the help, with the properties that its options have by default.

    variable: whether its options are settings, which have an environment variable.
    describes: whether its options describe servers in place of --profile.
    repeats: see `Option`.
    divided: see `Option`.
    """

    title: str
    variable: bool = False
    describes: bool = False
    repeats: bool | None = None
    divided: Divided | None = None

    def option(self, *names: str, **attributes: Any) -> Callable[[F], F]:
        """Return the decorator of an option of the section, as `click.option` does."""
        return click.option(*names, cls=Option, section=self, **attributes)


OWN = Section("Options")
FILTERS = Section("Filters", repeats=True, divided=SAME)
CHECKS = Section("Checks", repeats=False)
REQUESTS = Section("Requests", repeats=False, divided=SAME)
REPAIR = Section("Repair", repeats=False, divided=SAME)
RECORDS = Section("Catalogs and stamps", divided=SAME)
START = Section("Start of the caches")
MEMORY = Section("Memory of servers")
OUTPUT = Section("Output", variable=True, repeats=False, divided=AT_MERGE)
TRANSFORM = Section("Another deployment", divided=SAME)
PARTS = Section("Parts of a run", repeats=False, divided=OWN_VALUE)
RESOURCES = Section("Resources", variable=True, repeats=True, divided=OWN_VALUE)
MOONCAKE = Section("Mooncake", variable=True, repeats=True, divided=OWN_VALUE)
PROFILE = Section("Profile", variable=True, describes=True, repeats=True, divided=SAME)
SERVERS = Section("Server flags", describes=True, repeats=True, divided=SAME)


class Parsed(click.ParamType[Any]):
    """A value that a function makes from a text. Values that are not texts stay as they are.

    parse: function that makes the value. It raises ValueError or UsageError with the reason.
    words: function that returns the texts that a shell offers.
    """

    def __init__(
        self,
        name: str,
        parse: Callable[[str], Any],
        words: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.name = name
        self.parse = parse
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text, or fail with the message of `parse`."""
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except (ValueError, UsageError) as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Offer the words."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(word) for word in self.words() if word.startswith(incomplete)]


class CommaList(Parsed):
    """A text with commas between its members, which a function may parse further."""

    def __init__(self, parse: Callable[[str], Any] = str) -> None:
        super().__init__("list", parse)


class _Given(click.Parameter):
    """A parameter that refuses an empty text, and two different values unless it is `multiple`.

    A script with an unset variable gives an empty text, which must not choose everything.

    absence: option to give in place of an empty value, such as --no-tag; empty if there is none.
    hide_input: whether values are secrets, which messages do not show.
    """

    absence = ""
    hide_input = False

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
            # Set the source before a refusal, so that the message can name the variable.
            ctx.set_parameter_source(str(self.name), source)
            for text in value if isinstance(value, (list, tuple)) else [value]:
                self._refuse_empty(ctx, text)
        return value, source

    def _single(self, ctx: click.Context, values: list[Any]) -> Any:
        different = list(dict.fromkeys(values))
        if len(different) > 1 and not ctx.resilient_parsing:
            self._refuse(ctx, takes_one_value(different, secret=self.hide_input))
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


def takes_one_value(given: Collection[object], *, secret: bool = False) -> str:
    """Return the message on several values of a parameter that takes one value.

    secret: whether to hide the values.
    """
    named = len(given) if secret else " and ".join(repr(str(value)) for value in given)
    return f"takes one value, but has {named}; give only one"


class Argument(_Given, click.Argument):
    """An argument that refuses what `_Given` refuses."""


class Option(_Given, click.Option):
    """An option of a section of the help; click's own options belong to the section `OWN`.

    needs: other options with their values, such as "--free SIZE" or "--prompts or --trace". One of
        them must be given with this option. Empty if the option needs no other.
    entry: where the config file states the value; None for an option that it cannot state.
    writes: whether the option makes the command write to its store. A command with such options
        writes only if one of them is given.

    By default, these three properties are those of the section:

    describes: whether the option describes servers in place of --profile.
    repeats: whether a command that a message suggests has the option again.
    divided: what a run in parts does with the option.

    variable: whether the option is a setting, which has an environment variable. None stands for
        the value of the section.
    """

    def __init__(
        self,
        *args: Any,
        section: Section,
        variable: bool | None = None,
        absence: str = "",
        needs: str = "",
        entry: Entry | None = None,
        writes: bool = False,
        describes: bool | None = None,
        repeats: bool | None = None,
        divided: Divided | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.section = section
        self.absence = absence
        self.needs = needs
        self.entry = entry
        self.writes = writes
        self.describes = section.describes if describes is None else describes
        self.repeats = section.repeats if repeats is None else repeats
        self.divided = section.divided if divided is None else divided
        if section.variable if variable is None else variable:
            self.envvar = variable_of(self)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Make the parser keep every value, so that `_single` sees them. click keeps the last."""
        if self.is_flag or self.count or self.multiple:
            super().add_to_parser(parser, ctx)
        else:
            parser.add_option(
                obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs
            )


argument = partial(click.argument, cls=Argument)
"""`click.argument` for every command."""

own_option = OWN.option
"""`click.option` for a command's own option."""

equal_option = Section(OWN.title, divided=SAME).option
"""`click.option` for a command's own option that must have the same value in all parts."""

own_setting = partial(own_option, variable=True)
"""`click.option` for a command's own option that is a setting."""


def removed_option(name: str, instead: str) -> Callable[[F], F]:
    """Return the decorator of an option that only earlier releases have, and that is refused.

    instead: next step in the message.
    """

    def refuse(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None and not ctx.resilient_parsing:
            raise click.UsageError(f"{name}: no longer an option; {instead}")

    return own_option(
        name, hidden=True, expose_value=False, callback=refuse, repeats=False, divided=OWN_VALUE
    )


def stack(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator for several options. The help lists the options in the same order."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def refuse_lonely(ctx: click.Context) -> None:
    """Raise click.UsageError for an option without the option that it needs."""
    options = options_of(ctx.command)
    given = {
        long_name(option)
        for option in options
        if (value := ctx.params.get(str(option.name))) not in (None, ()) and value is not False
    }
    for option in options:
        needed = {word for word in option.needs.split() if word.startswith("--")}
        if needed and long_name(option) in given and needed.isdisjoint(given):
            raise click.UsageError(f"{long_name(option)} needs {option.needs}")


def options_of(command: click.Command) -> list[Option]:
    """Return the options of a command, without click's own options for the help."""
    return [parameter for parameter in command.params if isinstance(parameter, Option)]


def sections(parameters: Iterable[click.Parameter]) -> dict[str, list[click.Option]]:
    """Return the options that the help shows, by section.

    `OWN` comes first, then the other sections in the order in which the command declares them.
    """
    found: dict[str, list[click.Option]] = {OWN.title: []}
    for parameter in parameters:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            section = parameter.section if isinstance(parameter, Option) else OWN
            found.setdefault(section.title, []).append(parameter)
    return found


def long_name(option: click.Parameter) -> str:
    """Return an option's long name, such as --buffer-bytes."""
    return max(option.opts, key=len)


def variable_of(option: click.Parameter) -> str:
    """Return the environment variable of an option, such as HICACHECTL_BUFFER_BYTES."""
    return PREFIX + long_name(option).removeprefix("--").replace("-", "_").upper()


def on_command_line(ctx: click.Context, name: str) -> bool:
    """Return whether the command line gives a parameter its value."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
