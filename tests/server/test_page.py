"""The page's files: what is served, how, and what is never in them. How it behaves in a browser is tested elsewhere."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from quire.server.app import make_app
from tests.server.in_process import state_over

FOLDER = Path(str(files("quire.server").joinpath("page", "files")))
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
VENDOR = {
    str(file.relative_to(FOLDER).as_posix()): file.read_text()
    for file in sorted(FOLDER.joinpath("vendor").rglob("*"))
    if file.is_file()
}
FILES = {
    str(file.relative_to(FOLDER).as_posix()): file.read_text()
    for file in sorted(FOLDER.rglob("*"))
    if file.is_file() and FOLDER / "vendor" not in file.parents
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
INDEX = FILES["index.html"]


@pytest.fixture(scope="module")
def client() -> TestClient:
    llm = SimpleNamespace(tokenizer=SimpleNamespace(chat_templates={}))  # files need no engine
    return TestClient(make_app(state_over(llm, "tiny")))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_served_as_what_it_is(client: TestClient, name: str) -> None:
    answer = client.get("/" if name == "index.html" else f"/page/{name}")
    assert answer.status_code == 200
    assert answer.text == FILES[name]
    assert answer.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy


def test_the_page_of_endpoints_is_served_and_complete(client: TestClient) -> None:
    found = {file.name: file.read_text() for file in files("quire.server").joinpath("page", "docs").iterdir()}
    page = client.get("/docs")
    assert (page.status_code, page.text) == (200, found["index.html"])
    assert page.headers["content-security-policy"] == client.get("/").headers["content-security-policy"]
    for path in re.findall(r'(?:href|src)="((?:docs|page)/[^"]+)"', page.text):
        assert client.get(f"/{path}").status_code == 200, path
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", page.text) == []
    assert not any(re.search(r"https?://|innerHTML|\beval\(", text) for text in found.values())
    labelled = set(re.findall(r'<label for="([^"]+)"', page.text))
    assert set(re.findall(r'<input id="([^"]+)"', page.text)) == labelled


def test_what_a_browser_has_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/page/app.js").headers["etag"]
    again = client.get("/page/app.js", headers={"if-none-match": f'"old", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/page/app.js", headers={"if-none-match": '"old"'}).status_code == 200
    assert client.get("/page/styles/base.css").headers["etag"] != tag


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page",
        "/page/nothing.js",
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/map",
        "/page/map/",
        "/page/map/../../endpoint.py",
        "/page/map/%2e%2e/%2e%2e/endpoint.py",
        "/page/map/..%2f..%2fendpoint.py",
        "/page/vendor/README.md",
        "/page/vendor/marked/LICENSE",
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_is_small() -> None:
    assert sum(len(text.encode()) for text in FILES.values()) < 200_000


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    outside = re.findall(r"https?:[^\s\"')]*|[\"'(]//", FILES[name].replace("http://www.w3.org/2000/svg", ""))
    assert outside == []


def test_what_the_files_name_is_there() -> None:
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"', INDEX))
    for name, text in SCRIPTS.items():
        for path in re.findall(r'(?:from |new URL\()"(\.[^"]+)"', text):
            parts: list[str] = []
            for part in (PurePosixPath(name).parent / path).parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            named.add("/".join(parts))
    assert named == (set(FILES) | {name for name in VENDOR if name.endswith(".js")}) - {"index.html"}


@pytest.mark.parametrize("name", [name for name in VENDOR if name.endswith(".js")])
def test_a_library_is_served_as_it_was_published(client: TestClient, name: str) -> None:
    (digest,) = re.findall(
        rf"`{PurePosixPath(name).relative_to('vendor')}`.*`([0-9a-f]{{64}})`", VENDOR["vendor/README.md"]
    )
    assert hashlib.sha256(client.get(f"/page/{name}").content).hexdigest() == digest
    assert str(PurePosixPath(name).parent / "LICENSE") in VENDOR
    assert client.get(f"/page/{name}").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_text_becomes_markup_or_code(name: str) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|setHTML"
    assert re.findall(forbidden, SCRIPTS[name]) == []


def test_the_policy_allows_all_that_the_page_has() -> None:
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", INDEX) == []
    assert re.findall(r"<script(?![^>]*src=)", INDEX) == []


def test_scripts_use_what_the_page_has() -> None:
    ids = re.findall(r'\bid="([^"]+)"', INDEX)
    assert len(ids) == len(set(ids))
    used = {name for text in SCRIPTS.values() for name in re.findall(r'byId\("([^"]+)"\)', text)}
    assert used <= set(ids)


def test_whatever_can_be_filled_in_has_a_label() -> None:
    labelled = set(re.findall(r'<label[^>]*\bfor="([^"]+)"', INDEX))
    wrapped = {
        name
        for label in re.findall(r"<label\b[^>]*>(.*?)</label>", INDEX, re.S)
        for name in re.findall(r'id="([^"]+)"', label)
    }
    fields = set(re.findall(r'<(?:input|textarea|select)(?![^>]*aria-label=)[^>]*\bid="([^"]+)"', INDEX))
    assert fields <= labelled | wrapped
    referred = {
        name for names in re.findall(r'aria-(?:labelledby|describedby)="([^"]+)"', INDEX) for name in names.split()
    }
    assert referred <= set(re.findall(r'\bid="([^"]+)"', INDEX))
