"""From scheduled sequences and logits to tokens and log-probabilities."""

import logging
import random
import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from quire import kernels
from quire.common.batch import Draw, TokenLogprobs
from quire.common.faults import Fault, inject
from quire.common.params import LOGPROBS_MODES
from quire.runner.sampling.draw_tensors import DrawTensors, draws_of
from quire.runner.sampling.named_processor import NamedProcessor
from quire.runner.sampling.random import random_key, uniform
from quire.runner.sampling.sampler import Sampler
from tests.effort import examples
from tests.kernels.isas import ISAS, using
from tests.sampling.plain import Mask, changed, probabilities, sequence

VOCAB = 45
CPU = kernels.backend_for("cpu")
GREEDY = Draw(0.0, 0, 1.0, b"")
KEPT: list[NamedProcessor] = []


def named(*processors) -> tuple[str, ...]:
    """Names that stay valid until the tests end."""
    made = [NamedProcessor(processor) for processor in processors]
    KEPT.extend(made)
    return tuple(one.name for one in made)


SHIFTING = named(lambda output, logits: logits + len(output) % 3 - torch.arange(len(logits)) / 20)


def random_draw(rng: random.Random) -> Draw:
    """Any of what a request can ask for, most of it not at once."""

    def some(highest: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, highest)))

    everything = {
        "temperature": rng.choice([0.0, 0.4, 1.7]),
        "top_k": rng.choice([1, 5, 40, 100]),
        "top_p": rng.choice([0.3, 0.9]),
        "min_p": rng.choice([0.01, 0.3]),
        "presence_penalty": rng.choice([-1.0, 0.6]),
        "frequency_penalty": rng.choice([-0.3, 0.9]),
        "repetition_penalty": rng.choice([0.7, 1.2]),
        "logit_bias": tuple((i, rng.uniform(-3, 3)) for i in set(some(5))),
        "allowed_token_ids": some(60),
        "bad_words": tuple(some(3) for _ in range(4)),
        "min_tokens": rng.randrange(12),
        "stop_token_ids": some(3),
        "logprobs": rng.choice([0, 3]),
        "processors": SHIFTING,
    }
    chosen = {name: value for name, value in everything.items() if rng.random() < 0.3}
    return replace(Draw(1.0, 0, 1.0, random_key(rng.randrange(99), 0)), **chosen)


def random_sequence(rng: random.Random, seq_id: int):
    draws = tuple(random_draw(rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
    output = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 5, 30]))]
    mask = Mask(rng.sample(range(VOCAB), 20)) if rng.random() < 0.3 else None
    return sequence(draws, prompt, output, mask=mask, seq_id=seq_id)


def bits(logprobs: TokenLogprobs) -> tuple:
    return tuple(a.tobytes() for a in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks))


@pytest.mark.essential
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), num_seqs=st.integers(1, 12), mode=st.sampled_from(LOGPROBS_MODES))
def test_a_row_in_a_batch_is_what_it_is_alone(isa, seed, num_seqs, mode):
    rng = random.Random(seed)
    sequences = [random_sequence(rng, i) for i in range(num_seqs)]
    num_rows = sum(len(s.drawn.draws) for s in sequences)
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    with using(isa):
        drawn = Sampler(CPU, mode).sample(logits, sequences)
        token_ids, logprobs = drawn.token_ids, drawn.logprobs
    assert torch.equal(logits, before)
    row = 0
    for s in sequences:
        for draw in s.drawn.draws:
            alone = replace(s, drawn=replace(s.drawn, draws=(draw,)))
            with using(ISAS[seed % len(ISAS)], 1):
                own_drawn = Sampler(CPU, mode).sample(logits[row : row + 1], [alone])
                tokens, own = own_drawn.token_ids, own_drawn.logprobs
            assert tokens == token_ids[row : row + 1]
            assert (0 in own) == (row in logprobs) == (draw.logprobs is not None)
            if own:
                assert bits(own[0]) == bits(logprobs[row])
            row += 1
    assert len(token_ids) == num_rows


@pytest.mark.essential
@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_processed_logits_are_those_of_the_plain_definition(seed):
    rng = random.Random(seed)
    draw = replace(random_draw(rng), processors=())
    prompt, output = [[rng.randrange(VOCAB) for _ in range(n)] for n in (6, rng.choice([0, 5, 30]))]
    mask = Mask(rng.sample(range(VOCAB), 20)) if rng.random() < 0.4 else None
    if mask is not None and draw.allowed_token_ids is not None:
        mask = Mask([*mask.allowed, *draw.allowed_token_ids])
    s = sequence(draw, prompt, output, mask=mask)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    how = DrawTensors(s.drawn.draws, VOCAB).at([s], {})
    processed = kernels.processed_logits(logits, how, torch.tensor([0]))[0]
    expected = changed(logits[0], draw, prompt, output, mask)
    if draw.temperature == 0 or expected.max() == -torch.inf:
        assert torch.equal(processed, expected)
    else:
        probs = probabilities(expected, draw)
        assert torch.equal(processed > -torch.inf, probs > 0)
        kept = probs > 0
        assert torch.equal(processed[kept], (expected.double() / draw.temperature).float()[kept])
        torch.testing.assert_close(processed.double().softmax(0), probs, rtol=1e-5, atol=1e-12)


def test_the_random_number_of_a_draw_is_that_of_its_key_and_position():
    keys = [random_key(seed, 0) for seed in range(2)]
    sequences = [
        sequence((Draw(0.5, 0, 1.0, keys[0]), GREEDY), [1, 2], [3], num_rows=2),
        sequence(Draw(1.5, 0, 1.0, keys[1]), [1]),
    ]
    numbers = DrawTensors(draws_of(sequences), VOCAB).at(sequences, {}).uniform
    assert numbers.tolist() == [uniform(keys[0], 2), 0.0, uniform(keys[0], 3), 0.0, uniform(keys[1], 1)]


def test_whole_numbers_mean_what_they_mean_as_floats():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    results = []
    for number in (int, float):
        draw = Draw(
            number(2), 0, number(1), random_key(1, 0), min_p=number(0), presence_penalty=number(1),
            frequency_penalty=number(1), repetition_penalty=number(2), logit_bias=((5, number(3)),), logprobs=3,
        )  # fmt: skip
        results.append(Sampler(CPU, "processed_logits").sample(logits, [sequence(draw, [1, 2], [3, 3])]))
    assert results[0].token_ids == results[1].token_ids
    assert bits(results[0].logprobs[0]) == bits(results[1].logprobs[0])


@pytest.mark.parametrize("vocab", [64, 65])
@pytest.mark.parametrize("processors", [(), SHIFTING])
def test_the_last_token_of_a_vocabulary_may_be_the_only_one_allowed(vocab, processors):
    draw = replace(GREEDY, allowed_token_ids=(vocab - 1,), processors=processors)
    drawn = Sampler(CPU).sample(torch.zeros(1, vocab), [sequence(draw, [1])])
    assert (drawn.token_ids, drawn.errors) == ((vocab - 1,), {})


@pytest.mark.parametrize("masks", [[Mask([1, 2, 3]), None, Mask([4, 5, 6]), Mask([40, 41]), None], [None] * 5])
def test_a_row_that_cannot_be_made_ready_fails_alone(caplog, masks):
    """Its neighbours, with and without masks, are drawn as ever."""
    draws = [replace(GREEDY, temperature=1.0, random_key=random_key(i, 0)) for i in range(5)]
    draws[3] = replace(draws[3], logprobs=2)
    draws[4] = replace(draws[4], bad_words=((0,), (1,)))
    sequences = [
        sequence(draw, [1, 2], mask=mask, seq_id=i) for i, (draw, mask) in enumerate(zip(draws, masks, strict=True))
    ]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = Sampler(CPU).sample(logits, sequences)
    with inject(Fault("sampler.row", subject=2, error="OverflowError")):
        result = Sampler(CPU).sample(logits, sequences)
    assert result.errors == {2: "its token could not be drawn: OverflowError"}
    for row in (0, 1, 3, 4):
        assert result.token_ids[row] == expected.token_ids[row]
    assert bits(result.logprobs[3]) == bits(expected.logprobs[3])
    assert "a token of sequence 2 cannot be drawn" in caplog.text or not logging.getLogger("quire").propagate


class TestBans:
    """All logits are equal, so that greedy takes the lowest id that is not banned."""

    def token(self, prompt, output=(), mask=None, **changes) -> int:
        s = sequence(replace(GREEDY, **changes), prompt, output, mask=mask)
        return Sampler(CPU).sample(torch.zeros(1, VOCAB), [s]).token_ids[0]

    def test_bad_words_end_in_the_output_only(self):
        words = ((0,), (7, 8, 1), (9, 2))
        assert self.token([7, 8], bad_words=words) == 1
        assert self.token([7], [8], bad_words=words) == 1
        assert self.token([5], [7, 8], bad_words=words) == 2
        assert self.token([5], [7, 8], bad_words=(*words, (8, 2), (8, 3))) == 4
        assert self.token([5], [9], bad_words=((0,), (1,), (9, 2))) == 3

    def test_stop_tokens_wait_for_min_tokens(self):
        assert self.token([5], [1, 2], min_tokens=3, stop_token_ids=(0, 1)) == 2
        assert self.token([5], [1, 2, 4], min_tokens=3, stop_token_ids=(0, 1)) == 0

    def test_only_what_grammar_and_allowed_token_ids_have_in_common_is_drawn(self):
        assert self.token([5], mask=Mask([3, 40, 44]), allowed_token_ids=(1, 2, 40)) == 40

    def test_the_grammar_wins_over_what_contradicts_it(self):
        assert self.token([5], mask=Mask([3, 44]), allowed_token_ids=(1, 2)) == 3
        assert self.token([5], mask=Mask([3, 44]), min_tokens=5, stop_token_ids=(3, 44)) == 3

    def test_draws_that_change_from_step_to_step(self):
        sampler, logits = Sampler(CPU), torch.zeros(1, VOCAB)
        for banned in (((0,),), ((1,),), ((0,), (1,)), ()):
            s = sequence(replace(GREEDY, bad_words=banned), [5])
            expected = next(i for i in range(VOCAB) if (i,) not in banned)
            assert sampler.sample(logits, [s]).token_ids == (expected,)


class TestProcessors:
    def test_they_see_output_and_masked_logits_and_run_in_turn(self):
        seen = []

        def first(output, logits):
            seen.append((output, logits.clone()))
            logits[30] = 50.0
            return logits

        draw = replace(
            GREEDY,
            processors=named(first, lambda _, x: x * torch.tensor([1.0] * 30 + [-1.0] + [1.0] * 14)),
            allowed_token_ids=tuple(range(20, VOCAB)),
            bad_words=((25,),),
        )
        logits = torch.arange(45.0)[None].clone()
        s = sequence(draw, [4, 5], [6, 7])
        before = logits.clone()
        assert Sampler(CPU).sample(logits, [s]).token_ids == (44,)
        assert torch.equal(logits, before)
        ((output, masked),) = seen
        assert output == [6, 7]
        assert (masked == -torch.inf).nonzero().flatten().tolist() == [*range(20), 25]

    def test_they_see_the_prompt_too_if_they_have_a_parameter_for_it(self):
        seen = []

        def first(prompt, output, logits):
            seen.append((prompt, output))
            return logits

        draw = replace(GREEDY, processors=named(first))
        assert not Sampler(CPU).sample(torch.zeros(1, VOCAB), [sequence(draw, [4, 5], [6])]).errors
        assert seen == [([4, 5], [6])]

    def test_a_function_without_a_signature_gets_output_and_logits(self):
        class Hidden:
            __signature__ = "none"

            def __call__(self, *given):
                return given

        assert NamedProcessor(Hidden())([4, 5], [6], "logits") == ([6], "logits")
        assert NamedProcessor(lambda output, logits: (output, logits))([4], [6], "logits") == ([6], "logits")
        assert NamedProcessor(lambda *given, one=1: given)([4], [6], "logits") == ([6], "logits")

    def test_they_cannot_allow_what_the_grammar_forbids(self):
        draw = replace(GREEDY, processors=named(lambda _, x: torch.zeros_like(x)))
        assert Sampler(CPU).sample(torch.zeros(1, VOCAB), [sequence(draw, [1], mask=Mask([9]))]).token_ids == (9,)

    @pytest.mark.parametrize(
        ("processor", "message"),
        [
            (lambda _, x: x[1:], r"<lambda> failed: .*returned shape \[44\]; it must return a tensor of shape \[45\]"),
            (lambda _, x: None, "<lambda> failed: .*returned a NoneType"),
            (lambda _, x: 5, "<lambda> failed: .*returned a int"),
            (lambda _, x: x / [], "<lambda> failed: TypeError: "),
            (partial(divmod), "^the logits processor partial failed: TypeError: "),
            (type("Kind#2", (), {"__call__": len})(), "^the logits processor Kind#2 failed: TypeError: "),
            (lambda _, x: x * torch.nan, "<lambda> failed: .*left no token that could be drawn"),
            (lambda _, x: x.fill_(-torch.inf), "<lambda> failed: .*left no token that could be drawn"),
            (lambda _, x: x.to_sparse(), "<lambda> failed: NotImplementedError: Could not run [^\n]*$"),
            (lambda _, x: x[0], r"<lambda> failed: .*returned shape \[\]"),
            (lambda _, x: next(iter(())), "<lambda> failed: StopIteration: $"),
        ],
    )
    def test_a_failure_is_reported_for_its_row_only(self, processor, message):
        failing = sequence(replace(GREEDY, processors=named(processor)), [1])
        drawn = Sampler(CPU).sample(torch.arange(2.0 * VOCAB).view(2, VOCAB), [failing, sequence(GREEDY, [1])])
        assert list(drawn.errors) == [0]
        assert re.search(message, drawn.errors[0])
        assert drawn.token_ids[1] == VOCAB - 1

    def test_a_name_without_a_processor_fails_in_its_row_alone(self):
        unknown = replace(GREEDY, processors=(NamedProcessor(lambda _, x: x).name,))  # its object is gone already
        sequences = [sequence(unknown, [1]), sequence(GREEDY, [1])]
        drawn = Sampler(CPU).sample(torch.arange(2.0 * VOCAB).view(2, VOCAB), sequences)
        assert drawn.errors.keys() == {0}
        assert "unknown in the process that draws" in drawn.errors[0]

    def test_what_was_empty_before_is_not_their_fault(self):
        draw = replace(GREEDY, processors=named(lambda _, x: x), min_tokens=3, stop_token_ids=(9,))
        drawn = Sampler(CPU).sample(torch.zeros(1, VOCAB), [sequence(draw, [1], mask=Mask([9]))])
        assert (drawn.token_ids, drawn.errors) == ((9,), {})

    def test_others_are_not_touched(self):
        s = [
            sequence(GREEDY, [1]),
            sequence(replace(GREEDY, processors=named(lambda _, x: -x), logprobs=1), [1]),
            sequence(replace(GREEDY, logprobs=1), [1]),
        ]
        logits = torch.arange(45.0).repeat(3, 1)
        drawn = Sampler(CPU, "processed_logits").sample(logits, s)
        token_ids, logprobs = drawn.token_ids, drawn.logprobs
        assert token_ids == (44, 0, 44)
        assert [logprobs[row].logprobs[0, 0] for row in (1, 2)] == [0.0, 44.0]


class TestLogprobs:
    logits = torch.tensor([[1.0, 4.0, 3.0, 3.0, -2.0, 0.0]])

    def logprobs(self, mode: str, **changes) -> TokenLogprobs:
        s = sequence(replace(GREEDY, logprobs=3, **changes), [0])
        return Sampler(CPU, mode).sample(self.logits, [s]).logprobs[0]

    def test_raw_ones_are_of_the_models_own_logits(self):
        result = self.logprobs("raw_logprobs", logit_bias=((5, 100.0),))
        assert result.token_ids.tolist() == [[5, 1, 2, 3]]
        assert result.ranks.tolist() == [5]
        expected = self.logits[0].double().log_softmax(0)[[5, 1, 2, 3]].float().numpy()
        assert np.abs(result.logprobs[0] - expected).max() < 1e-6

    def test_processed_ones_are_of_what_was_drawn_from(self):
        result = self.logprobs("processed_logprobs", temperature=0.5, top_k=2)
        assert result.token_ids[0, 1:].tolist() == [1, 2, 0]
        expected = torch.tensor([8.0, 6.0]).log_softmax(0).tolist()
        assert result.logprobs[0, 1:].tolist() == pytest.approx([*expected, -np.inf], rel=1e-6)

    def test_greedy_ones_are_neither_divided_nor_cut(self):
        assert self.logprobs("processed_logits", top_k=1).logprobs.tolist() == [[4.0, 4.0, 3.0, 3.0]]

    def test_logits_are_not_normalized(self):
        assert self.logprobs("raw_logits").logprobs.tolist() == [[4.0, 4.0, 3.0, 3.0]]
        assert self.logprobs("processed_logits", logit_bias=((2, 4.0),)).logprobs.tolist() == [[7.0, 7.0, 4.0, 3.0]]

    def test_more_than_the_vocabulary_has_are_all(self):
        s = sequence(replace(GREEDY, logprobs=99), [0])
        assert Sampler(CPU).sample(self.logits, [s]).logprobs[0].token_ids.shape == (1, 7)

    def test_more_rows_than_are_taken_at_once(self):
        sequences = [sequence(replace(GREEDY, logprobs=i % 2), [0], seq_id=i) for i in range(200)]
        logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(3))
        logprobs = Sampler(CPU, "processed_logprobs").sample(logits, sequences).logprobs
        assert sorted(logprobs) == list(range(200))
        for row in (0, 63, 64, 199):
            alone = Sampler(CPU, "processed_logprobs").sample(logits[row : row + 1], [sequences[row]]).logprobs[0]
            assert bits(alone) == bits(logprobs[row])
