"""quire embed: which texts it reads, and what it prints or saves, when."""

import io
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.cli import embed, main

BOM = b"\xef\xbb\xbf"
LONG = b"word " * 60
"""More tokens than the model takes."""
Embed = Callable[..., tuple[int, list[dict[str, Any]], str]]


class Calls(list[list[str]]):
    """An LLM that notes the texts of each call; call number `interrupted` gets Ctrl-C."""

    interrupted: int | None = None

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def embed(self, texts: list[str], **arguments: Any) -> Any:
        self.append(texts)
        if len(self) - 1 == self.interrupted:
            raise KeyboardInterrupt
        return self._llm.embed(texts, **arguments)


@pytest.fixture
def calls(embedder: LLM, monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls(embedder)
    monkeypatch.setattr(embed, "load_llm", lambda options, one_engine: made)
    return made


@pytest.fixture
def run(calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Embed:
    """Run `quire embed` in this process; returns (exit status, rows on standard output, standard error)."""

    def run_embed(*arguments: str, stdin: bytes = b"") -> tuple[int, list[dict[str, Any]], str]:
        (tmp_path / "stdin").write_bytes(stdin)
        with (tmp_path / "stdin").open(encoding="ascii", errors="surrogateescape") as file:  # as a locale may have it
            monkeypatch.setattr(sys, "stdin", file)
            status = main(["embed", *arguments])
        captured = capsys.readouterr()
        return status, [json.loads(line) for line in captured.out.splitlines()], captured.err

    return run_embed


def texts(rows: list[dict[str, Any]]) -> list[str]:
    assert [row["index"] for row in rows] == list(range(len(rows)))
    return [row["text"] for row in rows]


@pytest.fixture(params=["file", "stdin"])
def run_lines(request: pytest.FixtureRequest, run: Embed, tmp_path: Path) -> Callable[[bytes], Any]:
    """Embed the lines of a file, or of standard input."""

    def run_embed(lines: bytes) -> Any:
        (tmp_path / "lines").write_bytes(lines)
        return run("--file", str(tmp_path / "lines")) if request.param == "file" else run(stdin=lines)

    return run_embed


def test_lines_are_utf_8_and_may_begin_with_a_byte_order_mark(run_lines: Any, embedder: LLM) -> None:
    status, rows, _ = run_lines(BOM + "ä\r\n\n \t\nb\rc".encode())
    assert (status, texts(rows)) == (0, ["ä", "b", "c"])
    assert rows[0]["embedding"] == embedder.embed("ä")[0].outputs.embedding
    assert run_lines(BOM + b"\n \n")[2].startswith("quire: no text was given")


@pytest.mark.parametrize("read_bytes", [1, 2, 3, 5])
def test_lines_may_be_longer_than_what_is_read_at_once(
    run_lines: Any, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(embed, "_READ_BYTES", read_bytes)
    assert texts(run_lines("one two\r\näö\n\nthree\nfour five".encode())[1]) == ["one two", "äö", "three", "four five"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [(LONG, "line 5: the text has 61 tokens, "), (b"b\xffd", "line 5 is not UTF-8: 'utf-8' codec can't ")],
    ids=["too long", "not UTF-8"],
)
def test_an_invalid_line_is_named_after_the_lines_before_it(
    run_lines: Any, calls: Calls, bad: bytes, message: str
) -> None:
    status, rows, err = run_lines(b"one\n\n\ntwo\n" + bad + b"\nthree\n")
    assert (status, texts(rows)) == (2, ["one", "two"])
    assert err.splitlines()[-1].startswith(f"quire: {message}")
    calls.clear()
    assert run_lines(b"b\xffd\none\n")[0] == 2
    assert calls == [], "no text before it needs the model"


def test_texts_are_printed_as_soon_as_their_piece_is_computed(
    run: Embed, calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embed, "_PIECE", 2)
    calls.interrupted = 2
    status, rows, _ = run(stdin=b"a\nb\nc\n\nd\n")
    assert (status, texts(rows)) == (130, ["a", "b", "c"])
    assert calls == [["a", "b"], ["c"], ["d"]]


def test_lines_of_a_pipe_are_answered_while_it_is_open(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)  # fails where it would wait

    class Client(io.BytesIO):
        """Sends the second line once it has the answer to the first."""

        def flush(self) -> None:
            if self.getvalue().count(b"\n") == 1 and len(calls) == 1:
                os.write(write_end, b"two\n")
                os.close(write_end)

    client = Client()
    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(client, encoding="ascii"))
        os.write(write_end, b"one\n")
        assert main(["embed"]) == 0
    assert [json.loads(line)["text"] for line in client.getvalue().splitlines()] == ["one", "two"]


def test_output_is_utf_8_in_any_locale(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(["embed", "--text", "ä"]) == 0
    assert json.loads(out.getvalue().decode())["text"] == "ä"


def test_texts_of_the_command_line_are_numbered_too(run: Embed) -> None:
    status, rows, err = run("--text", "one", os.fsdecode(b"\xff"))
    assert (status, texts(rows)) == (2, ["one"])
    assert "quire: text 2 is not UTF-8" in err


def test_an_array_is_written_where_a_symbolic_link_points(run: Embed, embedder: LLM, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link.npy").symlink_to("data/vectors.npy")
    status, rows, _ = run("--text", "one", "two", "--output", str(tmp_path / "link.npy"))
    assert (status, rows) == (0, [])
    assert (tmp_path / "link.npy").is_symlink()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["vectors.npy"]
    vectors = np.stack([output.outputs.data for output in embedder.embed(["one", "two"])])
    assert np.array_equal(np.load(tmp_path / "data" / "vectors.npy"), vectors)


def test_an_array_file_keeps_its_permissions(run: Embed, tmp_path: Path) -> None:
    output = tmp_path / "vectors.npy"
    output.write_bytes(b"before")
    output.chmod(0o600)
    assert run("--text", "one", "--output", str(output))[0] == 0
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert len(np.load(output)) == 1


def test_an_array_file_stays_as_it_was_where_a_run_ends_early(run: Embed, calls: Calls, tmp_path: Path) -> None:
    output = tmp_path / "data" / "vectors.npy"
    output.parent.mkdir()
    output.write_bytes(b"before")
    calls.interrupted = 0
    assert run("--text", "one", "--output", str(output))[0] == 130
    assert run("--text", LONG.decode(), "--output", str(output))[0] == 2
    assert [(path.name, path.read_bytes()) for path in output.parent.iterdir()] == [("vectors.npy", b"before")]


@pytest.mark.parametrize("name", ["missing/vectors.npy", "folder.npy", "pipe.npy", "vectors.txt"])
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    run: Embed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    monkeypatch.setattr(embed, "load_llm", lambda options, one_engine: pytest.fail("the model was loaded"))
    status, _, err = run("--text", "one", "--output", str(tmp_path / name))
    assert (status, err.count("\n")) == (2, 1)
    assert str(tmp_path / name) in err


def test_a_full_disk_is_an_error_in_words(run: Embed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fill(*_: object) -> None:
        raise OSError("76800 requested and 16352 written")

    monkeypatch.setattr("numpy.save", fill)
    status, _, error = run("--text", "a", "--output", str(tmp_path / "x.npy"))
    assert status == 2
    assert "x.npy': 76800 requested and 16352 written" in error
    assert not list(tmp_path.glob("x.npy*"))
