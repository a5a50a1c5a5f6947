"""Say what a request is, and what a form of request records has to tell.

A form is one kind of file that people have: our own, a server's log, a public trace, a data set of
chats. `reading` has the table of all forms, and reads files by them. A form is recognised by the
content of a record, never by the name of a file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import FormatError
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicachectl.requests.inputs import Line

MILLISECONDS = 0.001
SECONDS = 1.0
_MOST_TOKENS = 2**31 - 1
UNHASHABLE = "but only text can be hashed; give --token-ids with the ids that were served"


class Request(msgspec.Struct, frozen=True):
    """A request: what determines its pages, and what else a trace tells.

    where: "FILE: line N", for messages.
    token_ids: tokens of the prompt; empty with block_ids or page_hashes.
    extra_key: the text that seeds the hashes besides the salt: SGLang's member of this name, and
        the lora_id after it. An empty one is None (managers/io_struct.py).
    cache_salt: SGLang's member of this name; an empty one is None.
    block_ids: ids of blocks of tokens; equal ids have equal prefixes. None with token_ids.
    time: time of the request, in any unit.
    input_tokens: number of prompt tokens, with block_ids; -1 if unknown.
    output_tokens: number of generated tokens; -1 if unknown.
    start: place at which `Trace.again` finds the request; -1 without a file.
    page_hashes: hashes of the prompt's full pages, in hex, where the input names pages.
    block_tokens: tokens of a full block, where the input states them; 0 if it does not.
    output_ids: generated tokens, where the input has them.
    cached: prompt tokens that device, host and storage served; None if unknown. If only their sum
        is known, it stands first, and the others are -1.
    model: name of the model.
    adapter: LoRA adapter: its name or path, else its id.
    session: text that all requests of one session or conversation have.
    server: text that all requests to one server have.
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
    page_hashes: list[str] | None = None
    block_tokens: int = 0
    output_ids: Sequence[int] = ()
    cached: tuple[int, int, int] | None = None
    model: str | None = None
    adapter: str | None = None
    session: str | None = None
    server: str | None = None


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


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request whose prompt a tokenizer must encode.

    request: the rest of the request, without tokens.
    tokens: number of tokens that the server counted; -1 if unknown.
    """

    prompt: Prompt
    request: Request
    tokens: int = -1


class PromptTokenizer(Protocol):
    """Tokenizer that gives the same token ids as a server."""

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt. A FormatError does not name the prompt."""


@dataclass(slots=True)
class Context:
    """What a reader of a form knows and reports.

    block_size: tokens of a block, as the user states them; None if the user does not.
    notes: how often the input lacks a thing; the keys are what `note` gets.
    unfinished: number of lines about requests that the server has only received.
    """

    block_size: int | None = None
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)
    unfinished: int = 0

    def note(self, what: str, remedy: str, count: int = 1) -> None:
        """Count something that the input cannot tell: it is said once, after reading.

        what: words before the count of requests, such as "Without tokens, since …".
        remedy: what the user can do, or what becomes of the requests.
        """
        self.notes[what, remedy] += count

    def note_adapter(self, lora_id: str | None) -> None:
        """Count a request of an adapter that has been loaded at run time, by its uuid4.

        An adapter of --lora-paths has a uuid5 of its name and path, which stays the same. Source:
        SGLang srt/lora/lora_registry.py :: LoRARef.
        """
        if lora_id is not None and len(lora_id) == 32 and lora_id[12] == "4":
            self.note(
                "Of adapters loaded at run time",
                "each load names other pages, so they cannot be found again; give such adapters "
                "to --lora-paths",
            )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the input cannot tell, once each, with a count and the remedy."""
        return tuple(
            f"{what}: {counted(count, 'request')}; {remedy}"
            for (what, remedy), count in self.notes.items()
        )


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of request records.

    name: name for --trace-format.
    title: name in messages, such as "SGLang's request log".
    recognises: return whether a line is of this form, by its content; of a whole document, its
        first 64 KiB. It is cheap, and raises nothing.
    reader: return a new reader for one run over all lines. A reader may keep state, such as the
        numbers of chained ids. It raises FormatError without the place of the line, which the
        caller adds, and UsageError for a form that cannot be used at all.
    unit: seconds of the unit of relative times.
    in_log: whether a server logs the records: other lines may stand between them, and requests
        whose pages a record does not tell are left out and counted.
    is_document: whether a whole file is one record: the reader gets one line for each file.
    """

    name: str
    title: str
    recognises: Callable[[bytes], bool]
    reader: Callable[[Context], Callable[[Line], Iterable[Request | Prompted]]]
    unit: float = MILLISECONDS
    in_log: bool = False
    is_document: bool = False


def token_count(value: int | None, name: str) -> int:
    """Return a number of tokens; -1 for None. Raises FormatError naming the member."""
    if value is None:
        return -1
    if not 0 <= value <= _MOST_TOKENS:
        raise FormatError(f"{name}: {shown(value)} is not in 0..2^31-1")
    return value


def time_of(stamp: float | str | None) -> float | None:
    """Return a time as a number: Unix seconds for ISO 8601. Raises FormatError."""
    if isinstance(stamp, str):
        try:
            return datetime.fromisoformat(stamp).timestamp()
        except (ValueError, OverflowError) as error:
            raise FormatError(f"timestamp: {stamp!a:.60} is not ISO 8601") from error
    if stamp is not None and not abs(stamp) < 1e18:
        raise FormatError(f"timestamp: {stamp} is not in -1e18..1e18")
    return stamp


def seeding_key(extra_key: str | None, lora_id: str | None) -> str | None:
    """Return the text that seeds the hashes of a request besides its salt.

    Source: SGLang srt/managers/schedule_batch.py :: Req.__init__ (extra_key + lora_id).
    """
    return ((extra_key or "") + (lora_id or "")) or None


class _Cached(msgspec.Struct):
    """Prompt tokens that each tier served."""

    device: int = 0
    host: int = 0
    storage: int = 0


class Record(msgspec.Struct):
    """Members of every record of a request.

    refused: members that make other pages than the text or tokens alone. Source: SGLang
    srt/managers/io_struct.py :: GenerateReqInput.
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
    session_id: str | None = None
    hit_tokens: int | _Cached | None = None
    model: str | None = None
    lora_path: Any = None
    lora_id: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    session_params: Any = None

    def refuse(self) -> None:
        """Raise FormatError for a member that makes other pages than tokens alone."""
        for name, value in (("lora_path", self.lora_path), ("lora_id", self.lora_id)):
            if value is not None and not isinstance(value, str):
                raise FormatError(f"{name}: {shown(value)} is no text; give one adapter")
        if self.lora_path and not self.lora_id:
            raise FormatError(
                f"lora_path {shown(self.lora_path)}: the pages of an adapter are named by its "
                "lora_id; give lora_id as well, as SGLang's request log has it"
            )
        for name in self.refused:
            if getattr(self, name):
                raise FormatError(
                    f"{name}: changes the pages of the request, {UNHASHABLE}, without {name}"
                )

    def request(self, line: Line, token_ids: list[int] | None = None, **more: Any) -> Request:
        """Return the request of a line. Raises FormatError."""
        hits, cached = self.hit_tokens, None
        if isinstance(hits, _Cached):
            device, host, storage = (
                token_count(tokens, "hit_tokens")
                for tokens in (hits.device, hits.host, hits.storage)
            )
            cached = device, host, storage
        elif hits is not None:
            cached = token_count(hits, "hit_tokens"), -1, -1
        inputs = token_count(self.input_length, "input_length")
        return Request(
            line.where,
            token_ids or [],
            seeding_key(self.extra_key, self.lora_id),
            self.cache_salt or None,
            time=time_of(self.timestamp),
            input_tokens=inputs if token_ids is None else len(token_ids),
            output_tokens=token_count(self.output_length, "output_length"),
            start=line.place,
            cached=cached,
            model=self.model,
            adapter=self.lora_path or self.lora_id or None,
            session=self.session_id,
            **more,
        )


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def members(line: bytes) -> frozenset[str]:
    """Return the names of the members of a JSON object; none for other lines."""
    try:
        return frozenset(_MEMBERS.decode(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return frozenset()
