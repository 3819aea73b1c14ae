"""Tokenizers, incremental detokenization and stop strings. This package does not import torch."""
