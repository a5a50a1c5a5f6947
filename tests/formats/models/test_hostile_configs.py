"""Altered configs: each gives a profile, or one line that names the fault; never another error."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import ProfileError
from tests.formats.model_rows import profile_of
from tests.model_records import DRAFTS, MODELS, QUANTISED

_KNOWN = {**MODELS, **DRAFTS, **QUANTISED}
_HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 7, 2**31, 10**30, 1.5, float("nan"), float("inf"), "", "8",
    "x" * 1000, "\x1b[2J\n", [], [0], [1, 2, 3], ["full_attention"], [None], [[]], {}, {"a": 1},
    {"architectures": ["x"]}, [10**9] * 3, ["a"] * 1000,
)  # fmt: skip


@pytest.mark.slow
@given(st.data())
def test_altered_configs_give_a_profile_or_one_line(data: st.DataObject) -> None:
    model = copy.deepcopy(_KNOWN[data.draw(st.sampled_from(sorted(_KNOWN)))])
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from([x for x in ("config", "draft") if model.get(x)]))
        _alter(model[part], data)
    row = {"tp": data.draw(st.sampled_from((1, 2, 3, 16))), "pp": data.draw(st.integers(1, 3))}
    try:
        profile = profile_of(model, row)
    except ProfileError as error:
        text = str(error)
        assert ": " in text  # after the field or the document
        assert "\n" not in text
        assert "\x1b" not in text
        assert len(text) < 1000
    else:
        assert all(len(pool.layer_numbers) <= 10_000 for pool in profile.pools)


@pytest.mark.parametrize("model_type", _HOSTILE, ids=lambda value: repr(value)[:20])
def test_model_types_of_the_wrong_kind_are_no_other_error(model_type: Any) -> None:
    model = copy.deepcopy(MODELS["Qwen3ForCausalLM"])
    model["config"]["model_type"] = model_type
    with contextlib.suppress(ProfileError):
        profile_of(model, {"tp": 1, "pp": 1})


def _alter(document: Any, data: st.DataObject) -> None:
    """Change, remove or copy a value of the document, at any depth."""
    places = list(_places(document))
    if not places:
        return
    parent, key = data.draw(st.sampled_from(places))
    action = data.draw(st.sampled_from(("hostile", "hostile", "remove", "copy")))
    if action == "remove" and isinstance(parent, dict):
        del parent[key]
    elif action == "copy":
        other, name = data.draw(st.sampled_from(places))
        parent[key] = copy.deepcopy(other[name])
    else:
        parent[key] = copy.deepcopy(data.draw(st.sampled_from(_HOSTILE)))


def _places(value: Any, depth: int = 0) -> Any:
    if depth > 4:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value[:8])
    for key, child in list(items):
        yield value, key
        if isinstance(child, dict | list):
            yield from _places(child, depth + 1)
