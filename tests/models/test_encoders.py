"""Encoders and their heads against transformers, and texts that have the same bits among any others."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import UnsupportedModelError, kernels
from quire.common.batch import Batch, PooledRows, PoolSpec, ScheduledSequence
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.models.activations import activation_bytes
from quire.models.adapters.adapter import projections
from quire.models.adapters.peft import read_adapter
from quire.models.adapters.slots import AdapterSlots, adapter_reserve
from quire.models.weights.loader import load_model
from quire.runner import model_runner, text_graphs
from quire.runner.model_runner import ModelRunner
from quire.runner.pooling import PooledReader
from quire.runner.text_graphs import MAX_TOKENS, TextGraphs
from tests.kernels.isas import ISAS, needs_native, using
from tests.kernels.paged import same_bits
from tests.models.encoders import BOTH_WAYS, ENCODERS
from tests.models.pooled_run import hidden_states, pooled
from tests.models.test_activations import Watched
from tests.models.test_adapters import peft_adapter

TEXTS = [[2, *range(5, 5 + n), 3] for n in (1, 40, 7, 17)]
EMBED = PoolSpec("embed")
HEADS = ("ForSequenceClassification", "ForTokenClassification")


@pytest.fixture
def save_encoder(tmp_path: Path) -> Any:
    """Saves a model of random weights: the folder, and the model."""

    def save(family: str, head: str, **fields: Any) -> tuple[Path, Any]:
        kind = getattr(transformers, family + head)
        torch.manual_seed(fields.pop("seed", 0))
        model = kind._from_config(kind.config_class(**fields), attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers makes them 0
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return save


@pytest.mark.parametrize("variant", ENCODERS | BOTH_WAYS)
def test_hidden_states_are_those_of_transformers(variant: str, save_encoder: Any) -> None:
    family, fields = (ENCODERS | BOTH_WAYS)[variant]
    folder, oracle = save_encoder(family, "Model", **fields)
    model = load_model(ModelConfig.resolve(folder))
    for text, hidden in zip(TEXTS, hidden_states(model, TEXTS), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def test_nomics_own_config_is_read(save_encoder: Any) -> None:
    """As it was published, before transformers had the model."""
    folder, oracle = save_encoder("NomicBert", "Model", **ENCODERS["nomic"][1])
    stated = json.loads((folder / "config.json").read_text())
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
    own = {theirs: stated.pop(name) for theirs, name in names.items()}
    own |= {"layer_norm_epsilon": stated.pop("layer_norm_eps"), "rotary_emb_fraction": 1.0, "causal": False}
    own["rotary_emb_base"] = stated.pop("rope_parameters")["rope_theta"]
    del stated["hidden_act"]
    (folder / "config.json").write_text(json.dumps(stated | own | {"activation_function": "swiglu"}))
    (hidden,) = hidden_states(load_model(ModelConfig.resolve(folder)), TEXTS[1:2])
    with torch.no_grad():
        expected = oracle(torch.tensor(TEXTS[1:2])).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    (folder / "config.json").write_text(json.dumps(stated | own | {"prenorm": True}))
    with pytest.raises(UnsupportedModelError, match="'prenorm' is True: not supported"):
        load_model(ModelConfig.resolve(folder))


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("named", ["New", "GteNew"])
def test_gtes_own_config_is_read(named: str, head: str, save_encoder: Any) -> None:
    """As it was published; the second name is vLLM's. NTK scaling: a base times the factor, and all angles divided."""
    factor, theta, head_dim = 8.0, 500.0, 8
    rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / head_dim)}
    folder, oracle = save_encoder("Gte", head, **ENCODERS["gte-types"][1] | {"rope_parameters": rope})
    stated = json.loads((folder / "config.json").read_text()) | {"architectures": [f"{named}{head}"]}
    stated |= {"model_type": "new", "rope_theta": theta, "rope_scaling": {"type": "ntk", "factor": factor}}
    stated |= {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True}
    stated |= {"logn_attention_scale": False, "logn_attention_clip1": False, "auto_map": {"AutoConfig": "c.NewConfig"}}
    del stated["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(stated))
    tensors = load_file(folder / "model.safetensors")
    save_file({re.sub("^gte", "new", name): each for name, each in tensors.items()}, folder / "model.safetensors")
    model: Any = load_model(ModelConfig.resolve(folder))
    with torch.no_grad():
        if head == "Model":
            (found,), expected = hidden_states(model, TEXTS[1:2]), oracle(torch.tensor(TEXTS[1:2])).last_hidden_state
        else:
            (found,), expected = (
                pooled(model, TEXTS[1:2], "classify", activation=False),
                oracle(torch.tensor(TEXTS[1:2])).logits,
            )
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
    for asked, said in (
        ({"logn_attention_scale": True}, "'logn_attention_scale' is True"),
        ({"position_embedding_type": "absolute"}, "'position_embedding_type' is 'absolute'"),
        ({"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.9}}, "'mixed_b'"),
    ):
        (folder / "config.json").write_text(json.dumps(stated | asked))
        with pytest.raises(UnsupportedModelError, match=said):
            load_model(ModelConfig.resolve(folder))


@pytest.mark.parametrize(
    "asked", [{"is_decoder": True}, {"position_embedding_type": "relative_key"}, {"position_embedding_type": "alibi"}]
)
def test_encoders_that_attend_otherwise_are_refused(asked: dict[str, Any], save_encoder: Any) -> None:
    folder, _ = save_encoder("Bert", "Model", **ENCODERS["bert"][1])
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"is_decoder": False, "position_embedding_type": None}))
    load_model(ModelConfig.resolve(folder))
    (folder / "config.json").write_text(json.dumps(stated | asked))
    with pytest.raises(UnsupportedModelError, match=next(iter(asked))):
        load_model(ModelConfig.resolve(folder))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", ["deberta-v3", "embeddinggemma"])
def test_on_every_isa(variant: str, isa: str, save_encoder: Any) -> None:
    with using(isa):
        test_hidden_states_are_those_of_transformers(variant, save_encoder)
        if isa != "reference":  # torch's products depend on the batch
            test_a_text_has_the_same_bits_alone_and_among_others(variant, "bfloat16", save_encoder)


@needs_native
@pytest.mark.parametrize("variant", ["albert", "bert", "deberta-v3", "embeddinggemma", "modernbert", "mpnet", "nomic"])
def test_the_measured_memory_of_an_encoder_is_what_its_kernels_take(variant: str, save_encoder: Any) -> None:
    family, fields = (ENCODERS | BOTH_WAYS)[variant]
    config = ModelConfig.resolve(save_encoder(family, "Model", **fields)[0])
    model, workspace = load_model(config), Watched()
    forward = model.forward

    def watched(*args: Any) -> torch.Tensor:
        with workspace.recording():
            return forward(*args)

    model.forward = watched  # type: ignore[method-assign]
    hidden_states(model, [[5] * 60, [6] * 36])
    assert workspace.peak_bytes == activation_bytes(config, 96)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("variant", ENCODERS)
def test_heads_are_those_of_transformers(variant: str, head: str, save_encoder: Any) -> None:
    family, fields = ENCODERS[variant]
    folder, oracle = save_encoder(family, head, **fields)
    model: Any = load_model(ModelConfig.resolve(folder))
    for text, logits in zip(TEXTS, pooled(model, TEXTS, model.pooler.tasks[0], activation=False), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["albert", "bert", "deberta-v3", "embeddinggemma", "modernbert", "mpnet", "nomic"])
def test_a_text_has_the_same_bits_alone_and_among_others(variant: str, dtype: str, save_encoder: Any) -> None:
    family, fields = (ENCODERS | BOTH_WAYS)[variant]
    folder, _ = save_encoder(family, "Model", **fields)
    model: Any = load_model(ModelConfig.resolve(folder, dtype=dtype))
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(4, 96, (1 + 13 * i % 60,), generator=generator).tolist() for i in range(64)]
    together = pooled(model, texts, "embed")
    order = torch.randperm(64, generator=generator).tolist()
    shuffled = pooled(model, [texts[i] for i in order], "embed")
    assert all(same_bits(shuffled[place], together[i]) for place, i in enumerate(order))
    for i in (0, 1, 5, 31, 63):
        assert same_bits(pooled(model, [texts[i]], "embed")[0], together[i])
        assert together[i].norm() == pytest.approx(1, abs=1e-5)


def test_texts_of_a_pair_have_rows_of_their_own(save_encoder: Any) -> None:
    family, fields = ENCODERS["bert"]
    folder, oracle = save_encoder(family, "Model", **fields)
    model = load_model(ModelConfig.resolve(folder))
    types = [[0] * (len(text) // 2) + [1] * (len(text) - len(text) // 2) for text in TEXTS]
    for text, own, hidden in zip(TEXTS, types, hidden_states(model, TEXTS, types), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([text]), token_type_ids=torch.tensor([own])).last_hidden_state[0]
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def test_projections_that_make_heads_of_distances_take_no_adapters(save_encoder: Any) -> None:
    family, fields = ENCODERS["deberta-v3"]
    model = load_model(ModelConfig.resolve(save_encoder(family, "Model", **fields)[0]))
    names = {name.rpartition(".")[2] for _, names in projections(model) for name in names}
    assert names == {"o_proj", "up_proj", "down_proj"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
@pytest.mark.parametrize("variant", ENCODERS | BOTH_WAYS)
def test_adapters_of_encoders_are_those_of_peft(variant: str, save_encoder: Any, tmp_path: Path) -> None:
    family, fields = (ENCODERS | BOTH_WAYS)[variant]
    folder, base = save_encoder(family, "Model", **fields)
    config = ModelConfig.resolve(folder)
    model = load_model(config)
    left_out = ("pooler", "_proj") if family == "DebertaV2" else ("pooler",)
    linears = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
    wanted = [name for name in linears if not any(part in name for part in left_out)]
    adapter, oracle = peft_adapter(tmp_path / "adapter", base, r=4, lora_alpha=8, target_modules=wanted)
    slots = AdapterSlots(model, LoRAConfig(2, 8))
    assert adapter_reserve(config, LoRAConfig(2, 8)) > 0
    slots.load(1, read_adapter(adapter, model, 8))
    for text, plain, hidden in zip(
        TEXTS, hidden_states(model, TEXTS), hidden_states(model, TEXTS, adapter=1), strict=True
    ):
        with torch.no_grad():
            expected = oracle(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        assert (hidden - plain).abs().max() > 0.01


def scheduled(text: list[int], spec: PoolSpec = EMBED, **how: Any) -> ScheduledSequence:
    return ScheduledSequence(0, tuple(text), 0, (), pooled=PooledRows(0, len(text), spec), **how)


@torch.inference_mode()
@pytest.mark.parametrize("variant", ENCODERS | BOTH_WAYS)
def test_a_replayed_text_has_the_bits_of_the_plain_pass(variant: str, save_encoder: Any) -> None:
    family, fields = (ENCODERS | BOTH_WAYS)[variant]
    folder, _ = save_encoder(family, "Model", **fields)
    model: Any = load_model(ModelConfig.resolve(folder, dtype="bfloat16"))
    backend, workspace = kernels.backend_for("cpu"), kernels.Workspace()
    if not backend.can_record or not model.can_record:
        pytest.skip("needs the native kernels, and a model without torch's arithmetic")
    read = PooledReader(model.pooler)
    graphs = TextGraphs(model, read, backend, workspace)
    texts = [[2, 7, 3], [2, 8, 9, 3], [2, 9, 3], [2, 10, 11, 3], [2, 7, 3]]
    specs = [EMBED, PoolSpec("embed", normalize=False), PoolSpec("embed", dimensions=4), PoolSpec("token_embed")]
    assert model.pooler.can_record(EMBED)
    for text, spec in itertools.product(texts, specs):
        with workspace:
            result = graphs.run([scheduled(text, spec)])
        how = {"normalize": spec.normalize, "dimensions": spec.dimensions}
        assert same_bits(torch.from_numpy(result.pooled[0]), pooled(model, [text], spec.task, **how)[0])


@torch.inference_mode()
def test_few_recordings_are_kept(save_encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_graphs, "MAX_RECORDINGS", 2)
    family, fields = ENCODERS["bert"]
    model: Any = load_model(ModelConfig.resolve(save_encoder(family, "Model", **fields)[0]))
    backend, workspace = kernels.backend_for("cpu"), kernels.Workspace()
    graphs = TextGraphs(model, PooledReader(model.pooler), backend, workspace)
    recorded = list[int]()
    monkeypatch.setattr(graphs, "_record", lambda n, spec, make=graphs._record: (recorded.append(n), make(n, spec))[1])
    for length in (3, 4, 3, 5, 3, 4):
        with workspace:
            graphs.run([scheduled([2] * length)])
    assert recorded == [3, 4, 5, 4]


def test_long_texts_pairs_and_adapters_are_not_replayed() -> None:
    text, can_replay = [2, 7, 3], TextGraphs(None, None, None, None).can_replay  # type: ignore[arg-type]
    assert can_replay([scheduled(text)])
    assert can_replay([scheduled([2] * MAX_TOKENS)])
    assert not can_replay([scheduled([2] * (MAX_TOKENS + 1))])
    assert not can_replay([scheduled(text)] * 2)
    assert not can_replay([scheduled(text, token_type_ids=(0, 0, 1))])
    assert not can_replay([scheduled(text, adapter=0)])


@pytest.mark.parametrize("mode", ["CLS", "LAST", "MEAN"])
@pytest.mark.parametrize("variant", ENCODERS)
def test_every_encoder_gives_the_rows_that_are_pooled(
    variant: str, mode: str, save_encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, fields = ENCODERS[variant]
    folder, _ = save_encoder(family, "Model", **fields)
    config = ModelConfig.resolve(folder, dtype="float32", pooler_config={"pooling_type": mode})
    model: Any = load_model(config)
    runner = ModelRunner(model, (), 16, 64, kernels.backend_for("cpu"))
    pool, given = model.pooler.pool, list[int]()
    monkeypatch.setattr(model.pooler, "pool", lambda rows, *args: (given.append(len(rows)), pool(rows, *args))[1])
    specs = (EMBED, PoolSpec("token_embed"))
    batch = Batch(0, tuple(scheduled(text, spec) for text, spec in itertools.product(TEXTS, specs)))
    monkeypatch.setattr(model_runner, "most_read", lambda num_tokens: -1)
    expected = runner.run(batch).pooled
    assert given == [length for text in TEXTS for length in ((len(text) if mode == "MEAN" else 1), len(text))]
    monkeypatch.setattr(model_runner, "most_read", lambda num_tokens: num_tokens - 1)
    narrow = runner.run(batch).pooled
    for place, vectors in expected.items():
        assert same_bits(torch.from_numpy(narrow[place]), torch.from_numpy(vectors))
