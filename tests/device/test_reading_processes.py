"""`verify --device` with forked processes that read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.device.devices import DEVICES, HAS_CUDA, torch

from hicachectl.backends.base import Limits  # isort: skip
from hicachectl.backends.file.store import FileStore  # isort: skip
from hicachectl.device import devices  # isort: skip
from hicachectl.device.checker import DeviceChecker  # isort: skip
from hicachectl.device.lanes import lane_bytes  # isort: skip
from hicachectl.formats.errors import DeniedError, UsageError  # isort: skip
from hicachectl.verification.request import VerifyRequest  # isort: skip
from tests.device.test_checker import found, put, verified, write_store  # isort: skip
from tests.verification.in_process import verify_store  # isort: skip
from tests.skips import ON_CUDA
from tests.waiting import PATIENCE_S, alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.backends.base import ReadResult
    from hicachectl.formats.profile import Profile
    from tests.verification.in_process import Verified

PAGES = 6
# One lane, which holds one small object: the interpreter works in one thread only.
ONE_LANE = lane_bytes(8192)

# In this process, the tests of a CUDA device have started CUDA.
stands_in = pytest.mark.skipif(HAS_CUDA, reason=ON_CUDA)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU examine what was read for the device: the interpreter is slow."""
    monkeypatch.setattr(DeviceChecker, "examine", lambda *_arguments: None)


class Noting(FileStore):
    """A store that notes which process reads, and how many objects."""

    notes: Path
    before: Callable[[], object] = staticmethod(lambda: None)

    def read_into(self, rows: Any, *arguments: Any, **options: Any) -> ReadResult:
        with self.notes.open("a") as stream:
            stream.write(f"{os.getpid()} {len(rows)}\n")
        self.before()
        return super().read_into(rows, *arguments, **options)


class Unforkable(Noting):
    """A store whose reads need threads of this process."""

    limits = Limits(batch_objects=256, batch_bytes=1 << 20, parallel_reads=2)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Use the stand-in, as if there were three processors; yield the processes that are started.

    None of them is left at the end.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(devices, "cuda_devices", lambda names: [torch.device("cpu")] * len(names))
    pids: list[int] = []
    fork = os.fork

    def noted() -> int:
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", noted)
    yield pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def read_by(
    cls: type[Noting], store: Path, profile: Profile, *, device: str = "cuda", **fields: Any
) -> tuple[Verified, Counter[int]]:
    """Verify a store for a device; return also the objects that each process read."""
    options = {"jobs": 3, "device_bytes": ONE_LANE} | fields
    request = VerifyRequest(profile=profile, devices=(device,), **options)
    with cls(store) as source:
        source.notes = store.parent / "notes"
        source.notes.write_text("")
        report = verify_store(source, request)
    counts = Counter[int]()
    for line in source.notes.read_text().splitlines():
        pid, objects = map(int, line.split())
        counts[pid] += objects
    return report, counts


def damage(store: Path) -> None:
    """Make an object that is short, one with values that are no numbers, and one of zeros."""
    paths = sorted(store.iterdir())
    put(paths[1], b"\xff" * paths[1].stat().st_size)
    put(paths[3], paths[3].read_bytes()[:-1])
    put(paths[-1], bytes(paths[-1].stat().st_size))


@stands_in
@pytest.mark.slow
def test_processes_read_all_and_findings_are_those_of_the_cpu(
    tmp_path: Path, forks: list[int]
) -> None:
    store, profile = write_store(tmp_path, "latent", PAGES)
    damage(store)
    expected = found(verified(store, profile))
    assert {row["code"] for row in expected} == {"all-zero", "nan", "truncated"}
    report, counts = read_by(Noting, store, profile)
    assert found(report) == expected
    assert report.document["device"] == "cpu"
    assert len(forks) == 3
    assert counts.keys() <= set(forks)
    assert counts.total() == PAGES


@stands_in
@pytest.mark.slow
def test_digests_are_of_what_processes_read(tmp_path: Path, forks: list[int]) -> None:
    store, profile = write_store(tmp_path, "bfloat16", 2, page_size=1)
    on_host = verified(store, profile, update_catalog=True).catalog
    changed = sorted(store.iterdir())[1]
    facts, content = changed.stat(), bytearray(changed.read_bytes())
    content[9] ^= 1
    changed.write_bytes(content)
    os.utime(changed, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    report, counts = read_by(
        Noting,
        store,
        profile,
        checks=("digests",),
        catalog=on_host,
        identity=("mtime", "size"),
        device_bytes=lane_bytes(4096),
    )
    (row,) = found(report)
    assert (row["code"], row["key"]) == ("digest-mismatch", changed.name)
    assert counts.keys() <= set(forks)


@stands_in
@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_a_process_that_is_killed_ends_the_run_with_the_remedy(
    tmp_path: Path, forks: list[int]
) -> None:
    class Fatal(Noting):
        before = staticmethod(lambda: os.kill(os.getpid(), signal.SIGKILL))

    store, profile = write_store(tmp_path, "latent", PAGES)
    with pytest.raises(UsageError, match=r"signal 9 \(Killed\).*--buffer-bytes"):
        read_by(Fatal, store, profile)
    assert len(forks) == 3


@stands_in
@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_an_error_of_a_process_is_the_caller_s(tmp_path: Path, forks: list[int]) -> None:
    class Denied(Noting):
        @staticmethod
        def before() -> None:
            raise DeniedError("the object: cannot read it")

    store, profile = write_store(tmp_path, "latent", PAGES)
    with pytest.raises(DeniedError, match=r"^the object: cannot read it$"):
        read_by(Denied, store, profile)
    assert len(forks) == 3


@stands_in
@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_ctrl_c_ends_the_processes(tmp_path: Path, forks: list[int]) -> None:
    def interrupt(_nbytes: int, _total: int) -> None:
        raise KeyboardInterrupt

    store, profile = write_store(tmp_path, "latent", PAGES)
    request = VerifyRequest(profile=profile, devices=("cuda",), jobs=3, device_bytes=ONE_LANE)
    with FileStore(store) as source, pytest.raises(KeyboardInterrupt):
        verify_store(source, request, on_read=interrupt)
    assert len(forks) == 3


@stands_in
@pytest.mark.slow
def test_processes_read_on_while_a_thread_is_at_the_device(
    tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are threads for all processes, besides one for each lane."""
    notes, most = tmp_path / "notes", 0

    def examine(*_arguments: object) -> None:
        nonlocal most
        with alone:
            if not most:
                with suppress(AssertionError):
                    wait_until(lambda: notes.read_text().count("\n") == 4, patience_s=10)
                most = notes.read_text().count("\n")

    alone = threading.Lock()
    monkeypatch.setattr(DeviceChecker, "examine", examine)
    store, profile = write_store(tmp_path, "latent", PAGES)
    assert found(read_by(Noting, store, profile)[0]) == []
    assert most == 4
    assert len(forks) == 3


@stands_in
@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_a_rate_and_a_time_limit_hold_for_processes(tmp_path: Path, forks: list[int]) -> None:
    """The first task passes at once, and the time for the second never comes."""
    store, profile = write_store(tmp_path, "latent", PAGES)
    report, counts = read_by(Noting, store, profile, bytes_per_second=1, time_limit_seconds=3)
    assert report.document["complete"] is False
    assert counts.total() == 1
    assert len(forks) == 3


@stands_in
@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("why", ["jobs", "store", "cuda", "fork"])
def test_threads_read_where_processes_cannot(
    tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    if why == "cuda":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    elif why == "fork":
        monkeypatch.setattr(os, "fork", refuse)
    store, profile = write_store(tmp_path, "latent", PAGES)
    cls = Unforkable if why == "store" else Noting
    report, counts = read_by(cls, store, profile, jobs=1 if why == "jobs" else 3)
    assert found(report) == []
    assert counts == {os.getpid(): PAGES}
    assert forks == []


def test_without_a_device_no_process_is_left_and_this_one_reads(
    tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_names: tuple[str, ...]) -> Any:
        raise UsageError("CUDA: no usable device; check with nvidia-smi")

    def note() -> None:
        left.extend(pid for pid in forks if alive(pid))

    left: list[int] = []
    monkeypatch.setattr(devices, "cuda_devices", missing)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(Noting, "before", staticmethod(note))
    store, profile = write_store(tmp_path, "latent", PAGES)
    report, counts = read_by(Noting, store, profile, device="auto")
    assert report.document["device"] == "cpu"
    assert report.remarks[0].startswith("--device auto uses the CPU: CUDA: no usable device")
    assert counts == {os.getpid(): PAGES}
    assert len(forks) == 3
    assert left == []


ROOT = Path(__file__).parents[2]
_COUNTING = """
import os
import sys

import tests.device.devices as here

from hicachectl.__main__ import main
from hicachectl.device import devices

if not here.HAS_CUDA:
    devices.cuda_devices = lambda names: [here.torch.device("cpu")] * len(names)

fork = os.fork


def counted():
    assert not here.torch.cuda.is_initialized()
    pid = fork()
    if pid:
        print("forked", pid, file=sys.stderr, flush=True)
    return pid


os.fork = counted
os.sched_getaffinity = lambda process: {0, 1, 2}
main(sys.argv[1:])
"""


def command(folder: Path, *options: str) -> list[str]:
    """Return a command that verifies the folder's store on a device, and tells what it forks."""
    given = ("--profile", folder / "p.toml", "--device", "cuda", "--device-bytes", ONE_LANE)
    words = map(str, ("verify", folder / "store", *given))
    return [sys.executable, "-c", _COUNTING, *words, *options]


@pytest.mark.slow
@DEVICES
def test_the_command_forks_before_it_starts_the_device(tmp_path: Path, device: str) -> None:
    store, profile = write_store(tmp_path, "latent", PAGES)
    damage(store)
    done = subprocess.run(
        command(tmp_path, "--format", "json"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert len(re.findall(r"^forked \d+$", done.stderr, re.MULTILINE)) == 3, done.stderr
    document = json.loads(done.stdout)
    assert document["device"].startswith(device)
    expected = verified(store, profile).document
    assert document["counts"] == expected["counts"]


@pytest.mark.slow
@DEVICES
def test_ctrl_c_in_a_terminal_ends_the_command_and_its_processes(
    tmp_path: Path, device: str
) -> None:
    """The terminal signals all of them; the command waits for a time that never comes."""
    write_store(tmp_path, "latent", PAGES)
    run = subprocess.Popen(
        command(tmp_path, "--bwlimit", "1"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert run.stderr is not None
    pids = [int(run.stderr.readline().split()[1]) for _ in range(3)]
    assert all(map(alive, pids))
    os.killpg(run.pid, signal.SIGINT)
    said = run.stderr.read()
    run.stderr.close()
    assert run.wait(PATIENCE_S) == 130, said
    assert not any(map(alive, pids))
