"""--jobs: no command makes more calls at once to a store than it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.bench.slow_files.mounting import slow_mount
from tests.skips import needs_root
from tests.speed import slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.bench.slow_files.mounting import SlowMount
    from tests.conftest import Invoke

pytestmark = needs_root
DELAY_MS = 1.0
PAGES = 40
ALL = ("--before", "2100-01-01")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[SlowMount]:
    """A directory whose calls wait."""
    backing = tmp_path / "backing"
    backing.mkdir()
    with slow_mount(backing, tmp_path / "mount", 0) as mounted:
        yield mounted


class Commands:
    """Commands on a store of a slow directory, and their most calls at once."""

    def __init__(self, invoke: Invoke, mount: SlowMount, local: Path, jobs: int) -> None:
        """Make the store. local: a directory that is not there yet, and does not wait."""
        self._invoke, self._mount, self._local, self._jobs = invoke, mount, local, jobs
        self.store = mount.path / "store"
        invoke("demo", self.store, "--pages", PAGES)
        self._profile = ("--profile", self.store / ".hicachectl" / "demo.toml")

    def most(self, command: str, *words: Any, exit_code: int = 0) -> int:
        """Run a command; return the most calls that were in flight."""
        self._mount.delay_ms = DELAY_MS
        self._mount.forget_calls()
        self._invoke(*command.split(), *words, "--jobs", self._jobs, exit_code=exit_code)
        self._mount.delay_ms = 0
        return self._mount.most_in_flight

    def all(self) -> Iterator[tuple[str, int]]:
        """Run each command; yield its name and its most calls."""
        store, local, profile = self.store, self._local, self._profile
        copy = self._mount.path / "copy"
        yield "ls", self.most("ls", store)
        page = self._invoke("ls", store, "--format", "json").document["pages"][0]["page"]
        yield "show", self.most("show", store, page, *profile)
        yield "verify", self.most("verify", store, *profile)
        yield "report", self.most("report", store, *profile, "-o", local.with_name("r.html"))
        yield "migrate from", self.most("migrate", store, local, *profile)
        yield "migrate to", self.most("migrate", local, copy, *profile)
        yield "diff", self.most("diff", local, copy, *profile)
        for path in sorted(copy.glob("*.bin"))[::3]:
            path.unlink()
        repair = ("--repair", "quarantine", "--grace", "0s", "--yes")
        yield "repair", self.most("verify", copy, *profile, *repair, exit_code=4)
        yield "list", self.most("quarantine list", copy)
        yield "restore", self.most("restore", copy, copy, "--yes", *profile)
        yield "rm", self.most("rm", copy, "--yes", *ALL)


@pytest.mark.parametrize("jobs", [slow(1), slow(8)])
def test_no_command_makes_more_calls_at_once(
    invoke: Invoke, mount: SlowMount, tmp_path: Path, jobs: int
) -> None:
    """With --jobs 1 one call follows the other; with more, objects are read and copied at once."""
    most = dict(Commands(invoke, mount, tmp_path / "local", jobs).all())
    assert {name: calls for name, calls in most.items() if calls > jobs} == {}
    for name in ("verify", "migrate from", "migrate to"):
        assert most[name] > jobs // 2, name
