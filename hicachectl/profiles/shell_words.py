"""Split a shell script into commands, and put in the values of its plain variables.

Nothing is executed. A variable is plain if the script assigns it once, at top level, to literal
text or to other plain variables, and no other statement could change it. All other expansions stay
as they are written, and the command that has them names them. The text of here-documents is input
of a command, so it is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BLANK = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_REDIRECTION = re.compile(r"[0-9]*(?:&>>?|>>|>\||>&|<&|<<<|<<-?|<>|[<>])", re.ASCII)
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[\n;&|()]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\]|\+)?=", re.ASCII)
_PLAIN = re.compile(r"[^ \t\n'\"\\;&|()<>`$]+")
_QUOTED = re.compile(r'[^"\\`$]+')
_SIMPLE_EXPANSION = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])", re.ASCII)
_ANSI_QUOTE = re.compile(r"\$'((?:\\.|[^'\\])*)'", re.DOTALL)
_PATTERN = re.compile(r"[*?]|\{[^{}]*(?:,|\.\.)[^{}]*\}")  # several words, or names of files
_NESTED = re.compile(r"\\.|'[^']*'|\$[({]|[()}\"`]|[^\\'()$}\"`]+|.", re.DOTALL)
_NESTED_QUOTED = re.compile(r"\\.|\$[({]|[\"`]|[^\\$\"`]+|.", re.DOTALL)
_DEEPEST = 64  # expansions within expansions
_VARIABLE = re.compile(
    r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?P<all>\[[@*]\])?(?P<rest>.*)\})",
    re.ASCII | re.DOTALL,
)
_DEFAULT = re.compile(r":?-")
_SCRIPT_ARGUMENTS = ("$@", "$*", "${@}", "${*}")
_OPENS = ("if", "while", "until", "for", "select", "case", "{")
_CLOSES = ("fi", "done", "esac", "}")
_SKIPPED = ("then", "do", "else", "elif", "!", "time", "command", "builtin")
# Commands that change the variables which they name.
_ASSIGNERS = (
    "alias", "declare", "export", "getopts", "let", "local", "mapfile", "printf", "read",
    "readarray", "readonly", "trap", "typeset", "unset", "wait",
)  # fmt: skip
_DECLARERS = ("declare", "export", "local", "readonly", "typeset")
_KEEP_TEXT = frozenset({"-g", "-r", "-x"})
_RUNS_TEXT = (".", "eval", "source")
_NAME = re.compile(r"(?<![\w$])(?<!\$\{)[A-Za-z_]\w*", re.ASCII)
_DYNAMIC = re.compile(r"[^\s=]*[$`]")
_SETS_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[^]]*\])?:?=", re.ASCII)
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_CHANGES_NUMBER = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)|<<=|>>=")
_ANY = "*"  # instead of a name: any variable
_MOST_EXPANDED = 4 << 20  # characters, of all expansions of a script
_ONLY_RUN = "only an execution tells it"


class _Piece(NamedTuple):
    """A part of a word.

    text: its characters without quotes, or the expansion as it is written.
    expands: whether it is an expansion.
    quoted: whether it stands in quotes.
    """

    text: str
    expands: bool = False
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a script.

    pieces: its parts, in order; of an array, its name and "=".
    items: the words of the array that it assigns; None for other words.
    """

    pieces: tuple[_Piece, ...]
    items: tuple[_Word, ...] | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def bare(self) -> str:
        """Return the text of a word without quotes and expansions; "" for others."""
        return "" if any(one.quoted or one.expands for one in self.pieces) else self.text

    @property
    def assigned(self) -> re.Match[str] | None:
        """Return the match of `NAME=`, `NAME+=` or `NAME[…]=` at the start, outside quotes."""
        first = self.pieces[0] if self.pieces else _Piece("", quoted=True)
        return None if first.quoted else _ASSIGNMENT.match(first.text)


@dataclass(slots=True)
class _Statement:
    """A simple command of a script, without the reserved words before it.

    line: number of the line on which it ends.
    top: whether the script executes it always, once, and in its own process.
    is_inner: whether it stands in a loop, branch, function or subshell.
    in_function: whether it stands in `{ … }`, as the body of a function does.
    loops: the words come from `for` or `select`, whose first is a variable.
    arithmetic: the text of `((…))`.
    changes: variables that it could change.
    """

    words: list[_Word] = field(default_factory=list)
    line: int = 0
    top: bool = True
    is_inner: bool = False
    in_function: bool = False
    loops: bool = False
    arithmetic: str = ""
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a script.

    words: with the values of plain variables.
    environment: variables of SGLang that the script sets for the command.
    unknown: expansions that stay in words and environment, with the reason.
    passes_on: whether the script passes on arguments of its own.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    unknown: Mapping[str, str]
    passes_on: bool = False


@dataclass(slots=True)
class Budget:
    """Number of characters that expansions of a script and of its inner scripts may still have."""

    left: int = _MOST_EXPANDED

    def spend(self, values: list[str]) -> None:
        """Raise FormatError if values of variables are too long: each line can double a text."""
        self.left -= sum(map(len, values))
        if self.left < 0:
            raise FormatError(
                f"variables expand to more than {_MOST_EXPANDED} characters; give the launch "
                "command alone"
            )


@dataclass(slots=True)
class ScriptReader:
    """Reader of one shell script.

    variables: values of variables that are set before the script begins.
    environment: variables of SGLang that are set before the script begins.
    unknown: parts of these, and of the script, that the text around it does not tell.
    budget: the characters left for expansions.
    is_outer: whether the script can receive arguments that are not in the text.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    is_outer: bool = True
    _known: dict[str, list[str]] = field(init=False, default_factory=dict)
    _exported: set[str] = field(init=False, default_factory=set)
    _changes: dict[str, list[int]] = field(init=False, default_factory=dict)
    _settings: list[str] = field(init=False, default_factory=list)
    _is_lost: bool = field(init=False, default=False)
    _is_hidden: bool = field(init=False, default=False)
    _sets_arguments: bool = field(init=False, default=False)

    def commands(self, text: str) -> Iterator[Command]:
        """Yield the commands of a script, in order.

        Raises FormatError for an unclosed quote, parenthesis or here-document.
        """
        statements = list(self._statements(text.replace("\r\n", "\n")))
        for statement in statements:
            statement.changes = tuple(_changed(statement))
            for name in statement.changes:
                self._changes.setdefault(name, []).append(statement.line)
            texts = [word.text for word in statement.words]
            self._sets_arguments |= texts[:1] == ["set"] and "--" in texts
        self._settings = [name for name in self._changes if name.startswith("SGLANG_")]
        self._known = {
            name: [value] for name, value in self.variables.items() if name not in self._changes
        }
        for statement in statements:
            yield from self._read(statement)

    def _statements(self, text: str) -> Iterator[_Statement]:
        statement = _Statement()
        open_: list[str] = []  # reserved words and parentheses that are not closed
        before = "\n"
        for kind, token, word, line in _tokens(text):
            statement.line = line
            if kind == "word":
                statement.words.append(word)
            elif kind == "arithmetic":
                statement.arithmetic = token
            elif kind == "operator":
                _place(statement, open_, before, token)
                yield statement
                statement, before = _Statement(), token
                if token == "(":
                    open_.append("(")
                elif token == ")" and "(" in open_[-1:]:
                    open_.pop()
        _place(statement, open_, before, "\n")
        yield statement

    def _read(self, statement: _Statement) -> Iterator[Command]:
        """Assign, or yield a command."""
        if _ANY in statement.changes:
            self._known.clear()
            self._is_lost |= not statement.top
        # Statements after it in the text can precede it when it runs.
        self._is_hidden = statement.is_inner and _ANY in self._changes
        words = statement.words
        count = _count_assigned(words)
        if count == len(words) or words[count].bare in _DECLARERS:
            options = {word.text for word in words[count + 1 :] if word.text.startswith("-")}
            exports = "-x" in options or "export" in {
                word.bare for word in words[count : count + 1]
            }
            for word in words[count + 1 :] if count < len(words) else words:
                self._assign(word, statement, exports=exports, is_text=options <= _KEEP_TEXT)
            return
        unknown = {**self.unknown}
        passes_on = False
        environment = {**self.environment}
        for name in self._settings:
            if name in self._exported and name in self._known:
                environment[name] = self._known[name][0]
            else:
                environment[name] = f"${name}"
                unknown[f"${name}"] = self._reason(name)
        for word in words[:count]:
            found = word.assigned
            if found is not None and found[1].startswith("SGLANG_") and not found[2]:
                text = " ".join(self._expanded(_value_of(word), unknown, splits=False))
                environment[found[1]] = text
        expanded: list[str] = []
        for word in words[count:]:
            own = word.text in _SCRIPT_ARGUMENTS and any(piece.expands for piece in word.pieces)
            if own and self.is_outer and not (statement.in_function or self._sets_arguments):
                passes_on = True
            else:
                expanded.extend(self._expanded(word, unknown))
        yield Command(tuple(expanded), environment, unknown, passes_on)

    def _assign(self, word: _Word, statement: _Statement, *, exports: bool, is_text: bool) -> None:
        """Set a plain variable.

        exports: whether commands receive it. is_text: whether its value is the text that is
        assigned, and no sum or list.
        """
        found = word.assigned
        name = found[1] if found else word.bare
        if exports:
            self._exported.add(name)
        if found is None:
            return
        is_plain = statement.top and not self._is_lost and len(self._changes[name]) == 1
        if found[2] or not is_plain or not is_text:
            return
        unknown: dict[str, str] = {}
        if word.items is None:
            values = [" ".join(self._expanded(_value_of(word), unknown, splits=False))]
        else:
            values = [text for item in word.items for text in self._expanded(item, unknown)]
        if not unknown:
            self._known[name] = values

    def _expanded(self, word: _Word, unknown: dict[str, str], *, splits: bool = True) -> list[str]:
        """Return the words that a word becomes; add expansions that stay to `unknown`."""
        fields = [""]
        is_word = not word.pieces
        for piece in word.pieces:
            if not piece.expands:
                fields[-1] += piece.text
                is_word |= bool(piece.text) or piece.quoted
                continue
            values = self._values(piece.text)
            if values is None:
                unknown.setdefault(piece.text, self._reason_of(piece.text))
                values = [piece.text]
            elif splits and not piece.quoted:
                values = [part for value in values for part in value.split()]
            elif "[@]" not in piece.text and values:
                values = [" ".join(values)]
            if values:
                fields[-1] += values[0]
                fields.extend(values[1:])
                is_word |= piece.quoted
        return [] if fields == [""] and not is_word else fields

    def _values(self, expansion: str) -> list[str] | None:
        """Return the values of an expansion; None if they are unknown."""
        found = _VARIABLE.fullmatch(expansion)
        name = (found["bare"] or found["name"]) if found else ""
        if found is None or name not in self._known or self._is_hidden:
            return None
        values = self._known[name] if found["all"] else self._known[name][:1]
        # Where the variable has a value, its default does not count.
        if found["rest"] and not (any(values) and _DEFAULT.match(found["rest"])):
            return None
        self.budget.spend(values)
        return values

    def _reason_of(self, expansion: str) -> str:
        found = _VARIABLE.fullmatch(expansion)
        return _ONLY_RUN if found is None else self._reason(found["bare"] or found["name"])

    def _reason(self, name: str) -> str:
        lines = self._changes.get(name, [])
        if len(lines) > 1:
            return f"line {lines[-1]} can change it"
        if lines and self._changes.get(_ANY):
            return f"line {self._changes[_ANY][-1]} can change it"
        if lines:
            return f"line {lines[0]} does not set it to plain text at top level"
        return "the text does not set it"


def _place(statement: _Statement, open_: list[str], before: str, after: str) -> None:
    """Take off reserved words, keep track of what they open, and note where a statement stands.

    before, after: the operators around it.
    """
    words = statement.words
    while words and (word := words[0].bare):
        if word in _OPENS:
            open_.append(word)
            statement.loops |= word in ("for", "select")
        elif word in _CLOSES and open_[-1:] and open_[-1] != "(":
            open_.pop()
        elif word == "function" and words[-1].bare == "{":
            open_.append("{")
            words.clear()
            break
        elif word not in _SKIPPED:
            break
        del words[0]
    statement.is_inner, statement.in_function = bool(open_), "{" in open_
    is_certain = before in ("\n", ";", "&") and after not in ("&", "|", "|&")
    statement.top = is_certain and not open_


def _changed(statement: _Statement) -> Iterator[str]:
    """Yield the variables that a statement could change; `_ANY` if it could change any."""
    words = statement.words
    yield from _NAME.findall(statement.arithmetic)
    if statement.loops and words:
        yield words[0].text
    for word in words:
        for one in (word, *(word.items or ())):
            yield from _changed_by_expansions(one)
    count = _count_assigned(words)
    yield from (found[1] for word in words[:count] if (found := word.assigned))
    if count < len(words):
        operands = [word.text for word in words[count + 1 :]]
        yield from _changed_by_command(words[count].text, operands)


def _changed_by_expansions(word: _Word) -> Iterator[str]:
    for piece in word.pieces:
        if piece.expands:
            yield from _SETS_DEFAULT.findall(piece.text)
            for inner in _ARITHMETIC.findall(piece.text):
                if _CHANGES_NUMBER.search(inner):
                    yield from _NAME.findall(inner)


def _changed_by_command(command: str, operands: list[str]) -> Iterator[str]:
    options = [word for word in operands if word.startswith("-")]
    if command in _RUNS_TEXT:
        yield _ANY
    if command not in _ASSIGNERS or (command == "printf" and "-v" not in options):
        return
    for operand in operands:
        if _DYNAMIC.match(operand) and command not in ("alias", "trap", "wait"):
            yield _ANY
        elif command in ("alias", "let", "trap") or "-n" in options:
            yield from _NAME.findall(operand)
        elif command not in _DECLARERS:
            yield operand.split("[", 1)[0]
        # These keep the value if they give none.
        elif "=" in operand or command not in ("export", "readonly"):
            yield from _NAME.findall(operand.split("=", 1)[0])


def _count_assigned(words: list[_Word]) -> int:
    """Return the number of assignments at the start of a command."""
    return next((n for n, word in enumerate(words) if not word.assigned), len(words))


def _value_of(word: _Word) -> _Word:
    """Return the value of an assignment."""
    found = word.assigned
    assert found is not None
    rest = word.pieces[0].text[found.end() :]
    return _Word((*([_Piece(rest)] if rest else []), *word.pieces[1:]))


_NO_WORD = _Word(())


def _tokens(text: str) -> Iterator[tuple[str, str, _Word, int]]:
    """Yield the kind of each token, its characters, the word that it is, and its line.

    Kinds are word, operator, arithmetic and, for one that no command receives, "".
    """
    at, line, counted = _after_blanks(text, 0), 1, 0
    documents: list[tuple[str, bool]] = []  # last lines of those that begin after this line
    while at < len(text):
        start, kind, word = at, "", _NO_WORD
        if match := _REDIRECTION.match(text, at):
            target, at = _word(text, _after_blanks(text, match.end()))
            if match[0].rstrip("-").endswith("<<") and not match[0].endswith("<<<"):
                documents.append((target.text, match[0].endswith("-")))
        elif text.startswith("((", at) and text[(end := _closed(text, at)) - 2 : end] == "))":
            kind, at = "arithmetic", end
        elif match := _OPERATOR.match(text, at):
            kind, at = "operator", match.end()
        else:
            kind = "word"
            word, at = _array(text, at) if _ARRAY.match(text, at) else _word(text, at)
        line += text.count("\n", counted, start)
        counted = start
        yield kind, text[start:at], word, line
        if kind == "operator" and text[start] == "\n":
            for delimiter, indented in documents:
                at = _after_document(text, at, delimiter, indented=indented)
            documents = []
        at = _after_blanks(text, at)


def _after_blanks(text: str, at: int) -> int:
    """Return the place after blanks, continued lines and a comment."""
    found = _BLANK.match(text, at)
    return at if found is None else found.end()


def _array(text: str, at: int) -> tuple[_Word, int]:
    """Return the assignment of an array, and the place after it."""
    start, end = at, text.index("(", at)
    items: list[_Word] = []
    at = end + 1
    while (at := _after_blanks(text, at)) < len(text) and text[at] != ")":
        if text[at] == "\n":
            at += 1
            continue
        item, after = _word(text, at)
        if after == at:
            break
        items.append(item)
        at = after
    if text[at : at + 1] != ")":
        raise _unclosed(text, start)
    return _Word((_Piece(text[start:end]),), tuple(items)), at + 1


def _word(text: str, at: int) -> tuple[_Word, int]:
    """Return the word that begins at a place, of no pieces without one, and the place after it."""
    pieces: list[_Piece] = []
    while at < len(text):
        letter = text[at]
        if match := _PLAIN.match(text, at):
            pieces.append(_Piece(match[0], expands=_PATTERN.search(match[0]) is not None))
            at = match.end()
        elif letter == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise _unclosed(text, at)
            pieces.append(_Piece(text[at + 1 : end], quoted=True))
            at = end + 1
        elif letter == '"':
            at = _quoted(text, at, pieces)
        elif letter == "\\":
            if text[at + 1 : at + 2] != "\n":
                pieces.append(_Piece(text[at + 1 : at + 2], quoted=True))
            at += 2
        elif letter == "$" and (match := _ANSI_QUOTE.match(text, at)):
            is_plain = "\\" not in match[1]
            piece = match[1] if is_plain else match[0]
            pieces.append(_Piece(piece, expands=not is_plain, quoted=True))
            at = match.end()
        elif letter in "$`":
            at = _expansion(text, at, pieces, quoted=False)
        else:
            break
    return _Word(tuple(pieces)), at


def _quoted(text: str, at: int, pieces: list[_Piece]) -> int:
    """Add the pieces of a text in double quotes; return the place after it."""
    start = at
    at += 1
    if text.startswith('"', at):
        pieces.append(_Piece("", quoted=True))
    while at < len(text) and text[at] != '"':
        if match := _QUOTED.match(text, at):
            pieces.append(_Piece(match[0], quoted=True))
            at = match.end()
        elif text[at] == "\\":
            escaped = text[at + 1 : at + 2]
            kept = escaped if escaped in '"\\$`' else "" if escaped == "\n" else f"\\{escaped}"
            pieces.append(_Piece(kept, quoted=True))
            at += 2
        else:
            at = _expansion(text, at, pieces, quoted=True)
    if at >= len(text):
        raise _unclosed(text, start)
    return at + 1


def _expansion(text: str, at: int, pieces: list[_Piece], *, quoted: bool) -> int:
    """Add the piece that a `$` or a backtick begins; return the place after it."""
    if match := _SIMPLE_EXPANSION.match(text, at):
        end = match.end()
    elif text[at] == "`" or text.startswith(("$(", "${"), at):
        end = _closed(text, at)
    else:
        pieces.append(_Piece("$", quoted=quoted))
        return at + 1
    pieces.append(_Piece(text[at:end], expands=True, quoted=quoted))
    return end


def _closed(text: str, start: int) -> int:
    """Return the place after an expansion or a parenthesis, with all that it contains."""
    closers = {"(": ")", "{": "}", '"': '"', "`": "`"}
    first = text[start + 1] if text[start] == "$" else text[start]
    open_ = [closers[first]]
    at = start + (2 if text[start] == "$" else 1)
    while open_ and at < len(text):
        pattern = _NESTED_QUOTED if open_[-1] == '"' else _NESTED
        match = pattern.match(text, at)
        assert match is not None
        token, at = match[0], match.end()
        if token == open_[-1]:
            open_.pop()
        elif token in ("$(", "${", '"', "`") or (token == "(" and open_[-1] == ")"):
            open_.append(closers[token[-1]])
            if len(open_) > _DEEPEST:
                raise FormatError(f"{_line(text, start)}: expansions are nested more than "
                                  f"{_DEEPEST} times; give the launch command alone")  # fmt: skip
    if open_ or at > len(text):
        raise _unclosed(text, start)
    return at


def _after_document(text: str, start: int, delimiter: str, *, indented: bool) -> int:
    """Return the place after a here-document.

    start: the place of its first line.
    delimiter: its last line.
    indented: whether tabs may stand before the last line, after `<<-`.
    """
    at = start
    while at < len(text):
        end = text.find("\n", at)
        line = text[at : len(text) if end < 0 else end]
        at += len(text) if end < 0 else end + 1 - at
        if (line.lstrip("\t") if indented else line) == delimiter:
            return at
    raise FormatError(f"{_line(text, start)}: a here-document (<<) has no last line; add it")


def _unclosed(text: str, at: int) -> FormatError:
    return FormatError(f"{_line(text, at)}: a quote or a parenthesis is not closed; close it")


def _line(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}"
