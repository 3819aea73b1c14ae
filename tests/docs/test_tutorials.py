"""Every command and program of the tutorials runs, and prints what the page shows."""

from pathlib import Path

import pytest

from tests.docs.tutorial import Reader, blocks, matches

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.name != "index.md")
EXAMPLES = {
    ("agents-with-tools", "agent.py"): "agent.py",
    ("chat-app", "app.py"): "chat_app/app.py",
    ("chat-app", "index.html"): "chat_app/index.html",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_reader_who_follows_a_tutorial_sees_what_it_shows(page: Path, tmp_path: Path) -> None:
    with Reader(tmp_path, is_forked="pgrep" not in page.read_text(encoding="utf-8")) as reader:
        reader.follow(page)


@pytest.mark.slow
def test_the_how_to_page_of_chat_templates_shows_the_prompt_that_is_made(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        reader.follow(ROOT / "docs" / "how-to" / "chat-templates.md")


def test_all_tutorials_are_listed() -> None:
    listed = (ROOT / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")
    assert len(TUTORIALS) == 8
    assert [page.name for page in TUTORIALS if f"({page.name})" not in listed] == []


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_only_what_needs_a_network_is_not_run(page: Path) -> None:
    found = blocks(page)
    assert {block.language for block in found} <= {"bash", "python", "console", "text", "yaml", "html"}
    for block in found:
        if block.language == "console":
            assert "Qwen/" in block.text, f"this block needs no download, so it must be run: {block.text}"
    assert page.read_text(encoding="utf-8").count("```") % 2 == 0


@pytest.mark.parametrize(("page", "title"), EXAMPLES)
def test_a_program_that_is_an_example_too_is_the_same(page: str, title: str) -> None:
    (shown,) = [block.text for block in blocks(ROOT / "docs" / "tutorials" / f"{page}.md") if block.title == title]
    assert shown == (ROOT / "examples" / EXAMPLES[page, title]).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("printed", "shown", "expected"),
    [
        ("a\nb\n", "a\nb", True),
        ("a\nb", "a", False),
        ("a 12 b", "a ... b", True),
        ("1\nx\n2\n3", "1\n...\n3", True),
        ("1.5", "1?5", False),
    ],
)
def test_output_is_compared(printed: str, shown: str, expected: bool) -> None:
    assert matches(printed, shown) is expected
