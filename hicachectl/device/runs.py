"""Scatter objects into the device memory of a lane, check them there, and gather them back.

A lane is a stream with the memory for one slab (`device.lanes`). The objects of a slab have one
form: one pool, and equal tensors, padding layers and checks.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from hicachectl.checks.registry import resolved
from hicachectl.checks.tables import stored_layers
from hicachectl.device.lanes import MOST_OBJECTS
from hicachectl.device.plans import PoolForm, pool_form
from hicachectl.formats.copyplan import VECTOR_BYTES
from hicachectl.kernels.blake3_triton import Ranges, digest_ranges, ranges_of
from hicachectl.kernels.copy_triton import strided_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.checks.registry import ValueCheck
    from hicachectl.checks.values import ValueChecker
    from hicachectl.device.lanes import Lane
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec


T = TypeVar("T")

_CAPTURES = threading.Lock()
POISON = 0xA5  # byte that fills staging before the gather
_SEED = 20_011  # seed of the random page slots, which are scattered, as those of a server are


class DeviceKernel(Protocol):
    """The device part of a value check, for one form on one lane and for one thread at a time."""

    def __init__(self, spec: ObjectSpec, profile: Profile, run: DeviceRun) -> None:
        """Compute and upload the inputs of the launches. Raises torch.OutOfMemoryError."""

    @staticmethod
    def supports(spec: ObjectSpec, profile: Profile, pools: PoolForm) -> bool:
        """Return whether the kernel supports objects of the spec. If not, the CPU checks them."""

    def launch(self, count: int) -> Sequence[torch.Tensor]:
        """Check the first `count` objects in the pools. Return results, each [count, width].

        Does not synchronise. A launch is captured and replayed, so it may depend only on `count`.
        """

    def suspects(self, seen: Sequence[npt.NDArray[Any]]) -> BoolArray:
        """Return flags [count, 2] from the results on the host.

        Column 0 says whether the CPU must check the object. Column 1 says whether the object surely
        has an issue. If the CPU then finds no issue, the device damages data (DeviceError).
        """


def form_of(expected: ObjectSpec, checker: ValueChecker | None) -> Hashable:
    """Return the key of an object's form. Ranks with equal forms share prepared runs."""
    if checker is None:
        return expected.tensors
    stored = stored_layers(expected, checker.profile)
    padding = tuple(layer is None for layer in stored)
    return expected.coordinate.pool, expected.tensors, padding, tuple(checker.prepared)


class ObjectForm:
    """Form of objects that lie `step` bytes apart. Thread-safe.
    kernels: kernel of each check that has one; empty without a checker.
    supported: whether all kernels support such objects.
    """

    def __init__(self, expected: ObjectSpec, checker: ValueChecker | None, step: int) -> None:
        self.step = step
        self.nbytes = expected.nbytes
        self.pools = pool_form(expected.tensors)
        self.kernels: dict[ValueCheck, Callable[[DeviceRun], DeviceKernel]] = {}
        self.supported = True
        if checker is None:
            return
        for check in checker.prepared:
            if check.kernel is not None:
                kernel: type[DeviceKernel] = resolved(check.kernel)
                self.kernels[check] = partial(kernel, expected, checker.profile)
                self.supported &= kernel.supports(expected, checker.profile, self.pools)


class DeviceRun:
    """Inputs, kernels and captured launches of a lane, for slabs of one form.

    One thread may use them at a time.
    most: number of objects that fit into the lane.
    slots: [most] int64 on the device, the page slot of each object.
    pools: the device pools of the form, which are slices of `lane.pools`.

    On a CUDA device, launches are captured once, for `most` objects, and replayed for every slab.
    Results of unused slots are dropped. On other devices, the kernels are launched for the objects
    of each slab alone.
    """

    def __init__(self, form: ObjectForm, lane: Lane) -> None:
        """Compile the kernels, and upload their inputs. Raises torch.OutOfMemoryError."""
        self.most = min(
            MOST_OBJECTS,
            len(lane.staging) // form.step,
            len(lane.pools) // form.pools.page_bytes,
        )
        self.lane, self.pools = lane, form.pools
        self._form = form
        most, device = self.most, lane.device
        self.slots = torch.from_numpy(np.random.default_rng(_SEED).permutation(most)).to(device)
        self._places = torch.arange(most, device=device) * (form.step // VECTOR_BYTES)
        self._plans = form.pools.plans(most)
        self._kernels = [kernel(self) for kernel in form.kernels.values()]
        # Dtype and width of each kernel's results, recorded by the launch.
        self._seen: list[list[tuple[np.dtype[Any], int]]] = []
        self._ranges = self._digestible(most)
        self._digesting: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = None
        self._checking = self._captured(self._launch_checks)

    def close(self) -> None:
        """Free the captured launches and the kernels.

        The kernels refer to this run, and the run to the kernels, so neither is freed by itself.
        """
        self._kernels.clear()
        self._checking = self._digesting = None

    def prepare_digests(self) -> None:
        """Compile and capture the gather and the digest, once."""
        if self._digesting is None:
            self._digesting = self._captured(self._launch_digests)

    def start_checks(self, count: int) -> torch.Tensor:
        """Scatter the objects of the staging buffer into the pools and launch the checks.

        Returns the results for `suspects`, on the host. They are valid after `lane.wait()`.
        """
        if self._checking is None:
            return self.lane.to_host("seen", self._launch_checks(count))
        graph, seen = self._checking
        graph.replay()
        return self.lane.to_host("seen", seen)

    def start_digests(self, count: int) -> torch.Tensor:
        """Fill the staging buffer with POISON, gather the objects from the pools and digest them.

        Returns the digests on the host. They are valid after `lane.wait()`.
        """
        if self._digesting is None:
            return self.lane.to_host("digests", self._launch_digests(count))
        graph, results = self._digesting
        graph.replay()
        return self.lane.to_host("digests", results[:count])

    def suspects(self, seen: torch.Tensor, count: int) -> BoolArray:
        """Return flags [count, 2] from results of the checks; see `DeviceKernel`."""
        found = np.zeros((count, 2), dtype=np.bool_)
        launched = count if self._checking is None else self.most
        packed, start = seen.numpy(), 0
        for kernel, types in zip(self._kernels, self._seen, strict=True):
            tensors = []
            for dtype, width in types:
                stop = start + launched * width * dtype.itemsize
                tensor = packed[start:stop].view(dtype).reshape(launched, width)
                tensors.append(tensor[:count])
                start = stop
            found |= kernel.suspects(tensors)
        return found

    def scatter(self, count: int) -> None:
        """Scatter the first staged objects into the pools."""
        staging, pools = self.lane.staging, self.lane.pools
        for plan in self._plans:
            strided_copy(plan, staging, self._places[:count], pools, self.slots[:count])

    def _launch_checks(self, count: int) -> torch.Tensor:
        """Scatter and check objects. Return all results as bytes, for one copy to the host."""
        self.scatter(count)
        results = [kernel.launch(count) for kernel in self._kernels]
        self._seen = [[(_numpy_type(t), t.numel() // count) for t in seen] for seen in results]
        packed = [t.reshape(-1).view(torch.uint8) for seen in results for t in seen]
        return torch.cat([torch.empty(0, dtype=torch.uint8, device=self.lane.device), *packed])

    def _launch_digests(self, count: int) -> torch.Tensor:
        staging, pools = self.lane.staging, self.lane.pools
        staging[: count * self._form.step].fill_(POISON)
        for plan in self._plans:
            back = plan.reversed()
            strided_copy(back, pools, self.slots[:count], staging, self._places[:count])
        ranges = self._ranges if count == self.most else self._digestible(count)
        return digest_ranges(staging, ranges)

    def _digestible(self, count: int) -> Ranges:
        offsets = np.arange(count, dtype=np.int64) * self._form.step
        sizes = np.full(count, self._form.nbytes, dtype=np.int64)
        return ranges_of(self.lane.staging, offsets, sizes, upload=self.lane.to_device)

    def _captured(self, launch: Callable[[int], T]) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """Capture launches for all slots, after a first run that compiles them.

        Returns None if capture is impossible, or if memory is short. Each slab then launches the
        kernels for its own objects, which needs less memory. No other thread may use the device
        during a capture.
        """
        lane = self.lane
        if lane.stream is None:
            return None
        kept = len(lane.graphs)
        try:
            launch(self.most)
            lane.wait()
            torch.cuda.empty_cache()  # the graph allocates its own memory
            graph = torch.cuda.CUDAGraph()
            # After a device failure, `checker._ABANDONED` keeps the lane, and so its graphs.
            lane.graphs.append(graph)
            with _capturing(graph, lane):
                results = launch(self.most)
        except RuntimeError as error:  # torch.OutOfMemoryError, or CUDA's while building the graph
            if "out of memory" not in str(error):
                raise
            del lane.graphs[kept:]
            return None
        return graph, results


def _numpy_type(tensor: torch.Tensor) -> np.dtype[Any]:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, lane: Lane) -> Iterator[None]:
    with _nothing_collected():
        graph.capture_begin(pool=lane.graph_memory, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first error, raised below, has the cause
                graph.capture_end()
            raise
        graph.capture_end()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Stop Python's collector, which would end a capture if it destroyed a graph in this thread."""
    # Without the lock, the first of two captures to end would start the collector too early.
    with _CAPTURES:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
