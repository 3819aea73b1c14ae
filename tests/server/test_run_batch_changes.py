"""`quire run-batch` while its input is appended to, cut or rewritten."""

import json
import os

import pytest

from quire.common.errors import ConfigError, EngineDeadError, QuireError
from tests.server.test_run_batch import Batch, Echo, line


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


def test_what_is_appended_to_the_input_during_the_run_is_not_processed(batch):
    batch.write(line(0), line(1), line(2))

    def append():
        with batch.source.open("ab") as file:
            file.write(json.dumps(line(3)).encode() + b"\n" + b"x" * 200_000)

    batch.app.dies_after = 2
    with pytest.raises(EngineDeadError):
        batch.run(max_in_flight=1, meanwhile=append)
    batch.app = Echo()
    assert batch.run(resume=True, meanwhile=append) == (0, 2)
    assert [row["custom_id"] for row in batch.rows] == ["line-0", "line-1", "line-2"]


def test_an_input_that_loses_lines_during_the_run_gives_no_output(batch):
    batch.write(*(line(i, padding="x" * 50_000) for i in range(4)))
    num_bytes = batch.source.stat().st_size
    with pytest.raises(QuireError, match="the input was changed during the run: result 3 is missing"):
        batch.run(max_in_flight=1, meanwhile=lambda: os.truncate(batch.source, num_bytes * 3 // 4))
    assert not batch.output.exists()
    with pytest.raises(ConfigError, match="another input"):
        batch.run(resume=True)


@pytest.mark.parametrize(
    "rewritten",
    [
        [b"{}"] * 50_000,  # more lines than before
        [line(i, padding="y" * 50_000) for i in range(4)],  # as many, and as long
        [b"x" * 200_000, line(9)],
    ],
)
def test_an_input_that_is_rewritten_in_place_ends_the_run_and_keeps_what_was_answered(batch, rewritten):
    lines = [line(i, padding="x" * 50_000) for i in range(4)]
    batch.write(*lines)
    stop = r"^line [23] of .*in\.jsonl was changed during the run: restore the file and continue with --resume"
    with pytest.raises(QuireError, match=stop):
        batch.run(max_in_flight=1, meanwhile=lambda: batch.write(*rewritten))
    assert not batch.output.exists()
    with pytest.raises(ConfigError, match="another input"):
        batch.run(resume=True)
    batch.write(*lines)
    num_done = len(batch.partial.read_bytes().splitlines()) - 1
    assert num_done in (1, 2)
    assert batch.run(resume=True) == (0, 4 - num_done)
    assert [row["response"]["body"]["echo"]["padding"][0] for row in batch.rows] == ["x"] * 4
