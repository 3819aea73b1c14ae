"""The public names, and how little it takes to import them."""

import subprocess
import sys

import pytest

import quire

PUBLIC = {
    "LLM", "AsyncLLM", "LLMEngine", "LoRARequest", "EngineArgs", "SamplingParams", "RequestOutput", "CompletionOutput",
    "AsyncEngineArgs", "RequestMetrics", "AsyncLLMEngine", "PromptType", "TextPrompt", "TokensPrompt",
    "EngineStats", "PinnedPrefix", "QuireError", "ConfigError", "CheckpointError", "UnsupportedModelError",
    "StructuredOutputsParams", "TokenizerError", "OutOfMemoryError", "RequestError", "InvalidParamsError",
    "InvalidPromptError", "EngineDeadError", "EngineBrokenError", "RequestFailedError",
    "ClassificationOutput", "ClassificationRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "PoolingOutput",
    "PoolingParams", "PoolingRequestOutput", "ScoringOutput", "ScoringRequestOutput",
    "PromptTooLongError", "KernelError", "BeamSearchParams", "BeamSearchOutput", "BeamSearchSequence", "__version__",
}  # fmt: skip


def test_all_is_exactly_what_is_promised() -> None:
    assert set(quire.__all__) == PUBLIC
    assert len(quire.__all__) == len(PUBLIC)
    assert set(quire.__all__) <= set(dir(quire))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(quire, name)
    other = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}
    assert name in ("__version__", "PromptType") or value.__name__ == other.get(name, name)


def test_every_error_of_the_tree_is_public() -> None:
    from quire.common import errors

    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == {name for name in PUBLIC if name.endswith("Error")}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = quire.LLMs


@pytest.mark.parametrize(
    "code",
    [
        "import quire",
        "from quire import QuireError, SamplingParams",
        "import quire.text.tokenizer.tokenizer",
        "from quire.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass",
        "from quire.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_what_needs_no_tensors_loads_no_torch(code: str) -> None:
    check = "\nimport sys\nassert not {'torch', 'numpy', 'transformers'} & sys.modules.keys(), sorted(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_generating_does_not_load_torchs_compiler() -> None:
    """It takes more than a second, which the first request would wait for."""
    code = (
        "import sys; from quire import LLM, SamplingParams\n"
        "llm = LLM(max_model_len=64, num_gpu_blocks_override=16)\n"
        "llm.generate('a', SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)\n"
        "assert not {'torch._dynamo', 'sympy'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
