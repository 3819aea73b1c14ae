"""`quire run-batch`: files of requests, answered by the endpoints."""

import asyncio
import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from unittest.mock import Mock

import pytest

from quire.cli import main
from quire.common.errors import ConfigError, EngineDeadError
from quire.server.api.batch_file import BatchError, BatchResult, BatchRun, PartialFile
from tests.terminal import reading

PATH = "/v1/echo"
MAX_BODY = 4096


class Echo:
    """An application that answers with the body it was sent; `status`, `steps` and `kind` in it say how."""

    def __init__(self):
        self.num_running = self.most_running = self.num_answered = 0
        self.is_running = True
        self.dies_after = None
        self.released = {}

    async def __call__(self, scope, receive, send):
        assert (scope["type"], scope["method"], scope["path"]) == ("http", "POST", PATH)
        message = await receive()
        assert not message["more_body"]
        body = json.loads(message["body"])
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(body.get("steps", 1)):
            await asyncio.sleep(0)
        self.num_running -= 1
        self.num_answered += 1
        self.is_running = self.is_running and self.num_answered != self.dies_after
        status = body.get("status", 200) if self.is_running else 503
        kind = body.get("kind", "application/json").encode()
        headers = [(b"Content-Type", kind), (b"X-Request-ID", b"req-%d" % self.num_answered)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        text = json.dumps({"echo": body})
        await send({"type": "http.response.body", "body": text[:5].encode(), "more_body": True})
        await send({"type": "http.response.body", "body": text[5:].encode()})


class Batch:
    """One input and output, run by an Echo."""

    def __init__(self, folder):
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.app = Echo()

    def write(self, *lines):
        self.source.write_bytes(
            b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
        )

    def open(self, *, resume=False):
        return PartialFile(self.output, self.source, MAX_BODY, resume=resume)

    def run(self, *, resume=False, max_in_flight=4, meanwhile=None):
        """Returns how many lines failed, in all runs, and how many were asked; `meanwhile` is called once after one."""
        app, num_asked = self.app, 0

        def progress():
            nonlocal num_asked
            num_asked += 1
            if meanwhile is not None and num_asked == 1:
                meanwhile()

        run = BatchRun(
            app=app,
            paths={PATH},
            is_running=lambda: app.is_running,
            max_in_flight=max_in_flight,
            max_body_bytes=MAX_BODY,
        )
        partial = self.open(resume=resume)
        try:
            asyncio.run(run.run(self.source, partial, progress))
            partial.finish()
        finally:
            partial.close()
        return partial.num_failed, num_asked

    @property
    def rows(self):
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    @property
    def partial(self):
        return self.output.with_name("out.jsonl.partial")


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


def line(i, **body):
    return {"custom_id": f"line-{i}", "method": "POST", "url": PATH, "body": {"i": i, **body}}


def test_answers_come_out_in_the_order_of_the_input_many_at_once(batch):
    batch.write(*(line(i, steps=20 - i) for i in range(20)))
    assert batch.run(max_in_flight=6) == (0, 20)
    assert [row["custom_id"] for row in batch.rows] == [f"line-{i}" for i in range(20)]
    assert [row["response"]["body"]["echo"]["i"] for row in batch.rows] == list(range(20))
    first = batch.rows[0]
    assert first["error"] is None
    assert (first["response"]["status_code"], first["response"]["request_id"][:4]) == (200, "req-")
    assert len({row["id"] for row in batch.rows}) == 20
    assert batch.app.most_running == 6
    assert sorted(batch.output.parent.iterdir()) == [batch.source, batch.output]


@pytest.mark.parametrize(
    ("wrong", "code", "custom_id"),
    [
        (b"{", "invalid_line", None),
        (b"[1]", "invalid_line", None),
        (b'"\xff"', "invalid_line", None),
        (b"[" * 3000, "invalid_line", None),
        ({"custom_id": "a"}, "invalid_line", "a"),
        ({"custom_id": 3, "url": PATH, "body": {}}, "invalid_line", None),
        ({"custom_id": "a", "url": PATH, "body": {}, "method": "GET"}, "invalid_method", "a"),
        ({"custom_id": "a", "url": "/v1/else", "body": {}}, "invalid_url", "a"),
        ({"custom_id": "a", "url": PATH, "body": {"stream": True}}, "invalid_body", "a"),
        ({"custom_id": "a", "url": PATH, "body": {"background": True}}, "invalid_body", "a"),
        ({"custom_id": "a", "url": PATH, "body": {"kind": "application/octet-stream"}}, "not_json", "a"),
        ({"custom_id": "a", "url": PATH, "body": {"kind": "text/plain; charset=utf-8"}}, "not_json", "a"),
        (b"x" * 200_000, "line_too_long", None),
    ],
)
def test_a_wrong_line_fails_alone(batch, wrong, code, custom_id):
    batch.write(line(0), b"  ", wrong, line(1))
    assert batch.run() == (1, 3)
    before, failed, after = batch.rows
    assert before["response"]["status_code"] == after["response"]["status_code"] == 200
    assert (failed["custom_id"], failed["response"], failed["error"]["code"]) == (custom_id, None, code)
    assert failed["error"]["line"] == 3, "blank lines count"


def test_a_custom_id_that_was_there_already_is_refused_also_after_an_interruption(batch):
    batch.write(line(0), line(1), line(0, again=True), line(2))
    batch.app.dies_after = 2
    with pytest.raises(EngineDeadError):
        batch.run(max_in_flight=1)
    batch.app = Echo()
    assert batch.run(resume=True) == (1, 3)
    assert [row["custom_id"] for row in batch.rows] == ["line-0", "line-1", "line-0", "line-2"]
    assert [row["error"] and row["error"]["code"] for row in batch.rows] == [None, None, "duplicate_custom_id", None]


def test_an_empty_custom_id_is_one_and_a_line_without_an_id_does_not_use_it(batch):
    batch.write(b"{", line(0) | {"custom_id": ""}, line(1), line(2) | {"custom_id": ""})
    assert batch.run() == (2, 4)
    assert [row["error"] and row["error"]["code"] for row in batch.rows] == [
        "invalid_line", None, None, "duplicate_custom_id",
    ]  # fmt: skip


def test_a_byte_order_mark_is_no_part_of_a_line(batch):
    batch.write(b"\xef\xbb\xbf" + json.dumps(line(0)).encode(), line(1))
    assert batch.run() == (0, 2)


def test_a_refusal_of_the_server_is_shown_unchanged(batch):
    batch.write(line(0, status=400))
    assert batch.run() == (1, 1)
    assert batch.rows[0]["error"] is None
    assert batch.rows[0]["response"]["status_code"] == 400
    assert batch.rows[0]["response"]["body"] == {"echo": {"i": 0, "status": 400}}


def test_what_is_done_when_the_engine_dies_is_kept_and_gone_on_from(batch):
    batch.write(*(line(i) for i in range(12)))
    batch.app.dies_after = 8
    with pytest.raises(EngineDeadError):
        batch.run(max_in_flight=3)
    assert not batch.output.exists()
    num_done = len(batch.partial.read_bytes().splitlines()) - 1
    assert 5 <= num_done < 8
    with pytest.raises(ConfigError, match="--resume"):
        batch.run()
    batch.app = Echo()
    assert batch.run(resume=True) == (0, 12 - num_done)
    assert [row["custom_id"] for row in batch.rows] == [f"line-{i}" for i in range(12)]
    assert not batch.partial.exists()


def test_a_line_cut_off_in_the_partial_file_is_asked_again(batch):
    batch.write(*(line(i) for i in range(4)))
    batch.app.dies_after = 4
    with pytest.raises(EngineDeadError):
        batch.run(max_in_flight=1)
    batch.partial.write_bytes(batch.partial.read_bytes()[:-10])
    batch.app = Echo()
    assert batch.run(resume=True) == (0, 2)
    assert [row["response"]["body"]["echo"]["i"] for row in batch.rows] == list(range(4))


@pytest.mark.parametrize(
    "damaged",
    [
        lambda results: [bytes(200), *results[1:]],
        lambda results: [bytes(50) + results[0], *results[1:]],
        lambda results: [results[0][:30] + bytes(30) + results[0][60:], *results[1:]],
        lambda results: [b"99 " + results[0].partition(b" ")[2], *results[1:]],
        lambda results: [b"-1 " + results[0].partition(b" ")[2], *results[1:]],
        lambda results: [*results[1:], bytes(200)],
    ],
)
def test_results_that_a_power_failure_damaged_are_made_again(batch, damaged):
    batch.write(line(0, status=400), *(line(i) for i in range(1, 4)))
    batch.app.dies_after = 4
    with pytest.raises(EngineDeadError):
        batch.run(max_in_flight=1)
    head, *results = batch.partial.read_bytes().splitlines()
    batch.partial.write_bytes(b"\n".join([head, *damaged(results), b""]))
    batch.app = Echo()
    assert batch.run(resume=True) == (1, 2)
    assert [row["response"]["body"]["echo"]["i"] for row in batch.rows] == list(range(4))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_beside_another_is_refused_and_changes_nothing(batch, resume):
    batch.write(*(line(i) for i in range(4)))

    def second_run():
        with pytest.raises(ConfigError, match="another run is writing it"):
            batch.open(resume=resume)

    assert batch.run(max_in_flight=1, meanwhile=second_run) == (0, 4)
    assert [row["custom_id"] for row in batch.rows] == [f"line-{i}" for i in range(4)]


def test_a_file_that_another_run_deletes_before_it_is_locked_is_not_written(batch, monkeypatch):
    batch.write(line(0))
    monkeypatch.setattr(fcntl, "flock", lambda file, how: batch.partial.unlink())
    with pytest.raises(ConfigError, match="another run is writing it"):
        batch.open()


def test_a_file_system_without_locks_is_written_too(batch, monkeypatch):
    batch.write(line(0))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    assert batch.run() == (0, 1)


def test_a_run_of_wrong_lines_can_be_interrupted(batch):
    batch.write(*[b"{"] * 400)
    with pytest.raises(KeyboardInterrupt):
        batch.run(meanwhile=lambda: signal.raise_signal(signal.SIGINT))
    num_done = len(batch.partial.read_bytes().splitlines()) - 1
    assert 1 <= num_done < 400


def test_the_output_stays_a_link_and_keeps_its_permissions_and_no_other_file_changes(batch):
    link, target, beside = batch.output, batch.source.with_name("real"), batch.source.with_name("real.tmp")
    target.touch()
    target.chmod(0o600)
    link.symlink_to(target.name)
    beside.write_text("mine")
    batch.write(line(0), line(1))
    batch.app.dies_after = 2
    with pytest.raises(EngineDeadError):
        batch.run(max_in_flight=1)
    assert stat.S_IMODE(target.with_name("real.partial").stat().st_mode) == 0o600
    batch.app = Echo()
    assert batch.run(resume=True) == (0, 1)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert len(batch.rows) == 2
    assert beside.read_text() == "mine"
    assert {path.name for path in target.parent.iterdir()} == {"in.jsonl", "out.jsonl", "real", "real.tmp"}


def test_another_input_is_not_mixed_in(batch):
    batch.write(line(0), line(1))
    batch.app.dies_after = 2
    with pytest.raises(EngineDeadError):
        batch.run(max_in_flight=1)
    batch.write(line(0), line(2))
    with pytest.raises(ConfigError, match="another input"):
        batch.run(resume=True)


def test_resume_begins_where_there_is_nothing_to_go_on_with_and_empty_files_are_files(batch):
    batch.write()
    assert batch.run(resume=True) == (0, 0)
    assert batch.output.read_bytes() == b""


@pytest.mark.parametrize(
    "change", [{"-i": "missing.jsonl"}, {"-o": "in.jsonl"}, {"-o": "."}, {"-o": "pipe"}, {"--max-in-flight": "0"}]
)
def test_wrong_files_are_refused_before_the_model_is_loaded(batch, change, capsys, monkeypatch):
    batch.write(line(0))
    monkeypatch.chdir(batch.source.parent)
    os.mkfifo("pipe")
    options = {"-i": "in.jsonl", "-o": "out.jsonl"} | change
    assert main(["run-batch", *(word for pair in options.items() for word in pair)]) == 2
    assert capsys.readouterr().err.startswith("quire: ")


def test_an_interrupted_command_keeps_what_is_done(batch):
    body = {"prompt": "def", "max_tokens": 200, "ignore_eos": True}
    batch.write(*({"custom_id": str(i), "url": "/v1/completions", "body": body} for i in range(400)))
    files = ["-i", str(batch.source), "-o", str(batch.output)]
    limits = ["--num-gpu-blocks-override", "64", "--max-in-flight", "2", "--max-model-len", "256"]
    command = [sys.executable, "-m", "quire", "run-batch", *files, *limits]
    with reading(is_terminal=True) as (target, written), subprocess.Popen(command, stderr=target) as process:
        written.wait_for(r"[1-9]\d*/400")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    num_done = len(batch.partial.read_bytes().splitlines()) - 1
    assert 1 <= num_done < 400
    assert f"{num_done} of 400 lines are done and saved in" in written.text
    assert not batch.output.exists()


def test_the_command_answers_with_the_model(batch, capsys):
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    batch.write(
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def", "max_tokens": 3}},
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": "3"}},
        b'{"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "x", "stream": "\xff"}}',
        *(
            {"custom_id": url + str(wanted), "url": url, "body": {"model": "quire-tiny"} | body | wanted}
            for url, body in (("/api/generate", {"prompt": "def"}), ("/api/chat", {"messages": chat["messages"]}))
            for wanted in ({}, {"stream": None}, {"stream": True}, {"stream": False, "options": {"num_predict": 3}})
        ),
    )
    arguments = ["-i", str(batch.source), "-o", str(batch.output), "--num-gpu-blocks-override", "64"]
    assert main(["run-batch", *arguments, "--max-model-len", "256"]) == 1
    completion, answer, refused, malformed = (row["response"] for row in batch.rows[:4])
    assert completion["body"]["usage"]["completion_tokens"] == 3
    assert answer["body"]["choices"][0]["message"]["role"] == "assistant"
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["param"] == "max_tokens"
    assert malformed["status_code"] == 400
    for rows in (batch.rows[4:8], batch.rows[8:]):
        for row in rows[:3]:
            assert (row["response"], row["error"]["code"]) == (None, "invalid_body")
            assert row["error"]["message"].startswith("stream: ")
        assert rows[3]["response"]["body"]["eval_count"] == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("quire: 12 lines are done, of which 8 failed: see 'error', or 'response' with")
    assert said.endswith(f" in {batch.output}")


def test_a_resumed_command_says_what_failed_before_and_what_was_appended(batch, capsys):
    batch.write(b"{")
    partial = batch.open()
    partial.add(0, BatchResult(id="a", custom_id=None, error=BatchError("invalid_line", "wrong", line=1)))
    partial.close()
    batch.source.write_bytes(b"{\n{\n")
    arguments = ["-i", str(batch.source), "-o", str(batch.output), "--num-gpu-blocks-override", "64"]
    assert main(["run-batch", *arguments, "--max-model-len", "256", "--resume"]) == 1
    appended, failed = capsys.readouterr().err.splitlines()
    assert appended == f"quire: what was appended to {batch.source} after the run began was not processed"
    assert failed.startswith("quire: 1 lines are done, of which 1 failed: see 'error', or 'response' with")
    assert len(batch.rows) == 1
