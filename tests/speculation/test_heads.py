"""Heads draft what the papers say, in every format of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, CheckpointError, ConfigError, EngineArgs, SamplingParams, UnsupportedModelError
from quire.config.checkpoint.draft_heads import resolve_head
from quire.config.model import ModelConfig
from quire.runner import decode_graphs, head_runner, model_runner
from quire.runner.memory_plan import plan_memory

from . import heads
from .heads import Head, Oracle, write, write_speculators

SETTINGS = {"max_model_len": 128, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 48, "dtype": "float32"}


def make(path: Path | None, k: int = 3, model: Any = None, **config: Any) -> LLM:
    given = {"num_speculative_tokens": k, "adaptive": False, **config} | ({} if path is None else {"model": str(path)})
    return LLM(model, speculative_config=given, **SETTINGS)


FORMATS: dict[str, tuple[Callable[[], Head], Callable[[Path, Head], Path]]] = {
    "eagle": (heads.eagle, lambda folder, head: write(folder, head, heads.EAGLE_NAMES)),
    "eagle, all of its own": (
        lambda: heads.eagle(1, bias=True, has_head=True),
        lambda folder, head: write(folder, head, heads.EAGLE_NAMES, architectures=["EagleLlamaForCausalLM"]),
    ),
    "eagle3": (
        heads.eagle3,
        lambda folder, head: write(folder, head, heads.EAGLE3_NAMES, architectures=["LlamaForCausalLMEagle3"]),
    ),
    "eagle3, narrower, layers named": (
        lambda: heads.eagle3(2, width=64, vocab=heads.VOCAB, eagle_aux_hidden_state_layer_ids=[0, 1, 5]),
        lambda folder, head: write(folder, head, heads.EAGLE3_NAMES),
    ),
    "speculators eagle": (
        lambda: heads.eagle(3, has_norms=True),
        lambda folder, head: write_speculators(folder, head, heads.SPECULATORS_EAGLE_NAMES, "eagle", "quire-tiny"),
    ),
    "speculators eagle3": (
        lambda: heads.eagle3(4, adds_to_norm=True),
        lambda folder, head: write_speculators(folder, head, {"out_norm": "norm"}, "eagle3", "quire-tiny"),
    ),
}


def drafted(llm: LLM, prompt: list[int], num_tokens: int = 8) -> list[tuple[list[int], Any]]:
    """The tokens known after each step that drafted, and what was drafted behind them."""
    execute, found = llm.engine.executor.execute, []

    def watched(batch):
        result = execute(batch)
        found.extend(result.drafted.values())
        return result

    llm.engine.executor.execute = watched
    told = []
    llm.engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    while llm.engine.has_unfinished_requests():
        group = llm.engine._groups["a"]
        llm.engine.step()
        if found and found[-1].token_ids:
            told.append((list(group.seqs[0].token_ids), found[-1]))
        found.clear()
    llm.engine.executor.execute = execute
    llm.engine.requests.check_integrity()
    return told


def check(llm: LLM, oracle: Oracle, prompt: list[int]) -> None:
    told = drafted(llm, prompt)
    assert len(told) > 3
    for token_ids, found in told:
        expected, odds = oracle.drafts(token_ids, len(found.token_ids))
        assert list(found.token_ids) == expected
        torch.testing.assert_close(list(found.odds), odds, rtol=2e-3, atol=1e-5)


def numbers(seed: int, length: int) -> list[int]:
    return torch.randint(3, heads.VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("leaves_out", [False, True])
@pytest.mark.parametrize("format_name", FORMATS)
def test_a_head_drafts_what_the_paper_says(
    format_name: str, leaves_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one chunk and in several, and behind a prefix that was cached, whether its last layer leaves out the rows that
    nothing reads or not."""
    for module in (decode_graphs, model_runner):
        monkeypatch.setattr(module, "most_read", lambda num_tokens: num_tokens - 1 if leaves_out else -1)
    make_head, write_head = FORMATS[format_name]
    head = make_head()
    llm, oracle = make(write_head(tmp_path, head)), Oracle(head)
    prompt = numbers(1, 70)
    for each in (numbers(2, 9), prompt, prompt[:41]):
        check(llm, oracle, each)


def test_a_folder_in_the_speculators_format_starts_the_model_that_it_names(tmp_path: Path) -> None:
    head = heads.eagle3(4)
    folder = write_speculators(tmp_path / "a", head, {"out_norm": "norm"}, "eagle3", str(heads.TINY))
    llm = LLM(str(folder), **SETTINGS)
    assert llm.engine.model_config.model == str(heads.TINY)
    config = llm.engine.plan.config.speculative
    assert (config.method, config.model, config.num_speculative_tokens) == ("eagle3", str(folder), 3)
    llm = LLM(str(folder), speculative_config={"num_speculative_tokens": 2, "adaptive": False}, **SETTINGS)
    assert llm.engine.plan.config.speculative.num_speculative_tokens == 2
    check(llm, Oracle(head), numbers(1, 9))
    other = LLM(speculative_config={"model": str(folder)}, **SETTINGS)
    assert (other.engine.model_config.model, other.engine.plan.config.speculative.method) == ("quire-tiny", "eagle3")
    nameless = write_speculators(tmp_path / "b", head, {"out_norm": "norm"}, "eagle3", None)
    with pytest.raises(CheckpointError, match="does not say which model it drafts for; give that as the model"):
        LLM(str(nameless))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text('{"architectures": ["NoneForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match="'NoneForCausalLM' is not supported"):
        LLM(str(tmp_path / "d"))
    itself = write_speculators(tmp_path / "c", head, {"out_norm": "norm"}, "eagle3", str(tmp_path / "c"))
    with pytest.raises(UnsupportedModelError, match="Eagle3Speculator"):
        LLM(str(itself))


def test_a_head_that_adapts_drafts_and_changes_nothing(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = {"prompt_token_ids": numbers(1, 20)}
    llm = make(write(tmp_path, heads.eagle(), heads.EAGLE_NAMES), adaptive=True)
    expected = make(None, method="off").generate(prompt, params)[0].outputs[0].token_ids
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected
    assert not llm.engine.scheduler.drafting.num_errors


@pytest.mark.parametrize("format_name", ["eagle", "eagle3"])
def test_recorded_passes_of_a_head_draft_the_same_bits(
    format_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As passes whose kernels are called one at a time."""

    def counted(run: Callable[[Any], Any], calls: list[int], sequences: Any) -> Any:
        calls.append(len(sequences))
        return run(sequences)

    make_head, write_head = FORMATS[format_name]
    head, found = write_head(tmp_path, make_head()), list[Any]()
    for can_record in (False, True):
        llm, recorded = make(head), list[int]()
        passes = llm.engine.executor._drafts  # type: ignore[attr-defined]
        for each in (passes._of_model, passes._of_itself):
            monkeypatch.setattr(each, "_can_record", can_record)
            monkeypatch.setattr(each._graphs, "logits", partial(counted, each._graphs.logits, recorded))
        found.append([drafted(llm, numbers(seed, 20)) for seed in (1, 2)])
        assert len(recorded) > 20 if can_record else not recorded
    assert found[0] == found[1]


@pytest.mark.parametrize("plant", ["a rejected row", "another token", "another state"])
def test_planted_bugs_are_seen(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = head_runner.accepted_tokens

    def planted(s, drawn_ids):
        token_ids, history = accepted(s, drawn_ids)
        if plant == "another token":
            return (*token_ids[:-1], 7), history
        if plant == "a rejected row":
            return (*s.token_ids, token_ids[-1]), history
        return token_ids, history

    if plant == "another state":
        logits_of = head_runner.HeadRunner._logits_of
        monkeypatch.setattr(
            head_runner.HeadRunner,
            "_logits_of",
            lambda self, sequences, rows, is_first: logits_of(self, sequences, [0] * len(rows), is_first=is_first),
        )
    monkeypatch.setattr(head_runner, "accepted_tokens", planted)
    head = heads.eagle()
    with pytest.raises(AssertionError):
        check(make(write(tmp_path, head, heads.EAGLE_NAMES)), Oracle(head), numbers(1, 20))


# What is refused


def refused(folder: Path, message: str, **config: Any) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
        make(folder, **config)
    assert "\n" not in str(caught.value)


def eagle3_without(folder: Path, *names: str, **changed: torch.Tensor) -> Path:
    head = heads.eagle3()
    head.tensors = {name: tensor for name, tensor in head.tensors.items() if name not in names} | changed
    return write(folder, head, heads.EAGLE3_NAMES)


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no fc": (
        lambda folder: eagle3_without(folder, "fc.weight"),
        "draft head has no fc.weight, which must be .256, 768.: it is incomplete",
    ),
    "another width": (
        lambda folder: eagle3_without(folder, **{"fc.weight": torch.zeros(256, 3 * 512)}),
        r"has fc.weight \[256, 1536\], where hidden states of 256 elements need \[256, 768\]",
    ),
    "d2t out of range": (
        lambda folder: eagle3_without(folder, d2t=torch.full((500,), 8000)),
        "d2t for the token 8192, but the model has 8192 tokens",
    ),
    "d2t below 0": (lambda folder: eagle3_without(folder, d2t=torch.full((500,), -1)), "d2t for the token -1"),
    "d2t twice": (lambda folder: eagle3_without(folder, d2t=-torch.arange(500)), "two of its tokens the same token"),
    "d2t of another dtype": (
        lambda folder: eagle3_without(folder, d2t=torch.zeros(500)),
        r"d2t float32 \[500\] instead of a non-empty list of int64",
    ),
    "no d2t": (lambda folder: eagle3_without(folder, "d2t"), r"lm_head.weight \[500, 256\] instead of \[8192, 256\]"),
    "no lm_head": (lambda folder: eagle3_without(folder, "lm_head.weight"), "drafts 500 tokens, but has no lm_head"),
    "another vocabulary": (
        lambda folder: eagle3_without(folder, **{"embed_tokens.weight": torch.zeros(9000, 256)}),
        r"embed_tokens.weight \[9000, 256\] instead of \[8192, 256\]: other tokens",
    ),
    "shared embeddings of another width": (
        lambda folder: write(folder, heads.eagle3(width=64), {"out_norm": "norm", "embed_tokens": "verifier_"}),
        "shares the model's embeddings, so its hidden_size 64 must be 256",
    ),
    "layers that the model has not": (
        lambda folder: write(folder, heads.eagle3(), {}, eagle_aux_hidden_state_layer_ids=[1, 2, 6]),
        "must be a list of layers' numbers below 6",
    ),
    "another architecture": (
        lambda folder: write(folder, heads.eagle(), {}, architectures=["EagleNoneForCausalLM"]),
        "draft head of the architecture 'EagleNoneForCausalLM' is not supported",
    ),
    "layers without rotary embedding": (
        lambda folder: write(folder, heads.eagle3(), heads.EAGLE3_NAMES, architectures=["GPT2LMHeadModelEagle3"]),
        "layers of GPT2LMHeadModel are no EAGLE-3 layers",
    ),
    "a share of the dimensions that is too large": (
        lambda folder: write(folder, heads.eagle(), heads.EAGLE_NAMES, partial_rotary_factor=1e308),
        r"partial_rotary_factor is 1e\+308",
    ),
    "a missing matrix": (
        lambda folder: eagle3_without(folder, "layers.0.mlp.up_proj.weight"),
        "missing: layers.0.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused_in_one_line_before_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder, message = WRONG[name]
    if name != "a missing matrix":
        monkeypatch.setattr("quire.models.weights.loader.LayerLoader.fill", None)
    refused(make_folder(tmp_path), message)


@pytest.mark.parametrize("num", [0, 33, 1000])
def test_a_number_of_drafts_that_is_not_possible_is_refused(num: int, tmp_path: Path) -> None:
    refused(tmp_path, f"num_speculative_tokens={num} must be from 1 to 32", k=num, method="eagle")


def test_another_method_than_the_heads_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", heads.eagle(), {})
    refused(folder, "has a head for 'eagle', so method='eagle3' cannot use it", method="eagle3")
    refused(heads.TINY, "has no draft head, so method='eagle' cannot use it", method="eagle")
    with pytest.raises(ConfigError, match="method='eagle3' needs a model"):
        LLM(speculative_config={"method": "eagle3"})
    with pytest.raises(ConfigError, match="has no draft head, so method='mtp' cannot"):
        LLM(speculative_config={"method": "deepseek_mtp"})


def test_what_has_no_head_or_takes_none_is_refused(tmp_path: Path) -> None:
    target = ModelConfig.resolve(None)
    folder = write(tmp_path / "a", heads.eagle3(), heads.EAGLE3_NAMES)
    with pytest.raises(ConfigError, match="needs a model that Quire runs itself"):
        resolve_head(replace(target, model_impl="transformers"), str(folder), None)
    shallow = replace(target, hf_config=target.hf_config.replaced({"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match="EAGLE-3 needs a model of 3 layers or more, not of 2"):
        resolve_head(shallow, str(folder), None)
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert resolve_head(replace(target, path=file), None, None) is None
    with pytest.raises(UnsupportedModelError, match="read from safetensors, not from GGUF files"):
        resolve_head(replace(target, path=file), None, "mtp")


def test_a_head_with_too_wide_heads_is_refused_by_the_plan(tmp_path: Path) -> None:
    """Before a table of that width is made."""
    folder = write(tmp_path, heads.eagle(), heads.EAGLE_NAMES, head_dim=65538)
    with pytest.raises(CheckpointError, match=r"rotary embedding needs .*, not 65538: head_dim is 65538"):
        plan_memory(EngineArgs(speculative_config={"model": str(folder)}))


def test_the_plan_counts_the_head(tmp_path: Path) -> None:
    head = heads.eagle3()
    plan, alone = make(write(tmp_path, head, heads.EAGLE3_NAMES)).engine.plan, make(None, method="off").engine.plan
    num_bytes = sum(4 * tensor.numel() for name, tensor in head.tensors.items() if name not in ("d2t", "t2d"))
    assert plan.weight_bytes == alone.weight_bytes + num_bytes
    assert plan.kv_cache.bytes_per_token == alone.kv_cache.bytes_per_token + 2 * 2 * 16 * 4
    assert plan.activation_bytes > alone.activation_bytes + 48 * 9 * 256 * 4


def test_without_a_head_a_model_keeps_no_hidden_states() -> None:
    model = make(None, method="off").engine.executor.runner.model
    assert model.passes == list(model.layers)
    assert model._after == []
