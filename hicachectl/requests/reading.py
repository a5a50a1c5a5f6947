"""Read requests from files of any form in `FORMS`, and lists of pages.

Members of a record that change the pages of its request are read, or refused by name. All other
members are ignored, so that a line can be a whole request body. Reading raises UsageError if an
input cannot be read or has no requests. For a wrong line, it raises FormatError that names the
line.
"""

from __future__ import annotations

import itertools
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec.structs import replace

from hicachectl.backends.disk.bounded import MAX_LINE_BYTES, read_lines
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import decode
from hicachectl.pages.selection import PageList
from hicachectl.requests import public_traces, server_logs, texts
from hicachectl.requests.chains import Columns
from hicachectl.requests.forms import (
    Context,
    Form,
    Prompted,
    Record,
    Request,
    members,
    token_count,
)
from hicachectl.requests.inputs import Inputs
from hicachectl.requests.server_logs import unwrapped
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from hicachectl.requests.chains import Hashing, Requests
    from hicachectl.requests.forms import PromptTokenizer
    from hicachectl.requests.inputs import Line

    Read = Callable[[Line], Iterable[Request | Prompted]]

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_PROMPTS_AT_ONCE = 64  # prompts in one call, which a tokenizer encodes in parallel
_HASH = re.compile(r"[0-9a-f]{64}")
_LIST = re.compile(rb"\s*\[\s*(\]|-?\d+\s*[],])")
_TOKEN_MEMBERS = ("token_ids", "input_ids", "hash_ids", "pages")
_NO_TOKENIZER = "Sent as text", "give --tokenizer DIR, which encodes them as the server did"
_BEYOND_BLOCKS = (
    "With more tokens than their blocks have",
    "the other tokens count as never repeated; check --block-size",
)
_OTHER_TOKENIZER = (
    "Encoded to another number of tokens than the server counted",
    "they are left out; give the tokenizer of the server",
)


class _TokenLine(Record):
    token_ids: list[int] | None = None
    input_ids: list[int] | None = None
    hash_ids: list[_Int64] | None = None
    pages: list[str] | None = None
    block_size: int | None = None
    output_ids: list[int] | None = None


class _PageLine(msgspec.Struct):
    page: str
    group: str | None = None


_TOKEN_LINE = msgspec.json.Decoder(list[int] | _TokenLine)
_PAGE_LINE = msgspec.json.Decoder(list[str] | _PageLine)


class Trace:
    """Requests of files, directories, patterns and stdin, in any form. This is a context manager.

    remarks: after reading, one remark for each kind of request that counts only in part or not at
        all, with the number of such requests and the remedy.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        form: str = "",
        tokenizer: Callable[[], PromptTokenizer] | None = None,
        block_size: int | None = None,
        keeps: bool = False,
    ) -> None:
        """Find the files.

        names: paths and patterns of the inputs; "-" for stdin.
        form: name of the form; "" to recognise the form.
        tokenizer: function that returns the tokenizer; called at the first request that is text.
        block_size: number of tokens of a block of `hash_ids`, if the input does not state it.
        keeps: whether requests will be read again.
        Raises UsageError for a directory or pattern that has no file, and for an unknown form.
        """
        self._inputs = Inputs(names, keeps=keeps)
        self._form = None if not form else form_named(form)
        self._is_given = bool(form)
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._encoder: PromptTokenizer | None = None
        self.remarks: tuple[str, ...] = ()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._inputs.close()

    def requests(self, hashing: Hashing | None, *, outputs: bool = False) -> Requests:
        """Read all requests, in the order of the input, without their tokens.

        hashing: hashing for token ids; None if no request has token ids.
        outputs: whether chains also have the full pages of generated tokens.
        Raises UsageError for an input that has no requests or cannot be used. Raises FormatError
        that names the line for a wrong line.
        """
        context = Context(self._block_size)
        columns = Columns(hashing, outputs=outputs)
        for request in self.each(context):
            columns.add(request)
        self.remarks = context.remarks
        if self._form is None or not len(columns):
            raise UsageError(f"{self._inputs.source}: has no requests; {self._why_none(context)}")
        requests = columns.finished(
            self._inputs.source, unit=self._form.unit, block_tokens=self._block_size
        )
        _check_blocks(requests, context)
        self.remarks = context.remarks
        return requests

    def _why_none(self, context: Context) -> str:
        """Return why an input has no requests, and the next step."""
        if self._form is not None and (lacks := self.remarks):
            return "; ".join(lacks)
        if context.unfinished:
            return (
                f"it has {counted(context.unfinished, 'line')} about received requests, but none "
                "about a finished request; give the log to its end"
            )
        return "check the path"

    def again(self, places: Iterable[int]) -> Iterator[Request]:
        """Yield the requests at some places (`Requests.starts`), in the order of the places.

        The requests are read again, because their tokens may be too many to keep in memory. Raises
        UsageError if the input cannot be read again, and FormatError if the input has changed.
        """
        form, context = self._form, Context(self._block_size)
        assert form is not None
        try:
            if form.is_document:
                wanted = list(places)
                every = {one.start: one for one in self.each(context, only=frozenset(wanted))}
                yield from (every[place] for place in wanted)
            else:
                reader = form.reader(context)
                found = (self._request_at(reader, place) for place in places)
                yield from self._encoded(found, context)
        except (FormatError, KeyError) as error:
            source = self._inputs.source
            raise FormatError(f"{source}: changed since it was read; run again") from error

    def _request_at(self, reader: Read, place: int) -> Request | Prompted:
        """Return the request that starts at a place. Raises KeyError if there is none."""
        for line in unwrapped(self._inputs.lines_from(place)):
            if line.place <= place:
                for one in _numbered(reader, line):
                    if _start(one) == place:
                        return one
                break
        raise KeyError(place)

    def each(
        self, context: Context | None = None, only: frozenset[int] | None = None
    ) -> Iterator[Request]:
        """Yield every request with its tokens. Raises as `requests` does.

        context: context that collects the notes for `remarks`; None to drop them.
        only: starts of the wanted requests; None for all requests.
        """
        context = context or Context(self._block_size)
        lines = self._lines()
        if (form := self._form) is not None:
            reader = form.reader(context)
            if form.in_log and not self._is_given:
                lines = self._of_one_kind(lines)
            found = (one for line in lines for one in self._read_line(reader, line))
            if only is not None:
                found = (one for one in found if _start(one) in only)
            yield from self._encoded(found, context)

    def _read_line(self, reader: Read, line: Line) -> Iterable[Request | Prompted]:
        """Return the requests of a line. Raises FormatError that names the line."""
        try:
            return _numbered(reader, line)
        except FormatError as error:
            if not self._is_given:
                self._refuse_other_kind(line)
            raise FormatError(f"{line.where}: {error}") from error

    def _of_one_kind(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield the lines of logs. Raises FormatError for a file that begins with another form.

        Without this check, a file of another form would be skipped, because readers of logs skip
        all lines that they do not know.
        """
        file = ""
        for line in lines:
            if line.file != file:
                file = line.file
                self._refuse_other_kind(line)
            yield line

    def _refuse_other_kind(self, line: Line) -> None:
        other = _form_of(line.data)
        if other is not None and self._form is not None and other.reader is not self._form.reader:
            raise FormatError(
                f"{line.where}: looks like {other.title}, but earlier lines look like "
                f"{self._form.title}; read one kind at a time"
            )

    def _lines(self) -> Iterator[Line]:
        """Return the lines of the input.

        The first line decides the form, or else the first line of a log does.
        """
        if self._form is None:
            head = self._inputs.head()
            self._form = next((f for f in FORMS if f.is_document and f.recognises(head)), None)
        if self._form is not None and self._form.is_document:
            return self._inputs.documents()
        lines = self._inputs.lines()
        if self._form is not None:
            return unwrapped(lines) if self._form.in_log else lines
        lines, first = unwrapped(lines), None
        for line in lines:
            first = first or line
            if (form := _form_of(line.data)) is not None and (line is first or form.in_log):
                self._form = form
                return itertools.chain([line], lines)
        if first is None:
            return lines
        forms = ", ".join(form.title for form in FORMS if form is not public_traces.LENGTHS)
        seen = first.data.strip()[:60].decode(errors="backslashreplace")
        raise UsageError(
            f"{first.where}: {seen!r} is no request in a known form; give one of "
            f"{forms}, or name the form by --trace-format"
        )

    def _encoded(self, found: Iterable[Request | Prompted], context: Context) -> Iterator[Request]:
        """Yield the requests. Encode requests that are text."""
        waiting: list[Request | Prompted] = []
        for one in found:
            if isinstance(one, Request) and not waiting:
                yield one
                continue
            waiting.append(one)
            if len(waiting) == _PROMPTS_AT_ONCE:
                yield from self._tokenized(waiting, context)
                waiting = []
        yield from self._tokenized(waiting, context)

    def _tokenized(self, batch: list[Request | Prompted], context: Context) -> Iterator[Request]:
        prompted = [one for one in batch if isinstance(one, Prompted)]
        if prompted and self._tokenizer is None and self._form is not None and self._form.in_log:
            context.note(*_NO_TOKENIZER, count=len(prompted))
            batch, prompted = [one for one in batch if isinstance(one, Request)], []
        encoded = iter(self._tokens(prompted))
        for one in batch:
            if isinstance(one, Request):
                yield one
            elif len(ids := next(encoded)) == one.tokens or one.tokens < 0:
                yield replace(one.request, token_ids=ids, input_tokens=len(ids))
            else:
                context.note(*_OTHER_TOKENIZER)

    def _tokens(self, batch: list[Prompted]) -> list[list[int]]:
        if not batch:
            return []
        if self._tokenizer is None:
            where = batch[0].request.where
            raise UsageError(f"{where}: is text, which needs a tokenizer; give --tokenizer DIR")
        if self._encoder is None:
            self._encoder = self._tokenizer()
        try:
            return self._encoder.encode([one.prompt for one in batch])
        except FormatError as error:
            if len(batch) > 1:  # encode the prompts one by one, to name the bad prompt
                return [ids for one in batch for ids in self._tokens([one])]
            raise FormatError(f"{batch[0].request.where}: {error}") from error


def _check_blocks(requests: Requests, context: Context) -> None:
    """Raise FormatError if a request has more blocks than its tokens fill.

    Note requests with tokens that have no block.
    """
    size, tokens, blocks = requests.block_tokens, requests.tokens, np.diff(requests.offsets)
    if requests.hashed or not size:
        return
    for number in np.flatnonzero((tokens >= 0) & ((blocks - 1) * size >= tokens) & (blocks > 0))[
        :1
    ]:
        raise FormatError(
            f"{requests.source}: request {number + 1} has {counted(int(blocks[number]), 'block')} "
            f"of {size} tokens, but its {tokens[number]} tokens fill fewer blocks; check "
            "--block-size"
        )
    if few := int((tokens // size > blocks).sum()):
        context.note(*_BEYOND_BLOCKS, count=few)


def _numbered(reader: Read, line: Line) -> Sequence[Request | Prompted]:
    """Return the requests of a line. Request i starts at the place of the line plus i."""
    found = tuple(reader(line))
    return found if len(found) < 2 else [_moved(one, line.place + i) for i, one in enumerate(found)]


def _moved(one: Request | Prompted, start: int) -> Request | Prompted:
    if isinstance(one, Request):
        return replace(one, start=start)
    return Prompted(one.prompt, replace(one.request, start=start), one.tokens)


def _start(one: Request | Prompted) -> int:
    return one.start if isinstance(one, Request) else one.request.start


def _own_reader(context: Context) -> Read:
    def read(line: Line) -> Iterable[Request]:
        found: list[int] | _TokenLine = decode(_TOKEN_LINE, line.data)
        if isinstance(found, list):
            found = _TokenLine(token_ids=found)
        found.refuse()
        if found.lora_id is not None:
            context.note_adapter(found.lora_id)
        given = (found.token_ids, found.input_ids, found.hash_ids, found.pages)
        if given.count(None) != len(given) - 1:
            raise FormatError(
                'needs exactly one of the members "token_ids", "input_ids", "hash_ids" and "pages"'
            )
        for page in found.pages or ():
            _check_page(page)
        tokens = found.token_ids if found.input_ids is None else found.input_ids
        return (
            found.request(
                line,
                tokens,
                block_ids=found.hash_ids,
                page_hashes=found.pages,
                block_tokens=max(token_count(found.block_size, "block_size"), 0),
                output_ids=found.output_ids or (),
            ),
        )

    return read


FORMS = (
    *server_logs.FORMS,
    *public_traces.FORMS,
    Form(
        "hicachectl",
        "JSON lines with token_ids, hash_ids or pages",
        lambda line: not members(line).isdisjoint(_TOKEN_MEMBERS),
        _own_reader,
    ),
    Form(
        "token-ids",
        "JSON lists of token ids",
        lambda line: _LIST.match(line) is not None,
        _own_reader,
    ),
    *texts.FORMS,
    public_traces.LENGTHS,
)


def _form_of(line: bytes) -> Form | None:
    return next((f for f in FORMS if not f.is_document and f.recognises(line)), None)


def form_named(name: str) -> Form:
    """Return the form with this name. Raises UsageError for an unknown name."""
    for form in FORMS:
        if form.name == name:
            return form
    names = ", ".join(form.name for form in FORMS)
    raise UsageError(f"--trace-format {name}: no such form; give one of {names}")


def read_page_chains(path: Path) -> Iterator[list[str]]:
    """Yield the page chains of a file.

    Each line is one of these:

    - a page hash
    - a chain: a JSON list of page hashes
    - a JSON row with a "page", as `ls --format jsonl` prints it
    """
    for chain, _ in _page_lines(path, required=True):
        yield chain


def read_page_list(path: Path, *, requests: bool = False) -> PageList:
    """Read a page list, with lines as in `read_page_chains`. Rows may have a "group".

    requests: whether the lines are requests. A list of requests must not be empty; a list that only
        chooses pages may be empty.
    """
    pages: list[str] = []
    groups: list[str | None] = []
    lengths: list[int] = []
    for chain, group in _page_lines(path, required=requests):
        pages += chain
        groups += [group] * len(chain)
        lengths.append(len(chain))
    return PageList(str(path), pages, groups, lengths)


def request_lines(
    path: Path, limit: int | None = None, *, what: str = "requests", required: bool = True
) -> Iterator[tuple[int, int, bytes]]:
    """Yield each line that is not blank: its number, the offset of its first byte, its bytes.

    limit: largest number of bytes of a line; None for MAX_LINE_BYTES.
    what: plural noun for the lines, in the message.
    required: whether to raise UsageError for a file that has only blank lines. Requests need this,
        because an empty file would count as fully served.
    """
    end, is_empty = 0, True
    for number, line in read_lines(path, MAX_LINE_BYTES if limit is None else limit):
        end += len(line)
        if not line.isspace():
            is_empty = False
            yield number, end - len(line), line
    if is_empty and required:
        raise UsageError(f"{path}: has no {what}; check the path")


def _page_lines(path: Path, *, required: bool) -> Iterator[tuple[list[str], str | None]]:
    for where, line in _lines(path, required=required):
        chain, group = [line.decode(errors="replace")], None
        if line.startswith((b"{", b"[")):
            with _at(where):
                found: list[str] | _PageLine = decode(_PAGE_LINE, line)
            if isinstance(found, _PageLine):
                chain, group = [found.page], found.group
            else:
                chain = found
        with _at(where):
            for page in chain:
                _check_page(page)
        yield chain, group


def _check_page(page: str) -> None:
    if not _HASH.fullmatch(page):
        raise FormatError(
            f"{page!r:.80} is neither a page hash (64 hexadecimal digits) nor a row of hicachectl "
            "ls --format jsonl"
        )


def _lines(path: Path, *, required: bool = True) -> Iterator[tuple[str, bytes]]:
    for number, _, line in request_lines(path, required=required):
        yield f"{path}: line {number}", line.strip()


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Add the place to the message of a FormatError. where: path and number of the line."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
