"""vLLM's own examples run with Quire: only imports, the name of the model and the server's address are changed."""

import gc
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from quire import kernels
from quire.server.api.tools.formats import REASONING_FORMATS
from tests.clients.served import Served, quire_serve, saying_server
from tests.clients.vllm_examples import FOLDER, MODEL, NOT_RUN, POOLING, require_examples, source_of

PROMPTS = (
    "Hello, my name is", "The president of the United States is", "The capital of France is", "The future of AI is",
)  # fmt: skip
WEATHER = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
CALL = f"<tool_call>\n{json.dumps({'name': 'get_current_weather', 'arguments': WEATHER})}\n</tool_call>"
Check = Callable[[str], None]


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples change environment variables and read the command line."""
    require_examples()
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`quire serve` without API keys, as the clients among the examples expect.

    The client with tools parses what the tiny model writes, and on AMX that is a number without end: so not there.
    """
    with pytest.MonkeyPatch.context() as patch:
        if kernels.isa() == "amx":
            patch.setenv("QUIRE_ISA", "avx512_bf16")
        with quire_serve(tmp_path_factory.mktemp("open"), keys="") as served:
            yield served


def run(example: str, *arguments: str, url: str = "", model: str = MODEL, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run an example as the program that it is, and return what it prints."""
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    code = compile(source_of(example, url, model), str(FOLDER / example), "exec")
    with redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the examples close no clients
        exec(code, {"__name__": "__main__", "__file__": str(FOLDER / example)})
        gc.collect()
    return output.getvalue()


def answers_every_prompt(output: str) -> None:
    assert all(repr(prompt) in output for prompt in PROMPTS)
    assert len(re.findall(r"^(Output|Generated text): ", output, re.MULTILINE)) == len(PROMPTS)


def answers_every_conversation(output: str) -> None:
    assert output.count("Generated text: ") == 11
    texts = re.findall(r"^Generated text: (.*)$", output, re.MULTILINE)
    assert all(len(text) > 10 for text in texts)


def streams_three_answers(output: str) -> None:
    assert output.count("Generation complete!") == 3
    assert "All streaming examples completed!" in output


def finishes_three_requests(output: str) -> None:
    assert output.count("RequestOutput(") == output.count("finished=True") == 3
    assert "prompt_logprobs=[None, {" in output


def finishes_four_requests(output: str) -> None:
    assert "Resetting prefix cache at 10" in output
    assert output.count("RequestOutput(") == 4


def is_timed_twice(output: str) -> None:
    assert output.count("Generation time: ") == 2


def gives_the_same_answers_from_the_cache(output: str) -> None:
    assert "Generated answers are the same: True" in output


def keeps_every_structure(output: str) -> None:
    assert re.search(r"by Choice: (Positive|Negative)\n", output)
    assert re.search(r"by Regex: \w+@\w+\.com\n|by Regex: \w+", output)
    assert re.search(r'by JSON: \{\s*"brand"', output)
    assert re.search(r"by Grammar: SELECT col_[12]  from table_[12]  where col_[12] = [12] \n", output)


def repeats_target_tokens(output: str) -> None:
    answers_every_prompt(output)
    first, _, third, _ = re.findall(r"^Output: +(.*)$", output, re.MULTILINE)
    assert len(set(third.strip("'"))) == len(set(first.strip("'"))) == 1


def lists_metrics(output: str) -> None:
    answers_every_prompt(output)
    found = dict(re.findall(r"^(\S+) \((gauge|counter|histogram)\)", output, re.MULTILINE))
    assert found["vllm:num_requests_running"] == "gauge"
    assert found["vllm:e2e_request_latency_seconds"] == "histogram"
    (generated,) = re.findall(r"^vllm:generation_tokens \(counter\) = (\d+)$", output, re.MULTILINE)
    assert int(generated) > 4
    assert re.search(r"vllm:e2e_request_latency_seconds \(histogram\)\n    sum = \S+\n    count = 4\n", output)


def answers(output: str) -> None:
    assert len(output) > 100


OFFLINE: dict[str, tuple[tuple[str, ...], Check]] = {
    "basic/offline_inference/basic.py": ((), answers_every_prompt),
    "basic/offline_inference/chat.py": (("--max-tokens", "8", "--temperature", "0.5"), answers_every_conversation),
    "basic/offline_inference/generate.py": (("--max-tokens", "8", "--enforce-eager"), answers_every_prompt),
    "deployment/async_llm_streaming.py": ((), streams_three_answers),
    "deployment/llm_engine_example.py": (("--max_model_len", "256"), finishes_three_requests),
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py": ((), is_timed_twice),
    "features/automatic_prefix_caching/prefix_caching_offline.py": ((), gives_the_same_answers_from_the_cache),
    "features/context_extension/context_extension_offline.py": ((), answers),
    "features/logits_processor/custom.py": ((), repeats_target_tokens),
    "features/logits_processor/custom_req.py": ((), repeats_target_tokens),
    "features/logits_processor/custom_req_init.py": ((), answers_every_prompt),
    "features/reset_kv/reset_kv_offline.py": ((), finishes_four_requests),
    "features/structured_outputs/structured_outputs_offline.py": ((), keeps_every_structure),
    "observability/metrics/offline.py": ((), lists_metrics),
    "rl/batch_invariance/reproducibility_offline.py": ((), answers_every_prompt),
}
"""Examples that need no server: the arguments they are given, and what is expected of their output."""


@pytest.mark.parametrize("example", OFFLINE)
def test_an_offline_example_runs(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, check = OFFLINE[example]
    model = ("--model", MODEL) if example.startswith(("deployment/llm_engine", "features/reset_kv")) else ()
    check(run(example, *arguments, *model, monkeypatch=monkeypatch))


def completes_twice(output: str) -> None:
    assert "Completion(id=" in output
    assert output.count("CompletionChoice(") == 2
    assert "top_logprobs=[{" in output


def streams_completions(output: str) -> None:
    """One event for each of two answers is enough: tokens that the client has not fetched come together."""
    assert output.count("Completion(id=") >= 2
    assert sorted(re.findall(r"finish_reason='(?:stop|length)', index=(\d)", output)) == ["0", "1"]


def completes_a_chat(output: str) -> None:
    assert "ChatCompletion(id=" in output
    assert "role='assistant'" in output


def streams_a_chat(output: str) -> None:
    assert output.count("ChatCompletionChunk(id=") > 2
    assert re.search("finish_reason='(stop|length)'", output)


def keeps_the_clients_structures(output: str) -> None:
    assert re.search(r"choice:\n  Content: '(positive|negative)'", output)
    assert re.search(r"regex:\n  Content: '[a-z0-9.]{1,20}@\w{6,10}\.com\\n'", output)
    assert re.search(r'json:\n  Content: \'\{\s*"brand"', output)
    assert re.search(r"grammar:\n  Content: 'SELECT col_[12]  from table_[12] ", output)
    (text,) = re.findall(r"structural_tag:\n  Content: (.*)", output)
    assert text.count("<function=") == text.count('<function=get_weather>{"city":')


def streams_structures(output: str) -> None:
    assert re.search(r"choice \(Streaming\):\n  Content: (positive|negative)\n", output)


def calls_required_tools(output: str) -> None:
    assert "ChoiceDeltaToolCall(" in output
    assert re.search(r"^\[ChatCompletionMessageFunctionToolCall\(.*name='get_(current_weather|forecast)'", output, re.M)


def calls_the_function(output: str) -> None:
    calls = re.findall(r"^Function call: get_weather (\{.*\})$", output, re.MULTILINE)
    assert calls  # one, or more: the model may call in parallel
    assert all(set(json.loads(arguments)) == {"latitude", "longitude"} for arguments in calls)


ONLINE: list[tuple[str, tuple[str, ...], Check]] = [
    ("basic/online_serving/openai_chat_completion_client.py", (), completes_a_chat),
    ("basic/online_serving/openai_chat_completion_client.py", ("--stream",), streams_a_chat),
    ("basic/online_serving/openai_completion_client.py", (), completes_twice),
    ("basic/online_serving/openai_completion_client.py", ("--stream",), streams_completions),
    ("features/structured_outputs/structured_outputs_client.py", (), keeps_the_clients_structures),
    ("features/structured_outputs/structured_outputs_client.py", ("--stream",), streams_structures),
    ("reasoning/openai_responses_client.py", (), lambda output: None),
    ("tool_calling/openai_chat_completion_client_with_tools_required.py", (), calls_required_tools),
    ("tool_calling/openai_responses_client_with_tools.py", (), calls_the_function),
]
"""Clients of a server with the embedded model."""


@pytest.mark.parametrize(("example", "arguments", "check"), ONLINE)
def test_a_client_runs(
    example: str, arguments: tuple[str, ...], check: Check, open_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(run(example, *arguments, url=open_server.url, monkeypatch=monkeypatch))


def shows_two_rounds(output: str) -> None:
    assert output.count("reasoning for Round") == output.count("content for Round") == 2
    assert "reasoning for Round 2: 9.11 is less" in output


def shows_reasoning_and_content(output: str) -> None:
    assert re.search(r"reasoning:9\.11 is less.*\ncontent:.*9\.8", output, re.DOTALL)


def calls_the_tool(output: str) -> None:
    assert "tool_to_call result:  The weather in Dallas" in output
    assert "streamed tool call name: get_current_weather" in output
    assert json.loads(re.findall(r"^streamed tool call arguments: (.*)$", output, re.MULTILINE)[-1]) == WEATHER


def calls_four_functions(output: str) -> None:
    assert re.findall(r"^function name: (.*)$", output, re.MULTILINE) == ["get_current_weather"] * 4
    found = re.findall(r"^function arguments: (.*)$", output, re.MULTILINE)
    assert [json.loads(arguments) for arguments in found] == [WEATHER] * 4
    assert output.count("reasoning: Texas") == 2


THOUGHT = "<think>9.11 is less</think>9.8"
THOUGHTFUL_CALL = f"<think>Texas</think>{CALL}"
SPOKEN: dict[str, tuple[tuple[str, ...], Check]] = {
    "reasoning/openai_chat_completion_with_reasoning.py": ((THOUGHT, THOUGHT), shows_two_rounds),
    "reasoning/openai_chat_completion_with_reasoning_streaming.py": ((THOUGHT,), shows_reasoning_and_content),
    "reasoning/openai_chat_completion_tool_calls_with_reasoning.py": (
        (THOUGHTFUL_CALL, THOUGHTFUL_CALL, json.dumps(WEATHER), json.dumps(WEATHER)),
        calls_four_functions,
    ),
    "tool_calling/openai_chat_completion_client_with_tools.py": ((CALL, CALL, "It is warm."), calls_the_tool),
}
"""Clients of a server whose model says given texts, because they need one that thinks or decides to call a tool."""


@pytest.mark.parametrize("example", SPOKEN)
def test_a_client_of_a_capable_model_runs(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replies, check = SPOKEN[example]
    with saying_server("", first_replies=replies, reasoning_format=REASONING_FORMATS["think"]) as served:
        check(run(example, url=served.url, monkeypatch=monkeypatch))


def test_every_example_is_run_or_has_a_reason_why_not() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py")}
    are_run = {*OFFLINE, *SPOKEN, *POOLING, *(example for example, *_ in ONLINE)}
    assert are_run <= found
    assert not [example for example in are_run if example.startswith(tuple(NOT_RUN))]
    assert {example for example in found if not example.startswith(tuple(NOT_RUN))} == are_run
    assert not [begin for begin in NOT_RUN if not any(example.startswith(begin) for example in found)]


def test_the_migration_page_lists_every_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^- `(\S+\.py)`$", page, re.MULTILINE))
    assert listed == {*OFFLINE, *SPOKEN, *POOLING, *(example for example, *_ in ONLINE)}
    for example, need in NOT_RUN.items():
        assert example == "__init__.py" or re.search(
            rf"^\| `{re.escape(example)}\*?` \| {need} \|$", page, re.MULTILINE
        )
