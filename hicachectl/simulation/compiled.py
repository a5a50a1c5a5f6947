"""Compile long loops over references (uses of pages by requests), if numba is installed."""

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

LEAST = 1 << 14  # Python takes some seconds for so many references, and so does compiling a loop


@cache
def is_installed() -> bool:
    """Return whether numba is installed, without importing it, which takes most of a second."""
    return find_spec("numba") is not None


def is_compiled(references: int) -> bool:
    """Return whether a loop over this number of references is compiled."""
    return references >= LEAST and is_installed()


def compiled(
    function: Callable[Concatenate[First, P], R],
) -> Callable[Concatenate[First, P], R]:
    """Compile a loop over arrays when it is first called with a long first argument.

    Nothing is cached on disk, because numba's caches are pickles, which run code when loaded.
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
