"""Leaked pages of a live 3FS store: three snapshots must agree."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.base import open_store
from hicachectl.checks import page_tables as table_checks
from hicachectl.checks.findings import combine
from hicachectl.checks.page_tables import check_tables, saved_tables
from tests.backends.hf3fs.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store
    from tests.hf3fs_server import MetadataServer


@pytest.fixture
def place(tmp_path: Path, metadata_server: MetadataServer) -> Place:
    place = Place(metadata_server, tmp_path / "hicache")
    place.create()
    place.server.save()
    return place


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with open_store(place.url) as store:
        yield store


def leaked(
    place: Place, store: Store, between: Callable[[], object], then: Callable[[], object] | None
) -> tuple[list[str], str | None]:
    """Return the details about leaked pages in two snapshots, and the reason if not judged.

    between: runs between the snapshots. then: runs before a third, which is saved while the check
    waits; None: no third is saved.
    """
    before = saved_tables(store)
    between()
    place.server.save()
    seen = threading.Event()

    def save_again() -> None:
        seen.wait(30)
        if then is not None:
            then()
            place.server.save()

    saver = threading.Thread(target=save_again)
    saver.start()
    real = table_checks._next_state

    def wait(*arguments: Any) -> Any:
        seen.set()
        return real(*arguments)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table_checks, "_next_state", wait)
            found, why = check_tables(store, before, grace_seconds=60)
    finally:
        seen.set()
        saver.join()
    details = combine(found).column("detail").to_pylist()
    return [detail for detail in details if "neither free nor held" in detail], why


def test_a_page_that_a_third_snapshot_misses_too_is_leaked(place: Place, store: Store) -> None:
    place.server.reserve(0, ["lost"])
    place.server.save()
    found, why = leaked(place, store, lambda: None, lambda: None)
    assert why is None
    (detail,) = found
    assert detail.startswith("1 of 64 pages of 0:kv")


def test_a_page_that_was_in_flight_in_two_snapshots_is_no_finding(
    place: Place, store: Store
) -> None:
    ((_, index),) = place.server.reserve(0, ["slow"])
    place.server.save()
    found, why = leaked(
        place, store, lambda: None, lambda: place.server.confirm(0, [("slow", index)])
    )
    assert (found, why) == ([], None)


def test_without_a_third_snapshot_it_is_said_that_nothing_is_known(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_checks, "_MOST_WAIT_S", 0.5)
    place.server.reserve(0, ["lost"])
    place.server.save()
    found, why = leaked(place, store, lambda: None, None)
    assert found == []
    assert why is not None
    assert "no third" in why


def test_where_two_snapshots_agree_on_nothing_none_is_waited_for(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_checks, "_next_state", None)
    before = saved_tables(store)
    place.server.reserve(0, ["new"])
    place.server.save()
    found, why = check_tables(store, before, grace_seconds=60)
    assert len(combine(found)) == 0
    assert why is None
