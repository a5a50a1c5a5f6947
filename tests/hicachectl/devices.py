"""Where kernel tests run: natively on a CUDA device, else in Triton's interpreter.

Import this before any module with Triton kernels: they are compiled or interpreted by what the
environment says when they are imported.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
HAS_CUDA: bool = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed")

NATIVE = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device")],
)
INTERPRETED = pytest.param(
    "cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="kernels run natively on the CUDA device")
)
# One of the two runs: a process either interprets its kernels or compiles them.
DEVICES = pytest.mark.parametrize("device", [INTERPRETED, NATIVE])
