"""Tools of a chat as SGLang passes them to a chat template.

Templates write tools as JSON, so every member and the order of members count. Source: SGLang
srt/entrypoints/openai/protocol.py :: Tool, Function; serving_chat.py :: _process_messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicachectl.requests.reading import Chat

_ALWAYS = ("description", "name", "parameters")  # null if a request omits the member
_WHERE_GIVEN = ("strict", "defer_loading")
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_CHOICES = ("auto", "required", "none")


def template_tools(chat: Chat) -> list[dict[str, Any]] | None:
    """Return the tools that SGLang passes to a chat's template, or None.

    Raises FormatError for a malformed tool, an unknown choice, and types in JSON schemas that
    SGLang would replace.
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
