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
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "intfloat/e5-small", "BAAI/bge-reranker-base", "BAAI/bge-reranker-v2-m3",
)  # fmt: skip
_ADDRESS = re.compile(r"http://(localhost|0\.0\.0\.0|127\.0\.0\.1):8000")

NOT_RUN = {
    "__init__.py": "is empty",
    "applications/": "web applications and retrieval over vLLM's internals, embeddings or packages for user interfaces",
    "basic/offline_inference/classify.py": "a model that classifies",
    "basic/online_serving/watermark_detection_server.py": "watermarks",
    "disaggregated/": "transfer of the KV cache between GPUs",
    "features/data_parallel/": "several engines on several GPUs",
    "features/kv_events/": "events of the KV cache over ZeroMQ",
    "features/logits_processor/dry.py": "the interface of vLLM's GPU sampler, in Triton",
    "features/lora/": "adapters of large models, from the hub",
    "features/profiling/": "torch's profiler in vLLM's workers",
    "features/prompt_embed/": "embeddings as prompts",
    "features/sharded_state/": "vLLM's own checkpoint format, on several GPUs",
    "features/speculative_decoding/": "large models from the hub",
    "features/structured_diffusion/": "diffusion models",
    "features/tensorize_vllm_model.py": "the checkpoint format tensorizer",
    "features/torchrun/": "several GPUs",
    "generate/batched_chat_completions_online.py": "the endpoint /v1/chat/completions/batch",
    "generate/multimodal/": "images, audio and video",
    "generate/qwen_1m_offline.py": "a model with a context of a million tokens",
    "generate/trace_replay_offline.py": "vLLM's datasets for benchmarks",
    "observability/opentelemetry/": "a collector of traces over gRPC",
    "pooling/classify/": "models that classify, and a LoRA adapter for one",
    "pooling/embed/embed_": "the model jina-embeddings-v3",
    "pooling/embed/embedding_requests_": "a module of vLLM that reads vectors of several types",
    "pooling/embed/openai_embedding_long_text/": "vectors of texts in parts",
    "pooling/embed/openai_embedding_matryoshka_fy_client.py": "a model whose vectors may be cut",
    "pooling/embed/vision_": "images",
    "pooling/plugin/": "plugins that read images",
    "pooling/reward/": "models that reward",
    "pooling/score/co": "Cohere's former client, and models with a vector for each token",
    "pooling/score/qwen3_reranker_": "the model Qwen3-Reranker",
    "pooling/score/using_template_": "templates of the model nemotron-rerank",
    "pooling/score/vision_": "images",
    "pooling/token_classify/": "models that classify tokens",
    "pooling/token_embed/": "models with a vector for each token",
    "ray_serving/": "Ray's libraries for data and serving, and large models from the hub",
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

POOLING = {
    "basic/offline_inference/embed.py",
    "basic/offline_inference/score.py",
    "pooling/embed/openai_embedding_client.py",
    "pooling/score/rerank_api_online.py",
    "pooling/score/score_api_online.py",
}
"""Examples for a model that pools, which tests/clients/test_vllm_pooling_examples.py runs."""


def source_of(example: str, url: str = "", model: str = MODEL) -> str:
    """The text of an example in which imports, the model and the server's address are Quire's, and nothing else."""
    text = _IMPORT.sub(r"\1quire", (FOLDER / example).read_text(encoding="utf-8"))
    for name in _MODELS:
        text = text.replace(f'"{name}"', f'"{model}"')
    return _ADDRESS.sub(url, text)


def require_examples() -> None:
    """Skip a test where the examples were not fetched; in CI that is a failure."""
    if FOLDER.is_dir():
        return
    reason = f"vLLM's examples are not in {FOLDER}: `make .venv/.clients` fetches them"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
