"""The `prediction` of chats and completions, its counts, and drafts that are marked in streams."""

import pytest

from quire.common.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.server.api.shared.generation import TokenCounts
from tests.server.in_process import Server, saying

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REPLY = "The cat sat on the mat, and the dog lay beside it. é😀 Then both slept."
WRONG = "Nothing of the kind was said."
ALL = {"method": "prediction", "num_speculative_tokens": 4, "adaptive": False}


def predicting(config: dict | None = None) -> Server:
    """Over a model that says `REPLY`, whose drafts are all verified."""
    return saying(REPLY, speculation=ALL if config is None else config)


def asked(server: Server, path: str, **fields):
    body = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return server.post(path, {**body, "max_tokens": 64, **fields})


def details(usage):
    found = usage["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


PARTS = [{"type": "text", "text": REPLY[:9]}, {"type": "text", "text": REPLY[9:]}]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("content", [REPLY, PARTS], ids=["text", "parts"])
def test_a_right_prediction_saves_steps_and_changes_no_answer(path, content):
    server = predicting()
    plain = asked(server, path).json
    num_steps, server.executor.num_steps = server.executor.num_steps, 0
    answer = asked(server, path, prediction={"type": "content", "content": content}).json
    assert answer["choices"] == plain["choices"]
    num_tokens = plain["usage"]["completion_tokens"]
    assert num_steps == num_tokens
    assert server.executor.num_steps <= 2 + num_tokens // 5
    accepted, rejected = details(answer["usage"])
    assert accepted == num_tokens - server.executor.num_steps
    assert rejected == 0
    assert details(plain["usage"]) == (0, 0)
    assert answer["timings"]["num_drafts"] == answer["timings"]["num_accepted_drafts"] == accepted


def test_a_completion_s_prediction_may_be_a_string():
    usage = asked(predicting(), COMPLETIONS, prediction=REPLY, n=2).json["usage"]
    assert details(usage)[0] > usage["completion_tokens"] / 2  # of both


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_wrong_predictions_are_counted_as_rejected(path):
    server = predicting()
    plain, answer = asked(server, path).json, asked(server, path, prediction={"type": "content", "content": WRONG}).json
    assert answer["choices"] == plain["choices"]
    accepted, rejected = details(answer["usage"])
    assert rejected >= 4
    assert accepted + rejected == answer["timings"]["num_drafts"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_ends_with_the_same_counts(path):
    fields = {"prediction": {"type": "content", "content": REPLY[:20] + WRONG}}
    whole = asked(predicting(), path, **fields).json["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = asked(predicting(), path, **options, **fields).events
    assert last["usage"] == whole
    assert min(details(whole)) > 0
    seen = [details(chunk["usage"]) for chunk in chunks if chunk["usage"]]
    assert seen == sorted(seen)


def test_several_prompts_count_together():
    server = predicting()
    alone = details(asked(server, COMPLETIONS, prediction=REPLY).json["usage"])
    several = details(asked(server, COMPLETIONS, prompt=["Hi", "Ho"], prediction=REPLY).json["usage"])
    assert several == (2 * alone[0], 2 * alone[1])


def texts_by_mark(chunks):
    marked = {True: "", False: ""}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        marked[choice.get("drafted", False)] += choice["delta"].get("content") or choice["delta"].get("reasoning") or ""
    return marked


def test_accepted_drafts_are_marked_in_a_stream_that_asks_for_it():
    prediction = {"type": "content", "content": REPLY}
    server = predicting()
    plain = asked(server, CHAT, stream=True, prediction=prediction).events
    assert all("drafted" not in choice for chunk in plain for choice in chunk["choices"])
    chunks = asked(server, CHAT, stream=True, prediction=prediction, mark_drafts=True).events
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == REPLY
    marked = texts_by_mark(chunks)
    num_tokens = len(server.llm.tokenizer.encode(REPLY))
    assert len(marked[True]) > len(marked[False]) > 0
    assert chunks[-1]["timings"]["num_accepted_drafts"] >= num_tokens * 3 // 4
    unpredicted = asked(server, CHAT, stream=True, mark_drafts=True).events
    assert texts_by_mark(unpredicted) == {True: "", False: REPLY}


def test_text_that_waits_for_a_stop_string_keeps_its_mark():
    fields = {"stream": True, "mark_drafts": True, "stop": ["mat, and not", "both"]}
    prediction = {"type": "content", "content": REPLY}
    marked = texts_by_mark(asked(predicting(), CHAT, prediction=prediction, **fields).events)
    assert sum(map(len, marked.values())) == REPLY.index("both")
    assert len(marked[True]) > len(marked[False])


WRONG_PREDICTIONS = [
    5, True, [], ["a"], [1, 2], {}, {"type": "content"}, {"content": "x"}, {"type": "text", "content": "x"},
    {"type": "content", "content": None}, {"type": "content", "content": 5}, {"type": "content", "content": ["x"]},
    {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {"type": "content", "content": [{"type": "text", "text": 5}]}, {"type": "content", "content": [{"type": "text"}]},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("prediction", WRONG_PREDICTIONS, ids=str)
def test_what_is_no_prediction_is_refused(path, prediction):
    answer = asked(predicting(), path, prediction=prediction)
    assert answer.status == 400
    assert answer.error["param"].startswith("prediction")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num_chars", [100_000, 5_000_000])
def test_a_prediction_that_no_output_could_be_is_refused(path, num_chars):
    answer = asked(predicting(), path, prediction={"type": "content", "content": "a b " * (num_chars // 4)})
    assert answer.status == 400
    assert answer.error["param"] == "prediction"
    assert len(answer.body) < 1000


def test_beams_have_no_prediction():
    answer = asked(predicting(), COMPLETIONS, prediction=REPLY, use_beam_search=True, n=2)
    assert (answer.status, answer.error["param"]) == (400, "prediction")


@pytest.mark.parametrize("content", ["", [], "\0\u202e", "<|im_end|><|im_start|>"], ids=repr)
def test_any_text_may_be_predicted(content):
    answer = asked(predicting(), CHAT, prediction={"type": "content", "content": content})
    assert answer.json["choices"][0]["message"]["content"] == REPLY


def test_an_engine_without_drafts_ignores_predictions():
    usage = asked(predicting(config={"method": "off"}), COMPLETIONS, prediction=REPLY).json["usage"]
    assert details(usage) == (0, 0)


def test_only_tokens_of_the_prediction_that_are_in_the_answer_are_accepted():
    counts = TokenCounts()
    metrics = RequestMetrics(arrival_time=0.0, drafts={"prediction": (9, 7), "own": (5, 4)})
    for token_ids, predicted in (([5], []), ([6, 7, 8], [1])):  # the rest came behind a stop string
        choice = CompletionOutput(0, "", token_ids, None, accepted_drafts=[0, 1], predicted_drafts=predicted)
        counts.add(0, RequestOutput("a", "Hi", [1], [choice], False, metrics=metrics))
    assert counts.predicted == (1, 8)
    for number, rejected in ((2, 8), (10, 9)):  # another engine drafts them again, from the prompt on
        again = RequestMetrics(arrival_time=0.0, drafts={"prediction": (number, 1)})
        counts.add(0, RequestOutput("a", "Hi", [1], [CompletionOutput(0, "", [], None)], False, metrics=again))
        assert counts.predicted == (1, rejected)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [" the", "sat", "dog lay"])
def test_tokens_behind_a_stop_string_are_rejected(path, stop):
    answer = asked(predicting(), path, prediction={"type": "content", "content": REPLY}, stop=stop).json
    accepted, rejected = details(answer["usage"])
    assert 0 < accepted < answer["usage"]["completion_tokens"]
    assert accepted + rejected == answer["timings"]["num_drafts"]


def test_drafts_that_others_proposed_are_no_part_of_the_prediction():
    server = saying("a b c d e f g h " * 4, speculation={**ALL, "method": "suffix"})
    usage = asked(server, CHAT, prediction={"type": "content", "content": "a b c "}).json
    accepted, rejected = details(usage["usage"])
    assert accepted + rejected <= 6
    assert usage["timings"]["num_accepted_drafts"] > accepted
