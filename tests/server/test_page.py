"""The page's files: what is served, how, and what is never in them. How it behaves in a browser is tested elsewhere."""

import re
from importlib.resources import files
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from quire.server.app import make_app
from quire.server.config import ServerArgs
from quire.server.http.state import ServerState

FILES = {
    file.name: file.read_text() for file in files("quire.server").joinpath("page", "files").iterdir() if file.is_file()
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
INDEX = FILES["index.html"]


@pytest.fixture(scope="module")
def client() -> TestClient:
    llm = SimpleNamespace(tokenizer=SimpleNamespace(chat_templates={}))  # files need no engine
    return TestClient(make_app(ServerState(llm=llm, args=ServerArgs(), model_names=("tiny",))))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_served_as_what_it_is(client: TestClient, name: str) -> None:
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    answer = client.get("/" if name == "index.html" else f"/page/{name}")
    assert answer.status_code == 200
    assert answer.text == FILES[name]
    assert answer.headers["content-type"].split(";")[0] == types[name.rpartition(".")[2]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy


def test_what_a_browser_has_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/page/app.js").headers["etag"]
    again = client.get("/page/app.js", headers={"if-none-match": f'"old", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/page/app.js", headers={"if-none-match": '"old"'}).status_code == 200
    assert client.get("/page/style.css").headers["etag"] != tag


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
    for text in SCRIPTS.values():
        named |= set(re.findall(r'from "\./([^"]+)"', text))
    assert named == set(FILES) - {"index.html"}


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
        for label in re.findall(r"<label>(.*?)</label>", INDEX, re.S)
        for name in re.findall(r'id="([^"]+)"', label)
    }
    fields = set(re.findall(r'<(?:input|textarea|select)[^>]*\bid="([^"]+)"', INDEX))
    assert fields <= labelled | wrapped
    referred = {
        name for names in re.findall(r'aria-(?:labelledby|describedby)="([^"]+)"', INDEX) for name in names.split()
    }
    assert referred <= set(re.findall(r'\bid="([^"]+)"', INDEX))
