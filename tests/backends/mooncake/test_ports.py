"""The ports of Mooncake's client refuse connections; reads and writes work without them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.backends.mooncake import client as module
from hicachectl.backends.mooncake.client import MooncakeClient
from hicachectl.backends.mooncake.ports import close_ports, names_of_sockets
from hicachectl.backends.mooncake.settings import settings_from
from hicachectl.backends.urls import parse_url

if TYPE_CHECKING:
    from tests.mooncake_cluster import Cluster

HOST = "127.0.0.1"
VALUE = bytes(range(256)) * 64


def listening() -> set[int]:
    """Return the ports at which this process listens, of both families."""
    own = names_of_sockets()
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in own
    }


def accepts(port: int, host: str = HOST) -> bool:
    try:
        socket.create_connection((host, port), 0.3).close()
    except OSError:
        return False
    return True


def listener(ports: range = range(15000, 17001)) -> socket.socket:
    """Return a listener at one of Mooncake's ports."""
    for port in ports:
        try:
            return socket.create_server((HOST, port))
        except OSError:  # another test's
            continue
    raise AssertionError("every port is taken")


def test_a_port_and_its_connections_end_and_others_stay() -> None:
    with socket.create_server((HOST, 0)) as other, listener() as old:
        before = names_of_sockets()
        with listener() as fresh, socket.create_server((HOST, 0)) as elsewhere:
            peer = socket.create_connection(fresh.getsockname(), 5)
            own, _ = fresh.accept()
            assert close_ports(before) == []
            assert peer.recv(1) == b""
            assert not accepts(fresh.getsockname()[1])
            assert all(accepts(each.getsockname()[1]) for each in (other, old, elsewhere))
            peer.close()
            own.close()


RANGES = [
    ("", "", 15000),
    ("21000", "21999", 21000),
    ("21999", "21000", 15000),
    ("40000", "41000", 15000),
    ("21000", "x", 15000),
    ("80", "21999", 15000),
]


@pytest.mark.parametrize(("first", "last", "begin"), RANGES)
@pytest.mark.parametrize("spelling", ["RPC", "PRC"])
def test_the_ports_are_those_of_mooncakes_variables(
    monkeypatch: pytest.MonkeyPatch, spelling: str, first: str, last: str, begin: int
) -> None:
    """Mooncake takes its own range in place of one that it refuses."""
    for end, value in (("MIN", first), ("MAX", last)):
        if value:
            monkeypatch.setenv(f"MC_{end}_{spelling}_PORT", value)
    before = names_of_sockets()
    with listener(range(15000, 16000)) as usual, listener(range(21000, 21999)) as chosen:
        close_ports(before)
        ports = {15000: usual.getsockname()[1], 21000: chosen.getsockname()[1]}
        assert {name for name, port in ports.items() if not accepts(port)} == {begin}


def test_nobody_connects_to_a_client_which_reads_and_writes(mooncake_cluster: Cluster) -> None:
    plain = mooncake_cluster.client()
    before = listening()
    assert [accepts(port) for port in before].count(True) == 2  # those of the plain client
    client = MooncakeClient(settings_from(parse_url(mooncake_cluster.url), {}))
    fresh = listening() - before
    assert len(fresh) == 2
    addresses = {HOST, socket.gethostbyname(socket.gethostname())}
    assert not any(accepts(port, host) for port in fresh for host in addresses)
    memory = np.frombuffer(bytearray(VALUE), np.uint8)
    address = memory.ctypes.data
    client.register(address, len(VALUE))
    assert client.put_from(["key"], [address], [len(VALUE)]).tolist() == [0]
    memory[:] = 0
    assert client.get_into(["key"], [address], [len(VALUE)]).tolist() == [len(VALUE)]
    assert memory.tobytes() == VALUE == plain.get("key")
    client.unregister(address)
    client.close()
    assert not fresh & listening()


def test_a_kernel_without_filters_is_named(
    mooncake_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "close_ports", lambda _: [15001, 15002])
    with caplog.at_level("WARNING"):  # an earlier command may have set another level
        MooncakeClient(settings_from(parse_url(mooncake_cluster.url), os.environ)).close()
    assert "15001, 15002 stay open to the network" in caplog.text
