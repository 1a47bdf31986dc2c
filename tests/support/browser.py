"""A browser that a test drives: Chromium without a screen, spoken to in the DevTools protocol over two pipes.

::

    with Browser(tmp_path / "profile") as browser:
        page = browser.page("http://127.0.0.1:9577/")
        page.type("#q", "order-7")
        page.press("Enter")
        page.wait("document.querySelectorAll('tr.hit').length > 0")

What the page asked the network for is in ``page.requests``, what it said on the console in ``page.complaints``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.daemon import Daemon
from support.missing import need, requires
from support.small_log import SEGMENT_SIZE, SIZES

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    """The program, which the test cannot do without."""
    found = next((found for name in _NAMES if (found := shutil.which(name))), None)
    return found or need(_NAMES[0])


#: Marks a test that opens a page, or a module's tests: ``pytestmark = CHROMIUM``.
CHROMIUM = requires_chromium = requires(chromium)


_SECONDS = 60.0
_KEYS = {
    "Enter": (13, "\r"), "Escape": (27, ""), "ArrowDown": (40, ""), "ArrowUp": (38, ""), "Tab": (9, ""),
    "/": (191, "/"), "j": (74, "j"), "k": (75, "k"),
}  # fmt: skip


class Browser:
    """One process of Chromium for a ``with`` block; it resolves no names but this machine's."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._number = 0
        self._buffer = b""
        self.pages: dict[str, Tab] = {}

    def __enter__(self) -> Self:
        words = [
            chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
            "--disable-default-apps", "--disable-domain-reliability", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={self._profile}",
            "about:blank",
        ]  # fmt: skip
        self._profile.mkdir(parents=True, exist_ok=True)
        # It reads commands from its descriptor 3 and writes to 4, each ended by a zero.
        self._end, theirs = socket.socketpair()
        with theirs, (self._profile / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{theirs.fileno()} 4>&{theirs.fileno()}', "bash", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"HOME": str(self._profile), "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def page(self, address: str = "", *, width: int = 1280, dark: bool = False, script: bool = True) -> Tab:
        """A new page, empty or opened, in a profile of its own; ``script``: whether it runs JavaScript."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self.pages[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.call("Emulation.setScriptExecutionDisabled", value=not script)
        if address:
            tab.open(address)
        return tab

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; AssertionError says what the browser objects to."""
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        self._end.sendall(json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            said = self.hear(deadline - time.monotonic())
            assert said is not None, f"no answer to {method}"
            if said.get("id") == number:
                assert "error" not in said, f"{method}: {said['error']}"
                result: dict[str, Any] = said["result"]
                return result

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """The next message of the browser, None when none comes in time; events go to their page too."""
        self._end.settimeout(max(seconds, 0.001))
        while b"\0" not in self._buffer:
            try:
                read = self._end.recv(1 << 20)
            except TimeoutError:
                return None
            assert read, "the browser has ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        said: dict[str, Any] = json.loads(line)
        if said.get("sessionId") in self.pages and "method" in said:
            self.pages[said["sessionId"]].note(said["method"], said["params"])
        return said


class Tab:
    """One page. ``requests``: every address that was asked for; ``complaints``: errors, and refusals of the policy."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self._loads = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command to this page."""
        return self._browser.call(method, self._session, **parameters)

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        """Keep what an event says."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(f"{parameters['entry']['source']}: {parameters['entry']['text']}")

    def open(self, address: str) -> None:
        """Go there and wait until it is loaded."""

        def navigate() -> None:
            result = self.call("Page.navigate", url=address)
            assert "errorText" not in result, f"{address}: {result['errorText']}"

        self.navigate(navigate)

    def navigate(self, act: Callable[[], None]) -> None:
        """Do what leads to another page, and wait until that is loaded."""
        loads = self._loads
        act()
        deadline = time.monotonic() + _SECONDS
        while self._loads == loads:
            assert time.monotonic() < deadline, "no page is loaded"
            self._browser.hear(0.1)

    def eval(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, f"{expression}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.eval(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"waited for {expression}; the page says: {self.text()[:3000]}"
            time.sleep(0.03)

    def text(self, selector: str = "body") -> str:
        """The text that a person sees there; empty where nothing is."""
        return str(self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def html(self) -> str:
        """The document as it stands, without running anything in it."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        return str(self.call("DOM.getOuterHTML", nodeId=root)["outerHTML"])

    def type(self, selector: str, text: str) -> None:
        """Put the cursor into a field, select what is there and type over it."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.eval(f"{field}.focus(), {field}.select(), true")
        self.call("Input.insertText", text=text)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            code, text = _KEYS[key]
            pressed = {"key": key, "windowsVirtualKeyCode": code, "text": text, "unmodifiedText": text}
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **pressed)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """Click on the middle of an element, scrolled into view; works without JavaScript in the page."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        assert node, f"there is no {selector}"
        self.call("DOM.scrollIntoViewIfNeeded", nodeId=node)
        quad = self.call("DOM.getContentQuads", nodeId=node)["quads"][0]
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": sum(quad[0::2]) / 4, "y": sum(quad[1::2]) / 4}
            self.call("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)


class Page:
    """One page, opened from its file: ``dom`` behind its scripts, and the hosts that it ``asked`` for."""

    def __init__(self, path: Path, profile: Path, *, width: int = 1280, dark: bool = False) -> None:
        with Browser(profile) as browser:
            tab = browser.page(path.as_uri(), width=width, dark=dark)
            self.dom = tab.html()
            self.asked = {urlsplit(url).hostname for url in tab.requests} - {None}


#: Odd offsets behind it are no doubles.
BEGIN = 2**53 + 3 * SEGMENT_SIZE
TOPIC = "OrderPaid"
BODY = '{"order": 7, "amount": 12.50, "id": 12345678901234567890, "lines": [{"sku": "A"}, []], "order": 8}'


class Beside:
    """A log that a test writes on, the daemon beside it, and where its page is; the block ends both."""

    def __init__(self, home: Path, **env: str) -> None:
        self.writer = CommitLogWriter(home / "store" / "commitlog", SEGMENT_SIZE, start_offset=BEGIN)
        self.offsets: dict[str, list[int]] = {}
        self._home, self._env = home, env
        self._daemons = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._daemons:
            self.daemon.kill()
        self.writer.close()

    def write(self, topic: str, key: str, *, body: str = BODY, **properties: str) -> int:
        """One message, stored now; its physical offset."""
        now = int(time.time() * 1000)
        given = {"KEYS": key, "UNIQ_KEY": f"{len(self.offsets):032X}", **properties}
        spec = FrameSpec(topic, body=body.encode(), properties=given, born_timestamp=now, store_timestamp=now)
        offset = self.writer.append(spec)
        self.offsets.setdefault(key, []).append(offset)
        return offset

    def start(self, http: str = "127.0.0.1:0") -> None:
        """Start the daemon, caught up."""
        env = {"INDEXD_HTTP": http, **self._env}
        self.daemon = self._daemons.enter_context(Daemon(self._home / "store", self._home / "data", *SIZES, env=env))
        self.caught_up()

    def caught_up(self) -> None:
        """Wait until all that was written is indexed."""
        self.daemon.wait_caught_up(self.writer.max_offset)

    @property
    def address(self) -> str:
        """Of the page."""
        return f"http://{self.daemon.state()['http']}/"

    def search(self, q: str, /, **more: str) -> str:
        """The address of a search."""
        return self.address + "?" + urlencode({"topic": TOPIC, "q": q} | more)
