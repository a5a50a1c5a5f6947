"""Prompts to token ids, with realistic tokenizers; conformance tests compare with SGLang's ids."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.requests.forms import Chat
from hicachectl.requests.tokenizing import DirectoryTokenizer, find_tokenizer
from tests.skips import need_module
from tests.stores import DSA
from tests.tiny_tokenizers import make_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

# One process loads transformers, which takes seconds.
pytestmark = pytest.mark.xdist_group("transformers")

USER = {"role": "user", "content": "The cat"}


@pytest.fixture(autouse=True)
def _tokenizers() -> None:
    need_module("tokenizers")
    need_module("transformers")


def test_special_tokens_are_the_tokenizers_own_or_by_flag(tmp_path: Path) -> None:
    def ids(kind: str, **config: Any) -> list[int]:
        made = make_tokenizer(tmp_path / f"{kind}{len(config)}", kind, **config)
        return DirectoryTokenizer(made).encode(["The cat"])[0]

    plain = ids("qwen")
    assert ids("llama_without") == plain
    assert ids("llama3") == ids("deepseek") == ids("llama_by_default") == [0, *plain]
    # Classes without the flag ignore it.
    assert ids("qwen", add_bos_token=True) == plain


@pytest.mark.slow
def test_texts_and_chats_keep_their_order(tmp_path: Path) -> None:
    tokenizer = DirectoryTokenizer(make_tokenizer(tmp_path, "deepseek"))
    chat = Chat([USER], {})
    mixed = tokenizer.encode(["a", chat, "b", chat, chat])
    assert mixed == [tokenizer.encode([prompt])[0] for prompt in ("a", chat, "b", chat, chat)]
    assert mixed[1] != mixed[0]
    assert mixed[1][:2] == [0, 2]  # one <s>, from the template, then <|im_start|>


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "^the chat template cannot render the messages: roles must alternate; give --token-ids",
        ),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "the chat template cannot render"),
        # SGLang takes one of several; no file says which.
        (
            [{"name": name, "template": "{{ messages }}"} for name in ("default", "tool_use")],
            "has several .*; give --token-ids",
        ),
    ],
    ids=["refuses", "leaves its sandbox", "several"],
)
def test_a_template_that_renders_no_chat_is_said(tmp_path: Path, template: Any, said: str) -> None:
    tokenizer = DirectoryTokenizer(make_tokenizer(tmp_path, "qwen", chat_template=template))
    with pytest.raises((FormatError, UsageError), match=said):
        tokenizer.encode([Chat([USER], {})])


def test_tool_call_arguments_must_be_json(tmp_path: Path) -> None:
    tokenizer = DirectoryTokenizer(make_tokenizer(tmp_path, "qwen"))
    call = {"function": {"name": "f", "arguments": "{"}}
    with pytest.raises(FormatError, match="tool call arguments: not JSON"):
        tokenizer.encode([Chat([{"role": "assistant", "tool_calls": [call]}, USER], {})])


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tools_are_written_by_the_template_and_a_choice_picks_among_them(tmp_path: Path) -> None:
    tokenizer = DirectoryTokenizer(make_tokenizer(tmp_path, "qwen"))
    other = {"function": {"name": "other"}}
    without = tokenizer.encode([Chat([USER], {})])
    both = tokenizer.encode([Chat([USER], {}, [TOOL, other])])
    one = tokenizer.encode([Chat([USER], {}, [TOOL])])
    picked = {"type": "function", "function": {"name": "weather"}}
    assert tokenizer.encode([Chat([USER], {}, [TOOL, other], picked)]) == one
    assert tokenizer.encode([Chat([USER], {}, [TOOL, other], "required")]) == both
    assert tokenizer.encode([Chat([USER], {}, [TOOL], "none")]) == without
    assert len(without[0]) < len(one[0]) < len(both[0])


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([{"type": "function"}], "auto", r"tools\[0\]: has no function with a name; give"),
        (
            [TOOL, {"function": {"name": 3}}],
            "auto",
            r"tools\[1\]: has no function with a name; give",
        ),
        ([TOOL], "sometimes", "tool_choice: 'sometimes' is not one of auto, required, none"),
        ([TOOL], {"function": {"name": "x"}}, "tool_choice: 'x' is not one of the tools; name one"),
        ([TOOL], {"function": 1}, "tool_choice: None is not one of the tools; name one"),
        (
            [{"function": {"name": "f", "parameters": {"anyOf": [{"type": ["varchar"]}]}}}],
            "auto",
            "'varchar' is not a JSON schema type",
        ),
    ],
)
def test_tools_that_sglang_would_not_take_or_would_change_are_refused(
    tmp_path: Path, tools: list[dict[str, Any]], choice: Any, said: str
) -> None:
    tokenizer = DirectoryTokenizer(make_tokenizer(tmp_path, "qwen"))
    with pytest.raises(FormatError, match=said):
        tokenizer.encode([Chat([USER], {}, tools, choice)])


@pytest.mark.parametrize(
    "architecture", ["DeepseekV4ForCausalLM", "KimiK3ForConditionalGeneration"]
)
def test_chats_that_sglang_renders_itself_are_refused(tmp_path: Path, architecture: str) -> None:
    tokenizer = DirectoryTokenizer(make_tokenizer(tmp_path, "qwen"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    said = f"^Chats of {architecture} are rendered by SGLang's code.*; give --token-ids$"
    with pytest.raises(UsageError, match=said):
        tokenizer.encode([Chat([USER], {})])


def test_a_tokenizer_without_a_template_takes_texts_only(tmp_path: Path) -> None:
    tokenizer = DirectoryTokenizer(make_tokenizer(tmp_path, "qwen", chat_template=None))
    assert tokenizer.encode(["a"])
    with pytest.raises(UsageError, match=f"^{tmp_path}: .* no chat template; give --token-ids$"):
        tokenizer.encode([Chat([USER], {})])


@pytest.mark.parametrize("missing", ["tokenizers", "transformers"])
def test_a_missing_package_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    made = make_tokenizer(tmp_path, "qwen")
    monkeypatch.setitem(sys.modules, missing, None)
    step = f"run {sys.executable} -m pip install tokenizers transformers"
    with pytest.raises(UsageError, match=f"The {missing} package is missing; {step}"):
        DirectoryTokenizer(made).encode([Chat([USER], {})])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("tokenizer.json", "{", "cannot load the tokenizer: .* EOF while .*; copy it from"),
     ("tokenizer.json", "[]", "cannot load the tokenizer: .*; copy it from the model again"),
     ("tokenizer_config.json", "[", "not JSON: Expecting value"),
     ("tokenizer_config.json", "[]", "not a JSON object")],
)  # fmt: skip
def test_damaged_tokenizers_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    make_tokenizer(tmp_path, "qwen")
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=f"^{tmp_path / name}: {said}"):
        DirectoryTokenizer(tmp_path)


def test_a_text_that_the_tokenizer_cannot_encode_is_said(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    make_tokenizer(tmp_path, "qwen")
    Tokenizer(models.WordLevel({"known": 0})).save(str(tmp_path / "tokenizer.json"))
    said = r"^the tokenizer cannot encode the text: .*Missing \[UNK\] token.*; give --token-ids$"
    with pytest.raises(FormatError, match=said):
        DirectoryTokenizer(tmp_path).encode(["unknown"])


def test_a_tokenizer_with_code_of_its_own_takes_texts_only(tmp_path: Path) -> None:
    own_class = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    tokenizer = DirectoryTokenizer(make_tokenizer(tmp_path, "qwen", **own_class))
    assert tokenizer.encode(["a"])
    said = f"^{tmp_path}: cannot load the tokenizer: .* contains custom code.*; give --token-ids$"
    with pytest.raises(FormatError, match=said):
        tokenizer.encode([Chat([USER], {})])


def test_a_flagged_token_that_is_unknown_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, "deepseek", bos_token="<nobody>")
    said = f"^{tmp_path}: .* bos_token '<nobody>', which tokenizer.json lacks; check that both"
    with pytest.raises(FormatError, match=said):
        DirectoryTokenizer(tmp_path)


def test_the_tokenizer_lies_beside_the_config_unless_it_is_given(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model", "llama3")
    other = make_tokenizer(tmp_path / "other", "qwen")

    def first_id(given: Path | None, *places: Path | None) -> int:
        opened = find_tokenizer(given, places)
        assert opened is not None
        return opened().encode(["a"])[0][0]

    assert first_id(None, None, tmp_path, model / "config.json") == 0
    assert first_id(None, model) == 0
    assert first_id(other, model) != 0
    for given in (tmp_path, tmp_path / "none"):
        said = rf"^{given}: has no tokenizer\.json; give a local directory that has it"
        with pytest.raises(UsageError, match=said):
            first_id(given)
    assert find_tokenizer(None, (None, tmp_path)) is None


def test_hits_of_prompts_are_those_of_their_tokens(invoke: Invoke, tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model", "qwen")
    (tmp_path / "store").mkdir()
    (model / "profile.toml").write_text(DSA)
    prompts, ids = tmp_path / "prompts.jsonl", tmp_path / "ids.jsonl"
    text = "the cat sat on the mat, and the dog looked"
    encoded = DirectoryTokenizer(model).encode([text, Chat([USER], {}), Chat([USER], {}, [TOOL])])
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "auto", "model": "m"}
    prompts.write_text("".join(f"{json.dumps(one)}\n" for one in (text, [USER], body)))
    ids.write_text("".join(f"{json.dumps(one)}\n" for one in encoded))
    arguments = [
        "hits",
        tmp_path / "store",
        "--profile",
        model / "profile.toml",
        "--format",
        "jsonl",
    ]
    found = [invoke(*arguments, *source).stdout for source in (
        ["--prompts", prompts], ["--token-ids", ids], ["--prompts", prompts, "--tokenizer", model],
    )]  # fmt: skip
    assert found[0] == found[1] == found[2]
    assert [json.loads(line)["tokens"] for line in found[0].splitlines()] == [
        len(one) for one in encoded
    ]
