"""Define a request, and a form of request records.

A form is one kind of file, such as a server's log, a public trace or a data set of chats.
`reading` has the table of all forms, and reads files by them. A form is recognised by the content
of a record, never by the name of a file.
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
    """A request, with the members that determine its pages, and with facts for statistics.

    where: "FILE: line N", for messages.
    token_ids: tokens of the prompt; empty with block_ids or page_hashes.
    extra_key: text that seeds the hashes besides the salt: SGLang's extra_key, followed by the
        lora_id. None if the text is empty (managers/io_struct.py).
    cache_salt: SGLang's member of this name; None if it is empty.
    block_ids: ids of blocks of tokens. Equal ids have equal prefixes. None if the input
        has no such ids.
    time: time of the request, in the unit of the input; None if unknown.
    input_tokens: number of prompt tokens; -1 if unknown.
    output_tokens: number of generated tokens; -1 if unknown.
    start: place at which `Trace.again` finds the request; -1 without a file.
    page_hashes: hexadecimal hashes of the prompt's full pages; None if the input does not name
        pages.
    block_tokens: number of tokens of a full block; 0 if the input does not state it.
    output_ids: generated tokens; empty if the input does not have them.
    cached: number of prompt tokens that device, host and storage served; None if unknown. If only
        the sum is known, it stands first, and the others are -1.
    model: name of the model.
    adapter: name or path of the LoRA adapter; its id if the input states neither.
    session: text that all requests of one session or conversation share.
    server: text that all requests to one server share.
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
    """Messages and the other input of a chat template.

    tool_choice: "auto", "required", "none", or a tool, as in a request.
    """

    messages: list[dict[str, Any]]
    template_arguments: dict[str, Any]
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | dict[str, Any] = "auto"


Prompt = str | Chat


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request with a prompt that a tokenizer must encode.

    request: the request without its tokens.
    tokens: number of tokens that the server counted; -1 if unknown.
    """

    prompt: Prompt
    request: Request
    tokens: int = -1


class PromptTokenizer(Protocol):
    """Tokenizer that gives the same token ids as a server."""

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt. Raises FormatError that does not name the prompt."""


@dataclass(slots=True)
class Context:
    """Settings for the reader of a form, and what the reader reports.

    block_size: number of tokens of a block, as stated by the user; None if not stated.
    notes: number of requests that lack something; the keys are the texts given to `note`.
    unfinished: number of lines about requests that the server has received, but not finished.
    """

    block_size: int | None = None
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)
    unfinished: int = 0

    def note(self, what: str, remedy: str, count: int = 1) -> None:
        """Count requests that lack something. One remark for all of them follows after reading.

        what: words before the count of requests, such as "Without tokens, since …".
        remedy: next step of the user, or what happens to the requests.
        """
        self.notes[what, remedy] += count

    def note_adapter(self, lora_id: str | None) -> None:
        """Count a request if its adapter was loaded at run time. Such an adapter has a uuid4.

        An adapter of --lora-paths has a uuid5 of its name and path, which stays the same. Source:
        SGLang srt/lora/lora_registry.py :: LoRARef.
        """
        if lora_id is not None and len(lora_id) == 32 and lora_id[12] == "4":
            self.note(
                "Of adapters loaded at run time",
                "each load of an adapter gives its pages new names, so they cannot be found again; "
                "give such adapters to --lora-paths",
            )

    @property
    def remarks(self) -> tuple[str, ...]:
        """One remark for each kind of lack, with the number of requests and the remedy."""
        return tuple(
            f"{what}: {counted(count, 'request')}; {remedy}"
            for (what, remedy), count in self.notes.items()
        )


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of request records.

    name: name for --trace-format.
    title: name in messages, such as "SGLang's request log".
    recognises: function that returns whether a line has this form, by its content. For a document,
        the function gets the first 64 KiB. The function is cheap, and raises nothing.
    reader: function that returns a new reader for one run over all lines. A reader may keep state,
        such as the numbers of chained ids. It raises FormatError without the place of the line; the
        caller adds this place. It raises UsageError for a form that cannot be used at all.
    unit: number of seconds in one unit of relative times.
    in_log: whether the records are lines of a server's log. Other lines may stand between these
        lines. Records that do not show the pages of their request are counted and left out.
    is_document: whether a whole file is one record, so that the reader gets one line for each file.
    """

    name: str
    title: str
    recognises: Callable[[bytes], bool]
    reader: Callable[[Context], Callable[[Line], Iterable[Request | Prompted]]]
    unit: float = MILLISECONDS
    in_log: bool = False
    is_document: bool = False


def token_count(value: int | None, name: str) -> int:
    """Return a number of tokens; -1 for None. Raises FormatError that names the member."""
    if value is None:
        return -1
    if not 0 <= value <= _MOST_TOKENS:
        raise FormatError(f"{name}: {shown(value)} is not in 0..2^31-1")
    return value


def time_of(stamp: float | str | None) -> float | None:
    """Return a time as a number; Unix seconds if the stamp is ISO 8601. Raises FormatError."""
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
    """Number of prompt tokens that each tier served."""

    device: int = 0
    host: int = 0
    storage: int = 0


class Record(msgspec.Struct):
    """Members that any record of a request can have.

    refused: members that give the request other pages than its text or tokens. Source: SGLang
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
        """Raise FormatError for a member that gives the request other pages than its tokens."""
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
    """Return the names of the members of a JSON object; empty for any other line."""
    try:
        return frozenset(_MEMBERS.decode(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return frozenset()
