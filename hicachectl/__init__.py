"""Operations tool for SGLang's HiCache L3 store.

The functions of `hicachectl.api` are attributes of this package: `hicachectl.verify`, for example.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hicachectl.api import *  # noqa: F403


def __getattr__(name: str) -> object:
    """Import the Python interface when it is first used, so that commands start without it."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    api = import_module("hicachectl.api")
    if name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names defined here and the names of the Python interface."""
    from importlib import import_module

    return sorted({*globals(), *import_module("hicachectl.api").__all__})
