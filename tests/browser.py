"""A headless Chromium, driven over its DevTools pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Page:
    """One page; what goes wrong on it is kept in `faults`."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self.commands, self.answers = commands, answers
        self.session: str | None = None
        self.faults: list[Any] = []
        self.loaded = False
        self.number = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a DevTools command and wait for its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while (answer := self._next()).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser is gone")
            data += byte
        message = json.loads(data)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Page.javascriptDialogOpening":
            raise AssertionError(f"the page opened a dialog: {params['message']}")  # and now waits for an answer
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded") or (
            method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
        ):
            self.faults.append(params)
        return message

    def open(self, file: Path) -> None:
        """Load a file and wait until it is there."""
        self.loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self.loaded:
            self._next()

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, which must be JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point_at(self, element: str, click: bool = False) -> None:
        """Move the pointer to the middle of an element's widest line, given as a JavaScript expression."""
        boxes = self.value(
            f"(e => (e.scrollIntoView(), Array.from(e.getClientRects(), box => box.toJSON())))({element})"
        )
        box = max(boxes, key=lambda box: box["width"])
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def press(self, key: str, code: int) -> None:
        """Press a key, given by its DOM name and Windows key code."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a new browser; the test is skipped where there is none."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()

    def pipes() -> None:  # Chromium reads commands from 3 and writes to 4
        high = [os.dup(fd) for fd in (to_browser, from_browser)]
        while min(high) <= 4:
            high = [os.dup(fd) for fd in high]
        for fd, place in zip(high, (3, 4), strict=True):
            os.dup2(fd, place)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            [executable, *flags, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            with open(commands, "wb") as writer, open(answers, "rb") as reader:
                page = Page(writer, reader)
                target = page.call("Target.createTarget", url="about:blank")["targetId"]
                page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
                for domain in ("Page", "Runtime", "Log"):
                    page.call(f"{domain}.enable")
                yield page
        finally:
            process.terminate()
            process.wait()
