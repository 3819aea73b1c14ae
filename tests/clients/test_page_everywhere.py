"""The page at three widths, light and dark: nothing is cut off, axe finds nothing, thumbs hit every control.

These tests make the screenshots of the docs (`make screenshots`).
"""

import os
import time
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.clients.chromium import QUESTION, answers, ask, keep, load, opened, set_up
from tests.clients.served import Served
from tools.page_server import SyntheticCache, page_server

CONTROLS = "button, summary, select, input:not([type=file]), textarea, .choices label, .modes label, .filters label"
OWNED_AND_SHARED = """canvas => {
  const names = ["shared", "shared-strong", ...Array.from({ length: 8 }, (_, i) => `owner-${i}`)];
  const style = getComputedStyle(document.documentElement);
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [light, strong, ...owners] = names.map((name) => rgb(style.getPropertyValue(`--${name}`).trim()));
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const counts = { owners: 0, shared: 0 };
  for (let i = 0; i < data.length; i += 4) {
    const [red, , blue] = data.slice(i, i + 3);
    const near = (each) => each.every((value, k) => Math.abs(data[i + k] - value) < 3);
    const isDark = red <= light[0] + 2 && red >= strong[0] - 2;
    if (owners.some(near)) counts.owners += 1;
    else if (isDark && blue - red >= strong[2] - strong[0] - 4) counts.shared += 1;
  }
  const all = canvas.width * canvas.height;
  return [counts.owners / all, counts.shared / all];
}"""
"""The shares of the canvas that have an owner's colour, and that are shared."""
EVICTED_FROM_THE_FRONT = """async () => {
  const { PrefixTree } = await import("/page/engine/tree.js");
  const list = document.createElement("ul");
  document.body.append(list);
  const tree = new PrefixTree(list, document.createElement("p"));
  const row = (id) => ({ id, children: [], size: 1, tokens: 16, refs: 0, hits: 1 });
  const found = [];
  for (let turn = 1; turn <= 24; turn += 1) {
    const ids = Array.from({ length: 8 }, (_, i) => turn + i);
    tree.forest = { roots: ids.map(row), numRuns: ids.length };
    tree.render(turn);
    const rows = [...list.querySelectorAll("[tabindex='0']")].map((item) => item.dataset.key);
    found.push(`${rows} of ${list.firstElementChild.dataset.key}`);
    if (turn === 1) list.firstElementChild.focus();
    else if (!list.contains(document.activeElement)) found.push(`the focus is lost in turn ${turn}`);
  }
  return found;
}"""
"""The rows of the prefix tree that Tab reaches, and the first one, in each turn: each evicts what was first before."""
CUT_EVENTS = """() => [...document.querySelectorAll('#events li')].map(li => [li, li.lastElementChild])
  .filter(([li, text]) => text.getBoundingClientRect().right > li.getBoundingClientRect().right + 1)
  .map(([, text]) => text.textContent)"""
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
DRAWN_S = 60
"""A million blocks come in pieces, and a worker arranges them."""
SMALL_TARGETS = """controls => [...document.querySelectorAll(controls)]
  .filter(e => e.checkVisibility() && !['radio', 'checkbox'].includes(e.type))
  .map(e => [e.id || e.textContent.trim() || e.tagName, e.getBoundingClientRect()])
  .filter(([, box]) => box.height < 43.5 || box.width < 43.5)
  .map(([name, box]) => `${name} ${box.width}x${box.height}`)"""


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_it_can_be_used_at_every_width_in_both_themes(chromium: Browser, served: Served, width: int) -> None:
    with opened(chromium, served, color_scheme="light") as page:
        page.set_viewport_size({"width": width, "height": 1100})
        set_up(page, temperature="0", system="You answer questions about Python's standard library in one sentence.")
        page.get_by_text("System prompt and parameters").click()
        for question in (QUESTION, "What does os.path.join do?"):
            ask(page, question)
            answers(page)
        page.get_by_role("article", name="You").last.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the message").fill("What does os.path.split do?")
        page.get_by_role("button", name="Send as a branch").click()
        answers(page)
        with load(served, 8):
            expect(page.locator("#tree")).to_contain_text("8 references")
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                is_fit(page, width, scheme)
        page.get_by_role("button", name="Theme").click()
        page.get_by_role("button", name="Theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def is_fit(page: Page, width: int, scheme: str) -> None:
    """Assert that nothing is cut off and nothing in anyone's way, with all that can be opened closed and open."""
    details = "document.querySelectorAll('#library, #settings')"
    page.evaluate(f"{details}.forEach(e => {{ e.open = false }})")
    page.evaluate("new Promise(done => setTimeout(done, 900))")  # until the arrangement follows
    if width == 1440:
        page.evaluate("scrollTo(0, 0)")
        keep(page, scheme)
    elif width == 390 and scheme == "light":
        keep(page, "narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT_EVENTS) == []
    page.evaluate(f"{details}.forEach(e => {{ e.open = true }})")
    page.locator("#map canvas").first.focus()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    if width == 390:
        assert page.evaluate(SMALL_TARGETS, CONTROLS) == []


@pytest.mark.parametrize(("num_blocks", "num_running"), [(682, 8), (32_768, 96), (1_000_000, 256)])
def test_who_has_what_is_seen_at_every_size(chromium: Browser, num_blocks: int, num_running: int) -> None:
    """Much of the map is in the colours of owners, and the darkest cells are those that are shared."""
    cache = SyntheticCache(num_blocks, num_running)
    for _ in range(400 if num_blocks < 1000 else 60):
        cache.step()
    with (
        page_server(cache, 10 if num_blocks < 1000 else 0) as url,
        chromium.new_context(viewport={"width": 1440, "height": 1000}, color_scheme="light") as context,
    ):
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#map h3").first).to_contain_text(f"of {num_blocks:,} blocks")
        expect(page.locator("#tree")).to_contain_text("references")
        canvas, shares, ends_s = page.locator("#map canvas").first, [0.0, 0.0], time.monotonic() + DRAWN_S
        while not (shares[0] > 0.2 and shares[1] > 0.0002) and time.monotonic() < ends_s:
            page.wait_for_timeout(300)
            shares = canvas.evaluate(OWNED_AND_SHARED)
        assert shares[0] > 0.2
        assert shares[1] > 0.0002
        keep_map(page, num_blocks)


def keep_map(page, num_blocks: int) -> None:
    if folder := os.environ.get("QUIRE_SCREENSHOTS"):
        page.locator("section[aria-labelledby=blocks-title]").screenshot(path=Path(folder) / f"blocks-{num_blocks}.png")


def test_one_row_of_the_prefix_tree_is_reached_by_tab_whatever_is_evicted(chromium: Browser) -> None:
    """Only a quarter of the rows is updated at a time; the row that Tab reached may go when others are due."""
    with page_server(SyntheticCache(682, 8), 0) as url, chromium.new_context() as context:
        page = context.new_page()
        page.goto(url)
        found = page.evaluate(EVICTED_FROM_THE_FRONT)
    assert found == [f"{turn} of {turn}" for turn in range(1, 25)]
