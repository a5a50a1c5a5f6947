"""Read requests that are texts: prompts, chats, bodies of OpenAI requests, ShareGPT conversations.

A tokenizer encodes the texts as a server does. Sources:

- SGLang srt/entrypoints/openai/protocol.py :: ChatCompletionRequest, CompletionRequest
- SGLang benchmark/datasets/sharegpt.py
- AIPerf 0.13.0 dataset/loader/models.py :: MooncakeTrace
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec.structs import replace

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import decode
from hicachectl.requests.forms import (
    UNHASHABLE,
    Chat,
    Form,
    Prompted,
    Record,
    Request,
    members,
    time_of,
    token_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hicachectl.requests.forms import Context, Prompt
    from hicachectl.requests.inputs import Line

    Read = Callable[[Line], Iterable[Request | Prompted]]

_TEXT = re.compile(rb'\s*("|\[\s*\{\s*"(role|content)")')
_CONVERSATIONS = re.compile(rb'\s*(\[\s*)?\{[^\[]*"conversations"\s*:\s*\[')
_ARRAY = re.compile(rb"\s*\[")
_PROMPT_MEMBERS = ("text", "prompt", "messages", "text_input", "payload")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
}


class _Body(Record):
    """Members of a request with text or messages.

    prompt: a text, a list of texts, the token ids of one prompt, or a list of such token ids.
    text_input: a text, in AIPerf's records.
    """

    refused: ClassVar[tuple[str, ...]] = (
        *Record.refused,
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
    text_input: str | None = None
    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def given(self) -> int:
        """Return the number of members that have a prompt."""
        values = (self.text, self.text_input, self.prompt, self.messages)
        return sum(value is not None for value in values)

    def prompts(self) -> Iterable[Prompt | list[int]]:
        """Return the prompts: texts, chats, or lists of token ids. Raises FormatError."""
        self.refuse()
        if self.given() != 1:
            raise FormatError('needs exactly one of "text", "prompt" and "messages"')
        if self.messages is not None:
            return [self._chat(self.messages)]
        if self.chat_template_kwargs or self.tools:
            raise FormatError("chat_template_kwargs and tools need messages")
        return _prompts(self.text or self.text_input or self.prompt or "")

    def _chat(self, messages: list[dict[str, Any]]) -> Chat:
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise FormatError(f"messages[{number}]: has no role; give one")
            _check_content(message.get("content"), f"messages[{number}]")
        choice = self.tool_choice or "auto"
        return Chat(messages, self.chat_template_kwargs or {}, self.tools or (), choice)


class _Line(_Body):
    """A line: the body of a request, or a record with the body in a member.

    body: body in a line of an OpenAI batch.
    payload: body in AIPerf's records.
    """

    body: _Body | None = None
    payload: _Body | None = None

    def request_body(self) -> _Body:
        """Return the body, which may be the line itself. Raises FormatError for several bodies."""
        inner = [body for body in (self.body, self.payload) if body is not None]
        if inner and len(inner) + self.given() > 1:
            raise FormatError(
                'needs exactly one prompt; "body" or "payload" has a prompt beside another prompt'
            )
        return inner[0] if inner else self


class _Turn(msgspec.Struct):
    """Text of one speaker in a conversation."""

    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    """A conversation of ShareGPT."""

    conversations: list[_Turn]
    id: str | int | None = None


_LINE = msgspec.json.Decoder(str | list[dict[str, Any]] | _Line)
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_CONVERSATION = msgspec.json.Decoder(_Conversation)


def _prompts(prompt: str | list[Any]) -> Iterable[str | list[int]]:
    """Return the prompts of a completion request. Raises FormatError."""
    if isinstance(prompt, str) or (prompt and _are_tokens(prompt)):
        return [prompt]
    for one in prompt:
        if not isinstance(one, str) and not (isinstance(one, list) and _are_tokens(one)):
            raise FormatError(f"prompt: {shown(one)} is neither a text nor a list of token ids")
    return prompt


def _are_tokens(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _check_content(content: object, where: str) -> None:
    """Raise FormatError for parts that are not text, because SGLang hashes their bytes.

    Source: SGLang schedule_batch.py, pad values.
    """
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
            raise FormatError(f"{where}.content: has a part of type {kind!r:.40}, {UNHASHABLE}")


def _prompt_reader(context: Context) -> Read:
    sessions: set[str] = set()

    def read(line: Line) -> Iterator[Request | Prompted]:
        found: str | list[dict[str, Any]] | _Line = decode(_LINE, line.data)
        if isinstance(found, str):
            found = _Line(text=found)
        elif isinstance(found, list):
            found = _Line(messages=found)
        if found.text_input is not None and (session := found.session_id) is not None:
            if session in sessions:
                raise FormatError(
                    f"text_input: is a later turn of the session {shown(session)}, so its prompt "
                    "has answers that the trace lacks; give messages"
                )
            sessions.add(session)
        body = found.request_body()
        prompts = body.prompts()
        context.note_adapter(body.lora_id)
        request = body.request(line)
        if body is not found:
            request = replace(
                request,
                time=time_of(found.timestamp),
                output_tokens=token_count(found.output_length, "output_length"),
                session=found.session_id or request.session,
            )
        for prompt in prompts:
            if ":" in (body.model or ""):
                context.note(
                    "With a model whose name has a colon, after which SGLang reads a LoRA adapter",
                    "where adapters are served, give SGLang's request log, which has the lora_id",
                )
            if isinstance(prompt, list):
                yield replace(request, token_ids=prompt, input_tokens=len(prompt))
            else:
                yield Prompted(prompt, request)

    return read


def _conversation_reader(_: Context) -> Read:
    def read(line: Line) -> Iterator[Prompted]:
        conversations: list[Any]
        if _ARRAY.match(line.data):
            conversations = decode(_ELEMENTS, line.data)
        else:
            conversations = [text for text in line.data.split(b"\n") if text.strip()]
        for number, data in enumerate(conversations, 1):
            where = f"conversation {number}"
            try:
                found: _Conversation = decode(_CONVERSATION, data)
                chats = _chats(found)
            except FormatError as error:
                raise FormatError(f"{where}: {error}") from error
            for chat in chats:
                session = None if found.id is None else str(found.id)
                request = Request(f"{line.where}: {where}", [], start=line.place, session=session)
                yield Prompted(chat, request)

    return read


def _chats(conversation: _Conversation) -> list[Chat]:
    """Return a chat for each turn of the user. The chat ends with this turn."""
    messages: list[dict[str, Any]] = []
    chats = []
    for turn in conversation.conversations:
        if (role := _ROLES.get(turn.speaker)) is None:
            raise FormatError(
                f"from: {turn.speaker!r:.40} is no speaker of a chat; give one of "
                f"{', '.join(_ROLES)}"
            )
        messages.append({"role": role, "content": turn.value})
        if role == "user":
            chats.append(Chat(messages[:], {}))
    return chats


FORMS = (
    Form(
        "sharegpt",
        "conversations of ShareGPT",
        lambda head: _CONVERSATIONS.match(head) is not None,
        _conversation_reader,
        is_document=True,
    ),
    Form(
        "openai",
        "batch files of OpenAI requests",
        lambda line: members(line) >= {"custom_id", "body"},
        _prompt_reader,
    ),
    Form(
        "prompts",
        "texts, chats or bodies of requests as JSON lines",
        lambda line: _TEXT.match(line) is not None or not members(line).isdisjoint(_PROMPT_MEMBERS),
        _prompt_reader,
    ),
)
