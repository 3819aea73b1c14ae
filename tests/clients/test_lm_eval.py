"""lm-eval's `local-completions` against a real server: its log-likelihoods are those of the offline engine."""

import re

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from quire import LLM
from tests.clients.documented import examples, for_server
from tests.clients.served import CHECKPOINT, KEY, MODEL, Served

PAIRS = [
    ("The capital of France is", " Paris."),
    ("import os\nimport", " sys\n"),
    ("def read(self, size=-1):\n", '    """Read and return up to size bytes."""'),
    ("def f(", "x):\n    return x"),
    ("a", " b"),
]


def asked(kind: str, *arguments: object) -> list[Instance]:
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]


@pytest.fixture(params=["documented", "local tokenizer"])
def local_completions(request: pytest.FixtureRequest, served: Served, monkeypatch) -> LocalCompletionsAPI:
    """As docs/clients.md has it, with the server's tokenizer; or with one from the checkpoint's folder."""
    if request.param == "local tokenizer":
        url, tokenizer = f"{served.url}/v1/completions", str(CHECKPOINT)
        return LocalCompletionsAPI(
            url, "huggingface", model=MODEL, header=served.headers, tokenizer=tokenizer, batch_size=3
        )
    (command,) = examples("lm-eval", "bash")
    arguments = re.search(r"--model_args (\S+)", for_server(command, served))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = get_model("local-completions").create_from_arg_string(arguments[1])
    assert model.tokenizer_backend == "remote"
    return model


def test_log_likelihoods_are_those_of_the_offline_engine(local_completions: LocalCompletionsAPI) -> None:
    llm = LLM(kv_cache_memory="8MiB", max_num_seqs=8)
    contexts, continuations = map(list, zip(*PAIRS, strict=True))
    expected = llm.score_tokens(contexts, continuations, use_tqdm=False)
    found = local_completions.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
    for (logprob, is_greedy), score in zip(found, expected, strict=True):
        assert logprob == pytest.approx(score.sum_logprob, abs=1e-4)
        assert is_greedy == all(score.is_greedy)
    assert {is_greedy for _, is_greedy in found} == {True, False}


def test_generate_until_stops_where_it_should(local_completions: LocalCompletionsAPI) -> None:
    options = {"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0}
    (answer,) = local_completions.generate_until(asked("generate_until", ("import os\n", options)), disable_tqdm=True)
    assert answer
    assert "\n\n" not in answer


def test_chats_are_answered(served: Served) -> None:
    chat = LocalChatCompletion(
        base_url=f"{served.url}/v1/chat/completions", model=MODEL, header=served.headers, tokenizer_backend=None
    )
    messages = chat.apply_chat_template([{"role": "user", "content": "What does json.dumps do?"}])
    options = {"until": ["\n"], "max_gen_toks": 24, "temperature": 0}
    (answer,) = chat.generate_until(asked("generate_until", (messages, options)), disable_tqdm=True)
    assert "Serialize" in answer
