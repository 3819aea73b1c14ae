"""The playground as a chat that people use: Markdown that cannot harm, branches, kept conversations, files, tools."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import FilePayload, Page, Route, expect

from tests.clients.chromium import NUMBERS, QUESTION, answers, ask, set_up
from tests.clients.served import Served

HOSTILE = [
    "<script>window.stolen = 1</script>",
    "<img src=x onerror='window.stolen = 1'>",
    "<svg/onload=window.stolen=1>",
    "[click](javascript:window.stolen=1)",
    "[click](JaVaScRiPt&colon;window.stolen=1)",
    "[click](data:text/html,<script>window.stolen=1</script>)",
    "![x](https://example.invalid/pixel.png)",
    "<iframe srcdoc='<script>parent.stolen=1</script>'></iframe>",
    "```html\n<img src=x onerror=window.stolen=1>\n```",
    '```"><img src=x onerror=window.stolen=1>\ncode\n```',
    "|a|\n|-|\n|<img src=x onerror=window.stolen=1>|",
    "&lt;script&gt;window.stolen=1&lt;/script&gt; &#60;b&#62;",
    '<a href="javascript:window.stolen=1" onclick="window.stolen=1">a</a>',
    "<style>body { display: none }</style><form action='https://example.invalid'><input name=key></form>",
    "[a](http://example.invalid/'onmouseover='window.stolen=1)",
]


def says(page: Page, text: str, num_pieces: int = 7) -> None:
    """Let the server's next answers be this text, in pieces."""
    size = max(1, len(text) // num_pieces)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    says_chunks(page, [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces])


def says_chunks(page: Page, chunks: list[dict], **last: object) -> None:
    body = stream([*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **last}])

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)


def stream(chunks: list[dict]) -> str:
    """The events of a streamed answer."""
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def sent(page: Page, act: Callable[[], None]) -> dict:
    """The body of the next request that `act` sends."""
    with page.expect_request("**/v1/chat/completions") as caught:
        act()
    return caught.value.post_data_json


def test_answers_are_markdown(page: Page) -> None:
    text = (
        "# Title\n\nSome *soft* and **strong** words, `code`, [a link](https://example.invalid/a), &amp; more.\n\n"
        "1. one\n2. two\n   - inner\n\n> quoted\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "```python\nprint('<b>')\n```\n\nThe end."
    )
    says(page, text, 40)
    ask(page, QUESTION)
    answer = page.locator(".turn.assistant .text")
    expect(answer).to_contain_text("The end.")
    assert answer.evaluate("e => [...e.children].map(each => each.tagName)") == [
        "H3", "P", "OL", "BLOCKQUOTE", "DIV", "DIV", "P",
    ]  # fmt: skip
    expect(answer.locator("pre code")).to_have_text("print('<b>')")
    expect(answer.locator("strong")).to_have_text("strong")
    expect(answer.locator("ol ul li")).to_have_text("inner")
    expect(answer.locator("td").first).to_have_text("1")
    link = answer.get_by_role("link", name="a link")
    assert link.get_attribute("href") == "https://example.invalid/a"
    assert "noopener" in (link.get_attribute("rel") or "")
    expect(answer).to_contain_text("& more")


@pytest.mark.parametrize("num_pieces", [1, 60])
def test_nothing_that_a_model_writes_becomes_markup_or_code(page: Page, num_pieces: int) -> None:
    says(page, "\n\n".join([*HOSTILE, "The end."]), num_pieces)
    ask(page, QUESTION)
    answer = page.locator(".turn.assistant .text")
    expect(answer).to_contain_text("The end.")
    allowed = {
        "A", "BLOCKQUOTE", "BUTTON", "CODE", "DIV", "P", "PRE", "SPAN", "STRONG",
        "TABLE", "TBODY", "TD", "TH", "THEAD", "TR",
    }  # fmt: skip
    assert set(answer.evaluate("e => [...e.querySelectorAll('*')].map(each => each.tagName)")) <= allowed
    attributes = answer.evaluate("e => [...e.querySelectorAll('*')].flatMap(each => each.getAttributeNames())")
    assert set(attributes) <= {"class", "href", "target", "rel", "tabindex", "role", "aria-label", "type"}
    hrefs = answer.evaluate("e => [...e.querySelectorAll('a')].map(each => each.protocol)")
    assert set(hrefs) <= {"https:", "http:", "mailto:"}
    assert page.evaluate("window.stolen") is None
    expect(answer).to_contain_text("<script>window.stolen = 1</script>")


def test_text_that_is_nested_absurdly_deep_is_shown_as_text(page: Page) -> None:
    says(page, ">" * 20_000 + " deep\n\nThe end.")
    ask(page, QUESTION)
    expect(page.locator(".turn.assistant .text")).to_contain_text("The end.")
    expect(page.locator("#stop")).to_be_disabled()


def test_the_work_for_a_long_answer_grows_with_its_length_only(page: Page) -> None:
    """Of each text every part is read a few times at most, however many pieces it arrives in."""
    read = page.evaluate(
        """async () => {
          const { Markdown } = await import("/page/chat/markdown.js");
          const { Lexer } = await import("/page/vendor/marked/marked.esm.js");
          const lex = Lexer.prototype.lex;
          let read = 0;
          Lexer.prototype.lex = function (text) { read += text.length; return lex.call(this, text); };
          const root = document.createElement("div");
          const growing = new Markdown(root);
          let length = 0;
          for (let i = 0; i < 400; i += 1) {
            const piece = i % 2 ? "More words of the same paragraph.\\n\\n" : "A *paragraph*. ";
            length += piece.length;
            growing.write(piece);
            if (i % 4 === 3) await new Promise((resolve) => setTimeout(resolve, 31));
          }
          growing.finish();
          Lexer.prototype.lex = lex;
          return [read, length, root.querySelectorAll("p").length];
        }"""
    )
    characters, length, paragraphs = read
    assert paragraphs == 200
    assert characters < 6 * length


def test_an_edited_message_is_a_branch_and_shares_the_beginning(page: Page) -> None:
    set_up(page, temperature="0", max_tokens="12", system="Answer shortly and well. " * 12)
    ask(page, QUESTION)
    first = answers(page)
    page.get_by_role("article", name="You").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("What does os.path.join do?")
    page.get_by_role("button", name="Send as a branch").click()
    expect(page.locator(".turn.user .text")).to_have_text("What does os.path.join do?")
    second = answers(page)
    assert len(second) == 1
    shared, of = re.findall(
        r"(\d+) of (\d+) tokens of the prompt were shared", page.locator(".turn").last.inner_text()
    )[0]
    assert int(of) / 2 < int(shared) < int(of)
    versions = page.get_by_role("article", name="You").get_by_role("group", name="Versions")
    expect(versions).to_contain_text("2/2")
    versions.get_by_role("button", name="Previous version").click()
    expect(page.locator(".turn.user .text")).to_have_text(QUESTION)
    expect(page.get_by_role("article", name="You").get_by_role("group", name="Versions")).to_contain_text("1/2")
    assert answers(page) == first
    expect(page.get_by_role("button", name="Previous version")).to_be_focused()


def test_an_answer_made_again_is_kept_beside_the_first(page: Page) -> None:
    says(page, "The first answer.")
    ask(page, QUESTION)
    assert answers(page) == ["The first answer."]
    says(page, "The second answer.")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".turn.assistant .text")).to_have_text("The second answer.")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".turn.assistant .text")).to_have_text("The first answer.")


def test_conversations_outlive_the_page(page: Page) -> None:
    says(page, "An answer that is **kept**.")
    ask(page, "The first question")
    answers(page)
    page.get_by_role("button", name="New conversation").click()
    ask(page, "The second question")
    answers(page)
    page.reload()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_text("Conversations (2)").click()
    page.get_by_role("button", name=re.compile("^The first question")).click()
    expect(page.locator(".turn.user .text")).to_have_text("The first question")
    expect(page.locator(".turn.assistant strong")).to_have_text("kept")
    page.get_by_role("button", name="Rename The first question").click()
    page.get_by_label("Title").fill("Kept")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name=re.compile("^Kept"))).to_be_visible()
    page.get_by_role("button", name="Delete Kept").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("Conversations (1)")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)


def test_what_is_deleted_during_an_answer_stays_deleted(page: Page, served: Served) -> None:
    says(page, "An answer.")
    ask(page, "A question")
    answers(page)
    page.unroute("**/v1/chat/completions")
    set_up(page)
    page.get_by_label("JSON that matches a schema").check()
    page.locator("#schema").fill(json.dumps(NUMBERS))
    ask(page, QUESTION)
    expect(page.locator(".turn.assistant[aria-busy] .text")).to_have_text(re.compile(r"^\[\s*\d+"))
    page.get_by_text("Conversations (1)").click()
    page.get_by_role("button", name="Delete A question").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("Conversations (0)")).to_be_visible()
    served.wait_until_idle()
    page.reload()
    expect(page.get_by_text("Conversations (0)")).to_be_visible()


def test_what_is_deleted_in_another_tab_during_an_answer_stays_deleted(page: Page, served: Served) -> None:
    says(page, "An answer.")
    ask(page, "A question")
    answers(page)
    other = page.context.new_page()
    other.goto(served.url)
    other.get_by_text("Conversations (1)").click()
    waiting: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: waiting.append(route))
    ask(page, QUESTION)
    expect(page.locator(".turn.assistant[aria-busy]")).to_be_visible()
    other.get_by_role("button", name="Delete A question").click()
    other.get_by_role("button", name="Delete", exact=True).click()
    expect(other.get_by_text("Conversations (0)")).to_be_visible()
    waiting[0].fulfill(
        content_type="text/event-stream", body=stream([{"choices": [{"index": 0, "delta": {"content": "Too late."}}]}])
    )
    assert answers(page) == ["An answer.", "Too late."]
    expect(page.get_by_role("alert")).to_have_text(re.compile("^this conversation was deleted in another tab"))
    expect(page.get_by_text("Conversations (0)")).to_be_visible()
    other.reload()
    expect(other.get_by_text("Conversations (0)")).to_be_visible()


def test_a_new_title_does_not_bring_back_what_another_tab_deleted(page: Page, served: Served) -> None:
    says(page, "An answer.")
    ask(page, "First")
    answers(page)
    page.get_by_role("button", name="New conversation").click()
    page.locator("#library").evaluate("e => { e.open = true }")
    other = page.context.new_page()
    other.goto(served.url)
    other.locator("#library").evaluate("e => { e.open = true }")
    other.get_by_role("button", name="Delete First").click()
    other.get_by_role("button", name="Delete", exact=True).click()
    expect(other.get_by_text("Conversations (0)")).to_be_visible()
    page.get_by_role("button", name="Rename First").click()
    page.get_by_label("Title").fill("Back again")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Conversations (0)")).to_be_visible()
    other.reload()
    expect(other.get_by_text("Conversations (0)")).to_be_visible()


def test_a_conversation_is_exported_and_imported(page: Page, tmp_path: Path) -> None:
    says(page, "An answer.")
    ask(page, "A question")
    answers(page)
    page.locator("#library").evaluate("e => { e.open = true }")
    with page.expect_download() as caught:
        page.get_by_role("button", name="Export this one").click()
    assert caught.value.suggested_filename == "A question.json"
    path = tmp_path / "exported.json"
    caught.value.save_as(path)
    page.get_by_role("button", name="New conversation").click()
    page.locator("#import-file").set_input_files(path)
    expect(page.locator(".turn.assistant .text")).to_have_text("An answer.")
    expect(page.get_by_text("Conversations (2)")).to_be_visible()
    nodes = {"root": {"id": "root", "children": ["1"], "chosen": "1"}, "1": {"id": "1", "children": ["root"]}}
    for wrong in ("no JSON", "[]", json.dumps({"nodes": nodes})):
        page.locator("#import-file").set_input_files(FilePayload(name="x.json", mimeType="", buffer=wrong.encode()))
        expect(page.get_by_role("alert")).to_contain_text("x.json was not imported")
        page.get_by_role("button", name="New conversation").click()


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": 5},
        {"files": [{"name": "a"}]},
        {"tool_calls": "abc"},
        {"tool_calls": [None]},
        {"tool_calls": [{"id": "a", "function": {"name": "f"}}]},
        {"tool_call_id": 1},
        {"figures": {}},
        {"reasoning": []},
        {"prompt": 5},
        {"marks": [1, "x"]},
        {"marks": [-1]},
        {"parent": "2"},
        {"id": "2"},
        {"settings": "x"},
        {"settings": {"seed": {"toString": 1}}},
    ],
    ids=str,
)
def test_a_malformed_import_is_not_kept(page: Page, wrong: dict) -> None:
    message = {"id": "1", "parent": "root", "children": [], "chosen": None, "role": "assistant", "content": "", **wrong}
    root = {"id": "root", "parent": None, "children": ["1"], "chosen": "1"}
    data = json.dumps({"nodes": {"root": root, "1": message}, "settings": wrong.get("settings")}).encode()
    page.locator("#import-file").set_input_files(FilePayload(name="x.json", mimeType="", buffer=data))
    expect(page.get_by_role("alert")).to_contain_text("x.json was not imported: this is not an exported conversation")
    page.reload()
    expect(page.get_by_text("Conversations (0)")).to_be_visible()


def test_text_files_go_with_a_message_and_others_do_not(page: Page) -> None:
    says(page, "Read.")
    files = page.locator("#file")
    files.set_input_files(FilePayload(name="notes.txt", mimeType="text/plain", buffer=b"some ``` notes"))
    expect(page.get_by_role("list", name="Attached files")).to_contain_text("notes.txt")
    files.set_input_files(FilePayload(name="picture.png", mimeType="image/png", buffer=b"\x89PNG\xff"))
    expect(page.get_by_role("alert")).to_have_text("picture.png is not a text file in UTF-8")
    files.set_input_files(FilePayload(name="large.txt", mimeType="text/plain", buffer=b"a" * 300_000))
    expect(page.get_by_role("alert")).to_contain_text("large.txt has 300,000 bytes: at most 262,144 are allowed")
    body = sent(page, lambda: ask(page, "What is in it?"))
    assert body["messages"][-1]["content"] == "File notes.txt:\n````\nsome ``` notes\n````\n\nWhat is in it?"
    expect(page.locator(".turn.user")).to_contain_text("notes.txt, 14 characters")


def test_parameters_go_with_the_request_and_with_the_conversation(page: Page) -> None:
    says(page, "Yes.")
    set_up(page, temperature="0.5", top_p="0.9", top_k="7", min_p="0.1", max_tokens="5", seed="3", system="Be brief.")
    page.locator("#stop_text").fill("END|STOP")
    page.locator("#stop_text").blur()
    body = sent(page, lambda: ask(page, QUESTION))
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 5, "seed": 3}
    assert body | given == body
    assert body["stop"] == ["END", "STOP"]
    assert body["model"] == "quire-tiny"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    answers(page)
    page.locator("#temperature").fill("1")
    page.reload()
    page.get_by_text("Conversations (1)").click()
    page.get_by_role("button", name=re.compile("^What does json.dumps")).click()
    expect(page.locator("#temperature")).to_have_value("0.5")


def test_accepted_drafts_are_marked_and_rejected_ones_counted(page: Page) -> None:
    parts = [
        ("def ", False),
        ("area", True),
        ("(r):\n", True),
        ("    return <b>", False),
        (" **3**", True),
        (" r", False),
    ]
    drafted = {False: {}, True: {"drafted": True}}
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}, **drafted[mark]}]} for text, mark in parts]
    says_chunks(page, chunks, timings={"decode_s": 0.5, "num_drafts": 9, "num_accepted_drafts": 4})
    body = sent(page, lambda: ask(page, QUESTION))
    assert "mark_drafts" not in body
    answers(page)
    expect(page.locator(".turn.assistant mark")).to_have_count(0)
    expect(page.locator(".figures-line").last).to_contain_text("4 of 9 drafts accepted, 5 rejected")
    set_up(page)
    page.get_by_label("mark tokens that were drafted").check()
    body = sent(page, lambda: ask(page, "Again"))
    assert body["mark_drafts"] is True
    answers(page)
    page.reload()
    page.get_by_text("Conversations (1)").click()
    page.get_by_role("button", name=re.compile("^What does json.dumps")).click()
    answer = page.locator(".turn.assistant .text").last
    expect(answer).to_have_text("".join(text for text, _ in parts))
    assert "".join(answer.locator("mark").all_text_contents()) == "area(r):\n **3**"
    expect(page.get_by_label("mark tokens that were drafted")).to_be_checked()


def test_a_request_that_is_refused_gives_the_message_back(page: Page, served: Served) -> None:
    set_up(page, max_tokens="100000000")
    page.once("console", lambda message: None)
    body = {"error": {"message": "max_tokens is too large", "param": "max_tokens"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=f"data: {json.dumps(body)}\n\n"))
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_have_text("max_tokens is too large")
    expect(page.get_by_label("Message", exact=True)).to_have_value(QUESTION)
    expect(page.locator(".turn")).to_have_count(0)
