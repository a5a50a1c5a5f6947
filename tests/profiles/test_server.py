from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.weights import read_checkpoint
from hicachectl.formats.errors import ProfileError, StoreUnavailable, UsageError
from hicachectl.formats.identity import profile_tag
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.profiles import server
from hicachectl.profiles.server import fetch_server, profile_from_server, read_model_config
from tests.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Invoke

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
INFO: dict[str, Any] = {
    "model_path": "/models/llama",
    "served_model_name": "meta-llama/Llama-3.1-8B",
    "page_size": 64,
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "kv_cache_dtype": "auto",
    "dtype": "auto",
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
    "hicache_mem_layout": "layer_first",
    "hicache_io_backend": "kernel",
    "internal_states": [{"world_size": 2}],
    "version": "0.5.23",
}
LAYOUT: dict[str, Any] = {
    "enabled": False,
    "backend": "file",
    "page_size": 64,
    "hicache_object_layout": {"pools": []},
    "reason": "Mooncake storage is not attached",
}


@dataclass
class Sglang:
    """A server that answers as SGLang does; `answers` maps a path to status and body."""

    url: str = ""
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def answer(self, path: str, document: Any, status: int = 200) -> None:
        self.answers[path] = status, json.dumps(document).encode()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sglang]:
    for name in (server.API_KEY_VARIABLE, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    state = Sglang()
    state.answer("/server_info", INFO)
    state.answer("/get_hicache_l3_cache_layout", LAYOUT)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append((self.path, self.headers.get("Authorization")))
            status, body = state.answers.get(self.path, (404, b'{"detail": "Not Found"}'))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_both_replies_are_fetched(sglang: Sglang) -> None:
    replies = fetch_server(sglang.url + "/")
    assert (replies.info, replies.layout) == (INFO, LAYOUT)
    assert [path for path, _ in sglang.requests] == ["/server_info", "/get_hicache_l3_cache_layout"]


def test_older_servers_are_asked_under_the_older_name(sglang: Sglang) -> None:
    sglang.answers.clear()
    sglang.answer("/get_server_info", INFO)
    replies = fetch_server(sglang.url)
    assert (replies.info, replies.layout) == (INFO, None)


def test_a_server_with_neither_endpoint_is_no_sglang(sglang: Sglang) -> None:
    sglang.answers.clear()
    with pytest.raises(StoreUnavailable, match="check that this is the URL of an SGLang server"):
        fetch_server(sglang.url)


def test_the_api_key_is_sent_and_never_shown(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(server.API_KEY_VARIABLE, "s3cret\n")
    fetch_server(sglang.url)
    assert {key for _, key in sglang.requests} == {"Bearer s3cret"}
    assert "s3cret" not in caplog.text


def test_no_key_means_no_header(sglang: Sglang) -> None:
    fetch_server(sglang.url)
    assert {key for _, key in sglang.requests} == {None}


@pytest.mark.parametrize("key", ["s3cret\r\nX: y", "s3crét"])
def test_a_key_that_no_header_can_hold_is_not_quoted(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(server.API_KEY_VARIABLE, key)
    with pytest.raises(UsageError) as caught:
        fetch_server(sglang.url)
    assert str(caught.value) == "HICACHECTL_API_KEY: must be printable ASCII text"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_comes_with_the_remedy(sglang: Sglang, status: int) -> None:
    sglang.answer("/server_info", {"error": "Unauthorized"}, status)
    with pytest.raises(StoreUnavailable, match=f"HTTP {status}.*HICACHECTL_API_KEY"):
        fetch_server(sglang.url)


def test_a_redirect_is_not_followed(sglang: Sglang) -> None:
    sglang.answers["/server_info"] = 302, b""
    sglang.headers["Location"] = f"{sglang.url}/elsewhere"
    with pytest.raises(StoreUnavailable, match="redirects are not followed"):
        fetch_server(sglang.url)
    assert [path for path, _ in sglang.requests] == ["/server_info"]


def test_an_error_of_the_server_is_said(sglang: Sglang) -> None:
    sglang.answer("/server_info", {}, 503)
    with pytest.raises(StoreUnavailable, match=r"/server_info failed with HTTP 503"):
        fetch_server(sglang.url)


@pytest.mark.parametrize("body", [b"<html>", b"\xff\xfe", b"[1]", b"", b"[" * 100_000])
def test_an_answer_that_is_no_json_object_is_refused(sglang: Sglang, body: bytes) -> None:
    sglang.answers["/server_info"] = 200, body
    with pytest.raises(StoreUnavailable, match=r"not (a )?JSON"):
        fetch_server(sglang.url)


def test_a_reply_that_is_too_large_is_not_read_on(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_REPLY_BYTES", 100)
    with pytest.raises(StoreUnavailable, match="larger than 100 bytes"):
        fetch_server(sglang.url)


def test_a_silent_server_is_given_up() -> None:
    """tests/backends/test_http.py has other services that misbehave."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.1 s"):
            fetch_server(url, timeout_s=0.1)


@pytest.mark.parametrize(
    "url",
    ["", "host:30000", "file:///etc/passwd", "http://", "http://h:port", "http://h/?a=b",
     "http://user:s3cret@host:30000"],
)  # fmt: skip
def test_what_is_no_server_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="--server") as caught:
        fetch_server(url)
    assert "s3cret" not in str(caught.value)


# From a server to a profile


def test_a_given_config_completes_what_the_server_says(sglang: Sglang) -> None:
    answer = profile_from_server(sglang.url, model_config=CONFIGS / "llama-3.1-8b.json")
    profile = answer.profile
    assert (profile.model, profile.tp, profile.page_size) == ("meta-llama/Llama-3.1-8B", 2, 64)
    assert (profile.layout, profile.pools[0].layers) == ("layer_first", 32)
    assert answer.warnings == ()


def test_a_model_path_on_this_machine_is_read(sglang: Sglang, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3-32b.json").read_text())
    sglang.answer("/server_info", {**INFO, "model_path": str(tmp_path)})
    assert profile_from_server(sglang.url).profile.pools[0].layers == 64


@pytest.mark.parametrize("path", ["Qwen/Qwen3-32B", "/no/such/model"])
def test_a_model_path_elsewhere_asks_for_the_config(sglang: Sglang, path: str) -> None:
    sglang.answer("/server_info", {**INFO, "model_path": path})
    with pytest.raises(ProfileError, match="give --model-config"):
        profile_from_server(sglang.url)


def test_a_model_without_a_profile_is_told_with_the_next_command(
    sglang: Sglang, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["FutureForCausalLM"]}')
    pool = {"pool": "kv", "hit_policy": "all_pages"}
    layout = {**LAYOUT, "hicache_object_layout": {"pools": [pool]}}
    sglang.answer("/get_hicache_l3_cache_layout", layout)
    with pytest.raises(ProfileError) as refusal:
        profile_from_server(sglang.url, model_config=config)
    said = str(refusal.value)
    assert said.startswith(f"{config}: architectures: 'FutureForCausalLM' is not")
    assert "; the server tells model 'meta-llama/Llama-3.1-8B', " in said
    assert "page_size 64, layout 'layer_first', tp 2, pools 'kv' ('all_pages'), but not" in said
    assert said.count("run hicachectl profile --print-probe > probe.py") == 1


def test_a_draft_elsewhere_asks_for_its_config(sglang: Sglang) -> None:
    speculation = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "x/draft"}
    sglang.answer("/server_info", {**INFO, **speculation})
    config = CONFIGS / "llama-3.1-8b.json"
    with pytest.raises(ProfileError, match="give --draft-model-config"):
        profile_from_server(sglang.url, model_config=config)
    answer = profile_from_server(
        sglang.url, model_config=config, draft_model_config=CONFIGS / "kimi-k2-eagle3.json"
    )
    assert [pool.name for pool in answer.profile.pools] == ["kv", "draft"]


def test_options_win_over_the_server(sglang: Sglang) -> None:
    answer = profile_from_server(
        sglang.url, model_config=CONFIGS / "llama-3.1-8b.json", overrides={"tag": "teamA"}
    )
    assert answer.profile.tag == "teamA"


@pytest.mark.parametrize(
    ("changes", "inner", "warning"),
    [
        ({"page_size": 128}, {}, "page_size: the server has 128, but the profile has 64"),
        (
            {},
            {"is_mla_backend": True},
            "is_mla_backend: the server has True, but the profile has False",
        ),
        ({}, {"pp_size": 2}, "pp_size: the server has 2, but the profile has 1"),
        (
            {},
            {"key_prefix": "teamB_m"},
            "key_prefix: the server has 'teamB_m', but the profile has ",
        ),
        (
            {},
            {"pools": [{"pool": "kv", "hit_policy": "trailing_pages"}]},
            "pools[kv].hit_policy: the server has 'trailing_pages', but the profile has "
            "'all_pages'",
        ),
    ],
)
def test_a_layout_that_contradicts_the_profile_is_a_warning(
    sglang: Sglang, changes: dict[str, Any], inner: dict[str, Any], warning: str
) -> None:
    described = {**LAYOUT["hicache_object_layout"], **inner}
    answer = {**LAYOUT, **changes, "hicache_object_layout": described}
    sglang.answer("/get_hicache_l3_cache_layout", answer)
    found = profile_from_server(sglang.url, model_config=CONFIGS / "llama-3.1-8b.json")
    (said,) = found.warnings
    assert warning in said


@pytest.mark.parametrize(
    ("pools", "warnings"),
    [
        (["kv"], ()),
        (["kv", "kv"], ()),
        (["kv", "draft"], ("pools: only the server has draft",)),
        (["mamba"], ("pools: only the profile has kv", "pools: only the server has mamba")),
    ],
)
def test_pools_of_one_side_only_are_warnings_whatever_the_stages(
    sglang: Sglang, pools: list[str], warnings: tuple[str, ...]
) -> None:
    inner = {"pools": [{"pool": name, "hit_policy": "all_pages"} for name in pools]}
    sglang.answer("/get_hicache_l3_cache_layout", {**LAYOUT, "hicache_object_layout": inner})
    answer = profile_from_server(sglang.url, model_config=CONFIGS / "llama-3.1-8b.json")
    assert answer.warnings == warnings


def test_an_anchor_without_bytes_is_in_no_layout(sglang: Sglang) -> None:
    """MooncakeStore has no object for it (DeepSeek-V4)."""
    kv, swa = Pool(name="kv", kind="logical"), Pool(name="swa", kind="dsv4", row="v4", layers=1)
    profile = Profile(model="m", pools=(kv, swa))
    told = {"pools": [{"pool": "swa", "hit_policy": "trailing_pages"}]}
    assert server._contradictions(profile, {"hicache_object_layout": told}) == []
    assert server._contradictions(profile, {}) == []


@pytest.mark.parametrize("inner", [None, 3, {}, {"pools": 3}, {"pools": [1, None]}])
def test_a_layout_of_another_form_names_no_pools(inner: object) -> None:
    assert server.told_pools({"hicache_object_layout": inner}) == {}
    assert server.told_pools(None) == {}


# Weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shards: dict[str, Any] = {"model.safetensors": {"a": ("BF16", (100, 100))}}
    path = write_checkpoint(tmp_path / "model", shards)
    (path / "config.json").write_text((CONFIGS / "llama-3.1-8b.json").read_text())
    return path


def named(invoke: Invoke, sglang: Sglang, *arguments: object) -> tuple[Profile, str]:
    out = invoke("profile", "--server", sglang.url, *arguments)
    return parse_profile(out.stdout), out.stderr


def test_weights_on_this_machine_are_named_as_the_server_loads_them(
    invoke: Invoke, sglang: Sglang, model: Path
) -> None:
    info = {**INFO, "model_path": str(model)}
    names = set()
    for settings in (
        {},
        {"quantization": "fp8"},
        {"revision": "v2"},
        {"json_model_override_args": '{"rope_theta": 1}'},
    ):
        sglang.answer("/server_info", {**info, **settings})
        profile, said = named(invoke, sglang)
        assert (said, profile.draft_weights) == ("", "")
        assert named(invoke, sglang, "--weights", model)[0] == profile
        names.add(profile.weights)
    assert len(names) == 4
    assert read_checkpoint(model).fingerprint in names
    assert named(invoke, sglang, "--weights", "5" * 32)[0].weights == "5" * 32


def test_keys_of_the_plug_in_on_mooncake_have_the_profiles_tag(
    invoke: Invoke, sglang: Sglang, model: Path
) -> None:
    extra = {"module_path": "hicachectl.backends.sglang", "interface_v1": 1}
    tags = []
    for store in ("mooncake://m:50051", ["mooncake://m:50051", "/backup"], "file:///mnt/hicache"):
        config = json.dumps({**extra, "store": store})
        answer = {**INFO, "hicache_storage_backend_extra_config": config}
        answer["hicache_storage_backend"] = "dynamic"
        sglang.answer("/server_info", {**answer, "model_path": str(model)})
        profile, said = named(invoke, sglang)
        assert said == ""
        tags.append(profile.tag)
    expected = profile_tag(profile)  # which does not depend on its tag
    assert tags == [expected, expected, ""]
    answer["hicache_storage_backend_extra_config"] = json.dumps(
        {**extra, "store": "mooncake://m:50051"}
    )
    sglang.answer("/server_info", answer)
    profile, said = named(invoke, sglang, "--model-config", model)
    assert profile.tag == ""
    assert "the tag of its keys names the weights, which are unknown; give --weights" in said


def test_a_draft_has_weights_of_its_own(invoke: Invoke, sglang: Sglang, model: Path) -> None:
    draft = Path(shutil.copytree(model, model.parent / "draft"))
    (draft / "config.json").write_text((CONFIGS / "kimi-k2-eagle3.json").read_text())
    speculation = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(draft)}
    sglang.answer("/server_info", {**INFO, "model_path": str(model), **speculation})
    profile, said = named(invoke, sglang)
    assert said == ""
    assert profile.weights == read_checkpoint(model).fingerprint
    assert profile.draft_weights == read_checkpoint(draft).fingerprint


def test_a_draft_in_the_targets_directory_can_be_loaded_in_another_way(
    invoke: Invoke, sglang: Sglang, model: Path
) -> None:
    (model / "config.json").write_text((CONFIGS / "glm-4.7.json").read_text())
    info = {**INFO, "model_path": str(model), "speculative_algorithm": "EAGLE"}
    info["speculative_draft_model_path"] = str(model)
    sglang.answer("/server_info", info)
    same = named(invoke, sglang)[0]
    assert (same.weights, same.draft_weights) == (read_checkpoint(model).fingerprint, "")
    sglang.answer("/server_info", {**info, "speculative_draft_model_quantization": "fp8"})
    other = named(invoke, sglang)[0]
    assert other.weights == same.weights
    assert other.draft_weights not in ("", same.weights)


def test_a_draft_elsewhere_leaves_the_profile_without_weights(
    invoke: Invoke, sglang: Sglang, model: Path
) -> None:
    """Without a name of its own, the draft would count as part of the target."""
    draft = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "x/draft"}
    sglang.answer("/server_info", {**INFO, "model_path": str(model), **draft})
    config = ("--draft-model-config", CONFIGS / "kimi-k2-eagle3.json")
    profile, said = named(invoke, sglang, *config)
    assert (profile.weights, profile.draft_weights, said) == ("", "", "")
    given = named(invoke, sglang, *config, "--weights", model, "--draft-weights", "5" * 32)[0]
    assert given.draft_weights == "5" * 32


def test_weights_that_have_no_name_leave_the_profile_without(
    invoke: Invoke, sglang: Sglang, model: Path
) -> None:
    info = {**INFO, "model_path": str(model)}
    sglang.answer("/server_info", {**info, "load_format": "dummy"})
    profile, said = named(invoke, sglang)
    assert profile.weights == ""
    assert f"{sglang.url}: the weights are unknown: load_format: 'dummy'" in said
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").unlink()
    sglang.answer("/server_info", info)
    profile, said = named(invoke, sglang)
    assert profile.weights == ""
    assert f"the weights are unknown: {model}: no safetensors files" in said
    sglang.answer("/server_info", INFO)
    config = model / "config.json"
    assert named(invoke, sglang, "--model-config", config) == (profile, "")


# Config files


def test_a_folder_stands_for_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_model_config(tmp_path) == read_model_config(tmp_path / "config.json") == {"a": 1}


def test_modelopt_settings_beside_the_config_are_put_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert read_model_config(tmp_path)["hf_quant_config"] == {"quantization": quantization}


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ProfileError, match=r"config\.json"):
        read_model_config(file)


def test_a_config_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProfileError, match=r"config\.json: cannot read: No such file"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{}" + " " * 100)
    monkeypatch.setattr(server, "MAX_CONFIG_BYTES", 50)
    with pytest.raises(ProfileError, match="larger than 50 bytes"):
        read_model_config(tmp_path)
