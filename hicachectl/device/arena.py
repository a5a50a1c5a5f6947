"""Host memory that devices can use: page-locked and mapped, registered once."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import torch

from hicachectl.backends.arena import Arena

_LOG = logging.getLogger(__name__)

# cudaHostRegisterPortable: for all devices. cudaHostRegisterMapped: kernels may read the memory.
_FLAGS = 0x01 | 0x02
_ALREADY_REGISTERED = 712


class HostArenas:
    """Host tensors over arenas, page-locked from first use until the arena closes. Thread-safe.

    If the system refuses to page-lock (RLIMIT_MEMLOCK), copies work, but slower.
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
    """A small page-locked buffer that grows as needed. For one thread at a time.

    torch's pinned memory would not do: its destructor queries the device, which ends the process
    after a device failure.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a tensor, in place of the previous one.

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


def register(arena: Arena) -> bool:
    """Page-lock and map an arena's memory for all devices until it is closed.

    Return False without CUDA, or if CUDA refuses.
    """
    if not torch.cuda.is_available():
        return False
    error = torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, _FLAGS)
    if not int(error):
        device = torch.cuda.current_device()
        arena.at_close(lambda: _unregister(arena.address, device))
        return True
    if int(error) != _ALREADY_REGISTERED:
        _LOG.warning(
            "Cannot page-lock the buffer of %d bytes (CUDA error %d): copies to the device are "
            "slower; raise the limit of locked memory (ulimit -l)",
            arena.nbytes,
            int(error),
        )
    _forget_last_error()
    return False


def _unregister(address: int, device: int) -> None:
    """Undo `register` on the same device: on another one, CUDA would create a context."""
    with suppress(RuntimeError), torch.cuda.device(device):  # the device may have failed
        torch.cuda.cudart().cudaHostUnregister(address)


def _forget_last_error() -> None:
    """Clear the error that CUDA would report at this thread's next launch."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
