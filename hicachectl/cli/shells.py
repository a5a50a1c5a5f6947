"""click's completion in bash, zsh and fish, with corrections for each shell."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from click.shell_completion import (
    BashComplete,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_BREAKS = ":=@"  # where bash divides words, and store URLs have a character


class _WholeValues(ShellComplete):
    """A shell whose candidates replace the whole word, also that of --option=value."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return the candidates; for --option=value with the option."""
        items = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if equals and option.startswith("-"):
            for item in items:
                item.value = f"{option}={item.value}"
        return items


class Bash(_WholeValues, BashComplete):
    """Completion of bash, which divides words, and replaces only the last piece of one."""

    _done = 0  # characters of the word before its last piece

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the incomplete one, and that, each as it was written."""
        words, number = _words(), int(os.environ["COMP_CWORD"])
        *args, incomplete = joined_words([*words[1:number], *words[number : number + 1]])
        last = words[number] if number < len(words) else ""
        self._done = len(incomplete) - len(last.lstrip(_BREAKS))
        return args, incomplete

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """Return the line of a candidate, without what comes before the last piece."""
        return f"{item.type},{item.value[self._done :]}"


class Zsh(_WholeValues, ZshComplete):
    """Completion of zsh."""

    source_template = ZshComplete.source_template.replace("${words[*]}", "${(F)words}")

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the incomplete one, and that."""
        words, number = _words(), int(os.environ["COMP_CWORD"])
        return words[1:number], words[number] if number < len(words) else ""


class Fish(_WholeValues, FishComplete):
    """Completion of fish, with candidates and descriptions that contain commas."""

    source_template = FishComplete.source_template.replace(
        'string split ","', 'string split --max 1 ","'
    )


def add_shells() -> None:
    """Make click use these classes."""
    for name, shell in (("bash", Bash), ("zsh", Zsh), ("fish", Fish)):
        add_completion_class(shell, name)


def joined_words(words: list[str]) -> list[str]:
    """Return words that bash has divided: `prod`, `:` as `prod:`, and URLs and --x=y as a whole."""
    from hicachectl.backends.urls import SCHEMES

    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        is_url = before.removesuffix(":") in SCHEMES or "://" in before
        starts = word in (":", "=") or (is_url and word == "@")
        goes_on = word[:1] != "-" and (
            before.endswith("=") or (is_url and before.endswith((":", "@")))
        )
        if before and (starts or goes_on):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _words() -> list[str]:
    """Return the words of the line without quotes. The variable has one word on each line."""
    return [" ".join(split_arg_string(word)) for word in os.environ["COMP_WORDS"].split("\n")]
