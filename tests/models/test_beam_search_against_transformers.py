"""Beam search through the real model: every output, and its score, is transformers' in float32."""

import pytest
import torch

from quire import LLM, BeamSearchParams, InvalidParamsError, RequestError, SamplingParams
from tests.engine.beams import plain_beam_search

TOLERANCE = 2e-4
PROMPTS = [[5, 9, 2], [17], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
TEXTS = ["What does json.dumps do?", "import os\n\ndef main():\n    ", "Summarize"]
SEARCHES = [
    {"beam_width": width, "length_penalty": length_penalty, "early_stopping": early_stopping}
    for width, length_penalty, early_stopping in [
        (1, 1.0, False),
        (2, 1.0, False),
        (3, 0.0, True),
        (4, 1.0, True),
        (4, 1.0, "never"),
        (4, -1.0, "never"),
        (5, 2.0, False),
        (8, 0.6, "never"),
    ]
]


@torch.inference_mode()
def oracle_beams(oracle, prompt, beam_width, max_tokens, ends, **how):
    """[(tokens, score)] of all beams, each up to its end token and with it."""
    oracle.generation_config.eos_token_id = list(ends) or None
    output = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=beam_width,
        num_return_sequences=beam_width,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=beam_width > 1,
        **how,
    )
    beams = []
    for row in output.sequences[:, len(prompt) :].tolist():
        stop = next((i for i, token_id in enumerate(row) if token_id in ends), len(row) - 1)
        beams.append(row[: stop + 1])
    return beams, [None] if beam_width == 1 else output.sequences_scores.tolist()


def check(llm, oracle, prompts, max_tokens, ends, **search):
    """Returns the outputs' lengths."""
    lengths = set()
    how = {"ignore_eos": True, "stop_token_ids": list(ends), "include_stop_str_in_output": True}
    params = BeamSearchParams(max_tokens=max_tokens, **search, **how)
    for prompt, found in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected, scores = oracle_beams(oracle, prompt, max_tokens=max_tokens, ends=ends, **search)
        outputs = [sequence.tokens[len(prompt) :] for sequence in found.sequences]
        assert outputs == expected, search
        for sequence, tokens, score in zip(found.sequences, expected, scores, strict=True):
            lengths.add(len(tokens))
            penalized = sequence.cum_logprob / len(tokens) ** search["length_penalty"]
            assert score is None or penalized == pytest.approx(score, rel=TOLERANCE, abs=1e-5)
            assert sequence.finish_reason == ("stop" if tokens[-1] in ends else "length")
            assert sequence.stop_reason == (tokens[-1] if tokens[-1] in ends else None)
    engine = llm.engine
    engine.blocks.check_integrity()
    assert engine.blocks.num_used_blocks == 0
    return lengths


SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MODELS = {
    "LlamaForCausalLM": {"intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.3},
    "OPTForCausalLM": {"ffn_dim": 64, "init_std": 0.5},
}


@pytest.mark.parametrize(("architecture", "first"), list(zip(MODELS, (0, 5), strict=True)))
def test_random_models(architecture, first, save_checkpoint):
    folder, oracle = save_checkpoint(architecture, **SHAPE, **MODELS[architecture])
    llm = LLM(str(folder), tokenizer="quire-tiny", dtype="float32", block_size=4, max_model_len=100)
    greedy = oracle_beams(oracle, PROMPTS[0], 4, 12, ())[0]
    ends = tuple({greedy[0][4], greedy[2][7], greedy[3][2]})
    lengths = set()
    for search in SEARCHES[first:]:
        lengths |= check(llm, oracle, PROMPTS, 12, ends, **search)
    check(llm, oracle, PROMPTS, 12, (), **SEARCHES[2])
    assert len(lengths) > 2


def test_the_embedded_model():
    from transformers import AutoModelForCausalLM

    llm = LLM(dtype="float32", max_model_len=200)
    oracle = AutoModelForCausalLM.from_pretrained(llm.engine.model_config.path, dtype=torch.float32)
    prompts = [llm.engine.tokenizer.encode(text) for text in TEXTS]
    eos = tuple(llm.engine.model_config.eos_token_ids)
    lengths = set()
    for search in SEARCHES[4:7]:
        lengths |= check(llm, oracle, prompts, 16, eos, **search)
    assert len(lengths) > 1


@torch.inference_mode()
def test_a_temperature_divides_the_logits(save_checkpoint):
    folder, oracle = save_checkpoint("LlamaForCausalLM", **SHAPE, **MODELS["LlamaForCausalLM"])
    llm = LLM(str(folder), tokenizer="quire-tiny", dtype="float32", block_size=4, max_model_len=100)
    found = {}
    for temperature in (0.0, 1.0, 0.5, 4.0):

        def next_logprobs(output, divisor=temperature or 1.0):
            logits = oracle(torch.tensor([PROMPTS[0] + output])).logits[0, -1]
            return (logits / divisor).log_softmax(-1).numpy()

        params = BeamSearchParams(3, 6, ignore_eos=True, temperature=temperature, length_penalty=0.0)
        (output,) = llm.beam_search([PROMPTS[0]], params)
        expected = plain_beam_search(next_logprobs, params, 6, frozenset())
        found[temperature] = [sequence.tokens[3:] for sequence in output.sequences]
        assert found[temperature] == [tokens for tokens, _, _ in expected]
        for sequence, (_, cum_logprob, _) in zip(output.sequences, expected, strict=True):
            assert sequence.cum_logprob == pytest.approx(cum_logprob, rel=TOLERANCE)
    assert found[0.0] == found[1.0]
    assert found[0.5] != found[4.0]


def test_what_comes_out():
    llm = LLM(dtype="float32", max_model_len=200)
    tokenizer = llm.engine.tokenizer
    params = BeamSearchParams(beam_width=4, max_tokens=12, n=2, ignore_eos=True)
    text = TEXTS[0]
    outputs = llm.beam_search([text, [], {"prompt": text}, [10**6]], params)
    first, empty, same, unknown = outputs
    assert first == same
    assert [len(output.sequences) for output in outputs] == [2, 0, 2, 0]
    assert "empty" in empty.error
    assert "1000000" in unknown.error
    for sequence in first.sequences:
        assert sequence.tokens[: len(tokenizer.encode(text))] == tokenizer.encode(text)
        assert sequence.text == tokenizer.decode(sequence.tokens)
        assert sequence.text.startswith(text)
    scores = [sequence.cum_logprob for sequence in first.sequences]
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(RequestError, match="empty"):
        llm.beam_search({"prompt_token_ids": []}, params)
    assert llm.beam_search([], params) == []
    with pytest.raises(InvalidParamsError, match="must be BeamSearchParams, not SamplingParams"):
        llm.beam_search(text, SamplingParams())


def test_a_search_is_a_request_of_the_engine_like_any_other():
    """Bit for bit what it gives alone, beside samples and preempted before every step; nothing is told before the
    end."""
    engine_of = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 16}
    requests = [
        (TEXTS[0], BeamSearchParams(4, 16, length_penalty=0.5)),
        (TEXTS[1], SamplingParams(n=3, seed=1, max_tokens=12)),
        (TEXTS[2], BeamSearchParams(3, 10, early_stopping=True, detokenize=False)),
    ]
    solo = LLM(**engine_of | {"num_gpu_blocks_override": 200}, enable_prefix_caching=False)
    (alone,) = solo.beam_search(TEXTS[0], requests[0][1])
    for mode in ("recompute", "swap"):
        engine = LLM(**engine_of, swap_space=0.01, preemption_mode=mode).engine
        for i, (prompt, params) in enumerate(requests):
            engine.add_request(str(i), prompt, params)
        done = {}
        while engine.has_unfinished_requests():
            if running := engine.requests.running:
                engine.scheduler.preemptor.preempt(running[engine.scheduler.num_steps % len(running)])
            for output in engine.step():
                assert output.finished or output.request_id == "1"
                done[output.request_id] = output
            engine.blocks.check_integrity()
        assert engine.blocks.num_used_blocks == 0
        outputs = done["0"].outputs
        assert [output.cumulative_logprob for output in outputs] == [s.cum_logprob for s in alone.sequences]
        prompt_len = len(done["0"].prompt_token_ids)
        assert [output.token_ids for output in outputs] == [s.tokens[prompt_len:] for s in alone.sequences]
        assert [TEXTS[0] + output.text for output in outputs] == [s.text for s in alone.sequences]
        assert [output.index for output in outputs] == [0, 1, 2, 3]
        assert {output.text for output in done["2"].outputs} == {""}
        assert done["0"].metrics.finished_time is not None


def test_an_aborted_search_returns_its_best_beams_so_far():
    engine = LLM(dtype="float32", max_model_len=96).engine
    engine.add_request("a", TEXTS[0], BeamSearchParams(3, 20, ignore_eos=True))
    for _ in range(5):
        engine.step()
    output = engine.abort_request("a")
    assert [(len(o.token_ids), o.finish_reason) for o in output.outputs] == [(5, "abort")] * 3
    assert engine.blocks.num_used_blocks == 0
    assert not engine.has_unfinished_requests()
