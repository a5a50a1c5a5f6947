"""Power failures at every system call of the commands that write.

Each command runs once, recorded. Then every state that it may leave on the disk is checked: see
`crash_states`. Further tests leave out each kind of sync and check that this is found.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from tests.power import hf3fs_writers, migration_writers, pack_writers, repair_writers, writers
from tests.power.replaying import (
    found_by_looking,
    found_by_recovering,
    missed_without_syncs,
)
from tests.small_file_system import small_file_system
from tests.speed import seed_of_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hf3fs_server import MetadataServer
    from tests.power.recording import Recording
    from tests.power.writers import Writer

pytestmark = pytest.mark.slow

Recorded = tuple["Writer", "Recording"]


def _params() -> list[Any]:
    """Group tests by writer, so that one process records a writer once."""
    types: tuple[type[Writer], ...] = (
        *migration_writers.WRITERS,
        *repair_writers.WRITERS,
        writers.Notes,
        *pack_writers.WRITERS,
        *hf3fs_writers.WRITERS,
    )
    return [
        pytest.param(type_, id=type_.__name__, marks=pytest.mark.xdist_group(type_.__name__))
        for type_ in types
    ]


@pytest.fixture(scope="module", params=_params())
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorded]:
    writer: Writer = request.param(tmp_path_factory.mktemp("power"))
    elsewhere = getattr(writer, "elsewhere", None)
    with nullcontext() if elsewhere is None else small_file_system(elsewhere, "16m"):
        yield writer, writer.record()


def test_no_state_is_wrong(recorded: Recorded) -> None:
    assert list(found_by_looking(*recorded, seed_of_run())) == []


def test_the_next_run_completes_the_work(recorded: Recorded) -> None:
    assert found_by_recovering(*recorded, seed_of_run()) == []


def test_a_missing_sync_is_found(recorded: Recorded) -> None:
    """Each kind of sync that the command needs is left out once."""
    assert missed_without_syncs(*recorded) == []


def test_3fs_is_told_of_what_is_durable(tmp_path: Path, metadata_server: MetadataServer) -> None:
    writer = hf3fs_writers.PageWrites(tmp_path, metadata_server)
    recording = writer.record()
    assert list(found_by_looking(writer, recording, seed_of_run())) == []
    assert missed_without_syncs(writer, recording) == []
