"""Forms of option values, and existing files that a result must not replace."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicachectl.checks.registry import page_codes, remedies
from hicachectl.cli.parameters import CommaList, Parsed
from hicachectl.formats.errors import UsageError
from hicachectl.formats.sizes import parse_size
from hicachectl.text.units import Ago

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from urllib.parse import SplitResult

    from click.shell_completion import CompletionItem

FILE = click.Path(dir_okay=False, path_type=Path)
INPUT = click.Path(allow_dash=True)  # the value stays a text, because Path would change patterns
FORMATS = ("table", "json", "jsonl", "csv", "parquet", "arrow")

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_S = 100 * 365.25 * 86400
_LATEST_S = 2**63 // 10**9 - 1  # stores keep times as nanoseconds in 64 bits
_HEAD_BYTES = 1 << 20
_PAGE_NAME = re.compile(r"[0-9a-f]{64}")
# Members that together identify the kind of a file.
_KINDS = {
    "a profile": {"model", "page_size", "layout", "pools"},
    "a model's config": {"architectures"},
    "the record of a run": {"form", "run", "version"},
    "a marker of a store": {"form", "suffix"},
}


def _shown(value: str) -> str:
    return repr(value) if len(value) <= 40 else f"{value[:37]!r}..."


def _duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 10m, 2h or 7d."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is None:
        raise ValueError(f"{_shown(text)} is not a duration; write 90s, 10m, 2h or 7d")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _LONGEST_S:
        raise ValueError(f"{_shown(text)} is longer than 100 years")
    return seconds


def _positive_duration(text: str) -> float:
    """Return the seconds of a duration of a millisecond or more."""
    seconds = _duration(text)
    if seconds < 0.001:
        raise ValueError(f"{_shown(text)} is shorter than 1 ms; write 90s, 10m, 2h or 7d")
    return seconds


def _share(text: str) -> float:
    """Return a share from 0 to 1, such as 0.9 or 90%."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%?)", text)
    share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share <= 1:
        raise ValueError(f"{_shown(text)} is not a share; write 0.9 or 90%")
    return share


def _room(text: str) -> Any:
    """Return the bytes of a size, or the share of a percentage."""
    from hicachectl.prewarming.targets import parse_room

    return parse_room(text)


def moment(text: str) -> float:
    """Return the Unix seconds of a time in ISO 8601; an `Ago` for an age such as 7d."""
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?[smhd]", text):
        return Ago(_duration(text))
    try:
        seconds = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{_shown(text)} is neither ISO 8601 nor an age such as 7d") from None
    if abs(seconds) > _LATEST_S:
        raise ValueError(f"{_shown(text)} is not between the years 1678 and 2262")
    return seconds


def _positive_number(text: str) -> float:
    """Return a number above 0."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{_shown(text)} is not a number") from None
    if not 0 < number < math.inf:  # every comparison with nan is false, so nan is refused, too
        raise ValueError(f"{_shown(text)} is not above 0, or not finite")
    return number


def _repair_code(name: str, choices: tuple[str, ...]) -> str:
    """Return a finding code that `verify --repair` can act on."""
    if instead := remedies().get(name):
        raise ValueError(f"{name} does not concern a page, so --repair cannot act; {instead}")
    return _one_of(name, choices)


def _one_of(name: str, choices: tuple[str, ...]) -> str:
    if name not in choices:
        raise ValueError(f"{name!r} is not one of {', '.join(choices)}")
    return name


def _healthcheck_url(text: str) -> SplitResult:
    """Return the parts of a URL. Errors do not show the URL, because its path is a secret."""
    from hicachectl.backends.http import service_url

    parts = service_url(text)
    if parts is None or parts.scheme not in ("http", "https"):
        raise ValueError("not an http or https URL; give https://HOST/…")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError("the URL must have no credentials and no #; give one without")
    return parts


DURATION = Parsed("duration", _duration)
POSITIVE_DURATION = Parsed("duration", _positive_duration)
SHARE = Parsed("share", _share)
TIME = Parsed("time", moment)
HEALTHCHECK_URL = Parsed("url", _healthcheck_url)
POSITIVE_NUMBER = Parsed("number", _positive_number)
SIZE = Parsed("size", parse_size)
POSITIVE_SIZE = Parsed("size", partial(parse_size, least=1))
ROOM = Parsed("room", _room)


class Count(click.IntRange):
    """A whole number. The help shows its bounds only if it has an upper bound."""

    name = "number"

    def _describe_range(self) -> str:
        """Return the bounds as help shows them; click would write 1<=x<=64."""
        return "" if self.max is None else f"{self.min} to {self.max}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number, or fail with the bound that it crosses."""
        number: int = click.INT.convert(value, param, ctx)
        if self.min is not None and number < self.min:
            self.fail(f"{number} is too small; give {self.min} or more", param, ctx)
        if self.max is not None and number > self.max:
            self.fail(f"{number} is too large; give {self.max} or less", param, ctx)
        return number


class NameList(CommaList):
    """A comma-separated list of names. If there are choices, each name must be one of them.

    check: function that takes a name and the choices, and raises ValueError for a wrong name.
    """

    def __init__(
        self,
        choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
        check: Callable[[str, tuple[str, ...]], str] = _one_of,
    ) -> None:
        super().__init__(self._names)
        self._choices = choices
        self._check = check

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the allowed names; empty if any name is allowed."""
        return self._choices() if callable(self._choices) else self._choices

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the choices. If any name is allowed, return NAME,..."""
        return ",".join(self.choices) or "NAME,..."

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Offer the choices that the list does not have yet."""
        from click.shell_completion import CompletionItem

        given, comma, name = incomplete.rpartition(",")
        left = [choice for choice in self.choices if choice not in given.split(",")]
        return [CompletionItem(f"{given}{comma}{c}") for c in left if c.startswith(name)]

    def _names(self, text: str) -> tuple[str, ...]:
        """Split and check the text."""
        names, choices = tuple(text.split(",")), self.choices
        return tuple(self._check(name, choices) for name in names) if choices else names


REPAIR_CODES = NameList(page_codes, _repair_code)


class _CheckedPath(click.Path):
    """A path whose text `check` can refuse."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(path_type=Path, **attributes)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Check the text, then the path as click does."""
        text = os.fspath(value)
        try:
            self.check(text)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        super().convert(value, param, ctx)
        # `whole_file` writes to stdout if the path has this name.
        return Path("/dev/stdout" if self.allow_dash and text == "-" else text)

    def check(self, text: str) -> None:
        """Raise ValueError, or UsageError with the option's name, for a path that is refused."""
        raise NotImplementedError


class RunPath(_CheckedPath):
    """A run directory: a path, never a URL."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def check(self, text: str) -> None:
        """Refuse a URL."""
        if "://" in text:
            raise ValueError(f"{text} is a URL; give the path of a directory")


class OutputFile(_CheckedPath):
    """A file to write, or - for stdout.

    The name of a format is refused, and so is an existing file that a command may need.

    replaces: the kind of file that may be replaced nevertheless, as `kept_kind` names it.
    """

    def __init__(self, formats: tuple[str, ...] = FORMATS, *, replaces: str = "") -> None:
        super().__init__(dir_okay=False, readable=False, allow_dash=True)
        self.formats = formats
        self.replaces = replaces

    def check(self, text: str) -> None:
        """Refuse the name of a format, and a file that must not be replaced."""
        if text in self.formats:
            raise UsageError(
                f"-o {text}: is a format, not a file; use --format {text}, or -o ./{text} for a "
                "file of that name"
            )
        kind = "" if text == "-" else kept_kind(Path(text))
        if kind and kind != self.replaces:
            raise UsageError(f"-o {text}: is {kind}, and is not replaced; give another file")


class MetricsFile(_CheckedPath):
    """A file for metrics. An existing file with other content is refused."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def check(self, text: str) -> None:
        """Refuse a file with other content."""
        head = head_of(Path(text))
        if head.strip() and b"# HELP hicachectl_" not in head:
            raise UsageError(
                f"--metrics-file {text}: exists and has no metrics of hicachectl; give another file"
            )


def head_of(path: Path) -> bytes:
    """Return the first bytes of a regular file; b"" for other files."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def kept_kind(path: Path) -> str:
    """Return the kind of an existing file that a command may need; "" for other files."""
    from hicachectl.backends.object_files.tree import SIDE_DIRECTORY

    head = head_of(path)
    if not head:
        return ""
    folder = path.resolve().parent
    if SIDE_DIRECTORY in folder.parts or (folder / SIDE_DIRECTORY).is_dir():
        return "a file in a store"
    if _PAGE_NAME.search(path.name):
        return "an object of a store"
    return _kind_of_content(path, head)


def _kind_of_content(path: Path, head: bytes) -> str:
    from hicachectl.formats.pack.records import MAGIC

    if head.startswith(MAGIC):
        return "a pack"
    if head.startswith(b"PAR1"):
        with path.open("rb") as file:  # Parquet files have their metadata at the end
            file.seek(max(0, file.seek(0, os.SEEK_END) - _HEAD_BYTES))
            return "a catalog" if b"hicachectl.catalog" in file.read() else ""
    document = _document(head)
    if isinstance(document.get("stores"), dict):
        return "a config file of hicachectl"
    return next((kind for kind, names in _KINDS.items() if names <= document.keys()), "")


def _document(head: bytes) -> Mapping[str, Any]:
    """Return the JSON object or the TOML table that a file begins with; {} for other files."""
    from hicachectl.formats.documents import parse_json_object, parse_toml
    from hicachectl.formats.errors import FormatError

    if len(head) == _HEAD_BYTES:  # the file may be longer, and half a document cannot be parsed
        return {}
    with suppress(FormatError, UnicodeDecodeError):
        text = head.decode("utf-8-sig")
        is_json = text.lstrip().startswith("{")
        return parse_json_object(text, "") if is_json else parse_toml(text, "")
    return {}
