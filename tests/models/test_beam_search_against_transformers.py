"""Every output of a beam search, and its score: transformers' in float32."""

import pytest
import torch

from quire import LLM, BeamSearchParams
from quire.batch import StepResult, TokenLogprobs
from quire.runner import model_runner
from quire.runner.worker import Worker

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


@pytest.fixture(autouse=True)
def logprobs_by_definition(monkeypatch):
    """Log-probabilities from the logits that the real model gives, until the sampler brings them."""
    seen = []

    def sample(logits, tensors):
        seen.append(logits.clone())
        return drawn(logits, tensors)

    def execute(worker, batch):
        result = executed(worker, batch)
        draws = [draw for scheduled in batch.sequences for draw in scheduled.draws]
        logprobs = {}
        for place, (draw, row) in enumerate(zip(draws, seen.pop() if draws else (), strict=True)):
            if draw.logprobs is not None:
                values, ids = (row / (draw.temperature or 1.0)).log_softmax(-1).sort(descending=True, stable=True)
                top = [0, *range(draw.logprobs)]
                logprobs[place] = TokenLogprobs(ids[None, top].int().numpy(), values[None, top].numpy(), None)
        return StepResult(result.token_ids, logprobs)

    drawn, executed = model_runner.sample, Worker.execute
    monkeypatch.setattr(model_runner, "sample", sample)
    monkeypatch.setattr(Worker, "execute", execute)


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
            assert score is None or penalized == pytest.approx(score, rel=TOLERANCE)
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
    prompts = [llm.get_tokenizer().encode(text) for text in TEXTS]
    eos = tuple(llm.engine.model_config.eos_token_ids)
    lengths = set()
    for search in SEARCHES[4:7]:
        lengths |= check(llm, oracle, prompts, 16, eos, **search)
    assert len(lengths) > 1
