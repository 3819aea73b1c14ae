"""Decoders with a classification head, among them rerankers and reward models, over the last token."""

from quire.models.families.gemma import Gemma2ForCausalLM
from quire.models.families.llama import LlamaForCausalLM
from quire.models.families.mistral import MistralForCausalLM
from quire.models.families.qwen.qwen2 import Qwen2ForCausalLM
from quire.models.families.qwen.qwen3 import Qwen3ForCausalLM
from quire.models.pooling.model import Kind, pooled

Gemma2ForSequenceClassification = pooled(Gemma2ForCausalLM, Kind.CLASSIFY)
LlamaForSequenceClassification = pooled(LlamaForCausalLM, Kind.CLASSIFY)
MistralForSequenceClassification = pooled(MistralForCausalLM, Kind.CLASSIFY)
Qwen2ForSequenceClassification = pooled(Qwen2ForCausalLM, Kind.CLASSIFY)
Qwen3ForSequenceClassification = pooled(Qwen3ForCausalLM, Kind.CLASSIFY)
