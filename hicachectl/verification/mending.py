"""Commands that mend findings, with the store and the options of a run."""

from __future__ import annotations

import re
from shlex import quote

import msgspec

from hicachectl.checks.codes import OPTIONS, STORE
from hicachectl.formats.objects import AXES

_REPAIR = ("--repair", "quarantine")
_MODEL, _SIZE, _PROFILE = "MODEL", "SIZE", "FILE"
_GIVEN = "--profile"
# A label of `keys.labels` whose name is not escaped.
_LABEL = re.compile(r"([^\s%?]{2,}|[^\s%?-])((?: [a-z]+[0-9]+)*)")


class Mending(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a run's command line that remedies reuse.

    program: words before the command's name.
    store: name of the store, as the user gave it.
    options: words of the options that a next run needs, too.
    profiled: whether the run had a profile.
    deletes: whether objects can be deleted.
    quarantine: directory that a repair names; empty for the store's own.
    model: name of the profile's model, as in keys; empty without a profile.
    sizes: sizes of the profile by axis, as in keys; empty without a profile.
    stamped: whether the run writes a stamp.
    """

    program: tuple[str, ...] = ("hicachectl",)
    store: str = STORE
    options: tuple[str, ...] = ()
    profiled: bool = True
    deletes: bool = True
    quarantine: str = ""
    model: str = ""
    sizes: dict[str, int] = {}
    stamped: bool = False

    def command(self, template: str, deployment: str | None = None) -> str:
        """Return a command for a shell, from the command of a code.

        deployment: label of the deployment that the findings are about; None without exactly one.
        """
        words = self._named(template.split()[1:], deployment)
        if not self.deletes and (words[0] == "rm" or _REPAIR[0] in words):
            words = ["migrate", STORE, "DST"]
        repairs = _REPAIR[0] in words
        said: list[str] = []
        at = 0
        while at < len(words):
            word = words[at]
            if word.startswith("--") and word in self.options and OPTIONS in words:
                at += 1  # The run had this option.
                while at < len(words) and not words[at].startswith("--"):
                    at += 1
                continue
            if word == STORE:
                said.append(quote(self.store))
            elif word == OPTIONS:
                said += map(quote, self.options)
                said += [] if self.profiled or not repairs else ["--profile", "FILE"]
            elif word == _PROFILE and _GIVEN in self.options:
                said.append(quote(self.options[self.options.index(_GIVEN) + 1]))
            else:
                said.append(word)
            at += 1
        if repairs and self.quarantine:
            said += ["--quarantine", quote(self.quarantine)]
        return " ".join([*map(quote, self.program), *said])

    def _named(self, words: list[str], deployment: str | None) -> list[str]:
        """Put in the model's name and the sizes of a deployment, where they choose no other one."""
        label = _LABEL.fullmatch(deployment or self.model)
        if label is None or _MODEL not in words:
            return words
        named = [quote(label[1]) if word == _MODEL else word for word in words]
        found = re.findall(r"([a-z]+)([0-9]+)", label[2])
        stated = {axis: int(size) for axis, size in found if axis in AXES}
        others = any(self.sizes.get(axis) != size for axis, size in stated.items())
        if _SIZE in words and others:
            at = named.index(_SIZE) - 1
            chosen = [word for axis, size in stated.items() for word in (f"--{axis}", str(size))]
            named[at : at + 2] = chosen
        return named
