"""Run processes with the newest Mooncake, because one process cannot import two releases.

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
# Variable that tells a process, and the processes that it starts, which folder of packages to use.
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

    folder: empty folder for the library.
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
    """List the folder of the release that this process must use; [] for the installed release."""
    folder = os.environ.get(VARIABLE)
    return [folder] if folder else []
