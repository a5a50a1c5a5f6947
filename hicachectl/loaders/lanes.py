"""The device memory of a run: a fixed number of lanes, each one slab on its way."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hicachectl.backends.arena import ALIGNMENT
from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.cuda import _POOL_HANDLE

    from hicachectl.loaders.kinds import Passage

# Large enough that launches cost less than the copy, small enough that several lanes overlap.
SLAB_BYTES = 64 << 20
MOST_LANES = 8  # of a device: reads, copies and kernels overlap with fewer
_FEWEST_LANES = 4  # slabs get smaller before there are fewer
# Beside staging and pools, a quarter of a slab: digests keep 32 bytes for each KiB, statistics 32
# for each field of a block, which is 96 for 656 bytes where a page is one token.
_EXTRA_SHARE = 4


@dataclass(slots=True, eq=False)
class Lane:
    """One stream with the memory of one slab: staging, as read, and layer-first pools."""

    device: torch.device
    staging: torch.Tensor
    pools: torch.Tensor
    stream: torch.cuda.Stream | None
    # Of all captured launches: they are replayed one after another, so passing results share it.
    graph_memory: _POOL_HANDLE | None = None
    passages: dict[int, Passage] = field(default_factory=dict)  # by the kind's identity

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Launch on this lane's stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def wait(self) -> None:
        """Wait for what was launched, without keeping a processor busy."""
        if self.stream is not None:
            # Another event, one that blocks: spinning would take the readers' processors.
            event = torch.cuda.Event(blocking=True)
            event.record(self.stream)
            event.synchronize()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy a result to page-locked host memory, behind what has been launched."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def lane_bytes(slab_bytes: int) -> int:
    """Bytes of device memory that a lane for such slabs needs, passing results included."""
    return 2 * slab_bytes + slab_bytes // _EXTRA_SHARE


def slab_size(device_bytes: int, buffer_bytes: int, largest: int, name: str) -> int:
    """Choose the bytes of a slab: the largest object at least, SLAB_BYTES at most beyond that.

    Raises UsageError where not even one object fits.
    """
    least = _aligned(max(largest, 1))
    if lane_bytes(least) > device_bytes:
        raise UsageError(
            f"--device-bytes {device_bytes} is too small for one page: {name} of {largest} bytes "
            f"needs {lane_bytes(least)}"
        )
    ample = min(SLAB_BYTES, buffer_bytes // (2 * MOST_LANES))
    share = device_bytes * _EXTRA_SHARE // (_FEWEST_LANES * (2 * _EXTRA_SHARE + 1))
    return max(least, min(ample, share) // ALIGNMENT * ALIGNMENT)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def allocate_lanes(
    devices: Sequence[torch.device], device_bytes: int, slab_bytes: int, least: int
) -> list[Lane]:
    """Allocate up to MOST_LANES lanes on each device, within `device_bytes` of each.

    Where a device has less memory left, fewer lanes; where it has not even one, smaller slabs
    down to `least` bytes, in whole ALIGNMENTs, as objects lie in them. Raises UsageError where that
    does not fit either.
    """
    least = _aligned(least)
    while True:
        count = min(MOST_LANES, max(1, device_bytes // lane_bytes(slab_bytes)))
        by_device = [_lanes(device, count, slab_bytes) for device in devices]
        if all(by_device):
            # Devices take turns, so that they share the work from the first slab on.
            turns = (lanes[turn : turn + 1] for turn in range(count) for lanes in by_device)
            return [lane for turn in turns for lane in turn]
        if slab_bytes <= least:
            full = devices[by_device.index([])]
            raise UsageError(
                f"{full} is out of memory: {lane_bytes(slab_bytes)} bytes for one page cannot be "
                "allocated; free some, or run with --device cpu"
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
                lanes.pop()  # results and digests need a little, too
            torch.cuda.empty_cache()
    return lanes


def _lane(device: torch.device, slab_bytes: int) -> Lane:
    staging, pools = (torch.empty(slab_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    if device.type != "cuda":
        return Lane(device, staging, pools, None)
    return Lane(device, staging, pools, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
