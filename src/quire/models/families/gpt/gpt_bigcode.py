"""StarCoder and SantaCoder (Li et al. 2023): GPT-2 whose queries share one key and value, and matrices [out, in]."""

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import AttentionShape, QKVLayout
from quire.models.families.gpt.gpt2 import GPT2LMHeadModel


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """Without `multi_query`, each head's query, key and value lie together."""

    default_activation = "gelu_pytorch_tanh"
    qkv_layout = QKVLayout.BY_GROUP
    is_transposed = False

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        num_kv_heads = 1 if hf.flag("multi_query", True) else hf.size("num_attention_heads")
        return super().attention_shape(HFConfig({**hf, "num_key_value_heads": num_kv_heads}, hf.source), layer)
