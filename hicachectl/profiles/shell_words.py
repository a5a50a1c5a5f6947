"""Split the text of a shell into commands, and replace its plain variables by their values.

Nothing is executed, and no branch, loop or function is followed. A variable of the environment that
the text only reads is plain. Another variable is plain if:

- apart from places that read its value, only one place in the text names it;
- this place is a top-level statement that assigns it;
- no other statement can change variables without naming them, such as `source FILE`.

All other expansions stay as they are written, and their command lists them as unknown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SEVERAL_WORDS = "bash can replace it by several words; put it in quotes"
_ONLY_RUN = "only running the command shows its value"
_MOST_EXPANDED = 1 << 20  # most characters of all expansions of a text
_BLANK = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_SPACE = re.compile(r"[ \t\n]+")
_REDIRECTION = re.compile(r"[0-9]*(&>>?|>>|>\||>&|<&|<<<|<<-?|<>|[<>](?!\())", re.ASCII)
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[\n;&|()]")
_EXPANSION = (
    r"(?P<expansion>\$(?:[A-Za-z_]\w*|[0-9@*#?$!-]|(?=\[)))|(?P<open>\$[({]|`)|(?P<quote>\")"
)
_PIECE = re.compile(
    r"'(?P<literal>[^']*)'|\\(?P<escaped>.)|(?P<ansi>\$'(?:\\.|[^'\\])*'|\$(?=\"))|"
    rf"{_EXPANSION}|(?P<process>[<>]\()|(?P<plain>[^ \t\n'\"\\;&|()<>`$]+|\$)",
    re.ASCII | re.DOTALL,
)
_QUOTED_PIECE = re.compile(
    rf"\\(?P<escaped>[\"\\$`\n])|{_EXPANSION}|(?P<plain>[^\"\\$`]+|[\\$])", re.ASCII
)
_NESTED = re.compile(
    r"\\.|'[^']*'|(?<=\s)#[^\n]*|(?P<open>\$?\(|\$\{|[\"`])|[^\\'()$\"`}#]+|.", re.DOTALL
)
_CLOSERS = {"(": ")", "{": "}", '"': '"', "`": "`"}
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(\[[@*]\])?\})", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?\+?=", re.ASCII)
# Patterns that bash, outside quotes, can replace by file names, several words or a home directory.
_PATTERN = re.compile(r"[*?\[]|\{.*(?:,|\.\.).*\}|(?:^|[=:])~", re.DOTALL)
_ENDS = {
    "if": "fi",
    "case": "esac",
    "{": "}",
    **dict.fromkeys(("for", "select", "until", "while"), "done"),
}
_SKIPPED = ("then", "do", "else", "elif", "!", "time")
_DECLARERS = ("declare", "export", "local", "readonly", "typeset")
# `_READS` finds expansions that only read their variable. `_FLAG` finds flags, which name no
# variable.
_READS = re.compile(r"\$(?:\w+|\{#?[A-Za-z_]\w*(?:\[[@*]\])?(?=\}|:?[-+?]|[%#/^,@]))", re.ASCII)
_FLAG = re.compile(r"(?<![^\s=])--[A-Za-z][\w-]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Statements that run text from elsewhere, and statements that change variables without naming them.
_RUNS_TEXT = re.compile(
    r"(?<![\w./-])(?:alias|enable|eval|source)(?![\w./=-])|(?<![^\s;&|(){}])\.\s+[^\s-]", re.ASCII
)
_CHANGES_ANY = re.compile(
    r"\$\{![^}]*=|\bprintf -v|\bwait\s.*-\w*p|\b(?:declare|local|typeset)\s.*-\w*n|"
    rf"(?<!\S)(?:{'|'.join(_DECLARERS)}|getopts|let|mapfile|read|readarray|unset)\s"
    r"(?:.*\s)?(?:-[ap]\w|[^\s=]*[$`])",
    re.ASCII | re.DOTALL,
)
_OF_BASH = re.compile(
    r"_|BASH\w*|COLUMNS|COMP_\w+|COPROC\w*|DIRSTACK|EPOCH\w+|E?UID|FUNCNAME|GROUPS|HISTCMD|LINENO|"
    r"LINES|MAPFILE|(?:OLD)?PWD|OPT\w+|PIPESTATUS|PPID|S?RANDOM|REPLY|SECONDS|SHELLOPTS|SHLVL"
)


class _Piece(NamedTuple):
    """A piece of a word.

    text: characters without quotes, or the expansion as it is written.
    expands: whether the piece is an expansion.
    quoted: whether the piece stands in quotes.
    """

    text: str
    expands: bool
    quoted: bool


class _Word(NamedTuple):
    """A word of a text.

    raw: the word as it is written; for an array assignment, only the name and "=".
    pieces: pieces of the word, in order.
    items: words of the array that the word assigns; None for any other word.
    """

    raw: str
    pieces: tuple[_Piece, ...]
    items: tuple[_Word, ...] | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class _Statement(NamedTuple):
    """A simple command, without the reserved words before it.

    words: words of the command, in order.
    others: other texts, such as here-documents, that can name a variable.
    line: number of the line on which the statement ends.
    top: whether bash surely executes the statement once, in the process of the script.
    foreign: whether the statement can change variables that it does not name.
    """

    words: list[_Word]
    others: list[str]
    line: int
    top: bool
    foreign: bool


class Command(NamedTuple):
    """A command of a text.

    words: words of the command, with plain variables replaced by their values.
    environment: SGLang's variables that the command receives. The text sets them, or they are set
        before the text begins.
    unknown: expansions that stay in the words and the environment, each with the reason.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    unknown: Mapping[str, str]


class ScriptReader:
    """Reader of the commands of one text."""

    def __init__(
        self, variables: Mapping[str, str | None] | None = None, *, trusts: bool = True
    ) -> None:
        """Prepare.

        variables: environment before the text begins. None stands for an unknown value.
        trusts: whether the text is complete. If not, missing parts could change variables, so the
            values of all variables are unknown.
        """
        self._trusts = trusts
        self._settings = {name for name in variables or {} if name.startswith("SGLANG_")}
        self._known = {n: [value] for n, value in (variables or {}).items() if value is not None}
        self._lines: dict[str, list[int]] = {}  # lines on which the text names each variable
        # Line of a foreign statement other than the statement being read; 0 if there is none.
        self._foreign = 0
        self._left = _MOST_EXPANDED

    def commands(self, text: str) -> Iterator[Command]:
        """Yield the commands, in order. Raises FormatError for an unclosed quote or parenthesis."""
        if "\r\n" in text:
            raise FormatError(
                "has line ends of Windows (CRLF), which bash takes as part of the words; convert "
                "them, such as with dos2unix"
            )
        try:
            statements = list(_statements(text + "\n"))
        except RecursionError:
            raise FormatError(
                "expansions are nested too deep; give the launch command alone"
            ) from None
        foreign = [statement for statement in statements if statement.foreign]
        for statement in statements:
            for name in _names(statement):
                self._lines.setdefault(name, []).append(statement.line)
                self._known.pop(name, None)
                if name == "IFS":  # IFS changes how bash splits words
                    foreign.append(statement)
        self._settings |= {name for name in self._lines if name.startswith("SGLANG_")}
        for statement in statements:
            self._foreign = next((one.line for one in foreign if one is not statement), 0)
            yield from self._read(statement)

    def environment(self, unknown: dict[str, str]) -> dict[str, str]:
        """Return SGLang's variables that commands receive. Add unknown values to `unknown`."""
        return {
            name: self._text(f"${name}", self._values(f"${name}"), unknown)
            for name in sorted(self._settings)
        }

    def _read(self, statement: _Statement) -> Iterator[Command]:
        """Carry out the assignments of a statement, or yield its command."""
        words = statement.words
        first = words[0].raw if words else ""
        declares = first in _DECLARERS
        assigned = [word for word in words if _ASSIGNMENT.match(word.raw)]
        if declares or len(assigned) == len(words):
            is_plain = (
                statement.top
                and len(assigned) == len(words) - declares
                and (not declares or first in ("export", "readonly"))
            )
            for word in assigned:
                yield from self._assign(word, first, is_plain=is_plain)
        elif not _prints(words):
            unknown: dict[str, str] = {}
            environment = self.environment(unknown)
            expanded = [text for word in words for text in self._expanded(word, unknown)]
            yield Command(tuple(expanded), environment, unknown)

    def _assign(self, word: _Word, command: str, *, is_plain: bool) -> Iterator[Command]:
        """Set a plain variable. For any other variable, yield its value as a command.

        The value may be a launch command that the text runs later.
        """
        found = _ASSIGNMENT.match(word.raw)
        assert found is not None
        name, unknown = found[1], dict[str, str]()
        if word.items is None:
            first = word.pieces[0]._replace(text=word.pieces[0].text[found.end() :])
            value = _Word("", (first, *word.pieces[1:]))
            values = [" ".join(self._expanded(value, unknown, splits=False))]
        else:
            values = [text for item in word.items for text in self._expanded(item, unknown)]
        if command != "export" and name.startswith("SGLANG_"):
            is_plain = False  # commands do not receive a variable that is not exported
        once = len(self._lines[name]) == 1 and found[0] == f"{name}="
        if is_plain and once and not unknown and not _OF_BASH.fullmatch(name):
            self._known[name] = values
        elif name not in self._known or self._foreign:
            part = f"${{{name}[@]}}"
            unknown[part] = self._reason(name)
            yield Command((*" ".join(values).split(), part), {}, unknown)

    def _expanded(self, word: _Word, unknown: dict[str, str], *, splits: bool = True) -> list[str]:
        """Return the words that a word becomes. Add its unknown expansions to `unknown`."""
        bare = "".join(" " if one.quoted or one.expands else one.text for one in word.pieces)
        if pattern := _PATTERN.search(bare):
            unknown[word.text] = _ONLY_RUN if pattern[0].endswith("~") else SEVERAL_WORDS
            return [word.text]
        text = ""
        for piece in word.pieces:
            if not piece.expands:
                text += piece.text
                continue
            values = self._values(piece.text)
            spreads = piece.quoted and "[@]" in piece.text
            if values is not None and splits and (spreads or not piece.quoted):
                parts = values if spreads else [p for p in _SPACE.split(" ".join(values)) if p]
                matches_files = not spreads and re.search(r"[*?\[\\]", "".join(parts))
                if not matches_files and word.raw in (piece.text, f'"{piece.text}"'):
                    return parts
                values = values if parts == values and not (spreads or matches_files) else None
            text += self._text(piece.text, values, unknown)
        return [text] if text or any(piece.quoted for piece in word.pieces) else []

    def _text(self, expansion: str, values: list[str] | None, unknown: dict[str, str]) -> str:
        """Return the text of an expansion.

        values: values of the expansion. If they are None, add the expansion to `unknown`, and
            return it as it is written.
        """
        if values is not None:
            return " ".join(values)
        found = _VARIABLE.fullmatch(expansion)
        unknown[expansion] = self._reason(found[1] or found[2]) if found else _ONLY_RUN
        return expansion

    def _values(self, expansion: str) -> list[str] | None:
        """Return the values of an expansion; None if they are unknown."""
        found = _VARIABLE.fullmatch(expansion)
        values = self._known.get(found[1] or found[2]) if found else None
        if found is None or values is None or self._foreign or not self._trusts:
            return None
        values = values if found[3] else values[:1]
        self._left -= sum(map(len, values))
        if self._left < 0:
            raise FormatError(
                f"variables expand to more than {_MOST_EXPANDED} characters; give the launch "
                "command alone"
            )
        return values

    def _reason(self, name: str) -> str:
        lines = self._lines.get(name, [])
        if len(lines) > 1 or (lines and self._foreign):
            return f"line {self._foreign or lines[-1]} can change it"
        if lines:
            return f"line {lines[0]} does not set it to plain text at top level, before the command"
        return "the text does not set it"


def _statements(text: str) -> Iterator[_Statement]:
    """Yield the statements of a text, in order."""
    words: list[_Word] = []
    others: list[str] = []
    open_: list[str] = []  # open reserved words and parentheses
    # For each here-document that begins on the next line: its last line, and a pattern of the tabs
    # that may stand before this line.
    documents: list[tuple[str, str]] = []
    before, at, line, counted = "\n", _after_blanks(text, 0), 1, 0
    while at < len(text):
        start = at
        if match := _REDIRECTION.match(text, at):
            target, at = _word(text, _after_blanks(text, match.end()))
            others.append(target.raw)
            if match[1] in ("<<", "<<-"):
                documents.append((target.text, "\t*" if match[1] == "<<-" else ""))
        elif (
            text.startswith("((", at) and text[(end := _after(text, at + 1, ")")) - 2 : end] == "))"
        ):
            others.append(text[at:end])
            at = end
        elif match := _OPERATOR.match(text, at):
            token, at = match[0], match.end()
            line += text.count("\n", counted, start)
            counted = start
            is_empty = not words
            is_even = _take_reserved(words, open_) and (
                token != ")"
                or (open_[-1:] == ["("] and open_.pop() == "(")
                or open_[-1:] == ["case"]
            )
            is_certain = before in ("\n", ";", "&") and token not in ("&", "|", "|&")
            yield _Statement(
                words, others, line, is_certain and not open_, not is_even or _is_foreign(words)
            )
            words, others = [], []
            open_ += ["("] * (token == "(")
            if not (is_empty and token == "\n"):  # a line can end after "&&"
                before = token
            for delimiter, tabs in documents if token == "\n" else ():
                last = re.compile(rf"^{tabs}{re.escape(delimiter)}$", re.MULTILINE).search(text, at)
                if last is None:
                    raise FormatError(f"line {line}: a here-document (<<) has no last line; add it")
                others.append(text[at : last.start()])
                at = last.end() + 1
            documents = documents if token != "\n" else []
        else:
            word, at = _word(text, at)
            words.append(word)
        at = _after_blanks(text, at)


def _take_reserved(words: list[_Word], open_: list[str]) -> bool:
    """Remove the reserved words at the front of `words`.

    Return whether the words that close a block match the words that opened it.
    """
    while words:
        word = words[0].raw
        if word in _ENDS:
            open_.append(word)
        elif word in _ENDS.values():
            if not open_ or _ENDS.get(open_.pop()) != word:
                return False
        elif word == "function":
            del words[0]  # the name follows
        elif word not in _SKIPPED:
            break
        del words[:1]
    return True


def _prints(words: list[_Word]) -> bool:
    texts = [word.text for word in words[:2]]
    return texts[:1] == ["echo"] or (
        texts[:1] == ["printf"] and not texts[-1].startswith(("-", "$"))
    )


def _is_foreign(words: list[_Word]) -> bool:
    """Return whether a statement can change variables that it does not name."""
    texts = [word.text for word in words]
    joined = " ".join(_SPACE.sub("_", text) for text in texts)
    found = _RUNS_TEXT.search(" ".join(texts)) or _CHANGES_ANY.search(joined)
    return found is not None and not _prints(words)


def _names(statement: _Statement) -> Iterator[str]:
    """Yield the names in a statement, once for each word.

    Names of variables that the statement only reads are left out.
    """
    words = [one for word in statement.words for one in (word, *(word.items or ()))]
    is_print = _prints(statement.words)
    keeps_flags = [word.text for word in words[:1]] in (["let"], ["[["])
    texts = list(statement.others)
    for word in words:
        text = word.text
        if is_print:
            text = " ".join(piece.text for piece in word.pieces if piece.expands)
        texts.append(text if keeps_flags or set(text) & {"(", "["} else _FLAG.sub(" ", text))
    for text in texts:
        yield from set(_NAME.findall(_READS.sub(" ", text)))


def _after_blanks(text: str, at: int) -> int:
    """Return the place after blanks, continued lines and a comment."""
    found = _BLANK.match(text, at)
    return at if found is None else found.end()


def _word(text: str, at: int) -> tuple[_Word, int]:
    """Return the word that begins at a place, and the place after it."""
    pieces: list[_Piece] = []
    start, quoted = at, False
    while match := (_QUOTED_PIECE if quoted else _PIECE).match(text, at):
        kind, at = match.lastgroup or "", match.end()
        token = match[kind]
        if kind == "quote":
            quoted, token = not quoted, ""
        elif kind in ("open", "process"):
            at = _after(text, at, _CLOSERS[token[-1]])
            token = text[match.start() : at]
        elif kind == "escaped" and token == "\n":
            continue
        expands = kind in ("ansi", "expansion", "open", "process")
        pieces.append(
            _Piece(token, expands, quoted or kind in ("ansi", "escaped", "literal", "quote"))
        )
        if text.startswith("(", at) and _ASSIGNMENT.fullmatch(text, start, at):
            items, end = _items(text, at + 1)
            return _Word(text[start:at], tuple(pieces), items), end
    if quoted or text.startswith("'", at):
        raise _unclosed(text, start)
    return _Word(text[start:at], tuple(pieces)), at


def _items(text: str, at: int) -> tuple[tuple[_Word, ...], int]:
    """Return the words of an array, and the place after its parenthesis."""
    start, items = at, list[_Word]()
    while not text.startswith(")", at := _after_blanks(text, at)):
        item, end = _word(text, at)
        if end == at and not text.startswith("\n", at):
            raise _unclosed(text, start)
        items += [item] * (end > at)
        at = max(end, at + 1) if end == at else end
    return tuple(items), at + 1


def _after(text: str, at: int, closer: str) -> int:
    """Return the place after the closing character. at: place after the opening character."""
    start = at
    while not text.startswith(closer, at):
        match = (_QUOTED_PIECE if closer == '"' else _NESTED).match(text, at)
        if match is None:
            raise _unclosed(text, start)
        at = match.end()
        if match.lastgroup == "open":
            at = _after(text, at, _CLOSERS[match[0][-1]])
    return at + 1


def _unclosed(text: str, at: int) -> FormatError:
    line = text.count("\n", 0, at) + 1
    return FormatError(f"line {line}: a quote or a parenthesis is not closed; close it")
