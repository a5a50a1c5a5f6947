"""End the process in one line for SIGINT and SIGTERM while its modules are imported.

Nothing has been begun by then, so nothing is to be cleaned up; an exception would be a traceback,
and in the import of an extension module it can get lost. Import this module first, and only where
the process is the command line's own: importing it sets signal handlers.
"""

import os
import signal
from importlib import import_module
from types import FrameType

_ENDINGS = {
    signal.SIGINT: (b"hicachectl: interrupted\n", 130),
    signal.SIGTERM: (b"hicachectl: terminated\n", 143),
}


def end(number: int, _frame: FrameType | None) -> None:
    """Say what ended the process, and end it."""
    text, status = _ENDINGS[signal.Signals(number)]
    try:
        os.write(2, text)
    finally:
        os._exit(status)


def main() -> None:
    """Run the command line: what the console script calls."""
    import_module("hicachectl.__main__").main()


# What is ignored, as by nohup or in the background of a script, stays ignored.
for _number in _ENDINGS:
    if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(_number, end)
