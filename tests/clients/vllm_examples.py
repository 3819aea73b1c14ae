"""vLLM's own examples: where they are, how they are changed, and which of them cannot run."""

import os
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "vllm" / "examples"
MODEL = "quire-tiny"
_IMPORT = re.compile(r"^( *(?:from|import) )vllm\b", re.MULTILINE)
_MODELS = (
    "facebook/opt-125m", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "lmsys/longchat-13b-16k",
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B",
)  # fmt: skip
_ADDRESS = re.compile(r"http://(localhost|0\.0\.0\.0):8000")

NOT_RUN = {
    "__init__.py": "is empty",
    "applications/": "web applications and retrieval over vLLM's internals, embeddings or packages for user interfaces",
    "basic/offline_inference/classify.py": "models for classification",
    "basic/offline_inference/embed.py": "models for embeddings",
    "basic/offline_inference/score.py": "models for scores",
    "basic/online_serving/watermark_detection_server.py": "watermarks",
    "disaggregated/": "transfer of the KV cache between GPUs",
    "features/data_parallel/": "several engines on several GPUs",
    "features/kv_events/": "events of the KV cache over ZeroMQ",
    "features/logits_processor/dry.py": "the interface of vLLM's GPU sampler, in Triton",
    "features/lora/": "adapters of large models, from the hub",
    "features/profiling/": "torch's profiler in vLLM's workers",
    "features/prompt_embed/": "embeddings as prompts",
    "features/sharded_state/": "vLLM's own checkpoint format, on several GPUs",
    "features/speculative_decoding/": "models that draft",
    "features/structured_diffusion/": "diffusion models",
    "features/tensorize_vllm_model.py": "the checkpoint format tensorizer",
    "features/torchrun/": "several GPUs",
    "generate/batched_chat_completions_online.py": "the endpoint /v1/chat/completions/batch",
    "generate/multimodal/": "images, audio and video",
    "generate/qwen_1m_offline.py": "a model with a context of a million tokens",
    "generate/trace_replay_offline.py": "vLLM's datasets for benchmarks",
    "observability/opentelemetry/": "a collector of traces over gRPC",
    "pooling/": "models for embeddings, scores and classification",
    "ray_serving/": "Ray",
    "rl/pause_resume/": "pausing requests in the engine",
    "rl/rdt_": "transfer of weights between GPUs",
    "rl/rlhf_": "transfer of weights between GPUs",
    "rl/routed_experts_e2e.py": "mixtures of experts",
    "rl/skip_loading_weights_in_engine_init.py": "weights that another program sends",
    "scale_out/": "a front end and engines on several machines",
    "speech_to_text/": "audio",
    "tool_calling/chat_with_tools_offline.py": "a checkpoint in Mistral's own format",
    "tool_calling/openai_chat_completion_client_with_tools_xlam": "the tool format xlam",
    "tool_calling/openai_responses_client_with_mcp_tools.py": "MCP servers on the Internet",
}
"""Examples, or beginnings of their paths, and what they need that Quire does not have or a test cannot have."""


def source_of(example: str, url: str = "") -> str:
    """The text of an example in which imports, the model and the server's address are Quire's, and nothing else."""
    text = _IMPORT.sub(r"\1quire", (FOLDER / example).read_text(encoding="utf-8"))
    for model in _MODELS:
        text = text.replace(f'"{model}"', f'"{MODEL}"')
    return _ADDRESS.sub(url, text)


def require_examples() -> None:
    """Skip a test where the examples were not fetched; in CI that is a failure."""
    if FOLDER.is_dir():
        return
    reason = f"vLLM's examples are not in {FOLDER}: `make .venv/.clients` fetches them"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
