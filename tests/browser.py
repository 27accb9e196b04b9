"""A real browser, and pages that must be silent: no console error, no request that leaves them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
Open = Callable[..., Any]


def until(page: Any, expression: str) -> None:
    """Wait for it to be true. playwright's own way evaluates inside the page, which the page's policy forbids."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """open_page(url, **options of the context) -> page; afterwards nothing may have gone wrong in any of them."""
    troubles: list[str] = []
    contexts: list[Any] = []

    def open_(url: str, wait: str = ".plot[data-drawn=yes]", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1360, "height": 900}} | options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        origin = url if url.startswith("http") else "file:"
        page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((origin, "data:", "blob:")) else troubles.append(request.url)
            ),
        )
        page.goto(url)
        if wait:
            page.wait_for_selector(wait)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert troubles == []
