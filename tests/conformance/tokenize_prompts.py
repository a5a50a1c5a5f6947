"""Have SGLang tokenize texts and chats, as its servers do.

Runs inside the SGLang environment: `tokenize_prompts.py FILE`, a JSON list of {directory, texts,
chats}: a chat is a body of /v1/chat/completions. Prints a JSON list of {texts, chats}: token ids.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    pass
else:
    pass


def answer(question: list[dict[str, Any]]) -> list[Any]:
    """Tokenize prompts."""
    return [_answered(**one) for one in question]


def _answered(directory: str, texts: list[str], chats: list[dict[str, Any]]) -> dict[str, Any]:
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(directory)
    serving = _serving(tokenizer)
    return {
        "texts": tokenizer(texts)["input_ids"],
        "chats": [_chat(serving, chat) for chat in chats],
    }


def _serving(tokenizer: Any) -> Any:
    """Return SGLang's chat endpoint, with only the parts that render and encode."""
    # The endpoint imports these, but no chat of the tests needs them.
    sys.modules.setdefault("jsonschema", mock.MagicMock())
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.parser import jinja_template_utils

    serving = OpenAIServingChat.__new__(OpenAIServingChat)
    template = tokenizer.chat_template
    serving.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer)
    serving.template_manager = SimpleNamespace(
        jinja_template_content_format=jinja_template_utils.detect_jinja_template_content_format(
            template
        ),
        jinja_template_may_reorder_tool_results=False,
        python_chat_template=None,
        chat_template_name=None,
        reasoning_config=None,
    )
    serving.default_chat_template_kwargs = {}
    serving.chat_encoding_spec = None
    serving._encoding_adapter = None
    serving.is_minimax_m3 = False
    serving.is_gpt_oss = serving.is_gemma4 = False
    serving.tool_call_parser = serving.reasoning_parser = None
    serving._patch_reasoning_skip_special_tokens = lambda request: None
    serving._get_reasoning_from_request = lambda request: False
    serving._takes_turn_grammar = lambda request, output_constrained: False
    serving._requires_response_template_detokenization = lambda request: False
    serving._thinking_requested = lambda request: False
    serving._tokenizer_auto_adds_specials = len(tokenizer.encode("")) > 0
    serving._prompt_text_round_trip_is_lossy = serving._probe_prompt_text_round_trip()
    return serving


def _chat(serving: Any, body: dict[str, Any]) -> list[int]:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(model="m", **body)
    ids: list[int] = serving._process_messages(request, False).prompt_ids
    return ids
