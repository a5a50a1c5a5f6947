"""Read requests from files of JSON lines: token ids, block ids, text, chats, or page hashes.

Members of a line that change the pages of a request are read, or refused by name; others are
ignored, so that a line can be a whole request body. Reading raises UsageError if the file cannot be
read or has no requests, FormatError naming the line.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import msgspec

from hicachectl.backends.disk.bounded import MAX_LINE_BYTES, read_lines
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import decode
from hicachectl.formats.wording import failed
from hicachectl.pages.selection import PageList

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_MOST_TOKENS = 2**31 - 1
_PROMPTS_AT_ONCE = 64  # a tokenizer encodes several in parallel
_HASH = re.compile(r"[0-9a-f]{64}")
_UNHASHABLE = "but only text can be hashed; give --token-ids with the ids that were served"


@dataclass(frozen=True, slots=True)
class Request:
    """A request: what determines its pages, and what else a trace tells.

    where: "FILE: line N", for messages.
    token_ids: tokens of the prompt; empty with block_ids.
    extra_key: SGLang's member of this name; an empty one is None (managers/io_struct.py).
    cache_salt: SGLang's member of this name; an empty one is None.
    block_ids: ids of blocks of tokens; equal ids have equal prefixes. None with token_ids.
    time: time of the request, in any unit.
    input_tokens: number of prompt tokens, with block_ids; -1 if unknown.
    output_tokens: number of generated tokens; -1 if unknown.
    start: byte offset of the line; -1 without a file.
    """

    where: str
    token_ids: list[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    block_ids: list[int] | None = None
    time: float | None = None
    input_tokens: int = -1
    output_tokens: int = -1
    start: int = -1


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages and the other input of the chat template.

    tool_choice: "auto", "required", "none", or one of the tools, as in a request.
    """

    messages: list[dict[str, Any]]
    template_arguments: dict[str, Any]
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | dict[str, Any] = "auto"


Prompt = str | Chat


class PromptTokenizer(Protocol):
    """Tokenizer that gives the same token ids as a server."""

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt. A FormatError does not name the prompt."""


class _Line(msgspec.Struct):
    """Members of every line.

    refused: members that make other pages than the text or tokens alone. Source: SGLang
    srt/managers/io_struct.py :: GenerateReqInput; schedule_batch.py :: Req.__init__ (extra_key +
    lora_id).
    """

    refused: ClassVar[tuple[str, ...]] = (
        "image_data",
        "video_data",
        "audio_data",
        "input_embeds",
        "session_params",
    )
    timestamp: float | str | None = None
    input_length: int | None = None
    output_length: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: Any = None
    lora_id: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    session_params: Any = None

    def refuse(self) -> None:
        """Raise FormatError for a member that makes other pages than tokens alone."""
        for name in ("lora_path", "lora_id"):
            if (value := getattr(self, name)) is not None:
                raise FormatError(
                    f"{name} {shown(value)}: pages of LoRA adapters are not found by such a "
                    'line; give extra_key followed by lora_id as "extra_key", and leave out '
                    "lora_path and lora_id"
                )
        for name in self.refused:
            if getattr(self, name):
                raise FormatError(
                    f"{name}: changes the pages of the request, {_UNHASHABLE}, without {name}"
                )

    def request(self, where: str, start: int, token_ids: list[int] | None, **ids: Any) -> Request:
        """Return the request of a line with these tokens. Raises FormatError."""
        inputs = _count(self.input_length, "input_length")
        return Request(
            where,
            token_ids or [],
            self.extra_key or None,
            self.cache_salt or None,
            time=_time(self.timestamp),
            input_tokens=inputs if token_ids is None else len(token_ids),
            output_tokens=_count(self.output_length, "output_length"),
            start=start,
            **ids,
        )


class _TokenLine(_Line):
    token_ids: list[int] | None = None
    input_ids: list[int] | None = None
    hash_ids: list[_Int64] | None = None


class _PromptLine(_Line):
    """Members of a line with text or messages.

    Source: SGLang srt/entrypoints/openai/protocol.py :: ChatCompletionRequest.
    """

    refused: ClassVar[tuple[str, ...]] = (
        *_Line.refused,
        "reasoning_effort",
        "thinking",
        "task",
        "continue_final_message",
    )
    reasoning_effort: Any = None
    thinking: Any = None
    task: Any = None
    continue_final_message: Any = None
    text: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class _PageLine(msgspec.Struct):
    page: str
    group: str | None = None


_TOKEN_LINE = msgspec.json.Decoder(list[int] | _TokenLine)
_PROMPT_LINE = msgspec.json.Decoder(str | list[dict[str, Any]] | _PromptLine)
_PAGE_LINE = msgspec.json.Decoder(list[str] | _PageLine)


def read_requests(path: Path, tokenizer: PromptTokenizer | None = None) -> Iterator[Request]:
    """Yield the requests of a file: token ids or block ids; with a tokenizer, text or chats.

    A line of token ids is a JSON list, or an object with "token_ids" or "input_ids". One of block
    ids is an object with "hash_ids", as in Mooncake's public traces (FAST25-release). A line of
    text or chats is a JSON string, a list of messages, or an object with "text", "prompt" or
    "messages"; with messages it may have "chat_template_kwargs", "tools" and "tool_choice". Objects
    may have "extra_key", "cache_salt", "timestamp" (a number in any unit, or ISO 8601),
    "input_length" and "output_length" (in tokens).
    """
    lines = ((f"{path}: line {number}", start, line) for number, start, line in request_lines(path))
    return _requests(lines, tokenizer)


def read_again(
    path: Path, starts: Iterable[int], tokenizer: PromptTokenizer | None = None
) -> Iterator[Request]:
    """Yield the requests whose lines begin at bytes `starts`, in that order.

    Tokens are not kept, since there may be billions. Raises UsageError if the file cannot be read,
    FormatError if it has changed.
    """
    try:
        with path.open("rb") as file:
            yield from _requests(_lines_at(path, file, starts), tokenizer)
    except FormatError as error:
        raise FormatError(f"{path}: changed since it was read; run again") from error
    except OSError as error:
        raise UsageError(
            failed(path, "read the requests again", error, "check the file")
        ) from error


def _lines_at(
    path: Path, file: BinaryIO, starts: Iterable[int]
) -> Iterator[tuple[str, int, bytes]]:
    for start in starts:
        file.seek(start)
        yield f"{path}: byte {start}", start, file.readline(MAX_LINE_BYTES)


def _requests(
    lines: Iterable[tuple[str, int, bytes]], tokenizer: PromptTokenizer | None
) -> Iterator[Request]:
    """Yield the requests of lines. lines: where each is, for messages; its offset; its bytes."""
    if tokenizer is None:
        for where, start, line in lines:
            with _at(where):
                request = _token_request(where, start, line)
            yield request
        return
    rest = iter(lines)
    while batch := list(islice(rest, _PROMPTS_AT_ONCE)):
        yield from _tokenized([_prompt_line(*line) for line in batch], tokenizer)


def _token_request(where: str, start: int, line: bytes) -> Request:
    found: list[int] | _TokenLine = decode(_TOKEN_LINE, line)
    if isinstance(found, list):
        return Request(where, found, input_tokens=len(found), start=start)
    found.refuse()
    ids = [value for value in (found.token_ids, found.input_ids) if value is not None]
    if len(ids) + (found.hash_ids is not None) != 1:
        raise FormatError('needs exactly one of "token_ids" and "input_ids", or of "hash_ids"')
    return found.request(where, start, ids[0] if ids else None, block_ids=found.hash_ids)


def read_page_chains(path: Path) -> Iterator[list[str]]:
    """Yield page chains.

    A line is a page hash, a JSON list of page hashes (a chain), or a JSON row with a "page", as
    `ls --format jsonl` prints.
    """
    for chain, _ in _page_lines(path, required=True):
        yield chain


def read_page_list(path: Path, *, requests: bool = False) -> PageList:
    """Read a page list, in the lines of `read_page_chains`. Rows may have a "group".

    requests: whether the lines are requests; a list that only chooses pages may be empty.
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

    required: raise UsageError for a file without such a line, so that nothing requested is never
    taken for everything served. what: the plural name of a line, for this message. limit: most
    bytes of a line; default: MAX_LINE_BYTES.
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
        for page in chain:
            if not _HASH.fullmatch(page):
                raise FormatError(
                    f"{where}: {page!r:.80} is neither a page hash (64 hexadecimal digits) nor a "
                    "row of hicachectl ls --format jsonl"
                )
        yield chain, group


def _lines(path: Path, *, required: bool = True) -> Iterator[tuple[str, bytes]]:
    for number, _, line in request_lines(path, required=required):
        yield f"{path}: line {number}", line.strip()


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Name the line in a FormatError."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


def _time(stamp: float | str | None) -> float | None:
    if isinstance(stamp, str):
        try:
            return datetime.fromisoformat(stamp).timestamp()
        except (ValueError, OverflowError) as error:
            raise FormatError(f"timestamp: {stamp!a:.60} is not ISO 8601") from error
    if stamp is not None and not abs(stamp) < 1e18:
        raise FormatError(f"timestamp: {stamp} is not in -1e18..1e18")
    return stamp


def _count(value: int | None, name: str) -> int:
    if value is None:
        return -1
    if not 0 <= value <= _MOST_TOKENS:
        raise FormatError(f"{name}: {value} is not in 0..2^31-1")
    return value


def _prompt_line(where: str, start: int, line: bytes) -> tuple[str, int, Prompt, _PromptLine]:
    with _at(where):
        found: str | list[dict[str, Any]] | _PromptLine = decode(_PROMPT_LINE, line)
        if isinstance(found, str):
            found = _PromptLine(text=found)
        elif isinstance(found, list):
            found = _PromptLine(messages=found)
        found.refuse()
        return where, start, _prompt(found), found


def _prompt(line: _PromptLine) -> Prompt:
    given = [value for value in (line.text, line.prompt, line.messages) if value is not None]
    if len(given) != 1:
        raise FormatError('needs exactly one of "text", "prompt" and "messages"')
    if isinstance(given[0], str):
        if line.chat_template_kwargs or line.tools:
            raise FormatError("chat_template_kwargs and tools need messages")
        return given[0]
    for number, message in enumerate(given[0]):
        if not isinstance(message.get("role"), str):
            raise FormatError(f"messages[{number}]: has no role; give one")
        _check_content(message.get("content"), f"messages[{number}]")
    choice = line.tool_choice or "auto"
    return Chat(given[0], line.chat_template_kwargs or {}, line.tools or (), choice)


def _check_content(content: object, where: str) -> None:
    """Refuse parts that SGLang hashes by bytes, not as text (schedule_batch.py, pad values)."""
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise FormatError(
            f"{where}.content: {shown(content)} is no text or list of parts; give one"
        )
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") not in ("text", "input_text"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise FormatError(f"{where}.content: has a part of type {kind!r:.40}, {_UNHASHABLE}")


def _tokenized(
    batch: list[tuple[str, int, Prompt, _PromptLine]], tokenizer: PromptTokenizer
) -> Iterator[Request]:
    try:
        encoded = tokenizer.encode([prompt for _, _, prompt, _ in batch])
    except FormatError as error:
        if len(batch) > 1:  # find the bad prompt
            for each in batch:
                yield from _tokenized([each], tokenizer)
            return
        raise FormatError(f"{batch[0][0]}: {error}") from error
    for (where, start, _, line), token_ids in zip(batch, encoded, strict=True):
        with _at(where):
            request = line.request(where, start, token_ids)
        yield request
