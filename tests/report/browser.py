"""A page in headless Chromium, driven through its DevTools protocol: what it logs, what it asks for, what clicks do."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. ``complaints`` are its errors and warnings, ``requests`` the addresses that pages asked for."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 900) -> None:
        assert CHROMIUM is not None
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--disable-component-update", "--disable-sync", "--remote-debugging-port=0"]
        options += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        self.process = subprocess.Popen([CHROMIUM, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._last = 0
        try:
            self._socket = connect(self._address(profile / "DevToolsActivePort"), max_size=None, proxy=None)
        except Exception:
            self.process.kill()
            self.process.wait()
            raise
        self._session: str | None = None
        (page,) = (t for t in self._send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    @staticmethod
    def _address(file: Path, seconds: float = 60.0) -> str:
        """Wait for the address that the browser writes to a file, which is empty for a moment after it was made."""
        end = time.monotonic() + seconds
        while True:
            try:
                port, path = file.read_text(encoding="utf-8").split()
            except (OSError, ValueError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
            else:
                return f"ws://127.0.0.1:{port}{path}"

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=60))
        told = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent" if not told["request"]["url"].startswith("data:"):
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(told["entry"]["text"])
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(told["args"]))
            case "Page.loadEventFired":
                self._loaded = True
        return message

    def resize(self, width: int, height: int) -> None:
        """Show pages as on a screen of this size in CSS pixels; a narrow one is that of a phone, which zooms."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **metrics)

    def open(self, page: Path, *, charts: bool = True) -> None:
        """Load a file and wait until its scripts have run, and the charts of the report in it are drawn."""
        self.visit(page.absolute().as_uri(), charts=charts)

    def visit(self, address: str, *, charts: bool = True) -> None:
        """Load an address as ``open`` does a file."""
        with self.loading():
            self._send("Page.navigate", url=address)
        if charts:
            self.drawn()

    def drawn(self) -> None:
        """Wait until the charts of the report are drawn."""
        while not self.run("'drawn' in document.body.dataset"):
            time.sleep(0.02)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wait at the end of the block until the page that is loaded in it or after it is there."""
        self._loaded = False
        yield
        while not self._loaded:
            self._receive()

    def run(self, script: str) -> Any:
        """Return what an expression in JavaScript evaluates to."""
        found = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window and click."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self) -> None:
        """End the browser."""
        self._send("Page.disable")
        self._session = None
        self._send("Browser.close")
        self._socket.close()
        self.process.wait(timeout=30)
