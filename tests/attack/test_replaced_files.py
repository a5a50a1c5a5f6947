"""Files of a store are replaced during reads: no torn page arrives anywhere."""

from __future__ import annotations

import json
import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.attack.children import run
from tests.move.migrations import demo_store, profile_file

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 5


class Replacer(threading.Thread):
    """A thread that keeps replacing the files of a store by rename, as SGLang writes them."""

    def __init__(self, store: Path, values: dict[str, tuple[bytes, bytes]]) -> None:
        super().__init__()
        self.done = threading.Event()
        self.store, self.values = store, values

    def run(self) -> None:
        turn = 0
        while not self.done.is_set():
            turn += 1
            for name, value in self.values.items():
                temporary = self.store / f".{uuid.uuid4().hex}.tmp"
                temporary.write_bytes(value[turn % 2])
                temporary.replace(self.store / name)


@pytest.mark.parametrize("to", ["directory", "pack", "profile"])
def test_each_object_arrives_as_one_of_its_values(tmp_path: Path, to: str) -> None:
    store = demo_store(tmp_path / "store")
    values = {path.name: (data := path.read_bytes(), data[::-1]) for path in store.glob("*.bin")}
    profile = profile_file(tmp_path / "p.toml")
    replacer = Replacer(store, values)
    replacer.start()
    try:
        for number in range(ROUNDS):
            target = tmp_path / f"new{number}"
            url = f"pack://{target}.hcpack" if to == "pack" else str(target)
            options = ["--profile", profile] if to == "profile" else []
            done = run("migrate", store, url, "--format", "json", *options, home=tmp_path)
            assert done.returncode in (0, 4), done.stderr
            assert "Traceback" not in done.stderr
            if to == "pack":
                run("migrate", url, target, home=tmp_path)
            for path in target.glob("*.bin"):
                assert path.read_bytes() in values[path.name], path.name
    finally:
        replacer.done.set()
        replacer.join()


def test_no_finding_of_a_healthy_store_whose_files_are_replaced(tmp_path: Path) -> None:
    store = demo_store(tmp_path / "store")
    data = {path.name: path.read_bytes() for path in store.glob("*.bin")}
    replacer = Replacer(store, {name: (value, value) for name, value in data.items()})
    profile = profile_file(tmp_path / "p.toml")
    replacer.start()
    try:
        for _ in range(ROUNDS):
            done = run("verify", store, "--profile", profile, "--format", "json", home=tmp_path)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["findings"] == []
    finally:
        replacer.done.set()
        replacer.join()
