"""The pictures of the README, made from the damaged store of `make demo`.

`python -m tests.pictures` writes them into man/. Run it when `verify` prints another text, or when
the page of `report` looks different. Only report.png needs Chromium.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import termios
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from tests.browser import Browser, browser
from tests.skips import need_tool

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
MAN = ROOT / "man"
VERIFY = "hicachectl -q verify demo-damaged --profile demo-store/.hicachectl/demo.toml"
COLUMNS = 100
REPORT_WIDTH, REPORT_HEIGHT = 1200, 616  # the verdict, and the table of findings

# A terminal of dark colours. The keys are ANSI colours, as SGR sequences number them.
_PAPER, _INK, _PROMPT = "#0d1117", "#e6edf3", "#7d8590"
_COLOURS = {"31": "#ff7b72", "33": "#e3b341"}
_SIZE, _ADVANCE, _LINE, _EDGE = 14, 8.4, 20, 18  # pixels: font, character, line, margin
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_COLOURED = re.compile(r"\x1b\[(\d+)m(.*?)\x1b\[0m")


@contextmanager
def made_demo() -> Iterator[Demo]:
    """Make the demo in a folder with a short name, since the page of `report` shows the name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Demo(Path(name))


class Demo:
    """The stores of `make demo` in a folder, and `hicachectl` of this checkout as a command there.

    folder: the current directory of commands.
    printed: the text that `make demo` prints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "bin" / "hicachectl"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hicachectl "$@"\n')
        program.chmod(0o755)
        self._environment = {
            **{name: text for name, text in os.environ.items() if name != "COLUMNS"},
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(folder),
        }
        steps = subprocess.run(
            [need_tool("make"), "--no-print-directory", "--dry-run", "--old-file=.venv/.runtime",
             f"BIN={program.parent}", "demo"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        self.printed = "".join(map(self.run, steps.stdout.splitlines()))

    def run(self, command: str) -> str:
        """Return what a command of the shell prints on stdout; it must end with 0."""
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self._environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert not done.returncode, (command, done.stdout, done.stderr)
        return done.stdout

    def shown(self, command: str) -> str:
        """Return what a command prints on a terminal of `COLUMNS`, with its colours."""
        screen, terminal = pty.openpty()
        try:
            termios.tcsetwinsize(terminal, (50, COLUMNS))
            with subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self._environment, stdout=terminal,
                stderr=terminal,
            ):  # fmt: skip
                os.close(terminal)
                printed = b""
                while some := _read(screen):
                    printed += some
        finally:
            os.close(screen)
        return printed.decode().replace("\r\n", "\n")


def _read(screen: int) -> bytes:
    """Return the next bytes of a terminal; none after its last program has ended (EIO)."""
    try:
        return os.read(screen, 1 << 16)
    except OSError:
        return b""


def verify_picture(demo: Demo) -> str:
    """Return an SVG of a terminal in which `verify` has checked the damaged store."""
    lines = [_line(f"$ {VERIFY}", _PROMPT)]
    for text in demo.shown(VERIFY).rstrip("\n").split("\n"):
        if "\x1b" in text or len(text) <= COLUMNS:  # a coloured line is never too long
            lines.append(_line(text))
        else:
            lines += [_line(text[at : at + COLUMNS]) for at in range(0, len(text), COLUMNS)]
    rows = [
        f'<text xml:space="preserve" x="{_EDGE}" y="{_EDGE + _LINE * number + _SIZE}"{text}</text>'
        for number, text in enumerate(lines)
        if text
    ]
    width = round(COLUMNS * _ADVANCE) + 2 * _EDGE
    height = len(lines) * _LINE + 2 * _EDGE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="{_FONT}" font-size="{_SIZE}" '
            f'fill="{_INK}">',
            f"<title>{escape(VERIFY)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{_PAPER}"/>',
            *rows,
            "</svg>\n",
        ]
    )


def _line(text: str, colour: str = "") -> str:
    """Return the end of a text element: its colour, its length in pixels, and its spans.

    The length keeps the columns in line with fonts of another width.
    """
    length = len(_COLOURED.sub(r"\2", text)) * _ADVANCE
    fill = f' fill="{colour}"' if colour else ""
    spans = _COLOURED.sub(
        lambda found: f'<tspan fill="{_COLOURS[found[1]]}">{found[2]}</tspan>', escape(text)
    )
    return f'{fill} textLength="{length:g}" lengthAdjust="spacingAndGlyphs">{spans}' if text else ""


def report_picture(demo: Demo, chromium: Browser, store: str = "demo-damaged") -> bytes:
    """Return a PNG of the top of the page of `report`."""
    page = demo.folder / "report.html"
    profile = "demo-store/.hicachectl/demo.toml"
    demo.run(
        f"hicachectl report {store} --profile {profile} --title {store} --fail-on never -o {page}"
    )
    chromium.load(page, width=REPORT_WIDTH, scheme="light")
    return chromium.picture(REPORT_WIDTH, REPORT_HEIGHT)


def main() -> None:
    """Write both pictures."""
    with made_demo() as demo:
        (MAN / "verify.svg").write_text(verify_picture(demo), encoding="utf-8")
        with browser(demo.folder) as chromium:
            (MAN / "report.png").write_bytes(report_picture(demo, chromium))


if __name__ == "__main__":
    main()
