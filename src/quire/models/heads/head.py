"""Draft heads: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840), and DeepSeek-V3's multi-token prediction (2412.19437).

From the hidden state of a token and the token behind it, a head makes the hidden state of the latter, as it would be,
and logits of the next. Its own hidden states take the place of the model's for the tokens that it drafts itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import ClassVar

from torch import Tensor

from quire import kernels
from quire.common.errors import UnsupportedModelError
from quire.config.checkpoint.draft_heads import HeadConfig, HeadFormat
from quire.config.model import ModelConfig
from quire.models.base import CausalLM, Model
from quire.models.decoder.layers import DecoderLayer, PreNormLayer, XAndResidual
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import Arrangement, AttentionShape, DecoderShape, LayerShape
from quire.models.decoder.watch import beside
from quire.models.layers.batch_tensors import BatchTensors, LayerCache
from quire.models.layers.linear import Linear, LmHead
from quire.models.layers.norm import Norm, make_norm
from quire.models.layers.rotary import shared_rotary
from quire.models.weights.stacked import STACKS, Stack


class DraftHead(Decoder):
    """Layers of a family's decoder that start from `fc` of the token's embedding and the hidden state.

    `forward` takes the embeddings and states of a batch. What the checkpoint does not have, which are the token table
    or the projection to the vocabulary, is the model's, given to `share`.
    """

    format: ClassVar[HeadFormat]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, has_head=False)
        shape, head = self.shape(config), _head(config)
        self.width, self.dtype, held = shape.hidden_size, shape.dtype, head.held
        num_targets = config.vocab_size if head.targets is None else len(head.targets)
        self._project: Callable[[Tensor], Tensor]
        if not head.has_table:
            del self.embed_tokens
        for name in ("token_norm", "state_norm", "out_norm"):
            if f"{name}.weight" in held:
                setattr(self, name, make_norm(self.width, self.norm_shape(config.hf_config)))
        self._norms = tuple([getattr(self, name, _as_it_is) for name in ("token_norm", "state_norm", "out_norm")])
        self.fc = Linear(self._fc_width(head), self.width, bias="fc.bias" in held, dtype=shape.dtype)
        if head.has_head:
            self.lm_head = LmHead(self.width, num_targets, shape.dtype, bias="lm_head.bias" in held)

    def _fc_width(self, head: HeadConfig) -> int:
        return self.width + head.state_width

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        head, family = _head(config), super().shape(config)
        layers = cls._layer_shapes(config, head)
        return replace(
            family,
            layers=layers,
            final_norm=cls.norm_shape(config.hf_config) if cls.format.passes_norm else None,
            is_tied=False,
            embed_width=family.hidden_size,
            embed_norm=None,
            positions=None,
        )

    @classmethod
    def _layer_shapes(cls, config: ModelConfig, head: HeadConfig) -> tuple[LayerShape, ...]:
        """Those of the family; the first without its first norm if the checkpoint has none."""
        hf = config.hf_config
        num_layers = hf.size("num_hidden_layers")
        first = num_layers - 1 if cls.format.method == "mtp" else 0  # that of the model's config, and one more
        layers = [cls.layer_shape(hf, layer) for layer in range(first, num_layers)]
        if "layers.0.input_layernorm.weight" not in head.held:
            layers[0] = replace(layers[0], arrangement=Arrangement.PRE_NORM_OF_MLP)
        return tuple(layers)

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        return STACKS

    @classmethod
    def weight_name(cls, checkpoint_name: str) -> str | None:
        return cls.format.weight_name(checkpoint_name)

    def share(self, model: CausalLM) -> None:
        """Use what the model has where this head has nothing of its own."""
        if not hasattr(self, "embed_tokens"):
            self.embed_tokens = model.embed_tokens
        self._project = self.lm_head if hasattr(self, "lm_head") else model.compute_logits

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        """The model's hidden states at the head's places, each [num_tokens, its width] -> what `forward` takes."""
        (state,) = states
        return state

    def _embed(self, batch: BatchTensors) -> tuple[Tensor | None, Tensor]:
        assert batch.embeddings is not None
        assert batch.states is not None
        token, state = self._norms[0](batch.embeddings), self._norms[1](batch.states)
        both = beside(state, token) if self.format.is_state_first else beside(token, state)
        return None, self.fc(both, batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, width], as `forward` gives it -> logits [num_rows, tokens of the head] float32."""
        return self._project(self._norms[2](hidden))


class FusedHead(DraftHead):
    """EAGLE-3: `fc` fuses states of several layers into one, and the first layer's attention reads the token and the
    state side by side."""

    def _fc_width(self, head: HeadConfig) -> int:
        return len(head.places) * head.state_width

    @classmethod
    def _layer_shapes(cls, config: ModelConfig, head: HeadConfig) -> tuple[LayerShape, ...]:
        hf = config.hf_config
        first, *others = [cls.layer_shape(hf, layer) for layer in range(hf.size("num_hidden_layers"))]
        attention = first.attention
        fits = first.arrangement is Arrangement.PRE_NORM
        if not isinstance(attention, AttentionShape) or attention.rope is None or not fits:
            raise UnsupportedModelError(f"{hf.source}: layers of {config.architecture} are no EAGLE-3 layers")
        return replace(first, attention=replace(attention, input_width=2 * hf.size("hidden_size"))), *others

    def _make_layer(self, config: ModelConfig, layer: LayerShape, shape: DecoderShape, has_x: bool) -> DecoderLayer:
        if len(self.layers):
            return super()._make_layer(config, layer, shape, has_x)
        assert isinstance(layer.attention, AttentionShape)
        assert layer.attention.rope is not None
        rotary = shared_rotary(self.rotary, config, layer.attention.rope)
        made = TokenAndStateLayer(layer, shape.hidden_size, shape.dtype, rotary, has_x)
        made.adds_to_norm = config.hf_config.flag("norm_before_residual", False)
        return made

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        fused = kernels.matmul(reduce(beside, states), self.fc.weight, self.fc.bias)
        return fused if self.fc.gather_out is None else self.fc.gather_out(fused)

    def _embed(self, batch: BatchTensors) -> tuple[Tensor | None, Tensor]:
        assert batch.embeddings is not None
        assert batch.states is not None
        return batch.embeddings, batch.states


class TokenAndStateLayer(PreNormLayer):
    """Attention reads the norms of x, which are the tokens' embeddings, and of the residual, side by side."""

    adds_to_norm: bool
    """Whether what attention gives is added to the norm of the residual, and not to the residual."""

    norms = (*PreNormLayer.norms, "hidden_norm")
    hidden_norm: Norm

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        both, state = self._beside(x, residual)
        x = self.self_attn(both, batch, kv)
        residual = state if self.adds_to_norm else residual
        return self.mlp(self.post_attention_layernorm.add(x, residual), batch), residual

    def write(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> None:
        self.self_attn.write(self._beside(x, residual)[0], batch, kv)

    def _beside(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and its half that is made of the residual."""
        assert x is not None
        state = self.hidden_norm(residual)
        return beside(self.input_layernorm(x), state), state


@cache
def head_class(format: HeadFormat, family: type[Model]) -> type[DraftHead]:
    """The class of heads in this format with layers of the family."""
    if not issubclass(family, Decoder):
        raise UnsupportedModelError(f"draft heads with layers of {family.__name__} are not supported")
    kind = FusedHead if format.method == "eagle3" else DraftHead
    return type(f"{kind.__name__}Of{family.__name__}", (kind, family), {"format": format, "__doc__": kind.__doc__})


def _head(config: ModelConfig) -> HeadConfig:
    assert config.head is not None, "this config is of a model, and not of a draft head"
    return config.head


def _as_it_is(rows: Tensor) -> Tensor:
    return rows
