"""The architectures that Quire runs, and which class runs each of them."""

import difflib
import re

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import HFConfig

MODELS = {
    "ApertusForCausalLM": "quire.models.families.llama_like.apertus:ApertusForCausalLM",
    "ArceeForCausalLM": "quire.models.families.llama_like.arcee:ArceeForCausalLM",
    "BaichuanForCausalLM": "quire.models.families.llama_like.baichuan:BaichuanForCausalLM",
    "BaiChuanForCausalLM": "quire.models.families.llama_like.baichuan:BaichuanForCausalLM",
    "BloomForCausalLM": "quire.models.families.gpt.bloom:BloomForCausalLM",
    "Cohere2ForCausalLM": "quire.models.families.cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": "quire.models.families.cohere:CohereForCausalLM",
    "CwmForCausalLM": "quire.models.families.llama_like.cwm:CwmForCausalLM",
    "DbrxForCausalLM": "quire.models.families.mixtures.dbrx:DbrxForCausalLM",
    "DeepseekV2ForCausalLM": "quire.models.families.latent.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "quire.models.families.latent.deepseek:DeepseekV3ForCausalLM",
    "Dots1ForCausalLM": "quire.models.families.mixtures.glm4_moe:Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM": "quire.models.families.mixtures.ernie4_5_moe:Ernie45MoeForCausalLM",
    "Ernie4_5ForCausalLM": "quire.models.families.llama_like.ernie4_5:Ernie45ForCausalLM",
    "Exaone4ForCausalLM": "quire.models.families.llama_like.exaone:Exaone4ForCausalLM",
    "ExaoneForCausalLM": "quire.models.families.llama_like.exaone:ExaoneForCausalLM",
    "FalconForCausalLM": "quire.models.families.gpt.falcon:FalconForCausalLM",
    "FlexOlmoForCausalLM": "quire.models.families.mixtures.olmoe:FlexOlmoForCausalLM",
    "Gemma2ForCausalLM": "quire.models.families.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "quire.models.families.gemma:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "quire.models.families.gemma:Gemma3ForConditionalGeneration",
    "GemmaForCausalLM": "quire.models.families.gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": "quire.models.families.glm:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "quire.models.families.mixtures.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "quire.models.families.latent.glm4_moe_lite:Glm4MoeLiteForCausalLM",
    "GlmForCausalLM": "quire.models.families.glm:GlmForCausalLM",
    "GPT2LMHeadModel": "quire.models.families.gpt.gpt2:GPT2LMHeadModel",
    "GPTBigCodeForCausalLM": "quire.models.families.gpt.gpt_bigcode:GPTBigCodeForCausalLM",
    "GPTJForCausalLM": "quire.models.families.gpt.gptj:GPTJForCausalLM",
    "GPTNeoXForCausalLM": "quire.models.families.gpt.gpt_neox:GPTNeoXForCausalLM",
    "GptOssForCausalLM": "quire.models.families.mixtures.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "quire.models.families.llama_like.granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "quire.models.families.mixtures.granite_moe:GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM": "quire.models.families.mixtures.granite_moe:GraniteMoeSharedForCausalLM",
    "HeliumForCausalLM": "quire.models.families.llama_like.helium:HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM": "quire.models.families.llama_like.hunyuan:HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM": "quire.models.families.mixtures.hunyuan_moe:HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM": "quire.models.families.llama_like.granite:HyperCLOVAXForCausalLM",
    "InternLM2ForCausalLM": "quire.models.families.llama_like.internlm2:InternLM2ForCausalLM",
    "Jais2ForCausalLM": "quire.models.families.gpt.nemotron:Jais2ForCausalLM",
    "LLaMAForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "LlamaForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "MiMoForCausalLM": "quire.models.families.qwen.qwen2:Qwen2ForCausalLM",
    "MiniCPM3ForCausalLM": "quire.models.families.latent.minicpm3:MiniCPM3ForCausalLM",
    "MiniCPMForCausalLM": "quire.models.families.llama_like.minicpm:MiniCPMForCausalLM",
    "MiniMaxM2ForCausalLM": "quire.models.families.mixtures.minimax_m2:MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "quire.models.families.mistral:Ministral3ForCausalLM",
    "MinistralForCausalLM": "quire.models.families.mistral:MinistralForCausalLM",
    "Mistral3ForConditionalGeneration": "quire.models.families.mistral:Mistral3ForConditionalGeneration",
    "MistralForCausalLM": "quire.models.families.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "quire.models.families.mixtures.mixtral:MixtralForCausalLM",
    "MPTForCausalLM": "quire.models.families.gpt.mpt:MptForCausalLM",
    "MptForCausalLM": "quire.models.families.gpt.mpt:MptForCausalLM",
    "NanoChatForCausalLM": "quire.models.families.gpt.nanochat:NanoChatForCausalLM",
    "NemotronForCausalLM": "quire.models.families.gpt.nemotron:NemotronForCausalLM",
    "Olmo2ForCausalLM": "quire.models.families.olmo:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "quire.models.families.olmo:Olmo3ForCausalLM",
    "OlmoeForCausalLM": "quire.models.families.mixtures.olmoe:OlmoeForCausalLM",
    "OlmoForCausalLM": "quire.models.families.olmo:OlmoForCausalLM",
    "OPTForCausalLM": "quire.models.families.gpt.opt:OPTForCausalLM",
    "PersimmonForCausalLM": "quire.models.families.gpt.persimmon:PersimmonForCausalLM",
    "Phi3ForCausalLM": "quire.models.families.phi:Phi3ForCausalLM",
    "PhiForCausalLM": "quire.models.families.phi:PhiForCausalLM",
    "PhiMoEForCausalLM": "quire.models.families.mixtures.phimoe:PhimoeForCausalLM",
    "PhimoeForCausalLM": "quire.models.families.mixtures.phimoe:PhimoeForCausalLM",
    "Qwen2ForCausalLM": "quire.models.families.qwen.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "quire.models.families.mixtures.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "quire.models.families.qwen.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "quire.models.families.mixtures.qwen3_moe:Qwen3MoeForCausalLM",
    "RWForCausalLM": "quire.models.families.gpt.falcon:FalconForCausalLM",
    "SeedOssForCausalLM": "quire.models.families.llama_like.seed_oss:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "quire.models.families.llama_like.smollm3:SmolLM3ForCausalLM",
    "SolarOpenForCausalLM": "quire.models.families.mixtures.glm4_moe:SolarOpenForCausalLM",
    "StableLMEpochForCausalLM": "quire.models.families.gpt.stablelm:StableLmForCausalLM",
    "StableLmForCausalLM": "quire.models.families.gpt.stablelm:StableLmForCausalLM",
    "Starcoder2ForCausalLM": "quire.models.families.gpt.starcoder2:Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM": "quire.models.families.gemma:VaultGemmaForCausalLM",
    "YoutuForCausalLM": "quire.models.families.latent.youtu:YoutuForCausalLM",
}
"""By name as in a config.json's `architectures`: module and class, imported when a model of it is loaded."""
_ENCODERS = {
    "Albert": "albert:Albert",
    "Bert": "bert:Bert",
    "Camembert": "roberta:Roberta",
    "DebertaV2": "deberta_v2:DebertaV2",
    "DistilBert": "distilbert:DistilBert",
    "Electra": "electra:Electra",
    "Gte": "rotated:Gte",
    "GteNew": "rotated:Gte",
    "JinaEmbeddingsV3": "rotated:JinaEmbeddingsV3",
    "MPNet": "mpnet:MPNet",
    "ModernBert": "modernbert:ModernBert",
    "New": "rotated:Gte",
    "NomicBert": "rotated:NomicBert",
    "Roberta": "roberta:Roberta",
    "XLMRoberta": "roberta:Roberta",
}
_HEADS = {
    "ForMaskedLM": "EMBED",
    "ForSequenceClassification": "CLASSIFY",
    "ForTokenClassification": "TOKEN_CLASSIFY",
    "Model": "EMBED",
}
"""What a checkpoint was saved with -> the kind of model that is run of it."""
_DECODERS = ("Gemma2", "Gemma3Text", "Llama", "Mistral", "Qwen2", "Qwen3")
POOLING_MODELS = {
    f"{family}{head}": f"quire.models.families.encoders.{path}:{kind}"
    for family, path in _ENCODERS.items()
    for head, kind in _HEADS.items()
}
POOLING_MODELS |= {
    f"{family}{head}": f"{MODELS[family.removesuffix('Text') + 'ForCausalLM']}:{_HEADS[head]}"
    for family in _DECODERS
    for head in ("Model", "ForSequenceClassification")
}
POOLING_MODELS |= {
    "BgeM3EmbeddingModel": "quire.models.families.encoders.roberta:Roberta:MULTI_EMBED",
    "HF_ColBERT": "quire.models.families.encoders.bert:Bert:TOKEN_EMBED",
    "Qwen2ForProcessRewardModel": f"{MODELS['Qwen2ForCausalLM']}:STEP_REWARD",
    "Qwen2ForRewardModel": f"{MODELS['Qwen2ForCausalLM']}:REWARD",
}
"""The same for architectures that make embeddings, scores or classes of texts, and do not generate: module, class of
the body, and Kind of the model."""


def supported_architecture(hf: HFConfig) -> str:
    """The architecture that a config.json names. Raises UnsupportedModelError if Quire does not run it, whatever else
    the file has, and CheckpointError if it names none."""
    named, model_type = hf.get("architectures"), hf.get("model_type")
    if isinstance(named, list) and named and isinstance(named[0], str):
        if named[0] in MODELS or named[0] in POOLING_MODELS:
            return named[0]
        raise unsupported(named[0], f"{hf.source}: ", needs_code=hf.get("auto_map") is not None)
    families = {_family(name) for name in (*MODELS, *POOLING_MODELS)}
    if named is None and isinstance(model_type, str) and re.sub("[_-]", "", model_type).lower() not in families:
        raise unsupported(model_type, f"{hf.source}: ", needs_code=hf.get("auto_map") is not None)
    raise CheckpointError(f"{hf.source}: 'architectures' is {named!r}, but must be a list that names the model's class")


def unsupported(name: str, where: str = "", *, needs_code: bool = False) -> UnsupportedModelError:
    """The error for an architecture that Quire does not run, with the closest names. `needs_code`: the checkpoint comes
    with code that defines it."""
    families = {known: _family(known) for known in (*MODELS, *POOLING_MODELS)}
    near = set(difflib.get_close_matches(_family(name[:80]), set(families.values()), cutoff=0.7))
    alike = [known for known, family in families.items() if family in near]
    close = ", ".join(map(repr, difflib.get_close_matches(name[:80], alike, cutoff=0)))
    code = ", and code that comes with a checkpoint (auto_map) is never run" if needs_code else ""
    return UnsupportedModelError(
        f"{where}the architecture {name[:80]!r} is not supported: Quire has no class for it{code} "
        f"(`quire models` lists those that it has{f'; closest: {close}' if close else ''})"
    )


def _family(name: str) -> str:
    """What the names of a family's classes begin with, and what its `model_type` usually is without separators."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", name).lower()
