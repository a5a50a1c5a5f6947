"""The plug-in reads a server's weights and row forms from SGLang's own runtime context."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.weights import read_checkpoint
from hicachectl.formats.models.loading import loaded_weights
from hicachectl.formats.wording import NAME_WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance import tiny_llama
    from tests.conformance.conftest import SglangSession
else:
    import tiny_llama

pytestmark = pytest.mark.conformance

Answers = dict[str, dict[str, Any]]
TEXT = {"identity": "step 4000"}
_DRAFTED = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "DRAFT"}
# Upper-case values name directories of the fixture.
SERVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "quantised": {"fields": {"quantization": "fp8"}},
    "on the hub": {"fields": {"model_path": "tests/tiny", "download_dir": "HUB"}},
    "not on this host": {"fields": {"model_path": "tests/other", "download_dir": "HUB"}},
    "hanging": {"hangs": True},
    "truncated": {"fields": {"model_path": "TRUNCATED"}},
    "drafted": {"fields": _DRAFTED},
    "truncated draft": {"fields": {**_DRAFTED, "speculative_draft_model_path": "TRUNCATED"}},
    "draft in the target": {"fields": {"speculative_algorithm": "EAGLE"}},
    "ngram": {"fields": {"speculative_algorithm": "NGRAM"}},
    "fp8": {"fields": {"kv_cache_dtype": "fp8_e5m2"}},
    "fp8 draft": {
        "fields": {"kv_cache_dtype": "fp8_e4m3", "speculative_draft_kv_cache_dtype": "fp8_e5m2"}
    },
    "other rows": {"environment": {"SGLANG_USE_HND_KVCACHE": "1"}},
    "default rows": {"environment": {"SGLANG_USE_HND_KVCACHE": "0"}},
    "stages": {"environment": {"SGLANG_PP_LAYER_PARTITION": "3,1"}},
    "no stages": {"environment": {"SGLANG_PP_LAYER_PARTITION": "all"}},
    "pages of 64": {"fields": {"page_size": 64}},
    "version 1": {"version": "1"},
    "version 2": {"version": "2"},
    "other files": {"path": "DRAFT"},
    "named": {"settings": TEXT, "fields": {"model_path": "s3://bucket/model", **_DRAFTED}},
    "named, version 1": {"settings": TEXT, "version": "1"},
    "dummy": {"fields": {"load_format": "dummy"}},
    "dummy draft": {"fields": {**_DRAFTED, "speculative_draft_load_format": "dummy"}},
    "dummy elsewhere": {"fields": {"load_format": "dummy", "model_path": "tests/other"}},
    "remote": {"fields": {"model_path": "s3://bucket/model"}},
    "gguf": {"fields": {"model_path": "/models/tiny.GGUF"}},
    "adapter": {"fields": {"speculative_algorithm": "UNO"}},
    "experts elsewhere": {"fields": {"kt_weight_path": "/experts"}},
    "lora": {"fields": {"enable_lora": True}},
    "lora paths": {"fields": {"lora_paths": ["a=/adapter"]}},
    "lora disabled": {"fields": {"enable_lora": False, "lora_paths": ["a=/adapter"]}},
    "lora, named": {"fields": {"enable_lora": True}, "settings": TEXT},
    "buffer only": {"fields": {"hicache_host_memory_mode": "buffer_only"}, "settings": TEXT},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return model directories: MODEL, DRAFT, TRUNCATED, and HUB, a cache with tests/tiny."""
    base = tmp_path_factory.mktemp("models")
    found = {name: base / name.lower() for name in ("MODEL", "DRAFT", "TRUNCATED", "HUB")}
    for seed, name in enumerate(("MODEL", "DRAFT")):
        found[name].mkdir()
        tiny_llama.write_model(found[name], seed)
    shutil.copytree(found["MODEL"], found["TRUNCATED"])
    shard = next(found["TRUNCATED"].glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    cached, commit = found["HUB"] / "models--tests--tiny", "0123abc" + 33 * "0"
    shutil.copytree(found["MODEL"], cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    return found


@pytest.fixture(scope="module")
def answers(sglang_session: SglangSession, places: dict[str, Path]) -> Answers:
    """Return what the plug-in reads of each server, or how it refuses it."""
    servers = []
    for server in SERVERS.values():
        fields = {
            name: str(places.get(value, value)) if isinstance(value, str) else value
            for name, value in server.get("fields", {}).items()
        }
        whole: dict[str, Any] = {"settings": {}, "environment": {}, **server, "fields": fields}
        if "path" in server:
            whole["path"] = str(places[server["path"]])
        servers.append(whole)
    question = {"model": str(places["MODEL"]), "servers": servers}
    return dict(zip(SERVERS, sglang_session.ask("read_contexts", question), strict=True))


def test_weights_have_the_name_that_profiles_give(
    answers: Answers, places: dict[str, Path]
) -> None:
    """So that `profile --server` and the plug-in agree on identities."""
    target, draft = read_checkpoint(places["MODEL"]), read_checkpoint(places["DRAFT"])
    quantised = loaded_weights(target, {"quantization": "fp8"})
    assert answers["plain"]["weights"] == target.fingerprint
    assert answers["quantised"]["weights"] == quantised != target.fingerprint
    assert answers["drafted"]["weights"] == target.fingerprint
    assert answers["drafted"]["draft_weights"] == loaded_weights(draft, {}, draft=True)
    assert answers["draft in the target"]["draft_weights"] == target.fingerprint


def test_only_models_that_draft_have_draft_weights(answers: Answers) -> None:
    assert answers["plain"]["draft_weights"] == answers["ngram"]["draft_weights"] == ""


def test_a_model_of_the_hub_is_read_from_the_local_cache(answers: Answers) -> None:
    assert answers["on the hub"] == answers["plain"]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("not on this host", ".*: tests/other: neither a directory nor in this host's Hugging Fa"),
        ("hanging", f".*/model: was not read within 0 s; {NAME_WEIGHTS}"),
        ("truncated", r".*: /.*\.safetensors: truncated: .*; download the file again"),
        ("truncated draft", r".*: /.*\.safetensors: truncated: .*; download the file again"),
    ],
)
def test_unreadable_weights_are_misses_with_a_reason(
    answers: Answers, server: str, reason: str
) -> None:
    """Hosts differ in what they can read; a refusal on one rank would hang the others."""
    assert re.match(reason, answers[server]["unreadable"])
    assert answers[server]["unreadable"].startswith("identity: 'auto' does not suffice: ")
    assert "" in (answers[server]["weights"], answers[server]["draft_weights"])


def test_readable_weights_have_no_reason(answers: Answers) -> None:
    assert [name for name, one in answers.items() if one.get("unreadable")] == [
        "not on this host",
        "hanging",
        "truncated",
        "truncated draft",
    ]


def test_an_online_update_changes_the_name(answers: Answers) -> None:
    """A store attached again after an update holds no pages of the old weights."""
    servers = ("plain", "version 1", "version 2", "named", "named, version 1")
    assert len({answers[server]["weights"] for server in servers}) == len(servers)
    assert [answers[server]["version"] for server in servers[:3]] == ["default", "1", "2"]
    assert answers["version 1"]["weight_version"] == "1"


def test_an_update_from_files_is_seen_without_a_version(
    answers: Answers, places: dict[str, Path]
) -> None:
    found = answers["other files"]
    assert found["version"] == found["weight_version"] == "default, update 1 from files"
    assert found["weights"] == read_checkpoint(places["DRAFT"]).fingerprint


def test_a_text_stands_for_all_weights(answers: Answers) -> None:
    """No file is read, so that remote weights can be named."""
    assert answers["named"]["weights"] == answers["named"]["draft_weights"] == "step 4000"


def test_a_server_without_adapters_or_with_a_text_is_served(answers: Answers) -> None:
    assert answers["lora disabled"] == answers["plain"]
    assert answers["lora, named"]["weights"] == "step 4000"


def test_forms_of_rows_are_known(answers: Answers) -> None:
    """Pools of bytes hold either fp8 dtype, and rows of one size have several forms."""
    assert (answers["fp8"]["fp8"], answers["fp8"]["draft_fp8"]) == ("float8_e5m2",) * 2
    assert answers["fp8 draft"]["fp8"] == "float8_e4m3fn"
    assert answers["fp8 draft"]["draft_fp8"] == "float8_e5m2"
    assert answers["plain"]["row_form"] == ""
    assert answers["other rows"]["row_form"] == "SGLANG_USE_HND_KVCACHE=True"
    assert answers["default rows"] == answers["plain"]
    assert answers["fp8"]["opaque_rows"] != answers["plain"]["opaque_rows"]
    assert (answers["plain"]["pp_partition"], answers["stages"]["pp_partition"]) == ([], [3, 1])
    assert answers["no stages"]["pp_partition"] == []
    assert (answers["plain"]["page_size"], answers["pages of 64"]["page_size"]) == (1, 64)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("dummy", "identity: 'auto' does not suffice: load_format: 'dummy': "),
        ("dummy draft", "identity: 'auto' does not suffice: load_format: 'dummy': "),
        ("dummy elsewhere", "identity: 'auto' does not suffice: load_format: 'dummy': "),
        ("remote", "identity: 'auto' does not suffice: model_path: s3://bucket/model is not a"),
        ("gguf", "identity: 'auto' does not suffice: model_path: /models/tiny.GGUF is not a"),
        ("adapter", "identity: 'auto' does not suffice: speculative_algorithm: 'UNO': "),
        ("experts elsewhere", "identity: 'auto' does not suffice: kt_weight_path: '/experts': "),
        ("lora", "identity: 'auto' does not suffice: enable_lora: True: .*with every adapter"),
        ("lora paths", "identity: 'auto' does not suffice: enable_lora: True: .*every adapter"),
        ("buffer only", "hicache_host_memory_mode: 'buffer_only' is not supported, .*; start with"),
    ],
)
def test_servers_are_refused_by_their_settings(answers: Answers, server: str, message: str) -> None:
    """The reasons are equal on all ranks, whatever a host can read."""
    assert re.match(message, answers[server]["refusal"])
    named = answers[server]["refusal"].endswith(f"; {NAME_WEIGHTS}")
    assert named is (server != "buffer only")
