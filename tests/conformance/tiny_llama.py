"""A Llama of two layers with random weights, as a model directory for a server.

SGLang's `--load-format dummy` gives weights so small that attention does not matter: a page of
zeros then changes no answer. Here the scales let one wrong page change the answer.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

HIDDEN = 128
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
VOCABULARY = 1024

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_RANK = 8
_ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": _RANK,
    "lora_alpha": 8 * _RANK,
    "target_modules": ["q_proj", "k_proj", "v_proj"],
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "lora_dropout": 0.0,
}


def write_model(directory: Path, seed: int) -> None:
    """Write config.json and model.safetensors (bfloat16); equal seeds give equal bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    write_weights(directory, seed)


def write_weights(directory: Path, seed: int) -> None:
    """Write model.safetensors, or replace it in one step."""
    unfinished = directory / "model.unfinished"
    _write_tensors(unfinished, _weights(np.random.default_rng(seed)))
    unfinished.replace(directory / "model.safetensors")


def write_adapter(directory: Path, seed: int) -> None:
    """Write a LoRA adapter of the model, as a directory for a server."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(_ADAPTER))
    weights = _adapter_weights(np.random.default_rng(seed))
    _write_tensors(directory / "adapter_model.safetensors", weights)


def _write_tensors(path: Path, tensors: Iterable[tuple[str, npt.NDArray[np.float32]]]) -> None:
    """Write a safetensors file with bfloat16 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, weights in tensors:
        start = len(data)
        data += _bfloat16(weights)
        shape = list(weights.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _adapter_weights(
    random: np.random.Generator,
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in (("A", (_RANK, HIDDEN)), ("B", (rows * HEAD_DIM, _RANK))):
                values = random.standard_normal(shape, np.float32) / np.float32(4)
                yield f"{prefix}.lora_{half}.weight", values


def _weights(random: np.random.Generator) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    def matrix(rows: int, columns: int, scale: float) -> npt.NDArray[np.float32]:
        values = random.standard_normal((rows, columns), np.float32)
        return values * np.float32(scale / columns**0.5)

    ones = np.ones(HIDDEN, np.float32)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield "model.embed_tokens.weight", matrix(VOCABULARY, HIDDEN, HIDDEN**0.5)
    yield "model.norm.weight", ones
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN, 2)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, scale in (
            ("self_attn.q_proj", queries, HIDDEN, 2),
            ("self_attn.k_proj", keys, HIDDEN, 2),
            ("self_attn.v_proj", keys, HIDDEN, 1),
            ("self_attn.o_proj", HIDDEN, queries, 4),
            ("mlp.gate_proj", 2 * HIDDEN, HIDDEN, 1),
            ("mlp.up_proj", 2 * HIDDEN, HIDDEN, 1),
            ("mlp.down_proj", HIDDEN, 2 * HIDDEN, 1),
        ):
            yield f"{prefix}{name}.weight", matrix(rows, columns, scale)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", ones


def _bfloat16(values: npt.NDArray[np.float32]) -> bytes:
    """Return the upper halves of float32 values: bfloat16, rounded towards zero."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
