"""Qwen2 and Qwen3; their mixtures of experts are among the other mixtures."""
