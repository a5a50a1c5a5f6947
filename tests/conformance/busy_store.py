"""A store that SGLang's own backends read and write while a test works on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.processes import Closing
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession, Started

PATIENCE_S = 600  # SGLang takes minutes on a busy machine


class BusyStore(Closing):
    """Scripts of SGLang that use a store until they are stopped."""

    def __init__(
        self, session: SglangSession, place: str | Path, manifest: Manifest, folder: Path
    ) -> None:
        folder.mkdir()
        self._session, self._folder = session, folder
        until = str(folder / "stop")
        self._question = {"place": str(place), "manifest": manifest, "until": until}
        self._scripts: list[Started] = []

    def serve(self, role: str, rank: int, **more: int) -> Path:
        """Start a rank that writes, fills or reads (live_store.py); return its log."""
        return self._start("live_store", role=role, rank=rank, **more)

    def poll(self, backend: str) -> Path:
        """Start a process that polls the store (poll_store.py); return its log."""
        return self._start("poll_store", backend=backend)

    def use(self, question: dict[str, Any]) -> Path:
        """Start a rank that reads or fills the store (use_adopted.py); return its log."""
        return self._start("use_adopted", **question)

    def _start(self, script: str, **more: object) -> Path:
        name = f"{script}-{len(self._scripts)}"
        log = self._folder / f"{name}.jsonl"
        question = {**self._question, **more, "log": str(log)}
        self._scripts.append(self._session.start(script, question, self._folder / f"{name}.err"))
        return log

    def wait_until(self, done: Callable[[], object]) -> None:
        """Wait for a condition, while all scripts run."""

        def is_done() -> bool:
            assert all(script.is_alive for script in self._scripts), self._said()
            return bool(done())

        wait_until(is_done, "SGLang does not come so far", PATIENCE_S)

    def stop(self) -> None:
        """End all scripts, which must have had no error."""
        (self._folder / "stop").touch()
        assert not any(script.wait() for script in self._scripts), self._said()
        self._scripts.clear()

    def close(self) -> None:
        """Kill the scripts that still run."""
        for script in self._scripts:
            script.kill()

    def _said(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self._folder.glob("*.err"))


def lines(log: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a script's log."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if "\n" in line]
