"""The `quantization_config` of the method `fp8`, as DeepSeek's and AutoFP8's checkpoints have it."""

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.quantization.compressed import read_block


def float8_block(section: HFConfig) -> tuple[int, int]:
    """The rows and columns that share a scale, 0 for all. Raises UnsupportedModelError for other numbers than E4M3 and
    for a quantized KV cache, and CheckpointError for a malformed block."""
    number = section.text("fmt", "e4m3")
    if number != "e4m3" or section.get("kv_cache_scheme"):
        raise UnsupportedModelError(
            f"{section.source}: Quire reads numbers 'e4m3' without kv_cache_scheme, not {number[:80]!r} with "
            f"{str(section.get('kv_cache_scheme'))[:80]}"
        )
    return (0, 0) if section.get("weight_block_size") is None else read_block(section, "weight_block_size")
