"""The architectures that Quire runs, and which class runs each of them."""

import re

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import HFConfig

MODELS = {
    "Exaone4ForCausalLM": "quire.models.families.llama_like.exaone4:Exaone4ForCausalLM",
    "FalconForCausalLM": "quire.models.families.gpt.falcon:FalconForCausalLM",
    "Glm4MoeForCausalLM": "quire.models.families.mixtures.glm4_moe:Glm4MoeForCausalLM",
    "GPT2LMHeadModel": "quire.models.families.gpt.gpt2:GPT2LMHeadModel",
    "GptOssForCausalLM": "quire.models.families.mixtures.gpt_oss:GptOssForCausalLM",
    "GPTNeoXForCausalLM": "quire.models.families.gpt.gpt_neox:GPTNeoXForCausalLM",
    "HunYuanDenseV1ForCausalLM": "quire.models.families.llama_like.hunyuan:HunYuanDenseV1ForCausalLM",
    "LLaMAForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "LlamaForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "MinistralForCausalLM": "quire.models.families.mistral:MinistralForCausalLM",
    "MistralForCausalLM": "quire.models.families.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "quire.models.families.mixtures.mixtral:MixtralForCausalLM",
    "Olmo2ForCausalLM": "quire.models.families.olmo:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "quire.models.families.olmo:Olmo3ForCausalLM",
    "OlmoeForCausalLM": "quire.models.families.mixtures.olmoe:OlmoeForCausalLM",
    "OlmoForCausalLM": "quire.models.families.olmo:OlmoForCausalLM",
    "OPTForCausalLM": "quire.models.families.gpt.opt:OPTForCausalLM",
    "Phi3ForCausalLM": "quire.models.families.phi:Phi3ForCausalLM",
    "PhiForCausalLM": "quire.models.families.phi:PhiForCausalLM",
    "PhimoeForCausalLM": "quire.models.families.mixtures.phimoe:PhimoeForCausalLM",
    "PhiMoEForCausalLM": "quire.models.families.mixtures.phimoe:PhimoeForCausalLM",
    "Qwen2ForCausalLM": "quire.models.families.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "quire.models.families.mixtures.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "quire.models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "quire.models.families.mixtures.qwen3_moe:Qwen3MoeForCausalLM",
    "SeedOssForCausalLM": "quire.models.families.llama_like.seed_oss:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "quire.models.families.llama_like.smollm3:SmolLM3ForCausalLM",
    "StableLMEpochForCausalLM": "quire.models.families.gpt.stablelm:StableLmForCausalLM",
    "StableLmForCausalLM": "quire.models.families.gpt.stablelm:StableLmForCausalLM",
    "Starcoder2ForCausalLM": "quire.models.families.gpt.starcoder2:Starcoder2ForCausalLM",
}
"""By name as in a config.json's `architectures`: module and class, imported when a model of it is loaded."""


def supported_architecture(hf: HFConfig) -> str:
    """The architecture that a config.json names. Raises UnsupportedModelError if Quire does not run it, whatever else
    the file has, and CheckpointError if it names none."""
    named, model_type = hf.get("architectures"), hf.get("model_type")
    if isinstance(named, list) and named and isinstance(named[0], str):
        if named[0] in MODELS:
            return named[0]
        raise unsupported(named[0], f"{hf.source}: ")
    families = {re.sub("For(CausalLM|ConditionalGeneration)$|LMHeadModel$", "", name).lower() for name in MODELS}
    if named is None and isinstance(model_type, str) and model_type.replace("_", "").lower() not in families:
        raise unsupported(model_type, f"{hf.source}: ")
    raise CheckpointError(f"{hf.source}: 'architectures' is {named!r}, but must be a list that names the model's class")


def unsupported(name: str, where: str = "") -> UnsupportedModelError:
    """The error for an architecture that Quire does not run."""
    return UnsupportedModelError(
        f"{where}the architecture {name[:80]!r} is not supported (supported: {', '.join(sorted(MODELS))}; "
        "a checkpoint's own Python code is never run)"
    )
