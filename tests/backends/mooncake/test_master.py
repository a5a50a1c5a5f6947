"""Tests of backends.mooncake.master, with a real master and with misbehaving services."""

from __future__ import annotations

import json
import re
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from hicachectl.backends.mooncake import master as mooncake_master
from hicachectl.backends.mooncake.master import (
    ANSWER_SCHEMA,
    PIN_KEYS,
    MasterAdmin,
    Segment,
)
from hicachectl.formats.errors import StoreUnavailable, UsageError
from tests.backends.http_scripts import SOON_S, Call, serving
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.backends.http_scripts import Script

ODD_KEYS = [
    'quote"in',
    "back\\slash",
    "tab\tin",
    "control\x01in",
    "ünïcödé-页-😀",
    "percent%41",
    "a b+c&d=e#f?g/h;i:j",
    "[brackets]{}",
    "'4'",
    "trailing ",
    "\x7f",
]
MISSING = -704
PORT = "give the master's --metrics_port (9003 by default) as the admin port"


@pytest.fixture
def admin(mooncake_cluster: Cluster) -> Iterator[MasterAdmin]:
    with closing(MasterAdmin(mooncake_cluster.admin)) as admin:
        yield admin


@contextmanager
def scripted(script: Script, timeout_s: float = 10.0) -> Iterator[MasterAdmin]:
    with serving(script) as address, closing(MasterAdmin(address, timeout_s=timeout_s)) as admin:
        yield admin


def keys_of(batches: Any) -> list[bytes]:
    return [key for batch in batches for key in batch.to_pylist()]


def binary(*keys: str | bytes) -> Any:
    return pa.array([key if isinstance(key, bytes) else key.encode() for key in keys], pa.binary())


def versions(answer: Any) -> list[tuple[int, ...] | None]:
    column = answer.column("version").to_pylist()
    return [None if version is None else struct.unpack("<QQQ", version) for version in column]


# a real master


def test_a_master_that_leads_passes_the_check(admin: MasterAdmin) -> None:
    admin.check()


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_every_key_is_listed_once_in_batches_of_bounded_length(
    mooncake_cluster: Cluster, admin: MasterAdmin, most: int
) -> None:
    keys = [*ODD_KEYS, "with,comma", *(f"key-{number}" for number in range(20))]
    for key in keys:
        mooncake_cluster.put(key, b"x")
    batches = list(admin.key_batches(most))
    assert sorted(keys_of(batches)) == sorted(key.encode() for key in keys)
    assert all(batch.type == pa.binary() for batch in batches)
    assert {len(batch) for batch in batches[:-1]} <= {most}
    assert 0 < len(batches[-1]) <= most


def test_an_empty_store_has_no_keys(admin: MasterAdmin) -> None:
    assert list(admin.key_batches(10)) == []
    assert admin.query(binary()).schema == ANSWER_SCHEMA
    assert len(admin.query(binary())) == 0


def test_answers_come_in_the_order_asked(mooncake_cluster: Cluster, admin: MasterAdmin) -> None:
    sizes = {"b": 20, "a": 1, "c": 300}
    for key, size in sizes.items():
        mooncake_cluster.put(key, bytes(size))
    answer = admin.query(binary("c", "gone", "a", "b", "c"))
    assert answer.schema == ANSWER_SCHEMA
    assert answer.column("code").to_pylist() == [0, MISSING, 0, 0, 0]
    assert answer.column("nbytes").to_pylist() == [300, None, 1, 20, 300]
    endpoint = admin.segments()[0].endpoint
    assert answer.column("replicas").to_pylist()[:2] == [
        [{"kind": "memory", "location": endpoint, "nbytes": 300}],
        None,
    ]


def test_odd_characters_in_keys_are_asked_about_as_they_are(
    mooncake_cluster: Cluster, admin: MasterAdmin
) -> None:
    keys = [*ODD_KEYS, "line\nfeed"]
    for size, key in enumerate(keys, 1):
        mooncake_cluster.put(key, bytes(size))
    answer = admin.query(binary(*keys))
    assert answer.column("nbytes").to_pylist() == list(range(1, len(keys) + 1))


def test_keys_that_cannot_be_asked_about_have_a_null_code_and_spoil_no_other(
    mooncake_cluster: Cluster, admin: MasterAdmin
) -> None:
    for key in ("a", "with,comma", "with"):
        mooncake_cluster.put(key, b"xyz")
    answer = admin.query(binary("a", "with,comma", b"\xff\xfe", "", "nope", "with"))
    assert answer.column("code").to_pylist() == [0, None, None, None, MISSING, 0]
    for row in answer.slice(1, 3).to_pylist():
        assert set(row.values()) == {None}
    assert admin.query(binary("with,comma")).column("code").to_pylist() == [None]


def test_a_slice_of_keys_is_asked_about_as_such(
    mooncake_cluster: Cluster, admin: MasterAdmin
) -> None:
    mooncake_cluster.put("b", b"xx")
    answer = admin.query(binary("a,", "b", "c").slice(1))
    assert answer.column("code").to_pylist() == [0, MISSING]


def test_many_requests_make_one_answer(
    mooncake_cluster: Cluster, admin: MasterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_master, "URL_BYTES", 40)  # two or three keys per request
    keys = [f"key-of-some-length-{number}" for number in range(60)]
    for size, key in enumerate(keys, 1):
        mooncake_cluster.put(key, bytes(size))
    assert admin.query(binary(*keys)).column("nbytes").to_pylist() == list(range(1, 61))


def test_odd_and_many_keys_are_pinned(pinning_cluster: Cluster, admin: MasterAdmin) -> None:
    odd = [*ODD_KEYS, "with,comma", "new\nline"]
    for key in odd:
        pinning_cluster.put(key, b"x")
    absent = [f"absent-{number}" for number in range(2 * PIN_KEYS)]
    keys = [*odd[:3], *absent, *odd[3:]]
    expected = [0] * 3 + [MISSING] * len(absent) + [0] * (len(odd) - 3)
    assert admin.pin(keys, 60_000).tolist() == expected
    assert f"master_soft_pin_key_count {len(odd)}\n" in pinning_cluster.ask("metrics")
    assert admin.pin(keys, None).tolist() == expected
    assert "master_soft_pin_key_count 0\n" in pinning_cluster.ask("metrics")


def test_threads_share_one_admin(mooncake_cluster: Cluster, admin: MasterAdmin) -> None:
    for number in range(8):
        mooncake_cluster.put(f"key-{number}", bytes(number + 1))

    def ask(number: int) -> list[int]:
        sizes: list[int] = admin.query(binary(f"key-{number % 8}")).column("nbytes").to_pylist()
        return sizes

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(200))) == [[number % 8 + 1] for number in range(200)]


def test_looking_grants_no_lease(mooncake_cluster: Cluster, admin: MasterAdmin) -> None:
    client = mooncake_cluster.client()
    mooncake_cluster.put("looked-at", b"x")
    mooncake_cluster.put("read", b"x")
    admin.check()
    assert len(keys_of(admin.key_batches(10))) == 2
    assert admin.query(binary("looked-at", "read")).column("code").to_pylist() == [0, 0]
    admin.segments()
    assert client.is_exist("read") == 1
    assert client.remove("read") == -706  # leased: so this test can notice a lease
    assert client.remove("looked-at") == 0


def test_the_version_tells_an_object_from_its_successor(
    mooncake_cluster: Cluster, admin: MasterAdmin
) -> None:
    mooncake_cluster.put("a", b"12345")
    first, again = (versions(admin.query(binary("a")))[0] for _ in range(2))
    assert first == again
    assert first is not None
    assert first[0] == 5
    mooncake_cluster.remove("a")
    mooncake_cluster.put("between", b"12345")  # takes the place in memory
    mooncake_cluster.put("a", b"54321")
    assert versions(admin.query(binary("a")))[0] not in (None, first)


def test_segments_and_free_bytes_follow_what_is_put(
    mooncake_cluster: Cluster, admin: MasterAdmin
) -> None:
    (segment,) = admin.segments()
    free = admin.free_bytes()
    assert free == segment.capacity_bytes - segment.used_bytes
    assert (segment.protocol, segment.status) == ("tcp", "OK")
    mooncake_cluster.put("a", bytes(1 << 20))
    assert free - admin.free_bytes() == 1 << 20


def test_the_rpc_port_is_recognised_as_the_wrong_one(mooncake_cluster: Cluster) -> None:
    with (
        closing(MasterAdmin(mooncake_cluster.master)) as admin,
        pytest.raises(StoreUnavailable, match=r"without an answer; .*--metrics_port \(9003"),
    ):
        admin.check()


def test_replicas_in_memory_and_on_disk_are_told_apart(
    mooncake_package: None, tmp_path: Path
) -> None:
    """An evicted object on disk has no version: an object written later gets the same file name."""
    with (
        Cluster(16 << 20, stores=2, lease_ms=100, root_fs_dir=tmp_path) as cluster,
        closing(MasterAdmin(cluster.admin)) as admin,
    ):
        from mooncake.store import ReplicateConfig

        twice = ReplicateConfig()
        twice.replica_num = 2
        assert cluster.client().put("twice", bytes(1 << 20), twice) == 0
        kinds = _await(lambda: _kinds(admin, "twice"), lambda kinds: "disk" in kinds)
        assert kinds == ["memory", "memory", "disk"]
        replicas = admin.query(binary("twice")).column("replicas").to_pylist()[0]
        endpoints = {replica["location"] for replica in replicas[:2]}
        assert endpoints == {segment.endpoint for segment in admin.segments()}
        assert replicas[2]["location"].startswith(str(tmp_path))
        assert {replica["nbytes"] for replica in replicas} == {1 << 20}
        for number in range(60):
            cluster.client().put(f"filler-{number}", bytes(1 << 20))
        _await(lambda: _kinds(admin, "twice"), lambda kinds: kinds == ["disk"])
        (row,) = admin.query(binary("twice")).to_pylist()
        assert (row["code"], row["nbytes"]) == (0, 1 << 20)
        assert row["version"] is None


def _kinds(admin: MasterAdmin, key: str) -> list[str]:
    (replicas,) = admin.query(binary(key)).column("replicas").to_pylist()
    return [replica["kind"] for replica in replicas or []]


def _await(ask: Callable[[], list[str]], enough: Callable[[list[str]], bool]) -> list[str]:
    deadline = time.monotonic() + 120
    while not enough(found := ask()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


# scripted masters


def item(**fields: object) -> dict[str, object]:
    empty = dict.fromkeys(("error", "values", "disk_values", "local_disk_values", "nof_values"))
    return {"ok": True, **empty, **fields}


def buffer(size: int, address: int = 4096, endpoint: str = "host:1") -> dict[str, object]:
    return {
        "size_": size,
        "buffer_address_": address,
        "protocol_": "tcp",
        "transport_endpoint_": endpoint,
    }


def answering(data: object) -> Script:
    return lambda call: call.answer(json.dumps({"success": True, "data": data}).encode())


def test_replicas_of_every_kind_are_listed_memory_first() -> None:
    disk = {"file_path": "/d/a", "object_size": 10}
    local = {"client_id": "1-2", "object_size": 9, "transport_endpoint": "host:3"}
    nof = buffer(10, endpoint="nqn")
    data = {
        "all": item(values=[buffer(10), buffer(10, 1, "host:2")], disk_values=[disk],
                    local_disk_values=[local], nof_values=[nof]),
        "lost": item(ok=False, error="OBJECT_NOT_FOUND"),
        "local": item(values=[], local_disk_values=[local]),
        "memory": item(values=[buffer(7, 2**64 - 1)]),
    }  # fmt: skip
    with scripted(answering(data)) as admin:
        answer = admin.query(binary("all", "lost", "local", "memory"))
    rows = answer.to_pylist()
    named = [
        [(replica["kind"], replica["location"], replica["nbytes"]) for replica in row["replicas"]]
        for row in rows
        if row["replicas"]
    ]
    assert named == [
        [
            ("memory", "host:1", 10),
            ("memory", "host:2", 10),
            ("nof", "nqn", 10),
            ("disk", "/d/a", 10),
            ("local_disk", "host:3", 9),
        ],
        [("local_disk", "host:3", 9)],
        [("memory", "host:1", 7)],
    ]
    assert [row["nbytes"] for row in rows] == [10, None, 9, 7]
    found = versions(answer)
    assert found[1:3] == [None, None]
    assert found[0] is not None
    assert found[3] is not None
    assert (found[0][0], found[0][2], found[3][2]) == (10, 4096, 2**64 - 1)
    assert found[0][1] != found[3][1]


def test_the_version_knows_the_set_of_endpoints_but_not_their_order() -> None:
    one, two, three = (buffer(1, 5, f"host:{number}") for number in (1, 2, 3))
    data = {"12": item(values=[one, two]), "21": item(values=[two, one]),
            "13": item(values=[one, three]), "1": item(values=[one])}  # fmt: skip
    with scripted(answering(data)) as admin:
        found = versions(admin.query(binary("12", "21", "13", "1")))
    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [("REPLICA_IS_NOT_READY", -703), ("OBJECT_NOT_FOUND", -704), ("SOMETHING_NEW", -1), (None, -1)],
)
def test_errors_are_codes(error: str | None, code: int) -> None:
    with scripted(answering({"a": item(ok=False, error=error)})) as admin:
        assert admin.query(binary("a")).column("code").to_pylist() == [code]


def test_an_object_without_any_replica_is_not_ready() -> None:
    with scripted(answering({"a": item(values=[])})) as admin:
        (row,) = admin.query(binary("a")).to_pylist()
    assert (row["code"], row["nbytes"], row["replicas"]) == (-703, None, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>hello</html>", "is invalid"),
        (b"", "is invalid"),
        (b"[" * 100_000, "is invalid"),
        (b'{"success":true,"data":{"a":' * 5000, "is invalid"),
        (b'{"success":true,"data":{"\xff":null}}', "is invalid"),
        (b'{"success":false}', "is invalid"),
        (b'{"data":{"a":{"ok":1}}}', "is invalid"),
        (json.dumps({"data": {"a": {"ok": True, "error": None, "values": []}}}), "is invalid"),
        (json.dumps({"data": {"b": item(values=[])}}), "lacks keys of the request"),
        (json.dumps({"data": {"a": item(values=[buffer(-1)])}}), "out of range"),
        (json.dumps({"data": {"a": item(values=[buffer(2**63)])}}), "out of range"),
        (json.dumps({"data": {"a": item(values=[buffer(1, 2**64)])}}), "out of range"),
        (json.dumps({"data": {"a": item(values=[buffer(1, -1)])}}), "out of range"),
        (json.dumps({"data": {"a": item(values=[buffer(10**400)])}}), "is invalid|range"),
    ],
)
def test_garbage_about_keys_is_one_clear_line(body: bytes | str, message: str) -> None:
    raw = body.encode() if isinstance(body, str) else body
    with (
        scripted(lambda call: call.answer(raw)) as admin,
        pytest.raises(StoreUnavailable, match=f"^Mooncake master .*{message}") as refused,
    ):
        admin.query(binary("a"))
    assert str(refused.value).endswith(f"; {PORT}")


PINS = [
    (b"", "is invalid"),
    (b'{"results":[{"key":"a"}]}', "is invalid"),
    (b'{"results":[{"key":"a","error_code":"0"}]}', "is invalid"),
    (b'{"results":[]}', "has other keys than the request"),
    (b'{"results":[{"key":"b","error_code":0}]}', "has other keys than the request"),
    (b'{"results":[{"key":"a","error_code":0},{"key":"a","error_code":0}]}', "has other keys"),
    (b'{"results":[{"key":"a","error_code":%d}]}' % 10**30, "is invalid"),
    (b'{"results":[{"key":"a","error_code":%d}]}' % 2**62, "is invalid"),
]


@pytest.mark.parametrize(("body", "message"), PINS)
def test_garbage_about_pins_is_no_pin(body: bytes, message: str) -> None:
    with (
        scripted(lambda call: call.answer(body)) as admin,
        pytest.raises(StoreUnavailable, match=f"^Mooncake master .*{message}"),
    ):
        admin.pin(["a"], 1000)


@pytest.mark.parametrize(("status", "said"), [(503, "failed with HTTP 503"), (404, "no endpoint")])
def test_a_master_that_refuses_to_unpin_is_said(status: int, said: str) -> None:
    with (
        scripted(lambda call: call.answer(b"", status)) as admin,
        pytest.raises(StoreUnavailable, match=said),
    ):
        admin.pin(["a"], None)


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [('{"results":[{"key":"KEY","error_code":-704}]}', 200, True), ("", 404, False),
     ('{"results":[{"key":"KEY","error_code":-600}]}', 200, None)],
)  # fmt: skip
def test_whether_a_master_pins_is_asked_with_a_key_that_no_store_has(
    body: str, status: int, expected: bool | None
) -> None:
    asked = []

    def answer(call: Call) -> None:
        asked.append((call.path, json.loads(call.body)))
        call.answer(body.replace("KEY", asked[-1][1]["keys"][0]).encode(), status)

    with scripted(answer) as admin:
        assert admin.can_pin(1500) is expected
    ((path, question),) = asked
    assert path == "/api/v1/soft_pin"
    assert (len(question["keys"][0]) > 40, question["ttl_ms"]) == (True, 1500)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"k" * 2000 + b"\n", "its reply to /get_all_keys is longer than 1000 bytes"),
        (b"k" * 600, "its reply to /get_all_keys has a line longer than 500 bytes"),
    ],
)
def test_a_listing_without_bounds_ends(
    monkeypatch: pytest.MonkeyPatch, body: bytes, said: str
) -> None:
    monkeypatch.setattr(mooncake_master, "MAX_LISTING_BYTES", 1000)
    monkeypatch.setattr(mooncake_master, "MAX_KEY_BYTES", 500)
    with (
        scripted(lambda call: call.answer(body, 200, "Content-Type: text/plain")) as admin,
        pytest.raises(StoreUnavailable) as refused,
    ):
        list(admin.key_batches(100))
    assert str(refused.value).startswith("Mooncake master 127.0.0.1:")
    assert str(refused.value).endswith(f": {said}; {PORT}")


def test_a_page_for_people_is_no_listing() -> None:
    with (
        scripted(lambda call: call.answer(b"<html>", 200, "Content-Type: text/html")) as admin,
        pytest.raises(StoreUnavailable) as refused,
    ):
        list(admin.key_batches(100))
    assert str(refused.value).endswith(
        f": /get_all_keys returned text/html instead of text/plain; {PORT}"
    )


HEALTHY = json.dumps(
    {"status": "ok", "role": "leader", "ha_state": "serving", "service_ready": True}
).encode()


def master(batch: Script, health: bytes = HEALTHY) -> Script:
    def script(call: Call) -> None:
        if call.path == "/health":
            call.answer(health)
        else:
            batch(call)

    return script


def echo(fields: dict[str, object]) -> Script:
    """Answer for the queried key."""

    def script(call: Call) -> None:
        key = call.path.partition("keys=")[2]
        call.answer(json.dumps({"success": True, "data": {key: fields}}).encode())

    return script


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            lambda call: call.answer(b"OK"),
            "the master is too old; upgrade the master to Mooncake 0.3.12 or later",
        ),
        (lambda call: call.answer(b"not found", 404), "not a Mooncake master; .*--metrics_port"),
        (lambda call: call.answer(b"<html>"), "not a Mooncake master; .*--metrics_port"),
        (lambda call: call.answer(b'{"status":"ok"}'), "not a Mooncake master"),
        (
            master(lambda call: call.answer(b"no", 404)),
            "has no endpoint /batch_query_keys; upgrade the master to Mooncake 0.3.12 or later",
        ),
        (
            master(echo({"ok": False, "error": "OBJECT_NOT_FOUND"})),
            "extends the leases of queried objects; upgrade the master to Mooncake 0.3.12 or later",
        ),
        (
            master(
                lambda call: call.hang(),
                b'{"role":"standby","ha_state":"standby","service_ready":false,'
                b'"leader_address":"10.0.0.2:50051"}',
            ),
            r"does not serve \(role standby, state standby\); .*\(leader: 10\.0\.0\.2:50051\)",
        ),
        (master(lambda call: call.answer(b"{}")), "its reply to /batch_query_keys is invalid"),
        (
            master(lambda call: call.answer(b'{"error_message":"not active"}', 503)),
            "/batch_query_keys failed with HTTP 503: .*not active",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(script: Script, message: str) -> None:
    with scripted(script) as admin, pytest.raises(StoreUnavailable, match=message):
        admin.check()


def test_a_master_that_can_be_asked_harmlessly_passes_the_check() -> None:
    fields = item(ok=False, error="OBJECT_NOT_FOUND")
    with scripted(master(echo(fields))) as admin:
        admin.check()


@pytest.mark.parametrize(
    "ask",
    [
        lambda admin: admin.check(),
        lambda admin: admin.query(binary("a")),
        lambda admin: list(admin.key_batches(10)),
        lambda admin: admin.free_bytes(),
    ],
)
def test_a_master_that_hangs_is_given_up(ask: Callable[[MasterAdmin], Any]) -> None:
    with scripted(lambda call: call.hang(), timeout_s=0.1) as admin:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.1 s"):
            ask(admin)
        assert time.monotonic() - start < SOON_S
    assert mooncake_master.TIMEOUT_S < 20


def test_many_requests_to_a_master_that_hangs_take_no_longer_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mooncake_master, "URL_BYTES", 8)
    keys = binary(*(f"key-{number}" for number in range(100)))
    asked: list[str] = []

    def script(call: Call) -> None:
        asked.append(call.path)
        call.hang()

    with scripted(script, timeout_s=0.2) as admin:
        for _ in range(2):  # requests left over from the first would delay the second
            with pytest.raises(StoreUnavailable, match="no answer"):
                admin.query(keys)
    assert len(asked) <= 2 * mooncake_master.IN_FLIGHT  # no request is sent after one has failed


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 1000])
def test_keys_are_found_wherever_blocks_part(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("hicachectl.backends.http._BLOCK_BYTES", block_bytes)
    body = b"a\n\n\xffb,c\r\n\n\nlonger key\nz\n"
    with scripted(lambda call: call.answer(body)) as admin:
        assert keys_of(admin.key_batches(2)) == [b"a", b"\xffb,c\r", b"longer key", b"z"]


def test_a_listing_cut_short_is_never_taken_for_a_whole_one() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\na\nb\nc\n"
    for end in range(len(whole) - 6, len(whole)):

        def script(call: Call, end: int = end) -> None:
            call.send(whole[:end])
            call.close()

        with scripted(script) as admin, pytest.raises(StoreUnavailable, match="ended early"):
            list(admin.key_batches(10))


def test_a_listing_that_ends_within_a_key_is_refused() -> None:
    with (
        scripted(lambda call: call.answer(b"whole\nhal")) as admin,
        pytest.raises(StoreUnavailable, match="ends within a key"),
    ):
        list(admin.key_batches(10))


def test_an_endless_line_is_refused_before_it_fills_the_memory() -> None:
    def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        while True:
            call.send(b"x" * 65536)

    with scripted(script) as admin, pytest.raises(StoreUnavailable, match="a line longer than"):
        list(admin.key_batches(10))


@pytest.mark.slow
def test_a_million_keys_are_listed_in_bounded_memory() -> None:
    line = b"Qwen-Qwen3-32B_" + b"0123456789abcdef" * 4 + b"_0_k\n"
    block = line * 10_000

    def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (100 * len(block)))
        for _ in range(100):
            call.send(block)

    before = pa.total_allocated_bytes()
    most = count = 0
    with scripted(script) as admin:
        for batch in admin.key_batches(16384):
            count += len(batch)
            most = max(most, pa.total_allocated_bytes() - before)
    assert count == 1_000_000
    assert most < 24 << 20  # of 84 MB


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"segments":[{}]}', b'{"segments":[{"segment_name":1}]}', b"[" * 99_999]
)
def test_garbage_about_segments_is_one_clear_line(body: bytes) -> None:
    with (
        scripted(lambda call: call.answer(body)) as admin,
        pytest.raises(StoreUnavailable, match="its reply to /get_segments_detail is invalid"),
    ):
        admin.free_bytes()


def test_segments_on_their_way_out_are_not_free() -> None:
    segments = [
        {"segment_name": name, "te_endpoint": f"{name}:1", "protocol": "tcp", "status": status,
         "allocator_used_bytes": used, "allocator_capacity_bytes": 100,
         "allocator_usage_percent": 0e0}
        for name, status, used in (("a", "OK", 30), ("b", "DRAINING", 0), ("c", "OK", 130))
    ]  # fmt: skip
    with scripted(lambda call: call.answer(json.dumps({"segments": segments}).encode())) as admin:
        assert admin.segments()[0] == Segment("a", "a:1", "tcp", "OK", 30, 100)
        assert admin.free_bytes() == 70


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "::1:9003"])
def test_an_address_must_be_host_and_port(address: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"the admin address: {address!r}")):
        MasterAdmin(address)
