"""Decoders without a language model head: embedders, and classifiers, rerankers and reward models."""

from quire.models.families.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM
from quire.models.families.llama import LlamaForCausalLM
from quire.models.families.mistral import MistralForCausalLM
from quire.models.families.qwen.qwen2 import Qwen2ForCausalLM
from quire.models.families.qwen.qwen3 import Qwen3ForCausalLM
from quire.models.pooling.model import Kind, pooled

Gemma2Model = pooled(Gemma2ForCausalLM, Kind.EMBED)
Gemma3TextModel = pooled(Gemma3ForCausalLM, Kind.EMBED)
LlamaModel = pooled(LlamaForCausalLM, Kind.EMBED)
MistralModel = pooled(MistralForCausalLM, Kind.EMBED)
Qwen2Model = pooled(Qwen2ForCausalLM, Kind.EMBED)
Qwen3Model = pooled(Qwen3ForCausalLM, Kind.EMBED)
Gemma2ForSequenceClassification = pooled(Gemma2ForCausalLM, Kind.CLASSIFY)
Gemma3TextForSequenceClassification = pooled(Gemma3ForCausalLM, Kind.CLASSIFY)
LlamaForSequenceClassification = pooled(LlamaForCausalLM, Kind.CLASSIFY)
MistralForSequenceClassification = pooled(MistralForCausalLM, Kind.CLASSIFY)
Qwen2ForSequenceClassification = pooled(Qwen2ForCausalLM, Kind.CLASSIFY)
Qwen3ForSequenceClassification = pooled(Qwen3ForCausalLM, Kind.CLASSIFY)
Qwen2ForRewardModel = pooled(Qwen2ForCausalLM, Kind.REWARD)
Qwen2ForProcessRewardModel = pooled(Qwen2ForCausalLM, Kind.STEP_REWARD)
