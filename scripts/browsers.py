"""Chromium, Firefox and WebKit, driven alike: open a page, run JavaScript, press the mouse, type, take a picture.

Chromium is driven by Playwright; Debian's Firefox (``firefox-esr``) speaks WebDriver BiDi, and its WebKitGTK
(``webkit2gtk-driver``, with ``xvfb``) the older WebDriver. Playwright drives only its own builds of both.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
CHROMIUM_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
"""Chromium's names, those with windows first; benchmarks look for the same."""

CHROMIUM_PROGRAM = next(filter(shutil.which, CHROMIUM_PROGRAMS), CHROMIUM_PROGRAMS[-1])
WEBKIT = "/usr/lib/x86_64-linux-gnu/webkit2gtk-4.1/MiniBrowser"
PATIENCE = 60.0
"""Seconds that a browser may take to start."""

NAMES = ("chromium", "firefox", "webkit")


def missing(name: str) -> str:
    """Why a browser cannot be driven here, or an empty string."""
    programs = {
        "chromium": (CHROMIUM_PROGRAM,),
        "firefox": ("firefox-esr",),
        "webkit": ("WebKitWebDriver", "Xvfb", WEBKIT),
    }
    absent = [program for program in programs[name] if shutil.which(program) is None]
    return f"{', '.join(absent)} not installed" if absent else ""


def launch(name: str) -> Browser:
    """Start one of NAMES; close it when done."""
    return {"chromium": Chromium, "firefox": Firefox, "webkit": WebKit}[name]()


class Browser(ABC):
    """One page of a browser."""

    @abstractmethod
    def goto(self, address: str) -> None:
        """Open an address and wait until the page is loaded."""

    @abstractmethod
    def resize(self, width: int, height: int) -> None:
        """Set the size of what the page sees, in CSS pixels."""

    def run(self, function: str, *values: Any) -> Any:
        """Call a JavaScript function with values; its result, both as JSON."""
        call = f"JSON.stringify((({function})({', '.join(json.dumps(value) for value in values)})) ?? null)"
        return json.loads(self._evaluate(call))

    @abstractmethod
    def press(self, x: float, y: float) -> None:
        """Click at a point of the window."""

    @abstractmethod
    def type(self, text: str) -> None:
        """Type characters; a line break is Enter."""

    @abstractmethod
    def picture(self, path: Path) -> None:
        """Write a picture of the window."""

    @abstractmethod
    def close(self) -> None:
        """End the browser."""

    @abstractmethod
    def _evaluate(self, expression: str) -> str:
        """The value of a JavaScript expression, a text."""


class Acting(Browser):
    """A browser that performs the actions of a pointer and a keyboard, as WebDriver describes them."""

    def press(self, x: float, y: float) -> None:
        """Click."""
        pointer = [{"type": "pointerMove", "x": round(x), "y": round(y)}]
        pointer += [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")]
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": pointer})

    def type(self, text: str) -> None:
        """Type."""
        keys = ["\ue007" if character == "\n" else character for character in text]
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keyboard", "actions": actions})

    @abstractmethod
    def _act(self, source: dict[str, Any]) -> None:
        """Perform the actions of one device."""


class Chromium(Browser):
    """Chromium, by Playwright."""

    def __init__(self) -> None:
        from playwright.sync_api import sync_playwright

        self._driver = sync_playwright().start()
        path = shutil.which(CHROMIUM_PROGRAM)
        self._browser = self._driver.chromium.launch(executable_path=path, args=list(CHROMIUM))
        self.page = self._browser.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)

    def goto(self, address: str) -> None:
        """Open an address."""
        self.page.goto(address)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page."""
        self.page.set_viewport_size({"width": width, "height": height})

    def _evaluate(self, expression: str) -> str:
        return str(self.page.evaluate(expression))

    def press(self, x: float, y: float) -> None:
        """Click."""
        self.page.mouse.click(x, y)

    def type(self, text: str) -> None:
        """Type."""
        self.page.keyboard.type(text)

    def picture(self, path: Path) -> None:
        """Write a picture."""
        self.page.screenshot(path=path)

    def close(self) -> None:
        """End it."""
        self._browser.close()
        self._driver.stop()


class Firefox(Acting):
    """Firefox, by WebDriver BiDi."""

    def __init__(self) -> None:
        from tornado.websocket import websocket_connect

        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        port = free_port()
        command = ["firefox-esr", "--headless", "--no-remote", "--profile", self._folder.name]
        self._process = start([*command, f"--remote-debugging-port={port}", "about:blank"])
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1)  # Playwright's loop may be running on the caller's
        wait_for_port(port)
        self._number = 0

        async def connect() -> Any:
            return await websocket_connect(f"ws://127.0.0.1:{port}/session", max_message_size=1 << 28)

        self._socket = self._wait(connect())
        self._call("session.new", capabilities={})
        self._context = self._call("browsingContext.getTree")["contexts"][0]["context"]

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._thread.submit(self._loop.run_until_complete, work).result()

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        number = self._number

        async def ask() -> Any:
            await self._socket.write_message(json.dumps({"id": number, "method": method, "params": params}))
            while True:
                message = await self._socket.read_message()
                if message is None:
                    raise ConnectionError("Firefox has closed the connection")
                answer = json.loads(message)
                if answer.get("id") == number:
                    return answer

        answer = self._wait(ask())
        if answer["type"] == "error":
            raise RuntimeError(f"{method}: {answer['message']}")
        return answer["result"]

    def goto(self, address: str) -> None:
        """Open an address."""
        self._call("browsingContext.navigate", context=self._context, url=address, wait="complete")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page."""
        viewport = {"width": width, "height": height}
        self._call("browsingContext.setViewport", context=self._context, viewport=viewport)

    def _evaluate(self, expression: str) -> str:
        target = {"context": self._context}
        found = self._call("script.evaluate", expression=expression, target=target, awaitPromise=True)
        if found["type"] != "success":
            raise RuntimeError(found["exceptionDetails"]["text"])
        return str(found["result"]["value"])

    def _act(self, source: dict[str, Any]) -> None:
        self._call("input.performActions", context=self._context, actions=[source])

    def picture(self, path: Path) -> None:
        """Write a picture."""
        path.write_bytes(
            base64.b64decode(self._call("browsingContext.captureScreenshot", context=self._context)["data"])
        )

    def close(self) -> None:
        """End it."""
        self._call("browser.close")
        self._process.wait(timeout=PATIENCE)
        self._thread.shutdown()
        self._loop.close()
        self._folder.cleanup()


class WebKit(Acting):
    """WebKitGTK, which stands for Safari, by WebDriver, in a virtual display."""

    def __init__(self) -> None:
        display, port = f":{90 + free_port() % 9000}", free_port()
        self._screen = start(["Xvfb", display, "-screen", "0", "2800x1600x24", "-nolisten", "tcp"])
        environment = {
            "DISPLAY": display,
            "WEBKIT_DISABLE_SANDBOX_THIS_IS_DANGEROUS": "1",
            "LIBGL_ALWAYS_SOFTWARE": "1",
        }
        self._driver = start(["WebKitWebDriver", f"--port={port}"], environment)
        wait_for_port(port)
        self._address = f"http://127.0.0.1:{port}/session"
        options = {"binary": WEBKIT, "args": ["--automation"]}
        session = self._call("", capabilities={"alwaysMatch": {"webkitgtk:browserOptions": options}})
        self._address += f"/{session['sessionId']}"

    def _call(self, command: str, method: str = "POST", **params: Any) -> Any:
        data = None if method != "POST" else json.dumps(params).encode()
        request = urllib.request.Request(self._address + command, data, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=2 * PATIENCE) as answer:  # noqa: S310
                return json.load(answer)["value"]
        except urllib.error.HTTPError as problem:
            raise RuntimeError(f"{command}: {json.load(problem)['value'].get('message')}") from None

    def goto(self, address: str) -> None:
        """Open an address."""
        self._call("/url", url=address)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page, without the window's frame; a window has a least width."""
        for _ in range(2):
            inner = self.run("() => [innerWidth, innerHeight]")
            now = self._call("/window/rect", "GET")
            more = [now["width"] + width - inner[0], now["height"] + height - inner[1]]
            self._call("/window/rect", width=more[0], height=more[1])
            time.sleep(0.5)

    def _evaluate(self, expression: str) -> str:
        return str(self._call("/execute/sync", script=f"return {expression}", args=[]))

    def _act(self, source: dict[str, Any]) -> None:
        self._call("/actions", actions=[source])

    def picture(self, path: Path) -> None:
        """Write a picture."""
        path.write_bytes(base64.b64decode(self._call("/screenshot", "GET")))

    def close(self) -> None:
        """End it."""
        self._call("", "DELETE")
        for process in (self._driver, self._screen):
            process.terminate()
            process.wait(timeout=PATIENCE)


def start(command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program whose output nobody reads."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, **(environment or {})})


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Wait until a program listens.

    Raises:
        TimeoutError: It does not.
    """
    for _ in range(int(10 * PATIENCE)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens at port {port} after {PATIENCE:.0f} s")
