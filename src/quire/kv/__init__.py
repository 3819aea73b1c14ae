"""Accounting of KV cache blocks: who holds which, and what is in them. No tensors here (and no torch)."""
