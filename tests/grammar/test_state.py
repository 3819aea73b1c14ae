"""A place in a grammar: what may come next, forks, and the rows of the mask."""

import ctypes
import json
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.common.errors import InvalidParamsError
from quire.common.params import StructuredOutputsParams
from quire.text.grammar.compiler import Compilation, GrammarCompiler, rejection
from quire.text.grammar.source import num_beginnings
from quire.text.grammar.state import GrammarState, MaskShape
from tests.effort import examples
from tests.grammar.masked_engine import masked_llm


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return masked_llm()[0].engine.grammars.compiler


def start(compiler: GrammarCompiler, **structure: object) -> GrammarState:
    compilation: Compilation = compiler.submit(StructuredOutputsParams(**structure))
    compilation.exception(timeout=60)
    assert rejection(compilation) is None, rejection(compilation)
    return compilation.result()


def allowed(state: GrammarState, vocab_size: int = 8192) -> list[int]:
    words = state.mask()
    assert words.shape == (-(-vocab_size // 32),)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


JSON = {"json": {"type": "array", "items": {"enum": ["red", "green", 12, None]}}, "whitespace_pattern": " ?"}


@pytest.mark.essential
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_forks_go_their_own_ways(compiler, data) -> None:
    """Any walk over forks: each state allows what one allows that went the same way alone."""
    paths = [[]]
    states = [start(compiler, **JSON)]
    for _ in range(data.draw(st.integers(1, 12))):
        i = data.draw(st.integers(0, len(states) - 1))
        if data.draw(st.booleans()):
            states.append(states[i].fork())
            paths.append(list(paths[i]))
        if choices := allowed(states[i]):
            token_id = data.draw(st.sampled_from(choices))
            assert states[i].advance(token_id)
            paths[i].append(token_id)
    for state, path in zip(states, paths, strict=True):
        alone = start(compiler, **JSON)
        assert all(alone.advance(token_id) for token_id in path)
        assert allowed(alone) == allowed(state)
        assert (alone.may_end, alone.is_finished) == (state.may_end, state.is_finished)
        assert alone.forced_tokens() == state.forced_tokens()


def test_a_token_that_is_not_allowed_is_refused(compiler) -> None:
    state = start(compiler, choice=["yes"])
    assert state.fork().advance(-1) is False
    other = next(i for i in range(8192) if i not in allowed(state))
    assert not state.advance(other)
    assert state.error
    assert not state.is_finished
    assert allowed(state) == list(range(8192))


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1, max_size=6))
def test_any_string_can_be_a_choice(compiler, choices) -> None:
    tokenizer = compiler._tokenizer
    for choice in choices:
        state = start(compiler, choice=choices)
        token_ids = tokenizer._backend.encode(choice, add_special_tokens=False).ids
        if tokenizer.decode(token_ids, skip_special_tokens=False) != choice or set(token_ids) & {0, 1, 2}:
            continue
        assert all(state.advance(token_id) for token_id in token_ids), state.error
        assert state.may_end


def test_a_mask_sets_and_clears_every_bit(compiler, monkeypatch) -> None:
    state = start(compiler, regex="[ab]")
    masks = []
    for before in (0, -1):
        monkeypatch.setattr(np, "empty", lambda shape, dtype, before=before: np.full(shape, before, dtype))
        masks.append(state.mask())
    zeros, ones = masks
    assert np.array_equal(zeros, ones)
    assert zeros.any()


class AllAllowed:
    """A matcher that allows every token the library knows."""

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 255, num_bytes)


@pytest.mark.parametrize("vocab_size", [32, 33, 63, 64, 200])
def test_tokens_that_the_model_does_not_have_are_not_allowed(vocab_size) -> None:
    words = np.full(-(-vocab_size // 32), 7, np.int32)
    MaskShape(vocab_size, 200, hidden_token_ids=(3, 31)).fill(AllAllowed(), words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits[:200] == 0).tolist() == [3, 31, *range(vocab_size, min(200, len(bits)))]


@pytest.mark.parametrize("indent", [None, 0, 1, 2, 4, "\t"])
def test_json_may_be_indented_but_its_whitespace_has_an_end(compiler, indent) -> None:
    tokenizer = masked_llm()[0].engine.tokenizer
    state = start(compiler, json={"type": "object", "additionalProperties": {"type": "array"}})
    text = json.dumps({"a": [1, {"b": [None]}], "c": []}, indent=indent)
    for token_id in tokenizer.encode(text):
        assert state.advance(token_id), text
    assert state.may_end
    state = start(compiler, json={"type": "array"})
    for token_id in tokenizer.encode("[\n" + " " * 16):
        assert state.advance(token_id)
    texts = [tokenizer.decode([token_id]) for token_id in allowed(state)]
    assert texts
    assert not any(text[0].isspace() for text in texts)


class CountedTrials:
    """Wraps a compiler's trials, and counts them."""

    def __init__(self, compiler) -> None:
        self.num_trials = 0
        self._try_out = compiler._try_out
        compiler._try_out = self.try_out

    def try_out(self, params):
        self.num_trials += 1
        return self._try_out(params)


def test_a_trial_is_remembered_and_the_memory_is_bounded(monkeypatch) -> None:
    compiler = masked_llm(share_compiler=False)[0].engine.grammars.compiler
    trials = CountedTrials(compiler)
    monkeypatch.setattr("quire.text.grammar.compiler.MAX_VERDICTS", 20)
    first = StructuredOutputsParams(json={"title": "first", "type": "object"})
    for i in range(50):
        other = compiler.submit(StructuredOutputsParams(json={"title": str(i), "type": "object"}))
        assert compiler.submit(first).result(30).error is None
        assert other.result(30).error is None
        assert len(compiler._verdicts) <= 20
    assert trials.num_trials == 51  # asked for again and again, the first stays
    monkeypatch.setattr("quire.text.grammar.compiler.MAX_VERDICT_BYTES", 1000)
    compiler.submit(StructuredOutputsParams(regex="x" * 800)).result(30)
    assert len(compiler._verdicts) == 1


def test_a_request_does_not_pay_for_what_others_have_generated(compiler) -> None:
    """A lexer that the library has grown to its limit by one request's tokens is not the next one's."""
    walks = []
    for _ in range(3):
        state, rng = start(compiler, regex=r"(\w{1,500} ?){1,500}"), random.Random(0)
        walk: list[object] = []
        while state.error is None and len(walk) < 40:
            walk.append(rng.choice(allowed(state)))
            state.advance(walk[-1])
        walks.append([*walk, state.error])
    assert "too many" in walks[0][-1], "it shows nothing otherwise"
    assert walks[0] == walks[1] == walks[2]


@settings(max_examples=examples(50), deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=20, unique=True), as_json=st.booleans())
def test_the_beginnings_of_a_list_are_counted(texts, as_json) -> None:
    params = StructuredOutputsParams(json={"enum": texts}) if as_json else StructuredOutputsParams(choice=texts)
    encoded = [json.dumps(text, ensure_ascii=False).encode() if as_json else text.encode() for text in texts]
    beginnings = {text[:end] for text in encoded for end in range(1, len(text) + 1)}
    if not as_json or not any(ord(char) < 32 or char == "\x7f" for text in texts for char in text):
        assert num_beginnings(params) == len(beginnings)


@pytest.mark.parametrize(
    "structure",
    [{"regex": "a|b"}, {"json": {"enum": ["a", 1]}}, {"json": {"enum": ["a"], "pattern": "a*"}}, {"json_object": True}],
    ids=str,
)
def test_only_lists_of_texts_are_counted(structure) -> None:
    assert num_beginnings(StructuredOutputsParams(**structure)) is None


@pytest.mark.parametrize(("num_texts", "is_shared"), [(200, True), (2000, False)])
def test_what_is_compiled_is_shared_where_it_stays_small(compiler, num_texts, is_shared) -> None:
    texts = [f"{i} squared is {i * i}" for i in range(num_texts)]
    params = StructuredOutputsParams(choice=texts)
    first, second = (compiler.submit(params, jumps=jumps).result(30) for jumps in (True, False))
    assert (first.jumps, second.jumps) == (True, False)
    verdict = compiler._verdicts[msgspec.json.encode(params)]
    assert (verdict.start is not None) == is_shared
    assert verdict.start not in (first, second)
    token_ids = masked_llm()[0].engine.tokenizer.encode(texts[7], add_special_tokens=False)
    for state in (first, second):
        assert all(state.advance(token_id) for token_id in token_ids)


def test_the_vocabulary_can_be_given_beforehand() -> None:
    tokenizer = masked_llm()[0].engine.tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, ())
    compiler.prepare()
    known = compiler._vocabulary
    compiler.submit(StructuredOutputsParams(regex="a")).result(30)
    assert known is not None
    assert compiler._vocabulary is known


def test_what_failed_is_tried_again() -> None:
    compiler = masked_llm(share_compiler=False)[0].engine.grammars.compiler
    trials = CountedTrials(compiler)
    params = StructuredOutputsParams(regex="x{3")
    compilations = [compiler.submit(params) for _ in range(9)]
    for compilation in compilations:
        assert "regex is rejected" in str(compilation.exception(30))
    assert trials.num_trials <= 2, "one for each thread: the others had been asked for before these had ended"
    num_trials = trials.num_trials
    assert compiler.submit(params).exception(30) is not None
    assert trials.num_trials == num_trials + 1


def test_a_tokenizer_that_the_library_cannot_take() -> None:
    class Odd:
        vocab_size = 10
        special_token_texts = {}  # noqa: RUF012

        def to_json(self) -> str:
            return '{"model": {"type": "WordPiece"}}'

    compiler = GrammarCompiler(Odd(), 10, ())
    compiler.prepare()  # complains of nothing: no grammar is asked for yet
    compilation = compiler.submit(StructuredOutputsParams(regex="a"))
    assert isinstance(compilation.exception(timeout=60), InvalidParamsError)
    assert "tokenizer" in (rejection(compilation) or "")


@pytest.mark.parametrize("jumps", [False, True])
def test_drafts_that_are_tried_use_up_none_of_a_grammars_limits(compiler, jumps) -> None:
    """A pattern that has too many states after some 20 tokens: it fails at the same token with and without trials."""
    generator = random.Random(3)
    alone, tried = (start(compiler, regex=r"[a-z ]*[aeiou][a-z ]{40}") for _ in range(2))
    alone.jumps = tried.jumps = jumps
    for _ in range(60):
        assert np.array_equal(tried.mask(), alone.mask())
        for _ in range(3):
            trial = tried.trial()
            while trial is not None and trial.error is None and generator.random() < 0.9:
                trial.advance(generator.choice(allowed(trial)))
        token_id = generator.choice(allowed(alone))
        assert tried.num_allowed([token_id]) in (0, 1)
        assert tried.advance(token_id) == alone.advance(token_id)
        assert (tried.error, tried.may_end, tried.is_finished) == (alone.error, alone.may_end, alone.is_finished)
        if alone.error is not None:
            break
        assert tried.forced_tokens() == alone.forced_tokens()
    assert "too many states" in (alone.error or "")
    assert tried.trial() is None
    assert tried.num_allowed([token_id]) == 0


def test_a_sample_fails_where_it_would_alone(compiler) -> None:
    """Samples of a request share what the library builds, which has limits; none reaches them sooner for the others."""
    generators = [random.Random(seed) for seed in range(3)]
    alone, parent = (start(compiler, regex=r"[a-z ]*[aeiou][a-z ]{40}") for _ in range(2))
    others = [parent.fork() for _ in range(2)]
    lens = [0, 0]
    for _ in range(60):
        for i, other in enumerate(others):
            if other.error is None and other.advance(generators[i].choice(allowed(other))):
                lens[i] += 1
        assert np.array_equal(parent.mask(), alone.mask())
        token_id = generators[2].choice(allowed(alone))
        assert parent.advance(token_id) == alone.advance(token_id)
        assert (parent.error, parent.may_end, parent.is_finished) == (alone.error, alone.may_end, alone.is_finished)
        if alone.error is not None:
            break
    assert "too many states" in (alone.error or "")
    assert all(length > 10 for length in lens)
