"""Reasons why a server did not use, or did not write, tokens of its store.

`reasons.toml` has the reasons that SGLang and its plug-in count, and the reasons that `hits` finds.
`explain`, hicachectl-findings(7) and `doctor` take their texts from there. Unlike a code of
findings, a reason has no severity and no repair, because it is about a server and a span of time,
not about an object.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from hicachectl.checks.codes import BELOW, shown
from hicachectl.formats.plugin_status import COUNTED, metric_of

SGLANG, PLUGIN, HITS = SOURCES = ("sglang", "plugin", "hits")


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason, named as metrics and documents spell it.

    source: name of the program that counts the reason, one of SOURCES.
    counters: names of the metrics that have the reason as a label. For an SGLang metric without
        such a label, the reason is the metric's name without `sglang:` and `_tokens_total`.
    meaning: event that the reason stands for.
    effect: reaction of the server.
    remedy: advice to the operator. {command} stands for the command.
    command: the next command, with STORE and OPTIONS in it; empty if there is none.
    """

    name: str
    source: str
    counters: tuple[str, ...]
    meaning: str
    effect: str
    remedy: str
    command: str = ""

    def explanation(self) -> dict[str, str]:
        """Return the texts of `explain`: meaning, effect, remedy, command."""
        return {
            "meaning": self.meaning,
            "effect": self.effect,
            "remedy": self.remedy.format(command=BELOW),
            "command": shown(self.command),
        }


@cache
def reasons() -> tuple[Reason, ...]:
    """Return all reasons; no two names are equal, even if `_` is read as `-`."""
    text = files("hicachectl.checks").joinpath("reasons.toml").read_text(encoding="utf-8")
    return tuple(
        Reason(name, source, tuple(members.pop("counters", _counters(name, source))), **members)
        for source, named in tomllib.loads(text).items()
        for name, members in named.items()
    )


def _counters(name: str, source: str) -> list[str]:
    """Return the plug-in's metrics with a label for a reason.

    The list is empty if another source counts the reason.
    """
    kinds = [kind for kind, names in COUNTED.items() if name in names and source == PLUGIN]
    return [metric_of(kind, name) for kind in kinds]


def reason_named(name: str) -> Reason | None:
    """Return a reason by its exact name; None if it is unknown, such as one of a later SGLang."""
    return next((reason for reason in reasons() if reason.name == name), None)
