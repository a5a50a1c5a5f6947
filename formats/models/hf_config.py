"""Read a Hugging Face config.json strictly. Errors name the missing or malformed field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.flag_table import OPTIONS
from hicachectl.formats.profile import MAX_LAYERS, MAX_LENGTH, above
from hicachectl.formats.wording import with_next

# Other names of fields in some config classes (attribute_map).
_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
}
# Architectures that SGLang serves under another name (normalize_deepseek_v41_config).
_RENAMED = {"DeepseekV41ForCausalLM": "DeepseekV4ForCausalLM"}
_FLAGS = frozenset(flag.parameter for flag in OPTIONS)
_LAYER_COUNTS = ("num_hidden_layers", "num_nextn_predict_layers")


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A config's description of the language model.

    outer: the whole document.
    text: section on the language model; the whole document if it has no such section.
    source: name of the document in messages.
    """

    architecture: str
    outer: Mapping[str, Any]
    text: Mapping[str, Any]
    source: str

    def integer(self, name: str) -> int:
        """Return a field, which must be a whole number of at least 1."""
        return self._positive(name, self._present(name))

    def optional_integer(self, name: str) -> int:
        """Return a field, which must be a whole number; 0 if the field is absent or null."""
        value = self.text.get(name)
        return 0 if value is None or value == 0 else self._positive(name, value)

    def required(self, name: str) -> None:
        """Raise ProfileError if a field is absent. A field with the value null is not absent."""
        if name not in self.text:
            raise self.error(name, "missing")

    def flag(self, name: str, *, usual: bool) -> bool:
        """Return a field that is true or false; `usual` if the field is absent."""
        value = self.text.get(name, usual)
        if type(value) is not bool:
            raise self.error(name, f"expected true or false, found {shown(value)}")
        return value

    def strings(self, name: str, length: int | None = None) -> tuple[str, ...]:
        """Return a list of strings. length: required length of the list; None allows any."""
        return tuple(self._listed(name, str, "strings", length))

    def letters(self, name: str, length: int) -> str:
        """Return a string of `length` characters, one for each layer."""
        value = self._present(name)
        if not isinstance(value, str) or len(value) != length:
            raise self.error(name, f"expected {length} letters, found {shown(value)}")
        return value

    def integers(self, name: str, length: int | None = None) -> tuple[int, ...]:
        """Return a list of whole numbers. length: required length of the list; None allows any."""
        return tuple(self._listed(name, int, "whole numbers", length))

    def section(self, name: str) -> HfConfig:
        """Return a table of the config as an HfConfig."""
        value = self._present(name)
        if not isinstance(value, Mapping):
            raise self.error(name, f"expected a table, found {shown(value)}")
        return HfConfig(self.architecture, self.outer, value, f"{self.source}: {name}")

    def changed(self, **fields: Any) -> HfConfig:
        """Return the config with other values of some fields."""
        return replace(self, text={**self.text, **fields})

    def error(self, name: str, problem: str, next_step: str = "") -> ProfileError:
        """Return the error for a field of the config or a flag.

        next_step: next step for the user; by default, to check the flag or the config.
        """
        stated = f"--{name.replace('_', '-')}" if name in _FLAGS else "the config"
        return ProfileError(
            with_next(
                f"{self.source} ({self.architecture}): {name}: {problem}",
                next_step or f"check {stated}, or write a profile file",
            )
        )

    def _present(self, name: str) -> Any:
        for alias in (name, *_ALIASES.get(name, ())):
            value = self.text.get(alias)
            if value is not None:
                return value
        raise self.error(name, "missing")

    def _positive(self, name: str, value: Any) -> int:
        if type(value) is not int or value < 1:
            raise self.error(name, f"expected a whole number of at least 1, found {shown(value)}")
        most = MAX_LAYERS if name in _LAYER_COUNTS else MAX_LENGTH
        for problem in above(name, value, most):  # before building a list of that length
            raise self.error(*problem.split(": ", 1))
        return value

    def _listed(self, name: str, kind: type, words: str, length: int | None) -> list[Any]:
        value = self._present(name)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.error(name, f"expected a list of {words}, found {shown(value)}")
        if length not in (None, len(value)):
            raise self.error(name, f"expected {length} entries, found {len(value)}")
        return value


def open_config(document: Mapping[str, Any], *, source: str) -> HfConfig:
    """Return a config's architecture and language model. Raises ProfileError."""
    architectures = document.get("architectures")
    if (
        not isinstance(architectures, list)
        or not architectures
        or not isinstance(architectures[0], str)
    ):
        raise ProfileError(
            f"{source}: architectures: expected a list of names, found {shown(architectures)}; "
            "give a model's config.json"
        )
    return HfConfig(
        architecture=_RENAMED.get(architectures[0], architectures[0]),
        outer=document,
        text=_text(document),
        source=source,
    )


def _text(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section that SGLang reads (hf_transformers/common.py :: get_hf_text_config)."""
    if is_llava(document["architectures"][0]):
        return document
    if document.get("model_type") == "dots_vlm":  # DotsVLMConfig takes the whole document
        return document
    if document.get("model_type") == "iquest_q1_mtp":  # IQuestQ1MTPConfig has one layer
        target = document.get("target_config")
        of_target = target if isinstance(target, Mapping) else {}
        return {**of_target, "num_hidden_layers": 1, **document}
    thinker = document.get("thinker_config")
    if isinstance(thinker, Mapping):
        return _text({**thinker, "architectures": document["architectures"]})
    for name in ("llm_config", "language_config", "text_config"):
        section = document.get(name)
        if isinstance(section, Mapping):
            return _completed(section, document)
    return document


def _completed(section: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's section with the fields that SGLang copies from the document."""
    if document.get("model_type") == "deepseek_v41":  # normalize_deepseek_v41_config
        return {**section, **document}
    if document.get("model_type") == "inkling_mm_model":
        return {**section, **_inkling_mtp(document.get("mtp_config"))}
    return section


def _inkling_mtp(section: Any) -> dict[str, Any]:
    """Return the fields of the language model that `mtp_config` sets (InklingMMConfig)."""
    stated = section if isinstance(section, Mapping) else {}
    found = {"num_nextn_predict_layers": stated["n_layers"]} if "n_layers" in stated else {}
    if local := stated.get("local_layer_ids"):
        found["mtp_local_layer_ids"] = local
    return found


def is_llava(architecture: str) -> bool:
    """Return whether a model is a LLaVA, whose whole document SGLang reads (get_hf_text_config)."""
    return architecture.startswith("Llava") and architecture.endswith("ForCausalLM")
