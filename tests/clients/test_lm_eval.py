"""lm-eval's `local-completions` against a real server: its log-likelihoods are those of the offline engine."""

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from quire import LLM
from tests.clients.served import CHECKPOINT, MODEL, Served

PAIRS = [
    ("The capital of France is", " Paris."),
    ("import os\nimport", " sys\n"),
    ("def read(self, size=-1):\n", '    """Read and return up to size bytes."""'),
    ("def f(", "x):\n    return x"),
    ("a", " b"),
]


def asked(kind: str, *arguments: object) -> list[Instance]:
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]


def completions(served: Served, **kwargs) -> LocalCompletionsAPI:
    url = f"{served.url}/v1/completions"
    return LocalCompletionsAPI(base_url=url, model=MODEL, header=served.headers, **kwargs)


@pytest.fixture(params=["remote", "local"])
def local_completions(request: pytest.FixtureRequest, served: Served) -> LocalCompletionsAPI:
    """With the server's tokenizer, which lm-eval finds by itself, or with one from the checkpoint's folder."""
    if request.param == "local":
        return completions(served, tokenizer_backend="huggingface", tokenizer=str(CHECKPOINT), batch_size=3)
    model = completions(served, auth_token=served.headers["authorization"].removeprefix("Bearer "), num_concurrent=4)
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
