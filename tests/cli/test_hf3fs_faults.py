"""3FS stores whose server fails or whose pages are reused during a command."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Profiled
from hicachectl.cli.demo_store import PROFILE, fill
from tests.backends.http_scripts import serving
from tests.hf3fs_places import BFLOAT16_NAN, PAGES, Place
from tests.hf3fs_server import MetadataServer
from tests.paused import paused
from tests.speed import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.paused import Ended

QUICK_S = 30
LIST = "hicachectl.backends.hf3fs.metadata:MetadataClient.exists"
READ = "hicachectl.backends.hf3fs.store:Hf3fsStore.read_into"
READ_AGAIN = "hicachectl.backends.hf3fs.store:Hf3fsStore.read_confirmed"
TABLES = "hicachectl.backends.hf3fs.store:Hf3fsStore.table_state"
CONFIRM = "hicachectl.backends.hf3fs.store:Hf3fsStore.confirm"
DELETE = "hicachectl.backends.hf3fs.metadata:MetadataClient.delete"
REPAIR = ("--repair", "delete", "--yes")


@pytest.fixture
def place(tmp_path: Path, metadata_server: MetadataServer) -> Place:
    return Place(tmp_path, metadata_server)


@pytest.fixture
def mortal(tmp_path: Path, sglang_python: Path) -> Iterator[Place]:
    """A place with a private server, which the test may kill."""
    with MetadataServer(sglang_python) as server:
        yield Place(tmp_path, server)


def met(place: Place, call: str, number: int, then: Callable[[], object], *more: object) -> Ended:
    """Verify a store and run a function right before a call."""
    with paused(place.folder / "paused", call, number, *place.arguments(*more)) as run:
        then()
        ended = run.resumed()
    assert "Traceback" not in ended.stderr
    assert ended.seconds < QUICK_S
    return ended


def document_of(ended: Ended, exit_code: int = 0) -> dict[str, Any]:
    assert ended.code == exit_code, ended
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def found_in(document: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return the findings, except that the snapshot is older than the file, as after any write."""
    found = [(each["code"], each["key"]) for each in document["findings"]]
    return [each for each in found if each[0] != "snapshot-stale"]


def assert_lost(ended: Ended) -> None:
    """Assert exit code 3, an empty stdout and one line on stderr."""
    assert (ended.code, ended.stdout) == (3, ""), ended
    said = [line for line in ended.stderr.splitlines() if line.startswith("hicachectl:")]
    assert len(said) == 1, ended.stderr
    assert "metadata server" in said[0]


def lines_of(text: str) -> list[str]:
    assert "Traceback" not in text
    return text.splitlines()


# --- pages that are reused during a read ---


def test_a_page_reused_between_listing_and_reading_is_gone(place: Place) -> None:
    page = place.pages()[1]
    document = document_of(met(place, READ, 1, lambda: place.reuse(page)))
    assert found_in(document) == []
    assert document["gone"] == place.keys_of(page)


def test_a_page_that_moved_is_gone_though_its_keys_are_there(place: Place) -> None:
    """The page is evicted, another overwrites its indices, and it is stored again elsewhere."""
    page = place.pages()[1]

    def move() -> None:
        place.reuse(page)
        place.store_again(page)

    ended = met(place, READ, 1, move)
    document = document_of(ended)
    assert found_in(document) == []
    assert (
        document["gone"] == 4
    )  # the overwritten objects, which looked damaged: K and V of two ranks
    assert "8 queries for keys that looked damaged counted as use" in ended.stderr


def test_a_page_reused_while_it_is_looked_at_again_is_gone(place: Place) -> None:
    page = place.pages()[1]
    (key, index), *_ = place.of_page(page)[0, "kv"].items()
    place.write(0, "kv", index, BFLOAT16_NAN)
    document = document_of(met(place, READ_AGAIN, 1, lambda: place.reuse(page)))
    assert found_in(document) == []
    assert not place.server.exists(0, [key])[0]


def test_tables_that_were_wrong_for_a_moment_are_no_finding(place: Place) -> None:
    """Two keys share a page in the snapshot, but the server answers with two other pages."""
    first, second = (key for key, _ in place.tables()["0:kv"]["key_to_index"][:2])
    shared = dict(place.tables()["0:kv"]["key_to_index"])[first]
    place.server.confirm(0, [(second, shared)])
    place.save()

    def mend() -> None:
        indices = [index for _, index in place.server.reserve(0, ["a", "b"])]
        place.server.confirm(0, list(zip((first, second), indices, strict=True)))

    document = document_of(met(place, CONFIRM, 1, mend, "--checks", "groups"))
    assert found_in(document) == [("page-leaked", None)]  # the first page of `second`


def test_a_catalog_begun_while_all_was_evicted_is_of_use_later(
    place: Place, invoke: Invoke
) -> None:
    """The catalog has no records, so objects stored later are new to it."""
    pages = place.pages()
    for page in pages:
        place.evict(page)
    invoke(*place.arguments(*place.recording), "--allow-empty")
    with open_store(place.url()) as store:
        assert isinstance(store, Profiled)
        store.use_profile(PROFILE)
        fill(store, PAGES)
    place.save()
    document = invoke(*place.arguments(*place.recording)).document
    assert found_in(document) == []
    assert document["objects"] == sum(map(place.keys_of, pages))


def test_what_is_damaged_is_found_though_other_pages_are_reused(place: Place) -> None:
    damaged, reused, *_ = place.pages()
    (key, index), *_ = place.of_page(damaged)[0, "kv"].items()
    place.write(0, "kv", index, BFLOAT16_NAN)
    document = document_of(met(place, READ, 1, lambda: place.reuse(reused)), exit_code=4)
    assert found_in(document) == [("nan", f"0:kv:{key}")]


# --- the server ---


@pytest.mark.parametrize(
    ("call", "number"), some([(LIST, 1), (LIST, 3), (READ, 1), (READ, 2)], (LIST, 3), (READ, 1))
)
def test_a_server_killed_during_verify_ends_it(mortal: Place, call: str, number: int) -> None:
    assert_lost(met(mortal, call, number, mortal.server.kill, *mortal.recording))
    assert not (mortal.folder / "catalog.parquet").exists()


def test_a_server_killed_before_suspects_are_confirmed_ends_it(mortal: Place) -> None:
    index = mortal.tables()["0:kv"]["key_to_index"][0][1]
    mortal.write(0, "kv", index, BFLOAT16_NAN)
    assert_lost(met(mortal, READ_AGAIN, 1, mortal.server.kill))


def test_a_server_killed_during_a_repair_leaves_what_it_has_not_deleted(mortal: Place) -> None:
    index = mortal.tables()["0:kv"]["key_to_index"][0][1]
    mortal.write(0, "kv", index, BFLOAT16_NAN)
    ended = met(mortal, DELETE, 1, mortal.server.kill, *REPAIR)
    assert ended.code == 3, ended
    mortal.server.start()
    assert mortal.server.saved() == mortal.tables()


def test_a_server_restarted_from_an_older_snapshot_makes_pages_gone_not_damaged(
    mortal: Place,
) -> None:
    """Between listing and reading, the server forgets the newer half and frees its pages."""
    known = mortal.tables()
    kept = mortal.pages()[:3]
    forgotten = 0
    for table in known.values():
        entries = table["key_to_index"]
        table["key_to_index"] = [each for each in entries if each[0][:64] in kept]
        lost = [index for key, index in entries if key[:64] not in kept]
        table["free_pages"] += lost
        forgotten += len(lost)

    def restart() -> None:
        mortal.server.kill()
        mortal.server.snapshot.write_text(json.dumps(known))
        mortal.server.start()
        mortal.save()

    document = document_of(met(mortal, READ, 1, restart, *mortal.recording))
    assert found_in(document) == []
    assert document["gone"] == forgotten > 0


def test_a_server_restarted_without_its_snapshot_is_said_to_have_no_table(mortal: Place) -> None:
    def restart() -> None:
        mortal.server.kill()
        mortal.server.snapshot.unlink()
        mortal.server.start()

    ended = met(mortal, READ, 1, restart, *mortal.recording)
    assert_lost(ended)
    assert "has no table" in ended.stderr


def test_a_server_that_answers_wrongly_is_one_clear_line(place: Place, invoke: Invoke) -> None:
    """tests/backends/hf3fs/test_metadata.py has other wrong answers."""
    with serving(lambda call: call.answer(b"\xff\x00 this is no JSON {")) as address:
        started = time.monotonic()
        url = f"http://{address}"
        for command in (place.arguments(server=url), ["ls", place.url(url)]):
            out = invoke(*command, exit_code=3)
            assert out.stdout == ""
            (line,) = lines_of(out.stderr)
            assert address in line
        assert time.monotonic() - started < QUICK_S


def cut(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize("server", [None, ""], ids=["server", "alone"])
def test_a_snapshot_that_cannot_be_read_is_bad_input(
    place: Place, invoke: Invoke, server: str | None
) -> None:
    """tests/backends/hf3fs/test_snapshot.py has other snapshots."""
    before = cut(place.snapshot.read_text())
    place.snapshot.write_text(before)
    for command in (place.arguments(*REPAIR, server=server), ["ls", place.url(server)]):
        out = invoke(*command, exit_code=2)
        assert out.stdout == ""
        (line,) = lines_of(out.stderr)
        assert str(place.snapshot) in line
    assert place.snapshot.read_text() == before


def test_a_snapshot_that_breaks_during_a_run_is_bad_input(place: Place) -> None:
    def truncate() -> None:
        place.snapshot.write_text(cut(place.snapshot.read_text()))

    ended = met(place, TABLES, 2, truncate)
    assert (ended.code, ended.stdout) == (2, ""), ended
    assert "cut short" in ended.stderr


def test_an_absent_data_file_fails_its_objects_alone(place: Place, invoke: Invoke) -> None:
    path = place.file(1, "kv")
    path.unlink()
    out = invoke(*place.arguments(), exit_code=4)
    lines_of(out.stderr)
    document = out.document
    lost = {f"1:kv:{key}" for key, _ in place.tables()["1:kv"]["key_to_index"]}
    assert {each["key"] for each in document["findings"] if each["key"]} == lost
    assert all(str(path) in each["detail"] for each in document["findings"] if each["key"] in lost)
    assert not path.exists()
