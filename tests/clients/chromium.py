"""The page in a real Chromium: opening it, asking, loading the server, and keeping screenshots.

Screenshots are kept in the folder that QUIRE_SCREENSHOTS names, if there is one.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from playwright.sync_api import Browser, Page, expect

from tests.clients.served import KEY, MODEL, Served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUESTION = "What does json.dumps do?"
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 900}
"""no answer in this form ends soon"""
NO_ARGUMENTS = {"parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
COMMON = "All requests begin so, and so they share the blocks of the cache that hold this beginning. " * 4

expect.set_options(timeout=60_000)


@contextmanager
def opened(browser: Browser, served: Served, **options) -> Iterator[Page]:
    """The page with its key, connected to the engine. Fails for what goes wrong with it, and for calls to elsewhere."""
    wrong: list[str] = []
    with browser.new_context(viewport={"width": 1440, "height": 1000}, **options) as context:
        context.add_init_script(f"sessionStorage.setItem('quire-api-key', {json.dumps(KEY)})")
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("request", lambda asked: None if asked.url.startswith(served.url) else wrong.append(asked.url))
        page.goto(served.url)
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#model")).to_have_text(MODEL)
        yield page
        assert wrong == []
    served.wait_until_idle()


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def set_up(page: Page, **fields: str) -> None:
    """Fill in parameters."""
    if not page.locator("#system").is_visible():
        page.get_by_text("System prompt and parameters").click()
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)


def answers(page: Page) -> list[str]:
    """Of the turns whose answer has ended."""
    expect(page.locator("#stop")).to_be_disabled()
    return page.locator(".turn.assistant .text").all_inner_texts()


@contextmanager
def load(served: Served, num_requests: int = 3, **more: Any) -> Iterator[None]:
    """So many requests at once until the block ends, all with the same beginning; `more` is for the client."""
    stop = threading.Event()

    def run(i: int) -> None:
        asked = {"model": MODEL, "prompt": f"{COMMON}{i}", "max_tokens": 1800, "extra_body": {"ignore_eos": True}}
        with OpenAI(**served.openai) as client:
            while not stop.is_set():
                with client.completions.create(**asked, stream=True, **more) as stream:
                    while not stop.is_set() and next(stream, None) is not None:
                        pass

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_requests)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def keep(page: Page, name: str) -> None:
    """A screenshot of what is visible."""
    if folder := os.environ.get("QUIRE_SCREENSHOTS"):
        expect(page.locator("#figures dd").nth(3)).to_have_text(re.compile(r"^[4-9]\d"))  # much of the cache is in use
        page.screenshot(path=Path(folder) / f"{name}.png")  # makes the folder
