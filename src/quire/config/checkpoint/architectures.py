"""The architectures that Quire runs, and which class runs each of them."""

import re

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import HFConfig

MODELS = {
    "ApertusForCausalLM": "quire.models.families.llama_like.apertus:ApertusForCausalLM",
    "ArceeForCausalLM": "quire.models.families.llama_like.arcee:ArceeForCausalLM",
    "BloomForCausalLM": "quire.models.families.gpt.bloom:BloomForCausalLM",
    "Cohere2ForCausalLM": "quire.models.families.cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": "quire.models.families.cohere:CohereForCausalLM",
    "DbrxForCausalLM": "quire.models.families.mixtures.dbrx:DbrxForCausalLM",
    "Ernie4_5ForCausalLM": "quire.models.families.llama_like.ernie4_5:Ernie45ForCausalLM",
    "Exaone4ForCausalLM": "quire.models.families.llama_like.exaone4:Exaone4ForCausalLM",
    "FalconForCausalLM": "quire.models.families.gpt.falcon:FalconForCausalLM",
    "Gemma2ForCausalLM": "quire.models.families.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "quire.models.families.gemma:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "quire.models.families.gemma:Gemma3ForConditionalGeneration",
    "GemmaForCausalLM": "quire.models.families.gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": "quire.models.families.glm:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "quire.models.families.mixtures.glm4_moe:Glm4MoeForCausalLM",
    "GlmForCausalLM": "quire.models.families.glm:GlmForCausalLM",
    "GPT2LMHeadModel": "quire.models.families.gpt.gpt2:GPT2LMHeadModel",
    "GPTJForCausalLM": "quire.models.families.gpt.gptj:GPTJForCausalLM",
    "GPTNeoXForCausalLM": "quire.models.families.gpt.gpt_neox:GPTNeoXForCausalLM",
    "GptOssForCausalLM": "quire.models.families.mixtures.gpt_oss:GptOssForCausalLM",
    "Ernie4_5_MoeForCausalLM": "quire.models.families.mixtures.ernie4_5_moe:Ernie45MoeForCausalLM",
    "GraniteMoeForCausalLM": "quire.models.families.mixtures.granite_moe:GraniteMoeForCausalLM",
    "GraniteForCausalLM": "quire.models.families.llama_like.granite:GraniteForCausalLM",
    "HeliumForCausalLM": "quire.models.families.llama_like.helium:HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM": "quire.models.families.llama_like.hunyuan:HunYuanDenseV1ForCausalLM",
    "LLaMAForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "LlamaForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "MinistralForCausalLM": "quire.models.families.mistral:MinistralForCausalLM",
    "Mistral3ForConditionalGeneration": "quire.models.families.mistral:Mistral3ForConditionalGeneration",
    "MistralForCausalLM": "quire.models.families.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "quire.models.families.mixtures.mixtral:MixtralForCausalLM",
    "MPTForCausalLM": "quire.models.families.gpt.mpt:MptForCausalLM",
    "MptForCausalLM": "quire.models.families.gpt.mpt:MptForCausalLM",
    "NemotronForCausalLM": "quire.models.families.llama_like.nemotron:NemotronForCausalLM",
    "Olmo2ForCausalLM": "quire.models.families.olmo:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "quire.models.families.olmo:Olmo3ForCausalLM",
    "OlmoeForCausalLM": "quire.models.families.mixtures.olmoe:OlmoeForCausalLM",
    "OlmoForCausalLM": "quire.models.families.olmo:OlmoForCausalLM",
    "OPTForCausalLM": "quire.models.families.gpt.opt:OPTForCausalLM",
    "Phi3ForCausalLM": "quire.models.families.phi:Phi3ForCausalLM",
    "PhiForCausalLM": "quire.models.families.phi:PhiForCausalLM",
    "PhiMoEForCausalLM": "quire.models.families.mixtures.phimoe:PhimoeForCausalLM",
    "PhimoeForCausalLM": "quire.models.families.mixtures.phimoe:PhimoeForCausalLM",
    "Qwen2ForCausalLM": "quire.models.families.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "quire.models.families.mixtures.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "quire.models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "quire.models.families.mixtures.qwen3_moe:Qwen3MoeForCausalLM",
    "RWForCausalLM": "quire.models.families.gpt.falcon:FalconForCausalLM",
    "SeedOssForCausalLM": "quire.models.families.llama_like.seed_oss:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "quire.models.families.llama_like.smollm3:SmolLM3ForCausalLM",
    "StableLMEpochForCausalLM": "quire.models.families.gpt.stablelm:StableLmForCausalLM",
    "StableLmForCausalLM": "quire.models.families.gpt.stablelm:StableLmForCausalLM",
    "Starcoder2ForCausalLM": "quire.models.families.gpt.starcoder2:Starcoder2ForCausalLM",
}
"""By name as in a config.json's `architectures`: module and class, imported when a model of it is loaded."""
POOLING_MODELS = {
    "AlbertForMaskedLM": "quire.models.families.encoders.albert:AlbertModel",
    "AlbertForSequenceClassification": "quire.models.families.encoders.albert:AlbertForSequenceClassification",
    "AlbertForTokenClassification": "quire.models.families.encoders.albert:AlbertForTokenClassification",
    "AlbertModel": "quire.models.families.encoders.albert:AlbertModel",
    "BertForMaskedLM": "quire.models.families.encoders.bert:BertModel",
    "BertForSequenceClassification": "quire.models.families.encoders.bert:BertForSequenceClassification",
    "BertForTokenClassification": "quire.models.families.encoders.bert:BertForTokenClassification",
    "BertModel": "quire.models.families.encoders.bert:BertModel",
    "CamembertForMaskedLM": "quire.models.families.encoders.roberta:RobertaModel",
    "CamembertForSequenceClassification": "quire.models.families.encoders.roberta:RobertaForSequenceClassification",
    "CamembertForTokenClassification": "quire.models.families.encoders.roberta:RobertaForTokenClassification",
    "CamembertModel": "quire.models.families.encoders.roberta:RobertaModel",
    "DistilBertForMaskedLM": "quire.models.families.encoders.distilbert:DistilBertModel",
    "DistilBertForSequenceClassification": "quire.models.families.encoders.distilbert:DistilBertForSequenceClassification",
    "DistilBertForTokenClassification": "quire.models.families.encoders.distilbert:DistilBertForTokenClassification",
    "DistilBertModel": "quire.models.families.encoders.distilbert:DistilBertModel",
    "ElectraForMaskedLM": "quire.models.families.encoders.electra:ElectraModel",
    "ElectraForSequenceClassification": "quire.models.families.encoders.electra:ElectraForSequenceClassification",
    "ElectraForTokenClassification": "quire.models.families.encoders.electra:ElectraForTokenClassification",
    "ElectraModel": "quire.models.families.encoders.electra:ElectraModel",
    "GteForMaskedLM": "quire.models.families.encoders.rotated:GteModel",
    "GteForSequenceClassification": "quire.models.families.encoders.rotated:GteForSequenceClassification",
    "GteForTokenClassification": "quire.models.families.encoders.rotated:GteForTokenClassification",
    "GteModel": "quire.models.families.encoders.rotated:GteModel",
    "JinaEmbeddingsV3ForMaskedLM": "quire.models.families.encoders.rotated:JinaEmbeddingsV3Model",
    "JinaEmbeddingsV3ForSequenceClassification": "quire.models.families.encoders.rotated:JinaEmbeddingsV3ForSequenceClassification",
    "JinaEmbeddingsV3ForTokenClassification": "quire.models.families.encoders.rotated:JinaEmbeddingsV3ForTokenClassification",
    "JinaEmbeddingsV3Model": "quire.models.families.encoders.rotated:JinaEmbeddingsV3Model",
    "MPNetForMaskedLM": "quire.models.families.encoders.mpnet:MPNetModel",
    "MPNetForSequenceClassification": "quire.models.families.encoders.mpnet:MPNetForSequenceClassification",
    "MPNetForTokenClassification": "quire.models.families.encoders.mpnet:MPNetForTokenClassification",
    "MPNetModel": "quire.models.families.encoders.mpnet:MPNetModel",
    "ModernBertForMaskedLM": "quire.models.families.encoders.modernbert:ModernBertModel",
    "ModernBertForSequenceClassification": "quire.models.families.encoders.modernbert:ModernBertForSequenceClassification",
    "ModernBertForTokenClassification": "quire.models.families.encoders.modernbert:ModernBertForTokenClassification",
    "ModernBertModel": "quire.models.families.encoders.modernbert:ModernBertModel",
    "NomicBertForMaskedLM": "quire.models.families.encoders.rotated:NomicBertModel",
    "NomicBertForSequenceClassification": "quire.models.families.encoders.rotated:NomicBertForSequenceClassification",
    "NomicBertForTokenClassification": "quire.models.families.encoders.rotated:NomicBertForTokenClassification",
    "NomicBertModel": "quire.models.families.encoders.rotated:NomicBertModel",
    "RobertaForMaskedLM": "quire.models.families.encoders.roberta:RobertaModel",
    "RobertaForSequenceClassification": "quire.models.families.encoders.roberta:RobertaForSequenceClassification",
    "RobertaForTokenClassification": "quire.models.families.encoders.roberta:RobertaForTokenClassification",
    "RobertaModel": "quire.models.families.encoders.roberta:RobertaModel",
    "XLMRobertaForMaskedLM": "quire.models.families.encoders.roberta:RobertaModel",
    "XLMRobertaForSequenceClassification": "quire.models.families.encoders.roberta:RobertaForSequenceClassification",
    "XLMRobertaForTokenClassification": "quire.models.families.encoders.roberta:RobertaForTokenClassification",
    "XLMRobertaModel": "quire.models.families.encoders.roberta:RobertaModel",
}
"""The same for architectures that make embeddings, scores or classes of texts, and do not generate."""


def supported_architecture(hf: HFConfig) -> str:
    """The architecture that a config.json names. Raises UnsupportedModelError if Quire does not run it, whatever else
    the file has, and CheckpointError if it names none."""
    named, model_type = hf.get("architectures"), hf.get("model_type")
    if isinstance(named, list) and named and isinstance(named[0], str):
        if named[0] in MODELS or named[0] in POOLING_MODELS:
            return named[0]
        raise unsupported(named[0], f"{hf.source}: ")
    families = {re.sub("For(CausalLM|ConditionalGeneration)$|LMHeadModel$", "", name).lower() for name in (*MODELS, *POOLING_MODELS)}
    if named is None and isinstance(model_type, str) and model_type.replace("_", "").lower() not in families:
        raise unsupported(model_type, f"{hf.source}: ")
    raise CheckpointError(f"{hf.source}: 'architectures' is {named!r}, but must be a list that names the model's class")


def unsupported(name: str, where: str = "") -> UnsupportedModelError:
    """The error for an architecture that Quire does not run."""
    return UnsupportedModelError(
        f"{where}the architecture {name[:80]!r} is not supported (supported: {', '.join(sorted((*MODELS, *POOLING_MODELS)))}; "
        "a checkpoint's own Python code is never run)"
    )
