"""Whole experts in each rank: the bits of one process in every format, and what cannot be divided is refused."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from quire import LLM, ConfigError
from quire.cli import main
from quire.config.model import ModelConfig
from quire.config.parallel import Shard
from quire.kernels import Ranks
from quire.models.layers.experts import Expert, Experts
from quire.models.weights.loader import load_model
from quire.models.weights.usage import weight_use
from tests.kernels.isas import needs_native
from tests.models.gguf_convert import convert
from tests.models.mixtures import MIXTURES
from tests.models.variants import VARIANTS
from tests.parallel.machines import of_machines
from tests.parallel.ranks import in_threads, of_ranks
from tests.parallel.test_families import PARAMS, PROMPTS

pytestmark = needs_native
SMALL: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 12,
    "num_gpu_blocks_override": 40,
    "tokenizer": "quire-tiny",
}
FAMILIES = ["mixtral", "qwen2-moe", "deepseek-v3"]


def save(variant: str, save_checkpoint: Any) -> Path:
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields | {"vocab_size": 8192})
    return Path(folder)


def check(model: Path, counts: tuple[int, ...] = (2, 3), **given: Any) -> None:
    """Chunks of prompts, hits, and few blocks: equal in each of these numbers of ranks, which gather rows."""
    how = {"model": str(model), **SMALL, **given}
    expected = of_ranks(1, PROMPTS, PARAMS, **how)
    assert len({token for outputs, _, _ in expected for output in outputs for token in output.token_ids}) > 3
    for num_ranks in counts:
        assert of_ranks(num_ranks, PROMPTS, PARAMS, **how, enable_expert_parallel=True) == expected, num_ranks


@pytest.mark.parametrize(
    "given",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}],
    ids=lambda given: next(iter(given.values())),
)
@pytest.mark.parametrize("variant", FAMILIES)
def test_each_family_gives_the_bits_of_one_process(variant: str, given: dict[str, Any], save_checkpoint: Any) -> None:
    check(save(variant, save_checkpoint), **given)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", [*MIXTURES, "deepseek-v2", "deepseek-v3-halves"])
def test_each_mixture_gives_the_bits_of_one_process(variant: str, save_checkpoint: Any) -> None:
    check(save(variant, save_checkpoint), (2,), dtype="float32")


def test_a_gguf_file_gives_the_bits_of_one_process(save_checkpoint: Any, tmp_path: Path) -> None:
    check(convert(save("qwen3-moe", save_checkpoint), tmp_path / "m.gguf"), (2,))


def test_a_saved_folder_gives_the_bits_of_one_process(save_checkpoint: Any, tmp_path: Path) -> None:
    folder = save("qwen2-moe", save_checkpoint)
    assert main(["quantize", str(folder), str(tmp_path / "saved"), "--quantization", "int8"]) == 0
    check(tmp_path / "saved", (2,))


def test_stages_and_machines_give_the_bits_of_one_process(save_checkpoint: Any) -> None:
    """The first layers of the model have no experts, and so no stage of these has."""
    folder = save("qwen2-moe-some-layers", save_checkpoint)
    check(folder, (2,), pipeline_parallel_size=2)
    how = {"model": str(folder), **SMALL}
    expected = of_ranks(1, PROMPTS, PARAMS, **how)
    for num_ranks in (2, 4):
        given = {"tensor_parallel_size": num_ranks, "enable_expert_parallel": True}
        assert of_machines(PROMPTS, PARAMS, **how, **given) == expected, num_ranks


def test_a_rank_reads_and_keeps_its_own_experts_alone(save_checkpoint: Any) -> None:
    config = ModelConfig.resolve(save("mixtral", save_checkpoint), quantization="int8")
    whole, owned = weight_use(config), list[int]()
    for rank in range(4):
        ranks = Ranks(Shard(rank, 4, has_whole_experts=True))
        for layer in (module for module in load_model(config, ranks).modules() if isinstance(module, Experts)):
            first, end = layer.own
            kept = [number for number, expert in enumerate(layer.experts) if isinstance(expert, Expert)]
            assert kept == list(range(first, end))
            assert all(isinstance(expert, nn.Identity) for expert in [*layer.experts[:first], *layer.experts[end:]])
        owned += kept
        assert weight_use(config, ranks).expert_bytes == whole.expert_bytes * len(kept) / 6
    assert owned == list(range(6))
    assert len(kept) == 1, "two ranks have two experts, and the others one"


@pytest.mark.parametrize(
    ("variant", "given", "message"),
    [
        ("mixtral", {}, "enable_expert_parallel=True: .* tensor_parallel_size, which is 1; set it to 2 or more"),
        ("few", {"tensor_parallel_size": 4}, "has 3 experts, fewer than tensor_parallel_size=4; lower that"),
        ("qwen2", {"tensor_parallel_size": 2}, "enable_expert_parallel=True: Qwen2ForCausalLM has no experts"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    variant: str, given: dict[str, Any], message: str, save_checkpoint: Any
) -> None:
    architecture, fields = VARIANTS["mixtral" if variant == "few" else variant]
    given_fields = (
        fields | {"vocab_size": 8192} | ({"num_local_experts": 3, "num_experts": 3} if variant == "few" else {})
    )
    folder, _ = save_checkpoint(architecture, **given_fields)
    with in_threads(), pytest.raises(ConfigError, match=message):
        LLM(str(folder), **SMALL, num_threads=1, **given, enable_expert_parallel=True)
