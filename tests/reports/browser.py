"""A headless Chromium, spoken to over a pipe in its DevTools protocol, so that no package is needed for it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Its path; None where there is none."""
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it opens our own pages only, and CI runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-pipe",
)


class Page:
    """One tab."""

    def __init__(self, read: int, write: int) -> None:
        self._read = os.fdopen(read, "rb", buffering=0)
        self._write = os.fdopen(write, "wb", buffering=0)
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; AssertionError with the browser's own words when it fails."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard["error"]
                result: dict[str, Any] = heard["result"]
                return result
            self.events.append(heard)

    def open(self, file: Path) -> None:
        """Load a file and wait until all of it is there."""
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.evaluate("document.readyState")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def requests(self) -> list[str]:
        """URLs asked for since `open`."""
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """What the console, the log and uncaught exceptions said since `open`."""
        noisy = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [json.dumps(event["params"]) for event in self.events if event["method"] in noisy]

    def show(self, *, width: int, dark: bool = False) -> None:
        """Lay the page out for a screen of this width, in pixels, and a reader who likes it light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        wish = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=wish)

    def press(self, key: str) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def picture(self) -> bytes:
        """The whole page as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._read.read(1 << 16)
            if not more:
                raise EOFError("the browser is gone")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(message)
        return heard

    def close(self) -> None:
        """Close both ends of the pipe."""
        self._read.close()
        self._write.close()


KEYS = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37}


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page in a new browser with `profile` as its own folder. Only where `CHROMIUM` is found."""
    assert CHROMIUM is not None
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()

    def pipes() -> None:
        # The browser reads commands from 3 and writes answers to 4.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]
        for fd, target in zip(high, (3, 4), strict=True):
            os.dup2(fd, target)

    child = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=pipes,  # noqa: PLW1509 - no thread of ours runs, and nothing else can put a pipe at 3
    )
    os.close(commands)
    os.close(answers)
    page = None
    try:
        page = Page(from_browser, to_browser)
        yield page
    finally:
        if page is not None:
            page.close()
        child.terminate()
        child.wait(timeout=30)
