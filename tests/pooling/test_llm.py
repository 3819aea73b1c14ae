"""LLM.embed and its siblings: what callers give and get."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from quire import (
    LLM,
    InvalidParamsError,
    InvalidPromptError,
    PoolingParams,
    PromptTooLongError,
    RequestError,
    TokenizerError,
)
from quire.common.outputs import ClassificationRequestOutput, EmbeddingRequestOutput, ScoringRequestOutput
from quire.interfaces import pooling, running

from .models import BROKEN, NAN

TEXTS = ["Once upon a time", "def f(x):", "a"]


def test_outputs_have_the_order_of_the_texts_and_vllms_attributes(encoder: LLM) -> None:
    outputs = encoder.embed(TEXTS, use_tqdm=False)
    assert [type(output) for output in outputs] == [EmbeddingRequestOutput] * 3
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt == text
        assert output.prompt_token_ids == encoder.engine.tokenizer.encode(text)
        assert output.finished
        assert output.error is None
        assert isinstance(output.outputs.embedding, list)
        assert output.outputs.hidden_size == len(output.outputs.embedding) == encoder.engine.pooler.dimensions
        assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1, abs=1e-5)
        (alone,) = encoder.embed({"prompt_token_ids": output.prompt_token_ids}, use_tqdm=False)
        assert np.array_equal(alone.outputs.data, output.outputs.data)


def test_parameters_reach_the_pooler(encoder: LLM) -> None:
    raw = encoder.embed("a b", pooling_params=PoolingParams(normalize=False), use_tqdm=False)[0].outputs.data
    same = encoder.embed("a b", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)[0].outputs.data
    unit = encoder.embed("a b", use_tqdm=False)[0].outputs.data
    assert np.array_equal(raw, same)
    assert np.allclose(raw / np.linalg.norm(raw), unit)
    (classes,) = encoder.classify("a b", use_tqdm=False)
    (logits,) = encoder.classify("a b", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert isinstance(classes, ClassificationRequestOutput)
    assert classes.outputs.num_classes == 3
    assert np.allclose(classes.outputs.probs, 1 / (1 + np.exp(-logits.outputs.data)))


def test_vectors_of_tokens_have_a_row_for_each(encoder: LLM) -> None:
    (output,) = encoder.encode("Once upon a time", pooling_task="token_embed", use_tqdm=False)
    assert output.outputs.data.shape == (len(output.prompt_token_ids), encoder.engine.pooler.dimensions)
    (reward,) = encoder.reward("Once upon a time", use_tqdm=False)
    assert reward.outputs.data.shape == (3,), "without a task of tokens a reward is of the whole text"
    assert encoder.encode("a", use_tqdm=False)[0].outputs.data.shape == (encoder.engine.pooler.dimensions,)


def test_pairs_are_scored_one_to_one_and_one_to_many(encoder: LLM) -> None:
    one_to_many = encoder.score("Once", ["upon", "a", "time"], use_tqdm=False)
    each = encoder.score(["Once"] * 3, ["upon", "a", "time"], use_tqdm=False)
    assert [type(output) for output in each] == [ScoringRequestOutput] * 3
    assert [output.outputs.score for output in each] == [output.outputs.score for output in one_to_many]
    assert len({output.outputs.score for output in each}) == 3
    with pytest.raises(InvalidPromptError, match="data_1 has 2 texts and data_2 has 3"):
        encoder.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(InvalidPromptError, match="data_2 must be a text or a list of texts with at least one"):
        encoder.score("a", [])


def test_an_embedder_scores_by_the_cosine(encoder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    info = encoder.engine.pooler
    monkeypatch.setattr(encoder.engine, "pooler", type(info)(("embed",), info.whole_tasks, info.max_whole_tokens))
    scores = encoder.score("Once upon", ["Once upon", "def f(x)"], use_tqdm=False)
    a, b = (output.outputs.data for output in encoder.embed(["Once upon", "def f(x)"], use_tqdm=False))
    assert scores[0].outputs.score == pytest.approx(1)
    assert scores[1].outputs.score == pytest.approx(float(a @ b), abs=1e-6)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"dimensions": 8}, "dimensions=8: must be 24: this model has no smaller ones"),
        ({"truncate_prompt_tokens": 49}, "this model takes at most 48"),
        ({"task": "token_classify"}, "this model has embed, token_embed, classify, score"),
        ({"task": "classify", "dimensions": 24}, "it belongs to embeddings, and the task is 'classify'"),
    ],
)
def test_parameters_that_the_model_does_not_allow_are_refused(encoder: LLM, params: dict, match: str) -> None:
    size = encoder.engine.pooler.dimensions
    with pytest.raises(InvalidParamsError, match=match.replace("24", str(size))):
        encoder.encode("a", PoolingParams(**{k: size if v == 24 else v for k, v in params.items()}))


@pytest.mark.parametrize(
    "params",
    [{"dimensions": 0}, {"dimensions": 1.5}, {"normalize": 1}, {"task": "embedding"}, {"truncate_prompt_tokens": 0},
     {"tenant": "x" * 300}, {"priority": "high"}, {"truncate_prompt_tokens": -2}],
)  # fmt: skip
def test_parameters_that_no_model_takes_are_refused(params: dict) -> None:
    with pytest.raises(InvalidParamsError, match=next(iter(params))):
        PoolingParams(**params)


def test_sizes_that_a_model_was_trained_for_are_allowed(encoder: LLM) -> None:
    info = encoder.engine.pooler

    def check(matryoshka: tuple[int, ...] | None, dimensions: int) -> None:
        allowed = type(info)(info.tasks, (), 48, 64, matryoshka)
        allowed.check_parameters(PoolingParams(dimensions=dimensions), "embed")

    for matryoshka, dimensions in [(None, 64), ((), 1), ((), 64), ((16, 32), 32), ((16, 32), 64)]:
        check(matryoshka, dimensions)
    for matryoshka, dimensions in [(None, 32), ((), 65), ((16, 32), 8), ((16, 128), 128)]:
        with pytest.raises(InvalidParamsError, match="dimensions"):
            check(matryoshka, dimensions)


def test_a_longer_text_is_refused_or_cut(encoder: LLM) -> None:
    text = "word " * 100
    with pytest.raises(PromptTooLongError, match="and the model takes 48"):
        encoder.embed(text)
    (cut,) = encoder.embed(text, truncate_prompt_tokens=-1, use_tqdm=False)
    whole = encoder.engine.tokenizer.encode(text)
    assert cut.prompt_token_ids == whole[:48]
    (short,) = encoder.embed(text, truncate_prompt_tokens=5, use_tqdm=False)
    assert short.prompt_token_ids == whole[:5]
    (ids,) = encoder.embed([whole], truncate_prompt_tokens=5, use_tqdm=False)
    assert ids.prompt_token_ids == whole[-5:], "of token ids the last are kept, as in vLLM"


def test_vllms_arguments_for_the_tokenizer_are_read(encoder: LLM) -> None:
    text = "word " * 100
    whole = encoder.engine.tokenizer.encode(text)

    def kept(**arguments: Any) -> list[int]:
        return encoder.embed(text, tokenization_kwargs=arguments, use_tqdm=False)[0].prompt_token_ids

    assert kept(truncate_prompt_tokens=5, padding=False) == whole[:5]
    assert kept(truncation=True, max_length=6) == whole[:6]
    assert kept(truncation="longest_first") == kept(truncate_prompt_tokens=-1) == whole[:48]
    bare = encoder.engine.tokenizer.encode("a b", add_special_tokens=False)
    for call in (encoder.embed, encoder.classify, encoder.encode, encoder.reward):
        (output,) = call("a b", tokenization_kwargs={"add_special_tokens": False}, use_tqdm=False)
        assert output.prompt_token_ids == bare
    (pair,) = encoder.score("a", "b", tokenization_kwargs={"truncate_prompt_tokens": 2}, use_tqdm=False)
    assert len(pair.prompt_token_ids) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"padding": "max_length"}, "padding is not supported"),
        ({"max_length": 5}, "max_length is not supported"),
        ({"stride": 3}, "stride is not supported"),
        ({"truncation": "only_first"}, "truncation is not supported"),
        ({"add_special_tokens": 1}, "add_special_tokens=1: must be True or False"),
        ({"truncation_side": "middle"}, "truncation_side='middle': must be left, right"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ("longest_first", "tokenization_kwargs must be a dict, not str"),
    ],
)
def test_arguments_for_the_tokenizer_that_would_be_ignored_are_refused(encoder: LLM, given: Any, said: str) -> None:
    with pytest.raises(InvalidParamsError, match=said):
        encoder.embed("a", tokenization_kwargs=given, use_tqdm=False)


def test_the_texts_of_a_pair_are_always_separated(encoder: LLM) -> None:
    with pytest.raises(InvalidParamsError, match="add_special_tokens=False: they separate the texts of a pair"):
        encoder.score("a", "b", tokenization_kwargs={"add_special_tokens": False})


def test_wrong_texts_fail_alone_in_a_list(encoder: LLM) -> None:
    vocab_size = encoder.engine.model_config.vocab_size
    texts = ["fine", {"prompt_token_ids": [vocab_size]}, {"prompt_token_ids": []}, "a\ud800", 7, "fine"]
    outputs = encoder.embed(texts, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, False, False, False, True]
    assert np.array_equal(outputs[0].outputs.data, outputs[-1].outputs.data)
    assert outputs[1].outputs.embedding == []
    assert math.isnan(encoder.score(["a", "b"], ["c", "a\ud800"], use_tqdm=False)[1].outputs.score)
    with pytest.raises(InvalidPromptError, match="is empty"):
        encoder.embed({"prompt_token_ids": []})
    assert math.isnan(
        ScoringRequestOutput(
            "a", encoder.score("a", "b", use_tqdm=False)[0].outputs.__class__(np.zeros(0, np.float32)), []
        ).outputs.score
    )


LONG = {
    "a text": "word " * 100,
    "a text with other characters": "\u00e9 " * 30 + "word " * 40,
    "token ids": {"prompt_token_ids": [9] * 49},
    "a list of ids": [9] * 49,
    "a pair": ("a", "word " * 100),
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("call", ["embed", "classify", "encode", "reward"])
def test_a_text_that_is_too_long_raises_before_any_is_computed(
    encoder: LLM, kind: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder.engine, "step", lambda: pytest.fail("work began"))
    with pytest.raises(ValueError, match=r"^prompt 200: the text has \d+ tokens, and the model takes 48: shorten it"):
        getattr(encoder, call)(["fine"] * 200 + [LONG[kind]])
    monkeypatch.undo()
    cut = PoolingParams(truncate_prompt_tokens=-1)
    assert getattr(encoder, call)(["fine", LONG[kind]], pooling_params=cut, use_tqdm=False)[1].error is None


def test_pairs_that_are_too_long_raise_before_any_is_computed(encoder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder.engine, "step", lambda: pytest.fail("work began"))
    with pytest.raises(PromptTooLongError, match=r"^prompt 1: .* takes 48"):
        encoder.score("a", ["b", "word " * 60])
    monkeypatch.undo()
    assert encoder.score("a", ["b", "word " * 60], truncate_prompt_tokens=-1, use_tqdm=False)[1].error is None


def test_a_text_that_is_found_to_be_too_long_late_raises_too(encoder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "may_be_too_long", lambda *_: False)
    with pytest.raises(PromptTooLongError, match="takes 48"):
        encoder.embed(["fine"] * 100 + ["word " * 100], use_tqdm=False)
    assert not encoder.engine.has_unfinished_requests()


def test_texts_that_may_be_too_long_are_tokenized_on_several_cores(
    encoder: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["word " * (9 + i % 7) for i in range(50)]
    expected = [encoder.embed(text)[0].outputs.embedding for text in texts[:7]]
    threads = set[str]()

    def tokenized(*given: Any) -> Any:
        threads.add(threading.current_thread().name.partition("_")[0])
        return pooling.tokenized(*given)

    monkeypatch.setattr(running, "_num_cores", lambda _: 3)
    monkeypatch.setattr(running, "tokenized", tokenized)
    outputs = encoder.embed(texts, use_tqdm=False)
    assert [output.outputs.embedding for output in outputs] == [expected[i % 7] for i in range(50)]
    assert "tokenize-texts" in threads
    with pytest.raises(PromptTooLongError, match=r"^prompt 30: "):
        encoder.embed([*texts[:30], "word " * 60, *texts[:9], "word " * 70], use_tqdm=False)


TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{{ add_generation_prompt }}"


def test_a_template_joins_pairs_as_query_and_document(encoder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = encoder.score("one", ["two", "three"], chat_template=TEMPLATE, use_tqdm=False)
    texts = [f"query: one\ndocument: {other}\nFalse" for other in ("two", "three")]
    assert [output.prompt for output in outputs] == texts
    expected = encoder.encode(texts, pooling_task="score", use_tqdm=False)
    assert [output.outputs.score for output in outputs] == [output.outputs.data[0] for output in expected]
    with pytest.raises(TokenizerError, match="chat template"):
        encoder.score("one", "two", chat_template="no such template")
    monkeypatch.setattr(encoder.engine, "pooler", replace(encoder.engine.pooler, tasks=("embed",)))
    with pytest.raises(InvalidParamsError, match="chat_template is for models that read both texts"):
        encoder.score("one", "two", chat_template=TEMPLATE)


@pytest.mark.parametrize("types", [[0], [0, 1, 0, 0], [0, -1], [0, 2], [0, 2**15], "ab", [0, True], 5])
def test_token_types_must_fit_the_tokens(encoder: LLM, types: object) -> None:
    with pytest.raises(InvalidPromptError, match="token_type_ids"):
        encoder.embed({"prompt_token_ids": [1, 2], "token_type_ids": types})
    with pytest.raises(InvalidPromptError, match="token_type_ids"):
        encoder.embed({"prompt_token_ids": [1, 2], "token_type_ids": types}, truncate_prompt_tokens=1)


def test_token_types_reach_the_model(encoder: LLM) -> None:
    prompts = [{"prompt_token_ids": [7, 8, 9], "token_type_ids": types} for types in ([0, 0, 0], [0, 1, 1])]
    raw = PoolingParams(normalize=False)
    plain, typed, without = encoder.embed([*prompts, [7, 8, 9]], pooling_params=raw, use_tqdm=False)
    assert np.array_equal(plain.outputs.data, without.outputs.data)
    assert np.allclose(typed.outputs.data, plain.outputs.data + 2)


def test_a_vector_that_is_not_finite_fails_alone(encoder: LLM, embedder: LLM) -> None:
    for llm in encoder, embedder:
        fine, bad, broken, other = llm.embed([[7, 8], [7, NAN], [7, BROKEN], [8, 9]], use_tqdm=False)
        assert fine.error is other.error is None
        assert "not finite" in bad.error
        assert broken.error.endswith("its hidden states could not be pooled: ValueError")
        assert "secret" not in broken.error
        assert bad.outputs.data.size == 0


def test_each_kind_of_model_refuses_the_work_of_the_other(encoder: LLM) -> None:
    with pytest.raises(RequestError, match=r"this model pools texts .* cannot generate"):
        encoder.generate("a")
    with pytest.raises(RequestError, match="cannot generate"):
        encoder.perplexity("a b c")
    with pytest.raises(InvalidParamsError, match="task='classify': this call is for 'embed'"):
        encoder.embed("a", pooling_params=PoolingParams(task="classify"))
    with pytest.raises(InvalidParamsError, match="2 pooling_params for 1 prompts"):
        encoder.embed("a", pooling_params=[PoolingParams()] * 2)
    with pytest.raises(InvalidParamsError, match="must be PoolingParams, not dict"):
        encoder.embed("a", pooling_params={"task": "embed"})


def test_many_texts_come_in_order_through_a_short_queue(encoder: LLM) -> None:
    texts = [f"text {i % 37} " * (i % 5 + 1) for i in range(700)]
    outputs = encoder.embed(texts, use_tqdm=False)
    assert [output.prompt for output in outputs] == texts
    by_text = {}
    for output in outputs:
        first = by_text.setdefault(output.prompt, output.outputs.data)
        assert np.array_equal(first, output.outputs.data)


@pytest.mark.parametrize("where", ["a step", "the tokenizer of short texts", "the tokenizer of long texts"])
def test_an_interrupt_leaves_the_engine_as_it_was(encoder: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    is_step = where == "a step"
    owner, name = (encoder.engine.executor, "execute") if is_step else (encoder.engine.inputs.pooling, "encode")
    method, calls = getattr(owner, name), []

    def interrupted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return method(*args, **kwargs)

    texts = ["word " * 30 if where.endswith("long texts") else f"a {i}" for i in range(200)]
    expected = encoder.embed(texts[:3], use_tqdm=False)
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        encoder.embed(texts, use_tqdm=False)
    monkeypatch.undo()
    assert not encoder.engine.has_unfinished_requests()
    encoder.engine.requests.check_integrity()
    for output, other in zip(encoder.embed(texts[:3], use_tqdm=False), expected, strict=True):
        assert np.array_equal(output.outputs.data, other.outputs.data)


def test_the_tokenizing_of_long_texts_shows_its_progress(encoder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int]] = []
    done: list[int] = []

    @contextmanager
    def progress(what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
        shown.append((what, total))
        yield lambda: done.append(1)

    monkeypatch.setattr(running, "progress", progress)
    encoder.embed(["word " * 30] * 5 + ["a"])
    assert shown == [("tokenizing", len(done))] == [("tokenizing", 5)]
