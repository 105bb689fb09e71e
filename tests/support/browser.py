"""Debian's Chromium without a window, spoken to over a pipe (the DevTools protocol), with nothing but Python.

    with Browser() as browser:
        browser.open(path.as_uri())
        assert browser.run("document.title") == "..."

Tests that need it carry `needs_chromium`, which skips them where it is not installed.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
LIMIT = 120.0  # seconds for any answer: the machine may be busy


class Browser:
    """One tab. `events` are what the page said: console messages, exceptions and requests."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self.size = width, height
        self.events: list[dict[str, Any]] = []
        self._number, self._rest = 0, b""

    def __enter__(self) -> "Browser":
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The pipe's ends have to be descriptors 3 and 4 of the browser; both are made in the child, where 3 and 4 may
        # be anything else before.
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        words = [
            "/bin/bash",
            "-c",
            shell,
            str(CHROMIUM),
            *_FLAGS,
            f"--user-data-dir={self._folder.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            words, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        targets = self._ask("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(*self.size)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to the tab, and its result."""
        return self._ask(method, self._session, **params)

    def _ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            said = self._receive()
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return dict(said["result"])
            self.events.append(said)
        raise TimeoutError(method)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 2**20)
            assert part, "the browser ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def open(self, address: str) -> None:
        """Load a page and wait until it is loaded."""
        self.ask("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + LIMIT
        while not self.run(script):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str, media: str = "") -> None:
        """`scheme` is "light" or "dark"; `media` may be "print"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])

    @property
    def complaints(self) -> list[str]:
        """Errors of scripts, refused resources and warnings of the console so far."""
        found = []
        for one in self.events:
            method, params = one.get("method"), one.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(str(params["entry"]["text"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [one["params"] for one in self.events if one.get("method") == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]
