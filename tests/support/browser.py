"""A real browser: Chromium or Chrome, driven in a thread of its own.

Playwright's synchronous interface runs an event loop in its thread, where Django
refuses to touch the database.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

#: The first takes half as much of a processor, as it has no windows of its own to draw.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: The system's; without one, Playwright runs its own.
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)

# A closed network is tried again and again by what runs in the background.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

#: No page takes longer than this to do what a test waits for, in milliseconds.
TIMEOUT = 15_000

WIDE = {"width": 1180, "height": 800}
NARROW = {"width": 390, "height": 800}


class Window:
    """One page in a session of its own; the page's methods, run in its thread."""

    def __init__(self, do: Callable[..., Any], page: Any, url: str) -> None:
        self.do, self.page, self.url = do, page, url
        #: What the browser complained about: errors in scripts, refused resources.
        self.complaints: list[str] = []
        page.set_default_timeout(TIMEOUT)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _console(self, message: Any) -> None:
        # Pages that are refused, and icons that a server doesn't have, are no fault.
        loaded = "Failed to load resource" in message.text
        if loaded and "/static/" not in message.location["url"]:
            return
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.page, name)
        return lambda *args, **kwargs: self.do(method, *args, **kwargs)

    def open(self, path: str) -> None:
        """Go to a path of the server under test."""
        self.goto(self.url + path)

    def type(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        for key in keys:
            self.do(self.page.keyboard.press, key)

    def follow(self, selector: str) -> None:
        """Click, and wait for the page that this leads to."""
        self._navigate(self.page.click, selector)

    def enter(self) -> None:
        """Press Enter, and wait for the page that this leads to."""
        self._navigate(self.page.keyboard.press, "Enter")

    def _navigate(self, action: Callable[[str], None], argument: str) -> None:
        def act() -> None:
            with self.page.expect_navigation():
                action(argument)

        self.do(act)

    def log_in(self, username: str, password: str, path: str = "/admin/") -> None:
        """Log in at the admin's page and go where that leads."""
        self.open(f"/admin/login/?next={path}")
        self.fill("#id_username", username)
        self.fill("#id_password", password)
        self.follow("[type=submit]")

    def close(self) -> None:
        self.do(self.page.context.close)


class Browser:
    """Chromium, and the thread that it is driven from."""

    def __init__(self, do: Callable[..., Any], chromium: Any) -> None:
        self.do, self.chromium = do, chromium

    def window(self, url: str, **options: Any) -> Window:
        """Open a window with cookies of its own."""
        options = {"viewport": WIDE, "locale": "en", **options}

        def make() -> Window:
            page = self.chromium.new_context(**options).new_page()
            return Window(self.do, page, url)

        window: Window = self.do(make)
        return window


@contextmanager
def launch() -> Iterator[Browser]:
    """Run Chromium for the length of a block."""
    from playwright.sync_api import sync_playwright

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="browser") as thread:

        def do(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return thread.submit(function, *args, **kwargs).result()

        playwright = do(sync_playwright().start)
        try:
            chromium = do(
                playwright.chromium.launch,
                executable_path=EXECUTABLE,
                args=ARGUMENTS,
            )
            yield Browser(do, chromium)
            do(chromium.close)
        finally:
            do(playwright.stop)
