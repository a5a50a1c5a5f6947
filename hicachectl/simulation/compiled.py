"""Compile loops over references with numba, where it is installed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    P = ParamSpec("P")
    R = TypeVar("R")

njit: Any = None
with suppress(ImportError):
    from numba import njit


def is_compiled() -> bool:
    """Return whether `compiled` compiles: whether numba is installed."""
    return njit is not None


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of arrays and numbers at its first call; without numba, leave it.

    Nothing is cached on disk: numba's caches are pickles, and a compilation takes a second.
    """
    if njit is None:
        return function
    loop: Callable[P, R] = njit(nogil=True)(function)
    return loop
