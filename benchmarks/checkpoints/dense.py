"""A checkpoint with random bfloat16 weights in Qwen2-0.5B's shape; the measurements do not depend on the weights."""

import json
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 151936, 896, 4864, 24, 14, 2
_HEAD_DIM = HIDDEN // HEADS
_TOKENS = 8000
_EOS = "<|endoftext|>"
_STD = 0.02


_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


def ensure_checkpoint(folder: Path) -> Path:
    """Write the checkpoint unless it exists."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(random_weights(), folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer = train_tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _EOS, "pad_token": _EOS}
        _write(folder / "tokenizer_config.json", settings | {"model_max_length": 32768})
        eos = {"eos_token_id": tokenizer.token_to_id(_EOS)}
        _write(folder / "generation_config.json", eos)
        _write(folder / "config.json", _CONFIG | eos)  # last, because it marks the checkpoint as complete
    return folder


def random_weights() -> dict[str, torch.Tensor]:
    """Return random weights under transformers' names; the output head is tied to the token embeddings."""
    generator = torch.Generator().manual_seed(0)
    q, kv = HEADS * _HEAD_DIM, KV_HEADS * _HEAD_DIM
    matrices = {
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * _STD).bfloat16()

    weights = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in matrices.items():
            weights[f"{prefix}{name}.weight"] = draw(*shape)
            if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                weights[f"{prefix}{name}.bias"] = draw(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN).bfloat16()
    return weights


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on the standard library; prompts are token ids, so engines only have to load it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_TOKENS, special_tokens=[_EOS], initial_alphabet=alphabet, show_progress=False
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer.train_from_iterator((path.read_text(errors="ignore") for path in sources), trainer)
    return tokenizer


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
