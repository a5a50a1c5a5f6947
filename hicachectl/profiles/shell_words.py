"""Read the commands of a shell script as lists of words, without executing anything.

Quotes, escapes, comments, continued lines, variables and arrays have their meaning in a POSIX shell
and bash. What only an execution could tell, such as `$(hostname)`, stays as it is written. The text
of here-documents is input of a command, so it is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# `shlex` ends no command at a newline, takes "#" within a word for a comment, and knows no
# variables.
_EXPANSION = r"\$\((?:[^()]|\([^()]*\))*\)|\$\{[^{}]*\}|`[^`]*`"
_TOKEN = re.compile(
    rf"""
    (?P<blank>(?:\\\n|[ \t\r])+|\#[^\n]*)
    | (?P<array>[A-Za-z_]\w*\+?=\()
    | (?P<document>[0-9]*<<(?!<)-?)
    | (?P<redirection>[0-9]*(?:&>>?|>>|>\||>&|<&|<<<|[<>]))
    | (?P<end>&&|\|\||[\n;|&()])
    | (?P<word>(?:'[^']*'|"(?:\\.|`[^`]*`|[^"\\`])*"|\\.|{_EXPANSION}|[^\s'"\\;&|()<>`])+)
    """,
    re.VERBOSE | re.DOTALL,
)
_PIECE = re.compile(
    rf"""
    '(?P<single>[^']*)' | "(?P<double>(?:\\.|`[^`]*`|[^"\\`])*)" | \\(?P<escaped>.)
    | (?P<expansion>{_EXPANSION}|\$[A-Za-z_]\w*|\$[0-9@*\#?$!-]) | (?P<plain>[^'"\\$`]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(
    rf"\\(?P<escaped>[\\\"$`\n])|(?P<expansion>{_EXPANSION}|\$[A-Za-z_]\w*|\$[0-9@*\#?$!-])"
    r"|(?P<plain>[^\\$`]+|.)",
    re.DOTALL,
)
_VARIABLE = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(?P<all>\[[@*]\])?"
    r"(?:(?P<colon>:?)(?P<operator>[-=])(?P<default>.*))?",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.S)
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_MOST_EXPANDED = 4 << 20  # characters, of all expansions of a script
_SCRIPT_ARGUMENTS = ("$@", "$*", "${@}", "${*}")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a script. environment: variables that the script sets for it."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(slots=True)
class _Expanded:
    """Characters that expansions of a script, and of the scripts in it, may still have."""

    left: int = _MOST_EXPANDED


@dataclass(slots=True)
class ScriptReader:
    """Reader of shell scripts.

    environment, variables: in force. unknown: expansions that only an execution could tell, as they
    stand in the words. takes_arguments: whether the script passes on arguments of its own.
    has_documents: whether the script has here-documents.
    """

    environment: dict[str, str] = field(default_factory=dict)
    variables: dict[str, list[str]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    takes_arguments: bool = False
    has_documents: bool = False
    _expanded_characters: _Expanded = field(default_factory=_Expanded)

    def inner(self, environment: Mapping[str, str]) -> ScriptReader:
        """Return a reader of a script in the script: `bash -c`."""
        return ScriptReader(
            environment=dict(environment), _expanded_characters=self._expanded_characters
        )

    def commands(self, text: str) -> Iterator[Command]:
        """Yield the commands of a script, in order.

        Raises FormatError for an unclosed quote or here-document.
        """
        words: list[str] = []
        assigns = True  # whether all words so far assign
        array: tuple[str, list[str]] | None = None
        target = False  # of a redirection
        for kind, token in _tokens(text):
            self.has_documents |= kind == "document"
            if kind == "end" and array is not None and token in "\n)":
                if token == ")":
                    self._assign(array[0].removesuffix("+"), array[1], more=array[0][-1] == "+")
                    array = None
            elif kind == "end":
                yield from self._command(words)
                words, assigns = [], True
            elif kind == "array":
                array = token[:-2], []
            elif kind in ("redirection", "document"):
                target = True
            elif target:
                target = False
            elif array is not None:
                array[1].extend(self._expanded(token))
            elif assigns and _assigns(token):
                words.append(" ".join(self._expanded(token, splits=False)))
            else:
                assigns = False
                words.extend(self._expanded(token))
        yield from self._command(words)

    def _command(self, words: list[str]) -> Iterator[Command]:
        """Assign, export, or yield a command with its environment."""
        count = next((n for n, word in enumerate(words) if not _assigns(word)), len(words))
        named = dict(word.split("=", 1) for word in words[:count])
        if words and count < len(words) and words[count] in _DECLARES:
            for word in words[count + 1 :]:
                match = _ASSIGNMENT.fullmatch(word)
                name = match["name"] if match else word
                if match:
                    self._assign(name, [match["value"]], more=bool(match["more"]))
                if words[count] == "export" and name in self.variables:
                    self.environment[name] = " ".join(self.variables[name])
        elif count < len(words):
            yield Command(tuple(words[count:]), {**self.environment, **named})
        for word in words if count == len(words) else ():
            match = _ASSIGNMENT.fullmatch(word)
            assert match is not None
            self._assign(match["name"], [match["value"]], more=bool(match["more"]))
            if match["name"] in self.environment:
                self.environment[match["name"]] = match["value"]

    def _assign(self, name: str, values: list[str], *, more: bool) -> None:
        before = self.variables.get(name, []) if more else []
        joined = len(values) == 1 and len(before) == 1
        self.variables[name] = [before[0] + values[0]] if joined else before + values

    def _expanded(self, word: str, *, splits: bool = True) -> list[str]:
        """Return the words that a word of the script becomes."""
        fields, quoted = [""], False
        for match in _PIECE.finditer(word):
            if match["single"] is not None:
                fields[-1] += match["single"]
                quoted = True
            elif match["double"] is not None:
                quoted |= self._expand_quoted(match["double"], fields)
            elif match["expansion"] is not None:
                values = self._values(match["expansion"])
                if splits and values != [match["expansion"]]:
                    values = [part for value in values for part in value.split()]
                _append(fields, values)
            else:
                fields[-1] += match["plain"] or (match["escaped"] or "").replace("\n", "")
        return [] if fields == [""] and not quoted else fields

    def _expand_quoted(self, text: str, fields: list[str]) -> bool:
        """Expand a quoted text. Return whether it is a word: "" is one, an array of none is not."""
        is_word = not text
        for match in _QUOTED.finditer(text):
            if match["expansion"] is None:
                fields[-1] += match["plain"] or (match["escaped"] or "").replace("\n", "")
                is_word = True
                continue
            values = self._values(match["expansion"])
            one = "[@]" not in match["expansion"]
            _append(fields, [" ".join(values)] if one and values else values)
            is_word |= bool(values)
        return is_word

    def _values(self, expansion: str) -> list[str]:
        """Return the values of an expansion; the expansion itself if they are unknown."""
        values = self._looked_up(expansion)
        self._expanded_characters.left -= sum(map(len, values))
        if self._expanded_characters.left < 0:  # each of a few lines can double the text
            raise FormatError(
                f"variables expand to more than {_MOST_EXPANDED} characters; give the launch "
                "command alone"
            )
        return values

    def _looked_up(self, expansion: str) -> list[str]:
        if expansion in _SCRIPT_ARGUMENTS:
            self.takes_arguments = True
            return []
        inner = expansion[2:-1] if expansion.startswith("${") else expansion[1:]
        match = None if expansion.startswith(("$(", "`")) else _VARIABLE.fullmatch(inner)
        if match is not None:
            is_set = match["name"] in self.variables
            values = self.variables.get(match["name"], [])
            if not values and not (is_set and match["all"]):
                values = [self.environment.get(match["name"], "")]
            # With a colon, the default also stands for an empty value.
            if any(values) or (is_set and not match["colon"]):
                return values if match["all"] else values[:1]
            if match["default"] is not None:
                default = [" ".join(self._expanded(match["default"], splits=False))]
                if match["operator"] == "=":
                    self.variables[match["name"]] = default
                return default
        self.unknown.add(expansion)
        return [expansion]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    documents: list[tuple[str, bool]] = []  # that begin after this line: last line, indented
    before = ("", "")  # kind and text of the last token but blanks
    arithmetic = False  # in `((1 << 2))`
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            what = "a quote or a parenthesis is not closed; close it"
            raise FormatError(f"{_line(text, at)}: {what}")
        kind, token, at = str(match.lastgroup), match[0], match.end()
        if kind == "blank":
            continue
        if before[0] == "document" and kind == "word" and not arithmetic:
            documents.append((re.sub(r"[\\'\"]", "", token), before[1].endswith("-")))
        if kind == "end" and token in "()":
            arithmetic = token == "(" and before[1] == "(" and text[at - 2 : at] == "(("
        before = kind, token
        yield kind, token
        if token == "\n":
            for delimiter, indented in documents:
                at = _after_document(text, at, delimiter, indented=indented)
            documents = []


def _after_document(text: str, start: int, delimiter: str, *, indented: bool) -> int:
    """Return the place after a here-document.

    start: of its first line. delimiter: its last line. indented: after `<<-`.
    """
    at = start
    while at < len(text):
        end = text.find("\n", at)
        line = text[at : len(text) if end < 0 else end].removesuffix("\r")
        at += len(text) if end < 0 else end + 1 - at
        if (line.lstrip("\t") if indented else line) == delimiter:
            return at
    raise FormatError(f"{_line(text, start)}: a here-document (<<) has no last line; add it")


def _line(text: str, at: int) -> str:
    number = text.count("\n", 0, at) + 1
    return f"line {number}"


def _assigns(word: str) -> bool:
    return _ASSIGNMENT.fullmatch(word) is not None


def _append(fields: list[str], found: list[str]) -> None:
    """Append the first of some words to the last field, and the others as new fields."""
    if found:
        fields[-1] += found[0]
        fields.extend(found[1:])
