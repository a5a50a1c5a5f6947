"""The config class that nemotron-nas checkpoints bring along, as far as SGLang reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Part(dict[str, Any]):
    """A table with its fields as attributes too."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.__dict__.update(fields)


class DeciLMConfig(PretrainedConfig):  # type: ignore[misc]
    """A config with blocks of parts."""

    model_type = "nemotron-nas"

    def __init__(
        self, block_configs: Sequence[Mapping[str, Mapping[str, Any]]] = (), **fields: Any
    ) -> None:
        super().__init__(**fields)
        self.block_configs = [
            Part({name: Part(part) for name, part in block.items()}) for block in block_configs
        ]
