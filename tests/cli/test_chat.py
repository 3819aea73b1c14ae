"""quire chat: turns, commands, interruptions."""

import builtins
import io
import re
import signal
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.cli.arguments import options
from quire.cli.terminal.chat import ChatSession

from ..scripted_engine import RecitingExecutor, recital, scripted_llm

PARAMS = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture
def scripted() -> tuple[LLM, RecitingExecutor]:
    return scripted_llm()


@pytest.fixture
def session(scripted: tuple[LLM, RecitingExecutor]) -> ChatSession:
    return ChatSession(scripted[0], PARAMS, None)


def play(monkeypatch: pytest.MonkeyPatch, llm: LLM, lines: list[Any], *arguments: str) -> int:
    """`quire chat` with these lines typed; an exception among them is raised instead."""
    typed = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr(options, "load_llm", lambda _: llm)
    monkeypatch.setattr(builtins, "input", read)
    return main(["chat", *arguments])


def test_a_session_of_several_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scripted: tuple[LLM, RecitingExecutor]
) -> None:
    lines = ["Hello", "", KeyboardInterrupt(), "More", "/reset", "Hello", "/exit", "never read"]
    assert play(monkeypatch, scripted[0], lines) == 0
    answers = re.findall(
        r"I read (\d+) tokens 😀\.\n\[(\d+) tokens, .* tokens/s, (\d+) of (\d+) prompt", capsys.readouterr().out
    )
    assert len(answers) == 3
    first, second, third = ([int(number) for number in answer] for answer in answers)
    assert first[2] == 0
    assert second[0] > first[0]
    assert second[2] > 0, "the first turn is found in the prefix cache"
    assert third[0] == first[0], "a reset conversation begins anew"


def test_the_end_of_the_input_ends_the_session(
    monkeypatch: pytest.MonkeyPatch, scripted: tuple[LLM, RecitingExecutor]
) -> None:
    assert play(monkeypatch, scripted[0], ["Hello"]) == 0


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_script_learns_that_a_message_was_refused(
    monkeypatch: pytest.MonkeyPatch, scripted: tuple[LLM, RecitingExecutor], on_terminal: bool
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: on_terminal)
    assert play(monkeypatch, scripted[0], ["Hello", "word " * 300, "/reset", "Hello", "/exit"]) == int(not on_terminal)


@pytest.mark.parametrize("speculates", [True, False])
def test_accepted_drafts_are_coloured_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], speculates: bool
) -> None:
    llm, _ = scripted_llm(speculative_config={"method": "auto", "num_speculative_tokens": 4, "adaptive": False})
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    session = ChatSession(llm, PARAMS, None, shows_drafts=speculates)
    session.answer("Hello")
    assert "\x1b[32m" not in capsys.readouterr().out
    session.reset()
    session.answer("Hello")
    out = capsys.readouterr().out
    assert ("\x1b[32m" in out) == speculates
    assert re.search(r"I read \d+ tokens 😀\.\n", re.sub(r"\x1b\[\d+m", "", out))
    found = re.search(r", (\d+) of (\d+) drafts accepted\]", out)
    assert (found is not None) == speculates
    assert found is None or 0 < int(found[1]) <= int(found[2])


@pytest.mark.parametrize(
    ("arguments", "config"),
    [((), {"method": "suffix"}), (("--speculative-config", '{"method": "ngram"}'), {"method": "ngram"})],
)
def test_speculate_has_a_drafter_of_its_own_unless_another_is_named(
    scripted: tuple[LLM, RecitingExecutor], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], config: object
) -> None:
    given = []

    def load(parsed: Any) -> LLM:
        given.append(parsed.speculative_config)
        return scripted[0]

    monkeypatch.setattr(options, "load_llm", load)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--speculate", *arguments]) == 0
    assert given == [config]


def test_a_system_message_stays_through_a_reset(scripted: tuple[LLM, RecitingExecutor]) -> None:
    session = ChatSession(scripted[0], PARAMS, "Be kind.")
    session.answer("Hello")
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant"]
    session.reset()
    assert session.messages == [{"role": "system", "content": "Be kind."}]


def test_text_is_shown_as_it_is_made_and_never_half_a_character(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(builtins, "print", lambda *texts, **_: shown.extend(texts))
    session.answer("Hello")
    answer = "".join(shown[:-1])
    assert re.fullmatch(r"I read \d+ tokens 😀\.", answer)
    assert len([text for text in shown if text]) > 5
    assert "\ufffd" not in answer


def test_ctrl_c_stops_the_answer_and_keeps_the_session(
    session: ChatSession, scripted: tuple[LLM, RecitingExecutor]
) -> None:
    llm, executor = scripted
    executor.before_step = lambda step: signal.raise_signal(signal.SIGINT) if step == 4 else None
    session.answer("Hello")
    assert not llm.engine.has_unfinished_requests()
    user, assistant = session.messages
    whole = recital(len(llm.chat_prompt([user])["prompt_token_ids"]))
    assert 0 < len(assistant["content"]) < len(whole)
    assert whole.startswith(assistant["content"])
    session.answer("Go on")
    assert session.messages[-1]["content"].endswith("😀.")


def test_ctrl_c_before_the_first_token_forgets_the_message(
    session: ChatSession, scripted: tuple[LLM, RecitingExecutor]
) -> None:
    scripted[1].before_step = lambda step: (_ for _ in ()).throw(KeyboardInterrupt())
    session.answer("Hello")
    assert session.messages == []
    assert not scripted[0].engine.has_unfinished_requests()


@pytest.mark.parametrize("place", ["chat_prompt", "engine.add_request", "engine.tokenizer.stream"])
def test_ctrl_c_before_the_first_step_forgets_the_message(
    session: ChatSession, scripted: tuple[LLM, RecitingExecutor], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner: Any = scripted[0]
    *path, name = place.split(".")
    for part in path:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return function(*args, **kwargs)

    session.answer("Hello")
    before = list(session.messages)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        session.answer("More")
    assert session.messages == before
    assert not scripted[0].engine.has_unfinished_requests()
    session.answer("More")
    assert len(session.messages) == 4


def test_ctrl_c_at_the_end_of_an_answer_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scripted: tuple[LLM, RecitingExecutor]
) -> None:
    summaries = iter([KeyboardInterrupt(), "[second]"])

    def summary(output: Any, *args: Any, **kwargs: Any) -> str:
        if isinstance(line := next(summaries), BaseException):
            raise line
        return f"{line} {output.num_cached_tokens}"

    monkeypatch.setattr("quire.cli.terminal.chat._summary", summary)
    assert play(monkeypatch, scripted[0], ["Hello", "More"]) == 0
    found = re.search(r"\[second\] (\d+)", capsys.readouterr().out)
    assert found is not None
    assert int(found[1]) > 0


@pytest.mark.parametrize("on_terminal", [True, False])
def test_no_answer_is_a_command_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scripted: tuple[LLM, RecitingExecutor],
    on_terminal: bool,
) -> None:
    monkeypatch.setattr("tests.scripted_engine.recital", lambda prompt_len: "a\x1b[2J\x07\x9b\tb 👩‍🚀\n\nc")
    monkeypatch.setattr("sys.stdout.isatty", lambda: on_terminal)
    session = ChatSession(scripted[0], PARAMS, None)
    session.answer("Hello")
    said = "a?[2J??\tb 👩‍🚀\n\nc\n" if on_terminal else "a\x1b[2J\x07\x9b\tb 👩‍🚀\n\nc\n"
    assert capsys.readouterr().out.startswith(said)
    assert "\x1b" in session.messages[-1]["content"]


def test_a_message_that_does_not_fit_is_refused_and_forgotten(
    session: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert session.answer("Hello")
    before = list(session.messages)
    assert not session.answer("word " * 300)
    assert session.messages == before
    assert "maximum context length is 256 tokens" in capsys.readouterr().err
