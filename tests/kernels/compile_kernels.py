"""Compile every kernel for a CUDA device that may be absent, through the code that launches it.

    python -m tests.kernels.compile_kernels CAPABILITY [few]     # 90: Hopper

`few` compiles a case of plain rows and one of scaled rows, and so each branch of each kernel.

Triton's compiler and its assembler need no device. Launches stop before loading the compiled
kernel; tensors are on the host, with arbitrary contents. Prints JSON lines: Triton's version, then
for each compiled form its kernel, bytes of stack that its PTX declares, bytes of shared memory.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hicachectl.checks.values import ValueChecker
from hicachectl.device.lanes import Lane
from hicachectl.device.runs import DeviceRun, ObjectForm
from hicachectl.device.sparse import SparseLoader
from tests.bench.bench_device import cases, expected_of
from tests.bench.stream_triton import stream
from tests.device.sparse_rows import rows_of_layout

ALIGNMENT = 4096
OBJECTS = 3
ALIKE = (
    "bf16 K/V 8.4 MB page_head",
    "bf16 MLA 4.5 MB page_first",
    "656-byte rows 2.6 MB page_first_direct",
)
FEW = (
    "bf16 K/V 8.4 MB page_first",
    "656-byte rows 2.6 MB page_first",
)


class AbsentDevice:
    """The driver calls that Triton makes before it loads a kernel."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    """Make launches compile, print the result and stop."""
    run = JITFunction.run

    def compiled(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kw: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kw)
        stack = re.findall(r"\.local .*__local_depot\d+\[(\d+)\]", kernel.asm["ptx"])
        form = {"kernel": self.__name__, "stack": sum(map(int, stack))}
        print(json.dumps(form | {"shared": kernel.metadata.shared}))

    JITFunction.run = compiled


def compile_runs(*, few: bool) -> None:
    """Scatter, check, gather and digest every kind of page object of the measurements."""
    for case in cases():
        if case.name in ALIKE:  # compiles to the same forms as another case
            continue
        if few and case.name not in FEW:
            continue
        expected = expected_of(case)
        step = -(-expected.nbytes // ALIGNMENT) * ALIGNMENT
        staging, pools = (torch.empty(OBJECTS * step, dtype=torch.uint8) for _ in range(2))
        form = ObjectForm(expected, ValueChecker(expected, case.profile), step)
        assert form.supported, case.name
        run = DeviceRun(form, Lane(torch.device("cpu"), staging, pools, None))
        run.start_checks(OBJECTS)
        run.start_digests(OBJECTS)


def compile_sparse() -> None:
    """Run one step of the sparse loader."""
    layers, page_size, row_bytes, pages = 3, 64, 656, 4
    memory = torch.zeros(pages * page_size * layers * row_bytes, dtype=torch.uint8)
    rows = rows_of_layout(
        memory, torch.arange(pages)[None], layout="page_first", layers=layers,
        page_size=page_size, row_bytes=row_bytes,
    )  # fmt: skip
    loader = SparseLoader(rows, top_k=32)
    loader.step(0, torch.from_numpy(np.arange(32, dtype=np.int32))[None], torch.tensor([200]).int())


def main() -> None:
    print(json.dumps({"triton": triton.__version__}))
    triton.runtime.driver.set_active(AbsentDevice(int(sys.argv[1])))
    compile_only()
    compile_runs(few="few" in sys.argv)
    compile_sparse()
    stream(torch.empty(1 << 14, dtype=torch.uint8), torch.empty(1 << 14, dtype=torch.uint8))


if __name__ == "__main__":
    main()
