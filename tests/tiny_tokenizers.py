"""Tokenizers of real kinds with tiny vocabularies, in model directories."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The cat sat on the mat, and the dog looked at the cat.",
    "Page hashes are chained: each depends on all tokens before it.",
    "user assistant system tool weather in Paris {}[]()<> 0123456789\n",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

# One text per message.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{% endif %}"
)
# Content in parts, trimmed; tools without their wrapper.
PARTS_TEMPLATE = (
    "{% for tool in tools or [] %}{% if tool.function is defined %}"
    "{{ raise_exception('bare tools only') }}{% endif %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

KINDS: dict[str, dict[str, Any]] = {
    "qwen": {"tokenizer_class": "Qwen2Tokenizer", "chat_template": PLAIN_TEMPLATE},
    "llama3": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": PARTS_TEMPLATE},
    "deepseek": {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "chat_template": PLAIN_TEMPLATE,
    },
    "llama_by_default": {"tokenizer_class": "LlamaTokenizerFast", "chat_template": PLAIN_TEMPLATE},
    "llama_without": {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": False,
        "chat_template": PARTS_TEMPLATE,
    },
}


def make_tokenizer(directory: Path, kind: str, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json of one of KINDS; needs `tokenizers`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind == "llama3":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    stated = {"bos_token": "<s>", "eos_token": "</s>", **KINDS[kind], **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(stated))
    return directory
