"""ModelConfig: which checkpoint, where its files are, and what its config.json or GGUF header says."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.common.errors import CheckpointError, check_choice
from quire.common.log import logger
from quire.config.checkpoint.draft_heads import HeadConfig
from quire.config.checkpoint.formats import find_format
from quire.config.checkpoint.gguf.files import read_gguf
from quire.config.checkpoint.gguf.hf_values import generation_values, hf_values
from quire.config.checkpoint.library import implementation
from quire.config.checkpoint.location import CONFIG_FILE, EMBEDDED_CHECKPOINTS, Location
from quire.config.checkpoint.runners import AS_FILES_SAY, PoolerConfig, find_runner
from quire.config.checkpoint.sentence_transformers import read_sentence_config
from quire.config.hf_config import MAX_SIZE, HFConfig
from quire.config.parallel import Range
from quire.config.quantization import check_quantization, read_quantization

_HALF = ("float16", "half", "fp16")
_DTYPES = dict.fromkeys(("float32", "float", "fp32"), "float32")
_DTYPES |= dict.fromkeys(("bfloat16", "bf16", *_HALF), "bfloat16")
"""Maps the dtypes that may be given to those of the computation; the kernels do not support float16."""
_STORED_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "float64": "float32"}
_MAX_LAYERS = 4096
_MAX_HEADS = 65536
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint whose files were found and read, except for its weights. Made by `resolve`."""

    model: str
    """The name that was given."""
    path: Path
    """The checkpoint's folder, or a GGUF file."""
    tokenizer_path: Path
    """The tokenizer's folder, or a GGUF file."""
    hf_config: HFConfig
    """The contents of config.json, or what would be there for a GGUF file."""
    generation_config: Mapping[str, Any]
    """The contents of generation_config.json; empty if the checkpoint has no such file."""
    architecture: str
    dtype: str
    """The dtype of weights, activations and KV cache: `float32` or `bfloat16`."""
    quantization: str | None
    """The format of the matrices, such as `int4`; None for `dtype`."""
    quant_method: str | None
    """The tool that quantized the checkpoint's weights, as its `quantization_config` names it. None: they are not
    quantized, and `quantization` happens while they are loaded."""
    checkpoint_dtype: str
    """The dtype of the weights in the files: `float32`, `bfloat16` or `float16`."""
    vocab_size: int
    max_position_embeddings: int
    max_context_len: int
    """The largest max_model_len that may be given: max_position_embeddings, or more with rope scaling."""
    max_model_len: int
    """Largest length of prompt and output together, in tokens; until the engine replaces it, max_position_embeddings,
    or the length that a model that pools was made for."""
    eos_token_ids: frozenset[int]
    """Those of generation_config.json, or else of config.json, without ids outside the vocabulary; may be empty."""
    model_impl: str = "quire"
    """Whose modules run the architecture: `quire` or `transformers`."""
    head_quantization: str | None = None
    """`int8`: the head becomes that where the checkpoint has plain numbers; it does too with a `quantization`."""
    weights_from_file: str = "auto"
    """One of WEIGHTS_FROM_FILE; the memory plan replaces `auto` with `always` if the weights do not fit."""
    runner: str = "generate"
    """What the model does: `generate`, or `pooling` for embeddings, scores and classes."""
    convert: str = "none"
    """What a generating architecture is converted to for pooling: `embed`, `classify`, `reward`, or `none`."""
    pooler_config: PoolerConfig = AS_FILES_SAY
    """How a model that pools makes vectors, where the caller chose it."""
    layers: Range | None = None
    """The layers that a stage of a pipeline has. The first stage also has what is before the layers, and the last one
    what is behind them. None: all."""
    head: HeadConfig | None = None
    """If this is a draft head, and no model, what its checkpoint has of it; `architecture` is that of its layers."""

    @property
    def drafter(self) -> str:
        """What messages call it if it drafts."""
        of_head = "" if self.head is None else f"the {self.head.format.method} head of "
        return f"{of_head or 'the draft model '}{self.model}"

    @classmethod
    def resolve(
        cls,
        model: str | Path | None,
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        gguf_file: str | None = None,
        download_dir: str | Path | None = None,
        hf_overrides: Mapping[str, Any] = MappingProxyType({}),
        override_generation_config: Mapping[str, Any] = MappingProxyType({}),
        model_impl: str = "auto",
        head_quantization: str | None = None,
        weights_from_file: str = "auto",
        runner: str = "auto",
        convert: str = "auto",
        pooler_config: Mapping[str, Any] = MappingProxyType({}),
    ) -> "ModelConfig":
        """Find the checkpoint and read its config. The arguments are those of EngineArgs that have these names.

        Only hub ids use the network, for JSON, tokenizer and safetensors files or one GGUF file, never for pickles; of
        `tokenizer` only its own files are read. Raises ConfigError for a wrong argument, UnsupportedModelError for a
        checkpoint that Quire does not run, and CheckpointError for one that is missing or malformed.
        """
        check_choice("dtype", dtype, ("auto", *_DTYPES))
        check_quantization(quantization, head_quantization, weights_from_file)
        name = EMBEDDED_CHECKPOINTS[0] if model is None else str(model)
        location = Location(name, gguf_file, revision, download_dir)
        path, architecture, model_impl, hf, stated = _complete(location, hf_overrides, model_impl)
        generation, pooler = stated.replaced(override_generation_config), PoolerConfig.read(pooler_config)
        runner, convert = find_runner(architecture, path, runner, convert, pooler)
        tokenizer_path = path if tokenizer is None else Location(str(tokenizer), None, None, download_dir).tokenizer()
        checkpoint_dtype = _checkpoint_dtype(hf, path)
        vocab_size, positions = hf.size("vocab_size"), hf.size("max_position_embeddings")
        quant_method, quantization = read_quantization(hf, quantization, name, weights_from_file)
        return cls(
            model=name,
            path=path,
            tokenizer_path=tokenizer_path,
            hf_config=hf,
            generation_config=generation,
            architecture=architecture,
            dtype=_compute_dtype(dtype, checkpoint_dtype, name),
            quantization=quantization,
            quant_method=quant_method,
            checkpoint_dtype=checkpoint_dtype,
            vocab_size=vocab_size,
            max_position_embeddings=positions,
            max_context_len=_max_context_len(hf, positions) if model_impl == "quire" else positions,
            max_model_len=_trained_length(path, tokenizer_path, positions) if runner == "pooling" else positions,
            eos_token_ids=_eos_token_ids(generation, hf, vocab_size),
            model_impl=model_impl,
            head_quantization=head_quantization,
            weights_from_file=weights_from_file,
            runner=runner,
            convert=convert,
            pooler_config=pooler,
        )


def rope_config(hf: HFConfig, layer_type: str = "full_attention") -> HFConfig:
    """The rotary embedding's parameters, from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`.

    Always holds `rope_type` and `rope_theta`, and `original_max_position_embeddings`, the length trained on.
    `layer_type` counts where the config has parameters for each type of layer.
    """
    section = hf.section("rope_parameters") or hf.section("rope_scaling") or HFConfig({}, f"{hf.source}: rope")
    if any(isinstance(value, dict) for value in section.values()):
        of_layers = section.section(layer_type)
        if of_layers is None:
            raise CheckpointError(f"{section.source} has no {layer_type!r}: this checkpoint is incomplete")
        section = of_layers
    rope_type = section.text("rope_type", section.text("type", "default"))
    original = section.size("original_max_position_embeddings", hf.size("max_position_embeddings"))
    return HFConfig(
        {
            **section,
            "rope_type": "longrope" if rope_type == "su" else rope_type,
            "rope_theta": section.number("rope_theta", hf.number("rope_theta", 10000.0)),
            "partial_rotary_factor": section.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0)),
            "original_max_position_embeddings": hf.size("original_max_position_embeddings", original),
        },
        section.source,
    )


def _complete(
    location: Location, overrides: Mapping[str, Any], model_impl: str
) -> tuple[Path, str, str, HFConfig, HFConfig]:
    """Find a checkpoint's files, and download those that are missing. Returns where they are, the architecture, whose
    modules run it, and what config.json and generation_config.json say, or the header of a GGUF file."""
    path = location.find()
    gguf = None if path.is_dir() else read_gguf(path)
    stated = HFConfig.read(path / CONFIG_FILE) if gguf is None else hf_values(gguf)
    # Before gigabytes of weights that could not be used are downloaded.
    architecture, model_impl, hf = implementation(stated.replaced(overrides), model_impl)
    _check_layers(hf)
    if hf.get("auto_map"):
        logger.warning("%s asks for its own code (auto_map): never run, the model of %s is", hf.source, model_impl)
    path = location.complete(path)
    generation = HFConfig.read(path / GENERATION_FILE, required=False) if gguf is None else generation_values(gguf)
    return path, architecture, model_impl, hf, generation


def _eos_token_ids(generation: HFConfig, hf: HFConfig, vocab_size: int) -> frozenset[int]:
    """Without those that the model can never draw: checkpoints have them that were resized or merged carelessly."""
    stated = generation if generation.get("eos_token_id") is not None else hf
    token_ids = stated.token_ids("eos_token_id") or frozenset()
    known = frozenset(token_id for token_id in token_ids if token_id < vocab_size)
    if wrong := sorted(token_ids - known):
        logger.warning(
            "%s: ignored as they are outside the vocabulary of %d tokens: %s of 'eos_token_id'",
            stated.source,
            vocab_size,
            ", ".join(map(str, wrong[:10])),
        )
    return known


def _check_layers(hf: HFConfig) -> None:
    """Check the sizes that every decoder has, before anything is built from them."""
    hf.size("hidden_size")
    for key, limit in (("num_hidden_layers", _MAX_LAYERS), ("num_attention_heads", _MAX_HEADS)):
        if (number := hf.size(key)) > limit:
            raise CheckpointError(f"{hf.source}: {key!r} is {number}, more than {limit}")


def _trained_length(path: Path, tokenizer_path: Path, max_positions: int) -> int:
    """The tokens of the longest texts that a model was made for that pools, which may be fewer than its positions. As
    in sentence-transformers, the tokenizer's limit counts where the model has none."""
    if (limit := read_sentence_config(path).max_seq_length) is None:
        stated = HFConfig.read(tokenizer_path / "tokenizer_config.json", required=False).get("model_max_length")
        limit = stated if type(stated) is int and stated > 0 else max_positions
    return min(max_positions, limit)


def _max_context_len(hf: HFConfig, max_positions: int) -> int:
    """Dynamic and yarn scaling reach `factor` times the length trained on, even if the config states less."""
    rope = rope_config(hf)
    lengths = {"dynamic": max_positions, "yarn": rope.size("original_max_position_embeddings")}
    original = lengths.get(rope.text("rope_type"))
    if original is None:
        return max_positions
    factor = rope.number("factor", 1.0)
    if factor * original > MAX_SIZE:
        raise CheckpointError(f"{rope.source}: {original} positions times a factor of {factor:g} are too many")
    return max(max_positions, int(factor * original))


def _checkpoint_dtype(hf: HFConfig, path: Path) -> str:
    """Return the dtype that config.json states, under either of its names; otherwise that of the first weight."""
    stated = hf.text("dtype", hf.text("torch_dtype", "")).removeprefix("torch.")
    if not stated:
        format = find_format(path)
        tensors = format.open(path).tensors.values() if format else ()
        stated = next((_STORED_DTYPES[t.dtype] for t in tensors if t.dtype in _STORED_DTYPES), "float32")
    if stated not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(f"{hf.source}: 'dtype' is {stated[:80]!r}, but must be float32, bfloat16 or float16")
    return stated


def _compute_dtype(asked: str, checkpoint_dtype: str, name: str) -> str:
    if asked in _HALF:
        logger.info("dtype=%s: computing in bfloat16, the kernels have no float16", asked)
    elif asked == "auto" and checkpoint_dtype == "float16":
        logger.info("%s holds float16 weights: computing in bfloat16 (dtype='float32' keeps every bit)", name)
    return _DTYPES[checkpoint_dtype if asked == "auto" else asked]
