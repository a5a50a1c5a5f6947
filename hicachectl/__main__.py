"""Run the command line: `hicachectl` and `python -m hicachectl`."""

from __future__ import annotations

import os
import signal
import sys
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

    from hicachectl.cli import ClosedPipe, cli
    from hicachectl.errors import BAD_INPUT, INTERRUPTED, TERMINATED, exit_code
    from hicachectl.formats.errors import HicacheError

    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(cli.main(arguments, prog_name="hicachectl", standalone_mode=False) or 0)
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.ClickException as error:
        error.show()
        return BAD_INPUT
    except HicacheError as error:
        print(f"hicachectl: {error}", file=sys.stderr)
        return exit_code(error)
    except ClosedPipe:
        return 0
    except (KeyboardInterrupt, click.Abort):
        print("hicachectl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print("hicachectl: terminated", file=sys.stderr)
        return TERMINATED
    except Exception:
        print("hicachectl: this is a bug, please report it with the lines below", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


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
