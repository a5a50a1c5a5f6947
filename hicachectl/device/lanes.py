"""The memory of a run: device memory, which lanes divide, and host memory that devices can use."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hicachectl.backends.arena import ALIGNMENT, Arena
from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.cuda import _POOL_HANDLE

_LOG = logging.getLogger(__name__)

# All devices may use memory of cudaHostRegisterPortable. Kernels may read memory of
# cudaHostRegisterMapped.
_FLAGS = 0x01 | 0x02
_ALREADY_REGISTERED = 712

# Largest slab. The larger a slab is, the less Python code runs for each byte. The arena and
# `--device-bytes` mostly allow only smaller slabs.
SLAB_BYTES = 256 << 20
MOST_LANES = 8  # most lanes of a device; reads, copies and kernels overlap even with fewer
_FEWEST_LANES = 4  # slabs are made smaller, so that a device gets at least this many lanes
MOST_OBJECTS = 4096  # most objects of a task, which groups small objects
# A lane needs up to a third of a slab for tables and temporary results, in addition to staging and
# pools. Digests take 32 bytes per KiB, and checks take 8 bytes per block.
_EXTRA_SHARE = 3
# Least memory that torch allocates for temporary results: one segment for small results, and one
# segment for large results.
_SEGMENTS_BYTES = 22 << 20


# --- host memory ---
class HostArenas:
    """Host tensors over arenas. Thread-safe.

    An arena is page-locked from its first use until it closes. If the system refuses this
    (RLIMIT_MEMLOCK), copies work, but are slower.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[int, torch.Tensor] = {}

    def tensor(self, arena: Arena) -> torch.Tensor:
        """Return an arena's bytes as a host tensor without a copy, page-locked if possible."""
        with self._lock:
            known = self._tensors.get(id(arena))
            if known is None:
                known = torch.from_numpy(arena.array)
                self._tensors[id(arena)] = known
                arena.at_close(lambda: self._forget(arena))
                register(arena)
            return known

    def _forget(self, arena: Arena) -> None:
        with self._lock:
            del self._tensors[id(arena)]


class HostBuffer:
    """A small page-locked buffer that grows as needed. One thread at a time may use it.

    torch's pinned memory would not do. Its destructor queries the device, and after a device
    failure, this query ends the process.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a tensor. The tensor takes the place of the previous tensor.
        Copies from and to the previous tensor must be complete.
        """
        nbytes = shape.numel() * dtype.itemsize
        if self._arena is None or self._arena.nbytes < nbytes:
            self.close()
            self._arena = Arena(max(nbytes, 1))
            register(self._arena)
        return torch.from_numpy(self._arena.array)[:nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Free the memory."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def register(arena: Arena) -> None:
    """Page-lock and map an arena's memory for all devices until it is closed, if CUDA can."""
    if not torch.cuda.is_available():
        return
    error = torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, _FLAGS)
    if not int(error):
        device = torch.cuda.current_device()
        arena.at_close(lambda: _unregister(arena.address, device))
        return
    if int(error) != _ALREADY_REGISTERED:
        _LOG.warning(
            "Cannot page-lock the buffer of %d bytes (CUDA error %d), so copies to the device are "
            "slower; raise the limit of locked memory (ulimit -l)",
            arena.nbytes,
            int(error),
        )
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")  # takes the error, which the next launch would report


def _unregister(address: int, device: int) -> None:
    """Undo `register` on the same device, because CUDA would create a context on another."""
    with suppress(RuntimeError), torch.cuda.device(device):  # the device may have failed
        torch.cuda.cudart().cudaHostUnregister(address)


# --- lanes ---


@dataclass(slots=True, eq=False)
class Lane:
    """One stream, and the memory for one slab.

    staging: objects of the slab as they were read.
    pools: memory of the layer-first pools.
    stream: CUDA stream; None on other devices.
    graphs: captured graphs of this lane.
    """

    device: torch.device
    staging: torch.Tensor
    pools: torch.Tensor
    stream: torch.cuda.Stream | None
    # All captured graphs share this memory, because they are replayed one after another.
    graph_memory: _POOL_HANDLE | None = None
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    _results: dict[str, HostBuffer] = field(default_factory=dict)
    _tables: HostBuffer = field(default_factory=HostBuffer)
    _uploaded: torch.cuda.Event | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make this lane's device and stream current."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def wait(self) -> None:
        """Wait for all launches. The wait does not spin, because the readers need the CPU."""
        if self.stream is not None:
            event = torch.cuda.Event(blocking=True)
            event.record(self.stream)
            event.synchronize()

    def to_host(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """Begin to copy a result to the host, after all launches so far. Return the host tensor.

        The tensor is in page-locked memory. Its bytes are valid from the end of the next `wait`
        until the next result of the same name.
        """
        if result.device.type == "cpu":
            return result
        buffer = self._results.setdefault(name, HostBuffer())
        return buffer.room(result.shape, result.dtype).copy_(result, non_blocking=True)

    def to_device(self, table: torch.Tensor) -> torch.Tensor:
        """Begin to copy a host table to the device. Return the copy."""
        if self.device.type == "cpu":
            return table
        if self._uploaded is not None:
            self._uploaded.synchronize()
        room = self._tables.room(table.shape, table.dtype)
        uploaded = room.copy_(table).to(self.device, non_blocking=True)
        self._uploaded = torch.cuda.Event(blocking=True)
        self._uploaded.record(self.stream)
        return uploaded

    def close(self) -> None:
        """Free the memory. All launches must be done."""
        self.graphs.clear()
        for buffer in (*self._results.values(), self._tables):
            buffer.close()


def lane_bytes(slab_bytes: int) -> int:
    """Return the device bytes of a lane, temporary results included."""
    return 2 * slab_bytes + slab_bytes // _EXTRA_SHARE


def slab_size(
    devices: Sequence[torch.device], device_bytes: int, buffer_bytes: int, largest: int, name: str
) -> int:
    """Return the bytes of a slab. It has at most SLAB_BYTES, but room for the largest object.

    buffer_bytes: size of the host arena. The lanes of all devices use at most half of it.
    largest: bytes of the largest object.
    name: name of the largest object, for messages.
    Raises UsageError if not even one object fits.
    """
    least = _aligned(max(largest, 1))
    if lane_bytes(least) > device_bytes:
        raise UsageError(
            f"--device-bytes {device_bytes} is too small for one page: {name} has {largest} bytes; "
            f"give at least {lane_bytes(least)}"
        )
    ample = min(SLAB_BYTES, buffer_bytes // (2 * MOST_LANES * len(devices)))
    share = device_bytes // _FEWEST_LANES - _segments_bytes(devices)
    share = share * _EXTRA_SHARE // (2 * _EXTRA_SHARE + 1)
    return max(least, min(ample, share) // ALIGNMENT * ALIGNMENT)


def _segments_bytes(devices: Sequence[torch.device]) -> int:
    return _SEGMENTS_BYTES if any(device.type == "cuda" for device in devices) else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def allocate_lanes(
    devices: Sequence[torch.device], device_bytes: int, slab_bytes: int, least: int
) -> list[Lane]:
    """Allocate up to MOST_LANES lanes on each device, in `device_bytes` of its memory.

    Each device gets at least one lane, even if torch's segments exceed a small budget. A device
    with less free memory gets fewer lanes. If not even one lane fits, slabs are halved. Their size
    stays a multiple of ALIGNMENT, as the arena needs.
    least: bytes of the smallest slab.
    Raises UsageError if no lane with a slab of `least` bytes fits.
    """
    least = _aligned(least)
    while True:
        taken = lane_bytes(slab_bytes) + _segments_bytes(devices)
        count = min(MOST_LANES, max(1, device_bytes // taken))
        by_device = [_lanes(device, count, slab_bytes) for device in devices]
        if all(by_device):
            # The lanes of the devices alternate, so that the devices share the work from the first
            # slab on.
            turns = (lanes[turn : turn + 1] for turn in range(count) for lanes in by_device)
            return [lane for turn in turns for lane in turn]
        if slab_bytes <= least:
            full = devices[by_device.index([])]
            raise UsageError(
                f"{full} is out of memory: cannot allocate {lane_bytes(slab_bytes)} bytes for one "
                "page; free device memory or use --device cpu"
            )
        by_device.clear()
        slab_bytes = max(least, slab_bytes // 2 // ALIGNMENT * ALIGNMENT)


def _lanes(device: torch.device, count: int, slab_bytes: int) -> list[Lane]:
    lanes: list[Lane] = []
    guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with guard:
        for _ in range(count):
            try:
                lanes.append(_lane(device, slab_bytes))
            except torch.OutOfMemoryError:
                break
        if len(lanes) < count and device.type == "cuda":
            if lanes:
                lanes.pop()  # leave memory for results and digests
            torch.cuda.empty_cache()
    return lanes


def _lane(device: torch.device, slab_bytes: int) -> Lane:
    staging, pools = (torch.empty(slab_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    if device.type != "cuda":
        return Lane(device, staging, pools, None)
    return Lane(device, staging, pools, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
