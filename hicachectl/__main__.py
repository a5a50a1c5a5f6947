"""Run the command line: `hicachectl` and `python -m hicachectl`."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class Terminated(BaseException):
    """SIGTERM, raised in the main thread so that `finally` blocks run."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its status; see the exit codes in hicachectl(1)."""
    status = run(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_flush(status))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status. Only bugs of ours raise."""
    import click

    from hicachectl.cli import ClosedPipeError, cli
    from hicachectl.errors import BAD_INPUT, INTERRUPTED, TERMINATED, exit_code
    from hicachectl.formats.errors import HicacheError

    previous = signal.signal(signal.SIGTERM, _terminate)
    status = 0
    try:
        status = cli.main(arguments, prog_name="hicachectl", standalone_mode=False) or 0
    except click.exceptions.Exit as request:
        status = request.exit_code
    except click.ClickException as error:
        error.show()
        status = BAD_INPUT
    except HicacheError as error:
        print(f"hicachectl: {error}", file=sys.stderr)
        status = exit_code(error)
    except (KeyboardInterrupt, click.Abort):
        print("hicachectl: interrupted", file=sys.stderr)
        status = INTERRUPTED
    except Terminated:
        print("hicachectl: terminated", file=sys.stderr)
        status = TERMINATED
    except ClosedPipeError:
        pass  # `| head` has what it wanted
    except Exception:
        print("hicachectl: this is a bug, please report it with the lines below", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    return status


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


def _flush(status: int) -> int:
    """Flush stdout; a reader that closed it early (`| head`) is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


if __name__ == "__main__":
    main()
