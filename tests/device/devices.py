"""Where kernel tests run: on a CUDA device, or without one in Triton's interpreter.

Import this before any module with Triton kernels: on import, the environment decides whether
kernels are compiled or interpreted.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.skips import NO_CUDA, ON_CUDA, need_module

torch = need_module("torch")
HAS_CUDA: bool = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
need_module("triton")


def hasten_interpreter() -> None:
    """Spare Triton's interpreter most of its work, which changes no result.

    Each call of a function within a kernel patches the language again, which the launch has done.
    Each sum computes whether it overflows, and nothing reads the answer.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patched = set[str]()

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        # A launch does not patch the modules that functions of Triton itself import.
        if function.fn.__module__ not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn.__module__)
        return function.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call


if not HAS_CUDA:
    hasten_interpreter()

NATIVE = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason=NO_CUDA)],
)
INTERPRETED = pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason=ON_CUDA))
# Only one of the two runs: a process either interprets its kernels or compiles them.
DEVICES = pytest.mark.parametrize("device", [INTERPRETED, NATIVE])
