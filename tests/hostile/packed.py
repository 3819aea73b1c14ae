"""Checkpoints of other tools whose tensors do not fit each other: the embedded model, packed as each tool packs it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Pack = Callable[[int, int], Tensors]
GROUP = 32


def rewrite(folder: Path, pack: Pack, section: Mapping[str, Any], spoil: Callable[[Tensors], object]) -> None:
    """Replace each projection [n, k] by what `pack` makes of it; `spoil` changes those of the first one."""
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(path)
    for name in sorted(name for name in tensors if "_proj.weight" in name):
        n, k = tensors.pop(name).shape
        made = pack(n, k)
        if "layers.0.self_attn.q_proj" in name:
            spoil(made)
        tensors |= {name.replace("weight", own): tensor.contiguous() for own, tensor in made.items()}
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    values = json.loads(config.read_text()) | {"quantization_config": dict(section)}
    config.unlink()
    config.write_text(json.dumps(values))


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def gptq(n: int, k: int) -> Tensors:
    num_groups = k // GROUP
    tensors = {"qweight": integers(k // 8, n), "qzeros": integers(num_groups, n // 8)}
    return tensors | {"scales": torch.zeros(num_groups, n).half(), "g_idx": torch.arange(k).int() // GROUP}


def awq(n: int, k: int) -> Tensors:
    num_groups = k // GROUP
    tensors = {"qweight": integers(k, n // 8), "qzeros": integers(num_groups, n // 8)}
    return tensors | {"scales": torch.zeros(num_groups, n).half()}


def compressed(n: int, k: int) -> Tensors:
    tensors = {"weight_packed": integers(n, k // 8), "weight_scale": torch.zeros(n, k // GROUP).bfloat16()}
    return tensors | {"weight_shape": torch.tensor([n, k]), "weight_g_idx": torch.arange(k).int() // GROUP}


def blocks_of_float8(n: int, k: int) -> Tensors:
    return {
        "weight": torch.zeros(n, k).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.ones(-(-n // 128), -(-k // 128)),
    }


def mxfp4(n: int, k: int) -> Tensors:
    return {
        "weight_blocks": torch.zeros(n, k // 32, 16, dtype=torch.uint8),
        "weight_scales": torch.full((n, k // 32), 127, dtype=torch.uint8),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "actorder": "group"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}, "ignore": ["lm_head"],
}  # fmt: skip
FLOAT8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4"}


def case(
    pack: Pack, section: Mapping[str, Any], name: str, change: Callable[[Tensor], Tensor]
) -> Callable[[Path], None]:
    """The tensor of this name is changed."""

    def spoil(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return lambda folder: rewrite(folder, pack, section, spoil)


def filled(value: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def infinite(tensor: Tensor) -> Tensor:
    return torch.where(torch.arange(tensor.shape[1]) == 3, torch.inf, tensor)


def without_the_last(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def grouped(size: int) -> dict[str, Any]:
    """compressed-tensors with groups of another size."""
    return COMPRESSED | {"config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS | {"group_size": size}}}}


PACKED: dict[str, tuple[Callable[[Path], None], str]] = {
    "GPTQ: scales of another shape": (case(gptq, GPTQ, "scales", without_the_last), "wrong shape.*scales"),
    "GPTQ: scales of no numbers": (case(gptq, GPTQ, "scales", lambda old: old / 0), "scales are not finite"),
    "GPTQ: groups of another size": (
        case(gptq, GPTQ | {"group_size": 96}, "scales", Tensor.clone), "wrong shape.*scales"
    ),
    "AWQ: an infinite scale": (case(awq, AWQ, "scales", infinite), "scales are not finite"),
    "GPTQ: g_idx beyond the last group": (case(gptq, GPTQ, "g_idx", filled(2**31 - 1)), "g_idx must name each group"),
    "GPTQ: g_idx below the first": (case(gptq, GPTQ, "g_idx", filled(-(2**31))), "g_idx must name each group"),
    "GPTQ: one group for all": (case(gptq, GPTQ, "g_idx", filled(0)), "g_idx must name each group"),
    "GPTQ: words of another length": (case(gptq, GPTQ, "qweight", without_the_last), "wrong shape.*qweight"),
    "GPTQ: zero points of bytes": (case(gptq, GPTQ, "qzeros", Tensor.byte), "wrong dtype.*qzeros"),
    "AWQ: zero points of another shape": (case(awq, AWQ, "qzeros", without_the_last), "wrong shape.*qzeros"),
    "AWQ: GPTQ's words": (case(awq, AWQ, "qweight", lambda old: old.T.contiguous()), "wrong shape.*qweight"),
    "compressed-tensors: scales of another shape": (
        case(compressed, COMPRESSED, "weight_scale", lambda old: old[:, :-1]), "wrong shape.*weight_scale"
    ),
    "compressed-tensors: groups that do not divide": (
        case(compressed, grouped(2**19 + 32), "weight_scale", Tensor.clone), "does not divide"
    ),
    "compressed-tensors: a shape of trillions": (
        case(compressed, COMPRESSED, "weight_shape", filled(2**62)), "weight_shape is"
    ),
    "compressed-tensors: g_idx beyond the last group": (
        case(compressed, COMPRESSED, "weight_g_idx", filled(10**9)), "g_idx must name each group"
    ),
    "FP8: scales of another shape": (
        case(blocks_of_float8, FLOAT8, "weight_scale_inv", lambda old: old[:, :-1]), "wrong shape.*weight_scale_inv"
    ),
    "FP8: an infinite scale": (
        case(blocks_of_float8, FLOAT8, "weight_scale_inv", lambda old: old / 0), "not finite"
    ),
    "MXFP4: exponents of NaN": (case(mxfp4, MXFP4, "weight_scales", filled(255)), "exponents 255"),
    "MXFP4: scales of another shape": (
        case(mxfp4, MXFP4, "weight_scales", lambda old: old[:, :-1]), "wrong shape.*weight_scales"
    ),
}  # fmt: skip
