"""The map of the blocks in a real Chromium, over a made-up cache: sizes, zoom, tokens, the past."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.clients.served import Served
from tools.page_server import SyntheticCache, page_server


@contextmanager
def shown(
    browser: Browser, num_blocks: int, num_running: int, *, frames_per_s: float = 0, steps: int = 60, **cache
) -> Iterator[Page]:
    """The page over a cache of this size; fails for errors."""
    wrong: list[str] = []
    made = SyntheticCache(num_blocks, num_running, **cache)
    for _ in range(steps):
        made.step()
    with (
        page_server(made, frames_per_s) as url,
        browser.new_context(viewport={"width": 1440, "height": 1000}) as context,
    ):
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.goto(url)
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#map h3").first).to_contain_text(f"of {num_blocks:,} blocks")
        expect(page.locator("#map h3").first).to_contain_text("shared")
        yield page
    assert wrong == []


def press(page: Page, *keys: str) -> None:
    """Press keys on the map, each after the view has come to rest."""
    canvas = page.locator("#map canvas").first
    canvas.focus()
    for key in keys:
        page.keyboard.press(key)
        page.wait_for_function("() => new Promise(done => setTimeout(() => done(true), 220))")


def cursor_note(page: Page) -> str:
    return page.locator("#block-note").inner_text()


def test_cells_lie_on_a_curve_whose_levels_fit_into_one_another(page: Page) -> None:
    assert page.evaluate(
        """async () => {
          const { spot, numberAt, layOut } = await import("/page/map/curve.js");
          for (let order = 1; order <= 6; order += 1) {
            let before = null;
            for (let number = 0; number < 4 ** order; number += 1) {
              const [x, y] = spot(order, number);
              const [above, aside] = spot(order - 1, number >> 2);
              if (numberAt(order, x, y) !== number || above !== x >> 1 || aside !== y >> 1) return `${order} ${number}`;
              if (before && Math.abs(before[0] - x) + Math.abs(before[1] - y) !== 1) return `${order} ${number} jumps`;
              before = [x, y];
            }
          }
          for (const count of [1, 2, 5, 682, 32768, 1000000]) {
            const { side, columns, rows } = layOut(count, 800, 400);
            if (side * side * columns * rows < count) return `${count} do not fit`;
          }
          return "";
        }"""
    ) == ""  # fmt: skip


def test_the_pyramid_after_changes_equals_a_new_one(page: Page) -> None:
    """Whatever changes in whatever order, and in any arrangement."""
    assert page.evaluate(
        """async () => {
          const { Mirror } = await import("/page/engine/mirror.js");
          const { Pyramid } = await import("/page/map/pyramid.js");
          const { arrange } = await import("/page/map/arrange.js");
          let seed = 7;
          const draw = (below) => (seed = (seed * 48271) % 2147483647) % below;
          const mirror = new Mirror({ block_size: 16, num_blocks: 700, num_host_blocks: 0 });
          const tier = mirror.device;
          tier.journal = [];
          const order = arrange(tier).order;
          const kept = [new Pyramid(tier, 16, null, 4), new Pyramid(tier, 16, order.slice().reverse(), 4)];
          for (let round = 0; round < 30; round += 1) {
            const ids = [...new Set(Array.from({ length: 40 }, () => draw(700)))];
            const states = ids.map(() => draw(4));
            tier.apply({
              ids, states, refs: ids.map((_, i) => (states[i] > 1 ? 1 + draw(5) : 0)), filled: ids.map(() => draw(17)),
              depths: ids.map(() => draw(9)), hits: ids.map(() => 0), hashes: ids.map(() => draw(500)),
              parents: ids.map(() => draw(500)),
              owners: ids.map((_, i) => (states[i] > 1 ? [draw(9), 9 + draw(9)] : [])),
            }, round);
            for (const pyramid of kept) pyramid.update(tier.journal);
            tier.journal = [];
            for (const pyramid of kept) {
              const anew = new Pyramid(tier, 16, pyramid.order, 4);
              if (JSON.stringify(pyramid.levels) !== JSON.stringify(anew.levels)) return `round ${round}`;
            }
            const arranged = arrange(tier);
            if (new Set(arranged.order).size !== 700) return "the arrangement loses blocks";
            if (arranged.groups.reduce((sum, { size }) => sum + size, 0) !== 700) return "the groups do not cover all";
          }
          return "";
        }"""
    ) == ""  # fmt: skip


def test_by_owner_the_shared_beginning_lies_before_those_who_share_it(chromium: Browser) -> None:
    with shown(chromium, 682, 6) as page:
        press(page, "Home", "Enter")
        expect(page.locator("#block-note")).to_contain_text(re.compile(r"owned · \d+ references|pinned"))
        order = page.evaluate(
            """async () => {
              const { arrange } = await import("/page/map/arrange.js");
              const { Mirror } = await import("/page/engine/mirror.js");
              const mirror = new Mirror({ block_size: 4, num_blocks: 8, num_host_blocks: 0 });
              mirror.device.apply({
                ids: [0, 1, 2, 3, 5, 6], states: [2, 2, 2, 1, 2, 2], refs: [1, 2, 1, 0, 2, 1],
                filled: [4, 4, 4, 4, 4, 2],
                depths: [2, 0, 2, 2, 1, 3], hits: [0, 1, 0, 0, 1, 0], hashes: [30, 10, 31, 32, 20, 0],
                parents: [20, 1, 20, 20, 10, 31], owners: [[7], [7, 8], [8], [], [7, 8], [8]],
              }, 1);
              const { order, groups } = arrange(mirror.device);
              return [[...order], groups.map(({ kind, size, owners }) => [kind, size, ...owners])];
            }"""
        )
        assert order[0][:6] == [1, 5, 0, 2, 6, 3]
        assert order[1] == [["shared", 2, 7, 8], ["owned", 1, 7], ["owned", 2, 8], ["cached", 1], ["free", 2]]


@pytest.mark.parametrize(("num_blocks", "num_running"), [(682, 6), (32_768, 96), (1_000_000, 128)])
def test_one_zooms_from_all_blocks_to_the_tokens_of_one(chromium: Browser, num_blocks: int, num_running: int) -> None:
    with shown(chromium, num_blocks, num_running) as page:
        press(page, "Home")
        if num_blocks > 1000:
            expect(page.locator("#block-note")).to_contain_text(re.compile(r"^[\d,]+ blocks, "), timeout=30_000)
            press(page, "Home")
            assert re.match(r"^[\d,]+ blocks, shared by", cursor_note(page))
        trail = page.get_by_role("navigation", name="Part of the cache shown")
        for _ in range(9):
            if "word" in cursor_note(page) and "Block" in trail.inner_text():
                break
            press(page, "Enter")
        expect(page.locator("#block-note .tokens li")).to_have_count(16)
        expect(trail).to_contain_text(re.compile(r"Whole map.*(shared by|pinned).*Block \d+", re.S))
        for _ in range(9):
            if page.get_by_role("button", name="Zoom out of the cache").is_disabled():
                break
            press(page, "Escape")
        expect(trail).to_have_text("Whole map")


def test_the_wheel_zooms_only_where_it_is_meant_for_the_map(chromium: Browser) -> None:
    with shown(chromium, 32_768, 96) as page:
        canvas = page.locator("#map canvas").first
        out = page.get_by_role("button", name="Zoom out of the cache")
        canvas.hover()
        page.mouse.wheel(0, -200)
        expect(out).to_be_disabled()
        page.evaluate("scrollTo(0, 0)")
        canvas.click()
        for _ in range(8):
            page.mouse.wheel(0, -100)
        expect(out).to_be_enabled()
        page.get_by_role("button", name="Whole map").click()
        expect(out).to_be_disabled()
        canvas.dblclick(position={"x": 30, "y": 30})
        expect(out).to_be_enabled()


def test_a_request_that_is_chosen_stands_out(chromium: Browser) -> None:
    with shown(chromium, 682, 6) as page:
        before = page.locator("#map canvas").first.screenshot()
        page.locator("#queues .request").first.click()
        expect(page.locator("#queues .request").first).to_have_attribute("aria-pressed", "true")
        page.wait_for_function("() => new Promise(done => setTimeout(() => done(true), 300))")
        assert page.locator("#map canvas").first.screenshot() != before


def test_a_queue_of_24_shows_all_of_them_in_two_columns_with_names(chromium: Browser) -> None:
    with shown(chromium, 4096, 24, num_waiting=0) as page:
        requests = page.locator("#queues .request")
        expect(requests).to_have_count(24)
        names = page.locator("#queues .request-head span:first-child").all_inner_texts()
        assert all(re.fullmatch(r"[a-z]+-\d+", name) for name in names)
        boxes = [box for box in (each.bounding_box() for each in requests.all()) if box]
        assert len({round(box["x"]) for box in boxes}) == 2
        queue = page.locator("#queues ul").first.evaluate("e => [e.scrollHeight, e.clientHeight]")
        assert queue[0] <= queue[1] + 1, "all are visible without scrolling"


def test_the_tiles_agree_with_the_last_whole_second_of_the_chart_when_one_goes_back(chromium: Browser) -> None:
    with shown(chromium, 682, 6, frames_per_s=20) as page:
        tile = page.locator("#figures dd span").first
        chart = page.locator("#speed")
        expect(tile).to_have_text(re.compile(r"^[1-9][\d,]+$"))
        page.wait_for_function("() => -Number(document.querySelector('#scrub').min) > 4")
        page.locator("#scrub").focus()
        for key in ("ArrowLeft",) * 12:
            page.keyboard.press(key)
        expect(page.locator("#moment")).not_to_have_text("live")
        # in each frame one part of the page is updated: after so many, all of them show that moment
        frames = "let left = 40; const next = () => (left-- ? requestAnimationFrame(next) : done()); next();"
        page.evaluate(f"() => new Promise(done => {{ {frames} }})")
        speed = re.compile(r"in the last whole second ([\d,]+)$")
        agreed = "() => document.querySelector('#speed').ariaLabel.endsWith('second ' + document.querySelector('#figures dd span').textContent)"  # noqa: E501
        page.wait_for_function(agreed)
        assert speed.search(chart.get_attribute("aria-label") or "")
        shown_at = page.evaluate("document.querySelector('#moment').textContent")
        value = tile.inner_text()
        # it is the number of tokens that the frames of that second reported, and stays it while the engine goes on
        page.wait_for_function("() => new Promise(done => setTimeout(() => done(true), 600))")
        assert tile.inner_text() == value
        assert page.evaluate("document.querySelector('#moment').textContent") >= shown_at


def test_tokens_are_hidden_where_they_could_be_someone_else_s(page: Page, served: Served) -> None:
    """The server of these tests has one key, so all callers are one tenant."""
    page.route("**/debug/cache/blocks*", lambda route: route.fulfill(status=200, json={"blocks": []}))
    with page.expect_request("**/debug/cache/blocks*") as asked:
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        expect(page.locator("#stop")).to_be_disabled()
        page.get_by_label("by place").check()
        page.locator("#map canvas").first.focus()
        page.keyboard.press("Enter")
    assert "tier=device&ids=" in asked.value.url
