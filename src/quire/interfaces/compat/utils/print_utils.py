"""vLLM's `vllm.utils.print_utils`."""

from collections.abc import Sequence


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first 16 numbers of a vector, and how many it has."""
    shown = ", ".join(map(str, embeds[:16]))
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 16 else ''}] (size={len(embeds)})")
