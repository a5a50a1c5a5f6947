"""Devices that `--device` names."""

from __future__ import annotations

import os
import re
import sys
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING

from hicachectl.formats.errors import DeviceError, UsageError
from hicachectl.formats.wording import install_step, reason_of
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from hicachectl.device.checker import DeviceChecker

AUTO, CPU = "auto", "cpu"
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
    """Open a checker on the named devices.

    The result is None for `cpu`, or if `auto` finds no device that can be used.
    largest: bytes of the largest object.
    largest_name: name of the largest object, for messages.
    remark: takes the reason why `auto` uses the CPU.
    Raises UsageError and DeviceError if a named device cannot be used or an object exceeds
    `device_bytes`.
    """
    if names == (CPU,):
        return nullcontext()
    try:
        devices = open_devices(names)
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
        remark(f"--device auto uses the CPU: {error}")
        return nullcontext()


def refuse_missing(names: tuple[str, ...]) -> None:
    """Raise UsageError if a named CUDA device is missing. `auto` and `cpu` name none."""
    if names not in ((AUTO,), (CPU,)):
        cuda_devices(names)


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the device names in a value of --device. Raises UsageError if the value is invalid."""
    names = tuple(text.split(","))
    if names in ((AUTO,), (CPU,)):
        return names
    if not all(re.fullmatch(r"cuda(:\d{1,3})?", name) for name in names):
        raise UsageError(
            f"--device {text!r}: must be auto, cpu, cuda, or a list such as cuda:0,cuda:1"
        )
    if len(set(names)) < len(names) or (len(names) > 1 and "cuda" in names):
        raise UsageError(f"--device {text!r}: name each device once, as cuda:N")
    return names


def cuda_devices(names: tuple[str, ...]) -> list[torch.device]:
    """Return the named CUDA devices. `auto` and `cuda` name the first. Nothing runs on them yet.
    Raises UsageError with the reason if a device is missing.
    """
    try:
        import torch
        import triton
    except ImportError as error:
        raise UsageError(
            f"CUDA: no usable device: {error}; {install_step('torch', 'triton')}"
        ) from error
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _OLDEST_TRITON:
        raise UsageError(
            f"CUDA: no usable device: triton {triton.__version__} does not compile the kernels; "
            "install triton>=3.4, which comes with torch>=2.8"
        )
    # Triton warns that the default will change, unless the variable is set.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    with warnings.catch_warnings(record=True) as said:  # a warning may name an old driver
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        reasons = [str(warning.message).partition("\n")[0] for warning in said[:1]]
        next_step = "check with nvidia-smi"
        if not torch.version.cuda:
            reasons, next_step = ["this torch is built without CUDA"], "install a build with CUDA"
        raise UsageError(f"{': '.join(['CUDA: no usable device', *reasons])}; {next_step}")
    devices = [torch.device("cuda", int(name.partition(":")[2] or 0)) for name in names]
    for device in devices:
        if device.index >= count:
            raise UsageError(
                f"--device {device}: this machine has {counted(count, 'CUDA device')}, from "
                "cuda:0 on; name one of these"
            )
    return devices


def open_devices(names: tuple[str, ...]) -> list[torch.device]:
    """Start to use the devices that `cuda_devices` returns, and return them.

    Raises UsageError if a device is missing, and DeviceError if a device is busy or broken.
    """
    devices = cuda_devices(names)
    import torch

    for device in devices:
        try:
            torch.zeros(1, device=device)
        except RuntimeError as error:
            raise DeviceError(
                f"{device}: not usable: {reason_of(error)}; check with nvidia-smi"
            ) from error
    return devices


def cuda_started() -> bool:
    """Return whether this process has started to use a CUDA device."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
