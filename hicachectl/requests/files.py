"""Read requests from files, one per line: token ids, text, chats, or page hashes.

Reading raises UsageError if the file cannot be read or has no requests, FormatError naming the
line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from hicachectl.backends.disk.bounded import MAX_LINE_BYTES, read_lines
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    T = TypeVar("T")

_PROMPTS_AT_ONCE = 64  # a tokenizer encodes several in parallel
_HASH = re.compile(r"[0-9a-f]{64}")
_UNHASHABLE = "but only text parts can be hashed; give --token-ids with the ids that were served"


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that determine its page hashes.

    where: "FILE: line N", for messages. An empty extra_key or cache_salt is None, as in SGLang
    (managers/io_struct.py).
    """

    where: str
    token_ids: list[int]
    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages and the other input of the chat template.

    tool_choice: "auto", "required", "none", or one of the tools, as in a request.
    """

    messages: list[dict[str, Any]]
    template_arguments: dict[str, Any]
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | dict[str, Any] = "auto"


@dataclass(frozen=True, slots=True)
class PageList:
    """Pages that a file names, in the file's order.

    source: the file, for messages. groups: each page's group label (`ls` shows it as "group");
    None: all groups. lengths: pages in each line; a line of several is a chain.
    """

    source: str
    pages: list[str]
    groups: list[str | None]
    lengths: list[int]

    @property
    def labelled(self) -> int:
        """Number of rows with a group label."""
        return sum(group is not None for group in self.groups)

    @property
    def is_chained(self) -> bool:
        """Whether any line is a chain of several pages."""
        return any(length > 1 for length in self.lengths)

    def chains(self) -> Iterator[list[str]]:
        """Yield the pages of each line."""
        pages = iter(self.pages)
        return (list(islice(pages, length)) for length in self.lengths)

    def only_in_others(self, label: str) -> list[str]:
        """Return the pages that rows name only in groups other than `label`."""
        rows = list(zip(self.pages, self.groups, strict=True))
        named = {page for page, group in rows if group in (None, label)}
        return [page for page, _ in rows if page not in named]


Prompt = str | Chat


class PromptTokenizer(Protocol):
    """Tokenizer that gives the same token ids as a server."""

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt. A FormatError does not name the prompt."""


class OfAdapter(msgspec.Struct):
    """Members of a request for a LoRA adapter, whose pages have hashes of their own.

    Source: SGLang srt/managers/schedule_batch.py :: Req.__init__ (extra_key + lora_id).
    """

    lora_path: Any = None
    lora_id: Any = None

    def refuse(self) -> None:
        """Raise FormatError if the request is for an adapter."""
        for name, value in (("lora_path", self.lora_path), ("lora_id", self.lora_id)):
            if value is not None:
                raise FormatError(
                    f"{name} {shown(value)}: pages of LoRA adapters are not found by such a "
                    'line; give extra_key followed by lora_id as "extra_key", and leave out '
                    "lora_path and lora_id"
                )


class _Unhashed(OfAdapter, forbid_unknown_fields=True):
    """Members allowed beside the prompt: a line can be a whole request body.

    Others are refused, since a mistyped or unsupported member could change the chain.
    """

    rid: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    sampling_params: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    temperature: msgspec.Raw = msgspec.Raw()
    top_p: msgspec.Raw = msgspec.Raw()
    timestamp: msgspec.Raw = msgspec.Raw()
    input_length: msgspec.Raw = msgspec.Raw()
    output_length: msgspec.Raw = msgspec.Raw()
    extra_key: str | None = None
    cache_salt: str | None = None


class _TokenLine(_Unhashed):
    token_ids: list[int] | None = None
    input_ids: list[int] | None = None


class _PromptLine(_Unhashed):
    text: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: msgspec.Raw = msgspec.Raw()


class _PageLine(msgspec.Struct):
    page: str
    group: str | None = None


_TOKEN_LINE = msgspec.json.Decoder(list[int] | _TokenLine)
_PROMPT_LINE = msgspec.json.Decoder(str | list[dict[str, Any]] | _PromptLine)
_PAGE_LINE = msgspec.json.Decoder(list[str] | _PageLine)


def read_token_ids(path: Path) -> Iterator[Request]:
    """Yield requests of token ids.

    A line is a JSON list, {"token_ids": [...]} or {"input_ids": [...]}. Objects may have
    "extra_key" and "cache_salt".
    """
    for where, line in _lines(path):
        found: list[int] | _TokenLine = _decoded(_TOKEN_LINE, line, where)
        if isinstance(found, list):
            yield Request(where, found)
            continue
        ids = [value for value in (found.token_ids, found.input_ids) if value is not None]
        if len(ids) != 1:
            raise FormatError(f'{where}: needs exactly one of "token_ids" and "input_ids"')
        yield Request(where, ids[0], found.extra_key or None, found.cache_salt or None)


def read_prompts(path: Path, tokenizer: PromptTokenizer) -> Iterator[Request]:
    """Yield requests of text or chats.

    A line is a JSON string, {"text": "…"}, {"prompt": "…"}, a list of messages or
    {"messages": [...]}. Objects may have "extra_key" and "cache_salt"; with messages also
    "chat_template_kwargs", "tools" and "tool_choice".
    """
    batch: list[tuple[str, Prompt, _PromptLine]] = []
    for where, line in _lines(path):
        found: str | list[dict[str, Any]] | _PromptLine = _decoded(_PROMPT_LINE, line, where)
        if isinstance(found, str):
            found = _PromptLine(text=found)
        elif isinstance(found, list):
            found = _PromptLine(messages=found)
        batch.append((where, _prompt(found, where), found))
        if len(batch) == _PROMPTS_AT_ONCE:
            yield from _tokenized(batch, tokenizer)
            batch = []
    yield from _tokenized(batch, tokenizer)


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
            found: list[str] | _PageLine = _decoded(_PAGE_LINE, line, where)
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


def _decoded(decoder: msgspec.json.Decoder[T], line: bytes, where: str) -> T:
    try:
        found = decode(decoder, line)
        if isinstance(found, OfAdapter):
            found.refuse()
        return found
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


def _prompt(line: _PromptLine, where: str) -> Prompt:
    given = [value for value in (line.text, line.prompt, line.messages) if value is not None]
    if len(given) != 1:
        raise FormatError(f'{where}: needs exactly one of "text", "prompt" and "messages"')
    if isinstance(given[0], str):
        if line.chat_template_kwargs or line.tools:
            raise FormatError(f"{where}: chat_template_kwargs and tools need messages")
        return given[0]
    for number, message in enumerate(given[0]):
        if not isinstance(message.get("role"), str):
            raise FormatError(f"{where}: messages[{number}]: has no role; give one")
        _check_content(message.get("content"), f"{where}: messages[{number}]")
    choice = line.tool_choice or "auto"
    return Chat(given[0], line.chat_template_kwargs, line.tools or (), choice)


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
    batch: list[tuple[str, Prompt, _PromptLine]], tokenizer: PromptTokenizer
) -> Iterator[Request]:
    try:
        encoded = tokenizer.encode([prompt for _, prompt, _ in batch]) if batch else []
    except FormatError as error:
        if len(batch) > 1:  # find the bad prompt
            for one in batch:
                yield from _tokenized([one], tokenizer)
            return
        raise FormatError(f"{batch[0][0]}: {error}") from error
    for (where, _, line), token_ids in zip(batch, encoded, strict=True):
        yield Request(where, token_ids, line.extra_key or None, line.cache_salt or None)
