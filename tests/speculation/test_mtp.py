"""Layers for multi-token prediction in the model's own checkpoint draft what DeepSeek-V3's report says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.cli import main
from quire.common.errors import CheckpointError
from quire.config.checkpoint.draft_heads import own_head, resolve_head
from quire.config.model import ModelConfig
from tests.models.conftest import make_checkpoint
from tests.models.latent import LATENT
from tests.models.mixtures import MIXTURES

from . import heads
from .heads import MTP_NAMES, Head, Oracle, mtp, renamed
from .test_heads import SETTINGS, check, drafted, make, numbers


@pytest.mark.parametrize("name", ["ernie", "mimo", "qwen"])
def test_a_layer_beside_the_models_drafts_as_the_report_says(name: str, tmp_path: Path) -> None:
    head = mtp(name)
    folder = shutil.copytree(heads.TINY, tmp_path / "model")
    save_file(heads.load_tiny() | renamed(head.tensors, MTP_NAMES[name]), folder / "model.safetensors")
    llm, oracle = make(None, method=f"{name}_mtp" if name != "qwen" else "mtp", model=str(folder)), Oracle(head)
    assert llm.engine.plan.weight_bytes > make(None, method="off").engine.plan.weight_bytes
    for prompt in (numbers(1, 9), numbers(2, 70)):
        check(llm, oracle, prompt)


class LayerOracle(Oracle):
    """With a layer of transformers' in the place of Llama's."""

    def __init__(self, head: Head, model: Any, layer: Any) -> None:
        super().__init__(head, model)
        self.block = layer

    def layer(self, embeddings: Tensor, states: Tensor) -> Tensor:
        x = torch.cat([self.norm("token_norm", embeddings), self.norm("state_norm", states)], -1)
        x, places = self.linear("fc", x)[None], torch.arange(len(x))[None]
        mask = torch.full((len(states), len(states)), -torch.inf).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(x, places)
        out = self.block(x, attention_mask=mask, position_ids=places, position_embeddings=rotary)
        return (out if isinstance(out, Tensor) else out[0])[0]


FAMILIES = {name: LATENT[name] for name in ("deepseek-v3", "glm4-moe-lite")} | {"glm4-moe": MIXTURES["glm4-moe"]}


def behind(parent: Path, name: str, **changed: Any) -> tuple[Path, Callable[[], LayerOracle]]:
    """A model whose last layer is made the one that predicts further tokens."""
    architecture, fields = FAMILIES[name]
    if "mlp_layer_types" in fields:
        fields = fields | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    fields = fields | {"vocab_size": heads.VOCAB, "max_position_embeddings": 128} | changed
    folder, model = make_checkpoint(parent, architecture, **fields)
    last, width = model.config.num_hidden_layers - 1, model.config.hidden_size
    rng = torch.Generator().manual_seed(8)
    norms = {f"{norm}.weight": heads.norm(rng, width) for norm in ("token_norm", "state_norm", "out_norm")}
    tensors = norms | {"fc.weight": heads.matrix(rng, width, 2 * width)}
    names = {ours: theirs.replace("layers.6", f"layers.{last}") for ours, theirs in MTP_NAMES["deepseek"].items()}
    shared = {"shared_head.head": "lm_head", "embed_tokens": "model.embed_tokens"}
    stored = load_file(folder / "model.safetensors")
    copies = {f"model.layers.{last}.{name}.weight": stored[f"{ours}.weight"].clone() for name, ours in shared.items()}
    save_file(stored | renamed(tensors, names) | copies, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types"):
        if key in values:
            values[key] = values[key][:-1]
    values |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(values))

    def oracle() -> LayerOracle:
        layer = model.model.layers[last]
        model.model.layers = model.model.layers[:last]
        model.config.num_hidden_layers = last
        return LayerOracle(Head(tensors, {}), model, layer)

    return folder, oracle


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layer_behind_the_last_drafts_as_the_report_says(name: str, tmp_path: Path) -> None:
    folder, make_oracle = behind(tmp_path, name)
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    llm, oracle = LLM(str(folder), tokenizer="quire-tiny", speculative_config=config, **SETTINGS), make_oracle()
    for prompt in (numbers(1, 9), numbers(2, 70)):
        check(llm, oracle, prompt)
    off = LLM(str(folder), tokenizer="quire-tiny", speculative_config={"method": "off"}, **SETTINGS)
    assert not drafted(off, numbers(1, 9))


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_of_several_layers_behind_the_last_the_first_drafts(name: str, tmp_path: Path) -> None:
    folder, _ = behind(tmp_path, name)
    values, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    prefix = f"model.layers.{values['num_hidden_layers']}."
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    expected = drafted(LLM(str(folder), tokenizer="quire-tiny", speculative_config=config, **SETTINGS), numbers(1, 9))
    for number in (1, 2):
        other = f"model.layers.{values['num_hidden_layers'] + number}."
        layer = {each.replace(prefix, other): tensor + 1 for each, tensor in stored.items() if each.startswith(prefix)}
        save_file(load_file(folder / "model.safetensors") | layer, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 3}))
    llm = LLM(str(folder), tokenizer="quire-tiny", speculative_config=config, **SETTINGS)
    assert drafted(llm, numbers(1, 9)) == expected
    assert not drafted(LLM(str(folder), tokenizer="quire-tiny", **SETTINGS), numbers(1, 9))
    (folder / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 65}))
    with pytest.raises(CheckpointError, match="'num_nextn_predict_layers' is 65, more than 64"):
        LLM(str(folder), tokenizer="quire-tiny", **SETTINGS)


def test_mimo_is_qwen2_and_its_layer_drafts_without_changing_an_output(tmp_path: Path) -> None:
    fields = heads.SHAPE | {"num_hidden_layers": 3, "intermediate_size": 768, "vocab_size": heads.VOCAB}
    folder, model = make_checkpoint(tmp_path, "Qwen2ForCausalLM", max_position_embeddings=128, **fields)
    head, rng = mtp("mimo"), torch.Generator().manual_seed(9)
    for name in "qkv":
        weight = head.tensors[f"layers.0.self_attn.{name}_proj.weight"]
        head.tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(len(weight), generator=rng)
    stored = load_file(folder / "model.safetensors") | renamed(head.tensors, MTP_NAMES["mimo"])
    save_file(stored, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | {"architectures": ["MiMoForCausalLM"]}
    values |= {"model_type": "mimo", "num_nextn_predict_layers": 1, "auto_map": {"AutoConfig": "configuration.C"}}
    (folder / "config.json").write_text(json.dumps(values))

    def llm(**given: Any) -> LLM:
        return LLM(str(folder), tokenizer="quire-tiny", speculative_config=given, **SETTINGS)

    drafting = llm(method="mimo_mtp", num_speculative_tokens=3, adaptive=False)
    prompts, oracle = [numbers(1, 9), numbers(2, 70)], Oracle(head, model)
    for prompt in prompts:
        check(drafting, oracle, prompt)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    alone, drafted_for = (each.generate(given, params, use_tqdm=False) for each in (llm(method="off"), drafting))
    assert [output.outputs for output in alone] == [output.outputs for output in drafted_for]
    for prompt, output in zip(prompts, alone, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_what_a_layer_lacks_is_said_of_the_head(tmp_path: Path) -> None:
    folder, _ = behind(tmp_path, "glm4-moe")
    stored = load_file(folder / "model.safetensors")
    last = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    del stored[f"model.layers.{last}.self_attn.q_proj.weight"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"the mtp head of {folder} as described by config.json: 1 weight"):
        LLM(str(folder), tokenizer="quire-tiny", speculative_config={"method": "mtp"}, **SETTINGS)


def test_ernies_layer_has_no_experts() -> None:
    """Whose config says `-1` for the last layer with experts, which is the model's last one."""
    from quire.config.checkpoint.draft_heads import _with_one_more_layer
    from quire.config.hf_config import HFConfig
    from quire.models.families.mixtures.ernie4_5_moe import Ernie45MoeForCausalLM

    hf = _with_one_more_layer(HFConfig({"num_hidden_layers": 3, "moe_layer_end_index": -1}, "config.json"))
    shapes = [Ernie45MoeForCausalLM.experts_shape(hf, layer) for layer in (2, 3)]
    assert [shape is None for shape in shapes] == [False, True]
    hf = _with_one_more_layer(HFConfig({"num_hidden_layers": 3, "moe_layer_end_index": 1}, "config.json"))
    assert Ernie45MoeForCausalLM.experts_shape(hf, 2) is None


def test_a_head_is_found_in_the_models_checkpoint_or_not_at_all(tmp_path: Path) -> None:
    folder, _ = behind(tmp_path, "glm4-moe")
    found = resolve_head(ModelConfig.resolve(folder), None, None)
    assert found is not None
    assert found.head is not None
    assert (found.head.format.method, found.head.has_table, found.head.has_head) == ("mtp", False, False)
    assert resolve_head(ModelConfig.resolve(None), None, None) is None


def test_commands_name_a_layer_that_is_there_and_unused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a quantized model drafts with the one of its original."""
    head, folder = mtp("qwen"), shutil.copytree(heads.TINY, tmp_path / "model")
    save_file(heads.load_tiny() | renamed(head.tensors, MTP_NAMES["qwen"]), folder / "model.safetensors")
    small = ["--max-model-len", "128", "--num-gpu-blocks-override", "60"]
    assert main(["plan", str(folder), *small]) == 0
    assert "a layer for multi-token prediction, to draft by --speculative-config" in capsys.readouterr().out
    assert main(["plan", str(folder), *small, "--speculative-config", '{"method": "mtp"}']) == 0
    assert f"by the mtp head of {folder}" in (told := capsys.readouterr().out)
    assert "unused" not in told
    for path, has_layer in ((folder, True), (heads.TINY, False)):
        assert main(["plan", str(path), *small, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["has_unused_mtp_layer"] is has_layer
    assert main(["quantize", str(folder), str(tmp_path / "int8"), "--quantization", "int8"]) == 0
    assert f'--speculative-config \'{{"method": "mtp", "model": "{folder}"}}\'' in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "int8"), *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["has_unused_mtp_layer"] is False
    config = {"method": "mtp", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(str(tmp_path / "int8"), speculative_config=config, **SETTINGS)
    assert len(drafted(llm, numbers(1, 9))) > 3
    model = ModelConfig.resolve(str(folder))
    assert own_head(model) == "mtp"
    assert own_head(dataclasses.replace(model, runner="pooling")) is None
