"""Trailers written into a store that SGLang's own classes use meanwhile.

HiCacheFile and the plug-in read every page of a prompt again and again, while adoptions are killed.
In the second test HiCacheFile writes and evicts, and two adoptions run at once.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.trailer import TRAILER_BYTES, parse_trailer
from tests.conformance.busy_store import BusyStore, lines
from tests.conformance.cpu_server import KEY, prompt
from tests.conformance.plugin_site import Site, full_hit, is_whole
from tests.conformance.store_cases import PLUGIN_CASES
from tests.killed import Runner
from tests.small_file_system import small_file_system
from tests.speed import chance_of_run
from tests.test_readme import manual_blocks
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conformance.cpu_server import Answer, CpuServer
    from tests.conftest import Invoke
    from tests.killed import Unit

pytestmark = pytest.mark.conformance

KILLS = 50
PAGES = 24
PROMPTS = 6
ADOPTIONS = 6
PROMPTS_OF_SERVER = (prompt(61), prompt(62))
ALONE: dict[str, Any] = {"tp": 1}
WEIGHTS = "weights of the tests"
BUFFER_BYTES = 1 << 20
BLOCK_BYTES = 4096
SIDE_BYTES = 64 << 10  # markers and statuses of the plug-in


class Adopted:
    """A store that HiCacheFile has written, and the command that gives it trailers."""

    def __init__(
        self, session: SglangSession, folder: Path, store: Path, case: str, pages: int = PAGES
    ) -> None:
        self.store = store
        self.request = {"case": case, "profile": ALONE, "pages": pages, "seed": 0}
        settings = {"file_storage_path": str(store)}
        written = {**self.request, "backend": "file", "settings": settings, "steps": ["write"]}
        (report,) = session.ask("plugin_ranks", written)
        assert report["error"] == ""
        self.objects = self.files()
        self.age()
        profile = {**PLUGIN_CASES[case].deployments[0].profile, **ALONE, "weights": WEIGHTS}
        (folder / "profile.json").write_text(json.dumps(profile))
        self.command = (
            "migrate", store, store, "--profile", folder / "profile.json", "--trailers", "write",
            "--buffer-bytes", BUFFER_BYTES, "--grace", "0s", "--format", "json",
        )  # fmt: skip

    def files(self) -> dict[str, bytes]:
        """Return the bytes of each object's file."""
        return {path.name: path.read_bytes() for path in self.store.glob("*.bin")}

    def age(self) -> None:
        for path in self.store.glob("*.bin"):
            os.utime(path, (1.7e9, 1.7e9))

    def restore(self) -> None:
        """Take the trailers away again, so that readers find each file whole at every moment."""
        for name, data in self.objects.items():
            temporary = self.store / ".restored.tmp"
            temporary.write_bytes(data)
            os.utime(temporary, (1.7e9, 1.7e9))
            temporary.replace(self.store / name)

    def bare(self) -> set[str]:
        """Return the names of files without a trailer; check the bytes of all."""
        found = self.files()
        assert found.keys() == self.objects.keys()
        for name, data in found.items():
            payload = self.objects[name]
            assert data[: len(payload)] == payload, name
            assert len(data) in (len(payload), len(payload) + TRAILER_BYTES), name
            if len(data) > len(payload):
                assert parse_trailer(data[len(payload) :]) is not None, name
        return {name for name, data in found.items() if data == self.objects[name]}

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.store.glob(".*.tmp"))

    def used(self, backend: str, role: str, **more: Any) -> dict[str, Any]:
        """Return the question for a script that uses the store."""
        plug_in = {"store": f"file://{self.store}", "unstamped": "read"}
        settings = plug_in if backend == "dynamic" else {"file_storage_path": str(self.store)}
        settings |= more.pop("settings", {})
        return {**self.request, "backend": backend, "role": role, "settings": settings, **more}


class Room:
    """The least room of a file system, looked at every few milliseconds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ended = threading.Event()
        self.at_first = self.least = self._free()

    def _free(self) -> int:
        space = os.statvfs(self._directory)
        return space.f_bfree * space.f_frsize

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.least = min(self.least, self._free())


@pytest.mark.parametrize("case", ["mla_indexer", "hybrid_mamba"])
def test_every_page_is_readable_at_every_moment_whatever_is_killed(
    sglang_session: SglangSession, invoke: Invoke, tmp_path: Path, case: str
) -> None:
    chance, words = chance_of_run()
    kills = KILLS // 2  # of each case
    with (
        small_file_system(tmp_path / "disk", "64m") as disk,
        Runner(tmp_path) as runner,
    ):
        adopted = Adopted(sglang_session, tmp_path, disk / "store", case)
        whole = runner.run(*adopted.command, home=tmp_path)
        assert whole.document["objects"] == len(adopted.objects)
        adopted.restore()
        room = Room(disk)
        done = 0
        with (
            BusyStore(sglang_session, "", {}, tmp_path / "servers") as servers,
            room.watched(),
        ):
            logs = [servers.use(adopted.used(one, "read")) for one in ("file", "dynamic")]
            servers.wait_until(lambda: all(lines(log) for log in logs))
            while done < kills:
                unit: Unit = "bytes" if done % 2 else "steps"
                total = whole.written if unit == "bytes" else whole.steps
                kill = (unit, chance.randint(1, total // 3))
                run = runner.run(*adopted.command, home=tmp_path, kill=kill)
                left = adopted.bare()
                if run.killed:
                    done += 1
                else:
                    assert run.document["complete"], words
                    assert left == set(), words
                    adopted.restore()
            document = runner.run(*adopted.command, home=tmp_path).document
            before = [len(lines(log)) for log in logs]
            servers.wait_until(
                lambda: all(len(lines(log)) > n + 1 for log, n in zip(logs, before, strict=True))
            )
            servers.stop()
        assert document["complete"], words
        assert (adopted.bare(), adopted.leftovers()) == (set(), []), words
        for log in logs:
            every = lines(log)
            wrong = [one for one in every if one["pages"] != PAGES or one["wrong"]]
            assert wrong == [], words
            assert all(count for one in every for count in one["trailing"].values()), words
        growth = room.at_first - room.least
        trailers = len(adopted.objects) * BLOCK_BYTES
        assert growth <= BUFFER_BYTES + trailers + SIDE_BYTES, words
        refusing = adopted.used("dynamic", "read", settings={"unstamped": "refuse"})
        (report,) = sglang_session.ask("plugin_ranks", {**refusing, "steps": ["read"]})
        (step,) = report["steps"]
        assert (step["pages"], step["wrong"]) == (PAGES, {}), report
        found = invoke.document("verify", adopted.store, "--profile", tmp_path / "profile.json")
        assert found["findings"] == []


def test_a_server_writes_and_evicts_beside_two_adoptions(
    sglang_session: SglangSession, tmp_path: Path
) -> None:
    """No byte is wrong, and at the end every whole page has its trailers."""
    every = _all_prompts(sglang_session, tmp_path / "all")
    adopted = Adopted(sglang_session, tmp_path, tmp_path / "store", "mla_indexer", pages=8)
    most = sum(map(len, every.values())) // 2
    filling = adopted.used("file", "fill", prompts=PROMPTS, settings={"max_size": most})
    documents: list[dict[str, Any]] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        Runner(tmp_path / "one") as one,
        Runner(tmp_path / "two") as two,
        BusyStore(sglang_session, "", {}, tmp_path / "servers") as servers,
    ):
        log = servers.use(filling)
        servers.wait_until(lambda: len(lines(log)) > PROMPTS)

        def adopt(runner: Runner, *options: str) -> None:
            for _ in range(ADOPTIONS):
                # The server may have evicted the kv of every page at the moment of a listing.
                run = runner.run(*adopted.command, "--allow-empty", *options, home=tmp_path)
                documents.append(json.loads(run.stdout))

        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(adopt, one), pool.submit(adopt, two, "--include-partial")]
        assert [run.result() for run in runs] == [None, None]
        servers.stop()
        last = one.run(*adopted.command, home=tmp_path).document
    assert last["complete"]
    assert last["failed"] == 0
    adopted.objects = {name: every[name] for name in adopted.files()}
    halves = {page for page, count in _counted(adopted.objects).items() if count < 2}
    # Half a page has trailers, too, if it was adopted before the server evicted the other half.
    assert adopted.bare() <= {name for name in adopted.objects if name[:64] in halves}
    assert adopted.leftovers() == []
    assert min(sum(one[name] for one in documents) for name in ("pages", "gone")) > 0
    assert len(every) > len(adopted.objects)
    assert any(count == 2 for count in _counted(adopted.objects).values())


@pytest.mark.xdist_group("sglang-server")
def test_a_server_moves_to_the_plug_in_with_all_its_pages(
    cpu_server: CpuServer,
    tiny_model: Path,
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the commands of hicachectl-plugin(7)."""
    site, profile = Site(cpu_server, tmp_path / "hicache"), tmp_path / "prod.toml"
    places = {
        "/mnt/hicache": str(site.directory),
        "prod.toml": str(profile),
        "MODEL": str(tiny_model),
        "http://127.0.0.1:30000": cpu_server.url,
    }
    monkeypatch.setenv("HICACHECTL_API_KEY", KEY)
    (block,) = [text for text in manual_blocks("hicachectl-plugin.7") if "--trailers" in text]
    for name, here in places.items():
        block = block.replace(name, here)
    commands = [shlex.split(line)[1:] for line in block.splitlines()]
    commands[1].append("--yes")
    cpu_server.attach("file", {"file_storage_path": str(site.directory)})
    answers = [_stored(site, PROMPTS_OF_SERVER[0])]
    for command in commands:
        invoke(*command)
    assert all(map(is_whole, site.files(PROMPTS_OF_SERVER[0])))
    warm = site.warm(PROMPTS_OF_SERVER[0])  # HiCacheFile reads files with trailers
    assert (warm.storage, warm.same(answers[0])) == (full_hit(PROMPTS_OF_SERVER[0]), True)
    answers.append(_stored(site, PROMPTS_OF_SERVER[1]))
    cpu_server.detach()
    site.attach()
    invoke(*commands[-1])
    for tokens, cold in zip(PROMPTS_OF_SERVER, answers, strict=True):
        warm = site.warm(tokens)
        assert (warm.storage, warm.same(cold)) == (full_hit(tokens), True)


def _stored(site: Site, tokens: list[int]) -> Answer:
    """Answer a prompt, and wait until HiCacheFile has stored its pages."""
    answer = site.server.generate(tokens)
    wait_until(lambda: all(path.exists() for path in site.files(tokens)))
    return answer


def _counted(objects: Iterable[str]) -> Counter[str]:
    """Return the number of objects of each page."""
    return Counter(name[:64] for name in objects)


def _all_prompts(session: SglangSession, directory: Path) -> dict[str, bytes]:
    """Return the files that HiCacheFile writes of all prompts."""
    settings = {"file_storage_path": str(directory)}
    for seed in range(PROMPTS):
        request = {"case": "mla_indexer", "profile": ALONE, "pages": 8, "seed": seed}
        written = {**request, "backend": "file", "settings": settings, "steps": ["write"]}
        (report,) = session.ask("plugin_ranks", written)
        assert report["error"] == ""
    return {path.name: path.read_bytes() for path in directory.glob("*.bin")}
