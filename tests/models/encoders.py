"""A small model of each architecture that pools, and of each of its variants that changes the arithmetic."""

from typing import Any

BERT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "initializer_range": 0.3,
    "num_labels": 3,
}
DISTIL = {
    "vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 1, "initializer_range": 0.3, "num_labels": 3,
}  # fmt: skip
NARROW = BERT | {"embedding_size": 16}
MODERN = BERT | {"local_attention": 8, "num_hidden_layers": 4, "max_position_embeddings": 64}
MODERN |= {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
ROTATED = BERT | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}

DEBERTA = BERT | {"relative_attention": True, "share_att_key": True, "pos_att_type": "p2c|c2p"}
DEBERTA_V3 = {"position_biased_input": False, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("Albert", NARROW),
    "albert-groups": ("Albert", NARROW | {"num_hidden_groups": 2, "num_hidden_layers": 4}),
    "bert": ("Bert", BERT),
    "bert-gelu-new": ("Bert", BERT | {"hidden_act": "gelu_new"}),
    "bert-relu": ("Bert", BERT | {"hidden_act": "relu", "type_vocab_size": 3}),
    "camembert": ("Camembert", BERT),
    "deberta-v2": ("DebertaV2", DEBERTA | {"max_relative_positions": 12, "type_vocab_size": 2}),
    "deberta-v2-c2p": ("DebertaV2", DEBERTA | {"pos_att_type": ["c2p"], "max_relative_positions": 64}),
    "deberta-v2-plain": ("DebertaV2", BERT),
    "deberta-v3": ("DebertaV2", DEBERTA | DEBERTA_V3),
    "deberta-v3-p2c": ("DebertaV2", DEBERTA | DEBERTA_V3 | {"pos_att_type": "p2c"}),
    "distilbert": ("DistilBert", DISTIL),
    "electra": ("Electra", NARROW),
    "electra-wide": ("Electra", BERT | {"embedding_size": 32}),
    "gte": ("Gte", ROTATED),
    "gte-types": ("Gte", ROTATED | {"type_vocab_size": 2}),
    "gte-without-types": ("Gte", ROTATED | {"type_vocab_size": 0}),
    "jina-v3": ("JinaEmbeddingsV3", ROTATED),
    "modernbert": ("ModernBert", MODERN),
    "modernbert-biases-mean": (
        "ModernBert",
        MODERN | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
        | {"classifier_pooling": "mean", "classifier_activation": "relu"},
    ),
    "mpnet": ("MPNet", BERT),
    "mpnet-padding-0": ("MPNet", BERT | {"pad_token_id": 0}),
    "nomic": ("NomicBert", ROTATED),
    "roberta": ("Roberta", BERT),
    "xlm-roberta": ("XLMRoberta", BERT | {"pad_token_id": 0}),
}  # fmt: skip
"""Family, and fields of its config."""

_GROUPED = BERT | {"num_key_value_heads": 2, "head_dim": 8}
_GEMMA = _GROUPED | {
    "query_pre_attn_scalar": 8,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GEMMA |= {"num_hidden_layers": 2, "bos_token_id": 2, "eos_token_id": 3}

BOTH_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddinggemma": ("Gemma3Text", _GEMMA | {"use_bidirectional_attention": True}),
    "llama-both-ways": ("Llama", _GROUPED | {"is_causal": False}),
    "mistral-both-ways": ("Mistral", _GROUPED | {"is_causal": False, "sliding_window": 6}),
    "qwen2-both-ways": ("Qwen2", _GROUPED | {"is_causal": False, "use_sliding_window": False}),
    "qwen3-both-ways": ("Qwen3", _GROUPED | {"is_causal": False}),
}
"""Decoders whose config lets tokens see each other in both directions."""

POOLERS = {
    "BgeM3EmbeddingModel": "bge-m3",
    "HF_ColBERT": "colbert",
    "Qwen2ForProcessRewardModel": "qwen2-step-reward",
    "Qwen2ForRewardModel": "qwen2-reward",
}
"""Architectures that tests/pooling/test_families.py compares with formulas, and their names in docs/models.md."""

DECODERS = ("Gemma2", "Gemma3Text", "Llama", "Mistral", "Qwen2", "Qwen3")
"""Families of decoders that embed and classify by their last token."""
