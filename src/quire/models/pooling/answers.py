"""Classifiers that are language models: a class is a token that answers a question about the text, as in the rerankers
of Qwen3 (Zhang et al. 2025)."""

from collections.abc import Mapping, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from quire.common.errors import CheckpointError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.layers.weighted_layer import Part, WeightSpec
from quire.models.pooling.heads import Dense

TOKENS, TWO_WAY = "classifier_from_token", "from_2_way_softmax"
_MAX_TOKENS = 1024


class TokenDense(Dense):
    """A Dense whose rows are those of a language model head: of each token its own, or of two tokens the second less
    the first, whose sigmoid is the second's share of both."""

    def __init__(self, hidden_size: int, token_ids: Sequence[int], vocab_size: int, source: str, *, two_way: bool):
        """`source`: the model's name of the matrix [vocab_size, hidden_size]."""
        super().__init__(hidden_size, 1 if two_way else len(token_ids), bias=False)
        parts = tuple(Part((vocab_size, hidden_size), rows=(i, i + 1)) for i in token_ids)
        self._spec = WeightSpec(parts, torch.float32, source=source)
        self._two_way = two_way

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        return {"weight": self._spec}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        rows = tensors["weight"]  # [num_tokens, hidden]
        super().set_weights({"weight": rows[1:] - rows[:1] if self._two_way else rows})


def reads_tokens(hf: HFConfig) -> bool:
    """Whether a config asks for a TokenDense, under vLLM's keys."""
    return hf.get(TOKENS) is not None or hf.flag("is_original_qwen3_reranker", False)


def token_dense(config: ModelConfig, hidden_size: int, source: str) -> TokenDense | None:
    """The layer that a config asks for; None if it does not. Raises CheckpointError for tokens that are none of the
    tokenizer's."""
    hf = config.hf_config
    if not reads_tokens(hf):
        return None
    tokens = hf.get(TOKENS, ["no", "yes"])
    two_way = hf.flag("is_original_qwen3_reranker", False) or hf.text("method", "") == TWO_WAY
    if not isinstance(tokens, list) or not 0 < len(tokens) <= _MAX_TOKENS or (two_way and len(tokens) != 2):
        raise CheckpointError(f"{hf.source}: {TOKENS!r} must be a list of tokens, of two for {TWO_WAY}")
    file = config.tokenizer_path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise CheckpointError(f"{file}, in which the tokens of {TOKENS!r} are looked up: {error}") from error
    ids = [tokenizer.token_to_id(token) if isinstance(token, str) else None for token in tokens]
    if unknown := [token for token, i in zip(tokens, ids, strict=True) if i is None or i >= config.vocab_size]:
        raise CheckpointError(f"{hf.source}: {TOKENS!r} has {str(unknown)[:80]}, which are no tokens of the tokenizer")
    return TokenDense(hidden_size, [i for i in ids if i is not None], config.vocab_size, source, two_way=two_way)
