"""End the process with one line if SIGINT or SIGTERM arrives during the imports.

No work has begun then, so no cleanup is needed. An exception would print a traceback, and the
import of an extension module can lose it. Importing this module sets signal handlers, so import it
first, and only for the command line.
"""

import os
import signal
from importlib import import_module
from types import FrameType

_ENDINGS = {
    signal.SIGINT: (b"hicachectl: Interrupted\n", 130),
    signal.SIGTERM: (b"hicachectl: Terminated\n", 143),
}


def end(number: int, _frame: FrameType | None) -> None:
    """Print which signal arrived, and end the process."""
    text, status = _ENDINGS[signal.Signals(number)]
    try:
        os.write(2, text)
    finally:
        os._exit(status)


def main() -> None:
    """Run the command line; the entry point of the console script."""
    import_module("hicachectl.__main__").main()


# Ignored signals, as under nohup or in a background job, stay ignored.
for _number in _ENDINGS:
    if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(_number, end)
