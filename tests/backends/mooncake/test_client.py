"""The Mooncake client without a usable package or master: what is missing, and what to do."""

from __future__ import annotations

import socket
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.mooncake.client import MooncakeClient
from hicachectl.backends.mooncake.settings import settings_from
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import HicacheError, StoreUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOST_RPC = -900
_CALLS = ("batch_get_into", "batch_put_from", "batch_remove", "register_buffer")


@pytest.fixture
def master() -> Iterator[str]:
    """Return an address that accepts connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def client(master: str) -> MooncakeClient:
    return MooncakeClient(settings_from(parse_url(f"mooncake://{master}?protocol=tcp"), {}))


def refusal(master: str, kind: type[HicacheError]) -> str:
    with pytest.raises(kind) as refused:
        client(master)
    return str(refused.value)


def package(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    """Let the package have a store with these members."""
    mooncake = ModuleType("mooncake")
    mooncake.store = SimpleNamespace(  # type: ignore[attr-defined]
        MooncakeDistributedStore=type("MooncakeDistributedStore", (), members),
        ReplicateConfig=object,
    )
    monkeypatch.setitem(sys.modules, "mooncake", mooncake)


class Unloadable(ModuleType):
    """A package whose library lacks another one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        raise ImportError("libcuda.so.1: cannot open shared object file")


def test_a_missing_package_is_named_with_what_installs_it(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    step = (
        f"run {sys.executable} -m pip install mooncake-transfer-engine, or on a host without CUDA "
    )
    said = f"The mooncake package is missing; {step}"
    assert refusal(master, UsageError).startswith(said)


def test_a_package_that_cannot_be_loaded_names_the_library(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", Unloadable("mooncake"))
    message = refusal(master, UsageError)
    assert "cannot be loaded (libcuda.so.1: cannot open" in message
    assert "; install the missing library, or " in message


def test_an_old_package_names_the_call_and_the_release(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(monkeypatch, **dict.fromkeys(_CALLS[:-1]))
    assert refusal(master, UsageError) == (
        "The mooncake package is too old: register_buffer is missing; install 0.3.13 or later"
    )


def test_a_client_that_cannot_be_set_up_names_its_settings(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(monkeypatch, setup=lambda *_: LOST_RPC, **dict.fromkeys(_CALLS))
    message = refusal(master, StoreUnavailable)
    assert message.startswith(f"mooncake://{master}: cannot set up a client (error -900); check ")
    assert "--rpc_port), protocol 'tcp', device '' and metadata 'P2PHANDSHAKE'" in message


def test_a_master_that_is_not_there_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, **dict.fromkeys(_CALLS))
    assert refusal("127.0.0.1:1", StoreUnavailable) == (
        "mooncake://127.0.0.1:1: cannot connect to the master: Connection refused; check that the "
        "master is running and that this is its --rpc_port (default 50051)"
    )


CONNECTED = {name: lambda *_: 0 for name in (*_CALLS, "setup", "is_exist", "close")}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LOST_RPC, "the master accepts connections, but does not answer the mooncake package here; "
                   "install the version that the cluster runs"),
        (-1, "the master refused to look up a key: "),
    ],
)  # fmt: skip
def test_a_master_that_does_not_answer_is_told_from_one_that_refuses(
    master: str, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    package(monkeypatch, **{**CONNECTED, "is_exist": lambda *_: code})
    message = refusal(master, StoreUnavailable)
    assert message.startswith(f"mooncake://{master}: {said}")
    assert "; " in message


@pytest.mark.parametrize(
    ("members", "call", "said"),
    [
        (
            {"register_buffer": lambda *_: -1},
            lambda one: one.register(0, 4096),
            "{url}: cannot register 4096 bytes of memory for transfers; raise `ulimit -l`, or give "
            "a smaller --buffer-bytes",
        ),
        (
            {},
            lambda one: one.put_from(["k"], [0], [8], pin_seconds=60),
            "The mooncake package here cannot pin objects; install a newer version, or leave out "
            "--pin",
        ),
        (
            {"batch_remove": lambda *_: [LOST_RPC]},
            lambda one: one.remove(["k"]),
            "{url}: the master does not answer (error -900); check that it is running, and has the "
            "version of the mooncake package here",
        ),
    ],
)
def test_what_a_connected_client_cannot_do_says_what_to_change(
    master: str, monkeypatch: pytest.MonkeyPatch, members: dict[str, Any], call: Any, said: str
) -> None:
    package(monkeypatch, **{**CONNECTED, **members})
    one = client(master)
    with pytest.raises(HicacheError) as refused:
        call(one)
    one.close()
    assert str(refused.value) == said.format(url=f"mooncake://{master}")


def test_a_call_that_gets_no_answer_names_the_call_and_the_time(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    package(monkeypatch, **{**CONNECTED, "batch_remove": lambda *_: over.wait(60) and 0})
    one = client(master)
    monkeypatch.setattr("hicachectl.backends.mooncake.client._PATIENCE_SECONDS", 0.05)
    try:
        with pytest.raises(StoreUnavailable) as refused:
            one.remove(["k"])
        one.close()
    finally:
        over.set()
    assert str(refused.value) == (
        f"mooncake://{master}: batch_remove got no answer within 0 s; check whether the master or "
        "a storage process hangs"
    )
