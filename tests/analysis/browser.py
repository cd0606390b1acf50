"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver, no port, no package.

Commands go to the browser's file descriptor 3 and answers and events come from 4, JSON messages
that end in a zero byte (``--remote-debugging-pipe``).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
TIMEOUT_S = 120.0


class BrowserError(AssertionError):
    """The browser did not do what it was told."""


class Browser:
    """One browser with one page; `events` are what the page reported, in order.

    Args:
        profile: an empty folder for the browser's own files.
        width, height: of the page's window, in pixels.
    """

    def __init__(self, profile: Path, width: int = 1200, height: int = 900) -> None:
        self.events: list[dict[str, Any]] = []
        self.path = Path()  # of the file that is open
        self._count, self._received = 0, b""
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        # Moved out of the way of 3 and 4, which the shell then makes of them.
        child = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_browser, from_browser)]
        for fd in (to_browser, from_browser):
            os.close(fd)
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{child[0]} 4>&{child[1]}', "bash", *command],
            pass_fds=child,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in child:
            os.close(fd)
        targets = self._send("Target.getTargets", {})["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self._send("Target.attachToTarget", {"targetId": page, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._commands)  # the browser ends when its pipe does
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def resize(self, width: int, height: int) -> None:
        """Give the page another size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def open(self, path: Path) -> float:
        """Open a file, wait until it has loaded, and return the seconds that took."""
        began = time.monotonic()
        self.path = path
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()
        return time.monotonic() - began

    def run(self, expression: str) -> Any:
        """Return what JavaScript evaluates to in the page, promises awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Evaluate until the result is true, and return it."""
        deadline = time.monotonic() + TIMEOUT_S / 4
        while not (value := self.run(expression)):
            if time.monotonic() > deadline:
                raise BrowserError(f"still false: {expression}")
            time.sleep(0.05)
        return value

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Do one thing with the mouse: "mouseMoved", "mousePressed" or "mouseReleased"."""
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def click(self, x: float, y: float) -> None:
        """Move the mouse somewhere and click."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def click_on(self, selector: str) -> None:
        """Scroll the first match into view and click its middle."""
        left, top, width, height = self.place_of(selector)
        self.click(left + width / 2, top + height / 2)

    def place_of(self, selector: str) -> tuple[float, float, float, float]:
        """Scroll the first match into view; return its left, top, width and height on screen."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.left, r.top, r.width, r.height]; })()"
        )
        return (box[0], box[1], box[2], box[3])

    def screenshot(self, path: Path, *, whole_page: bool = True) -> None:
        """Write a PNG of the page."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=whole_page, format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Return everything that went wrong in the page: exceptions, errors and warnings."""
        found = []
        for event in self.events:
            method, content = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(content["exceptionDetails"]))
            if method == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning"):
                found.append(json.dumps(content["args"]))
            if method == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
                found.append(json.dumps(content["entry"]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for, itself and inline data left out."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
            and event["params"].get("type") != "Document"
        ]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command to the page and return its result."""
        return self._send(method, params, sessionId=self._session)

    def _send(self, method: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **more}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        """Return the next message; those that answer no command are kept as events."""
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            part = os.read(self._answers, 1 << 20) if ready else b""
            if not part:
                raise BrowserError("the browser has gone, or says nothing")
            self._received += part
        first, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message
