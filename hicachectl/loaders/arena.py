"""The host arena as devices see it: page-locked and mapped, registered once."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
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
                registered = register(arena)
                arena.at_close(lambda: self._forget(arena, registered))
            return known

    def _forget(self, arena: Arena, registered: bool) -> None:
        with self._lock:
            del self._tensors[id(arena)]
        if registered:
            torch.cuda.cudart().cudaHostUnregister(arena.address)


def register(arena: Arena) -> bool:
    """Page-lock and map an arena's memory for all devices; False where that is refused."""
    if not torch.cuda.is_available():
        return False
    error = torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, _FLAGS)
    if not int(error):
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


def _forget_last_error() -> None:
    """Let a launch report the error that CUDA keeps for the thread's next one to report."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
