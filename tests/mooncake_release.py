"""The newest release of Mooncake, for processes of its own: two cannot be imported in one.

Its wheel exists for CUDA only. The client loads without a GPU beside a library with the names of
CUDA's driver, each of which returns an error, so that Mooncake finds no device.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.skips import missing, need_tool

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / ".venv-mooncake"
# The folder whose packages a process uses, for the processes that it starts in turn.
VARIABLE = "HICACHECTL_TEST_MOONCAKE"

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CUDA_DRIVER = (
    "cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxSetCurrent", "cuDeviceGet", "cuDeviceGetAttribute",
    "cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRetain",
    "cuGetErrorName", "cuGetErrorString", "cuInit", "cuMemAddressFree", "cuMemAddressReserve",
    "cuMemCreate", "cuMemExportToShareableHandle", "cuMemGetAddressRange_v2",
    "cuMemGetAllocationGranularity", "cuMemGetHandleForAddressRange",
    "cuMemImportFromShareableHandle", "cuMemMap", "cuMemRelease", "cuMemRetainAllocationHandle",
    "cuMemSetAccess", "cuMemUnmap", "cuPointerGetAttribute", "cuPointerSetAttribute",
)  # fmt: skip


def newest_release(folder: Path) -> dict[str, str]:
    """Return the variables of processes that use the newest release; skip if it is not installed.

    folder: an empty one, for the library.
    """
    if not (PACKAGES / "mooncake").is_dir():
        missing("the newest Mooncake", "`make .venv-mooncake/.installed` installs it")
    compiler = need_tool("gcc")
    source = folder / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n"
                              for name in _CUDA_DRIVER))  # fmt: skip
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    libraries = [str(folder), str(PACKAGES / "nvidia/cu13/lib")]
    return {
        VARIABLE: str(PACKAGES),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGES)]),
    }


def release_of_process() -> list[str]:
    """Return the folder of the release that this process must use, if it is not the installed."""
    folder = os.environ.get(VARIABLE)
    return [folder] if folder else []
