"""Host memory as devices see it: page-locked and mapped, registered once."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import torch

from hicachectl.backends.arena import Arena

_LOG = logging.getLogger(__name__)

# cudaHostRegisterPortable: for every device. cudaHostRegisterMapped: kernels may read it.
_FLAGS = 0x01 | 0x02
_ALREADY_REGISTERED = 712


class HostArenas:
    """Page-locks each arena when it is first used, until the arena is closed.

    Threads may share it. Where the system refuses (RLIMIT_MEMLOCK, say), copies still work, slower.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[int, torch.Tensor] = {}

    def tensor(self, arena: Arena) -> torch.Tensor:
        """Give an arena's bytes as a host tensor, not copied, page-locked where possible."""
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
    """A little page-locked memory that grows with what is put there. One thread at a time.

    Not of torch's own: that asks the device about memory that it gets back, in a destructor, which
    ends the process once the device has failed.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Give memory for a tensor; it is that of the one before, whose copies have to be done."""
        nbytes = shape.numel() * dtype.itemsize
        if self._arena is None or self._arena.nbytes < nbytes:
            self.close()
            self._arena = Arena(max(nbytes, 1))
            register(self._arena)
        return torch.from_numpy(self._arena.array)[:nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Give the memory back."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def register(arena: Arena) -> bool:
    """Page-lock and map an arena's memory for all devices, until it is closed.

    False where that is refused.
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
            "the buffer of %d bytes cannot be page-locked (CUDA error %d): copies to the device "
            "are slower; a higher limit of locked memory (ulimit -l) helps",
            arena.nbytes,
            int(error),
        )
    _forget_last_error()
    return False


def _unregister(address: int, device: int) -> None:
    """Undo `register` on the device that was current: on another, CUDA would begin to use it."""
    with suppress(RuntimeError), torch.cuda.device(device):  # it may have failed
        torch.cuda.cudart().cudaHostUnregister(address)


def _forget_last_error() -> None:
    """Let a launch report the error that CUDA keeps for the thread's next one to report."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
