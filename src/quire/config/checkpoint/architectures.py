"""The architectures that Quire runs, and which class runs each of them."""

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import HFConfig

MODELS = {
    "Glm4MoeForCausalLM": "quire.models.families.glm4_moe:Glm4MoeForCausalLM",
    "LlamaForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "LLaMAForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "MistralForCausalLM": "quire.models.families.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "quire.models.families.mixtral:MixtralForCausalLM",
    "OPTForCausalLM": "quire.models.families.opt:OPTForCausalLM",
    "Qwen2ForCausalLM": "quire.models.families.qwen2:Qwen2ForCausalLM",
    "OlmoeForCausalLM": "quire.models.families.olmoe:OlmoeForCausalLM",
    "Qwen2MoeForCausalLM": "quire.models.families.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "quire.models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "quire.models.families.qwen3_moe:Qwen3MoeForCausalLM",
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
    families = {name.removesuffix("ForCausalLM").lower() for name in MODELS}
    if named is None and isinstance(model_type, str) and model_type not in families:
        raise unsupported(model_type, f"{hf.source}: ")
    raise CheckpointError(f"{hf.source}: 'architectures' is {named!r}, but must be a list that names the model's class")


def unsupported(name: str, where: str = "") -> UnsupportedModelError:
    """The error for an architecture that Quire does not run."""
    return UnsupportedModelError(
        f"{where}the architecture {name[:80]!r} is not supported (supported: {', '.join(sorted(MODELS))}; "
        "a checkpoint's own Python code is never run)"
    )
