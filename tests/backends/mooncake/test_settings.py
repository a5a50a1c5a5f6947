"""Tests of backends.mooncake.settings."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.disk.bounded import MAX_CONFIG_BYTES
from hicachectl.backends.mooncake.settings import (
    CONFIG_VARIABLE,
    MooncakeSettings,
    settings_from,
    split_address,
)
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import FormatError, UsageError
from tests.speed import examples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    ConfigFile = Callable[..., dict[str, str]]

DEFAULTS = MooncakeSettings(
    master="m:50051",
    admin="m:9003",
    metadata="P2PHANDSHAKE",
    protocol="rdma",
    device="",
    local_hostname="localhost",
)


@pytest.fixture
def config_file(tmp_path: Path) -> ConfigFile:
    """Return a function that writes a JSON config and returns the environment that names it."""

    def write(**config: Any) -> dict[str, str]:
        path = tmp_path / "mooncake.json"
        path.write_text(json.dumps(config))
        return {CONFIG_VARIABLE: str(path)}

    return write


def settings(text: str, environ: dict[str, str] | None = None) -> MooncakeSettings:
    return settings_from(parse_url(text), environ or {})


@pytest.mark.parametrize("backend", ["rs", "", "CPP"])
def test_another_implementation_of_the_store_is_refused_by_name(backend: str) -> None:
    with pytest.raises(UsageError, match=f"MOONCAKE_STORE_BACKEND: '{backend}' is not supported"):
        settings("mooncake://m:50051", {"MOONCAKE_STORE_BACKEND": backend})


def test_the_implementation_in_c_is_accepted() -> None:
    assert settings("mooncake://m:50051", {"MOONCAKE_STORE_BACKEND": "cpp"}) == DEFAULTS


def test_a_bare_url_has_the_defaults_of_sglang() -> None:
    assert settings("mooncake://m:50051") == DEFAULTS
    assert settings("mooncake://m:50051/") == DEFAULTS


def test_a_url_says_everything() -> None:
    found = settings(
        "mooncake://m:1?admin=[::1]:2&protocol=tcp&metadata=http://h:8080/meta%3Fa&device=mlx5_0"
        "&tenant=default"
    )
    assert found == MooncakeSettings(
        master="m:1",
        admin="[::1]:2",
        metadata="http://h:8080/meta?a",
        protocol="tcp",
        device="mlx5_0",
        local_hostname="localhost",
    )


def test_the_environment_says_everything() -> None:
    environ = {
        "MOONCAKE_MASTER": "[fd00::1]:1",
        "MOONCAKE_MASTER_METRICS_PORT": "2",
        "MOONCAKE_TE_META_DATA_SERVER": "etcd://e:2379",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_DEVICE": "mlx5_1",
        "MOONCAKE_LOCAL_HOSTNAME": "here",
        "MOONCAKE_TENANT_ID": " ",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64gb",
        "MOONCAKE_CHECK_SERVER": "true",
        "MOONCAKE_STANDALONE_STORAGE": "No",
    }
    expected = MooncakeSettings(
        master="[fd00::1]:1",
        admin="[fd00::1]:2",
        metadata="etcd://e:2379",
        protocol="tcp",
        device="mlx5_1",
        local_hostname="here",
    )
    for text in ("mooncake:", "mooncake://", "mooncake:///"):
        assert settings(text, environ) == expected


def test_the_config_file_says_everything(config_file: ConfigFile) -> None:
    environ = config_file(
        master_server_address="m:1",
        master_metrics_port=2,
        metadata_server="http://h/meta",
        protocol="tcp",
        device_name="mlx5_1",
        local_hostname="here",
        tenant_id="default",
        global_segment_size="64gb",
        check_server=True,
        standalone_storage=False,
        client_server_address=None,
        enable_ssd_offload=False,
        ssd_offload_path=None,
    )
    assert settings("mooncake:", environ) == MooncakeSettings(
        master="m:1",
        admin="m:2",
        metadata="http://h/meta",
        protocol="tcp",
        device="mlx5_1",
        local_hostname="here",
    )


def test_the_config_file_is_one_whole_and_leaves_only_the_protocol_to_the_environment(
    config_file: ConfigFile,
) -> None:
    """As in SGLang: with a config file, only MOONCAKE_PROTOCOL of these variables counts."""
    others = {
        "MOONCAKE_MASTER": "other:1",
        "MOONCAKE_MASTER_METRICS_PORT": "2",
        "MOONCAKE_TE_META_DATA_SERVER": "etcd://e:2379",
        "MOONCAKE_DEVICE": "mlx5_1",
        "MOONCAKE_TENANT_ID": "other",
        "MOONCAKE_STANDALONE_STORAGE": "true",
        "MOONCAKE_PROTOCOL": "efa",
    }
    environ = config_file(master_server_address="m:50051") | others
    assert settings("mooncake:", environ) == settings("mooncake://m:50051?protocol=efa")
    environ = config_file(master_server_address="m:50051", protocol="tcp") | others
    assert settings("mooncake:", environ).protocol == "tcp"


def test_the_name_of_this_host_comes_from_its_own_environment_first(
    config_file: ConfigFile,
) -> None:
    environ = config_file(master_server_address="m:1", local_hostname="configured")
    assert settings("mooncake:", environ).local_hostname == "configured"
    environ["LOCAL_HOSTNAME"] = "plain"
    assert settings("mooncake:", environ).local_hostname == "plain"
    environ["MOONCAKE_LOCAL_HOSTNAME"] = "own"
    assert settings("mooncake:", environ).local_hostname == "own"


def test_each_part_of_a_url_wins_over_the_rest(config_file: ConfigFile) -> None:
    environ = config_file(
        master_server_address="m:1", master_metrics_port="2", protocol="tcp", device_name="d"
    )
    found = settings("mooncake://other:3?device=", environ)
    assert (found.master, found.admin, found.protocol, found.device) == (
        "other:3",
        "other:2",
        "tcp",
        "",
    )
    found = settings("mooncake:?admin=proxy:80&protocol=rdma", environ)
    assert (found.master, found.admin, found.protocol, found.device) == (
        "m:1",
        "proxy:80",
        "rdma",
        "d",
    )


def test_a_map_from_ranks_to_devices_has_none_for_a_guest(config_file: ConfigFile) -> None:
    environ = config_file(master_server_address="m:1", device_name=' {"0": "mlx5_0"}')
    assert settings("mooncake:", environ).device == ""


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("mooncake:", {}, "no master address; write mooncake://HOST:50051, or set MOONCAKE"),
        ("mooncake:", {"MOONCAKE_CLIENT": "c:1"}, "MOONCAKE_CLIENT alone is not enough"),
        ("mooncake:", {"MOONCAKE_MASTER": ""}, "MOONCAKE_MASTER: '' is not an address"),
        ("mooncake:", {"MOONCAKE_MASTER": "m"}, "MOONCAKE_MASTER: 'm' is not an address"),
        (
            "mooncake:",
            {"MOONCAKE_MASTER": "etcd://10.0.0.1:2379"},
            "MOONCAKE_MASTER: leader election by etcd is not supported; name the leading",
        ),
        (
            "mooncake:",
            {"MOONCAKE_MASTER": "m:1", "MOONCAKE_STANDALONE_STORAGE": "1"},
            "MOONCAKE_STANDALONE_STORAGE is set, .*name the master",
        ),
        (
            "mooncake://m:1",
            {"MOONCAKE_STANDALONE_STORAGE": "maybe"},
            "MOONCAKE_STANDALONE_STORAGE: 'maybe' is neither true nor false",
        ),
        (
            "mooncake://m:1",
            {"MOONCAKE_MASTER_METRICS_PORT": "high"},
            "MOONCAKE_MASTER_METRICS_PORT: 'high' is not a port number",
        ),
        ("mooncake://m:1", {"MOONCAKE_MASTER_METRICS_PORT": "0"}, "'0' is not a port number"),
        ("mooncake://m:1", {"MOONCAKE_PROTOCOL": ""}, "MOONCAKE_PROTOCOL: '' is empty or has"),
        ("mooncake://m:1", {"MOONCAKE_TENANT_ID": "a"}, "MOONCAKE_TENANT_ID: 'a' cannot be used"),
        ("mooncake://m:1?tenant=a", {}, "tenant: 'a' cannot be used, because the master .*default"),
        ("mooncake://m", {}, "'m' is not an address; write HOST:PORT"),
        ("mooncake://u:p@m:1", {}, "is not an address"),
        ("mooncake://m:1/path", {}, "mooncake://m:1/path: a Mooncake URL has no path"),
        ("mooncake://m:1?admin=m", {}, "admin: 'm' is not an address"),
        ("mooncake://m:1?admin=http://m:9003", {}, "admin: 'http://m:9003' is not an address"),
        ("mooncake://m:1?protocol=", {}, "protocol: '' is empty or has"),
        ("mooncake://m:1?protocol=t%20p", {}, "protocol: 't p' is not a protocol name"),
        ("mooncake://m:1?metadata=", {}, "metadata: '' is empty or has"),
        ("mooncake://m:1?device=a%0Ab", {}, "device: .* has unprintable characters; give"),
        ("mooncake://m:1?segment=4gb", {}, "unknown parameter 'segment'"),
        ("mooncake://m:1", {CONFIG_VARIABLE: ""}, f"{CONFIG_VARIABLE} : cannot read: No such file"),
        ("mooncake://m:1", {CONFIG_VARIABLE: "/nowhere"}, "/nowhere: cannot read: No such file"),
        ("mooncake://m:1", {CONFIG_VARIABLE: "/tmp"}, "/tmp: cannot read: not a regular file"),
        ("mooncake://m:1", {CONFIG_VARIABLE: "a\0b"}, CONFIG_VARIABLE),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(
    text: str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        settings(text, environ)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"master_server_address": "m:1", "master": "m"},
            "unknown field 'master'; known fields: mas",
        ),
        (
            {"master_server_address": "m:1", "extra_backend_tag": "t"},
            "unknown field 'extra_",
        ),
        ({"protocol": "tcp"}, "master_server_address is missing"),
        ({"master_server_address": 1}, "master_server_address: expected str, found 1"),
        ({"master_server_address": "m"}, "master_server_address: 'm' is not an address"),
        ({"master_server_address": "m:1", "protocol": None}, "protocol: expected str, found None"),
        (
            {"master_server_address": "m:1", "master_metrics_port": True},
            "master_metrics_port: expected int or str, found True",
        ),
        (
            {"master_server_address": "m:1", "master_metrics_port": 10**400},
            "master_metrics_port: .* is not a port number",
        ),
        (
            {"master_server_address": "m:1", "standalone_storage": "false"},
            "standalone_storage: expected bool, found 'false'",
        ),
        ({"master_server_address": "m:1", "metadata_server": ""}, "metadata_server: '' is empty"),
    ],
)
def test_a_wrong_config_file_is_refused_by_name(
    config_file: ConfigFile, config: dict[str, Any], message: str
) -> None:
    environ = config_file(**config)
    with pytest.raises(FormatError, match=f"^{CONFIG_VARIABLE} .*mooncake.json: {message}"):
        settings("mooncake:", environ)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"client_server_address": "c:1"}, "client_server_address alone is not enough"),
        ({"master_server_address": None}, "no master address"),
        ({"master_server_address": "m:1", "tenant_id": "a"}, "tenant_id: 'a' cannot be used"),
        ({"master_server_address": "m:1", "standalone_storage": True}, "standalone_storage is set"),
    ],
)
def test_a_mode_that_a_guest_cannot_use_is_refused_unless_the_url_names_the_master(
    config_file: ConfigFile, config: dict[str, Any], message: str
) -> None:
    environ = config_file(**config)
    with pytest.raises(UsageError, match=message):
        settings("mooncake:", environ)
    assert settings("mooncake://m:50051?tenant=default", environ) == DEFAULTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"master_metrics_port": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"master_server_address"', "not a JSON object"),
        (b" " * (MAX_CONFIG_BYTES + 1), "larger than"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "mooncake.json"
    path.write_bytes(text)
    with pytest.raises(FormatError, match=message):
        settings("mooncake://m:1", {CONFIG_VARIABLE: str(path)})


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        settings("mooncake://m:1", {CONFIG_VARIABLE: str(tmp_path / "pipe")})


def test_the_url_of_messages_leads_back_to_the_same_settings() -> None:
    text = "mooncake://[::1]:1?admin=a:2&protocol=tcp&metadata=http://h:80/m%26b&device=d%20e"
    found = settings(text)
    assert settings(str(found)) == found
    assert str(DEFAULTS) == "mooncake://m:50051?admin=m:9003&protocol=rdma"


@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        ("redis://user:hunter2@r:6379/0", "redis://***%40r:6379/0"),
        ("redis://r:6379?password=hunter2", "redis://r:6379%3Fpassword%3D***"),
        ("hunter2@r:6379", "***%40r:6379"),
    ],
)
def test_no_password_is_shown(metadata: str, shown: str) -> None:
    url = parse_url(f"mooncake://m:1?tenant=a&metadata={metadata}")
    with pytest.raises(UsageError) as refused:
        settings_from(url, {})
    assert "hunter2" not in str(refused.value)
    found = settings(f"mooncake://m:1?metadata={metadata}")
    assert found.metadata == metadata
    assert "hunter2" not in str(found)
    assert str(found).endswith(f"&metadata={shown}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:9003", ("fe80::1%eth0", 9003)),
        ("master-0.pods.svc:00080", ("master-0.pods.svc", 80)),
    ],
)
def test_an_address_is_split(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text, "master") == parts


@examples(25)
@given(st.text() | st.from_regex(r"[\[\]a-z:.]{1,8}:\d{1,6}"))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        host, port = split_address(text, "master")
        assert host
        assert 1 <= port <= 65535


@pytest.mark.parametrize(
    "text",
    ["::1:1", "[]:1", "[::g]:1", "[m]:1", "m:1 ", "m:1\n", "m:٣", "m:-1", "-m:1", "m:1/", "m m:1"],
)
def test_what_only_resembles_an_address_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"master: .* is not an address"):
        split_address(text, "master", FormatError)
