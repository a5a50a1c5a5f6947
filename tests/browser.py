"""Headless Chromium for tests, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.skips import need_tool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Chromium reads commands from descriptor 3 and writes answers to 4.
_START = 'exec "$@" 3<&"$COMMANDS" 4>&"$ANSWERS"'
_NOISY = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """One page of a browser.

    noise: messages on the console, exceptions and refused requests of the last load.
    requests: URLs for which the page asked.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._read = b""
        self._number = 0
        self._session = ""
        self.noise: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def load(self, page: Path, *, width: int, scheme: str, media: str = "") -> None:
        """Load a file in a window of a width.

        scheme: light or dark.
        media: such as print.
        """
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self._call(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.noise.clear()
        self.requests.clear()
        self._loaded = False
        self._call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._note(self._next())
        self.value("1")  # earlier events are noted by now

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, width: int, height: int) -> bytes:
        """Return a PNG of the top left corner of the page, without scroll bars."""
        self._call("Emulation.setScrollbarsHidden", hidden=True)
        self.value("document.body.style.display = 'none'; document.body.offsetHeight")
        self.value("document.body.style.display = ''")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode(self._call("Page.captureScreenshot", clip=clip)["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            some = os.read(self._answers, 1 << 20)
            assert some, "the browser has ended"
            self._read += some
        one, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") in _NOISY:
            self.noise.append(event)
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        elif event.get("method") == "Page.loadEventFired":
            self._loaded = True


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with its profile in a folder, and end it. Skip if it is not installed."""
    program = need_tool("chromium")
    bash = need_tool("bash")
    commands, own_commands = os.pipe()
    own_answers, answers = os.pipe()
    log = folder / "chromium.log"
    with log.open("wb") as stderr:
        child = subprocess.Popen(
            [bash, "-c", _START, "bash", program, "--headless=new", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}/own",
             "about:blank"],
            env={**os.environ, "COMMANDS": str(commands), "ANSWERS": str(answers),
                 "HOME": str(folder)},
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(own_commands, own_answers)
    finally:
        os.close(own_commands)  # Chromium ends when its pipe closes
        os.close(own_answers)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
