"""/v1/completions: shapes, prompts of every kind, and log-probabilities against the offline door."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from tests.effort import examples
from tests.scripted_engine import recital, scripted_llm
from tests.server.in_process import saying, serve, tokenizer_of

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.mark.essential
def test_a_completion_has_openai_s_shape(reciting):
    answer = reciting.post(PATH, {"model": "alias", "prompt": "one two", "max_tokens": 64})
    body = answer.json
    num_tokens = len(tokenizer_of(reciting).encode("one two"))
    text = recital(num_tokens)
    assert answer.status == 200
    assert body["id"] == "cmpl-" + answer.headers["x-request-id"]
    assert (body["object"], body["model"]) == ("text_completion", "alias")
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    num_written = len(tokenizer_of(reciting).encode(text)) + 1
    assert body["usage"] == {
        "prompt_tokens": num_tokens,
        "completion_tokens": num_written,
        "total_tokens": num_tokens + num_written,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert 0 <= body["timings"]["queue_s"] <= body["timings"]["total_s"]


def test_cached_tokens_are_reported(tiny, tiny_llm):
    prompt = list(range(300, 340))
    for expected in (0, 39):
        usage = tiny.post(PATH, {"prompt": prompt, "cache_salt": "told", **GREEDY}).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("text", 1), (["one", "two words"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2), (["one", [5, 6, 7]], 2)],
)
def test_prompts_of_every_kind(reciting, prompt, num_prompts):
    body = reciting.post(PATH, {"prompt": prompt, "max_tokens": 64}).json
    listed = prompt if num_prompts > 1 else [prompt]
    encode = tokenizer_of(reciting).encode
    lens = [len(encode(one)) if isinstance(one, str) else len(one) for one in listed]
    assert [choice["index"] for choice in body["choices"]] == list(range(num_prompts))
    assert [choice["text"] for choice in body["choices"]] == [recital(n) for n in lens]
    assert body["usage"]["prompt_tokens"] == sum(lens)


def test_later_prompts_of_a_request_wait_with_the_first_if_the_engine_ends(reciting):
    held = reciting.llm.held
    held.clear()
    reciting.post(PATH, {"prompt": ["one", "two", "three"], "max_tokens": 1})
    assert held == [False, True, True]


OPTIONS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["once", ["a b c", "d"], [7, 8, 9], [[5, 6], [7]]]),
        "max_tokens": st.integers(1, 20),
        "n": st.integers(1, 2),
        "echo": st.booleans(),
        "seed": st.integers(0, 3),
    },
    optional={
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
        "stop": st.sampled_from(["to", ["s.", "😀"]]),
        "include_stop_str_in_output": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "min_tokens": st.just(1),
    },
)


@settings(max_examples=examples(60), deadline=None)
@given(OPTIONS)
def test_a_stream_adds_up_to_the_whole_answer(options):
    llm, _ = scripted_llm()
    server = serve(llm.engine)
    whole = server.post(PATH, options).json
    streamed = server.post(PATH, options | {"stream": True, "stream_options": {"include_usage": True}})
    chunks = streamed.events
    last = chunks.pop()
    assert last["choices"] == []
    assert _counts(last["usage"]) == _counts(whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert _added_up(chunks) == whole["choices"]
    assert {chunk["id"] for chunk in chunks} == {"cmpl-" + streamed.headers["x-request-id"]}


def _counts(usage):
    return usage["prompt_tokens"], usage["completion_tokens"]


def _added_up(chunks):
    """Choices as a client puts them together."""
    choices = {}
    for chunk in chunks:
        (delta,) = chunk["choices"]
        if delta["index"] not in choices:
            choices[delta["index"]] = delta
            continue
        choice = choices[delta["index"]]
        assert choice["finish_reason"] is None
        choice["text"] += delta["text"]
        for key in ("finish_reason", "stop_reason"):
            choice[key] = delta[key]
        if choice["logprobs"] is not None:
            for key, values in delta["logprobs"].items():
                choice["logprobs"][key] += values
        if "token_ids" in choice:
            choice["token_ids"] += delta["token_ids"]
        assert "prompt_token_ids" not in delta
        assert "prompt_logprobs" not in delta
    return [choices[index] for index in sorted(choices)]


def test_every_chunk_has_the_usage_so_far_if_wanted(reciting):
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"prompt": "one two", "max_tokens": 64, "stream": True, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in reciting.post(PATH, request).events]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == counts[-2] > 5


def test_without_stream_options_a_stream_ends_with_timings_and_no_usage(reciting):
    chunks = reciting.post(PATH, {"prompt": ["a", "b"], "max_tokens": 64, "stream": True}).events
    assert all("usage" not in chunk for chunk in chunks)
    assert [i for i, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]


def test_echoed_logprobs_are_those_of_the_offline_score(tiny, tiny_llm):
    ids = tiny_llm.engine.tokenizer.encode("The old house stood on the hill, and nobody")
    body = tiny.post(PATH, {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}).json
    told = body["choices"][0]["logprobs"]
    (scores,) = tiny_llm.score_tokens([ids[:1]], [ids[1:]], use_tqdm=False)
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1:-1] == scores.logprobs
    decode = tiny_llm.engine.tokenizer.decode_token
    assert told["tokens"][:-1] == [decode(i) for i in ids]
    likeliest = [
        max(top, key=top.get) == token for token, top in zip(told["tokens"], told["top_logprobs"], strict=True) if top
    ]
    assert likeliest[:-1] == scores.is_greedy
    text = body["choices"][0]["text"]
    starts = told["text_offset"]
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)] == told["tokens"]


@pytest.mark.parametrize(
    ("prompt", "skips", "echoed", "starts"),
    [
        ("a", True, "", []),
        ("é 日", True, "é 日", [0, 0, 1, 2, 2, 2]),
        ("<|im_start|>a", True, "<|im_start|>a", [0, 12]),
        ([1, 67], True, "a", [0, 0]),
        ([1, 67], False, "<|im_start|>a", [0, 12]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_a_character_begin_where_it_does(prompt, skips, echoed, starts, stream):
    server = saying("🎉é日abc")
    request = {"prompt": prompt, "echo": bool(echoed), "logprobs": 0, "skip_special_tokens": skips, "max_tokens": 10}
    answer = server.post(PATH, request | {"stream": stream})
    (choice,) = _added_up(answer.events) if stream else answer.json["choices"]
    assert choice["text"] == echoed + "🎉é日abc"
    output = [0, 0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert choice["logprobs"]["text_offset"] == [*starts, *(len(echoed) + start for start in output)]


def test_an_offset_counts_no_special_token_that_the_text_lacks():
    server = saying("<|im_start|>abc")
    request = {"prompt": "a", "logprobs": 0, "max_tokens": 2}
    for skips, expected in ((True, [0, 0]), (False, [0, 12])):
        (choice,) = server.post(PATH, request | {"skip_special_tokens": skips}).json["choices"]
        assert choice["logprobs"]["text_offset"] == expected


def test_max_tokens_0_with_echo_scores_the_prompt_alone(tiny):
    prompt = "The old house stood"
    request = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0}
    with_one, scored = (tiny.post(PATH, request | {"max_tokens": n}).json for n in (1, 0))
    (choice,) = scored["choices"]
    assert choice["text"] == prompt
    assert choice["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    full = with_one["choices"][0]["logprobs"]
    assert choice["logprobs"] == {key: values[:-1] for key, values in full.items()}


@pytest.mark.essential
def test_logprobs_are_the_engine_s(tiny, tiny_llm):
    (output,) = tiny_llm.generate("The old", SamplingParams(temperature=0, max_tokens=8, logprobs=2), use_tqdm=False)
    told = tiny.post(PATH, {"prompt": "The old", "logprobs": 2, **GREEDY}).json["choices"][0]["logprobs"]
    rows = output.outputs[0].logprobs
    ids = output.outputs[0].token_ids
    assert told["token_logprobs"] == [row[i].logprob for i, row in zip(ids, rows, strict=True)]
    assert [set(top.values()) for top in told["top_logprobs"]] == [{lp.logprob for lp in row.values()} for row in rows]


def test_best_of_gives_the_likeliest(tiny, tiny_llm):
    request = {"prompt": "The old", "n": 1, "best_of": 3, "seed": 5, "max_tokens": 6, "temperature": 1.0}
    params = SamplingParams(n=1, best_of=3, seed=5, max_tokens=6)
    (output,) = tiny_llm.generate("The old", params, use_tqdm=False)
    assert [c["text"] for c in tiny.post(PATH, request).json["choices"]] == [output.outputs[0].text]


def test_a_beam_search(tiny, tiny_llm):
    from quire import BeamSearchParams

    (found,) = tiny_llm.beam_search("The old", BeamSearchParams(beam_width=3, max_tokens=6))
    request = {"prompt": "The old", "n": 3, "use_beam_search": True, "max_tokens": 6}
    choices = tiny.post(PATH, request | {"echo": True}).json["choices"]
    assert [choice["text"] for choice in choices] == [beam.text for beam in found.sequences]
    streamed = _added_up(tiny.post(PATH, request | {"echo": True, "stream": True}).events)
    assert streamed == choices


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 22]}}}},
        {"structured_outputs": {"json": {"enum": [1, 22]}}},
        {"guided_json": {"enum": [1, 22]}},
        {"guided_choice": ["1", "22"]},
        {"guided_regex": "1|22"},
        {"guided_grammar": 'root ::= "1" | "22"'},
    ],
)
def test_a_form_by_each_of_its_names(tiny, form):
    answer = tiny.post(PATH, {"prompt": "A number:", "max_tokens": 20, **form})
    assert json.loads(answer.json["choices"][0]["text"]) in (1, 22)


def test_logit_bias_has_text_keys(tiny):
    request = {"prompt": "The", "logit_bias": {"77": 100}, "return_token_ids": True, **GREEDY}
    choice = tiny.post(PATH, request).json["choices"][0]
    assert choice["token_ids"][:1] == [77]
    assert choice["prompt_token_ids"] == tokenizer_of(tiny).encode("The")


def test_a_truncated_prompt_is_echoed_as_it_was_read(tiny):
    request = {"prompt": list(range(300, 320)), "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 0}
    text = tiny.post(PATH, request).json["choices"][0]["text"]
    assert text == tokenizer_of(tiny).decode([318, 319])


def test_the_checkpoint_recommends_and_the_request_decides():
    server = saying("Hello there, all of you!")
    server.llm.default_sampling_params = lambda: SamplingParams(max_tokens=2)
    usages = [server.post(PATH, {"prompt": "a"} | more).json["usage"] for more in ({}, {"max_tokens": 3})]
    assert [usage["completion_tokens"] for usage in usages] == [2, 3]
