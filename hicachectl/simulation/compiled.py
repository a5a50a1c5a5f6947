"""Compile loops over references with numba, where it is installed and the loop is long."""

from __future__ import annotations

from functools import cache, wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sized
    from typing import Concatenate

    P = ParamSpec("P")
    R = TypeVar("R")
    First = TypeVar("First", bound=Sized)

LEAST = 1 << 14  # Compiling a loop takes some seconds, as Python does for so many references.


@cache
def is_installed() -> bool:
    """Return whether numba is installed. Importing it takes most of a second."""
    return find_spec("numba") is not None


def is_compiled(references: int) -> bool:
    """Return whether a loop over so many references is compiled."""
    return references >= LEAST and is_installed()


def compiled(
    function: Callable[Concatenate[First, P], R],
) -> Callable[Concatenate[First, P], R]:
    """Compile a loop of arrays and numbers when its first argument is long for the first time.

    Nothing is cached on disk: numba's caches are pickles.
    """

    @cache
    def loop() -> Callable[Concatenate[First, P], R]:
        from numba import njit

        made: Callable[Concatenate[First, P], R] = njit(nogil=True)(function)
        return made

    @wraps(function)
    def run(first: First, /, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = loop() if is_compiled(len(first)) else function
        return chosen(first, *args, **kwargs)

    return run
