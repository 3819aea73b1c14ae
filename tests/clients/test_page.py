"""The page in a real Chromium: a chat, the cache while it is filled and shared, and nothing goes wrong meanwhile."""

import json
import re

from playwright.sync_api import Browser, Page, expect

from tests.clients.chromium import NO_ARGUMENTS, NUMBERS, QUESTION, answers, ask, load, opened, set_up
from tests.clients.served import KEY, MODEL, Served


def test_a_turn_is_answered_and_what_was_said_comes_from_the_cache(page: Page) -> None:
    set_up(page, temperature="0")
    ask(page, QUESTION)
    assert "Serialize" in answers(page)[0]
    ask(page, "And json.loads?")
    assert len(answers(page)) == 2
    (cached,) = re.findall(r"(\d+) of \d+ tokens of the prompt were shared", page.locator(".turn").last.inner_text())
    assert int(cached) > 16
    expect(page.locator("#tree")).to_contain_text(re.compile(r"[1-9]\d* hit"))
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_blocks_are_allocated_shared_and_given_back(page: Page, served: Served) -> None:
    blocks = page.locator("#map h3").first
    with load(served):
        expect(blocks).to_have_text(re.compile(r", [1-9]\d* owned"))
        expect(page.locator("#queues .request")).to_have_count(3)
        expect(page.locator("#tree")).to_contain_text("3 references")
        page.get_by_role("button", name="Pause").click()
    served.wait_until_idle()
    page.get_by_label("by place").check()
    page.locator("#map canvas").first.focus()
    note = page.locator("#block-note")
    expect(note).to_contain_text("Block 0:")
    for _ in range(700):
        if "3 references" in note.inner_text():
            break
        page.keyboard.press("n")
    expect(note).to_contain_text(re.compile("owned · 3 references .*16 of 16 tokens"))
    expect(blocks).to_have_text(re.compile(r", [1-9]\d* owned"))  # as it was when it was paused
    page.locator("#pause").click()
    expect(blocks).to_have_text(re.compile(", 0 owned"))
    expect(page.locator("#queues")).to_contain_text("No request is running.")


def test_an_answer_is_made_again_and_copied(page: Page, served: Served) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
    set_up(page, temperature="0")
    ask(page, QUESTION)
    first = answers(page)
    set_up(page, max_tokens="3")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".turn").last).to_contain_text("ended at the token limit")
    (again,) = answers(page)
    assert first[0].startswith(again)
    assert len(again) < len(first[0])
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == again


def test_a_tool_is_called_and_its_result_is_sent(page: Page) -> None:
    set_up(page, temperature="0", max_tokens="200")
    page.get_by_label("text or tool calls").check()
    page.get_by_label("Tool choice").select_option("required")
    page.locator("#tools").fill(json.dumps([{"type": "function", "function": {"name": "now"} | NO_ARGUMENTS}]))
    ask(page, QUESTION)
    expect(page.locator(".turn.assistant pre")).to_have_text(re.compile(r"now\(\{\s*\}\)"))
    page.get_by_label("Tool choice").select_option("none")
    page.get_by_label("Result of now").fill("noon")
    page.get_by_role("button", name="Send").click()
    assert len(answers(page)) == 2
    expect(page.get_by_role("article", name="result of now")).to_contain_text("noon")


def test_the_past_is_shown_when_one_goes_back(page: Page, served: Served) -> None:
    queues, moment = page.locator("#queues"), page.locator("#moment")
    with load(served):
        expect(page.locator("#queues .request")).to_have_count(3)
        expect(page.locator("#figures dd").first).to_have_text(re.compile(r"\d{3}"))  # after a second or so
        page.wait_for_timeout(3000)  # a past to go back to
    served.wait_until_idle()
    expect(queues).to_contain_text("No request is running.")
    page.locator("#scrub").focus()
    for _ in range(200):
        page.keyboard.press("ArrowLeft")
        for _ in range(6):  # the parts of the page are drawn in turn, one in a frame
            page.evaluate("new Promise(requestAnimationFrame)")
        if page.locator("#queues .request").count() == 3:
            break
    expect(page.locator("#queues .request")).to_have_count(3)
    expect(moment).not_to_have_text("live")
    page.keyboard.press("End")
    expect(moment).to_have_text("live")
    expect(queues).to_contain_text("No request is running.")


def test_the_speed_of_a_short_answer_is_the_one_that_the_server_measured(page: Page) -> None:
    """All of it arrives in one piece, so that the browser cannot measure how long it took."""
    first = {"index": 0, "delta": {"role": "assistant", "content": "Nine."}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
    chunks = [{"choices": [first]}, {"choices": [], "usage": usage, "timings": {"decode_s": 0.4}}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, QUESTION)
    expect(page.locator(".turn-foot").last).to_contain_text("9 tokens · 20.0 tokens/s")


def test_requests_are_named_as_their_clients_named_them_or_by_their_kind(page: Page, served: Served) -> None:
    names = page.locator("#queues .request-head span:first-child")
    with load(served, 1, extra_headers={"x-request-id": "nightly"}):
        expect(names).to_have_text(["nightly"])
    with load(served, 1):
        expect(names).to_have_text([re.compile(r"^completion \d+$")])


def test_a_narrow_page_has_buttons_for_thumbs_and_nothing_beside_it(chromium: Browser, served: Served) -> None:
    with opened(chromium, served) as page:
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        boxes = [page.get_by_role("button", name=name).bounding_box() for name in ("Regenerate", "Stop", "Send")]
        assert all(box is not None and box["height"] >= 44 and box["x"] + box["width"] <= 360 for box in boxes)
        assert len({box["y"] for box in boxes if box}) == 1, "in one row"


def test_an_answer_is_streamed_and_stopped(page: Page, served: Served) -> None:
    set_up(page)
    page.get_by_label("JSON that matches a schema").check()
    page.locator("#schema").fill(json.dumps(NUMBERS))
    ask(page, QUESTION)
    expect(page.locator(".turn.assistant[aria-busy] .text")).to_have_text(re.compile(r"^\[\s*\d+"))
    page.get_by_role("button", name="Stop").click()
    assert not answers(page)[0].endswith("]")
    expect(page.locator(".turn").last).to_contain_text("stopped")
    served.wait_until_idle()


def test_an_answer_fits_its_schema(page: Page) -> None:
    set_up(page, temperature="0", max_tokens="200")
    page.get_by_label("JSON that matches a schema").check()
    expect(page.locator("#schema")).to_have_value(re.compile("properties"))
    page.locator("#schema").fill(
        json.dumps(
            {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "required": ["ok"],
                "additionalProperties": False,
            }
        )
    )
    ask(page, QUESTION)
    assert set(json.loads(answers(page)[0])) == {"ok"}
    page.locator("#schema").fill("{no JSON")
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_contain_text("JSON schema")


def test_all_of_it_works_from_the_keyboard(page: Page, served: Served) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
    page.keyboard.press("Enter")
    message = page.get_by_label("Message", exact=True)
    expect(message).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    assert len(answers(page)) == 1
    expect(message).to_be_focused()
    with load(served, 1):
        expect(page.locator("#scrub")).to_be_enabled()
    reached: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if reached[-1] == "BODY":
            break
        outline = page.evaluate("(e => e.outlineStyle + e.boxShadow)(getComputedStyle(document.activeElement))")
        assert outline != "nonenone", f"{reached[-1]} does not show that it has the focus"
    assert {"regenerate", "send", "pause", "scrub", "CANVAS", "events"} <= set(reached)


def test_without_its_key_it_says_what_is_missing(chromium: Browser, served: Served) -> None:
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(served.url)
        expect(page.locator("#link")).to_contain_text("Enter an API key")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#model")).to_have_text(MODEL)


def test_a_pause_while_nothing_is_received_does_not_stop_the_view(chromium: Browser, served: Served) -> None:
    wrong: list[str] = []
    with chromium.new_context() as context:
        context.add_init_script(f"sessionStorage.setItem('quire-api-key', {json.dumps(KEY)})")
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(served.url)
        link, key = page.locator("#link"), page.get_by_label("API key")
        expect(link).to_have_text("live")
        key.fill("wrong")
        page.keyboard.press("Enter")
        expect(link).to_contain_text("Enter an API key")
        page.locator("#pause").click()
        for _ in range(5):
            page.evaluate("new Promise(requestAnimationFrame)")
        key.fill(KEY)
        page.keyboard.press("Enter")
        expect(link).to_have_text("live")
        with load(served, 1):
            expect(page.locator("#queues .request")).to_have_count(1)
        assert wrong == []


def test_after_a_pause_an_idle_engine_is_live_again(page: Page) -> None:
    """It sends nothing that would say so."""
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#link")).to_have_text("paused; the engine continues")
    page.get_by_role("button", name="Go live").click()
    expect(page.locator("#link")).to_have_text("live")


def test_the_page_of_endpoints_shows_the_fields_of_each(chromium: Browser, served: Served) -> None:
    wrong: list[str] = []
    with chromium.new_context() as context:
        context.add_init_script(f"sessionStorage.setItem('quire-api-key', {json.dumps(KEY)})")
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(served.url) else wrong.append(asked.url))
        page.goto(f"{served.url}/docs")
        page.get_by_label("Show endpoints that contain").fill("/api/chat")
        expect(page.get_by_role("status")).to_have_text("1 endpoints")
        page.locator("details:not([hidden]) summary").click()
        expect(page.locator("details:not([hidden])")).to_contain_text("keep_alive")
        expect(page.locator("details:not([hidden])")).to_contain_text("repeat_penalty")
        assert wrong == []
