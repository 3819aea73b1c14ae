"""BERT (Devlin et al. 2019), among them MiniLM, BGE, E5, GTE and Snowflake's Arctic Embed."""

from quire.models.encoder.model import Encoder

BERT_NAMES = (
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "embed_types."),
    (r"^embeddings\.LayerNorm\.", "embed_norm."),
    (r"^(?:embeddings_project|encoder\.embedding_hidden_mapping_in)\.", "project_in."),
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".input_layernorm."),
    (r"\.intermediate\.dense\.", ".mlp.up_proj."),
    (r"\.output\.dense\.", ".mlp.down_proj."),
    (r"\.output\.LayerNorm\.", ".post_attention_layernorm."),
)
"""What checkpoints of BERT and of many others call their tensors."""


class Bert(Encoder):
    """The original."""

    renames = ((r"^bert\.", ""), *BERT_NAMES)
