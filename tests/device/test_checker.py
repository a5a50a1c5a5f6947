"""`verify --device` gives the same report as without a device, through lanes and pools."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from tests.device.devices import DEVICES, HAS_CUDA, torch

from hicachectl.backends.file.store import FileStore  # isort: skip
from hicachectl.formats.errors import DeviceError, UsageError  # isort: skip
from hicachectl.formats.keys.file import FileGrammar  # isort: skip
from hicachectl.formats.profile import dump_profile  # isort: skip
from hicachectl.device import devices  # isort: skip
from hicachectl.device.checker import DeviceChecker  # isort: skip
from hicachectl.device.devices import parse_devices  # isort: skip
from hicachectl.device.runs import DeviceRun  # isort: skip
from hicachectl.device.lanes import Lane, allocate_lanes, lane_bytes, slab_size  # isort: skip
from tests.device.providers import TorchProvider  # isort: skip
from hicachectl.formats.spec import object_specs  # isort: skip
from triton.runtime.errors import PTXASError  # isort: skip
from hicachectl.verification.request import VerifyRequest  # isort: skip
from tests.verification.in_process import verify_store  # isort: skip
from tests.checks.repeats import registered  # isort: skip
from tests.stores import OLD, page  # isort: skip
from tests.checks.value_cases import tiny  # isort: skip
from tests.kvgen import KvGenerator  # isort: skip
from tests.skips import NO_CUDA, ON_CUDA
from tests.speed import slow, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicachectl.backends.base import ReadResult
    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke
    from tests.verification.in_process import Verified

PAGES = 3
STREAM: Any = object()  # stand-in for a stream on the CPU
DEVICE = "cuda" if HAS_CUDA else "cpu"
JOBS = 4 if HAS_CUDA else 1  # Triton's interpreter works in one thread only
KINDS = ("float8_e4m3fn", "bfloat16", "fp8_scaled", "indexer", "mamba")
# The interpreter takes a third of a second for the digest of 64 bytes.
FEW: dict[str, Any] = {"pages": 2, "page_size": 1}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that maps CUDA names to a device that can run the kernels here."""

    def use(device: str) -> None:
        def named(names: tuple[str, ...]) -> list[Any]:
            return [torch.device(device)] * len(names)

        monkeypatch.setattr(devices, "cuda_devices", named)

    return use


def write_store(
    directory: Path, kind: str, pages: int = PAGES, **fields: Any
) -> tuple[Path, Profile]:
    """Write pages of a model with this kind of pool, all its pools included."""
    profile, _ = tiny(kind, **fields)
    return write_pages(directory, profile, pages), profile


def write_pages(directory: Path, profile: Profile, pages: int = PAGES) -> Path:
    store = directory / "store"
    store.mkdir(parents=True)
    for expected in object_specs(profile, "file"):
        before, after = FileGrammar().affix(expected.coordinate)
        objects = KvGenerator(expected, profile, seed=3).objects(range(pages))
        for number, content in enumerate(objects):
            put(store / f"{before}{page(number)}{after}", content.tobytes())
    (directory / "p.toml").write_text(dump_profile(profile))
    return store


def put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.utime(path, (OLD, OLD))


def verified(store: Path, profile: Profile, *names: str, **fields: Any) -> Verified:
    request = VerifyRequest(profile=profile, devices=names or ("cpu",), jobs=JOBS, **fields)
    with FileStore(store) as source:
        return verify_store(source, request)


def found(report: Verified) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report.findings.to_pylist()
    return rows


class Changing(FileStore):
    """A store that removes or cuts files after they were listed."""

    change: Callable[[], object] | None = None

    def read_into(self, *arguments: Any, **options: Any) -> ReadResult:
        change, self.change = self.change, None
        if change is not None:
            change()
        return super().read_into(*arguments, **options)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("cpu",), ("cuda",)], ids=["cpu", "device"])
@DEVICES
def test_the_bytes_of_objects_that_could_not_be_read_are_not_judged(
    tmp_path: Path, on_device: Callable[[str], None], device: str, names: tuple[str, ...]
) -> None:
    """The arena holds old bytes at their place, here NaN, which are not the store's."""
    store, profile = write_store(tmp_path, "bfloat16")
    paths = sorted(store.iterdir())
    for path in paths[:2]:  # the arena keeps these bytes
        put(path, b"\xff" * path.stat().st_size)
    on_device(device)
    request = VerifyRequest(profile=profile, devices=names, jobs=1)
    with Changing(store) as source:
        source.change = paths[0].unlink
        report = verify_store(source, request)
    expected = [f for f in found(verified(store, profile)) if f["code"] == "nan"]
    assert [f["key"] for f in expected] == [paths[1].name]
    assert [f for f in found(report) if f["code"] == "nan"] == expected
    assert all(f["key"] != paths[0].name for f in found(report))
    assert report.document["gone"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["bfloat16", *(slow(kind) for kind in KINDS if kind != "bfloat16")]
)
@DEVICES
def test_healthy_pages_are_healthy_on_the_device(
    tmp_path: Path, on_device: Callable[[str], None], device: str, kind: str
) -> None:
    store, profile = write_store(tmp_path, kind)
    on_device(device)
    report = verified(store, profile, "cuda")
    assert found(report) == []
    assert report.document["device"] == device
    assert report.document["bytes_read"] == report.document["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS[:-1], slow("mamba")])
@DEVICES
def test_findings_are_those_of_the_cpu_word_for_word(
    tmp_path: Path, on_device: Callable[[str], None], device: str, kind: str
) -> None:
    store, profile = write_store(tmp_path, kind)
    paths = sorted(store.iterdir())
    rng = np.random.default_rng(7)
    for path in paths[::2]:
        content = np.fromfile(path, np.uint8)
        first = int(rng.integers(len(content) // 16)) * 16
        content[first : first + 16] = 0xFF
        put(path, content.tobytes())
    put(paths[1], bytes(paths[1].stat().st_size))
    os.truncate(paths[-1], 100)
    os.utime(paths[-1], (OLD, OLD))
    expected = found(verified(store, profile))
    assert {row["code"] for row in expected} >= {"all-zero", "truncated"}
    on_device(device)
    assert found(verified(store, profile, "cuda")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("checks", [("repeats",), ("values", "repeats")])
@DEVICES
def test_the_host_runs_the_checks_that_have_no_kernel(
    tmp_path: Path, on_device: Callable[[str], None], device: str, checks: tuple[str, ...]
) -> None:
    """The CPU runs these on every object, whatever the device has found there."""
    store, profile = write_store(tmp_path, "bfloat16")
    paths = sorted(store.iterdir())
    for path, byte in zip(paths[:2], (b"\x11", b"\xff"), strict=True):  # a number; NaN
        put(path, byte * path.stat().st_size)
    with registered():
        expected = found(verified(store, profile, checks=checks))
        assert [row["key"] for row in expected if row["code"] == "repeated-byte"] == [
            path.name for path in paths[:2]
        ]
        on_device(device)
        report = verified(store, profile, "cuda", checks=checks)
    assert found(report) == expected
    assert report.document["device"] == device
    assert {row["code"] for row in expected} == {"repeated-byte"} | (
        {"nan"} if "values" in checks else set()
    )


@pytest.mark.slow
@DEVICES
def test_a_change_of_the_dtype_is_that_of_the_cpu(
    tmp_path: Path, on_device: Callable[[str], None], device: str
) -> None:
    """Quartiles are those of the bytes in host memory, from which the device reads."""
    store, profile = write_store(tmp_path, "float8_e4m3fn", 20)
    later = write_pages(tmp_path / "later", tiny("float8_e5m2")[0], 20)
    for path in sorted(later.iterdir())[:9]:
        put(store / path.name, path.read_bytes())
        os.utime(store / path.name, (OLD + 60, OLD + 60))
    expected = found(verified(store, profile))
    assert [row["code"] for row in expected] == ["values-changed"]
    on_device(device)
    report = verified(store, profile, "cuda")
    assert found(report) == expected
    assert report.document["device"] == device


@pytest.mark.slow
@pytest.mark.parametrize("packed", [slow(False), True])
@DEVICES
def test_drafts_go_the_same_way(
    tmp_path: Path, on_device: Callable[[str], None], device: str, packed: bool
) -> None:
    profile, _ = tiny("latent")
    kv = profile.pools[0]
    pools = (replace(kv, packed_draft_layers=1),) if packed else (kv, replace(kv, name="draft"))
    profile = replace(profile, pools=pools)
    store = write_pages(tmp_path, profile)
    damaged = sorted(path for path in store.iterdir() if packed or ".draft" in path.name)[1]
    put(damaged, damaged.read_bytes()[:-32] + b"\xff" * 32)
    expected = found(verified(store, profile))
    assert [row["key"] for row in expected] == [damaged.name]
    on_device(device)
    assert found(verified(store, profile, "cuda")) == expected


@pytest.mark.slow
@DEVICES
def test_digests_are_of_the_bytes_that_came_back_from_the_pools(
    tmp_path: Path, on_device: Callable[[str], None], device: str
) -> None:
    store, profile = write_store(tmp_path, "bfloat16", **FEW)
    foreign = store / "notes.txt"
    foreign.write_bytes(b"x" * 101)
    on_host = verified(store, profile, update_catalog=True).catalog
    on_device(device)
    report = verified(store, profile, "cuda", catalog=on_host, update_catalog=True)
    assert report.document["counts"].get("digest-mismatch") is None
    assert verified(store, profile, catalog=report.catalog).document["counts"].keys() == {
        "foreign-object"
    }
    foreign.unlink()
    path = next(store.glob(f"*{page(1)}*"))
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    report = verified(store, profile, "cuda", catalog=on_host, identity=("mtime", "size"))
    assert report.document["counts"]["digest-mismatch"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [KINDS[0], *(slow(kind) for kind in some(KINDS[1:], "fp8_scaled", "mamba"))]
)
@DEVICES
def test_digests_alone_are_those_of_the_cpu_and_nothing_is_looked_at(
    tmp_path: Path,
    on_device: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    kind: str,
) -> None:
    """The copies of the other kinds are compared on every run by the findings above."""

    def looked_at(*arguments: Any, **options: Any) -> None:
        raise AssertionError("values are looked at")

    for place in ("block_flags", "correlations"):
        monkeypatch.setattr(f"hicachectl.device.check_kernels.{place}", looked_at)
    store, profile = write_store(tmp_path, kind, pages=1, page_size=1)
    on_host = verified(store, profile, update_catalog=True).catalog
    on_device(device)
    assert found(verified(store, profile, "cuda", checks=("digests",), catalog=on_host)) == []


@pytest.mark.slow
def test_digests_alone_are_of_what_went_through_the_pools_where_the_form_is_known(
    tmp_path: Path, provided: Callable[[Any], None]
) -> None:
    class Copyless(TorchProvider):
        def copy(self, *arguments: Any) -> None:
            pass

    store, profile = write_store(tmp_path, "bfloat16", **FEW)
    known = {path.name for path in store.iterdir()}
    (store / "notes.txt").write_bytes(b"x" * 101)
    on_host = verified(store, profile, update_catalog=True).catalog
    provided(Copyless())
    rows = found(verified(store, profile, "cuda", checks=("digests",), catalog=on_host))
    assert {row["code"] for row in rows} == {"digest-mismatch"}
    assert {row["key"] for row in rows} == known


@pytest.mark.slow
@DEVICES
def test_objects_that_a_lane_does_not_hold_together_follow_one_another(
    tmp_path: Path, on_device: Callable[[str], None], device: str
) -> None:
    store, profile = write_store(tmp_path, "bfloat16")
    damaged = sorted(store.iterdir())[2]
    put(damaged, b"\xff" * damaged.stat().st_size)
    expected = found(verified(store, profile))
    on_device(device)
    one_object = lane_bytes(4096)
    report = verified(store, profile, "cuda", device_bytes=one_object)
    assert found(report) == expected


class Replaying:
    """Stand-in for a CUDA graph: launches for all slots, into the same results each time."""

    def __init__(self, launch: Callable[[int], Any], most: int) -> None:
        self.replayed, self._launch, self._most = 0, launch, most
        self.results = launch(most)

    def replay(self) -> None:
        self.replayed += 1
        self.results.copy_(self._launch(self._most))


@pytest.mark.slow  # digests, in the interpreter
@pytest.mark.skipif(HAS_CUDA, reason=ON_CUDA)
def test_what_lies_in_slots_without_an_object_is_not_reported(
    tmp_path: Path, on_device: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, profile = write_store(tmp_path, "bfloat16", **FEW)
    paths = sorted(store.iterdir())
    put(paths[0], b"\xff" * paths[0].stat().st_size)
    expected = found(verified(store, profile))
    graphs: list[Replaying] = []

    def captured(run: DeviceRun, launch: Callable[[int], Any]) -> tuple[Replaying, Any]:
        run.lane.staging.fill_(0xFF)
        graphs.append(Replaying(launch, run.most))
        return graphs[-1], graphs[-1].results

    monkeypatch.setattr(DeviceRun, "_captured", captured)
    for name in ("MOST_LANES", "_FEWEST_LANES"):
        monkeypatch.setattr(f"hicachectl.device.lanes.{name}", 1)
    on_device("cpu")
    one_lane = lane_bytes((FEW["pages"] + 1) * 4096)
    report = verified(store, profile, "cuda", device_bytes=one_lane, update_catalog=True)
    assert found(report) == expected
    assert [graph.replayed for graph in graphs] == [1, 1]
    assert found(verified(store, profile, catalog=report.catalog)) == expected


@pytest.mark.slow
@DEVICES
def test_devices_share_the_work(
    tmp_path: Path, on_device: Callable[[str], None], device: str
) -> None:
    store, profile = write_store(tmp_path, "bfloat16")
    on_device(device)
    report = verified(store, profile, "cuda:0", "cuda:1", device_bytes=lane_bytes(4096))
    assert found(report) == []


def test_a_budget_too_small_for_one_page_says_what_it_needs(
    tmp_path: Path, on_device: Callable[[str], None]
) -> None:
    store, profile = write_store(tmp_path, "bfloat16")
    on_device("cpu")
    why = r"--device-bytes 5000 is too small for one page: .*\.bin has .*; give at least"
    with pytest.raises(UsageError, match=why):
        verified(store, profile, "cuda", device_bytes=5000)
    report = verified(store, profile, "auto", device_bytes=5000)
    assert found(report) == []
    assert report.document["device"] == "cpu"
    assert "too small for one page" in report.remarks[0]


@pytest.mark.skipif(HAS_CUDA, reason=ON_CUDA)
def test_without_cuda_a_named_device_is_refused_and_auto_goes_on(
    tmp_path: Path, invoke: Invoke
) -> None:
    store, _ = write_store(tmp_path, "bfloat16")
    arguments = ["verify", store, "--profile", tmp_path / "p.toml", "--device"]
    refused = invoke(*arguments, "cuda", exit_code=2).stderr
    assert "CUDA: no usable device" in refused
    assert len(refused.splitlines()) == 1
    (empty := tmp_path / "empty").mkdir()
    assert invoke("verify", empty, *arguments[2:], "cuda", exit_code=2).stderr == refused
    outcome = invoke(*arguments, "auto", "--format", "json")
    assert outcome.document["device"] == "cpu"
    said = [line for line in outcome.stderr.splitlines() if "--device auto" in line]
    assert len(said) == 1
    assert "CUDA: no usable device" in said[0]


class Failing(TorchProvider):
    """A device that breaks after some copies, or has memory for one object only."""

    def __init__(self, good: int = 0, at_most: int | None = None, error: Any = None) -> None:
        self.good, self.at_most = good, at_most
        self.error = error or RuntimeError("CUDA error: unspecified launch failure\nmore")

    def copy(self, plan: Any, source: Any, places: Any, *rest: Any) -> None:
        self.good -= 1
        if self.good < 0 and (self.at_most is None or len(places) > self.at_most):
            raise self.error
        super().copy(plan, source, places, *rest)


@pytest.fixture
def provided(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that lets another provider copy; its copies are not captured."""

    def use(provider: Any) -> None:
        monkeypatch.setattr(
            devices, "cuda_devices", lambda names: [torch.device(DEVICE)] * len(names)
        )

        def copy(*arguments: Any) -> None:
            provider.copy(*arguments)  # looked up now, because a test may replace the method

        monkeypatch.setattr("hicachectl.device.runs.strided_copy", copy)
        if HAS_CUDA:
            monkeypatch.setattr(DeviceRun, "_captured", lambda run, launch: None)

    return use


@contextmanager
def noted_events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the events of lanes: used, failed, waited for; and that the checker is closed."""
    events: list[str] = []

    def noting(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            events.append(event)
            return call(*arguments)

        return noted

    def copied(provider: Failing, *arguments: Any) -> None:
        try:
            copy(provider, *arguments)
        except BaseException:
            events.append("failed")
            raise

    copy = Failing.copy
    with monkeypatch.context() as patch:
        patch.setattr(Failing, "copy", copied)
        patch.setattr(Lane, "wait", noting("waited", Lane.wait))
        patch.setattr(Lane, "in_use", noting("used", Lane.in_use))
        patch.setattr(DeviceChecker, "close", noting("closed", DeviceChecker.close))
        yield events


def check_each_failure_is_waited_for(events: list[str]) -> None:
    """Check that a wait follows each failure, before the lane or the arena is used again."""
    failures = [at for at, event in enumerate(events) if event == "failed"]
    assert failures
    assert {events[at + 1] for at in failures} == {"waited"}, events


@pytest.mark.slow
def test_a_device_that_fails_ends_the_run_or_leaves_the_rest_to_the_cpu(
    tmp_path: Path, provided: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, profile = write_store(tmp_path, "indexer")
    damaged = sorted(store.iterdir())[3]
    put(damaged, bytes(damaged.stat().st_size))
    expected = found(verified(store, profile))
    provided(Failing(good=1))
    why = "failed: CUDA error: unspecified launch failure;"
    with noted_events(monkeypatch) as events, pytest.raises(DeviceError, match=why):
        verified(store, profile, "cuda")
    check_each_failure_is_waited_for(events)
    provided(Failing(good=1))
    report = verified(store, profile, "auto", device_bytes=lane_bytes(16384))
    assert found(report) == expected
    assert any("The CPU did the rest: " in remark for remark in report.remarks)


@pytest.mark.slow
def test_without_memory_for_many_objects_fewer_are_sent(
    tmp_path: Path, provided: Callable[[Any], None]
) -> None:
    store, profile = write_store(tmp_path, "latent")
    error = torch.OutOfMemoryError("CUDA out of memory")
    provided(Failing(at_most=1, error=error))
    assert found(verified(store, profile, "cuda")) == []
    provided(Failing(at_most=0, error=error))
    with pytest.raises(DeviceError, match="out of memory for one page"):
        verified(store, profile, "cuda")


def streaming_lane(device: Any, slab_bytes: int) -> Lane:
    staging, pools = (torch.empty(slab_bytes, dtype=torch.uint8) for _ in range(2))
    return Lane(device, staging, pools, STREAM)


@pytest.mark.slow  # digests, in the interpreter
@pytest.mark.skipif(HAS_CUDA, reason=ON_CUDA)
def test_without_memory_to_capture_launches_they_are_made_anew_for_fewer_objects(
    tmp_path: Path, provided: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = Failing(at_most=1, error=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(Lane, "in_use", lambda lane: nullcontext())
    monkeypatch.setattr(Lane, "wait", lambda lane: None)
    monkeypatch.setattr("hicachectl.device.lanes._lane", streaming_lane)
    store, profile = write_store(tmp_path, "bfloat16", **FEW)
    on_host = verified(store, profile, update_catalog=True).catalog
    provided(provider)
    assert found(verified(store, profile, "cuda", catalog=on_host, update_catalog=True)) == []


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        CalledProcessError(1, ["gcc", "main.c"]),
        PTXASError("ptxas fatal: Value 'sm_30' is not defined"),
        RuntimeError("Cannot find ptxas"),
        FileNotFoundError(2, "No such file or directory", "/sbin/ldconfig"),
        AssertionError("libcuda.so cannot found!\nPossible files are located at []"),
    ],
)
def test_where_kernels_cannot_be_built_the_run_ends_with_the_reason(
    tmp_path: Path, provided: Callable[[Any], None], error: Exception
) -> None:
    store, profile = write_store(tmp_path, "latent")
    provided(Failing(error=error))
    with pytest.raises(DeviceError, match=r"(C compiler|gcc|ptxas|ldconfig|libcuda).*--device cpu"):
        verified(store, profile, "cuda")
    provided(Failing(error=error))
    report = verified(store, profile, "auto")
    assert found(report) == []
    assert "The CPU did the rest: " in report.remarks[0]


class Unbuilt:
    """A CUDA graph that runs out of memory when it is built from the capture."""

    def capture_begin(self, **_options: Any) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore")


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason=ON_CUDA)
def test_without_memory_to_build_a_graph_launches_are_made_anew(
    tmp_path: Path, provided: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = Failing(good=1000)
    assert found(captured_by(Unbuilt, provider, tmp_path, provided, monkeypatch)) == []
    assert provider.good < 1000


def captured_by(
    graph: type[Unbuilt],
    provider: Failing,
    folder: Path,
    provided: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Verified:
    """Verify a store on the CPU as on a device whose launches are captured in such graphs."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(Lane, "in_use", lambda lane: nullcontext())
    monkeypatch.setattr(Lane, "wait", lambda lane: None)
    monkeypatch.setattr("hicachectl.device.lanes._lane", streaming_lane)
    store, profile = write_store(folder, "latent")
    provided(provider)
    return verified(store, profile, "cuda", device_bytes=lane_bytes(16384))


class Watched(Unbuilt):
    """A capture during which a collection would be seen."""

    collects: ClassVar[list[bool]] = []

    def capture_begin(self, **_options: Any) -> None:
        self.collects.append(gc.isenabled())

    def capture_end(self) -> None:
        self.collects.append(gc.isenabled())
        super().capture_end()


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason=ON_CUDA)
def test_nothing_is_collected_during_a_capture(
    tmp_path: Path, provided: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may find graphs of an earlier run, and destroying one ends a capture."""
    provider = Failing(good=1000)
    assert found(captured_by(Watched, provider, tmp_path, provided, monkeypatch)) == []
    assert Watched.collects
    assert not any(Watched.collects)
    assert gc.isenabled()


@pytest.mark.slow
@DEVICES
def test_a_closed_checker_leaves_nothing_to_the_collector(
    tmp_path: Path,
    on_device: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
) -> None:
    """Its graphs hold device memory, and the collector may come to them late."""
    runs: list[weakref.ref[DeviceRun]] = []
    made = DeviceRun.__init__

    def note(run: DeviceRun, *arguments: Any) -> None:
        made(run, *arguments)
        runs.append(weakref.ref(run))

    monkeypatch.setattr(DeviceRun, "__init__", note)
    store, profile = write_store(tmp_path, "latent")
    on_device(device)
    gc.collect()
    gc.disable()
    try:
        assert found(verified(store, profile, "cuda")) == []
        assert runs
        assert [run for run in runs if run() is not None] == []
    finally:
        gc.enable()


def test_what_a_failed_device_has_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying its graphs would end the process."""

    def wait(lane: Lane) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    abandoned: list[object] = []
    monkeypatch.setattr("hicachectl.device.checker._ABANDONED", abandoned)
    cpu = torch.device("cpu")
    with DeviceChecker([cpu], device_bytes=1 << 22, buffer_bytes=1 << 22, largest=100) as checker:
        monkeypatch.setattr(Lane, "wait", wait)
        monkeypatch.setattr(Lane, "close", lambda lane: pytest.fail("given back"))
    assert len(abandoned) == checker.lanes


_BREAKING = """
import sys

import triton
import triton.language as tl

from hicachectl.__main__ import main
from hicachectl.device import runs


@triton.jit
def stray(memory):
    tl.store(memory + (1 << 45), 1)


copy = runs.strided_copy


def breaking(*arguments):
    copy(*arguments)
    stray[(1,)](arguments[1])  # Every later call of the device fails.


runs.strided_copy = breaking
runs.DeviceRun._captured = lambda run, launch: None
main(sys.argv[1:])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason=NO_CUDA)
@pytest.mark.parametrize(
    ("device", "status", "said"),
    [("auto", 4, "The CPU did the rest: "), ("cuda", 3, "run again or use --device cpu")],
)
def test_a_device_that_really_fails_does_not_take_the_process_with_it(
    tmp_path: Path, device: str, status: int, said: str
) -> None:
    program = tmp_path / "breaking.py"
    program.write_text(_BREAKING)
    store, _ = write_store(tmp_path, "bfloat16")
    damaged = sorted(store.iterdir())[2]
    put(damaged, b"\xff" * damaged.stat().st_size)
    arguments = ("verify", store, "--profile", tmp_path / "p.toml", "--device", device)
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr


def test_a_driver_s_complaint_is_the_reason_that_there_is_no_device(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: the driver is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    said = r"^CUDA: no usable device: .* the driver is too old; check with nvidia-smi$"
    with pytest.raises(UsageError, match=said):
        devices.cuda_devices(("auto",))
    assert not len(recwarn)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    step = f"run {sys.executable} -m pip install torch triton"
    said = f"^CUDA: no usable device: .*{package}.*; {step}$"
    with pytest.raises(UsageError, match=said):
        devices.cuda_devices(("cuda",))


def test_devices_that_are_missing_or_busy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = "^--device cuda:2: this machine has 2 CUDA devices, from cuda:0 on; name one of these$"
    with pytest.raises(UsageError, match=said):
        devices.cuda_devices(("cuda:2",))
    monkeypatch.setattr(torch, "zeros", busy)
    assert devices.cuda_devices(("cuda:1",)) == [torch.device("cuda:1")]  # not used yet
    said = "^cuda:1: not usable: CUDA error: all CUDA-.* are busy; check with nvidia-smi$"
    with pytest.raises(DeviceError, match=said):
        devices.open_devices(("cuda:1",))


def test_an_old_triton_is_refused_with_the_one_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.3.1")
    with pytest.raises(UsageError, match=r"triton 3\.3\.1 does not.*install triton>=3\.4"):
        devices.cuda_devices(("auto",))


@pytest.mark.slow
def test_a_device_that_damages_data_is_told_from_a_damaged_store(
    tmp_path: Path, provided: Callable[[Any], None]
) -> None:
    class Damaging(TorchProvider):
        def copy(self, *arguments: Any) -> None:
            super().copy(*arguments)
            arguments[3].fill_(0xFF)

    store, profile = write_store(tmp_path, "bfloat16")
    provided(Damaging())
    with pytest.raises(DeviceError, match="correct in host memory, but not on the device"):
        verified(store, profile, "cuda")


def test_lanes_stay_within_the_budget_and_grow_with_the_largest_object() -> None:
    for kind, segments in (("cpu", 0), ("cuda", 22 << 20)):
        devices = [torch.device(kind)]
        for budget, lanes in ((1 << 20, 1), (300 << 20, 4), (2 << 30, 8)):
            slab = slab_size(devices, budget, 1 << 30, 50_000, "x")
            assert lane_bytes(slab) <= budget
            assert lanes == 1 or lanes * (lane_bytes(slab) + segments) <= budget
        assert slab_size(devices, 4 << 30, 1 << 30, 77_000_000, "x") >= 77_000_000


def test_lanes_of_several_devices_leave_half_of_the_buffer_to_reading() -> None:
    devices = [torch.device("cpu")] * 3
    slab = slab_size(devices, 2 << 30, 1 << 30, 50_000, "x")
    lanes = allocate_lanes(devices, 24 * lane_bytes(slab), slab, slab)
    assert len(lanes) == 24
    assert len(lanes) * slab <= 1 << 29


def test_a_full_device_gets_fewer_lanes_then_smaller_slabs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, largest, allowed = torch.empty, 20480, 3

    def empty(nbytes: Any, **options: Any) -> Any:
        nonlocal allowed
        if nbytes > largest or not allowed:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allowed -= 1
        return real(nbytes, **options)

    monkeypatch.setattr("hicachectl.device.lanes.torch.empty", empty)
    cpu = torch.device("cpu")
    lanes = allocate_lanes([cpu], 1 << 20, 20480, 5000)
    assert [len(lane.staging) for lane in lanes] == [20480]
    largest, allowed = 12288, 1000
    lanes = allocate_lanes([cpu], 1 << 20, 20480, 5000)
    assert {len(lane.staging) for lane in lanes} == {8192}
    largest = 8191
    with pytest.raises(UsageError, match="out of memory"):
        allocate_lanes([cpu], 1 << 20, 20480, 5000)


def test_device_names() -> None:
    assert parse_devices("cpu") == ("cpu",)
    assert parse_devices("cuda:0,cuda:3") == ("cuda:0", "cuda:3")
    for wrong in ("", "gpu", "cpu,cuda", "auto,cuda:0", "cuda:x", "cuda:0,", "cuda:0,cuda:0"):
        with pytest.raises(UsageError, match="--device"):
            parse_devices(wrong)


@DEVICES
def test_an_arena_is_page_locked_until_it_is_closed(device: str) -> None:
    from hicachectl.backends.arena import Arena
    from hicachectl.device.lanes import HostArenas

    arenas = HostArenas()
    arena = Arena(1 << 20)
    tensor = arenas.tensor(arena)
    assert arenas.tensor(arena) is tensor
    assert tensor.is_pinned() == (device == "cuda")
    arena.array[5] = 7
    assert tensor[5] == 7
    arena.close()
    with Arena(1 << 20) as again:
        assert arenas.tensor(again)[5] == 0


@pytest.mark.parametrize(("error", "warnings_said"), [(0, 0), (2, 1), (712, 0)])
def test_a_refusal_to_page_lock_is_said_and_does_not_come_up_later(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
    warnings_said: int,
) -> None:
    from hicachectl.backends.arena import Arena
    from hicachectl.device.lanes import register

    kept = []

    def cuda_host_register(address: int, nbytes: int, flags: int) -> int:
        assert flags == 3
        kept.extend([error] * (error > 0))
        return error

    def launch(*arguments: Any, **options: Any) -> None:
        if kept:
            raise RuntimeError(f"CUDA error: {kept.pop()}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    undone = []
    current = [1]
    cudart = SimpleNamespace(
        cudaHostRegister=cuda_host_register,
        cudaHostUnregister=lambda address: undone.append((address, current[-1])),
    )

    @contextmanager
    def device(number: int) -> Iterator[None]:
        current.append(number)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch, "ones", launch)
    caplog.set_level(logging.WARNING)  # an earlier test may have run the command line with -q
    with Arena(4096) as arena:
        register(arena)
        address = arena.address
        current.append(0)  # as if the main thread closes what a lane's thread registered
    assert kept == []
    assert undone == ([] if error else [(address, 1)])
    assert len(caplog.records) == warnings_said


def test_a_buffer_of_the_host_grows_with_what_is_put_there() -> None:
    from hicachectl.device.lanes import HostBuffer

    buffer = HostBuffer()
    for shape in ((3, 32), (0,), (5000, 32), (2,)):
        room = buffer.room(torch.Size(shape), torch.float32)
        assert (room.shape, room.dtype) == (shape, torch.float32)
        room.fill_(1.5)
        assert (room == 1.5).all()
    buffer.close()


def test_a_checker_gives_its_lanes_back() -> None:
    cpu = torch.device("cpu")
    with DeviceChecker([cpu], device_bytes=1 << 22, buffer_bytes=1 << 22, largest=100) as checker:
        assert checker.names == ("cpu",)
        assert checker.lanes >= 1
