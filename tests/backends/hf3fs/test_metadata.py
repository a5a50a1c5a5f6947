"""Tests of backends.hf3fs.metadata: SGLang's own server, and services that misbehave."""

from __future__ import annotations

import json
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.hf3fs import metadata as hf3fs_metadata
from hicachectl.backends.hf3fs.metadata import MetadataClient
from hicachectl.backends.hf3fs.settings import settings_from
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import StoreUnavailable
from tests.backends.http_scripts import SOON_S, Call, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.backends.http_scripts import Script
    from tests.hf3fs_server import MetadataServer

    Verb = Callable[[MetadataClient], object]

VERBS: dict[str, Verb] = {
    "exists": lambda client: client.exists(0, "kv", ["a", "b"]),
    "get_page_indices": lambda client: client.page_indices(0, "kv", ["a", "b"]),
    "reserve_and_allocate_page_indices": lambda client: client.reserve(0, "kv", ["a", "b"]),
    "confirm_write": lambda client: client.confirm(0, "kv", [("a", 1)], [2]),
    "delete_keys": lambda client: client.delete(0, "kv", ["a", "b"]),
}
HARMLESS_TO_REPEAT = {"exists", "get_page_indices"}
every_verb = pytest.mark.parametrize("verb", VERBS)


@pytest.fixture
def client(metadata_server: MetadataServer) -> Iterator[MetadataClient]:
    with closing(MetadataClient(metadata_server.url)) as client:
        yield client


@contextmanager
def client_of(script: Script, timeout_s: float = 10.0) -> Iterator[MetadataClient]:
    with (
        serving(script) as address,
        closing(MetadataClient(f"http://{address}", timeout_s=timeout_s)) as client,
    ):
        yield client


# SGLang's server


def test_to_ask_whether_keys_exist_leaves_their_order_alone(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(3, 9, "indexer")
    metadata_server.put(3, ["old", "é", "new"], "indexer")
    assert client.exists(3, "indexer", ["old", "x", "é"]).tolist() == [True, False, True]
    assert metadata_server.keys_by_recency(3, "indexer") == ["old", "é", "new"]


def test_to_ask_for_pages_makes_keys_the_most_recent_in_the_order_asked(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 9)
    old, mid, new = metadata_server.put(0, ["old", "mid", "new"])
    assert client.page_indices(0, "kv", ["mid", "x", "old"]) == [mid, None, old]
    assert client.page_indices(0, "kv", ["new"]) == [new]
    assert metadata_server.keys_by_recency(0) == ["mid", "old", "new"]


def test_nothing_asked_is_nothing_answered(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 9)
    assert client.exists(0, "kv", []).tolist() == []
    assert client.page_indices(0, "kv", []) == []
    assert client.reserve(0, "kv", []) == []
    client.confirm(0, "kv", [])
    client.delete(0, "kv", [])


def test_many_keys_are_asked_about_in_parts(
    metadata_server: MetadataServer, client: MetadataClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf3fs_metadata, "KEYS_PER_CALL", 3)
    metadata_server.initialize(0, 9)
    keys = [f"key-{number}" for number in range(8)]
    pages = metadata_server.put(0, keys)
    assert client.exists(0, "kv", [*keys, "x"]).tolist() == [True] * 8 + [False]
    assert client.page_indices(0, "kv", ["x", *keys]) == [None, *pages]


def test_pages_are_reserved_and_then_confirmed_or_released(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 3)
    metadata_server.put(0, ["there"])
    assert client.reserve(0, "kv", ["a", "there", "b"]) == [(False, 1), (True, 2), (False, 0)]
    client.confirm(0, "kv", [("a", 1)], [0])
    assert metadata_server.saved()["0:kv"] == {
        "num_pages": 3,
        "free_pages": [0],
        "key_to_index": [["there", 2], ["a", 1]],
    }


def test_keys_deleted_together_free_the_page_they_share(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 2)
    metadata_server.confirm(0, [("a", 1), ("b", 1)])
    client.delete(0, "kv", ["a", "x", "b"])
    assert metadata_server.saved()["0:kv"] == {
        "num_pages": 2,
        "free_pages": [0, 1],
        "key_to_index": [],
    }


def test_more_pages_than_there_are_is_an_error_that_says_so(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 2)
    with pytest.raises(
        StoreUnavailable, match=r"reserve 3 pages of 0:kv; .*no key can be dropped; remove pages"
    ):
        client.reserve(0, "kv", ["a", "b", "c"])


@every_verb
def test_a_table_that_the_server_has_not_is_named(client: MetadataClient, verb: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"^3FS metadata server .*: has no table 0:kv; "):
        VERBS[verb](client)


def test_a_server_that_comes_back_is_asked_again(metadata_server: MetadataServer) -> None:
    metadata_server.initialize(0, 4)
    metadata_server.put(0, ["a"])
    metadata_server.save()
    with closing(MetadataClient(metadata_server.url)) as client:
        assert client.exists(0, "kv", ["a"]).all()
        metadata_server.kill()
        try:
            with pytest.raises(StoreUnavailable, match="connection refused"):
                client.exists(0, "kv", ["a"])
        finally:
            metadata_server.start()
        assert client.exists(0, "kv", ["a"]).all()
        assert client.reserve(0, "kv", ["b"]) == [(False, 2)]


# services that misbehave


@every_verb
def test_an_engine_s_verb_is_posted_with_its_namespace(verb: str) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def script(call: Call) -> None:
        seen.append((call.path, json.loads(call.body)))
        call.answer(b"", 500)

    with client_of(script) as client, pytest.raises(StoreUnavailable):
        VERBS[verb](client)
    ((path, body),) = seen
    assert path == f"/0/{verb}"
    assert body.pop("namespace") == "kv"
    assert body == {
        "reserve_and_allocate_page_indices": {"keys": [["a", ""], ["b", ""]]},
        "confirm_write": {"written_keys_to_confirm": [["a", 1]], "pages_to_release": [2]},
    }.get(verb, {"keys": ["a", "b"]})


@every_verb
def test_only_what_does_no_more_when_repeated_is_sent_again(verb: str) -> None:
    seen: list[int] = []

    def script(call: Call) -> None:
        seen.append(call.number)
        call.reset()

    with client_of(script) as client, pytest.raises(StoreUnavailable, match="without an answer"):
        VERBS[verb](client)
    assert len(seen) == (3 if verb in HARMLESS_TO_REPEAT else 1)


@every_verb
@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, b"Internal Server Error", "500|cannot reserve"),
        (503, b"", "HTTP 503"),
        (422, b'{"detail":[]}', "HTTP 422"),
        (405, b"", "HTTP 405"),
        (404, b'{"detail":"Not Found"}', "has no endpoint /0/.*metadata_server_url"),
        (301, b"", "HTTP 301"),
        (200, b"<html>", "is invalid|an unexpected reply"),
        (200, b"{}", "is invalid|an unexpected reply"),
        (200, b'{"exists": [1, 2], "indices": ["a", "b"]}', "is invalid|an unexpected reply"),
        (200, b'{"exists": [null], "indices": [[false, null]]}', "is invalid|an unexpected reply"),
        (200, b'{"exists": [true], "indices": [1]}', "has 1 keys|is invalid|an unexpected reply"),
        (200, b'{"exists": "\xff", "indices": [-1, 1]}', "is invalid|an unexpected reply"),
        (
            200,
            b'{"exists": [], "indices": [[false, 9223372036854775808]]}',
            "has 0|invalid|unexp",
        ),
        (202, b"", "HTTP 202"),
    ],
)
def test_garbage_is_one_clear_line(verb: str, status: int, body: bytes, said: str) -> None:
    with (
        client_of(lambda call: call.answer(body, status)) as client,
        pytest.raises(StoreUnavailable, match=said) as caught,
    ):
        VERBS[verb](client)
    message = str(caught.value)
    assert message.startswith("3FS metadata server 127.0.0.1:")
    assert "\n" not in message
    assert len(message) < 400


@every_verb
def test_a_server_that_hangs_is_given_up_in_time(verb: str) -> None:
    with client_of(lambda call: call.hang(), timeout_s=0.1) as client:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer within"):
            VERBS[verb](client)
        assert time.monotonic() - start < SOON_S
    assert hf3fs_metadata.TIMEOUT_S <= 20


def test_a_server_behind_a_path_is_asked_there() -> None:
    with serving(lambda call: call.answer(b'{"exists":[true]}')) as address:
        for end in ("/meta", "/meta/"):
            url = f"hf3fs:///prefix?server=http://{address}{end}"
            server = settings_from(parse_url(url), {}).server
            assert server is not None
            with closing(MetadataClient(server)) as client:
                assert client.exists(0, "kv", ["a"]).all()
