"""Which modules of the library transformers Quire's kernels compute: those that give the same, whatever their names."""

from functools import partial, wraps
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BitNetConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.nanochat import modeling_nanochat
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from quire.config.model import ModelConfig
from quire.models.fallback.arithmetic import (
    InnerNorm,
    make_tables,
    mlp_like,
    norm_like,
    rotary_step,
    use_rotary_kernel,
)
from quire.models.fallback.model import TransformersCausalLM
from quire.models.fallback.modules import CurrentBatch, InnerMLP

WIDTH = 24


class Qwen3LikeNorm(Qwen3RMSNorm):
    """Made different in one way by each of its heirs."""


class StatedOtherwise(Qwen3LikeNorm):
    """Computes with another epsilon than it states."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 10 * self.variance_epsilon)


class GroupedNorm(Qwen3LikeNorm):
    def forward(self, x: Tensor) -> Tensor:
        groups = x.view(*x.shape[:-1], 2, -1)
        return self.weight * (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)).view(x.shape)


class GatedNorm(Qwen3LikeNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class WideningNorm(Qwen3LikeNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class TensorsOfOneShape(Qwen3LikeNorm):
    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        return super().forward(x.view(batch, tokens, width))


def with_numbers(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = torch.linspace(-1, 2, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    return module.eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Olmo2RMSNorm, GemmaRMSNorm, CohereLayerNorm, nn.LayerNorm])
def test_norms_that_are_the_same_are_found_and_computed_by_the_kernels(kind: Any, dtype: torch.dtype) -> None:
    theirs = with_numbers(kind(WIDTH, eps=1e-3).to(dtype))
    ours = norm_like(theirs)
    assert isinstance(ours, InnerNorm)
    ours.norm.set_weights({name: each.float() for name, each in theirs.named_parameters()})
    x = torch.linspace(-3, 3.5, 4 * WIDTH, dtype=dtype).view(1, 2, WIDTH, 2).transpose(2, 3) * 0.02
    torch.testing.assert_close(ours(x), theirs(x), rtol=0.02 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", [StatedOtherwise, GroupedNorm, GatedNorm, WideningNorm, TensorsOfOneShape])
def test_norms_that_differ_in_one_way_stay_the_library_s(kind: Any) -> None:
    assert norm_like(Qwen3LikeNorm(WIDTH).to(torch.bfloat16)) is not None
    assert norm_like(kind(WIDTH).to(torch.bfloat16)) is None


@pytest.mark.parametrize(
    "other",
    [
        nn.LayerNorm(WIDTH, elementwise_affine=False),  # no weights say how wide it is
        nn.LayerNorm((2, WIDTH)),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, 8),
        nn.PReLU(WIDTH),
    ],
)
def test_other_modules_are_no_norms(other: nn.Module) -> None:
    assert norm_like(other) is None


MLP: Any = Qwen3MLP


class Swapped(MLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Scaled(MLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 1.5


class TwoInputs(MLP):  # type: ignore[misc]
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x) * scale


SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CONFIG = Qwen3Config(hidden_size=16, intermediate_size=24)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_gated_mlps_are_found_by_what_they_compute(activation: str) -> None:
    module = MLP(CONFIG)
    module.act_fn = ACT2FN[activation]
    assert isinstance(mlp_like(module, CurrentBatch()), InnerMLP)


@pytest.mark.parametrize(
    "other",
    [Swapped(CONFIG), Scaled(CONFIG), TwoInputs(CONFIG), BitNetMLP(BitNetConfig()), nn.Sequential(nn.Linear(4, 4))],
)
def test_mlps_that_differ_stay_the_library_s(other: nn.Module) -> None:
    assert mlp_like(other, CurrentBatch()) is None


def test_an_mlp_of_which_only_one_matrix_has_a_bias_stays() -> None:
    module = MLP(CONFIG)
    module.up_proj = nn.Linear(16, 24, bias=True)
    assert mlp_like(module, CurrentBatch()) is None


def test_an_activation_that_the_kernels_lack_leaves_the_mlp_as_it_is() -> None:
    module = MLP(CONFIG)
    module.act_fn = nn.Tanh()
    assert mlp_like(module, CurrentBatch()) is None


POSITIONS = torch.tensor([[3, 0, 11, 5]])


def halves(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None] * torch.tensor([1.0, 0.3, 0.02])
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def pairs(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = (position_ids[..., None] * torch.tensor([1.0, 0.3, 0.02])).repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


def neither(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None] * torch.tensor([1.0, 0.3, 0.02, 0.9, 0.2, 0.01])
    return angles.cos(), angles.sin()


class Tables(nn.Module):
    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.made(x, position_ids)


class Rotates(nn.Module):
    """An attention module that only rotates, by the function of one of the library's files."""

    def forward(self, *args: Any, **named: Any) -> Any:
        return apply_rotary_pos_emb(*args, **named)  # type: ignore[name-defined]  # noqa: F821


def attention_of(library: Any, decorate: Any = lambda forward: forward) -> Any:
    forward = decorate(FunctionType(Rotates.forward.__code__, vars(library)))
    return type("Attention", (nn.Module,), {"forward": forward})()


def calls_of(made: Any) -> list[Any]:
    return [((torch.zeros(1, 4, 8, device="meta"),), {"position_ids": POSITIONS.to("meta")})]


def rotations(
    library: Any,
    made: Any,
    head_dim: int,
    change: Any = lambda cos: cos,
    decorate: Any = lambda forward: forward,
    **named: Any,
) -> list[Any]:
    """What an attention module gives before and after the kernel takes over, and whether the kernel ran."""
    tables, current, attention = Tables(made), CurrentBatch(), attention_of(library, decorate)
    step = rotary_step(tables, calls_of(made))
    assert step is not None
    query, key = (torch.linspace(-1, 1, 4 * n * head_dim).view(1, 4, n, head_dim).transpose(1, 2) for n in (2, 1))
    kept = query.clone()
    results = []
    for _ in range(2):
        with current.running(None):  # type: ignore[arg-type]
            cos, sin = tables(torch.zeros(1, 4, 8), POSITIONS)
            results.append(attention(query, key, change(cos), sin, **named))
        make_tables(tables, current, step)
        use_rotary_kernel(attention, current, step)
    assert not current.tables, "tables of a step are kept beyond it"
    assert torch.equal(query, kept), "the library may read queries again"
    return results


@pytest.mark.parametrize(
    ("library", "made", "head_dim"),
    [
        (modeling_llama, halves, 6),
        (modeling_cohere, pairs, 6),
        (modeling_glm, halves, 6),
        (modeling_glm, halves, 10),  # a part of each head
    ],
)
def test_rotations_are_those_of_the_library(
    library: Any, made: Any, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = rotations(library, made, head_dim)
    for x, y in zip(theirs, ours, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)
    called: list[str] = []
    monkeypatch.setattr("quire.kernels.rotary_embedding", lambda *_, **__: called.append("kernel"))
    rotations(library, made, head_dim)
    assert called == ["kernel"] * 2


@pytest.mark.parametrize(
    "given", [{"change": lambda cos: cos.clone()}, {"unsqueeze_dim": 1}], ids=["other tensors", "arguments of its own"]
)
def test_what_has_no_table_is_rotated_by_the_library(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rotations(modeling_llama, halves, 6)  # the function has been tried
    monkeypatch.setattr("quire.kernels.rotary_embedding", None)
    theirs, ours = rotations(modeling_llama, halves, 6, **given)
    assert all(map(torch.equal, theirs, ours))


def test_functions_that_rotate_in_another_way_stay() -> None:
    """NanoChat rotates backwards, which no trial matches."""
    attention = attention_of(modeling_nanochat)
    use_rotary_kernel(attention, CurrentBatch(), 1)
    assert "forward" not in vars(attention)


def hidden(forward: Any) -> Any:
    """Keeps what it wraps in a place of its own."""
    kept = [forward]
    return wraps(forward)(lambda *args, **named: kept[0](*args, **named))


def renamed(forward: Any) -> Any:
    return wraps(forward)(lambda *args, turned=None, **named: forward(*args, **named))


@pytest.mark.parametrize(("decorate", "calls"), [(renamed, 2), (lambda f: renamed(renamed(f)), 2), (hidden, 0)])
def test_decorators_of_the_library_stay_around_what_rotates(
    decorate: Any, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(rotations(modeling_llama, halves, 6)) == 2  # the function has been tried
    called: list[str] = []
    monkeypatch.setattr("quire.kernels.rotary_embedding", lambda *_, **__: called.append("kernel"))
    rotations(modeling_llama, halves, 6, decorate=decorate)
    assert len(called) == calls


def test_what_python_did_not_define_stays() -> None:
    attention = type("Attention", (nn.Module,), {"forward": partial(Rotates.forward)})()
    use_rotary_kernel(attention, CurrentBatch(), 1)
    assert "forward" not in vars(attention)


def test_tables_that_are_laid_out_in_another_way_are_not_used() -> None:
    assert [rotary_step(Tables(made), calls_of(made)) for made in (halves, pairs, neither)] == [1, 2, None]
    assert rotary_step(Tables(lambda x, position_ids: position_ids), calls_of(halves)) is None


def test_everything_of_qwen3_but_sums_is_the_kernels(save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("Qwen3ForCausalLM", vocab_size=64, **SHAPE)
    layers = TransformersCausalLM(ModelConfig.resolve(folder, model_impl="transformers")).backbone
    left = [
        type(module).__name__
        for module in layers.modules()
        if type(module).__module__.startswith("transformers") and "forward" not in vars(module)
    ]
    assert set(left) == {"Qwen3Model", "Qwen3DecoderLayer"}
