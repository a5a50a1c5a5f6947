"""Run the command line: `hicachectl` and `python -m hicachectl`."""

from __future__ import annotations

if __name__ == "__main__":
    import hicachectl.cli.startup  # noqa: F401 - handles signals during the imports below

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from hicachectl.text.terminal import message_text

if TYPE_CHECKING:
    from types import FrameType


# Methods of pathlib such as `is_dir` raise these errors instead of returning False.
_CLOSED_PATH = {errno.EACCES, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE, errno.ENOTCONN}
_NO_THREAD = "can't start new thread"  # the text of Python's RuntimeError


class Terminated(BaseException):
    """SIGTERM, raised in the main thread to run `finally` blocks."""


class _Received:
    """The signal that ends the command.

    number: number of the signal; None until one arrives.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM."""
        self.number = number
        self.end()

    def end(self) -> None:
        """Raise KeyboardInterrupt after SIGINT, Terminated after SIGTERM; else do nothing."""
        if self.number is not None:
            raise KeyboardInterrupt if self.number == signal.SIGINT else Terminated


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its status. hicachectl(1) lists the statuses."""
    _complete_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the locale may be unable to encode a name
            stream.reconfigure(errors="backslashreplace")
    if instruction := os.environ.get("_HICACHECTL_COMPLETE"):  # the scripts of `completion` set it
        import_module("hicachectl.cli.commands.completion").complete(instruction)
    status = _flush(run(sys.argv[1:] if arguments is None else arguments))
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    # A normal exit could abort, because Arrow's and Mooncake's threads may release Python objects
    # while the interpreter shuts down. All files and stores are closed by now.
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status. Raises only on a bug."""
    from hicachectl.cli.exit_codes import INTERRUPTED, TERMINATED

    # This import takes long. It comes before the handlers are set, so that a signal during the
    # import ends the process at once.
    import_module("hicachectl.cli.group")
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    received = _Received()
    try:
        signal.signal(signal.SIGTERM, received.handle)
        if previous[signal.SIGINT] != signal.SIG_IGN:
            signal.signal(signal.SIGINT, received.handle)
        return _run(arguments, received)
    except (KeyboardInterrupt, Terminated) as error:
        for number in previous:  # report only the first signal
            signal.signal(number, signal.SIG_IGN)
        interrupted = isinstance(error, KeyboardInterrupt)
        _say("Interrupted" if interrupted else "Terminated")
        return INTERRUPTED if interrupted else TERMINATED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run(arguments: list[str], received: _Received) -> int:
    """Run one command, print its error and return its exit status."""
    import click

    from hicachectl.cli.exit_codes import BAD_INPUT, exit_code
    from hicachectl.cli.group import ClosedPipeError, cli
    from hicachectl.formats.errors import HicacheError

    streams = sys.stdout, sys.stderr
    status = 0
    try:
        status = cli.main(arguments, prog_name="hicachectl", standalone_mode=False) or 0
    except click.exceptions.Exit as request:
        status = request.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        with suppress(OSError):
            print(error.format_message(), file=sys.stderr)
        status = BAD_INPUT
    except click.ClickException as error:
        from hicachectl.cli.command import one_line

        _say(one_line(error))
        status = BAD_INPUT
    except HicacheError as error:
        _say(str(error))
        status = exit_code(error)
    except click.Abort:
        raise KeyboardInterrupt from None
    except ClosedPipeError:
        pass  # the reader, such as `| head`, needs no more output
    except SystemExit:
        if streams == (sys.stdout, sys.stderr):  # shell completion
            raise
        sys.stdout, sys.stderr = streams  # click replaced them after a closed pipe
    except Exception as error:
        received.end()  # a library may have replaced our exception by an error of its own
        status = _unexpected(error)
    return status


def _complete_streams() -> None:
    """Open /dev/null in place of closed standard streams, as after `>&-`.

    Otherwise the next file that is opened would get the number of the stream, and libraries would
    print into this file. Writes to a replaced stdout fail, because it is open for reading only.
    Writes to a replaced stderr are discarded.
    """
    for number, access in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, access)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _say(text: str) -> None:
    with suppress(OSError):  # stderr may be closed
        print(f"hicachectl: {message_text(text)}", file=sys.stderr)


def _unexpected(error: Exception) -> int:
    """Return the status if the system refused output, a path or a thread. Re-raise other errors."""
    import click

    from hicachectl.cli.exit_codes import BAD_INPUT
    from hicachectl.formats.wording import failed, lost_stdout

    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    echoing = place is not None and place.tb_frame.f_code is click.echo.__code__
    if isinstance(error, OSError) and echoing:
        _say(lost_stdout(error))
        return BAD_INPUT
    if isinstance(error, OSError) and error.filename and error.errno in _CLOSED_PATH:
        path = os.fsdecode(error.filename)
        _say(failed(path, "use the path", error, "check it, its permissions and its mount"))
        return BAD_INPUT
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        _say("Cannot start another thread; raise the limit (ulimit -u) or give fewer --jobs")
        return BAD_INPUT
    _say("This is a bug. Please report it with the lines below.")
    raise error


def _flush(status: int) -> int:
    """Flush stdout and return the status. A closed pipe (`| head`) is not an error."""
    from hicachectl.cli.exit_codes import BAD_INPUT
    from hicachectl.formats.wording import lost_stdout

    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        if not status:
            _say(lost_stdout(error))
            return BAD_INPUT
    return status


if __name__ == "__main__":
    main()
