"""Check of placement, on answers of a master that a small cluster cannot give."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.backends.http_scripts import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.backends.http_scripts import Call
    from tests.conftest import Invoke

KEYS = {
    name: f"m_{number:064x}_0_k" for number, name in enumerate(("sound", "torn", "slow", "both"))
}
HEALTH = {"role": "leader", "ha_state": "serving", "service_ready": True, "leader_address": None}


def memory(nbytes: int) -> dict[str, Any]:
    return {"size_": nbytes, "buffer_address_": 4096, "transport_endpoint_": "10.0.0.1:1"}


def on_disk(nbytes: int) -> dict[str, Any]:
    return {"object_size": nbytes, "transport_endpoint": "10.0.0.1:1"}


def item(memories: list[Any] | None = None, disks: list[Any] | None = None) -> dict[str, Any]:
    return {
        "ok": True,
        "error": None,
        "values": memories,
        "disk_values": None,
        "local_disk_values": disks,
        "nof_values": None,
    }


MISSING = item() | {"ok": False, "error": "OBJECT_NOT_FOUND"}
ITEMS = {
    KEYS["sound"]: item([memory(100), memory(100)]),
    KEYS["torn"]: item([memory(100), memory(90)]),
    KEYS["slow"]: item(None, [on_disk(100)]),
    KEYS["both"]: item([memory(100)], [on_disk(100)]),
}


@pytest.fixture
def master() -> Iterator[str]:
    def script(call: Call) -> None:
        url = urlsplit(call.path)
        if url.path == "/health":
            call.answer(json.dumps(HEALTH).encode())
        elif url.path == "/get_all_keys":
            call.answer("".join(f"{key}\n" for key in ITEMS).encode())
        else:
            asked = parse_qs(url.query)["keys"][0].split(",")
            found = {key: ITEMS.get(key, MISSING) for key in asked}
            call.answer(json.dumps({"success": True, "data": found}).encode())

    with serving(script) as address:
        yield address


def test_copies_that_differ_and_objects_on_disk_alone_are_found(
    master: str, invoke: Invoke
) -> None:
    out = invoke(
        "verify", f"mooncake://{master}?admin={master}", "--checks", "sizes", "--grace", "0s",
        "--format", "json", exit_code=4,
    )  # fmt: skip
    found = out.document["findings"]
    assert {(each["code"], each["severity"], each["key"], each["pool"]) for each in found} == {
        ("replica-mismatch", "warning", KEYS["torn"], "kv"),
        ("disk-only", "info", KEYS["slow"], "kv"),
    }
