"""What is made beside a dense checkpoint: the same in AWQ's or GPTQ's format, LoRA adapters for it, and Qwen3-0.6B's
shape with its tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

GROUP, RANK, NUM_ADAPTERS = 128, 16, 8
_SCALE = 0.005
_METHODS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
}


def ensure_packed(checkpoint: Path, folder: Path, method: str) -> Path:
    """Write a checkpoint of `awq` or `gptq` with random integers, unless it exists; all else is the given one's."""
    if not (folder / "config.json").exists():
        from safetensors.torch import load_file, save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Any] = {}
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            module = name.removesuffix(".weight")
            tensors |= (
                _packed(module, len(tensor), tensor.shape[1], method) if module.endswith("_proj") else {name: tensor}
            )
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for path in checkpoint.glob("*token*.json"):
            shutil.copy(path, folder)
        config = json.loads((checkpoint / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _METHODS[method]}))
    return folder


def _packed(module: str, n: int, k: int, method: str) -> dict[str, Any]:
    """The tensors of a matrix [n, k]."""
    import torch

    def integers(*shape: int) -> Any:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)

    found = {
        f"{module}.qweight": integers(k, n // 8) if method == "awq" else integers(k // 8, n),
        f"{module}.qzeros": integers(k // GROUP, n // 8),
        f"{module}.scales": torch.full((k // GROUP, n), _SCALE, dtype=torch.float16),
    }
    if method == "gptq":  # zero points in the middle, stored one lower
        found[f"{module}.qzeros"].fill_(0x77777777)
        found[f"{module}.g_idx"] = (torch.arange(k) // GROUP).int()
    return found


def ensure_adapters(checkpoint: Path, folder: Path) -> list[Path]:
    """Write adapters of rank 16 for all projections, unless they exist."""
    folders = [folder / f"adapter{i}" for i in range(NUM_ADAPTERS)]
    if not (folders[-1] / "adapter_config.json").exists():
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            names = [name for name in file.keys() if name.endswith("_proj.weight")]  # noqa: SIM118
            shapes = {name.removesuffix(".weight"): file.get_slice(name).get_shape() for name in names}
        for each in folders:
            each.mkdir(parents=True, exist_ok=True)
            tensors = {}
            for module, (n, k) in shapes.items():
                tensors[f"base_model.model.{module}.lora_A.weight"] = (torch.randn(RANK, k) * 0.01).bfloat16()
                tensors[f"base_model.model.{module}.lora_B.weight"] = (torch.randn(n, RANK) * 0.01).bfloat16()
            save_file(tensors, each / "adapter_model.safetensors", metadata={"format": "pt"})
            modules = sorted({module.rpartition(".")[2] for module in shapes})
            config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
            config |= {"base_model_name_or_path": checkpoint.name, "task_type": "CAUSAL_LM"}
            (each / "adapter_config.json").write_text(json.dumps(config))
    return folders


def ensure_qwen3(checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint of Qwen3-0.6B's shape with random weights, as transformers makes them, unless it exists; the
    tokenizer is the given one's."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes: dict[str, Any] = {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
        }
        torch.manual_seed(0)
        config = Qwen3Config(**sizes, num_attention_heads=16, tie_word_embeddings=True, dtype="bfloat16")
        partial = folder.with_name(f"{folder.name}.partial")
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(partial)
        for path in checkpoint.glob("*token*.json"):
            shutil.copy(path, partial)
        partial.rename(folder)
    return folder
