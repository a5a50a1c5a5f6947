"""What a server tells in confidence, and no output of `doctor` shows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.doctor.replies import SETTINGS, answering, info
from tests.move.migrations import demo_store, profile_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

SECRET = "hunter2-of-the-test"
# Members that `doctor` may show as they are.
SHOWN = {
    "enable_hierarchical_cache", "disable_radix_cache", "hicache_storage_backend",
    "hicache_write_policy", "hicache_storage_prefetch_policy", "page_size", "kv_cache_dtype",
    "hicache_mem_layout", "served_model_name", "model_path", "weight_version", "tp_size",
    "pp_size", "dp_size", "attn_dp_size", "dtype", "hicache_io_backend",
}  # fmt: skip


def planted(**changes: Any) -> dict[str, Any]:
    """Return a reply with the secret in each member that may hold one, also of each rank."""
    extra = {
        "access_key": SECRET,
        "store": f"mooncake://user:{SECRET}@10.0.0.1:50051",
        "nested": {"password": SECRET, SECRET: 1},
        "prefetch_threshold": 64,
    }
    secret = {
        **{name: SECRET for name, value in SETTINGS.items() if name not in SHOWN and value is None},
        "admin_api_key": SECRET,
        "api_key": SECRET,
        "ssl_keyfile_password": SECRET,
        "hicache_storage_backend_extra_config": json.dumps(extra),
        "env_vars": {"MOONCAKE_TOKEN": SECRET, "SGLANG_PP_LAYER_PARTITION": ""},
        SECRET: SECRET,
    }
    reply = info({**secret}, {**secret, "hicache_write_policy": "write_back"}, **secret, **changes)
    reply["launch_command"] = f"sglang serve --api-key {SECRET}"
    return reply


@pytest.mark.parametrize("output_format", ["table", "json", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({}, False),
        ({"tp_size": 4}, True),
        ({"tp_size": "x"}, False),
        ({"hicache_storage_backend": "dynamic"}, False),
        ({"hicache_storage_backend": None}, True),
        ({"enable_hierarchical_cache": False}, True),
    ],
)
def test_no_format_shows_a_secret(
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output_format: str,
    changes: dict[str, Any],
    fails: bool,
) -> None:
    """Neither a key, nor the launch command, nor an option of the backend is in any output."""
    monkeypatch.setenv("HICACHECTL_API_KEY", SECRET)
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "profile.toml")
    metrics = f'# {SECRET}\nsglang:num_requests_total{{model_name="{SECRET}"}} 1\n'.encode()
    with answering(planted(**changes), metrics=metrics) as url:
        asked = ("-v", "doctor", store, "--server", url, "--profile", profile, "--watch", "0s")
        outcome = invoke(*asked, "--format", output_format, exit_code=4 if fails else 0)
    assert SECRET not in outcome.stdout + outcome.stderr
    assert outcome.stdout


def test_a_server_that_echoes_the_key(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of an error is shown without the key that was sent."""
    monkeypatch.setenv("HICACHECTL_API_KEY", SECRET)
    with answering({}, status=500, body=f"bad key {SECRET}".encode()) as url:
        outcome = invoke("doctor", demo_store(tmp_path / "s"), "--server", url, exit_code=4)
    assert "bad key ***" in outcome.stdout
    assert SECRET not in outcome.stdout + outcome.stderr


def test_no_key_of_an_object_is_shown(invoke: Invoke, tmp_path: Path) -> None:
    """Page hashes are names of what users asked: the document has none."""
    store = demo_store(tmp_path / "store")
    hashes = {path.name[:64] for path in store.iterdir()}
    next(iter(sorted(store.glob("*_2.bin")))).write_bytes(b"short")
    with answering(info(tp_size=4)) as url:
        text = invoke("doctor", store, "--server", url, "--format", "json", exit_code=4).stdout
    assert not any(one in text for one in hashes)
