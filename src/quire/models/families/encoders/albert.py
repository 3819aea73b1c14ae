"""ALBERT (Lan et al. 2020): BERT whose layers share their weights, and whose tables are narrower than its layers."""

from dataclasses import replace

from quire.common.errors import UnsupportedModelError
from quire.config.model import ModelConfig
from quire.models.encoder.model import Encoder
from quire.models.encoder.shapes import EncoderShape
from quire.models.families.encoders.bert import BERT_NAMES


class Albert(Encoder):
    """A text goes through a layer of each group several times."""

    renames = (
        (r"^albert\.", ""),
        (r"^encoder\.albert_layer_groups\.(\d+)\.albert_layers\.0\.", r"layers.\1."),
        (r"\.attention\.(query|key|value)\.", r".attention.self.\1."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.LayerNorm\.", ".input_layernorm."),
        (r"\.ffn\.", ".mlp.up_proj."),
        (r"\.ffn_output\.", ".mlp.down_proj."),
        (r"\.full_layer_layer_norm\.", ".post_attention_layernorm."),
        *BERT_NAMES,
    )

    @classmethod
    def shape(cls, config: ModelConfig) -> EncoderShape:
        hf, shape = config.hf_config, super().shape(config)
        num_groups, num_layers = hf.size("num_hidden_groups", 1), len(shape.layers)
        if hf.size("inner_group_num", 1) != 1 or num_groups > num_layers:
            raise UnsupportedModelError(f"{hf.source}: groups of one layer are supported, not more groups than layers")
        order = tuple(layer * num_groups // num_layers for layer in range(num_layers))
        return replace(shape, layers=shape.layers[:num_groups], order=order)
