"""Check objects on devices instead of the CPU, for `verify --device`."""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager, suppress
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

import numpy as np
import torch
from triton.errors import TritonError

from hicachectl.backends.disk.io import Closing
from hicachectl.device.lanes import MOST_OBJECTS, HostArenas, allocate_lanes, slab_size
from hicachectl.device.runs import DeviceRun, ObjectForm, form_of
from hicachectl.formats.catalog import DIGEST_BYTES
from hicachectl.formats.errors import DeviceError
from hicachectl.kernels.blake3_triton import digest_ranges, ranges_of

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.checks.registry import ValueCheck, ValueIssue
    from hicachectl.checks.values import ValueChecker
    from hicachectl.device.lanes import Lane
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.io.pipeline import Loaded

    Digests = npt.NDArray[np.uint8]

# Lanes of failed devices, and their runs. They are kept until the process exits, because the
# destruction of their CUDA graphs would end it.
_ABANDONED: list[tuple[Lane, dict[tuple[Lane, ObjectForm], DeviceRun]]] = []


class DeviceChecker(Closing):
    """Digest and value checks on one or several devices.

    names: names of the devices.
    slab_bytes: largest number of bytes of a task, gaps between its objects in the arena included.
    most_objects: largest number of objects of a task.
    lanes: number of lanes of all devices.
    failure: message of the first device failure; None if no device has failed.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        device_bytes: int,
        buffer_bytes: int,
        largest: int,
        largest_name: str = "an object",
        falls_back: bool = False,
    ) -> None:
        """Allocate all device memory of the run.

        device_bytes: memory to use on each device.
        largest: bytes of the largest object.
        largest_name: name of the largest object, for messages.
        falls_back: whether `examine` returns None after a device failure. If not, it raises
            DeviceError.
        Raises UsageError if the largest object does not fit.
        """
        slab = slab_size(devices, device_bytes, buffer_bytes, largest, largest_name)
        lanes = allocate_lanes(devices, device_bytes, slab, max(1, largest))
        self.names = tuple(dict.fromkeys(str(lane.device) for lane in lanes))
        self.slab_bytes = len(lanes[0].staging)
        self.most_objects = MOST_OBJECTS
        self.lanes = len(lanes)
        self.failure: str | None = None
        self._falls_back = falls_back
        self._free: queue.Queue[Lane] = queue.Queue()
        for lane in lanes:
            self._free.put(lane)
        self._arenas = HostArenas()
        self._preparing = threading.Lock()
        self._forms: dict[Hashable, ObjectForm] = {}
        self._runs: dict[tuple[Lane, ObjectForm], DeviceRun] = {}
        self._prepared: set[tuple[ObjectForm, bool]] = set()

    def examine(
        self,
        loaded: Loaded,
        wanted: BoolArray,
        expected: ObjectSpec | None,
        checker: ValueChecker | None,
    ) -> tuple[Digests, list[ValueIssue]] | None:
        """Send the objects of a task through a device, and return digests [n, 32] and issues.

        wanted: [n] bool, whether to digest the object.
        expected: spec of all objects; None if it is unknown. With a spec, the device unpacks the
            objects into pools, gathers them back, and digests the gathered bytes. Without a spec,
            the device digests the objects as they are.
        checker: value checks of the spec; None to check no values. Unreadable objects get no
            issues.

        Returns None if the CPU must examine the objects in the arena. This is so if a kernel does
        not support them, if the device has nothing to do, or if a device has failed and
        `falls_back` is set. Without `falls_back`, a device failure raises DeviceError.
        """
        if self.failure is not None or not loaded.task.capacities[0]:
            return None
        form = None if expected is None else self._form(expected, checker, _step(loaded))
        if form is not None and not form.supported:
            return None
        if not (wanted.any() or (form is not None and form.kernels)):
            return None
        digests = np.zeros((len(wanted), DIGEST_BYTES), dtype=np.uint8)
        try:
            flags = self._flags(loaded, wanted, form, digests)
            issues = []
            if form is not None and checker is not None:
                issues = _issues(loaded, checker, form.kernels, flags)
        except DeviceError as error:
            if not self._falls_back:
                raise
            if self.failure is None:
                self.failure = str(error)
            return None
        return digests, issues

    def _flags(
        self, loaded: Loaded, wanted: BoolArray, form: ObjectForm | None, digests: Digests
    ) -> BoolArray:
        """Run a task, in halves if memory is short. Fill in `digests`, and return flags [n, 2].

        wanted: [n] bool, whether to digest the object.
        """
        flags = np.zeros((len(wanted), 2), dtype=np.bool_)
        slabs = [(0, len(wanted))]
        while slabs:
            start, stop = slabs.pop()
            try:
                flags[start:stop] = self._on_device(loaded, start, stop, wanted, form, digests)
            except torch.OutOfMemoryError as error:
                if stop - start < 2:
                    raise DeviceError(
                        "CUDA is out of memory for one page; free device memory, give a smaller "
                        "--device-bytes, or use --device cpu"
                    ) from error
                middle = (start + stop) // 2
                slabs += [(middle, stop), (start, middle)]
        return flags

    def _on_device(
        self,
        loaded: Loaded,
        start: int,
        stop: int,
        wanted: BoolArray,
        form: ObjectForm | None,
        digests: Digests,
    ) -> BoolArray:
        """Run a slab through a lane. Fill in `digests`, and return flags [stop - start, 2].

        start, stop: half-open range of the slab's objects in the task.
        """
        step, count = _step(loaded), stop - start
        chosen = np.flatnonzero(wanted[start:stop])
        if form is not None:
            self._prepare(form, digests=len(chosen) > 0)
        with self._lane() as lane, lane.in_use():
            first = int(loaded.offsets[start])
            nbytes = (count - 1) * step + int(loaded.task.capacities[stop - 1])
            run = None if form is None else self._runs[lane, form]
            host = self._arenas.tensor(loaded.arena)[first : first + nbytes]
            lane.staging[:nbytes].copy_(host, non_blocking=True)
            launched = None if run is None else run.start_checks(count)
            made = None
            if len(chosen) and run is not None:
                made = run.start_digests(count)
            elif len(chosen):
                sizes = loaded.task.capacities[start:stop]
                offsets = np.arange(count) * step
                ranges = ranges_of(lane.staging, offsets, sizes, upload=lane.to_device)
                made = lane.to_host("digests", digest_ranges(lane.staging, ranges))
            lane.wait()
            if made is not None:
                digests[start + chosen] = made.numpy()[chosen]
            if run is None or launched is None:
                return np.zeros((count, 2), np.bool_)
            return run.suspects(launched, count)

    def _prepare(self, form: ObjectForm, *, digests: bool) -> None:
        """Compile and capture the launches for objects of a form on every lane, with their inputs.

        No other thread may use the devices during a capture, so this thread takes all lanes.
        digests: whether to prepare the launches that digest, too.
        """
        if (form, digests) in self._prepared:
            return
        with self._preparing:
            if (form, digests) in self._prepared:
                return
            lanes = [self._free.get() for _ in range(self.lanes)]
            try:
                for lane in lanes:
                    with _named_errors(lane), lane.in_use():
                        run = self._runs.get((lane, form))
                        if run is None:
                            run = self._runs[lane, form] = DeviceRun(form, lane)
                        if digests:
                            run.prepare_digests()
                        lane.wait()
            finally:
                for lane in lanes:
                    self._free.put(lane)
            self._prepared |= {(form, False), (form, digests)}

    def _form(self, expected: ObjectSpec, checker: ValueChecker | None, step: int) -> ObjectForm:
        key = (form_of(expected, checker), step)
        if key not in self._forms:  # if two threads race, the first form stays
            self._forms.setdefault(key, ObjectForm(expected, checker, step))
        return self._forms[key]

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        lane = self._free.get()
        try:
            with _named_errors(lane):
                yield lane
        except BaseException:
            # The copy may still read the objects in the arena, so wait for its end. The wait fails
            # if the device has failed, but such a device no longer reads the arena.
            with suppress(RuntimeError):
                lane.wait()
            raise
        finally:
            self._free.put(lane)

    def close(self) -> None:
        """Free the device memory, but keep the memory of a failed device, see _ABANDONED."""
        while not self._free.empty():
            lane = self._free.get_nowait()
            mine = {place: run for place, run in self._runs.items() if place[0] is lane}
            try:
                lane.wait()
                for place, run in mine.items():
                    del self._runs[place]
                    run.close()
                mine.clear()
                lane.close()
            except RuntimeError:
                _ABANDONED.append((lane, mine))
        self._runs.clear()
        self._forms.clear()
        if torch.cuda.is_available() and not _ABANDONED:
            torch.cuda.empty_cache()


# If an error of torch, CUDA or Triton has one of these words, it is about a device or its tools.
_DEVICE_SIGNS = ("CUDA", "C compiler", "ptxas", "libcuda")


@contextmanager
def _named_errors(lane: Lane) -> Iterator[None]:
    """Raise DeviceError for an error of a lane's device. A lack of memory is raised unchanged."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TritonError, CalledProcessError, OSError) as error:  # compilers raise these
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise DeviceError(
            f"{lane.device}: cannot build kernels: {reason}; install a C compiler, Python's "
            "headers and a triton that supports the device, or use --device cpu"
        ) from error
    except (RuntimeError, AssertionError) as error:
        if not any(sign in str(error) for sign in _DEVICE_SIGNS):
            raise  # a defect of hicachectl, not a device failure
        reason = str(error).partition("\n")[0]
        raise DeviceError(
            f"{lane.device} failed: {reason}; run again or use --device cpu"
        ) from error


def _step(loaded: Loaded) -> int:
    """Return the bytes from one object of a task to the next. The objects have equal sizes."""
    offsets = loaded.offsets
    if len(offsets) > 1:
        return int(offsets[1] - offsets[0])
    return -(-max(1, int(loaded.task.capacities[0])) // 4096) * 4096


def _issues(
    loaded: Loaded, checker: ValueChecker, on_device: Collection[ValueCheck], flags: BoolArray
) -> list[ValueIssue]:
    """Run the checks that the device leaves to the CPU, on the bytes in the arena.

    on_device: checks that ran on the device. The CPU repeats these checks only for suspects.
    flags: [n, 2], whether an object is suspect, and whether the CPU must find an issue in it.
    Raises DeviceError if the CPU finds no issue in such an object.
    """
    others = checker.prepared.keys() - on_device
    every = np.flatnonzero(loaded.read.ok) if others else np.zeros(0, dtype=np.int64)
    suspects = np.flatnonzero(flags[:, 0] & loaded.read.ok)
    issues = checker.check(loaded.block(), suspects, on_device)
    found = {issue.index for issue in issues}
    for index in np.flatnonzero(flags.all(axis=1) & loaded.read.ok).tolist():
        if index not in found:
            raise DeviceError(
                f"Object {index} of a batch: correct in host memory, but not on the device, so the "
                "device or the transfer damages data; test the device, and use --device cpu"
            )
    return issues + checker.check(loaded.block(), every, others)
