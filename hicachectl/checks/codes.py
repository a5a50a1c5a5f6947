"""Codes of findings: severities, meanings, remedies.

`codes.toml` has the codes of the built-in checks. `explain`, hicachectl-findings(7), the table of
`verify` and the messages of `--repair` take their texts from there.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SEVERITIES = ("info", "warning", "error")

# Rules that give a finding another severity than its code. The check says which rule applies.
# A missing draft or trailing pool costs only hits: no server reads wrong data.
COSTS_HITS_ONLY = "costs-hits-only"
# The store evicts each pool separately, so orphans are normal.
POOLS_APART = "pools-apart"
# The store refuses to read an object of another size, so its page is a miss.
REFUSED_WHOLE = "refused-whole"
# The versions that the store gives objects repeat, so a rewrite may go unnoticed.
VERSIONS_RECUR = "versions-recur"
RULES = {
    COSTS_HITS_ONLY: "for drafts and trailing pools (Mamba states, sliding windows)",
    POOLS_APART: "on 3FS, which evicts each pool separately",
    REFUSED_WHOLE: "on Mooncake, which refuses to read the object",
    VERSIONS_RECUR: "if the store cannot tell whether a server rewrote the object",
}

# Words in commands. A run replaces STORE and OPTIONS by its own store and options, and other words
# if it knows their values. The user replaces the rest.
STORE, OPTIONS = "STORE", "OPTIONS"
PROFILE_OPTION = "--profile FILE"
# The option with which a command trusts a doubtful profile.
DESPITE = "--despite-profile"
BELOW = "the command below"
_REPAIR = f"hicachectl verify {STORE} {OPTIONS} --repair quarantine"
# hicachectl-runbooks(7) quotes some of the texts below and in codes.toml, in outputs that
# tests/conformance/test_runbooks.py compares. After a change, write these outputs again.
_REMOVED = "Remove the page with {command}. Servers compute the page again and write it."
_REPAIR_COST = (
    "One computation of the page, when a request next needs it. Until then, requests miss the "
    "pages that follow it. The quarantine takes the space of the page; hicachectl-restore(1) puts "
    "the page back."
)

# More words in commands, and the next steps after wrong pages were removed.
MODEL, TIME, SERVER = "MODEL", "TIME", "SERVER"
# A server without a key ignores the header.
_IN_MEMORY = (
    "Servers that have loaded these pages keep them in memory: while no request runs, empty it on "
    "each server (ADMIN_KEY: its admin key, or else its API key, or nothing) with "
    'curl -X POST -H "Authorization: Bearer $ADMIN_KEY" {server}/flush_cache'
)
_COMPUTED = (
    "Pages that a server computed after a wrong one are wrong, too, and no check finds them; see "
    "{what} with {command}"
)


def following_command(*, timed: bool) -> str:
    """Return the command that shows the pages that may have been computed from wrong pages.

    timed: whether the store keeps write times.
    """
    since = f" --since {TIME}" if timed else ""
    return f"hicachectl rm {STORE} --model {MODEL}{since} --dry-run"


def next_steps(
    command: str, *, server: str = SERVER, timed: bool = True, doubtful: bool = False
) -> tuple[str, str]:
    """Return what to do about servers after wrong pages were removed, one sentence for each step.

    command: the result of `following_command` for the user's store.
    server: URL of a server, quoted for a shell.
    timed: whether the store keeps write times.
    doubtful: whether the removed pages may have been right.
    """
    what = "those written since the first wrong one, which can be all that are left,"
    if not timed:
        what = "all pages of the model, because the store keeps no write times,"
    steps = (_IN_MEMORY.format(server=server), _COMPUTED.format(command=command, what=what))
    if not doubtful:
        return steps
    first, second = (f"If the removed pages were wrong: {s[:1].lower()}{s[1:]}" for s in steps)
    return first, second


AFTERWARDS = "".join(f" {step}." for step in next_steps(following_command(timed=True))).strip()


@dataclass(frozen=True, slots=True)
class Code:
    """A code of findings.

    severity: one of SEVERITIES.
    rules: severity under each rule that changes it.
    misleads: whether a server may have computed with the object, so that answers and later pages
        may be wrong.
    structural: whether the page group lacks objects, and no object is damaged.
    doubts: settings that cause the finding on healthy pages if the profile states them wrongly;
        empty if a wrong profile never causes the finding.
    remedy: next step for findings of a code that `--repair-code` refuses; empty for other codes.
        {command} stands for the command.
    meaning: what is wrong.
    effect: what a server does with the object or page.
    advice: what to look at before a repair.
    cost: what the remedy costs.
    command: command of the remedy; empty if the remedy is a repair of pages, or has no command.
    alternative: another command, better than a repair in some cases, because it keeps the pages, or
        because it frees their space, unlike a quarantine.
    detail: text of each finding, if all findings of the code have the same text.
    """

    name: str
    severity: str
    rules: Mapping[str, str] = field(default_factory=dict, hash=False)
    misleads: bool = False
    structural: bool = False
    doubts: str = ""
    remedy: str = ""
    meaning: str = ""
    effect: str = ""
    advice: str = ""
    cost: str = ""
    command: str = ""
    alternative: str = ""
    detail: str = ""

    def mending_command(self, severity: str) -> str:
        """Return the command that mends findings, with STORE and OPTIONS in it; "" if none does.

        severity: severity of the findings, which `rules` can change. A repair removes only errors
            unless an option names the code.
        """
        if self.command or self.remedy:
            return self.command
        return _REPAIR if severity == "error" else f"{_REPAIR} --repair-code {self.name}"

    @property
    def next_step(self) -> str:
        """The remedy as a clause for messages; empty for findings about pages."""
        return self.remedy.format(command=shown(self.command))

    @property
    def exceptions(self) -> str:
        """The other severities and their conditions, as a text; empty if there are none."""
        others = {rule: changed for rule, changed in self.rules.items() if changed != self.severity}
        return "; ".join(f"{changed} {RULES.get(rule, rule)}" for rule, changed in others.items())

    def explanation(self) -> dict[str, str]:
        """Return the texts of `explain`: meaning, effect, remedy, cost, afterwards, command."""
        command = shown(self.mending_command(self.severity))
        remedy = self.remedy[:1].upper() + self.remedy[1:] + "." if self.remedy else ""
        if not self.remedy and not self.command:
            remedy = _REMOVED
        return {
            "meaning": self.meaning,
            "effect": self.effect,
            "remedy": " ".join(filter(None, (self.advice, remedy.format(command=BELOW)))),
            "cost": self.cost or ("" if self.remedy else _REPAIR_COST),
            "afterwards": AFTERWARDS if self.misleads else "",
            "command": command,
        }


def is_removal(command: str) -> bool:
    """Return whether a command removes pages and keeps no copy."""
    return command.startswith("hicachectl rm ")


def is_repair(command: str) -> bool:
    """Return whether a command is a repair of pages."""
    return command.startswith(_REPAIR)


def shown(command: str) -> str:
    """Return a command as texts outside a run show it."""
    return command.replace(OPTIONS, PROFILE_OPTION)


@cache
def builtin_codes() -> dict[str, Code]:
    """Return the codes of `codes.toml` by name."""
    text = files("hicachectl.checks").joinpath("codes.toml").read_text(encoding="utf-8")
    return {name: Code(name, **members) for name, members in tomllib.loads(text).items()}


# Codes of wrong entries in the page tables of 3FS.
PAGE_INDEX_CODES = ("page-index-shared", "page-index-out-of-range", "page-index-free")
