"""Listings of directories whose calls wait: many calls at once, and none that could be saved."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.testing import rows_of
from tests.bench.slow_files.mounting import slow_mount
from tests.skips import needs_root
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.slow_files.mounting import SlowMount

pytestmark = needs_root
DELAY_MS = 2.0
KNOWN_S = 1.0  # the kernel trusts names and attributes for so long
OBJECTS = 1500
MANY = 12  # calls at once; few, for a machine that has other work
KEYS = sorted(f"{page(number)}_model_0_1.bin".encode() for number in range(OBJECTS))


@pytest.fixture(scope="module", params=["flat", "folders"])
def mount(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlowMount]:
    """A slow mount with a store."""
    folder = tmp_path_factory.mktemp("slow")
    made = folder / "files"
    ObjectDirectory.create(str(made), folders=request.param == "folders" or None).close()
    with ObjectDirectory.open(str(made)) as objects:
        for key in KEYS:
            directory, name = objects.place_for_new(key)
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=directory)
            os.write(descriptor, b"abc")
            os.close(descriptor)
    with slow_mount(made, folder / "mount", DELAY_MS, attribute_seconds=KNOWN_S) as slow_files:
        yield slow_files


@pytest.fixture
def mounted(mount: SlowMount) -> SlowMount:
    """The mount, of which the kernel knows nothing any more."""
    time.sleep(1.1 * KNOWN_S)
    mount.forget_calls()
    return mount


@pytest.mark.parametrize("columns", [("nbytes", "mtime_ns"), ("nbytes", "version")])
def test_a_listing_has_many_calls_in_flight_and_one_for_each_object(
    mounted: SlowMount, columns: tuple[str, ...]
) -> None:
    with FileStore(mounted.path) as store:
        folders = len(list(store.objects.directories())) if store.objects.folders else 0
        mounted.forget_calls()
        batches = list(store.scan(columns))
    assert sorted(key for batch in batches for key in batch.column("key").to_pylist()) == KEYS
    assert all(set(batch.column("nbytes").to_pylist()) == {3} for batch in batches)
    assert mounted.most_in_flight >= MANY
    assert mounted.calls()["lookup"] <= OBJECTS + 2 * folders + 20
    assert mounted.calls()["readdir"] <= 4 + 3 * folders


def test_known_objects_are_looked_at_many_at_once(mounted: SlowMount) -> None:
    asked = [*KEYS, *(key.replace(b"_0_1", b"_1_2") for key in KEYS[:10])]
    with FileStore(mounted.path) as store:
        assert store.exists(rows_of(asked)).tolist() == [True] * OBJECTS + [False] * 10
        assert mounted.most_in_flight >= MANY
        time.sleep(1.1 * KNOWN_S)
        mounted.forget_calls()
        found = store.look(rows_of(asked))
        assert mounted.most_in_flight >= MANY
    assert sorted(found.column("key").to_pylist()) == KEYS
    assert found.column("version").null_count == 0
