"""Sentences that several modules share, so that the same problem reads the same everywhere.

A message names the object or option first, then says what happened, then gives the next step:
`PLACE: what happened; next step`.
"""

from __future__ import annotations

import sys
from shlex import quote
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

GIVE_PROFILE = "give --profile, --model-config or --server"
WRITE_PROFILE = "write a profile file, see hicachectl-profile(1)"
RUN_PROBE = (
    "run hicachectl profile --print-probe > probe.py, and in the server's environment python "
    "probe.py with the server's flags; it prints the profile"
)
NAME_WEIGHTS = (
    "give the weights a name, with --weights TEXT or with the setting identity of the plug-in"
)
OTHER_BYTES = "other weights, dtype, layout or rank"  # differences that a trailer shows
PAGES_COMPARED = (
    "pages are compared with each other, so a pool, part or rank missing everywhere goes "
    f"unnoticed; {GIVE_PROFILE}"
)


def reason_of(error: Exception) -> str:
    """Return the reason that an error gives, in one line without a final period.

    The reason of a system error has neither its number nor its file name.
    """
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text).partition("\n")[0].rstrip(" .")


def failed(place: object, action: str, error: Exception, next_step: str = "") -> str:
    """Return the message for a failed system call.

    place: file, directory or URL.
    action: words that follow "cannot", such as "read the snapshot".
    """
    return with_next(f"{place}: cannot {action}: {reason_of(error)}", next_step)


def lost_stdout(error: OSError) -> str:
    """Return the message for a result that cannot be written."""
    return (
        f"Cannot write to stdout: {reason_of(error)}; check the file or pipe behind it, or give -o"
    )


def with_next(problem: str, next_step: str) -> str:
    """Append the next step to a problem; an empty step is left out."""
    return f"{problem}; {next_step}" if next_step else problem


def divided(message: str) -> tuple[str, str]:
    """Return the problem and the next step of a message; inverse of `with_next`."""
    problem, _, next_step = message.partition("; ")
    return problem, next_step


def not_one_of(name: str, value: object, choices: Iterable[object]) -> str:
    """Return the message for a value that is not among the choices."""
    return f"{name}: {value!r} is not one of {', '.join(map(str, choices))}"


def lock_held(path: object) -> str:
    """Return the message for a run that did nothing because of a lock."""
    return f"{path}: another process holds this lock; nothing was done"


def one_place(source: str, evidence: str, option: str) -> str:
    """Return the message for a SRC and DST that are one store, where an option would remove pages.

    evidence: text that shows that they are one store.
    """
    return (
        f"{source}: SRC and DST are one place: {evidence}; give another destination, or leave out "
        f"{option}"
    )


def conflict(what: str) -> str:
    """Return the message for an object of the destination that differs from the object to write.

    what: text that says how the objects differ.
    """
    return (
        f"{what}; check both stores with hicachectl verify; migrate --if-exists overwrite replaces "
        "the page in the destination"
    )


def over_buffer(nbytes: int, buffer_bytes: int) -> str:
    """Return the reason why something does not fit into the buffer of --buffer-bytes."""
    return (
        f"needs {nbytes} bytes of memory, but --buffer-bytes is {buffer_bytes}; give a larger "
        "--buffer-bytes"
    )


def install_step(*packages: str) -> str:
    """Return the next step that installs packages for the Python that runs this program.

    packages: their names on the Python package index. An extra of hicachectl cannot stand in their
        place, because the index does not have hicachectl.
    """
    return f"run {quote(sys.executable)} -m pip install {' '.join(packages)}"


def no_quarantine(url: str, *, nameable: bool) -> str:
    """Return the message for a store without a default quarantine.

    nameable: whether its URL may name a directory for side files.
    """
    either = f", or {_NAME_SIDE_DIRECTORY}" if nameable else ""
    return f"{url}: no default quarantine; give --quarantine DIR{either}"


def no_stamp_place(url: str, *, nameable: bool) -> str:
    """Return the message for a store without a place for stamps. nameable: see `no_quarantine`."""
    either = f"{_NAME_SIDE_DIRECTORY}, or " if nameable else ""
    return f"{url}: no directory for a stamp; {either}leave out --stamp and --weights-version"


_NAME_SIDE_DIRECTORY = "add side_directory=DIR to the URL"


def needs_profile(what: str) -> str:
    """Return the message for a request that needs a profile."""
    return f"{what} needs a profile; {GIVE_PROFILE}"


def inferred_refused(what: str) -> str:
    """Return the message for a request that an inferred profile cannot serve."""
    return (
        f"{what} needs a given profile, not one inferred from the store; {GIVE_PROFILE}; "
        "hicachectl profile --server URL -o prod.toml writes a profile file"
    )
