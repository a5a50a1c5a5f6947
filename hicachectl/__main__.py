"""Run the command line: `hicachectl` and `python -m hicachectl`."""

from __future__ import annotations

if __name__ == "__main__":
    pass  # signals end the process in one line from here on

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

    import click


_NO_THREAD = "can't start new thread"  # as Python's threading says it


class Terminated(BaseException):
    """SIGTERM, raised in the main thread so that `finally` blocks run."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its status; see the exit codes in hicachectl(1)."""
    _complete_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the locale may lack what names are made of
            stream.reconfigure(errors="backslashreplace")
    status = _flush(run(sys.argv[1:] if arguments is None else arguments))
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    # Not through the interpreter's end: Arrow's and Mooncake's threads may still let go of what
    # is Python's then, and abort the process. Whatever matters is closed by now.
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status. Only bugs of ours raise."""
    from hicachectl.cli.exit_codes import INTERRUPTED, TERMINATED

    import_module("hicachectl.cli.group")  # while signals still end the process
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGTERM, _terminate)
        if previous[signal.SIGINT] != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run(arguments)
    except (KeyboardInterrupt, Terminated) as error:
        for number in previous:  # what ends the run is said once
            signal.signal(number, signal.SIG_IGN)
        interrupted = isinstance(error, KeyboardInterrupt)
        _say("interrupted" if interrupted else "terminated")
        return INTERRUPTED if interrupted else TERMINATED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run(arguments: list[str]) -> int:
    """Run one command; say what ended it."""
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
    except click.ClickException as error:
        _show(error)
        status = BAD_INPUT
    except HicacheError as error:
        _say(str(error))
        status = exit_code(error)
    except click.Abort:
        raise KeyboardInterrupt from None
    except ClosedPipeError:
        pass  # `| head` has what it wanted
    except SystemExit:
        if streams == (sys.stdout, sys.stderr):  # shell completion
            raise
        sys.stdout, sys.stderr = streams  # click has met a closed pipe and put wrappers there
    except Exception as error:
        status = _unexpected(error)
    return status


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


def _complete_streams() -> None:
    """Put something where a standard stream is closed, as after `>&-`.

    Else the next file that is opened would take its number, and what libraries print there.
    Closed, stdout refuses to be written, and stderr says nothing.
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
    with suppress(OSError):  # nobody is left to be told
        print(f"hicachectl: {message_text(text)}", file=sys.stderr)


def _show(error: click.ClickException) -> None:
    text = io.StringIO()
    error.show(file=text)
    with suppress(OSError):
        sys.stderr.write(message_text(text.getvalue(), keep="\n"))


def _unexpected(error: Exception) -> int:
    """Return the status of what the system refused: output, or a thread; else raise: a bug."""
    import click

    from hicachectl.cli.exit_codes import BAD_INPUT

    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    echoing = place is not None and place.tb_frame.f_code is click.echo.__code__
    if isinstance(error, OSError) and echoing:
        _say(f"cannot write output: {error.strerror or error}")
        return BAD_INPUT
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        _say("the system refuses another thread; raise its limit (ulimit -u), or lower --jobs")
        return BAD_INPUT
    _say("this is a bug, please report it with the lines below")
    raise error


def _flush(status: int) -> int:
    """Flush stdout; a reader that closed it early (`| head`) is no error."""
    from hicachectl.cli.exit_codes import BAD_INPUT

    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        if not status:
            _say(f"cannot write to stdout: {error.strerror or error}")
            return BAD_INPUT
    return status


if __name__ == "__main__":
    main()
