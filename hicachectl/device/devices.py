"""Which devices `--device` names, and what is said when there are none."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING

from hicachectl.formats.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from hicachectl.device.checker import DeviceChecker

AUTO, CPU = "auto", "cpu"
DEFAULT_DEVICE_BYTES = 2 << 30
_OLDEST_TRITON = (3, 4)


def open_checker(
    names: tuple[str, ...],
    *,
    device_bytes: int,
    buffer_bytes: int,
    largest: int,
    largest_name: str,
    remark: Callable[[str], None],
) -> AbstractContextManager[DeviceChecker | None]:
    """Open what checks on the named devices; None for the CPU, and where `auto` finds no device.

    remark is told why `auto` fell back. Raises UsageError and DeviceError where a named device
    cannot be used, or one object does not fit into `device_bytes`.
    """
    if names == (CPU,):
        return nullcontext()
    try:
        devices = cuda_devices(names)
        from hicachectl.device.checker import DeviceChecker

        return DeviceChecker(
            devices,
            device_bytes=device_bytes,
            buffer_bytes=buffer_bytes,
            largest=largest,
            largest_name=largest_name,
            falls_back=names == (AUTO,),
        )
    except (UsageError, DeviceError) as error:
        if names != (AUTO,):
            raise
        remark(f"--device auto: {error}; the CPU does the work")
        return nullcontext()


def refuse_missing(names: tuple[str, ...]) -> None:
    """Raise UsageError or DeviceError where a device that `auto` does not choose cannot be used."""
    if names not in ((AUTO,), (CPU,)):
        cuda_devices(names)


def parse_devices(text: str) -> tuple[str, ...]:
    """Split `auto`, `cpu`, `cuda`, or a list such as `cuda:0,cuda:1`. Raises UsageError."""
    names = tuple(text.split(","))
    if names in ((AUTO,), (CPU,)):
        return names
    if not all(re.fullmatch(r"cuda(:\d{1,3})?", name) for name in names):
        raise UsageError(f"--device {text!r}: write auto, cpu, cuda, or a list: cuda:0,cuda:1")
    if len(set(names)) < len(names) or (len(names) > 1 and "cuda" in names):
        raise UsageError(f"--device {text!r} names a device twice")
    return names


def cuda_devices(names: tuple[str, ...]) -> list[torch.device]:
    """Find the named CUDA devices, the first for `auto` and `cuda`.

    Raises UsageError, saying why, where one is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"no CUDA device can be used: {error}; install the extra hicachectl[gpu]"
        ) from error
    try:
        import triton
    except ImportError as error:
        raise UsageError(f"no CUDA device can be used: {error}; install triton") from error
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _OLDEST_TRITON:
        raise UsageError(
            f"no CUDA device can be used: triton {triton.__version__} does not compile the "
            "kernels; install triton>=3.4, which torch>=2.8 brings"
        )
    # Its default is to change: Triton would say so on stderr.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    with warnings.catch_warnings(record=True) as said:  # of a driver that is too old, say
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        reasons = [str(warning.message).partition("\n")[0] for warning in said]
        if not torch.version.cuda:
            reasons = ["this torch is built without CUDA"]
        raise UsageError(": ".join(["no CUDA device is there", *reasons[:1]]))
    devices = [torch.device("cuda", _index(name)) for name in names]
    for device in devices:
        if device.index >= count:
            raise UsageError(f"{device}: there are {count} CUDA devices, from cuda:0 on")
        _touch(device)
    return devices


def _touch(device: torch.device) -> None:
    """Begin to use a device. Raises DeviceError where that fails: a busy or broken one."""
    import torch

    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise DeviceError(f"{device} cannot be used: {reason}") from error


def _index(name: str) -> int:
    return int(name.partition(":")[2] or 0)
