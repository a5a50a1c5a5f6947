"""Encode prompts as an SGLang server does, with a tokenizer on this machine.

Text is encoded with the tokenizer's special tokens, as by /generate and /v1/completions. Chats go
through the model's chat template with a generation prompt, as by /v1/chat/completions. Sources, in
SGLang's srt:

- managers/tokenizer_manager.py :: _tokenize_texts
- utils/hf_transformers/tokenizer.py :: get_tokenizer
- entrypoints/openai/serving_chat.py :: _apply_jinja_template
"""

from __future__ import annotations

import os
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.formats.documents import parse_json, parse_json_object
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.wording import failed, install_step, reason_of
from hicachectl.requests.forms import Chat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from hicachectl.requests.forms import Prompt


_TOKENIZER_FILE = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 256 << 20  # far above the largest known file, about 40 MB
_MAX_CONFIG_BYTES = 64 << 20
_INSTALL = install_step("tokenizers", "transformers")
_OTHER_SOURCE = "give --token-ids"
# Classes in which add_bos_token (default true) overrides the post-processor of tokenizer.json.
# In fast classes, add_eos_token does not override the post-processor (_fix_v5_add_bos_eos_token).
_BOS_BY_FLAG = frozenset(
    {
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "CodeLlamaTokenizer",
        "CodeLlamaTokenizerFast",
        "GemmaTokenizer",
        "GemmaTokenizerFast",
        "CohereTokenizerFast",
    }
)
# Architectures for which SGLang renders chats without a template (openai/chat_encoding.py).
_OWN_RENDERERS = ("DeepseekV4", "KimiK3", "InklingForConditionalGeneration")


def find_tokenizer(
    given: Path | None, places: Iterable[Path | None] = ()
) -> Callable[[], DirectoryTokenizer] | None:
    """Return a function that opens the tokenizer of a directory; None if no place has a tokenizer.

    given: directory of the tokenizer; None for the first place that has a tokenizer.
    places: directories, or files in them.
    """
    if given is not None:
        return partial(DirectoryTokenizer, given)
    for place in places:
        if place is not None:
            directory = place if place.is_dir() else place.parent
            if (directory / _TOKENIZER_FILE).is_file():
                return partial(DirectoryTokenizer, directory)
    return None


class DirectoryTokenizer:
    """Tokenizer of a model directory. It downloads nothing, and runs no code of the model."""

    def __init__(self, directory: Path) -> None:
        """Load tokenizer.json.

        Raises UsageError if the file or the package tokenizers is missing, and FormatError if the
        file is damaged.
        """
        self._directory = directory
        file = directory / _TOKENIZER_FILE
        if not file.is_file():
            raise UsageError(
                f"{directory}: has no {_TOKENIZER_FILE}; give a local directory that has it, since "
                "names on the Hugging Face Hub are not downloaded"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UsageError(f"The tokenizers package is missing; {_INSTALL}") from error
        data = read_bounded(file, _MAX_TOKENIZER_BYTES, what="a tokenizer", regular=True)
        try:
            self._fast: Any = Tokenizer.from_buffer(data)
        except Exception as error:  # tokenizers raises plain Exception
            why = failed(file, "load the tokenizer", error, "copy it from the model again")
            raise FormatError(why) from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self._config = _read_json(directory / "tokenizer_config.json")
        self._prefix = self._flagged_prefix()

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        chats = [isinstance(prompt, Chat) for prompt in prompts]
        texts = [self._rendered(p) if isinstance(p, Chat) else p for p in prompts]
        # A chat template writes special tokens itself, so the tokenizer adds none to chats.
        own = self._prefix is None
        prefix = self._prefix or []
        plain = self._encoded([t for t, chat in zip(texts, chats, strict=True) if not chat], own)
        rendered = self._encoded([t for t, chat in zip(texts, chats, strict=True) if chat], False)
        of_text, of_chat = iter(plain), iter(rendered)
        return [next(of_chat) if chat else prefix + next(of_text) for chat in chats]

    def _encoded(self, texts: list[str], special: bool) -> list[list[int]]:
        try:
            found = self._fast.encode_batch(texts, add_special_tokens=special)
        except Exception as error:  # tokenizers raises plain Exception
            why = f"the tokenizer cannot encode the text: {reason_of(error)}; {_OTHER_SOURCE}"
            raise FormatError(why) from error
        return [encoding.ids for encoding in found]

    def _flagged_prefix(self) -> list[int] | None:
        """Return the token ids that go before each text; None if tokenizer.json decides."""
        if self._config.get("tokenizer_class") not in _BOS_BY_FLAG:
            return None
        if self._config.get("add_bos_token") is False:
            return []
        stated = self._config.get("bos_token")
        text = stated.get("content") if isinstance(stated, dict) else stated
        token = self._fast.token_to_id(text) if isinstance(text, str) else None
        if token is None:
            raise FormatError(
                f"{self._directory}: tokenizer_config.json names the bos_token {text!r:.40}, "
                f"which {_TOKENIZER_FILE} lacks; check that both files are of the same model"
            )
        return [token]

    def _rendered(self, chat: Chat) -> str:
        messages = _template_messages(chat.messages, takes_parts=self._takes_parts)
        tools = template_tools(chat)
        ways = [tools]
        if tools:  # some templates need the bare functions; SGLang, too, tries these second
            ways.append([tool["function"] for tool in tools])
        for given in ways:
            try:
                text = self._templated.apply_chat_template(
                    messages,
                    tools=given,
                    tokenize=False,
                    add_generation_prompt=True,
                    **chat.template_arguments,
                )
            except Exception as error:  # a template may raise anything
                refusal = error
            else:
                return str(text)
        why = f"the chat template cannot render the messages: {reason_of(refusal)}; {_OTHER_SOURCE}"
        raise FormatError(why) from refusal

    @cached_property
    def _templated(self) -> Any:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise UsageError(f"The transformers package is missing; {_INSTALL}") from error
        architectures = _read_json(self._directory / "config.json").get("architectures") or [""]
        if str(architectures[0]).startswith(_OWN_RENDERERS):
            raise UsageError(
                f"Chats of {architectures[0]} are rendered by SGLang's code, without a chat "
                "template; give --token-ids"
            )
        try:
            found = AutoTokenizer.from_pretrained(
                str(self._directory), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = failed(self._directory, "load the tokenizer", error, _OTHER_SOURCE)
            raise FormatError(why) from error
        if not found.chat_template:
            raise UsageError(
                f"{self._directory}: the tokenizer has no chat template; give --token-ids"
            )
        return found

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether SGLang passes content to the template as a list of parts, not as one text.

        Source: parser/jinja_template_utils.py :: detect_jinja_template_content_format.
        """
        template = self._templated.chat_template
        if not isinstance(template, str):
            raise UsageError(f"{self._directory}: has several chat templates; give --token-ids")
        if any(word in template for word in ("image", "audio", "video", "vision")):
            return True
        return _iterates_content(template)


def _iterates_content(template: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]).parse(template)
    except TemplateSyntaxError:  # the template uses transformers' own extensions
        return False
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        while isinstance(source, nodes.Filter | nodes.Test) or (
            isinstance(source, nodes.Getitem) and isinstance(source.arg, nodes.Slice)
        ):
            if source.node is None:
                break
            source = source.node
        name, member = _member(source)
        if name in ("message", "msg", "m") and member == "content":
            return True
    return False


def _member(node: Any) -> tuple[object, object]:
    """Return the name and the member in `name.member` or `name["member"]`."""
    owner = getattr(getattr(node, "node", None), "name", None)
    argument = getattr(node, "arg", None)
    return owner, getattr(node, "attr", None) or getattr(argument, "value", None)


def _template_messages(
    messages: Sequence[dict[str, Any]], *, takes_parts: bool
) -> list[dict[str, Any]]:
    found = []
    for message in messages:
        given = {name: value for name, value in message.items() if value is not None}
        given["content"] = _content(given, takes_parts=takes_parts)
        if given["role"] == "assistant" and given.get("tool_calls"):
            given["tool_calls"] = [_parsed_call(call) for call in given["tool_calls"]]
        found.append(given)
    # If the last message is the assistant's, SGLang sends it as a message of the user
    # (_handle_last_assistant_message).
    if found and found[-1]["role"] == "assistant" and isinstance(found[-1]["content"], str):
        found[-1] = {"role": "user", "content": found[-1]["content"]}
    return found


def _content(message: dict[str, Any], *, takes_parts: bool) -> object:
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content]
    if takes_parts and message["role"] != "tool":
        return [{"type": "text", "text": text} for text in texts]
    return " ".join(texts)


def _parsed_call(call: Any) -> Any:
    """Return a tool call with its arguments parsed. Requests have them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = parse_json(function["arguments"], "tool call arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    data = read_bounded(file, _MAX_CONFIG_BYTES, what="the config of a tokenizer", regular=True)
    return parse_json_object(data, str(file))


_ALWAYS = ("description", "name", "parameters")  # members that are null if a request omits them
_WHERE_GIVEN = ("strict", "defer_loading")
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_CHOICES = ("auto", "required", "none")


def template_tools(chat: Chat) -> list[dict[str, Any]] | None:
    """Return the tools that SGLang passes to the template of a chat; None without tools.

    Raises FormatError for a malformed tool, for an unknown choice, and for types in JSON schemas
    that SGLang would replace.
    """
    tools = [_tool(tool, number) for number, tool in enumerate(chat.tools)]
    choice = chat.tool_choice
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise FormatError(f"tool_choice: {choice!r:.40} is not one of {', '.join(_CHOICES)}")
        return tools if tools and choice != "none" else None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise FormatError(f"tool_choice: {name!r:.40} is not one of the tools; name one")
    return chosen


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    given = tool.get("function")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise FormatError(f"tools[{number}]: has no function with a name; give one")
    _refuse_other_types(given.get("parameters"), f"tools[{number}].function.parameters")
    later = tool.get("defer_loading")
    function = {name: value for name, value in given.items() if name in (*_ALWAYS, *_WHERE_GIVEN)}
    function |= {name: None for name in _ALWAYS if name not in function}
    if later is not None and function.get("defer_loading") is None:
        function["defer_loading"] = later
    for name in _WHERE_GIVEN:
        if name in function and function[name] is None:
            del function[name]
    return {"type": tool.get("type", "function"), "function": function, "defer_loading": later}


def _refuse_other_types(schema: object, where: str) -> None:
    """Raise FormatError for a type name that SGLang replaces (function_call/utils.py)."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        stated = part.get("type")
        names: Sequence[object] = stated if isinstance(stated, list) else [stated]
        for name in names:
            if isinstance(name, str) and name not in _TYPES:
                raise FormatError(
                    f"{where}: {name!r:.40} is not a JSON schema type, so SGLang would replace "
                    "it; give --token-ids with the ids that were served"
                )
