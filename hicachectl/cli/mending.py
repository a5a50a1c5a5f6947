"""Commands that messages give, made from the words of the command that was run."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hicachectl.cli.command import words_of
from hicachectl.cli.parameters import Option
from hicachectl.cli.session import store_name
from hicachectl.formats.objects import AXES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import click

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.verification.report_text import Mending


def mending_of(
    ctx: click.Context,
    text: str,
    store: Store,
    *,
    profile: Profile | None,
    quarantine: str = "",
    without: Collection[str] = (),
) -> Mending:
    """Return what commands that mend findings have in common with this one.

    text: the STORE argument.
    profile: the given profile, not an inferred one.
    quarantine: the given directory.
    without: parameters that the next commands do not have, although their options say so.
    """
    from hicachectl.backends.capabilities import SideFiles
    from hicachectl.verification.report_text import Mending

    own = store.side_directory() if isinstance(store, SideFiles) else None
    # A URL can have a password; NAME: of the config file has none.
    named = "://" not in text
    return Mending(
        program=_program(ctx),
        store=text if named else store_name(ctx, text),
        options=tuple(_next_words(ctx, without)),
        profiled=profile is not None,
        deletes=store.traits.deletes,
        quarantine=quarantine or ("" if own is not None else "DIR"),
        model="" if profile is None else profile.key_model,
        stamped=bool(ctx.params.get("stamp")),
        sizes={} if profile is None else {axis: getattr(profile, axis) for axis in AXES},
    )


def with_value(ctx: click.Context, option: str, value: str) -> str:
    """Return the command with another value of an option, for a shell; secrets are masked."""
    from hicachectl.backends.urls import without_secrets

    words = words_of(ctx)
    for number, word in enumerate(words):
        if word == option and number + 1 < len(words):
            words[number + 1] = value
        elif word.startswith(f"{option}="):
            words[number] = f"{option}={value}"
    return without_secrets(shlex.join([*_program(ctx), str(ctx.info_name), *words]))


def _program(ctx: click.Context) -> tuple[str, ...]:
    config = ctx.obj.config
    return ("hicachectl", *(() if config is None else ("--config", str(config))))


def _next_words(ctx: click.Context, without: Collection[str]) -> Iterator[str]:
    """Yield the given options that a next command needs, too, as they were given."""
    values, _, order = ctx.command.make_parser(ctx).parse_args(words_of(ctx))
    for param in dict.fromkeys(order):
        if not isinstance(param, Option) or not param.repeats or param.name in without:
            continue
        value = values[param.name]
        for one in dict.fromkeys(value) if isinstance(value, list) else [value]:
            yield max(param.opts, key=len)
            if not param.is_flag:
                yield str(one)
