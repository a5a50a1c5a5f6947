"""Where kernel tests run: on a CUDA device, or without one in Triton's interpreter.

Import this before any module with Triton kernels: on import, the environment decides whether
kernels are compiled or interpreted.
"""

from __future__ import annotations

import os

import pytest

from tests.skips import NO_CUDA, ON_CUDA, need_module

torch = need_module("torch")
HAS_CUDA: bool = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
need_module("triton")

NATIVE = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason=NO_CUDA)],
)
INTERPRETED = pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason=ON_CUDA))
# Only one of the two runs: a process either interprets its kernels or compiles them.
DEVICES = pytest.mark.parametrize("device", [INTERPRETED, NATIVE])
