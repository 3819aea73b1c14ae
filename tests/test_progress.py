"""Progress: bars where standard error is a terminal, lines in the log of a server, and otherwise not one byte."""

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils.tqdm import tqdm as hub_tqdm
from tqdm import tqdm

from quire import LLM, SamplingParams, kernels
from quire.cli import main
from quire.common import progress
from quire.common.params import StructuredOutputsParams
from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model
from quire.text.grammar import compiler
from tests.scripted_engine import scripted_llm
from tests.terminal import Written, reading, standard_error

GREEDY = SamplingParams(temperature=0, max_tokens=8)
either = pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])


@pytest.fixture(autouse=True)
def not_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have done in this process."""
    monkeypatch.setattr(progress, "_has_log", False)
    monkeypatch.setattr("quire.common.log.chosen_format", None)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars appear without the delay."""
    monkeypatch.setattr(progress, "DELAY_S", 0)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Progress of this process is logged at every update."""
    monkeypatch.setattr(progress, "_has_log", True)
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, logger="quire")
    return caplog


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeBar:
    """What makes a bar is called with tqdm's arguments; this keeps what it shows."""

    def __init__(self, **look: Any) -> None:
        self.look = look
        self.text = ""
        self.shown: list[tuple[int, str]] = []

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def update(self, num: int) -> None:
        self.shown.append((num, self.text))

    def close(self) -> None:
        self.shown.append((-1, "closed"))


def is_bar(written: Written, what: str) -> bool:
    return f"{what}: " in written.text and "%|" in written.text


@either
def test_a_bar_appears_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, at_once: None, is_terminal: bool) -> None:
    with (
        standard_error(monkeypatch, is_terminal=is_terminal) as written,
        progress.progress("counting", 4000, "B") as advance,
    ):
        for _ in range(4):
            advance(1000)
    assert is_bar(written, "counting") if is_terminal else written.data == b""
    assert ("/4.00k [" in written.text) is is_terminal


def test_work_that_is_done_before_the_delay_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 3600)
    with (
        standard_error(monkeypatch, is_terminal=True) as written,
        progress.progress("counting", 2, "line") as advance,
    ):
        advance()
        advance()
    assert written.data == b""


def test_without_a_standard_error_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.shows_bars()


class ZMQInteractiveShell:
    """Named as IPython's class of shells in notebooks."""


class Shell(ZMQInteractiveShell):
    """As Colab's."""


class TerminalInteractiveShell:
    """Named as IPython's class of shells on terminals."""


@pytest.mark.parametrize(
    ("shell", "is_notebook"), [(ZMQInteractiveShell, True), (Shell, True), (TerminalInteractiveShell, False)]
)
def test_bars_appear_in_notebooks(
    monkeypatch: pytest.MonkeyPatch, at_once: None, shell: type[Any], is_notebook: bool
) -> None:
    made: list[dict[str, Any]] = []

    class NotebookBar(tqdm):  # type: ignore[misc]
        def __init__(self, **look: Any) -> None:
            made.append(look)
            super().__init__(**look)

    monkeypatch.setattr("builtins.get_ipython", shell, raising=False)
    monkeypatch.setattr("tqdm.auto.tqdm", NotebookBar)
    num_modules = len([name for name in sys.modules if name.startswith("IPython")])
    with standard_error(monkeypatch, is_terminal=False) as written:
        assert progress.shows_bars() is is_notebook
        with progress.progress("counting", 4000, "B") as advance:
            advance(4000)
        scripted_llm()[0].generate(["a"], GREEDY)
    assert [look["desc"] for look in made] == ["counting", "Processed prompts"] * is_notebook
    assert is_bar(written, "counting") is is_notebook
    assert num_modules == len([name for name in sys.modules if name.startswith("IPython")])
    monkeypatch.setattr("quire.common.log.chosen_format", "text")
    assert not progress.shows_bars()


def test_where_progress_is_logged_no_bar_appears(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    with standard_error(monkeypatch, is_terminal=True) as written:
        with progress.progress("loading", 3_400_000_000, "B", at_once=True) as advance:
            advance(1_200_000_000)
        with progress.progress("counting", 3, "line") as advance:
            advance()
        assert not progress.shows_bars()
    assert logged.messages == ["loading: 1.2 of 3.4 GB"]
    assert written.data == b""


def test_a_line_is_logged_every_few_seconds(monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 3.0)
    clock = Clock()
    counted = progress.LoggedBytes("loading", 10_000_000, clock)
    for now in (101, 102.9, 103, 104, 105.9, 106.5, 107):
        clock.now = now
        counted.update(1_000_000)
    assert logged.messages == ["loading: 3.0 of 10.0 MB", "loading: 6.0 of 10.0 MB"]


def test_a_process_with_a_server_s_log_has_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    with standard_error(monkeypatch, is_terminal=True):
        assert progress.shows_bars()
        monkeypatch.setattr("quire.common.log.chosen_format", "text")
        assert not progress.shows_bars()


def test_the_bar_of_prompts_counts_prompts_and_tokens_per_second() -> None:
    clock, stats = Clock(), SimpleNamespace(num_prompt_tokens=50, num_generated_tokens=7)
    bars: list[FakeBar] = []

    def make(**look: Any) -> FakeBar:
        bars.append(FakeBar(**look))
        return bars[0]

    bar = progress.PromptsBar(5, lambda: copy.copy(stats), lambda: 0, make, clock)
    clock.now, stats.num_prompt_tokens, stats.num_generated_tokens = 102.0, 850, 17
    bar.update(2)
    clock.now = 102.05
    bar.update(1)
    clock.now, stats.num_generated_tokens = 104.0, 107
    bar.update(0)
    bar.update(2)
    bar.close()
    assert (bars[0].look["total"], bars[0].look["unit"]) == (5, " prompt")
    assert bars[0].shown == [
        (2, "10 tokens, input 400 tokens/s, output 5 tokens/s"),
        (1, "100 tokens, input 200 tokens/s, output 25 tokens/s"),
        (2, "100 tokens, input 200 tokens/s, output 25 tokens/s"),
        (-1, "closed"),
    ]


def test_grammars_that_take_more_than_a_second_are_mentioned() -> None:
    clock, num_compiling, fake = Clock(), 2, FakeBar()
    stats = SimpleNamespace(num_prompt_tokens=0, num_generated_tokens=0)
    bar = progress.PromptsBar(5, lambda: stats, lambda: num_compiling, lambda **_: fake, clock)
    for now, num_compiling in ((100.5, 2), (101, 2), (102, 1), (103, 0), (103.5, 3), (104.25, 3)):  # noqa: B007
        clock.now = now
        bar.update(0)
    texts = [text.partition("output 0 tokens/s")[2] for _, text in fake.shown]
    assert texts == ["", ", compiling 2 grammars", ", compiling 1 grammar", "", "", ", compiling 3 grammars"]


@either
def test_generate_shows_a_bar_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    llm, _ = scripted_llm()
    with standard_error(monkeypatch, is_terminal=is_terminal) as written:
        llm.generate(["a", "b", "c"], GREEDY)
    assert is_bar(written, "Processed prompts") if is_terminal else written.data == b""
    assert (" 3/3 " in written.text and " 24 tokens, input " in written.text) is is_terminal
    with standard_error(monkeypatch, is_terminal=is_terminal) as written:
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert written.data == b""


def test_a_bar_of_the_caller_is_used_wherever_it_writes(capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = scripted_llm()
    made: list[tqdm[Any]] = []

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, **look: Any) -> None:
            super().__init__(**look)
            made.append(self)

    llm.generate(["a", "", "c"], GREEDY, use_tqdm=Bar)
    llm.chat([[{"role": "user", "content": "a"}]] * 2, GREEDY, use_tqdm=Bar)
    assert [(bar.n, bar.total) for bar in made] == [(3, 3), (2, 2)]
    assert "3/3" in capsys.readouterr().err


def test_the_bar_is_closed_when_a_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, executor = scripted_llm()
    fake = FakeBar()

    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    executor.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"], GREEDY, use_tqdm=lambda **_: fake)
    assert fake.shown[-1] == (-1, "closed")


@either
def test_loading_shows_the_bytes_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, at_once: None, is_terminal: bool
) -> None:
    with standard_error(monkeypatch, is_terminal=is_terminal) as written:
        load_model(ModelConfig.resolve("quire-draft"))
    assert is_bar(written, "loading weights") if is_terminal else written.data == b""


@pytest.mark.skipif(kernels.isa() == "reference", reason="quantized weights are saved in the native kernels' layout")
@either
def test_quantizing_shows_its_bytes(
    monkeypatch: pytest.MonkeyPatch, at_once: None, tmp_path: Path, is_terminal: bool
) -> None:
    with standard_error(monkeypatch, is_terminal=is_terminal) as written:
        assert main(["quantize", "quire-draft", str(tmp_path / "out")]) == 0
    assert is_bar(written, "quantizing and writing weights") is is_terminal
    assert is_terminal or written.data == b""


@either
def test_benchmarks_show_a_bar_and_leave_their_rows_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at_once: None, is_terminal: bool
) -> None:
    with standard_error(monkeypatch, is_terminal=is_terminal) as written:
        assert main(["bench", "scheduler", "--num-seqs", "1", "2", "--waiting", "0"]) == 0
    assert is_bar(written, "scheduler") if is_terminal else written.data == b""
    assert [json.loads(line)["num_seqs"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


@either
def test_downloads_show_the_hub_s_bars(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    def download(name: str, tqdm_class: type[Any], **_: Any) -> str:
        assert issubclass(tqdm_class, hub_tqdm)
        with tqdm_class(desc="Fetching 2 files", total=2) as bar:
            bar.update(2)
        return str(ModelConfig.resolve("quire-draft").path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with standard_error(monkeypatch, is_terminal=is_terminal) as written:
        ModelConfig.resolve("some/model")
    assert is_bar(written, "Fetching 2 files") if is_terminal else written.data == b""


def test_downloads_of_a_server_are_logged(monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture) -> None:
    bar_class = progress.hub_bar(hub_tqdm, "some/model")
    with (
        standard_error(monkeypatch, is_terminal=True) as written,
        bar_class(desc="Downloading", total=0, unit="B") as bar,
        bar_class(desc="Files", total=2) as files,
    ):
        bar.total = 4_000_000
        bar.update(1_500_000)
        files.update()
    assert logged.messages == ["some/model: Downloading: 1.5 of 4.0 MB"]
    assert written.data == b""


def test_another_thread_can_read_how_much_of_a_download_is_done() -> None:
    download = progress.Download()
    token = progress.current_download.set(download)
    bar_class = progress.hub_bar(hub_tqdm, "some/model")
    progress.current_download.reset(token)
    other_class = progress.hub_bar(hub_tqdm, "other/model")
    with (
        bar_class(desc="Writing", total=0, unit="B") as bar,
        bar_class(desc="Receiving", total=0, unit="B") as late,
        bar_class(desc="Files", total=900) as files,
        other_class(desc="Writing", total=900, unit="B") as other,
    ):
        assert (download.num_bytes, download.total) == (0, 0)
        bar.total = late.total = 500
        for one, num in ((bar, 200), (late, 100), (files, 700), (other, 800), (bar, 250), (late, 1)):
            one.update(num)
    assert (download.num_bytes, download.total) == (450, 500)


@pytest.mark.slow
@either
def test_a_batch_file_shows_its_lines(tmp_path: Path, is_terminal: bool) -> None:
    """Also that the engine process logs how much it has loaded, where that takes some seconds."""
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
    (tmp_path / "in").write_text(json.dumps(row) + "\n")
    fault = {"point": "weights.load", "action": "delay", "seconds": progress.LOG_INTERVAL_S + 0.1}
    command = [sys.executable, "-m", "quire", "run-batch", "--model", "quire-draft", "-i", "in", "-o", "out"]
    with reading(is_terminal=is_terminal) as (target, written):
        subprocess.run(
            [*command, "--kv-cache-memory", "4MiB"],
            cwd=tmp_path,
            env=os.environ | {"QUIRE_FAULTS": json.dumps([fault])},
            stderr=target,
            check=True,
        )
    assert "loading weights: " in written.text
    assert " MB" in written.text
    assert is_bar(written, "Lines") is is_terminal


def test_a_bar_says_that_grammars_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real queue of grammars, whose compilation waits for it."""
    monkeypatch.setattr(progress, "_COMPILING_S", 0)
    llm = LLM("quire-draft", max_model_len=128, kv_cache_memory="4MiB")
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[ab]{3}"))
    with standard_error(monkeypatch, is_terminal=True) as written:
        monkeypatch.setattr(compiler, "fault_point", lambda point: written.wait_for("compiling 2 grammars"))
        llm.generate(["a", "b"], params)
    assert "compiling 2 grammars" in written.text
