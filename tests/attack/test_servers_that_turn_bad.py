"""A 3FS metadata server and a Mooncake master that answer well at first, and badly later.

A service between the command line and the real server passes requests on, up to some request.
Nothing may be deleted, moved or called clean because of its later answers, and the same command
completes the work with the good server.
"""

from __future__ import annotations

import json
import random
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from hicachectl.__main__ import run
from hicachectl.backends.base import open_store
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.profile import dump_profile
from tests.attack.turning import BROKEN, SLOW, Turning, altered, fewer, more, numbers, passed_on
from tests.backends.http_scripts import serving
from tests.hf3fs_places import BFLOAT16_NAN, PAGES, Place
from tests.mooncake_cluster import Cluster
from tests.move.migrations import demo_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.attack.turning import Bad, Real
    from tests.backends.http_scripts import Call
    from tests.hf3fs_server import MetadataServer

    Command = Callable[[str], list[object]]

DEADLINE_S = 0.5  # timeout of an answer; by default 15 s
QUICK_S = 20
WRONG_COUNTS: dict[str, Bad] = {"fewer": altered(fewer), "more": altered(more)}
SEED = 20_251_122


class Said(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def call(*arguments: object) -> Said:
        capfd.readouterr()
        started = time.monotonic()
        status = run([str(argument) for argument in arguments])
        found = Said(status, *capfd.readouterr())
        assert time.monotonic() - started < QUICK_S, found
        assert status in (0, 3, 4), found
        assert "Traceback" not in found.stderr
        return found

    return call


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("hf3fs.store.MetadataClient", "mooncake.store.MasterAdmin"):
        name = f"hicachectl.backends.{kind}.__init__.__kwdefaults__"
        monkeypatch.setattr(name, {"timeout_s": DEADLINE_S})


@pytest.fixture
def place(tmp_path: Path, metadata_server: MetadataServer) -> Place:
    place = Place(tmp_path, metadata_server)
    (tmp_path / "pages").write_text(json.dumps(place.pages()) + "\n")
    return place


def assert_refused(found: Said, address: str) -> None:
    """Assert exit 3, nothing on stdout, and one line that names the server."""
    assert (found.status, found.stdout) == (3, ""), found
    assert address in found.stderr.splitlines()[-1]


def turned(said: Callable[..., Said], command: Command, script: Turning) -> tuple[Said, str]:
    """Run a command against a server that turns bad; return its end, and the server address."""
    with serving(script) as address:
        return said(*command(address)), address


def requests_of(server: str, said: Callable[..., Said], command: Command) -> int:
    """Return the number of requests of a command that succeeds."""
    script = Turning(server)
    found, _ = turned(said, command, script)
    assert found.status == 0, found
    return script.requests


def attack_reader(
    server: str, said: Callable[..., Said], command: Command, bads: dict[str, Bad], *, most: int
) -> None:
    """Let a server turn bad at up to `most` moments of a read-only command."""
    requests = requests_of(server, said, command)
    chance = random.Random(SEED)
    for name, bad in bads.items():
        moments = range(requests)
        for good in chance.sample(moments, min(requests, 1 if name in SLOW else most)):
            for once in {False, name in ("HTML", "other JSON", "null")}:
                script = Turning(server, good, bad, once=once)
                found, address = turned(said, command, script)
                assert_refused(found, address)


# --- a 3FS metadata server ---


def reading(place: Place, command: str) -> Command:
    pages = place.folder / "pages"
    common = ["--profile", place.profile, "--format", "json"]

    def arguments(address: str) -> list[object]:
        url = f"http://{address}"
        return {
            "ls": ["ls", place.url(url), *common],
            "hits": ["hits", place.url(url), "--pages", pages, *common],
            "sizes": place.arguments("--checks", "names,groups,sizes", server=url),
            "digests": place.arguments("--catalog", place.folder / "catalog.parquet", server=url),
            "migrate": ["migrate", place.url(url), place.folder / "copy", *common, "--dry-run"],
        }[command]

    return arguments


@pytest.mark.parametrize("command", ["ls", "hits", "sizes", "digests", "migrate"])
def test_a_reader_of_3fs_is_refused_at_every_moment(
    place: Place, said: Callable[..., Said], command: str
) -> None:
    if command == "digests":
        said(*place.arguments(*place.recording))
    bads = {**BROKEN, **SLOW, **WRONG_COUNTS}
    most = 1 if command == "digests" else 4
    address = place.server.url.removeprefix("http://")
    attack_reader(address, said, reading(place, command), bads, most=most)


def empty(place: Place) -> None:
    for page in place.pages():
        place.evict(page)
    place.save()


def copying(place: Place, source: Path) -> Command:
    options = ["--profile", place.profile, "--jobs", "1", "--format", "json"]
    return lambda address: ["migrate", source, place.url(f"http://{address}"), *options]


def assert_no_anchor_alone(place: Place) -> None:
    """Assert that every page with an anchor has its sidecars."""
    place.save()
    for page in place.pages():
        held = place.of_page(page)
        sidecars = {name for name in held if name[1] != "kv"}
        if page in with_sidecars(place):
            assert all(held[name] for name in sidecars)


def with_sidecars(place: Place) -> set[str]:
    names = (place.folder / "source").iterdir()
    return {path.name[:64] for path in names if ".mamba" in path.name}


@pytest.mark.parametrize("good", range(0, 20, 3))
def test_a_copy_into_3fs_is_completed_by_the_same_command(
    place: Place, said: Callable[..., Said], good: int
) -> None:
    source = demo_store(place.folder / "source", PAGES)
    address = place.server.url.removeprefix("http://")
    bads = {**BROKEN, **SLOW, **WRONG_COUNTS}
    for name in random.Random(SEED + good).sample(sorted(bads), 2):
        empty(place)
        script = Turning(address, good, bads[name])
        found, _ = turned(said, copying(place, source), script)
        assert found.status in (0, 3), (name, found)
        assert_no_anchor_alone(place)
        again = said(*copying(place, source)(address))
        assert again.status == 0, (name, again)
        place.save()
        assert len(place.pages()) == PAGES
        compared = said(*copying(place, source)(address), "--if-exists", "verify")
        assert (compared.status, json.loads(compared.stdout)["skipped"]) == (0, PAGES)


@pytest.mark.parametrize("index", [0, 7])
def test_a_page_that_is_given_to_several_keys_is_written_by_none(
    place: Place, said: Callable[..., Said], index: int
) -> None:
    source = demo_store(place.folder / "source", PAGES)
    empty(place)
    address = place.server.url.removeprefix("http://")
    script = Turning(address, 0, altered(numbers(index)))
    found, at = turned(said, copying(place, source), script)
    assert_refused(found, at)
    assert "gave one page to several keys" in found.stderr
    assert "may stay reserved" in found.stderr
    place.save()
    assert place.pages() == []


def test_a_page_that_no_table_has_is_not_given_back(
    place: Place, said: Callable[..., Said]
) -> None:
    """If it were, the server would hand it to an engine."""
    source = demo_store(place.folder / "source", 1)
    empty(place)
    address = place.server.url.removeprefix("http://")

    def beyond(document: dict[str, Any]) -> dict[str, Any]:
        pairs = enumerate(document["indices"])
        return {"indices": [[each[0], (1 << 62) + n] for n, each in pairs]}

    def bad(call: Call, real: Callable[[], Real]) -> None:
        (altered(beyond) if "reserve" in call.path else altered(lambda same: same))(call, real)

    found, _ = turned(said, copying(place, source), Turning(address, 0, bad))
    assert found.status == 4, found
    assert "returned a page beyond the end of the table" in found.stderr
    place.save()
    for table in place.tables().values():
        assert all(page < table["num_pages"] for page in table["free_pages"])


@pytest.mark.parametrize("verb", ["confirm_write", "reserve_and_allocate_page_indices"])
def test_pages_that_may_stay_reserved_are_counted(
    place: Place, said: Callable[..., Said], verb: str
) -> None:
    source = demo_store(place.folder / "source", PAGES)
    empty(place)
    address = place.server.url.removeprefix("http://")
    turned_bad = threading.Event()

    def bad(call: Call, real: Callable[[], Real]) -> None:
        if turned_bad.is_set() or verb in call.path:
            turned_bad.set()
            call.reset()
        else:
            passed_on(call, real())

    found, _ = turned(said, copying(place, source), Turning(address, 0, bad))
    assert found.status == 3
    assert "2 pages of 0:mamba may stay reserved" in found.stderr


@pytest.mark.parametrize("good", [0, 9, 21, 24, 26, 27, 28, 30, 32])
def test_a_repair_of_3fs_deletes_nothing_healthy(
    place: Place, said: Callable[..., Said], good: int
) -> None:
    damaged = place.pages()[1]
    (_, index), *_ = place.of_page(damaged)[0, "kv"].items()
    place.write(0, "kv", index, BFLOAT16_NAN)
    healthy = {page: place.keys_of(page) for page in place.pages() if page != damaged}
    address = place.server.url.removeprefix("http://")
    quarantine = ("--quarantine", place.folder / "q", "--repair", "quarantine", "--yes")
    bads = {**BROKEN, **WRONG_COUNTS}
    name = random.Random(SEED + good).choice(sorted(bads))

    def repairing(address: str) -> list[object]:
        return place.arguments(*quarantine, server=f"http://{address}")

    found, _ = turned(said, repairing, Turning(address, good, bads[name]))
    assert found.status in (3, 4), (name, found)
    again = said(*repairing(address))
    assert again.status in (0, 4), again
    place.save()
    assert {p: place.keys_of(p) for p in place.pages() if p != damaged} == healthy
    assert not place.of_page(damaged).get((0, "kv"))
    assert said(*place.arguments()).status == 0


# --- a Mooncake master's admin port ---


@pytest.fixture(scope="module")
def filled(mooncake_package: None) -> Iterator[Cluster]:
    with Cluster(lease_ms=200) as cluster:
        with open_store(cluster.url) as store:
            fill(store, 2)
        yield cluster


def at_admin(cluster: Cluster, command: str, folder: Path) -> Command:
    profile, pages = folder / "p.toml", folder / "pages"
    profile.write_text(dump_profile(PROFILE))
    hashes = sorted({key.split("_")[1] for key in cluster.list_keys()})
    pages.write_text(json.dumps(hashes) + "\n")
    common = ["--profile", profile, "--format", "json"]

    def arguments(address: str) -> list[object]:
        url = f"mooncake://{cluster.master}?admin={address}&protocol=tcp"
        return {
            "ls": ["ls", url, *common],
            "hits": ["hits", url, "--pages", pages, *common],
            "verify": ["verify", url, "--checks", "names,groups,sizes", "--grace", "0s", *common],
            "migrate": ["migrate", url, folder / "copy", "--dry-run", *common],
            "rm": ["rm", url, "--pages", pages, "--yes", *common],
        }[command]

    return arguments


def of_data(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Bad:
    """Return an answer with altered data about keys."""

    def changed(document: dict[str, Any]) -> dict[str, Any]:
        return {**document, "data": change(document["data"])} if document.get("data") else document

    return altered(changed)


OF_KEYS: dict[str, Bad] = {
    "other keys": of_data(lambda data: {f"{key}x": each for key, each in data.items()}),
    "a key too few": of_data(lambda data: dict(list(data.items())[1:])),
    **{
        f"{value!r} as number": of_data(numbers(value))
        for value in (0, -1, (1 << 63) - 1, 1 << 63, 1 << 62, "x", 1.5, None)
    },
}


@pytest.mark.parametrize("command", ["ls", "hits", "verify", "migrate"])
def test_a_reader_of_mooncake_is_refused_at_every_moment(
    filled: Cluster, said: Callable[..., Said], command: str, tmp_path: Path
) -> None:
    arguments = at_admin(filled, command, tmp_path)
    attack_reader(filled.admin, said, arguments, {**BROKEN, **SLOW}, most=4)
    # The last answers to hits are about keys of other topologies, of which there are none.
    good = 0 if command == "hits" else requests_of(filled.admin, said, arguments) - 1
    for bad in OF_KEYS.values():
        found, address = turned(said, arguments, Turning(filled.admin, good, bad))
        assert_refused(found, address)


@pytest.mark.parametrize("good", range(5))
def test_nothing_is_removed_from_mooncake_on_a_bad_word(
    filled: Cluster, said: Callable[..., Said], good: int, tmp_path: Path
) -> None:
    arguments, before = at_admin(filled, "rm", tmp_path), sorted(filled.list_keys())
    for bad in {**BROKEN, **OF_KEYS}.values():
        found, address = turned(said, arguments, Turning(filled.admin, good, bad))
        assert_refused(found, address)
    assert sorted(filled.list_keys()) == before


def test_an_endless_listing_is_given_up(
    filled: Cluster, said: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicachectl.backends.mooncake.master.MAX_LISTING_BYTES", 8 << 20)

    def endless(call: Call, _: Callable[[], Real]) -> None:
        call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:  # until the client closes the connection
            call.send(b"10000\r\n" + b"\n" * 0x10000 + b"\r\n")

    script = Turning(filled.admin, 2, endless)
    found, address = turned(said, at_admin(filled, "ls", tmp_path), script)
    assert_refused(found, address)
    assert "its reply to /get_all_keys is longer than 8388608 bytes" in found.stderr
